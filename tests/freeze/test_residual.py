"""Inverted residual blocks in one call."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import CONV, conv_bn, distance, eager, frozen_outputs, needs_library, randomised, unfrozen
from torch import nn

import convselect
from convselect.freeze import residual


class Unpacked(nn.Module):
    def forward(self, values):
        return values[0]


class Inverted(nn.Module):
    """An inverted residual block; `watched`: something else sees what is between its layers."""

    def __init__(self, c_in=12, deep=40, c_out=12, kernel=3, stride=1, expands=True, watched=None, activation=nn.ReLU6):
        super().__init__()
        deep = deep if expands else c_in
        self.expand = conv_bn(c_in, deep, 1, activation()) if expands else nn.Identity()
        self.depthwise = conv_bn(deep, deep, kernel, activation(), groups=deep, stride=stride)
        self.project = conv_bn(deep, c_out, 1)
        self.residual, self.watched = c_in == c_out and stride == 1, watched

    def forward(self, x):
        expanded = self.expand(x)
        deep = self.depthwise(expanded)
        y = self.project(deep)
        if self.residual:
            y = x + y
        return {None: (y,), "expanded": (y, expanded), "deep": (y, deep)}[self.watched]


def blocks_of(report):
    return {name for row in report.inputs for name, chosen in row.chosen.items() if chosen == "block"}


INVERTED = {
    "residual": ({}, 3),
    "stride": ({"stride": 2, "c_out": 20}, 3),
    "5x5": ({"kernel": 5, "activation": nn.SiLU}, 3),
    "two layers": ({"expands": False, "c_out": 7, "activation": nn.ReLU}, 2),
    "what is expanded is seen": ({"watched": "expanded"}, 2),
    "what is deep is seen": ({"watched": "deep"}, 0),
    "gelu": ({"activation": nn.GELU}, 3),
    "7x7": ({"kernel": 7}, 3),
    "9x9": ({"kernel": 9}, 0),
}


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
@pytest.mark.parametrize("case", INVERTED)
def test_blocks(case, forced):
    options, fused = INVERTED[case]
    model = randomised(Inverted(**options))
    for shape in ((1, 12, 14, 15), (2, 12, 5, 3)):
        x = torch.randn(shape)
        want, got, report = frozen_outputs(model, x)
        for a, b in zip(got, want, strict=True):
            assert distance(a, b) < CONV
            assert a.stride() == b.stride()
        assert len(blocks_of(report)) == fused
        assert unfrozen(model) == 1
        with torch.no_grad():
            assert all(map(torch.equal, model(x), want))


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
@pytest.mark.parametrize("layer", ["expand", "depthwise", "project"])
def test_blocks_notice_changes_and_keep_nonfinite_values(layer, forced):
    model = randomised(nn.Sequential(Inverted(), Unpacked(), Inverted(stride=2), Unpacked()))
    x = torch.randn(1, 12, 14, 14)
    report = convselect.summary(convselect.freeze(model, x))
    assert len(blocks_of(report)) == 6
    before = model(x)
    with torch.no_grad():
        getattr(model[0], layer)[0].weight.mul_(1.5)
        getattr(model[2], layer)[1].bias.add_(0.5)
    want = eager(model, x)
    assert distance(before, want) > 1e-2
    assert distance(model(x), want) < CONV
    x[0, 2, 3, 4] = float("nan")
    assert torch.equal(model(x).isnan(), eager(model, x).isnan())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x).isnan(), model(x).isnan())


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_blocks_compute_the_same_bits_on_any_number_of_threads(forced):
    model = randomised(Inverted(16, 96, 16))
    x = torch.randn(2, 16, 40, 33)
    convselect.freeze(model)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        model(x)
        results.append(model(x)[0].clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_a_block_keeps_within_the_workspace_budget(forced):
    model = randomised(Inverted(16, 96, 16))
    x = torch.randn(1, 16, 30, 30)
    with convselect.use(workspace_bytes=64 << 10):
        report = convselect.summary(convselect.freeze(model, x))
        assert distance(model(x)[0], eager(model, x)[0]) < CONV
    assert not blocks_of(report)


@pytest.mark.parametrize("faster", ["apart", "block"])
def test_a_block_that_is_not_faster_is_not_used(faster, monkeypatch):
    monkeypatch.setattr(residual, "fastest", lambda *_: faster)
    model = randomised(Inverted(16, 96, 16))
    with torch.no_grad():
        report = convselect.summary(convselect.freeze(model, torch.randn(1, 16, 30, 30)))
    assert faster == "block" or not blocks_of(report)


@needs_library
def test_blocks_that_would_share_a_layer(monkeypatch):
    """MobileOne: depthwise and pointwise layers in turn. Each pointwise one ends a block and could begin one."""
    monkeypatch.setattr(residual, "fastest", lambda *_: "block")
    parts = []
    for _ in range(4):
        parts += [conv_bn(8, 8, 3, groups=8, activation=nn.ReLU()), conv_bn(8, 8, 1, activation=nn.ReLU())]
    model = randomised(nn.Sequential(*parts))
    x = torch.randn(1, 8, 12, 12)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    for row in report.inputs:
        assert row.layout != "channels_last" or list(row.chosen.values()).count("block") == 8
