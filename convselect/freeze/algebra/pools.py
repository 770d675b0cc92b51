"""Averages over windows and 1x1 convolutions, which may change places."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from convselect.freeze.algebra.bench import (
    Bench,
    Node,
    argument,
    arguments,
    aten,
    only_reader,
    same_strides,
    shape,
    tensor,
)
from convselect.freeze.algebra.layers import Layer, layer

_POOL = aten.avg_pool2d.default
_ADAPTIVE = (aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)
_PER_VALUE = 8  # multiplications in the time of reading one value more


def averages_first(graph: fx.Graph) -> int:
    """avg(W x + b) = W avg(x) + b for a 1x1 convolution and an average over windows that leaves fewer pixels.

    DenseNet (Huang et al. 2017, arXiv 1608.06993) goes from block to block so; the convolution then has a quarter of
    the pixels. A bias must meet averages whose weights sum up to 1, which a padding's zeros prevent if they are
    counted, and another divisor; without one any average is linear. Left alone: a convolution's result that somebody
    else reads, and one with so few channels that averaging the operand's instead costs more than is saved.
    """
    bench = Bench(graph)
    count = sum(_exchanged(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _exchanged(node: Node, bench: Bench) -> bool:
    kept = _keeps_constants(node)
    source = arguments(node)[0] if kept is not None else None
    before = layer(source, bench) if isinstance(source, Node) else None
    if before is None or not before.is_conv or len(before.kernel) != 2 or not before.is_pointwise:
        return False
    if only_reader(before.node) is not node or (before.bias is not None and not kept):
        return False
    if not _pays(before, node):
        return False
    average = bench.call(before.node, node.target, before.x, *node.args[1:], **node.kwargs)
    result = bench.call(node, before.node.target, average, *before.node.args[1:], **before.node.kwargs)
    if not same_strides(result, tensor(node).stride()):
        bench.erase(result)
        return False
    result.meta.update({key: value for key, value in before.node.meta.items() if key != "val"})
    bench.replace(node, result)
    return True


def _keeps_constants(node: Node) -> bool | None:
    """Whether the averages of a constant are that constant; None if this is no average over windows of images."""
    if node.target in _ADAPTIVE:
        return True
    if node.target is aten.mean.dim:
        dims: Any = argument(node, 1, "dim") or ()
        spatial = sorted(d % 4 for d in dims) == [2, 3] and len(shape(arguments(node)[0])) == 4
        return True if spatial and argument(node, 2, "keepdim", False) and argument(node, 3, "dtype") is None else None
    if node.target is not _POOL:
        return None
    padded, counted = any(argument(node, 3, "padding", (0,))), argument(node, 5, "count_include_pad", True)
    return argument(node, 6, "divisor_override") is None and not (padded and counted)


def _pays(before: Layer, node: Node) -> bool:
    """Multiplications saved against values that are averaged in addition, each of which counts for `_PER_VALUE`."""
    pixels, fewer = (math.prod(shape(n)) // before.n_out for n in (before.node, node))
    saved = (pixels - fewer) * math.prod(shape(before.weight))
    return fewer < pixels and saved > _PER_VALUE * pixels * (before.n_in - before.n_out)
