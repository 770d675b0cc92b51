"""Why each of the other algorithms was not taken: sentences for `explain`, the log and `bench`."""

from __future__ import annotations

import math

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE, Choice, Prediction
from convselect.kernels.pool import ALL

SHOWN = ("verify", "measure", "store")
"""Sources of choices that were made by timing."""


def reasons(problem: ConvProblem, choice: Choice, used: Settings, prediction: Prediction | None) -> dict[str, str]:
    """Name -> one sentence, for every algorithm of the pool but the one that was chosen."""
    found: dict[str, str] = {}
    for algorithm in ALL:
        name = algorithm.name
        if name == choice.algorithm:
            continue
        reason = refusal(algorithm, problem, used)
        if reason is None and choice.source == "forced":
            reason = f"{choice.algorithm} was asked for by name."
        if reason is None:
            reason = _by_source(name, choice, prediction)
        found[name] = reason
    return found


def _by_source(name: str, choice: Choice, prediction: Prediction | None) -> str:
    if choice.source in SHOWN:
        return f"Timing has settled on {choice.algorithm}{_predicted(name, prediction)}."
    if choice.source == "trial":
        return f"The first calls are being timed{_predicted(name, prediction)}."
    if choice.source == "memory":
        return f"{choice.algorithm} was chosen before{_predicted(name, prediction)}."
    if choice.source == "small":
        return "The convolution is so small that native runs at once."
    if prediction is None:
        return "There is no model for this problem, so native runs."
    if name not in prediction.ranked:
        return "The model was trained before this algorithm existed."
    if name == NATIVE:
        return f"{choice.algorithm} is predicted to be {times(choice.predicted_gain)} as fast."
    gain = math.exp(prediction.log_gain(name))
    if choice.algorithm == NATIVE and gain > 1:
        return f"Predicted {times(gain)} native's speed, under the margin for leaving native."
    return f"Predicted {times(gain)} native's speed; {choice.algorithm} {times(choice.predicted_gain or 1.0)}."


def _predicted(name: str, prediction: Prediction | None) -> str:
    if name == NATIVE or prediction is None or name not in prediction.ranked:
        return ""
    return f" (predicted {times(math.exp(prediction.log_gain(name)))} native's speed)"


def times(value: float | None) -> str:
    """A ratio as text, "1.73x"; "" for None."""
    return "" if value is None else f"{value:.2f}x"
