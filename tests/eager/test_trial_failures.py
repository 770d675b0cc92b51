"""Trials and settled choices whose algorithms fail, are wrong, or leave a call to native: no call's result is wrong."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from fake_model import use_fake
from race import NATIVE_US, X, call_until_settled, on_trial

import convselect
from convselect.base import lru, settings
from convselect.base import warnings as _warnings
from convselect.base.problem import Direction, conv_problem
from convselect.choice.budgets import distrusted
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.outcome import Prior
from convselect.choice.trial import EARLY_ROUNDS
from convselect.eager import checks, execute, live_trial, resolve
from convselect.eager.live_trial import FIRST_PLACES, UNSEEN_US, LiveTrial
from convselect.eager.plan import plans
from convselect.graph import run as graph_run
from convselect.kernels import _library
from convselect.kernels.pool import BY_NAME
from convselect.store import process

WRONG = "quick is wrong on .*It is not used any more, and native computed this call"


def zeros(a, b, problem, *_):
    return torch.zeros(problem.result_shape)


# ---- wrong results --------------------------------------------------------------------------------------------------


def test_a_wrong_algorithm_is_caught_at_its_first_call_and_its_result_is_never_seen(race):
    race["quick"].result = zeros
    with pytest.warns(convselect.ConvselectWarning, match=WRONG) as said:
        trial = call_until_settled()
        # Nor on other problems, and nobody is warned again.
        for size in (8, 12):
            with torch.no_grad():
                for _ in range(20):
                    convselect.conv2d(torch.randn(1, 4, size, size), torch.randn(4, 4, 3, 3), padding=1)
    assert len(said) == 1
    assert trial.choice.algorithm == NATIVE
    assert list(trial.trial.priors) == ["slow"]  # begun anew
    assert len(race["quick"].runs) == 1
    assert list(distrusted) == ["quick"]
    assert "gave a wrong result" in distrusted["quick"]
    lru.clear()
    assert distrusted == {}


def test_what_is_wrong_forgets_plans_and_choices_of_every_layer(race):
    with torch.no_grad():
        for _ in range(60):
            convselect.conv2d(torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3))
    assert [t.choice.algorithm for t in on_trial()] == ["quick"]
    race["quick"].result = zeros
    other = torch.randn(1, 4, 9, 9), torch.randn(8, 4, 3, 3)
    with pytest.warns(convselect.ConvselectWarning, match=WRONG), torch.no_grad():
        while not distrusted:
            assert torch.equal(convselect.conv2d(*other), F.conv2d(*other))
    assert on_trial() == []
    assert list(plans.entries) == []
    with torch.no_grad():
        convselect.conv2d(torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3))
    assert resolve.choice_for(conv_problem(1, 4, 6, 6, 4, 3, 3), settings.current()).algorithm != "quick"


def test_a_stored_choice_is_refused_with_its_algorithm(race):
    trial = call_until_settled()
    assert process.look_up(trial.problem, settings.current().budgets).algorithm == "quick"
    distrusted["quick"] = "It was wrong."
    lru.forget_entries()
    choice = resolve.choice_for(trial.problem, settings.current())
    assert (choice.algorithm, choice.source) != ("quick", "store")


def test_a_settled_choice_that_becomes_wrong_is_found_and_the_call_repeated(race):
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    call_until_settled()
    race["quick"].result = zeros
    checks.due.left = 0
    with pytest.warns(convselect.ConvselectWarning, match=WRONG), torch.no_grad():
        assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    runs = len(race["quick"].runs)
    with torch.no_grad():
        for _ in range(60):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    assert len(race["quick"].runs) == runs


def test_right_results_are_checked_and_nothing_happens(race, monkeypatch):
    seen = []
    original = checks.is_right
    monkeypatch.setattr(checks, "is_right", lambda *a: seen.append((a[0], *a[6:])) or original(*a))
    trial = call_until_settled()
    assert sorted(seen) == [("quick", FIRST_PLACES), ("slow", FIRST_PLACES)]
    checks.due.left = 0
    call_until_settled(1)
    assert seen[2:] == [("quick",)]
    assert 0 < checks.due.left <= checks.MOST_GAP
    assert trial.choice.algorithm == "quick"


def test_bias_and_strides_are_part_of_what_is_checked(race):
    """The bias forgotten: wrong. Another layout of the result: right."""
    original = race["quick"].result
    race["quick"].result = lambda a, b, p, params, bias: original(a, b, p, params, None)
    channels_last = X.to(memory_format=torch.channels_last)
    for bias, wrong in ((None, False), (torch.randn(4) + 3, True)):
        lru.clear()
        checks.due.left = 0  # the second time it comes out of the store
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            for x in (X, channels_last):
                for _ in range(20):
                    y = convselect.conv2d(x, torch.ones(4, 4, 3, 3), bias)
                    assert y.stride() == F.conv2d(x, torch.ones(4, 4, 3, 3), bias).stride()
        assert bool(said) is bool(distrusted) is wrong


def test_what_autograd_still_holds_does_not_run_what_was_wrong(race):
    """The plan is forgotten, but a graph has it: its backward goes by native."""
    layer, x = convselect.SelectedConv2d(4, 4, 3, padding=1), X.clone().requires_grad_()
    for _ in range(60):
        layer(x).sum().backward()
    y = layer(x)
    (plan,) = plans.entries.values()
    distrusted["quick"] = "It was wrong."
    lru.forget_entries()
    race["quick"].result = zeros
    x.grad = None
    y.sum().backward()
    assert torch.equal(plan.forward(x.detach(), layer.weight, layer.bias), y)
    want = X.clone().requires_grad_()
    F.conv2d(want, layer.weight, layer.bias, padding=1).sum().backward()
    assert torch.equal(x.grad, want.grad)


def test_a_trial_that_autograd_still_holds_does_not_run_what_was_wrong(race):
    layer, x = convselect.SelectedConv2d(4, 4, 3, padding=1), X.clone().requires_grad_()
    for _ in range(6):
        y = layer(x)
        y.sum().backward(retain_graph=True)
    assert all(t.choice is None for t in on_trial())
    runs = len(race["quick"].runs)
    distrusted["quick"] = "It was wrong."
    lru.forget_entries()
    for _ in range(30):
        x.grad = None
        y.sum().backward(retain_graph=True)
    assert len(race["quick"].runs) == runs


def test_a_compiled_graph_that_names_what_was_wrong_runs_native(race):
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight)
    geometry = graph_run.OpGeometry((1, 1), (0, 0, 0, 0), (1, 1), 1)

    def call() -> torch.Tensor:
        return graph_run.run(Direction.FORWARD, X, weight, None, geometry, "quick", "")

    assert torch.equal(call(), expected)
    assert len(race["quick"].runs) == 1
    race["quick"].result = zeros
    checks.due.left = 0
    with pytest.warns(convselect.ConvselectWarning, match=WRONG):
        assert torch.equal(call(), expected)
    for _ in range(3):
        assert torch.equal(call(), expected)
    assert len(race["quick"].runs) == 2


def test_what_was_asked_for_by_name_is_not_checked(race):
    race["quick"].result = zeros
    checks.due.left = 0
    with convselect.use("quick"), torch.no_grad():
        assert not convselect.conv2d(X, torch.randn(4, 4, 3, 3)).any()
    assert distrusted == {}


def test_a_wrong_result_costs_its_own_time_and_its_check(race):
    clock = race.clock
    trial = LiveTrial(conv_problem(1, 1, 1, 1, 1, 1, 1), Choice(NATIVE, "model"), {"slow": Prior(0.7, 0.3)})

    def run(name: str):
        clock.ns += int(1000 * BY_NAME[name].us)
        return torch.ones(1)

    def is_right(name: str, result: torch.Tensor, places: int) -> bool:
        assert places == FIRST_PLACES
        clock.ns += 200_000
        return False

    for _ in range(2):
        trial.run(run, torch.device("cpu"), is_right)
    assert clock.ns == 1000 * (2 * NATIVE_US + 1500.0 + 200.0)
    assert trial.trial.excess_us == pytest.approx(25.0 + UNSEEN_US + 1500.0 + 200.0)
    assert live_trial.account.excess_us == pytest.approx(trial.trial.excess_us)
    assert trial.choice.algorithm == NATIVE
    assert trial.trial.hopeless() == []


# ---- infinities and NaNs --------------------------------------------------------------------------------------------


def test_after_two_results_that_native_must_give_a_candidate_is_out(race):
    race["quick"].result = lambda *_: None
    trial = call_until_settled()
    assert trial.choice.algorithm == NATIVE
    assert len(race["quick"].runs) == 2
    assert trial.trial.measured().keys() == {"slow"}


def test_after_one_it_is_still_in_the_race(race):
    original, calls = race["quick"].result, iter(range(1000))
    race["quick"].result = lambda *a: None if next(calls) < 1 else original(*a)
    assert call_until_settled().choice.algorithm == "quick"


def test_a_settled_choice_rests_after_two_in_a_row(race):
    call_until_settled()
    original, calls = race["quick"].result, iter(range(10_000))
    race["quick"].result = lambda *_: None
    runs = len(race["quick"].runs)
    call_until_settled(2 + execute.REST_CALLS)
    assert len(race["quick"].runs) == runs + 2
    call_until_settled(1)  # and is tried again
    assert len(race["quick"].runs) == runs + 3
    call_until_settled(execute.REST_CALLS)
    assert len(race["quick"].runs) == runs + 3
    # Every other call is no reason to rest.
    lru.clear()
    race["quick"].result = lambda *a: None if next(calls) % 2 else original(*a)
    runs = len(race["quick"].runs)
    with torch.no_grad():
        for _ in range(50):  # out of the store
            convselect.conv2d(X, torch.ones(4, 4, 3, 3), padding=1)
    assert len(race["quick"].runs) == runs + 50


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["winograd4", "fft", "im2col_gemm"])
def test_values_that_are_not_finite_or_huge_give_natives_result(name, value, monkeypatch, store):
    use_fake(monkeypatch, name)
    monkeypatch.setattr(_warnings, "_given", set())
    x, weight = torch.randn(2, 8, 20, 20), torch.randn(8, 8, 3, 3)
    x[0, 3, 5, 5] = value
    expected = F.conv2d(x, weight, padding=1)
    finite = expected.isfinite()
    touched = torch.zeros_like(finite)
    touched[0, :, 4:7, 4:7] = True
    with convselect.use("verify"), torch.no_grad():
        for _ in range(40):
            y = convselect.conv2d(x, weight, padding=1)
            if value == 1e30:  # a transform may spread its rounding errors over the image
                assert y[1].isfinite().all()
                assert torch.allclose(y[1], expected[1], rtol=1e-4, atol=1e-4)
                assert torch.allclose(y[touched], expected[touched], rtol=1e-3)
                continue
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y == float("inf"), expected == float("inf"))
            assert torch.allclose(y[finite], expected[finite], rtol=1e-4, atol=1e-4)
    assert distrusted == {}


# ---- memory, errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_short_memory_does_not_decide_for_good(race, error, monkeypatch):
    freed = []
    monkeypatch.setattr(_library, "give_back", lambda: freed.append(1))

    def fails(*_):
        raise error

    race["quick"].result = fails
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial = call_until_settled()
    assert trial.choice.algorithm == NATIVE
    assert process.look_up(trial.problem, settings.current().budgets) is None
    assert freed == [1]  # native may need it
    process.flush()
    lru.clear()
    # Nor does it teach anything to later processes.
    race["quick"].result = race[NATIVE].result
    assert call_until_settled().choice.algorithm == "quick"


def test_an_algorithm_that_fails_is_out_with_one_warning(race):
    def fails(*_):
        raise RuntimeError("no such tile")

    race["quick"].result = fails
    with pytest.warns(convselect.ConvselectWarning, match="quick failed on forward.*no such tile") as said:
        trial = call_until_settled()
    assert len(said) == 1
    assert trial.choice.algorithm == NATIVE
    assert len(race["quick"].runs) == 1


def test_what_is_still_compiling_waits_for_its_turn(race):
    asked = iter(range(1000))
    race["quick"].may_be_unready = True
    race["quick"].ready = lambda problem, params=None: next(asked) > 5
    assert call_until_settled().choice.algorithm == "quick"


def test_natives_errors_are_the_users_and_the_trial_goes_on(race):
    original = race[NATIVE].result

    def fails(*_):
        raise RuntimeError("really wrong")

    weight = torch.randn(4, 4, 3, 3)

    def calls(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                convselect.conv2d(X, weight, padding=1)

    for before in (0, 4):
        calls(before)
        race[NATIVE].result = fails
        with pytest.raises(RuntimeError, match="really wrong"):
            calls(9)
        race[NATIVE].result = original
    trial = call_until_settled()
    assert trial.choice.algorithm == "quick"
    assert trial.trial.rounds >= EARLY_ROUNDS


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_makes_no_algorithm_wrong(value):
    """Whether it meets the zeros beyond the edge differs between kernels, so a check must not say so."""
    problem = conv_problem(1, 3, 8, 8, 4, 3, 3, direction="backward_data", padding=1)
    grad_y, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 3, 3, 3)
    result = torch.full((1, 3, 8, 8), value)
    try:
        bad = weight.clone()
        bad[0, 0, 0, 0] = value
        assert checks.is_right("direct", result, grad_y, bad, problem, None, places=50)
        assert "direct" not in distrusted
        with pytest.warns(convselect.ConvselectWarning, match="direct is wrong"):
            assert not checks.is_right("direct", result, grad_y, weight, problem, None)
    finally:
        convselect.clear()
        _warnings._given.discard("wrong:direct")
