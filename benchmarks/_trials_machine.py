"""What `benchmarks.trials` runs under: its cores, spinning neighbours, restarts with other variables, the clock."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from convselect.base import timing
from convselect.demo.demo import restart_with_tuned_malloc

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
SPINNERS = {"none": 0, "half": 1, "fifth": 4}
"""Spinning processes on each of the benchmark's cores, of its own priority: half of a core is left, or a fifth."""
_SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(10**6):
        pass
"""


@dataclass(frozen=True)
class Figure:
    """One number of the report.

    Attributes:
        part: number of the part that it belongs to.
        target: the most it may be; None if there is no target.
        count: how many problems, calls or runs it is drawn from.
        unit: "", "us", "calls", "%".
    """

    part: int
    name: str
    value: float
    target: float | None = None
    count: int = 0
    unit: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; NaN does not meet one. None if there is none, or nothing was measured."""
        return None if self.target is None or not self.count else self.value <= self.target


def restart(isa: str | None) -> None:
    """Restart this process, at most once, with malloc told to keep freed memory and limited to `isa`."""
    wanted = AVX2 if isa == "avx2" else {}
    missing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    os.environ.update(missing)
    restart_with_tuned_malloc()
    if missing:  # malloc was as it should be
        os.execve(sys.executable, sys.orig_argv, os.environ)


def pin(threads: int, core: int | None) -> list[int]:
    """Bind this process and its later children to as many cores as threads, the last ones unless `core` is given;
    returns them, or nothing where processes cannot be bound."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    cores = allowed[-threads:] if core is None else [core, *(c for c in allowed if c != core)][:threads]
    os.sched_setaffinity(0, cores)
    return cores


@contextlib.contextmanager
def neighbours(busy: str, cores: Sequence[int]) -> Iterator[None]:
    """Spinning processes on these cores, for as long as this context lasts. They end with this process in any case."""
    spinning = []
    try:
        for core in cores:
            for _ in range(SPINNERS[busy]):
                spinning.append(subprocess.Popen([sys.executable, "-S", "-c", _SPIN]))
                os.sched_setaffinity(spinning[-1].pid, {core})
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def clock() -> Callable[[], int]:
    """Nanoseconds: CPU time of the calling thread if torch computes on that alone, else the time that passes."""
    return timing.SYSTEM_CLOCK.thread_ns if torch.get_num_threads() == 1 else timing.SYSTEM_CLOCK.wall_ns


def once(call: Callable[[], object], now: Callable[[], int]) -> float:
    """Microseconds of one call. Its result is dropped after the timing."""
    start = now()
    result = call()
    end = now()
    del result
    return (end - start) / 1e3


def quantile(values: Sequence[float], share: float) -> float:
    """NaN of nothing."""
    return float(torch.tensor(list(values), dtype=torch.float64).quantile(share)) if values else float("nan")
