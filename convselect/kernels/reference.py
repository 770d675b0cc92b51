"""The specification: a direct sum in float64, one kernel tap at a time. Slow, obvious, never chosen automatically.

y[n, k, p, q] = sum over c, r, s of x[n, c, p*stride - pad + r*dil, q*stride - pad + s*dil] * weight[k, c, r, s]

Source: the definition of cross-correlation in `torch.nn.Conv2d`. Every other algorithm is tested against this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm, Grade, Params


def _taps(problem: ConvProblem) -> list[tuple[int, int, slice, slice]]:
    """(r, s, rows, columns): the part of the padded image that kernel tap (r, s) multiplies."""
    return [
        (
            r,
            s,
            slice(r * problem.dil_h, r * problem.dil_h + (problem.P - 1) * problem.stride_h + 1, problem.stride_h),
            slice(s * problem.dil_w, s * problem.dil_w + (problem.Q - 1) * problem.stride_w + 1, problem.stride_w),
        )
        for r in range(problem.R)
        for s in range(problem.S)
    ]


def _padded(x: Tensor, problem: ConvProblem) -> Tensor:
    """x in float64, zero-padded, channels split: (N, G, C/G, H + pads, W + pads)."""
    p = problem
    x = F.pad(x.double(), (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom))
    return x.reshape(p.N, p.groups, p.C // p.groups, x.shape[2], x.shape[3])


class Reference(Algorithm):
    name = "reference"
    devices = frozenset({"cpu", "cuda"})
    automatic = False

    def why_not(self, problem: ConvProblem) -> str | None:
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = problem
        padded = p.N * p.C * (p.H + p.pad_top + p.pad_bottom) * (p.W + p.pad_left + p.pad_right)
        # Operands, result and one tap's product and gathered slice, all in float64.
        return 8 * (3 * padded + 2 * p.N * p.C * p.P * p.Q + 4 * p.N * p.K * p.P * p.Q + 4 * p.K * p.C * p.R * p.S)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        padded, w = _padded(x, p), weight.double().reshape(G, p.K // G, p.C // G, p.R, p.S)
        y = torch.zeros(p.N, G, p.K // G, p.P, p.Q, dtype=torch.float64, device=x.device)
        for r, s, rows, columns in _taps(p):
            y += torch.einsum("ngchw,gkc->ngkhw", padded[..., rows, columns], w[..., r, s])
        return y.reshape(p.y_shape).to(x.dtype)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        g, w = grad_y.double().reshape(p.N, G, p.K // G, p.P, p.Q), weight.double().reshape(G, p.K // G, -1, p.R, p.S)
        height, width = p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right
        grad = torch.zeros(p.N, G, p.C // G, height, width, dtype=torch.float64, device=grad_y.device)
        for r, s, rows, columns in _taps(p):
            grad[..., rows, columns] += torch.einsum("ngkhw,gkc->ngchw", g, w[..., r, s])
        grad = grad[..., p.pad_top : p.pad_top + p.H, p.pad_left : p.pad_left + p.W]
        return grad.reshape(p.x_shape).to(grad_y.dtype)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        padded, g = _padded(x, p), grad_y.double().reshape(p.N, G, p.K // G, p.P, p.Q)
        grad = torch.empty(G, p.K // G, p.C // G, p.R, p.S, dtype=torch.float64, device=x.device)
        for r, s, rows, columns in _taps(p):
            grad[..., r, s] = torch.einsum("ngkhw,ngchw->gkc", g, padded[..., rows, columns])
        return grad.reshape(p.weight_shape).to(x.dtype)


ALGORITHMS = (Reference(),)
