"""A program is an algorithm with a value for each of its parameters; `Programs` are all those of one problem."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE
from convselect.kernels._contract import Algorithm
from convselect.kernels._space import Space
from convselect.kernels.pool import BY_NAME

Floats = npt.NDArray[np.float64]


class Program(NamedTuple):
    """One way to compute a problem, with all parameters fixed.

    Attributes:
        params: (name, value) in the order of the algorithm's space; empty if it has no parameters.
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
            ValueError: if the text is not a program.
        """
        head, *rest = text.split()
        pairs = [item.partition("=") for item in rest]
        return cls(head, tuple((name, int(value)) for name, _, value in pairs))


class Programs:
    """All programs of one problem.

    Args:
        spaces: algorithm -> its space of parameters; None if it has no parameters, and so only one program.
    """

    def __init__(self, problem: ConvProblem, spaces: Mapping[str, Space | None]) -> None:
        self.problem = problem
        self.spaces = dict(spaces)
        self.tunable = [name for name, space in self.spaces.items() if space is not None]
        self._valid: dict[Program, bool] = {}

    @classmethod
    def of(cls, problem: ConvProblem, settings: Settings, algorithms: Mapping[str, Algorithm] = BY_NAME) -> Programs:
        """The programs of native and of every algorithm that these settings admit for the problem."""
        admitted = {n: a for n, a in algorithms.items() if n == NATIVE or refusal(a, problem, settings) is None}
        return cls(problem, {name: algorithm.space(problem) for name, algorithm in admitted.items()})

    def default(self, name: str) -> Program:
        """The algorithm with its default parameters."""
        space = self.spaces[name]
        return Program(name) if space is None else self.made(name, space.default(self.problem))

    def defaults(self) -> list[Program]:
        """The default program of each algorithm."""
        return [self.default(name) for name in self.spaces]

    def made(self, name: str, values: Mapping[str, int]) -> Program:
        """A program with these values, in the order of the space."""
        space = self.spaces[name]
        return Program(name, () if space is None else tuple((n, values[n]) for n in space.names))

    def sample(self, source: random.Random) -> Program | None:
        """A random program, drawn one parameter at a time; None if no algorithm has parameters."""
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
        """The program itself if it is valid, otherwise None. A subclass in which only some programs can be measured
        returns the nearest of those."""
        return program if self.is_valid(program) else None
