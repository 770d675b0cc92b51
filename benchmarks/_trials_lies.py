"""A model that lies, for `benchmarks.trials`: it nominates the slowest algorithms and predicts three times native's
speed for them. By times that were measured before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from convselect.base import settings
from convselect.base.problem import ConvProblem
from convselect.choice.budgets import refusal
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure.measure import measure_problem

NATIVE = "native"
NOMINATED = 3
PREDICTED = math.log(3.0)


class LyingPrediction:
    """`worst`, predicted three times as fast as native; then native, and the others far behind."""

    def __init__(self, worst: Sequence[str]) -> None:
        self._worst = worst
        self.ranked = [*worst, NATIVE, *(a.name for a in ALL if a.name != NATIVE and a.name not in worst)]

    def log_gain(self, name: str) -> float:
        if name in self._worst:
            return PREDICTED - 0.01 * self._worst.index(name)
        return 0.0 if name == NATIVE else -3.0

    def margin_of(self, name: str) -> float:
        return 0.0

    def probability(self, name: str) -> float:
        return 0.9 / len(self._worst) if name in self._worst else 0.1 / len(self.ranked)


class LyingPredictor:
    """Lies about the problems whose worst algorithms it was given, and knows no others. It can be pickled."""

    identity = "lies"

    def __init__(self, worst: Mapping[Any, Sequence[str]]) -> None:
        self._worst = dict(worst)

    def predict(self, problem: ConvProblem) -> LyingPrediction | None:
        worst = self._worst.get(sizes(problem))
        return LyingPrediction(worst) if worst else None


def sizes(problem: ConvProblem) -> tuple[object, ...]:
    """Direction and geometry."""
    return problem[:17]


def worst_algorithms(problem: ConvProblem) -> list[str]:
    """The slowest ones that the default budgets admit, slowest first."""
    rows = measure_problem("", problem, ALL, deadline_s=0.1)
    times = {row.algorithm: row.min_us for row in rows if row.status in ("ok", "censored")}
    used = settings.Settings()
    admitted = [name for name in times if name != NATIVE and refusal(BY_NAME[name], problem, used) is None]
    return sorted(admitted, key=lambda name: -times[name])[:NOMINATED]
