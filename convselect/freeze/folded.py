"""Values that a frozen forward computes from parameters alone, kept and computed again when these change."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from convselect.freeze.algebra.constants import Constants
from convselect.freeze.capture import Source, read


def evaluated(*nodes: fx.Node) -> list[Tensor]:
    """Expressions of constants, in new contiguous memory; computed in float64 if there is anything to compute."""
    if all(node.op == "get_attr" for node in nodes):
        return [read(node).clone(memory_format=torch.contiguous_format) for node in nodes]
    return [value.clone(memory_format=torch.contiguous_format) for value in Constants(read).values(nodes)]


def sources_of(*nodes: fx.Node | None) -> list[Source]:
    """(dictionary, key) of every tensor that these expressions read."""
    constants = Constants(read)
    found = dict.fromkeys(source for node in nodes if node is not None for source in constants.sources(node))
    return [source.meta["source"] for source in found]


def is_finite(*tensors: Tensor | None) -> bool:
    """By sums; one that overflows merely costs speed."""
    floats = (t for t in tensors if t is not None and t.is_floating_point())
    # In the type that it has, which is several times as fast as in a wider one.
    return all(math.isfinite(t.sum(dtype=torch.float32 if t.itemsize == 2 else None).item()) for t in floats)


class FrozenConstant:
    """An expression of constants. `value` is always the same memory.

    Args:
        is_mask: it is added to scores of attention alone, where -infinity is a number like any other.
    """

    def __init__(self, node: fx.Node, is_mask: bool = False) -> None:
        self.node, self._is_mask = node, is_mask
        self.value = self._computed()

    @property
    def finite(self) -> bool:
        return is_finite(self.value.clamp(min=0) if self._is_mask else self.value)

    def _computed(self) -> Tensor:
        return evaluated(self.node)[0].to(self.node.meta["val"].dtype)

    def sources(self) -> list[Source]:
        return sources_of(self.node)

    def refold(self) -> bool:
        """Compute again, in place. False if shape or dtype changed."""
        value = self._computed()
        if value.shape != self.value.shape or value.dtype != self.value.dtype:
            return False
        self.value.copy_(value)
        return True


class ReadValues:
    """Tensors of modules of which the forward read values while it was captured: sizes of a kernel, for example."""

    finite = True  # what they are, not what is computed with them

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list({(id(owner), key): (owner, key) for owner, key in sources}.values())
        self._values = [owner[key].detach().clone() for owner, key in self._sources]

    def sources(self) -> list[Source]:
        return self._sources

    def refold(self) -> bool:
        """Whether they are what they were; otherwise the forward has to be captured again."""
        now = [owner[key] for owner, key in self._sources]
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(now, self._values, strict=True))
