"""aten's convolution of volumes called with our per-side padding: the part of `_native_ops` for five sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem

Three = tuple[int, int, int]


def steps(problem: ConvProblem) -> tuple[Three, Three]:
    """(stride, dilation), depth first."""
    p = problem
    return (p.stride_d, p.stride_h, p.stride_w), (p.dil_d, p.dil_h, p.dil_w)


def even_padding(problem: ConvProblem) -> tuple[Three, tuple[int, ...] | None]:
    """Split the padding into what aten takes (one number per axis) and what is left for `F.pad`, last axis first."""
    p = problem
    sides = ((p.pad_front, p.pad_back), (p.pad_top, p.pad_bottom), (p.pad_left, p.pad_right))
    depth, height, width = (min(of) for of in sides)
    if p.symmetric_padding:
        return (depth, height, width), None
    return (depth, height, width), tuple(side - min(of) for of in reversed(sides) for side in of)


def output_padding(problem: ConvProblem) -> Three:
    """Slices, rows and columns of the padded x that no window reaches."""
    p = problem
    return (
        p.D + p.pad_front + p.pad_back - p.depth_extent - (p.O - 1) * p.stride_d,
        p.H + p.pad_top + p.pad_bottom - p.kernel_extent[0] - (p.P - 1) * p.stride_h,
        p.W + p.pad_left + p.pad_right - p.kernel_extent[1] - (p.Q - 1) * p.stride_w,
    )


def native_forward(x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor:
    """y (N, K, O, P, Q) by `aten::convolution`."""
    (stride, dilation), (padding, rest) = steps(problem), even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    return torch.conv3d(x, weight, bias, stride, padding, dilation, problem.groups)


def native_transposed(x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor:
    """The problem's grad-input of x, plus `bias` (C,). Its padding has to be symmetric."""
    p, (stride, dilation) = problem, steps(problem)
    padding, more = (p.pad_front, p.pad_top, p.pad_left), output_padding(p)
    return torch.conv_transpose3d(x, weight, bias, stride, padding, more, p.groups, dilation)


def native_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, problem: ConvProblem, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_x, grad_weight, grad_bias) by one call of `aten::convolution_backward`; None if `needed` is False."""
    p, (stride, dilation), (padding, rest) = problem, steps(problem), even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    bias_sizes = [p.K] if needed[2] else None
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        grad_y, x, weight, bias_sizes, stride, padding, dilation, False, [0, 0, 0], p.groups, needed
    )
    if rest is not None and grad_x is not None:
        left, _, top, _, front, _ = rest
        grad_x = grad_x[:, :, front : front + p.D, top : top + p.H, left : left + p.W]
    return grad_x, grad_weight, grad_bias


def forward_in_bands(
    x: Tensor, weight: Tensor, problem: ConvProblem, bias: Tensor | None, bands: int, y: Tensor
) -> None:
    """y by one call of aten per image and band of slices."""
    p, (stride, dilation) = problem, steps(problem)
    slices = -(-p.O // bands)
    for n in range(p.N):
        for first in range(0, p.O, slices):
            last = min(first + slices, p.O)
            front = first * p.stride_d - p.pad_front
            back = (last - 1) * p.stride_d + p.depth_extent - p.pad_front
            band = x[n : n + 1, :, max(front, 0) : max(min(back, p.D), 0)]
            missing = (max(-front, 0), back - front - max(-front, 0) - band.shape[2])
            band = F.pad(band, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom, *missing))
            y[n : n + 1, :, first:last] = torch.conv3d(band, weight, bias, stride, 0, dilation, p.groups)
