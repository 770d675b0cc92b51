"""Networks that multiply rounding get smaller tiles; others keep theirs."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import distance, randomised
from torch import nn

import convselect
from convselect.freeze import accuracy, candidates, plan, residual
from convselect.freeze import layer as freeze_layer
from convselect.kernels import _library
from convselect.store import process

pytestmark = pytest.mark.skipif(not _library.available(), reason="Winograd in C")


class Amplifying(nn.Module):
    """Convolutions whose results nearly cancel: what they round is multiplied by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.factor = factor

    def forward(self, x):
        return self.second(x + (self.first(x).tanh() - x.tanh()) * self.factor)


@pytest.fixture
def only_large_tiles(monkeypatch):
    """The largest tile that is allowed always wins."""

    def fastest(functions, *_):
        return max(functions, key=lambda name: (name.startswith("winograd"), name))

    monkeypatch.setattr(freeze_layer, "fastest", fastest)
    monkeypatch.setattr(accuracy, "_MOST", 2.0)


def frozen_error(model, x):
    want = copy.deepcopy(model).double()(x.double())
    ordinary = distance(model(x), want.float())
    convselect.freeze(model, x)
    with torch.inference_mode():
        return distance(model(x), want.float()), ordinary


def test_tiles_shrink_until_the_result_is_near_enough(only_large_tiles, monkeypatch):
    model, x = randomised(Amplifying(30.0)), torch.randn(1, 16, 32, 32)
    rows = []
    monkeypatch.setattr(
        accuracy.Limits, "admit", lambda self, d, chosen, layout, real=accuracy.Limits.admit: rows.append(max(chosen))
        or real(self, d, chosen, layout),
    )  # fmt: skip
    with torch.inference_mode():
        error, ordinary = frozen_error(model, x)
    assert rows[0] == 7
    assert rows[-1] < 7
    assert error < 6 * ordinary


def test_the_outcome_is_remembered(only_large_tiles, monkeypatch, tmp_path):
    process.configure(tmp_path / "store.sqlite")
    model, x = randomised(Amplifying(30.0)), torch.randn(1, 16, 32, 32)
    convselect.freeze(copy.deepcopy(model), x)
    process.flush()
    process.configure(tmp_path / "store.sqlite")

    def refuse(*_, **__):
        raise AssertionError("searched again")

    for module, name in ((freeze_layer, "fastest"), (plan, "timed"), (residual, "fastest"), (candidates, "timed")):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(accuracy.Limits, "_measure", refuse)
    monkeypatch.setattr(freeze_layer.FrozenLayer, "reference", refuse)
    with torch.inference_mode():
        convselect.freeze(model, x)
    assert convselect.summary(model).inputs


def test_what_was_remembered_of_other_weights_is_measured_again(only_large_tiles, monkeypatch, tmp_path):
    process.configure(tmp_path / "store.sqlite")
    model, x = randomised(Amplifying(30.0)), torch.randn(1, 16, 32, 32)
    convselect.freeze(copy.deepcopy(model), x)
    measured = []
    real = accuracy.Limits._measure
    monkeypatch.setattr(accuracy.Limits, "_measure", lambda *a: measured.append(1) or real(*a))
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    convselect.freeze(model, x)
    assert measured


@pytest.mark.parametrize(
    ("largest", "kept"),
    [([7, 7, 4], [7, 7, 4]), ([7] * 300, [7] * 300), ([7, 6] * 100, [6] * 200)],
)
def test_limits_as_text(largest, kept):
    text = accuracy._text([1.5e-6], largest)
    assert text is not None
    assert len(text) <= 200
    assert accuracy._parsed(text, len(largest)) == ([1.5e-6], kept)
    assert accuracy._parsed(text, len(largest) + 1) is None


@pytest.mark.parametrize("text", [None, "", "eager", "1e-6 9x3", "nan 7x3", "1e-6 7x3 7x3", "x 7x3"])
def test_other_texts(text):
    assert accuracy._parsed(text, 3) is None
