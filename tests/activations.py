"""What the C kernels' epilogues apply, for tensors of any dtype.

By PyTorch's own functions but for gelu's two forms: 1 + erf and 1 + tanh lose the small values on the negative side."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SLOPE = 0.1


def gelu(y: Tensor) -> Tensor:
    return y * torch.erfc(-y / 2**0.5) / 2


def gelu_tanh(y: Tensor) -> Tensor:
    return y * torch.sigmoid((8 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    "relu": torch.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "tanh": torch.tanh,
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=SLOPE),
}
