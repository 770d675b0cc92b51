"""Layers that choose their algorithms: an `nn.Conv2d` that `convert` has marked, and the drop-in `SelectedConv2d`.

Many tools recognise layers by `type(layer) is nn.Conv2d` (quantisation, fusion, counters, allow-lists of pickles), and
skip any other class without a word. So converting changes no class: it leaves a mark in the layer's `__dict__`, and
`nn.Conv2d.forward` gets a look at that mark, here, at import. A mark is plain data, hence whatever copies, stores,
replicates or reclasses a module takes it along; docs/compatibility.md says what the other ways would have lost.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from convselect import graph
from convselect.choice.choose import check_policy as check_policy
from convselect.eager import dispatch

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_PLAIN_CONV = nn.Conv2d(1, 1, 1, device="meta")
_MARK = "_convselect"
_stock_forward: Any = nn.Conv2d.forward
_stock_conv_forward = nn.Conv2d._conv_forward
_stock_extra_repr: Any = nn.Conv2d.extra_repr


class SelectedConv2d(nn.Conv2d):
    """Drop-in `torch.nn.Conv2d` that picks its algorithm per shape and direction, for code that builds its layers.
    Tools that ask for `type(layer) is nn.Conv2d` do not know it; layers that `convert` has marked, they do.

    Same arguments, parameters, state_dict keys, hooks, results and strides. `policy` ("auto", "verify", "measure",
    "native" or an algorithm's name; None for the context's) is an attribute and may be changed at any time.

    Raises:
        ValueError: `policy` names no algorithm.
    """

    # On the class: layers that an earlier version has converted and pickled have none of their own.
    policy: str | None = None

    def __init__(  # written out, since torch.nn.utils.skip_init and others read the signature
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros", device: Any = None,
        dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        if policy is not None:
            check_policy(policy)
            self.policy = policy

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # TorchScript compiles this branch, which is nn.Conv2d's own, and skips the rest.
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            if self.padding_mode != "zeros":
                padded = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                return F.conv2d(padded, weight, bias, self.stride, (0, 0), self.dilation, self.groups)
            return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        else:  # an else branch, because TorchScript skips nothing else
            if isinstance(input, Proxy):
                return self._as_leaf(input, weight, bias)
            padding = self.padding
            if self.padding_mode != "zeros":
                input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
                padding = (0, 0)
            geometry = (self.stride, padding, self.dilation, self.groups)
            if _is_dynamo_compiling() or _is_exporting():
                return graph.conv2d(input, weight, bias, geometry, self.policy)
            return dispatch.conv2d(input, weight, bias, geometry, self.policy)

    def _as_leaf(self, input: Any, *parameters: Any) -> Any:
        """Symbolic tracing: if the tracer would keep an nn.Conv2d as a leaf, keep this layer as a leaf. (The default
        tracer recognises leaves by the module that defines their class, so it traces into ours and calls this.)"""
        tracer = input.tracer
        path = tracer.path_of_module(self)
        if not tracer.is_leaf_module(_PLAIN_CONV, path):
            return nn.Conv2d._conv_forward(self, input, *parameters)
        for parameter in parameters:  # remove the unused nodes of parameters that nn.Conv2d.forward has just fetched
            if isinstance(parameter, Proxy) and not parameter.node.users:
                tracer.graph.erase_node(parameter.node)
        return tracer.create_proxy("call_module", path, (input,), {})

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.policy is None else f"{text}, policy={self.policy!r}"


# ---- marked layers --------------------------------------------------------------------------------------------------


@functools.wraps(_stock_forward)  # TorchScript compiles the source of what is wrapped, which is nn.Conv2d's own
def _forward(self: Any, input: Any) -> Any:
    if (
        not self._convselect
        or type(self)._conv_forward is not _stock_conv_forward  # somebody's own, as the next
        or "_conv_forward" in self.__dict__
        or isinstance(input, Proxy)  # a tracer that looks into nn.Conv2d
    ):
        return self._conv_forward(input, self.weight, self.bias)
    padding = self.padding
    if self.padding_mode != "zeros":
        input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        padding = (0, 0)
    geometry, policy = (self.stride, padding, self.dilation, self.groups), self.policy
    if _is_dynamo_compiling() or _is_exporting():
        self._conv_forward  # noqa: B018  dynamo guards on attributes, and not on what a dictionary lacks
        return graph.conv2d(input, self.weight, self.bias, geometry, policy)
    return dispatch.conv2d(input, self.weight, self.bias, geometry, policy)


@functools.wraps(_stock_forward)
def _forward_around_another(self: Any, input: Any) -> Any:
    """In place of `_forward`, if the forward found is not PyTorch's own, or not the one that `_forward` repeats."""
    return _forward(self, input) if self._convselect else _stock_forward(self, input)


def _extra_repr(self: Any) -> str:
    text: str = _stock_extra_repr(self)
    if _MARK in self.__dict__:
        policy = self.__dict__.get("policy")
        text += ", convselect" if policy is None else f", convselect, policy={policy!r}"
    return text


def _look_for_marks() -> None:
    """Make `nn.Conv2d.forward` look for marks. A layer without one has the class's False."""
    nn.Conv2d._convselect = False  # type: ignore[attr-defined]
    code = getattr(_stock_forward, "__code__", None)
    known = code is not None and code.co_names == ("_conv_forward", "weight", "bias") and not code.co_consts[1:]
    nn.Conv2d.forward = _forward if known else _forward_around_another  # type: ignore[method-assign]
    nn.Conv2d.extra_repr = _extra_repr  # type: ignore[method-assign]


_look_for_marks()


def mark(layer: nn.Conv2d, policy: str | None) -> None:
    """Make this layer choose; `policy` None leaves the one that it has, if any."""
    state = layer.__dict__
    state[_MARK] = True
    state["policy"] = state.get("policy") if policy is None else policy


def unmark(layer: nn.Module) -> None:
    """Undo `mark`; a layer without a mark stays as it is."""
    if layer.__dict__.pop(_MARK, None):
        layer.__dict__.pop("policy", None)


def chooses(module: nn.Module) -> bool:
    """Whether this is a converted layer, or a `SelectedConv2d`."""
    if isinstance(module, SelectedConv2d):
        return True
    kind: Any = type(module)
    return (
        isinstance(module, nn.Conv2d)
        and _MARK in module.__dict__
        and kind.forward is nn.Conv2d.forward
        and kind._conv_forward is _stock_conv_forward
    )


# ---- modules of users ---------------------------------------------------------------------------------------------


def check_module(target: Any, function: str, verb: str | None = None) -> None:
    """Raises TypeError if `target` is no nn.Module, naming the attributes to `verb` (default: `function`) instead: a
    pipeline's modules that contain convolutions, from its dict `components`, else from its own attributes."""
    if isinstance(target, nn.Module):
        return
    held: Any = None
    with contextlib.suppress(Exception):  # a property, which may raise anything
        held = target.components
    if not isinstance(held, dict):
        held = {} if isinstance(target, type) else getattr(target, "__dict__", {})
    names = [
        str(name)
        for name, value in held.items()
        if isinstance(value, nn.Module) and any(isinstance(m, nn.modules.conv._ConvNd) for m in value.modules())
    ]
    advice = f"; {verb or function} its modules instead: {', '.join(names)}" if names else ""
    raise TypeError(f"{function} takes an nn.Module, not {type(target).__name__}{advice}.")


def why_not_converted(module: nn.Module) -> str | None:
    """None if this is a plain nn.Conv2d, parametrized or not, which may be converted. "" if it is converted already,
    or not a convolution. Otherwise a sentence why it is not converted."""
    kind = type(module)
    if chooses(module):
        return ""
    if kind is nn.Conv2d or _is_parametrized_conv2d(kind):
        policy = module.__dict__.get("policy")
        return None if policy is None or isinstance(policy, str) else "It has an attribute `policy` of another kind."
    if isinstance(module, nn.LazyConv2d):
        return "It is lazy and has no weight before its first call; convert the model after that."
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "It is a transposed convolution; only nn.Conv2d is converted."
    if isinstance(module, nn.Conv1d | nn.Conv3d):
        return f"It is {kind.__name__}; only nn.Conv2d is converted."
    if isinstance(module, nn.Conv2d):
        return f"{kind.__module__}.{kind.__qualname__} is a subclass of nn.Conv2d and may compute something else."
    if "Conv" in kind.__name__ and "quantized" in kind.__module__:
        return "It is quantised; only floating-point nn.Conv2d is converted."
    return ""


def _is_parametrized_conv2d(kind: type) -> bool:
    """Whether this is the class that `torch.nn.utils.parametrize` makes for one module on top of nn.Conv2d."""
    return (
        kind.__bases__ == (nn.Conv2d,)
        and getattr(kind, "parametrizations", None) is None
        and (
            kind.__name__ == "ParametrizedConv2d" and "forward" not in vars(kind) and "_conv_forward" not in vars(kind)
        )
    )
