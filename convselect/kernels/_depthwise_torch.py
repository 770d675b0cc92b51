"""`depthwise` without the C library: native calls that oneDNN computes with its fast depthwise kernel.

oneDNN's vectorised depthwise kernel declines zero padding wider than its register block (4 columns with AVX2, 6 with
AVX-512, 3 before), and the fallback is 15-40 times slower. Every direction is therefore rewritten as a *forward*
depthwise convolution with at most three columns of implicit padding; the rest of the padding is written out as zeros:

    forward          y = x * w
    backward data    grad_x = grad_y * flip(w), padded by extent - 1 - pad, at unit stride
    backward weight  grad_w[c, r, s] = sum over n of (x[n, c] * grad_y[n, c])[r, s]: every image and channel is a group,
                     grad_y is the kernel, stride and dilation change places

A channel multiplier K / C > 1 takes K / C calls, since the fast kernel needs as many outputs as groups. Sources:
the definition of the convolution's gradients; oneDNN's `jit_uni_dw_conv` conditions on `l_pad` and `r_pad`.
16-bit operands are computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels._common import cast_bytes, strides, why_not_depthwise
from convselect.kernels._contract import Algorithm, Grade, Params

IMPLICIT_PADDING = 3
"""Columns and rows of padding that the fast kernel takes on every instruction set."""

# The weight gradient adds up a kernel's whole area in one float32 register; larger outputs are cut into bands of rows.
_SUMMED_IN_A_ROW = 4096
# Up to this size the channels_last kernel is as fast as the contiguous one, and converting costs more than it saves.
_CHANNELS_LAST_EXTENT = 9

Pads = tuple[int, int, int, int]  # top, bottom, left, right; negative: cut off


def _split(pads: Pads) -> tuple[tuple[int, int], list[int] | None]:
    """Padding to leave to the convolution, and padding for `F.pad` to write out (None if there is none)."""
    top, bottom, left, right = pads
    implicit_h = max(0, min(top, bottom, IMPLICIT_PADDING))
    implicit_w = max(0, min(left, right, IMPLICIT_PADDING))
    rest = [left - implicit_w, right - implicit_w, top - implicit_h, bottom - implicit_h]
    return (implicit_h, implicit_w), rest if any(rest) else None


def _prepared(image: Tensor, problem: ConvProblem) -> Tensor:
    """The image in float32, in the layout that is fast for this kernel."""
    image = image.float()
    return image.contiguous() if max(problem.kernel_extent) > _CHANNELS_LAST_EXTENT else image


def _gradient_pads(p: ConvProblem) -> Pads:
    extent_h, extent_w = p.kernel_extent
    return (
        extent_h - 1 - p.pad_top,
        extent_h - 1 - p.pad_bottom,
        extent_w - 1 - p.pad_left,
        extent_w - 1 - p.pad_right,
    )


def _band_rows(p: ConvProblem) -> int:
    """Output rows per band of the weight gradient, nearly the same in every band."""
    bands = -(-p.P // max(1, _SUMMED_IN_A_ROW // p.Q))
    return -(-p.P // bands)


def _band_height(p: ConvProblem, rows: int) -> int:
    """Padded rows of x that `rows` rows of y depend on."""
    return (rows - 1) * p.stride_h + p.kernel_extent[0]


def _call_elements(images: int, channels: int, area: int, taps: int, out: int) -> int:
    """Elements that one convolution call may allocate: a copy of everything in oneDNN's channel-blocked layout."""
    blocked = -(-channels // 16) * 16
    return images * blocked * (area + out) + 2 * blocked * taps


class DepthwiseByNative(Algorithm):
    name = "depthwise"
    # Whether zero padding meets an infinite *weight* depends on the kernel that oneDNN picks, in native too (it differs
    # between AVX2 and AVX-512); a NaN or infinity in an image stays within the window of its pixel.
    spreads_nonfinite = False

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if (reason := why_not_depthwise("The depthwise algorithm", p)) is not None:
            return reason
        if p.device != "cpu":
            return f"The depthwise algorithm runs on CPUs; this problem is on {p.device}."
        if p.dtype == "float64":
            return "Without the C kernels the depthwise algorithm needs a kernel of oneDNN, which has none for float64."
        if p.direction == Direction.BACKWARD_DATA and p.stride != (1, 1):
            return f"Without the C kernels a depthwise data gradient needs stride 1; this one has {strides(p)}."
        return None

    def same_as_native(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.direction != Direction.FORWARD or p.K > p.C or p.element_bytes == 2:
            return None
        if p.layout == CHANNELS_LAST and max(p.kernel_extent) > _CHANNELS_LAST_EXTENT:
            return None
        if min(p.pad_top, p.pad_bottom) > IMPLICIT_PADDING or min(p.pad_left, p.pad_right) > IMPLICIT_PADDING:
            return None
        return f"With at most {IMPLICIT_PADDING} rows and columns of padding, native makes the same call."

    def error_grade(self, problem: ConvProblem) -> Grade:
        # The weight gradient's long sums measure up to three times native's error, at most 1.2e-6.
        weight_gradient = problem.direction == Direction.BACKWARD_WEIGHT
        return Grade.CLOSE if weight_gradient and problem.element_bytes > 2 else Grade.DIRECT

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p, multiplier = problem, problem.K // problem.C
        if p.direction == Direction.BACKWARD_WEIGHT:
            rows, images = _band_rows(p), p.N * p.C
            height, width = p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right
            band = height if rows >= p.P else _band_height(p, rows)
            # Rows and columns that the stride does not reach come out as further taps.
            taps = -(-(band - (rows - 1) * p.stride_h) // p.dil_h) * -(-(width - (p.Q - 1) * p.stride_w) // p.dil_w)
            # Dense copies of x, padded, and of grad_y (its layout is not in the problem); a gathered band of each.
            dense, banded = p.layout == CONTIGUOUS, rows < p.P
            written_out = banded or _split(p.padding)[1] is not None
            total = images * (height * width * (written_out + (not dense)) + p.P * p.Q)
            total += images * (band * width + rows * p.Q) if banded else 0
            total += _call_elements(1, images, band * width, rows * p.Q, taps) + 2 * images * taps + 2 * p.K * p.R * p.S
            return 4 * total + cast_bytes(p, p.N * p.C * p.H * p.W, p.N * p.K * p.P * p.Q)
        forward = p.direction == Direction.FORWARD
        height, width, out = (p.H, p.W, p.P * p.Q) if forward else (p.P, p.Q, p.H * p.W)
        top, bottom, left, right = (max(0, pad) for pad in (p.padding if forward else _gradient_pads(p)))
        padded = (height + top + bottom) * (width + left + right)
        streamed = p.N * (p.C if forward else p.K) * height * width
        # The operand made dense, and padded; a contiguous one that needs neither is used as it is.
        dense = p.layout == CONTIGUOUS and multiplier == 1
        _, rest = _split(p.padding if forward else _gradient_pads(p))
        total = (0 if dense else streamed + p.N * p.C * padded) + (0 if rest is None else p.N * p.C * padded)
        total += 3 * p.K * p.R * p.S  # cast, flipped, one multiplier's
        total += _call_elements(p.N, p.C, padded, p.R * p.S, out)
        if multiplier > 1 or p.element_bytes == 2:
            total += 2 * p.N * p.C * out
        return 4 * total + cast_bytes(p, streamed)

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, multiplier = problem, problem.K // problem.C
        implicit, rest = _split(p.padding)
        image, w = _prepared(x, p), weight.float()
        if rest is not None:
            image = F.pad(image, rest)
        if multiplier == 1:
            return torch.conv2d(image, w, None, p.stride, implicit, p.dilation, p.C).to(x.dtype)
        y = x.new_empty(p.y_shape)
        for m in range(multiplier):
            y[:, m::multiplier] = torch.conv2d(image, w[m::multiplier], None, p.stride, implicit, p.dilation, p.C)
        return y

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, multiplier = problem, problem.K // problem.C
        implicit, rest = _split(_gradient_pads(p))
        image, w = _prepared(grad_y, p), weight.float().flip(2, 3)
        grad_x: Tensor | None = None
        for m in range(multiplier):
            part = image[:, m::multiplier]
            if rest is not None:
                part = F.pad(part, rest)
            product = torch.conv2d(part, w[m::multiplier], None, 1, implicit, p.dilation, p.C)
            del part
            grad_x = product if grad_x is None else grad_x.add_(product)
            del product
        assert grad_x is not None
        return grad_x.to(grad_y.dtype)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, multiplier, groups = problem, problem.K // problem.C, problem.N * problem.C
        result = x.new_zeros(p.weight_shape)
        if p.N == 0:
            return result
        rows = _band_rows(p)
        implicit, rest = _split(p.padding if rows >= p.P else (0, 0, p.pad_left, p.pad_right))
        image = x.float()
        if rows < p.P:
            rest = [*(rest or (0, 0))[:2], p.pad_top, p.pad_bottom]
        if rest is not None:
            image = F.pad(image, rest)
        image = image.reshape(1, groups, *image.shape[2:])
        total = torch.zeros(p.weight_shape, dtype=torch.float32) if rows < p.P else None
        for m in range(multiplier):
            kernels = grad_y[:, m::multiplier].float().reshape(groups, 1, p.P, p.Q)
            for first in range(0, p.P, rows):
                kernel = kernels[:, :, first : first + rows]
                top = first * p.stride_h
                band = image if total is None else image[:, :, top : top + _band_height(p, kernel.shape[2])]
                taps = torch.conv2d(band, kernel, None, p.dilation, implicit, p.stride, groups)
                # Rows and columns that the stride does not reach come out as further taps.
                taps = taps[:, :, : p.R, : p.S].reshape(p.N, p.C, p.R, p.S).sum(0)
                if total is None:
                    result[m::multiplier, 0] = taps
                else:
                    total[m::multiplier, 0] += taps
        return result if total is None else total.to(x.dtype)
