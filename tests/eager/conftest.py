"""What tests of trials on real calls start from."""

from __future__ import annotations

import os

import pytest
from race import Race

import convselect
from convselect.base import lru
from convselect.base import warnings as _warnings
from convselect.eager import checks, live_trial, resolve
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.store import process


@pytest.fixture
def store(tmp_path):
    """A store of its own, and nothing known in this process."""
    process.configure(tmp_path / "store.sqlite")
    lru.clear()
    yield
    lru.clear()
    process.configure(os.environ.get("CONVSELECT_STORE"))


@pytest.fixture
def race(monkeypatch, store):
    """A pool of native, "quick" and "slow" on an invented clock, with a model that likes both; policy "verify"."""
    race = Race()
    live_trial.account.clear()
    for name, algorithm in race.items():
        monkeypatch.setitem(BY_NAME, name, algorithm)
    monkeypatch.setattr(live_trial, "_wall_ns", race.clock)
    monkeypatch.setattr(live_trial, "_thread_ns", race.clock)
    monkeypatch.setattr(live_trial, "plan_cost_us", lambda problem, native_us, names: 25.0)
    monkeypatch.setattr(resolve, "trusted", lambda algorithm, problem: algorithm.name in race.trusted)
    monkeypatch.setattr(loaded, "get", lambda: race.model)
    monkeypatch.setattr(_warnings, "_given", set())
    monkeypatch.setattr(checks.due, "left", checks.MOST_GAP)
    with convselect.use("verify"):
        yield race
