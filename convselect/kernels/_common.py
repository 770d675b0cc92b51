"""Small helpers that several algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor

from convselect.problem import CHANNELS_LAST, ConvProblem


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """float32 for 16-bit problems (accumulation is never in 16 bit), else the problem's own."""
    return torch.float64 if problem.dtype == "float64" else torch.float32


def compute_element_bytes(problem: ConvProblem) -> int:
    return 8 if problem.dtype == "float64" else 4


def cast_bytes(problem: ConvProblem, *element_counts: int) -> int:
    """Bytes of float32 copies of operands with so many elements; 0 where the problem is not 16-bit."""
    return 0 if problem.element_bytes > 2 else 4 * sum(element_counts)


def memory_format(problem: ConvProblem) -> torch.memory_format:
    return torch.channels_last if problem.layout == CHANNELS_LAST else torch.contiguous_format


def flipped_transposed(weight: Tensor, groups: int) -> Tensor:
    """The weight whose *forward* convolution is the data gradient at stride 1: (K, C/G, R, S) -> (C, K/G, R, S), taps
    rotated by 180 degrees, input and output channels exchanged within each group."""
    K, c_per_group, R, S = weight.shape
    grouped = weight.reshape(groups, K // groups, c_per_group, R, S).transpose(1, 2)
    return grouped.reshape(groups * c_per_group, K // groups, R, S).flip(2, 3)
