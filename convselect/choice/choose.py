"""Choose an algorithm for a problem. Pure functions: candidates, store and predictor are arguments, so that recorded
measurements can be replayed through exactly this code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from convselect.base.problem import ConvProblem, Direction
from convselect.base.settings import CHOOSING, TIMING, Settings
from convselect.choice.budgets import NATIVE as NATIVE
from convselect.choice.budgets import OVERSIZED, Shortage, check_disabled, refusal
from convselect.choice.outcome import Measured
from convselect.kernels._contract import Algorithm, NotApplicable
from convselect.kernels.pool import BY_NAME

TIMED = ("verify", "measure", "store")
"""Sources of choices that were made by timing, in this process or an earlier one."""
NOMINATED = 3
"""Candidates of a trial, besides native."""
NOMINATION_GAP = math.log(1.3)
"""How much slower than the best an algorithm may be predicted to be and still be a candidate."""
NOMINATION_LEAST = -0.1
"""Least predicted ln(t_native / t) of a candidate."""


Refused = dict[str, str | None]
"""Algorithm -> why it may not be chosen for the problem at hand; None if it may."""
SMALL_PRODUCT_FLOPS = 3e5
"""Native takes 10 to 25 us for 1x1 convolutions up to here. Problems below 30 us never gained anything: 0 of 500."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One algorithm for one problem, and the source of this choice.

    Attributes:
        source: "forced", "memory" (a graph names it), "store", "small", "model", "fallback", "verify" or "measure"
            (timed in this process), or "trial" (being timed; only to tell people of it).
        predicted_gain: speed relative to native, as the model predicts, with what was learnt since; 1.0 for native;
            None if the model was not asked.
        measured: what timed calls have shown of it: number, median and spread of the speed relative to native; None if
            nothing was timed, and for native.
        memory_limited: whether something ranked higher was left out only because too little memory was free. That is
            usually temporary, so such a choice is not stored.
        per_image: the settings, if under them each image of a batch is computed as if it were alone; None otherwise.
    """

    algorithm: str
    source: str
    params: Mapping[str, Any] | None = field(default=None, hash=False)
    predicted_gain: float | None = None
    memory_limited: bool = False
    per_image: Settings | None = None
    measured: Measured | None = None

    @property
    def gain(self) -> float | None:
        """Speed relative to native: as measured, else as predicted; 1.0 for native. For thresholds: people are told the
        one or the other by its name."""
        return self.predicted_gain if self.measured is None else self.measured.gain

    @property
    def measured_gain(self) -> float | None:
        """Speed relative to native in timed calls; 1.0 for native if timing has settled on it; None if nothing was
        timed."""
        if self.measured is not None:
            return self.measured.gain
        return 1.0 if self.algorithm == NATIVE and self.source in TIMED else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """(p20, p80) of the measured gain; None if they are not known."""
        return None if self.measured is None else self.measured.spread


class Prediction(Protocol):
    """A predictor's result for one problem. `ranked` has every name it knows, best first; native is kept unless the
    predicted ln(t_native / t) of an algorithm is above its `margin_of`."""

    ranked: Sequence[str]

    def margin_of(self, name: str) -> float: ...
    def log_gain(self, name: str) -> float: ...
    def probability(self, name: str) -> float: ...


class Predictor(Protocol):
    def predict(self, problem: ConvProblem) -> Prediction | None: ...


def forced(problem: ConvProblem, name: str, algorithms: Mapping[str, Algorithm]) -> Choice:
    """The algorithm of this name, or an error.

    Raises:
        ValueError: if no algorithm has this name.
        NotApplicable: if it cannot do this problem; the message is its `why_not` sentence.
    """
    algorithm = algorithms.get(name)
    if algorithm is None:
        raise _unknown(name, algorithms)
    reason = OVERSIZED if problem.is_oversized and name != NATIVE else algorithm.why_not(problem)
    if reason is not None:
        raise NotApplicable(f"{name} cannot do this convolution: {reason} ({problem})")
    return Choice(name, "forced")


def _unknown(policy: str, algorithms: Mapping[str, Algorithm]) -> ValueError:
    return ValueError(f"unknown policy {policy!r}; known are {', '.join((*CHOOSING, *sorted(algorithms)))}")


def check_policy(policy: str) -> None:
    """Raises ValueError if `policy` is neither a policy that chooses nor the name of an algorithm."""
    if policy not in CHOOSING and policy not in BY_NAME:
        raise _unknown(policy, BY_NAME)


def choose(
    problem: ConvProblem,
    algorithms: Mapping[str, Algorithm],
    settings: Settings,
    *,
    store: Callable[[ConvProblem], Choice | None] | None = None,
    predictor: Predictor | None = None,
    refused: Refused | None = None,
) -> Choice:
    """Forced > store > model (confident, within budgets) > native. (This process's own cache is asked before.)

    Masking comes after ranking: the model ranks all names it knows; those that are unknown here, do not apply, are
    disabled or over a budget are dropped, and so are those whose predicted gain over native does not exceed their
    margin; the first that is left is taken. A policy that names an algorithm overrides disabled algorithms and budgets.

    Args:
        algorithms: name -> algorithm; must hold "native".
        store: returns an earlier process's choice for exactly this problem, or None.
        predictor: the model; None if there is none.
        refused: filled in, for `nominees`.

    Raises:
        ValueError, NotApplicable: as `forced` does.
    """
    if not settings.chooses:
        return forced(problem, settings.policy, algorithms)
    if problem.is_oversized:
        return Choice(NATIVE, "fallback")
    if settings.disabled:
        check_disabled(settings.disabled, tuple(algorithms))
    memory_limited = False
    found = store(problem) if store is not None else None
    # A stored choice may name an algorithm that no longer exists, or that the current budgets do not admit.
    if found is not None and found.algorithm in algorithms:
        reason = refusal(algorithms[found.algorithm], problem, settings)
        if reason is None:
            return found
        memory_limited = isinstance(reason, Shortage)
    if settings.policy in TIMING and is_small_product(problem):
        return Choice(NATIVE, "small", predicted_gain=1.0)
    prediction = predictor.predict(problem) if predictor is not None else None
    if predictor is None or prediction is None:
        return Choice(NATIVE, "fallback", memory_limited=memory_limited)
    for name in prediction.ranked:
        if name == NATIVE:
            break
        algorithm = algorithms.get(name)
        if algorithm is None:
            continue
        log_gain = prediction.log_gain(name)
        if log_gain <= prediction.margin_of(name):
            continue  # the next may have a lower margin
        reason = refusal(algorithm, problem, settings)
        if refused is not None:
            refused[name] = reason
        if reason is None:
            return Choice(name, "model", None, math.exp(log_gain), memory_limited)
        memory_limited = memory_limited or isinstance(reason, Shortage)
    return Choice(NATIVE, "model", None, 1.0, memory_limited)


def is_small_product(problem: ConvProblem) -> bool:
    """Whether this is a matrix product of a few microseconds on one thread: asking for a prediction would take longer
    than leaving native could save in a hundred calls. Squeeze-and-excitation layers are full of them."""
    p = problem
    return (
        p.R == p.S == p.groups == p.stride_h == p.stride_w == p.threads == 1
        and p.device == "cpu"
        and p.dtype == "float32"
        and p.direction == Direction.FORWARD
        and not any(p.padding)
        and 2 * p.N * p.C * p.D * p.H * p.W * p.K <= SMALL_PRODUCT_FLOPS
        and p.is_pointwise  # of a volume, too
    )


def nominees(
    problem: ConvProblem,
    algorithms: Mapping[str, Algorithm],
    settings: Settings,
    prediction: Prediction,
    refused: Refused | None = None,
) -> list[str]:
    """The algorithms that are worth a trial against native, best predicted first: at most `NOMINATED`, near the best.

    The margin does not count here: it guards against predictions that are not checked by timing.

    Args:
        refused: what is known already.
    """
    found: list[str] = []
    refused = refused or {}
    least = NOMINATION_LEAST
    for name in prediction.ranked:
        log_gain = prediction.log_gain(name)
        if log_gain < least or len(found) == NOMINATED:
            break  # ranked; checking whether the others apply would cost more than the prediction did
        if name == NATIVE or name not in algorithms:
            continue
        reason = refused[name] if name in refused else refusal(algorithms[name], problem, settings)
        if reason is None:
            least = max(least, log_gain - NOMINATION_GAP) if not found else least
            found.append(name)
    return found
