"""`benchmarks.small_networks`: its networks compute, and its command prints their ratios."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import small_networks


@pytest.mark.parametrize("name", [name for name in small_networks.NETWORKS if not name.startswith("Mobile")])
def test_networks_have_an_output_and_a_gradient(name):
    make, shape = small_networks.NETWORKS[name]
    model, x = make(), torch.randn(2, *shape)
    loss = small_networks.step(model, x)()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())
    assert small_networks.inference(model, x)().shape[0] == 2


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(small_networks, "restart", lambda isa: None)
    monkeypatch.setattr(small_networks, "SETTLE", 2)
    monkeypatch.setattr(sys, "argv", ["small_networks", "--rounds", "2", "--networks", "squeeze"])
    threads = torch.get_num_threads()
    try:
        small_networks.main()
    finally:
        torch.set_num_threads(threads)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("inference") == out.count("training step") == 2
    assert "geometric mean" in out
