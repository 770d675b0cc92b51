"""Compiled and exported graphs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None) -> Tensor:
    """As `eager.dispatch.conv2d`, while torch.compile or torch.export makes a graph."""
    from convselect.graph import traced  # needs dynamo

    return traced.conv2d(x, weight, bias, geometry, policy)
