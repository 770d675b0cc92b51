"""Self-tests and corrections as one process sees them: read from both stores, and kept until they are written.

What `process.py` promises of choices holds for them: no call waits for long, and none raises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from convselect.base.version import __version__
from convselect.machine import environment
from convselect.store.process import using

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from convselect.store.choices import Choices
    from convselect.store.learnt import CorrectionKey, TestKey
    from convselect.store.process import _Process

    Found = TypeVar("Found")

REMEMBERED = 4096
"""Most of either kind that are kept in memory; the oldest are dropped."""


class Lessons:
    """What this process has learnt. Used by one thread at a time; `process.py` writes what waits."""

    def __init__(self) -> None:
        self.waiting_tests: dict[TestKey, bool] = {}  # of this machine's processor
        self.waiting: dict[tuple[str, CorrectionKey], tuple[float, float]] = {}  # with fingerprints
        self._known: dict[tuple[str | None, CorrectionKey], tuple[float, float]] = {}  # those that are never written
        self._passed: set[TestKey] = set()  # in this process
        self._read: set[TestKey] | None = None  # in others, before

    def __len__(self) -> int:
        """How many wait to be written."""
        return len(self.waiting_tests) + len(self.waiting)

    def self_tests(self, process: _Process) -> set[TestKey]:
        found = self._read
        if found is None:
            fingerprint = environment.fingerprint_of("cpu")
            found = set()
            if fingerprint is not None:
                found = found.union(*_in_both(process, lambda store: store.self_tests(fingerprint, __version__)))
            if process.inside <= 1 and not process.resting:  # else it is read again: this may not be all
                self._read = found
        return found | self._passed

    def remember_self_test(self, process: _Process, key: TestKey, passed: bool) -> None:
        (self._passed.add if passed else self._passed.discard)(key)
        if not passed and self._read is not None:
            self._read.discard(key)
        if process.why_off is None and environment.fingerprint_of("cpu") is not None:
            self.waiting_tests[key] = passed
        _bound(self.waiting_tests)

    def corrections(self, process: _Process, model: str, device: str) -> dict[CorrectionKey, tuple[float, float]]:
        fingerprint = environment.fingerprint_of(device)
        found: dict[CorrectionKey, tuple[float, float]] = {}
        if fingerprint is not None:
            for one in reversed(_in_both(process, lambda store: store.corrections(fingerprint, model))):
                found |= one  # the user's own store comes before the system's
        for own in (self._known, self.waiting):
            found |= {key: values for (of, key), values in own.items() if of == fingerprint and key[0] == model}
        return found

    def remember_correction(self, process: _Process, key: CorrectionKey, n: float, mean: float, device: str) -> None:
        if not (math.isfinite(n) and math.isfinite(mean)):
            return
        fingerprint = environment.fingerprint_of(device)
        if process.why_off is not None or fingerprint is None:
            _put_last(self._known, (fingerprint, key), (float(n), float(mean)))
        else:
            self._known.pop((fingerprint, key), None)
            _put_last(self.waiting, (fingerprint, key), (float(n), float(mean)))

    def write(self, store: Choices, put: Callable[..., None]) -> None:
        """Write what waits, in one transaction per environment; what was written no longer waits.

        Args:
            put: `_Process._put`.

        Raises:
            sqlite3.Error: if writing failed.
        """
        here = environment.fingerprint_of("cpu")
        for fingerprint in {of for of, _ in self.waiting} | ({here} if here and self.waiting_tests else set()):
            tests = dict(self.waiting_tests) if fingerprint == here else {}
            group = {key: values for (of, key), values in self.waiting.items() if of == fingerprint}
            put(store, fingerprint, store.put_learnt, __version__, tests, group)
            for test in tests:
                self.waiting_tests.pop(test, None)
            for key in group:
                self.waiting.pop((fingerprint, key), None)

    def keep_in_memory(self) -> None:
        """Nothing is written any more, or the parent process does it."""
        for key, values in self.waiting.items():
            _put_last(self._known, key, values)
        self.waiting, self.waiting_tests = {}, {}


def _in_both(process: _Process, read: Callable[[Choices], Found]) -> list[Found]:
    """What is read from the user's store and from the system's, of those that there are."""
    found = []
    for opened, failed in ((process.opened, process.failed), (process.opened_system, process.without_system)):
        store = opened()
        if store is not None:
            try:
                found.append(read(store))
                process.tell_invalid(store)
            except Exception as error:
                failed(error)
    return found


def _put_last(kept: dict, key: object, value: object) -> None:
    kept.pop(key, None)
    kept[key] = value
    _bound(kept)


def _bound(kept: dict) -> None:
    while len(kept) > REMEMBERED:
        kept.pop(next(iter(kept)))


# ---- the process's own, for all threads -------------------------------------------------------------------------


def self_tests() -> set[TestKey]:
    """What has passed its self-test on this machine's processor, under this version of convselect: (algorithm,
    revision, direction, dtype, layout) each. The files are read once per process."""
    found: set[TestKey] = set()
    with using() as process:
        found = _of(process).self_tests(process)
    return found


def remember_self_test(key: TestKey, passed: bool = True) -> None:
    """Keep the result of a self-test: in memory at once, and soon on disk. One that failed is not in `self_tests`, so
    that a later process tries again."""
    with using() as process:
        _of(process).remember_self_test(process, key, passed)
        process.write_in_time()


def corrections(model: str, device: str = "cpu") -> list[tuple[str, str, float, float]]:
    """What trials on this machine have taught about a model: (algorithm, layer, n, mean) each, 20,000 at most per
    store. The user's own store comes before the system's. Reads the files, at about 5 us a row.

    Args:
        model: the artifact's digest.
    """
    found: dict[CorrectionKey, tuple[float, float]] = {}
    with using() as process:
        found = _of(process).corrections(process, model, device)
    return [(algorithm, layer, n, mean) for (_, algorithm, layer), (n, mean) in found.items()]


def remember_correction(model: str, algorithm: str, layer: str, n: float, mean: float, device: str = "cpu") -> None:
    """Keep a correction, in place of an earlier one: in memory at once, and soon on disk. One that is not finite is
    left out.

    Args:
        model: the artifact's digest.
        algorithm: with its direction: "winograd6 forward".
        layer: a problem without N, H and W, as text.
        n: number of problems behind it.
        mean: mean residual of the logarithm of the gain.
    """
    with using() as process:
        _of(process).remember_correction(process, (model, algorithm, layer), n, mean, device)
        process.write_in_time()


def _of(process: _Process) -> Lessons:
    if process.lessons is None:
        process.lessons = Lessons()
    return process.lessons
