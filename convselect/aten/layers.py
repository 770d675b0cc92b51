"""From a convolution layer and its input, or a call of a functional convolution, to the problems of the call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
    return problems_of_call(x, weight, layer.bias, geometry, dimensions, transposed)


def problems_of_call(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, dimensions: int, transposed: bool
) -> list[ConvProblem]:
    """As `problems_of`, for the arguments of a functional convolution; its geometry as tuples."""
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
    if problem is None or not valid(problem, x, weight, bias, geometry, cast=bool(cast)):
        return []
    return [problem, *(gradients(x, weight, problem) if torch.is_grad_enabled() else ())]


_FUNCTIONS: dict[Any, tuple[int, bool]] = {
    torch.conv1d: (1, False),
    torch.conv2d: (2, False),
    torch.conv3d: (3, False),
    torch.conv_transpose1d: (1, True),
    torch.conv_transpose2d: (2, True),
    torch.conv_transpose3d: (3, True),
}
_GEOMETRY = {False: ("stride", "padding", "dilation", "groups"),
             True: ("stride", "padding", "output_padding", "groups", "dilation")}  # fmt: skip


class Noting(TorchFunctionMode):
    """Inside, `note(weight, problems)` is called for every functional convolution."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)  # first: it raises if arguments are wrong
        if func in _FUNCTIONS:
            dimensions, transposed = _FUNCTIONS[func]
            names = ("input", "weight", "bias", *_GEOMETRY[transposed])
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            geometry = tuple(_tuple(given, name, dimensions) for name in _GEOMETRY[transposed])
            operands = (given["input"], given["weight"], given.get("bias"))
            self.note(operands[1], problems_of_call(*operands, geometry, dimensions, transposed))
        return y


def _tuple(given: dict[str, Any], name: str, dimensions: int) -> Any:
    value = given.get(name, 0 if "padding" in name else 1)
    if name == "groups" or isinstance(value, str):
        return value
    return (value,) * dimensions if isinstance(value, int) else tuple(value)
