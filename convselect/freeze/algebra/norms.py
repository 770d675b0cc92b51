"""Batch normalisation as a scale and a shift."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from convselect.freeze.algebra.bench import Bench, Node, argument, aten, same_strides, shape, tensor

# Operator -> (position of `training` or None, position of eps). All take x, weight, bias, mean and variance first.
_NORMS: dict[Any, tuple[int | None, int]] = {
    aten.native_batch_norm.default: (5, 7),
    aten.batch_norm.default: (5, 7),
    aten._native_batch_norm_legit.default: (5, 7),
    aten._native_batch_norm_legit_no_training.default: (None, 6),
    aten.cudnn_batch_norm.default: (5, 7),
    aten.miopen_batch_norm.default: (5, 7),
}
if hasattr(aten, "_batch_norm_no_update"):
    _NORMS[aten._batch_norm_no_update.default] = (None, 6)


def batch_norms(graph: fx.Graph) -> int:
    """Batch normalisation by running statistics is x * s + t, s = weight / sqrt(var + eps) and t = bias - mean * s.

    Of values with any number of dimensions. Left alone: batch statistics, statistics or affine parameters that are not
    constant, integers, operands in another order than the result (a permuted sequence, for example; views may rely on
    strides), and normalisations whose saved statistics somebody reads.
    """
    bench = Bench(graph)
    count = sum(_rewritten(node, bench) for node in bench.nodes() if node.target in _NORMS)
    bench.finish()
    return count


def _rewritten(node: Node, bench: Bench) -> bool:
    training_at, eps_at = _NORMS[node.target]
    x, weight, bias, mean, var = node.args[:5]
    eps: Any = argument(node, eps_at, "epsilon" if "cudnn" in str(node.target) else "eps")
    if not isinstance(x, Node) or (training_at is not None and node.args[training_at] is not False) or eps is None:
        return False
    if not all(bench.is_constant(c) for c in (mean, var)) or not all(
        c is None or bench.is_constant(c) for c in (weight, bias)
    ):
        return False
    result = node if node.target is aten.batch_norm.default else _first_result(node)
    if result is None or not tensor(x).is_floating_point() or tensor(x).dim() < 2:
        return False
    # What pointwise operations make of an operand with gaps, a cut one for example, is dense and in the same order.
    if not same_strides(result, _dense_strides(x)):
        return False
    s = bench.constant(aten.rsqrt.default, bench.constant(aten.add.Tensor, var, eps))
    if weight is not None:
        s = bench.constant(aten.mul.Tensor, weight, s)
    t = bench.constant(aten.mul.Tensor, mean, s)
    t = bench.constant(aten.neg.default, t) if bias is None else bench.constant(aten.sub.Tensor, bias, t)
    scaled = bench.call(node, aten.mul.Tensor, x, _placed(bench, s, x))
    shifted = bench.call(node, aten.add.Tensor, scaled, _placed(bench, t, x))
    scaled.meta["val"] = shifted.meta["val"] = tensor(result)
    bench.replace(result, shifted)
    return True


def _first_result(node: Node) -> Node | None:
    """The one used result, the normalised values; None if others are used."""
    first = None
    for reader in list(node.users):
        if reader.target is not operator.getitem:
            return None
        if reader.args[1] == 0:
            if first is not None:
                return None
            first = reader
        elif reader.users:
            return None
    for reader in list(node.users):
        if reader is not first:
            node.graph.erase_node(reader)
    return first


def _dense_strides(x: Node) -> tuple[int, ...]:
    """Strides in the order of this value's, without gaps."""
    t, step = tensor(x), 1
    strides = [0] * t.dim()
    for d in sorted(range(t.dim()), key=lambda d: (t.stride(d), -d)):
        strides[d], step = step, step * t.shape[d]
    return tuple(strides)


def _placed(bench: Bench, s: Node, x: Node) -> Node:
    """One value per channel in the shape and element type in which it scales x."""
    dtype = tensor(x).dtype
    s = bench.constant(aten.reshape.default, s, [1, -1, *(1,) * (len(shape(x)) - 2)])
    return s if tensor(s).dtype == dtype else bench.constant(aten._to_copy.default, s, dtype=dtype)
