"""Trials on invented times."""

from __future__ import annotations

from collections.abc import Callable

from convselect.choice.trial import NATIVE, Trial

US = 1000.0
"""Native's time."""


def of(**times: float) -> Callable[[str], float]:
    return ({NATIVE: US} | times).__getitem__


def play(trial: Trial, time_us: Callable[[str], float], turns: int = 1000, overhead_us: float = 0.0) -> list[str]:
    """Whose turns they were, until the trial ends or this many turns were had."""
    seen: list[str] = []
    while trial.outcome is None and len(seen) < turns:
        name = trial.turn()
        if name is None:
            break
        seen.append(name)
        trial.record(name, time_us(name), overhead_us)
    return seen
