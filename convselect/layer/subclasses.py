"""Converted layers of classes that derive from PyTorch's and have a forward of their own: standardised weights, "same"
padding, quantisation-aware training, a norm and an activation behind the convolution, and whatever else.

Such a forward calls `F.conv2d`, `self._conv_forward` or `super().forward`, directly or through helpers. None of these
can be replaced for one layer; so the forward runs inside `Choosing`, as under `enabled()`. As with PyTorch's own layers
the class is left alone but for its forward, which looks for the mark in the layer (`convert` exchanges it, at the first
layer of a class), so that types, copies and pickles stay what they are.

A mode costs 15 to 30 us a call, since it sees every function that the forward calls, sizes that are asked for included.
So a layer whose convolutions all turn out to be PyTorch's own, or that need no mode, runs without one: one call in
`_LOOK_AGAIN` looks whether that is still so.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from convselect.eager import dispatch, kinds, volumes
from convselect.eager.plan import ALL_NATIVE, plans
from convselect.layer.mode import NAMES, TRANSPOSED_NAMES, Choosing, called_by_convselect, complete

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_push: Any = torch._C._push_on_torch_function_stack  # type: ignore[attr-defined]
_pop: Any = torch._C._pop_torch_function_stack  # type: ignore[attr-defined]
_depth: Any = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
_mode_at: Any = torch._C._get_function_stack_at  # type: ignore[attr-defined]
_grad_enabled = torch.is_grad_enabled
_threads = torch.get_num_threads
_any_autocast: Any = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
_PLAIN = frozenset({Tensor, nn.Parameter})

_LOOK_AGAIN = 64
"""Calls of a kind without looking whether they need the mode."""
_MOST_KINDS = 64
"""Kinds of calls that are remembered of one layer."""
_FUNCTIONS: dict[Any, tuple[Any, int, tuple[str, ...]]] = {
    torch.conv1d: (kinds.conv1d, 1, NAMES),
    torch.conv2d: (dispatch.conv2d, 2, NAMES),
    torch.conv3d: (volumes.conv3d, 3, NAMES),
    torch.conv_transpose1d: (kinds.conv_transpose1d, 1, TRANSPOSED_NAMES),
    torch.conv_transpose2d: (kinds.conv_transpose2d, 2, TRANSPOSED_NAMES),
    torch.conv_transpose3d: (volumes.conv_transpose3d, 3, TRANSPOSED_NAMES),
}


class _Looking(Choosing):
    """As `Choosing`, and notes what became of the convolutions."""

    def __init__(self, policy: str | None) -> None:
        super().__init__(policy)
        self.chose = False
        """Whether one is not PyTorch's own for good."""
        self.decided = True
        """False if one was left to PyTorch for what goes on around it, as under a tracer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FUNCTIONS:
            return func(*args, **kwargs)
        eager, dimensions, names = _FUNCTIONS[func]
        if not complete(args, kwargs, names) or called_by_convselect():
            return func(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        geometry = tuple(_normalised(given, name, dimensions) for name in names[3:])
        seen: list[Any] = []
        try:
            y = eager(given["input"], given["weight"], given.get("bias"), geometry, self.policy_inside, seen=seen)
        except TypeError:
            self.decided = False
            return super().__torch_function__(func, types, args, kwargs)  # PyTorch's error
        self.decided &= len(seen) == 1 and seen[0] is not ALL_NATIVE
        self.chose |= any(plan.native is not True for plan in seen)
        return y


def _normalised(given: dict[str, Any], name: str, dimensions: int) -> Any:
    value = given.get(name, 0 if "padding" in name else 1)
    return (value,) * dimensions if type(value) is int and name != "groups" else value


class _Kind:
    """One kind of call of one layer."""

    __slots__ = ("left", "needs_mode")

    def __init__(self, needs_mode: bool) -> None:
        self.needs_mode = needs_mode
        self.left = _LOOK_AGAIN


_known: weakref.WeakKeyDictionary[nn.Module, dict[Any, _Kind]] = weakref.WeakKeyDictionary()
_modes: dict[str | None, Choosing] = {}
plans.followers.append(_known.clear)


def _around(stock: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`stock(layer, *args, **kwargs)`, whose convolutions choose."""
    policy = layer.policy
    if _is_dynamo_compiling() or _is_exporting():
        with Choosing(policy):
            return stock(layer, *args, **kwargs)
    x: Any = args[0] if args else None
    modes = _depth()
    if isinstance(x, Proxy) or (modes and _is_inside(modes, policy)):
        return stock(layer, *args, **kwargs)
    key = states = None
    if type(x) in _PLAIN and not modes:  # another mode, as `enabled`, would choose by another policy
        used = dispatch.settings_for(policy)
        if used.policy == "native" and not used.batch_invariant:
            return stock(layer, *args, **kwargs)
        if used.chooses and not used.batch_invariant:  # otherwise not one call may be PyTorch's
            key = (
                x.shape, x.stride(), x.dtype, x.device, x.requires_grad, layer.training, _grad_enabled(),
                _any_autocast(), _threads(), used,
            )  # fmt: skip
            states = _known.get(layer)
    known = None if states is None else states.get(key)
    mode: Choosing
    if key is None or (known is not None and known.needs_mode and known.left):
        mode = _modes.get(policy) or _modes.setdefault(policy, Choosing(policy))
    elif known is not None and known.left:
        known.left -= 1
        return stock(layer, *args, **kwargs)
    else:
        mode = _Looking(policy)
    _push(mode)
    try:
        y = stock(layer, *args, **kwargs)
    finally:
        _pop()
    if isinstance(mode, _Looking):
        if mode.decided:
            _remember(layer, key, mode.chose)
    elif known is not None:
        known.left -= 1
    return y


def _is_inside(modes: int, policy: str | None) -> bool:
    """Whether this is the forward of a base class, called by one that is inside already."""
    top: Any = _mode_at(modes - 1)
    return type(top) in (Choosing, _Looking) and top.policy_inside == policy


def _remember(layer: nn.Module, key: Any, needs_mode: bool) -> None:
    states = _known.get(layer)
    if states is None or len(states) >= _MOST_KINDS:
        states = _known[layer] = {}
    states[key] = _Kind(needs_mode)


# ---- classes --------------------------------------------------------------------------------------------------------


def own_method(kind: Any, base: Any) -> str | None:
    """The method in which a class computes something of its own instead of what `base` does; None if it has none."""
    if kind.forward is not base.forward:
        return "forward"
    own = getattr(kind, "_conv_forward", None)
    return None if own is getattr(base, "_conv_forward", None) else "_conv_forward"


def is_routed(kind: Any, base: Any) -> bool:
    """Whether layers of this class choose if they are marked."""
    name = own_method(kind, base)
    return name is None or hasattr(getattr(kind, name), "_convselect_routes")


def why_not_routed(kind: Any, base: Any) -> str | None:
    """A sentence if the method of its own cannot be exchanged; None if it can be."""
    name = own_method(kind, base)
    if name is None or isinstance(vars(_owner(kind, name))[name], types.FunctionType):
        return None
    return f"{kind.__module__}.{kind.__qualname__} has a `{name}` that is no Python function."


def route(kind: Any, base: Any) -> None:
    """Let the class's own method look for marks. Done once for the class that defines it, and for ever."""
    if is_routed(kind, base) or why_not_routed(kind, base) is not None:
        return
    name = own_method(kind, base)
    assert name is not None
    owner = _owner(kind, name)
    # A mix-in may belong to modules that are no convolutions.
    setattr(owner if issubclass(owner, nn.modules.conv._ConvNd) else kind, name, _looks_for_marks(getattr(kind, name)))


def _owner(kind: Any, name: str) -> Any:
    return next(one for one in kind.__mro__ if name in vars(one))


def _looks_for_marks(stock: Any) -> Any:
    around = _around

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._convselect:
            return around(stock, self, args, kwargs)
        return stock(self, *args, **kwargs)

    # With the globals of what it stands for: TorchScript compiles the source of that (`__wrapped__`), and looks up its
    # names here.
    made: Any = types.FunctionType(method.__code__, stock.__globals__, stock.__name__, None, method.__closure__)
    functools.update_wrapper(made, stock)
    made._convselect_routes = True
    return made
