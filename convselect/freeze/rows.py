"""Operations on (N, C, L) that PyTorch or the C library computes in NHWC only if they are images: as images of one row.

Between frozen layers (N, C, L) may lie as (N, L, C). PyTorch keeps such an order where a tensor has four dimensions
(channels_last) and copies it where it has three. An image of one row is a view and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from convselect.freeze import norms
from convselect.freeze.algebra.bench import arguments, tensor

Node = fx.Node
_aten = torch.ops.aten
_HEIGHT = 2
_BORDERS = (_aten.reflection_pad1d.default, _aten.replication_pad1d.default)
_MOST_BESIDE = 32  # values that a border has; a wider one is left to PyTorch
_RaisedArguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def raised(graph: fx.Graph) -> None:
    """Group normalisations, concatenations and nearest upsampling of (N, C, L) as those of images, in place.

    Reflected and repeated borders become concatenations, which are one call of C in both layouts.
    """
    for node in list(graph.nodes):
        if node.target in _BORDERS and tensor(node).dim() == 3:
            _concatenated(graph, node)
    for node in list(graph.nodes):
        form_of = _RAISED.get(node.target) if node.op == "call_function" else None
        if form_of is None or tensor(node).dim() != 3:
            continue
        with graph.inserting_before(node):
            found = form_of(lambda t: _view(graph, t, _aten.unsqueeze.default), *node.args, **node.kwargs)
            if found is None:
                continue
            target, args, kwargs = found
            image = graph.call_function(target, args, kwargs)
            image.meta = {**node.meta, "val": tensor(node).unsqueeze(_HEIGHT)}
            made = _view(graph, image, _aten.squeeze.dim)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _concatenated(graph: fx.Graph, node: Node) -> None:
    """Replace a padding by the concatenation of the input and single values beside it."""
    x, (before, after) = arguments(node)[:2]
    length, dim = tensor(x).shape[-1], tensor(x).dim() - 1
    if min(before, after) < 0 or before + after > _MOST_BESIDE:
        return
    if before == after == 0 and all(user.op != "output" for user in node.users):
        node.replace_all_uses_with(x)
        graph.erase_node(node)
        return
    reflects = node.target is _aten.reflection_pad1d.default
    left = range(before, 0, -1) if reflects else [0] * before
    right = range(length - 2, length - 2 - after, -1) if reflects else [length - 1] * after

    def at(place: int) -> Node:
        made = graph.call_function(_aten.slice.Tensor, (x, dim, place, place + 1))
        made.meta["val"] = tensor(x)[..., place : place + 1]
        return made

    with graph.inserting_before(node):
        made = graph.call_function(_aten.cat.default, ([*map(at, left), x, *map(at, right)], dim))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _view(graph: fx.Graph, of: Node, target: Any) -> Node:
    made = graph.call_function(target, (of, _HEIGHT))
    val = tensor(of)
    made.meta["val"] = val.unsqueeze(_HEIGHT) if target is _aten.unsqueeze.default else val.squeeze(_HEIGHT)
    return made


def _group_norm(raise_: Callable[[Node], Node], x: Node, *rest: Any, **options: Any) -> _RaisedArguments:
    return _aten.group_norm.default, (raise_(x), *rest), options


def _group_norm_then(
    raise_: Callable[[Node], Node], activation: str, slope: float, x: Node, *rest: Any, **options: Any
) -> _RaisedArguments:
    return norms.GROUP_NORM_THEN, (activation, slope, raise_(x), *rest), options


def _concatenation(raise_: Callable[[Node], Node], parts: Any, dim: int = 0) -> _RaisedArguments | None:
    if any(tensor(part).dim() != 3 for part in parts):
        return None  # an empty tensor of one dimension is left out of the result
    dim %= 3
    return _aten.cat.default, ([raise_(part) for part in parts], dim + (dim >= _HEIGHT)), {}


def _nearest(raise_: Callable[[Node], Node], x: Node, size: Any, factors: Any = None) -> _RaisedArguments:
    sizes = None if size is None else [1, *size]
    return _aten.upsample_nearest2d.vec, (raise_(x), sizes, None if factors is None else [1.0, *factors]), {}


def pooled_twice(graph: fx.Graph) -> None:
    """Pooling of volumes in float32 by windows along the rows and columns, and then along the depth, in place: both are
    poolings of images on views (see `reduce`)."""
    for node in list(graph.nodes):
        if node.target not in (_aten.max_pool3d.default, _aten.avg_pool3d.default):
            continue
        given, average = arguments(node), node.target is _aten.avg_pool3d.default
        x = given[0]
        named = dict(zip(("kernel", "stride", "padding", *(() if average else ("dilation",))), given[1:], strict=False))
        rest = given[len(named) + 1 :]
        if tensor(x).dim() != 5 or tensor(x).dtype != torch.float32 or node.kwargs:
            continue
        if average and (any(rest[:1]) or len(rest) > 2):  # ceil mode, another divisor: windows have no product of sizes
            continue
        axes = {name: [*values] * (3 if len(values) == 1 else 1) for name, values in named.items()}
        axes["stride"] = axes.get("stride") or axes["kernel"]
        plain = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
        inner = [[plain[name], *values[1:]] for name, values in axes.items()]
        outer = [[values[0], plain[name], plain[name]] for name, values in axes.items()]
        if _changes_nothing(inner, plain.values()) or _changes_nothing(outer, plain.values()):
            continue  # the other one is all of it
        with graph.inserting_before(node):
            first = graph.call_function(node.target, (x, *inner, *rest))
            first.meta["val"] = node.target(torch.empty(tensor(x).shape, device="meta"), *inner, *rest)
            second = graph.call_function(node.target, (first, *outer, *rest))
        second.meta = dict(node.meta)
        node.replace_all_uses_with(second)
        graph.erase_node(node)


def _changes_nothing(options: list[list[int]], plain: Iterable[int]) -> bool:
    return all(values == [n] * 3 for values, n in zip(options, plain, strict=False))


def _nearest_scaled(raise_: Callable[[Node], Node], x: Node, size: Any, scale: float | None = None) -> _RaisedArguments:
    return _aten.upsample_nearest2d.default, (raise_(x), [1, *size], None if scale is None else 1.0, scale), {}


_RAISED: dict[Any, Callable[..., _RaisedArguments | None]] = {
    _aten.group_norm.default: _group_norm,
    norms.GROUP_NORM_THEN: _group_norm_then,
    _aten.cat.default: _concatenation,
    _aten.upsample_nearest1d.vec: _nearest,
    _aten.upsample_nearest1d.default: _nearest_scaled,
}
