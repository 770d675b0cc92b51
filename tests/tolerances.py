"""The one table of tolerances. Every row has a reason; nothing loosens it in CI.

Errors of whole results are relative L2 norms against float64 (`reference.py` on the same inputs): ||got - want|| /
||want||. A norm cannot see a few bad elements beside large ones, so single results have a bound of their own:
`elementwise`.
"""

from __future__ import annotations

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._contract import Algorithm, Grade
from convselect.kernels._spot_check import limit

# (dtype, grade) -> relative L2 error
FORWARD: dict[tuple[str, Grade], float] = {
    # A float32 direct sum of up to 512 * 9 terms measures 2e-7 to 1.2e-6 with oneDNN; twice that is what DIRECT means.
    ("float32", Grade.DIRECT): 2.5e-6,
    # The promise of the grade itself.
    ("float32", Grade.NEAR): 3e-6,
    ("float32", Grade.CLOSE): 1e-5,
    ("float32", Grade.LOOSE): 2e-5,
    # float64 against a float64 reference: the same sums in another order, 2**-53 = 1.1e-16 times the same growth.
    ("float64", Grade.DIRECT): 5e-15,
    ("float64", Grade.NEAR): 2e-14,
    ("float64", Grade.CLOSE): 2e-14,
    ("float64", Grade.LOOSE): 4e-14,
    # 16-bit results are rounded once at the end: half an ulp is 2**-12 (float16) or 2**-9 (bfloat16) of the value, RMS
    # about a third of an ulp. The float32 error inside is far below. Native accumulates in float32 as well.
    ("float16", Grade.DIRECT): 4e-4,
    ("float16", Grade.NEAR): 4e-4,
    ("float16", Grade.CLOSE): 4e-4,
    ("float16", Grade.LOOSE): 4e-4,
    ("bfloat16", Grade.DIRECT): 3e-3,
    ("bfloat16", Grade.NEAR): 3e-3,
    ("bfloat16", Grade.CLOSE): 3e-3,
    ("bfloat16", Grade.LOOSE): 3e-3,
}

# A weight gradient sums over N * P * Q terms (up to 1e5 here), not C * R * S: native itself measures up to 2e-6.
WEIGHT_GRADIENT_FACTOR = 2.0

# PyTorch's slow paths (small images, float16 gradients: col2im) add up in 16 bit, one rounding per kernel tap: 1.8e-3
# measured in float16 for 13x13 taps, 3.6e-3 for 31x31. That is native's own error and not ours to mend.
NATIVE_16_BIT_FACTOR = 12.0


def tolerance(algorithm: Algorithm, problem: ConvProblem) -> float:
    """The bound for one algorithm on one problem."""
    bound = FORWARD[problem.dtype, algorithm.error_grade(problem)]
    if problem.element_bytes == 2 and algorithm.name.startswith("native"):
        bound *= NATIVE_16_BIT_FACTOR
    return bound * WEIGHT_GRADIENT_FACTOR if problem.direction == Direction.BACKWARD_WEIGHT else bound


def elementwise(algorithm: Algorithm, problem: ConvProblem) -> float:
    """The bound for each single result, in eps times the size of its sum (all |a||b| that it adds up), or of the median
    one of its image if that is larger. docs/budgets.md has the reasons; users' results are checked by the same."""
    return limit(algorithm, problem)
