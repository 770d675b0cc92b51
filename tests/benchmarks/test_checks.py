"""`benchmarks.checks`: how soon a wrong algorithm is caught."""

from __future__ import annotations

import math

import pytest
import torch

import convselect
from benchmarks import checks as benchmark
from convselect.eager import checks
from convselect.kernels import _library

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "LAYERS", {"small": (32, 32, 3, 1, (2, 32, 28, 28))})
    yield
    convselect.clear()


@pytest.mark.skipif(not _library.available(), reason="native may be the fastest without the C kernels")
@pytest.mark.filterwarnings("ignore::convselect.ConvselectWarning")
@pytest.mark.parametrize("fault", benchmark.FAULTS)
def test_every_fault_is_caught(fault):
    with torch.no_grad():
        calls = benchmark.calls_until_caught("small", benchmark.FAULTS[fault])
    assert 1 <= calls < math.inf


def test_what_is_right_is_never_caught_and_looking_takes_little(monkeypatch):
    monkeypatch.setattr(benchmark, "MOST_CALLS", 300)
    before = checks._Due.add
    with torch.no_grad():
        calls = benchmark.calls_until_caught("small", lambda y: None)
        share = benchmark.share_of_time("small", 500)
    assert calls == math.inf or math.isnan(calls)
    assert 0 <= share < 0.5
    assert checks._Due.add is before
