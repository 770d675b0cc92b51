"""Convolutions of volumes and their transposes, as eager calls: on CPUs.

A call whose kernel reaches along one axis only, or that has one slice, is a convolution of images on views, and has its
problem: with it the same algorithms, model, trials and stored choices as any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.aten.strides import Strides
from convselect.aten.volumes import (
    folded,
    folded_strides,
    rows_of,
    transposed_volume,
    transposed_volume_gradients,
    transposed_volume_problem,
    transposed_volume_strides,
    unfolded,
    volume_gradients,
    volume_of,
    volume_problem_of,
    volume_strides,
)
from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.volumes import image_of
from convselect.choice.choose import NATIVE, Choice
from convselect.eager.dispatch import dispatcher
from convselect.eager.kinds import TransposedPlan
from convselect.eager.plan import Plan, as_unbatched, is_legacy_batched, plan_for
from convselect.kernels._contract import NotApplicable
from convselect.kernels._native_ops import native_forward
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded


class _Volumes:
    """What plans of volumes differ in from those of images, transposed or not."""

    __slots__ = ()

    def refold(self, x_shape: tuple[int, ...], weight_shape: tuple[int, ...], groups: int, like: Tensor) -> Any:
        plan: Any = self
        N, C = x_shape[:2]  # vmap makes batches and channels of what it adds: other sizes stay as they are
        problem = plan.problem._replace(N=N, C=C, K=weight_shape[0], groups=groups, layout="contiguous")
        streamed = (N, weight_shape[0], *plan.y_size) if isinstance(self, TransposedPlan) else x_shape
        x = torch.empty((1,), dtype=like.dtype, device=like.device).expand(streamed)
        weight = torch.empty((1,), dtype=like.dtype, device=like.device).expand(weight_shape)
        return type(plan)(problem, plan.settings, plan.strides_of(x, weight, problem))


class VolumePlan(_Volumes, Plan):
    __slots__ = ()
    aten: Any = torch.conv3d
    strides_of = staticmethod(volume_strides)
    expected = staticmethod(volume_gradients)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_legacy_batched(x, weight):
            y = native_forward(x, weight, self.problem)
            return y if bias is None else y + bias.view(-1, 1, 1, 1)
        return Plan.forward(self, x, weight, bias)

    run = forward


class TransposedVolumePlan(_Volumes, TransposedPlan):
    __slots__ = ()
    aten: Any = torch.conv_transpose3d
    strides_of = staticmethod(transposed_volume_strides)
    expected = staticmethod(transposed_volume_gradients)

    @property
    def y_size(self) -> tuple[int, ...]:
        """(O, P, Q)."""
        return self.problem.y_shape[2:]


# ---- as images ------------------------------------------------------------------------------------------------------


class FoldedStrides(NamedTuple):
    """`ResultStrides` of an image that stands for a volume, and what it was."""

    y: Strides
    grad_x: Strides
    grad_weight: Strides
    rows: tuple[int, int] | None
    """(H, W), which are one dimension of the image; None if its one slice is the image."""
    x_shape: tuple[int, ...]
    """Of x, or of the transposed convolution's result."""
    y_size: tuple[int, ...]
    """(O, P, Q), or that of the transposed convolution's input."""


def _folded_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> FoldedStrides:
    rows = rows_of(x, weight)
    of = volume_strides(x, weight, problem)
    return _fold_all(of, rows, problem)


def _transposed_folded_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> FoldedStrides:
    rows = rows_of(x, weight)
    of = transposed_volume_strides(x, weight, problem)
    return _fold_all(of, rows, problem)


def _fold_all(of: tuple[Strides, ...], rows: tuple[int, int] | None, p: ConvProblem) -> FoldedStrides:
    y, grad_x, grad_weight = (folded_strides(strides, rows) for strides in of)
    if rows is None:
        return FoldedStrides(y, grad_x, grad_weight, rows, (p.N, p.C, 1, p.H, p.W), (1, p.P, p.Q))
    return FoldedStrides(y, grad_x, grad_weight, rows, (p.N, p.C, p.H, *rows), (p.P, *rows))


class _Folded(_Volumes):
    """Operands and results of volumes, for a plan of images."""

    __slots__ = ()

    def __init__(self, problem: ConvProblem, settings: Settings, strides: FoldedStrides) -> None:
        super().__init__(problem, settings, strides)  # type: ignore[call-arg]
        plan: Any = self
        plan.x_shape = strides.x_shape
        plan.weight_shape = (*problem.weight_shape[:2], *self._unfolded_kernel())

    @staticmethod
    def beats_aten(problem: ConvProblem, settings: Settings) -> bool:
        """For kernels along the depth: `conv2d` is 1.2 to 4 times as fast as `conv3d` for the same sums, at stride 1.
        With a stride it may be slower, and for 1x1x1 kernels (`python -m benchmarks.volumes --layers x1x1`)."""
        if settings.policy == NATIVE or problem.R == 1 or problem.S > 1 or problem.stride_h > 1:
            return False
        return settings.chooses and loaded.get_for(problem) is not None

    def _forget_if_native(self, choice: Choice) -> None:
        plan: Any = self
        if not self.beats_aten(plan.problem, plan.settings):
            super()._forget_if_native(choice)  # type: ignore[misc]

    def _unfolded_kernel(self) -> tuple[int, int, int]:
        plan: Any = self
        p = plan.problem
        return (1, p.R, p.S) if plan.strides.rows is None else (p.R, 1, 1)

    @property
    def y_size(self) -> tuple[int, ...]:
        plan: Any = self
        return plan.strides.y_size  # type: ignore[no-any-return]

    def _fold(self, t: Tensor) -> Tensor:
        plan: Any = self
        return folded(t, plan.strides.rows)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plan: Any = self
        y = super().forward(self._fold(x), self._fold(weight), bias)  # type: ignore[misc]
        return unfolded(y, plan.strides.rows)

    def backward(
        self, grad_y: Tensor, x: Tensor | None, weight: Tensor | None, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        plan: Any = self
        grad_x, grad_weight, grad_bias = super().backward(  # type: ignore[misc]
            self._fold(grad_y),
            None if x is None else self._fold(x),
            None if weight is None else self._fold(weight),
            needed,
        )
        rows = plan.strides.rows
        return (
            None if grad_x is None else unfolded(grad_x, rows),
            None if grad_weight is None else unfolded(grad_weight, rows and (1, 1)),
            grad_bias,
        )


class FoldedPlan(_Folded, Plan):
    __slots__ = ()
    aten: Any = torch.conv3d
    strides_of: Any = staticmethod(_folded_strides)
    expected = staticmethod(volume_gradients)
    run = _Folded.forward


class TransposedFoldedPlan(_Folded, TransposedPlan):
    __slots__ = ()
    aten: Any = torch.conv_transpose3d
    strides_of: Any = staticmethod(_transposed_folded_strides)
    expected = staticmethod(transposed_volume_gradients)

    def transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = TransposedPlan.transposed(self, self._fold(x), self._fold(weight), bias)
        return unfolded(y, self.strides.rows)  # type: ignore[attr-defined]

    run = transposed


# ---- plans and calls ------------------------------------------------------------------------------------------------


def _refuse_elsewhere(x: Tensor, weight: Tensor, settings: Settings) -> None:
    """On other devices volumes are aten's, unless an algorithm was asked for by name.

    Raises:
        NotApplicable: one was.
    """
    named = settings.policy in BY_NAME and settings.policy != NATIVE
    if named and x.dim() == weight.dim() == 5 and x.device.type != "cpu":
        raise NotApplicable(f"{settings.policy} cannot do this convolution: volumes need a CPU, not {x.device}")


def make_3d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings) -> Any:
    """As `make_plan`, for `torch.conv3d`."""
    if x.dim() == 4 and weight.dim() == 5:
        return as_unbatched(make_3d(x.unsqueeze(0), weight, bias, geometry, settings))
    _refuse_elsewhere(x, weight, settings)
    problem = volume_of(x, weight, geometry)
    kind = VolumePlan if problem is None or image_of(problem) is None else FoldedPlan
    return plan_for(kind, volume_problem_of, x, weight, bias, geometry, settings)


def make_transposed_3d(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, settings: Settings) -> Any:
    """As `make_plan`, for `torch.conv_transpose3d`."""
    if x.dim() == 4 and weight.dim() == 5:
        return as_unbatched(make_transposed_3d(x.unsqueeze(0), weight, bias, geometry, settings))
    _refuse_elsewhere(x, weight, settings)
    problem = transposed_volume(x, weight, geometry)
    kind = TransposedVolumePlan if problem is None or image_of(problem) is None else TransposedFoldedPlan
    return plan_for(kind, transposed_volume_problem, x, weight, bias, geometry, settings)


for _kind in (VolumePlan, FoldedPlan):
    _kind.make = staticmethod(make_3d)
for _transposed_kind in (TransposedVolumePlan, TransposedFoldedPlan):
    _transposed_kind.make = staticmethod(make_transposed_3d)

conv3d = dispatcher(torch.conv3d, make_3d)
conv_transpose3d = dispatcher(torch.conv_transpose3d, make_transposed_3d)

__all__ = ["conv3d", "conv_transpose3d"]
