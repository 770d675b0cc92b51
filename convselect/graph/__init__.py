"""Compiled and exported graphs: each function is that of `eager` with its name, while torch.compile or torch.export
makes a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Call = Callable[[Tensor, Tensor, "Tensor | None", Any, "str | None"], Tensor]


def _traced(kind: str) -> Call:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, policy: str | None) -> Tensor:
        from convselect.graph import traced  # needs dynamo

        return traced.call(kind, x, weight, bias, geometry, policy)

    return call


conv1d = _traced("conv1d")
conv2d = _traced("conv2d")
conv3d = _traced("conv3d")
conv_transpose1d = _traced("conv_transpose1d")
conv_transpose2d = _traced("conv_transpose2d")
conv_transpose3d = _traced("conv_transpose3d")
