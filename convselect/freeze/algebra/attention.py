"""Attention that is written out, as one call: products, a softmax, and what is between them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from convselect.freeze.algebra.bench import Bench, Node, aten, is_number, only_reader, shape, tensor
from convselect.freeze.algebra.passing import VIEWS
from convselect.freeze.algebra.spelling import ALIASES

_MOST_CHANNELS = 256
"""Of a head: the C kernel's limit. PyTorch's own attention would be slower than its products there."""
_LARGEST_MASK = 2**21
"""Elements of a sum of masks, which is kept as a constant."""
_TYPES = (torch.float32, torch.float64)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)


class _Scores(NamedTuple):
    """softmax(scale q k + masks): q is (N heads, queries, depth), k (N heads, depth, keys), all else constant.

    Attributes:
        masks: with the sizes of the scores that they are added to: dimensions in front may be divided otherwise.
        factors: per head.
        sizes: (.., heads, queries, keys).
    """

    q: Node
    k: Node
    masks: list[tuple[Node, tuple[int, ...]]]
    factors: list[Node]
    scale: float
    sizes: tuple[int, ...]


def attentions(graph: fx.Graph) -> int:
    """softmax(s q k^T + mask) v as `scaled_dot_product_attention` of four dimensions.

    As LeViT, EfficientFormer and Swin write it, and as PyTorch itself computes its function where its kernel declines:
    five dimensions, a mask of three, values of another depth than keys. s is a number, or one per head (Swin V2); masks
    are constant, or there is none; all products may be the other way round, v^T weights^T (EfficientViT). Numbers that
    q or k are multiplied with go into s, and copies of them are not made. A row of a mask that is -infinity throughout
    would make NaN where attention makes 0. Left alone: scores or weights that somebody else reads, and heads of more
    channels than the C kernel takes.
    """
    bench = Bench(graph)
    count = sum(_attention(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _attention(node: Node, bench: Bench) -> bool:
    if node.target is not aten.bmm.default or tensor(node).dtype not in _TYPES:
        return False
    left, right = node.args
    assert isinstance(left, Node)
    assert isinstance(right, Node)
    softmax, v, turned = _softmax_behind(left, False), right, False
    if softmax is None:
        softmax, v, turned = _softmax_behind(right, True), left, True
    scores = None if softmax is None else _scores(softmax, bench)
    if scores is None:
        return False
    *lead, heads, queries, keys = scores.sizes
    N, depth, value_depth = math.prod(lead), shape(scores.q)[2], shape(v)[1 if turned else 2]
    if max(depth, value_depth) > _MOST_CHANNELS:
        return False
    if any(math.prod(shape(mask)[:-3]) > 1 for mask, _ in scores.masks) and math.prod(scores.sizes) > _LARGEST_MASK:
        return False
    q, q_scale = _operand(scores.q, (N, heads, queries, depth), False, bench, node)
    k, k_scale = _operand(scores.k, (N, heads, keys, depth), True, bench, node)
    v, v_scale = _operand(v, (N, heads, keys, value_depth), turned, bench, node, scaled=False)
    assert v_scale == 1
    for factor in scores.factors:
        q = bench.call(node, aten.mul.Tensor, q, bench.constant(aten.reshape.default, factor, [1, -1, 1, 1]))
    scale = scores.scale * q_scale * k_scale
    mask = _mask(scores, N, bench)
    # PyTorch's result lies as it is mostly read: (N, queries, heads, channels), dense.
    strides = (queries * heads * value_depth, value_depth, heads * value_depth, 1)
    form = _form(tensor(node), (N, heads, queries, value_depth), strides)
    result = bench.call_as(
        node, form, aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, False, scale=scale
    )
    if turned:
        result = _seen(result, aten.transpose.int, (2, 3), bench, node)
    elif _put_beside(node, result, (*lead, heads, queries, value_depth), bench):
        return True
    if _is_returned(node):
        exact = torch.empty(shape(result), dtype=form.dtype, device="meta")
        result = bench.call_as(node, exact, aten.clone.default, result, memory_format=torch.contiguous_format)
    bench.replace(node, bench.call_as(node, tensor(node), aten.reshape.default, result, list(shape(node))))
    return True


def _is_returned(node: Node) -> bool:
    """Whether this value, or a view of it, is a result of the graph, whose strides are promised."""
    return any(user.op == "output" or (user.target in ALIASES and _is_returned(user)) for user in node.users)


def _softmax_behind(node: Node, turned: bool) -> Node | None:
    """The softmax that these matrices are views or copies of, if nobody else reads anything in between; `turned`: with
    rows and columns exchanged."""
    exchanged = False
    while node.target not in _SOFTMAXES:
        source = node.args[0] if node.args else None
        if only_reader(node) is None or not isinstance(source, Node) or only_reader(source) is not node:
            return None
        if _exchanges_last(node):
            exchanged = not exchanged
        elif node.target not in (*VIEWS, aten.clone.default) or shape(node)[-2:] != shape(source)[-2:]:
            return None
        node = source
    return node if exchanged == turned and only_reader(node) is not None else None


def _exchanges_last(node: Node) -> bool:
    if node.target is not aten.transpose.int:
        return False
    dims = len(shape(node))
    return {d % dims for d in node.args[1:]} == {dims - 2, dims - 1}  # type: ignore[operator]


def _scores(softmax: Node, bench: Bench) -> _Scores | None:
    sizes = shape(softmax)
    if len(sizes) < 3 or softmax.args[1] not in (-1, len(sizes) - 1):
        return None
    masks: list[tuple[Node, tuple[int, ...]]] = []
    factors: list[Node] = []
    scale, below, reader = 1.0, softmax.args[0], softmax
    while True:
        if not isinstance(below, Node) or only_reader(below) is not reader:
            return None
        if tensor(below).dtype != tensor(softmax).dtype or shape(below)[-2:] != sizes[-2:]:
            return None
        if below.target is aten.bmm.default:
            break
        a, b = (*below.args, None)[:2]
        if below.target is aten.add.Tensor and not below.kwargs:
            if scale != 1 or factors or shape(below)[-3] != sizes[-3]:
                return None
            a, b = (b, a) if bench.is_constant(a) else (a, b)
            if not isinstance(b, Node) or not _is_added(b, a, below, bench):
                return None
            masks.append((b, shape(below)))
        elif below.target in (*_PRODUCTS, *_QUOTIENTS) and is_number(b) and not below.kwargs:
            if b == 0:
                return None
            scale *= float(b) if below.target in _PRODUCTS else 1 / float(b)  # type: ignore[arg-type]
        elif below.target is aten.mul.Tensor and (bench.is_constant(a) or bench.is_constant(b)):
            a, b = (b, a) if bench.is_constant(a) else (a, b)
            if not isinstance(b, Node) or not _is_added(b, a, below, bench) or not _is_per_head(b, sizes[-3]):
                return None
            factors.append(b)
        elif below.target not in VIEWS:
            return None
        reader, below = below, a
    if below is not softmax.args[0] and math.prod(shape(below)) != math.prod(sizes):
        return None
    q, k = below.args
    assert isinstance(q, Node)
    assert isinstance(k, Node)
    return _Scores(q, k, masks, factors, scale, sizes)


def _is_added(constant: Node, other: Any, result: Node, bench: Bench) -> bool:
    """Whether a constant, and something that is none and has the result's sizes already, are combined."""
    if not bench.is_constant(constant) or not isinstance(other, Node) or bench.is_constant(other):
        return False
    return tensor(constant).dtype == tensor(result).dtype and shape(other) == shape(result)


def _is_per_head(factor: Node, heads: int) -> bool:
    sizes = (1, 1, 1, *shape(factor))
    return sizes[-2:] == (1, 1) and sizes[-3] in (1, heads) and math.prod(sizes) == sizes[-3]


def _mask(scores: _Scores, N: int, bench: Bench) -> Node | None:
    """The sum of the masks, of four dimensions: PyTorch's kernel takes no others."""
    found: Node | None = None
    for mask, sizes in scores.masks:
        *lead, heads, queries, keys = (*(1 for _ in range(4 - len(shape(mask)))), *shape(mask))
        if math.prod(lead) > 1:
            mask = bench.constant(aten.expand.default, mask, [*sizes[:-3], heads, queries, keys])
        mask = bench.constant(aten.reshape.default, mask, [N if math.prod(lead) > 1 else 1, heads, queries, keys])
        found = mask if found is None else bench.constant(aten.add.Tensor, found, mask)
    return found


def _operand(
    node: Node, sizes: tuple[int, int, int, int], turned: bool, bench: Bench, before: Node, scaled: bool = True
) -> tuple[Node, float]:
    """A batch of matrices as (N, heads, rows, columns), and the number that it still has to be multiplied with: what it
    was before it was copied, and multiplied with that if it is `scaled`.

    Args:
        turned: what is given is (.., columns, rows).
    """
    scale, wanted = 1.0, sizes[:2]
    while True:
        source, by = (*node.args, None, None)[:2]
        if not isinstance(source, Node) or "val" not in node.meta or "val" not in source.meta:
            break
        if node.target in VIEWS:
            # Heads as they were, and what is in front of them.
            *front, heads = (*shape(source)[:-2], 1)[: max(len(shape(source)) - 2, 1)]
            if shape(source)[-2:] != shape(node)[-2:] or (math.prod(front), heads) != wanted:
                break
        elif _exchanges_last(node):
            turned = not turned
        elif scaled and node.target in _PRODUCTS and is_number(by) and tensor(source).dtype == tensor(node).dtype:
            scale *= float(by)  # type: ignore[arg-type]
        elif node.target is not aten.clone.default:
            break
        node = source
    if turned:
        dims = len(shape(node))
        node = _seen(node, aten.transpose.int, (dims - 2, dims - 1), bench, before)
    return node if shape(node) == sizes else _reshaped(node, sizes, bench, before), scale


def _reshaped(node: Node, sizes: tuple[int, ...], bench: Bench, before: Node) -> Node:
    empty = torch.empty_strided(shape(node), tensor(node).stride(), dtype=tensor(node).dtype, device="meta")
    return bench.call_as(before, empty.reshape(sizes), aten.reshape.default, node, list(sizes))


def _seen(node: Node, target: Any, given: tuple[Any, ...], bench: Bench, before: Node) -> Node:
    """A view of a value, by a method of tensors and ATen's operator of the same name."""
    empty = torch.empty_strided(shape(node), tensor(node).stride(), dtype=tensor(node).dtype, device="meta")
    return bench.call_as(before, empty.transpose(*given), target, node, *given)


def _put_beside(node: Node, result: Node, sizes: tuple[int, ...], bench: Bench) -> bool:
    """Whether the heads of each query are put beside each other; they are there already then, and no copy is needed."""
    behind = only_reader(node)
    if behind is None or behind.target not in VIEWS or shape(behind) != sizes:
        return False
    exchanged = only_reader(behind)
    copy = None if exchanged is None else _copy_of_heads(exchanged)
    if exchanged is None or copy is None:
        return False
    if len(sizes) != 4:
        result = _reshaped(result, sizes, bench, node)
    exchanged.replace_input_with(behind, result)
    *lead, heads, queries, channels = sizes
    exchanged.meta["val"] = torch.empty((*lead, queries, heads, channels), dtype=tensor(node).dtype, device="meta")
    if copy.target is aten.clone.default and all(reader.target in VIEWS for reader in copy.users):
        for reader in copy.users:
            reader.target = aten.reshape.default  # whoever computes attention may lay it out otherwise
        bench.replace(copy, exchanged)
    bench.erase(behind)
    return True


def _copy_of_heads(exchanged: Node) -> Node | None:
    """The call that lays out (.., heads, queries, channels) as (.., queries, heads, channels); None if `exchanged` is
    not what exchanges the dimensions, or is read in another way."""
    dims = len(shape(exchanged))
    order = [*range(dims - 3), dims - 2, dims - 3, dims - 1]
    if exchanged.target is aten.transpose.int:
        if {d % dims for d in exchanged.args[1:]} != {dims - 3, dims - 2}:  # type: ignore[operator]
            return None
    elif exchanged.target is not aten.permute.default or exchanged.args[1] != order:
        return None
    copy = only_reader(exchanged)
    if copy is None or copy.target not in (aten.clone.default, aten.reshape.default):
        return None
    return copy if copy.kwargs.get("memory_format") in (None, torch.contiguous_format) else None


def _form(like: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=like.dtype, device="meta")
