"""What people are told of a choice, or of the trial that is to make it: by `explain`, `summary` and the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from convselect.choice.budgets import distrusted
from convselect.choice.choose import NATIVE, TIMED, Choice
from convselect.choice.outcome import OnTrial
from convselect.choice.reasons import rounds, times, with_spread
from convselect.eager.live_trial import LiveTrial


class Facts(Protocol):
    """An algorithm with both of its gains; a `Choice` is one."""

    @property
    def algorithm(self) -> str: ...
    @property
    def predicted_gain(self) -> float | None: ...
    @property
    def measured_gain(self) -> float | None: ...
    @property
    def spread(self) -> tuple[float, float] | None: ...


def told(found: Choice | LiveTrial) -> tuple[Choice, OnTrial | None]:
    """The choice, and None; of an open trial its leader with source "trial", and how the trial stands."""
    if not isinstance(found, LiveTrial):
        return found, None
    trial = found.on_trial
    if trial is None:
        return found.current, None
    leader = trial.leader
    params, predicted = found.params_of(leader), trial.predicted.get(leader, 1.0)
    return Choice(leader, "trial", params, predicted, measured=found.trial.measured().get(leader)), trial


def gains(of: Facts, number: int = 0) -> str:
    """ ", measured 1.82x (1.75 to 1.90) in 5 rounds, predicted 2.46x": as much of this as is known; "" for native.

    Args:
        number: of rounds; 0 if it is told elsewhere, or not known.
    """
    if of.algorithm == NATIVE:
        return ""
    after = f" in {rounds(number)}" if number else ""
    measured = "" if of.measured_gain is None else f", measured {with_spread(of.measured_gain, of.spread)}{after}"
    return measured + ("" if of.predicted_gain is None else f", predicted {times(of.predicted_gain)}")


def others(trial: OnTrial) -> Iterator[str]:
    """The candidates that do not lead: "direct, measured 1.08x, predicted 2.01x"."""
    for name, gain in trial.candidates.items():
        if name != trial.leader:
            measured = "" if gain is None else f", measured {times(gain)}"
            yield f"{name}{measured}, predicted {times(trial.predicted[name])}"


__all__ = ["TIMED", "OnTrial", "distrusted", "gains", "others", "told"]
