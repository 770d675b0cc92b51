"""Attention that is written out, as one call: products, a softmax, and what is between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from convselect.freeze.algebra.bench import Bench, Node, aten, is_number, only_reader, shape, tensor
from convselect.freeze.algebra.passing import VIEWS

_MOST_CHANNELS = 256
"""Of a head: the C kernel's limit. PyTorch's own attention would be slower than its products there."""
_TYPES = (torch.float32, torch.float64)


class _Scores(NamedTuple):
    """softmax(scale q k + mask): q is (N heads, queries, depth), k (N heads, depth, keys), the mask constant."""

    q: Node
    k: Node
    mask: Node | None
    scale: float
    sizes: tuple[int, ...]  # N, heads, queries, keys


def attentions(graph: fx.Graph) -> int:
    """softmax(s q k^T + mask) v, whose heads are put beside each other again, as `scaled_dot_product_attention`.

    As LeViT, EfficientFormer and Swin have it: four dimensions, a number s, and a mask (of relative positions, say)
    that is constant, or none. A row of that mask that is -infinity throughout would make NaN where attention makes 0.
    Left alone: scores or weights that somebody else reads, and heads of more channels than the C kernel takes.
    """
    bench = Bench(graph)
    count = sum(_attention(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _attention(node: Node, bench: Bench) -> bool:
    if node.target is not aten.bmm.default or tensor(node).dtype not in _TYPES:
        return False
    weights, v = node.args
    assert isinstance(weights, Node)
    assert isinstance(v, Node)
    softmax = _single_view_of(weights)
    scores = None if softmax is None else _scores(softmax, bench)
    behind = only_reader(node)
    if scores is None or behind is None or behind.target not in VIEWS:
        return False
    N, heads, queries, keys = scores.sizes
    depth, value_depth = shape(scores.q)[2], shape(v)[2]
    if max(depth, value_depth) > _MOST_CHANNELS or shape(behind) != (N, heads, queries, value_depth):
        return False
    exchanged = only_reader(behind)
    copy = None if exchanged is None else _copy_of_heads(exchanged)
    if exchanged is None or copy is None:
        return False
    q = _in_heads(scores.q, (N, heads, queries, depth), bench, node)
    k = _in_heads(scores.k, (N, heads, depth, keys), bench, node)
    k_strides = tensor(k).stride()
    k_form = _form(tensor(k), (N, heads, keys, depth), (*k_strides[:2], k_strides[3], k_strides[2]))
    k = bench.call_as(node, k_form, aten.transpose.int, k, 2, 3)
    v = _in_heads(v, (N, heads, keys, value_depth), bench, node)
    mask = scores.mask
    if mask is not None and len(shape(mask)) < 2:
        mask = bench.constant(aten.reshape.default, mask, [1, *(shape(mask) or (1,))])
    # The result lies as it is read: (N, queries, heads, channels), dense.
    strides = (queries * heads * value_depth, value_depth, heads * value_depth, 1)
    form = _form(tensor(node), (N, heads, queries, value_depth), strides)
    result = bench.call_as(
        node, form, aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, False, scale=scores.scale
    )
    exchanged.replace_input_with(behind, result)
    exchanged.meta["val"] = torch.empty((N, queries, heads, value_depth), dtype=form.dtype, device="meta")
    if copy.target is aten.clone.default and all(reader.target in VIEWS for reader in copy.users):
        for reader in copy.users:
            reader.target = aten.reshape.default  # whoever computes attention may lay it out otherwise
        bench.replace(copy, exchanged)
    bench.erase(behind)
    return True


def _single_view_of(node: Node) -> Node | None:
    """What this is a view of, if nobody else reads either."""
    source = node.args[0] if node.target in VIEWS else None
    if not isinstance(source, Node) or only_reader(node) is None or only_reader(source) is not node:
        return None
    return source


def _scores(softmax: Node, bench: Bench) -> _Scores | None:
    if softmax.target is not aten._softmax.default or len(shape(softmax)) != 4 or softmax.args[1] not in (-1, 3):
        return None
    sizes, mask, scale = shape(softmax), None, 1.0
    below: Any = softmax.args[0]
    if only_reader(below) is not softmax or tensor(below).dtype != tensor(softmax).dtype:
        return None
    if below.target is aten.add.Tensor and not below.kwargs:
        a, b = below.args
        below, mask = (b, a) if bench.is_constant(a) else (a, b)
        if not bench.is_constant(mask) or bench.is_constant(below) or tensor(mask).dtype != tensor(softmax).dtype:
            return None
        if not isinstance(below, Node) or only_reader(below) is None or shape(below) != sizes:
            return None
    if below.target in (aten.mul.Tensor, aten.div.Tensor) and is_number(below.args[1]):
        by = float(below.args[1])
        if by == 0:
            return None
        scale = by if below.target is aten.mul.Tensor else 1 / by
        below = below.args[0]
        if only_reader(below) is None or shape(below) != sizes:
            return None
    product = _single_view_of(below)
    if product is None or product.target is not aten.bmm.default:
        return None
    q, k = product.args
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    return _Scores(q, k, mask, scale, sizes)


def _copy_of_heads(exchanged: Node) -> Node | None:
    """The call that lays out (N, heads, queries, channels) as (N, queries, heads, channels); None if `exchanged` is
    not what exchanges the dimensions, or is read in another way."""
    is_transposed = exchanged.target is aten.transpose.int and exchanged.args[1:] in ((1, 2), (2, 1))
    if not is_transposed and not (exchanged.target is aten.permute.default and exchanged.args[1] == [0, 2, 1, 3]):
        return None
    copy = only_reader(exchanged)
    if copy is None or copy.target not in (aten.clone.default, aten.reshape.default):
        return None
    return copy if copy.kwargs.get("memory_format") in (None, torch.contiguous_format) else None


def _in_heads(node: Node, sizes: tuple[int, ...], bench: Bench, before: Node) -> Node:
    """(N heads, ..) as (N, heads, ..), which it often is a view of."""
    source = node.args[0] if node.target in VIEWS else None
    if isinstance(source, Node) and shape(source) == sizes:
        return source
    strides = tensor(node).stride()
    form = _form(tensor(node), sizes, (strides[0] * sizes[1], *strides))
    return bench.call_as(before, form, aten.view.default, node, list(sizes))


def _form(like: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=like.dtype, device="meta")
