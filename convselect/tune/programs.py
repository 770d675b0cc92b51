"""Programs: an algorithm with a value for each of its parameters, and all of them that one problem has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE
from convselect.kernels._contract import Algorithm
from convselect.kernels._space import Parameter, Space
from convselect.kernels.pool import BY_NAME
from convselect.problem import ConvProblem
from convselect.settings import Settings

Floats = npt.NDArray[np.float64]


class Program(NamedTuple):
    """One way to compute a problem, to the last parameter.

    Attributes:
        params: (name, value) in the order of the algorithm's space; empty where it has none.
    """

    algorithm: str
    params: tuple[tuple[str, int], ...] = ()

    @property
    def values(self) -> dict[str, int]:
        return dict(self.params)

    def __str__(self) -> str:
        """A line that `Program.parse` reads back."""
        return " ".join([self.algorithm, *(f"{name}={value}" for name, value in self.params)])

    @classmethod
    def parse(cls, text: str) -> Program:
        """Inverse of `str(program)`.

        Raises:
            ValueError: where it is none.
        """
        head, *rest = text.split()
        pairs = [item.partition("=") for item in rest]
        return cls(head, tuple((name, int(value)) for name, _, value in pairs))


class Programs:
    """All programs of one problem.

    Args:
        spaces: algorithm -> its space; None where there is nothing to decide, and so one program.
    """

    def __init__(self, problem: ConvProblem, spaces: Mapping[str, Space | None]) -> None:
        self.problem = problem
        self.spaces = dict(spaces)
        self.tunable = [name for name, space in self.spaces.items() if space is not None]
        self._valid: dict[Program, bool] = {}

    @classmethod
    def of(cls, problem: ConvProblem, settings: Settings, algorithms: Mapping[str, Algorithm] = BY_NAME) -> Programs:
        """Those of every algorithm that these settings admit for the problem."""
        admitted = {n: a for n, a in algorithms.items() if n == NATIVE or refusal(a, problem, settings) is None}
        return cls(problem, {name: algorithm.space(problem) for name, algorithm in admitted.items()})

    def default(self, name: str) -> Program:
        """What this algorithm does where nobody decides."""
        space = self.spaces[name]
        return Program(name) if space is None else self.made(name, space.default(self.problem))

    def defaults(self) -> list[Program]:
        """One of each algorithm."""
        return [self.default(name) for name in self.spaces]

    def made(self, name: str, values: Mapping[str, int]) -> Program:
        """A program of these values, in the order of the space."""
        space = self.spaces[name]
        return Program(name, () if space is None else tuple((n, values[n]) for n in space.names))

    def sample(self, source: random.Random) -> Program | None:
        """A complete program, drawn one parameter at a time; None where no algorithm has parameters."""
        if not self.tunable:
            return None
        name = source.choice(self.tunable)
        space = self.spaces[name]
        assert space is not None
        return self.made(name, space.sample(self.problem, source))

    def is_valid(self, program: Program) -> bool:
        found = self._valid.get(program)
        if found is None:
            space = self.spaces.get(program.algorithm)
            if space is None:
                found = program.algorithm in self.spaces and not program.params
            else:
                found = space.is_valid(self.problem, program.values)
            self._valid[program] = found
        return found

    def settle(self, program: Program) -> Program | None:
        """The program itself where it is valid, otherwise None; where only some can be measured, the nearest."""
        return program if self.is_valid(program) else None


class RecordedPrograms(Programs):
    """The programs of one problem that there are recorded times of; a space is what values they have.

    Args:
        programs: the first one of an algorithm is its default.
        kinds: (algorithm, parameter) -> kind of parameter, where it is not a tile size.
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
    """Of each parameter, which of its values it has."""
    values = program.values
    return [p.values.index(values[p.name]) if values[p.name] in p.values else -1 for p in space.parameters]
