"""Seven products in place of eight behind frozen 1x1 convolutions: every instruction set, edges, threads, and sizes of
numbers that differ between rows and columns."""

from __future__ import annotations

import itertools

import pytest
import torch
from activations import ACTIVATIONS, SLOPE
from pairs import pairs, pairwise
from problems import random_operands, relative_error
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, conv_problem
from convselect.kernels import _library
from convselect.kernels._product import forward_packed, pack, takes

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
every_level = pytest.mark.parametrize("level", LEVELS)
TOLERANCE = 2.5e-6  # `Grade.DIRECT`
# (N, C, H, W, K, stride). Of a size at which blocks of rows, panels and chunks end in a rest.
SIZES = {
    "7x7": (1, 160, 7, 7, 192, 1),
    "one pixel": (1, 300, 1, 1, 70, 1),
    "two channels": (2, 2, 5, 3, 64, 1),
    "several chunks": (1, 900, 13, 14, 64, 1),
    "many results": (1, 6, 29, 23, 700, 1),
    "stride 2": (2, 20, 12, 15, 72, 2),
    "strides (1, 3)": (2, 18, 6, 8, 136, (1, 3)),
}


def problem_of(name: str) -> ConvProblem:
    N, C, H, W, K, stride = SIZES[name]
    return conv_problem(N, C, H, W, K, 1, 1, stride=stride, layout=CHANNELS_LAST)


def run(x: Tensor, weight: Tensor, p: ConvProblem, level: int, *epilogue: object) -> Tensor:
    packed = pack(weight, p, level, kernel="strassen")
    return forward_packed(x, packed, p, *epilogue, isa_level=level, slope=SLOPE, kernel="strassen")  # type: ignore[arg-type]


def prepared(p: ConvProblem) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the float64 result."""
    x, weight, _ = random_operands(p, CHANNELS_LAST, "contiguous")
    return x, weight, torch.conv2d(x.double(), weight.double(), stride=p.stride)


@pairwise({"name": list(SIZES), "level": LEVELS, "activation": list(ACTIVATIONS)})
def test_epilogues(name, level, activation, nan_memory):
    p = problem_of(name)
    x, weight, y = prepared(p)
    bias, residual = torch.randn(p.K), torch.randn(p.y_shape)
    for given_bias, given_residual in itertools.product((None, bias), (None, residual)):
        want = y if given_bias is None else y + bias.double()[:, None, None]
        want = want if given_residual is None else want + residual.double()
        got = run(x, weight, p, level, given_bias, given_residual, activation)
        assert relative_error(got, ACTIVATIONS[activation](want)) <= TOLERANCE


@every_level
def test_every_number_of_rows_and_columns(level, nan_memory):
    """Every height of a tile, and an odd last row, beside every width of what is left."""
    for rows, K in pairs((*range(1, 31), 56, 57), (*range(64, 130), 200)):
        p = conv_problem(1, 6, 1, rows, K, 1, 1, layout=CHANNELS_LAST)
        x, weight, want = prepared(p)
        activation = "relu6" if rows % 2 else None
        got = run(9 * x, weight, p, level, None, None, activation)
        what = f"{rows} x {K}: "
        want = ACTIVATIONS[activation](9 * want).float()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4, msg=lambda m, what=what: what + m)


@every_level
def test_rows_and_columns_of_any_size(level):
    """A result's error is bounded by the norms of its own row of x and its own column of w, whatever the others are."""
    generator = torch.Generator().manual_seed(0)
    p = conv_problem(1, 128, 9, 7, 192, 1, 1, layout=CHANNELS_LAST)
    x, weight, _ = prepared(p)
    x = x * 10 ** (20 * torch.rand(1, 1, 9, 7, generator=generator) - 10)
    weight = weight * 10 ** (20 * torch.rand(192, 1, 1, 1, generator=generator) - 10)
    x[..., 3, 2], weight[70] = 0, 0
    want = torch.conv2d(x.double(), weight.double())
    bound = x.double().norm(dim=1, keepdim=True) * weight.double().flatten(1).norm(dim=1)[:, None, None]
    assert ((run(x, weight, p, level) - want).abs() <= 2e-6 * bound).all()


@every_level
def test_threads_do_not_change_a_bit(level, monkeypatch):
    for name in ("7x7", "several chunks", "many results", "stride 2"):
        p = problem_of(name)._replace(N=3)
        x, weight, _ = prepared(p)
        residual, results = torch.randn(p.y_shape), []
        for threads in (1, 2, 3, 8):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(run(x, weight, p, level, None, residual, "silu"))
        assert all(torch.equal(result, results[0]) for result in results[1:]), name


@every_level
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_would_spread(level, value):
    p = problem_of("7x7")
    x, weight, _ = prepared(p)
    for place in ((0, 3, 2, 5), (0, 159, 6, 6), (0, 0, 0, 0)):
        poisoned = x.clone()
        poisoned[place] = value
        with pytest.raises(FloatingPointError, match="not finite"):
            run(poisoned, weight, p, level)


@every_level
def test_the_largest_and_the_smallest_numbers(level):
    p = problem_of("7x7")
    x, weight, want = prepared(p)
    for size in (1e37, 1e-37):
        got = run((x * size / x.abs().max()).float(), weight, p, level)
        # Subnormal results have fewer digits.
        assert relative_error(got, want * size / x.double().abs().max()) <= (TOLERANCE if size > 1 else 1e-3)


def test_what_it_takes():
    p = problem_of("stride 2")
    assert takes(p, "strassen")
    for other in (p._replace(C=21), p._replace(K=63), p._replace(dtype="bfloat16"), p._replace(layout="contiguous")):
        assert not takes(other, "strassen"), other
