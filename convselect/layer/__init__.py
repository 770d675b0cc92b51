"""Layers that choose their algorithms: an `nn.Conv2d` that `convert` has marked, and the drop-in `SelectedConv2d`; the
same for `nn.Conv1d`, `nn.Conv3d` and the transposed ones.

Many tools recognise layers by `type(layer) is nn.Conv2d` (quantisation, fusion, counters, allow-lists of pickles), and
skip any other class without a word. So converting changes no class: it leaves a mark in the layer's `__dict__`, and
`nn.Conv2d.forward` gets a look at that mark, here, at import. A mark is plain data, hence whatever copies, stores,
replicates or reclasses a module takes it along; docs/compatibility.md says what the other ways would have lost.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.conv import _ConvNd

from convselect import graph
from convselect.choice.choose import check_policy as check_policy
from convselect.eager import dispatch, kinds, volumes
from convselect.layer import subclasses

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_exporting = torch.compiler.is_exporting
_PLAIN_CONV = nn.Conv2d(1, 1, 1, device="meta")
_MARK = "_convselect"
_stock_extra_repr: Any = nn.Conv2d.extra_repr


class _Choosing:
    """What the classes below add to PyTorch's."""

    # On the class: layers that an earlier version has converted and pickled have none of their own.
    policy: str | None = None

    def _set_policy(self, policy: str | None) -> None:
        if policy is not None:
            check_policy(policy)
            self.policy = policy

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return text if self.policy is None else f"{text}, policy={self.policy!r}"


class SelectedConv2d(_Choosing, nn.Conv2d):
    """Drop-in `torch.nn.Conv2d` that picks its algorithm per shape and direction, for code that builds its layers.
    Tools that ask for `type(layer) is nn.Conv2d` do not know it; layers that `convert` has marked, they do.

    Same arguments, parameters, state_dict keys, hooks, results and strides. `policy` ("auto", "verify", "measure",
    "native" or an algorithm's name; None for the context's) is an attribute and may be changed at any time.

    Raises:
        ValueError: `policy` names no algorithm.
    """

    def __init__(  # written out, since torch.nn.utils.skip_init and others read the signature
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros", device: Any = None,
        dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._set_policy(policy)

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
            return dispatch.conv2d(input, weight, bias, geometry, self.policy)  # type: ignore[no-any-return]

    def _as_leaf(self, input: Any, *parameters: Any) -> Any:
        found = _leaf(self, _PLAIN_CONV, input)
        if found is None:
            return nn.Conv2d._conv_forward(self, input, *parameters)
        for parameter in parameters:  # remove the unused nodes of parameters that nn.Conv2d.forward has just fetched
            if isinstance(parameter, Proxy) and not parameter.node.users:
                input.tracer.graph.erase_node(parameter.node)
        return found


def _leaf(layer: Any, plain: nn.Module, *inputs: Any) -> Any:
    """Symbolic tracing: if the tracer would keep PyTorch's layer as a leaf, keep this one as a leaf; None if not. (The
    default tracer recognises leaves by the module that defines their class, so it traces into ours and calls this.)"""
    tracer = inputs[0].tracer
    path = tracer.path_of_module(layer)
    return tracer.create_proxy("call_module", path, inputs, {}) if tracer.is_leaf_module(plain, path) else None


class SelectedConv1d(_Choosing, nn.Conv1d):
    """As `SelectedConv2d`, for `torch.nn.Conv1d`."""

    _convselect = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros", device: Any = None,
        dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._set_policy(policy)


class SelectedConvTranspose1d(_Choosing, nn.ConvTranspose1d):
    """As `SelectedConv2d`, for `torch.nn.ConvTranspose1d`."""

    _convselect = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = True, dilation: Any = 1, padding_mode: Any = "zeros",
        device: Any = None, dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._set_policy(policy)


class SelectedConvTranspose2d(_Choosing, nn.ConvTranspose2d):
    """As `SelectedConv2d`, for `torch.nn.ConvTranspose2d`."""

    _convselect = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = True, dilation: Any = 1, padding_mode: Any = "zeros",
        device: Any = None, dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._set_policy(policy)


class SelectedConv3d(_Choosing, nn.Conv3d):
    """As `SelectedConv2d`, for `torch.nn.Conv3d`."""

    _convselect = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: Any = "zeros", device: Any = None,
        dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._set_policy(policy)


class SelectedConvTranspose3d(_Choosing, nn.ConvTranspose3d):
    """As `SelectedConv2d`, for `torch.nn.ConvTranspose3d`."""

    _convselect = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = True, dilation: Any = 1, padding_mode: Any = "zeros",
        device: Any = None, dtype: Any = None, *, policy: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._set_policy(policy)


SELECTED: dict[Any, Any] = {
    nn.Conv1d: SelectedConv1d,
    nn.Conv2d: SelectedConv2d,
    nn.Conv3d: SelectedConv3d,
    nn.ConvTranspose1d: SelectedConvTranspose1d,
    nn.ConvTranspose2d: SelectedConvTranspose2d,
    nn.ConvTranspose3d: SelectedConvTranspose3d,
}
"""PyTorch's layers that may be converted -> our classes."""
_SELECTED = tuple(SELECTED.values())


# ---- marked layers --------------------------------------------------------------------------------------------------


def _forward_of(kind: Any, eager: Any, traced: Any) -> Any:
    """In place of `nn.Conv2d.forward`, `nn.Conv1d.forward` or `nn.Conv3d.forward`."""
    stock, conv_forward = kind.forward, kind._conv_forward
    plain = kind(1, 1, 1, device="meta")

    @functools.wraps(stock)  # TorchScript compiles the source of what is wrapped, which is PyTorch's own
    def forward(self: Any, input: Any) -> Any:
        if (
            not self._convselect
            or type(self)._conv_forward is not conv_forward  # somebody's own, as the next
            or "_conv_forward" in self.__dict__
            or isinstance(input, Proxy)  # a tracer that looks into nn.Conv2d
        ):
            if isinstance(self, _Choosing) and isinstance(input, Proxy) and kind is not nn.Conv2d:
                found = _leaf(self, plain, input)
                if found is not None:
                    return found
            return self._conv_forward(input, self.weight, self.bias)
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * len(self.stride)
        geometry, policy = (self.stride, padding, self.dilation, self.groups), self.policy
        if _is_dynamo_compiling() or _is_exporting():
            self._conv_forward  # noqa: B018  dynamo guards on attributes, and not on what a dictionary lacks
            return traced(input, self.weight, self.bias, geometry, policy)
        return eager(input, self.weight, self.bias, geometry, policy)

    @functools.wraps(stock)
    def around_another(self: Any, input: Any) -> Any:
        """If the forward found is not PyTorch's own, or not the one that `forward` repeats."""
        return forward(self, input) if self._convselect else stock(self, input)

    code = getattr(stock, "__code__", None)
    known = code is not None and code.co_names == ("_conv_forward", "weight", "bias") and not code.co_consts[1:]
    return forward if known else around_another


def _transposed_forward_of(kind: Any, dimensions: int, eager: Any, traced: Any) -> Any:
    """In place of `nn.ConvTranspose2d.forward` and its like."""
    stock = kind.forward
    plain = kind(1, 1, 1, device="meta")

    @functools.wraps(stock)
    def forward(self: Any, input: Any, output_size: Any = None) -> Any:
        if not self._convselect or self.padding_mode != "zeros" or isinstance(input, Proxy):
            if isinstance(self, _Choosing) and isinstance(input, Proxy):
                found = _leaf(self, plain, input, *(() if output_size is None else (output_size,)))
                if found is not None:
                    return found
            return stock(self, input, output_size)
        more = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dimensions, self.dilation
        )
        geometry = (self.stride, self.padding, tuple(more), self.groups, self.dilation)
        if _is_dynamo_compiling() or _is_exporting():
            return traced(input, self.weight, self.bias, geometry, self.policy)
        return eager(input, self.weight, self.bias, geometry, self.policy)

    return forward


def _extra_repr(self: Any) -> str:
    text: str = _stock_extra_repr(self)
    if _MARK in self.__dict__:
        policy = self.__dict__.get("policy")
        text += ", convselect" if policy is None else f", convselect, policy={policy!r}"
    return text


def _look_for_marks() -> None:
    """Make the forward of PyTorch's layers look for marks. A layer without one has the class's False."""
    _ConvNd._convselect = False  # type: ignore[attr-defined]
    forwards = {
        nn.Conv1d: _forward_of(nn.Conv1d, kinds.conv1d, graph.conv1d),
        nn.Conv2d: _forward_of(nn.Conv2d, dispatch.conv2d, graph.conv2d),
        nn.Conv3d: _forward_of(nn.Conv3d, volumes.conv3d, graph.conv3d),
        nn.ConvTranspose1d: _transposed_forward_of(
            nn.ConvTranspose1d, 1, kinds.conv_transpose1d, graph.conv_transpose1d
        ),
        nn.ConvTranspose2d: _transposed_forward_of(
            nn.ConvTranspose2d, 2, kinds.conv_transpose2d, graph.conv_transpose2d
        ),
        nn.ConvTranspose3d: _transposed_forward_of(
            nn.ConvTranspose3d, 3, volumes.conv_transpose3d, graph.conv_transpose3d
        ),
    }
    kind: Any
    for kind, forward in forwards.items():
        kind.forward = forward
        kind.extra_repr = _extra_repr


_look_for_marks()


def mark(layer: nn.Module, policy: str | None) -> None:
    """Make this layer choose; `policy` None leaves the one that it has, if any."""
    state = layer.__dict__
    state[_MARK] = True
    state["policy"] = state.get("policy") if policy is None else policy
    subclasses.route(type(layer), _base_of(layer))


def unmark(layer: nn.Module) -> None:
    """Undo `mark`; a layer without a mark stays as it is."""
    if layer.__dict__.pop(_MARK, None):
        layer.__dict__.pop("policy", None)


def _set_state(self: Any, state: Any) -> None:
    """A copy or a pickle of a marked layer, perhaps in a process in which no other of its class has been converted."""
    _stock_set_state(self, state)
    if _MARK in self.__dict__:
        subclasses.route(type(self), _base_of(self))


_stock_set_state: Any = _ConvNd.__setstate__
_ConvNd.__setstate__ = functools.wraps(_stock_set_state)(_set_state)  # type: ignore[method-assign]


def chooses(module: nn.Module) -> bool:
    """Whether this is a converted layer, or a `SelectedConv2d` or its like."""
    if isinstance(module, _SELECTED):
        return True
    base = _base_of(module)
    return base is not None and _MARK in module.__dict__ and subclasses.is_routed(type(module), base)


def computes_itself(module: nn.Module) -> bool:
    """Whether this convolution's class has a forward of its own: its problems do not follow from its attributes."""
    base = None if isinstance(module, _SELECTED) else _base_of(module)
    return base is not None and subclasses.own_method(type(module), base) is not None


@contextlib.contextmanager
def unmarked(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these layers are as before they were converted."""
    marked = [layer for layer in layers if layer.__dict__.pop(_MARK, None)]
    try:
        yield
    finally:
        for layer in marked:
            layer.__dict__[_MARK] = True


def _base_of(module: nn.Module) -> Any:
    """Which of PyTorch's layers that may be converted this is; None if it is none."""
    return next((base for base in (*SELECTED, _ConvNd) if isinstance(module, base)), None)


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
        if isinstance(value, nn.Module) and any(isinstance(m, _ConvNd) for m in value.modules())
    ]
    advice = f"; {verb or function} its modules instead: {', '.join(names)}" if names else ""
    raise TypeError(f"{function} takes an nn.Module, not {type(target).__name__}{advice}.")


def why_not_converted(module: nn.Module) -> str | None:
    """None if this is a convolution that may be converted. "" if it is converted already, or not a convolution.
    Otherwise a sentence why it is not converted."""
    kind = type(module)
    if chooses(module):
        return ""
    base = _base_of(module)
    if base is None:
        quantised = "Conv" in kind.__name__ and "quantized" in kind.__module__
        return "It is quantised; only floating-point convolutions are converted." if quantised else ""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "It is lazy and has no weight before its first call; convert the model after that."
    if not _has_room_for_policy(module):
        return "It has an attribute `policy` of another kind."
    if subclasses.own_method(kind, base) == "forward" and "forward" in module.__dict__:
        return "Its forward was replaced before the model was converted."
    return subclasses.why_not_routed(kind, base)


def _has_room_for_policy(module: nn.Module) -> bool:
    try:
        held = getattr(module, "policy", None)
    except Exception:  # a property, which may raise anything
        return False
    if held is None or type(module) in SELECTED:
        return held is None or isinstance(held, str)
    try:
        check_policy(held)
    except (TypeError, ValueError):
        return False
    return "policy" in module.__dict__
