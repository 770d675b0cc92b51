"""`with convselect.enabled():` for code that calls `F.conv2d` itself and has no layer to convert.

It is a torch-function mode (`layer/mode.py`), so nothing outside is affected; every torch function inside costs about
1 us more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

import torch
from torch.utils._device import DeviceContext

from convselect.base import settings
from convselect.layer.mode import Choosing


class enabled(ContextDecorator, Choosing):
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
