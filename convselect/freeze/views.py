"""What a layer computes on, where that is not what its step reads and makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from convselect.freeze.chains import Step, meta_of


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
    if step.seen_as is not None:
        return _ROW if step.seen_as == "row" else _SLICE if step.seen_as == "slice" else _columns(step)
    dims = step.permuted
    if dims is None:
        return NO_VIEWS
    inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
    return Views(_same, lambda t: t.permute(dims), lambda t: None if t is None else t.permute(inverse))


def shown(t: Any, of: Any) -> Any:
    """A view `of` t; None if it is a copy, which would not follow what is written to t. None stays None."""
    return None if t is None or of is None or of.data_ptr() != t.data_ptr() else of


def _same(t: Any) -> Any:
    return t


def _columns(step: Step) -> Views:
    """The layer's H * W columns are those of the volume's slices."""
    rows = meta_of(step.out).shape[3:]
    return Views(lambda t: t.flatten(3), lambda t: t.unflatten(3, rows), lambda t: None if t is None else t.flatten(3))


NO_VIEWS = Views(_same, _same, _same)
_ROW = Views(lambda t: t.unsqueeze(2), lambda t: t.squeeze(2), lambda t: None if t is None else t.unsqueeze(2))
_SLICE = Views(_ROW.of_result, _ROW.of_x, lambda t: None if t is None else t.squeeze(2))
