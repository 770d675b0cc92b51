"""PyTorch's own convolution (oneDNN on CPUs, cuDNN or MIOpen on GPUs): the baseline, always applicable, the fallback."""

from __future__ import annotations

import torch
from torch import Tensor

from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._native_ops import native_backward, native_forward, padding_copy_bytes
from convselect.problem import ConvProblem


class Native(Algorithm):
    name = "native"

    def why_not(self, problem: ConvProblem) -> str | None:
        return None

    def workspace_bytes(self, problem: ConvProblem) -> int:
        # oneDNN's own scratch is not PyTorch's to count; slow paths unfold one image at a time.
        p = problem
        unfolded = (p.C // p.groups) * p.R * p.S * p.P * p.Q * p.element_bytes
        return 2 * (p.x_bytes + p.y_bytes + p.weight_bytes) + p.threads * unfolded + padding_copy_bytes(p)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_forward(x, weight, problem)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        # The operator wants x for its shape and layout only; an expanded scalar costs no memory.
        x = torch.empty(1, dtype=grad_y.dtype, device=grad_y.device).expand(problem.x_shape)
        grad_x = native_backward(grad_y, x, weight, problem, (True, False))[0]
        assert grad_x is not None
        return grad_x

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        weight = torch.empty(1, dtype=x.dtype, device=x.device).expand(problem.weight_shape)
        grad_weight = native_backward(grad_y, x, weight, problem, (False, True))[1]
        assert grad_weight is not None
        return grad_weight


ALGORITHMS = (Native(),)
