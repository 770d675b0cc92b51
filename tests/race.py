"""Native and two algorithms on a clock that moves only when one of them runs, and a model that likes both too much."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_model import FakePrediction, FakePredictor

from convselect.base import lru, settings
from convselect.choice.choose import NATIVE
from convselect.eager import live_trial
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

    def __call__(self) -> int:
        return self.ns


class Timed(Native):
    """Native's results; every call takes `us`, and the next ones as many more as `delays` has, from its end."""

    def __init__(self, name: str, us: float, clock: Clock) -> None:
        self.name, self.us, self.clock = name, us, clock
        self.delays: list[float] = []

    def run_checked(self, a, b, problem, params=None, bias=None):
        self.clock.ns += int(1000 * (self.us + (self.delays.pop() if self.delays else 0.0)))
        return super().run_checked(a, b, problem, params, bias)


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
