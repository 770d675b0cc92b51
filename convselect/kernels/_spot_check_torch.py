"""The spot check in PyTorch's operations, for volumes and for installations without the C library: about 50 us per
place. Also what both have in common: the finding, and what errors are measured by."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction

Place = tuple[int, ...]


class Finding(NamedTuple):
    """The worst of the places that were looked at."""

    ratio: float
    """The error, in units of eps * size; infinite if the result is not finite, or has the wrong shape or dtype."""
    limit: float
    place: Place
    """Indices into the result."""
    got: float
    expected: float

    @property
    def right(self) -> bool:
        return self.ratio <= self.limit


class Scale(NamedTuple):
    """What errors of one element type are measured by; fields as in `cs_spot`."""

    unit: float
    rounding: float
    tiny: float
    largest: float


def _scale(dtype: torch.dtype) -> Scale:
    own, sums = torch.finfo(dtype), torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    # A 16-bit result is rounded once, and again if the bias is added to it: half an ulp of each. Twice that is allowed.
    rounding = own.eps if own.bits == 16 else 0.0
    # Float16's subnormals are not flushed to zero: their spacing. Elsewhere: the smallest normal number.
    tiny = own.smallest_normal * own.eps if dtype == torch.float16 else own.smallest_normal
    return Scale(sums.eps, rounding, tiny, own.max / 2)


SCALES = {dtype: _scale(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LAST_FEW = 8
_OTHERS = 16


def _splitmix64(seed: int, counter: int) -> int:
    z = (seed + (counter + 1) * _GOLDEN) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _below(random: int, n: int) -> int:
    return (random >> 32) * n >> 32


def choose(shape: tuple[int, ...], weight_gradient: bool, seed: int, i: int, places: int) -> Place:
    """Place number `i` of `places` in a result of this shape: `choose` of csrc/spot_check.c."""
    place, drawn = [], len(shape)
    for d, n in enumerate(shape):
        where, how = _splitmix64(seed, 2 * drawn * i + d), _splitmix64(seed, 2 * drawn * i + drawn + d)
        if (d > 0 or weight_gradient) and how & 3 == 0:
            kind = how >> 2 & 3
            place.append(0 if kind == 0 else n - 1 if kind == 1 else n - 1 - _below(where, min(n, _LAST_FEW)))
            continue
        if d == 0:
            width = (1 << 32) // places
            where = (i * width + _below(where, width)) << 32
        if d == 2:
            where = (_splitmix64(seed, _WORD - 1) + i * _GOLDEN) & _WORD
        place.append(_below(where, n))
    return tuple(place)


def _inside(start: int, step: int, n: int, last: int) -> tuple[slice, slice]:
    """(which i of 0 .. n - 1 have start + i * step in 0 .. last, those positions)."""
    first, end = max(0, -(start // step)), min(n - 1, (last - start) // step)
    if end < first:
        return slice(0, 0), slice(0, 0)
    return slice(first, end + 1), slice(start + first * step, start + end * step + 1, step)


def _reaching(start: int, dil: int, stride: int, taps: int, outputs: int) -> tuple[list[int], list[int]]:
    """(the taps r by which y reaches a position of x, the rows of y that they come from)."""
    found = [
        (r, (start - r * dil) // stride)
        for r in range(taps)
        if (start - r * dil) % stride == 0 and 0 <= start - r * dil <= (outputs - 1) * stride
    ]
    return [r for r, _ in found], [row for _, row in found]


class _Axis(NamedTuple):
    """One of the spatial dimensions of a problem."""

    size: int
    outputs: int
    taps: int
    stride: int
    pad: int
    dil: int


def _axes(p: ConvProblem) -> list[_Axis]:
    depth = [_Axis(p.D, p.O, p.T, p.stride_d, p.pad_front, p.dil_d)] if p.is_volume else []
    return [
        *depth,
        _Axis(p.H, p.P, p.R, p.stride_h, p.pad_top, p.dil_h),
        _Axis(p.W, p.Q, p.S, p.stride_w, p.pad_left, p.dil_w),
    ]


def _factors(a: Tensor, b: Tensor, p: ConvProblem, place: Place) -> tuple[Tensor, Tensor]:
    """The elements of `a` and of `b` that the result is the sum of products of. Dimension 0 is the channel, or for a
    weight gradient the image."""
    i0, i1, *at = place
    C, K = p.C // p.groups, p.K // p.groups
    axes = list(zip(at, _axes(p), strict=True))
    if p.direction == Direction.BACKWARD_DATA:
        image, taps = a[i0, i1 // C * K :][:K], b[i1 // C * K :, i1 % C][:K]
        for d, (i, of) in enumerate(axes, start=1):
            found = _reaching(i + of.pad, of.dil, of.stride, of.taps, of.outputs)
            reaching, positions = (torch.tensor(indices, dtype=torch.int64) for indices in found)
            image, taps = image.index_select(d, positions), taps.index_select(d, reaching)
        return image, taps
    if p.direction == Direction.FORWARD:
        image, other = a[i0, i1 // K * C :][:C], b[i1]
        met = [_inside(i * of.stride - of.pad, of.dil, of.taps, of.size - 1) for i, of in axes]
    else:
        image, other = a[:, i0 // K * C + i1], b[:, i0]
        met = [_inside(i * of.dil - of.pad, of.stride, of.outputs, of.size - 1) for i, of in axes]
    return image[(slice(None), *(h for _, h in met))], other[(slice(None), *(r for r, _ in met))]


def _usual_size(a: Tensor, b: Tensor, p: ConvProblem, seed: int, place: Place, largest: float) -> float | None:
    """The size that three quarters of the results do not exceed, by a sample: `usual_size` of csrc/spot_check.c."""
    weight_gradient = p.direction == Direction.BACKWARD_WEIGHT
    sizes = []
    for i in range(_OTHERS):
        other = choose(p.result_shape, weight_gradient, ~seed & _WORD, i, _OTHERS)
        left, right = _factors(a, b, p, other if weight_gradient else (*place[:2], *other[2:]))
        size = (left.double() * right.double()).abs().sum().item()
        if 0 < size <= largest:
            sizes.append(size)
    if not sizes:
        return None
    return 1000 * max(sizes) if len(sizes) < _OTHERS // 4 else sorted(sizes)[len(sizes) * 3 // 4]


@torch.no_grad()
def spot_check(
    result: Tensor,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    bias: Tensor | None,
    limit: float,
    spreads: bool,
    places: int,
    seed: int,
) -> Finding | None:
    """As `_spot_check.spot_check`, which has checked the arguments. Follows csrc/spot_check.c line by line."""
    p = problem
    if 0 in p.result_shape:
        return None
    scale = SCALES[p.torch_dtype]
    weight_gradient = p.direction == Direction.BACKWARD_WEIGHT
    worst: Finding | None = None
    for i in range(places):
        place = choose(p.result_shape, weight_gradient, seed & _WORD, i, places)
        left, right = (factor.double() for factor in _factors(a, b, p, place))
        products = left * right
        offset = 0.0 if bias is None else float(bias[place[1]])
        expected, size = products.sum().item() + offset, products.abs().sum().item() + abs(offset)
        if not size <= scale.largest:
            continue
        got = float(result[place])
        error = abs(got - expected) - scale.rounding * (abs(expected) + abs(offset))
        finite = not math.isnan(error)
        ratio = max(error, 0.0) / (scale.unit * size + scale.tiny) if finite else math.inf
        if ratio > limit:
            slack = scale.tiny
            if p.dtype != "float16":
                slack *= 1 + products.numel() + left.abs().sum().item() + right.abs().sum().item()
                slack *= 1000 if spreads else 1
            if spreads:
                usual = _usual_size(a, b, p, seed & _WORD, place, scale.largest)
                if usual is None:
                    continue
                size = max(size, usual + abs(offset))
            ratio = error / (scale.unit * size + slack) if finite else math.inf
        if worst is None or ratio > worst.ratio:
            worst = Finding(ratio, limit, place, got, expected)
    return worst
