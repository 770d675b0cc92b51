"""Autograd for a chosen convolution.

Convolution is three bilinear maps of the same geometry,

    y = forward(x, w)        grad_x = backward_data(g, w)        grad_w = backward_weight(x, g),

and they are closed under differentiation: every derivative of one is given by the other two, on operands of the very
same shapes. So double backward (and any higher order) has no new problems, and uses the choices already made. jvp
follows from bilinearity; vmap folds the batch into N if only activations have it, and into the groups if the weight has
it.

`ConvOps` is the interface that the functions need: one geometry with an algorithm for each direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers

from convselect.aten.strides import in_functorch


class ConvOps(Protocol):
    """A convolution geometry with a chosen algorithm for each direction; see `eager.plan.Plan`."""

    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]: ...
    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> ConvOps: ...

    @property
    def x_shape(self) -> tuple[int, ...]: ...
    @property
    def weight_shape(self) -> tuple[int, ...]: ...


class TransposedOps(ConvOps, Protocol):
    """The same for a transposed convolution: `forward` and `backward` are those of the convolution that it is the
    grad-input map of."""

    def transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


class _Function(torch.autograd.Function):
    """An autograd function without default arguments, called often."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        # PyTorch's own `apply` inspects the signature of `forward` on every call, for defaults; that is 45 us of 60.
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


class Conv2dFunction(_Function):
    """y = forward(x, weight) + bias."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvOps) -> Tensor:  # type: ignore[override]
        return plan.forward(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, ctx.plan = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (*gradients(ctx.plan, grad_y, x, weight, ctx.needs_input_grad[:3]), None)

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        tangent = _sum_of(
            x_t is not None and (lambda: Conv2dFunction.apply(x_t, weight, None, ctx.plan)),
            weight_t is not None and (lambda: Conv2dFunction.apply(x, weight_t, None, ctx.plan)),
        )
        return _plus_bias(tangent, bias_t, lambda: Conv2dFunction.apply(x, weight, None, ctx.plan))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvOps) -> Any:
        x_dim, weight_dim, bias_dim, _ = in_dims
        B = info.batch_size
        if x_dim is None and weight_dim is None:  # only the bias is batched
            y = Conv2dFunction.apply(x, weight, None, plan).unsqueeze(0)
        else:
            y = _fold(B, plan, (x, x_dim), (weight, weight_dim), Conv2dFunction, lambda a, b, p: (a, b, None, p))
        return _plus_batched_bias(y, bias, bias_dim), 0


def gradients(
    plan: ConvOps, grad_y: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_x, grad_weight, grad_bias), None if not needed; differentiable if gradients are recorded."""
    need_x, need_weight, need_bias = needed
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    if torch.is_grad_enabled() or in_functorch():
        if need_x:
            grad_x = BackwardDataFunction.apply(grad_y, weight, plan)
        if need_weight:
            grad_weight = BackwardWeightFunction.apply(x, grad_y, plan)
    else:
        grad_x, grad_weight, grad_bias = plan.backward(grad_y, x, weight, needed)
    if need_bias and grad_bias is None:
        grad_bias = _sum_per_channel(grad_y)
    return grad_x, grad_weight, grad_bias


class BackwardDataFunction(_Function):
    """grad_x = backward_data(grad_y, weight), itself differentiable."""

    @staticmethod
    def forward(grad_y: Tensor, weight: Tensor, plan: ConvOps) -> Tensor:  # type: ignore[override]
        grad_x, _, _ = plan.backward(grad_y, None, weight, (True, False, False))
        assert grad_x is not None
        return grad_x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad_y, weight, ctx.plan = inputs
        ctx.save_for_backward(grad_y, weight)
        ctx.save_for_forward(grad_y, weight)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_y, weight = ctx.saved_tensors
        return (
            Conv2dFunction.apply(gg, weight, None, ctx.plan) if ctx.needs_input_grad[0] else None,
            BackwardWeightFunction.apply(gg, grad_y, ctx.plan) if ctx.needs_input_grad[1] else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, grad_y_t: Tensor | None, weight_t: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        grad_y, weight = ctx.saved_tensors
        return _sum_of(
            grad_y_t is not None and (lambda: BackwardDataFunction.apply(grad_y_t, weight, ctx.plan)),
            weight_t is not None and (lambda: BackwardDataFunction.apply(grad_y, weight_t, ctx.plan)),
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, grad_y: Tensor, weight: Tensor, plan: ConvOps) -> Any:
        operands = (grad_y, in_dims[0]), (weight, in_dims[1])
        return _fold(info.batch_size, plan, *operands, BackwardDataFunction, lambda a, b, p: (a, b, p)), 0


class BackwardWeightFunction(_Function):
    """grad_weight = backward_weight(x, grad_y), itself differentiable."""

    @staticmethod
    def forward(x: Tensor, grad_y: Tensor, plan: ConvOps) -> Tensor:  # type: ignore[override]
        _, grad_weight, _ = plan.backward(grad_y, x, None, (False, True, False))
        assert grad_weight is not None
        return grad_weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, grad_y, ctx.plan = inputs
        ctx.save_for_backward(x, grad_y)
        ctx.save_for_forward(x, grad_y)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, grad_y = ctx.saved_tensors
        return (
            BackwardDataFunction.apply(grad_y, gg, ctx.plan) if ctx.needs_input_grad[0] else None,
            Conv2dFunction.apply(x, gg, None, ctx.plan) if ctx.needs_input_grad[1] else None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor | None, grad_y_t: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        x, grad_y = ctx.saved_tensors
        return _sum_of(
            x_t is not None and (lambda: BackwardWeightFunction.apply(x_t, grad_y, ctx.plan)),
            grad_y_t is not None and (lambda: BackwardWeightFunction.apply(x, grad_y_t, ctx.plan)),
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, grad_y: Tensor, plan: ConvOps) -> Any:
        B, groups = info.batch_size, plan.groups
        x, grad_y = (_batch_into_channels(t, d, B) for t, d in ((x, in_dims[0]), (grad_y, in_dims[1])))
        N, C, *size = plan.x_shape
        K = plan.weight_shape[0]
        folded = plan.refold((N, B * C, *size), (B * K, *plan.weight_shape[1:]), B * groups, x)
        return BackwardWeightFunction.apply(x, grad_y, folded).unflatten(0, (B, K)), 0


def transposed_gradients(
    plan: TransposedOps, grad_y: Tensor, x: Tensor, weight: Tensor, needed: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `gradients`, of a transposed convolution."""
    need_x, need_weight, need_bias = needed
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    if torch.is_grad_enabled() or in_functorch():
        if need_x:
            grad_x = Conv2dFunction.apply(grad_y, weight, None, plan)
        if need_weight:
            grad_weight = BackwardWeightFunction.apply(grad_y, x, plan)
    else:
        if need_x:
            grad_x = plan.forward(grad_y, weight, None)
        if need_weight:
            _, grad_weight, _ = plan.backward(x, grad_y, None, (False, True, False))
    return grad_x, grad_weight, _sum_per_channel(grad_y) if need_bias else None


class ConvTransposeFunction(_Function):
    """y = backward_data(x, weight) + bias: a transposed convolution is the grad-input map of the convolution that its
    plan describes, whose y is this x. So its gradients are that convolution's other two maps."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: TransposedOps) -> Tensor:  # type: ignore[override]
        return plan.transposed(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _, ctx.plan = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (*transposed_gradients(ctx.plan, grad_y, x, weight, ctx.needs_input_grad[:3]), None)

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        tangent = _sum_of(
            x_t is not None and (lambda: BackwardDataFunction.apply(x_t, weight, ctx.plan)),
            weight_t is not None and (lambda: BackwardDataFunction.apply(x, weight_t, ctx.plan)),
        )
        return _plus_bias(tangent, bias_t, lambda: BackwardDataFunction.apply(x, weight, ctx.plan))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvOps) -> Any:
        x_dim, weight_dim, bias_dim, _ = in_dims
        if x_dim is None and weight_dim is None:
            y = BackwardDataFunction.apply(x, weight, plan).unsqueeze(0)
        else:
            operands = (x, x_dim), (weight, weight_dim)
            y = _fold(info.batch_size, plan, *operands, BackwardDataFunction, lambda a, b, p: (a, b, p))
        return _plus_batched_bias(y, bias, bias_dim), 0


def _sum_per_channel(grad_y: Tensor) -> Tensor:
    """The gradient of a bias."""
    return grad_y.sum((0, *range(2, grad_y.dim())))


def _plus_bias(tangent: Tensor | None, bias_t: Tensor | None, y: Callable[[], Tensor]) -> Tensor | None:
    """A tangent of y and that of its bias; `y` gives the shape if the first is zero."""
    if bias_t is None:
        return tangent
    if tangent is None:
        tangent = torch.zeros_like(y())
    return tangent + bias_t.view(1, -1, *(1,) * (tangent.dim() - 2))


def _plus_batched_bias(y: Tensor, bias: Tensor | None, dim: int | None) -> Tensor:
    """y (B or 1, N, K, ...) + bias, which has a batch at `dim` if that is not None."""
    if bias is None:
        return y
    size = (1,) * (y.dim() - 3)
    if dim is None:
        return y + bias.view(-1, *size)
    bias = bias.movedim(dim, 0)
    return y + bias.view(bias.shape[0], 1, -1, *size)


def _sum_of(*terms: Callable[[], Tensor] | bool) -> Tensor | None:
    """The sum of the terms that are not False; None if there is none."""
    total: Tensor | None = None
    for term in terms:
        if callable(term):
            value = term()
            total = value if total is None else total + value
    return total


def _batch_into_channels(t: Tensor, dim: int | None, B: int) -> Tensor:
    """(N, C, ...) with a batch at `dim`, or shared by the batch -> (N, B*C, ...), the batch outermost."""
    t = t.movedim(dim, 1) if dim is not None else t.unsqueeze(1).expand(-1, B, *t.shape[1:])
    return t.flatten(1, 2)


def _fold(
    B: int,
    plan: ConvOps,
    activation: tuple[Tensor, int | None],
    weight: tuple[Tensor, int | None],
    function: Any,
    arguments: Callable[[Tensor, Tensor, ConvOps], tuple[Any, ...]],
) -> Tensor:
    """Run `function` on batched operands as one convolution; the result has the batch in front."""
    a, a_dim = activation
    w, w_dim = weight
    N, C, *size = plan.x_shape
    if w_dim is None:
        assert a_dim is not None
        folded = plan.refold((B * N, C, *size), plan.weight_shape, plan.groups, a)
        return function.apply(*arguments(a.movedim(a_dim, 0).flatten(0, 1), w, folded)).unflatten(0, (B, N))  # type: ignore[no-any-return]
    w = w.movedim(w_dim, 0).flatten(0, 1)
    a = _batch_into_channels(a, a_dim, B)
    folded = plan.refold((N, B * C, *size), tuple(w.shape), B * plan.groups, a)
    result = function.apply(*arguments(a, w, folded))
    return result.unflatten(1, (B, result.shape[1] // B)).movedim(1, 0)  # type: ignore[no-any-return]
