"""The store of one process: choices are looked up before the model is asked, and written once they are made; so are
self-tests and corrections (`lessons.py`).

No call waits for long, and none raises (except for the one warning, if the user has turned warnings into errors). If
the file fails, choices are kept in memory from then on.

The setting is `convselect.set_store(...)` or the environment:

    CONVSELECT_STORE          a file, or "off"
    CONVSELECT_SYSTEM_STORE   a read-only file below the user's own: choices that a team ships
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convselect.base import timing
from convselect.base.warnings import warn_once
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment
from convselect.store.fork import ForkGuard, abandon

if TYPE_CHECKING:
    from convselect.base.problem import ConvProblem
    from convselect.store.choices import Choices
    from convselect.store.decision import Decision
    from convselect.store.lessons import Lessons

BUSY_S = 0.2
"""How long a call waits for another process, in seconds."""
QUEUE = 64
"""Choices are written once this many are waiting .."""
EVERY_S = 5.0
""".. or this many seconds after the last write. After finding the file locked the process waits for as long."""
TRIES = 3
"""How many times in a row a locked file is tried before it is given up."""
REMEMBERED = 4096
"""Most choices kept in memory if they cannot be written."""
ROWS, SIZE_BYTES = 50_000, 64 * 2**20
"""Bounds of the user's store: choices and measurements together, and bytes in use."""

Key = tuple["ConvProblem", str]


class _Process:
    """The state of this process's two stores. Used by one thread at a time.

    Store modules are imported when a file is opened: without one, a process never imports sqlite3.
    """

    def __init__(self, setting: str | Path | None = None) -> None:
        given = setting if setting is not None else os.environ.get("CONVSELECT_STORE") or None
        self.off = given == "off"
        self.given = None if given is None or self.off else _absolute(given)
        system = os.environ.get("CONVSELECT_SYSTEM_STORE")
        self.system_path = None if not system or self.off else _absolute(system)
        self.pid = os.getpid()
        self.why_off: str | None = "it is switched off" if self.off else None
        self.warnings: list[tuple[str, str]] = []
        self.waiting: dict[Key, tuple[str, Decision]] = {}  # with fingerprints
        self.known: dict[Key, Decision] = {}  # choices that cannot be written, or that the parent process writes
        self.lessons: Lessons | None = None  # from the first self-test or correction on
        self.store: Choices | None = None
        self.system: Choices | None = None
        self.numbers: dict[str, int] = {}  # fingerprint -> number of the environment
        self.locked = 0  # how often in a row
        self.rest: timing.Deadline | None = None  # no attempts until then, after the file was locked
        self.written: timing.Deadline | None = None  # since the last write, or since the first choice waits
        self.damaged = False
        self.inside = 0  # depth of calls: a signal handler may run in the middle of one
        self._path: Path | None = self.given

    # ---- opening ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The user's store; it may not exist. Raises OSError if this user has no home."""
        if self._path is None:
            self._path = environment.user_cache() / "store.sqlite"
        return self._path

    @property
    def resting(self) -> bool:
        """Whether the file was locked just now, and is left alone for a while."""
        return self.rest is not None and not self.rest.passed

    def opened(self, *, make: bool = False) -> Choices | None:
        """The user's store; None if it cannot be opened, or does not exist and need not be made."""
        if self.inside > 1:
            return None
        if self.store is not None or self.why_off is not None or self.resting:
            return self.store
        try:
            path = self.path
            if not make and not os.path.lexists(path):
                return None
            from convselect.machine.ownership import examined
            from convselect.store.choices import Choices

            _make_folders(path.parent)
            self.store = Choices(examined(path, named=self.given is not None), busy_s=BUSY_S, shared=True)
        except Exception as error:
            self.failed(error)
        return self.store

    def opened_system(self) -> Choices | None:
        """The system's store, read-only; None if there is none, or it cannot be opened."""
        if self.inside > 1:
            return None
        if self.system is None and self.system_path is not None:
            try:
                from convselect.machine.ownership import examined
                from convselect.store.choices import Choices

                path = examined(self.system_path, named=True, any_owner=True)
                self.system = Choices(path, read_only=True, busy_s=BUSY_S, shared=True)
            except Exception as error:
                self.without_system(error)
        return self.system

    def close(self, *, quickly: bool = False) -> None:
        for store in (self.store, self.system):
            if store is not None:
                with contextlib.suppress(Exception):
                    store.close(quickly=quickly)
        self.store, self.system = None, None
        self.numbers.clear()

    # ---- failing ------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Wait for a while, begin a new file, or continue without a file, depending on the error."""
        from convselect.store.file import kind_of, set_aside

        kind = kind_of(error)
        if kind == "busy":
            self.locked += 1
            self.rest = timing.Deadline(EVERY_S)
            if self.locked < TRIES:
                return
        if kind == "damaged" and not self.damaged:
            self.damaged = True
            try:
                inode = getattr(error, "inode", None) or (None if self.store is None else self.store.inode)
                self.close(quickly=True)
                aside = set_aside(self.path, inode)
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
        self._keep_waiting_in_memory()

    def tell_invalid(self, store: Choices) -> None:
        """Warn of rows that were left out."""
        if store.invalid:
            self.warnings.append(
                (
                    "store row",
                    f"convselect: {store.invalid[0]}; what no version writes is left out. `convselect store "
                    "verify` lists it.",
                )
            )
            store.invalid.clear()

    def without_system(self, error: Exception) -> None:
        self.warnings.append(("system store", f"convselect: the system store is left out: {error}"))
        self.system, self.system_path = None, None

    def _keep_waiting_in_memory(self) -> None:
        self.known |= {key: decision for key, (_, decision) in self.waiting.items()}
        self.waiting = {}
        if self.lessons is not None:
            self.lessons.keep_in_memory()

    def forked(self) -> None:
        """Continue as a forked child. The parent writes the choices that were waiting."""
        self.pid, self.inside = os.getpid(), 0
        self._keep_waiting_in_memory()
        if self.store is not None or self.system is not None:
            # Forked in the middle of a look-up, or by code that bypasses the hooks of `os.fork`.
            for store in (self.store, self.system):
                if store is not None:
                    abandon(store._db)
            self.store, self.system, self.system_path = None, None, None
            self.why_off = self.why_off or "this process was forked while its parent was using the store"

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
        if self.written is not None and self.written.passed:
            self.write()
        fingerprint = environment.fingerprint_of(problem.device)
        if fingerprint is None:
            return None
        for opened, failed in ((self.opened, self.failed), (self.opened_system, self.without_system)):
            store = opened()
            if store is None:
                continue
            try:
                found = store.decision(fingerprint, problem, budgets)
                if store is self.store:
                    self.locked = 0
                self.tell_invalid(store)
                if found is not None and _is_current(found):
                    return found
            except Exception as error:
                failed(error)
        return None

    def remember(self, decision: Decision) -> None:
        if self.off:
            return
        key = (decision.problem, decision.budgets)
        fingerprint = environment.fingerprint_of(decision.problem.device)
        if self.why_off is not None or fingerprint is None:
            self.known[key] = decision
        else:
            self.known.pop(key, None)
            self.waiting[key] = (fingerprint, decision)
            self.write_in_time()
        for kept in (self.waiting, self.known):
            while len(kept) > REMEMBERED:
                kept.pop(next(iter(kept)))

    def write_in_time(self) -> None:
        """Write if many are waiting, or for long."""
        count = len(self.waiting) + (0 if self.lessons is None else len(self.lessons))
        if count:
            self.written = self.written or timing.Deadline(EVERY_S)
            if count >= QUEUE or self.written.passed:
                self.write()

    def write(self) -> None:
        """Write what is waiting, in one transaction per environment and kind. After a failure it keeps waiting."""
        if not self.waiting and not self.lessons:
            return
        store = self.opened(make=True)
        if store is None:
            return
        self.written = timing.Deadline(EVERY_S)
        try:
            for fingerprint in {fingerprint for fingerprint, _ in self.waiting.values()}:
                group = {key: one for key, (of, one) in self.waiting.items() if of == fingerprint}
                self._put(store, fingerprint, store.put_choices, list(group.values()))
                for key in group:
                    del self.waiting[key]
            if self.lessons:
                self.lessons.write(store, self._put)
            self.locked = 0
            if sum(store.counts()) > ROWS or store.used_bytes > SIZE_BYTES:
                # Prune a bit more than necessary, so that not every later write has to prune.
                store.prune(rows=ROWS * 9 // 10, size_bytes=SIZE_BYTES * 9 // 10)
        except Exception as error:
            self.failed(error)

    def _put(self, store: Choices, fingerprint: str, put: Callable[..., object], *values: object) -> None:
        """Call `put` with the number of this environment, which is added if it is new, and values to write."""
        import sqlite3

        for last in (False, True):
            try:
                if fingerprint not in self.numbers:
                    self.numbers[fingerprint] = store.environment(environment.descriptions[fingerprint], fingerprint)
                put(self.numbers[fingerprint], *values)
                return
            except sqlite3.IntegrityError:  # another process has removed the environment
                if last:
                    raise
                self.numbers.clear()


def _make_folders(folder: Path) -> None:
    """Make a folder, and those above it, for this user alone: one that others can write would be refused."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _is_current(decision: Decision) -> bool:
    """Whether the algorithm still has this revision: an upgraded one is measured again."""
    algorithm = BY_NAME.get(decision.algorithm)
    return algorithm is None or algorithm.revision == decision.revision


# ---- the process's own, for all threads -------------------------------------------------------------------------

_process: _Process | None = None


def _before_fork() -> None:
    if _process is not None and not _process.inside:
        _process.close(quickly=True)


def _in_child() -> None:
    if _process is not None:
        _process.forked()


_guard = ForkGuard(_before_fork, _in_child)


@contextlib.contextmanager
def using() -> Iterator[_Process]:
    """The process's state, locked for this thread; warnings are given after it is unlocked."""
    global _process
    with _guard.lock:
        if _process is None:
            _process = _Process()
        elif _process.pid != os.getpid():
            _process.forked()
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


def is_off() -> bool:
    """Whether there is nothing to look up, as far as can be told without the lock."""
    return _process is not None and _process.off


def look_up(problem: ConvProblem, budgets: str) -> Decision | None:
    """The choice stored for this problem under these budgets, on this machine, with these versions; None if there is
    none, or if its algorithm has another revision by now. The user's own store comes before the system's."""
    found = None
    with using() as process:
        found = process.look_up(problem, budgets)
    return found


def remember(decision: Decision) -> None:
    """Keep a choice: in memory at once, and soon on disk."""
    with using() as process:
        process.remember(decision)


def flush() -> None:
    """Write what is waiting."""
    if _process is None:
        return
    with using() as process:
        process.rest = None
        process.write()


def configure(path: str | Path | None = None) -> None:
    """Keep choices in this file from now on; "off": in no file; None: in the file that the environment variable names,
    by default in the user's cache directory. Choices not yet written go to the file used so far."""
    global _process
    flush()
    with _guard.lock:
        if _process is not None:
            _process.close()
        _process = _Process(path)


def user_path() -> Path:
    """The user's store, which may not exist.

    Raises:
        OSError: if it is switched off, or this user has no home.
    """
    process = _process or _Process()
    if process.off:
        raise OSError("the store is switched off")
    return process.path


def status() -> dict[str, Any]:
    """The state of the store: path, enabled, why_off, exists, journal ("wal" or "delete"), healthy, rows (choices and
    measurements), choices, measurements, self_tests, corrections, bytes, waiting (choices not written yet),
    system_store (its path or None)."""
    from convselect.store.status import described

    told: dict[str, Any] = {}
    with using() as process:
        told = described(process)
    return told


@atexit.register
def _at_exit() -> None:
    flush()
    with _guard.lock:
        if _process is not None:
            if _process.waiting:
                warn_once(
                    "store", f"convselect: {len(_process.waiting)} choices could not be written: the store is in use"
                )
            _process.close()
