"""Parameters of C kernels: converts `params` to the slots of `cs_conv.tune`, and bounds the workspace of programs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm, Params
from convselect.kernels._space import Values

MORE_BYTES = 32 * 2**20
"""A program may take this much more workspace than the default one, or twice as much."""


def in_slots(algorithm: Algorithm, problem: ConvProblem, params: Params, order: tuple[str, ...]) -> tuple[int, ...]:
    """The values of `params` in the kernel's order of parameters, 0 if the kernel decides; () if there are none.

    Raises:
        ValueError: if `params` is not a program of the algorithm on this problem.
    """
    return () if params is None else _in_slots(algorithm, problem, tuple(params.items()), order)


@functools.lru_cache(maxsize=4096)
def _in_slots(
    algorithm: Algorithm, problem: ConvProblem, items: tuple[tuple[str, int], ...], order: tuple[str, ...]
) -> tuple[int, ...]:
    # Cached: asking the space costs as much as a small convolution.
    values, space = dict(items), algorithm.space(problem)
    if space is None or not space.is_valid(problem, values):
        raise ValueError(f"{algorithm.name} has no program {values} for {problem}")
    return in_order(values, order)


def in_order(params: Mapping[str, Any], order: tuple[str, ...]) -> tuple[int, ...]:
    """The values of `params` in this order, 0 for missing ones; not checked, for computing workspaces."""
    return tuple(params.get(name, 0) for name in order)


def within(algorithm: Algorithm, problem: ConvProblem, default: Values, values: Values) -> bool:
    """Whether a complete program takes no more memory than `MORE_BYTES` allows."""
    if len(values) < len(default):
        return True  # one value of the remaining parameters takes the least memory
    before = algorithm.workspace_bytes(problem)
    return algorithm.workspace_bytes(problem, values) <= max(2 * before, before + MORE_BYTES)
