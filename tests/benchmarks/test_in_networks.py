"""`benchmarks.in_networks`: layers by native and by the model's first choice, in a network that computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_model import FakePredictor
from torch import Tensor, nn

from benchmarks import in_networks
from convselect.base.problem import Direction
from convselect.measure.rows import NATIVE, Row
from convselect.model import loaded, margins
from convselect.model.dataset import read_measurements


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers), torch.randn(1, 3, 12, 12)


@pytest.fixture
def favourite(monkeypatch):
    monkeypatch.setattr(loaded, "get_for", lambda problem: FakePredictor("im2col_gemm"))


def measured(batch: int, backward: bool) -> list[Row]:
    return in_networks.measure(f"{__name__}:network", batch, backward, 4, 0.0)


@pytest.mark.parametrize("backward", [False, True])
def test_a_watched_network_computes_what_it_did(backward, favourite):
    (model, x), (watched, _) = network(), network()
    calls = in_networks.Calls()
    in_networks.watch(watched, calls)
    for calls.native in (True, False):
        wanted, got = model(x), watched(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        if backward:
            for one, y in ((model, wanted), (watched, got)):
                one.zero_grad()
                y.square().sum().backward()
            for want, have in zip(model.parameters(), watched.parameters(), strict=True):
                torch.testing.assert_close(have.grad, want.grad, rtol=1e-3, atol=1e-4)
    ran = {name for of in calls.us.values() for name in of}
    assert ran == {NATIVE, "im2col_gemm"}
    assert {p.direction for p in calls.us} == (set(Direction) if backward else {Direction.FORWARD})


def test_rows_hold_both_in_all_directions_and_are_added_to_a_file(favourite, tmp_path: Path):
    rows = measured(1, False)
    assert {row.algorithm for row in rows} == {NATIVE, "im2col_gemm"}
    assert all(row.rounds >= 4 and row.min_us <= row.median_us for row in rows)
    path = tmp_path / "in.csv.gz"
    in_networks.written(path, rows, {})
    in_networks.written(path, measured(2, True), {})
    in_networks.written(path, measured(1, False), {})  # in place of the first
    kept, machine = read_measurements([path])
    found = margins.from_rows(kept)
    assert len(found) == len({(one.problem, one.algorithm) for one in found}) == len(kept) // 2
    assert {(one.problem.N, one.problem.direction) for one in found} >= {
        (1, Direction.FORWARD),
        *((2, d) for d in Direction),
    }
    assert margins.read([path], machine["family"]) == found
    assert in_networks.summary(kept).row_count >= 3
