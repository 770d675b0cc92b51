"""Recorded times of programs, and searches replayed against them.

Recorded times are a CSV file (`.gz`: compressed) of many programs per problem, measured once, with the environment in
`<path>.env.json`. A replay needs nothing else, so that strategies are compared, and tested, on any machine.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convselect.base.problem import ConvProblem
from convselect.choice.choose import NATIVE
from convselect.kernels._space import TILE, Parameter, Space
from convselect.tune.programs import Program, Programs
from convselect.tune.records import Measured
from convselect.tune.runner import Verdict


class RecordedPrograms(Programs):
    """The recorded programs of one problem; a space consists of the values that occur in them.

    Args:
        programs: the first one of an algorithm is its default.
        kinds: (algorithm, parameter) -> kind of parameter, if it is not a tile size.
    """

    def __init__(
        self, problem: ConvProblem, programs: Iterable[Program], kinds: Mapping[tuple[str, str], str] | None = None
    ) -> None:
        self.recorded: dict[str, list[Program]] = {}
        for program in programs:
            self.recorded.setdefault(program.algorithm, []).append(program)
        spaces = {name: _space_of(of, kinds or {}) for name, of in self.recorded.items()}
        super().__init__(problem, spaces)
        self._known = {program for of in self.recorded.values() for program in of}
        self._places = {
            name: np.array([_place(space, p) for p in self.recorded[name]])
            for name, space in spaces.items()
            if space is not None
        }

    def sample(self, source: random.Random) -> Program | None:
        return source.choice(self.recorded[source.choice(self.tunable)]) if self.tunable else None

    def is_valid(self, program: Program) -> bool:
        return program in self._known

    def settle(self, program: Program) -> Program | None:
        """The recorded program nearest to this one."""
        space = self.spaces.get(program.algorithm)
        if program in self._known or space is None:
            return program if program in self._known else None
        distance = np.abs(self._places[program.algorithm] - np.array(_place(space, program))).sum(1)
        return self.recorded[program.algorithm][int(distance.argmin())]


def _space_of(programs: Sequence[Program], kinds: Mapping[tuple[str, str], str]) -> Space | None:
    first = programs[0]
    if len(programs) == 1 and not first.params:
        return None
    parameters = []
    for name, _ in first.params:
        values = tuple(sorted({program.values[name] for program in programs}))
        kind = kinds.get((first.algorithm, name))
        parameters.append(Parameter(name, values) if kind is None else Parameter(name, values, kind))
    default: Callable[[ConvProblem], Mapping[str, int]] = lambda problem: first.values  # noqa: E731
    return Space(tuple(parameters), default)


def _place(space: Space, program: Program) -> list[int]:
    """The index of each parameter's value among its possible values."""
    values = program.values
    return [p.values.index(values[p.name]) if values[p.name] in p.values else -1 for p in space.parameters]


# ---- files ------------------------------------------------------------------------------------------------------

HEADER = ("network", "calls", "problem", "role", "program", "status", "time_us")
NOMINAL = "chosen"
"""Role of the program that runs without tuning. An algorithm's default has the role "default", any other program ""."""


@dataclass
class Recorded:
    """One problem's recorded programs; defaults come first.

    Attributes:
        calls: network -> how often it computes this problem.
        chosen: the program that runs without tuning.
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
    """Read a file of `write_recorded`.

    Raises:
        ValueError: if it is something else.
        OSError: if it cannot be read.
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
    """The file with the environment of a file of recorded times."""
    return path.with_name(path.name + ".env.json")


# ---- replays ----------------------------------------------------------------------------------------------------


def replayed(recorded: Sequence[Recorded]) -> list[tuple[Programs, Mapping[str, int], Program]]:
    """`tuning.problems_of` for recorded times."""
    return [(one.programs(), one.calls, one.chosen or Program(NATIVE)) for one in recorded]


class Replay:
    """A runner that looks times up among recorded ones."""

    def __init__(self, recorded: Sequence[Recorded]) -> None:
        self._of = {one.problem: one.measured for one in recorded}

    def run(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> list[Measured]:
        """Raises KeyError for programs that were not recorded."""
        return [self._of[problem][program] for program in programs]

    def confirm(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> Verdict:
        """The fastest by the recorded times."""
        times = {p: m.time_us for p, m in self._of[problem].items() if m.time_us is not None}
        chosen = min((p for p in (default, *programs) if p in times), key=times.__getitem__)
        native = times.get(Program(NATIVE))
        gain = None if native is None else native / times[chosen]
        return Verdict(chosen, gain, times.get(default, math.inf) / times[chosen], 1)
