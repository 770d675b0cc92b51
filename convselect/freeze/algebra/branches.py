"""Layers of one operand whose results are summed, as one layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from convselect.freeze.algebra.affine import Affine, Factor, affine, factor_vector, sum_of, times, varies_over, vector
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
from convselect.freeze.algebra.layers import CONV, LINEAR, Layer, layer

_Shifts = list[tuple[Operand, tuple[Factor, ...]]]


@dataclass(eq=False)
class _Term:
    """A summand: a value times all these factors."""

    node: Node
    factors: tuple[Factor, ...]


@dataclass
class _Sum:
    """A tree of sums and of scales and shifts by constants, multiplied out.

    Attributes:
        shifts: summands that are constant, and their factors.
        inner: nodes that only this sum reads, and that it replaces.
    """

    root: Node
    dim: int
    terms: list[_Term] = field(default_factory=list)
    shifts: _Shifts = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)


def parallel_layers(graph: fx.Graph) -> int:
    """A x + B x = (A + B) x, for convolutions, linear layers, x itself, and scales and shifts of x.

    Convolutions need the same stride and groups. Smaller filters are padded with zeros to the place that they have in
    the largest one, which has to cover all others: a filter of 1x3 and one of 3x1 stay two. x itself is a filter with
    ones, if a result has as many channels and pixels as x. Sums may be nested, and scaled as a whole. Left alone:
    layers that somebody else reads.
    """
    bench = Bench(graph)
    count = 0
    done: set[Node] = set()
    for node in reversed(bench.nodes()):
        if node._erased or node in done or _summands(node, bench) is None:
            continue
        for dim in sorted({1, len(shape(node)) - 1}):
            found = _collected(node, dim, bench)
            done.update(found.inner)
            merged = _merged(found, bench)
            count += merged
            if merged:
                break
    bench.finish()
    return count


def common_factors(graph: fx.Graph) -> int:
    """x * a + x * y * b + t = x * (y * b + a) + t, for constant a, b, t and a smaller y that is not constant.

    So a gate beside a residual, and a global response normalisation, scale x once. Left alone: sums of more than these,
    and products that somebody else reads.
    """
    bench = Bench(graph)
    count = 0
    for node in reversed(bench.nodes()):
        if not node._erased and _summands(node, bench) is not None:
            count += any(_factored(_collected(node, dim, bench), bench) for dim in sorted({1, len(shape(node)) - 1}))
    bench.finish()
    return count


def _factored(found: _Sum, bench: Bench) -> bool:
    root = found.root
    if len(found.terms) != 2:
        return False
    for plain, gated in (found.terms, found.terms[::-1]):
        x, product = plain.node, gated.node
        if product.target is not aten.mul.Tensor or only_reader(product) is None or x not in product.args[:2]:
            continue
        gate = next((arg for arg in arguments(product)[:2] if arg is not x), None)
        if (
            not isinstance(gate, Node)
            or tensor(gate).numel() >= tensor(x).numel()
            or tensor(gate).dtype != tensor(x).dtype
        ):
            continue
        a, b = _product(plain.factors, bench), _product(gated.factors, bench)
        is_per_channel = any(isinstance(factor, Node) and shape(factor) for factor in (a, b))
        per_channel = len(shape(gate)) == len(shape(root)) and shape(gate)[found.dim] == shape(root)[found.dim]
        if (is_per_channel and not per_channel) or not same_strides(x, tensor(root).stride()):
            continue
        for target, factor in ((aten.mul.Tensor, b), (aten.add.Tensor, a)):
            if factor != (1 if target is aten.mul.Tensor else 0):
                scaled = bench.call(root, target, gate, _placed(factor, found, bench))
                gate = _like(gate, scaled)
        result = _like(root, bench.call(root, aten.mul.Tensor, x, gate))
        for shift, factors in found.shifts:
            whole = times(bench, _product(factors, bench), vector(bench, shift))
            result = _like(root, bench.call(root, aten.add.Tensor, result, _placed(whole, found, bench)))
        bench.replace(root, result)
        return True
    return False


def _placed(value: Operand, found: _Sum, bench: Bench) -> Operand:
    """A vector in the shape in which it is broadcast to the sum; others as they are."""
    if not isinstance(value, Node) or not shape(value):
        return value
    dims = [-1 if i == found.dim else 1 for i in range(len(shape(found.root)))]
    return bench.constant(aten.reshape.default, value, dims)


def _summands(node: Node, bench: Bench) -> tuple[Any, float, Any, float] | None:
    """As `sum_of`, of two values that are not constant."""
    found = sum_of(node)
    if found is None or tensor(node).dim() < 2 or not tensor(node).is_floating_point():
        return None
    return None if any(is_number(value) or bench.is_constant(value) for value in found[::2]) else found


def _collected(root: Node, dim: int, bench: Bench) -> _Sum:
    found = _Sum(root, dim)
    todo: list[tuple[Any, tuple[Factor, ...]]] = [(root, ())]
    while todo:
        value, factors = todo.pop()
        own = value is root or only_reader(value) is not None
        step = affine(value, bench) if own and value is not root else None
        if step is not None and _fits(step, dim, shape(root)):
            found.inner.append(value)
            todo.append((step.x, (*factors, *_unless_one(step.factor))))
            if step.shift is not None:
                found.shifts.append((step.shift, (*factors, *_unless_one(Factor(step.shift_number)))))
        elif own and (summed := _summands(value, bench)) is not None and _same_kind(value, root):
            a, m, b, n = summed
            found.inner.append(value)
            todo.append((b, (*factors, *_unless_one(Factor(n)))))
            todo.append((a, (*factors, *_unless_one(Factor(m)))))
        else:
            found.terms.append(_Term(value, factors))
    return found


def _same_kind(value: Node, root: Node) -> bool:
    """Whether nothing is broadcast or converted in this sum."""
    return all(
        tensor(a).shape == tensor(root).shape and tensor(a).dtype == tensor(root).dtype
        for a in (value, *arguments(value)[:2])
    )


def _fits(step: Affine, dim: int, of: tuple[int, ...]) -> bool:
    return varies_over(step.factor.constant, dim, of) and varies_over(step.shift, dim, of)


def _unless_one(factor: Factor) -> tuple[Factor, ...]:
    return () if factor == Factor() else (factor,)


def _merged(found: _Sum, bench: Bench) -> int:
    """Merges what can be merged in a sum; the number of layers and other terms that are gone."""
    hosts: list[tuple[Layer, list[tuple[_Term, Layer | None]]]] = []
    left = list(found.terms)
    layers = {term.node: found_layer for term in left if (found_layer := _branch(term, found, bench)) is not None}
    # The largest filters first: a host takes in what fits into it.
    for term in sorted(left, key=lambda term: -_taps(layers.get(term.node))):
        host = layers.get(term.node)
        if host is None or term not in left:
            continue
        guests = [(other, layers.get(other.node)) for other in left if other is not term]
        guests = [(other, guest) for other, guest in guests if _takes_in(host, other, guest, found)]
        if guests:
            taken = {id(term), *(id(other) for other, _ in guests)}
            left = [other for other in left if id(other) not in taken]
            hosts.append((host, [(term, host), *guests]))
    # Multiplied out, a scale of the whole sum is one of each term that is left.
    scales = sum(any(factor.constant is not None for factor in term.factors) for term in left)
    calls = 2 * len(hosts) + len(left) - 1 + scales + _unmerged(layers, hosts)
    if not hosts or calls >= len(found.inner) + len(layers):
        return 0
    # A sum has the strides of its first operand: what the first one went into stays first.
    first = found.terms[0]
    hosts.sort(key=lambda merged: all(term is not first for term, _ in merged[1]))
    leads = first if first in left else None
    if not same_strides((leads or hosts[0][1][0][0]).node, tensor(found.root).stride()):
        return 0
    shifts = found.shifts
    results = []
    for host, parts in hosts:
        results.append(_one_layer(host, parts, shifts, found, bench))
        shifts = []
    bench.replace(found.root, _sum_of(results, left, leads, found, bench))
    return sum(len(parts) - 1 for _, parts in hosts)


def _unmerged(layers: dict[Node, Layer], hosts: list[Any]) -> int:
    merged = {part.node for _, parts in hosts for _, part in parts if part is not None}
    return sum(found.node not in merged for found in layers.values())


def _branch(term: _Term, found: _Sum, bench: Bench) -> Layer | None:
    """The layer that a term is, if only the sum reads it."""
    node = term.node
    if only_reader(node) is None:
        return None
    branch = layer(node, bench)
    return branch if branch is not None and branch.channels == found.dim and not branch.is_transposed else None


def _taps(branch: Layer | None) -> int:
    taps = 0 if branch is None else 1
    for size in branch.kernel if branch is not None else ():
        taps *= size
    return taps


def _takes_in(host: Layer, term: _Term, guest: Layer | None, found: _Sum) -> bool:
    if guest is None or guest.x is not host.x:
        in_place = all(s == 1 for s in host.stride) and _margins(host, None) is not None
        return term.node is host.x and in_place  # of the sum's shape, so there are as many channels
    same = guest.is_conv == host.is_conv and guest.stride == host.stride and guest.groups == host.groups
    return same and _margins(host, guest) is not None


def _margins(host: Layer, guest: Layer | None) -> list[tuple[int, int]] | None:
    """Zeros before and after a smaller filter (x itself has one tap) in each dimension; None if it sticks out.

    Tap i of a filter reads the operand at i * dilation - padding.
    """
    margins = []
    for i, (size, padding, dilation) in enumerate(zip(host.kernel, host.padding, host.dilation, strict=True)):
        own_size, own_padding, own_dilation = (
            (1, 0, 1) if guest is None else (guest.kernel[i], guest.padding[i], guest.dilation[i])
        )
        before, rest = divmod(padding - own_padding, dilation)
        after = size - own_size - before
        if rest or before < 0 or after < 0 or (own_size > 1 and own_dilation != dilation):
            return None
        margins.append((before, after))
    return margins


def _one_layer(
    host: Layer, parts: list[tuple[_Term, Layer | None]], shifts: _Shifts, found: _Sum, bench: Bench
) -> Node:
    weight: Operand | None = None
    bias: Operand = 0
    for term, branch in parts:
        margins = _margins(host, branch)
        assert margins is not None
        if branch is None:
            branch = Layer(bench, host.node, host.x, _identity(host, bench), None, host.is_conv)
        branch.scale_out(_product(term.factors, bench))
        own = branch.weight
        if any(before or after for before, after in margins):
            pads = [n for pair in reversed(margins) for n in pair]
            own = bench.constant(aten.constant_pad_nd.default, own, pads)
        weight = own if weight is None else bench.constant(aten.add.Tensor, weight, own)
        if branch.bias is not None:
            bias = branch.bias if bias == 0 else bench.constant(aten.add.Tensor, bias, branch.bias)
    assert isinstance(weight, Node)
    args = (host.x, weight, bias if isinstance(bias, Node) else None, *host.node.args[3:])
    with bench.graph.inserting_before(found.root):
        node = bench.graph.call_function(CONV if host.is_conv else LINEAR, args)
    node.meta = {**host.node.meta, "val": tensor(host.node)}
    merged = layer(node, bench)
    assert merged is not None
    for shift, factors in shifts:
        merged.shift_out(times(bench, _product(factors, bench), vector(bench, shift)))
    merged.edit()
    return node


def _identity(host: Layer, bench: Bench) -> Node:
    """The weight of x itself: one tap, and ones where input and output channel are the same."""
    own, groups = host.n_in // host.groups, host.groups
    made = dict(dtype=tensor(host.weight).dtype, device=torch.device("cpu"))
    if own == 1:
        eye = bench.constant(aten.ones.default, [groups, 1], **made)
    else:
        eye = bench.constant(aten.eye.default, own, **made)
        if groups > 1:
            eye = bench.constant(aten.repeat.default, eye, [groups, 1])
    return bench.constant(aten.reshape.default, eye, [groups * own, own, *(1 for _ in host.kernel)])


def _product(factors: tuple[Factor, ...], bench: Bench) -> Operand:
    product: Operand = 1
    for factor in factors:
        product = times(bench, product, factor_vector(bench, factor))
    return product


def _sum_of(results: list[Node], left: list[_Term], leads: _Term | None, found: _Sum, bench: Bench) -> Node:
    """The sum of the new layers and of what could not be merged; `leads`, if any, comes first."""
    root = found.root
    summands: list[tuple[Node, float]] = [(result, 1.0) for result in results]
    for term in left:
        factor, value = _product(term.factors, bench), term.node
        if isinstance(factor, Node) or (term is leads and factor != 1):
            scaled = bench.call(root, aten.mul.Tensor, value, _placed(factor, found, bench))
            value, factor = _like(root, scaled), 1
        assert not isinstance(factor, Node)
        summands.insert(0 if term is leads else len(summands), (value, factor))
    total = summands[0][0]
    for value, factor in summands[1:]:
        alpha = {"alpha": factor} if factor != 1 else {}
        total = _like(root, bench.call(root, aten.add.Tensor, total, value, **alpha))
    return total


def _like(node: Node, new: Node) -> Node:
    new.meta = dict(node.meta)
    return new
