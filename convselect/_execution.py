"""Choices and their execution: what eager calls and compiled graphs have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect import _log, _measure, _predictor, _remembered, _verify
from convselect._aten_strides import with_strides
from convselect._lru import LRU, Entry
from convselect._verify import OnTrial
from convselect._warnings import warn_once
from convselect.choose import NATIVE, Choice, Prediction, choose, nominees
from convselect.kernels import BY_NAME
from convselect.problem import ConvProblem
from convselect.settings import CACHE_ENTRIES, Settings
from convselect.trial import Outcome

TIMING = ("verify", "measure")
"""Policies under which calls are timed."""
_any_autocast: Any = torch._C._is_any_autocast_enabled


class _Chosen(Entry):
    """A remembered choice, or a trial that is to find one."""

    __slots__ = ("choice",)

    def __init__(self, choice: Choice | OnTrial) -> None:
        super().__init__()
        self.choice = choice


choices = LRU(CACHE_ENTRIES)


def choice_for(problem: ConvProblem, settings: Settings) -> Choice:
    """The choice for one problem: out of memory, or made now and remembered. Never times anything."""
    found = _entry_for(problem, settings)
    if isinstance(found, OnTrial):
        return found.choice or found.provisional
    return found


def eager_choice(problem: ConvProblem, settings: Settings) -> Choice | OnTrial:
    """As `choice_for`, for calls that really run now and may be timed: under "measure" everything is, before the first;
    under "verify" the first calls decide."""
    if settings.policy == "measure" and (problem, settings) not in choices.entries:
        measured = _measure.measured(problem, settings)
        if measured is not None:
            _keep(problem, settings, measured)
    found = _entry_for(problem, settings)
    if isinstance(found, OnTrial) and found.final is not None:
        return found.final
    return found


def _entry_for(problem: ConvProblem, settings: Settings) -> Choice | OnTrial:
    key = (problem, settings)
    entry = choices.entries.get(key)
    if entry is not None:
        entry.age = choices.clock
        return entry.choice  # type: ignore[no-any-return]
    prediction: Prediction | None = None
    if settings.chooses:
        predictor = _predictor.get_for(problem)
        prediction = None if predictor is None else predictor.predict(problem)
    choice = choose(
        problem,
        BY_NAME,
        settings,
        store=None if problem.deterministic else lambda p: _stored(p, settings),
        predictor=None if prediction is None else _Said(prediction),
    )
    _log.chosen(problem, choice, settings)
    found: Choice | OnTrial = choice
    if settings.policy in TIMING and not problem.deterministic:
        candidates: list[str] = []
        if settings.policy == "verify" and choice.source != "store" and prediction is not None:
            candidates = nominees(problem, BY_NAME, settings, prediction)
        if candidates or (settings.audit and choice.algorithm != NATIVE):
            found = OnTrial(problem, choice, candidates, audit=settings.audit, on_settled=_Keeper(problem, settings))
    already = choices.entries.get(key)
    if already is not None:  # by another thread, which may have begun a trial
        return already.choice  # type: ignore[no-any-return]
    if settings.policy != "measure":  # what is chosen without measuring is a makeshift there
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
    decision = _remembered.look_up(problem, settings.budgets)
    if decision is None or (settings.policy == "measure" and decision.source != "measure"):
        return None
    algorithm = BY_NAME.get(decision.algorithm)
    if algorithm is None or algorithm.revision != decision.revision:
        return None
    return Choice(decision.algorithm, "store", decision.params, decision.gain)


class _Keeper:
    """Keeps what a trial found: in memory, and on disk unless it was for the moment only."""

    def __init__(self, problem: ConvProblem, settings: Settings) -> None:
        self._problem, self._settings = problem, settings

    def __call__(self, choice: Choice, outcome: Outcome, lasting: bool) -> None:
        _log.settled(self._problem, outcome.algorithm, outcome.gain, outcome.rounds, outcome.reason)
        if lasting:
            _verify.keep(self._problem, self._settings, choice, outcome.rounds)


def _keep(problem: ConvProblem, settings: Settings, choice: Choice) -> None:
    choices.put((problem, settings), _Chosen(choice))


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
    _predictor.tick()
    if choice.source == "trial":

        def run(name: str) -> Tensor | None:
            found = without_autocast(BY_NAME[name].run_checked, a, b, problem, None, bias)
            return None if found is None else with_strides(found, strides)

        return choice.run(run, a.device)  # type: ignore[union-attr]
    algorithm = BY_NAME[choice.algorithm]
    result: Tensor | None = None
    try:
        if choice.source == "forced" or algorithm.ready(problem, choice.params):
            result = without_autocast(algorithm.run_checked, a, b, problem, choice.params, bias)
    except Exception as error:
        if choice.source == "forced" or algorithm.name == NATIVE:
            raise
        warn_once(
            f"failed:{algorithm.name}",
            f"convselect: {algorithm.name} failed on {problem} ({error!r}); native runs instead.",
        )
    if result is None:
        # It is still being compiled, or failed; or a transform turned one NaN or infinity into a tile or an image of
        # them, and native keeps them where they belong.
        result = without_autocast(BY_NAME[NATIVE].run_checked, a, b, problem, None, bias)
    return with_strides(result, strides)
