"""Files of measured programs.

A *log* has one line of JSON per program and stands beside the store: what a search found is there for the next one,
even after a search that was killed. *Recorded times* are a CSV file (`.gz`: compressed) of many programs per problem,
measured once, with the environment in `<path>.env.json`: a search can be replayed against them on any machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from convselect.base.problem import ConvProblem
from convselect.tune.programs import Program

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
