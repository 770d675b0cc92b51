"""problem -> Choice. Pure: candidates, memory, store and predictor come in as arguments, so that a recorded tape of
measurements can be replayed through exactly this code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from convselect.kernels._contract import Algorithm, Grade, NotApplicable
from convselect.problem import ConvProblem, Direction
from convselect.settings import CHOOSING, Settings

GRADE_OF_PRECISION = {"exact": Grade.DIRECT, "native": Grade.CLOSE, "fast": Grade.LOOSE}
NATIVE = "native"
PLAN_COST_US = {Direction.FORWARD: 25.0, Direction.BACKWARD_DATA: 60.0, Direction.BACKWARD_WEIGHT: 60.0}
"""What running through a plan costs beyond the algorithm itself: `python -m benchmarks.overhead` prints it. It is what
decides on tiny problems."""
NOMINATED = 3
"""Candidates of a trial, besides native."""
NOMINATION_GAP = math.log(1.3)
"""How much slower than the best an algorithm may be predicted to be and still be a candidate."""
NOMINATION_LEAST = -0.15
"""Least predicted ln(t_native / t) of a candidate."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One algorithm for one problem, and where it came from.

    Attributes:
        source: "forced", "memory", "store", "model", "fallback", or "verify" or "measure", which found it out here.
        predicted_gain: how many times faster than native the model expects this to be, or calls have shown it to be;
            1.0 for native, None where neither was asked.
        probability: the model's probability for this algorithm; None unless the model was asked.
    """

    algorithm: str
    source: str
    params: Mapping[str, Any] | None = field(default=None, hash=False)
    predicted_gain: float | None = None
    probability: float | None = None


class Prediction(Protocol):
    """What a predictor says about one problem. `ranked` has every name it knows, best first; native is kept unless the
    predicted ln(t_native / t) is above `margin`."""

    ranked: Sequence[str]
    margin: float

    def log_gain(self, name: str) -> float: ...
    def probability(self, name: str) -> float: ...


class Predictor(Protocol):
    def predict(self, problem: ConvProblem) -> Prediction | None: ...


def refusal(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> str | None:
    """Why this algorithm may not be chosen automatically here: not applicable, too imprecise, too much memory."""
    if not algorithm.automatic:
        return "it runs only when asked for by name"
    reason = algorithm.why_not(problem) or algorithm.same_as_native(problem)
    if reason is not None:
        return reason
    grade = algorithm.error_grade(problem)
    if grade > GRADE_OF_PRECISION[settings.precision]:
        return f"its error grade {grade.name} is over the precision budget {settings.precision!r}"
    if algorithm.name != NATIVE and (needed := algorithm.workspace_bytes(problem)) > settings.workspace_bytes:
        return f"it needs {needed / 2**20:.0f} MiB of workspace and {settings.workspace_bytes / 2**20:.0f} are allowed"
    return None


def forced(problem: ConvProblem, name: str, algorithms: Mapping[str, Algorithm]) -> Choice:
    """The algorithm of this name, or an error.

    Raises:
        ValueError: no algorithm has this name.
        NotApplicable: it cannot do this problem; the message is its `why_not` sentence.
    """
    algorithm = algorithms.get(name)
    if algorithm is None:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join((*CHOOSING, *sorted(algorithms)))}")
    reason = algorithm.why_not(problem)
    if reason is not None:
        raise NotApplicable(f"{name} cannot do this convolution: {reason} ({problem})")
    return Choice(name, "forced")


def choose(
    problem: ConvProblem,
    algorithms: Mapping[str, Algorithm],
    settings: Settings,
    *,
    memory: Callable[[ConvProblem], Choice | None] | None = None,
    store: Callable[[ConvProblem], Choice | None] | None = None,
    predictor: Predictor | None = None,
) -> Choice:
    """Forced > memory > store > model (confident, within budgets) > native.

    Masking comes after ranking: the model ranks all names it knows; those that are unknown here, do not apply or are
    over a budget are dropped; the first that is left is taken if its predicted gain over native exceeds the
    prediction's margin.

    Args:
        algorithms: name -> algorithm; must hold "native".
        memory, store: look-ups that return an earlier choice for this very problem, or None.

    Raises:
        ValueError, NotApplicable: as `forced` does.
    """
    if not settings.chooses:
        return forced(problem, settings.policy, algorithms)
    for look_up in (memory, store):
        if look_up is not None:
            found = look_up(problem)
            if found is not None and _still_allowed(found, problem, algorithms, settings):
                return found
    prediction = predictor.predict(problem) if predictor is not None else None
    if predictor is None or prediction is None:
        return Choice(NATIVE, "fallback")
    for name in prediction.ranked:
        if name == NATIVE:
            break
        algorithm = algorithms.get(name)
        if algorithm is None:
            continue
        log_gain = prediction.log_gain(name)
        if log_gain <= prediction.margin:
            break  # ranked: nothing after this gains more
        if refusal(algorithm, problem, settings) is None:
            return Choice(name, "model", None, math.exp(log_gain), prediction.probability(name))
    return Choice(NATIVE, "model", None, 1.0, prediction.probability(NATIVE))


def nominees(
    problem: ConvProblem, algorithms: Mapping[str, Algorithm], settings: Settings, prediction: Prediction
) -> list[str]:
    """The algorithms that are worth a trial against native, best predicted first: at most `NOMINATED`, near the best.

    The margin does not count here: it guards against predictions that nobody checks.
    """
    allowed = [
        (name, prediction.log_gain(name))
        for name in prediction.ranked
        if name != NATIVE and name in algorithms and refusal(algorithms[name], problem, settings) is None
    ]
    best = max((log_gain for _, log_gain in allowed), default=0.0)
    least = max(best - NOMINATION_GAP, NOMINATION_LEAST)
    return [name for name, log_gain in allowed if log_gain >= least][:NOMINATED]


def _still_allowed(
    choice: Choice, problem: ConvProblem, algorithms: Mapping[str, Algorithm], settings: Settings
) -> bool:
    """A remembered choice may name an algorithm that has gone, or that today's budgets do not admit."""
    algorithm = algorithms.get(choice.algorithm)
    return algorithm is not None and refusal(algorithm, problem, settings) is None
