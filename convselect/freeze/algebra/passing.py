"""Calls that a constant scale of one dimension, often a shift too, can be moved through."""

from __future__ import annotations

import math
from typing import Any

from convselect.freeze.algebra.bench import Node, argument, arguments, aten, shape

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# Each result is an average of operands of its channel, with weights that sum up to 1.
_AVERAGES = (
    aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.default,
    aten.upsample_bilinear2d.vec, aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default,
    aten.upsample_nearest3d.default, aten.upsample_trilinear3d.default, aten._adaptive_avg_pool3d.default,
)  # fmt: skip


def through(node: Node, dim: int) -> tuple[int, bool] | None:
    """Where a dimension of a call's first argument is in its result, and whether shifts pass as well as scales.

    f(x * s) = f(x) * s, and f(x + t) = f(x) + t, for s and t that vary over this dimension alone. None if that does not
    hold, as where a view cuts the dimension into parts.
    """
    found = _through(node, dim)
    return None if found is None else (found[0], found[1])


def _through(node: Node, dim: int) -> tuple[int, bool] | None:
    source = node.args[0] if node.args else None
    if node.op != "call_function" or not isinstance(source, Node):
        return None
    if node.target in _PLAIN:
        return dim, True
    if node.target in VIEWS:
        moved = _viewed(shape(source), shape(node), dim)
        return None if moved is None else (moved, True)
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % len(dims) for d in dims].index(dim), True
    if node.target in (aten.transpose.int, aten.t.default):
        return _transposed(node, len(shape(source)), dim), True
    if node.target in (aten.unsqueeze.default, aten.squeeze.dim):
        moved = _with_or_without(node, dim)
        return None if moved is None else (moved, True)
    if node.target is aten.slice.Tensor:
        return None if argument(node, 1, "dim", 0) % len(shape(source)) == dim else (dim, True)
    if node.target is aten.constant_pad_nd.default:  # zeros stay zeros when they are scaled
        pads_others = argument(node, 2, "value", 0) == 0 and len(arguments(node)[1]) <= 2 * (
            len(shape(source)) - 1 - dim
        )
        return (dim, False) if pads_others else None
    if node.target is aten.mean.dim:
        return _averaged(node, len(shape(source)), dim)
    is_image = len(shape(source)) in (4, 5) and dim == 1
    if node.target in _AVERAGES:
        return (1, True) if is_image else None
    if node.target is aten.avg_pool2d.default and is_image:
        padding, ceil = argument(node, 3, "padding", (0,)), argument(node, 4, "ceil_mode", False)
        divisor = argument(node, 6, "divisor_override")
        return 1, not any(padding) and not ceil and divisor is None
    return None


_PLAIN = (aten.clone.default, aten.alias.default, aten.detach.default)


def _viewed(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> int | None:
    outer = math.prod(before[:dim])
    places = (i for i, n in enumerate(after) if n == before[dim] and math.prod(after[:i]) == outer)
    return next(places, None)


def _transposed(node: Node, n_dims: int, dim: int) -> int:
    if node.target is aten.t.default:
        return n_dims - 1 - dim
    a, b = (int(d) % n_dims for d in arguments(node)[1:3])
    return {a: b, b: a}.get(dim, dim)


def _with_or_without(node: Node, dim: int) -> int | None:
    """Where a dimension is when one of size 1 was put in or left out; None if it is the one that was left out."""
    before, after = (shape(n) for n in (arguments(node)[0], node))
    at = int(arguments(node)[1]) % max(len(before), len(after))
    if len(after) > len(before):
        return dim + (dim >= at)
    if len(after) == len(before):
        return dim
    return None if dim == at else dim - (dim > at)


def _averaged(node: Node, n_dims: int, dim: int) -> tuple[int, bool] | None:
    dims = argument(node, 1, "dim")
    if not dims or argument(node, 3, "dtype") is not None:
        return None
    averaged = {d % n_dims for d in dims}
    if dim in averaged:
        return None
    kept = argument(node, 2, "keepdim", False)
    return dim if kept else dim - sum(d < dim for d in averaged), True
