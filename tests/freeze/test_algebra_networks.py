"""Rewriting the graphs of real networks: the same results, and no more calls than are needed."""

from __future__ import annotations

import cProfile
import importlib.util
from collections import Counter

import pytest
import torch
from rewriting import randomised_norms, rewritten, traced
from torch import nn
from torchvision_stub import without_torchvision

from convselect.freeze.algebra.rewrite import rewrite

pytestmark = pytest.mark.slow

# Network -> operators left, but for those in `REST`. The rest are what the network computes: sums of residuals, gates.
LEFT = {
    "resnet50": {"convolution": 53, "relu": 49, "add": 16},
    "efficientnet_b0": {"convolution": 81, "silu": 49, "sigmoid": 16, "mul": 16, "add": 9},
    # 12 gates, and 12 times their two numbers at once; standardised weights are constants.
    "nfnet_l0": {"convolution": 81, "silu": 52, "relu": 12, "sigmoid": 12, "mul": 24, "add": 12, "avg_pool2d": 3},
    "repvgg_b0": {"convolution": 28, "relu": 28},
    "mobileone_s0": {"convolution": 43, "relu": 43},
    # Token mixers are one depthwise convolution each; 10 residuals.
    "fastvit_t8": {"convolution": 52, "gelu": 17, "add": 10, "relu": 1, "sigmoid": 1, "mul": 1},
    "ghostnet_100": {"convolution": 95, "relu": 42, "hardsigmoid": 7, "mul": 7, "add": 16, "cat": 32},
    "repghostnet_100": {"convolution": 95, "relu": 42, "hardsigmoid": 7, "mul": 7, "add": 16},
    "convnext_tiny": {"convolution": 22, "native_layer_norm": 23, "gelu": 18, "add": 18, "permute": 46},
}
REST = {"mean", "view", "getitem", "max_pool2d_with_indices", "linear"}


@pytest.fixture(scope="module")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install 'convselect[models]'")
    with without_torchvision():
        import timm
    return timm


@pytest.mark.parametrize("name", LEFT)
def test_networks(name, timm):
    model = randomised_norms(timm.create_model(name)).double()
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, _ = rewritten(model, x)
    assert left["linear"] == (37 if name == "convnext_tiny" else 1)
    assert left - Counter(dict.fromkeys(REST, 1000)) == LEFT[name]


@pytest.mark.parametrize("batch", [1, 2])
def test_layouts(batch, timm):
    """In channels_last, and with batches, PyTorch writes linear layers and means in other ways."""
    model = randomised_norms(timm.create_model("convnext_atto")).double().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 64, 64, dtype=torch.float64).to(memory_format=torch.channels_last)
    left, _ = rewritten(model, x)
    assert not left.keys() & {"bmm", "mm", "clone", "as_strided_"}


def test_work_is_in_proportion_to_the_graph():
    """Calls of functions are counted: four times as many layers may cost little more than four times as much."""

    class Chain(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(n))

        def forward(self, x):
            for layer in self.layers:
                x = (x + layer(x)).relu() + x
            return x

    calls = {}
    for n in (10, 40):
        module = traced(Chain(n).eval(), torch.randn(1, 4, 4, 4))
        profile = cProfile.Profile()
        profile.runcall(rewrite, module.graph)
        calls[n] = sum(entry.callcount for entry in profile.getstats())
    assert calls[40] < 5 * calls[10]
