"""A candidate's first result on a GPU, compared with native's."""

from __future__ import annotations

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.base.warnings import warn_once

ERROR_BOUNDS = {"float64": 1e-11, "float32": 2e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Relative L2 distance from native's result beyond which a candidate's is a mistake: ten times the loosest grade."""


def is_near(name: str, error: float, problem: ConvProblem) -> bool:
    """Whether a relative error is rounding; if not, there is a warning."""
    if error <= ERROR_BOUNDS[problem.dtype]:
        return True
    warn_once(
        f"wrong:{name}",
        f"convselect: {name} is wrong on {problem}: its relative error is {error:.1e}. It is not used there; "
        "please report this.",
    )
    return False


def distance(result: Tensor, native: Tensor) -> Tensor:
    """Relative L2 distance; 0 if both are all zeros, NaN if something is not finite."""
    with torch.no_grad():
        wide = torch.float64 if native.dtype == torch.float64 else torch.float32
        result, native = result.detach().to(wide), native.detach().to(wide)
        size = torch.linalg.vector_norm(native)
        distance: Tensor = torch.linalg.vector_norm(result - native) / size.clamp_min(torch.finfo(wide).tiny)
        return distance
