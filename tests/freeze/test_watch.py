"""Changes of tensors behind their version counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from networks import CONV, distance, eager, randomised
from torch import nn

import convselect
from convselect.freeze.watch import Watch


@pytest.mark.parametrize(("get", "calls"), [(lambda m: m[1].running_mean, 8), (lambda m: m[0].bias, 8)])
@pytest.mark.parametrize("replace", [True, False])
def test_small_tensors_behind_the_counter_are_noticed_within_eight_calls(get, calls, replace):
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(1, 3, 9, 8)
    convselect.freeze(model, x)
    if replace:
        get(model).data = get(model) + 1
    else:
        get(model).data.add_(1)
    for _ in range(calls):
        model(x)
    assert distance(model(x), eager(model, x)) < CONV


def test_one_element_behind_the_counter_is_noticed_within_a_round():
    model = randomised(nn.Sequential(nn.Conv2d(64, 128, 3), nn.Tanh(), nn.Conv2d(128, 16, 1)))
    x = torch.randn(1, 64, 5, 5)
    convselect.freeze(model, x)
    model(x)
    model[0].weight.data[120, 3, 1, 1] = 10.0  # in one of the last chunks
    want = eager(model, x)
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    rounds = next(i for i in range(100) if distance(model(x), want) < CONV)
    assert 0 < rounds <= n_bytes // 65536 + 4
    assert distance(model(x), want) < CONV


def test_watch_says_which_group():
    tensors = [torch.randn(8, 8) for _ in range(3)]
    groups = [[({"t": t}, "t")] for t in tensors]
    watch = Watch(groups)
    assert watch.changed() == set()
    tensors[1].add_(1)
    assert watch.changed() == {1}
    watch.accept()
    tensors[2].data.add_(1)
    assert watch.changed() == {2}
    watch.accept()
    tensors[0].numpy()[0, 0] += 1
    assert watch.changed_anywhere() == {0}


def test_watch_sees_lone_numbers_of_equal_value_replaced():
    owner = {"t": torch.ones(1)}
    watch = Watch([[(owner, "t")]])
    owner["t"] = torch.ones(1)
    assert watch.changed() == {0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 7)[::2, 1:4],
        lambda: torch.randn(4, 3, 3, 3).permute(0, 2, 3, 1),
        lambda: torch.randn(1).expand(4),
        lambda: torch.randn(7).bfloat16(),
        lambda: torch.empty(0),
    ],
)
def test_watch_takes_any_memory(make):
    t = make()
    watch = Watch([[({"t": t}, "t")]])
    assert watch.changed_anywhere() == set()
    if t.numel():
        t.data[..., :1].add_(1)
        assert watch.changed_anywhere() == {0}


def test_numpy_is_enough():
    """The watch sums memory as 64-bit integers: a swap of halves inside one word must show."""
    t = torch.tensor([1.0, 2.0, 3.0, 4.0])
    watch = Watch([[({"t": t}, "t")]])
    t.numpy()[:] = np.array([2.0, 1.0, 3.0, 4.0], np.float32)
    assert watch.changed_anywhere() == {0}
