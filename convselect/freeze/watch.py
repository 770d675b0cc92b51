"""Detecting changes of tensors that folded weights were derived from.

Three checks, each for what the one before misses:

1. At every call, exact: which tensor is registered under the name, and its version counter. Catches assignments,
   state_dict loads, optimizer steps, and all operations in place.
2. At every call for weights, at every eighth for the (small) other tensors: the address of the memory, and one element
   of it. Catches `.data = other` and usually whatever rewrites a whole tensor without moving the version counter:
   `.data.copy_`, `.data.mul_`, writes through NumPy.
3. At every call one chunk of 64 KiB, in turn, by its sum as 64-bit integers. Catches any other write within as many
   calls as there are chunks, unless it leaves the sum the same.

After a run of the network nothing of this is in the caches, neither data nor code, so both are kept small: the C
library reads the memory if it is available, and words that show that nothing has changed (see `words`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from convselect.freeze.capture import is_plain
from convselect.freeze.words import Words, dictionaries_have_tags, tensor_layout
from convselect.kernels import _library

Source = tuple[dict[str, Any], str]

_CHUNK_WORDS = 8192
_TURNS = 8
_RENEWALS = 16
_version: Any = operator.attrgetter("_version")
_data_ptr: Any = Tensor.data_ptr


@functools.cache
def _c_functions() -> tuple[Any, Any] | None:
    """`cs_same` and `cs_sum`; None if there is no C library."""
    loaded = _library.library()
    if loaded is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    same, total = loaded["cs_same"], loaded["cs_sum"]
    same.argtypes, same.restype = (pointer, pointer, count), ctypes.c_int32
    total.argtypes, total.restype = (pointer, count), ctypes.c_uint64
    return same, total


def _summing(words: Any) -> Callable[[], int]:
    """A function for the sum of these words, modulo 2^64; it keeps their memory alive."""
    functions = _c_functions()
    if functions is None or words.itemsize != 8:
        return lambda: int(np.add.reduce(words))
    total, pointer, count = functions[1], ctypes.c_void_p(words.ctypes.data), ctypes.c_int64(words.size)
    return lambda owner=words: total(pointer, count)  # type: ignore[misc]


class _Samples:
    """One element per tensor, in parallel lists."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        self.elements: list[tuple[memoryview, int]] = []
        self.values: list[int] = []
        self.groups: list[int] = []
        self.same: Callable[[], bool] = self._same

    def add(self, t: Tensor, words: Any, group: int) -> None:
        memory, at = memoryview(words), words.size // 2
        self.tensors.append(t)
        self.addresses.append(t.data_ptr())
        self.elements.append((memory, at))
        self.values.append(memory[at])
        self.groups.append(group)

    def _same(self) -> bool:
        return [memory[at] for memory, at in self.elements] == self.values

    def complete(self) -> None:
        """To be called after the last `add`."""
        functions, elements = _c_functions(), self.elements
        if functions is None or any(memory.itemsize != 8 for memory, _ in elements):
            return
        count = len(elements)
        lines = (ctypes.c_void_p * count)(*(_address(memory) + 8 * at for memory, at in elements))
        same, values = functions[0], (ctypes.c_uint64 * count)(*self.values)
        self.same = lambda: bool(same(lines, values, count))

    def changed(self) -> set[int]:
        # `elements` keeps the old memory alive, so reading it is safe even if the tensor has moved.
        addresses = list(map(_data_ptr, self.tensors))
        if addresses == self.addresses and self.same():
            return set()
        values = [memory[at] for memory, at in self.elements]
        old = zip(self.addresses, self.values, strict=True)
        new = zip(addresses, values, strict=True)
        return {group for group, a, b in zip(self.groups, old, new, strict=True) if a != b}


def _address(memory: memoryview) -> int:
    return np.asarray(memory).ctypes.data


class _Chunk(NamedTuple):
    sum: Callable[[], int]
    total: int
    group: int


class Watch:
    """The state of groups of tensors, each named by the dictionary that holds it and its key there."""

    def __init__(self, groups: list[list[Source]]) -> None:
        self._groups = groups
        self._sources = [(owner, key, group) for group, sources in enumerate(groups) for owner, key in sources]
        owners = {id(owner): owner for owner, _, _ in self._sources}
        self._live = list(owners.values())
        self._turn = 0
        self._saved: list[dict[str, Any]] = []
        self._words: Words | None = None
        self._renewals = _RENEWALS  # something that writes without changing anything would cost more than it saves
        self._look()

    def _look(self) -> None:
        # Versions first: a write during what follows is then noticed at the next call.
        self._words = self._present_words()
        tensors = [owner[key] for owner, key, _ in self._sources]
        self._saved = [dict(owner) for owner in self._live]
        self._kinds = list(map(_kind, tensors))
        # Comparing dictionaries compares values by identity first; if that differs, one-element tensors by value.
        named = zip(self._sources, tensors, strict=True)
        self._lone = [(owner, key, t) for (owner, key, _), t in named if t.numel() == 1]
        self._tensors = [t for t in tensors if not t.is_inference()]
        self._versions = list(map(_version, self._tensors))
        self._every = _Samples()
        self._by_turn = [_Samples() for _ in range(_TURNS)]
        self._chunks: list[_Chunk] = []
        for i, ((_, _, group), t) in enumerate(zip(self._sources, tensors, strict=True)):
            words = _words(t)
            if words.size == 0:
                continue
            (self._every if t.dim() > 1 else self._by_turn[i % _TURNS]).add(t, words, group)
            for start in range(0, words.size, _CHUNK_WORDS):
                summed = _summing(words[start : start + _CHUNK_WORDS])
                self._chunks.append(_Chunk(summed, summed(), group))
        for samples in (self._every, *self._by_turn):
            samples.complete()

    def _present_words(self) -> Words | None:
        if not dictionaries_have_tags() or tensor_layout() is None or self._renewals == 0:
            return None
        return Words(self._live, [owner[key] for owner, key, _ in self._sources], tensor_layout())

    def is_comparable(self) -> bool:
        """Whether the same names hold tensors of the same shapes and types as when it was looked at, which can be read:
        see `is_plain`."""
        for owner, saved in zip(self._live, self._saved, strict=True):
            if {key for key, t in owner.items() if t is not None} != {k for k, t in saved.items() if t is not None}:
                return False
        now = [owner[key] for owner, key, _ in self._sources]
        return all(isinstance(t, Tensor) and is_plain(t) for t in now) and self._kinds == list(map(_kind, now))

    def changed(self) -> set[int]:
        """Groups that have changed, by the checks of this call; they stay changed until `accept`."""
        turn = self._turn
        if self._words is not None and self._words.same():
            self._turn = turn + 1
            by_turn = self._by_turn[turn % _TURNS]
            found = set() if self._every.same() and by_turn.same() else self._every.changed() | by_turn.changed()
            self._add_up(turn, found)
            return found
        renewed = None
        if self._words is not None:
            self._renewals -= 1
            with contextlib.suppress(KeyError, AttributeError, RuntimeError):
                renewed = self._present_words()  # before looking, for what is written meanwhile
        found = self._changed_objects()
        if renewed is not None:  # they show moved memory, too, which is else asked for in turn
            for samples in self._by_turn:
                found |= samples.changed()
        if not found:
            self._words = renewed
        return found

    def _changed_objects(self) -> set[int]:
        """As `changed`, by asking each."""
        found: set[int] = set()
        try:
            same = self._live == self._saved
        except (RuntimeError, TypeError, ValueError):  # tensors that differ were compared element by element
            same = False
        if not same or any(owner.get(key) is not t for owner, key, t in self._lone):
            return set(range(len(self._groups)))
        if list(map(_version, self._tensors)) != self._versions:
            found |= self._by_version()
        turn = self._turn
        self._turn = turn + 1
        found |= self._every.changed() | self._by_turn[turn % _TURNS].changed()
        self._add_up(turn, found)
        return found

    def _add_up(self, turn: int, found: set[int]) -> None:
        if self._chunks:
            summed, total, group = self._chunks[turn % len(self._chunks)]
            if summed() != total:
                found.add(group)

    def changed_anywhere(self) -> set[int]:
        """As `changed`, by all checks."""
        found = self.changed()
        for samples in self._by_turn:
            found |= samples.changed()
        return found | {group for summed, total, group in self._chunks if summed() != total}

    def accept(self) -> None:
        """Compare with the present state from now on."""
        self._look()

    def _by_version(self) -> set[int]:
        versions = {id(t): v for t, v in zip(self._tensors, self._versions, strict=True)}
        return {g for owner, key, g in self._sources if owner[key]._version != versions.get(id(owner[key]))}


def _kind(t: Tensor) -> tuple[torch.dtype, torch.Size]:
    return t.dtype, t.shape


def _words(t: Tensor) -> Any:
    """The memory that a tensor spans, as 64-bit integers if its length allows, else as bytes."""
    t = t.detach()
    if t.numel() == 0:
        return np.empty(0, np.uint64)
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    flat = t.as_strided((span,), (1,)).view(torch.uint8).numpy()
    return flat.view(np.uint64) if flat.nbytes % 8 == 0 else flat
