"""Memory of frozen networks beside eager's: what is counted, and the command."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from benchmarks import memory


def tiny():
    layers = (nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1))
    return nn.Sequential(*layers), torch.randn(1, 8, 64, 64)


def test_results_count_while_they_are_alive():
    with torch.no_grad(), memory.Live() as live:
        a = torch.zeros(1000)
        b = a + 1
        assert live.peak == 8000
        a.view(10, 100).mul_(2)  # no new memory
        assert live.peak == 8000
        del a
        c = b * 2
        assert live.peak == 8000
        assert c.sum().item() == 2000
        assert live.peak == 8004


def test_the_command(capfd, monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parents[1]))))
    assert memory.main(["--models", f"{__name__}:tiny"]) == 0
    out = capfd.readouterr().out
    assert "frozen over eager" in out
    line = next(line for line in out.splitlines() if "tiny" in line)
    eager, frozen = map(float, line.split()[3:5])
    assert 0 < frozen <= eager
