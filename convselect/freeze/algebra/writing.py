"""Calls that write to their arguments, as calls that return a value."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from convselect.freeze.algebra.bench import Node, argument, arguments, aten, same_strides, shape, tensor
from convselect.freeze.algebra.spelling import ALIASES, DROPOUTS


def views_in_place(graph: fx.Graph) -> int:
    """Calls that change the shape or strides of a tensor in place, as calls that return a view: neither writes.

    PyTorch's own functions leave them in a graph: `linear` squeezes, and a mean chooses strides for dimensions of size
    1, an `as_strided_` that changes nothing. Left alone if somebody else reads the tensor.
    """
    count = 0
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.args else None
        if node.target is aten.as_strided_.default and _keeps_strides(node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            count += 1
        elif node.target in _IN_PLACE and len(source.users) == 1 and source.op == "call_function":
            node.target = _IN_PLACE[node.target]
            count += 1
    return count


_IN_PLACE: dict[Any, Any] = {
    aten.squeeze_.default: aten.squeeze.default, aten.squeeze_.dim: aten.squeeze.dim, aten.t_.default: aten.t.default,
    aten.unsqueeze_.default: aten.unsqueeze.default, aten.transpose_.default: aten.transpose.int,
}  # fmt: skip


def _keeps_strides(node: Node) -> bool:
    source: Any = node.args[0]
    (size, stride), offset = arguments(node)[1:3], argument(node, 3, "storage_offset")
    return tuple(size) == shape(source) and offset in (None, 0) and same_strides(source, tuple(stride))


def writes_to_own(graph: fx.Graph) -> int:
    """Pointwise calls that write to a value of the graph's own, as calls that return a new one: x.add_(y) is x + y.

    Functionalisation leaves those of values that come from parameters and buffers alone, which it does not see: a
    linear layer of such a value, or an activation in place, by which Swin V2 makes its biases of positions. Left alone
    if the value written to is an argument's or the module's, if it can be read under another name, or if types are
    mixed.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    count = 0
    for node in list(graph.nodes):
        new = _returning(node.target)
        if new is None or not _is_own(node, place):
            continue
        if all(tensor(t).dtype == tensor(node).dtype for t in node.all_input_nodes):
            node.target = new
            count += 1
    return count


@functools.cache
def _returning(target: Any) -> Any:
    """The pointwise operation that returns what this one writes to its first argument; None if it is no such thing."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = None if packet is None else getattr(packet, target._overloadname, None)
    if found is None or found._schema.is_mutable or torch.Tag.pointwise not in found.tags:
        return None
    takes = [[(a.name, str(a.type)) for a in overload._schema.arguments] for overload in (target, found)]
    return found if takes[0] == takes[1] else None


def _is_own(node: Node, place: dict[Node, int]) -> bool:
    """Whether the memory that this call writes to is made by the graph, and read by nobody under another name later."""
    written: Any = node.args[0]
    if any(place[user] > place[node] or _shares(user) for user in written.users if user is not node):
        return False
    while _shares(written):
        source: Any = written.args[0] if written.target in ALIASES else None
        # All of its elements: what is written to a part of them has strides that a new value would not have.
        if source is None or tensor(source).numel() != tensor(written).numel() or len(source.users) > 1:
            return False
        written = source
    return bool(written.op == "call_function")


def _shares(node: Node) -> bool:
    """Whether the result may lie in the memory of an argument."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"
    aliases = any(returned.alias_info is not None for returned in target._schema.returns)
    return aliases or target in (*ALIASES, *DROPOUTS)
