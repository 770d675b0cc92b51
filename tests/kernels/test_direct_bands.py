"""The direct C kernel with more than one tap: slabs of inputs, bands of rows, layouts of x and y."""

from __future__ import annotations

import itertools

import pytest
import torch
from pairs import pairwise
from problems import random_operands, relative_error
from tolerances import tolerance
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels.direct import Direct, forward_packed, pack
from convselect.kernels.reference import Reference

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

DIRECT, REFERENCE = Direct(), Reference()
LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
LAYOUTS = ("contiguous", "channels_last")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

CASES = {
    "stride leaves gaps": conv_problem(2, 5, 23, 37, 9, 2, 3, stride=(5, 7)),
    "stride leaves gaps, padded": conv_problem(1, 12, 20, 41, 20, 3, 2, padding=2, stride=(4, 5)),
    "rows of taps outside": conv_problem(2, 16, 9, 10, 24, 3, 3, padding=4, dilation=4),
    "only the middle tap": conv_problem(1, 8, 5, 5, 20, 3, 3, padding=7, dilation=7),
    "outputs that meet padding only": conv_problem(1, 6, 3, 3, 10, 2, 2, padding=5),
    "stem": conv_problem(1, 3, 33, 70, 17, 3, 3, padding=1, stride=2),
    "stem of 4 channels": conv_problem(1, 4, 20, 21, 16, 5, 5, padding=2),
    "patch": conv_problem(2, 3, 32, 48, 33, 4, 4, stride=4),
    "rows less than 8": conv_problem(3, 20, 7, 5, 20, 3, 3, padding=1),
    "pixels a power of two apart": conv_problem(1, 512, 6, 6, 20, 3, 3, padding=1, stride=2),
    "patch, a power of two apart": conv_problem(1, 512, 4, 4, 20, 2, 2, stride=2),
    "several bands": conv_problem(2, 64, 33, 32, 20, 3, 3, padding=1),
    "part of a long row": conv_problem(2, 40, 1, 1500, 20, 1, 5, padding=(0, 2)),
    "part of a long row, strided": conv_problem(1, 64, 4, 2100, 17, 3, 3, padding=1, stride=(1, 2)),
    "several images in a band": conv_problem(5, 24, 7, 7, 40, 3, 3, padding=1),
    "groups": conv_problem(2, 40, 11, 9, 48, 3, 3, padding=1, groups=2),
    "patch, groups": conv_problem(1, 40, 9, 8, 48, 2, 2, stride=2, groups=2),
}


def operands(p: ConvProblem) -> tuple[Tensor, Tensor]:
    x, weight, _ = random_operands(p)
    return x, weight


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_layouts_of_x_and_y_give_the_same_bits(name, level, nan_memory):
    p = CASES[name]
    x, weight = operands(p)
    bias, residual = torch.randn(p.K), torch.randn(p.y_shape)
    y = REFERENCE.run(x.double(), weight.double(), p._replace(dtype="float64"))
    want = (y + bias.double()[:, None, None] + residual.double()).relu()
    first = None
    for x_layout, y_layout in itertools.product(LAYOUTS, LAYOUTS):
        q = p._replace(layout=x_layout)
        got = forward_packed(x, pack(weight, q, level), q, bias, residual, "relu", level, y_layout=y_layout)
        assert got.is_contiguous(memory_format=FORMATS[y_layout])
        assert relative_error(got, want) <= tolerance(DIRECT, q), f"{x_layout} to {y_layout}"
        first = got if first is None else first
        assert torch.equal(got, first), f"{x_layout} to {y_layout}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_between_layouts(dtype, nan_memory):
    for p in (CASES["stem"], CASES["several images in a band"], CASES["groups"]):
        p = p._replace(dtype=dtype)
        x, weight = operands(p)
        want = REFERENCE.run(x.double(), weight.double(), p._replace(dtype="float64"))
        for x_layout, y_layout in itertools.product(LAYOUTS, LAYOUTS):
            q = p._replace(layout=x_layout)
            got = forward_packed(x, pack(weight, q), q, y_layout=y_layout)
            assert relative_error(got, want) <= tolerance(DIRECT, q), f"{p} {x_layout} to {y_layout}"


def test_data_gradients_of_every_case(nan_memory):
    for (name, listed), layout in itertools.product(CASES.items(), LAYOUTS):
        p = listed._replace(direction=Direction.BACKWARD_DATA)
        _, weight, grad_y = random_operands(p)
        want = REFERENCE.run(grad_y.double(), weight.double(), p._replace(dtype="float64"))
        grad_y = grad_y.contiguous(memory_format=FORMATS[layout])
        got = _library.call("cs_direct", grad_y, weight, p._replace(layout=layout))
        assert relative_error(got, want) <= tolerance(DIRECT, p), f"{name} {layout}"


# Grad-inputs with a stride, whose classes of outputs are computed together in NCHW. They have as many taps in each
# class, one more in some, none in some; rows and columns of the last block that there are not; too many classes.
STRIDED = {
    "as many taps": conv_problem(2, 20, 12, 18, 36, 4, 4, padding=1, stride=2),
    "one more in some": conv_problem(1, 40, 15, 18, 20, 5, 3, padding=(2, 1), stride=2),
    "none in some": conv_problem(2, 17, 14, 16, 24, 2, 2, stride=3),
    "none in a row of classes": conv_problem(1, 9, 13, 14, 20, 1, 3, stride=(3, 2)),
    "one tap each": conv_problem(2, 36, 6, 10, 50, 2, 2, stride=2),
    "columns only": conv_problem(3, 20, 1, 100, 33, 1, 16, padding=(0, 4), stride=(1, 8)),
    "rows only": conv_problem(1, 20, 70, 5, 33, 8, 1, padding=(2, 0), stride=(4, 1)),
    "a rest below and beside": conv_problem(1, 20, 23, 27, 24, 4, 4, padding=1, stride=4),
    "dilated": conv_problem(1, 20, 19, 22, 24, 3, 4, padding=3, stride=(2, 3), dilation=(2, 3)),
    "groups": conv_problem(2, 40, 10, 12, 48, 4, 4, padding=1, stride=2, groups=2),
    "many columns": conv_problem(1, 20, 2, 2400, 24, 2, 4, padding=(0, 1), stride=2),
    "more classes than are joined": conv_problem(1, 20, 4, 40, 24, 2, 17, stride=(2, 17)),
    "a kernel of many taps": conv_problem(1, 9, 20, 24, 16, 12, 12, stride=4),
    "one image is less than a block": conv_problem(3, 20, 1, 3, 24, 4, 4, padding=(2, 1), stride=4),
}


@pairwise(
    {"level": LEVELS, "name": list(STRIDED), "layout": LAYOUTS, "weight_layout": LAYOUTS,
     "dtype": ["float32", "float32", "bfloat16"]}
)  # fmt: skip
def test_classes_of_a_data_gradient(level, name, layout, weight_layout, dtype, nan_memory):
    p = STRIDED[name]._replace(direction=Direction.BACKWARD_DATA, dtype=dtype, layout=layout)
    _, weight, grad_y = random_operands(p)
    want = REFERENCE.run(grad_y.double(), weight.double(), p._replace(dtype="float64"))
    grad_y, weight = (t.contiguous(memory_format=FORMATS[f]) for t, f in ((grad_y, layout), (weight, weight_layout)))
    got = _library.call("cs_direct", grad_y, weight, p._replace(weight_layout=weight_layout), isa_level=level)
    assert relative_error(got, want) <= tolerance(DIRECT, p)


def test_classes_have_the_same_bits_in_both_layouts_and_with_several_threads():
    """In NHWC each class is a call of its own."""
    for name, p in STRIDED.items():
        p = p._replace(direction=Direction.BACKWARD_DATA)
        _, weight, grad_y = random_operands(p)
        results = []
        for layout, threads in (("channels_last", 1), ("contiguous", 1), ("contiguous", 2), ("contiguous", 3)):
            torch.set_num_threads(threads)
            a = grad_y.contiguous(memory_format=FORMATS[layout])
            results.append(_library.call("cs_direct", a, weight, p._replace(layout=layout, threads=threads)))
        assert all(torch.equal(results[0], other) for other in results), name


def test_one_packed_weight_serves_both_layouts():
    p = CASES["several bands"]
    _, weight = operands(p)
    packed = [pack(weight, p._replace(layout=layout)) for layout in LAYOUTS]
    assert torch.equal(*packed)


def test_a_1x1_kernel_has_one_layout():
    p = conv_problem(1, 16, 4, 4, 16, 1, 1)
    x, weight = operands(p)
    with pytest.raises(ValueError, match="layout of x"):
        forward_packed(x, pack(weight, p), p, y_layout="channels_last")
