"""What leaving native costs a call, beside the algorithm's own time.

Nothing, if the call runs outside Python (`eager/cached_calls.cpp`, and the algorithm is a C kernel): there it costs 3
to 4 us less than the difference of the times in rows says, since those were taken through Python. Otherwise what a plan
in Python costs. `python -m benchmarks.overhead` prints both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import NATIVE

outside_python = False
"""Whether cached calls of C kernels run outside Python in this process. Set when what does that is loaded."""
PLAN_COST_US = {Direction.FORWARD: 25.0, Direction.BACKWARD_DATA: 60.0, Direction.BACKWARD_WEIGHT: 60.0}
"""Overhead per call of a plan in Python. It decides the choice for tiny problems. Times in rows do not include it."""
COLD_SHARE, COLD_MOST_US = 0.055, 150.0
"""What the same costs in a program: this share of native's time, at most so many us. A convolution leaves nothing of
Python's in the processor's caches, and each of its functions then takes four to seven times as long. Measured between
convolutions of 0.2 to 35 ms, under AVX2 and AVX-512: 0.03 to 0.08."""
PLAN_COST_CUDA_US = 3.0
"""The same on a GPU, whose queue hides most of the host's overhead. A guess, not measured."""


def computes_in_c(name: str) -> bool:
    """Whether calls of this algorithm can run outside Python."""
    algorithm = BY_NAME.get(name)
    return algorithm is not None and algorithm.in_c


def is_free(name: str) -> bool:
    """Whether leaving native for this algorithm costs nothing in this process."""
    return name == NATIVE or (outside_python and computes_in_c(name))


def fixed_cost_us(problem: ConvProblem, name: str) -> float:
    """Least overhead of a call of this algorithm, in this process."""
    if is_free(name):
        return 0.0
    return PLAN_COST_US[problem.direction] if problem.device == "cpu" else PLAN_COST_CUDA_US


def plan_cost_us(problem: ConvProblem, native_us: float, names: Iterable[str]) -> float:
    """Overhead per call of leaving native for the costliest of these algorithms, in a program."""
    if all(map(is_free, names)):
        return 0.0
    if problem.device != "cpu":
        return PLAN_COST_CUDA_US
    return max(PLAN_COST_US[problem.direction], min(COLD_SHARE * native_us, COLD_MOST_US))


def step_cost_us(native_us: float, names: Iterable[str]) -> float:
    """Overhead of a forward and backward pass that leaves native for these algorithms, on a CPU in a program: if one
    direction goes through Python, all of them do. Measured on layers of which one direction takes native 0.08 to 10 ms.

    Args:
        native_us: native's time in the slowest direction.
    """
    return 0.0 if all(map(is_free, names)) else 80.0 + min(0.2 * native_us, 300.0)


def charged(
    problem: ConvProblem, names: Sequence[str], logits: Sequence[float], alpha: float, ln_native_us: float
) -> list[float]:
    """A model's logits with the cost of a plan counted into every algorithm's time that has to pay it here.

    Models of machines with C kernels are trained without it, so a gain has to be known in microseconds first.

    Args:
        alpha: logit differences / alpha are ln of ratios of times.
        ln_native_us: estimate of native's time (`model.targets.native_line`).
    """
    native_us, native = math.exp(min(ln_native_us, 30.0)), logits[list(names).index(NATIVE)]
    found = []
    for name, logit in zip(names, logits, strict=True):
        cost_us = plan_cost_us(problem, native_us, (name,))
        share = math.exp(min((native - logit) / alpha, 30.0)) + cost_us / native_us
        found.append(native - alpha * math.log(share) if cost_us else logit)
    return found
