"""How the C kernels divide their work among threads that are not there: `virtual_openmp.c`, and what it writes down.

The kernels run as they are; only OpenMP's functions are others, which run the threads of a team one after another on
one processor. So what is counted is the division that the kernel makes, its schedule included, and no copy of it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

SOURCE = Path(__file__).with_name("virtual_openmp.c")
MOST_THREADS = 64
_PRELOADED = "CONVSELECT_VIRTUAL_OPENMP"
_ROOM = 1 << 20
Result = TypeVar("Result")


class Stretch(NamedTuple):
    """What a thread did between two calls of OpenMP; `virtual_openmp.c` has the fields."""

    phase: int
    team: int
    rank: int
    loop: int
    first: int
    ns: int

    @property
    def key(self) -> tuple[int, ...]:
        """The same in every run: parts of a dynamic loop go to whichever thread is free."""
        return (self.phase, self.team, self.loop, self.first) if self.first >= 0 else self[:-1]


class _Stretch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("phase", "team", "rank", "loop")),
        ("first", ctypes.c_int64),
        ("ns", ctypes.c_int64),
    )


class Division(NamedTuple):
    """One call, as it is divided among threads.

    Attributes:
        work_ns: processor time of all threads together.
        span_ns: time that passes, on as many processors as there are threads.
        serial_ns: of the span, what one thread does alone, outside parallel regions.
        shares: tasks of the longest phase: parts of dynamic loops, or threads with a share of a static one.
        largest: the largest of these over their mean.
    """

    work_ns: int
    span_ns: int
    serial_ns: int
    shares: int
    largest: float


def build(folder: str | Path) -> Path:
    """Compile `virtual_openmp.c` into this folder.

    Raises:
        FileNotFoundError: without GCC, whose functions these are.
        subprocess.CalledProcessError: if it does not compile.
    """
    compiler = shutil.which(os.environ.get("CC") or "gcc")
    if compiler is None:
        raise FileNotFoundError("gcc: OpenMP's functions are written for what it calls")
    library = Path(folder) / "virtual_openmp.so"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """The environment of a process in which it stands in front of OpenMP's own."""
    return {**os.environ, "LD_PRELOAD": str(library), _PRELOADED: str(library)}


def run_again(folder: str | Path) -> int:
    """This program once more, with its arguments, in such an environment; its exit status."""
    command = [sys.executable, *sys.orig_argv[1:]]
    return subprocess.run(command, env=environment(build(folder)), check=False).returncode


def preloaded() -> bool:
    return _PRELOADED in os.environ


class Call(NamedTuple):
    """A call of a C function of at most 8 integers and pointers, which returns 0 if all is well.

    Attributes:
        held: what has to live as long.
    """

    function: Any
    arguments: tuple[int, ...]
    held: object = None

    def __call__(self) -> int:
        return int(self.function(*self.arguments))


class Recorder:
    """Writes down what threads do.

    Raises:
        RuntimeError: if this process was not started with `environment`.
    """

    def __init__(self) -> None:
        if not preloaded():
            raise RuntimeError("OpenMP's own functions are in use: start the process with `environment`")
        self._library = ctypes.CDLL(os.environ[_PRELOADED])
        self._library.virtual_begin.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
        self._library.virtual_end.restype = self._library.virtual_call.restype = ctypes.c_int64
        self._library.virtual_call.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, *(ctypes.c_void_p,) * 3,
        )  # fmt: skip
        self._log: Any = (_Stretch * _ROOM)()

    def record(self, call: Callable[[], Result], threads: int) -> tuple[Result, list[Stretch]]:
        """The call's result, and what its threads did, at most `threads` of them. Of a `Call` nothing of Python's is
        counted.

        Raises:
            ValueError: for a number of threads that is not between 1 and MOST_THREADS.
            RuntimeError: if the call makes too many calls of OpenMP.
        """
        if not 1 <= threads <= MOST_THREADS:
            raise ValueError(f"1 to {MOST_THREADS} threads, not {threads}")
        log = ctypes.byref(self._log)
        result: Any
        if isinstance(call, Call):
            values, status = (ctypes.c_int64 * 8)(*call.arguments), ctypes.c_int32()
            address = ctypes.cast(call.function, ctypes.c_void_p)
            count = int(self._library.virtual_call(threads, log, _ROOM, address, values, ctypes.byref(status)))
            result = status.value
        else:
            self._library.virtual_begin(threads, log, _ROOM)
            try:
                result = call()
            finally:
                count = int(self._library.virtual_end())
        if count == _ROOM:
            raise RuntimeError(f"more than {_ROOM} stretches")
        return result, [Stretch(s.phase, s.team, s.rank, s.loop, s.first, s.ns) for s in self._log[:count]]


def least(runs: Iterable[Sequence[Stretch]]) -> list[Stretch]:
    """Each stretch with the least time that it took in one of these runs of a call: what else the processor does only
    adds to it."""
    found: dict[tuple[int, ...], Stretch] = {}
    for run in runs:
        for s in run:
            known = found.get(s.key)
            if known is None or s.ns < known.ns:
                found[s.key] = s
    return list(found.values())


def division(stretches: Iterable[Stretch]) -> Division:
    """Phases pass one after another. Within one each thread has what is its own, and takes parts of dynamic loops, in
    their order, whenever it is the one that is free first."""
    phases: dict[int, list[Stretch]] = defaultdict(list)
    for s in stretches:
        phases[s.phase].append(s)
    work = span = serial = 0
    longest, shares, largest = -1, 0, 1.0
    for members in phases.values():
        clocks = [0] * members[0].team
        for s in members:
            if s.first < 0:
                clocks[s.rank] += s.ns
        parts = sorted((s for s in members if s.first >= 0), key=lambda s: (s.loop, s.first))
        tasks = [s.ns for s in parts] or [ns for ns in clocks if ns > 0]
        for s in parts:
            clocks[clocks.index(min(clocks))] += s.ns
        work += sum(s.ns for s in members)
        span += max(clocks)
        if len(clocks) == 1:
            serial += clocks[0]
        if max(clocks) > longest and sum(tasks) > 0:
            longest, shares, largest = max(clocks), len(tasks), max(tasks) * len(tasks) / sum(tasks)
    return Division(work, span, serial, shares, largest)
