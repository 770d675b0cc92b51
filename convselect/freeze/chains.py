"""Steps of a captured graph: a convolution or linear layer with what follows it, pointwise tails, and the rest.

    convolution or linear layer -> [+ residual] -> [activation]

is one step if nobody else reads the value in between; a residual may also be added to a permuted view of a linear
layer's result. What is left of pointwise operations becomes programs of as many operations as fit together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from convselect.freeze import borders, norms, rows
from convselect.freeze.algebra.constants import constant_nodes
from convselect.freeze.capture import Captured, layer_name, owner
from convselect.freeze.instructions import MOST_INPUTS, MOST_INSTRUCTIONS, instruction_of

Node = fx.Node
_aten = torch.ops.aten

MAX_LINEAR_BYTES = 16 * 2**20
_SMALL = 2**16  # elements of a constant that is copied
_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
# Operations of which often only the first result is read -> the same with no other.
_FIRST_RESULT: dict[Any, Callable[..., _Call]] = {
    _aten.max_pool2d_with_indices.default: lambda *args, **kwargs: (_aten.max_pool2d.default, args, kwargs),
    _aten.max_pool3d_with_indices.default: lambda *args, **kwargs: (_aten.max_pool3d.default, args, kwargs),
    _aten.native_layer_norm.default: lambda *args, **kwargs: (_aten.layer_norm.default, args, kwargs),
    _aten.native_group_norm.default: lambda x, weight, bias, N, C, pixels, groups, eps: (
        _aten.group_norm.default, (x, groups, weight, bias, eps), {},
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (
        lambda q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None: (
            _aten.scaled_dot_product_attention.default, (q, k, v, attn_mask, dropout_p, is_causal), {"scale": scale},
        )
    ),
}  # fmt: skip
_GATED = {"none": "gelu", "tanh": "gelu_tanh"}
_ACTIVATIONS: dict[Any, str] = {
    _aten.relu.default: "relu", _aten.relu6.default: "relu6", _aten.silu.default: "silu",
    _aten.hardswish.default: "hardswish", _aten.hardsigmoid.default: "hardsigmoid", _aten.sigmoid.default: "sigmoid",
    _aten.tanh.default: "tanh",
}  # fmt: skip


@dataclass(eq=False)
class Layer:
    """A convolution or linear layer with all that runs in its epilogue.

    Attributes:
        kind: "conv", "transposed" or "linear", and "volume" or "transposed volume" with three dimensions.
        name: of the module; several layers may have the same.
        weight, bias: expressions of constants.
        geometry: stride, padding, dilation, groups of a convolution, and the output padding of a transposed one; of two
            dimensions, also if it has one, or three. The padding is (top, bottom, left, right), with (front, back)
            ahead of it, if it is not the same on both sides.
        seen_as: a convolution of images on views: "row" if it has one dimension and (N, C, L) is an image of height 1;
            of volumes (N, C, D, H, W) "columns" if its kernel is T x 1 x 1, and H * W are columns of an image of D
            rows, and "slice" if there is one slice only.
        slope: of a "leaky_relu" below 0.
        permuted: how result and residual of the step permute a linear layer's dimensions; None if they do not.
        folded: names of the tensors that the weight and the bias are made of.
    """

    kind: str
    name: str
    weight: Node
    bias: Node | None
    geometry: tuple[Any, ...] = ()
    activation: str | None = None
    slope: float = 0.01
    residual: bool = False
    permuted: tuple[int, ...] | None = None
    folded: tuple[str, ...] = ()
    seen_as: str | None = None

    @property
    def norms(self) -> list[str]:
        """Modules whose running statistics are folded in."""
        return list(dict.fromkeys(owner(n) for n in self.folded if n.endswith("running_var")))

    @property
    def merged(self) -> list[str]:
        """Other modules whose weights are folded in."""
        owners = dict.fromkeys(owner(n) for n in self.folded if n.endswith(".weight"))
        return [name for name in owners if name != self.name and name not in self.norms]

    @property
    def fused(self) -> tuple[str, ...]:
        known = {self.name, *self.norms}
        scaled = any(owner(n) not in known and not n.endswith((".weight", ".bias")) for n in self.folded)
        named = (
            ("batch norm", self.norms), ("scale", scaled), ("merged", self.merged), ("bias", self.bias is not None),
            ("residual", self.residual),
        )  # fmt: skip
        return (*(name for name, there in named if there), *((self.activation,) if self.activation else ()))


@dataclass(eq=False)
class Step:
    """One call of a program: `out` names the value it makes, `args` and `kwargs` hold earlier nodes.

    Attributes:
        kind: that of a Layer, "pointwise", "constant", "read" (a parameter as it is) or "call".
        target: a Layer; the nodes of a pointwise program, the last of which is `out`; the node of an expression of
            constants; or the function to call.
    """

    out: Node
    kind: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def permuted(self) -> tuple[int, ...] | None:
        """See `Layer`."""
        return getattr(self.target, "permuted", None)

    @property
    def seen_as(self) -> str | None:
        """See `Layer`."""
        return getattr(self.target, "seen_as", None)


def steps_of(captured: Captured) -> list[Step]:
    """The graph as steps, each at the place of its last node."""
    graph = captured.graph
    _take_single_results(graph)
    _without_copies(graph)
    norms.instance_norms(graph)
    norms.with_activations(graph, activation_of)
    rows.raised(graph)
    rows.pooled_twice(graph)
    constants = constant_nodes(graph)
    borders.into_layers([node for node in graph.nodes if _operands(node, constants) is not None])
    captured.results = list(next(iter(reversed(graph.nodes))).args[0])  # type: ignore[arg-type]
    nodes = list(graph.nodes)
    steps: dict[Node, Step] = {}
    claimed: set[Node] = set(constants)
    for node in nodes:
        layer = _layer(node, captured, constants)
        if layer is None:
            continue
        inner, end, residual = _with_tail(node, layer, claimed)
        steps[end] = Step(end, layer.kind, layer, (node.args[0],) if residual is None else (node.args[0], residual))
        claimed.update(inner)
    for inner in _programs(nodes, claimed):
        steps[inner[-1]] = Step(inner[-1], "pointwise", inner, tuple(_outside(inner)))
        claimed.update(inner)
    for node in nodes:
        if node not in claimed and node.op == "call_function":
            steps[node] = Step(node, "call", node.target, node.args, dict(node.kwargs))
    wanted = {node for step in steps.values() for node in _nodes_in((step.args, step.kwargs))}
    wanted.update(_nodes_in(nodes[-1].args))
    in_programs = {node for step in steps.values() if step.kind == "pointwise" for node in step.args}
    for node in constants & wanted:
        small = meta_of(node).numel() <= _SMALL if isinstance(meta_of(node), Tensor) else False
        is_read = node.op == "get_attr" and node not in in_programs and not small
        steps[node] = Step(node, "read" if is_read else "constant", node)
    return [steps[node] for node in nodes if node in steps]


def _take_single_results(graph: fx.Graph) -> None:
    """Operations of which only the first result is read become those that have no other."""
    for node in list(graph.nodes):
        single_of = _FIRST_RESULT.get(node.target)
        if single_of is None or not all(user.target is operator.getitem and user.args[1] == 0 for user in node.users):
            continue
        for user in list(node.users):
            with graph.inserting_before(node):
                new = graph.call_function(*single_of(*node.args, **node.kwargs))
            new.meta = dict(user.meta)
            user.replace_all_uses_with(new)
            graph.erase_node(user)
        graph.erase_node(node)


def _without_copies(graph: fx.Graph) -> None:
    """Attention reads q, k and v where they lie: no copies in another order for it alone."""
    for node in list(graph.nodes):
        if node.target is not _aten.scaled_dot_product_attention.default:
            continue
        for copied in dict.fromkeys(node.args[:3]):
            if copied.target is _aten.clone.default and list(copied.users) == [node]:
                copied.replace_all_uses_with(copied.args[0])
                graph.erase_node(copied)


def is_mask(node: Node) -> bool:
    """Whether this value is read as the mask of attention, and by nobody else."""
    attention = _aten.scaled_dot_product_attention.default
    return all(user.target is attention and user.args.index(node) == 3 for user in node.users)


def _nodes_in(arguments: Any) -> list[Node]:
    found: list[Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found


def meta_of(node: Node) -> Tensor:
    """What the value looked like when it was captured, on no device."""
    return node.meta["val"]  # type: ignore[no-any-return]


# ---- layers ----------------------------------------------------------------------------------------------------------


def _layer(node: Node, captured: Captured, constants: set[Node]) -> Layer | None:
    """The layer that this node is, without what follows; None if it is none that can be frozen."""
    operands = _operands(node, constants)
    if operands is None:
        return None
    weight, bias = operands[1:]
    made_of = [source for part in (weight, bias) if part is not None for source in captured.constants.sources(part)]
    folded = tuple(dict.fromkeys(str(source.target) for source in made_of))
    found = Layer("linear", node.meta.get("layer") or layer_name(weight), weight, bias, folded=folded)
    if node.target is _aten.convolution.default:
        _pose(node, found)
    return found


def _pose(node: Node, layer: Layer) -> None:
    """What kind of convolution the layer is, and its geometry."""
    given: Any = node.args
    transposed, sizes = given[6], meta_of(given[1]).shape[2:]
    sides = borders.sides_of(node)
    steps = [list(_per_axis(given[i], len(sizes))) for i in (3, 5, 7)]  # stride, dilation, output padding
    layer.seen_as = _seen_as(sizes, sides, steps, meta_of(given[0]).shape[2:])
    volume = len(sizes) == 3 and layer.seen_as is None
    layer.kind = ("transposed volume" if transposed else "volume") if volume else "transposed" if transposed else "conv"
    kept = {"columns": (0, 1), "slice": (1, 2)}.get(layer.seen_as or "", range(len(sizes)))
    sides, steps = [sides[i] for i in kept], [[values[i] for i in kept] for values in steps]
    if layer.seen_as == "row":
        sides, steps = [[0, 0], *sides], [[usual, *values] for usual, values in zip((1, 1, 0), steps, strict=True)]
    even = all(before == after for before, after in sides)
    padding = tuple(before for before, _ in sides) if even else tuple(size for pair in sides for size in pair)
    stride, dilation, more = map(tuple, steps)
    layer.geometry = (stride, padding, dilation, given[8], *([more] if transposed else []))


def _seen_as(kernel: Sequence[int], sides: borders.Sides, steps: list[list[int]], sizes: Sequence[int]) -> str | None:
    """See `Layer`; `sizes`: of the input."""
    if len(kernel) == 1:
        return "row"
    if len(kernel) == 3:
        per_axis = list(zip(kernel, map(tuple, sides), *steps, strict=True))
        plain = [axis == (1, (0, 0), 1, 1, 0) for axis in per_axis]
        if plain[0] and sizes[0] == 1:
            return "slice"
        if all(plain[1:]):
            return "columns"
    return None


def _operands(node: Node, constants: set[Node]) -> tuple[Node, Node, Node | None] | None:
    """x, weight and bias of a layer that can be frozen; None if this node is none."""
    given: Any = node.args
    if node.target is _aten.convolution.default:
        x, weight, bias, *_ = given
        dims = meta_of(weight).dim()
        if dims not in (3, 4, 5) or meta_of(x).dim() != dims:
            return None
    elif node.target is _aten.linear.default:
        x, weight, bias = (*given, None)[:3]
    else:
        return None
    value = meta_of(weight)
    if x in constants or weight not in constants or not (bias is None or bias in constants):
        return None
    # A larger one is limited by memory bandwidth, and its packed copy would double its memory.
    if value.dim() == 2 and value.numel() * value.element_size() > MAX_LINEAR_BYTES:
        return None
    if not value.is_floating_point() or meta_of(x).dtype != value.dtype:
        return None
    return x, weight, bias


def _per_axis(values: Any, axes: int) -> tuple[int, ...]:
    return tuple(values) * (axes if len(values) == 1 else 1)


def _with_tail(node: Node, layer: Layer, claimed: set[Node]) -> tuple[list[Node], Node, Node | None]:
    """Adds to `layer` what can run in its epilogue. Returns all nodes, the last one, and the residual's."""
    end, residual, inner = node, None, [node]
    while layer.activation is None and len(end.users) == 1:
        user = next(iter(end.users))
        if user in claimed or user.op != "call_function":
            break
        other = _other_summand(user, end, claimed)
        if layer.kind == "linear" and layer.permuted is None and residual is None and (dims := _permutation(user)):
            following = next(iter(user.users)) if len(user.users) == 1 else None
            if following is None or following in claimed or _other_summand(following, user, claimed) is None:
                break
            layer.permuted = dims
        elif other is not None and residual is None:
            residual, layer.residual = other, True
        elif (activation := activation_of(user)) is not None:
            layer.activation = activation
            if activation == "leaky_relu" and len(user.args) > 1:
                layer.slope = float(user.args[1])  # type: ignore[arg-type]
        else:
            break
        end = user
        inner.append(user)
    return inner, end, residual


def activation_of(node: Node) -> str | None:
    if node.target is _aten.gelu.default:
        return _GATED.get(str(node.kwargs.get("approximate", "none")))
    if node.target is _aten.hardtanh.default and node.args[1:] == (0.0, 6.0):
        return "relu6"
    if node.target is _aten.leaky_relu.default:
        return "leaky_relu"
    return _ACTIVATIONS.get(node.target) if len(node.args) == 1 else None


def _permutation(node: Node) -> tuple[int, ...] | None:
    if node.target is not _aten.permute.default:
        return None
    dims: Any = node.args[1]
    return tuple(d % len(dims) for d in dims)


def _other_summand(node: Node, mine: Node, claimed: set[Node]) -> Node | None:
    """b if `node` is mine + b or b + mine, of the same shape and dtype, and b is no constant."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, Node) or not isinstance(b, Node) or a is b:
        return None
    other = b if a is mine else a
    if (
        other.op == "get_attr"
        or meta_of(other).shape != meta_of(mine).shape
        or meta_of(other).dtype != meta_of(mine).dtype
    ):
        return None
    return other


# ---- pointwise programs ----------------------------------------------------------------------------------------------


def _programs(nodes: list[Node], claimed: set[Node]) -> Iterator[list[Node]]:
    """Groups of pointwise operations, each with one result that others read."""
    taken = set(claimed)
    position = {node: i for i, node in enumerate(nodes)}
    for node in reversed(nodes):
        if node in taken or not _is_pointwise(node):
            continue
        inner = [node]
        # Backwards: an operation joins if everybody who reads it has.
        for current in inner:
            for before in sorted(current.all_input_nodes, key=position.__getitem__, reverse=True):
                if before in taken or before in inner or any(user not in inner for user in before.users):
                    continue
                more = [*inner, before]
                fits = len(more) <= MOST_INSTRUCTIONS and len(_outside(more)) <= MOST_INPUTS
                if fits and _is_pointwise(before) and meta_of(before).shape == meta_of(node).shape:
                    inner.append(before)
        taken.update(inner)
        yield sorted(inner, key=position.__getitem__)


def _is_pointwise(node: Node) -> bool:
    if node.op != "call_function" or instruction_of(node) is None:
        return False
    return all(meta_of(t).dtype == torch.float32 for t in (node, *node.all_input_nodes))


def _outside(inner: list[Node]) -> list[Node]:
    """The values that these operations read and do not make, in order."""
    own = set(inner)
    return list(dict.fromkeys(arg for node in inner for arg in node.all_input_nodes if arg not in own))
