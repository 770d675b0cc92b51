"""Networks of 1-D and transposed convolutions: each is built, and hands its name on to the command that measures."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from benchmarks import clients, timm_networks

WRITTEN_OUT = ("tcn", "dcgan", "unet")


@pytest.mark.parametrize("name", clients.NETWORKS)
def test_networks_are_built(name):
    if name not in WRITTEN_OUT and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    model, x = clients.NETWORKS[name]()
    kinds = (nn.Conv1d, nn.ConvTranspose1d, nn.ConvTranspose2d)
    assert any(isinstance(module, kinds) for module in model.modules())
    assert torch.isfinite(x).all()


def test_a_tensor_of_a_network_is_its_result():
    model, x = clients.tcn()
    y = model(x[..., :40])
    assert isinstance(y, Tensor)
    assert y.shape == (1, 10, 40)


def test_the_command_names_them_for_the_other_one(monkeypatch):
    given = []
    monkeypatch.setattr(timm_networks, "main", lambda arguments: given.append(arguments) or 0)
    assert clients.main(["--networks", "tcn", "unet", "--rounds", "3"]) == 0
    assert given == [["--models", "benchmarks.clients:tcn", "benchmarks.clients:unet", "--rounds", "3"]]
    with pytest.raises(SystemExit):
        clients.main(["--networks", "resnet50"])
