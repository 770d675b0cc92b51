"""Averages ahead of 1x1 convolutions: where the two may change places, and where they must not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, traced
from torch import nn

from convselect.freeze.algebra.rewrite import rewrite

_GENERATOR = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*s, dtype=torch.float64, generator=_GENERATOR) for s in ((2, 6, 9, 8), (4, 6, 1, 1), (4,)))
GROUPED, B8 = (torch.randn(*s, dtype=torch.float64, generator=_GENERATOR) for s in ((8, 3, 1, 1), (8,)))
W3 = torch.randn(4, 6, 3, 3, dtype=torch.float64, generator=_GENERATOR)

EXCHANGED = {
    "transition": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W, B), 2),
    "overlapping": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W, B), 3, 2),
    "padded, not counted": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W, B), 3, 2, 1, count_include_pad=False),
    "padded, no bias": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W), 3, 2, 1),
    "ceil": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W, B), 2, ceil_mode=True),
    "divisor, no bias": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W), 2, divisor_override=3),
    "grouped": lambda x: F.avg_pool2d(F.conv2d(x.relu(), GROUPED, B8, groups=2), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(F.conv2d(x.relu(), W, B), (4, 3)),
    "mean": lambda x: F.conv2d(x.relu(), W, B).mean((2, 3), keepdim=True),
    "activation behind": lambda x: F.avg_pool2d(F.conv2d(x.relu(), W, B), 2).relu(),
}
KEPT = {
    "padded": lambda x: F.avg_pool2d(F.conv2d(x, W, B), 3, 2, 1),
    "divisor": lambda x: F.avg_pool2d(F.conv2d(x, W, B), 2, divisor_override=3),
    "activation between": lambda x: F.avg_pool2d(F.conv2d(x, W, B).relu(), 2),
    "a maximum": lambda x: F.max_pool2d(F.conv2d(x, W, B), 2),
    "as many pixels": lambda x: F.avg_pool2d(F.conv2d(x, W), 3, 1, 1),
    "3x3": lambda x: F.avg_pool2d(F.conv2d(x, W3, B), 2),
    "with a stride": lambda x: F.avg_pool2d(F.conv2d(x, W, B, 2), 2),
    "with a padding": lambda x: F.avg_pool2d(F.conv2d(x, W, B, padding=1), 2),
    "read by another": lambda x: [F.avg_pool2d(y, 2), y] if (y := F.conv2d(x, W, B)) is not None else None,
    "one channel of many": lambda x: F.avg_pool2d(F.conv2d(x, W[:1]), 2),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_an_average_goes_ahead_of_a_pointwise_convolution(name):
    f = EXCHANGED[name]
    graph = traced(f, X).graph
    assert rewrite(graph)["averages_first"] == 1
    order = [str(node.target).partition(".")[2].partition(".")[0] for node in graph.nodes if node.op == "call_function"]
    assert order.index("convolution") == 2, order  # relu, average, convolution
    rewritten(f, X)


@pytest.mark.parametrize("name", KEPT)
def test_an_average_that_stays_behind(name):
    assert "averages_first" not in rewritten(KEPT[name], X)[1]


def test_a_layer_keeps_its_name_and_a_transition_its_norm():
    block = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1, bias=False), nn.AvgPool2d(2)).double().eval()
    left, applied = rewritten(lambda x: block(x), X)
    assert applied["averages_first"] == 1
    assert left["convolution"] == left["avg_pool2d"] == left["relu"] == 1
