"""The strides that aten's convolution gives its results; ours must be the same to the last number."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect._autograd import in_functorch
from convselect.kernels._native_ops import even_padding
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, canonical_strides

Strides = tuple[int, ...]


class ResultStrides(NamedTuple):
    y: Strides
    grad_x: Strides
    grad_weight: Strides


def result_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> ResultStrides:
    """Strides of y, grad_x and grad_weight for this very call. Costs a few microseconds: ask once per plan.

    aten picks a backend, the backend a memory format from x and weight together, and all three results are freshly
    allocated in it. Both decisions are asked of aten itself, so that they cannot drift apart from it.
    """
    if in_functorch():  # wrapped tensors do not answer questions about their layout
        x, weight = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, weight))
    padding, rest = even_padding(problem)
    if rest is not None:
        x = F.pad(x.detach(), rest)
    backend = torch._C._select_conv_backend(
        x, weight, None, problem.stride, padding, problem.dilation, False, (0, 0), problem.groups
    )
    memory_format = torch._C._conv_determine_backend_memory_format(x, weight, backend)
    layout = weight_layout = CONTIGUOUS
    if memory_format == torch.channels_last:
        # The backend gets both operands made channels_last and reads the format off them again: one channel or one
        # pixel may then say contiguous.
        moved_weight = _format_once_moved(weight)
        if CHANNELS_LAST in (moved_weight, _format_once_moved(x)):
            layout = weight_layout = CHANNELS_LAST
        # The slow path asks the weight alone for the layout of its gradient.
        if str(backend).endswith("Slow2d"):
            weight_layout = moved_weight
    return ResultStrides(
        canonical_strides(problem.y_shape, layout),
        canonical_strides(problem.x_shape, layout),
        canonical_strides(problem.weight_shape, weight_layout),
    )


def _format_once_moved(t: Tensor) -> str:
    """What ATen's `suggest_memory_format` says of t.contiguous(memory_format=torch.channels_last)."""
    moved = torch.empty_strided(t.shape, t.stride(), device="meta").contiguous(memory_format=torch.channels_last)
    sizes, strides = moved.shape, moved.stride()
    smallest = 0
    for d in (1, 3, 2, 0):
        if strides[d] < smallest or (d == 0 and smallest == strides[1]):
            return CONTIGUOUS
        smallest = strides[d] * max(sizes[d], 1)
    return CHANNELS_LAST


def with_strides(result: Tensor, strides: Strides) -> Tensor:
    """`result` with exactly these strides, and not a view (autograd forbids in-place use of a view that a custom
    function returns). Copies only where the memory really is arranged otherwise."""
    if result.stride() != strides:
        shape = result.shape
        if _same_memory(shape, result.stride(), strides):
            result = result.as_strided(shape, strides)
        else:
            result = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)
    return result.detach() if result._is_view() else result


def _same_memory(shape: torch.Size, have: Strides, want: Strides) -> bool:
    """Whether the strides differ only in dimensions of size one, where they mean nothing."""
    return all(size == 1 or a == b for size, a, b in zip(shape, have, want, strict=True))
