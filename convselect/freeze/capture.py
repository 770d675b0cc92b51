"""A module's forward as a list of steps, with what belongs to a convolution or a linear layer gathered into one step.

`torch.fx` records the forward once. A layer then takes in what follows it (see `chains`) and runs at the place of its
last node. Dropout and Identity vanish.
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

from convselect.freeze import chains
from convselect.freeze.chains import Modules, Node, has_hooks, is_boundary, is_plain, plain_call, why_not_frozen
from convselect.layer import SelectedConv2d

_KINDS = {"call_function": "function", "call_method": "method", "get_attr": "attribute", "call_module": "module"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Their results are new memory, never a view of an argument.
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
    """One call of a program: `out` names the value it makes, `args` and `kwargs` hold earlier nodes."""

    out: Node
    kind: str  # "conv", "linear", "module", "function", "method", "attribute"
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def permuted(self) -> tuple[int, ...] | None:
        """See `LinearChain`."""
        return getattr(self.target, "permuted", None)


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
    def chains(self) -> list[chains.ConvChain | chains.LinearChain]:
        return [step.target for step in self.steps if step.kind in ("conv", "linear")]

    @property
    def is_readable(self) -> bool:
        """Whether the weights of all chains can still be folded."""
        layers = (chain.conv if isinstance(chain, chains.ConvChain) else chain.linear for chain in self.chains)
        return all(is_plain(layer.weight) for layer in layers)


class _Tracer(fx.Tracer):
    # Buffers are read at each call, like parameters, and are not constants.
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
        """Proxies for required arguments only: an optional one keeps its default, since a proxy is never None."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._required]
        return root_fn, [self.root, *proxies]

    def create_arg(self, a: Any) -> Any:
        known = isinstance(a, nn.Parameter) or not isinstance(a, Tensor)
        if not known and a not in self.tensor_attrs and all(a is not b for b in self.root.buffers()):
            # fx would store it on the model, and a random one would be the same at every call.
            raise Untraceable("forward makes a tensor that does not depend on its input")
        return super().create_arg(a)


def required_arguments(forward: Callable[..., Any]) -> list[str]:
    """Names of the arguments without a default, `self` left out.

    Raises:
        Untraceable: if there are `*args`, `**kwargs` or required keyword-only arguments.
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
        Untraceable: with the reason, if the forward is not a fixed list of calls.
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
    _erase_identities(graph, modules)
    nodes = list(graph.nodes)
    for node in nodes:
        if _mutates(node, modules) and any(source.op == "get_attr" for source in node.all_input_nodes):
            raise Untraceable("forward writes to parameters or buffers")
    layers, claimed = _gathered(nodes, modules, root)
    rest = [node for node in nodes if node not in claimed and node.op not in ("placeholder", "output")]
    steps = {node: Step(node, _KINDS[node.op], node.target, node.args, dict(node.kwargs)) for node in rest} | layers
    return Traced(
        inputs=[node for node in nodes if node.op == "placeholder"],
        steps=[steps[node] for node in nodes if node in steps],
        result=nodes[-1].args[0],
        boundaries=[str(node.target) for node in rest if node in modules and is_boundary(modules[node])],
        left_alone={str(node.target): reason for node in nodes if (reason := _why_left_alone(node, modules))},
    )


def _erase_identities(graph: fx.Graph, modules: Modules) -> None:
    """Take out what does nothing in evaluation mode."""
    for node in list(modules):
        if isinstance(modules[node], (nn.Identity, *_DROPOUTS)) and plain_call(node, modules) is not None:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
            del modules[node]


def _gathered(nodes: list[Node], modules: Modules, root: nn.Module) -> tuple[dict[Node, Step], set[Node]]:
    """Convolutions and linear layers as steps, by the last node of their chains; and every node of a chain."""
    position = {node: i for i, node in enumerate(nodes)}
    writes = [i for i, node in enumerate(nodes) if _mutates(node, modules) and not _mutates_only_own(node, modules)]
    steps: dict[Node, Step] = {}
    claimed: set[Node] = set()
    for node in nodes:
        if _why_left_alone(node, modules) is None:
            kind, find = "conv", chains.conv_chain
        elif chains.is_linear(node, modules):
            kind, find = "linear", chains.linear_chain
        else:
            continue
        chain, end, residual = find(node, modules, claimed, root)
        if any(position[node] < i < position[end] for i in writes):
            chain, end, residual = find(node, modules, set(nodes), root)  # the layer alone
        steps[end] = Step(end, kind, chain, (node.args[0],) if residual is None else (node.args[0], residual))
        claimed.add(end)
        while node is not end:
            claimed.add(node)
            node = next(iter(node.users))
    return steps, claimed


def _why_left_alone(node: Node, modules: Modules) -> str | None:
    """As `why_not_frozen`, for this call of a module."""
    module = modules.get(node)
    reason = "" if module is None else why_not_frozen(module)
    if reason is None and module is not None and node.target and has_hooks(module):
        return "it has hooks"
    if reason is None and (len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], Node)):
        return "an unusual call"
    return reason


def _mutates(node: Node, modules: Modules) -> bool:
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


def _mutates_only_own(node: Node, modules: Modules) -> bool:
    """Whether the memory written to is new and nobody else reads it."""
    source = node.args[0] if node.args else None
    module = modules.get(source) if isinstance(source, Node) else None
    return (
        isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear)
        and not is_boundary(module)
        and len(source.users) == 1  # type: ignore[union-attr]
        and (node.op != "call_module" or not is_boundary(modules[node]))
    )


def keeps_no_view(step: Step, root: nn.Module) -> bool:
    """Whether this step's result is always new memory, and the step neither writes to its arguments nor keeps them."""
    if step.kind in ("conv", "linear"):
        return True
    if step.kind == "module":
        module = root.get_submodule(step.target)
        return type(module) in _FRESH_MODULES and not is_boundary(module) and not getattr(module, "inplace", False)
    if step.kind != "function":
        return False
    return step.target in _FRESH_FUNCTIONS and not any(v is True for v in (*step.args, *step.kwargs.values()))
