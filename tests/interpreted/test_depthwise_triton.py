"""depthwise_triton against float64, in Triton's interpreter: tiny images, few channels, each with its reason."""

from __future__ import annotations

import checking
import pytest
import torch
from checking import check
from pairs import pairwise
from problems import random_operands
from tolerances import tolerance

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.kernels._contract import NotApplicable
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference
from convselect.kernels.triton import depthwise as triton_depthwise
from convselect.kernels.triton.launch import configurations

ALGORITHM = BY_NAME["depthwise_triton"]


def depthwise(N: int, C: int, H: int, W: int, R: int, S: int, multiplier: int = 1, **rest: object) -> ConvProblem:
    return conv_problem(N, C, H, W, C * multiplier, R, S, groups=C, **rest)


CASES = {
    "3x3, whole vectors of channels": depthwise(1, 8, 5, 9, 3, 3, padding=1),
    "5x5, odd channels": depthwise(1, 3, 6, 7, 5, 5, padding=2),
    "7x7": depthwise(1, 2, 8, 7, 7, 7, padding=3),
    "no padding": depthwise(2, 3, 5, 6, 3, 3),
    "uneven padding": depthwise(2, 2, 5, 4, 3, 3, padding=(2, 0, 1, 3)),
    "wide padding": depthwise(1, 3, 3, 4, 3, 3, padding=4),
    "stride 2 with a rest": depthwise(2, 2, 8, 9, 3, 3, stride=2),
    "stride 2, 5x5": depthwise(1, 2, 9, 8, 5, 5, stride=2, padding=2),
    "stride (3, 2), dilated": depthwise(1, 2, 11, 8, 3, 3, stride=(3, 2), padding=(2, 1), dilation=(2, 3)),
    "stride and dilation 2: outputs that nothing reaches": depthwise(1, 2, 9, 9, 3, 2, stride=2, dilation=2, padding=1),
    "stride over the kernel": depthwise(1, 2, 7, 8, 2, 1, stride=3),
    "dilation 2": depthwise(1, 2, 7, 8, 3, 3, padding=2, dilation=2),
    "even kernel": depthwise(1, 3, 5, 6, 4, 2, padding="same"),
    "multiplier 3": depthwise(1, 2, 5, 6, 3, 3, 3, padding=1),
    "multiplier 2, stride 2": depthwise(1, 3, 6, 7, 3, 3, 2, padding=1, stride=2),
    "one pixel": depthwise(3, 4, 1, 1, 3, 3, padding=1),
    "one row": depthwise(2, 2, 1, 19, 1, 4, padding=(0, 1)),
    "largest kernel": depthwise(1, 2, 11, 3, 11, 1),
}
SMALL = depthwise(2, 4, 6, 9, 3, 3, padding=1)
LAYOUTS = ("contiguous", "channels_last")


@pairwise({"name": list(CASES), "direction": list(Direction), "layout": LAYOUTS})
def test_awkward_sizes(name, direction, layout):
    check(ALGORITHM, CASES[name].with_direction(direction), layout)


KERNELS = {"gather_nhwc": (Direction.FORWARD, 1), "gather_nchw": (Direction.FORWARD, 0),
           "weight_nhwc": (Direction.BACKWARD_WEIGHT, 1), "weight_nchw": (Direction.BACKWARD_WEIGHT, 0)}  # fmt: skip


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_configuration(kernel, index):
    shipped = configurations("depthwise_triton", kernel)
    if index >= len(shipped):
        pytest.skip("there are fewer configurations")
    direction, layout = KERNELS[kernel]
    problem = depthwise(1, 8, 7, 10, 3, 3, padding=1) if layout else depthwise(1, 2, 9, 7, 3, 3, padding=1)
    check(ALGORITHM, problem.with_direction(direction), LAYOUTS[layout], params=shipped[index])


@pairwise({"dtype": ["float16", "bfloat16", "float64"], "direction": list(Direction), "layout": LAYOUTS})
def test_types(dtype, direction, layout, monkeypatch):
    if dtype == "bfloat16":  # the interpreter cuts off what a GPU rounds, which is twice the error
        monkeypatch.setattr(checking, "tolerance", lambda *of: 2 * tolerance(*of))
    check(ALGORITHM, SMALL._replace(dtype=dtype, direction=direction), layout)


@pytest.mark.parametrize("layout", ["expanded", "channel_slice", "offset", "transposed"])
@pytest.mark.parametrize("direction", Direction)
def test_operands_lie_anyhow(direction, layout):
    check(ALGORITHM, SMALL.with_direction(direction), layout, layout if layout != "expanded" else "contiguous")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", Direction)
def test_offsets_of_64_bits(direction, layout, monkeypatch):
    monkeypatch.setattr(triton_depthwise, "SPLIT_ELEMENTS", 1)
    check(ALGORITHM, SMALL.with_direction(direction), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_parts(layout, monkeypatch):
    """The sum over parts has a rest, and a part of the last block of outputs is empty."""
    monkeypatch.setattr(triton_depthwise, "_FEWEST_STEPS", 1)
    problem = depthwise(5, 2, 7, 7, 3, 3, padding=1, direction=Direction.BACKWARD_WEIGHT)
    check(ALGORITHM, problem, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", Direction)
def test_an_infinity_stays_within_its_window(direction, layout):
    """Tiles reach over the edge of the outputs; a zero gradient there must not meet an infinity."""
    problem = depthwise(1, 2, 6, 5, 3, 3, direction=direction, layout=layout)
    x, weight, grad_y = (t.contiguous(memory_format=getattr(torch, f"{layout}_format", torch.channels_last))
                         for t in random_operands(problem))  # fmt: skip
    if direction == Direction.BACKWARD_DATA:
        grad_y[0, 1, 2, 2] = torch.inf
    else:
        x[0, 0, 5, 4] = torch.inf
        x[0, 1, 0, 0] = -torch.inf
    operands = {"forward": (x, weight), "backward_data": (grad_y, weight), "backward_weight": (x, grad_y)}[direction]
    got = ALGORITHM.run(*operands, problem)
    want = Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))
    assert torch.equal(got.isfinite(), want.isfinite())


def test_the_result_has_the_layout_of_the_image():
    x, weight, _ = random_operands(SMALL, "channels_last")
    y = ALGORITHM.forward(x, weight, SMALL._replace(layout="channels_last"))
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_same_twice():
    problem = SMALL.with_direction(Direction.BACKWARD_WEIGHT)
    x, _, grad_y = random_operands(problem)
    first, second = (ALGORITHM.backward_weight(x, grad_y, problem) for _ in range(2))
    assert torch.equal(first, second)


def test_an_explicit_request_that_cannot_be():
    import convselect

    with convselect.use(policy="depthwise_triton"), pytest.raises(NotApplicable, match="one input channel per group"):
        convselect.conv2d(torch.ones(1, 4, 5, 5), torch.ones(2, 4, 3, 3))
