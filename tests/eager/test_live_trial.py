"""Trials on real calls: results stay right, the faster algorithm wins, nothing is timed that must not be."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from fake_model import FakePrediction, FakePredictor
from torch import nn
from torch.utils.checkpoint import checkpoint

import convselect
from convselect.base import lru, settings, timing
from convselect.base import warnings as _warnings
from convselect.base.problem import Direction, conv_problem
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.trial import MIN_ROUNDS
from convselect.eager import live_trial, measured, resolve
from convselect.eager.live_trial import LiveTrial
from convselect.eager.plan import plans
from convselect.kernels.native import Native
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.store import process

NATIVE_US = 1000.0
X = torch.randn(2, 4, 10, 10)
LAYER = dict(padding=1)


class Clock:
    """Time passes when algorithms say so."""

    ns = 0

    def __call__(self) -> int:
        return self.ns


class Timed(Native):
    """Native's results; takes `us` on the fake clock."""

    def __init__(self, name: str, us: float, clock: Clock) -> None:
        self.name, self.us, self.clock = name, us, clock
        self.runs: list[Direction] = []
        self.result = super().run_checked

    def run_checked(self, a, b, problem, params=None, bias=None):
        self.runs.append(problem.direction)
        self.clock.ns += int(1000 * self.us)
        return self.result(a, b, problem, params, bias)


class Likes(FakePredictor):
    """Predicts twice native's speed for its favourites, half for the rest."""

    def predict(self, problem):
        prediction = FakePrediction(self._ranked, 2.0)
        liked = self._ranked[: self._ranked.index(NATIVE)]
        prediction.log_gain = lambda name: 0.0 if name == NATIVE else 0.7 if name in liked else -0.7
        return prediction


@pytest.fixture
def race(monkeypatch, tmp_path):
    """A pool of native, "quick" and "slow" on a fake clock, with a model that likes both; policy "verify"."""
    clock = Clock()
    pool = {
        NATIVE: Timed(NATIVE, NATIVE_US, clock),
        "quick": Timed("quick", 300.0, clock),
        "slow": Timed("slow", 1500.0, clock),
    }
    for name, algorithm in pool.items():
        monkeypatch.setitem(BY_NAME, name, algorithm)
    monkeypatch.setattr(live_trial, "_wall_ns", clock)
    monkeypatch.setattr(live_trial, "_thread_ns", clock)
    predictor = Likes("slow", "quick")
    monkeypatch.setattr(loaded, "get", lambda: predictor)
    monkeypatch.setattr(_warnings, "_given", set())
    process.configure(tmp_path / "store.sqlite")
    lru.clear()
    with convselect.use("verify"):
        yield pool
    lru.clear()
    process.configure(os.environ.get("CONVSELECT_STORE"))


def on_trial() -> list[LiveTrial]:
    return [e.found for e in resolve.choices.entries.values() if isinstance(e.found, LiveTrial)]


def test_the_quick_one_wins_and_every_result_is_right(race):
    weight, bias = torch.randn(4, 4, 3, 3), torch.randn(4)
    # If the bias is added in a separate pass, as during a trial, the last bit may differ.
    expected = F.conv2d(X, weight, bias, padding=1), F.conv2d(X, weight, padding=1) + bias[:, None, None]
    with torch.no_grad():
        for _ in range(60):
            y = convselect.conv2d(X, weight, bias, padding=1)
            assert any(torch.equal(y, one) for one in expected)
    (trial,) = on_trial()
    assert trial.choice == Choice("quick", "verify", None, pytest.approx(1000 / 325, rel=1e-6))
    assert len(race["slow"].runs) < 10
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
    decision = process.look_up(problem, convselect.base.settings.current().budgets)
    assert decision is not None
    assert (decision.algorithm, decision.source, decision.samples) == ("quick", "verify", MIN_ROUNDS)
    counts = {name: len(a.runs) for name, a in race.items()}
    for policy in ("auto", "verify"):
        with torch.no_grad(), convselect.use(policy):
            convselect.conv2d(X, weight, padding=1)
        choice = resolve.choice_for(problem, settings.with_policy(settings.current(), policy))
        assert (choice.algorithm, choice.source) == ("quick", "store")
    assert len(race["quick"].runs) == counts["quick"] + 2
    # Under other budgets it was not found out.
    with torch.no_grad(), convselect.use("auto", precision="fast") as other:
        assert resolve.choice_for(problem, other).source == "model"
    # An upgraded algorithm is tried again.
    race["quick"].revision += 1
    lru.clear()
    assert resolve.choice_for(problem, convselect.base.settings.current()).source == "model"


def test_all_three_directions_have_trials_of_their_own(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    plain = nn.Conv2d(4, 4, 3, padding=1)
    plain.load_state_dict(layer.state_dict())
    x = X.clone().requires_grad_()
    y = X.clone().requires_grad_()
    grad = torch.randn_like(X)  # not of the results, whose last bit may differ by how the bias is added
    for _ in range(60):
        for module, leaf in ((layer, x), (plain, y)):
            module.zero_grad()
            leaf.grad = None
            module(leaf).backward(grad)
        assert torch.equal(x.grad, y.grad)
        assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert {t.problem.direction: t.choice.algorithm for t in on_trial()} == dict.fromkeys(Direction, "quick")
    (plan,) = plans.entries.values()
    assert {choice.source for _, choice in plan._backward.values()} == {"verify"}


def test_where_native_wins_the_call_is_natives_again(race):
    race["quick"].us = race["slow"].us = 1100.0
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    for _ in range(300):
        layer(X.clone().requires_grad_()).square().sum().backward()
    assert {t.choice.algorithm for t in on_trial()} == {NATIVE}
    assert [plan.native for plan in plans.entries.values()] == [True]


@pytest.mark.parametrize("slowdown", [1.05, 3, 40])
def test_the_excess_of_a_lying_model_is_bounded(race, slowdown):
    race["quick"].us = race["slow"].us = slowdown * NATIVE_US
    clock, weight = race[NATIVE].clock, torch.randn(4, 4, 3, 3)
    start = clock.ns
    with torch.no_grad():
        for _ in range(100):
            convselect.conv2d(X, weight, padding=1)
    assert (clock.ns - start) / 1e3 <= (100 + 8 + slowdown) * NATIVE_US


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


def test_not_in_gradient_checks(race, monkeypatch):
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


# ---- failures -------------------------------------------------------------------------------------------------------


def call_until_settled(times: int = 600) -> LiveTrial:
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    with torch.no_grad():
        for _ in range(times):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    (trial,) = on_trial()
    assert trial.choice is not None
    return trial


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_short_memory_does_not_decide_for_good(race, error):
    def fails(*_):
        raise error

    race["quick"].result = fails
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial = call_until_settled()
    assert trial.choice.algorithm == NATIVE
    assert process.look_up(trial.problem, convselect.base.settings.current().budgets) is None


def test_an_algorithm_that_fails_is_out_with_one_warning(race):
    def fails(*_):
        raise RuntimeError("no such tile")

    race["quick"].result = fails
    with pytest.warns(convselect.ConvselectWarning, match="quick failed on forward.*no such tile") as said:
        trial = call_until_settled()
    assert len(said) == 1
    assert trial.choice.algorithm == NATIVE
    assert len(race["quick"].runs) == 1


def test_a_wrong_algorithm_is_caught_at_its_first_call_and_its_result_is_never_seen(race):
    race["quick"].result = lambda a, b, problem, *_: torch.zeros(problem.result_shape)
    with pytest.warns(convselect.ConvselectWarning, match="quick is wrong on forward.*relative error is 1.0e"):
        trial = call_until_settled()
    assert trial.choice.algorithm == NATIVE
    assert len(race["quick"].runs) == 1


def test_nothing_is_concluded_from_calls_with_a_nan(race):
    weight = torch.randn(4, 4, 3, 3)
    bad = X.clone()
    bad[0, 0, 0, 0] = float("nan")
    with torch.no_grad():
        for _ in range(30):
            convselect.conv2d(bad, weight, padding=1)
    (trial,) = on_trial()
    assert trial.choice is None
    assert call_until_settled().choice.algorithm == "quick"


def test_a_result_that_native_must_give_is_no_reason_to_leave_the_race(race):
    original, calls = race["quick"].result, iter(range(1000))
    race["quick"].result = lambda *a: None if next(calls) < 3 else original(*a)
    assert call_until_settled().choice.algorithm == "quick"


def test_what_is_still_compiling_waits_for_its_turn(race):
    asked = iter(range(1000))
    race["quick"].may_be_unready = True
    race["quick"].ready = lambda problem, params=None: next(asked) > 5
    assert call_until_settled().choice.algorithm == "quick"


def test_natives_errors_are_the_users(race):
    def fails(*_):
        raise torch.OutOfMemoryError("really full")

    race[NATIVE].result = fails
    with pytest.raises(torch.OutOfMemoryError, match="really full"):
        convselect.conv2d(X, torch.randn(4, 4, 3, 3), padding=1)


# ---- GPUs, by fake events -------------------------------------------------------------------------------------------


class Event:
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


def test_neighbours_on_the_machine_do_not_count(race, monkeypatch):
    """On one thread its own clock; on several, calls that stood still are dismissed."""
    clock, other = race[NATIVE].clock, Clock()
    monkeypatch.setattr(live_trial, "_thread_ns", other)
    natives = iter(range(10_000))

    def run(name: str):
        us = BY_NAME[name].us
        clock.ns += int(1000 * us) + (16_000_000 if name == "quick" and next(natives) % 2 == 0 else 0)
        other.ns += int(1000 * us)
        return torch.ones(1)

    for threads in (1, 2):
        trial = LiveTrial(
            conv_problem(1, 1, 1, 1, 1, 1, 1, threads=threads), Choice("quick", "model"), ["quick", "slow"]
        )
        for _ in range(60):
            trial.run(run, torch.device("cpu"))
        assert trial.choice is not None
        assert trial.choice.algorithm == "quick"
    # A machine on which every call is interrupted has to be taken as it is.
    monkeypatch.setattr(live_trial, "_thread_ns", Clock())
    trial = LiveTrial(conv_problem(1, 1, 1, 1, 1, 1, 1, threads=2), Choice("quick", "model"), ["slow"])
    for _ in range(600):
        trial.run(run, torch.device("cpu"))
    assert trial.choice is not None


def test_on_a_gpu_events_are_read_once_they_have_passed_and_never_waited_for(race, monkeypatch):
    clock = race[NATIVE].clock
    never = pytest.fail
    monkeypatch.setattr(timing, "cuda_events", lambda: timing.Events(lambda: Event(clock), never, never))
    monkeypatch.setattr(live_trial, "_wall_ns", never)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    problem = conv_problem(1, 1, 1, 1, 1, 1, 1)
    trial = LiveTrial(problem, Choice("quick", "model"), ["quick", "slow"])

    def run(name: str):
        clock.ns += int(1000 * BY_NAME[name].us)
        return torch.ones(1)

    for i in range(120):
        capturing[0] = i % 10 == 9
        turns = trial.trial.turns
        trial.run(run, torch.device("cuda"))
        assert not capturing[0] or trial.trial.turns == turns
    assert trial.choice is not None
    assert trial.choice.algorithm == "quick"


# ---- audits ---------------------------------------------------------------------------------------------------------


def test_an_audit_gives_up_what_has_become_slow(race):
    weight = torch.randn(4, 4, 3, 3)
    with convselect.use(audit=8), torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        (trial,) = on_trial()
        assert trial.choice.algorithm == "quick"
        natives = len(race[NATIVE].runs)
        for _ in range(80):
            convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) - natives == 10
        race["quick"].us = 1100.0
        for _ in range(8 * 40):
            convselect.conv2d(X, weight, padding=1)
        assert trial.choice.algorithm == NATIVE
        assert [plan.native for plan in plans.entries.values()] == [True]
        decision = process.look_up(trial.problem, convselect.base.settings.current().budgets)
        assert decision is not None
        assert decision.algorithm == NATIVE


def test_a_stored_choice_is_audited_as_well_and_none_without_asking(race):
    weight = torch.randn(4, 4, 3, 3)
    with torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        natives = len(race[NATIVE].runs)
        for _ in range(600):
            convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) == natives
        lru.clear()
        with convselect.use(audit=100):
            for _ in range(600):
                convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) == natives + 6


# ---- measuring ------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    process.configure(tmp_path / "store.sqlite")
    lru.clear()
    yield
    lru.clear()
    process.configure(os.environ.get("CONVSELECT_STORE"))


def test_measure_decides_before_the_first_call_in_every_direction(store, monkeypatch):
    asked = []
    original = measured.measured
    monkeypatch.setattr(measured, "measured", lambda p, s: asked.append(p.direction) or original(p, s))
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1, policy="measure")
    # In the layout that y has: if forward is native, as on some machines, gradients are asked for by that one.
    grad = torch.randn(1, 8, 14, 14)
    for _ in range(3):
        layer(torch.randn(1, 8, 14, 14, requires_grad=True)).backward(grad)
    assert sorted(asked) == sorted(Direction)
    sources = {entry.found.source for entry in resolve.choices.entries.values()}
    assert sources == {"measure"}
    # Another process finds it in the store.
    process.flush()
    lru.clear()
    monkeypatch.setattr("convselect.measure.measure.measure_problem", lambda *_, **__: pytest.fail("measured again"))
    layer(torch.randn(1, 8, 14, 14, requires_grad=True)).backward(grad)
    assert {entry.found.source for entry in resolve.choices.entries.values()} == {"store"}


def test_measure_never_takes_a_wrong_algorithm(store, monkeypatch):
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)

    def wrong(a, b, problem, params=None):
        return torch.zeros(problem.result_shape)

    for name in ("winograd2", "winograd4", "direct", "im2col_gemm"):
        monkeypatch.setattr(BY_NAME[name], "run", wrong)
    with convselect.use("measure") as used:
        found = resolve.eager_choice(problem, used)
    assert found.source == "measure"
    assert found.algorithm not in ("winograd2", "winograd4", "direct", "im2col_gemm")


def test_measure_respects_budgets_and_keeps_out_of_deterministic_mode_graphs_and_modes(store):
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)
    with convselect.use("measure", precision="exact", workspace_bytes=0, disable="direct") as used:
        choice = resolve.eager_choice(problem, used)
        assert choose_grade(choice.algorithm, problem)
        assert choice.algorithm != "direct"
        deterministic = resolve.eager_choice(problem._replace(deterministic=True), used)
        assert deterministic.source in ("model", "fallback")
        assert resolve.choice_for(problem._replace(N=2), used).source in ("model", "fallback")


def choose_grade(name: str, problem) -> bool:
    return name == NATIVE or BY_NAME[name].error_grade(problem) == 0


def test_measure_without_memory_is_the_models_choice_for_now(store, monkeypatch):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr("convselect.measure.measure.measure_problem", short)
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)
    with convselect.use("measure") as used:
        assert resolve.eager_choice(problem, used).source in ("model", "fallback")
    monkeypatch.undo()
    with convselect.use("measure") as used:
        assert resolve.eager_choice(problem, used).source == "measure"


# ---- the user's view ------------------------------------------------------------------------------------------------


def test_explain_shows_trials_and_what_came_of_them(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        assert convselect.explain(layer, X).rows[0].source == "model"
        for _ in range(60):
            layer(X)
        row = convselect.explain(layer, X).rows[0]
    assert (row.algorithm, row.source) == ("quick", "verify")
    assert row.gain == pytest.approx(1000 / 325, rel=1e-6)
    assert row.why_not[NATIVE] == "Timing has settled on quick."


def test_per_layer_per_context_per_environment(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1, policy="verify")
    with convselect.use("native"), torch.no_grad():
        for _ in range(60):
            layer(X)
    assert [t.choice.algorithm for t in on_trial()] == ["quick"]
    with pytest.raises(ValueError, match="unknown policy"):
        convselect.SelectedConv2d(1, 1, 1, policy="verily")


def test_a_watched_choice_that_fails_is_native_for_that_call(race):
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    with convselect.use(audit=8), torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        original, calls = race["quick"].result, iter(range(10_000))

        def fails(*arguments):
            if next(calls) % 3 == 0:
                raise MemoryError
            return original(*arguments)

        race["quick"].result = fails
        for _ in range(40):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    (trial,) = on_trial()
    assert trial.choice.algorithm == "quick"


def test_an_audited_choice_keeps_its_parameters(race, monkeypatch):
    given = []
    original = race["quick"].run_checked

    def run_checked(a, b, problem, params=None, bias=None):
        given.append(params)
        return original(a, b, problem, None, bias)

    monkeypatch.setattr(race["quick"], "run_checked", run_checked)
    weight, problem = torch.randn(4, 4, 3, 3), conv_problem(2, 4, 10, 10, 4, 3, 3, padding=1)
    stored = Choice("quick", "store", {"tile": 3}, 2.0)
    monkeypatch.setattr(resolve, "_stored", lambda p, s: stored)
    with convselect.use(audit=4), torch.no_grad():
        for _ in range(12):
            convselect.conv2d(X, weight, padding=1)
        assert resolve.choice_for(problem, convselect.base.settings.current()) is stored
    assert given
    assert set(map(str, given)) == {"{'tile': 3}"}
