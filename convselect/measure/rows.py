"""Measured times as rows, and as lines of a CSV file: `measure` makes them, the store and training read them."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from convselect.base.problem import IMAGE_FIELDS, ConvProblem, Direction
from convselect.base.problem import KERNEL_CLASSES as KERNEL_CLASSES  # rows are sampled and reported by it
from convselect.base.problem import kernel_class as kernel_class

NATIVE = "native"
STATUSES = ("ok", "wrong", "failed", "censored")


class Row(NamedTuple):
    """One algorithm on one problem.

    Attributes:
        model: the network that the problem is from, or another name for its origin.
        status: "ok"; "censored": dropped after the first rounds as hopeless, with the time of those; "wrong": its
            result was wrong, so it was not timed; "failed": it raised.
        clock: kind of times: "thread", CPU time of the calling thread (with one thread); "wall"; or "event", a GPU's
            own.
        min_us, median_us, p20_us, p80_us: in microseconds; NaN if there are none.
        wall_us: median wall time of the same calls (with events: of the GPU).
        rounds: number of timed calls.
        repeat: 1 for a second, independent measurement, which shows how reliable the first is; else 0.
    """

    model: str
    problem: ConvProblem
    algorithm: str
    revision: int
    status: str
    clock: str = "thread"
    min_us: float = float("nan")
    median_us: float = float("nan")
    p20_us: float = float("nan")
    p80_us: float = float("nan")
    wall_us: float = float("nan")
    rounds: int = 0
    repeat: int = 0


TIMES = ("min_us", "median_us", "p20_us", "p80_us", "wall_us")
_DEPTH = ConvProblem._fields[IMAGE_FIELDS:]
HEADER = ("model", "kernel_class", *ConvProblem._fields[:IMAGE_FIELDS], *Row._fields[2:])
"""Columns of a file. One with volumes has `_DEPTH` behind them; files of images alone are as they always were."""
_HEADERS = (HEADER, HEADER[:-1], (*HEADER, *_DEPTH))  # files from before problems were measured twice lack `repeat`


SPECIAL_KINDS = ("dilated", "patches", "thin", "one row", "strided", "1x1 strided", "plain")


def special_kind(problem: ConvProblem) -> str:
    """The one of `SPECIAL_KINDS` under which a problem is reported: the first that it is. Thin: at most eight channels
    in or out. One row: 1xN and Nx1. Depthwise convolutions are plain, if they are not dilated."""
    p = problem
    if (p.dil_h > 1 and p.R > 1) or (p.dil_w > 1 and p.S > 1):
        return "dilated"
    if p.is_depthwise:
        return "plain"
    if p.is_patch and min(p.R, p.S) > 1:
        return "patches"
    if min(p.C, p.K) <= 8 and p.groups == 1:
        return "thin"
    if (p.R == 1) != (p.S == 1):
        return "one row"
    if p.stride != (1, 1):
        return "1x1 strided" if p.R == p.S == 1 else "strided"
    return "plain"


# ---- files ------------------------------------------------------------------------------------------------------


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write rows to a new file (`.gz`: compressed; the same rows give the same bytes)."""
    rows = list(rows)
    depth = _DEPTH if any(row.problem.is_volume for row in rows) else ()
    data = (",".join((*HEADER, *depth)) + "\n" + _lines(rows, len(depth))).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


_HEADER_LINE = ",".join(HEADER) + "\n"


def _lines(rows: Iterable[Row], depth: int = 0) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        times = [f"{getattr(row, name):.3f}" for name in TIMES]
        head = [row.algorithm, row.revision, row.status, row.clock]
        if row.problem.is_volume and not depth:
            raise ValueError(f"a file of images has no columns for {row.problem}")
        problem, more = row.problem[:IMAGE_FIELDS], row.problem[IMAGE_FIELDS:][:depth]
        writer.writerow([row.model, kernel_class(row.problem), *problem, *head, *times, row.rounds, row.repeat, *more])
    return text.getvalue()


def read_text(path: str | Path) -> str:
    """The text of a file (`.gz`: compressed).

    Raises:
        ValueError: if it is not UTF-8, or not compressed although its name says so, with the name; OSError.
    """
    data = Path(path).read_bytes()
    try:
        return (gzip.decompress(data) if Path(path).suffix == ".gz" else data).decode()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole file that gzip has written: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from error


def read_rows(path: str | Path) -> list[Row]:
    """All complete rows of a file (`.gz`: compressed), in order. An unfinished last line is left out.

    Raises:
        ValueError: if it cannot be unpacked, the header differs, or a row has an unknown status, a field that is not a
            number, or sizes that no convolution has.
    """
    text = read_text(path)
    try:
        return _rows(path, text[: text.rfind("\n") + 1].splitlines())
    except csv.Error as error:
        raise ValueError(f"{path} is damaged, or not a file of measured times: {error}") from error


def _rows(path: str | Path, lines: Sequence[str]) -> list[Row]:
    reader = csv.reader(lines)
    header = tuple(next(reader, ()))
    if header not in _HEADERS:
        raise ValueError(f"{path} is not a file of measured times of this version: its header differs")
    n = 2 + IMAGE_FIELDS
    rows = []
    for cells in reader:
        if len(cells) != len(header):
            raise ValueError(f"{path}, line {reader.line_num}: {len(cells)} fields instead of {len(header)}")
        depth = cells[len(HEADER) :]
        missing = ["0"] * (len(HEADER) - len(header))
        algorithm, revision, status, clock, *numbers, rounds, repeat = cells[n : len(HEADER)] + missing
        if status not in STATUSES:
            raise ValueError(f"{path}, line {reader.line_num}: unknown status {status!r}")
        times = dict(zip(TIMES, map(float, numbers), strict=True))
        problem = _problem([*cells[2:n], *depth])
        if (why := problem.why_impossible()) is not None:
            raise ValueError(f"{path}, line {reader.line_num}: {why}")
        rows.append(
            Row(cells[0], problem, algorithm, int(revision), status, clock, **times,
                rounds=int(rounds), repeat=int(repeat))
        )  # fmt: skip
    return rows


def _problem(cells: Sequence[str]) -> ConvProblem:
    values: list[object] = [Direction(cells[0])]
    for name, cell in zip(ConvProblem._fields[1:], cells[1:], strict=False):
        default = ConvProblem._field_defaults.get(name, 0)
        if isinstance(default, bool):
            values.append(cell == "True")
        else:
            values.append(cell if isinstance(default, str) else int(cell))
    return ConvProblem(*values)  # type: ignore[arg-type]


def environment_path(path: str | Path) -> Path:
    """The file beside a CSV file of times that describes the environment of the measurement."""
    return Path(f"{path}.env.json")


MACHINE = ("family", "host_flags", "device", "torch")
"""Fields of an environment that must be equal for times to be mixed."""
