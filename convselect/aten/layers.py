"""From a convolution layer and its input to the problems of the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect.aten.arguments import (
    autocast_dtype,
    cast_like_autocast,
    gradients_of,
    one_row,
    problem_of,
    transposed_gradients_of,
    transposed_problem,
    valid,
)
from convselect.aten.volumes import (
    transposed_volume_gradients,
    transposed_volume_problem,
    volume_gradients,
    volume_problem_of,
)
from convselect.base.problem import ConvProblem

OF: dict[tuple[bool, bool], tuple[Any, Any]] = {
    (False, False): (problem_of, gradients_of),
    (False, True): (transposed_problem, transposed_gradients_of),
    (True, False): (volume_problem_of, volume_gradients),
    (True, True): (transposed_volume_problem, transposed_volume_gradients),
}
"""(whether of volumes, whether transposed) -> what makes the problem of a call, and those of its gradients."""


def problems_of(layer: Any, x: Tensor, output_size: Any = None) -> list[ConvProblem]:
    """The problems of a convolution layer for this input: its own, and under grad mode that of each gradient that would
    be computed. Empty if the call is left to aten.

    Args:
        layer: one of `torch.nn`: Conv1d, Conv2d, Conv3d, or transposed.
        output_size: the further argument of a transposed layer's forward.
    """
    weight = layer.weight
    geometry: Any = (layer.stride, layer.padding, layer.dilation, layer.groups)
    transposed = isinstance(layer, torch.nn.modules.conv._ConvTransposeNd)
    dimensions = len(layer.kernel_size)
    if transposed:
        more = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, dimensions, layer.dilation
        )
        geometry = (layer.stride, layer.padding, tuple(more), layer.groups, layer.dilation)
    elif layer.padding_mode != "zeros":
        x = torch.nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        geometry = (layer.stride, (0,) * dimensions, layer.dilation, layer.groups)
    if dimensions == 1:
        raised = one_row(x, weight, geometry)
        if raised is None:
            return []
        x, weight, geometry = raised
    elif x.dim() == dimensions + 1:
        x = x.unsqueeze(0)
    cast = autocast_dtype(x)
    if cast:
        x, weight = cast_like_autocast(x, cast), cast_like_autocast(weight, cast)
    of, gradients = OF[dimensions == 3, transposed]
    problem = of(x, weight, geometry)
    if problem is None or not valid(problem, x, weight, layer.bias, geometry, cast=bool(cast)):
        return []
    return [problem, *(gradients(x, weight, problem) if torch.is_grad_enabled() else ())]
