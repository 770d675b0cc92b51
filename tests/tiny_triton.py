"""A Triton algorithm for tests: 1x1 convolutions as row times column, with two configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._contract import Grade, Params
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import Launch, TritonAlgorithm


class Tiny(TritonAlgorithm):
    name = "tiny_triton"

    def why_not_shape(self, problem: ConvProblem) -> str | None:
        if not problem.is_pointwise or problem.groups != 1 or problem.dtype == "float64":
            return "it is for dense 1x1 kernels"
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        return 2 * problem.bytes

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        return [{"BLOCK": 64, "num_warps": 1}, {"BLOCK": 32, "num_warps": 1}]

    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        p = problem
        chosen = dict(params or self.configs(p)[0])
        pixels = p.N * p.P * p.Q
        rows, columns, inner = {
            Direction.FORWARD: (pixels, p.K, p.C),
            Direction.BACKWARD_DATA: (pixels, p.C, p.K),
            Direction.BACKWARD_WEIGHT: (p.K, p.C, pixels),
        }[p.direction]
        constants = (("N", columns), ("K", inner), ("BLOCK", chosen["BLOCK"]))
        grid = (rows, -(-columns // chosen["BLOCK"]), 1)
        return (Launch("_tiny_kernels", "product", grid, (p.dtype,) * 3, constants, num_warps=chosen["num_warps"]),)

    def _run(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        (launch,) = self.launches(problem, params)
        launcher.run(launch, *(launcher.aligned(t.contiguous()) for t in (a, b)), c)
        return c

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = problem
        y = self._run(_pixels(x), weight.reshape(p.K, p.C).T, p, params)
        return y.view(p.N, p.P, p.Q, p.K).permute(0, 3, 1, 2)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = problem
        grad = self._run(_pixels(grad_y), weight.reshape(p.K, p.C), p, params)
        return grad.view(p.N, p.H, p.W, p.C).permute(0, 3, 1, 2)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._run(_pixels(grad_y).T, _pixels(x), problem, params).view(problem.weight_shape)


def _pixels(t: Tensor) -> Tensor:
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])
