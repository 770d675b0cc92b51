"""A problem's choice: out of this process's cache, the store or the model; or a trial that is to find one.

What eager calls and operators of compiled graphs have in common; nothing here runs a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convselect.base import timing
from convselect.base.lru import LRU, Entry, on_clear
from convselect.base.problem import ConvProblem, Direction
from convselect.base.settings import CACHE_ENTRIES, TIMING, Settings
from convselect.choice.choose import NATIVE, Choice, Prediction, Refused, choose, nominees
from convselect.choice.learnt import Corrected, is_settled
from convselect.choice.outcome import Measured, Outcome, Prior
from convselect.choice.trial import MIN_GAIN
from convselect.eager import batch, learning, log, measured
from convselect.eager.keeping import keep
from convselect.eager.live_trial import LiveTrial
from convselect.eager.trusted import trusted
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.store import process

Found = Choice | LiveTrial
_, _thread_ns = timing.SYSTEM_CLOCK


class _Chosen(Entry):
    """A cached choice, or the trial that is to find one."""

    __slots__ = ("found",)

    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found = found


choices = LRU(CACHE_ENTRIES)
on_clear(choices.clear)


def choice_for(problem: ConvProblem, settings: Settings) -> Choice:
    """The choice for one problem: out of the cache, or made now and cached. Never times anything."""
    found = found_for(problem, settings)
    return found.current if isinstance(found, LiveTrial) else found


def found_for(problem: ConvProblem, settings: Settings) -> Found:
    """As `choice_for`, but the trial itself if there is one."""
    return _cached((problem, settings)) or _resolve(problem, settings)


def eager_choice(problem: ConvProblem, settings: Settings) -> Found:
    """As `choice_for`, for calls that really run now and may be timed: under "measure" everything is timed before the
    first call; under "verify" the first calls decide."""
    found = _cached((problem, settings)) or _resolve(problem, settings)
    if isinstance(found, LiveTrial):
        return found.final or found
    if settings.policy != "measure" or settings.batch_invariant:
        return found
    if found.source not in ("measure", "store"):
        found = measured.measured(problem, settings) or found
        if log.logger.isEnabledFor(log.INFO):
            log.chosen(problem, found, settings, None)
    if found.source in ("measure", "store"):
        choices.put((problem, settings), _Chosen(found))
    return found


def _cached(key: tuple[ConvProblem, Settings]) -> Found | None:
    entry = choices.entries.get(key)
    if entry is None:
        return None
    entry.age = choices.clock
    return entry.found  # type: ignore[no-any-return]


def _resolve(problem: ConvProblem, settings: Settings) -> Found:
    """Make the choice and cache it. Under "measure" a choice without a measurement is a makeshift, and not cached."""
    key = (problem, settings)
    begun_ns = _thread_ns()
    per_image = settings.batch_invariant and problem.direction != Direction.BACKWARD_WEIGHT
    if per_image:
        problem = batch.single(problem)
    problem.derive()
    predictor = _Once(corrected=settings.policy in TIMING and not (problem.deterministic or settings.batch_invariant))
    stored = None if problem.deterministic else lambda p: _stored(p, settings)
    refused: Refused = {}
    choice = choose(problem, BY_NAME, settings, store=stored, predictor=predictor, refused=refused)
    if per_image:
        choice = replace(choice, per_image=settings)
    found = _on_trial(problem, settings, choice, predictor.said, refused, begun_ns) or choice
    if log.logger.isEnabledFor(log.INFO) and (settings.policy != "measure" or choice.source == "store"):
        log.chosen(problem, found, settings, predictor.said)
    raced = choices.entries.get(key)
    if raced is not None:  # by another thread, which may have begun a trial
        return raced.found  # type: ignore[no-any-return]
    if settings.policy != "measure" or per_image:
        choices.put(key, _Chosen(found))
    return found


class _Once:
    """The model, loaded only if it is asked; what it said about the one problem that it is asked about.

    Args:
        corrected: with what trials in this process and in earlier ones have taught.
    """

    def __init__(self, *, corrected: bool) -> None:
        self.said: Prediction | None = None
        self._corrected = corrected

    def predict(self, problem: ConvProblem) -> Prediction | None:
        predictor = loaded.get_for(problem)
        self.said = None if predictor is None else predictor.predict(problem)
        if self._corrected and self.said is not None:
            self.said = learning.corrected(self.said, problem)
        return self.said


FAVOURITE = math.log(1.3)
"""Predicted ln(t_native / t) from which an algorithm runs at once."""
PRIOR_SD = 0.3
"""Standard deviation of a prediction in a trial: what `learnt.Estimate.sd` is without residuals, or less."""


def _on_trial(
    problem: ConvProblem,
    settings: Settings,
    choice: Choice,
    prediction: Prediction | None,
    refused: Refused,
    begun_ns: int,
) -> Found | None:
    """The trial that checks this choice, or watches it; None if it needs neither; a choice if what was learnt makes a
    trial needless."""
    if settings.policy not in TIMING or problem.deterministic or settings.batch_invariant:
        return None
    candidates: dict[str, Prior] = {}
    favourite = None
    corrected = prediction if isinstance(prediction, Corrected) else None  # None: nothing was learnt yet
    if settings.policy == "verify" and choice.source != "store" and prediction is not None:
        names = nominees(problem, BY_NAME, settings, prediction, refused)
        settled = is_settled(names, corrected, MIN_GAIN) if names and corrected is not None else None
        if settled is not None and (settled == NATIVE or trusted(BY_NAME[settled], problem)):
            gain = 1.0 if settled == NATIVE else math.exp(prediction.log_gain(settled))
            choice, names = replace(choice, algorithm=settled, predicted_gain=gain, params=None), []
        if names and prediction.log_gain(names[0]) >= FAVOURITE and trusted(BY_NAME[names[0]], problem):
            favourite = names[0]
        for name in names:
            sd = PRIOR_SD if corrected is None else min(PRIOR_SD, corrected.estimate(name).sd)
            candidates[name] = Prior(prediction.log_gain(name), sd)
        if settled is not None and not names and (settled == NATIVE or not settings.audit):
            return choice
    if not candidates and not (settings.audit and choice.algorithm != NATIVE):
        return None
    predicted = {}
    if prediction is not None:
        model_says = prediction.log_gain if corrected is None else corrected.raw_log_gain
        predicted = {name: model_says(name) for name in candidates}
    keeper = _Keeper(problem, settings, predicted, loaded.identity(problem) if predicted else "")
    # A GPU's queue hides most of what the host does meanwhile, and its calls are short: few would have trials.
    plan_us = (_thread_ns() - begun_ns) / 1e3 if problem.device == "cpu" else 0.0
    trial = LiveTrial(
        problem, choice, candidates, favourite=favourite, plan_us=plan_us, audit=settings.audit, on_settled=keeper
    )
    keeper.trial = trial
    trial.store_result = not choice.memory_limited
    return trial


# ---- the store ------------------------------------------------------------------------------------------------------


def _stored(problem: ConvProblem, settings: Settings) -> Choice | None:
    """What an earlier process found out, if it was about the algorithm as it is today."""
    if process.is_off():
        return None
    decision = process.look_up(problem, settings.budgets)
    if decision is None or (settings.policy == "measure" and decision.source not in ("measure", "tune")):
        return None
    algorithm = BY_NAME.get(decision.algorithm)
    if algorithm is None or algorithm.revision != decision.revision:
        return None
    if decision.params is not None and not _params_still_valid(algorithm, problem, decision.params, settings):
        return None
    native = decision.algorithm == NATIVE
    # SQLite keeps any type in any column.
    known = isinstance(decision.gain, int | float) and decision.gain > 0 and isinstance(decision.samples, int)
    measured = Measured(decision.samples, decision.gain) if known and not native else None  # type: ignore[arg-type]
    return Choice(decision.algorithm, "store", decision.params, 1.0 if native else None, measured=measured)


def _params_still_valid(
    algorithm: Algorithm, problem: ConvProblem, params: Mapping[str, Any], settings: Settings
) -> bool:
    """Whether these are still values that the algorithm's parameters may have, within the memory that is allowed: tuned
    ones outlive what was tuned."""
    if algorithm.why_not(problem) is not None:
        return False
    space = algorithm.space(problem)
    if space is None or not space.is_valid(problem, params):
        return False
    return algorithm.workspace_bytes(problem, params) <= settings.workspace_bytes


def params_of(name: str, problem: ConvProblem, settings: Settings) -> Mapping[str, Any] | None:
    """Parameters of an algorithm that a graph names: those it was tuned with on this machine; None for its default."""
    if not settings.chooses or settings.batch_invariant:
        return None
    stored = None if problem.deterministic else _stored(problem, settings)
    return stored.params if stored is not None and stored.algorithm == name else None


class _Keeper:
    """Logs what a trial found, learns from it, and writes it to the store unless it holds for the moment only."""

    def __init__(self, problem: ConvProblem, settings: Settings, predicted: Mapping[str, float], model: str) -> None:
        self._problem, self._settings = problem, settings
        self._predicted, self._model = predicted, model  # not asked for again: it may have been unloaded meanwhile
        self.trial: LiveTrial | None = None
        self._learnt = False

    def __call__(self, choice: Choice, outcome: Outcome, store_result: bool) -> None:
        log.settled(self._problem, choice, outcome)
        if store_result:
            keep(self._problem, self._settings, choice, outcome.rounds)
        if self.trial is not None and not self._learnt and self._predicted:
            self._learnt = True
            trial = self.trial
            learning.learn(
                self._problem, trial.trial, outcome.measured, self._predicted, self._model, keep=trial.store_result
            )


__all__ = ["Found", "choice_for", "choices", "eager_choice", "found_for", "params_of"]
