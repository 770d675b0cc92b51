"""Choices and their execution: what eager calls and compiled graphs have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from convselect import _predictor
from convselect._aten_strides import with_strides
from convselect._lru import LRU, Entry
from convselect._warnings import warn_once
from convselect.choose import NATIVE, Choice, choose
from convselect.kernels import BY_NAME
from convselect.problem import ConvProblem
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
    predictor = _predictor.get_for(problem) if settings.chooses else None
    choice = choose(problem, BY_NAME, settings, predictor=predictor)
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
