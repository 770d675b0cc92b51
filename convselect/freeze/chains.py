"""A convolution or linear layer with what follows it, gathered into one step.

    conv -> [BatchNorm2d] -> [+ residual] -> [ReLU | ReLU6 | SiLU | GELU]
    linear -> [* parameter] -> [+ residual] -> [ReLU | ReLU6 | SiLU | GELU]

if nobody else reads the value in between. A residual may also be added to a permuted view of a linear layer's result.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from convselect.base.settings import CHOOSING
from convselect.layer import SelectedConv2d

Node = fx.Node
Modules = dict[Node, nn.Module]

_ACTIVATION_MODULES: dict[type, str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.GELU: "gelu"}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", F.relu_: "relu", F.relu6: "relu6", F.silu: "silu",
    F.gelu: "gelu",
}  # fmt: skip
_ACTIVATION_METHODS = {"relu": "relu", "relu_": "relu"}
MAX_LINEAR_BYTES = 16 * 2**20


@dataclass(eq=False)
class ConvChain:
    """A convolution with all that runs in its epilogue; its step's arguments are x and, if any, the residual."""

    conv: nn.Conv2d
    name: str
    norm: nn.BatchNorm2d | None = None
    norm_name: str = ""
    activation: str | None = None
    residual: bool = False

    @property
    def fused(self) -> tuple[str, ...]:
        parts = ["batch norm"] if self.norm is not None else []
        if self.conv.bias is not None or self.norm is not None:
            parts.append("bias")
        if self.residual:
            parts.append("residual")
        return (*parts, *((self.activation,) if self.activation else ()))


@dataclass(eq=False)
class LinearChain:
    """A linear layer with all that runs in its epilogue; its step's arguments are x and, if any, the residual.

    Attributes:
        scale: (module, name) of the parameter that the result is multiplied by.
        permuted: how result and residual of the step permute the layer's dimensions; None if they do not.
    """

    linear: nn.Linear
    name: str
    scale: tuple[nn.Module, str] | None = None
    activation: str | None = None
    residual: bool = False
    permuted: tuple[int, ...] | None = None
    norm_name: str = ""

    @property
    def fused(self) -> tuple[str, ...]:
        named = (("scale", self.scale), ("bias", self.linear.bias is not None), ("residual", self.residual))
        return (*(name for name, there in named if there), *((self.activation,) if self.activation else ()))


Found = tuple[ConvChain | LinearChain, Node, Node | None]


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def why_not_frozen(conv: nn.Module) -> str | None:
    """None if this module is a convolution whose weight may be folded, "" if it is no convolution, else a reason."""
    if not isinstance(conv, nn.modules.conv._ConvNd):
        return ""
    if isinstance(conv, nn.modules.conv._ConvTransposeNd):
        return "a transposed convolution"
    if type(conv) not in (nn.Conv2d, SelectedConv2d):
        return f"{type(conv).__qualname__} is not an nn.Conv2d itself"
    assert isinstance(conv, nn.Conv2d)
    if "forward" in vars(conv):
        return "its forward was replaced"
    policy = getattr(conv, "policy", None)
    if policy is not None and policy not in CHOOSING:
        return f"its policy asks for {policy}"
    if conv.padding_mode != "zeros":
        return f"padding mode {conv.padding_mode}"
    if not is_plain(conv.weight):
        return f"its weight is {type(conv.weight).__name__}, {conv.weight.dtype} on {conv.weight.device}"
    if not conv.weight.is_floating_point():
        return f"its weight is {conv.weight.dtype}"
    return None


def is_plain(t: torch.Tensor) -> bool:
    """Whether this is memory that can be read here: no subclass (as of a quantisation library), no other device."""
    return type(t) in (torch.Tensor, nn.Parameter) and t.is_cpu and t.layout == torch.strided


def is_boundary(module: nn.Module) -> bool:
    """Whether a module that the tracer kept whole must be called as a module: hooks, a forward of its own."""
    return has_hooks(module) or "forward" in vars(module) or not type(module).__module__.startswith("torch.nn")


def plain_call(node: Node, modules: Modules) -> nn.Module | None:
    """The module of a call with a single positional tensor, in evaluation mode and without hooks."""
    module = modules.get(node)
    if module is None or module.training or has_hooks(module) or "forward" in vars(module):
        return None
    return module if len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], Node) else None


def conv_chain(node: Node, modules: Modules, claimed: set[Node], root: nn.Module) -> Found:
    """The longest chain from this convolution without nodes in `claimed`, its last node, and the residual's."""
    conv = modules[node]
    assert isinstance(conv, nn.Conv2d)
    chain = ConvChain(conv, str(node.target))
    end, residual = node, None
    while chain.activation is None and len(end.users) == 1:
        user = next(iter(end.users))
        if user in claimed or user.op == "output":
            break
        module = plain_call(user, modules)
        other = _other_summand(user, end)
        if type(module) is nn.BatchNorm2d and module.running_mean is not None and chain.norm is None and not residual:
            assert isinstance(module, nn.BatchNorm2d)
            if module.num_features != conv.out_channels:
                break
            chain.norm, chain.norm_name = module, str(user.target)
        elif other is not None and residual is None:
            residual, chain.residual = other, True
        elif (activation := _activation(user, module)) is not None:
            chain.activation = activation
        else:
            break
        end = user
    return chain, end, residual


def is_linear(node: Node, modules: Modules) -> bool:
    layer = plain_call(node, modules)
    return (
        type(layer) is nn.Linear
        and layer.weight.is_cpu
        and layer.weight.layout == torch.strided
        and layer.weight.is_floating_point()
        # A larger one is limited by memory bandwidth, and its packed copy would double its memory.
        and is_plain(layer.weight)
        and layer.weight.numel() * layer.weight.element_size() <= MAX_LINEAR_BYTES
    )


def linear_chain(node: Node, modules: Modules, claimed: set[Node], root: nn.Module) -> Found:
    """As `conv_chain`, for a linear layer."""
    linear = modules[node]
    assert isinstance(linear, nn.Linear)
    chain = LinearChain(linear, str(node.target))
    end, residual = node, None
    while chain.activation is None and len(end.users) == 1:
        user = next(iter(end.users))
        if user in claimed or user.op == "output":
            break
        other = _other_summand(user, end)
        scale = _other_factor(user, end, root, linear.out_features)
        permuted = _permutation(user)
        if scale is not None and chain.scale is None and residual is None and chain.permuted is None:
            chain.scale = scale
        elif permuted is not None and chain.permuted is None and residual is None:
            following = next(iter(user.users)) if len(user.users) == 1 else None
            if following is None or following in claimed or _other_summand(following, user) is None:
                break
            chain.permuted = permuted
        elif other is not None and residual is None:
            residual, chain.residual = other, True
        elif (activation := _activation(user, plain_call(user, modules))) is not None:
            chain.activation = activation
        else:
            break
        end = user
    return chain, end, residual


def _other_factor(node: Node, mine: Node, root: nn.Module, size: int) -> tuple[nn.Module, str] | None:
    """(owner, name) of the parameter if `node` is `mine` * parameter, with one number per output."""
    if node.op != "call_function" or node.target not in (operator.mul, torch.mul) or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    other = b if a is mine else a
    if not isinstance(other, Node) or other is mine or other.op != "get_attr":
        return None
    owner_name, _, name = str(other.target).rpartition(".")
    owner = root.get_submodule(owner_name)
    parameter = owner._parameters.get(name)
    return (owner, name) if parameter is not None and parameter.shape == (size,) else None


def _permutation(node: Node) -> tuple[int, ...] | None:
    """The dimensions of a `permute` that names them all, counted from the front."""
    if node.op != "call_method" or node.target != "permute" or node.kwargs:
        return None
    dims = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = tuple(dims[0])
    plain = all(isinstance(d, int) and d >= 0 for d in dims)
    return dims if plain and sorted(dims) == list(range(len(dims))) else None  # type: ignore[return-value, type-var, arg-type]


def _activation(node: Node, module: nn.Module | None) -> str | None:
    """The name of the activation that this node is, with its default parameters."""
    if module is not None:
        exact = not isinstance(module, nn.GELU) or module.approximate == "none"
        return _ACTIVATION_MODULES.get(type(module)) if exact else None
    rest = (*node.args[1:], *(v for k, v in node.kwargs.items() if k != "inplace"))
    if any(not isinstance(v, bool) for v in rest) or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.op == "call_function":
        return _ACTIVATION_FUNCTIONS.get(node.target)
    return _ACTIVATION_METHODS.get(node.target) if node.op == "call_method" else None  # type: ignore[arg-type]


def _other_summand(node: Node, mine: Node) -> Node | None:
    """b if `node` is mine + b or b + mine; a sum in place counts only if it overwrites `mine`."""
    either = (node.op == "call_function" and node.target in (operator.add, torch.add)) or (
        node.op == "call_method" and node.target == "add"
    )
    in_place = (node.op == "call_function" and node.target is operator.iadd) or (
        node.op == "call_method" and node.target == "add_"
    )
    if not (either or in_place) or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return None
    return b if a is mine else a if either else None
