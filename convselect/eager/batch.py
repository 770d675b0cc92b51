"""Batch invariance: image i of a batch gets, bit for bit, what `x[i:i+1]` alone gets, forward and in grad-input.

Libraries and ranked choices both look at N: another batch size, another algorithm or another cut of the work, other
bits. So here the choice is the one for a single image, and each image is computed by it alone. Algorithms that are
shown to give every image the same bits in any batch (`Algorithm.batch_invariant`) run the batch at once.

Images are handed over in one of two layouts, with the strides of a fresh tensor and 64-byte aligned: matrix products
may sum in another order if memory is aligned otherwise, and a slice of a batch starts anywhere.

A weight's gradient is a sum over the batch: it is computed as without this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, canonical_strides, layout_of
from convselect.base.settings import Settings
from convselect.choice.choose import Choice
from convselect.kernels._common import format_of
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME

_ALIGNMENT = 64

# (choice, operands, problem, bias) -> the result, and for `Attempt` None if it has to be left to native.
Attempt = Callable[[Choice, Tensor, Tensor, ConvProblem, Tensor | None], Tensor | None]
Native = Callable[[Tensor, Tensor, ConvProblem, Tensor | None], Tensor]


def single(problem: ConvProblem) -> ConvProblem:
    """The problem of one image: what is chosen by. The weight's gradient has none."""
    return problem if problem.direction == Direction.BACKWARD_WEIGHT else problem._replace(N=1)


def run(
    choose: Callable[[ConvProblem], Choice],
    attempt: Attempt,
    native: Native,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    strides: tuple[int, ...],
    bias: Tensor | None,
    settings: Settings,
) -> Tensor:
    """y or grad_x of a whole batch; with these strides if there is more than one image.

    Args:
        choose: the choice for a problem with N = 1.
        a: x (N, C, H, W), or grad_y (N, K, P, Q).
        b: weight (K, C/groups, R, S).
        bias: (K,), in the forward direction.
    """
    # All images have the same strides, and one alone has a layout even if the batch has none: a[::2], a.expand.
    layout = CHANNELS_LAST if layout_of(a[:1]) == CHANNELS_LAST else CONTIGUOUS
    one = problem._replace(N=1, layout=layout)
    choice = choose(one)
    if problem.N > 1 and problem.layout == layout and _at_once(choice, problem, one, settings):
        whole = attempt(choice, a, b, problem, bias)
        if whole is not None:
            return whole
        # Otherwise something in some image made it native's business: then only in that one.

    def alone(image: Tensor) -> Tensor:
        image = _canonical(image, layout)
        result = attempt(choice, image, b, one, bias)
        return native(image, b, one, bias) if result is None else result

    if problem.N == 1:
        return alone(a)
    results = torch.empty_strided(problem.result_shape, strides, dtype=a.dtype, device=a.device)
    for n in range(problem.N):
        results[n : n + 1] = alone(a[n : n + 1])
    return results


def _at_once(choice: Choice, problem: ConvProblem, one: ConvProblem, settings: Settings) -> bool:
    algorithm: Algorithm = BY_NAME[choice.algorithm]
    if not algorithm.batch_invariant(one) or algorithm.why_not(problem) is not None:
        return False
    return choice.source == "forced" or algorithm.workspace_bytes(problem) <= settings.workspace_bytes


def _canonical(image: Tensor, layout: str) -> Tensor:
    image = image.contiguous(memory_format=format_of(layout, image.dim()))
    strides = canonical_strides(tuple(image.shape), layout)
    if image.stride() != strides:
        image = image.as_strided(image.shape, strides)
    return image.clone() if image.data_ptr() % _ALIGNMENT else image


__all__ = ["run", "single"]
