"""Memory in huge pages for what a frozen network reads or writes at every call: weights, intermediates.

A processor remembers where some 2,000 pages lie, 8 MB if they are small ones of 4 KiB, and looks up the others in
tables in memory. Weights alone are larger. Huge pages have 2 MiB, and Linux gives them to whoever asks (`madvise`, if
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always"). Since they are larger than most weights, blocks
of all networks share chunks of memory, and what is free again is given to others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
CHUNK = 8 * HUGE_PAGE
_LINE = 64
_SMALL = 4096  # blocks below it, of which many fit in a page of any size, are left to PyTorch


class _Chunk:
    """Memory of which parts are given away; `free` holds the others as (start, end), in order, never adjacent."""

    def __init__(self, n_bytes: int) -> None:
        n_bytes = -(-n_bytes // HUGE_PAGE) * HUGE_PAGE
        # MAP_PRIVATE: shared memory has pages of its own kind. One page more, to begin at a multiple of its size.
        self.memory = mmap.mmap(-1, n_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) % HUGE_PAGE
        self.memory.madvise(mmap.MADV_HUGEPAGE, start, n_bytes)
        self.whole = (start, start + n_bytes)
        self.free = [self.whole]

    def take(self, n_bytes: int) -> int | None:
        """Where the first free part of this size starts; it is no longer free."""
        for i, (start, end) in enumerate(self.free):
            if end - start >= n_bytes:
                self.free[i : i + 1] = [(start + n_bytes, end)] if end - start > n_bytes else []
                return start
        return None

    def give_back(self, start: int, n_bytes: int) -> None:
        free = [*self.free, (start, start + n_bytes)]
        self.free = []
        for begin, end in sorted(free):
            if self.free and self.free[-1][1] == begin:
                begin = self.free.pop()[0]
            self.free.append((begin, end))
            if begin <= start < end:  # what is whole pages now goes back to the system
                first, last = -(-begin // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
                if first < last:
                    self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


_chunks: list[_Chunk] = []
_unused: deque[tuple[_Chunk, int, int]] = deque()
_lock = threading.Lock()


def empty(n_bytes: int) -> Tensor:
    """Uninitialised memory (n_bytes,), uint8, at a multiple of 64 bytes; in huge pages, if the system has them."""
    if n_bytes < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
    rounded = -(-n_bytes // _LINE) * _LINE
    try:
        with _lock:
            chunk, start = _taken(rounded)
    except (OSError, ValueError, OverflowError):  # no memory of this kind
        return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
    block = (ctypes.c_char * n_bytes).from_buffer(chunk.memory, start)
    weakref.finalize(block, _released, chunk, start, rounded).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def moved(t: Tensor) -> Tensor:
    """A copy of a dense tensor in such memory, with the same strides."""
    memory = empty(t.numel() * t.element_size()).view(t.dtype)
    return memory.as_strided(t.shape, t.stride()).copy_(t)


def _taken(n_bytes: int) -> tuple[_Chunk, int]:
    _collect()
    for chunk in _chunks:
        found = chunk.take(n_bytes)
        if found is not None:
            return chunk, found
    _chunks.append(_Chunk(max(n_bytes, CHUNK)))
    start = _chunks[-1].take(n_bytes)
    assert start is not None
    return _chunks[-1], start


def _released(*part: Any) -> None:
    """Called when nobody uses a block any more, anywhere, even in a thread that holds the lock: that one, or the next
    to come, then collects it."""
    _unused.append(part)
    if _lock.acquire(blocking=False):
        try:
            _collect()
        finally:
            _lock.release()


def _collect() -> None:
    while _unused:
        chunk, start, n_bytes = _unused.popleft()
        chunk.give_back(start, n_bytes)
        if chunk.free == [chunk.whole] and chunk in _chunks:
            _chunks.remove(chunk)


def _after_fork() -> None:
    """The child's lock is free, and it writes to no chunk of its parent's that may be half changed."""
    global _lock
    _lock = threading.Lock()
    _chunks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
