"""Pointwise operations of ATen as instructions of the C library's evaluator.

An instruction is an operation's name and its operands: nodes of the graph, or numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

Instruction = tuple[str, tuple[Any, ...]]

MOST_INPUTS = 8
MOST_INSTRUCTIONS = 24
_aten = torch.ops.aten

_PLAIN: dict[Any, str] = {
    _aten.neg.default: "neg", _aten.abs.default: "abs", _aten.maximum.default: "max", _aten.minimum.default: "min",
    _aten.relu.default: "relu", _aten.relu6.default: "relu6", _aten.silu.default: "silu",
    _aten.sigmoid.default: "sigmoid", _aten.hardswish.default: "hardswish", _aten.hardsigmoid.default: "hardsigmoid",
    _aten.tanh.default: "tanh", _aten.exp.default: "exp", _aten.log.default: "log", _aten.sqrt.default: "sqrt",
    _aten.rsqrt.default: "rsqrt", _aten.square.default: "square", _aten.reciprocal.default: "reciprocal",
    _aten.mish.default: "mish",
}  # fmt: skip
_SUMS: dict[Any, str] = {
    _aten.add.Tensor: "add", _aten.sub.Tensor: "sub", _aten.add.Scalar: "add", _aten.sub.Scalar: "sub",
}  # fmt: skip
_PRODUCTS: dict[Any, str] = {
    _aten.mul.Tensor: "mul", _aten.div.Tensor: "div", _aten.mul.Scalar: "mul", _aten.div.Scalar: "div",
}  # fmt: skip


def _clamp(x: Any, low: Any = None, high: Any = None) -> Instruction | None:
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    return "clamp", (x, -math.inf if low is None else low, math.inf if high is None else high)


def _softplus(x: Any, beta: float = 1, threshold: float = 20) -> Instruction | None:
    return ("softplus", (x,)) if beta == 1 and threshold == 20 else None


def _elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Instruction | None:
    return ("elu", (x, alpha)) if scale == 1 and input_scale == 1 else None


def _power(x: Any, exponent: float) -> Instruction | None:
    return ("square", (x,)) if exponent == 2 else None


_WITH_NUMBERS: dict[Any, Callable[..., Instruction | None]] = {
    _aten.clamp.default: _clamp,
    _aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    _aten.clamp_min.default: lambda x, low: _clamp(x, low),
    _aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    _aten.leaky_relu.default: lambda x, slope=0.01: ("leaky_relu", (x, slope)),
    _aten.elu.default: _elu,
    _aten.softplus.default: _softplus,
    _aten.pow.Tensor_Scalar: _power,
    _aten.rsub.Scalar: lambda x, other, alpha=1: ("sub", (other, x)) if alpha == 1 else None,
    _aten.gelu.default: lambda x, approximate="none": ("gelu_tanh" if approximate == "tanh" else "gelu", (x,)),
}


def instruction_of(node: fx.Node) -> Instruction | None:
    """None if this node is no pointwise operation that the evaluator knows."""
    target, args = node.target, node.args
    if target in _PLAIN:
        return _PLAIN[target], args
    if target in _SUMS:
        alpha = node.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        return (_SUMS[target], args[:2]) if alpha == 1 and _are_operands(args[:2]) else None
    if target in _PRODUCTS:
        return (_PRODUCTS[target], args) if not node.kwargs and _are_operands(args) else None
    with_numbers = _WITH_NUMBERS.get(target)
    return None if with_numbers is None else with_numbers(*args, **node.kwargs)


def _are_operands(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and all(isinstance(a, fx.Node | int | float) and not isinstance(a, bool) for a in args)
