"""Frozen layers and constants that the programs of one model share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from torch import fx

from convselect.freeze.capture import Source
from convselect.freeze.chains import Layer, is_mask
from convselect.freeze.conv import FrozenConv
from convselect.freeze.folded import FrozenConstant, ReadValues
from convselect.freeze.layer import FrozenLayer
from convselect.freeze.linear import FrozenLinear
from convselect.freeze.transposed import FrozenTransposed
from convselect.freeze.volume import FrozenVolume
from convselect.freeze.volume_transposed import FrozenTransposedVolume

LAYERS: dict[str, type[FrozenLayer]] = {
    "conv": FrozenConv, "linear": FrozenLinear, "transposed": FrozenTransposed, "volume": FrozenVolume,
    "transposed volume": FrozenTransposedVolume,
}  # fmt: skip
"""By kind: see `chains.Layer`."""
Entry = FrozenLayer | FrozenConstant | ReadValues


class Registry:
    """Frozen layers and constants that the programs of one model share, each folded once."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, Entry] = {}

    def layer(self, layer: Layer, key_of: Callable[[fx.Node], str]) -> FrozenLayer:
        bias = None if layer.bias is None else key_of(layer.bias)
        how = (layer.kind, layer.seen_as, layer.geometry, layer.activation, layer.slope, layer.residual)
        key = (key_of(layer.weight), bias, how)
        return self._entry(key, lambda: LAYERS[layer.kind](layer))  # type: ignore[return-value]

    def constant(self, node: fx.Node, key_of: Callable[[fx.Node], str]) -> FrozenConstant:
        mask = is_mask(node)
        return self._entry(("constant", key_of(node), mask), lambda: FrozenConstant(node, mask))  # type: ignore[return-value]

    def reads(self, sources: Sequence[Source]) -> ReadValues:
        key = ("read", *sorted({(id(owner), key) for owner, key in sources}))
        return self._entry(key, lambda: ReadValues(sources))  # type: ignore[return-value]

    def _entry(self, key: Hashable, make: Callable[[], Entry]) -> Entry:
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = make()
        return found

    def keep(self, entries: Iterable[Entry]) -> None:
        """Drop all but these, which programs use: some constants depend on the size of the image."""
        used = {id(entry) for entry in entries}
        self.entries = {key: entry for key, entry in self.entries.items() if id(entry) in used}

    @property
    def finite(self) -> bool:
        return all(entry.finite for entry in self.entries.values())

    def pin_packs(self, used: Collection[Mapping[FrozenLayer, set[Hashable]]]) -> None:
        """Keep the packed weights that these plans' candidates use, and drop the others."""
        for entry in self.entries.values():
            if isinstance(entry, FrozenLayer):
                entry.pin_packs({pack for packs in used for pack in packs.get(entry, ())})
