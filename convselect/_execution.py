"""Choices and their execution: what eager calls and compiled graphs have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from convselect import _batch, _predictor
from convselect._aten_strides import with_strides
from convselect._lru import LRU, Entry
from convselect._warnings import warn_once
from convselect.choose import NATIVE, Choice, choose
from convselect.kernels import BY_NAME
from convselect.problem import ConvProblem, Direction
from convselect.settings import CACHE_ENTRIES, Settings

_any_autocast: Any = torch._C._is_any_autocast_enabled


class _Chosen(Entry):
    """A remembered choice."""

    __slots__ = ("choice",)

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice


choices = LRU(CACHE_ENTRIES)


def choice_for(problem: ConvProblem, settings: Settings) -> Choice:
    """The choice for one problem: out of memory, or made now and remembered."""
    key = (problem, settings)
    entry = choices.entries.get(key)
    if entry is not None:
        entry.age = choices.clock
        return entry.choice  # type: ignore[no-any-return]
    if settings.batch_invariant and problem.direction != Direction.BACKWARD_WEIGHT:
        problem = _batch.single(problem)
    predictor = _predictor.get_for(problem) if settings.chooses else None
    choice = choose(problem, BY_NAME, settings, predictor=predictor)
    if settings.batch_invariant and problem.direction != Direction.BACKWARD_WEIGHT:
        choice = replace(choice, alone=settings)
    choices.put(key, _Chosen(choice))
    return choice


def without_autocast(function: Any, *arguments: Any) -> Any:
    """Algorithms compute in the dtype they are given; inside a backward under autocast ATen would cast again."""
    if not _any_autocast():
        return function(*arguments)
    device = next(a.device.type for a in arguments if isinstance(a, Tensor))
    with torch.autocast(device, enabled=False):
        return function(*arguments)


def execute(
    choice: Choice,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    strides: tuple[int, ...],
    bias: Tensor | None = None,
) -> Tensor:
    """Run the chosen algorithm on its operands. The automatic choice falls back to native; a forced one raises."""
    _predictor.tick()
    settings = choice.alone
    if settings is not None:
        alone = _batch.run(
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
        if not forced and not algorithm.ready(problem, choice.params):
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, in any of the ways in which PyTorch says it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no exception of its own; cuBLAS and cuDNN have none either.
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    )
