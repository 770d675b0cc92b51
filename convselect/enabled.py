"""`with convselect.enabled():` for code that calls `F.conv2d` itself and has no layer to convert.

It is a torch-function mode, so nothing outside is affected: it sees every torch function that its thread calls inside,
sends `torch.conv2d` (the function behind `F.conv2d`) to `convselect.conv2d`, `torch.conv1d`, `torch.conv3d` and the
transposed ones likewise, and passes on all others, which costs about 1 us each.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from convselect.base import settings
from convselect.functional import conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_torch_conv1d: Any = torch.conv1d
_torch_conv2d: Any = torch.conv2d
_torch_conv3d: Any = torch.conv3d
_torch_conv_transpose1d: Any = torch.conv_transpose1d
_torch_conv_transpose2d: Any = torch.conv_transpose2d
_torch_conv_transpose3d: Any = torch.conv_transpose3d
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_NAMES = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


class enabled(ContextDecorator, TorchFunctionMode):
    """Within this context every `F.conv2d` / `torch.conv2d` call of this thread is a `convselect.conv2d` call; the same
    holds for `conv1d`, `conv3d` and the transposed ones.

    Calls that a converted layer leaves to PyTorch (tensor subclasses, integers, tracers, invalid arguments) are left to
    it here as well. Plain `nn.Conv2d` layers choose too; converted ones keep their own policy. Nests; works as a
    decorator; local to the thread: other threads, also those started inside, are not affected. Backward passes take the
    choices of
    their forward, inside or outside. A checkpointed forward is recomputed by PyTorch's own convolution, since PyTorch
    suspends these modes in a backward pass; convert the layers if the recomputed bits must equal the first ones.

    Args:
        policy, budgets: as for `convselect.use`; they hold for converted layers inside as well.

    Raises:
        ValueError: on entry, if the precision is unknown or a workspace is negative.
    """

    def __init__(self, policy: str | None = None, **budgets: Any) -> None:
        super().__init__()
        self._policy, self._budgets = policy, budgets
        self._uses: list[AbstractContextManager[settings.Settings]] = []

    def _recreate_cm(self) -> enabled:
        # As a decorator: one object per call, so calls from several threads share nothing.
        return enabled(self._policy, **self._budgets)

    def __enter__(self) -> enabled:
        if self._policy is not None or self._budgets:
            context = settings.use(self._policy, **self._budgets)
            context.__enter__()
            self._uses.append(context)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._uses:
            self._uses.pop().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        choosing: Any
        names: tuple[str, ...]
        # Comparisons, which dynamo traces.
        if func is _torch_conv2d:
            choosing, names = conv2d, _NAMES
        elif func is _torch_conv1d:
            choosing, names = conv1d, _NAMES
        elif func is _torch_conv_transpose2d:
            choosing, names = conv_transpose2d, _TRANSPOSED_NAMES
        elif func is _torch_conv_transpose1d:
            choosing, names = conv_transpose1d, _TRANSPOSED_NAMES
        elif func is _torch_conv3d:
            choosing, names = conv3d, _NAMES
        elif func is _torch_conv_transpose3d:
            choosing, names = conv_transpose3d, _TRANSPOSED_NAMES
        else:
            return func(*args, **kwargs)
        if not _complete(args, kwargs, names):
            return func(*args, **kwargs)
        if _is_dynamo_compiling():
            from convselect.graph import traced  # needs dynamo

            settled = traced.called_by_convselect()
        else:
            settled = _called_by_convselect()
        return func(*args, **kwargs) if settled else choosing(*args, **kwargs)


def _complete(args: Any, kwargs: Any, names: tuple[str, ...]) -> bool:
    """Whether number and names of the arguments are those of a convolution. PyTorch raises if they are not."""
    if not kwargs:
        return 2 <= len(args) <= len(names)
    given = {*names[: len(args)], *kwargs}
    return len(given) == len(args) + len(kwargs) and given.issubset(names) and given.issuperset(names[:2])


def _called_by_convselect() -> bool:
    """Whether dispatch or an algorithm made this call, to run natively. Between it and this mode there may be other
    modes, which pass the call on."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("convselect.")


# ---- without a context ------------------------------------------------------------------------------------------


def enable() -> None:
    """As `enabled()`, for the calling thread until `disable()` in the same thread, or until the thread ends.

    Other threads, also those started later, are not affected and may call it themselves: torch-function modes are
    local to threads. (A backward pass takes the choices of its forward, in any thread.) A second `enable()` changes
    nothing. The policy is the context's (`convselect.use`), else the process's (`convselect.set_defaults`).
    """
    stack = _pop_all()
    try:
        if not any(isinstance(mode, _Permanent) for mode in stack):
            # Below all others, so that contexts that are open now can close; only the mode of the default device must
            # stay below.
            stack.insert(1 if stack and isinstance(stack[0], DeviceContext) else 0, _Permanent())
    finally:
        _push_all(stack)


def disable() -> None:
    """Undo `enable()` in the calling thread, if there was one. Contexts of `enabled()` stay as they are."""
    _push_all([mode for mode in _pop_all() if not isinstance(mode, _Permanent)])


class _Permanent(enabled):
    """The mode that `enable()` adds and `disable()` removes."""


def _pop_all() -> list[Any]:
    """Take all torch-function modes of this thread off the stack; lowest first."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    return modes[::-1]


def _push_all(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
