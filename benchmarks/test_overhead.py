"""The same calls as `overhead.py` under pytest-benchmark: `make bench`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import convselect
from convselect import lru
from convselect.eager import dispatch
from convselect.model import loaded
from convselect.problem import conv_problem


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("kind", ["nn.Conv2d", "SelectedConv2d"])
def test_cached_call(benchmark, kind, grad):
    layer = nn.Conv2d(1, 1, 3, padding=1)
    if kind == "SelectedConv2d":
        convselect.convert(layer, policy="auto")
    x = torch.randn(1, 1, 8, 8)
    benchmark.group = f"cached call, {'grad' if grad else 'no_grad'}"
    with torch.set_grad_enabled(grad):
        benchmark(layer, x)


def test_prediction(benchmark):
    predictor = loaded.get()
    assert predictor is not None
    assert benchmark(predictor.predict, conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)) is not None


def test_first_call_of_a_new_problem(benchmark):
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    x, settings = torch.randn(1, 8, 16, 16), convselect.settings.current()

    def plan():
        lru.clear()
        return dispatch.make_plan(x, layer.weight, layer.bias, (1, 1), (1, 1), (1, 1), 1, settings)

    assert benchmark(plan) is not None
