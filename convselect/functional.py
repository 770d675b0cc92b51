"""`convselect.conv2d`: `torch.nn.functional.conv2d` with one more argument, the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from convselect import graph
from convselect.eager import dispatch
from convselect.graph import ops as ops  # registers the operators of saved graphs

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    policy: str | None = None,
) -> Tensor:
    """2-D convolution by the algorithm that is expected to be fastest for this problem, per direction.

    Mirrors `torch.nn.functional.conv2d`: same results within rounding, same strides, same errors.

    Args:
        input: (N, C, H, W) or (C, H, W).
        weight: (K, C / groups, R, S).
        bias: (K,) or None.
        stride, padding, dilation, groups: as in PyTorch; `padding` also takes "same" and "valid".
        policy: "auto", "verify", "measure", "native" or the name of an algorithm; None for the context's
            (`convselect.use`), else the process's (`CONVSELECT_POLICY`).

    Returns:
        (N, K, P, Q), or (K, P, Q) for an unbatched input.

    Raises:
        NotApplicable: an algorithm named by `policy` cannot do this problem.
        ValueError: `policy` names no algorithm.
        RuntimeError, TypeError: as `torch.nn.functional.conv2d` for the same arguments.
    """
    given = (stride, padding, dilation, groups)
    # An int and a pair of that int are the same call and share one cache entry.
    if type(stride) is int:
        stride = (stride, stride)
    if type(padding) is int:
        padding = (padding, padding)
    if type(dilation) is int:
        dilation = (dilation, dilation)
    geometry = (stride, padding, dilation, groups)
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv2d(input, weight, bias, geometry, policy)
    try:
        return dispatch.conv2d(input, weight, bias, geometry, policy)
    except TypeError:
        torch.conv2d(input, weight, bias, *given)  # type: ignore[arg-type, call-overload]  # its error, for what was given
        raise
