"""Parameters of C kernels: from `params` to the slots of `cs_conv.tune`, and workspaces that stay in bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convselect.kernels._contract import Params
from convselect.kernels._space import Space, Values
from convselect.problem import ConvProblem

MORE_BYTES = 32 * 2**20
"""A program may take this much more workspace than the default one, or twice as much."""


# (algorithm, problem, parameters) -> slots. Every call asks, and asking the space costs more than a small convolution.
_known: dict[tuple[str, ConvProblem, tuple[tuple[str, int], ...]], tuple[int, ...]] = {}
_MOST_KNOWN = 4096


def slots(name: str, problem: ConvProblem, params: Params, space: Space, order: Mapping[str, int]) -> tuple[int, ...]:
    """The values in the kernel's order, 0 where it decides.

    Args:
        order: parameter -> slot.

    Raises:
        ValueError: where `params` is no program of the algorithm on this problem.
    """
    if params is None:
        return ()
    key = (name, problem, tuple(params.items()))
    known = _known.get(key)
    if known is not None:
        return known
    if not space.is_valid(problem, params):
        raise ValueError(f"{name} has no program {dict(params)} for {problem}")
    filled = [0] * (1 + max(order.values()))
    for parameter, value in params.items():
        filled[order[parameter]] = value
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    found = _known[key] = tuple(filled)
    return found


def within(workspace: Callable[[Values | None], int], default: Values, values: Values) -> bool:
    """Whether a complete program takes no more memory than is fair."""
    if len(values) < len(default):
        return True  # what is still to come has a value that takes least
    before = workspace(None)
    return workspace(values) <= max(2 * before, before + MORE_BYTES)
