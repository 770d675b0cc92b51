"""Trials on a GPU, by fake events: they are read when they have passed, and nothing waits for them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from race import NATIVE_US, Clock

import convselect
from convselect.base import timing
from convselect.base.problem import conv_problem
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.outcome import Prior
from convselect.choice.trial import EARLY_ROUNDS
from convselect.eager import live_trial
from convselect.eager.live_trial import LiveTrial
from convselect.kernels.pool import BY_NAME

GPU = torch.device("cuda")
P = conv_problem(1, 1, 1, 1, 1, 1, 1)


class Event:
    """Has passed when it is asked for the second time."""

    seen: ClassVar[list[Event]] = []

    def __init__(self, clock: Clock) -> None:
        self.clock, self.passed = clock, False
        Event.seen.append(self)

    def record(self) -> None:
        self.at = self.clock.ns

    def query(self) -> bool:
        self.passed, before = True, self.passed
        return before

    def elapsed_time(self, later: Event) -> float:
        assert Event.seen[-1].passed, "read before all had passed"
        return (later.at - self.at) / 1e6


@pytest.fixture
def gpu(race, monkeypatch):
    """Runs a trial's calls; `capturing[0]`: in a CUDA graph capture. `results` are those of the algorithms."""
    clock, never = race.clock, pytest.fail
    monkeypatch.setattr(timing, "cuda_events", lambda: timing.Events(lambda: Event(clock), never, never))
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    results = {name: torch.ones(1) for name in race}

    def run(name: str):
        clock.ns += int(1000 * BY_NAME[name].us)
        return results[name]

    def call(trial: LiveTrial, times: int = 1) -> None:
        for _ in range(times):
            trial.run(run, GPU, lambda *_: pytest.fail("checked on the CPU"))

    call.capturing, call.results, call.clock = capturing, results, clock
    return call


def trial_of(*names: str) -> LiveTrial:
    return LiveTrial(P, Choice("quick", "model"), {name: Prior(0.7, 0.3) for name in names})


def test_events_are_read_once_they_have_passed_and_never_waited_for(gpu):
    trial = trial_of("quick", "slow")
    for i in range(120):
        gpu.capturing[0] = i % 10 == 9
        turns = trial.trial.turns
        gpu(trial)
        assert not gpu.capturing[0] or trial.trial.turns == turns
    assert trial.choice is not None
    assert trial.choice.algorithm == "quick"
    assert trial.choice.measured.gain == pytest.approx(1000 / 325, rel=1e-3)
    assert trial.choice.measured.rounds == EARLY_ROUNDS


def test_the_first_result_is_natives_and_everything_is_charged(gpu):
    trial = trial_of("slow")
    gpu.results["slow"], gpu.results[NATIVE] = torch.tensor([1.0]), torch.tensor([1.0])
    gpu(trial, 5)  # native's turn; a call meanwhile; the candidate's with native's; a call meanwhile; and they are read
    assert trial.trial.excess_us == pytest.approx(25.0 + 1500.0 + 25.0, abs=1)
    assert live_trial.account.excess_us == pytest.approx(trial.trial.excess_us)
    assert live_trial.account.native_us == pytest.approx(NATIVE_US)


def test_a_wrong_one_is_out_with_a_warning(gpu):
    trial = trial_of("quick", "slow")
    gpu.results["quick"] = torch.full((1,), 2.0)
    with pytest.warns(convselect.ConvselectWarning, match="quick is wrong on .*relative error is 1.0e"):
        gpu(trial, 120)
    assert trial.choice.algorithm == NATIVE
    assert trial.trial.measured().keys() == {"slow"}


def test_what_cannot_be_compared_ends_without_a_result(gpu):
    """A NaN in the operands is in both results: nothing is said against the candidate."""
    trial = trial_of("quick")
    gpu.results["quick"] = gpu.results[NATIVE] = torch.tensor([float("nan")])
    gpu(trial, 30)
    assert trial.choice is None
    assert trial.trial.live == ["quick"]
    gpu.results["quick"] = gpu.results[NATIVE] = torch.ones(1)
    gpu(trial, 60)
    assert trial.choice.algorithm == "quick"
