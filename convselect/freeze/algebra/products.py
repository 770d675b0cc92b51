"""Two layers in a row without anything between them, as one layer."""

from __future__ import annotations

import math

import torch
from torch import fx

from convselect.freeze.algebra.bench import Bench, Node, aten, only_reader, shape, tensor
from convselect.freeze.algebra.layers import Layer, layer


def layers_in_a_row(graph: fx.Graph) -> int:
    """B (A x + a) + b = (B A) x + (B a + b), if one of the two has filters of one tap and B A is cheaper.

    A filter of any size may follow one of 1x1 if it does not pad, or if the first has no bias: a padding is of zeros,
    and A 0 + a is a. One of 1x1 may follow any, and strides multiply. Left alone: groups, transposed convolutions, two
    filters of which none is 1x1, a value in between that somebody else reads, and a product with more multiplications
    than the two layers.
    """
    bench = Bench(graph)
    count = sum(_merged(node, bench) for node in bench.nodes() if not node._erased)
    bench.finish()
    return count


def _merged(node: Node, bench: Bench) -> bool:
    second = layer(node, bench)
    first = None if second is None else layer(second.x, bench)
    if first is None or second is None or only_reader(first.node) is not node or first.is_conv != second.is_conv:
        return False
    if any(each.groups != 1 or each.is_transposed for each in (first, second)):
        return False
    n_results = math.prod(shape(node)) // second.n_out
    if first.is_pointwise and (first.bias is None or not any(second.padding)):
        if n_results * _size(second) // second.n_in * first.n_in >= first.macs() + second.macs():
            return False
        weight, stride, padding, dilation = (
            _after_one_tap(first, second),
            second.stride,
            second.padding,
            second.dilation,
        )
    elif all(size == 1 for size in second.kernel) and not any(second.padding):
        if n_results * _size(first) // first.n_out * second.n_out >= first.macs() + second.macs():
            return False
        weight, padding, dilation = _before_one_tap(first, second), first.padding, first.dilation
        stride = tuple(a * b for a, b in zip(first.stride, second.stride, strict=True))
    else:
        return False
    bias = None if first.bias is None else _through(second, first.bias)
    if second.bias is not None:
        bias = second.bias if bias is None else bench.constant(aten.add.Tensor, bias, second.bias)
    if second.is_conv:
        node.args = (first.x, weight, bias, list(stride), list(padding), list(dilation), *node.args[6:])
    else:
        node.args = (first.x, weight, bias)
        node.kwargs = {}
    bench.erase(first.node)
    return True


def _size(of: Layer) -> int:
    return math.prod(shape(of.weight))


def _after_one_tap(first: Layer, second: Layer) -> Node:
    """sum_m B[k, m, r, s] A[m, c], as a product of matrices with rows (k, r, s)."""
    constant, (k, m, *taps) = first.bench.constant, shape(second.weight)
    last = len(taps) + 1
    b = constant(aten.permute.default, second.weight, [0, *range(2, last + 1), 1])
    b = constant(aten.reshape.default, b, [-1, m])
    a = constant(aten.reshape.default, first.weight, [m, first.n_in])
    product = constant(aten.reshape.default, constant(aten.mm.default, b, a), [k, *taps, first.n_in])
    product = constant(aten.permute.default, product, [0, last, *range(1, last)])
    # Strides as of a parameter: a convolution takes its result's layout from its weight's.
    return constant(aten.clone.default, product, memory_format=torch.contiguous_format)


def _before_one_tap(first: Layer, second: Layer) -> Node:
    """sum_m B[k, m] A[m, c, r, s]."""
    constant, (m, *rest) = first.bench.constant, shape(first.weight)
    b = constant(aten.reshape.default, second.weight, [-1, m])
    a = constant(aten.reshape.default, first.weight, [m, -1])
    return constant(aten.reshape.default, constant(aten.mm.default, b, a), [second.n_out, *rest])


def _through(second: Layer, a: Node) -> Node:
    """B a: what the second layer makes of the first one's bias."""
    constant, b = second.bench.constant, second.weight
    dims = list(range(2, tensor(b).dim()))
    if dims:
        b = constant(aten.sum.dim_IntList, b, dims)
    return constant(aten.mv.default, b, a)
