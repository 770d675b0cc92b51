"""aten's convolution called with our per-side padding; shared by native, native_layout and upcast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.problem import ConvProblem


def _even_padding(problem: ConvProblem) -> tuple[tuple[int, int], tuple[int, int, int, int] | None]:
    """Split the padding into what aten takes (one number per axis) and what is left for `F.pad`."""
    p = problem
    if p.symmetric_padding:
        return (p.pad_top, p.pad_left), None
    even_h, even_w = min(p.pad_top, p.pad_bottom), min(p.pad_left, p.pad_right)
    rest = (p.pad_left - even_w, p.pad_right - even_w, p.pad_top - even_h, p.pad_bottom - even_h)
    return (even_h, even_w), rest


def padding_copy_bytes(problem: ConvProblem) -> int:
    """Bytes of the padded copy of x that uneven padding costs, 0 where the padding is even."""
    p = problem
    if p.symmetric_padding:
        return 0
    return 2 * p.N * p.C * (p.H + p.pad_bottom + p.pad_top) * (p.W + p.pad_left + p.pad_right) * p.element_bytes


def native_forward(x: Tensor, weight: Tensor, problem: ConvProblem) -> Tensor:
    """y by `aten::convolution`, without bias."""
    padding, rest = _even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    return torch.conv2d(x, weight, None, problem.stride, padding, problem.dilation, problem.groups)


def native_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, problem: ConvProblem, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(grad_x, grad_weight) by one call of `aten::convolution_backward`; None where `needed` is False."""
    padding, rest = _even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad_y, x, weight, [0], problem.stride, padding, problem.dilation, False, [0, 0], problem.groups, [*needed, False]
    )
    if rest is not None and grad_x is not None:
        left, _, top, _ = rest
        grad_x = grad_x[:, :, top : top + problem.H, left : left + problem.W]
    return grad_x, grad_weight
