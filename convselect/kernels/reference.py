"""The specification: a direct sum in float64, one kernel tap at a time. Slow, obvious, never chosen automatically.

y[n, k, p, q] = sum over c, r, s of x[n, c, p*stride - pad + r*dil, q*stride - pad + s*dil] * weight[k, c, r, s]

A volume has one index more of each kind, ahead of the others; an image is a volume of one slice.

Source: the definition of cross-correlation in `torch.nn.Conv2d` and `torch.nn.Conv3d`. Every other algorithm is
tested against this.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm, Grade, Params


def _taps(problem: ConvProblem) -> list[tuple[tuple[int, int, int], tuple[slice, slice, slice]]]:
    """((t, r, s), (slices, rows, columns)): the part of the padded image that kernel tap (t, r, s) multiplies."""
    p = problem
    axes = ((p.T, p.O, p.stride_d, p.dil_d), (p.R, p.P, p.stride_h, p.dil_h), (p.S, p.Q, p.stride_w, p.dil_w))
    reach = [
        [slice(tap * dil, tap * dil + (outputs - 1) * stride + 1, stride) for tap in range(taps)]
        for taps, outputs, stride, dil in axes
    ]
    return [
        ((t, r, s), (reach[0][t], reach[1][r], reach[2][s])) for t in range(p.T) for r in range(p.R) for s in range(p.S)
    ]


def _padded(x: Tensor, problem: ConvProblem) -> Tensor:
    """x in float64, zero-padded, channels split: (N, G, C/G, D + pads, H + pads, W + pads)."""
    p = problem
    x = x.double().reshape(p.N, p.groups, p.C // p.groups, p.D, p.H, p.W)
    return F.pad(x, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom, p.pad_front, p.pad_back))


class Reference(Algorithm):
    name = "reference"
    dimensions = frozenset({2, 3})
    devices = frozenset({"cpu", "cuda"})
    automatic = False

    def why_not(self, problem: ConvProblem) -> str | None:
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = problem
        slices = p.D + p.pad_front + p.pad_back
        padded = p.N * p.C * slices * (p.H + p.pad_top + p.pad_bottom) * (p.W + p.pad_left + p.pad_right)
        results = p.N * p.O * p.P * p.Q
        # Operands, result and one tap's product and gathered slice, all in float64.
        return 8 * (3 * padded + 2 * p.C * results + 4 * p.K * results + 4 * p.K * p.C * p.T * p.R * p.S)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        padded, w = _padded(x, p), weight.double().reshape(G, p.K // G, p.C // G, p.T, p.R, p.S)
        y = torch.zeros(p.N, G, p.K // G, p.O, p.P, p.Q, dtype=torch.float64, device=x.device)
        for tap, reached in _taps(p):
            y += torch.einsum("ngcdhw,gkc->ngkdhw", padded[(..., *reached)], w[(..., *tap)])
        return y.reshape(p.y_shape).to(x.dtype)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        g = grad_y.double().reshape(p.N, G, p.K // G, p.O, p.P, p.Q)
        w = weight.double().reshape(G, p.K // G, -1, p.T, p.R, p.S)
        size = (p.D + p.pad_front + p.pad_back, p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right)
        grad = torch.zeros(p.N, G, p.C // G, *size, dtype=torch.float64, device=grad_y.device)
        for tap, reached in _taps(p):
            grad[(..., *reached)] += torch.einsum("ngkdhw,gkc->ngcdhw", g, w[(..., *tap)])
        grad = grad[..., p.pad_front :, p.pad_top :, p.pad_left :][..., : p.D, : p.H, : p.W]
        return grad.reshape(p.x_shape).to(grad_y.dtype)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G = problem, problem.groups
        padded, g = _padded(x, p), grad_y.double().reshape(p.N, G, p.K // G, p.O, p.P, p.Q)
        grad = torch.empty(G, p.K // G, p.C // G, p.T, p.R, p.S, dtype=torch.float64, device=x.device)
        for tap, reached in _taps(p):
            grad[(..., *tap)] = torch.einsum("ngkdhw,ngcdhw->gkc", g, padded[(..., *reached)])
        return grad.reshape(p.weight_shape).to(x.dtype)


ALGORITHMS = (Reference(),)
