"""`convselect.conv2d` and its like: the functions of `torch.nn.functional` with one more argument, the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect import graph
from convselect.eager import dispatch, kinds, volumes
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
        return dispatch.conv2d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        torch.conv2d(input, weight, bias, *given)  # type: ignore[arg-type, call-overload]  # its error, for what was given
        raise


def conv1d(
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
    """1-D convolution, as `convselect.conv2d`: the algorithms, choices and stored results are those of the 2-D
    convolution of an image of one row.

    Args:
        input: (N, C, L) or (C, L).
        weight: (K, C / groups, S).
        bias, stride, padding, dilation, groups: as of `torch.nn.functional.conv1d`.
        policy: as of `convselect.conv2d`.

    Returns:
        (N, K, Q), or (K, Q) for an unbatched input.

    Raises:
        NotApplicable, ValueError, RuntimeError, TypeError: as `convselect.conv2d`.
    """
    given = (stride, padding, dilation, groups)
    geometry = (_single(stride), _single(padding), _single(dilation), groups)
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv1d(input, weight, bias, geometry, policy)
    try:
        return kinds.conv1d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        F.conv1d(input, weight, bias, *given)  # type: ignore[arg-type, call-overload]  # its error
        raise


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    policy: str | None = None,
) -> Tensor:
    """Transposed 1-D convolution, as `convselect.conv_transpose2d` of an image of one row.

    Args:
        input: (N, C, L) or (C, L).
        weight: (C, K / groups, S).
        bias, stride, padding, output_padding, groups, dilation: as of `torch.nn.functional.conv_transpose1d`.
        policy: as of `convselect.conv2d`.

    Raises:
        NotApplicable, ValueError, RuntimeError, TypeError: as `convselect.conv2d`.
    """
    given = (stride, padding, output_padding, groups, dilation)
    geometry = (_single(stride), _single(padding), _single(output_padding), groups, _single(dilation))
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv_transpose1d(input, weight, bias, geometry, policy)
    try:
        return kinds.conv_transpose1d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        F.conv_transpose1d(input, weight, bias, *given)  # type: ignore[arg-type]  # its error
        raise


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    policy: str | None = None,
) -> Tensor:
    """Transposed 2-D convolution by the algorithm that is expected to be fastest.

    It is the grad-input map of the convolution that maps its result's shape to that of `input`, so the algorithms,
    choices and stored results are those of that problem. If `output_padding` is not less than the stride there is no
    such convolution, and PyTorch computes the call.

    Args:
        input: (N, C, H, W) or (C, H, W).
        weight: (C, K / groups, R, S).
        bias: (K,) or None.
        stride, padding, output_padding, groups, dilation: as of `torch.nn.functional.conv_transpose2d`.
        policy: as of `convselect.conv2d`.

    Raises:
        NotApplicable, ValueError, RuntimeError, TypeError: as `convselect.conv2d`.
    """
    given = (stride, padding, output_padding, groups, dilation)
    geometry = (_pair(stride), _pair(padding), _pair(output_padding), groups, _pair(dilation))
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv_transpose2d(input, weight, bias, geometry, policy)
    try:
        return kinds.conv_transpose2d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        F.conv_transpose2d(input, weight, bias, *given)  # type: ignore[arg-type]  # its error
        raise


def conv3d(
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
    """3-D convolution, as `convselect.conv2d`, on CPUs. If the kernel reaches along the depth alone (T x 1 x 1), or
    there is one slice, it is a convolution of images, with its algorithms, choices and stored results.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        weight: (K, C / groups, T, R, S).
        bias, stride, padding, dilation, groups: as of `torch.nn.functional.conv3d`.
        policy: as of `convselect.conv2d`.

    Returns:
        (N, K, O, P, Q), or (K, O, P, Q) for an unbatched input.

    Raises:
        NotApplicable, ValueError, RuntimeError, TypeError: as `convselect.conv2d`.
    """
    given = (stride, padding, dilation, groups)
    geometry = (_triple(stride), _triple(padding), _triple(dilation), groups)
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv3d(input, weight, bias, geometry, policy)
    try:
        return volumes.conv3d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        F.conv3d(input, weight, bias, *given)  # type: ignore[arg-type, call-overload]  # its error
        raise


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    policy: str | None = None,
) -> Tensor:
    """Transposed 3-D convolution, on CPUs: the grad-input of `convselect.conv3d`, as `convselect.conv_transpose2d` is
    that of `convselect.conv2d`.

    Args:
        input: (N, C, D, H, W) or (C, D, H, W).
        weight: (C, K / groups, T, R, S).
        bias, stride, padding, output_padding, groups, dilation: as of `torch.nn.functional.conv_transpose3d`.
        policy: as of `convselect.conv2d`.

    Raises:
        NotApplicable, ValueError, RuntimeError, TypeError: as `convselect.conv2d`.
    """
    given = (stride, padding, output_padding, groups, dilation)
    geometry = (_triple(stride), _triple(padding), _triple(output_padding), groups, _triple(dilation))
    if _is_dynamo_compiling() or _is_exporting():
        return graph.conv_transpose3d(input, weight, bias, geometry, policy)
    try:
        return volumes.conv_transpose3d(input, weight, bias, geometry, policy)  # type: ignore[no-any-return]
    except TypeError:
        F.conv_transpose3d(input, weight, bias, *given)  # type: ignore[arg-type]  # its error
        raise


def _single(value: Any) -> Any:
    """An int and a tuple of that int are the same call and share one cache entry."""
    return (value,) if type(value) is int else value


def _pair(value: Any) -> Any:
    return (value, value) if type(value) is int else value


def _triple(value: Any) -> Any:
    return (value, value, value) if type(value) is int else value
