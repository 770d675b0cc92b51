"""Banded products for large depthwise filters, interpreted: geometry, layouts, directions, shipped configurations."""

from __future__ import annotations

import math
import re

import pytest
from checking import check
from problems import LAYOUTS

from convselect.base.problem import Direction, conv_problem
from convselect.kernels.triton import large_depthwise_plan
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.large_depthwise import LargeDepthwiseTriton

ALGORITHM = LargeDepthwiseTriton()
DIRECTIONS = tuple(Direction)


def depthwise(N, C, H, W, R, S, padding, dtype="float16", **rest):
    return conv_problem(N, C, H, W, C, R, S, padding=padding, groups=C, dtype=dtype, **rest)


# The interpreter's time goes by programs: one per channel.
FEW_PROGRAMS = {Direction.BACKWARD_WEIGHT: {"K_BYTES": 256, "PROGRAMS": 1, "num_warps": 4, "num_stages": 3}}

CASES = {
    "filter as large as the image": depthwise(2, 2, 9, 10, 9, 9, 4),
    "filter larger than the image": depthwise(3, 2, 10, 9, 27, 27, 13),
    "width of whole vectors": depthwise(2, 2, 7, 24, 9, 9, 4),
    "several tiles of columns": depthwise(1, 2, 5, 70, 3, 11, (1, 5)),
    "no padding": depthwise(2, 3, 9, 12, 7, 7, 0),
    "uneven padding, even filter": depthwise(1, 3, 11, 13, 8, 10, (2, 5, 0, 7)),
    "same, even filter": depthwise(1, 2, 12, 11, 8, 8, "same"),
    "padding beyond the filter": depthwise(1, 2, 6, 7, 7, 7, 9),
    "one pixel": depthwise(2, 3, 1, 1, 7, 7, 3),
    "one row": depthwise(2, 2, 1, 21, 7, 9, (3, 4)),
    "one column": depthwise(2, 2, 21, 1, 9, 7, (4, 3)),
    "tall": depthwise(2, 2, 9, 7, 51, 5, (25, 2)),
    "tall, odd, no padding": depthwise(1, 3, 19, 7, 15, 2, 0),
    "wide": depthwise(2, 2, 6, 9, 5, 51, (2, 25)),
    "one row of taps": depthwise(1, 2, 5, 20, 1, 9, (0, 4)),
    "one column of taps": depthwise(1, 2, 20, 5, 9, 1, (4, 0)),
    "images in whole vectors": depthwise(8, 2, 8, 8, 7, 7, 3),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES)
def test_geometry(case, direction):
    check(ALGORITHM, CASES[case].with_direction(direction), params=FEW_PROGRAMS.get(direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tf32", [False, True])
def test_float32(direction, tf32):
    check(ALGORITHM, depthwise(2, 2, 11, 13, 9, 11, (4, 5), "float32", tf32=tf32).with_direction(direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, direction):
    p = depthwise(2, 3, 4, 5, 7, 7, 3).with_direction(direction)
    check(ALGORITHM, p, layout, params=FEW_PROGRAMS.get(direction))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", ["tall", "uneven padding, even filter", "one pixel"])
def test_channels_last(case, direction):
    check(ALGORITHM, CASES[case].with_direction(direction), "channels_last", params=FEW_PROGRAMS.get(direction))


@pytest.mark.parametrize("weight_layout", ["channels_last", "transposed", "expanded", "offset"])
def test_weight_layouts(weight_layout):
    check(ALGORITHM, depthwise(1, 3, 9, 10, 7, 7, 3), weight_layout=weight_layout)


def configurations():
    seen = []
    for arch in (80, 90):
        with launcher.assumed_arch(arch):
            for kernel in ("banded", "banded_gradient", "correlate"):
                seen += [
                    (kernel, c) for c in launcher.configurations(ALGORITHM.name, kernel) if (kernel, c) not in seen
                ]
    return seen


@pytest.mark.parametrize(("kernel", "config"), configurations(), ids=str)
def test_every_configuration(kernel, config):
    if kernel == "banded":
        # More than one tile of patches, and of columns.
        rows = config["BM"] * config["BP"] // 2
        check(ALGORITHM, depthwise(3, 2, rows, 5, 7, 7, (3, 2)), params=config)
        columns = config["BQ"] + 3
        back = depthwise(2, 2, 6, columns, 7, 9, (3, 4), "float32").with_direction(Direction.BACKWARD_DATA)
        check(ALGORITHM, back, params=config)
    elif kernel == "banded_gradient":
        weight = depthwise(3, 2, 21, 19, 9, 11, (4, 5)).with_direction(Direction.BACKWARD_WEIGHT)
        check(ALGORITHM, weight, params=config)
        check(ALGORITHM, weight._replace(N=1, H=7, dtype="float32"), params=config)
    else:
        # Several parts: of the columns alone, and of both ranges of the sum.
        weight = depthwise(3, 2, 21, 9, 9, 11, (4, 5)).with_direction(Direction.BACKWARD_WEIGHT)
        check(ALGORITHM, weight, params={**config, "PROGRAMS": 8})
        check(ALGORITHM, weight._replace(H=41, W=3), params={**config, "PROGRAMS": 24})


def test_offsets_of_64_bits(monkeypatch):
    large_depthwise_plan.planned.cache_clear()
    monkeypatch.setattr(large_depthwise_plan, "_wide", lambda *elements: True)
    for direction in DIRECTIONS:
        check(ALGORITHM, depthwise(2, 2, 3, 4, 7, 7, 3).with_direction(direction), "channels_last")
    large_depthwise_plan.planned.cache_clear()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_workspace_is_a_bound(direction):
    problem = depthwise(2, 3, 13, 14, 27, 9, (13, 4), device="cuda").with_direction(direction)
    for config in ALGORITHM.configs(problem):
        steps = ALGORITHM._steps(problem, config)
        elements = [step.dtype.itemsize * math.prod(step.shape) for step in steps if step.shape]
        assert sum(elements) < ALGORITHM.workspace_bytes(problem)


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (conv_problem(1, 4, 20, 20, 4, 9, 9), "not a depthwise"),
        (conv_problem(1, 4, 20, 20, 8, 9, 9, groups=4), "one output channel"),
        (conv_problem(1, 4, 20, 20, 4, 9, 9, groups=4, stride=2), "stride 1"),
        (conv_problem(1, 4, 20, 20, 4, 9, 9, groups=4, dilation=2), "dilation 1"),
        (depthwise(1, 4, 20, 20, 5, 5, 2), "longer side"),
        (depthwise(1, 4, 80, 80, 5, 65, 2), "longer side"),
        (depthwise(1, 4, 20, 20, 9, 9, 4, "float64"), "float32"),
        (depthwise(2**12, 2, 2**10, 2**10, 9, 9, 4), "2\\*\\*31"),
    ],
)
def test_why_not(problem, word):
    assert re.search(word, ALGORITHM.why_not(problem) or "")


def test_the_window_stays_in_the_image():
    """With 27x27 taps on 14x14 pixels, 16 columns instead of 48."""
    problem = depthwise(32, 512, 14, 14, 27, 27, 13, device="cuda")
    launch = ALGORITHM.launches(problem)[-1]
    assert launch.kernel == "banded"
    assert dict(launch.constants)["COLUMNS"] == 16


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_banded_weight_gradient(case, layout):
    problem = CASES[case].with_direction(Direction.BACKWARD_WEIGHT)
    config = {"BM": 128, "BP": 4, "BQ": 16, "K_BYTES": 128, "num_warps": 8, "num_stages": 3}
    check(ALGORITHM, problem, layout, params=config)
