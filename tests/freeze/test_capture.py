"""Forwards that can be traced only in part, or not at all."""

from __future__ import annotations

import pytest
import torch
from networks import CONV, Flagged, distance, eager, frozen_outputs, randomised, unfrozen, use_forced
from torch import nn

import convselect


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(4, 4, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x)


class CountsInBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.conv(x)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x) + torch.rand(1)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x, mask=None, scale=2.0):
        y = self.conv(x) * scale
        return y if mask is None else y * mask


@use_forced
def test_data_dependent_control_flow():
    model = randomised(Flagged())
    report = convselect.summary(convselect.freeze(model))
    assert set(report.frozen) == {"a", "b"}
    assert "not traced" in report.not_fused[""]
    for x in (torch.rand(1, 8, 6, 6), -torch.rand(1, 8, 6, 6)):
        model(x)
        assert distance(model(x), eager(model, x)) < CONV
    with pytest.raises(RuntimeError, match="unfreeze"):
        model.train()
    assert unfrozen(model) == 2


@pytest.mark.parametrize("kind", [Counts, CountsInBuffer, Noise])
def test_side_effects_keep_happening(kind):
    model = randomised(kind())
    x = torch.randn(1, 4, 5, 5)
    report = convselect.summary(convselect.freeze(model))
    assert report.frozen == ("conv",)
    assert "" in report.not_fused
    before = int(getattr(model, "calls", 0))
    outputs = [model(x) for _ in range(4)]
    if kind is Noise:
        assert not torch.equal(outputs[2], outputs[3])
    else:
        assert int(model.calls) - before == 4


@use_forced
def test_optional_arguments():
    model = randomised(Optional())
    x, mask = torch.randn(1, 4, 5, 5), torch.rand(1, 1, 5, 5)
    convselect.freeze(model, x)
    with torch.no_grad():
        for args, kwargs in (((x,), {}), ((x, mask), {}), ((), {"x": x}), ((x,), {"mask": mask, "scale": 3.0})):
            want = Optional.forward(model, *args, **kwargs)
            for _ in range(2):
                assert distance(model(*args, **kwargs), want) < CONV
    with pytest.raises(TypeError):
        model()


def test_models_without_convolutions():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    report = convselect.summary(convselect.freeze(model, torch.randn(1, 4)))
    assert report.frozen == ()
    model.train()
    assert unfrozen(model) == 0


@use_forced
def test_a_lone_convolution():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3)))[0]
    x = torch.randn(1, 3, 8, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.frozen == ("",)
    assert distance(model(x[0]), eager(model, x[0])) < CONV  # no batch dimension


def test_reasons_for_convolutions_left_alone():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), convselect.SelectedConv2d(4, 4, 1, policy="native"),
    ).eval()  # fmt: skip
    x = torch.randn(1, 4, 6, 6)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert {name: why.split()[0] for name, why in report.not_fused.items()} == {
        "1": "a", "2": "padding", "3": "ParametrizedConv2d", "4": "its",
    }  # fmt: skip
    text = str(report)
    assert "1 layers frozen in 1 parts" in text
    assert "transposed" in text
