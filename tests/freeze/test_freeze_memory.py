"""What a frozen model keeps in memory: one copy of each weight, and less for intermediates than eager."""

from __future__ import annotations

import gc

import pytest
import torch
from networks import CONV, conv_bn, distance, eager, needs_library, randomised, use_forced
from torch import nn

import convselect
from benchmarks.memory import Live
from convselect.freeze.freeze import frozen_forwards


def _layers(model):
    (forward,) = frozen_forwards(model).values()
    (plan,) = (plan for _, plan in forward.plans())
    return plan, list(plan.program.layers.values())


def _network():
    return randomised(
        nn.Sequential(conv_bn(8, 32, activation=nn.ReLU()), conv_bn(32, 64, 1, nn.ReLU()), conv_bn(64, 16, stride=2))
    )


@use_forced
def test_folded_weights_are_held_only_by_what_reads_them():
    model, x = _network(), torch.randn(1, 8, 20, 24)
    convselect.freeze(model, x)
    model(x)
    gc.collect()
    plan, layers = _layers(model)
    for layer in layers:
        held = layer._alive()
        if None not in plan.packs[layer]:
            packed = [cell[0] for cell, _, _ in layer._packs.values()]
            assert held is None or any(t is held for t in packed)  # native reads it as it is
        else:
            assert held is not None


@use_forced
@pytest.mark.parametrize("inference", [False, True])
def test_a_weight_let_go_is_there_when_native_has_to_compute(inference):
    model, x = _network(), torch.randn(1, 8, 20, 24)
    convselect.freeze(model, x)
    model(x)
    _, layers = _layers(model)
    y = torch.randn(1, 32, 20, 24)
    for change in (False, True):
        if change:  # and it is folded again with the others
            with torch.no_grad():
                model[1][0].weight.mul_(-1.5)
        want = eager(model[1], y)
        with torch.inference_mode(inference), torch.no_grad():
            got = model(x)
            assert distance(layers[1].native(y), want) < CONV
        assert distance(got, eager(model, x)) < CONV


@use_forced
def test_weights_that_kernels_read_stay_where_they_are():
    model, x = _network(), torch.randn(1, 8, 20, 24)
    convselect.freeze(model, x)
    model(x)
    _, layers = _layers(model)
    held = {layer: layer._alive() for layer in layers}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    assert distance(model(x), eager(model, x)) < CONV
    for layer, t in held.items():
        if t is not None:
            assert layer.weight is t


@needs_library
@use_forced
@pytest.mark.parametrize("blocks", [1, 4])
def test_intermediates_take_no_more_memory_than_eager_needs(blocks, monkeypatch):
    inner = [conv_bn(32, 32, activation=nn.ReLU()) for _ in range(blocks)]
    model = randomised(nn.Sequential(conv_bn(8, 32, activation=nn.ReLU()), *inner, nn.AdaptiveAvgPool2d(1)))
    x = torch.randn(1, 8, 40, 40)
    with torch.no_grad(), Live() as live:
        model(x)
    assert live.peak >= 2 * 32 * 40 * 40 * 4
    convselect.freeze(model, x)
    (row,) = convselect.summary(model).inputs
    assert 0 <= row.intermediates_bytes <= live.peak
    # Native and oneDNN make new memory for their results.
    assert row.intermediates_bytes or not {"direct", "winograd2"} & set(row.chosen.values())
    assert row.weights_bytes >= sum(p.numel() * 4 for p in model.parameters() if p.dim() == 4)
    assert "MiB between layers" in str(convselect.summary(model))
