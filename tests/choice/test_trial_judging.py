"""How a trial judges: what rounds show, what was predicted, and who is the best of several."""

from __future__ import annotations

import math

import pytest
from trials import US, of, play

from convselect.choice.outcome import Measured, Prior
from convselect.choice.rounds import NATIVE, NOISE_ROUNDS, NOISE_SD
from convselect.choice.trial import EARLY_ROUNDS, RIVAL_ROUNDS, Trial


def rounds(trial: Trial, *gains: float, name: str = "a") -> None:
    """Rounds in which this candidate had these ln(t_native / t); all others were equal to native."""
    if trial.is_cold(NATIVE):
        play(trial, of(**dict.fromkeys(trial.live, US)), 1 + len(trial.live))
    for gain in gains:
        for _ in range(1 + len(trial.live)):
            one = trial.turn()
            trial.record(one, US * math.exp(-gain) if one == name else US)


def test_gain_is_a_median_with_its_standard_error():
    trial = Trial({"a": Prior(0.1, 10.0)})
    assert trial.gain("a") == (0.0, math.inf)
    rounds(trial, 0.3, 0.1)
    middle, error = trial.gain("a")
    assert middle == pytest.approx(0.2)
    variance = (NOISE_ROUNDS * NOISE_SD**2 + 2 * (1.4826 * 0.1) ** 2) / (NOISE_ROUNDS + 2)
    assert error == pytest.approx(1.2533 * math.sqrt(variance / 2))
    assert trial.gain(NATIVE, over="a")[0] == pytest.approx(-0.2)


def test_belief_is_prediction_and_measurement_by_their_precisions():
    trial = Trial({"a": Prior(0.25, 0.1)})
    assert trial.belief("a") == (0.25, 0.1)
    rounds(trial, 0.2, 0.2)
    mean, error = trial.gain("a")
    weight = 100 / (1 + (0.05 / math.hypot(0.1, error) / 2) ** 4)
    expected = (weight * 0.25 + mean / error**2) / (weight + 1 / error**2)
    assert trial.belief("a")[0] == pytest.approx(expected)
    assert trial.belief("a")[1] == pytest.approx((weight + 1 / error**2) ** -0.5)
    assert 0.2 < expected < 0.25


def test_a_prediction_that_contradicts_what_was_seen_loses_its_weight():
    for mean in (3.0, -3.0):
        trial = Trial({"a": Prior(mean, 0.1)})
        rounds(trial, 0.0, 0.0)
        assert abs(trial.belief("a")[0]) < 0.01
        play(trial, of(a=US))
        assert trial.outcome is not None
        assert trial.outcome.algorithm == NATIVE
    trial = Trial({"a": Prior(-1.0, 0.1)})
    play(trial, of(a=700.0))
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "a"


def test_a_good_prediction_shortens_the_trial():
    def needed(mean: float, sd: float) -> int:
        trial = Trial({"a": Prior(mean, sd)})
        play(trial, of(a=US * math.exp(-0.08)))
        assert trial.outcome is not None
        assert trial.outcome.algorithm == "a"
        return trial.rounds

    assert needed(0.08, 0.03) < needed(0.0, 0.3)


def test_the_leader_is_who_would_win_now():
    trial = Trial({"a": Prior(0.6, 0.3), "b": Prior(0.9, 0.3)})
    assert trial.leader == "b"
    play(trial, of(a=0.7 * US, b=1.2 * US), 3)
    assert trial.leader == "a"
    play(trial, of(a=0.7 * US, b=1.2 * US), 6)
    assert trial.leader == "a"
    assert Trial({"a": Prior(0.1, 0.3)}).leader == NATIVE


def test_of_a_proven_leader_and_its_rival_the_best_wins_without_native():
    trial = Trial(["good", "best", "bad"])
    # They differ by less than the rounds can tell.
    seen = play(trial, of(good=500.0, best=499.0, bad=1300.0))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.rounds) == ("best", RIVAL_ROUNDS)
    assert seen.count(NATIVE) == 1 + EARLY_ROUNDS
    assert seen.count("best") == seen.count("good") == 1 + RIVAL_ROUNDS
    assert trial.outcome.gain == pytest.approx(US / 499.0)
    assert trial.outcome.measured["good"].rounds == EARLY_ROUNDS


def test_a_rival_that_is_clearly_slower_than_the_leader_is_out_although_it_beats_native():
    trial = Trial(["good", "best"])
    play(trial, of(good=800.0, best=400.0))
    assert trial.outcome is not None
    assert (trial.outcome.algorithm, trial.outcome.rounds) == ("best", EARLY_ROUNDS)
    assert trial.measured()["good"].gain == pytest.approx(1.25)


def test_if_the_proven_leader_fails_native_takes_part_again():
    trial = Trial(["good", "best"])
    times = of(good=500.0, best=499.0)
    seen = play(trial, times, 3 + 3 * EARLY_ROUNDS + 2)
    assert NATIVE not in seen[-2:]
    trial.drop("best")
    seen = play(trial, times)
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "good"
    assert NATIVE in seen


def test_who_never_beat_native_does_not_win_by_one_good_round_against_the_leader():
    trial = Trial({"proven": Prior(0.7, 0.1), "doubtful": Prior(0.0, 0.3)})
    wild = iter([1.0, 3.0, 0.3, 2.0, 0.3, 0.3, 0.3] + [0.3] * 20)
    play(trial, lambda name: {NATIVE: US, "proven": 500.0}.get(name) or US * next(wild))
    assert trial.outcome is not None
    assert trial.outcome.algorithm == "proven"


def test_what_was_measured():
    trial = Trial(["a", "b", "c"])
    assert trial.measured() == {}
    # Fast first calls pay for what is slow.
    times = {"a": iter([100.0, 900.0, 800.0, 700.0]), "b": iter([100.0, 2600.0]), "c": iter([4.3 * US])}
    play(trial, lambda name: US if name == NATIVE else next(times[name]), 4)
    assert trial.measured() == {}  # first calls say too little
    while trial.rounds < 3 and trial.outcome is None:
        name = trial.turn()
        trial.record(name, US if name == NATIVE else next(times[name]))
    found = trial.measured()
    assert list(found) == ["a", "b"]
    assert found["a"].rounds == 3
    assert (found["a"].p20, found["a"].gain, found["a"].p80) == pytest.approx((US / 900, US / 800, US / 700))
    assert found["b"] == Measured(1, *[pytest.approx(1 / 2.6)] * 3)
    assert trial.hopeless() == ["c"]
