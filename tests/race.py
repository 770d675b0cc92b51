"""Native and two algorithms on a clock that moves only when one of them runs, and a model that likes both too much."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fake_model import FakePrediction, FakePredictor

import convselect
from convselect.base import lru, settings
from convselect.base.problem import Direction
from convselect.choice import trial
from convselect.choice.choose import NATIVE
from convselect.eager import live_trial, resolve
from convselect.eager.live_trial import LiveTrial
from convselect.kernels.native import Native
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.store import process

QUICK, SLOW = "winograd4", "im2col_gemm"
US = {NATIVE: 1000.0, QUICK: 525.0, SLOW: 1175.0}
"""What a call takes. Leaving native costs 25 us more."""
GAINS = {QUICK: 1000 / 550, SLOW: 1000 / 1200}
PREDICTED = {QUICK: 2.0, SLOW: 2.4}


class Clock:
    """Time passes when algorithms say so."""

    ns = 0
    reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return self.ns


class Timed(Native):
    """Native's results, unless `result` is replaced; every call takes `us`, or what `us_of` has for its direction, and
    the next ones as many more as `delays` has, from its end."""

    def __init__(self, name: str, us: float, clock: Clock) -> None:
        self.name, self.us, self.clock = name, us, clock
        self.us_of: dict[Direction, float] = {}
        self.delays: list[float] = []
        self.runs: list[Direction] = []
        self.result = super().run_checked

    def run_checked(self, a, b, problem, params=None, bias=None):
        self.runs.append(problem.direction)
        us = self.us_of.get(problem.direction, self.us)
        self.clock.ns += int(1000 * (us + (self.delays.pop() if self.delays else 0.0)))
        return self.result(a, b, problem, params, bias)


class Likes(FakePredictor):
    """Predicts what `PREDICTED` has, and half of native's speed for the rest."""

    def predict(self, problem: object) -> FakePrediction:
        prediction = FakePrediction(self._ranked, 2.0)
        prediction.log_gain = lambda name: 0.0 if name == NATIVE else math.log(PREDICTED.get(name, 0.5))
        return prediction


@contextmanager
def racing(store: Path | str = "off") -> Iterator[dict[str, Timed]]:
    """The pool's three under the policy "verify", with this store."""
    clock = Clock()
    pool = {name: Timed(name, us, clock) for name, us in US.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, algorithm in pool.items():
            patch.setitem(BY_NAME, name, algorithm)
        for name in ("_wall_ns", "_thread_ns"):
            patch.setattr(live_trial, name, clock)
        patch.setattr(live_trial, "plan_cost_us", lambda problem, native_us, names: 25.0)
        patch.setattr(trial, "EARLY_ROUNDS", trial.MIN_ROUNDS)  # time to look at an open trial
        predictor = Likes(SLOW, QUICK)
        patch.setattr(loaded, "get", lambda: predictor)
        process.configure(store)
        lru.clear()
        try:
            with settings.use("verify"):
                yield pool
        finally:
            lru.clear()
            process.configure(os.environ.get("CONVSELECT_STORE"))


# ---- the same with names of its own: the fixture `race` of tests/eager/conftest.py ---------------------------------

NATIVE_US = 1000.0
X = torch.randn(2, 4, 10, 10)


class Equally(FakePredictor):
    """Predicts twice native's speed for its favourites, half for the rest."""

    def predict(self, problem):
        prediction = FakePrediction(self._ranked, 2.0)
        liked = self._ranked[: self._ranked.index(NATIVE)]
        prediction.log_gain = lambda name: 0.0 if name == NATIVE else self.gain if name in liked else -0.7
        return prediction

    gain = 0.7


class Race(dict[str, Timed]):
    """Name -> algorithm: native, "quick" (300 us) and "slow" (1500 us); the model likes both.

    Attributes:
        clock: the only one that trials read.
        trusted: names that may be chosen, or run at once, before anything was measured.
        model: what predicts.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.trusted: set[str] = set()
        self.model = Equally("slow", "quick")
        super().__init__({
            NATIVE: Timed(NATIVE, NATIVE_US, self.clock),
            "quick": Timed("quick", 300.0, self.clock),
            "slow": Timed("slow", 1500.0, self.clock),
        })  # fmt: skip

    def counts(self) -> dict[str, int]:
        return {name: len(algorithm.runs) for name, algorithm in self.items()}


def on_trial() -> list[LiveTrial]:
    return [e.found for e in resolve.choices.entries.values() if isinstance(e.found, LiveTrial)]


def call_until_settled(times: int = 70) -> LiveTrial:
    """The only trial, after so many calls, all of them with native's result."""
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    with torch.no_grad():
        for _ in range(times):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    (trial,) = on_trial()
    assert trial.choice is not None
    return trial
