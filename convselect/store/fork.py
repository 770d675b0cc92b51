"""Stores at a fork. SQLite's locks belong to a process, and a child that used its parent's connection could break the
file. So connections are closed before a fork, and a child that has inherited an open one all the same gives it up."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 1.0
"""How long a fork waits for other threads to finish with the store."""


class ForkGuard:
    """A lock that a fork waits for, and that is free in the child. Use as `with guard.lock:`.

    Args:
        before: called before a fork with the lock held; not called if the lock could not be had within `WAIT_S`.
        in_child: called in the child, before anything else can use the lock.
    """

    def __init__(self, before: Callable[[], object], in_child: Callable[[], object]) -> None:
        self.lock = threading.RLock()
        self._held = False
        self._before, self._in_child = before, in_child
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._renew)

    def _acquire(self) -> None:
        self._held = self.lock.acquire(timeout=WAIT_S)
        if self._held:
            self._before()

    def _release(self) -> None:
        if self._held:
            self._held = False
            self.lock.release()

    def _renew(self) -> None:
        self.lock, self._held = threading.RLock(), False
        self._in_child()


def abandon(connection: Any) -> None:
    """Leave a connection of the parent's open for as long as this process lives: closing it would release the parent's
    locks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
