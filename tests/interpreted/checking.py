"""One Triton algorithm on one problem, against float64."""

from __future__ import annotations

from typing import Any

import torch
from problems import operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import ConvProblem, Direction, layout_of
from convselect.kernels.reference import Reference
from convselect.kernels.triton.launch import TritonAlgorithm


def check(
    algorithm: TritonAlgorithm,
    problem: ConvProblem,
    layout: str = "contiguous",
    weight_layout: str = "contiguous",
    params: dict[str, Any] | None = None,
) -> None:
    """Run and compare; the result's memory starts as NaN, and no operand may change. The problem must apply."""
    x, weight, grad_y = random_operands(problem, layout, weight_layout)
    streamed = grad_y if problem.direction == Direction.BACKWARD_DATA else x
    p = problem._replace(layout=layout_of(streamed), weight_layout=layout_of(weight))
    assert algorithm.why_not(p) is None, (algorithm.why_not(p), p)
    operands = operands_of(p, x, weight, grad_y)
    copies = [t.clone() for t in operands]
    got = _with_nan_memory(lambda: algorithm.run(*operands, p, params))
    assert got.shape == p.result_shape
    assert got.dtype == p.torch_dtype
    want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
    error, bound = relative_error(got, want), tolerance(algorithm, p)
    assert error <= bound, f"{algorithm.name} {p} {params}: relative error {error:.2e} over {bound:.1e}"
    assert all(torch.equal(t, c) for t, c in zip(operands, copies, strict=True)), "an operand was modified"


def _with_nan_memory(function: Any) -> torch.Tensor:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # under which torch.empty fills with NaN
    try:
        return function()
    finally:
        torch.use_deterministic_algorithms(before)
