"""The rules of a trial, on invented times: who wins, what it may cost, what noise does to it."""

from __future__ import annotations

import math
import random

import pytest

from convselect.choice.trial import (
    ALLOWANCE,
    COLD_US,
    MAX_ROUNDS,
    MIN_ROUNDS,
    NATIVE,
    SHARE,
    Trial,
    Z,
    replay,
)


def noisy(times: dict[str, float], sd: float = 0.03, spikes: float = 0.01, seed: int = 0):
    source = random.Random(seed)

    def time_us(name: str) -> float:
        us = times[name] * math.exp(sd * source.gauss(0, 1))
        return us * (1 + source.expovariate(0.5)) if source.random() < spikes else us

    return time_us


def test_z_is_students_at_99_percent():
    scipy = pytest.importorskip("scipy.stats")
    exact = [scipy.t.ppf(0.99, n - 1) for n in range(MIN_ROUNDS, MAX_ROUNDS + 1)]
    assert pytest.approx(exact, abs=0.006) == list(Z)


def test_native_begins_and_goes_on_alone_without_candidates():
    trial = Trial([])
    assert trial.outcome is not None
    assert trial.outcome.algorithm == NATIVE
    trial = Trial(["a"])
    assert [trial.turn() for _ in range(3)] == [NATIVE] * 3


def test_the_faster_one_wins_after_the_least_number_of_rounds():
    trial = Trial(["fast"])
    replay(trial, lambda name: {NATIVE: 1000.0, "fast": 500.0}[name], 30)
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.rounds) == ("fast", MIN_ROUNDS)
    assert trial.outcome.gain == pytest.approx(2)
    assert trial.turns == 3 + 1 + 2 * MIN_ROUNDS  # native's first, the cold call, the rounds
    assert trial.excess_us < 0


def test_what_leaving_native_costs_counts():
    for cost_us, winner in ((0.0, "fast"), (300.0, NATIVE)):
        trial = Trial(["fast"], cost_us=cost_us)
        replay(trial, lambda name: {NATIVE: 1000.0, "fast": 800.0}[name], 200)
        assert trial.outcome is not None
        assert trial.outcome.algorithm == winner


def test_the_best_of_several_wins_and_native_stops_taking_turns_once_beaten():
    trial = Trial(["good", "best", "bad"])
    times = {NATIVE: 1000.0, "good": 500.0, "best": 490.0, "bad": 1300.0}
    turns: dict[str | None, int] = {}
    time_us = noisy(times, sd=0.03, spikes=0, seed=2)
    while trial.outcome is None:
        name = trial.turn()
        turns[name] = turns.get(name, 0) + 1
        trial.record(name or NATIVE, time_us(name or NATIVE))
    assert trial.outcome.algorithm == "best"
    assert turns[NATIVE] == 3 + MIN_ROUNDS
    assert turns["best"] > 1 + MIN_ROUNDS


def test_hopeless_candidates_are_out_after_one_call_and_slow_ones_after_two():
    trial = Trial(["hopeless", "slow"])
    seen = []
    while trial.outcome is None and trial.calls < 1000:
        name = trial.turn()
        if name:
            seen.append(name)
            trial.record(name, {NATIVE: 1000.0, "hopeless": 4001.0 + COLD_US, "slow": 2600.0}[name])
    assert seen.count("hopeless") == 1
    assert seen.count("slow") == 2
    assert trial.outcome.algorithm == NATIVE


def test_a_cold_start_is_forgiven():
    trial, cold = Trial(["fast"]), [3900.0]
    replay(trial, lambda name: 1000.0 if name == NATIVE else cold.pop() if cold else 400.0, 400)
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "fast"


def test_equals_seldom_win_and_two_percent_slower_hardly_ever():
    for us, most in ((1000.0, 12), (1020.0, 2)):
        left = 0
        for seed in range(400):
            trial = Trial(["same"], seed=seed)
            replay(trial, noisy({NATIVE: 1000.0, "same": us}, seed=seed), 1500)
            assert trial.outcome is not None
            left += trial.outcome.algorithm != NATIVE
        assert left <= most


@pytest.mark.parametrize("slowdown", [1.05, 1.5, 2.4, 3.5, 30.0])
def test_the_excess_stays_within_its_allowance(slowdown):
    """One call may overdraw it, since nobody knows what it will take; then native pays back."""
    trial, native_us, worst = Trial(["a", "b", "c"]), 1000.0, 0.0
    time_us = noisy(dict.fromkeys(("a", "b", "c"), slowdown * native_us) | {NATIVE: native_us}, seed=3)
    for _ in range(3000):
        if trial.outcome is not None:
            break
        before = trial.excess_us
        name = trial.turn()
        if name not in (None, NATIVE):
            assert before <= 1.1 * native_us * (ALLOWANCE + SHARE * trial.calls)
        if name:
            trial.record(name, time_us(name))
        worst = max(worst, trial.excess_us - native_us * SHARE * trial.calls)
    assert worst < native_us * (ALLOWANCE + slowdown) * 1.3


def test_nothing_is_timed_while_a_debt_is_paid_back():
    trial = Trial(["bad", "other"])
    for _ in range(4):
        name = trial.turn()
        trial.record(name, 1000.0 if name == NATIVE else 6_000.0)
    assert trial.live == ["other"]
    assert {trial.turn() for _ in range(150)} == {None}
    assert any(trial.turn() is not None for _ in range(100))


def test_predictions_that_are_far_off_end_the_trial():
    trial = Trial(["bad", "other"])
    for _ in range(4):
        name = trial.turn()
        trial.record(name, 1000.0 if name == NATIVE else 11_000.0)
    assert trial.outcome is not None
    assert trial.outcome.algorithm == NATIVE
    assert trial.outcome.cut_short


def test_interruptions_are_not_charged_in_full():
    trial, calls = Trial(["fast"]), iter(range(10_000))
    for _ in range(10):
        name = trial.turn()
        trial.record(name, 1000.0 if name == NATIVE or next(calls) != 4 else 1e6)
    assert trial.excess_us < 4000


def test_a_failed_candidate_is_out_and_its_turns_are_gone():
    trial = Trial(["fails", "fast"])
    times = {NATIVE: 1000.0, "fails": 100.0, "fast": 500.0}
    for _ in range(12):
        trial.record(name := trial.turn(), times[name])
    trial.drop("fails")
    trial.drop("fails")
    turns = set()
    while trial.outcome is None:
        turns.add(name := trial.turn())
        trial.record(name, times[name])
    assert "fails" not in turns
    assert trial.outcome.algorithm == "fast"


def test_a_postponed_turn_comes_again():
    trial = Trial(["a"])
    for _ in range(3):
        trial.record(trial.turn(), 1000.0)
    assert trial.turn() == "a"
    trial.postpone("a")
    assert trial.turn() == "a"
    assert trial.turns == 4


def test_rounds_are_in_random_order():
    trial, orders, turns = Trial(["a"], seed=1), set(), []
    for _ in range(4 + 20):
        name = trial.turn()
        turns.append(name)
        trial.record(name, 1000.0 + trial.calls % 3)
        if trial.outcome:
            break
    rounds = turns[4:]
    orders = {tuple(rounds[i : i + 2]) for i in range(0, len(rounds) - 1, 2)}
    assert orders == {(NATIVE, "a"), ("a", NATIVE)}


@pytest.mark.slow
@pytest.mark.parametrize(("sd", "spikes", "wrong"), [(0.03, 0.01, 0.002), (0.1, 0.05, 0.005)])
def test_a_lying_model_does_not_make_anything_slower(sd, spikes, wrong):
    """Candidates drawn so that all are slower than native, from a hair to thirtyfold; 1,000 problems."""
    source, slower, first, plain = random.Random(5), 0, 0.0, 0.0
    for i in range(1000):
        times = {name: 1000 * math.exp(source.uniform(0.02, 3.4)) for name in "abc"} | {NATIVE: 1000.0}
        trial = Trial(list("abc"), seed=i)
        first += replay(trial, noisy(times, sd, spikes, seed=i), 100)
        time_us = noisy(times, sd, spikes, seed=i)
        plain += sum(time_us(NATIVE) for _ in range(100))
        replay(trial, noisy(times, sd, spikes, seed=-i), 3000)
        slower += trial.outcome is not None and times[trial.outcome.algorithm] > 1020
    assert slower <= wrong * 1000
    # A single call of the worst costs thirty of native's, 8.5 on average: that much cannot be known without trying.
    assert first / plain < 1.15
