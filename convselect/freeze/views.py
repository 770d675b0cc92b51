"""What a layer computes on, where that is not what its step reads and makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from convselect.freeze.chains import Step


class Views(NamedTuple):
    """What a layer computes on, if it is not what its step reads and makes.

    Attributes:
        of_x: from the step's input to the layer's.
        of_result: from the layer's result to the step's value.
        of_residual: from the step's residual, or memory for its value, to the layer's; None stays None.
    """

    of_x: Callable[[Any], Any]
    of_result: Callable[[Any], Any]
    of_residual: Callable[[Any], Any]


def views_of(step: Step) -> Views:
    """The views between a layer and its step."""
    if step.one_row:
        return _ONE_ROW
    dims = step.permuted
    if dims is None:
        return NO_VIEWS
    inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
    return Views(_same, lambda t: t.permute(dims), lambda t: None if t is None else t.permute(inverse))


def _same(t: Any) -> Any:
    return t


NO_VIEWS = Views(_same, _same, _same)
_ONE_ROW = Views(lambda t: t.unsqueeze(2), lambda t: t.squeeze(2), lambda t: None if t is None else t.unsqueeze(2))
