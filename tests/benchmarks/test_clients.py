"""Networks of 1-D and transposed convolutions: each is built, and hands its name on to the command that measures."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from benchmarks import _timm_tables, clients, timm_networks

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


def test_the_table_of_the_pages():
    def result(name, converted, frozen):
        over = {"converted": [converted, 0, 9], "frozen": [frozen, 0, 9]}
        return {"network": f"benchmarks.clients:{name}", "over_eager": over, "error": {"eager": 1e-7, "frozen": 4e-6}}

    *_, a, b, mean = _timm_tables.clients_table(
        {"results": [result("a", 1.0, 2.0), result("b", 4.0, 8.0)]}
    ).splitlines()
    assert a == "| a | 1.00 | 2.00 | 1.0e-07 / 4.0e-06 |"
    assert b == "| b | 4.00 | 8.00 | 1.0e-07 / 4.0e-06 |"
    assert mean.startswith("| geometric mean | 2.00 | 4.00 |")
