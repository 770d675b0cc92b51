"""The search for one problem: which programs to measure next, and the results so far."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from convselect.base.problem import ConvProblem
from convselect.tune import evolution
from convselect.tune.cost_model import CostModel
from convselect.tune.programs import Floats, Program, Programs

EPSILON = 0.1
"""Share of a batch that is drawn at random: otherwise programs that the model believes slow are never measured."""
_DRAWS = 20  # attempts per new program


class Search:
    """Random search: the defaults first, then random programs, none twice.

    Attributes:
        times_us: times of the measured programs with correct results.
        measured: all programs that were measured, wrong and failed ones too.
    """

    def __init__(self, programs: Programs, source: random.Random) -> None:
        self.programs = programs
        self.source = source
        self.times_us: dict[Program, float] = {}
        self.measured: set[Program] = set()

    @property
    def problem(self) -> ConvProblem:
        return self.programs.problem

    @property
    def best(self) -> Program | None:
        return min(self.times_us, key=self.times_us.__getitem__, default=None)

    @property
    def best_us(self) -> float:
        """Time of the best program; infinite before there is one."""
        return min(self.times_us.values(), default=float("inf"))

    def propose(self, count: int) -> list[Program]:
        """Up to `count` programs to measure next; empty if there are no others. The first batch is all defaults."""
        defaults = [program for program in self.programs.defaults() if program not in self.measured]
        # Together, even if they are more than `count`: everything else is compared with them.
        return defaults or self._proposed(count)

    def _proposed(self, count: int) -> list[Program]:
        return self.drawn(count)

    def drawn(self, count: int, exclude: Iterable[Program] = ()) -> list[Program]:
        """New programs, drawn at random."""
        found: dict[Program, None] = {}
        known = self.measured.union(exclude)
        for _ in range(_DRAWS * count):
            if len(found) == count:
                break
            program = self.programs.sample(self.source)
            if program is None:
                break
            if program not in known:
                found[program] = None
        return list(found)

    def learn(self, program: Program, time_us: float | None) -> None:
        """Add a measurement; None if the program was wrong or failed."""
        self.measured.add(program)
        if time_us is not None:
            self.times_us[program] = time_us


class Evolution(Search):
    """Evolutionary search with a cost model, which the problems of a network share.

    Args:
        model: the caller trains it before every `propose`.
        epsilon: share of each batch that is drawn at random.
    """

    def __init__(
        self, programs: Programs, source: random.Random, model: CostModel, *, epsilon: float = EPSILON
    ) -> None:
        super().__init__(programs, source)
        self._model, self._epsilon = model, epsilon

    def _proposed(self, count: int) -> list[Program]:
        blind = sum(self.source.random() < self._epsilon for _ in range(count))
        start = [*self._fastest(evolution.POPULATION // 4), *self.drawn(evolution.POPULATION // 2)]
        ranked = evolution.evolve(self.programs, self._score, self.source, start, exclude=self.measured)
        chosen = ranked[: count - blind]
        return [*chosen, *self.drawn(count - len(chosen), chosen)]

    def _fastest(self, count: int) -> list[Program]:
        return sorted(self.times_us, key=self.times_us.__getitem__)[:count]

    def _score(self, programs: Sequence[Program]) -> Floats:
        return self._model.predict(self.problem, programs)
