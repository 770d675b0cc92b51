"""One spelling for what ATen writes in several ways: linear layers, means of images; and calls that change nothing."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from convselect.freeze.algebra.bench import (
    Bench,
    Node,
    argument,
    arguments,
    aten,
    is_number,
    same_strides,
    shape,
    tensor,
)
from convselect.freeze.algebra.constants import gives_the_same
from convselect.freeze.algebra.layers import CONV
from convselect.freeze.algebra.passing import VIEWS

# Their results share memory with their first argument, so a reader of one may be a reader of the other.
ALIASES = (
    *VIEWS, aten.alias.default, aten.detach.default, aten.expand.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.unsqueeze.default, aten.as_strided.default,
)  # fmt: skip
_PADS = (
    aten.constant_pad_nd.default, aten.reflection_pad1d.default, aten.reflection_pad2d.default,
    aten.replication_pad1d.default, aten.replication_pad2d.default,
)  # fmt: skip
_CASTS = (aten._to_copy.default,)
DROPOUTS = (
    aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default,
)  # fmt: skip


def identities(graph: fx.Graph) -> int:
    """Calls whose result is their operand: f(x) = x.

    Dropout in evaluation, copies, also over another value, conversions to the type that a value has, views of the shape
    that it has, x * 1, x + 0, pooling of one pixel, padding by nothing. A copy stays if it has other strides than its
    operand, or if its memory is returned: then it must not be an argument's, nor another result's. (-0 + 0 is 0: the
    sign is not kept.)
    """
    bench = Bench(graph)
    output = next(iter(reversed(graph.nodes)))
    returned = _returned(output)
    count = 0
    for node in bench.nodes():
        if node._erased or node.op != "call_function":
            continue
        source = _unchanged(node)
        if source is None or not _may_vanish(node, source, output, returned):
            continue
        bench.replace(node, source)
        count += 1
    bench.finish()
    return count


def _returned(output: Node) -> set[Node]:
    """Values whose memory may be part of the results."""
    found: set[Node] = set()
    todo = list(output.all_input_nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if node.target in (*ALIASES, operator.getitem, aten.split.Tensor, aten.unbind.int, *DROPOUTS):
                todo.extend(node.all_input_nodes)
    return found


def _may_vanish(node: Node, source: Node, output: Node, returned: set[Node]) -> bool:
    if tensor(node).dtype != tensor(source).dtype or tensor(node).shape != tensor(source).shape:
        return False
    if not same_strides(source, tensor(node).stride()):
        return False
    if node not in returned:
        return True
    # A view or dropout of what the graph made itself is as good as that, unless the same tensor is returned twice.
    fresh = source.op == "call_function" and source not in output.all_input_nodes
    return fresh and (node.target in ALIASES or node.target in DROPOUTS)


def _unchanged(node: Node) -> Node | None:
    """The operand that a call returns, if it does nothing."""
    target, args = node.target, arguments(node)
    if target is operator.getitem:
        return _undropped(node)
    if target is aten.copy.default:  # what is left of a write to all of a tensor (MViT V2)
        return args[1]  # type: ignore[no-any-return]
    source: Any = args[0] if args else None
    if not isinstance(source, Node):
        return _neutral(node)
    if target in DROPOUTS:
        same = argument(node, 2, "train") is False or argument(node, 1, "p") == 0
    elif target in (*VIEWS, aten.alias.default, aten.detach.default, aten.expand.default, aten.clone.default):
        same = shape(node) == shape(source)
    elif target in (aten.slice.Tensor, *_CASTS):
        same = shape(node) == shape(source) and (target in _CASTS or argument(node, 4, "step", 1) == 1)
    elif target is aten.permute.default:
        same = [d % len(args[1]) for d in args[1]] == list(range(len(args[1])))
    elif target is aten.transpose.int:
        same = (args[1] - args[2]) % max(len(shape(source)), 1) == 0
    elif target in _PADS:
        same = not any(args[1])
    elif target is aten.avg_pool2d.default:
        one = _all(args[1], 1) and _all(argument(node, 2, "stride") or [1], 1)
        same = one and _all(argument(node, 3, "padding", [0]), 0) and argument(node, 6, "divisor_override") in (None, 1)
    else:
        return _neutral(node)
    return source if same else None


def _all(values: Any, wanted: int) -> bool:
    return all(value == wanted for value in values)


def _undropped(node: Node) -> Node | None:
    dropout: Any = node.args[0]
    off = dropout.target is aten.native_dropout.default and dropout.args[2] is False
    return dropout.args[0] if off and node.args[1] == 0 else None


def _neutral(node: Node) -> Node | None:
    """x of x * 1, x / 1, x + 0, x - 0."""
    if node.target not in _NEUTRAL:
        return None
    value, commutes = _NEUTRAL[node.target]
    a, b = node.args[:2]
    if "rounding_mode" in node.kwargs:
        return None
    if commutes and is_number(a) and a == value and argument(node, 2, "alpha", 1) == 1:
        a, b = b, a
    return a if isinstance(a, Node) and is_number(b) and b == value else None


_NEUTRAL: dict[Any, tuple[int, bool]] = {
    aten.mul.Tensor: (1, True), aten.mul.Scalar: (1, False), aten.div.Tensor: (1, False), aten.div.Scalar: (1, False),
    aten.add.Tensor: (0, True), aten.add.Scalar: (0, False), aten.sub.Tensor: (0, False), aten.sub.Scalar: (0, False),
}  # fmt: skip


def paddings(graph: fx.Graph) -> int:
    """A convolution of an image with a border of zeros, as one that pads.

    Left alone: other values, borders that are not the same on both sides, and transposed convolutions, which crop.
    """
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        pad: Any = node.args[0] if node.target is CONV else None
        if node._erased or pad is None or pad.target is not aten.constant_pad_nd.default or node.args[6]:
            continue
        border, value = arguments(pad)[1], argument(pad, 2, "value", 0)
        own = [*arguments(node)[4]] * (len(shape(node)) - 2 if len(arguments(node)[4]) == 1 else 1)
        before, after = border[0::2], border[1::2]
        if value != 0 or before != after or min(border) < 0 or len(before) > len(own):
            continue
        for i, zeros in enumerate(before, start=1):  # the last dimension comes first
            own[-i] += zeros
        node.args = (pad.args[0], *node.args[1:4], own, *node.args[5:])
        bench.erase(pad)
        count += 1
    bench.finish()
    return count


def repeated_calls(graph: fx.Graph) -> int:
    """f(x) and f(x) are one call, if f is no random operator; those whose memory is returned stay two."""
    bench = Bench(graph)
    returned = _returned(next(iter(reversed(graph.nodes))))
    first: dict[Any, Node] = {}
    count = 0
    for node in bench.nodes():
        if not gives_the_same(node.target) or node.op != "call_function":
            continue
        same = first.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if same is not node and same not in returned and node not in returned:
            bench.replace(node, same)
            count += 1
    bench.finish()
    return count


def views_of_views(graph: fx.Graph) -> int:
    """A view of a view is one view, and a view back to the first shape is none; `_unsafe_view` is `view`."""
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        if node._erased or node.target not in VIEWS:
            continue
        source: Any = node.args[0]
        inner = source.args[0] if source.target in VIEWS else None
        # `reshape` of a value with other strides is a copy: a view of that has no view of the first for it.
        if inner is not None and aten.reshape.default not in (source.target, node.target):
            node.args = (inner, list(shape(node)))
            bench.erase(source)
            count += 1
        if node.target is aten._unsafe_view.default:
            node.target = aten.view.default
            count += 1
    bench.finish()
    return count


def linear_layers(graph: fx.Graph) -> int:
    """addmm(b, X, W^T) = linear(X, W, b), and mm(X, W^T) = linear(X, W), for constant W and b.

    Of an operand that was copied or viewed as a matrix, the layer reads the operand itself: rows stay rows. So it does
    if the matrix was repeated for a batch of products (`bmm`), as PyTorch does for operands that are no matrix in
    memory.
    """
    bench = Bench(graph)
    count = sum(_linear(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _linear(node: Node, bench: Bench) -> bool:
    if node.target is aten.mm.default:
        bias, (x, matrix) = None, arguments(node)[:2]
    elif node.target is aten.addmm.default:
        bias, x, matrix = arguments(node)[:3]
    elif node.target is aten.bmm.default:
        bias, x, matrix = None, arguments(node)[0], _repeated(arguments(node)[1])
    else:
        return False
    if not bench.is_constant(matrix) or bench.is_constant(x) or not tensor(node).is_floating_point():
        return False
    n_in, n_out = shape(matrix)
    if bias is not None:
        if not bench.is_constant(bias) or shape(bias) not in ((n_out,), (1, n_out)):
            return False
        bias = _scaled(bias, argument(node, 3, "beta", 1), bench)
        if len(shape(bias)) == 2:
            bias = bench.constant(aten.reshape.default, bias, [n_out])
    weight = _scaled(_transposed(matrix, bench), argument(node, 4, "alpha", 1), bench)
    while x.target in (*VIEWS, aten.clone.default) and shape(x.args[0])[-1:] == (n_in,):
        x = x.args[0]
    made = bench.call(node, aten.linear.default, x, weight, bias)
    made.meta = {**node.meta, "val": made.meta["val"]}
    if shape(made) != shape(node):
        made = bench.call(node, aten.view.default, made, list(shape(node)))
    bench.replace(node, made)
    return True


def _repeated(matrices: Node) -> Node | None:
    """The matrix of which all these are copies."""
    node = matrices
    while node.target in (*VIEWS, aten.expand.default) and shape(node)[-2:] == shape(matrices)[-2:]:
        node = arguments(node)[0]
    return node if shape(node) == shape(matrices)[-2:] else None


def _scaled(value: Node, number: Any, bench: Bench) -> Node:
    return value if number == 1 else bench.constant(aten.mul.Tensor, value, number)


def _transposed(matrix: Node, bench: Bench) -> Node:
    args = arguments(matrix)
    is_transpose = matrix.target is aten.t.default
    if matrix.target is aten.permute.default:
        is_transpose = [d % 2 for d in args[1]] == [1, 0]
    elif matrix.target is aten.transpose.int:
        is_transpose = (args[1] - args[2]) % 2 == 1
    if is_transpose:
        return args[0]  # type: ignore[no-any-return]
    return bench.constant(aten.t.default, matrix)


def image_means(graph: fx.Graph) -> int:
    """The mean of each image and channel, however written, as `mean.dim(x, [2, 3], True)` and a view.

    Of values with four dimensions: means over the last two in any order, adaptive pooling to one pixel, and pooling by
    one window of the size of the image.
    """
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        if node._erased or not _is_image_mean(node):
            continue
        x: Any = node.args[0]
        made = bench.call(node, aten.mean.dim, x, [2, 3], True)
        made.meta = {**node.meta, "val": made.meta["val"]}
        if shape(made) != shape(node):
            made = bench.call(node, aten.view.default, made, list(shape(node)))
        bench.replace(node, made)
        count += 1
    bench.finish()
    return count


def _is_image_mean(node: Node) -> bool:
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, Node) or "val" not in source.meta:
        return False
    if not isinstance(source.meta["val"], torch.Tensor) or len(shape(source)) != 4:
        return False
    if not tensor(source).is_floating_point():
        return False
    if node.target is aten.mean.dim:
        dims: Any = argument(node, 1, "dim") or ()
        keep = argument(node, 2, "keepdim", False)
        same = argument(node, 3, "dtype") in (None, tensor(source).dtype)
        return bool(same) and sorted(d % 4 for d in dims) == [2, 3] and not (list(dims) == [2, 3] and keep)
    if node.target in (aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default):
        return shape(node)[2:] == (1, 1)
    if node.target is aten.avg_pool2d.default:
        window, padding = arguments(node)[1], argument(node, 3, "padding", [0])
        plain = _all(padding, 0) and argument(node, 6, "divisor_override") is None
        return plain and tuple(window) == shape(source)[2:]
    return False
