"""Results checked for ever: now and then a few outputs of a real call are computed again in float64.

Every algorithm's first result in a trial is checked, and a share of all later ones that costs `SHARE` of the time of
the calls that are eligible (all that run another algorithm than native, unless it was named by the user). Which calls
are checked is random, and so are the places (`kernels/_spot_check.py`). The gap between two checks follows from two
running means over the calls that were checked: their time, and that of the checks. As calls are drawn at random, these
are the means over all calls, so that the share holds for any mixture of layers.

An algorithm that was wrong once is never chosen again in this process: the call is repeated natively, and one warning
says how to report it. Its stored choices are refused with it; a later process tests it again (`trusted`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from torch import Tensor

from convselect.base import lru, timing
from convselect.base.problem import ConvProblem, Direction
from convselect.base.warnings import warn_once
from convselect.choice.budgets import distrusted
from convselect.kernels._spot_check import check
from convselect.kernels._spot_check_torch import Finding
from convselect.kernels.pool import BY_NAME

PLACES = 8
SHARE = 0.004
MOST_GAP = 4096
"""A check is at most this many calls away, however short the calls are."""
_KEPT = 0.9
"""Share of a running mean that the next value leaves."""
_wall_ns, _thread_ns = timing.SYSTEM_CLOCK
_random = random.Random()


class _Due:
    """`left` is how many calls come before the next check. Callers count down themselves, to save a function call.
    Threads may lose a count between them, which does no harm."""

    __slots__ = ("call_us", "check_us", "checks", "left")

    def __init__(self) -> None:
        self.left = 8
        self.call_us = 0.0
        self.check_us = 0.0
        self.checks = 0

    def add(self, call_us: float, check_us: float) -> None:
        """A call was checked: draw the gap to the next."""
        kept = _KEPT if self.checks else 0.0
        # One interruption must not stop the checks: a value counts at most ten times the mean.
        limited = min(check_us, 10 * self.check_us) if self.checks else check_us
        self.call_us = kept * self.call_us + (1 - kept) * call_us
        self.check_us = kept * self.check_us + (1 - kept) * limited
        self.checks += 1
        mean = self.check_us / (SHARE * max(self.call_us, 1.0))
        self.left = min(int(_random.uniform(0.5, 1.5) * mean), MOST_GAP)


due = _Due()


def watched(
    run: Callable[[], Tensor | None], name: str, a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None
) -> Tensor | None:
    """The result of a call that is due to be checked; None if `run` has none, or if it is wrong."""
    now_ns = _thread_ns if problem.threads == 1 else _wall_ns
    begun_ns = now_ns()
    result = run()
    ran_ns = now_ns()
    if result is None:
        return None
    right = is_right(name, result, a, b, problem, bias)
    due.add((ran_ns - begun_ns) / 1e3, (now_ns() - ran_ns) / 1e3)
    return result if right else None


def is_right(
    name: str, result: Tensor, a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None, places: int = PLACES
) -> bool:
    """Look at some places; an algorithm whose result is wrong at one of them is `distrust`ed."""
    finding = check(BY_NAME[name], result, a, b, problem, bias, places=places, seed=_random.getrandbits(63))
    if finding is None or finding.right:
        return True
    of_weight = problem.direction == Direction.BACKWARD_WEIGHT
    if not of_weight and not math.isfinite(finding.got) and not b.isfinite().all():
        return True  # whether an infinite weight meets the zeros of the padding differs between kernels, aten's too
    distrust(name, problem, finding)
    return False


def distrust(name: str, problem: ConvProblem, finding: Finding) -> None:
    """Never choose this algorithm again in this process."""
    found = f"{finding.got:.9g} in place of {finding.expected:.9g} at {finding.place}"
    distrusted[name] = f"{name} gave a wrong result in this process."
    lru.forget_entries()  # choices and plans that name it
    warn_once(
        f"wrong:{name}",
        f"convselect: {name} is wrong on {problem}: {found}. It is not used any more, and native computed this call; "
        "please report this, with the output of `convselect doctor --json`.",
    )


lru.on_clear(distrusted.clear)

__all__ = ["due", "is_right", "watched"]
