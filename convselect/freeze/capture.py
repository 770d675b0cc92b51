"""A module's forward as a list of steps, with what belongs to a convolution gathered into one step.

`torch.fx` records the forward once. A convolution then takes in what follows it, as long as nobody else reads the value
in between:

    conv -> [BatchNorm2d] -> [+ residual] -> [ReLU | ReLU6 | SiLU | GELU]
    linear -> [* parameter] -> [+ residual] -> [ReLU | ReLU6 | SiLU | GELU]

and runs where the last of these stood. A residual may also be added to a permuted view of what a linear layer gives.
Dropout and Identity vanish.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from convselect.layer import SelectedConv2d
from convselect.settings import CHOOSING

Node = fx.Node

_ACTIVATION_MODULES: dict[type, str] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu", nn.GELU: "gelu"}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", torch.relu_: "relu", F.relu_: "relu", F.relu6: "relu6", F.silu: "silu",
    F.gelu: "gelu",
}  # fmt: skip
_ACTIVATION_METHODS = {"relu": "relu", "relu_": "relu"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
MAX_LINEAR_BYTES = 16 * 2**20
# Whose results are new memory, never a view of an argument.
_FRESH_MODULES = (
    nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.Upsample, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Hardswish,
    nn.Hardsigmoid, nn.LeakyReLU, nn.Softmax, nn.LayerNorm, nn.GroupNorm,
)  # fmt: skip
_FRESH_FUNCTIONS = frozenset({
    torch.cat, torch.add, torch.mul, operator.add, operator.mul, operator.sub, F.max_pool2d, F.avg_pool2d,
    F.adaptive_avg_pool2d, F.interpolate, F.gelu, F.linear, torch.sigmoid,
})  # fmt: skip


class Untraceable(Exception):
    """Why a forward cannot be written down as a list of steps."""


@dataclass(eq=False)
class Step:
    """One call of the flat program: `out` names the value it makes, `args` and `kwargs` hold earlier nodes."""

    out: Node
    kind: str  # "conv", "linear", "module", "function", "method", "attribute"
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class ConvChain:
    """A convolution with all that runs in its epilogue; arguments of its step are x and, where there is one, the
    residual."""

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
    """A linear layer with all that runs in its epilogue; arguments of its step are x and, where there is one, the
    residual. Its result, and its residual, is the layer's `permuted` by these dimensions, where they are given."""

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


@dataclass(eq=False)
class Traced:
    """A forward as steps.

    Attributes:
        inputs: the nodes of the required arguments, in order.
        result: the returned value; nodes inside tuples, lists and dicts.
        boundaries: names of modules that are called as modules, hooks and all.
        left_alone: name -> reason, for convolutions that run as they are.
    """

    inputs: list[Node]
    steps: list[Step]
    result: Any
    boundaries: list[str]
    left_alone: dict[str, str]

    @property
    def chains(self) -> list[ConvChain | LinearChain]:
        return [step.target for step in self.steps if step.kind in ("conv", "linear")]


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def why_not_frozen(conv: nn.Module) -> str | None:
    """None: this module is a convolution whose weight may be folded. "": no convolution. Otherwise a reason."""
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
    if not conv.weight.is_cpu or not conv.weight.is_floating_point() or conv.weight.layout != torch.strided:
        return f"its weight is {conv.weight.dtype} on {conv.weight.device}"
    return None


class _Tracer(fx.Tracer):
    # Buffers are read at each call, as parameters are, and not baked in.
    proxy_buffer_attributes = True

    def __init__(self, required: list[str]) -> None:
        super().__init__()
        self._required = required

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            has_hooks(m)
            or "forward" in vars(m)
            or isinstance(m, SelectedConv2d)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Proxies for required arguments only: an optional one keeps its default, for a proxy is never None."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._required]
        return root_fn, [self.root, *proxies]

    def create_arg(self, a: Any) -> Any:
        known = isinstance(a, nn.Parameter) or not isinstance(a, Tensor)
        if not known and a not in self.tensor_attrs and all(a is not b for b in self.root.buffers()):
            # fx would store it on the model, and a random one would be the same for ever.
            raise Untraceable("forward makes a tensor that does not depend on its input")
        return super().create_arg(a)


def required_arguments(forward: Callable[..., Any]) -> list[str]:
    """Names of the arguments without a default, `self` left out.

    Raises:
        Untraceable: for `*args`, `**kwargs` and required keyword-only arguments.
    """
    names = []
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Untraceable("forward takes *args or **kwargs")
        if parameter.default is parameter.empty:
            if parameter.kind == parameter.KEYWORD_ONLY:
                raise Untraceable("forward has a required keyword-only argument")
            names.append(parameter.name)
    return names


def trace(root: nn.Module) -> Traced:
    """Write down what `root.forward` does in evaluation mode, `root` unchanged.

    Raises:
        Untraceable: with the reason, where the forward is not a fixed list of calls.
    """
    if "forward" in vars(root):
        raise Untraceable("its forward was replaced")
    graph = _lone_conv() if isinstance(root, nn.Conv2d) else _graph(root)
    return _steps(graph, root)


def _graph(root: nn.Module) -> fx.Graph:
    required = required_arguments(type(root).forward)
    if not required:
        raise Untraceable("forward takes no input")
    before = [(module, dict(vars(module))) for module in root.modules()]
    try:
        graph = _Tracer(required).trace(root)
    except Untraceable:
        raise
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise Untraceable(f"{type(error).__name__}: {first_line}") from error
    finally:
        changed = [(module, attributes) for module, attributes in before if not _same(vars(module), attributes)]
        for module, attributes in changed:
            vars(module).clear()
            vars(module).update(attributes)
    if changed:
        raise Untraceable("forward changes attributes of the model")
    return graph


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _lone_conv() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("input")
    graph.output(graph.call_module("", (x,)))
    return graph


def _steps(graph: fx.Graph, root: nn.Module) -> Traced:
    modules = {node: root.get_submodule(node.target) for node in graph.nodes if node.op == "call_module"}
    for node in list(modules):
        if isinstance(modules[node], (nn.Identity, *_DROPOUTS)) and _plain_call(node, modules) is not None:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            del modules[node]
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    harmful = [i for i, node in enumerate(nodes) if _mutates(node, modules) and not _mutates_only_own(node, modules)]
    for node in nodes:
        if _mutates(node, modules) and any(source.op == "get_attr" for source in node.all_input_nodes):
            raise Untraceable("forward writes to parameters or buffers")
    claimed: set[Node] = set()
    steps: dict[Node, Step] = {}
    left_alone: dict[str, str] = {}
    for node in nodes:
        conv = modules.get(node)
        reason = "" if conv is None else why_not_frozen(conv)
        if reason is None and conv is not None and node.target and has_hooks(conv):
            reason = "it has hooks"
        if reason is None and (len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node)):
            reason = "an unusual call"
        if reason:
            left_alone[node.target] = reason
        kind = "conv" if reason is None else "linear" if _is_linear(node, modules) else ""
        if kind:
            make = _chain if kind == "conv" else _linear_chain
            chain, end, residual = make(node, modules, claimed, root)
            if any(position[node] < i < position[end] for i in harmful):
                chain, end, residual = make(node, modules, set(nodes), root)  # nothing but the layer itself
            walk = node
            while walk is not end:
                claimed.add(walk)
                walk = next(iter(walk.users))
            operands = (node.args[0],) if residual is None else (node.args[0], residual)
            claimed.add(end)
            steps[end] = Step(end, kind, chain, operands)
    boundaries: list[str] = []
    inputs: list[Node] = []
    program: list[Step] = []
    result: Any = None
    for node in nodes:
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op == "output":
            result = node.args[0]
        elif node in steps:
            program.append(steps[node])
        elif node not in claimed:
            program.append(_plain_step(node, modules, boundaries))
    return Traced(inputs, program, result, boundaries, left_alone)


def _plain_step(node: Node, modules: dict[Node, nn.Module], boundaries: list[str]) -> Step:
    kinds = {"call_function": "function", "call_method": "method", "get_attr": "attribute", "call_module": "module"}
    if node.op == "call_module" and is_boundary(modules[node]):
        boundaries.append(node.target)  # type: ignore[arg-type]
    return Step(node, kinds[node.op], node.target, node.args, dict(node.kwargs))


def is_boundary(module: nn.Module) -> bool:
    """Whether a module that the tracer kept whole must be called as a module: hooks, a forward of its own."""
    return has_hooks(module) or "forward" in vars(module) or not type(module).__module__.startswith("torch.nn")


def _plain_call(node: Node, modules: dict[Node, nn.Module]) -> nn.Module | None:
    """The module of a call with a single positional tensor, in evaluation mode and without hooks."""
    module = modules.get(node)
    if module is None or module.training or has_hooks(module) or "forward" in vars(module):
        return None
    return module if len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], Node) else None


def _chain(
    node: Node, modules: dict[Node, nn.Module], claimed: set[Node], root: nn.Module
) -> tuple[ConvChain, Node, Node | None]:
    """The longest chain from this convolution, its last node, and the residual's."""
    conv = modules[node]
    assert isinstance(conv, nn.Conv2d)
    chain = ConvChain(conv, str(node.target))
    end, residual = node, None
    while chain.activation is None and len(end.users) == 1:
        user = next(iter(end.users))
        if user in claimed or user.op == "output":
            break
        module = _plain_call(user, modules)
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


def _is_linear(node: Node, modules: dict[Node, nn.Module]) -> bool:
    layer = _plain_call(node, modules)
    return (
        type(layer) is nn.Linear
        and layer.weight.is_cpu
        and layer.weight.layout == torch.strided
        and layer.weight.is_floating_point()
        # A larger one is as fast as memory delivers it, and would be there twice.
        and layer.weight.numel() * layer.weight.element_size() <= MAX_LINEAR_BYTES
    )


def _linear_chain(
    node: Node, modules: dict[Node, nn.Module], claimed: set[Node], root: nn.Module
) -> tuple[LinearChain, Node, Node | None]:
    """As `_chain`, for a linear layer."""
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
        elif (activation := _activation(user, _plain_call(user, modules))) is not None:
            chain.activation = activation
        else:
            break
        end = user
    return chain, end, residual


def _other_factor(node: Node, mine: Node, root: nn.Module, size: int) -> tuple[nn.Module, str] | None:
    """(owner, name) of the parameter in `mine` * parameter, one number per output."""
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
    if node.op != "call_method" or node.target != "permute" or node.kwargs:
        return None
    dims = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = tuple(dims[0])
    plain = all(isinstance(d, int) and d >= 0 for d in dims)
    return dims if plain and sorted(dims) == list(range(len(dims))) else None  # type: ignore[return-value, type-var, arg-type]


def _activation(node: Node, module: nn.Module | None) -> str | None:
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
    """b where `node` is mine + b or b + mine; a sum in place counts only where it overwrites `mine`."""
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


def _mutates(node: Node, modules: dict[Node, nn.Module]) -> bool:
    """Whether this call may write to an argument."""
    if node.op == "call_module":
        module = modules[node]
        return bool(getattr(module, "inplace", False)) or is_boundary(module)
    literals = (*node.args, *node.kwargs.values())
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "?")
        in_place_operator = getattr(operator, f"__{name}__", None) is node.target and name.startswith("i")
        return (
            in_place_operator
            or node.target is operator.setitem
            or name.endswith("_")
            or any(value is True for value in literals)
            or "out" in node.kwargs
            or (not _from_torch(node.target) and node.target not in _FRESH_FUNCTIONS)
        )
    return False


def _from_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    return module.startswith(("torch", "_operator", "operator", "math", "builtins", "_VariableFunctions"))


def _mutates_only_own(node: Node, modules: dict[Node, nn.Module]) -> bool:
    """Whether what is written to is new memory that nobody else reads."""
    source = node.args[0] if node.args else None
    module = modules.get(source) if isinstance(source, Node) else None
    return (
        isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
        and not is_boundary(module)
        and len(source.users) == 1  # type: ignore[union-attr]
        and (node.op != "call_module" or not is_boundary(modules[node]))
    )


def keeps_no_view(step: Step, root: nn.Module) -> bool:
    """Whether the result of this step is new memory whatever its arguments, which it does not write to or keep."""
    if step.kind in ("conv", "linear"):
        return True
    if step.kind == "module":
        module = root.get_submodule(step.target)
        return type(module) in _FRESH_MODULES and not is_boundary(module) and not getattr(module, "inplace", False)
    if step.kind != "function":
        return False
    return step.target in _FRESH_FUNCTIONS and not any(v is True for v in (*step.args, *step.kwargs.values()))
