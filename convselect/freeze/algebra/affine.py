"""Calls of the form x * scale + shift with constants, and constants that vary over channels alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from convselect.freeze.algebra.bench import Bench, Node, Operand, argument, arguments, aten, is_number, shape, tensor

_ADD = (aten.add.Tensor, aten.add.Scalar)
_SUB = (aten.sub.Tensor, aten.sub.Scalar)
_RSUB = (aten.rsub.Tensor, aten.rsub.Scalar)
_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)
SUMS = (*_ADD, *_SUB, *_RSUB)


@dataclass(frozen=True)
class Factor:
    """A number times a constant, or divided by one."""

    number: float = 1.0
    constant: Node | None = None
    inverse: bool = False


@dataclass(frozen=True)
class Affine:
    """x * factor + shift * shift_number, of the shape and element type of x."""

    x: Node
    factor: Factor
    shift: Operand | None = None
    shift_number: float = 1.0


def sum_of(node: Node) -> tuple[Any, float, Any, float] | None:
    """(a, number, b, number) if a node is a * number + b * number; None if it is no sum or difference."""
    if node.target not in SUMS:
        return None
    a, b = node.args[:2]
    alpha = argument(node, 2, "alpha", 1)
    if not is_number(alpha):
        return None
    if node.target in _ADD:
        return a, 1.0, b, float(alpha)
    if node.target in _SUB:
        return a, 1.0, b, -float(alpha)
    return a, -float(alpha), b, 1.0


def affine(node: Node, bench: Bench) -> Affine | None:
    """What a call does to its one operand that is not constant, if it scales or shifts it by constants.

    Integers are refused, and whatever changes shape or element type.
    """
    found = _affine(node, bench)
    if found is None or not isinstance(found.x, Node) or bench.is_constant(found.x):
        return None
    x, y = tensor(found.x), tensor(node)
    return found if x.shape == y.shape and x.dtype == y.dtype and y.is_floating_point() else None


def _affine(node: Node, bench: Bench) -> Affine | None:
    def fixed(value: Any) -> bool:
        return is_number(value) or bench.is_constant(value)

    if node.target is aten.neg.default:
        return Affine(arguments(node)[0], Factor(-1.0))
    summed = sum_of(node)
    if summed is not None:
        a, m, b, n = summed
        if fixed(b):
            return Affine(a, Factor(m), b, n)
        return Affine(b, Factor(n), a, m) if fixed(a) else None
    if node.target in _MUL:
        a, b = arguments(node)[:2]
        if fixed(a):
            a, b = b, a
        return Affine(a, _factor(b)) if fixed(b) else None
    if node.target in _DIV:
        a, b = arguments(node)[:2]
        return Affine(a, _factor(b, inverse=True)) if fixed(b) and b != 0 else None
    return None


def _factor(value: Any, inverse: bool = False) -> Factor:
    if isinstance(value, Node):
        return Factor(1.0, value, inverse)
    return Factor(1 / value if inverse else float(value))


def varies_over(value: Operand | None, dim: int, of: tuple[int, ...]) -> bool:
    """Whether a constant, broadcast to this shape, is the same along all dimensions but one."""
    if not isinstance(value, Node):
        return True
    dims = shape(value)
    if len(dims) > len(of):
        return False
    dims = (1,) * (len(of) - len(dims)) + dims
    return all(size == 1 or (i == dim and size == of[dim]) for i, size in enumerate(dims))


def vector(bench: Bench, value: Operand) -> Operand:
    """A constant that `varies_over` one dimension as a vector, or a number (a tensor without dimensions) as it is."""
    if not isinstance(value, Node):
        return value
    size = tensor(value).numel()
    wanted = [size] if size != 1 else []
    return value if list(shape(value)) == wanted else bench.constant(aten.reshape.default, value, wanted)


def factor_vector(bench: Bench, factor: Factor) -> Operand:
    """A factor's value as `vector`."""
    if factor.constant is None:
        return factor.number
    found = vector(bench, factor.constant)
    if factor.inverse:
        found = bench.constant(aten.reciprocal.default, found)
    return times(bench, found, factor.number)


def times(bench: Bench, a: Operand, b: Operand) -> Operand:
    if not isinstance(a, Node):
        if not isinstance(b, Node):
            return a * b
        a, b = b, a
    return a if not isinstance(b, Node) and b == 1 else bench.constant(aten.mul.Tensor, a, b)


def plus(bench: Bench, a: Operand, b: Operand) -> Operand:
    if not isinstance(a, Node):
        if not isinstance(b, Node):
            return a + b
        a, b = b, a
    return a if not isinstance(b, Node) and b == 0 else bench.constant(aten.add.Tensor, a, b)
