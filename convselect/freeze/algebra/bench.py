"""Editing a graph of ATen operators: shapes of its values, new constants, new calls, and what is dead."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from convselect.freeze.algebra.constants import constant_nodes, is_mutation

Node = fx.Node
Operand = Node | float | int
aten = torch.ops.aten


class Bench:
    """A graph being rewritten, its constant expressions moved in front of everything else.

    So a constant may be combined with any other, wherever either was used first. `replace` erases at once what nobody
    reads any more: counts of readers stay right.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.constants = constant_nodes(graph)
        self._first = next(node for node in graph.nodes if node.op != "placeholder" and node not in self.constants)
        behind = False
        for node in list(graph.nodes):
            behind = behind or node is self._first
            if behind and node in self.constants:
                self._first.prepend(node)

    def nodes(self) -> list[Node]:
        """What is not constant, in order, as of now."""
        return [node for node in self.graph.nodes if node not in self.constants]

    def is_constant(self, value: Any) -> bool:
        return isinstance(value, Node) and value in self.constants

    def constant(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new constant expression: an operator on constants, numbers and lists of them."""
        with self.graph.inserting_before(self._first):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = _elementwise(args) if target in _ELEMENTWISE else _inferred(target, args, kwargs)
        self.constants.add(node)
        return node

    def call(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new call in front of a node. Its `meta["val"]` has shape, element type and strides, and no device."""
        return self.call_as(before, _inferred(target, args, kwargs), target, *args, **kwargs)

    def call_as(self, before: Node, form: Any, target: Any, *args: Any, **kwargs: Any) -> Node:
        """The same for a call whose result's form is known: asking an operator for it may take a second."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = form
        if before is self._first:
            self._first = node
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Let everybody read `new`, and erase what is dead by that."""
        old.replace_all_uses_with(new)
        self.erase(old)

    def erase(self, *nodes: Node) -> None:
        """Erase those of these nodes that nobody reads, and their arguments if nobody reads them then.

        Constants stay until `finish`, which finds them faster.
        """
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node._erased or node.users or node.op != "call_function" or node in self.constants or is_mutation(node):
                continue
            sources = node.all_input_nodes
            if node is self._first:
                self._first = node.next
            self.graph.erase_node(node)
            todo.extend(sources)

    def finish(self) -> None:
        """Erase dead constants."""
        for node in reversed(self.graph.nodes):
            if node in self.constants and not node.users:
                self.graph.erase_node(node)


def dead_code(graph: fx.Graph) -> int:
    """Erase calls without effect whose results nobody reads; arguments of the graph stay."""
    count = 0
    for node in reversed(graph.nodes):
        pure = node.op == "get_attr" or (node.op == "call_function" and not is_mutation(node))
        if pure and not node.users:
            graph.erase_node(node)
            count += 1
    return count


def tensor(node: Node) -> Tensor:
    """A tensor of this node's shape, strides and element type; its elements are nothing.

    Raises:
        ValueError: if the node has no `meta["val"]` and is no attribute of the graph's module.
    """
    found = node.meta.get("val")
    if found is None and node.op == "get_attr" and node.graph.owning_module is not None:
        found = operator.attrgetter(str(node.target))(node.graph.owning_module)
        node.meta["val"] = found = _empty(found)
    if not isinstance(found, Tensor):
        raise ValueError(f"node {node.name} does not say what tensor it is")
    return found


def shape(node: Node) -> tuple[int, ...]:
    return tuple(tensor(node).shape)


def same_strides(node: Node, strides: tuple[int, ...]) -> bool:
    """Whether a value has these strides, but for dimensions of size 1."""
    t = tensor(node)
    return all(a == b or n <= 1 for n, a, b in zip(t.shape, t.stride(), strides, strict=True))


def only_reader(node: Node) -> Node | None:
    """The one node that reads this value; None if there are several, or it is returned."""
    if len(node.users) != 1:
        return None
    reader = next(iter(node.users))
    return None if reader.op == "output" else reader


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument that may have been given by position, by name or not at all."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments, of any type."""
    return node.args


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_ELEMENTWISE = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.rsqrt.default, aten.neg.default, aten.reciprocal.default,
)  # fmt: skip


def _elementwise(args: tuple[Any, ...]) -> Tensor:
    """The result of an operator on floating-point constants, always contiguous. Most new nodes are such; asking the
    operators themselves would be half of the time of rewriting."""
    operands = [_empty(tensor(arg)) if isinstance(arg, Node) else arg for arg in args]
    tensors = [t for t in operands if isinstance(t, Tensor)]
    dtype = torch.result_type(*operands) if len(operands) == 2 else tensors[0].dtype
    return torch.empty(_broadcast([t.shape for t in tensors]), dtype=dtype, device="meta")


def _broadcast(shapes: list[torch.Size]) -> torch.Size:
    """As torch.broadcast_shapes, which would import sympy."""
    if len(set(shapes)) == 1:
        return shapes[0]
    dims = max(map(len, shapes))
    sizes = zip(*((1,) * (dims - len(one)) + tuple(one) for one in shapes), strict=True)
    return torch.Size(next((n for n in size if n != 1), 1) for size in sizes)


def _easily_inferred(target: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The result of a linear layer, of the mean of an image, or of an elementwise operator on an image and on what is
    broadcast to it, which lies as the image does; None for others. (ATen's operators on meta tensors import
    torch._dynamo: a second.)"""
    operands = [_empty(tensor(arg)) if isinstance(arg, Node) else arg for arg in args]
    if target is aten.linear.default and operands[0].is_contiguous() and operands[0].dim() > 1:
        return torch.empty((*operands[0].shape[:-1], len(operands[1])), dtype=operands[0].dtype, device="meta")
    if target is aten.mean.dim and operands[1:] == [[2, 3], True] and operands[0].dim() == 4:
        return torch.empty((*operands[0].shape[:2], 1, 1), dtype=operands[0].dtype, device="meta")
    tensors = sorted((t for t in operands if isinstance(t, Tensor)), key=Tensor.numel)
    if target not in _ELEMENTWISE or len(operands) > 2 or not tensors:
        return None
    image, shapes = tensors[-1], [t.shape for t in tensors]
    if any(t.numel() == image.numel() for t in tensors[:-1]) or _broadcast(shapes) != image.shape:
        return None
    order = sorted(range(image.dim()), key=lambda i: (image.stride(i), image.shape[i] != 1))
    expected = 1
    for i in order:
        if image.shape[i] != 1 and image.stride(i) != expected:
            return None  # not dense
        expected *= image.shape[i]
    dtype = torch.result_type(*operands) if len(operands) == 2 else image.dtype
    return torch.empty_strided(image.shape, image.stride(), dtype=dtype, device="meta")


def _inferred(target: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator's result looks like. Meta tensors: ten times as fast as fake ones."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, Node):
            return _empty(tensor(value))
        return torch.device("meta") if isinstance(value, torch.device) else value

    found = None if kwargs else _easily_inferred(target, tuple(args))
    if found is not None:
        return found
    with torch.no_grad():
        return target(*fx.node.map_aggregate(tuple(args), on_meta), **fx.node.map_aggregate(kwargs, on_meta))  # type: ignore[misc]


def _empty(t: Tensor) -> Tensor:
    if t.device.type == "meta" and type(t) is Tensor:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
