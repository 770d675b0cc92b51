"""Small helpers that several algorithms share."""

from __future__ import annotations

import torch

from convselect.base.problem import CHANNELS_LAST, ConvProblem


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """float32 for 16-bit problems (accumulation is never in 16 bit), else the problem's own."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def compute_element_bytes(problem: ConvProblem) -> int:
    return 8 if problem.dtype == "float64" else 4


def cast_bytes(problem: ConvProblem, *element_counts: int) -> int:
    """Bytes of float32 copies of operands with these numbers of elements; 0 if the problem is not 16-bit."""
    return 0 if problem.element_bytes > 2 else 4 * sum(element_counts)


def memory_format(problem: ConvProblem) -> torch.memory_format:
    return format_of(problem.layout, 5 if problem.is_volume else 4)


def format_of(layout: str, sizes: int) -> torch.memory_format:
    """The memory format of tensors in this layout with so many sizes."""
    if layout != CHANNELS_LAST:
        return torch.contiguous_format
    return torch.channels_last if sizes == 4 else torch.channels_last_3d


def add_bias(result: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`result` (N, K, ...) with bias (K,) added in place."""
    return result.add_(bias.view(-1, *(1,) * (result.dim() - 2)))


def why_not_depthwise(what: str, problem: ConvProblem) -> str | None:
    """A sentence why `what`, an algorithm for depthwise convolutions, does not apply; None if it does."""
    if problem.is_depthwise:
        return None
    return f"{what} needs one input channel per group and several groups; this is not a depthwise convolution."


def strides(problem: ConvProblem) -> str:
    return f"stride {problem.stride_h}x{problem.stride_w}"
