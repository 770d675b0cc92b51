"""Measured rows, appended to a CSV file as a run goes on."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from convselect.measure.rows import _HEADER_LINE, Row, _lines


def append_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Append rows to a file in one write, so that a problem is complete in it or missing; create the file if necessary.

    An unfinished line of an interrupted write is removed first.
    """
    text = _lines(rows)
    with Path(path).open("a+b") as file:
        whole = _whole_bytes(file)
        file.truncate(whole)
        file.write((("" if whole else _HEADER_LINE) + text).encode())


def _whole_bytes(file: BinaryIO) -> int:
    """Size of a file up to its last newline; read from its end only as far as necessary."""
    end = file.seek(0, io.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
