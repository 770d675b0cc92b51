"""The same calls as `overhead.py` under pytest-benchmark: `make bench`."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import convselect
from convselect.base import lru
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.doctor import doctor
from convselect.eager.plan import make_plan
from convselect.model import loaded
from convselect.model.features import features
from convselect.store import process
from convselect.store.store import Decision

LAYER = conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("kind", ["nn.Conv2d", "converted"])
def test_cached_call(benchmark, kind, grad):
    layer = nn.Conv2d(1, 1, 3, padding=1)
    if kind == "converted":
        convselect.convert(layer, policy="auto")
    x = torch.randn(1, 1, 8, 8)
    benchmark.group = f"cached call, {'grad' if grad else 'no_grad'}"
    with torch.set_grad_enabled(grad):
        benchmark(layer, x)


def test_problem(benchmark):
    """Built and hashed: some 2 us."""
    benchmark(lambda: hash(ConvProblem(Direction.FORWARD, 1, 64, 56, 56, 64, 3, 3, 1, 1, 1, 1, 1, 1)))


def test_features(benchmark):
    """At most 15 us."""
    benchmark(features, LAYER)


def test_prediction(benchmark):
    """With features at most 49 us, the paper's figure for its network of the same size."""
    predictor = loaded.get()
    assert predictor is not None
    assert benchmark(predictor.predict, LAYER) is not None


def test_look_up_in_a_store(benchmark, tmp_path):
    """20 us, budgeted at 60."""
    process.configure(tmp_path / "store.sqlite")
    problems = [conv_problem(1, 1 + i, 9, 9, 8, 3, 3) for i in range(500)]
    for problem in problems:
        process.remember(Decision(problem, "b", "native", None, "verify", 1.5, 1, 9))
    process.flush()
    turns = itertools.cycle(problems)
    assert benchmark(lambda: process.look_up(next(turns), "b")) is not None
    process.configure("off")


def test_self_test_of_the_doctor(benchmark):
    """A fifth of a second."""
    benchmark.pedantic(doctor.examine, rounds=3, warmup_rounds=1)


def test_first_call_of_a_new_problem(benchmark):
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    x, settings = torch.randn(1, 8, 16, 16), convselect.base.settings.current()

    def plan():
        lru.clear()
        return make_plan(x, layer.weight, layer.bias, ((1, 1), (1, 1), (1, 1), 1), settings)

    assert benchmark(plan) is not None
