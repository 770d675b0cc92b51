"""The rules of a trial, on invented times: whose turn it is, who is out and who wins, what it may cost."""

from __future__ import annotations

import functools
import itertools
import math
import operator

import pytest
from trials import US, of, play

from convselect.choice.outcome import Measured, Prior
from convselect.choice.replay import replay
from convselect.choice.trial import (
    ALLOWANCE_CALLS,
    ALLOWANCE_US,
    CHECK_US,
    COLD_DROP,
    COLD_US,
    EARLY_ROUNDS,
    MACHINERY_US,
    MAX_ROUNDS,
    MIN_ROUNDS,
    MOST_CALLS,
    NATIVE,
    WARM_DROP,
    Trial,
)

# ---- turns ----------------------------------------------------------------------------------------------------------


def test_without_candidates_it_is_over():
    trial = Trial([])
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.gain, trial.outcome.measured) == (NATIVE, 1.0, {})
    assert trial.turn() is None
    assert trial.leader == NATIVE


def test_native_is_first_then_every_candidate_then_rounds_of_all():
    trial = Trial(["a", "b"])
    turns = play(trial, of(a=US, b=US), 3 + 4 * 3)
    assert turns[:3] == [NATIVE, "a", "b"]
    assert [sorted(turns[i : i + 3]) for i in range(3, 15, 3)] == [["a", "b", NATIVE]] * 4
    assert (trial.rounds, trial.turns, trial.calls) == (4, 15, 15)


def test_a_favourite_is_before_native():
    trial = Trial(["a", "b"], favourite="b")
    assert trial.favourite_is_next
    assert play(trial, of(a=US, b=US), 3) == ["b", NATIVE, "a"]
    assert not trial.favourite_is_next
    assert not Trial(["a"]).favourite_is_next


def test_whether_a_turn_is_an_algorithms_first():
    trial = Trial(["a"])
    assert trial.is_cold(NATIVE)
    play(trial, of(a=US), 1)
    assert (trial.is_cold(NATIVE), trial.is_cold("a")) == (False, True)


def test_rounds_are_in_random_order_which_the_seed_decides():
    def turns(seed: int) -> list[str]:
        return play(Trial(["a"], seed=seed), of(a=0.97 * US), 2 + 2 * 8)[2:]

    rounds = {tuple(turns(1)[i : i + 2]) for i in range(0, 16, 2)}
    assert rounds == {(NATIVE, "a"), ("a", NATIVE)}
    assert turns(1) == turns(1)
    assert len({tuple(turns(seed)) for seed in range(8)}) > 3


def test_a_postponed_turn_comes_again():
    trial = Trial(["a"])
    play(trial, of(a=US), 1)
    assert trial.turn() == "a"
    trial.postpone("a")
    assert (trial.turn(), trial.turns, trial.calls) == ("a", 2, 3)
    trial.record("a", US)
    # In a round, what is left of it comes first.
    first = trial.turn()
    trial.postpone(first)
    other = trial.turn()
    assert {first, other} == {NATIVE, "a"}
    trial.record(other, US)
    assert trial.turn() == first


def test_what_was_dropped_or_is_over_is_not_postponed():
    trial = Trial(["a", "b"])
    play(trial, of(), 1)
    assert trial.turn() == "a"
    trial.drop("a")
    trial.postpone("a")
    assert trial.turn() == "b"
    trial.drop("b")
    trial.postpone(NATIVE)
    assert trial.turn() is None


# ---- the end --------------------------------------------------------------------------------------------------------


def test_the_faster_one_wins_after_the_least_number_of_rounds():
    trial = Trial(["fast"])
    turns = play(trial, of(fast=500.0))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.rounds) == ("fast", EARLY_ROUNDS)
    assert trial.outcome.gain == pytest.approx(2)
    assert not trial.outcome.cut_short
    assert "2.00 times native's speed" in trial.outcome.reason
    assert len(turns) == 2 + 2 * EARLY_ROUNDS
    assert trial.excess_us < 0
    assert trial.turn() is None


def test_what_is_not_clear_after_two_rounds_has_a_third():
    for us, winner in ((860.0, "a"), (1090.0, NATIVE)):
        trial = Trial(["a"])
        play(trial, of(a=us))
        assert trial.outcome is not None
        assert (trial.outcome.algorithm, trial.outcome.rounds) == (winner, MIN_ROUNDS)
        assert not trial.outcome.cut_short


def test_what_leaving_native_costs_counts():
    for share, winner in ((0.0, "fast"), (0.3, NATIVE)):
        trial = Trial(["fast"], cost_us=functools.partial(operator.mul, share))
        play(trial, of(fast=800.0))
        assert trial.outcome is not None
        assert trial.outcome.algorithm == winner
        gain = US / (800.0 + share * US)
        assert trial.measured()["fast"].gain == pytest.approx(gain)
        assert trial.outcome.gain == pytest.approx(gain if winner == "fast" else 1.0)


def test_equals_are_native():
    for us, most in ((US, 10), (1.1 * US, MIN_ROUNDS)):
        trial = Trial({"same": Prior(0.3, 0.3)})
        play(trial, of(same=us))
        assert trial.outcome is not None
        assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, False)
        assert trial.rounds <= most


@pytest.mark.parametrize(
    ("gain", "winner", "words"), [(0.04, NATIVE, "nothing was clearly faster"), (0.07, "a", "the best so far")]
)
def test_it_ends_after_the_most_rounds(gain, winner, words):
    """Neither clearly better nor clearly not: one standard deviation decides."""
    trial, noise = Trial({"a": Prior(gain, 0.3)}), itertools.cycle([-0.06, 0.0, 0.06])
    while (name := trial.turn()) is not None:
        trial.record(name, US if name == NATIVE else US * math.exp(next(noise) - gain))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.rounds) == (winner, MAX_ROUNDS)
    assert trial.outcome.reason == f"{words} after {MAX_ROUNDS} rounds"
    assert not trial.outcome.cut_short


@pytest.mark.parametrize(("gain", "rounds"), [(0.0, 5), (0.02, 9), (0.03, 13)])
def test_what_is_hardly_faster_is_not_worth_many_calls(gain, rounds):
    trial = Trial({"a": Prior(gain, 0.3)})
    play(trial, of(a=US / math.exp(gain)))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, False)
    assert trial.rounds <= rounds


def test_after_60_calls_it_is_over_timed_or_not():
    assert MOST_CALLS == 60
    trial = Trial(["a"])
    play(trial, of(a=US), 1)
    trial.wait(58)
    assert trial.turn() == "a"
    assert trial.calls == 60
    trial.postpone("a")
    assert trial.turn() is None
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, True)
    assert "60 calls" in trial.outcome.reason
    # Turns that are never timed count as well.
    trial, calls = Trial(["a"]), 0
    while (name := trial.turn()) is not None:
        trial.postpone(name)
        calls += 1
    assert calls == 60


def test_waiting_alone_ends_it_and_then_the_model_decides():
    for mean, winner in ((0.8, "a"), (0.2, NATIVE)):  # 0.2 is less than one standard deviation
        trial = Trial({"a": Prior(mean, 0.3), "b": Prior(0.1, 0.3)})
        play(trial, of(), 1)
        trial.wait(60)
        assert trial.outcome is not None
        assert (trial.outcome.algorithm, trial.outcome.cut_short) == (winner, True)
        assert (trial.outcome.gain, trial.outcome.rounds) == (1.0 if winner == NATIVE else None, 0)
        assert trial.outcome.measured == {}
    trial.wait(5)
    assert trial.calls == 66


def test_what_was_compared_often_enough_is_no_cut_short_end():
    """The 60th call comes in the fourth round."""
    trial = Trial({"a": Prior(0.5, 0.3)})
    trial.wait(50)
    times = iter([1.0, 1.1, 0.7, 0.9, 0.8])
    while trial.outcome is None:
        name = trial.turn()
        if name is not None:
            trial.record(name, US * (1.0 if name == NATIVE else next(times)))
    assert (trial.outcome.algorithm, trial.outcome.cut_short, trial.outcome.rounds) == ("a", False, 4)
    assert "the best so far after 60 calls" in trial.outcome.reason


# ---- who is out -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("favourite", [None, "hopeless"])
def test_a_first_call_that_is_far_too_slow(favourite):
    """A favourite's is judged once native's time is known."""
    limit = COLD_DROP * US + COLD_US
    for us, out in ((limit + 1, True), (limit, False)):
        trial = Trial(["hopeless", "other"], favourite=favourite)
        assert set(play(trial, of(hopeless=us), 2)) == {NATIVE, "hopeless"}
        assert (trial.live == ["other"]) is out
        assert trial.hopeless() == (["hopeless"] if out else [])


def test_a_second_call_that_is_far_too_slow():
    for us, out in ((WARM_DROP * US + 1, True), (WARM_DROP * US, False)):
        trial, times = Trial(["slow"]), iter([US, us])
        while trial.turns < 4 and trial.outcome is None:
            name = trial.turn()
            trial.record(name, US if name == NATIVE else next(times))
        assert (trial.live == []) is out
        assert trial.hopeless() == []  # it was compared
        assert trial.measured()["slow"] == Measured(1, *[pytest.approx(US / us)] * 3)


def test_a_cold_start_is_forgiven_and_a_later_interruption_as_well():
    trial, times = Trial(["fast"]), iter([3900.0, 400.0, 4000.0])
    play(trial, lambda name: US if name == NATIVE else next(times, 400.0))
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "fast"


def test_with_the_last_candidate_it_is_over():
    trial = Trial(["a"])
    play(trial, of(a=10 * US))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, False)
    assert trial.outcome.reason == "no candidate was faster"
    assert trial.turns == 2


def test_a_failed_candidate_is_out_and_its_turns_are_gone():
    trial = Trial(["fails", "fast"])
    play(trial, of(fails=100.0, fast=600.0), 7)
    trial.drop("fails")
    trial.drop("fails")
    assert "fails" not in play(trial, of(fast=600.0))
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "fast"
    assert trial.hopeless() == []


def test_a_round_is_complete_if_the_last_one_who_was_due_is_dropped():
    trial = Trial(["a", "b"])
    play(trial, of(a=US, b=US), 3)
    names = [trial.turn() for _ in range(3)]
    for name in names:
        if name != "b":
            trial.record(name, US)
    assert trial.rounds == 0
    trial.drop("b")
    assert trial.rounds == 1


def test_two_unusable_results_are_the_end_of_a_candidate():
    trial = Trial(["a", "b"])
    play(trial, of(), 1)
    assert trial.turn() == "a"
    trial.unusable("a", 300.0)
    assert play(trial, of(b=US), 1) == ["b"]  # others have their first call before it
    assert trial.live == ["a", "b"]
    assert trial.turn() == "a"
    trial.unusable("a", 300.0)
    assert trial.live == ["b"]
    assert trial.excess_us == pytest.approx(600.0)
    assert trial.hopeless() == []
    assert trial.turn() in {NATIVE, "b"}


def test_unusable_results_of_two_candidates_are_the_end_of_the_trial():
    trial = Trial(["a", "b", "c"])
    play(trial, of(), 1)
    for name in "ab":
        assert trial.outcome is None
        assert trial.turn() == name
        trial.unusable(name, 300.0)
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, True)


def test_where_values_spoil_results_the_models_word_decides_nothing():
    trial = Trial({"a": Prior(1.0), "b": Prior(0.9), "c": Prior(0.8)}, favourite="a")
    assert trial.turn() == "a"
    trial.unusable("a", 300.0)
    assert trial.turn() == NATIVE
    trial.record(NATIVE, 100.0)
    trial.charge(1e4)
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, True)


def test_what_a_trial_costs_beyond_its_bound_is_kept():
    trial = Trial(["a"])
    play(trial, of(a=20 * US))
    allowed_us = ALLOWANCE_CALLS * US + ALLOWANCE_US
    assert trial.beyond_us == pytest.approx(19 * US - allowed_us)
    quick = Trial(["a"])
    play(quick, of(a=0.5 * US))
    assert quick.beyond_us == 0


def test_unusable_results_need_not_be_in_a_row():
    trial = Trial(["a"])
    play(trial, of(a=US), 1)
    assert trial.turn() == "a"
    trial.unusable("a", 0.0)
    play(trial, of(a=0.8 * US), 3)
    while trial.outcome is None:
        name = trial.turn()
        if name == "a":
            trial.unusable("a", 0.0)
            break
        trial.record(name, US)
    assert trial.outcome is not None
    assert trial.outcome.algorithm == NATIVE
    assert trial.hopeless() == []


# ---- what it costs --------------------------------------------------------------------------------------------------


def test_excess_is_what_native_alone_would_not_have_taken():
    trial = Trial(["a"], cost_us=lambda _: 25.0)
    assert trial.excess_us == 0
    play(trial, of(), 1, overhead_us=5.0)
    assert trial.excess_us == pytest.approx(30.0)  # native's turn comes through the plan as well
    trial.record(trial.turn(), 3000.0, 7.0)
    assert trial.excess_us == pytest.approx(30.0 + 2000.0 + 32.0)
    trial.charge(100.0)
    assert trial.excess_us == pytest.approx(30.0 + 2000.0 + 32.0 + 100.0)
    trial.wait(3)  # native's calls, which cost nothing
    assert trial.excess_us == pytest.approx(2162.0)


def test_a_favourites_call_is_charged_once_natives_time_is_known():
    trial = Trial(["a"], favourite="a")
    play(trial, of(a=2500.0), 1)
    trial.charge(50.0)
    assert trial.excess_us == 0
    play(trial, of(), 1)
    assert trial.excess_us == pytest.approx(1550.0)


def test_saved_time_pays():
    trial = Trial(["a"])
    play(trial, of(a=400.0), 4)
    assert trial.excess_us == pytest.approx(-1200.0)


def test_it_ends_once_it_has_cost_its_allowance():
    allowance = ALLOWANCE_CALLS * US + ALLOWANCE_US
    for more, over in ((0.0, False), (1.0, True)):
        trial = Trial({"a": Prior(0.5, 0.3), "b": Prior(1.1, 0.3)})
        play(trial, of(a=1500.0), 2)
        trial.charge(allowance - 500.0 + more)
        assert (trial.outcome is not None) is over
    # The model's word counts for nobody who was slower than native in the first call, nor for who never had one.
    assert trial.outcome.algorithm == NATIVE
    assert trial.outcome.cut_short
    assert "its cost" in trial.outcome.reason


def test_there_is_no_trial_where_no_three_rounds_can_be_had():
    """The model decides once native's time is known: for what is predicted to gain much."""
    least = (2 * MIN_ROUNDS + 1) * MACHINERY_US + CHECK_US
    tiny = (least - ALLOWANCE_US + 200.0) / ALLOWANCE_CALLS
    for us, plan_us, gain, over, winner in (
        (tiny + 1, 200.0, 1.1, False, None), (tiny - 1, 200.0, 1.1, True, "a"), (tiny - 1, 200.0, 0.3, True, NATIVE),
        (tiny - 1, 150.0, 1.1, False, None), (US, 1e9, 1.1, False, None),
    ):  # fmt: skip
        trial = Trial({"a": Prior(gain, 0.3)}, plan_us=plan_us)
        trial.record(trial.turn(), us)
        assert (trial.outcome is not None) is over
        if trial.outcome is not None:
            assert (trial.outcome.algorithm, trial.outcome.cut_short) == (winner, True)
        assert trial.excess_us == 0


def test_if_its_first_call_was_faster_than_native_the_models_word_counts():
    trial = Trial({"a": Prior(0.5, 0.3), "b": Prior(1.1, 0.3)})
    play(trial, of(a=800.0), 2)
    trial.charge(1e6)
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short, trial.outcome.gain) == ("a", True, None)
    assert trial.outcome.reason == "the model decides after its cost"


def test_interruptions_are_not_charged_in_full():
    trial, calls = Trial(["a"]), iter(range(1000))
    for _ in range(12):
        name = trial.turn()
        trial.record(name, 950.0 if name != NATIVE else 1e6 if next(calls) == 5 else US)
    assert trial.excess_us < 3 * US


def test_the_difference_of_excess_between_two_calls_adds_up():
    """An account is kept by differences, while native's time becomes known better."""
    trial, account, times = Trial(["a", "b"]), 0.0, iter([1500.0, 900.0, 1000.0, 1100.0] * 20)
    while trial.outcome is None:
        before = trial.excess_us
        name = trial.turn()
        if name is not None:
            trial.record(name, next(times), 3.0)
        account += trial.excess_us - before
    assert account == pytest.approx(trial.excess_us)


def test_replay_adds_up_everything():
    trial = Trial(["fast"], cost_us=lambda _: 25.0)
    total = replay(trial, of(fast=400.0), 100)
    turns = 2 + 2 * EARLY_ROUNDS
    timed = (1 + EARLY_ROUNDS) * (US + 400.0) + turns * (MACHINERY_US + 25.0) + CHECK_US
    assert total == pytest.approx(timed + (100 - turns) * 425.0)
    assert trial.excess_us == pytest.approx(timed - turns * US)
    # Afterwards it is the winner's, native's without a plan.
    assert replay(trial, of(fast=400.0), 10) == pytest.approx(4250.0)
    assert replay(Trial([]), of(), 10) == pytest.approx(10 * US)


def test_names_alone_are_candidates_of_which_nothing_is_known():
    trial = Trial(["a", "b"])
    assert trial.priors == {"a": Prior(0.0, 0.3), "b": Prior(0.0, 0.3)}
    assert list(Trial({"z": Prior(1.0), "a": Prior(0.5)}).priors) == ["z", "a"]


def test_what_happens_after_the_end_changes_nothing():
    trial = Trial(["a"])
    play(trial, of(a=500.0))
    outcome, excess = trial.outcome, trial.excess_us
    trial.record("a", 9e9)
    trial.drop("a")
    trial.wait(100)
    trial.postpone("a")
    trial.unusable("a", 0.0)
    assert trial.outcome is outcome
    assert trial.excess_us == excess


def test_if_no_trial_could_begin_native_runs_whatever_the_model_says():
    trial = Trial({"a": Prior(3.0, 0.1)})
    play(trial, of(), 1)
    for _ in range(3):
        trial.refuse(17)
    assert (trial.outcome, trial.calls) == (None, 52)
    trial.refuse(17)
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.cut_short) == (NATIVE, True)
