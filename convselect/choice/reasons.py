"""Why each of the other algorithms was not taken: sentences for `explain` and the log; and numbers as text."""

from __future__ import annotations

import math

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE, TIMED, Choice, Prediction
from convselect.choice.outcome import Measured
from convselect.choice.trial import Trial
from convselect.kernels.pool import ALL


def reasons(
    problem: ConvProblem,
    choice: Choice,
    used: Settings,
    prediction: Prediction | None,
    trial: Trial | None = None,
) -> dict[str, str]:
    """Name -> one sentence, for every algorithm of the pool but the one that was chosen.

    Args:
        trial: the one in this process that has made the choice, or is to make it.
    """
    found: dict[str, str] = {}
    measured = {} if trial is None else trial.measured()
    for algorithm in ALL:
        name = algorithm.name
        if name == choice.algorithm:
            continue
        reason = refusal(algorithm, problem, used)
        if reason is None and choice.source == "forced":
            reason = f"{choice.algorithm} was asked for by name."
        if reason is None:
            reason = _by_source(name, choice, prediction, measured.get(name), trial)
        found[name] = reason
    return found


def _by_source(
    name: str, choice: Choice, prediction: Prediction | None, measured: Measured | None, trial: Trial | None
) -> str:
    gain = None
    if trial is not None and name in trial.priors:
        gain = math.exp(trial.priors[name].mean)  # as it was when the trial began
    elif name != NATIVE and prediction is not None and name in prediction.ranked:
        gain = math.exp(prediction.log_gain(name))
    open_ = trial is not None and choice.source == "trial"
    said = "" if gain is None else f"predicted {times(gain)}"
    if measured is not None:
        timed = f"Measured {with_spread(measured.gain, measured.spread)} native's speed in {rounds(measured.rounds)}"
        parts = [timed + " so far" if open_ else timed, *([said] if said else [])]
        return ", ".join(parts) + (f"; {_told(choice, ' ')}." if choice.measured is not None else ".")
    if choice.source in TIMED:
        other = f"; this one was {said}" if said else ""
        return f"Timing has settled on {_told(choice)}{other}."
    if trial is not None and open_:
        if name == NATIVE:
            return "The candidates are being compared with it on the first calls."
        on = "It is on trial" if name in trial.live else "Others are on trial"
        if name in trial.priors and name not in trial.live:
            on = "It is out of the trial since its first calls"
        return f"{on}; this one is {said}." if said else f"{on}."
    if choice.source == "memory":
        return f"{choice.algorithm} was chosen before{f' ({said})' if said else ''}."
    if choice.source == "small":
        return "The convolution is so small that native runs at once."
    outcome = None if trial is None else trial.outcome
    if outcome is not None and outcome.cut_short and name != NATIVE:
        other = f"; this one was {said}" if said else ""
        return f"The trial could not tell ({outcome.reason}), and {choice.algorithm} runs{other}."
    if prediction is None:
        return "There is no model for this problem, so native runs."
    if name not in prediction.ranked:
        return "The model was trained before this algorithm existed."
    if name == NATIVE:
        return f"{choice.algorithm} is predicted to be {times(choice.predicted_gain)} as fast."
    if choice.algorithm == NATIVE and gain is not None and gain > 1:
        return f"Predicted {times(gain)} native's speed, under the margin for leaving native."
    return f"Predicted {times(gain)} native's speed; {choice.algorithm} {times(choice.predicted_gain or 1.0)}."


def _told(choice: Choice, between: str = ", measured ") -> str:
    """ "winograd4, measured 1.82x (1.75 to 1.90)"; without a measurement only its name."""
    found = choice.measured
    return choice.algorithm if found is None else f"{choice.algorithm}{between}{with_spread(found.gain, found.spread)}"


# ---- numbers ----------------------------------------------------------------------------------------------------


def times(value: float | None) -> str:
    """A ratio as text, "1.73x"; "" for None."""
    return "" if value is None else f"{value:.2f}x"


def with_spread(gain: float | None, spread: tuple[float, float] | None) -> str:
    """A measured ratio as text, "1.82x (1.75 to 1.90)"; without the brackets if the spread is not known."""
    return times(gain) if spread is None else f"{times(gain)} ({spread[0]:.2f} to {spread[1]:.2f})"


def rounds(number: int) -> str:
    """ "1 round", "5 rounds"."""
    return f"{number} round{'s' * (number != 1)}"
