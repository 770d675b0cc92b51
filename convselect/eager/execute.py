"""A choice run on its operands: what eager calls and operators of compiled graphs have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect.aten.strides import with_strides
from convselect.base.lru import on_clear
from convselect.base.problem import ConvProblem, Direction
from convselect.base.shortage import is_out_of_memory
from convselect.base.warnings import warn_once
from convselect.choice.budgets import distrusted
from convselect.choice.choose import NATIVE, Choice
from convselect.eager import batch, checks
from convselect.eager.live_trial import LiveTrial
from convselect.eager.resolve import choice_for
from convselect.kernels import _library
from convselect.kernels._native_ops import native_forward_in_bands
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.model.loaded import idle

_any_autocast: Any = torch._C._is_any_autocast_enabled


def execute(
    choice: Choice | LiveTrial,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    strides: tuple[int, ...],
    bias: Tensor | None = None,
) -> Tensor:
    """Run the chosen algorithm on its operands. The automatic choice falls back to native; a forced one raises.

    Args:
        a, b: the operands of `Algorithm.run`, in its order.
        strides: aten's, of the result.
        bias: (K,), in the forward direction.
    """
    idle.left -= 1
    if idle.left < 0:
        loaded.release_idle()
    if isinstance(choice, LiveTrial):
        settled = choice.choice
        if settled is None or settled.algorithm == NATIVE or checks.due.left > 0:
            if settled is not None:
                checks.due.left -= 1
            return _on_trial(choice, a, b, problem, strides, bias)
        choice = settled  # its result is due to be checked; the audit goes on with the next call
    if choice.per_image is not None:
        settings = choice.per_image
        result = batch.run(
            lambda one: choice_for(one, settings), _attempt, _native, a, b, problem, strides, bias, settings
        )
    else:
        due = checks.due
        due.left -= 1
        # None: it is still being compiled, failed or was wrong; or a transform turned one NaN or infinity into a tile
        # or an image of them, and native keeps them where they belong.
        if due.left >= 0 or choice.algorithm == NATIVE or choice.source == "forced":
            attempted = _attempt(choice, a, b, problem, bias)
        else:
            attempted = checks.watched(
                lambda: _attempt(choice, a, b, problem, bias), choice.algorithm, a, b, problem, bias
            )
        result = _native(a, b, problem, bias) if attempted is None else attempted
    if result.stride() == strides and not result._is_view():
        return result
    return with_strides(result, strides)


def _on_trial(
    trial: LiveTrial, a: Tensor, b: Tensor, problem: ConvProblem, strides: tuple[int, ...], bias: Tensor | None
) -> Tensor:
    def run(name: str) -> Tensor | None:
        if name == NATIVE:
            return with_strides(_native(a, b, problem, bias), strides)
        if name in distrusted:
            return None
        found = without_autocast(BY_NAME[name].run_checked, a, b, problem, trial.params_of(name), bias)
        return None if found is None else with_strides(found, strides)

    def is_right(name: str, result: Tensor, places: int) -> bool:
        return checks.is_right(name, result, a, b, problem, bias, places)

    return trial.run(run, a.device, is_right)


def without_autocast(function: Any, *arguments: Any) -> Any:
    """Call `function` with autocast off: algorithms compute in the dtype they are given, and inside a backward under
    autocast ATen would cast again."""
    if not _any_autocast():
        return function(*arguments)
    device = next(a.device.type for a in arguments if isinstance(a, Tensor))
    with torch.autocast(device, enabled=False):
        return function(*arguments)


def _native(a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor:
    native = BY_NAME[NATIVE].run_checked
    try:
        return without_autocast(native, a, b, problem, None, bias)  # type: ignore[no-any-return]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    give_back()
    try:
        return without_autocast(native, a, b, problem, None, bias)  # type: ignore[no-any-return]
    except (RuntimeError, MemoryError) as error:
        if problem.direction != Direction.FORWARD or problem.is_oversized or not is_out_of_memory(error):
            raise
    return without_autocast(native_forward_in_bands, a, b, problem, bias)  # type: ignore[no-any-return]


def give_back() -> None:
    """Give back what is kept here: the model, scratch memory of the C kernels, and what malloc holds unused."""
    loaded.unload()
    _library.give_back()


def _attempt(choice: Choice, a: Tensor, b: Tensor, problem: ConvProblem, bias: Tensor | None) -> Tensor | None:
    """The chosen algorithm's result; None if it has to be left to native. A forced one raises what it raises."""
    algorithm = BY_NAME[choice.algorithm]
    forced = choice.source == "forced"
    if not forced and algorithm.name in distrusted:
        return None  # a graph names it, or a plan that autograd still holds
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
    if result is None:
        _unusable(algorithm.name, problem)
    elif failing:
        failures.pop((algorithm.name, problem), None)
    return result


# ---- failures -------------------------------------------------------------------------------------------------------

FAILURES_IN_A_ROW = 3
"""After this many on one problem an algorithm rests there: an exception per call is no way to run native."""
UNUSABLE_IN_A_ROW = 2
"""The same for results that an infinity or a NaN has spoilt."""
REST_CALLS = 256
"""How many calls it rests. Then it is tried again: memory shortages are usually temporary."""
_MOST_FAILING = 1024

# (algorithm, problem) -> [failures in a row, calls left to rest]. Empty if nothing goes wrong, and then it costs
# nothing. No lock, which a fork might find taken: threads that meet here lose a count at most.
failures: dict[tuple[str, ConvProblem], list[int]] = {}
on_clear(failures.clear)


def _rests(name: str, problem: ConvProblem) -> bool:
    entry = failures.get((name, problem))
    if entry is None or entry[1] <= 0:
        return False
    entry[1] -= 1
    return True


def _count(name: str, problem: ConvProblem, most: int) -> None:
    if len(failures) >= _MOST_FAILING:
        failures.clear()
    entry = failures.setdefault((name, problem), [0, 0])
    entry[0] += 1
    if entry[0] >= most:
        entry[1] = REST_CALLS


def _unusable(name: str, problem: ConvProblem) -> None:
    if problem.device == "cpu":
        _count(name, problem, UNUSABLE_IN_A_ROW)


def _failed(name: str, problem: ConvProblem, error: Exception) -> None:
    _count(name, problem, FAILURES_IN_A_ROW)
    if is_out_of_memory(error):
        _library.give_back()  # native may need it
        topic, what = f"memory:{name}", f"{name} found too little memory for"
    else:
        topic, what = f"failed:{name}", f"{name} failed on"
    warn_once(topic, f"convselect: {what} {problem} ({error!r}); native runs instead.")
