"""Scales and shifts by constants, folded into the layer before or after them or into each other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from convselect.freeze.algebra.affine import (
    Affine,
    Factor,
    affine,
    factor_vector,
    times,
    varies_over,
    vector,
)
from convselect.freeze.algebra.bench import (
    Bench,
    Node,
    Operand,
    arguments,
    aten,
    is_number,
    only_reader,
    same_strides,
    shape,
    tensor,
)
from convselect.freeze.algebra.layers import Layer, layer
from convselect.freeze.algebra.passing import through


def into_layer_before(graph: fx.Graph) -> int:
    """(W x + b) * s + t = (W * s) x + (b * s + t), for s and t that vary over channels alone.

    Between layer and scale there may be calls that it can be moved through (`passing.through`), permutations for
    example. Left alone if somebody else reads a value in between.
    """
    bench = Bench(graph)
    count = sum(_folded_before(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _folded_before(node: Node, bench: Bench) -> bool:
    found = affine(node, bench)
    source = None if found is None else _source(found.x, bench)
    if found is None or source is None:
        return False
    before, dim, shifts_pass = source
    if not _fits(found, dim, shape(node)) or (found.shift is not None and not shifts_pass):
        return False
    scale, shift = _vectors(found, bench)
    if scale != 1:
        before.scale_out(scale)
    if shift is not None:
        before.shift_out(shift)
    before.edit()
    bench.replace(node, found.x)
    return True


def _source(node: Node, bench: Bench) -> tuple[Layer, int, bool] | None:
    """The layer that this value is the result of, where its channels are now, and whether shifts pass as well."""
    path: list[Node] = []
    while only_reader(node) is not None:
        found = layer(node, bench)
        if found is not None:
            dim, shifts = found.channels, True
            for call in reversed(path):
                moved = through(call, dim)
                if moved is None:
                    return None
                dim, shifts = moved[0], shifts and moved[1]
            return found, dim, shifts
        path.append(node)
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node) or len(node.all_input_nodes) != 1:
            return None
        node = source
    return None


def into_layers_after(graph: fx.Graph) -> int:
    """W (x * s + t) + b = (W * s) x + (W t + b), W * s over input channels and W t summed over taps.

    If all that reads the value, directly or through calls that it can be moved through, is a layer. A shift is folded
    only if no reader pads: next to a border a filter sees zeros that were not shifted.
    """
    bench = Bench(graph)
    # From the end: an x * s + t loses its shift first, and x * s is read by the layer then.
    count = sum(_folded_after(node, bench) for node in reversed(bench.nodes()) if not node._erased)
    bench.finish()
    return count


def _folded_after(node: Node, bench: Bench) -> bool:
    found = affine(node, bench)
    if found is None:
        return False
    sinks: list[Layer] = []
    dims = range(len(shape(node)))
    dim = next((d for d in dims if _fits(found, d, shape(node)) and _all_layers(node, d, bench, sinks)), None)
    if dim is None:
        return False
    # Where strides change, a view between this and a layer might be impossible without it.
    direct = len(sinks) == len(node.users) and all(sink.x is node for sink in sinks)
    if not direct and not same_strides(found.x, tensor(node).stride()):
        return False
    if found.shift is not None and not (all(sink.can_shift_in() for sink in sinks) and _shifts_reach(node, dim)):
        return False
    scale, shift = _vectors(found, bench)
    for sink in sinks:
        if shift is not None:
            sink.shift_in(shift)
        if scale != 1:
            sink.scale_in(scale)
        sink.edit()
    bench.replace(node, found.x)
    return True


def _all_layers(node: Node, dim: int, bench: Bench, sinks: list[Layer]) -> bool:
    """Whether only layers read a value, whose channels this dimension is; `sinks` are those layers."""
    sinks.clear()
    for reader, at in _readers(node, dim):
        found = layer(reader, bench)
        if found is None or at != (1 if found.is_conv else len(shape(found.x)) - 1):
            return False
        sinks.append(found)
    return bool(sinks)


def _readers(node: Node, dim: int) -> Iterator[tuple[Node, int]]:
    """Who reads a value, calls that it can be moved through left out, and where its dimension is there."""
    todo = [(node, dim)]
    while todo:
        value, at = todo.pop()
        for reader in value.users:
            moved = through(reader, at) if reader.args and reader.args[0] is value else None
            if moved is None:
                yield reader, at
            else:
                todo.append((reader, moved[0]))


def _shifts_reach(node: Node, dim: int) -> bool:
    todo = [(node, dim)]
    while todo:
        value, at = todo.pop()
        for reader in value.users:
            moved = through(reader, at)
            if moved is not None:
                if not moved[1]:
                    return False
                todo.append((reader, moved[0]))
    return True


def _fits(found: Affine, dim: int, of: tuple[int, ...]) -> bool:
    return varies_over(found.factor.constant, dim, of) and varies_over(found.shift, dim, of)


def _vectors(found: Affine, bench: Bench) -> tuple[Operand, Operand | None]:
    scale = factor_vector(bench, found.factor)
    shift = None if found.shift is None else times(bench, vector(bench, found.shift), found.shift_number)
    return scale, None if shift == 0 else shift


def products_and_sums(graph: fx.Graph) -> int:
    """addcmul(a, b, c) = a + b * c, if one of the three is constant: it may go elsewhere."""
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        if node.target is not aten.addcmul.default or not any(map(bench.is_constant, node.args)):
            continue
        a, b, c = node.args[:3]
        if bench.is_constant(b) and bench.is_constant(c):
            product = bench.constant(aten.mul.Tensor, b, c)
        else:
            product = bench.call(node, aten.mul.Tensor, b, c)
        alpha = node.kwargs.get("value", 1)
        whole = bench.call(node, aten.add.Tensor, a, product, **({} if alpha == 1 else {"alpha": alpha}))
        whole.meta = dict(node.meta)
        bench.replace(node, whole)
        count += 1
    bench.finish()
    return count


def constants_together(graph: fx.Graph) -> int:
    """(x * a) * b = x * (a * b), and (x * y) * a = x * (y * a) if y is not constant and smaller than the product.

    The second lets a constant factor go to the gate of a squeeze-and-excitation block, one value per channel. Left
    alone if somebody else reads the inner product, or if a * b would be larger than both.
    """
    bench = Bench(graph)
    count = sum(_together(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _together(node: Node, bench: Bench) -> bool:
    outer = affine(node, bench)
    if outer is None or outer.shift is not None or only_reader(outer.x) is not node:
        return False
    inner = affine(outer.x, bench)
    if inner is not None:
        return inner.shift is None and _one_factor(node, outer, inner, bench)
    return outer.x.target is aten.mul.Tensor and _to_gate(node, outer, bench)


def _one_factor(node: Node, outer: Affine, inner: Affine, bench: Bench) -> bool:
    a, b = (_whole(found.factor, bench) for found in (inner, outer))
    product = times(bench, a, b)
    sizes = [tensor(value).numel() for value in (a, b) if isinstance(value, Node)]
    if isinstance(product, Node) and tensor(product).numel() > max(sizes):
        return False
    bench.replace(node, _scaled(node, inner.x, product, bench))
    return True


def _to_gate(node: Node, outer: Affine, bench: Bench) -> bool:
    gate = min(arguments(outer.x)[:2], key=lambda arg: 0 if is_number(arg) else tensor(arg).numel())
    if not isinstance(gate, Node) or tensor(gate).numel() >= tensor(node).numel() or bench.is_constant(gate):
        return False
    constant = outer.factor.constant
    dims = shape(gate)
    if len(dims) != len(shape(node)) or not all(
        a in (1, b) for a, b in zip(_padded(constant, len(dims)), dims, strict=True)
    ):
        return False
    if tensor(gate).dtype != tensor(node).dtype:
        return False
    other = next(arg for arg in outer.x.args[:2] if arg is not gate)
    factor = _whole(outer.factor, bench)
    scaled = _scaled(outer.x, gate, factor, bench)
    whole = bench.call(node, aten.mul.Tensor, *(scaled if arg is gate else other for arg in outer.x.args[:2]))
    whole.meta = dict(node.meta)
    bench.replace(node, whole)
    return True


def _padded(constant: Node | None, n_dims: int) -> tuple[int, ...]:
    dims = () if constant is None else shape(constant)
    return (1,) * (n_dims - len(dims)) + dims if len(dims) <= n_dims else (0,) * n_dims


def _whole(factor: Factor, bench: Bench) -> Operand:
    """A factor's value, in the shape that it broadcasts from."""
    if factor.constant is None:
        return factor.number
    constant = bench.constant(aten.reciprocal.default, factor.constant) if factor.inverse else factor.constant
    return times(bench, constant, factor.number)


def _scaled(before: Node, x: Node, factor: Operand, bench: Bench) -> Node:
    node = bench.call(before, aten.mul.Tensor, x, factor)
    node.meta["val"] = tensor(x)
    return node
