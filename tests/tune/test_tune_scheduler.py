"""Which problem is searched next, on times that fall along given curves."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from convselect.base.problem import conv_problem
from convselect.tune.scheduler import LEAST_GAIN, PATIENCE, EqualSplit, Objective, Scheduler, Task, latencies

P3 = conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)
P1 = conv_problem(1, 64, 28, 28, 64, 1, 1)


def task(curve, calls=None, problem=P3) -> Task:
    """Best time after n rounds is curve(n); before the first it is what runs without tuning, curve(0)."""
    made = Task(SimpleNamespace(problem=problem, best_us=math.inf), calls or {"a": 1}, default_us=curve(0))
    made.curve = curve
    return made


def advance(one: Task) -> None:
    one.search.best_us = one.curve(len(one.history) + 1)
    one.history.append(one.best_us)


def run(scheduler, rounds: int) -> list[int]:
    turns = []
    for _ in range(rounds):
        i = scheduler.next()
        if i is None:
            break
        advance(scheduler.tasks[i])
        turns.append(i)
    return turns


def falling(least, most, pace):
    return lambda n: least + (most - least) * math.exp(-n / pace)


def network():
    return [
        task(falling(400, 1000, 6), {"a": 6}),
        task(falling(90, 100, 1), {"a": 1}),
        task(falling(20, 21, 1), {"a": 2}),
        task(falling(55, 60, 2), {"a": 1}),
    ]


def total(tasks) -> float:
    return sum(latencies(tasks, [t.best_us for t in tasks]).values())


def test_each_is_measured_once_first():
    scheduler = Scheduler(network())
    assert math.isnan(scheduler.expected_gain())
    assert run(scheduler, 4) == [0, 1, 2, 3]
    assert scheduler.expected_gain() > 0


def test_it_reaches_an_equal_splits_latency_in_half_the_rounds():
    equal = EqualSplit(network())
    turns = run(equal, 40)
    assert [turns.count(i) for i in range(4)] == [10] * 4
    led = Scheduler(network(), source=random.Random(0))
    run(led, 20)
    assert total(led.tasks) <= total(equal.tasks)


def test_a_target_that_is_met_gets_nothing_more():
    tasks = [task(falling(50, 100, 2), {"a": 1}), task(falling(50, 100, 2), {"b": 1})]
    goal = Objective("target", {"a": 90.0, "b": 1.0})
    scheduler = Scheduler(tasks, goal, random.Random(0), epsilon=0.0)
    turns = run(scheduler, 20)
    assert turns.count(0) <= 2
    assert goal(tasks, [50.0, 60.0]) == 90 + 60
    both = Scheduler(
        [task(falling(50, 100, 2), {"a": 1}), task(falling(50, 100, 2), {"b": 1})],
        Objective("target", {"a": 90.0, "b": 80.0}), random.Random(0),
    )  # fmt: skip
    assert len(run(both, 20)) < 8
    assert both.next() is None


def test_speedup_is_a_mean_over_networks_however_large():
    """The large network's latency could fall by more us, the small one's by a larger factor."""

    def tasks():
        return [task(falling(9000, 10000, 4), {"large": 1}), task(falling(10, 100, 4), {"small": 1})]

    by_latency = run(Scheduler(tasks(), Objective("latency"), random.Random(0), epsilon=0.0), 12)
    by_speedup = run(Scheduler(tasks(), Objective("speedup"), random.Random(0), epsilon=0.0), 12)
    assert by_latency.count(0) > by_latency.count(1)
    assert by_speedup.count(1) > by_latency.count(1)
    assert Objective("speedup")(tasks(), [5000.0, 25.0]) == pytest.approx(-((2 * 4) ** 0.5))


def test_early_stop_gives_up_what_stands_still():
    tasks = [task(lambda n: 1000.0, {"a": 10}), task(falling(10, 100, 30), {"a": 1})]
    turns = run(Scheduler(tasks, Objective("early-stop"), random.Random(0), epsilon=0.0), 30)
    assert turns.count(0) == PATIENCE + 1
    still = [task(lambda n: 1000.0), task(lambda n: 10.0)]
    scheduler = Scheduler(still, Objective("early-stop"), random.Random(0))
    assert len(run(scheduler, 100)) == 2 * (PATIENCE + 1)
    assert scheduler.next() is None


def test_stalled_is_by_relative_gain():
    one = task(lambda n: 100 * (1 - 2 * LEAST_GAIN / PATIENCE) ** n)
    run(EqualSplit([one]), PATIENCE + 5)
    assert not one.stalled()
    one = task(lambda n: 100 * (1 - 0.5 * LEAST_GAIN / PATIENCE) ** n)
    run(EqualSplit([one]), PATIENCE + 5)
    assert one.stalled()


def test_recent_gains_and_similar_problems_count():
    same = [task(falling(50, 100, 8)), task(lambda n: falling(50, 100, 8)(1))]
    run(EqualSplit(same), 12)
    recent = Scheduler(same, alpha=1.0)
    assert recent.fall(0) == pytest.approx((same[0].history[-4] - same[0].history[-1]) / 3)
    assert recent.fall(1) == 0
    assert Scheduler(same, alpha=0.0).fall(1) > 0
    # A problem at a fifth of the speed of one of its class may be hoped to fall by more than one of another class.
    slow = [task(lambda n: 100.0), task(lambda n: 20.0), task(lambda n: 100.0 * P1.flops / P3.flops, problem=P1)]
    run(EqualSplit(slow), 30)
    scheduler = Scheduler(slow)
    assert scheduler.fall(0) / 100 > 5 * scheduler.fall(2) / slow[2].best_us


def test_now_and_then_another_is_next():
    tasks = [task(falling(1, 1000, 50), {"a": 50}), task(lambda n: 1.0)]
    never = run(Scheduler(tasks, source=random.Random(0), epsilon=0.0), 60)
    assert never.count(1) == 1
    tasks = [task(falling(1, 1000, 50), {"a": 50}), task(lambda n: 1.0)]
    assert run(Scheduler(tasks, source=random.Random(0), epsilon=0.5), 60).count(1) > 5


def test_what_has_no_other_programs_is_passed_over():
    tasks = network()
    run(EqualSplit(tasks), 4)
    tasks[0].exhausted = True
    assert 0 not in run(Scheduler(tasks, source=random.Random(0)), 10)
    for one in tasks:
        one.exhausted = True
    assert Scheduler(tasks).next() is None


def test_objectives_are_named():
    with pytest.raises(ValueError, match="must be one of latency, target, speedup, early-stop"):
        Objective("fast")
