"""Statistics, normalisation, softmax and concatenation by the C library (`csrc/reduce.inc`, `csrc/group_norm.inc`).

Each function binds one call to the memory of its tensors, which are float32 on the CPU, and returns None if they are
not, or their strides are not covered. Results are ATen's up to rounding, NaN and infinity included. The number of
threads is that of PyTorch when a call is bound; it does not change results.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.freeze.bound import Bound, Call, bound
from convselect.freeze.pointwise import is_plain, shares_memory
from convselect.kernels import _library

# What `cs_reduce` computes.
_SUM, _NORM, _VARIANCE, _LARGEST = range(4)


class _Reduction(Call):
    """`cs_reduction` of csrc/convselect.h."""

    _fields_ = (
        ("outer", ctypes.c_int64), ("reduced", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float), ("operation", ctypes.c_int32), ("divisor", ctypes.c_double),
    )  # fmt: skip


class _GroupedNorm(Call):
    """`cs_grouped_norm` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("N", "C", "pixels", "groups")),
        ("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("epsilon", ctypes.c_float), ("layout", ctypes.c_int32),
        ("activation", ctypes.c_int32), ("parameter", ctypes.c_float),
    )  # fmt: skip


class _Joining(Call):
    """`cs_joining` of csrc/convselect.h."""

    _fields_ = (
        ("rows", ctypes.c_int64), ("inputs", ctypes.c_int64), ("pitch", ctypes.c_int64),
        ("sizes", ctypes.c_void_p), ("pitches", ctypes.c_void_p), ("places", ctypes.c_void_p),
    )  # fmt: skip


def mean(x: Tensor, out: Tensor, dim: Sequence[int] = (2, 3)) -> Bound | None:
    """out = x.mean(dim, keepdim=True), with x dense in some order of its dimensions in which those of `dim` are
    neighbours: the pixels of NCHW and NHWC images, the tokens of (N, tokens, C). `out` is dense in the same order; a
    result without the kept dimensions may be given as well."""
    return _reduced(_SUM, x, out, dim, lambda n: n)


def total(x: Tensor, out: Tensor, dim: Sequence[int]) -> Bound | None:
    """out = x.sum(dim, keepdim=True); x and out as in `mean`."""
    return _reduced(_SUM, x, out, dim)


def norm(x: Tensor, out: Tensor, dim: Sequence[int]) -> Bound | None:
    """out = linalg.vector_norm(x, 2, dim, keepdim=True); x and out as in `mean`."""
    return _reduced(_NORM, x, out, dim)


def variance(x: Tensor, out: Tensor, dim: Sequence[int], correction: float = 1) -> Bound | None:
    """out = x.var(dim, correction=correction, keepdim=True); x and out as in `mean`. None if no value would be left to
    divide by."""
    return _reduced(_VARIANCE, x, out, dim, lambda n: n - correction)


def largest(x: Tensor, out: Tensor, dim: Sequence[int]) -> Bound | None:
    """out = x.amax(dim, keepdim=True); x and out as in `mean`."""
    return _reduced(_LARGEST, x, out, dim)


def _reduced(
    operation: int, x: Tensor, out: Tensor, dim: Sequence[int], divisor: Callable[[int], float] = lambda _: 1
) -> Bound | None:
    """divisor: of the sum, from the number of values."""
    reduced = {d % x.dim() for d in dim} if x.dim() else set()
    kept = [1 if d in reduced else n for d, n in enumerate(x.shape)]
    if not reduced or not is_ready(x, out):
        return None
    without = [n for d, n in enumerate(x.shape) if d not in reduced]
    if list(out.shape) == without:
        for d in sorted(reduced):
            out = out.unsqueeze(d)
    if list(out.shape) != kept:
        return None
    call = _reduction(x, out, reduced)
    if call is None or divisor(call.reduced) <= 0:
        return None
    call.operation, call.divisor = operation, divisor(call.reduced)
    return bound("cs_reduce", call, x, out)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out: Tensor, dim: int = -1
) -> Bound | None:
    """out = (x - mean) / sqrt(variance + eps) * weight + bias over one dimension: the last one as in
    `torch.nn.functional.layer_norm`, or the channels of images in either layout (dim 1). x and out are dense in the
    same order and may be the same memory; weight and bias are (x.shape[dim],) or None."""
    affine = [t for t in (weight, bias) if t is not None]
    if x.dim() == 0 or not is_ready(x, out) or not all(is_plain(t) and t.is_contiguous() for t in affine):
        return None
    dim %= x.dim()
    if any(t.shape != (x.shape[dim],) for t in affine) or not _alike(x, out):
        return None
    call = _reduction(x, None, {dim})
    if call is None:
        return None
    call.weight, call.bias = (None if t is None else t.data_ptr() for t in (weight, bias))
    call.epsilon = eps
    return bound("cs_layer_norm", call, x, out, weight, bias)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    activation: str | None = None,
    slope: float = 0.01,
) -> Bound | None:
    """out = activation(torch.nn.functional.group_norm(x, groups, weight, bias, eps)). x (N, C, H, W) or (N, C, D, H, W)
    and out are dense in the same layout, channels first or last, and may be the same memory; weight and bias are (C,)
    or None; activation is a key of `_library.ACTIVATIONS`, slope that of "leaky_relu" below 0."""
    affine = [t for t in (weight, bias) if t is not None]
    if x.dim() not in (4, 5) or not is_ready(x, out) or not _alike(x, out) or groups < 1 or x.shape[1] % groups:
        return None
    if x.dim() == 5:
        images = columns(x), columns(out)
        if images[0] is None or images[1] is None:
            return None
        x, out = images  # type: ignore[assignment]
    layouts, (N, C, H, W) = layouts_of(x), x.shape
    if not layouts or not all(is_plain(t) and t.is_contiguous() and t.shape == (C,) for t in affine):
        return None
    layout = _library.LAYOUTS[CONTIGUOUS if CONTIGUOUS in layouts else CHANNELS_LAST]
    at = (None if t is None else t.data_ptr() for t in (weight, bias))
    code = _library.ACTIVATIONS[activation]
    call = _GroupedNorm(
        _library.isa(), torch.get_num_threads(), N, C, H * W, groups, *at, eps, layout, code, slope
    )  # fmt: skip
    return bound("cs_group_norm", call, x, out, weight, bias)


def softmax(x: Tensor, out: Tensor) -> Bound | None:
    """out = x.softmax(-1). x and out are contiguous and may be the same memory."""
    if x.dim() == 0 or not is_ready(x, out) or not x.is_contiguous() or not _alike(x, out):
        return None
    call = _reduction(x, None, {x.dim() - 1})
    return None if call is None else bound("cs_softmax", call, x, out)


def concatenate(inputs: Sequence[Tensor], out: Tensor, dim: int, there: Collection[int] = ()) -> Bound | None:
    """out = cat(inputs, dim). All are dense in the same order of dimensions, but for gaps between what an input, or
    `out`, has of `dim` and of all that is faster: each may be a part of a larger tensor along `dim`. Inputs whose index
    is in `there` are in their place already."""
    if out.dim() == 0 or not inputs or not all(is_plain(t) for t in (*inputs, out)) or out.numel() == 0:
        return None
    dim %= out.dim()
    moved = [i not in there for i, t in enumerate(inputs) if t.numel() > 0]
    inputs = [t for t in inputs if t.numel() > 0]
    rest = [n for d, n in enumerate(out.shape) if d != dim]
    if any(t.dim() != out.dim() or [n for d, n in enumerate(t.shape) if d != dim] != rest for t in inputs):
        return None
    if sum(t.shape[dim] for t in inputs) != out.shape[dim]:
        return None
    starts = itertools.accumulate((t.shape[dim] for t in inputs), initial=0)
    placed = [(t, start) for t, start, moves in zip(inputs, starts, moved, strict=False) if moves]
    inputs = [t for t, _ in placed]
    if not inputs or any(shares_memory(t, out) for t in inputs):
        return None
    # The order is out's: dimensions of one element have no place in it, but for `dim`, which is as slow as it can be
    # if its stride says nothing.
    order = sorted(
        (d for d in range(out.dim()) if out.shape[d] > 1 or d == dim), key=lambda d: (-out.stride()[d], d != dim)
    )
    runs = [_runs(t, order, dim) for t in (*inputs, out)]
    if any(run is None for run in runs):
        return None
    rows, sizes, pitches = zip(*(run for run in runs if run is not None), strict=True)
    if len(set(rows)) != 1:
        return None
    count = len(inputs)
    all_sizes, all_pitches = (ctypes.c_int64 * count)(*sizes[:-1]), (ctypes.c_int64 * count)(*pitches[:-1])
    per_element = sizes[-1] // out.shape[dim]
    places = (ctypes.c_int64 * count)(*(start * per_element for _, start in placed))
    pointers = (ctypes.c_void_p * count)(*(t.data_ptr() for t in inputs))
    call = _Joining(
        _library.isa(), torch.get_num_threads(), rows[0], count, pitches[-1],
        ctypes.addressof(all_sizes), ctypes.addressof(all_pitches), ctypes.addressof(places),
    )  # fmt: skip
    return bound("cs_join", call, pointers, out, all_sizes, all_pitches, places, inputs)


def columns(t: Tensor) -> Tensor | None:
    """(N, C, D, H, W) as an image of D rows and H * W columns, on the same memory; None if it is not dense so."""
    try:
        return t.view(*t.shape[:3], t.shape[3] * t.shape[4])
    except RuntimeError:
        return None


# ---- shapes and strides ---------------------------------------------------------------------------------------------


def _runs(t: Tensor, order: Sequence[int], dim: int) -> tuple[int, int, int] | None:
    """(rows, floats of a row, floats from row to row): what `dim` and all faster dimensions hold lies in one run."""
    place, step = order.index(dim), 1
    for d in reversed(order[place:]):
        if t.shape[d] > 1 and t.stride()[d] != step:
            return None
        step *= t.shape[d]
    slower = [d for d in order[:place] if t.shape[d] > 1]
    pitch = t.stride(slower[-1]) if slower else step
    if pitch < step:
        return None
    expected, rows = pitch, 1
    for d in reversed(slower):
        if t.stride()[d] != expected:
            return None
        expected *= t.shape[d]
        rows *= t.shape[d]
    return rows, step, pitch


def is_ready(x: Tensor, out: Tensor) -> bool:
    return _library.available() and is_plain(x) and is_plain(out) and x.numel() > 0 and out.numel() > 0


def _alike(x: Tensor, out: Tensor) -> bool:
    """Whether both have the same shape and order; the same memory, or none in common."""
    steps = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (x, out)]
    return (
        x.shape == out.shape and steps[0] == steps[1] and (x.data_ptr() == out.data_ptr() or not shares_memory(x, out))
    )


def _reduction(x: Tensor, out: Tensor | None, reduced: set[int]) -> _Reduction | None:
    """x, dense, as (outer, reduced, inner); None if the reduced dimensions are no neighbours, or `out` is in another
    order."""
    order = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -x.stride()[d])
    step = 1
    for d in reversed(order):
        if x.stride()[d] != step:
            return None
        step *= x.shape[d]
    places = [i for i, d in enumerate(order) if d in reduced]
    if places and places[-1] - places[0] + 1 != len(places):
        return None
    split = [order[: places[0]], order[places[-1] + 1 :]] if places else [order, []]
    if out is not None:
        step = 1
        for d in reversed(split[0] + split[1]):
            if out.stride()[d] != step:
                return None
            step *= out.shape[d]
        if shares_memory(x, out):
            return None
    outer, inner = (math.prod(x.shape[d] for d in dims) for dims in split)
    return _Reduction(_library.isa(), torch.get_num_threads(), outer, x.numel() // (outer * inner), inner)


def layouts_of(t: Tensor) -> set[str]:
    """The layouts in which this image is dense: both if it has one channel or one pixel."""
    if pitch_of(t):
        return {CHANNELS_LAST}
    layouts = {CONTIGUOUS} if t.is_contiguous() else set()
    return layouts | {CHANNELS_LAST} if t.is_contiguous(memory_format=torch.channels_last) else layouts


def pitch_of(t: Tensor) -> int:
    """Floats from pixel to pixel, if these are some channels of a larger image in NHWC; else 0."""
    _, C, H, W = t.shape
    pitch = t.stride(3)
    return pitch if pitch > C and t.stride() == (H * W * pitch, 1, W * pitch, pitch) else 0
