"""A torch-function mode that makes functional convolutions choose: what `enabled()` is, and what converted subclasses
with a forward of their own run in.

It sees every torch function that its thread calls inside, sends `torch.conv2d` (the function behind `F.conv2d`) to
`convselect.conv2d`, `torch.conv1d`, `torch.conv3d` and the transposed ones likewise, and passes on all others.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from convselect.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_torch_conv1d: Any = torch.conv1d
_torch_conv2d: Any = torch.conv2d
_torch_conv3d: Any = torch.conv3d
_torch_conv_transpose1d: Any = torch.conv_transpose1d
_torch_conv_transpose2d: Any = torch.conv_transpose2d
_torch_conv_transpose3d: Any = torch.conv_transpose3d
NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


class Choosing(TorchFunctionMode):
    """Convolutions choose inside, with this policy; None: the context's."""

    def __init__(self, policy: str | None = None) -> None:
        super().__init__()
        self.policy_inside = policy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        choosing: Any
        names: tuple[str, ...]
        # Comparisons, which dynamo traces.
        if func is _torch_conv2d:
            choosing, names = conv2d, NAMES
        elif func is _torch_conv1d:
            choosing, names = conv1d, NAMES
        elif func is _torch_conv_transpose2d:
            choosing, names = conv_transpose2d, TRANSPOSED_NAMES
        elif func is _torch_conv_transpose1d:
            choosing, names = conv_transpose1d, TRANSPOSED_NAMES
        elif func is _torch_conv3d:
            choosing, names = conv3d, NAMES
        elif func is _torch_conv_transpose3d:
            choosing, names = conv_transpose3d, TRANSPOSED_NAMES
        else:
            return func(*args, **kwargs)
        if not complete(args, kwargs, names):
            return func(*args, **kwargs)
        if _is_dynamo_compiling():
            from convselect.graph import traced  # needs dynamo

            settled = traced.called_by_convselect()
        else:
            settled = called_by_convselect()
        if settled:
            return func(*args, **kwargs)
        return choosing(*args, **kwargs, policy=self.policy_inside)


def complete(args: Any, kwargs: Any, names: tuple[str, ...]) -> bool:
    """Whether number and names of the arguments are those of a convolution. PyTorch raises if they are not."""
    if not kwargs:
        return 2 <= len(args) <= len(names)
    given = {*names[: len(args)], *kwargs}
    return len(given) == len(args) + len(kwargs) and given.issubset(names) and given.issuperset(names[:2])


def called_by_convselect() -> bool:
    """Whether dispatch or an algorithm made this call, to run natively. Between it and this mode there may be other
    modes, which pass the call on."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("convselect.")
