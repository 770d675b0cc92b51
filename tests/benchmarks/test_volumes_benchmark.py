"""`benchmarks.volumes` times what is right, with conv2d beside it where an image computes a layer."""

from __future__ import annotations

import torch

from benchmarks import volumes
from convselect.base.problem import Direction
from convselect.base.volumes import volume_problem
from convselect.kernels.pool import BY_NAME

SMALL = volume_problem(1, 4, 3, 6, 7, 3, 3, 3, 3, padding=1)
ALONG = volume_problem(1, 4, 5, 6, 7, 3, 3, 1, 1, padding=(1, 0, 0))


def test_every_side_computes_the_layer():
    for layer, as_image in ((SMALL, False), (ALONG, True)):
        for direction in Direction:
            native_us, found = volumes.gains(layer._replace(direction=direction), 2)
            assert native_us > 0
            a, b = volumes.measure.operands(layer._replace(direction=direction))
            assert (volumes.CONV2D in volumes.sides(layer._replace(direction=direction), a, b)) == as_image
            assert all(gain > 0 for gain in found.values())


def test_what_is_wrong_is_named_and_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(type(BY_NAME["im2col_gemm"]), "run", lambda *_: torch.zeros(SMALL.y_shape))
    _, found = volumes.gains(SMALL, 1)
    assert "im2col_gemm" not in found
    assert "im2col_gemm is wrong" in capsys.readouterr().out


def test_lines_name_layer_and_direction(monkeypatch, capsys):
    monkeypatch.setattr(volumes, "LAYERS", {"small": SMALL, "along": ALONG})
    volumes.main(["--rounds", "1", "--layers", "small"])
    printed = capsys.readouterr().out
    assert printed.count("small") == 3
    assert "along" not in printed
