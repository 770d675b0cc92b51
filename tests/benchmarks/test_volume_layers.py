"""`benchmarks.volumes` measures what it says, and nothing that is wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks import volumes
from convselect.base.problem import Direction
from convselect.base.volumes import volume_problem
from convselect.kernels.pool import BY_NAME

SMALL = volume_problem(1, 2, 3, 6, 7, 3, 3, 3, 3, padding=1)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_every_algorithm_that_takes_a_layer_has_a_ratio(direction):
    p = SMALL._replace(direction=direction)
    native_ms, ratios = volumes.measured(p, 2, [BY_NAME["direct"], BY_NAME["depthwise"], BY_NAME["im2col_gemm"]])
    assert native_ms > 0
    assert "depthwise" not in ratios
    assert all(ratio > 0 for ratio in ratios.values())


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(type(BY_NAME["im2col_gemm"]), "why_not", lambda *_: None)
    monkeypatch.setattr(type(BY_NAME["im2col_gemm"]), "run", lambda *_: torch.zeros(SMALL.y_shape))
    with pytest.raises(AssertionError, match="im2col_gemm"):
        volumes.measured(SMALL, 1, [BY_NAME["im2col_gemm"]])


def test_the_table_has_a_row_for_each_direction(monkeypatch, capsys):
    monkeypatch.setattr(volumes, "LAYERS", {"small": SMALL})
    volumes.main(["--rounds", "1", "--layers", "small"])
    printed = capsys.readouterr().out
    assert printed.count(SMALL.brief) == 3
    for direction in Direction:
        assert direction in printed
