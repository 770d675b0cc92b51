"""Algorithms and problems to measure: native with something done to its result, and three small problems."""

from __future__ import annotations

import torch

from convselect.base.problem import conv_problem
from convselect.kernels._contract import Algorithm, Grade
from convselect.kernels.pool import BY_NAME

NATIVE = BY_NAME["native"]
TINY = (
    conv_problem(2, 4, 6, 6, 4, 3, 3, padding=1),
    conv_problem(2, 4, 6, 5, 6, 1, 1, direction="backward_data"),
    conv_problem(2, 4, 6, 5, 4, 3, 3, groups=4, direction="backward_weight", dtype="bfloat16"),
)


class Like(Algorithm):
    """Native with something done to its result; counts its calls."""

    def __init__(self, name: str, change=lambda y: y, **attributes) -> None:
        self.name, self.change, self.calls = name, change, 0
        for attribute, value in attributes.items():
            setattr(self, attribute, value)

    refusal: str | None = None
    needs: int = 0

    def why_not(self, problem):
        return self.refusal

    def workspace_bytes(self, problem):
        return self.needs

    def error_grade(self, problem):
        return Grade.DIRECT

    def _run(self, direction, *args):
        self.calls += 1
        return self.change(getattr(NATIVE, direction)(*args))

    def forward(self, x, weight, problem, params=None):
        return self._run("forward", x, weight, problem)

    def backward_data(self, grad_y, weight, problem, params=None):
        return self._run("backward_data", grad_y, weight, problem)

    def backward_weight(self, x, grad_y, problem, params=None):
        return self._run("backward_weight", x, grad_y, problem)


def raises(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no luck")
