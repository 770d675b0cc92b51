"""A spot check: a few results of a convolution, at random places, are computed again in float64 and compared.

Errors are counted in units of eps * size. `size` is the sum of |a||b| over the products that the result is the sum of,
plus |bias|; eps is float32's, float64's for float64. What rounding a result to 16 bit may add is subtracted first. A
transform spreads its rounding errors over a tile, so for an algorithm that `spreads` a place over the limit is looked
at again: its size counts as at least that of most other results of the image. `limit` says how much is allowed;
docs/budgets.md how it was measured.

Places that cannot be judged are passed over: sums that are not finite, or so large that they may overflow.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels import _library, _spot_check_torch
from convselect.kernels._contract import Algorithm
from convselect.kernels._spot_check_torch import SCALES, Finding

DTYPES = {**_library.DTYPES, "float64": 3}
MOST_TERMS = 1_000_000
_INFINITY = float("inf")


class Spot(ctypes.Structure):
    """`cs_spot` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "N", "C", "H", "W", "K", "R", "S", "P", "Q",
            "stride_h", "stride_w", "pad_top", "pad_left", "dil_h", "dil_w", "groups",
        )),
        *((name, ctypes.c_int64 * 4) for name in ("a_strides", "b_strides", "result_strides")),
        ("bias_stride", ctypes.c_int64),
        ("places", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("unit", "rounding", "tiny", "largest", "limit")),
        *((name, ctypes.c_int32) for name in ("dtype", "direction", "spreads", "reserved")),
    )  # fmt: skip


class Found(ctypes.Structure):
    """`cs_found` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("ratio", "got", "expected")),
        ("place", ctypes.c_int64 * 4),
        ("checked", ctypes.c_int64),
    )


Strides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_LARGE = 1 << 18  # elements; operands below this stay in a cache


def _terms(p: ConvProblem) -> int:
    """How many products a result is the sum of, at most."""
    if p.direction == Direction.FORWARD:
        return p.C // p.groups * p.T * p.R * p.S
    return p.K // p.groups * p.T * p.R * p.S if p.direction == Direction.BACKWARD_DATA else p.N * p.O * p.P * p.Q


def places_within(problem: ConvProblem, strides: Strides, places: int, most_terms: int) -> int:
    """So many of `places`, at least one, that not more than `most_terms` products are computed. A weight gradient that
    finds each element of large operands on another line of the cache takes eight times as long: it gets an eighth."""
    p = problem
    scattered = p.direction == Direction.BACKWARD_WEIGHT and not strides[0][-1] == strides[1][-1] == p.stride_w == 1
    if scattered and p.N * max(p.C * p.D * p.H * p.W, p.K * p.O * p.P * p.Q) > _LARGE:
        most_terms //= 8
    return max(1, min(places, most_terms // max(1, _terms(p))))


SPREADING = 3000.0
"""What a transform may add, in eps of the size of a result, or of a usual one of its image if that is larger. Tiles
that would exceed it are computed as direct sums (csrc/winograd_range.inc, `_range.py`)."""
SPREADING_OF_WEIGHT = 8000.0
"""The same in a weight gradient, where the whole image is one sum."""


@functools.lru_cache(maxsize=4096)
def limit(algorithm: Algorithm, problem: ConvProblem) -> float:
    """The largest ratio that is right. docs/budgets.md has what was measured: at most 0.37 of this.

    A sum of n terms, in any order, is off by at most n / 2 eps of its size, and constant data comes within a factor of
    four: every addition rounds the same way. In weight gradients, where n is large, that would hide mistakes. Kernels
    that sum those in blocks stay below a multiple of sqrt(n); PyTorch's own do not.
    """
    p = problem
    n = _terms(p)
    most = 16 + n / 2
    by_pytorch = algorithm.name.startswith(("native", "upcast")) or not _library.available()
    if p.direction == Direction.BACKWARD_WEIGHT and not by_pytorch:
        most = 16 + min(n / 2, 8 * n**0.5)
    if algorithm.spreads_nonfinite:
        most += SPREADING_OF_WEIGHT if p.direction == Direction.BACKWARD_WEIGHT else SPREADING
    if p.element_bytes == 2 and p.direction != Direction.FORWARD and algorithm.name.startswith("native"):
        # PyTorch's slow paths add up in 16 bit, one rounding per tap, or per image.
        roundings = p.N / 4 if p.direction == Direction.BACKWARD_WEIGHT else p.T * p.R * p.S / 4
        most += (2 + roundings) * torch.finfo(p.torch_dtype).eps / torch.finfo(torch.float32).eps
    return most


class _Prepared(NamedTuple):
    """The part of a check that is the same for every result of one problem."""

    function: Any
    spot: Any
    places: int
    operand_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result_shape: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=4096)
def _prepared(
    problem: ConvProblem,
    strides: Strides,
    bias_stride: int,
    limit: float,
    spreads: bool,
    places: int,
    most_terms: int,
) -> _Prepared:
    p = problem
    function = spot = None
    count = places_within(p, strides, places, most_terms)
    if _library.available() and not p.is_volume:
        loaded = _library.library()
        assert loaded is not None
        function = loaded["cs_spot_check"]
        pointer = ctypes.c_void_p
        function.argtypes, function.restype = (*(pointer,) * 5, ctypes.c_uint64, pointer), ctypes.c_int32
        spot = ctypes.byref(Spot(
            p.N, p.C, p.H, p.W, p.K, p.R, p.S, p.P, p.Q,
            p.stride_h, p.stride_w, p.pad_top, p.pad_left, p.dil_h, p.dil_w, p.groups,
            *((ctypes.c_int64 * 4)(*of[:4]) for of in strides), bias_stride, count,
            *SCALES[p.torch_dtype], limit, DTYPES[p.dtype], _library.DIRECTIONS[p.direction], spreads, 0,
        ))  # fmt: skip
    first = p.y_shape if p.direction == Direction.BACKWARD_DATA else p.x_shape
    second = p.y_shape if p.direction == Direction.BACKWARD_WEIGHT else p.weight_shape
    return _Prepared(function, spot, count, (first, second), p.result_shape, p.torch_dtype)


def _plain(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values."""
    if tensor.is_neg() or tensor._is_zerotensor():
        return tensor.resolve_neg().clone()
    return tensor


def spot_check(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    bias: Tensor | None = None,
    *,
    limit: float,
    spreads: bool,
    places: int,
    seed: int,
    most_terms: int = MOST_TERMS,
) -> Finding | None:
    """Compare `result` with float64 at up to `places` places. Tensors may have any strides.

    Args:
        a, b: the operands, in the order of `Algorithm.run`; `bias` (K,) in the forward direction, (C,) for grad-input.
        limit: the largest ratio that is right, from `limit`.
        spreads: whether rounding errors come from the whole image (`Algorithm.spreads_nonfinite`).
        seed: decides the places; 64 bits.
        most_terms: most products to compute; fewer places are looked at, but at least one.

    Returns:
        The worst place; a result of the wrong shape or dtype is infinitely wrong. None if no place could be judged, or
        a tensor is not a dense one on the CPU.

    Raises:
        ValueError: if an operand or the bias does not fit the problem.
    """
    for tensor in (result, a, b):
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
    result, a, b = _plain(result), _plain(a), _plain(b)
    bias_stride = 0
    of_weight = problem.direction == Direction.BACKWARD_WEIGHT
    if bias is not None:
        if bias.shape != (problem.result_shape[1],) or not bias.is_cpu or of_weight:
            raise ValueError(f"a bias {tuple(bias.shape)} on {bias.device} for {problem}")
        bias = _plain(bias).to(problem.torch_dtype)
        bias_stride = bias.stride(0)
    strides = (a.stride(), b.stride(), result.stride())
    plan = _prepared(problem, strides, bias_stride, limit, spreads, places, most_terms)
    dtype = plan.dtype
    if (a.shape, b.shape) != plan.operand_shapes or a.dtype != dtype or b.dtype != dtype:
        raise ValueError(f"operands {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} for {problem}")
    if result.shape != plan.result_shape or result.dtype != dtype:
        return Finding(_INFINITY, limit, (0,) * len(plan.result_shape), float("nan"), float("nan"))
    if plan.function is None:
        return _spot_check_torch.spot_check(result, a, b, problem, bias, limit, spreads, plan.places, seed)
    found = Found()
    bias_at = None if bias is None else bias.data_ptr()
    plan.function(
        plan.spot, a.data_ptr(), b.data_ptr(), result.data_ptr(), bias_at, seed & (1 << 64) - 1, ctypes.byref(found)
    )
    if not found.checked:
        return None
    n, k, p, q = found.place
    return Finding(found.ratio, limit, (n, k, p, q), found.got, found.expected)


def check(
    algorithm: Algorithm,
    result: Tensor,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    bias: Tensor | None = None,
    *,
    places: int,
    seed: int,
    most_terms: int = MOST_TERMS,
) -> Finding | None:
    """`spot_check` of a result of `algorithm`, by its limit: `finding is None or finding.right` if nothing is wrong."""
    return spot_check(
        result,
        a,
        b,
        problem,
        bias,
        limit=limit(algorithm, problem),
        spreads=algorithm.spreads_nonfinite,
        places=places,
        seed=seed,
        most_terms=most_terms,
    )
