"""What to expect of algorithms on volumes: rules, since the networks have seen images only.

Each rule is a kind of layer with a gain over native that no measured one of its kind stayed below by more than a tenth,
under AVX-512 and AVX2 on one thread (`python -m benchmarks.volumes`). So they say what is worth a trial on real
calls, and little about which of two is faster.
"""

from __future__ import annotations

from collections.abc import Mapping

from convselect.base.problem import CONTIGUOUS, ConvProblem, Direction

LEAST_FLOPS = 1e7
"""Smaller calls take 0.1 ms or less, of which nothing was measured."""
FEW = 4
"""Most input channels of a stem."""
_FORWARD, _OF_X, _OF_WEIGHT = Direction

# gains forward, in the gradient of x, and in that of the weight
_Gains = Mapping[str, tuple[float, float, float]]
_DEPTHWISE: _Gains = {
    "depthwise": (4.5, 12.0, 7.0), "native_channels_last": (1.8, 1.0, 1.0), "im2col_gemm": (0.7, 2.3, 1.3),
}  # fmt: skip
_PLAIN: _Gains = {"winograd4": (2.2, 2.5, 2.4), "winograd6": (2.1, 2.5, 2.2), "winograd5": (2.0, 2.1, 2.1)}
_STRIDED: _Gains = {
    "winograd4": (1.6, 2.7, 1.3), "winograd3": (1.5, 2.5, 1.5), "native_channels_last": (0.9, 1.8, 0.8)
}  # fmt: skip
_STEM: _Gains = {"direct": (1.2, 1.6, 1.8), "winograd4": (1.1, 0.9, 1.6)}
_STRIDED_STEM: _Gains = {"winograd4": (1.3, 1.8, 1.3), "direct": (0.8, 2.6, 0.8), "im2col_gemm": (0.4, 1.3, 0.4)}
_PATCHES: _Gains = {"direct": (0.6, 2.0, 0.7), "im2col_gemm": (0.8, 2.2, 0.7)}
_HALVING: _Gains = {
    "native_channels_last": (0.9, 2.6, 0.7), "direct": (1.2, 2.0, 0.7), "im2col_gemm": (1.1, 1.5, 0.7)
}  # fmt: skip


def gains(problem: ConvProblem) -> dict[str, float] | None:
    """Algorithm -> its expected speed relative to native; None if nothing was measured of such problems."""
    p = problem
    if p.dtype != "float32" or p.device != "cpu" or p.layout != CONTIGUOUS or p.flops < LEAST_FLOPS:
        return None
    of = _of_kind(p)
    if of is None:
        return None
    column = (_FORWARD, _OF_X, _OF_WEIGHT).index(p.direction)
    return {name: expected[column] for name, expected in of.items()}


def _of_kind(p: ConvProblem) -> _Gains | None:
    if p.dilation != (1, 1) or p.dil_d > 1:
        return None
    if p.is_depthwise:
        return _DEPTHWISE if p.stride == (1, 1) and p.stride_d == 1 and max(p.R, p.S) >= 3 else None
    if p.groups > 1 or min(p.R, p.S) == 1 or p.K < 16:
        return None
    if p.is_patch:
        return _PATCHES if p.C <= FEW else _HALVING
    if min(p.R, p.S) < 3 or p.T > 7:
        return None
    strided = p.stride != (1, 1)
    if p.C <= FEW:
        return _STRIDED_STEM if strided else _STEM
    if p.C < 16 or max(p.R, p.S) > 3:
        return None
    return _STRIDED if strided else _PLAIN


__all__ = ["gains"]
