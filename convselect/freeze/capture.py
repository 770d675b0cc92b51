"""A module's forward as a graph of ATen operations, for inputs of one kind.

A dispatch mode runs the forward once under `functionalize` (in-place operations become ordinary ones) and writes down
every operation below autograd, so that any spelling of a layer, a functional call, a parametrisation or a module of
another library comes out the same. Sizes and other Python values are constants of the graph. Parameters, buffers and
other tensors of the modules are `get_attr` nodes, named as in the module, whose `meta["source"]` says where to read
them.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from convselect.base.settings import CHOOSING
from convselect.freeze.algebra.constants import Constants, is_constant
from convselect.freeze.algebra.rewrite import rewrite

Node = fx.Node
Source = tuple[dict[str, Any], str]

_PLAIN_LEAVES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_aten = torch.ops.aten
_READS = (_aten._local_scalar_dense.default, _aten.item.default)  # the second one of tensors made in inference mode
_RECORDERS = "transformers.utils.output_capturing"
_MOST_READ = 64  # elements of a constant of which Python may read values: each call compares all of them


class Uncapturable(Exception):
    """Why a forward cannot be written down as a fixed list of operations."""


@dataclass(eq=False)
class Captured:
    """A forward as a graph, rewritten.

    Attributes:
        graph: placeholders are the tensors among the arguments, in order.
        results: the leaves of what the forward returns: nodes and plain values.
        spec: how the leaves are put together.
        constants: their sources, keys and values; a `get_attr` node's target is its name in the module.
        reads: where the tensors are of which Python read a value: the graph is that of these values.
    """

    graph: fx.Graph
    results: list[Any]
    spec: pytree.TreeSpec
    constants: Constants = field(default_factory=lambda: Constants(read))
    reads: list[Source] = field(default_factory=list)

    @property
    def inputs(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def has_hooks(module: nn.Module) -> bool:
    return runs_more(module._forward_hooks) or runs_more(module._forward_pre_hooks)


def runs_more(hooks: dict[int, Any]) -> bool:
    """Whether one of these hooks does more than to note results for a forward around it, as those do that transformers
    puts into a model when its hidden states are asked for first, and leaves there. A forward that asks is captured with
    them; while one around the captured module does, `is_recorded`."""
    return any(getattr(hook, "__module__", None) != _RECORDERS for hook in hooks.values())


def is_recorded() -> bool:
    """Whether a forward that runs now asks the hooks of transformers for results."""
    recorders: Any = sys.modules.get(_RECORDERS)
    return recorders is not None and recorders._active_collector.get() is not None


def is_plain(t: Tensor) -> bool:
    """Whether this is memory that can be read here: no subclass (as of a quantisation library), no other device."""
    return type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.layout == torch.strided


def why_not_captured(root: nn.Module) -> str | None:
    """A reason to leave `root` as it is that shows without running it; None if there is none."""
    for name, module in root.named_modules():
        inner = name or "the module"
        if name and _is_replaced(vars(module).get("forward"), module):
            return f"the forward of {name} was replaced"
        if name and has_hooks(module):
            return f"{name} has hooks"
        convolution = isinstance(module, nn.modules.conv._ConvNd)
        policy = getattr(module, "policy", None) if convolution else None
        if policy is not None and policy not in CHOOSING:
            return f"the policy of {inner} asks for {policy}"
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None and not is_plain(t):
                kind = f"{type(t).__name__}, {t.dtype} on {t.device}"
                return f"{'.'.join(part for part in (name, key) if part)} is a {kind}"
    return None


def _is_replaced(forward: object, module: nn.Module) -> bool:
    """Whether a module's own attribute `forward` is more than a choice among its methods, which a module may make when
    it is built: that is captured as any other method is."""
    return forward is not None and not (isinstance(forward, MethodType) and forward.__self__ is module)


def capture(root: nn.Module, args: tuple[Any, ...]) -> Captured:
    """Write down what `root.forward(*args)` does in evaluation mode, `root` unchanged, and rewrite it.

    Raises:
        Uncapturable: with the reason, if the operations depend on more than kinds and sizes of the arguments.
    """
    reason = why_not_captured(root)
    if reason is not None:
        raise Uncapturable(reason)
    before = [(owner, dict(owner)) for module in root.modules() for owner in (vars(module), *_dictionaries(module))]
    try:
        graph, results, spec, values_read = _recorded(root, args)
    except Uncapturable:
        raise
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise Uncapturable(f"{type(error).__name__}: {first_line:.200}") from error
    finally:
        changed = [(owner, saved) for owner, saved in before if not _same(owner, saved)]
        for owner, saved in changed:
            owner.clear()
            owner.update(saved)
    if changed:
        raise Uncapturable("forward changes attributes of the model")
    where = _places(root)
    if any(id(t) not in where for t in values_read):
        raise Uncapturable("forward reads a value of a tensor that is in no module")
    captured = Captured(graph, results, spec, reads=[where[id(t)][1] for t in values_read])
    _name_constants(graph, where)
    for node in graph.nodes:
        if node.op == "call_function" and _writes(node) and node.args[0].op == "get_attr":
            raise Uncapturable("forward writes to parameters or buffers")
        if node.target is _aten.convolution.default and node.args[1].op != "placeholder":
            # Its name, whatever the weight is made of later.
            node.meta["layer"] = layer_name(node.args[1])
    rewrite(graph)
    for node in graph.nodes:
        # What is kept of a constant would be written to by every call.
        if node.op == "call_function" and _writes(node) and is_constant(node.args[0]):
            raise Uncapturable("forward writes to a value that comes from parameters or buffers alone")
    output = next(iter(reversed(graph.nodes)))
    captured.results = list(output.args[0])
    return captured


def read(node: Node) -> Tensor:
    """The tensor that a `get_attr` node stands for, as it is now."""
    owner, key = node.meta["source"]
    return owner[key].detach()  # type: ignore[no-any-return]


def layer_name(weight: Node) -> str:
    """The module that owns the first parameter in this expression."""
    found = Constants(read).sources(weight)
    return owner(str(found[0].target)) if found else ""


def owner(name: str) -> str:
    """The module that a tensor of this name belongs to, parametrised or not."""
    before, found, _ = f".{name}".partition(".parametrizations.")
    return before[1:] if found else name.rpartition(".")[0]


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


class _Recorder(TorchDispatchMode):
    """Writes operations down while they are computed: below autograd, functionalised, on real values.

    What make_fx does, without all that it needs for symbolic sizes, fake tensors and stack traces: a tenth of the time,
    and no import of torch._dynamo and sympy, which takes longer than all else that a second process has to do.

    It refuses what a graph of fixed sizes cannot repeat: values of tensors that Python reads, sizes that depend on
    data, random numbers. Values that are computed from small tensors of the modules alone may be read: the graph holds
    for as long as these do not change.
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.values_read: list[Tensor] = []
        self._nodes: Any = WeakIdKeyDictionary()
        for i, t in enumerate(inputs):
            self._note(t, self.graph.placeholder(f"input_{i}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import torch._dynamo to keep it out of here, where it never is."""
        return False

    def node(self, t: Tensor) -> Node:
        """The node that makes this tensor; one that is not known yet is a constant."""
        found: Node | None = self._nodes.get(t)
        if found is None:
            found = self.graph.create_node("get_attr", "constant")
            found.meta["tensor"] = t
            self._note(t, found)
        return found

    def _may_be_read(self, t: Tensor) -> bool:
        """Whether this value comes from small constants alone; they are noted then."""
        node = self.node(t)
        if not is_constant(node):
            return False
        sources = [source for source in Constants(read).sources(node) if not _is_literal(source)]
        found = [source.meta["tensor"] for source in sources]
        if any(source.numel() > _MOST_READ for source in found):
            return False
        self.values_read += found
        return True

    def _note(self, value: Any, node: Node) -> None:
        self._nodes[value] = node
        node.meta["val"] = _form(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tags = func.tags
        if torch.Tag.data_dependent_output in tags:
            if func in _READS and self._may_be_read(args[0]):
                return func(*args)
            raise Uncapturable("forward reads a value of a tensor")
        if torch.Tag.dynamic_output_shape in tags and (func is not _aten.index.Tensor or _by_mask(args[1])):
            raise Uncapturable("sizes depend on data")
        if torch.Tag.nondeterministic_seeded in tags and _draws(func, args, kwargs or {}):
            raise Uncapturable("forward draws random numbers")
        with self:
            parts = func.decompose(*args, **kwargs) if _is_composite(func) else NotImplemented
        if parts is not NotImplemented:
            return parts
        given, options = (pytree.tree_map_only(Tensor, self.node, part) for part in (args, kwargs))
        result = func(*args, **kwargs)
        # A literal may be written to: each call then has its own.
        target = _aten.lift_fresh_copy.default if func is _aten.lift_fresh.default else func
        node = self.graph.call_function(target, given, options)
        if isinstance(result, Tensor):
            self._note(result, node)
        elif isinstance(result, tuple | list):
            node.meta["val"] = tuple(map(_form, result))
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._note(part, self.graph.call_function(operator.getitem, (node, i)))
        else:
            node.meta["val"] = result
        return result


def _is_composite(func: Any) -> bool:
    """Whether PyTorch itself computes this operation by others. Once torch._decomp is imported, `decompose` also has
    Python's spelling of some that have a kernel: nearest upsampling as a gather, which takes twice as long and more."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _form(value: Any) -> Any:
    """A tensor's shape, strides and element type, as a tensor without memory."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this operation, which can draw random numbers, does so with these arguments."""
    parameters = func._schema.arguments
    given = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    given |= {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
    # Attention drops a share of 0; dropout and rrelu are not in training (None is True there).
    return not (given.get("dropout_p") == 0 or False in (given.get("train"), given.get("training")))


def _by_mask(indices: Any) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices)


def _recorded(root: nn.Module, args: tuple[Any, ...]) -> tuple[fx.Graph, list[Any], pytree.TreeSpec, list[Tensor]]:
    """The graph, the leaves of its result, how they are put together, and the constants that Python read values of."""
    found: list[pytree.TreeSpec] = []

    def forward(*tensors: Tensor) -> list[Any]:
        given = iter(tensors)
        result = type(root).forward(root, *(next(given) if isinstance(a, Tensor) else a for a in args))
        leaves, spec = pytree.tree_flatten(result)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN_LEAVES)):
                raise Uncapturable(f"forward returns a {type(leaf).__name__}")
        found[:] = [spec]
        return leaves

    tensors = [a.detach().clone() for a in args if isinstance(a, Tensor)]
    if not tensors:
        raise Uncapturable("forward takes no tensor")
    recorder = _Recorder(tensors)
    with recorder:
        leaves = torch.func.functionalize(forward)(*tensors)
    graph = recorder.graph
    graph.output([recorder.node(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    graph.eliminate_dead_code()
    return graph, list(next(iter(reversed(graph.nodes))).args[0]), found[0], recorder.values_read


def _dictionaries(module: nn.Module) -> list[dict[str, Any]]:
    """Attributes that are dictionaries, such as a cache of what a forward makes once (LeViT's attention biases)."""
    return [value for value in vars(module).values() if type(value) is dict and value is not module._modules]


def _places(root: nn.Module) -> dict[int, tuple[str, Source]]:
    """By the `id` of each tensor of a module, in its dictionaries too: its name, and where it is read."""
    where: dict[int, tuple[str, Source]] = {}
    for name, module in root.named_modules():
        for owner in (vars(module), module._buffers, module._parameters, *_dictionaries(module)):
            for key, t in owner.items():
                if isinstance(t, Tensor):
                    where.setdefault(id(t), (f"{name}.{key}" if name else str(key), (owner, key)))
    return where


def _name_constants(graph: fx.Graph, where: dict[int, tuple[str, Source]]) -> None:
    """Say of each constant of the graph where it is read; one node for each.

    Raises:
        Uncapturable: if a tensor is found in no module, so that nobody could say whether it changes.
    """
    first: dict[str, Node] = {}
    for i, node in enumerate(list(graph.nodes)):
        if node.op != "get_attr":
            continue
        t = node.meta.pop("tensor")
        if id(t) in where:
            name, source = where[id(t)]
        elif _is_literal(node):
            name, source = f"literal.{i}", ({"literal": t}, "literal")  # torch.tensor(..) in the forward
        else:
            raise Uncapturable("forward uses a tensor that is in no module")
        if not is_plain(t):
            raise Uncapturable(f"{name} is a {type(t).__name__}")
        if name in first:
            node.replace_all_uses_with(first[name])
            graph.erase_node(node)
            continue
        first[name] = node
        node.target, node.meta["source"] = name, source


def _is_literal(node: Node) -> bool:
    """Whether this constant is a torch.tensor(..) of the forward."""
    return bool(node.users) and all(user.target is _aten.lift_fresh_copy.default for user in node.users)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)
