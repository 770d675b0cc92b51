"""PyTorch's own convolution (oneDNN on CPUs, cuDNN or MIOpen on GPUs): the baseline and the fallback, always
applicable."""

from __future__ import annotations

from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._native_ops import (
    native_backward_data,
    native_backward_weight,
    native_forward,
    native_transposed,
    native_workspace_bytes,
)


class Native(Algorithm):
    name = "native"
    dimensions = frozenset({2, 3})
    devices = frozenset({"cpu", "cuda"})

    def why_not(self, problem: ConvProblem) -> str | None:
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        return native_workspace_bytes(problem)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_forward(x, weight, problem)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor:
        """aten adds the bias itself: the same call as the user's, bit for bit and in time."""
        if bias is None:
            return self.run(a, b, problem)
        run = native_transposed if problem.direction == Direction.BACKWARD_DATA else native_forward
        return run(a, b, problem, bias)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_data(grad_y, weight, problem)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_weight(x, grad_y, problem)


ALGORITHMS = (Native(),)
