"""aten's convolution called with our per-side padding; shared by native, native_layout, upcast and depthwise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CONTIGUOUS, ConvProblem, Direction, canonical_strides
from convselect.base.shortage import is_out_of_memory
from convselect.kernels import _native_volumes
from convselect.kernels._common import format_of, memory_format


def even_padding(problem: ConvProblem) -> tuple[tuple[int, int], tuple[int, int, int, int] | None]:
    """Split the padding into what aten takes (one number per axis) and what is left for `F.pad`."""
    p = problem
    if p.symmetric_padding:
        return (p.pad_top, p.pad_left), None
    even_h, even_w = min(p.pad_top, p.pad_bottom), min(p.pad_left, p.pad_right)
    rest = (p.pad_left - even_w, p.pad_right - even_w, p.pad_top - even_h, p.pad_bottom - even_h)
    return (even_h, even_w), rest


def native_workspace_bytes(problem: ConvProblem) -> int:
    """Bytes that aten may allocate: packed operands, copies in the layout that oneDNN prefers, the padded x if padding
    is uneven, and on slow paths (float64, dilated 16-bit) the unfolded image of each thread. oneDNN's own scratch
    memory is not included, since PyTorch does not allocate it."""
    p = problem
    unfolded = (p.C // p.groups) * p.T * p.R * p.S * p.O * p.P * p.Q * p.element_bytes
    padded = 0
    if not p.symmetric_padding:
        rows, columns = p.H + p.pad_bottom + p.pad_top, p.W + p.pad_left + p.pad_right
        padded = 2 * p.N * p.C * (p.D + p.pad_front + p.pad_back) * rows * columns * p.element_bytes
    if p.device == "cuda":  # both operands and the result moved to another layout; cuDNN's workspace comes on top
        return p.x_bytes + p.y_bytes + 2 * p.weight_bytes + padded
    # An image of the batch is unfolded per thread; PyTorch's slow weight gradient unfolds the whole batch.
    return 4 * (p.x_bytes + p.y_bytes) + 2 * p.weight_bytes + max(p.threads, p.N) * unfolded + padded


def overruns_in_channels_last(problem: ConvProblem) -> bool:
    """Whether oneDNN writes past the end of one of its buffers in the weight gradient of this geometry in
    channels_last: strided 1x1 kernels with less than a vector of input channels. Seen with oneDNN 3.12 under AVX2
    (C < 8) and AVX-512 (C < 16), from about 112 x 112 pixels on; later glibc aborts with "free(): invalid pointer" or
    worse."""
    p = problem
    return p.R == p.S == 1 and p.stride != (1, 1) and p.C // p.groups < 16 and p.device == "cpu" and not p.is_volume


def unsound_in_16_bit(problem: ConvProblem) -> bool:
    """Strided 16-bit convolutions on CPUs in which a kernel tap, or a whole window, meets nothing but padding. There
    oneDNN 3.12 gives garbage gradients or crashes, differently in the two layouts: a call that is right in one may be
    wrong in the other, so no call may be moved from one layout to the other."""
    p = problem
    if p.element_bytes > 2 or p.device != "cpu":
        return False
    if p.is_volume:  # not looked into: none is moved
        return p.stride != (1, 1) or p.stride_d > 1
    if p.stride == (1, 1) or not any(p.padding):
        return False
    axes = (
        (p.H, p.P, p.R, p.stride_h, p.dil_h, p.pad_top, p.pad_bottom),
        (p.W, p.Q, p.S, p.stride_w, p.dil_w, p.pad_left, p.pad_right),
    )
    return any(_axis_meets_only_padding(*axis) for axis in axes)


def wrong_in_channels_last(problem: ConvProblem) -> bool:
    """A superset of what oneDNN 3.12 (AVX-512, AVX2) computes wrongly, or with writes past the end of a buffer, in
    channels_last, besides `overruns_in_channels_last` and `unsound_in_16_bit`:

    - forward, strided, one input channel per group: outputs stay unwritten if the result is one column wide; with a
      single channel in all, glibc may abort. Seen with strides along one axis only.
    - weight gradients, strided and dilated: those of groups are off by their own size if the padding is wide.
    - 16-bit weight gradients with dilated rows, or of strided results at most two columns wide: garbage, up to 1e20.

    In contiguous layout the same calls are right.
    """
    p = problem
    if p.device != "cpu":
        return False
    strided, few = p.stride != (1, 1) or p.stride_d > 1, min(p.P, p.Q)
    if p.direction == Direction.FORWARD:
        return strided and (p.C == 1 or (p.groups == p.C and few == 1))
    if p.direction == Direction.BACKWARD_DATA:
        return False
    half = p.element_bytes == 2
    if p.is_volume:  # not looked into any further
        return strided or half or p.dilation != (1, 1) or p.dil_d > 1
    return (p.dilation != (1, 1) and (strided or half)) or (half and strided and few <= 2)


_MANY_TAPS = 4096  # no kernel, but views of one number have as many as they like


def _axis_meets_only_padding(
    size: int, out: int, taps: int, stride: int, dilation: int, before: int, after: int
) -> bool:
    # The first or the last window lies outside, or one may step over the image between two taps.
    if max(before, after) > dilation * (taps - 1) or size < dilation or taps > _MANY_TAPS:
        return True
    for tap in range(taps):
        offset = tap * dilation - before
        first = max(0, -(offset // stride))  # the first output whose tap is not in front of the image
        if first >= out or first * stride + offset >= size:
            return True
    return False


def plainly_contiguous(t: Tensor) -> Tensor:
    """The tensor, contiguous, and with the strides of a contiguous one: one channel fits both layouts, and aten goes by
    the strides."""
    return t.contiguous().as_strided(t.shape, canonical_strides(tuple(t.shape), CONTIGUOUS))


def native_forward(x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None = None) -> Tensor:
    """y by `aten::convolution`."""
    if x.dim() == 5:
        return _native_volumes.native_forward(x, weight, problem, bias)
    padding, rest = even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    return torch.conv2d(x, weight, bias, problem.stride, padding, problem.dilation, problem.groups)


def output_padding(problem: ConvProblem) -> tuple[int, int]:
    """Rows and columns of the padded x that no window reaches: the output padding of the transposed convolution that
    gives this x."""
    p = problem
    return (
        p.H + p.pad_top + p.pad_bottom - p.kernel_extent[0] - (p.P - 1) * p.stride_h,
        p.W + p.pad_left + p.pad_right - p.kernel_extent[1] - (p.Q - 1) * p.stride_w,
    )


def native_transposed(x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None = None) -> Tensor:
    """A transposed convolution by aten's own operator: the problem's grad-input of x, plus `bias` (C,). Its padding has
    to be symmetric."""
    if x.dim() == 5:
        return _native_volumes.native_transposed(x, weight, problem, bias)
    p = problem
    padding, more = (p.pad_top, p.pad_left), output_padding(p)
    return torch.conv_transpose2d(x, weight, bias, p.stride, padding, more, p.groups, p.dilation)


def native_forward_in_bands(x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None = None) -> Tensor:
    """y by one call of aten per image and band of rows: for want of memory, since aten may copy both operands of a call
    into other layouts, and the result out of one. If oneDNN finds no memory even so, by aten's own loops."""
    try:
        return _in_bands(x, weight, problem, bias, 16)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    enabled = torch._C._get_mkldnn_enabled()  # type: ignore[attr-defined]
    torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]  # other threads are only slower meanwhile
    try:
        return _in_bands(x, weight, problem, bias, 96)
    finally:
        torch._C._set_mkldnn_enabled(enabled)  # type: ignore[attr-defined]


def _in_bands(x: Tensor, weight: Tensor, p: ConvProblem, bias: Tensor | None, bands: int) -> Tensor:
    y = torch.empty(p.result_shape, dtype=x.dtype, device=x.device, memory_format=memory_format(p))
    if p.is_volume:
        _native_volumes.forward_in_bands(x, weight, p, bias, bands, y)
        return y
    rows = -(-p.P // bands)
    for n in range(p.N):
        for first in range(0, p.P, rows):
            last = min(first + rows, p.P)
            top = first * p.stride_h - p.pad_top
            bottom = (last - 1) * p.stride_h + (p.R - 1) * p.dil_h + 1 - p.pad_top
            band = x[n : n + 1, :, max(top, 0) : min(bottom, p.H)]
            band = F.pad(band, (p.pad_left, p.pad_right, max(-top, 0), max(bottom - p.H, 0)))
            y[n : n + 1, :, first:last] = torch.conv2d(band, weight, bias, p.stride, 0, p.dilation, p.groups)
    return y


def native_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, problem: ConvProblem, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_x, grad_weight, grad_bias) by one call of `aten::convolution_backward`; None if `needed` is False. With the
    weight's gradient the bias's is free; alone it is a sum."""
    if grad_y.dim() == 5:
        return _native_volumes.native_backward(grad_y, x, weight, problem, needed)
    padding, rest = even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    if needed[1] and overruns_in_channels_last(problem):
        grad_y, x, weight = (plainly_contiguous(t) for t in (grad_y, x, weight))
    bias_sizes = [problem.K] if needed[2] else None
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad_y, x, weight, bias_sizes, problem.stride, padding, problem.dilation, False, [0, 0], problem.groups, needed
    )
    if rest is not None and grad_x is not None:
        left, _, top, _ = rest
        grad_x = grad_x[:, :, top : top + problem.H, left : left + problem.W]
    return grad_x, grad_weight, grad_bias


def native_backward_data(grad_y: Tensor, weight: Tensor, problem: ConvProblem) -> Tensor:
    """grad_x alone. The operator needs x only for its shape and layout: memory that is never touched costs no time."""
    x = torch.empty(problem.x_shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=memory_format(problem))
    grad_x, _, _ = native_backward(grad_y, x, weight, problem, (True, False, False))
    assert grad_x is not None
    return grad_x


def native_backward_weight(x: Tensor, grad_y: Tensor, problem: ConvProblem) -> Tensor:
    """grad_weight alone; the operator needs the weight only for its shape and layout."""
    weight_format = format_of(problem.weight_layout, len(problem.weight_shape))
    weight = torch.empty(problem.weight_shape, dtype=x.dtype, device=x.device, memory_format=weight_format)
    _, grad_weight, _ = native_backward(grad_y, x, weight, problem, (False, True, False))
    assert grad_weight is not None
    return grad_weight
