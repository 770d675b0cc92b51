"""Choices and their execution: what eager calls and compiled graphs have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from convselect.aten.strides import with_strides
from convselect.choice.choose import NATIVE, Choice, Prediction, choose, nominees
from convselect.choice.trial import Outcome
from convselect.eager import batch, live_trial, log, measured
from convselect.eager.live_trial import OnTrial, is_out_of_memory
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME
from convselect.lru import LRU, Entry, on_clear
from convselect.model import loaded
from convselect.problem import ConvProblem, Direction
from convselect.settings import CACHE_ENTRIES, TIMING, Settings
from convselect.store import process
from convselect.warnings import warn_once

_any_autocast: Any = torch._C._is_any_autocast_enabled


class _Chosen(Entry):
    """A remembered choice, or a trial that is to find one."""

    __slots__ = ("choice",)

    def __init__(self, choice: Choice | OnTrial) -> None:
        super().__init__()
        self.choice = choice


choices = LRU(CACHE_ENTRIES)
on_clear(choices.clear)


def choice_for(problem: ConvProblem, settings: Settings) -> Choice:
    """The choice for one problem: out of memory, or made now and remembered. Never times anything."""
    found = _entry_for(problem, settings)
    if isinstance(found, OnTrial):
        return found.choice or found.provisional
    return found


def eager_choice(problem: ConvProblem, settings: Settings) -> Choice | OnTrial:
    """As `choice_for`, for calls that really run now and may be timed: under "measure" everything is, before the first;
    under "verify" the first calls decide."""
    found = _entry_for(problem, settings)
    if isinstance(found, OnTrial):
        return found.final or found
    if settings.policy == "measure" and not settings.batch_invariant:
        if found.source not in ("measure", "store"):
            found = measured.measured(problem, settings) or found
            log.chosen(problem, found, settings)
        if found.source in ("measure", "store"):
            choices.put((problem, settings), _Chosen(found))
    return found


def _entry_for(problem: ConvProblem, settings: Settings) -> Choice | OnTrial:
    key = (problem, settings)
    entry = choices.entries.get(key)
    if entry is not None:
        entry.age = choices.clock
        return entry.choice  # type: ignore[no-any-return]
    alone = settings.batch_invariant and problem.direction != Direction.BACKWARD_WEIGHT
    if alone:
        problem = batch.single(problem)
    prediction: Prediction | None = None
    if settings.chooses:
        predictor = loaded.get_for(problem)
        prediction = None if predictor is None else predictor.predict(problem)
    choice = choose(
        problem,
        BY_NAME,
        settings,
        store=None if problem.deterministic else lambda p: _stored(p, settings),
        predictor=None if prediction is None else _Said(prediction),
    )
    if alone:
        choice = replace(choice, alone=settings)
    if settings.policy != "measure" or choice.source == "store":
        log.chosen(problem, choice, settings)
    found: Choice | OnTrial = choice
    if settings.policy in TIMING and not (problem.deterministic or settings.batch_invariant):
        candidates: list[str] = []
        if settings.policy == "verify" and choice.source != "store" and prediction is not None:
            candidates = nominees(problem, BY_NAME, settings, prediction)
        if candidates or (settings.audit and choice.algorithm != NATIVE):
            found = OnTrial(
                problem, choice, candidates, audit=settings.audit, on_settled=_Keeper(problem, settings)
            )  # fmt: skip
            found.lasting = not choice.passing
    already = choices.entries.get(key)
    if already is not None:  # by another thread, which may have begun a trial
        return already.choice  # type: ignore[no-any-return]
    if settings.policy != "measure" or alone:  # otherwise what is chosen without measuring is a makeshift there
        choices.put(key, _Chosen(found))
    return found


class _Said:
    """A predictor that has been asked already."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction

    def predict(self, problem: ConvProblem) -> Prediction:
        return self._prediction


def _stored(problem: ConvProblem, settings: Settings) -> Choice | None:
    """What an earlier process found out, if it was about the algorithm as it is today."""
    decision = process.look_up(problem, settings.budgets)
    if decision is None or (settings.policy == "measure" and decision.source not in ("measure", "tune")):
        return None
    algorithm = BY_NAME.get(decision.algorithm)
    if algorithm is None or algorithm.revision != decision.revision:
        return None
    if decision.params is not None and not _may_be(algorithm, problem, decision.params, settings):
        return None
    return Choice(decision.algorithm, "store", decision.params, decision.gain)


def _may_be(algorithm: Algorithm, problem: ConvProblem, params: Mapping[str, Any], settings: Settings) -> bool:
    """Whether these are still values that the algorithm's parameters may have, within the memory that is allowed: tuned
    ones outlive what was tuned."""
    if algorithm.why_not(problem) is not None:
        return False
    space = algorithm.space(problem)
    if space is None or not space.is_valid(problem, params):
        return False
    return algorithm.workspace_bytes(problem, params) <= settings.workspace_bytes


def params_of(name: str, problem: ConvProblem, settings: Settings) -> Mapping[str, Any] | None:
    """Parameters of an algorithm that a graph names: those it was tuned with on this machine; None: its default."""
    if not settings.chooses or settings.batch_invariant:
        return None
    stored = None if problem.deterministic else _stored(problem, settings)
    return stored.params if stored is not None and stored.algorithm == name else None


class _Keeper:
    """Keeps what a trial found: in memory, and on disk unless it was for the moment only."""

    def __init__(self, problem: ConvProblem, settings: Settings) -> None:
        self._problem, self._settings = problem, settings

    def __call__(self, choice: Choice, outcome: Outcome, lasting: bool) -> None:
        log.settled(self._problem, outcome.algorithm, outcome.gain, outcome.rounds, outcome.reason)
        if lasting:
            live_trial.keep(self._problem, self._settings, choice, outcome.rounds)


def without_autocast(function: Any, *arguments: Any) -> Any:
    """Algorithms compute in the dtype they are given; inside a backward under autocast ATen would cast again."""
    if not _any_autocast():
        return function(*arguments)
    device = next(a.device.type for a in arguments if isinstance(a, Tensor))
    with torch.autocast(device, enabled=False):
        return function(*arguments)


def execute(
    choice: Choice | OnTrial,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    strides: tuple[int, ...],
    bias: Tensor | None = None,
) -> Tensor:
    """Run the chosen algorithm on its operands. The automatic choice falls back to native; a forced one raises."""
    loaded.tick()
    if isinstance(choice, OnTrial):
        given = choice

        def run(name: str) -> Tensor | None:
            found = without_autocast(BY_NAME[name].run_checked, a, b, problem, given.params_of(name), bias)
            return None if found is None else with_strides(found, strides)

        return choice.run(run, a.device)
    settings = choice.alone
    if settings is not None:
        alone = batch.run(
            lambda one: choice_for(one, settings), _attempt, _native, a, b, problem, strides, bias, settings
        )
        return with_strides(alone, strides)
    result = _attempt(choice, a, b, problem, bias)
    if result is None:
        # It is still being compiled, or failed; or a transform turned one NaN or infinity into a tile or an image of
        # them, and native keeps them where they belong.
        result = _native(a, b, problem, bias)
    return with_strides(result, strides)


def _native(a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor:
    return without_autocast(BY_NAME[NATIVE].run_checked, a, b, problem, None, bias)  # type: ignore[no-any-return]


def _attempt(choice: Choice, a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor | None:
    """The chosen algorithm's result; None where it has to be left to native. A forced one raises what it raises."""
    algorithm = BY_NAME[choice.algorithm]
    forced = choice.source == "forced"
    failing = bool(failures) and not forced
    if failing and _rests(algorithm.name, problem):
        return None
    try:
        if not forced and algorithm.may_be_unready and not algorithm.ready(problem, choice.params):
            return None
        result: Tensor | None = without_autocast(algorithm.run_checked, a, b, problem, choice.params, bias)
    except Exception as error:
        if forced or algorithm.name == NATIVE:
            raise
        _failed(algorithm.name, problem, error)
        return None
    if failing:
        failures.pop((algorithm.name, problem), None)
    return result


# ---- failures -------------------------------------------------------------------------------------------------------

FAILURES_IN_A_ROW = 3
"""After so many on one problem an algorithm rests there: an exception per call is no way to run native."""
REST_CALLS = 256
"""For so many calls. Then it is tried again: a want of memory passes."""
_MOST_FAILING = 1024

# (algorithm, problem) -> [failures in a row, calls left to rest]. Empty where nothing goes wrong, and then it costs
# nothing. No lock, which a fork might find taken: threads that meet here lose a count at most.
failures: dict[tuple[str, ConvProblem], list[int]] = {}
on_clear(failures.clear)


def _rests(name: str, problem: ConvProblem) -> bool:
    entry = failures.get((name, problem))
    if entry is None or entry[1] <= 0:
        return False
    entry[1] -= 1
    return True


def _failed(name: str, problem: ConvProblem, error: Exception) -> None:
    if len(failures) >= _MOST_FAILING:
        failures.clear()
    entry = failures.setdefault((name, problem), [0, 0])
    entry[0] += 1
    if entry[0] >= FAILURES_IN_A_ROW:
        entry[1] = REST_CALLS
    if is_out_of_memory(error):
        topic, what = f"memory:{name}", f"{name} found too little memory for"
    else:
        topic, what = f"failed:{name}", f"{name} failed on"
    warn_once(topic, f"convselect: {what} {problem} ({error!r}); native runs instead.")
