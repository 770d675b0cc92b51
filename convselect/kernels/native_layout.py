"""Native, in the other memory layout: convert, convolve, and let dispatch restore the layout aten would give.

oneDNN is 1.1-17x faster in channels_last on some shapes (strided, grouped, large depthwise kernels) and up to 5x slower
on others (weight gradients), and a round trip over the activations costs less than that.
"""

from __future__ import annotations

from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, canonical_strides
from convselect.kernels._common import format_of
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._native_ops import (
    native_backward_data,
    native_backward_weight,
    native_forward,
    native_workspace_bytes,
    unsound_in_16_bit,
    wrong_in_channels_last,
)


class NativeLayout(Algorithm):
    """aten's convolution with every activation and weight moved to `layout` first."""

    dimensions = frozenset({2, 3})
    devices = frozenset({"cpu", "cuda"})

    def __init__(self, layout: str) -> None:
        self.name = f"native_{layout}"
        self._layout = layout

    def why_not(self, problem: ConvProblem) -> str | None:
        if unsound_in_16_bit(problem):
            return (
                f"Moving to {self._layout} needs kernels that are sound in both layouts; oneDNN's strided 16-bit ones "
                "are not if a kernel tap or an output meets only padding."
            )
        if self._layout == CHANNELS_LAST and wrong_in_channels_last(problem):
            return (
                "Moving to channels_last needs a kernel of oneDNN's that is right there; it has none for strided "
                "convolutions of single channels, and for weight gradients that are dilated, or strided and narrow."
            )
        return None

    def same_as_native(self, problem: ConvProblem) -> str | None:
        if problem.layout == self._layout and problem.weight_layout == self._layout:
            return f"The tensors are {self._layout} already, so this is native."
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = problem
        return native_workspace_bytes(p) + p.x_bytes + p.y_bytes + p.weight_bytes

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def _moved(self, tensor: Tensor) -> Tensor:
        moved = tensor.contiguous(memory_format=format_of(self._layout, tensor.dim()))
        canonical = canonical_strides(tuple(moved.shape), self._layout)
        # With one channel or one pixel both layouts fit, and aten goes by the strides: give the right ones.
        return moved if moved.stride() == canonical else moved.as_strided(moved.shape, canonical)

    def _as_moved(self, problem: ConvProblem) -> ConvProblem:
        return problem._replace(layout=self._layout, weight_layout=self._layout)

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_forward(self._moved(x), self._moved(weight), self._as_moved(problem))

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_data(self._moved(grad_y), self._moved(weight), self._as_moved(problem))

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_weight(self._moved(x), self._moved(grad_y), self._as_moved(problem))


ALGORITHMS = (NativeLayout(CHANNELS_LAST), NativeLayout(CONTIGUOUS))
