"""Pooling of images and volumes by the C library (`csrc/pool.inc`), as `reduce` has the other steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.freeze.bound import Bound, Call, bound
from convselect.freeze.pointwise import shares_memory
from convselect.freeze.reduce import columns, is_ready, layouts_of, pitch_of
from convselect.kernels import _library

Pair = int | Sequence[int]


class _Pooling(Call):
    """`cs_pooling` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "N", "C", "H", "W", "R", "S", "P", "Q", "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w",
            "divisor",
        )),
        ("layout", ctypes.c_int32), ("average", ctypes.c_int32),
        ("counts_padding", ctypes.c_int32), ("reserved", ctypes.c_int32),
        ("x_pitch", ctypes.c_int64), ("y_pitch", ctypes.c_int64),
    )  # fmt: skip


def max_pool(
    x: Tensor,
    out: Tensor,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Bound | None:
    """out = max_pool2d(x, ...), without indices. x (N, C, H, W) and out are dense in the same layout, NCHW or NHWC;
    in NHWC each may be some channels of a larger image. Volumes (N, C, D, H, W), as max_pool3d: with windows along the
    depth, or along rows and columns, only."""
    if x.dim() == out.dim() == 5:
        images = _pooled_images(x, out, kernel, stride, padding, dilation)
        if images[0] is None or images[1] is None:
            return None
        x, out, (kernel, stride, padding, dilation) = images  # type: ignore[assignment]
    call = _pooling(x, out, kernel, stride, padding, dilation, ceil_mode)
    return None if call is None else bound("cs_pool", call, x, out)


def avg_pool(
    x: Tensor,
    out: Tensor,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Bound | None:
    """out = avg_pool2d(x, ...) or avg_pool3d(x, ...). x and out as in `max_pool`."""
    if x.dim() == out.dim() == 5:
        images = _pooled_images(x, out, kernel, stride, padding)
        if images[0] is None or images[1] is None:
            return None
        x, out, (kernel, stride, padding) = images  # type: ignore[assignment]
    call = _pooling(x, out, kernel, stride, padding, 1, ceil_mode)
    if call is None or divisor_override == 0:
        return None
    call.average, call.counts_padding, call.divisor = 1, count_include_pad, divisor_override or 0
    return bound("cs_pool", call, x, out)


def _slices(t: Tensor) -> Tensor | None:
    """(N, C, D, H, W) as images of H rows and W columns, with D among the channels or the batch."""
    N, C, D, H, W = t.shape
    if t.is_contiguous():
        return t.view(N, C * D, H, W)
    if t.is_contiguous(memory_format=torch.channels_last_3d):
        return t.transpose(1, 2).view(N * D, C, H, W)
    return None


def _pooled_images(
    x: Tensor, out: Tensor, *options: Pair | None
) -> tuple[Tensor | None, Tensor | None, list[Pair | None]]:
    """Operands and options of a pooling of volumes as of images; the options are those of all axes. None unless its
    window has one tap along the depth, or along it only."""

    def of(value: Pair, axis: int) -> int:
        return value if isinstance(value, int) else tuple(value)[axis if len(value) > 1 else 0]

    kernel, stride, padding, *rest = options
    assert kernel is not None
    usual = [kernel, kernel if stride is None or stride == [] else stride, padding, *rest]
    trivial = [all(of(v or 0, axis) == n for v, n in zip(usual, (1, 1, 0, 1), strict=False)) for axis in range(3)]
    if trivial[0]:
        return _slices(x), _slices(out), [None if v is None else (of(v, 1), of(v, 2)) for v in usual]
    if all(trivial[1:]):
        plain = (1, 1, 0, 1)
        return columns(x), columns(out), [(of(v or 0, 0), n) for v, n in zip(usual, plain, strict=False)]
    return None, None, []


def _pooling(
    x: Tensor, out: Tensor, kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil_mode: bool
) -> _Pooling | None:
    if x.dim() != 4 or out.dim() != 4 or not is_ready(x, out) or shares_memory(x, out):
        return None
    layouts = layouts_of(x) & layouts_of(out)
    (R, S), (pad_h, pad_w), (dil_h, dil_w) = _pair(kernel), _pair(padding), _pair(dilation)
    stride_h, stride_w = (R, S) if stride is None or stride == [] else _pair(stride)
    if (
        not layouts
        or min(R, S, stride_h, stride_w, dil_h, dil_w) < 1
        or not (0 <= 2 * pad_h <= R and 0 <= 2 * pad_w <= S)
    ):
        return None
    N, C, H, W = x.shape
    P = _pooled(H, R, stride_h, pad_h, dil_h, ceil_mode)
    Q = _pooled(W, S, stride_w, pad_w, dil_w, ceil_mode)
    if out.shape != (N, C, P, Q):
        return None
    layout = _library.LAYOUTS[CHANNELS_LAST if CHANNELS_LAST in layouts else CONTIGUOUS]
    return _Pooling(
        _library.isa(), torch.get_num_threads(), N, C, H, W, R, S, P, Q, stride_h, stride_w, pad_h, pad_w, dil_h,
        dil_w, 0, layout, x_pitch=pitch_of(x), y_pitch=pitch_of(out),
    )  # fmt: skip


def _pooled(size: int, taps: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """PyTorch's rule: the last window starts within the image or its padding on the left."""
    room = size + 2 * pad - dilation * (taps - 1) - 1 + (stride - 1 if ceil_mode else 0)
    outputs = room // stride + 1
    return outputs - 1 if ceil_mode and (outputs - 1) * stride >= size + pad else outputs


def _pair(value: Pair) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])
