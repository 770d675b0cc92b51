"""Steps that one function of the C library computes, or ATen where it does not take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from convselect.freeze import attention, norms, pointwise, pooling, reduce
from convselect.freeze.bound import Bound
from convselect.freeze.candidates import Form, OtherForm, distance
from convselect.freeze.chains import Step
from convselect.freeze.instructions import instruction_of
from convselect.freeze.kernel import FixedCall
from convselect.kernels import _library

Maker = Callable[[Sequence[Tensor], Tensor], Bound | None]

_TOLERANCE = 4e-6
_aten = torch.ops.aten


def on_any_memory(inner: list[fx.Node], args: tuple[Any, ...]) -> Callable[..., Tensor]:
    """A pointwise program by ATen's operations, as a function of the values that it reads."""

    def run(*values: Any) -> Tensor:
        found = dict(zip(args, values, strict=True))
        for node in inner:
            arguments, options = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*arguments, **options)  # type: ignore[operator]
        return found[inner[-1]]  # type: ignore[no-any-return]

    return run


def maker_of(step: Step, values: Sequence[Any], result: Any) -> Maker | None:
    """How the C library computes this step; None if it does not, or gives something else for these values.

    Args:
        values: of the nodes that the step reads.
    """
    if not _library.available() or not isinstance(result, Tensor) or result.dtype != torch.float32:
        return None
    if not Form.like(result).is_dense or result.numel() == 0:
        return None
    if not all(isinstance(v, Tensor) and v.dtype == torch.float32 for v in values):
        return None
    maker = _maker(step)
    if maker is None:
        return None
    out = Form.like(result).new()
    try:
        bound = maker(values, out)
    except ValueError:  # a number that the evaluator does not take
        return None
    if bound is None:
        return None
    status = bound.function(*bound.arguments)
    if status not in (None, _library.OK) or not distance(out, result) <= _TOLERANCE:
        return None
    return maker


def _maker(step: Step) -> Maker | None:
    if step.kind == "pointwise":
        return _pointwise(step)
    make = _CALLS.get(step.target)
    return None if make is None else make(*step.args, **step.kwargs)


def _pointwise(step: Step) -> Maker | None:
    operands: dict[Any, Any] = {node: pointwise.Input(i) for i, node in enumerate(step.args)}
    instructions: list[pointwise.Instruction] = []
    for node in step.target:
        instruction = instruction_of(node)
        assert instruction is not None
        name, values = instruction
        instructions.append((name, tuple(operands[v] if isinstance(v, fx.Node) else float(v) for v in values)))
        operands[node] = pointwise.Result(len(instructions) - 1)
    return lambda inputs, out: pointwise.bind(instructions, inputs, out)


def _mean(x: Any, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Maker | None:
    return None if dtype is not None or not dim else lambda inputs, out: reduce.mean(inputs[0], out, dim)


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Maker | None:
    return None if dtype is not None or not dim else lambda inputs, out: reduce.total(inputs[0], out, dim)


def _norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Maker | None:
    if order != 2 or dtype is not None or not dim:
        return None
    return lambda inputs, out: reduce.norm(inputs[0], out, dim)


def _variance(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Maker | None:
    less = 1 if correction is None else correction
    return None if not dim else lambda inputs, out: reduce.variance(inputs[0], out, dim, less)


def _largest(x: Any, dim: Any = (), keepdim: bool = False) -> Maker | None:
    return None if not dim else lambda inputs, out: reduce.largest(inputs[0], out, dim)


def _affine(inputs: Sequence[Tensor], *parts: Any) -> list[Tensor | None]:
    """The inputs behind the first one, None in place of the parts that are None."""
    given = iter(inputs[1:])
    return [None if part is None else next(given) for part in parts]


def _layer_norm(x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Maker | None:
    if len(shape) != 1:
        return None

    def make(inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
        own_weight, own_bias = _affine(inputs, weight, bias)
        return reduce.layer_norm(inputs[0], own_weight, own_bias, eps, out)

    return make


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Maker | None:
    def make(inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
        own_weight, own_bias = _affine(inputs, weight, bias)
        return reduce.group_norm(inputs[0], groups, own_weight, own_bias, eps, out)

    return make


def _group_norm_then(activation: str, slope: float, *given: Any) -> Maker | None:
    groups, weight, bias, eps = (*given[1:], None, None, 1e-5)[:4] if len(given) < 5 else given[1:5]

    def make(inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
        own_weight, own_bias = _affine(inputs, weight, bias)
        return reduce.group_norm(inputs[0], groups, own_weight, own_bias, eps, out, activation, slope)

    return make


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None,
    enable_gqa: bool = False,
) -> Maker | None:  # fmt: skip
    if is_causal or enable_gqa or dropout_p:
        return None

    def make(inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
        own_q, own_k, own_v, *own_mask = inputs
        return attention.attention(own_q, own_k, own_v, own_mask[0] if own_mask else None, out, scale)

    return make


def _max_pool(x: Any, *options: Any) -> Maker | None:
    kernel, stride, *rest = (*options, None)[: max(2, len(options))]
    return lambda inputs, out: pooling.max_pool(inputs[0], out, kernel, stride or None, *rest)


def _avg_pool(x: Any, *options: Any) -> Maker | None:
    kernel, stride, *rest = (*options, None)[: max(2, len(options))]
    return lambda inputs, out: pooling.avg_pool(inputs[0], out, kernel, stride or None, *rest)


def _concatenate(parts: Any, dim: int = 0) -> Maker | None:
    return lambda inputs, out: reduce.concatenate(inputs, out, dim)


def _softmax(x: Any, dim: int, half_to_float: bool) -> Maker | None:
    def make(inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
        return reduce.softmax(inputs[0], out) if dim in (-1, out.dim() - 1) else None

    return make


def _copy(x: Any, **_: Any) -> Maker | None:
    return lambda inputs, out: pointwise.bind([("copy", (pointwise.Input(0),))], inputs, out)


_CALLS: dict[Any, Callable[..., Maker | None]] = {
    _aten.mean.dim: _mean,
    _aten.sum.dim_IntList: _sum,
    _aten.linalg_vector_norm.default: _norm,
    _aten.var.correction: _variance,
    _aten.amax.default: _largest,
    _aten.layer_norm.default: _layer_norm,
    _aten.group_norm.default: _group_norm,
    _aten.scaled_dot_product_attention.default: _attention,
    norms.GROUP_NORM_THEN: _group_norm_then,
    _aten.max_pool2d.default: _max_pool,
    _aten.avg_pool2d.default: _avg_pool,
    _aten.max_pool3d.default: _max_pool,
    _aten.avg_pool3d.default: _avg_pool,
    _aten.cat.default: _concatenate,
    _aten._softmax.default: _softmax,
    _aten.clone.default: _copy,
}


def fixed_call(
    maker: Maker, inputs: list[Tensor | None], forms: list[Form], out: Tensor, plain: Callable[..., Any]
) -> Callable[..., Tensor]:
    """The step on memory of its own.

    Args:
        inputs: where each value that it reads lies; None if that differs from call to call: it is copied then.
        forms: what these values looked like when the step was planned.
        plain: computes the same of values of any form.
    """
    given = [
        (form if form.is_dense else _contiguous(form)).new() if t is None else t
        for t, form in zip(inputs, forms, strict=True)
    ]
    bound = maker(given, out)

    def otherwise(_: int) -> Tensor:
        return out.copy_(plain(*given))

    if bound is None:  # these values lie otherwise than when it was planned
        call: Any = lambda: otherwise(0)  # noqa: E731
    else:
        call = FixedCall(bound, out, otherwise)
        if all(t is not None for t in inputs):
            return call  # type: ignore[no-any-return]
    moving = [(i, given[i]) for i, t in enumerate(inputs) if t is None]

    def run(*values: Any, **options: Any) -> Tensor:
        flat = _flat((*values, *options.values()))
        for i, memory in moving:
            if flat[i].shape != memory.shape or flat[i].dtype != memory.dtype:
                raise OtherForm
            memory.copy_(flat[i])
        call()
        return out

    return run


def _contiguous(form: Form) -> Form:
    return Form.like(torch.empty(form.shape, dtype=form.dtype, device="meta"))


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if isinstance(value, Tensor)]
