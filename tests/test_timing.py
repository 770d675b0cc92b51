"""Interleaving, statistics and the run_environment. Times come from a fake clock wherever a number is asserted."""

from __future__ import annotations

import json

import pytest
import torch

from convselect.base.timing import Clock, Deadline, Timing, assert_timer_sane, interleaved, once, ratio
from convselect.machine.environment import run_environment


class FakeClock:
    """Time passes only when told to; the thread's clock runs at half the wall's speed."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.clock = Clock(lambda: self.now_ns, lambda: self.now_ns // 2)

    def work(self, us: float):
        def function() -> None:
            self.now_ns += int(us * 1000)

        return function


def test_each_function_gets_its_own_time_once_per_round() -> None:
    fake = FakeClock()
    timings = interleaved({"a": fake.work(100), "b": fake.work(40)}, 7, clock=fake.clock)
    assert timings["a"].samples_us == (100.0,) * 7
    assert timings["b"].samples_us == (40.0,) * 7
    assert timings["a"].thread_us == (50.0,) * 7
    assert timings["a"].on_thread_clock.median_us == 50.0


def test_orders_are_random_complete_and_reproducible() -> None:
    def orders(seed: int) -> list[str]:
        calls: list[str] = []
        functions = {name: lambda n=name: calls.append(n) for name in "abc"}
        interleaved(functions, 50, seed=seed)
        return calls

    calls = orders(1)
    assert calls[:3] == ["a", "b", "c"]  # the untimed call of each
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert len(rounds) == 50
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) == 6
    assert orders(1) == calls
    assert orders(2) != calls


def test_the_first_call_is_not_timed() -> None:
    fake = FakeClock()
    calls = 0

    def slow_once() -> None:
        nonlocal calls
        calls += 1
        fake.now_ns += 1_000_000 if calls == 1 else 1_000

    assert interleaved({"f": slow_once}, 3, clock=fake.clock)["f"].samples_us == (1.0, 1.0, 1.0)
    calls = 0
    assert interleaved({"f": slow_once}, 3, clock=fake.clock, first=False)["f"].samples_us == (1000.0, 1.0, 1.0)


def test_a_single_call() -> None:
    fake = FakeClock()
    work = fake.work(30)
    result, taken = once(lambda: (work(), "done")[1], fake.clock)
    assert (result, taken) == ("done", Timing((30.0,), (15.0,)))


def test_warm_calls_precede_each_timed_one_and_are_not_timed() -> None:
    fake = FakeClock()
    calls: list[str] = []

    def function(name: str) -> None:  # slow after another one's call
        fake.work(1.0 if calls[-2:] == [name] * 2 else 1e3)()
        calls.append(name)

    timings = interleaved({n: lambda n=n: function(n) for n in "ab"}, 3, clock=fake.clock, warm=2)
    assert timings["a"].samples_us == timings["b"].samples_us == (1.0, 1.0, 1.0)
    assert "".join(calls[2:]).count("aaa") >= 3


@pytest.mark.parametrize(("deadline_s", "expected"), [(0.0, 2), (2.5, 2), (3.0, 3), (100.0, 20), (None, 20)])
def test_deadline_stops_before_a_round_that_would_pass_it_but_not_before_two(deadline_s, expected) -> None:
    fake = FakeClock()  # one round takes 1 s
    functions = {"a": fake.work(400_000), "b": fake.work(600_000)}
    timings = interleaved(functions, 20, clock=fake.clock, deadline_s=deadline_s)
    assert {len(t.samples_us) for t in timings.values()} == {expected}


def test_synchronisation_is_inside_the_timed_stretch_and_the_callback_is_not() -> None:
    fake = FakeClock()
    queued_us = 0.0
    seen: list[int] = []

    def launch() -> None:
        nonlocal queued_us
        queued_us += 30

    def synchronise() -> None:
        nonlocal queued_us
        fake.work(queued_us)()
        queued_us = 0.0

    def on_round(done: int) -> None:
        seen.append(done)
        fake.work(1e6)()

    timings = interleaved({"k": launch}, 4, clock=fake.clock, synchronise=synchronise, on_round=on_round)
    assert timings["k"].samples_us == (30.0,) * 4
    assert seen == [1, 2, 3, 4]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds"):
        interleaved({"a": lambda: None}, 0)


def test_statistics() -> None:
    timing = Timing(tuple(float(v) for v in (50, 10, 30, 20, 40, 60)))
    assert timing.min_us == 10
    assert timing.median_us == 35
    assert timing.p20_us == 20
    assert timing.p80_us == 50


def test_ratio_is_paired_by_round() -> None:
    # The machine halves its speed in the last two rounds: paired ratios do not see it, ratios of medians would.
    a = Timing((20.0, 20.0, 20.0, 40.0, 40.0))
    b = Timing((10.0, 10.0, 10.0, 20.0, 20.0))
    assert ratio(a, b) == (2.0, 2.0, 2.0)
    spread = ratio(Timing((1.0, 2.0, 3.0, 4.0, 5.0, 6.0)), Timing((1.0,) * 6))
    assert spread == pytest.approx((3.5, 2.0, 5.0))
    # 30 / 10, 10 / 20, 20 / 30: the median of the ratios is 2 / 3, the ratio of the medians 1.
    assert ratio(Timing((30.0, 10.0, 20.0)), Timing((10.0, 20.0, 30.0))).median == pytest.approx(2 / 3)


def test_ratio_refuses_what_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="pair"):
        ratio(Timing((1.0, 2.0)), Timing((1.0,)))
    with pytest.raises(ValueError, match="pair"):
        ratio(Timing(()), Timing(()))


def test_deadline() -> None:
    fake = FakeClock()
    deadline = Deadline(2.0, clock=fake.clock)
    fake.now_ns = 1_500_000_000
    assert (deadline.elapsed_s, deadline.remaining_s, deadline.passed) == (1.5, 0.5, False)
    fake.now_ns = 2_500_000_000
    assert (deadline.remaining_s, deadline.passed) == (0.0, True)
    endless = Deadline(None, clock=fake.clock)
    fake.now_ns += 10**15
    assert (endless.remaining_s, endless.passed) == (float("inf"), False)


def test_environment_says_everything_that_changes_a_measurement() -> None:
    env = run_environment()
    assert set(env) >= {
        "device",
        "isa",
        "threads",
        "cpus",
        "torch",
        "onednn",
        "python",
        "convselect",
        "libc",
        "malloc",
        "isa_limits",
        "load_average",
    }
    assert env["threads"] == torch.get_num_threads()
    assert env["torch"] == torch.__version__
    assert env["device"]
    assert json.loads(json.dumps(env)) == env


def test_environment_reports_malloc_and_isa_limits(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "123")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("MALLOC_TOP_PAD_", raising=False)
    env = run_environment()
    assert env["malloc"]["MALLOC_TRIM_THRESHOLD_"] == "123"
    assert env["malloc"]["MALLOC_TOP_PAD_"] is None
    assert env["isa_limits"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_this_machines_clocks_are_sane() -> None:
    assert_timer_sane()


def test_insane_clocks_are_found() -> None:
    ticks = iter(range(10**9))
    backwards = Clock(lambda: -next(ticks), lambda: next(ticks))
    with pytest.raises(AssertionError, match="wall_ns ran backwards"):
        assert_timer_sane(backwards)
    with pytest.raises(AssertionError, match="found no time to pass"):
        assert_timer_sane(Clock(lambda: 5, lambda: 5))
    # Counts its own readings instead of time: once and twice look the same.
    with pytest.raises(AssertionError, match="twice the work took 1"):
        assert_timer_sane(Clock(lambda: next(ticks), lambda: next(ticks)))
