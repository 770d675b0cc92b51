"""16-bit in, float32 convolution, 16-bit out.

On CPUs without 16-bit dot products, native bfloat16 and float16 convolutions measured 5-30x slower than float32, so two
casts and a float32 convolution win by far. The sum is rounded to 16 bits once, as native does.
"""

from __future__ import annotations

from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.kernels._common import cast_bytes
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._native_ops import (
    native_backward_data,
    native_backward_weight,
    native_forward,
    native_workspace_bytes,
    plainly_contiguous,
    wrong_in_channels_last,
)


class Upcast(Algorithm):
    name = "upcast"
    dimensions = frozenset({2, 3})

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.element_bytes > 2:
            return f"Upcasting needs 16-bit tensors; {problem.dtype} needs no cast to float32."
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = problem
        elements = (p.x_bytes + p.y_bytes + p.weight_bytes) // p.element_bytes
        return native_workspace_bytes(p._replace(dtype="float32")) + cast_bytes(p, elements)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        x_32, p = x.float(), _float32(problem)
        if wrong_in_channels_last(p):  # one channel may have either layout's strides
            x_32, weight = plainly_contiguous(x_32), plainly_contiguous(weight)
        return native_forward(x_32, weight.float(), p).to(x.dtype)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_data(grad_y.float(), weight.float(), _float32(problem)).to(grad_y.dtype)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_weight(x.float(), grad_y.float(), _float32(problem)).to(x.dtype)


def _float32(problem: ConvProblem) -> ConvProblem:
    return problem._replace(dtype="float32")


ALGORITHMS = (Upcast(),)
