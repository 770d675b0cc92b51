"""Activations that were written out, as the operators that they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from convselect.freeze.algebra.affine import Factor, affine
from convselect.freeze.algebra.bench import Bench, Node, argument, arguments, aten, is_number, only_reader, tensor

_CLAMPS = (aten.clamp.default, aten.clamp_min.default, aten.hardtanh.default, aten.clamp_min.Tensor)
_ROOT_HALF, _ROOT_2_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


def activations(graph: fx.Graph) -> int:
    """Formulas as one operator each.

        max(x, 0)                                           relu
        min(max(x, a), b)                                   hardtanh
        min(max(x + 3, 0), 6) / 6                           hardsigmoid
        x * hardsigmoid(x)                                  hardswish
        x * sigmoid(x)                                      silu
        x / 2 * (1 + erf(x / sqrt(2)))                      gelu
        x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))   gelu, approximate="tanh"

    Numbers may stand anywhere in a product, and must agree to 1e-7 (float64: 1e-12). Left alone: integers, and formulas
    of which somebody else reads a part.
    """
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        if not node._erased and node.op == "call_function":
            count += _clamped(node, bench) or _product(node, bench)
    bench.finish()
    return count


def gates(graph: fx.Graph) -> int:
    """glu(x) = a * sigmoid(b), a and b the halves of x: pointwise, as what stands around it."""
    bench = Bench(graph)
    count = 0
    for node in bench.nodes():
        if node.target is not aten.glu.default or not tensor(node).is_floating_point():
            continue
        x, dim = arguments(node)[0], argument(node, 1, "dim", -1) % tensor(node).dim()
        half = tensor(node).shape[dim]
        a, b = (bench.call(node, aten.slice.Tensor, x, dim, start, start + half) for start in (0, half))
        made = bench.call(node, aten.mul.Tensor, a, bench.call(node, aten.sigmoid.default, b))
        made.meta = dict(node.meta)
        bench.replace(node, made)
        count += 1
    bench.finish()
    return count


def _clamped(node: Node, bench: Bench) -> bool:
    """Clamping between numbers as relu or hardtanh."""
    bounds = _bounds(node)
    x = node.args[0] if node.args else None
    if bounds is None or not isinstance(x, Node) or not tensor(node).is_floating_point():
        return False
    if tensor(x).dtype != tensor(node).dtype:
        return False
    low, high = bounds
    if bounds == (0, math.inf):
        args: tuple[Any, ...] = (aten.relu.default, x)
    elif node.target is not aten.hardtanh.default and math.isfinite(low) and math.isfinite(high):
        args = (aten.hardtanh.default, x, low, high)
    else:
        return False
    _become(node, bench, *args)
    return True


def _bounds(node: Node) -> tuple[float, float] | None:
    if node.target is aten.hardtanh.default:
        low, high = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
    elif node.target is aten.clamp.default:
        low, high = argument(node, 1, "min"), argument(node, 2, "max")
    elif node.target is aten.clamp_min.default:
        low, high = argument(node, 1, "min"), None
    else:
        return None
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return (float(low), float(high)) if is_number(low) and is_number(high) and low <= high else None


@dataclass
class _Core:
    """The part of a formula that is no product: the formula is `number` * `core`, times x if `with_x`."""

    core: Node
    x: Node
    with_x: bool
    number: float
    target: Any
    kwargs: dict[str, str]


def _cores(node: Node, bench: Bench) -> Iterator[_Core]:
    """What this node may be the core of."""
    if node.target is aten.sigmoid.default:
        yield _Core(node, arguments(node)[0], True, 1.0, aten.silu.default, {})
    elif node.target is aten.hardsigmoid.default:
        yield _Core(node, arguments(node)[0], True, 1.0, aten.hardswish.default, {})
    elif _bounds(node) == (0, 6):
        found = _shifted(node.args[0], bench)
        if found is not None and found[1] == 3:
            yield _Core(node, found[0], True, 1 / 6, aten.hardswish.default, {})
            yield _Core(node, found[0], False, 1 / 6, aten.hardsigmoid.default, {})
    else:
        found = _shifted(node, bench)
        inner = found[0] if found is not None and found[1] == 1 and only_reader(found[0]) is node else None
        if inner is not None and inner.target is aten.erf.default:
            x, number = _scaled(inner.args[0], bench)
            if x is not None and _same(number, _ROOT_HALF, node):
                yield _Core(node, x, True, 0.5, aten.gelu.default, {})
        elif inner is not None and inner.target is aten.tanh.default:
            cubic = _cubic(inner.args[0], bench)
            if cubic is not None:
                yield _Core(node, cubic, True, 0.5, aten.gelu.default, {"approximate": "tanh"})


def _product(node: Node, bench: Bench) -> bool:
    """Whether a formula of which this node is the core was found and replaced."""
    for core in _cores(node, bench):
        whole = _whole(core, bench)
        if whole is not None:
            _become(whole, bench, core.target, core.x, **core.kwargs)
            return True
    return False


def _whole(core: _Core, bench: Bench) -> Node | None:
    """The product of a core with all that belongs to its formula, up through its only readers."""
    dtype = tensor(core.core).dtype
    value, number, with_x = core.core, 1.0, False
    if tensor(core.x).dtype != dtype or not dtype.is_floating_point:
        return None
    while True:
        if with_x == core.with_x and _same(number, core.number, value) and value is not core.core:
            return value
        reader = only_reader(value)
        if reader is None or tensor(core.x).shape != tensor(value).shape:
            return None
        step = affine(reader, bench)
        if step is not None:
            if step.factor.constant is not None or step.shift is not None:
                return None
            number *= step.factor.number
        elif reader.target is aten.mul.Tensor and not with_x and core.with_x:
            other: Any = next((arg for arg in reader.args[:2] if arg is not value), None)
            x, factor = (other, 1.0) if other is core.x else _scaled(other, bench)
            if x is not core.x:
                return None
            number, with_x = number * factor, True
        else:
            return None
        if tensor(reader).dtype != dtype:
            return None
        value = reader


def _same(a: float, b: float, node: Node) -> bool:
    return math.isclose(a, b, rel_tol=1e-12 if tensor(node).dtype == torch.float64 else 1e-7)


def _scaled(value: Any, bench: Bench) -> tuple[Node | None, float]:
    """(x, number) of x * number, number 1 if the value is no such product; (None, 1) if it is no tensor."""
    if not isinstance(value, Node):
        return None, 1.0
    step = affine(value, bench)
    if step is None or step.shift is not None or step.factor.constant is not None:
        return value, 1.0
    return step.x, step.factor.number


def _shifted(value: Any, bench: Bench) -> tuple[Node, float] | None:
    """(x, number) of x + number."""
    step = affine(value, bench) if isinstance(value, Node) and value.op == "call_function" else None
    if step is None or step.shift is None or isinstance(step.shift, Node) or step.factor != Factor():
        return None
    return step.x, step.shift * step.shift_number


def _cubic(value: Any, bench: Bench) -> Node | None:
    """x of sqrt(2 / pi) * (x + 0.044715 * x^3), or of sqrt(2 / pi) * x * (1 + 0.044715 * x^2)."""
    inner, number = _scaled(value, bench)
    if inner is None or inner.target not in (aten.add.Tensor, aten.mul.Tensor) or inner.kwargs:
        return None
    for first, rest in (inner.args[:2], inner.args[1::-1]):
        if inner.target is aten.add.Tensor:
            x, factor, powers, exponent = first, 1.0, rest, 3
        else:
            (x, factor), found = _scaled(first, bench), _shifted(rest, bench)
            powers, exponent = None if found is None or found[1] != 1 else found[0], 2
        if isinstance(x, Node) and _same(number * factor, _ROOT_2_PI, inner):
            power = _monomial(powers, x, bench)
            if power is not None and power[1] == exponent and _same(power[0], 0.044715, inner):
                return x
    return None


def _monomial(value: Any, x: Node, bench: Bench) -> tuple[float, int] | None:
    """(c, n) of c * x^n."""
    if value is x:
        return 1.0, 1
    if not isinstance(value, Node):
        return None
    if value.target is aten.pow.Tensor_Scalar:
        n = value.args[1]
        return (1.0, n) if value.args[0] is x and isinstance(n, int) else None
    inner, number = _scaled(value, bench)
    if inner is not value:
        found = _monomial(inner, x, bench)
        return None if found is None else (found[0] * number, found[1])
    if value.target is not aten.mul.Tensor:
        return None
    a, b = (_monomial(part, x, bench) for part in value.args[:2])
    return None if a is None or b is None else (a[0] * b[0], a[1] + b[1])


def _become(node: Node, bench: Bench, target: Any, *args: Any, **kwargs: Any) -> None:
    made = bench.call(node, target, *args, **kwargs)
    made.meta = dict(node.meta)
    bench.replace(node, made)
