"""problem -> Choice. Pure: candidates, memory, store and predictor come in as arguments, so that a recorded tape of
measurements can be replayed through exactly this code."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from convselect.kernels._contract import Algorithm, Grade, NotApplicable
from convselect.machine import memory as machine_memory
from convselect.problem import ConvProblem, Direction
from convselect.settings import CHOOSING, Settings
from convselect.warnings import warn_once

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
ASKED_FROM_BYTES = 16 * 2**20
"""Workspaces up to this size are had from anywhere: how much memory is free is asked (50 us) only for larger ones."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One algorithm for one problem, and where it came from.

    Attributes:
        source: "forced", "memory", "store", "model", "fallback", or "verify" or "measure", which found it out here.
        predicted_gain: how many times faster than native the model expects this to be, or calls have shown it to be;
            1.0 for native, None where neither was asked.
        probability: the model's probability for this algorithm; None unless the model was asked.
        passing: whether something ranked higher was left out only because too little memory was free. That may pass,
            so such a choice is not for keeping.
        alone: the settings, where they ask that each image of a batch is computed as if it were alone.
    """

    algorithm: str
    source: str
    params: Mapping[str, Any] | None = field(default=None, hash=False)
    predicted_gain: float | None = None
    probability: float | None = None
    passing: bool = False
    alone: Settings | None = None


class Prediction(Protocol):
    """What a predictor says about one problem. `ranked` has every name it knows, best first; native is kept unless the
    predicted ln(t_native / t) is above `margin`."""

    ranked: Sequence[str]
    margin: float

    def log_gain(self, name: str) -> float: ...
    def probability(self, name: str) -> float: ...


class Predictor(Protocol):
    def predict(self, problem: ConvProblem) -> Prediction | None: ...


class Shortage(str):
    """A refusal for want of free memory: the next one may be none."""

    __slots__ = ()


def refusal(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> str | None:
    """Why this algorithm may not be chosen automatically here: not applicable, disabled, not deterministic, too
    imprecise, too much memory. A `Shortage` where only the memory that is free just now is too little."""
    if not algorithm.automatic:
        return "it runs only when asked for by name"
    reason = algorithm.why_not(problem) or algorithm.same_as_native(problem)
    return over_budget(algorithm, problem, settings) if reason is None else reason


def over_budget(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> str | None:
    """Which budget does not admit this algorithm, that applies: as a sentence, None where all do. Native is always
    admitted."""
    if algorithm.name == NATIVE:
        return None
    if is_disabled(algorithm.name, settings.disabled):
        return "it is disabled (CONVSELECT_DISABLE or use(disable=...))"
    if problem.deterministic and not algorithm.deterministic(problem):
        return "its results may differ from run to run, and deterministic ones are asked for"
    if settings.batch_invariant and problem.device != "cpu" and algorithm.may_be_unready:
        return "native runs until it is ready, so results would not be those of an image alone"
    grade = algorithm.error_grade(problem)
    if grade > GRADE_OF_PRECISION[settings.precision]:
        return f"its error grade {grade.name} is over the precision budget {settings.precision!r}"
    needed = algorithm.workspace_bytes(problem)
    if needed > settings.workspace_bytes:
        return f"it needs {_mib(needed)} of workspace and {_mib(settings.workspace_bytes)} are allowed"
    return _shortage(needed, problem.device, settings) if needed > ASKED_FROM_BYTES else None


def _shortage(needed: int, device: str, settings: Settings) -> str | None:
    share = settings.workspace_share
    if settings.batch_invariant:
        # What is free differs from call to call: choices would, too. What there is does not.
        total = machine_memory.total_bytes(device)
        if total is None or needed <= share * total:
            return None
        return f"it needs {_mib(needed)} of workspace and {share:.0%} of all {_mib(total)} are allowed"
    free = machine_memory.free_bytes(device)
    if free is None or needed <= share * free:
        return None
    return Shortage(
        f"it needs {_mib(needed)} of workspace and {share:.0%} of the {_mib(free)} that are free are allowed"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


@functools.lru_cache(maxsize=1024)
def is_disabled(name: str, disabled: tuple[str, ...]) -> bool:
    """Whether an algorithm is switched off: by its name, or by a beginning that ends where a number or another word
    begins ("winograd" all of winograd2 to winograd7, "fft" fft and fft_tiled). Native never is."""
    return name != NATIVE and any(
        name == start or (name.startswith(start) and (name[len(start)] == "_" or name[len(start)].isdigit()))
        for start in disabled
    )


@functools.lru_cache(maxsize=256)
def check_disabled(disabled: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Warn, once, of what is to be disabled and is no algorithm, with the names nearest to it."""
    wrong = []
    families = {name.rstrip("0123456789") for name in names}
    for start in disabled:
        if start == NATIVE:
            wrong.append("native cannot be disabled")
        elif not any(is_disabled(name, (start,)) for name in names):
            near = difflib.get_close_matches(start, sorted({*names, *families} - {NATIVE}), 3, 0.5)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            wrong.append(f"there is no algorithm {start!r}{hint}")
    if wrong:
        warn_once(
            f"disable:{','.join(disabled)}",
            f"convselect: of what CONVSELECT_DISABLE or disable= names: {'; '.join(wrong)}.",
        )


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

    Masking comes after ranking: the model ranks all names it knows; those that are unknown here, do not apply, are
    disabled or over a budget are dropped; the first that is left is taken if its predicted gain over native exceeds the
    prediction's margin. A policy that names an algorithm is obeyed whatever is disabled and whatever the budgets say.

    Args:
        algorithms: name -> algorithm; must hold "native".
        memory, store: look-ups that return an earlier choice for this very problem, or None.

    Raises:
        ValueError, NotApplicable: as `forced` does.
    """
    if not settings.chooses:
        return forced(problem, settings.policy, algorithms)
    if settings.disabled:
        check_disabled(settings.disabled, tuple(algorithms))
    passing = False
    for look_up in (memory, store):
        found = look_up(problem) if look_up is not None else None
        # A remembered choice may name an algorithm that has gone, or that today's budgets do not admit.
        if found is not None and found.algorithm in algorithms:
            reason = refusal(algorithms[found.algorithm], problem, settings)
            if reason is None:
                return found
            passing = passing or isinstance(reason, Shortage)
    prediction = predictor.predict(problem) if predictor is not None else None
    if predictor is None or prediction is None:
        return Choice(NATIVE, "fallback", passing=passing)
    for name in prediction.ranked:
        if name == NATIVE:
            break
        algorithm = algorithms.get(name)
        if algorithm is None:
            continue
        log_gain = prediction.log_gain(name)
        if log_gain <= prediction.margin:
            break  # ranked: nothing after this gains more
        reason = refusal(algorithm, problem, settings)
        if reason is None:
            return Choice(name, "model", None, math.exp(log_gain), prediction.probability(name), passing)
        passing = passing or isinstance(reason, Shortage)
    return Choice(NATIVE, "model", None, 1.0, prediction.probability(NATIVE), passing)


def nominees(
    problem: ConvProblem, algorithms: Mapping[str, Algorithm], settings: Settings, prediction: Prediction
) -> list[str]:
    """The algorithms that are worth a trial against native, best predicted first: at most `NOMINATED`, near the best.

    The margin does not count here: it guards against predictions that nobody checks.
    """
    found: list[str] = []
    least = NOMINATION_LEAST
    for name in prediction.ranked:
        log_gain = prediction.log_gain(name)
        if log_gain < least or len(found) == NOMINATED:
            break  # ranked: and asking the rest whether they apply would cost more than the prediction did
        if name != NATIVE and name in algorithms and refusal(algorithms[name], problem, settings) is None:
            least = max(least, log_gain - NOMINATION_GAP) if not found else least
            found.append(name)
    return found
