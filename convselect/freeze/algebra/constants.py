"""Expressions of constants in a graph of ATen operators: what is one, its value in float64, and its name.

A constant expression is computed from parameters and buffers (`get_attr` nodes) alone. Rewriting only combines such
expressions; it never evaluates them, since weights are watched and folded again when they change.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

Node = fx.Node
aten = torch.ops.aten

# These need no tensor, and give the same every time. `empty` is not among them.
_FACTORIES = frozenset({
    aten.full.default, aten.ones.default, aten.zeros.default, aten.eye.default, aten.eye.m, aten.arange.default,
    aten.arange.start, aten.arange.start_step, aten.scalar_tensor.default, aten.linspace.default,
})  # fmt: skip
_UNINITIALISED = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_NORMS = frozenset({
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten.batch_norm.default,
    aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default,
})  # fmt: skip
# A parameter may have other strides by the time it is read.
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
# Their results jump: rounding the argument differently may change them by more than rounding.
_JUMPS = frozenset({
    "round", "floor", "ceil", "trunc", "sign", "sgn", "frac", "remainder", "fmod", "floor_divide", "heaviside",
    "argmax", "argmin", "argsort", "sort", "topk", "eq", "ne", "lt", "le", "gt", "ge", "where", "bucketize",
    "fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
})  # fmt: skip


def is_constant(node: Node) -> bool:
    """Whether this node is computed from `get_attr` nodes alone, by operators that give the same every time."""
    known: dict[Node, bool] = {}
    for part in _in_order(node):
        known[part] = part.op == "get_attr" or (
            _is_repeatable(part) and all(known[source] for source in part.all_input_nodes)
        )
    return known[node]


def constant_nodes(graph: fx.Graph) -> set[Node]:
    """All nodes of a graph for which `is_constant` holds, but for what the graph itself writes to."""
    # Of the hundreds of nodes, looked at by every rule, few differ in their operators.
    nodes = [(node, _traits(node.target) if node.op == "call_function" else None) for node in graph.nodes]
    written = {
        source
        for node, traits in nodes
        if traits is not None and traits.may_write and is_mutation(node)
        for source in node.all_input_nodes
    }
    found: set[Node] = set()
    for node, traits in nodes:
        if traits is None:
            if node.op == "get_attr" and node not in written:
                found.add(node)
        elif traits.may_repeat and found.issuperset(node.all_input_nodes) and _is_repeatable(node):
            found.add(node)
    return found


class _Traits(NamedTuple):
    may_write: bool
    may_repeat: bool


@functools.cache
def _traits(target: Any) -> _Traits:
    return _Traits(target in _NORMS or _writes(target), gives_the_same(target))


def is_mutation(node: Node) -> bool:
    """Whether this node writes to one of its arguments."""
    if node.target in _NORMS:  # what they declare is not what they do: running statistics are written in training
        return node.args[3] is not None and node.args[5] is not False
    return node.op == "call_function" and _writes(node.target)


@functools.cache
def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _is_repeatable(node: Node) -> bool:
    if node.op != "call_function" or not gives_the_same(node.target) or is_mutation(node):
        return False
    return node.target in _FACTORIES or bool(node.all_input_nodes)


@functools.cache
def gives_the_same(target: Any) -> bool:
    """Whether an operator's result depends on its arguments alone, and it writes to none."""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or (target._schema.is_mutable and target not in _NORMS):
        return False
    name = target._schema.name.removeprefix("aten::")
    return torch.Tag.nondeterministic_seeded not in target.tags and name not in _UNINITIALISED


def _in_order(*nodes: Node) -> list[Node]:
    """These nodes and all that they are computed from, arguments first. Without recursion: expressions are deep."""
    order: list[Node] = []
    seen: set[Node] = set()
    todo = [(node, False) for node in reversed(nodes)]
    while todo:
        node, arguments_done = todo.pop()
        if arguments_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo.extend((source, False) for source in reversed(node.all_input_nodes))
    return order


class Constants:
    """Values, sources and names of constant expressions.

    Args:
        read: the tensor that a `get_attr` node stands for now.
        name: what to call that tensor in a `key`; by default the node's target, which names the same tensor only in
            graphs of one model that number its parameters alike.
    """

    def __init__(self, read: Callable[[Node], Tensor], name: Callable[[Node], str] | None = None) -> None:
        self._read = read
        self._name = name or (lambda node: str(node.target))
        self._keys: dict[Node, str] = {}

    def value(self, node: Node) -> Tensor:
        """This expression in float64 (integers stay what they are), from the tensors as they are now."""
        return self.values([node])[0]

    def values(self, nodes: Iterable[Node]) -> list[Tensor]:
        """As `value`, for several expressions; what they share is computed once.

        Whatever rounds or compares, fake quantisation for example, is computed in the element types of the graph, so
        that it gives what the model itself gives.

        Raises:
            ValueError: if one of these is no constant expression.
        """
        nodes = list(nodes)
        order = _in_order(*nodes)
        for node in order:
            if node.op != "get_attr" and not _is_repeatable(node):
                raise ValueError(f"{node.name} is no constant expression")
        read = {node: self._read(node).detach() for node in order if node.op == "get_attr"}
        as_is = self._evaluated(_in_order(*(node for node in order if _jumps(node))), read, widen=False)
        start = {node: _widened(value) for node, value in {**read, **_only_jumps(as_is)}.items()}
        found = self._evaluated(order, start, widen=True)
        return [found[node] for node in nodes]

    @staticmethod
    def _evaluated(order: list[Node], start: dict[Node, Any], widen: bool) -> dict[Node, Any]:
        found = dict(start)

        def argument(value: Any) -> Any:
            if isinstance(value, torch.dtype) and widen and value.is_floating_point:
                return torch.float64
            return found[value] if isinstance(value, Node) else value

        with torch.inference_mode(False), torch.no_grad():
            for node in order:
                if node not in found:
                    args = fx.node.map_aggregate(node.args, argument)
                    kwargs = fx.node.map_aggregate(dict(node.kwargs), argument)
                    function: Any = aten.reshape.default if node.target in _VIEWS else node.target
                    found[node] = function(*args, **kwargs)
        return found

    def sources(self, node: Node) -> tuple[Node, ...]:
        """The `get_attr` nodes that this expression depends on, in the order in which they are read."""
        return tuple(part for part in _in_order(node) if part.op == "get_attr")

    def key(self, node: Node) -> str:
        """A digest of the expression's structure: equal for the same expression in another graph."""
        for part in _in_order(node):
            if part not in self._keys:
                self._keys[part] = self._digest(part)
        return self._keys[node]

    def _digest(self, node: Node) -> str:
        keys = self._keys

        def named(value: Any) -> Any:
            return f"<{keys[value]}>" if isinstance(value, Node) else value

        if node.op == "get_attr":
            text = f"get {self._name(node)}"
        else:
            args = fx.node.map_aggregate(node.args, named)
            kwargs = fx.node.map_aggregate(dict(sorted(node.kwargs.items())), named)
            # A list of fx prints as a list; a number says whether it is whole.
            text = f"{node.target} {args!r} {kwargs!r}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _jumps(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.name.removeprefix("aten::") in _JUMPS:
        return True
    dtype = node.kwargs.get("dtype")
    return isinstance(dtype, torch.dtype) and not dtype.is_floating_point and not dtype.is_complex


def _only_jumps(values: dict[Node, Any]) -> dict[Node, Any]:
    return {node: value for node, value in values.items() if node.op != "get_attr" and _jumps(node)}


def _widened(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_widened(part) for part in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
