"""A trial on times that were measured or made up before, through exactly the rules of `trial.py`."""

from __future__ import annotations

from collections.abc import Callable

from convselect.choice.rounds import NATIVE
from convselect.choice.trial import CHECK_US, MACHINERY_US, Trial


def replay(trial: Trial, time_us: Callable[[str], float], calls: int) -> float:
    """Total time of `calls` calls in us: first those of the trial, with its overhead and the check of each candidate's
    first result, then those of the algorithm it settled on. `time_us(algorithm)` returns the time of one call."""
    total = 0.0
    for _ in range(calls):
        name = None if trial.outcome is not None else trial.turn()
        if name is None:
            assert trial.outcome is not None
            used = trial.outcome.algorithm
            total += time_us(used) + (trial.cost_us if used != NATIVE else 0.0)
            continue
        us = time_us(name)
        overhead_us = MACHINERY_US + (CHECK_US if name != NATIVE and trial.is_cold(name) else 0.0)
        total += us + overhead_us + trial.cost_us
        trial.record(name, us, overhead_us)
    return total
