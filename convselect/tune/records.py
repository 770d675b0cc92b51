"""Files of measured programs.

A *log* has one line of JSON per program and lies beside the store: the next search continues from it, even if the last
one was killed. *Recorded times* are a CSV file (`.gz`: compressed) of many programs per problem, measured once, with
the environment in `<path>.env.json`: a search can be replayed against them on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from convselect.base.problem import ConvProblem
from convselect.tune.programs import Program

LOG_LINES = 200_000
"""Maximum length of a log; a longer one is cut to the newest half of this when it is read."""


class Measured(NamedTuple):
    """The measurement of one program.

    Attributes:
        status: "ok", "wrong" (its result is wrong, so it was not timed) or "failed" (it raised).
        time_us: None unless the status is "ok".
    """

    program: Program
    status: str
    time_us: float | None = None


class _Line(msgspec.Struct):
    """What a line of a log holds."""

    environment: str
    problem: Annotated[str, Meta(max_length=20_000)]
    program: Annotated[str, Meta(max_length=20_000)]
    revision: int
    status: Literal["ok", "wrong", "failed"]
    time_us: Annotated[float, Meta(gt=0, le=1e12)] | None


_line = msgspec.json.Decoder(_Line).decode


class Log:
    """A file of measured programs of one or several environments. It is created when the first line is written.

    Args:
        environment: the fingerprint under which lines are written and read.
        revisions: algorithm -> its current revision; lines about other revisions are not read.
    """

    def __init__(self, path: Path, environment: str, revisions: Mapping[str, int]) -> None:
        self.path, self._environment, self._revisions = path, environment, revisions

    def add(self, problem: ConvProblem, measured: Iterable[Measured]) -> None:
        """Append to the file, in one write.

        Raises:
            OSError: if the file cannot be written.
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
        """Measurements in this environment of the algorithms' current revisions; the later one of repeated ones."""
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
                one = _line(line)
                program = Program.parse(one.program)
                if one.environment != self._environment:
                    continue
                if one.revision != self._revisions.get(program.algorithm):
                    continue
                problem = ConvProblem.parse(one.problem)
                found.setdefault(problem, {})[program] = Measured(program, one.status, one.time_us)
            except (ValueError, RecursionError):
                continue  # a line that was cut off, or is none
        return found
