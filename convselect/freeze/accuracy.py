"""Smaller tiles of Winograd for networks that multiply rounding.

Each layer's kernel rounds little more than a direct sum, but a network may multiply what its layers round: results of
some differ from float64's by a hundred times as much as one layer's. How much float32 loses in such a network whatever
the kernels shows in the distance of two computations that round differently: the model's own, and PyTorch's operations
with folded weights (direct sums of the C library if nothing was folded). A plan may be `_MOST` times that far from the
model's own result. Otherwise the largest tiles are replaced by smaller ones, the first layers first, as many as the
usual errors of tiles let one expect to be enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from convselect.base.settings import Settings, exactly
from convselect.freeze.candidates import distance
from convselect.freeze.chains import Step
from convselect.freeze.program import Program, nodes_in
from convselect.freeze.remembered import Key, Remembered
from convselect.freeze.views import views_of

# The distance of two direct computations is about 1.4 times the error of either: 9 times the model's own error.
_MOST = 6.5
_SAME_ORDER = 2e-7  # below it, two computations are nearly the same one
_NEGLIGIBLE = 1.5e-6  # ten times the error of a single direct sum
_MARGIN = 0.85  # what is expected of smaller tiles is this share of what is allowed
_LONGEST_TEXT = 200
# Relative error of one layer by the largest tile: measured for 3x3 kernels, normal data. 0 stands for a direct sum.
_ERRORS = {0: 1.6e-7, 2: 2.4e-7, 3: 3.8e-7, 4: 6.6e-7, 5: 1.3e-6, 6: 2.7e-6, 7: 6.6e-6}
_ANY = max(_ERRORS)


class Limits:
    """The largest tile that each layer of a network may have.

    Args:
        tensors, expected: arguments, and the model's own result for them.
        key: what the limits are for; None if they cannot be remembered.
    """

    def __init__(
        self,
        program: Program,
        tensors: Sequence[Tensor],
        expected: Any,
        settings: Settings,
        remembered: Remembered,
        key: Key | None,
    ) -> None:
        self._program, self._tensors, self._settings = program, tensors, settings
        self._expected, self._remembered, self._key = pytree.tree_leaves(expected), remembered, key
        self._largest = [_ANY] * len(program.layers)
        self._index = {step: i for i, step in enumerate(program.layers)}
        self._scales: list[float] | None = None  # distances of direct computations, one per leaf of the result
        self._measured = False
        known = None if key is None else _parsed(remembered.get(key), len(self._largest))
        if known is not None:
            self._scales, self._largest = known

    def of(self, step: Step) -> int:
        return self._largest[self._index[step]]

    @property
    def known(self) -> bool:
        """Whether they were found before, for these weights."""
        return self._scales is not None

    def are_met(self, distances: Sequence[float]) -> bool:
        """Whether results are as near to the model's own as two direct computations are to each other, or nearly."""
        return self._excess(distances) <= 1.0

    def admit(self, distances: Sequence[float], chosen: Sequence[int], layout: str) -> bool:
        """Whether a plan may stay, or cannot be improved by smaller tiles. If not, some limits are lower now.

        Args:
            distances: of its results, leaf by leaf, from the model's own.
            chosen: the tile of each layer.
            layout: between its layers.
        """
        if not self.are_met(distances) and not self._measured:
            self._measure(layout)
        excess = self._excess(distances)
        if excess <= 1.0 or not math.isfinite(excess) or max(chosen, default=0) <= 3:
            return True
        self._lower(chosen, excess)
        self._remember()
        return False

    def _excess(self, distances: Sequence[float]) -> float:
        if self._scales is None or len(self._scales) != len(distances):
            return math.inf
        allowed = (max(_MOST * scale, _NEGLIGIBLE) for scale in self._scales)
        return max(d / most for d, most in zip(distances, allowed, strict=True))

    def _lower(self, chosen: Sequence[int], excess: float) -> None:
        """Expects errors of layers to be independent, and multiplied alike."""
        tiles = list(chosen)
        aim = sum(_ERRORS[t] ** 2 for t in tiles) * (_MARGIN / excess) ** 2
        smaller = {t: max((other for other in _ERRORS if other < t), default=0) for t in _ERRORS}
        changed = False
        while max(tiles) > 0 and not (changed and sum(_ERRORS[t] ** 2 for t in tiles) <= aim):
            i = tiles.index(max(tiles))
            tiles[i] = self._largest[i] = smaller[tiles[i]]
            changed = True

    def _measure(self, layout: str) -> None:
        self._measured = True
        for by_pytorch in (True, False):
            self._scales = [
                distance(got, want) if isinstance(want, Tensor) and want.is_floating_point() else 0.0
                for got, want in zip(self._directly_computed(layout, by_pytorch), self._expected, strict=True)
            ]
            if max(self._scales) > _SAME_ORDER:
                break
        self._remember()

    def _remember(self) -> None:
        text = _text(self._scales or [], self._largest)
        if self._key is not None and text is not None:
            self._remembered.put(self._key, text)

    def _directly_computed(self, layout: str, by_pytorch: bool) -> list[Any]:
        """The leaves of the program's result, with a direct sum in each layer: PyTorch's, or the C library's."""
        program, settings = self._program, exactly(self._settings)
        values: dict[fx.Node, Any] = dict(zip(program.captured.inputs, self._tensors, strict=True))
        for i, step in enumerate(program.steps):
            operands, options = fx.map_arg((step.args, step.kwargs), values.__getitem__)
            layer = program.layers.get(step)
            if layer is None:
                values[step.out] = program.function(step)(*operands, **options)
            else:
                x, residual = (*operands, None)[:2]
                views = views_of(step)
                x, residual = views.of_x(x), views.of_residual(residual)
                run = layer.native
                if not by_pytorch:
                    found = layer.candidates(x, residual, layout, settings)
                    direct = next((c for c in found if c.writes_out and c.tile == 0), found[0])
                    run = direct.bind(None, None, None)
                values[step.out] = views.of_result(run(x, residual))
                layer.pin_chosen(None)
            for node in nodes_in((step.args, step.kwargs)):
                if program.last_use[node] == i:
                    values.pop(node, None)
        return [values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in program.captured.results]


class Known(NamedTuple):
    scales: list[float]
    largest: list[int]


def _text(scales: Sequence[float], largest: Sequence[int]) -> str | None:
    """What `_parsed` reads; None if it is too long to be stored even with one limit for all layers."""
    runs = ",".join(f"{t}x{len(list(group))}" for t, group in itertools.groupby(largest))
    for limits in (runs, f"{min(largest)}x{len(largest)}"):
        text = f"{'/'.join(f'{scale:.2e}' for scale in scales)} {limits}"
        if len(text) <= _LONGEST_TEXT:
            return text
    return None


def _parsed(text: str | None, layers: int) -> Known | None:
    """None if this is no such text, or is about another number of layers."""
    try:
        scales, limits = (text or "").split(" ")
        runs = [tuple(map(int, run.split("x"))) for run in limits.split(",")]
        largest = [t for t, count in runs for _ in range(count)]
        known = Known([float(scale) for scale in scales.split("/")], largest)
    except ValueError:
        return None
    fits = len(largest) == layers and all(t in _ERRORS for t in largest) and all(map(math.isfinite, known.scales))
    return known if fits else None
