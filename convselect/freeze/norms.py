"""Normalisations by the statistics of the values at hand: instance norms as group norms, with activations behind them.

PyTorch computes an instance norm (Ulyanov et al. 2016, arXiv 1607.08022) as the batch norm of one image with N * C
channels. It is the group norm with a group per channel, which the C library has, together with an activation that
follows: both go through memory once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from convselect.freeze.algebra.bench import argument, shape, tensor
from convselect.freeze.algebra.passing import VIEWS
from convselect.freeze.candidates import finish

Node = fx.Node
_aten = torch.ops.aten


class _GroupNormThen:
    """activation(group_norm(x, ...))."""

    __name__ = "group_norm_then"  # fx names nodes by it

    def __call__(self, activation: str, slope: float, x: Tensor, groups: int, *affine: Any) -> Tensor:
        weight, bias, eps = (*affine, None, None, 1e-5)[:3] if len(affine) < 3 else affine[:3]
        return finish(F.group_norm(x, groups, weight, bias, eps), None, activation, slope)

    def __repr__(self) -> str:
        return self.__name__  # the same in each process: digests of programs have it


GROUP_NORM_THEN = _GroupNormThen()


def instance_norms(graph: fx.Graph) -> None:
    """Batch norms of one image by its own statistics as group norms, in place; N * C channels of several images again
    as N images. Left alone: what somebody reads the statistics of, and affine parameters of another element type."""
    for node in list(graph.nodes):
        if node.target is _aten.native_batch_norm.default and node.args[3] is node.args[4] is None:
            x, weight, bias, _, _, training, _, eps = node.args
        elif node.target is _aten._native_batch_norm_legit.no_stats:
            x, weight, bias, training, _, eps = node.args
        else:
            continue
        affine = [t for t in (weight, bias) if t is not None]
        alone = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
        if not training or not alone or shape(x)[0] != 1 or len(shape(x)) < 3:
            continue
        if any(tensor(t).dtype != tensor(x).dtype for t in affine):
            continue
        for result in list(node.users):
            _as_group_norm(graph, result, x, weight, bias, eps)
        unread: Any = node
        while not unread.users and unread.op == "call_function":  # with the views and copies that were made for it
            before, _ = unread.args[0], graph.erase_node(unread)
            unread = before


def _as_group_norm(graph: fx.Graph, result: Node, x: Node, weight: Node | None, bias: Node | None, eps: float) -> None:
    end, source, groups = result, x, shape(x)[1]
    found = _several(result, x, weight, bias)
    if found is not None:
        end, source, groups, weight, bias = found
    if source.target is _aten.clone.default:  # made dense in NCHW for the batch norm; group norms take NHWC, too
        source = source.args[0]  # type: ignore[assignment]
    with graph.inserting_before(end):
        made = graph.call_function(_aten.group_norm.default, (source, groups, weight, bias, eps))
    made.meta = dict(end.meta)
    end.replace_all_uses_with(made)
    for node in dict.fromkeys((end, result)):
        graph.erase_node(node)


def _several(
    result: Node, x: Node, weight: Node | None, bias: Node | None
) -> tuple[Node, Node, int, Node | None, Node | None] | None:
    """Of an instance norm of several images: the view of its result as such, x as such, C, weight and bias."""
    after = next(iter(result.users)) if len(result.users) == 1 else None
    if after is None or after.target not in VIEWS or x.target not in VIEWS:
        return None
    source: Any = x.args[0]
    if shape(source) != shape(after) or len(shape(source)) != len(shape(x)) or shape(source)[2:] != shape(x)[2:]:
        return None
    N, C = shape(source)[:2]
    affine: list[Node | None] = []
    for t in (weight, bias):
        if t is not None and N > 1:
            if t.target is not _aten.repeat.default or shape(t.args[0]) != (C,):  # type: ignore[arg-type]
                return None
            t = t.args[0]  # type: ignore[assignment]
        affine.append(t)
    return after, source, C, affine[0], affine[1]


def with_activations(graph: fx.Graph, activation_of: Callable[[Node], str | None]) -> None:
    """Group norms of images and volumes whose only reader is an activation, as one call, in place."""
    for node in list(graph.nodes):
        if node.target is not _aten.group_norm.default or len(node.users) != 1 or node.kwargs:
            continue
        reader = next(iter(node.users))
        activation = activation_of(reader) if reader.op == "call_function" else None
        if activation is None or tensor(node).dtype != torch.float32 or len(shape(node)) < 3:
            continue
        slope = float(argument(reader, 1, "negative_slope", 0.01)) if activation == "leaky_relu" else 0.0
        with graph.inserting_before(reader):
            made = graph.call_function(GROUP_NORM_THEN, (activation, slope, *node.args))
        made.meta = dict(reader.meta)
        reader.replace_all_uses_with(made)
        graph.erase_node(reader)
        graph.erase_node(node)
