"""Timing by events of a device, on a device that is made up."""

from __future__ import annotations

import itertools

import pytest

from benchmarks._gpu_clock import on_device
from convselect.base import timing


class Queue:
    """A device whose work takes what it is told to, and whose events read its own clock."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.occupied: list[float] = []
        self.waits = 0
        self.numbers: list[int] = []

    def work(self, us: float):
        def call(number: int) -> None:
            self.numbers.append(number)
            self.now_ms += us / 1e3

        return call

    def events(self) -> timing.Events:
        queue = self

        class Event:
            def record(self) -> None:
                self.at = queue.now_ms

            def elapsed_time(self, later: Event) -> float:
                return later.at - self.at

        def occupy(us: float) -> None:
            queue.occupied.append(us)
            queue.now_ms += us / 1e3

        def wait() -> None:
            queue.waits += 1

        return timing.Events(Event, occupy, wait)


def test_events_time_the_queue_per_call_without_what_keeps_it_busy():
    queue = Queue()
    fast, slow = queue.work(5), queue.work(70)
    found = on_device(
        {"fast": fast, "slow": slow}, 4, events=queue.events(), calls={"fast": 8, "slow": 1}, host_us_per_call=30
    )
    assert found["fast"].samples_us == pytest.approx((5,) * 4)
    assert found["slow"].samples_us == pytest.approx((70,) * 4)
    assert sorted(queue.occupied) == [30] * 4 + [240] * 4
    assert queue.waits == 4
    assert sorted(queue.numbers) == sorted([*range(32), *range(4)])


def test_events_stop_at_the_deadline_but_not_before_two_rounds():
    ticks = itertools.count(0, 10**9)
    clock = timing.Clock(lambda: next(ticks), lambda: 0)
    queue = Queue()
    found = on_device({"a": queue.work(1)}, 100, events=queue.events(), deadline_s=0.5, clock=clock)
    assert len(found["a"].samples_us) == 2
    with pytest.raises(ValueError, match="at least 1"):
        on_device({}, 0, events=queue.events())
