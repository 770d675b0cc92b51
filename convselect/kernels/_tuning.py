"""Parameters of C kernels: from `params` to the slots of `cs_conv.tune`, and workspaces that stay in bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable

from convselect.kernels._contract import Algorithm, Params
from convselect.kernels._space import Values
from convselect.problem import ConvProblem

MORE_BYTES = 32 * 2**20
"""A program may take this much more workspace than the default one, or twice as much."""


def slots(algorithm: Algorithm, problem: ConvProblem, params: Params, order: tuple[str, ...]) -> tuple[int, ...]:
    """The values of `params` in the kernel's order of parameters, 0 where it decides.

    Raises:
        ValueError: where `params` is no program of the algorithm on this problem.
    """
    if params is None:
        return ()
    return _slots(algorithm, problem, tuple(params.items()), order)


@functools.lru_cache(maxsize=4096)
def _slots(
    algorithm: Algorithm, problem: ConvProblem, items: tuple[tuple[str, int], ...], order: tuple[str, ...]
) -> tuple[int, ...]:
    # Remembered: asking the space costs as much as a small convolution.
    values, space = dict(items), algorithm.space(problem)
    if space is None or not space.is_valid(problem, values):
        raise ValueError(f"{algorithm.name} has no program {values} for {problem}")
    return in_order(values, order)


def in_order(params: Params, order: tuple[str, ...]) -> tuple[int, ...]:
    """The values of `params` in this order, 0 where it has none; unchecked, for questions about workspaces."""
    return () if not params else tuple(params.get(name, 0) for name in order)


def within(workspace: Callable[[Values | None], int], default: Values, values: Values) -> bool:
    """Whether a complete program takes no more memory than is fair."""
    if len(values) < len(default):
        return True  # what is still to come has a value that takes least
    before = workspace(None)
    return workspace(values) <= max(2 * before, before + MORE_BYTES)
