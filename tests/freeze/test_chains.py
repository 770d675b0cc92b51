"""What a frozen convolution or linear layer takes into its epilogue, and what it must not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, Residual, distance, eager, frozen_outputs, randomised, use_forced
from torch import nn

import convselect


@use_forced
@pytest.mark.parametrize("how", ["add", "iadd", "method", "reversed", "shortcut"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "none"])
def test_residuals_are_fused(how, activation):
    model = randomised(Residual(how, activation))
    x = torch.randn(1, 8, 10, 9) * 4
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    last = ("residual",) if activation == "none" else ("residual", activation)
    assert report.fused["body.1.0"] == ("batch norm", "bias", *last)
    assert report.fused["body.0.0"] == ("batch norm", "bias", "relu")


@use_forced
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(inplace=True), nn.SiLU(inplace=True)])
def test_activations_are_fused(activation):
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), activation))
    x = torch.randn(1, 3, 9, 9) * 5
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.fused == {"0": ("bias", type(activation).__name__.lower())}


class Uses(nn.Module):
    """Values that are read twice, written in place or broadcast: what must not be fused."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.norm, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.gate = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        y = self.a(x)
        if self.how == "twice":
            return self.norm(y) + y
        if self.how == "doubled":
            return y + y
        if self.how == "input written":
            x = self.b(x) * 2
            y = self.a(x)
            x.relu_()
            return y + x
        if self.how == "identity written":
            x = self.b(x) * 2
            return F.relu(x, inplace=True) + self.a(x) + x
        if self.how == "written before":
            z = self.b(y)
            y.mul_(3)
            return z + y
        if self.how == "broadcast":
            return y + self.gate(x)
        if self.how == "broadcast up":
            return self.gate(x) + y
        if self.how == "pixel":
            return torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))) * y
        if self.how == "view kept":
            return y.flatten(1), F.relu(self.b(y)).permute(0, 2, 3, 1)
        if self.how == "alpha":
            return torch.add(y, x, alpha=2)
        if self.how == "threshold":
            return F.silu(self.norm(y)).chunk(2, 1)[1]
        raise AssertionError(self.how)


@use_forced
@pytest.mark.parametrize(
    "how",
    ["twice", "doubled", "input written", "identity written", "written before", "broadcast", "broadcast up", "pixel",
     "view kept", "alpha", "threshold"],
)  # fmt: skip
def test_what_must_not_be_fused(how):
    model = randomised(Uses(how))
    x = torch.randn(2, 4, 6, 7)
    with torch.no_grad():
        want = model(x)
    convselect.freeze(model, x)
    first = model(x)
    second = model(torch.randn(2, 4, 6, 7))  # must not write into what the call before returned
    for got, expected in zip(first, want, strict=True) if isinstance(want, tuple) else [(first, want)]:
        assert distance(got, expected) < CONV
        assert got.stride() == expected.stride()
    del second


@pytest.mark.parametrize("how", ["plain", "no bias", "relu", "read twice", "scaled after"])
@use_forced
def test_linear_layers(how):
    model = randomised(ConvNeXtLike(how))
    x = torch.randn(2, 6, 9, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert got.stride() == want.stride()
    assert report.fused["one"] == ("bias", "gelu")
    expected = {
        "plain": ("scale", "bias", "residual"),
        "no bias": ("scale", "residual"),
        "relu": ("scale", "bias", "residual", "relu"),
        "read twice": ("scale", "bias", "residual"),  # y * scale + y is y * (scale + 1)
        "scaled after": ("bias", "residual"),
    }
    assert report.fused["two"] == expected[how]
    with torch.no_grad():
        model.scale.mul_(2)
        model.one.bias.add_(1)
    assert distance(model(x), eager(model, x)) < CONV
    model.two.weight.data.mul_(2)
    assert distance(model(x), eager(model, x)) < CONV


class ConvNeXtLike(nn.Module):
    """A linear layer's scale and, across a permutation, its residual."""

    def __init__(self, how):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(6, 6, 7, padding=3, groups=6), nn.LayerNorm(6)
        self.one, self.two = nn.Linear(6, 24), nn.Linear(24, 6, bias=how != "no bias")
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.how = how

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.two(F.gelu(self.one(y)))
        if self.how == "read twice":
            y = y * self.scale + y
        elif self.how == "scaled after":
            y = (y + x.permute(0, 2, 3, 1)) * self.scale
        else:
            y = y * self.scale
        y = y.permute(0, 3, 1, 2)
        return F.relu(x + y) if self.how == "relu" else x + y
