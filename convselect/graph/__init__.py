"""Compiled and exported graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None) -> Tensor:
    """As `eager.dispatch.conv2d`, while torch.compile or torch.export makes a graph."""
    from convselect.graph import traced  # needs dynamo

    return traced.conv2d(x, weight, bias, geometry, policy)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None) -> Tensor:
    """As `eager.kinds.conv1d`, while a graph is made."""
    from convselect.graph import traced

    return traced.conv1d(x, weight, bias, geometry, policy)


def left_to_aten(
    native: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None
) -> Tensor:
    """A transposed or 3-D convolution while a graph is made: aten's own, which `native` is."""
    from convselect.graph import traced

    return traced.left_to_aten(native, x, weight, bias, geometry, policy)
