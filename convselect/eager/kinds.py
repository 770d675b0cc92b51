"""One-dimensional and transposed convolutions, as eager calls.

A 1-D problem is the 2-D problem of height 1, on views. A transposed convolution is the grad-input map of the
convolution that maps its result's shape to that of its input; its gradients are that convolution's other two maps. So
all of them have ordinary problems, and with these the same algorithms, choices, trials and store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect.aten.arguments import one_row, problem_of, transposed_gradients_of, transposed_problem
from convselect.aten.autograd import ConvTransposeFunction, transposed_gradients
from convselect.aten.strides import ResultStrides, transposed_strides
from convselect.base.problem import ConvProblem, Direction
from convselect.base.settings import Settings
from convselect.eager import cached
from convselect.eager.dispatch import dispatcher
from convselect.eager.execute import execute
from convselect.eager.plan import Plan, as_unbatched, is_legacy_batched, plan_for
from convselect.kernels._native_ops import native_backward, native_forward, native_transposed


class TransposedPlan(Plan):
    """The plan of a transposed convolution. `strides` are those of its own results; `forward` and `backward` are maps
    of the convolution that its problem describes, as the autograd functions want them."""

    __slots__ = ()
    aten = torch.conv_transpose2d
    function = ConvTransposeFunction
    gradients = staticmethod(transposed_gradients)
    transposes = True
    strides_of = staticmethod(transposed_strides)
    expected = staticmethod(transposed_gradients_of)

    def transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """y with aten's strides; no autograd."""
        if is_legacy_batched(x, weight):
            y = native_transposed(x, weight, self.problem)
            return y if bias is None else y + bias.view(-1, *(1,) * (y.dim() - 2))
        return Plan.forward(self, x, weight, bias)

    run = transposed

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The gradient of a transposed convolution's input; x is that of its result."""
        assert bias is None
        if is_legacy_batched(x, weight):
            return native_forward(x, weight, self.problem)
        problem, found = self._backward_choice(Direction.FORWARD, x)
        return execute(found, x, weight, problem, self.strides.grad_x)

    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(grad_x, grad_weight, None) of the convolution the other way round, None if not needed."""
        if is_legacy_batched(grad_y, x, weight):
            whole_x = grad_y.new_empty(self.problem.x_shape) if x is None else x
            whole_weight = grad_y.new_empty(self.problem.weight_shape) if weight is None else weight
            return native_backward(grad_y, whole_x, whole_weight, self.problem, needed)
        grad_x: Tensor | None = None
        grad_weight: Tensor | None = None
        if needed[0] and weight is not None:
            problem, found = self._backward_choice(Direction.BACKWARD_DATA, grad_y)
            grad_x = execute(found, grad_y, weight, problem, self.strides.y)
        if needed[1] and x is not None:
            problem, found = self._backward_choice(Direction.BACKWARD_WEIGHT, x)
            grad_weight = execute(found, x, grad_y, problem, self.strides.grad_weight)
            if not self._judged:
                self._judge_step()
        return grad_x, grad_weight, None

    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> Plan:
        N, C, H, W = x_shape
        problem = self.problem._replace(N=N, C=C, H=H, W=W, K=weight_shape[0], groups=groups, layout="contiguous")
        x = torch.empty((1,), dtype=like.dtype, device=like.device).expand(problem.y_shape)
        weight = torch.empty((1,), dtype=like.dtype, device=like.device).expand(weight_shape)
        return type(self)(problem, self.settings, transposed_strides(x, weight, problem))


def make_transposed(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings) -> Any:
    """As `make_plan`, for `torch.conv_transpose2d`."""
    if x.dim() == 3 and weight.dim() == 4:
        return as_unbatched(make_transposed(x.unsqueeze(0), weight, bias, geometry, settings))
    return plan_for(TransposedPlan, transposed_problem, x, weight, bias, geometry, settings)


TransposedPlan.make = staticmethod(make_transposed)


# ---- one dimension --------------------------------------------------------------------------------------------------


class _OneRow:
    """Operands and results of one dimension, for a plan of two."""

    __slots__ = ()
    one_row = True

    def __init__(self, problem: ConvProblem, settings: Settings, strides: ResultStrides) -> None:
        super().__init__(problem, settings, strides)  # type: ignore[call-arg]
        for name in ("x_shape", "weight_shape"):
            setattr(self, name, _without_height(getattr(problem, name)))

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _lowered(super().forward(_raised(x), weight.unsqueeze(2), bias))  # type: ignore[misc, no-any-return]

    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_x, grad_weight, grad_bias = super().backward(  # type: ignore[misc]
            grad_y.unsqueeze(2),
            None if x is None else _raised(x),
            None if weight is None else weight.unsqueeze(2),
            needed,
        )
        return (
            None if grad_x is None else _lowered(grad_x),
            None if grad_weight is None else _lowered(grad_weight),
            grad_bias,
        )

    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> Any:
        return super().refold(_with_height(x_shape), _with_height(weight_shape), groups, like)  # type: ignore[misc]


class Plan1d(_OneRow, Plan):
    __slots__ = ()
    aten = torch.conv1d
    run = _OneRow.forward


class TransposedPlan1d(_OneRow, TransposedPlan):
    __slots__ = ()
    aten = torch.conv_transpose1d

    def transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _lowered(TransposedPlan.transposed(self, _raised(x), weight.unsqueeze(2), bias))

    run = transposed


def make_1d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings) -> Any:
    """As `make_plan`, for `torch.conv1d`."""
    return _make(Plan1d, problem_of, x, weight, bias, geometry, settings)


def make_transposed_1d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings) -> Any:
    """As `make_plan`, for `torch.conv_transpose1d`."""
    return _make(TransposedPlan1d, transposed_problem, x, weight, bias, geometry, settings)


def _make(
    kind: type[Plan], of: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings
) -> Any:
    raised = one_row(x, weight, geometry)
    if raised is None:
        return None
    plan = plan_for(kind, of, *raised[:2], bias, raised[2], settings)
    return as_unbatched(plan) if x.dim() == 2 else plan


def _raised(x: Tensor) -> Tensor:
    """(N, C, L) as an image of one row, in memory as aten takes it: it copies what is arranged otherwise."""
    return x.contiguous().unsqueeze(2)


def _lowered(result: Tensor) -> Tensor:
    """The same without the row, and no view: autograd forbids changing one in place that a function returns."""
    result = result.squeeze(2)
    return result.detach() if result._is_view() else result


def _without_height(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], *shape[3:])


def _with_height(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:])


Plan1d.make = staticmethod(make_1d)
TransposedPlan1d.make = staticmethod(make_transposed_1d)

conv1d = cached.in_front_of(dispatcher(torch.conv1d, make_1d), 1)
conv_transpose1d = cached.in_front_of(dispatcher(torch.conv_transpose1d, make_transposed_1d), 1, transposed=True)
conv_transpose2d = cached.in_front_of(dispatcher(torch.conv_transpose2d, make_transposed), 2, transposed=True)

__all__ = ["conv1d", "conv_transpose1d", "conv_transpose2d"]
