"""Interleaved timing. The only file of the project that reads a clock.

A and B are timed A B A B in one process, in a new random order every round, so that another process, a change of clock
frequency or a drifting cache affects both; only ratios within a round are compared.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

_Result = TypeVar("_Result")


class Clock(NamedTuple):
    """Two clocks, in nanoseconds: `wall_ns` is wall-clock time, `thread_ns` CPU time of the calling thread.

    `thread_ns` leaves out preemption by other processes, but also the work of other threads: with more than one thread
    it is the calling thread's share only, and on an accelerator it means nothing.
    """

    wall_ns: Callable[[], int]
    thread_ns: Callable[[], int]


SYSTEM_CLOCK = Clock(time.perf_counter_ns, time.thread_time_ns)
PROCESS_CLOCK = Clock(time.perf_counter_ns, time.process_time_ns)
"""With the CPU time of all threads in place of the calling one's: for what computes on threads of its own."""


def computed_us() -> float:
    """CPU time that all threads of this process have used so far, in us."""
    return time.process_time_ns() / 1e3


class Deadline:
    """A stretch of wall-clock time that begins now. `seconds=None` never ends."""

    def __init__(self, seconds: float | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.seconds = seconds
        self._wall_ns = clock.wall_ns
        self._start_ns = clock.wall_ns()

    @property
    def elapsed_s(self) -> float:
        return (self._wall_ns() - self._start_ns) / 1e9

    @property
    def remaining_s(self) -> float:
        """Seconds left, not below 0; infinite without an end."""
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.elapsed_s)

    @property
    def passed(self) -> bool:
        return self.seconds is not None and self.elapsed_s >= self.seconds


def _percentile(samples: Sequence[float], percent: float) -> float:
    return float(np.percentile(samples, percent))


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one function: one sample per round, in the order of the rounds, in microseconds.

    Attributes:
        samples_us: wall-clock time.
        thread_us: CPU time of the calling thread in the same calls.
    """

    samples_us: tuple[float, ...]
    thread_us: tuple[float, ...] = ()

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    @property
    def median_us(self) -> float:
        return _percentile(self.samples_us, 50)

    @property
    def p20_us(self) -> float:
        return _percentile(self.samples_us, 20)

    @property
    def p80_us(self) -> float:
        return _percentile(self.samples_us, 80)

    @property
    def on_thread_clock(self) -> Timing:
        """The same calls with the calling thread's CPU time as the samples."""
        return Timing(self.thread_us, self.thread_us)


class Ratio(NamedTuple):
    """Median, 20th and 80th percentile of the ratios of samples taken in the same round."""

    median: float
    p20: float
    p80: float


def ratio(a: Timing, b: Timing) -> Ratio:
    """Time of `a` over time of `b`, paired by round: above 1 if `b` is faster.

    Raises:
        ValueError: unless both have the same, nonzero number of samples.
    """
    if len(a.samples_us) != len(b.samples_us) or not a.samples_us:
        raise ValueError(f"cannot pair {len(a.samples_us)} samples with {len(b.samples_us)}")
    ratios = [x / y for x, y in zip(a.samples_us, b.samples_us, strict=True)]
    return Ratio(_percentile(ratios, 50), _percentile(ratios, 20), _percentile(ratios, 80))


@dataclass(slots=True)
class _Samples:
    wall_us: list[float] = field(default_factory=list)
    thread_us: list[float] = field(default_factory=list)


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    seed: int = 0,
    clock: Clock = SYSTEM_CLOCK,
    warm: int = 0,
    first: bool = True,
    deadline_s: float | None = None,
    synchronise: Callable[[], object] | None = None,
    on_round: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time each function once per round, in a new random order every round, after one untimed call of each (`first`).

    Args:
        functions: the functions to time. Each is called without arguments; its result is dropped after the timing.
        rounds: samples per function.
        seed: random seed of the orders.
        warm: untimed calls of a function before each timed one: it then finds the caches as its own calls leave them,
            and threads that others left spinning at rest.
        deadline_s: stop after a round when another like the longest so far would end later than this many seconds
            after the untimed calls, but not before two rounds.
        synchronise: waits until an accelerator has finished; called, timed, after each function, and before it.
        on_round: called, untimed, with the number of rounds done.

    Raises:
        ValueError: for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    # Only orders come from this generator, and its own state keeps the global one as the caller left it.
    order_source = random.Random(seed)
    wall_ns, thread_ns = clock
    wait = synchronise if synchronise is not None else _nothing
    for function in functions.values() if first else ():
        function()
    wait()
    samples = {name: _Samples() for name in functions}
    names = list(functions)
    deadline = Deadline(deadline_s, clock=clock)
    longest_s, before_s = 0.0, 0.0
    for done in range(1, rounds + 1):
        order_source.shuffle(names)
        for name in names:
            function = functions[name]
            for _ in range(warm):
                function()
            wait()
            thread_start = thread_ns()
            wall_start = wall_ns()
            result = function()
            wait()
            wall_end = wall_ns()
            thread_end = thread_ns()
            del result
            samples[name].wall_us.append((wall_end - wall_start) / 1e3)
            samples[name].thread_us.append((thread_end - thread_start) / 1e3)
        if on_round is not None:
            on_round(done)
        if deadline_s is not None:
            now_s = deadline.elapsed_s
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
            if done >= 2 and now_s + longest_s > deadline_s:
                break
    return {name: Timing(tuple(s.wall_us), tuple(s.thread_us)) for name, s in samples.items()}


def _nothing() -> None:
    pass


def once(function: Callable[[], _Result], clock: Clock = SYSTEM_CLOCK) -> tuple[_Result, Timing]:
    """(the result of one call, its time)."""
    thread_start, wall_start = clock.thread_ns(), clock.wall_ns()
    result = function()
    wall_end, thread_end = clock.wall_ns(), clock.thread_ns()
    return result, Timing(((wall_end - wall_start) / 1e3,), ((thread_end - thread_start) / 1e3,))


class Events(NamedTuple):
    """Timing of an accelerator by marks in its own queue.

    Attributes:
        event: makes a mark, with `record()` and `elapsed_time(later)` in milliseconds.
        occupy: keeps the accelerator busy for about the given number of microseconds, so that the work queued after it
            is timed without gaps of waiting for the host.
        synchronise: waits until it has finished.
    """

    event: Callable[[], Any]
    occupy: Callable[[float], object]
    synchronise: Callable[[], object]


CYCLES_PER_US = 2000.0
"""At least what a GPU's clock does, so that it is occupied for long enough."""


def cuda_events() -> Events:
    """For the current CUDA device and stream."""
    return Events(
        lambda: torch.cuda.Event(enable_timing=True),
        lambda us: torch.cuda._sleep(int(us * CYCLES_PER_US)),
        torch.cuda.synchronize,
    )


def assert_timer_sane(clock: Clock = SYSTEM_CLOCK) -> None:
    """Check that both clocks run, never run backwards, and show a longer time for twice the work.

    Raises:
        AssertionError: with the clock's name and what it did. Not an `assert`, so `python -O` checks as well.
    """

    def spin(steps: int) -> Callable[[], object]:
        return lambda: sum(range(steps))

    for name, read in zip(clock._fields, clock, strict=True):
        readings = [read() for _ in range(1000)]
        if any(later < earlier for earlier, later in itertools.pairwise(readings)):
            raise AssertionError(f"{name} ran backwards")
    # Well under a time slice, which is 3 ms or more: on a busy core some of the calls then run without a break.
    timings = interleaved({"once": spin(20_000), "twice": spin(40_000)}, 25, clock=clock)
    for name, thread in (("wall_ns", False), ("thread_ns", True)):
        once, twice = (t.on_thread_clock if thread else t for t in (timings["once"], timings["twice"]))
        if once.min_us <= 0:
            raise AssertionError(f"{name} found no time to pass while work was done")
        # Other processes disturb the minimum least; the true ratio is 2, and 1 would mean that it measures nothing.
        if not 1.3 < twice.min_us / once.min_us < 3:
            raise AssertionError(f"{name}: twice the work took {twice.min_us / once.min_us:.2f} times as long, not 2")


def assert_known_workload(clock: Clock = SYSTEM_CLOCK) -> None:
    """Check that matrix products of known cost take plausible times.

    A product of twice the size costs eight times as much, and one core computes between 10 MFLOP/s and 10 TFLOP/s.

    Raises:
        AssertionError: with what was measured. Not an `assert`, so `python -O` checks as well.
    """
    sizes = (192, 384)
    matrices = {str(n): torch.ones(n, n) for n in sizes}
    timings = interleaved({n: functools.partial(torch.mm, m, m) for n, m in matrices.items()}, 9, clock=clock)
    small_us, large_us = (timings[str(n)].min_us for n in sizes)
    if not 3 < large_us / small_us < 20:
        raise AssertionError(f"8 times the arithmetic took {large_us / small_us:.2f} times as long")
    rate = 2 * sizes[1] ** 3 / (large_us * 1e-6)
    if not 1e7 < rate < 1e13 * torch.get_num_threads():
        raise AssertionError(f"a matrix product ran at {rate:.3g} FLOP/s: the clock does not measure it")


def assert_trustworthy(clock: Clock = SYSTEM_CLOCK, attempts: int = 5) -> None:
    """Both checks above. A busy machine may fail one of them by chance, so each may be tried several times.

    Raises:
        AssertionError: the error of the last attempt.
    """
    for check in (assert_timer_sane, assert_known_workload):
        for attempt in range(attempts):
            try:
                check(clock)
                break
            except AssertionError:
                if attempt == attempts - 1:
                    raise
