"""Files of measured programs.

A *log* has one line of JSON per program and stands beside the store: what a search found is there for the next one,
even after a search that was killed. *Recorded times* are a CSV file (`.gz`: compressed) of many programs per problem,
measured once, with the environment in `<path>.env.json`: a search can be replayed against them on any machine.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from convselect.kernels._space import TILE
from convselect.problem import ConvProblem
from convselect.tune.programs import Program, RecordedPrograms

LOG_LINES = 200_000
"""Most lines of a log; when it has grown longer, the older half goes."""


class Measured(NamedTuple):
    """One program, measured.

    Attributes:
        status: "ok", "wrong" (never timed), "failed" (it raised).
        time_us: None unless it was ok.
    """

    program: Program
    status: str
    time_us: float | None = None


class Log:
    """A file of measured programs of one or several environments. It is made with the first line.

    Args:
        environment: the fingerprint under which lines are written and read.
        revisions: algorithm -> its revision today; lines about others are not read.
    """

    def __init__(self, path: Path, environment: str, revisions: Mapping[str, int]) -> None:
        self.path, self._environment, self._revisions = path, environment, revisions

    def add(self, problem: ConvProblem, measured: Iterable[Measured]) -> None:
        """Append, in one write.

        Raises:
            OSError: where that is not possible.
        """
        text = "".join(
            json.dumps(
                {
                    "environment": self._environment, "problem": str(problem), "program": str(one.program),
                    "revision": self._revisions.get(one.program.algorithm, 1), "status": one.status,
                    "time_us": None if one.time_us is None else round(one.time_us, 3),
                }
            )
            + "\n"
            for one in measured
        )  # fmt: skip
        if not text:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() and not self._ends_whole(file):
                text = "\n" + text  # an earlier write was cut off
            file.write(text.encode())

    @staticmethod
    def _ends_whole(file: Any) -> bool:
        file.seek(-1, os.SEEK_END)
        whole: bool = file.read(1) == b"\n"
        return whole

    def read(self) -> dict[ConvProblem, dict[Program, Measured]]:
        """What was measured here of algorithms as they are today; of a program measured twice the later time."""
        found: dict[ConvProblem, dict[Program, Measured]] = {}
        if not self.path.exists():
            return found
        lines = self.path.read_text(errors="replace").splitlines()
        if len(lines) > LOG_LINES:
            lines = lines[-LOG_LINES // 2 :]
            shorter = self.path.with_name(self.path.name + ".new")
            shorter.write_text("\n".join(lines) + "\n")
            shorter.replace(self.path)
        for line in lines:
            try:
                one = json.loads(line)
                program = Program.parse(one["program"])
                if one["environment"] != self._environment:
                    continue
                if one["revision"] != self._revisions.get(program.algorithm):
                    continue
                time_us = None if one["time_us"] is None else float(one["time_us"])
                problem = ConvProblem.parse(one["problem"])
                found.setdefault(problem, {})[program] = Measured(program, one["status"], time_us)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # a line that was cut off
        return found


# ---- recorded times ---------------------------------------------------------------------------------------------

HEADER = ("network", "calls", "problem", "role", "program", "status", "time_us")
NOMINAL = "chosen"
"""Role of the program that runs without tuning; "default" is an algorithm's, "" any other's."""


@dataclass
class Recorded:
    """One problem's recorded programs; those that are defaults come first.

    Attributes:
        calls: network -> how often it computes this problem.
        chosen: what runs without tuning.
        kinds: (algorithm, parameter) -> its kind.
    """

    problem: ConvProblem
    calls: dict[str, int] = field(default_factory=dict)
    measured: dict[Program, Measured] = field(default_factory=dict)
    chosen: Program | None = None
    kinds: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def times_us(self) -> dict[Program, float]:
        return {program: one.time_us for program, one in self.measured.items() if one.time_us is not None}

    def programs(self) -> RecordedPrograms:
        return RecordedPrograms(self.problem, self.measured, self.kinds)


def write_recorded(path: Path, recorded: Iterable[Recorded], about: Mapping[str, Any]) -> None:
    """Write recorded times, with `about` (environment, revisions, ..) beside them."""
    recorded = list(recorded)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADER)
    for one in recorded:
        defaults: dict[str, Program] = {}
        for program in one.measured:
            defaults.setdefault(program.algorithm, program)
        names, calls = " ".join(one.calls), " ".join(map(str, one.calls.values()))
        for program, m in one.measured.items():
            role = NOMINAL if program == one.chosen else "default" if defaults[program.algorithm] == program else ""
            time = "" if m.time_us is None else f"{m.time_us:.2f}"
            writer.writerow((names, calls, one.problem, role, program, m.status, time))
    data = buffer.getvalue().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    kinds = {f"{a} {p}": kind for one in recorded for (a, p), kind in one.kinds.items() if kind != TILE}
    beside(path).write_text(json.dumps({**about, "kinds": kinds}, indent=1) + "\n")


def read_recorded(path: Path) -> list[Recorded]:
    """What `write_recorded` wrote.

    Raises:
        ValueError: where it is something else.
        OSError: where it cannot be read.
    """
    data = path.read_bytes()
    rows = csv.DictReader(io.StringIO((gzip.decompress(data) if path.suffix == ".gz" else data).decode()))
    if tuple(rows.fieldnames or ()) != HEADER:
        raise ValueError(f"{path} holds no recorded programs")
    kinds: dict[tuple[str, str], str] = {}
    if beside(path).exists():
        told = json.loads(beside(path).read_text()).get("kinds", {})
        kinds = {(key.split()[0], key.split()[1]): kind for key, kind in told.items()}
    found: dict[str, Recorded] = {}
    for row in rows:
        one = found.get(row["problem"])
        if one is None:
            calls = dict(zip(row["network"].split(), map(int, row["calls"].split()), strict=True))
            one = found[row["problem"]] = Recorded(ConvProblem.parse(row["problem"]), calls, kinds=kinds)
        program = Program.parse(row["program"])
        one.measured[program] = Measured(program, row["status"], float(row["time_us"]) if row["time_us"] else None)
        if row["role"] == NOMINAL:
            one.chosen = program
    return list(found.values())


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".env.json")
