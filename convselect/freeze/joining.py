"""Concatenations that are written in place: their parts get memory inside theirs, so that nothing is copied.

A concatenation along the channels is the memory of its parts side by side. In NHWC a part's pixels are then further
apart than it has channels, which whoever writes or reads it must know of; in NCHW with one image a part is as dense as
ever. Where one concatenation has the parts of another and more, as in DenseNet (Huang et al. 2017, arXiv 1608.06993),
the smaller one needs no memory of its own: Pleiss et al. 2017 (arXiv 1707.06990) share it so for training.

Each range of channels of such memory belongs to one value for the whole of a call, so nothing is ever overwritten
that somebody may still read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, canonical_strides
from convselect.freeze.candidates import Candidate, Form
from convselect.freeze.chains import Step, meta_of
from convselect.freeze.passes import Maker

_aten = torch.ops.aten
_POOLS = (_aten.max_pool2d.default, _aten.avg_pool2d.default)
_SLICES = (
    _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.chunk.default, _aten.narrow.default,
)  # fmt: skip
_ALIASES = 2048  # bytes: pixels a multiple of it apart share few sets of the caches
_GAP = 16  # floats: a line of the cache


class Place(NamedTuple):
    """The channels of `root`'s memory from `first` on. A root's own place is at 0."""

    root: fx.Node
    first: int


class _Walk(Protocol):
    makers: dict[Step, Maker]
    forms: dict[fx.Node, Form]
    base: dict[fx.Node, fx.Node]


class Joining:
    """Where values lie that are parts of concatenations.

    Args:
        steps: of the program, in order.
        results: values that it returns: these stay where they are.
        candidates: what runs the layers among the steps.

    Attributes:
        places: value -> its place, for the parts that are written there and the concatenations themselves.
    """

    def __init__(
        self, steps: Sequence[Step], results: Sequence[fx.Node], candidates: Mapping[Step, Candidate], walk: _Walk
    ) -> None:
        self._candidates, self._walk = candidates, walk
        self._makers_of = {step.out: step for step in steps}
        self._readers: dict[fx.Node, list[Step]] = {}
        for step in steps:
            for node in step_inputs(step):
                self._readers.setdefault(node, []).append(step)
        self._returned = {self._base(node) for node in results}
        self.places: dict[fx.Node, Place] = {}
        # The widest first: it may hold the others.
        joins = sorted(filter(self._is_join, steps), key=lambda step: -meta_of(step.out).shape[1])
        for step in joins:
            self._place(step)
        self._pitches = {place.root: self._pitch(place.root) for place in self.places.values()}

    def memory(self, node: fx.Node, root: Tensor) -> Tensor:
        """A value's part of the root's memory, which is `n_bytes(root)` long."""
        place, form = self.places[node], self._walk.forms[node]
        whole, width = self._walk.forms[place.root], self._pitches[place.root]
        flat = root[: self.n_bytes(place.root)].view(form.dtype)
        C = form.shape[1]
        if self._layout(place.root) == CONTIGUOUS:
            return flat[place.first * math.prod(form.shape[2:]) :].as_strided(form.shape, form.strides)
        if (place.first, C, width) == (0, whole.shape[1], whole.shape[1]):
            return flat.as_strided(form.shape, form.strides)
        H, W = form.shape[2:]
        return flat[place.first :].as_strided(form.shape, (H * W * width, 1, W * width, width))

    def n_bytes(self, root: fx.Node) -> int:
        form = self._walk.forms[root]
        return form.n_bytes // form.shape[1] * self._pitches[root]

    def there(self, step: Step) -> list[int] | None:
        """Which parts of a concatenation are written in place; None if it is not one with a place."""
        if step.out not in self.places or not self._is_join(step):
            return None
        place, parts = self.places[step.out], step.args[0]
        first, found = place.first, []
        for i, part in enumerate(parts):
            if self.places.get(part) == (place.root, first):
                found.append(i)
            first += meta_of(part).shape[1]
        return found

    # ---- choosing places --------------------------------------------------------------------------------------------

    def _place(self, step: Step) -> None:
        parts: Sequence[fx.Node] = step.args[0]
        own = self.places.get(step.out)
        if own is None:
            if self._base(step.out) in self._returned:
                return
            if self._lie_side_by_side(parts) and self._read_apart(step.out):
                self.places[step.out] = self.places[parts[0]]
                return
            own = Place(step.out, 0)
        first, placed = own.first, {}
        for part in parts:
            if self._may_lie_in(part, step, parts):
                placed[part] = Place(own.root, first)
            first += meta_of(part).shape[1]
        if placed:
            self.places.update({step.out: own, **placed})

    def _lie_side_by_side(self, parts: Sequence[fx.Node]) -> bool:
        """Whether all are in place in some other concatenation, in this order."""
        found = [self.places.get(part) for part in parts]
        for part, place, following in zip(parts, found, [*found[1:], None], strict=True):
            if place is None:
                return False
            if following is not None and following != (place.root, place.first + meta_of(part).shape[1]):
                return False
        return True

    def _may_lie_in(self, part: fx.Node, step: Step, parts: Sequence[fx.Node]) -> bool:
        if part in self.places or part in self._walk.base or part in self._returned or parts.count(part) > 1:
            return False
        maker = self._makers_of.get(part)
        if maker is None or not self._writes_apart(maker) or self._layout(part) != self._layout(step.out):
            return False
        if self._layout(part) == CHANNELS_LAST and meta_of(part).shape[1] == 1:
            return False  # nothing would move by one float
        return self._read_apart(part)

    def _writes_apart(self, step: Step) -> bool:
        dense = self._layout(step.out) == CONTIGUOUS
        if step in self._candidates:
            candidate = self._candidates[step]
            simple = step.kind == "conv" and not step.target.residual
            return candidate.writes_out and (dense or (candidate.takes_pitch and simple))
        return step in self._walk.makers and (dense or self._knows_pitch(step))

    def _read_apart(self, node: fx.Node) -> bool:
        """Whether whoever reads this value can read some channels of larger memory."""
        if self._layout(node) == CONTIGUOUS:
            return True
        return all(self._reads_apart(step, node) for step in self._readers.get(node, ()))

    def _reads_apart(self, step: Step, node: fx.Node) -> bool:
        if step in self._candidates:
            is_input = step.args[0] is node and node not in step.args[1:]
            return step.kind == "conv" and is_input and self._candidates[step].takes_pitch
        if step in self._walk.makers:
            return self._knows_pitch(step)
        # Of channels: a view whatever the strides are. Its readers see gaps in any case.
        return step.target in _SLICES and _dim(step, 1 if step.target is _aten.slice.Tensor else 2, 0) == 1

    def _knows_pitch(self, step: Step) -> bool:
        return step.kind == "pointwise" or step.target in _POOLS or self._is_join(step)

    def _is_join(self, step: Step) -> bool:
        if step.kind != "call" or step.target is not _aten.cat.default or step not in self._walk.makers:
            return False
        dims = meta_of(step.out).dim()
        images = all(meta_of(part).dim() == dims and meta_of(part).numel() > 0 for part in step.args[0])
        return images and self._layout(step.out) is not None and _dim(step, 1, 0) == 1

    def _layout(self, node: fx.Node) -> str | None:
        """The layout of a dense image in float32; None if it is none, or several images in NCHW. Of volumes NCDHW only:
        nobody writes some channels of a larger one in NDHWC."""
        form = self._walk.forms.get(node)
        if form is None or len(form.shape) not in (4, 5) or form.dtype != torch.float32:
            return None
        if len(form.shape) == 4 and form.strides == canonical_strides(form.shape, CHANNELS_LAST):
            return CHANNELS_LAST
        is_dense = form.strides == canonical_strides(form.shape, CONTIGUOUS)
        return CONTIGUOUS if is_dense and form.shape[0] == 1 else None

    def _base(self, node: fx.Node) -> fx.Node:
        while node in self._walk.base:
            node = self._walk.base[node]
        return node

    def _pitch(self, root: fx.Node) -> int:
        """Floats from pixel to pixel: a few more than there are channels, if the pixels would share sets of the cache
        and nobody minds."""
        channels = self._walk.forms[root].shape[1]
        shared = self._layout(root) == CHANNELS_LAST and 4 * channels % _ALIASES == 0 and self._read_apart(root)
        return channels + _GAP if shared else channels


def step_inputs(step: Step) -> list[fx.Node]:
    """The values that a step reads, each once."""
    found: dict[fx.Node, None] = {}
    fx.map_arg((step.args, step.kwargs), lambda node: found.setdefault(node))
    return list(found)


def _dim(step: Step, position: int, default: int) -> int:
    """The dimension that a call is about, counted from the front."""
    given: Any = step.args[position] if len(step.args) > position else step.kwargs.get("dim", default)
    return given % meta_of(step.out).dim() if isinstance(given, int) else -1
