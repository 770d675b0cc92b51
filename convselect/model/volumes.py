"""What to expect of algorithms on volumes: rules, for machines and problems that no model of volumes knows.

Each rule is a kind of layer with a gain over native that no measured one of its kind stayed below by more than a tenth:
the layers of `python -m benchmarks.volumes`, in the layouts and element types that the rules name, under AVX-512 on
one thread of one machine. Under AVX2 only plain, strided, stem and depthwise 3x3x3 layers were measured. So they say
what is worth a trial on real calls, and little about which of two is faster. What has no rule was slower than native,
or was not measured.

Native is what differs most from kind to kind: oneDNN's kernels want multiples of 16 channels and no dilation, and
without them it is 5 to 40 times as slow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction

LEAST_FLOPS = 1e6
"""Smaller calls take less than 50 us, and a plan costs 25."""
FEW = 4
"""Most channels that `direct`, with its vectors along rows, takes at a speed near its best."""
TINY = 64
"""Results of a channel in volumes so small that reading and transforming the weight is what takes time."""
_FORWARD, _OF_X, _OF_WEIGHT = Direction

# gains forward, in the gradient of x, and in that of the weight
_Gains = Mapping[str, tuple[float, float, float]]

# Of Winograd: of results that tiles cover without waste; `_of_tiles` takes the waste off.
_PLAIN: _Gains = {
    "winograd4": (2.2, 2.1, 2.2), "winograd6": (2.5, 2.6, 2.5), "winograd5": (2.4, 2.4, 2.4),
    "winograd3": (1.9, 1.9, 1.9), "winograd2": (1.5, 1.5, 1.6),
}  # fmt: skip
_TINY: _Gains = {"winograd2": (1.5, 1.4, 1.4), "winograd4": (1.1, 1.3, 1.3)}
_UNEVEN: _Gains = {
    "winograd4": (10.0, 13.0, 8.0), "winograd6": (10.0, 13.0, 8.0), "winograd5": (10.0, 13.0, 8.0),
    "winograd3": (8.0, 12.0, 7.0),
}  # fmt: skip
_UNEVEN_SMALL: _Gains = {"winograd4": (4.3, 7.0, 6.0), "winograd2": (3.4, 6.0, 5.5)}
_DILATED: _Gains = {"winograd4": (5.0, 5.4, 5.2), "winograd5": (4.5, 4.7, 4.6), "winograd3": (4.2, 4.2, 4.1)}
_FIVE: _Gains = {"winograd4": (3.2, 3.1, 3.4), "winograd2": (1.8, 1.8, 1.7)}
_FIVE_FEW: _Gains = {"winograd4": (2.0, 2.0, 4.8), "direct": (1.1, 1.1, 4.4), "winograd2": (1.1, 1.1, 2.8)}
_SEVEN: _Gains = {"winograd2": (1.9, 2.1, 2.4)}
_AXIS: _Gains = {"winograd6": (1.7, 2.1, 1.8), "winograd4": (1.5, 1.7, 1.6)}
_STRIDED: _Gains = {
    "winograd4": (1.7, 1.6, 1.5), "winograd3": (1.4, 1.4, 1.3), "winograd5": (1.7, 1.7, 1.5),
    "winograd7": (1.6, 1.8, 1.5),
}  # fmt: skip
_STRIDED_LAST: _Gains = {"winograd4": (1.3, 1.5, 1.6), "winograd3": (1.1, 1.3, 1.6)}
_STRIDED_FIVE: _Gains = {"winograd4": (1.9, 2.4, 2.1), "winograd5": (1.9, 2.4, 2.1)}
_STRIDED_FOUR: _Gains = {"winograd4": (1.8, 2.4, 1.7), "winograd2": (1.3, 1.7, 1.3)}
_PLAIN_16: _Gains = {
    "winograd4": (1.4, 1.4, 1.7), "winograd6": (1.5, 1.5, 1.9), "winograd5": (1.4, 1.4, 1.7),
    "winograd2": (1.0, 1.0, 1.2),
}  # fmt: skip
_DILATED_16: _Gains = {"winograd4": (1.4, 1.4, 4.8), "winograd6": (1.2, 1.3, 4.6)}
_FIVE_16: _Gains = {"winograd4": (2.2, 2.2, 2.5), "winograd2": (1.1, 1.1, 1.3)}
_THIN_16: _Gains = {"direct": (2.4, 6.3, 8.8), "native_channels_last": (1.1, 3.1, 0.5), "winograd6": (0.8, 2.1, 2.6)}
_UNEVEN_16: _Gains = {"winograd6": (1.4, 2.1, 6.0), "winograd4": (1.4, 2.0, 5.5), "direct": (1.3, 1.9, 4.9)}

_HEAD: _Gains = {"direct": (3.6, 7.2, 2.9), "winograd6": (3.0, 5.7, 2.8), "winograd4": (2.7, 5.5, 2.5)}
_HEAD_LAST: _Gains = {"winograd6": (2.5, 0.8, 2.7), "winograd4": (2.3, 0.8, 2.5), "direct": (2.2, 0.8, 2.0)}
_THIN: _Gains = {"direct": (8.0, 6.9, 6.5), "winograd6": (3.5, 4.0, 2.5), "winograd4": (3.5, 4.0, 2.3)}
_WIDENING: _Gains = {"winograd6": (8.0, 4.4, 8.3), "winograd4": (8.0, 4.0, 8.3), "direct": (5.0, 4.3, 6.0)}
_STRIDED_THIN: _Gains = {"direct": (2.7, 1.9, 3.0), "im2col_gemm": (1.0, 0.8, 1.0)}
_STEM: _Gains = {"direct": (1.2, 1.6, 1.8), "winograd4": (1.1, 0.9, 1.6)}
_STEM_LAST: _Gains = {
    "direct": (3.2, 2.9, 5.0), "winograd6": (2.0, 4.2, 7.0), "winograd5": (1.9, 4.6, 7.0), "winograd4": (1.9, 4.4, 7.0)
}  # fmt: skip
_LARGE_STEM: _Gains = {"direct": (0.9, 3.4, 0.9), "winograd4": (0.7, 1.6, 0.8)}
_STRIDED_STEM: _Gains = {"winograd4": (1.3, 1.8, 1.3), "direct": (0.8, 2.6, 0.8), "im2col_gemm": (0.4, 1.3, 0.4)}

_DEPTHWISE: _Gains = {
    "depthwise": (4.5, 12.0, 7.0), "native_channels_last": (1.8, 1.0, 1.0), "im2col_gemm": (0.7, 2.3, 1.3),
}  # fmt: skip
_NARROW_DEPTHWISE: _Gains = {"depthwise": (0.9, 6.0, 3.8), "native_channels_last": (1.1, 1.2, 1.0)}
_LARGE_DEPTHWISE: _Gains = {"depthwise": (1.2, 28.0, 16.0), "native_channels_last": (0.9, 2.5, 1.8)}
_STRIDED_DEPTHWISE: _Gains = {"depthwise": (1.8, 5.4, 3.4), "native_channels_last": (0.9, 1.5, 0.9)}
_DEPTHWISE_LAST: _Gains = {"depthwise": (0.6, 2.0, 3.0), "im2col_gemm": (0.6, 0.8, 1.4)}
_LARGE_DEPTHWISE_LAST: _Gains = {"depthwise": (0.7, 7.2, 5.0)}
_STRIDED_DEPTHWISE_LAST: _Gains = {"depthwise": (0.6, 1.8, 1.5)}
_DEPTHWISE_16: _Gains = {"depthwise": (1.3, 11.5, 11.5), "native_channels_last": (1.0, 1.9, 0.9)}
_LARGE_DEPTHWISE_16: _Gains = {"depthwise": (0.6, 15.0, 14.0), "native_channels_last": (0.9, 1.5, 1.0)}
_STRIDED_DEPTHWISE_16: _Gains = {"depthwise": (1.7, 9.4, 3.5)}

_FEW_IN_GROUP: _Gains = {"direct": (1.6, 1.7, 5.0), "native_channels_last": (0.8, 0.9, 1.4)}
_EIGHT_IN_GROUP: _Gains = {"winograd4": (1.3, 1.4, 3.9), "direct": (1.1, 1.1, 3.7)}
_OVERLAPPING_PAIRS: _Gains = {"direct": (2.2, 2.4, 2.2), "im2col_gemm": (1.1, 1.0, 1.1)}
_SUBSAMPLED: _Gains = {"im2col_gemm": (1.6, 1.8, 1.1), "native_channels_last": (0.5, 2.1, 0.5)}
_PATCHES: _Gains = {"patches": (0.9, 3.1, 0.7), "im2col_gemm": (0.6, 2.2, 0.7), "direct": (0.8, 2.0, 0.7)}
_LARGE_PATCHES: _Gains = {"patches": (0.9, 1.5, 0.9)}
_HALVING: _Gains = {
    "patches": (1.3, 1.8, 0.9), "direct": (1.1, 1.7, 0.7), "native_channels_last": (0.8, 1.6, 0.7),
    "im2col_gemm": (0.9, 1.4, 0.7),
}  # fmt: skip
_HALVING_DEEP: _Gains = {"patches": (0.9, 1.2, 0.8)}


def is_measured(problem: ConvProblem) -> bool:
    """Whether there are times of volumes like this one at all."""
    p = problem
    return p.device == "cpu" and p.layout in (CONTIGUOUS, CHANNELS_LAST) and p.flops >= LEAST_FLOPS


def gains(problem: ConvProblem) -> dict[str, float] | None:
    """Algorithm -> its expected speed relative to native; None if nothing was measured of such problems."""
    p = problem
    if not is_measured(p):
        return None
    of: _Gains | None = None
    if p.dtype == "float32":
        of = _of_kind(p, p.layout == CHANNELS_LAST)
    elif p.dtype == "bfloat16" and p.layout == CONTIGUOUS:
        of = _of_kind_in_16_bits(p)
    if of is None:
        return None
    column = (_FORWARD, _OF_X, _OF_WEIGHT).index(p.direction)
    return {name: expected[column] * _of_tiles(name, p) for name, expected in of.items()}


def _of_tiles(name: str, p: ConvProblem) -> float:
    """The share of a Winograd tile's results that there are in the image, on average; 1 for other algorithms."""
    if not name.startswith("winograd"):
        return 1.0
    m, share = int(name.removeprefix("winograd")), 1.0
    for results, taps, dilation in ((p.P, p.R, p.dil_h), (p.Q, p.S, p.dil_w)):
        if taps > 1:
            of_phase = results / dilation
            share *= of_phase / (math.ceil(of_phase / m) * m)
    return share


def _of_kind(p: ConvProblem, last: bool) -> _Gains | None:
    """The rules in float32; `last`: in NDHWC."""
    strided, square = p.stride != (1, 1) or p.stride_d > 1, p.R == p.S
    if p.is_depthwise:
        return None if _is_dilated(p) else _of_depthwise(p, last, strided)
    if _is_dilated(p):
        return _of_dilated(p) if p.groups == 1 and not strided and square else None
    if p.groups > 1:
        return _of_groups(p, last, strided) if square else None
    if p.T == p.R == p.S == 1:
        return _SUBSAMPLED if strided and not last else None
    if p.is_patch:
        return None if last else _of_patches(p)
    if p.stride_d > 2 or p.T > 7:
        return None
    if p.C < FEW and p.K >= 16:
        return _of_stem(p, last, strided)
    if strided:
        return _of_strided(p, last)
    if p.S == 1 and p.R == 3 and not last:
        return _AXIS if min(p.C, p.K) >= 16 else None
    if p.R == p.S == p.T == 2:
        return _OVERLAPPING_PAIRS if p.C <= 16 and not last else None
    if (p.R, p.S) == (5, 5):
        return _FIVE_FEW if min(p.C, p.K) < 16 else _FIVE
    if p.R == p.S == p.T == 7 and min(p.C, p.K) >= 16 and not last:
        return _SEVEN
    return _of_three(p, last) if (p.R, p.S) == (3, 3) else None


def _of_patches(p: ConvProblem) -> _Gains | None:
    if p.C > FEW:
        return _HALVING if p.C <= 32 else _HALVING_DEEP
    taps = p.C * p.T * p.R * p.S
    return None if taps < 32 else _PATCHES if p.S <= 8 else _LARGE_PATCHES


def _is_dilated(p: ConvProblem) -> bool:
    return p.dilation != (1, 1) or p.dil_d > 1


def _is_tiny(p: ConvProblem) -> bool:
    return p.O * p.P * p.Q <= TINY


def _of_three(p: ConvProblem, last: bool) -> _Gains:
    """T x 3 x 3 at stride 1."""
    if p.K <= FEW < p.C:
        return _HEAD_LAST if last else _HEAD
    if p.C <= FEW:
        return _WIDENING if p.K >= 16 else _THIN
    # Beyond 64 channels oneDNN fills its blocks of 16 up, and is as fast as with whole ones.
    if min(p.C, p.K) < 16 or (max(p.C, p.K) <= 64 and (p.C % 16 or p.K % 16)):
        return _UNEVEN if p.flops >= 1e7 else _UNEVEN_SMALL
    return _TINY if _is_tiny(p) else _PLAIN


def _of_strided(p: ConvProblem, last: bool) -> _Gains | None:
    if p.stride != (2, 2) or _is_tiny(p):
        return None
    if max(p.C, p.K) <= FEW or (p.C <= FEW and p.K <= 16):
        return _STRIDED_THIN if not last else None
    if min(p.C, p.K) < 16:
        return None
    if (p.R, p.S) == (3, 3):
        return _STRIDED_LAST if last else _STRIDED
    of = {(5, 5): _STRIDED_FIVE, (4, 4): _STRIDED_FOUR}.get((p.R, p.S))
    return None if last else of


def _of_stem(p: ConvProblem, last: bool, strided: bool) -> _Gains | None:
    """A few channels to whole vectors of them."""
    if min(p.R, p.S) < 3:
        return None
    if strided:
        if p.R == 3 and p.C == 1 and p.K <= 16 and not last:
            return _STRIDED_THIN
        return _LARGE_STEM if p.R > 5 and (p.stride_d > 1 or p.T == 1) else _STRIDED_STEM
    if max(p.R, p.S) > 3:
        return None if last else _LARGE_STEM
    return _STEM_LAST if last else _STEM


def _of_dilated(p: ConvProblem) -> _Gains | None:
    if min(p.C, p.K) < 8:
        return None
    if p.R == 5 and p.C >= 16:
        return _FIVE
    if p.R == 2 and p.C <= 16:
        return _OVERLAPPING_PAIRS if p.layout == CONTIGUOUS else None
    return _DILATED if p.R == 3 else None


def _of_groups(p: ConvProblem, last: bool, strided: bool) -> _Gains | None:
    least = min(p.C, p.K) // p.groups
    if strided:
        return _STRIDED if least >= 16 and p.R == 3 and p.stride == (2, 2) and p.stride_d <= 2 and not last else None
    if least >= 16 and p.R in (3, 5):
        return _PLAIN if p.R == 3 else _FIVE_FEW
    if last:
        return None
    if p.R == 5:
        return _FIVE_FEW if least == 8 else None
    return None if p.R != 3 else _FEW_IN_GROUP if least <= FEW else _EIGHT_IN_GROUP if least == 8 else None


def _of_depthwise(p: ConvProblem, last: bool, strided: bool) -> _Gains | None:
    if min(p.R, p.S) < 3:
        return None if last or max(p.R, p.S) < 3 or strided else _DEPTHWISE
    if strided:
        return _STRIDED_DEPTHWISE_LAST if last else _STRIDED_DEPTHWISE
    if min(p.R, p.S) >= 5:
        return _LARGE_DEPTHWISE_LAST if last else _LARGE_DEPTHWISE
    if last:
        return _DEPTHWISE_LAST
    return _NARROW_DEPTHWISE if p.Q < 16 else _DEPTHWISE


def _of_kind_in_16_bits(p: ConvProblem) -> _Gains | None:
    """On a processor with instructions for it; without them native is slower still."""
    strided = p.stride != (1, 1) or p.stride_d > 1
    if p.is_depthwise:
        if _is_dilated(p) or min(p.R, p.S) < 3 or p.Q < 16:
            return None
        return _STRIDED_DEPTHWISE_16 if strided else _DEPTHWISE_16 if min(p.R, p.S) < 5 else _LARGE_DEPTHWISE_16
    ins, outs = p.C // p.groups, p.K // p.groups
    if strided or p.R != p.S or p.T > 7 or p.O * p.P * p.Q <= 4 * TINY:
        return None
    if min(ins, outs) < 16:
        if p.groups > 1 or _is_dilated(p) or p.R != 3 or max(ins, outs) > 16:
            return None
        return _THIN_16 if max(ins, outs) <= FEW else _UNEVEN_16 if min(ins, outs) >= 8 else None
    if p.R == 5:
        return _FIVE_16 if p.groups == 1 and not _is_dilated(p) else None
    if p.R != 3:
        return None
    return _DILATED_16 if _is_dilated(p) else _PLAIN_16


__all__ = ["gains"]
