"""Zeros put around a convolution's input, and results cut off at its edges, as padding of the convolution itself.

ATen's convolution pads both sides alike. A causal one is written with `F.pad` before it, or pads both sides and drops
what looks into the future (Bai et al. 2018, arXiv 1803.01271). The C kernels pad each side by its own number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from convselect.freeze.algebra.bench import argument, arguments, shape, tensor

Node = fx.Node
_aten = torch.ops.aten
Sides = list[list[int]]


def into_layers(nodes: Iterable[Node]) -> None:
    """Move such zeros and cuts into these convolutions, in place; other layers among them stay as they are.

    `meta["sides"]` of a convolution then has ((top, bottom), (left, right)), or ((left, right),) for one dimension, in
    place of the padding among its arguments. Left alone: other values than 0, values that somebody else reads, and
    cuts that leave out a part of the input.
    """
    for node in nodes:
        if node.target is _aten.convolution.default:
            if not node.args[6]:
                _take_zeros(node)
            while _take_cut(node):
                pass


def sides_of(node: Node) -> Sides:
    """The padding of a convolution: [before, after] for each dimension."""
    found: Sides | None = node.meta.get("sides")
    if found is not None:
        return [list(pair) for pair in found]
    padding: Any = node.args[4]
    dims = len(shape(node)) - 2
    return [[p, p] for p in (list(padding) * (dims if len(padding) == 1 else 1))]


def _take_zeros(node: Node) -> None:
    pad: Any = node.args[0]
    if pad.target is not _aten.constant_pad_nd.default or argument(pad, 2, "value", 0) != 0:
        return
    border, sides = arguments(pad)[1], sides_of(node)
    if min(border, default=0) < 0 or len(border) > 2 * len(sides):
        return
    for i in range(len(border) // 2):  # the last dimension comes first
        sides[-1 - i][0] += border[2 * i]
        sides[-1 - i][1] += border[2 * i + 1]
    node.meta["sides"] = sides
    node.args = (pad.args[0], *node.args[1:])
    if not pad.users:
        pad.graph.erase_node(pad)


def _take_cut(node: Node) -> bool:
    """Whether the only reader was a cut, which is part of the convolution now."""
    cut = next(iter(node.users)) if len(node.users) == 1 else None
    if cut is None or cut.target is not _aten.slice.Tensor or argument(cut, 4, "step", 1) != 1:
        return False
    sizes, kept = shape(node), shape(cut)
    dim, start = argument(cut, 1, "dim", 0) % len(sizes), argument(cut, 2, "start") or 0
    if dim < 2 or kept[dim] == 0:
        return False
    start = max(start + sizes[dim], 0) if start < 0 else start
    i, sides = dim - 2, sides_of(node)
    if node.args[6]:  # the padding of a transposed convolution is what its result is cut by
        sides[i] = [sides[i][0] + start, sides[i][1] + sizes[dim] - start - kept[dim]]
    else:
        x, weight, _, stride, _, dilation = arguments(node)[:6]
        step, spread = (values[i if len(values) > 1 else 0] for values in (stride, dilation))
        before = sides[i][0] - start * step
        extent = spread * (shape(weight)[dim] - 1) + 1
        after = (kept[dim] - 1) * step + extent - shape(x)[dim] - before
        if before < 0 or after < 0:
            return False
        sides[i] = [before, after]
    node.meta["sides"] = sides
    node.meta["val"] = torch.empty(kept, dtype=tensor(cut).dtype, device="meta")
    cut.replace_all_uses_with(node)
    cut.graph.erase_node(cut)
    return True
