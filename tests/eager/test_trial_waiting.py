"""Trials that may not begin yet, since others have cost too much; and the end after 60 calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from race import NATIVE_US, X, call_until_settled, on_trial

import convselect
from convselect.base import settings, timing
from convselect.base.problem import Direction, conv_problem
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.trial import ALLOWANCE_CALLS, EARLY_ROUNDS, MOST_CALLS
from convselect.eager import dispatch, live_trial
from convselect.eager.live_trial import LiveTrial
from convselect.eager.plan import make_plan
from convselect.store import process

CPU = torch.device("cpu")


class Passed:
    """aten's own calls, by the dispatcher, counted."""

    calls = 0

    def __call__(self, *arguments):
        self.calls += 1
        return F.conv2d(*arguments)


@pytest.fixture
def account(race, monkeypatch):
    """More was spent than may be, until `excess_us` is set back."""
    live_trial.account.begun(NATIVE_US)
    live_trial.account.excess_us = 1e12
    return live_trial.account


def test_while_a_trial_may_not_begin_calls_are_atens_own_and_then_it_goes_on(race, account, monkeypatch):
    passed = Passed()
    monkeypatch.setattr(dispatch, "conv2d", dispatch.dispatcher(passed, make_plan))
    weight, reads = torch.randn(4, 4, 3, 3), []
    expected = F.conv2d(X, weight, padding=1)

    def call() -> None:
        before = race.clock.reads, passed.calls
        assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
        reads.append((race.clock.reads - before[0], passed.calls - before[1]))

    with torch.no_grad():
        for _ in range(2 * 17 + 1):
            call()
        (trial,) = on_trial()
        asked = [i for i, (read, _) in enumerate(reads) if read]
        assert asked == [0, 1, 18]  # native's turn; whether it may begin; the same
        assert [taken for _, taken in reads] == [0, 0, *[1] * 16, 0, *[1] * 16]
        assert trial.trial.calls == len(reads)
        assert trial.trial.turns == 1
        account.excess_us = 0.0
        for _ in range(15):
            call()
    assert trial.trial.turns == 3 * (1 + EARLY_ROUNDS)
    assert trial.choice is not None
    assert trial.choice.algorithm == "quick"


def test_calls_that_need_a_gradient_wait_without_a_clock_as_well(race, account):
    x, weight = X.clone().requires_grad_(), torch.randn(4, 4, 3, 3)
    for _ in range(2):
        convselect.conv2d(x, weight, padding=1)
    (trial,) = [t for t in on_trial() if t.problem.direction == Direction.FORWARD]
    reads = race.clock.reads
    for _ in range(16):
        convselect.conv2d(x, weight, padding=1)
    assert race.clock.reads == reads
    assert trial.trial.calls == 18
    convselect.conv2d(x, weight, padding=1).sum().backward()
    assert x.grad is not None
    assert race.clock.reads > reads


def test_a_favourite_waits_as_well(race, account):
    race.trusted = {"slow", "quick"}
    with torch.no_grad():
        for _ in range(17):
            convselect.conv2d(X, torch.randn(4, 4, 3, 3), padding=1)
    assert on_trial()[0].trial.turns == 0
    account.excess_us = 0.0
    call_until_settled()
    assert account.trials == 2


@pytest.mark.parametrize("slowdown", [1.5, 3.0, 30.0])
@pytest.mark.parametrize("network", [False, True])
def test_a_model_that_lies_about_every_layer_costs_a_few_calls_of_native(race, slowdown, network, monkeypatch):
    """Forty layers, one after the other or in turn; nothing else is computed."""
    race["quick"].us = race["slow"].us = slowdown * NATIVE_US
    race.model.gain = 1.1
    monkeypatch.setattr(timing, "computed_us", lambda: race.clock.ns / 1e3)
    layers = [(torch.zeros(1, 1 + i, 5, 5), torch.zeros(2, 1 + i, 3, 3)) for i in range(40)]
    with torch.no_grad():
        for x, weight in layers * 61 if network else [layer for layer in layers for _ in range(61)]:
            convselect.conv2d(x, weight)
    assert {t.choice.algorithm for t in on_trial()} == {NATIVE}
    excess = (slowdown - 1) * (len(race["quick"].runs) + len(race["slow"].runs))
    # Each of those that are under way may cost its allowance: one, or all that a network's first passes have begun.
    under_way = len(layers) if network else 1
    assert excess <= 40 + 0.005 * len(layers) * 61 + under_way * ALLOWANCE_CALLS + slowdown


@pytest.mark.parametrize("grad", [False, True])
def test_who_waits_for_ever_is_settled_after_60_calls_and_nothing_is_stored(race, account, grad):
    x, weight = X.clone().requires_grad_(grad), torch.randn(4, 4, 3, 3)
    convselect.conv2d(x, weight, padding=1)
    (trial,), calls = on_trial(), 1
    while trial.choice is None:
        convselect.conv2d(x, weight, padding=1)
        calls += 1
    assert 40 < calls <= MOST_CALLS + 1
    assert (trial.choice.algorithm, trial.choice.source, trial.choice.measured) == (NATIVE, "model", None)
    assert process.look_up(trial.problem, settings.current().budgets) is None


def test_60_calls_are_the_end_however_few_were_timed(race):
    """An algorithm that never is ready."""
    for name in ("quick", "slow"):
        race[name].may_be_unready = True
        race[name].ready = lambda problem, params=None: False
    trial = call_until_settled(MOST_CALLS + 1)
    assert trial.trial.calls == MOST_CALLS + 1
    assert race["quick"].runs == []
    assert race["slow"].runs == []
    assert process.look_up(trial.problem, settings.current().budgets) is None


def test_time_that_threads_compute_together_counts_for_one_of_them(race, account, monkeypatch):
    """The allowance is a share of what has been computed, in time that passes."""
    for threads, computed_us, begins in ((1, 30_000.0, True), (2, 30_000.0, False), (2, 50_000.0, True)):
        monkeypatch.setattr(timing, "computed_us", lambda us=computed_us: us)
        trial = LiveTrial(conv_problem(1, 1, 1, 1, 1, 1, 1, threads=threads), Choice(NATIVE, "model"), ["quick"])
        for _ in range(2):
            account.native_us, account.trials, account.excess_us = NATIVE_US, 1, 40 * NATIVE_US + 100.0
            trial.run(lambda name: torch.ones(1), CPU, lambda *_: True)
        assert (trial.waits == 0) is begins
