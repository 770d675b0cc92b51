"""The store as one process sees it: choices looked up before the model is asked, and written down once they are made.

It never waits for long and never raises (but for the one warning, where the user has made warnings errors). Whatever
goes wrong with the file, choices are kept in memory from then on.

The setting is `convselect.set_store(...)` or the environment:

    CONVSELECT_STORE          a file, or "off"
    CONVSELECT_SYSTEM_STORE   a file that is only read, below the user's own: choices that a team ships
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convselect import timing
from convselect.warnings import warn_once

if TYPE_CHECKING:
    from convselect.problem import ConvProblem
    from convselect.store.store import Decision, Store

BUSY_S = 0.2
"""How long a call waits for another process."""
QUEUE = 64
"""So many choices are written together .."""
EVERY_S = 5.0
""".. or those that wait when the last write is so long ago. After a locked file there is as long a rest."""
TRIES = 3
"""So many times in a row a locked file is tried."""
REMEMBERED = 4096
"""Choices kept in memory at most, where they cannot be written."""
ROWS, SIZE_BYTES = 50_000, 64 * 2**20
"""Bounds of the user's store: choices and measurements together, and bytes in use."""

Key = tuple["ConvProblem", str]


class _Process:
    """What this process knows of its two stores. Used by one thread at a time."""

    def __init__(self, setting: str | Path | None = None) -> None:
        given = setting if setting is not None else os.environ.get("CONVSELECT_STORE") or None
        self.off = given == "off"
        self.given = None if given is None or self.off else Path(os.path.abspath(os.path.expanduser(given)))
        system = os.environ.get("CONVSELECT_SYSTEM_STORE")
        self.system_path = None if not system or self.off else Path(os.path.abspath(os.path.expanduser(system)))
        self.pid = os.getpid()
        self.why_off: str | None = "it is switched off" if self.off else None
        self.warnings: list[tuple[str, str]] = []
        self.waiting: dict[Key, tuple[str, Decision]] = {}
        self.known: dict[Key, Decision] = {}  # what cannot be written, or was the parent's to write
        self.store: Store | None = None
        self.system: Store | None = None
        self.numbers: dict[str, int] = {}  # of environments, by fingerprint
        self.locked = 0
        self.rest = timing.Deadline(0)
        self.written = timing.Deadline(EVERY_S)
        self.damaged = False
        self.inside = 0  # how deep: a signal's handler may come in the middle of a call
        self._path: Path | None = self.given

    # ---- opening ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The user's store; it may not exist. Raises OSError where this user has no home."""
        if self._path is None:
            from convselect.machine.environment import user_cache

            self._path = user_cache() / "store.sqlite"
        return self._path

    def opened(self, *, make: bool) -> Store | None:
        """The user's store; None where it cannot be had, or is not there and need not be made."""
        if self.inside > 1:
            return None
        if self.store is not None or self.why_off is not None or not self.rest.passed:
            return self.store
        try:
            path = self.path
            if not make and not os.path.exists(path):
                return None
            from convselect.store.store import Store

            self._see_to_folder(path.parent)
            self.store = Store(path, busy_s=BUSY_S, shared=True)
        except Exception as error:
            self.failed(error)
        return self.store

    def _see_to_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        # What another user put there could say which code runs here; a path that was given is the user's own decision.
        if self.given is None and hasattr(os, "geteuid") and folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to another user")

    def opened_system(self) -> Store | None:
        if self.inside > 1:
            return None
        if self.system is None and self.system_path is not None:
            from convselect.store.store import Store

            try:
                self.system = Store(self.system_path, read_only=True, busy_s=BUSY_S, shared=True)
            except Exception as error:
                self.without_system(error)
        return self.system

    def without_system(self, error: Exception) -> None:
        self.warnings.append(("system store", f"convselect: the system store is left out: {error}"))
        self.system, self.system_path = None, None

    # ---- failing ------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Rest, begin a new file, or do without one from now on, by what went wrong."""
        from convselect.store.aside import set_aside
        from convselect.store.file import kind_of

        kind = kind_of(error)
        if kind == "busy":
            self.locked += 1
            self.rest = timing.Deadline(EVERY_S)
            if self.locked < TRIES:
                return
        if kind == "damaged" and not self.damaged:
            self.damaged = True
            try:
                judged = getattr(error, "inode", None) or (None if self.store is None else self.store.inode)
                self.close(quickly=True)
                aside = set_aside(self.path, judged)
                kept = f"; it is kept as {aside}" if aside else ""
                self.warnings.append(("store", f"convselect: {error}{kept}, and a new one is begun."))
                return
            except OSError as second:
                error = second
        self.close(quickly=True)
        self.why_off = str(error) or repr(error)
        self.warnings.append(
            ("store", f"convselect: choices are kept in memory only, and not for later processes: {self.why_off}")
        )
        self.known |= {key: decision for key, (_, decision) in self.waiting.items()}
        self.waiting.clear()

    def close(self, *, quickly: bool = False) -> None:
        for store in (self.store, self.system):
            if store is not None:
                with contextlib.suppress(Exception):
                    store.close(quickly=quickly)
        self.store, self.system = None, None
        self.numbers.clear()

    # ---- use ----------------------------------------------------------------------------------------------------

    def look_up(self, problem: ConvProblem, budgets: str) -> Decision | None:
        if self.off:
            return None
        key = (problem, budgets)
        waiting = self.waiting.get(key)
        if waiting is not None:
            return waiting[1]
        if key in self.known:
            return self.known[key]
        if self.waiting and self.written.passed:
            self.write()
        from convselect.machine.environment import fingerprint_of

        mark = fingerprint_of(problem.device)
        if mark is None:
            return None
        user = self.opened(make=False)
        if user is not None:
            try:
                found = user.decision(mark, problem, budgets)
                self.locked = 0
                if found is not None and _is_current(found):
                    return found
            except Exception as error:
                self.failed(error)
        system = self.opened_system()
        if system is not None:
            try:
                found = system.decision(mark, problem, budgets)
                if found is not None and _is_current(found):
                    return found
            except Exception as error:
                self.without_system(error)
        return None

    def remember(self, decision: Decision) -> None:
        if self.off:
            return
        from convselect.machine.environment import fingerprint_of

        key = (decision.problem, decision.budgets)
        mark = fingerprint_of(decision.problem.device)
        if self.why_off is not None or mark is None:
            self.known[key] = decision
        else:
            self.known.pop(key, None)
            self.waiting[key] = (mark, decision)
            if len(self.waiting) >= QUEUE or self.written.passed:
                self.write()
        for kept in (self.waiting, self.known):
            while len(kept) > REMEMBERED:
                kept.pop(next(iter(kept)))

    def write(self) -> None:
        """What waits, in one transaction per environment. What could not be written waits on."""
        if not self.waiting:
            return
        store = self.opened(make=True)
        if store is None:
            return
        import sqlite3

        self.written = timing.Deadline(EVERY_S)
        try:
            for mark in {mark for mark, _ in self.waiting.values()}:
                group = {key: one for key, (of, one) in self.waiting.items() if of == mark}
                try:
                    store.decide(self._number(store, mark), list(group.values()))
                except sqlite3.IntegrityError:  # another process has removed the environment
                    self.numbers.clear()
                    store.decide(self._number(store, mark), list(group.values()))
                for key in group:
                    del self.waiting[key]
            self.locked = 0
            if sum(store.counts()) > ROWS or store.used_bytes > SIZE_BYTES:
                # Some room, so that this does not come with every write from now on.
                store.prune(rows=ROWS * 9 // 10, size_bytes=SIZE_BYTES * 9 // 10)
        except Exception as error:
            self.failed(error)

    def _number(self, store: Store, mark: str) -> int:
        from convselect.machine.environment import descriptions

        if mark not in self.numbers:
            self.numbers[mark] = store.environment(descriptions[mark], mark)
        return self.numbers[mark]


def _is_current(decision: Decision) -> bool:
    """An upgraded algorithm is measured again."""
    from convselect.kernels.pool import BY_NAME

    algorithm = BY_NAME.get(decision.algorithm)
    return algorithm is None or algorithm.revision == decision.revision


# ---- the process's own, for all threads -------------------------------------------------------------------------

_lock = threading.RLock()
_process: _Process | None = None


@contextlib.contextmanager
def _using() -> Iterator[_Process]:
    """The process's view, for this thread alone; warnings follow once it is free again."""
    global _process
    with _lock:
        if _process is None:
            _process = _Process()
        elif _process.pid != os.getpid():
            _in_child()
        process = _process
        process.inside += 1
        try:
            yield process
        except Exception as error:
            process.failed(error)
        finally:
            process.inside = max(0, process.inside - 1)  # a child begins at 0
        said, process.warnings = process.warnings, []
    for topic, text in said:
        warn_once(topic, text)


def look_up(problem: ConvProblem, budgets: str) -> Decision | None:
    """What was decided for this problem under these budgets, on this machine, with these versions; None where nothing
    was, or where the algorithm has had another revision since. The user's own store comes before the system's."""
    found = None
    with _using() as process:
        found = process.look_up(problem, budgets)
    return found


def remember(decision: Decision) -> None:
    """Keep a decision: at once in memory, and before long on disk."""
    with _using() as process:
        process.remember(decision)


def flush() -> None:
    """Write what waits."""
    if _process is None:
        return
    with _using() as process:
        process.rest = timing.Deadline(0)
        process.write()


def configure(path: str | Path | None = None) -> None:
    """Keep choices in this file from now on; "off": nowhere; None: where the environment says, else in the user's cache
    directory. Choices made so far and not yet written go to the file that was in use."""
    global _process
    flush()
    with _lock:
        if _process is not None:
            _process.close()
        _process = _Process(path)


def user_path() -> Path:
    """The user's store, which may not exist.

    Raises:
        OSError: where it is switched off, or this user has no home.
    """
    process = _process or _Process()
    if process.off:
        raise OSError("the store is switched off")
    return process.path


def status() -> dict[str, Any]:
    """How it stands with the store: path, enabled, why_off, exists, journal ("wal" or "delete"), healthy, rows (choices
    and measurements), bytes, waiting (choices not written yet), system_store (its path, where there is one)."""
    told: dict[str, Any] = dict.fromkeys(("path", "journal", "rows", "bytes"))
    told |= {"enabled": False, "exists": False, "healthy": False}
    with _using() as process:
        with contextlib.suppress(OSError):
            told["path"] = None if process.off else str(process.path)
        store = process.opened(make=False)
        if store is not None:
            try:
                choices, measurements = store.counts()
                told |= {
                    "exists": True,
                    "journal": store.journal,
                    "rows": choices + measurements,
                    "choices": choices,
                    "measurements": measurements,
                    "bytes": store.used_bytes,
                    "healthy": not store.problems(),
                }
            except Exception as error:
                process.failed(error)
        elif process.why_off is None:
            told["healthy"] = process.rest.passed  # nothing there yet
        system = process.opened_system()
        told |= {
            "enabled": process.why_off is None,
            "why_off": process.why_off,
            "waiting": len(process.waiting),
            "system_store": None if system is None else str(system.path),
        }
    return told


def _at_exit() -> None:
    flush()
    with _lock:
        if _process is not None:
            if _process.waiting:
                warn_once(
                    "store", f"convselect: {len(_process.waiting)} choices could not be written: the store is in use"
                )
            _process.close()


# ---- forks ------------------------------------------------------------------------------------------------------
# SQLite's locks belong to a process, and a child that went on with its parent's connection could break the file. So
# the parent closes its own before it forks; it is opened again when it is next needed.

_held = False


def _before_fork() -> None:
    global _held
    _held = _lock.acquire(timeout=1.0)
    if _held and _process is not None and not _process.inside:
        _process.close(quickly=True)


def _in_parent() -> None:
    global _held
    if _held:
        _held = False
        _lock.release()


def _after_in_child() -> None:
    global _lock, _held
    _lock, _held = threading.RLock(), False
    if _process is not None:
        _in_child()


def _in_child() -> None:
    """What waited is the parent's to write."""
    process = _process
    assert process is not None
    process.pid, process.inside = os.getpid(), 0
    process.known |= {key: decision for key, (_, decision) in process.waiting.items()}
    process.waiting = {}
    if process.store is not None or process.system is not None:
        # Forked in the middle of a look-up, or by code that told nobody: neither to be used here nor to be closed.
        import ctypes

        for store in (process.store, process.system):
            if store is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(store._db))
        process.store, process.system, process.system_path = None, None, None
        process.why_off = process.why_off or "this process was forked while its parent was using the store"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_after_in_child)
atexit.register(_at_exit)
