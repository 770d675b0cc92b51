"""Convolutions and linear layers with constant weights, and what scales and shifts become in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from convselect.freeze.algebra.affine import plus, times
from convselect.freeze.algebra.bench import Bench, Node, Operand, argument, arguments, aten, shape, tensor

CONV, LINEAR = aten.convolution.default, aten.linear.default


@dataclass
class Layer:
    """A convolution or linear layer: `edit` writes what was changed back to its node.

    Attributes:
        channels: the dimension of the channels in its operand and result.
    """

    bench: Bench
    node: Node
    x: Node
    weight: Node
    bias: Node | None
    is_conv: bool

    @property
    def channels(self) -> int:
        return 1 if self.is_conv else len(shape(self.node)) - 1

    @property
    def stride(self) -> tuple[int, ...]:
        return self._ints(3)

    @property
    def padding(self) -> tuple[int, ...]:
        return self._ints(4)

    @property
    def dilation(self) -> tuple[int, ...]:
        return self._ints(5)

    @property
    def is_transposed(self) -> bool:
        return self.is_conv and bool(self.node.args[6])

    @property
    def groups(self) -> int:
        return int(arguments(self.node)[8]) if self.is_conv else 1

    @property
    def kernel(self) -> tuple[int, ...]:
        return shape(self.weight)[2:]

    @property
    def n_in(self) -> int:
        return shape(self.x)[self.channels if self.is_conv else -1]

    @property
    def n_out(self) -> int:
        return shape(self.node)[self.channels]

    @property
    def is_pointwise(self) -> bool:
        """Whether each result depends on the operand's values at its own position alone."""
        if not self.is_conv:
            return True
        ones = (1,) * len(self.kernel)
        return not self.is_transposed and self.kernel == self.stride == ones and not any(self.padding)

    def _ints(self, position: int) -> tuple[int, ...]:
        """A list of the convolution, one integer stretched to all spatial dimensions; empty for linear layers."""
        if not self.is_conv:
            return ()
        values: Any = self.node.args[position]
        return tuple(values) * (len(self.kernel) if len(values) == 1 else 1)

    def edit(self) -> None:
        self.node.args = (self.x, self.weight, self.bias, *self.node.args[3:])

    def scale_out(self, s: Operand) -> None:
        """(W x + b) * s = (W * s) x + b * s, s a number or one value per channel of the result."""
        self.weight = _node(times(self.bench, self.weight, self._over_outputs(s)))
        if self.bias is not None:
            self.bias = _node(times(self.bench, self.bias, s))

    def shift_out(self, t: Operand) -> None:
        """(W x + b) + t = W x + (b + t)."""
        if self.bias is None:
            size, dtype = self.n_out, tensor(self.weight).dtype
            self.bias = self.bench.constant(aten.zeros.default, [size], dtype=dtype, device=torch.device("cpu"))
        self.bias = _node(plus(self.bench, self.bias, t))

    def scale_in(self, s: Operand) -> None:
        """W (x * s) + b = (W * s) x + b, s a number or one value per channel of the operand."""
        self.weight = _node(times(self.bench, self.weight, self._over_inputs(s)))

    def can_shift_in(self) -> bool:
        """Whether all of a filter's taps see operands: not the zeros of a padding."""
        return not self.is_transposed and not any(self.padding)

    def shift_in(self, t: Operand) -> None:
        """W (x + t) + b = W x + (W t + b), W t summed over taps and channels."""
        product = times(self.bench, self.weight, self._over_inputs(t))
        self.shift_out(self.bench.constant(aten.sum.dim_IntList, product, list(range(1, len(shape(self.weight))))))

    def _over_outputs(self, s: Operand) -> Operand:
        """One value per channel of the result, in the place that the channel has in the weight."""
        if not isinstance(s, Node) or not shape(s):
            return s
        bench, (k, c, *taps) = self.bench, shape(self.weight)
        ones = [1] * len(taps)
        if not self.is_transposed:
            return bench.constant(aten.reshape.default, s, [k, 1, *ones])
        if self.groups == 1:
            return bench.constant(aten.reshape.default, s, [1, c, *ones])
        s = bench.constant(aten.reshape.default, s, [self.groups, 1, c])
        s = bench.constant(aten.expand.default, s, [self.groups, k // self.groups, c])
        return bench.constant(aten.reshape.default, s, [k, c, *ones])

    def _over_inputs(self, s: Operand) -> Operand:
        """One value per channel of the operand, in the place that the channel has in the weight."""
        if not isinstance(s, Node) or not shape(s):
            return s
        bench, (k, c, *taps) = self.bench, shape(self.weight)
        if self.is_transposed:
            return bench.constant(aten.reshape.default, s, [k, 1, *(1 for _ in taps)])
        if self.groups > 1:
            s = bench.constant(aten.reshape.default, s, [self.groups, 1, c])
            s = bench.constant(aten.expand.default, s, [self.groups, k // self.groups, c])
            return bench.constant(aten.reshape.default, s, [k, c, *(1 for _ in taps)])
        return bench.constant(aten.reshape.default, s, [1, c, *(1 for _ in taps)])

    def macs(self) -> int:
        """Multiplications of the whole layer."""
        weight = shape(self.weight)
        return math.prod(shape(self.node)) // self.n_out * math.prod(weight)


def layer(node: Node, bench: Bench) -> Layer | None:
    """The layer that a node is; None if its weight or bias is no constant, or its operand is one."""
    if node.target is CONV:
        x, weight, bias = arguments(node)[:3]
    elif node.target is LINEAR:
        (x, weight), bias = arguments(node)[:2], argument(node, 2, "bias")
    else:
        return None
    if bench.is_constant(x) or not bench.is_constant(weight) or not (bias is None or bench.is_constant(bias)):
        return None
    if not tensor(node).is_floating_point():
        return None
    return Layer(bench, node, x, weight, bias, node.target is CONV)


def _node(value: Operand) -> Node:
    assert isinstance(value, Node)
    return value
