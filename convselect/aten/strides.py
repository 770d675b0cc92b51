"""The strides that aten's convolution gives its results; ours must be exactly the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, canonical_strides
from convselect.kernels._native_ops import even_padding, output_padding

Strides = tuple[int, ...]
_Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ResultStrides(NamedTuple):
    y: Strides
    grad_x: Strides
    grad_weight: Strides


# Looked up once: the first call of a problem finds torch's large dictionaries in no cache.
_functorch_level: Any = torch._C._functorch.peek_interpreter_stack
_select_backend: Any = torch._C._select_conv_backend
_format_of_backend: Any = torch._C._conv_determine_backend_memory_format
_MOVED: Any = (torch.channels_last, torch.channels_last_3d)


def in_functorch() -> bool:
    """Whether a torch.func transform or batched gradients are active; then tensors must pass through `apply`."""
    return _functorch_level() is not None


def result_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> ResultStrides:
    """Strides of y, grad_x and grad_weight for this very call. Costs 10 to 35 us: ask once per plan.

    aten picks a backend, the backend picks a memory format from x and weight together, and all three results are
    freshly allocated in it. aten itself is asked for both decisions, so that the result is right in every version.
    """
    if in_functorch():  # wrapped tensors do not give their layout
        x, weight = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, weight))
    padding, rest = even_padding(problem)
    if rest is None:
        return _evenly_padded(x, weight, problem, padding)
    padded = F.pad(x.detach(), rest)
    _, _, H, W = padded.shape
    grown = problem._replace(
        H=H, W=W, pad_top=padding[0], pad_bottom=padding[0], pad_left=padding[1], pad_right=padding[1]
    )
    strides = _evenly_padded(padded, weight, grown, padding)
    # grad_x is cut out of the gradient of the padded x, and cloned: that keeps the strides of a single image.
    grad = torch.empty_strided(padded.shape, strides.grad_x, device="meta")
    left, _, top, _ = rest
    cut = grad.narrow(2, top, problem.H).narrow(3, left, problem.W).clone()
    return strides._replace(grad_x=cut.stride())


def _evenly_padded(x: Tensor, weight: Tensor, problem: ConvProblem, padding: tuple[int, int]) -> ResultStrides:
    G = problem.groups
    backend = _select_backend(x, weight, None, problem.stride, padding, problem.dilation, False, (0, 0), G)
    shapes = (problem.y_shape, problem.x_shape, problem.weight_shape)
    return in_format_of(x, weight, backend, G, shapes)


def transposed_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> ResultStrides:
    """As `result_strides`, of a transposed convolution: y is what its problem calls x, and x (N, K, P, Q) the other way
    round."""
    if in_functorch():
        x, weight = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in (x, weight))
    p, padding = problem, (problem.pad_top, problem.pad_left)
    backend = _select_backend(x, weight, None, p.stride, padding, p.dilation, True, output_padding(p), p.groups)
    return in_format_of(x, weight, backend, p.groups, (p.x_shape, p.y_shape, p.weight_shape))


def in_format_of(x: Tensor, weight: Tensor, backend: Any, G: int, shapes: _Shapes) -> ResultStrides:
    """The strides of y, grad_x and grad_weight, which have these shapes."""
    if _format_of_backend(x, weight, backend) not in _MOVED:
        return _all_in(shapes, CONTIGUOUS, CONTIGUOUS)
    # The backend gets both operands in channels_last and derives the format from them again: with one channel or one
    # pixel that may be contiguous.
    x, weight = _moved(x), _moved(weight)
    by_group = G > 1 and "Slow" in str(backend)
    if by_group:
        x, weight = _slice(x, 1, x.shape[1] // G), _slice(weight, 0, weight.shape[0] // G)
    of_weight = suggested_layout(weight.shape, weight.stride())
    layout = CHANNELS_LAST if CHANNELS_LAST in (of_weight, suggested_layout(x.shape, x.stride())) else CONTIGUOUS
    # In the plain slow paths the weight alone decides the layout of its gradient.
    weight_layout = of_weight if str(backend).endswith(("Slow2d", "SlowTranspose2d")) else layout
    if not by_group:
        return _all_in(shapes, layout, weight_layout)
    # The results of the groups are concatenated, in the format that they suggest.
    (N, K, *y), (_, C, *image), (filters, *taps) = shapes
    parts = ((N, K // G, *y), (N, C // G, *image), (filters // G, *taps))
    return ResultStrides(
        *(
            canonical_strides(whole, suggested_layout(part, strides))
            for whole, part, strides in zip(shapes, parts, _all_in(parts, layout, weight_layout), strict=True)
        )
    )


def _all_in(shapes: _Shapes, layout: str, weight_layout: str) -> ResultStrides:
    y, x, weight = shapes
    return ResultStrides(
        canonical_strides(y, layout), canonical_strides(x, layout), canonical_strides(weight, weight_layout)
    )


def _moved(t: Tensor) -> Tensor:
    """t.contiguous(memory_format=torch.channels_last), without the memory; of volumes, in theirs."""
    return torch.empty_strided(t.shape, t.stride(), device="meta").contiguous(memory_format=_channels_last(t))


def _channels_last(t: Tensor) -> torch.memory_format:
    return torch.channels_last if t.dim() == 4 else torch.channels_last_3d


def _slice(t: Tensor, dim: int, size: int) -> Tensor:
    """The part of one group, as ATen passes it on: contiguous in the format that the whole tensor suggests."""
    whole = suggested_layout(t.shape, t.stride())
    memory_format = _channels_last(t) if whole == CHANNELS_LAST else torch.contiguous_format
    return t.narrow(dim, 0, size).contiguous(memory_format=memory_format)


def suggested_layout(shape: tuple[int, ...], strides: Strides) -> str:
    """The layout that ATen's `suggest_memory_format` finds for the strides of a dense tensor, also with one channel or
    one pixel."""
    smallest = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[d] < smallest or (d == 0 and smallest == strides[1]):
            return CONTIGUOUS
        smallest = strides[d] * max(shape[d], 1)
    return CHANNELS_LAST


def with_strides(result: Tensor, strides: Strides) -> Tensor:
    """`result` with exactly these strides, and not a view (autograd forbids in-place use of a view that a custom
    function returns). Copies only if the memory really is arranged otherwise."""
    if result.stride() != strides:
        shape = result.shape
        if _same_memory(shape, result.stride(), strides):
            result = result.as_strided(shape, strides)
        else:
            result = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device).copy_(result)
    return result.detach() if result._is_view() else result


def _same_memory(shape: torch.Size, have: Strides, want: Strides) -> bool:
    """Whether the strides are equal except in dimensions of size one, whose strides mean nothing."""
    return all(size == 1 or a == b for size, a, b in zip(shape, have, want, strict=True))
