"""A predictor that always prefers one algorithm: makes automatic choices anything but native."""

from __future__ import annotations

import itertools
import math

from convselect.base import lru
from convselect.kernels.pool import ALL
from convselect.model import loaded

_numbers = itertools.count()


class FakePrediction:
    def __init__(self, ranked: list[str], gain: float) -> None:
        self.ranked = ranked
        self._gain = gain

    def log_gain(self, name: str) -> float:
        return 0.0 if name == "native" else math.log(self._gain)

    def margin_of(self, name: str) -> float:
        return 0.08

    def probability(self, name: str) -> float:
        return 1.0 / len(self.ranked)


class FakePredictor:
    """Ranks `favourites` first, native after them, the rest last."""

    def __init__(self, *favourites: str, gain: float = 2.0) -> None:
        rest = [a.name for a in ALL if a.name not in favourites and a.name != "native"]
        self._ranked = [*favourites, "native", *rest]
        self._gain = gain
        # What was learnt about another test's model is nothing to this one.
        self.identity = f"fake {next(_numbers)}"

    def predict(self, problem: object) -> FakePrediction:
        return FakePrediction(self._ranked, self._gain)


def use_fake(monkeypatch, *favourites: str, gain: float = 2.0) -> None:
    """Let every automatic choice of this test be made by a `FakePredictor`; forgets earlier choices."""
    predictor = FakePredictor(*favourites, gain=gain)
    monkeypatch.setattr(loaded, "get", lambda: predictor)
    lru.clear()
