"""Trials on real calls: results stay right, the faster algorithm wins, nothing is timed that must not be."""

from __future__ import annotations

import math
import multiprocessing
import threading

import pytest
import torch
import torch.nn.functional as F
from race import NATIVE_US, Clock, X, call_until_settled, on_trial
from torch import nn
from torch.utils.checkpoint import checkpoint

import convselect
from convselect.base import lru, settings
from convselect.base.problem import Direction, conv_problem
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.outcome import Measured, Prior
from convselect.choice.trial import ALLOWANCE_CALLS, ALLOWANCE_US, EARLY_ROUNDS
from convselect.eager import live_trial, resolve
from convselect.eager.live_trial import UNSEEN_US, LiveTrial
from convselect.eager.plan import plans
from convselect.kernels.pool import BY_NAME
from convselect.store import process

GAIN = pytest.approx(1000 / 325, rel=1e-6)
"""Of "quick", with the cost of its plan."""
CPU = torch.device("cpu")


def test_the_quick_one_wins_and_where_native_runs_the_bits_are_natives(race):
    """The bias included."""
    for name in ("quick", "slow"):
        original = race[name].result
        race[name].result = lambda *a, original=original: original(*a) * (1 + 2**-20)
    weight, bias = torch.randn(4, 4, 3, 3), torch.randn(4)
    expected = F.conv2d(X, weight, bias, padding=1)
    before, natives = race.counts(), 0
    with torch.no_grad():
        for _ in range(60):
            y = convselect.conv2d(X, weight, bias, padding=1)
            after = race.counts()
            ran = [name for name in race if after[name] > before[name]]
            assert len(ran) == 1
            assert torch.equal(y, expected) is (ran == [NATIVE])
            assert torch.allclose(y, expected, rtol=1e-5)
            before, natives = after, natives + (ran == [NATIVE])
    assert natives == 1 + EARLY_ROUNDS
    (trial,) = on_trial()
    assert trial.choice == Choice("quick", "verify", None, pytest.approx(math.exp(0.7)), measured=trial.choice.measured)
    assert trial.choice.measured == Measured(EARLY_ROUNDS, GAIN, GAIN, GAIN)
    assert trial.choice.gain == GAIN
    assert len(race["slow"].runs) <= 1 + EARLY_ROUNDS
    assert race["quick"].runs[-20:] == [Direction.FORWARD] * 20
    (plan,) = plans.entries.values()
    assert plan.found is trial.choice


def test_what_was_found_outlives_the_process(race):
    weight = torch.randn(4, 4, 3, 3)
    problem = conv_problem(2, 4, 10, 10, 4, 3, 3, padding=1)
    with torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
    lru.clear()
    decision = process.look_up(problem, settings.current().budgets)
    assert decision is not None
    assert (decision.algorithm, decision.source, decision.samples) == ("quick", "verify", EARLY_ROUNDS)
    counts = race.counts()
    for policy in ("auto", "verify"):
        with torch.no_grad(), convselect.use(policy):
            convselect.conv2d(X, weight, padding=1)
        choice = resolve.choice_for(problem, settings.with_policy(settings.current(), policy))
        assert (choice.algorithm, choice.source) == ("quick", "store")
        assert choice.measured == Measured(EARLY_ROUNDS, GAIN)
    assert race.counts() == counts | {"quick": counts["quick"] + 2}
    # Under other budgets it was not found out.
    with torch.no_grad(), convselect.use("auto", precision="fast") as other:
        assert resolve.choice_for(problem, other).source == "model"
    # An upgraded algorithm is tried again.
    race["quick"].revision += 1
    lru.clear()
    assert resolve.choice_for(problem, settings.current()).source == "model"


def test_all_three_directions_have_trials_of_their_own(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    plain = nn.Conv2d(4, 4, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    for _ in range(60):
        results = []
        for module, leaf in ((layer, x), (plain, y)):
            module.zero_grad()
            leaf.grad = None
            results.append(module(leaf))
            results[-1].square().sum().backward()
        assert torch.equal(*results)
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert {t.problem.direction: t.choice.algorithm for t in on_trial()} == dict.fromkeys(Direction, "quick")
    (plan,) = plans.entries.values()
    assert {choice.source for _, choice in plan._backward.values()} == {"verify"}


def test_where_native_wins_the_call_is_natives_again(race):
    race["quick"].us = race["slow"].us = 1100.0
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    for _ in range(70):
        layer(X.clone().requires_grad_()).square().sum().backward()
    assert {t.choice.algorithm for t in on_trial()} == {NATIVE}
    assert [plan.native for plan in plans.entries.values()] == [True]


@pytest.mark.parametrize(("us", "winner"), [(850.0, NATIVE), (500.0, "quick")])
def test_what_a_training_step_saves_has_to_be_more_than_leaving_native_costs_it(race, us, winner):
    """Faster in one direction only, which alone counts its own share of the cost: 25 us here. The step costs 280 us."""
    race["quick"].us = race["slow"].us = 1100.0
    race["quick"].us_of[Direction.BACKWARD_WEIGHT] = us
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    for _ in range(70):
        layer(X.clone().requires_grad_()).square().sum().backward()
    found = {t.problem.direction: t.choice for t in on_trial()}
    assert found[Direction.BACKWARD_WEIGHT].algorithm == winner
    assert found[Direction.BACKWARD_WEIGHT].source == "verify"
    assert found[Direction.FORWARD].algorithm == found[Direction.BACKWARD_DATA].algorithm == NATIVE
    assert [plan.native is True for plan in plans.entries.values()] == [winner == NATIVE]


def test_where_only_the_forward_direction_leaves_native_all_gradients_are_natives(race):
    race["quick"].us = race["slow"].us = 1100.0
    race["quick"].us_of[Direction.FORWARD] = 300.0
    layer, plain = convselect.SelectedConv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    for _ in range(70):
        for module in (layer, plain):
            module.zero_grad()
            module(X.clone().requires_grad_()).square().sum().backward()
        assert torch.equal(layer.weight.grad, plain.weight.grad)
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    assert {t.problem.direction for t in on_trial() if t.choice.algorithm == "quick"} == {Direction.FORWARD}
    assert torch.equal(layer.bias.grad, plain.bias.grad)  # it comes with the weight's


def test_directions_that_save_a_little_each_may_save_enough_together(race):
    race["quick"].us, race["slow"].us = 850.0, 1100.0
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    for _ in range(70):
        layer(X.clone().requires_grad_()).square().sum().backward()
    assert {t.choice.algorithm for t in on_trial()} == {"quick"}


def test_a_trusted_favourite_runs_from_the_very_first_call_on(race):
    race.model._ranked.remove("quick")
    race.model._ranked.insert(0, "quick")
    weight, order = torch.randn(4, 4, 3, 3), []
    for trusted, first in (((), NATIVE), (("slow",), NATIVE), (("quick",), "quick")):
        lru.clear()
        race.trusted = set(trusted)
        before = race.counts()
        with torch.no_grad():
            convselect.conv2d(X, weight, padding=1)
        order.append(first)
        assert {name for name, count in race.counts().items() if count > before[name]} == {first}
    assert call_until_settled().choice.algorithm == "quick"
    # A gain below 1.3 is no reason.
    process.configure("off")
    lru.clear()
    race.trusted, race.model.gain = {"quick", "slow"}, 0.25
    natives = len(race[NATIVE].runs)
    with torch.no_grad():
        convselect.conv2d(X, weight, padding=1)
    assert len(race[NATIVE].runs) == natives + 1


@pytest.mark.parametrize("favourite", [False, True])
@pytest.mark.parametrize("slowdown", [1.05, 3, 40])
def test_the_excess_of_a_lying_model_is_bounded(race, slowdown, favourite):
    race["quick"].us = race["slow"].us = slowdown * NATIVE_US
    race.trusted = {"quick", "slow"} if favourite else set()
    start = race.clock.ns
    call_until_settled(100)
    excess_us = (race.clock.ns - start) / 1e3 - 100 * NATIVE_US
    assert excess_us <= ALLOWANCE_CALLS * NATIVE_US + ALLOWANCE_US + slowdown * NATIVE_US
    assert live_trial.account.excess_us >= excess_us  # it counts the plan's cost too
    assert live_trial.account.trials == 1


def test_everything_around_a_turn_is_charged(race):
    """Time that passes between the turn's begin and end, and outside the algorithm's run."""
    clock, problem = race.clock, conv_problem(1, 1, 1, 1, 1, 1, 1)
    trial = LiveTrial(problem, Choice(NATIVE, "model"), {"quick": Prior(0.7, 0.3)})

    def run(name: str):
        clock.ns += int(1000 * BY_NAME[name].us)
        return torch.ones(1)

    def is_right(name: str, result: torch.Tensor, places: int) -> bool:
        clock.ns += 200_000
        return True

    for expected in (25.0 + UNSEEN_US, 2 * (25.0 + UNSEEN_US) + 200.0 + 300.0 - 1000.0):
        trial.run(run, CPU, is_right)
        assert trial.trial.excess_us == pytest.approx(expected)
        assert live_trial.account.excess_us == pytest.approx(expected)


# ---- when nothing may be timed --------------------------------------------------------------------------------------


def untouched() -> None:
    assert sum(t.trial.turns for t in on_trial()) == 0


def test_not_in_deterministic_mode(race):
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            convselect.conv2d(X, torch.randn(4, 4, 3, 3), padding=1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_trial() == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_not_in_checkpointed_code(race, use_reentrant):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    x = X.clone().requires_grad_()
    for _ in range(20):
        checkpoint(lambda x: layer(x).relu(), x, use_reentrant=use_reentrant).sum().backward()
    forward = [t for t in on_trial() if t.problem.direction == Direction.FORWARD]
    assert [t.trial.turns for t in forward] == [0]
    assert Direction.FORWARD not in race["quick"].runs + race["slow"].runs


def test_not_in_gradient_checks(race):
    x, weight = X[:1, :, :4, :4].clone().requires_grad_(), torch.randn(4, 4, 3, 3, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, w: convselect.conv2d(x, w, padding=1),
        (x, weight),
        eps=1e-2,
        atol=1e-1,
        rtol=1e-1,
        check_undefined_grad=False,
    )
    untouched()


@pytest.mark.compile
def test_not_while_tracing_or_compiling(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    torch.jit.trace(layer, X, check_trace=False)  # a check calls it for real
    torch.fx.symbolic_trace(nn.Sequential(layer))
    with torch.no_grad():
        torch.export.export(layer, (X,))
        compiled = torch.compile(layer, backend="eager")
        for _ in range(4):
            compiled(X)
    untouched()
    torch._dynamo.reset()


def test_not_under_vmap(race):
    weight = torch.randn(4, 4, 3, 3)
    for _ in range(4):
        torch.func.vmap(lambda x: convselect.conv2d(x, weight, padding=1))(torch.randn(3, 2, 4, 10, 10))
    untouched()


def test_a_call_beside_another_is_native_and_untimed(race):
    """Two at once would time each other."""
    inside, go = threading.Event(), threading.Event()
    weight = torch.randn(4, 4, 3, 3)
    original = race[NATIVE].result

    def waits(*arguments):
        if threading.current_thread().name == "first":
            inside.set()
            assert go.wait(10)
        return original(*arguments)

    race[NATIVE].result = waits

    def call() -> None:
        with torch.no_grad(), convselect.use("verify"):
            convselect.conv2d(X, weight, padding=1)

    first = threading.Thread(target=call, name="first")
    first.start()
    assert inside.wait(10)
    call()
    (trial,) = on_trial()
    assert trial.trial.turns == 1
    go.set()
    first.join()


def test_many_threads(race):
    weight = torch.randn(4, 4, 3, 3)
    expected, wrong = F.conv2d(X, weight, padding=1), []

    def work() -> None:
        with torch.no_grad(), convselect.use("verify"):
            for _ in range(200):
                if not torch.equal(convselect.conv2d(X, weight, padding=1), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(on_trial()) <= 1


def _in_child(queue) -> None:
    with torch.no_grad(), convselect.use("verify"):
        for _ in range(60):
            convselect.conv2d(X, torch.ones(4, 4, 3, 3), padding=1)
    queue.put(on_trial()[0].choice.algorithm)


def test_a_fork_while_a_trial_is_held_does_not_stop_it_in_the_child(race):
    with torch.no_grad():
        convselect.conv2d(X, torch.ones(4, 4, 3, 3), padding=1)
    (trial,) = on_trial()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with trial._lock:
        child = context.Process(target=_in_child, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == "quick"
        child.join(10)


def test_neighbours_on_the_machine_do_not_count(race, monkeypatch):
    """On one thread its own clock; on several, calls that stood still are dismissed."""
    clock, other = race.clock, Clock()
    monkeypatch.setattr(live_trial, "_thread_ns", other)
    quick = iter(range(10_000))

    def run(name: str):
        us = BY_NAME[name].us
        clock.ns += int(1000 * us) + (16_000_000 if name == "quick" and next(quick) % 2 else 0)
        other.ns += int(1000 * us)
        return torch.ones(1)

    for threads in (1, 2):
        problem = conv_problem(1, 1, 1, 1, 1, 1, 1, threads=threads)
        trial = LiveTrial(problem, Choice("quick", "model"), ["quick", "slow"])
        for _ in range(60):
            trial.run(run, CPU, lambda *_: True)
        assert trial.choice is not None
        assert trial.choice.algorithm == "quick"
    # A machine on which every call is interrupted has to be taken as it is.
    monkeypatch.setattr(live_trial, "_thread_ns", Clock())
    trial = LiveTrial(conv_problem(1, 1, 1, 1, 1, 1, 1, threads=2), Choice("slow", "model"), ["slow"])
    for _ in range(61):
        trial.run(run, CPU, lambda *_: True)
    assert trial.choice is not None
    assert trial.trial.rounds >= EARLY_ROUNDS


# ---- the user's view ------------------------------------------------------------------------------------------------


def test_explain_shows_trials_and_what_came_of_them(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        assert convselect.explain(layer, X).rows[0].source == "trial"
        for _ in range(60):
            layer(X)
        row = convselect.explain(layer, X).rows[0]
    assert (row.algorithm, row.source) == ("quick", "verify")
    assert row.measured_gain == GAIN
    assert row.why_not[NATIVE].startswith("Timing has settled on quick")


def test_per_layer_per_context_per_environment(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1, policy="verify")
    with convselect.use("native"), torch.no_grad():
        for _ in range(60):
            layer(X)
    assert [t.choice.algorithm for t in on_trial()] == ["quick"]
    with pytest.raises(ValueError, match="unknown policy"):
        convselect.SelectedConv2d(1, 1, 1, policy="verily")
