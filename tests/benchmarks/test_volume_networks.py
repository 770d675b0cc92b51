"""`benchmarks.volume_networks`: its own networks are built; sides are compared before they are timed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import convselect
from benchmarks import volume_networks
from convselect.base.problem import Direction


def small():
    layers = [nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 8, 2, 2)]
    return nn.Sequential(*layers, nn.ConvTranspose3d(8, 2, 2, 2)), torch.randn(1, 1, 6, 8, 8)


@pytest.fixture
def only_small(monkeypatch):
    monkeypatch.setattr(volume_networks, "NETWORKS", {"small": small})
    yield
    convselect.clear()


@pytest.mark.parametrize("mode", volume_networks.MODES)
def test_sides_are_compared_and_timed(mode, only_small):
    found = volume_networks.measure("small", mode, rounds=1, seconds=5, layout="contiguous")
    assert set(found["over_eager"]) == set(volume_networks.SIDES)
    assert not found["missing"]
    assert 0 < max(found["error"].values()) < 1e-4
    shown = volume_networks.table([found], mode)
    assert shown.row_count == 2  # with the mean


def test_what_is_wrong_has_no_time(only_small, monkeypatch):
    def spoil(model, policy):
        with torch.no_grad():
            next(model.parameters()).mul_(2)

    monkeypatch.setattr(convselect, "convert", spoil)
    found = volume_networks.measure("small", "inference", rounds=1, seconds=5, layout="contiguous")
    assert set(found["over_eager"]) == {"eager"}
    assert set(found["missing"]) == {"auto", "converted"}


def test_layers_are_counted_with_their_directions(only_small):
    model, x = small()
    found = dict(volume_networks.layers(model, x, [Direction.FORWARD]))
    assert [p.direction for p in found] == [Direction.FORWARD, Direction.FORWARD, Direction.BACKWARD_DATA]
    assert set(found.values()) == {1}
    assert sum(dict(volume_networks.layers(model, x, list(Direction))).values()) == 9


@pytest.mark.slow
def test_the_video_networks_are_those_of_the_paper():
    """Their numbers of parameters: 33.4 and 31.5 million with 400 classes."""
    for name, millions in (("r3d_18", 33.37), ("r2plus1d_18", 31.51)):
        model, x = volume_networks.NETWORKS[name]()
        assert x.dim() == 5
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
