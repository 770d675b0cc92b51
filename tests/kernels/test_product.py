"""The matrix product behind frozen 1x1 convolutions and linear layers: every instruction set, edges, threads."""

from __future__ import annotations

import itertools

import pytest
import torch
from activations import ACTIVATIONS, SLOPE
from pairs import pairs, pairwise
from problems import random_operands, relative_error
from tolerances import tolerance
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, conv_problem, layout_of
from convselect.kernels import _library, direct
from convselect.kernels._product import forward_packed, pack, takes

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
every_level = pytest.mark.parametrize("level", LEVELS)
# (N, C, H, W, K, stride). Of a size at which tiles, panels and chunks end in a rest, or rows share a set of a cache.
SIZES = {
    "7x7": (1, 160, 7, 7, 104, 1),
    "one pixel": (1, 300, 1, 1, 70, 1),
    "one channel": (2, 1, 5, 3, 1, 1),
    "several chunks": (1, 900, 13, 14, 48, 1),
    "many results": (1, 3, 29, 23, 700, 1),
    "rows alias": (1, 1024, 5, 5, 40, 1),
    "rows alias by the stride": (1, 512, 9, 9, 33, 2),
    "stride 2": (2, 20, 12, 15, 72, 2),
    "stride beyond the image": (3, 17, 2, 3, 24, 5),
    "strides (1, 3)": (2, 9, 6, 8, 56, (1, 3)),
}


def problem_of(name: str) -> ConvProblem:
    N, C, H, W, K, stride = SIZES[name]
    return conv_problem(N, C, H, W, K, 1, 1, stride=stride, layout=CHANNELS_LAST)


def prepared(p: ConvProblem) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the float64 result."""
    x, weight, _ = random_operands(p, CHANNELS_LAST, "contiguous")
    return x, weight, torch.conv2d(x.double(), weight.double(), stride=p.stride)


@pairwise({"name": list(SIZES), "level": LEVELS, "activation": list(ACTIVATIONS)})
def test_epilogues(name, level, activation, nan_memory):
    p = problem_of(name)
    x, weight, y = prepared(p)
    packed = pack(weight, p, level)
    bias, residual = torch.randn(p.K), torch.randn(p.y_shape)
    for given_bias, given_residual in itertools.product((None, bias), (None, residual)):
        want = y if given_bias is None else y + bias.double()[:, None, None]
        want = want if given_residual is None else want + residual.double()
        got = forward_packed(x, packed, p, given_bias, given_residual, activation, level, SLOPE)
        assert relative_error(got, ACTIVATIONS[activation](want)) <= tolerance(direct.Direct(), p)
        assert layout_of(got) == CHANNELS_LAST or 1 in (p.K, p.P * p.Q)


@every_level
def test_every_number_of_rows_and_columns(level, nan_memory):
    """Every height of a tile beside every width of a last panel, full and in part."""
    for rows, K in pairs((*range(1, 16), 28, 30), (*range(1, 57), 80, 99)):
        p = conv_problem(1, 5, 1, rows, K, 1, 1, layout=CHANNELS_LAST)
        x, weight, want = prepared(p)
        activation = (None, "relu6", "silu", "hardswish")[rows % 4]
        residual = torch.randn(p.y_shape).contiguous(memory_format=torch.channels_last) if K % 3 else None
        x, want = 9 * x, 9 * want
        got = forward_packed(x, pack(weight, p, level), p, None, residual, activation, level)
        what = f"{rows} x {K}: "
        want = ACTIVATIONS[activation](want if residual is None else want + residual.double()).float()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, msg=lambda m, what=what: what + m)


@every_level
def test_same_bits_as_direct(level):
    """Both add in the order of the channels, so that freezing may take either."""
    for name in SIZES:
        p = problem_of(name)
        x, weight, _ = prepared(p)
        bias = torch.randn(p.K)
        want = direct.forward_packed(x, direct.pack(weight, p, level), p, bias, isa_level=level)
        assert torch.equal(forward_packed(x, pack(weight, p, level), p, bias, isa_level=level), want), name


@every_level
def test_threads_do_not_change_a_bit(level, monkeypatch):
    for name in ("7x7", "several chunks", "rows alias", "many results", "stride 2"):
        p = problem_of(name)._replace(N=3)
        x, weight, _ = prepared(p)
        packed, residual = pack(weight, p, level), torch.randn(p.y_shape)
        results = []
        for threads in (1, 2, 3, 8):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(forward_packed(x, packed, p, None, residual, "silu", level))
        assert all(torch.equal(result, results[0]) for result in results[1:]), name


@every_level
def test_nan_stays_in_its_row(level):
    p = problem_of("7x7")
    x, weight, _ = prepared(p)
    for activation, value in itertools.product((None, "relu", "relu6"), (float("nan"), float("inf"))):
        x[0, 3, 2, 5] = value
        got = forward_packed(x, pack(weight, p, level), p, activation=activation, isa_level=level)
        exact = ACTIVATIONS[activation](torch.conv2d(x, weight))
        assert torch.equal(got.isnan(), exact.isnan())
        assert got.isnan().any() == (value != value)


def test_what_it_takes():
    p = problem_of("stride 2")
    assert takes(p)
    for other in (
        p._replace(dtype="bfloat16"), p._replace(layout="contiguous"), p._replace(R=3), p._replace(groups=2),
        p._replace(pad_top=1), p._replace(pad_right=1, stride_w=1), p._replace(device="cuda"),
    ):  # fmt: skip
        assert not takes(other), other
    # Padding that no output meets.
    assert takes(p._replace(pad_right=1))
    with pytest.raises(ValueError, match="a weight"):
        pack(torch.zeros(p.K, p.C + 1, 1, 1), p)
    x, weight, _ = prepared(p)
    with pytest.raises(ValueError, match="in place of"):
        forward_packed(x[1:], pack(weight, p), p)
    with pytest.raises(ValueError, match="in place of"):
        forward_packed(x, pack(weight, p)[1:], p)
