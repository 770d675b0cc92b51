"""A bounded, thread-safe, fork-safe dictionary that evicts the least recently used entries."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any


class Entry:
    """Base of an `LRU`'s values. `age` is the time of last use, counted in insertions; a hit sets it (see `LRU`)."""

    __slots__ = ("age",)

    def __init__(self) -> None:
        self.age = 0


class LRU:
    """A bounded dictionary of `Entry`s. `entries` is a plain dict, so that a hit costs one look-up:
    `entry = lru.entries.get(key)`, then `entry.age = lru.clock`.

    Only insertions take the lock and evict, an eighth of the capacity at a time. Recency is counted in insertions,
    which is all that eviction needs: entries used since the last insertion are equally recent.

    Args:
        capacity: most entries; 0: nothing is kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: dict[Hashable, Any] = {}
        self.clock = 0
        self.followers: list[Callable[[], object]] = []
        """Called after an entry was taken out before its time: whoever else holds it lets go of it."""
        self._lock = threading.Lock()
        _ALL.add(self)

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, key: Hashable, entry: Entry) -> None:
        if self.capacity <= 0:
            return
        with self._lock:
            self.clock += 1
            entry.age = self.clock
            if key not in self.entries and len(self.entries) >= self.capacity:
                surplus = len(self.entries) - self.capacity + max(1, self.capacity // 8)
                oldest = sorted(self.entries.items(), key=lambda item: item[1].age)[:surplus]
                for old_key, _ in oldest:
                    self.entries.pop(old_key, None)
            self.entries[key] = entry

    def clear(self) -> None:
        with self._lock:
            self.entries.clear()
        self._tell()

    def remove(self, key: Hashable) -> None:
        self.entries.pop(key, None)
        self._tell()

    def _tell(self) -> None:
        for follower in self.followers:
            follower()

    def _after_fork_in_child(self) -> None:
        # Another thread of the parent may have held the lock; the dict is consistent, since this thread held the GIL.
        self._lock = threading.Lock()


_ALL: weakref.WeakSet[LRU] = weakref.WeakSet()
_on_clear: list[Callable[[], object]] = []


def on_clear(forget: Callable[[], object]) -> None:
    """Register a function for `clear` to call."""
    _on_clear.append(forget)


def forget_entries() -> None:
    """Empty every LRU: plans and choices are made anew."""
    for lru in list(_ALL):
        lru.clear()


def clear() -> None:
    """Forget all plans, choices and failures of this process."""
    for forget in _on_clear:
        forget()


def _renew_locks() -> None:
    for lru in list(_ALL):
        lru._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
