"""Tuning as a whole: the loop, what it keeps, measuring here, the command, and the next run that uses it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import fresh
import pytest
import torch
from _toy_space import Toy, problems, programs, time_us
from typer.testing import CliRunner

from convselect.base.problem import conv_problem
from convselect.choice.choose import NATIVE
from convselect.cli import main
from convselect.kernels._contract import Algorithm, Grade
from convselect.kernels._space import Parameter, Space
from convselect.kernels.pool import BY_NAME
from convselect.store import process as store_process
from convselect.store.store import Store
from convselect.tune.cost_model import CostModel
from convselect.tune.programs import Program, Programs
from convselect.tune.records import Log, Measured
from convselect.tune.runner import Live, Verdict, params_of
from convselect.tune.tuning import Tuning

P = problems()[0]
SMALL = conv_problem(1, 8, 20, 20, 8, 3, 3, padding=1)


def prepared(of=None):
    return [(programs(p), {"toy": 1 + i}, programs(p).default("blocked")) for i, p in enumerate(of or problems()[:3])]


# ---- the loop ---------------------------------------------------------------------------------------------------


def test_a_budget_in_trials_is_kept():
    search = Tuning(prepared(), Toy(), model=CostModel(trees=30), batch=8)
    search.run(trials=50)
    assert search.trials == 50 == sum(task.trials for task in search.tasks)
    assert search.latency_us < search.default_latency_us
    assert search.default_latency_us == sum((1 + i) * time_us(p, q) for i, (q, p) in enumerate(_defaults()))


def _defaults():
    return [(programs(p).default("blocked"), p) for p in problems()[:3]]


def test_the_first_round_of_every_problem_is_always_run():
    search = Tuning(prepared(), Toy(), batch=8)
    search.run(seconds=0.0)
    assert [len(task.history) for task in search.tasks] == [1, 1, 1]
    assert all(math.isfinite(task.best_us) for task in search.tasks)


def test_it_ends_when_every_program_is_measured():
    alone = Programs(P, {NATIVE: None, "plain": None})
    search = Tuning([(alone, {"toy": 1}, Program(NATIVE))], Toy(), model=CostModel())
    search.run(trials=100)
    assert search.trials == 2
    assert search.tasks[0].exhausted


def test_what_is_wrong_is_never_the_best_nor_measured_again():
    best = programs(P).default("blocked")
    toy = Toy(frozenset({best}))
    search = Tuning(prepared([P]), toy, model=CostModel(trees=30), batch=8)
    search.run(trials=40)
    assert search.wrong == [(P, best, "wrong")]
    assert best not in search.tasks[0].search.times_us
    assert [program for _, program in toy.ran].count(best) == 1
    assert search.tasks[0].default_us == time_us(P, Program(NATIVE))  # what runs if the default fails


# ---- files ------------------------------------------------------------------------------------------------------


def test_a_log_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "below" / "programs.jsonl"
    log = Log(path, "here", {"blocked": 2, "plain": 1})
    one, two = programs(P).default("blocked"), Program("plain")
    assert log.read() == {}
    log.add(P, [Measured(one, "ok", 12.5), Measured(two, "wrong")])
    log.add(P, [Measured(one, "ok", 11.0)])
    assert log.read() == {P: {one: Measured(one, "ok", 11.0), two: Measured(two, "wrong")}}
    assert Log(path, "elsewhere", {"blocked": 2}).read() == {}
    assert set(Log(path, "here", {"blocked": 3, "plain": 1}).read()[P]) == {two}  # an upgraded algorithm
    # a write that was cut off loses its own line only
    path.write_bytes(path.read_bytes()[:-9])
    log.add(P, [Measured(two, "ok", 3.0)])
    assert log.read()[P] == {one: Measured(one, "ok", 12.5), two: Measured(two, "ok", 3.0)}


def test_a_log_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("convselect.tune.records.LOG_LINES", 10)
    log = Log(tmp_path / "log", "here", {"plain": 1})
    for i in range(11):
        log.add(P, [Measured(Program("plain"), "ok", float(i))])
    assert log.read()[P][Program("plain")].time_us == 10
    assert len((tmp_path / "log").read_text().splitlines()) == 5


def test_a_search_goes_on_where_an_earlier_one_was_killed(tmp_path):
    log = Log(tmp_path / "log", "here", dict.fromkeys((NATIVE, "plain", "blocked", "other"), 1))
    first = Tuning(prepared(), Toy(), model=CostModel(trees=30), batch=8, log=log)
    first.run(trials=60)  # and nothing else: as if it had been killed
    toy = Toy()
    second = Tuning(prepared(), toy, model=CostModel(trees=30), batch=8, log=log, seed=1)
    assert second.resumed == 60
    assert second.latency_us == pytest.approx(first.latency_us, rel=1e-5)
    assert second.default_latency_us == pytest.approx(first.default_latency_us, rel=1e-5)
    second.run(trials=24)
    measured = {task.problem: task.search.measured for task in first.tasks}
    assert not [program for problem, program in toy.ran if program in measured[problem]]
    assert Tuning(prepared(), Toy(), log=log, resume=False).resumed == 0


# ---- measuring here ---------------------------------------------------------------------------------------------


class Laps(Algorithm):
    """Does native's work `laps` times; with `off`, its result is wrong by that many thousandths."""

    name = "laps"
    calls = 0

    def why_not(self, problem):
        return None

    def workspace_bytes(self, problem):
        return 0

    def error_grade(self, problem):
        return Grade.DIRECT

    def space(self, problem):
        return Space(
            (Parameter("laps", (1, 2, 12)), Parameter("off", (0, 1, 9))),
            default=lambda p: {"laps": 2, "off": 0},
        )

    def forward(self, x, weight, problem, params=None):
        params = params or {"laps": 2, "off": 0}
        Laps.calls += 1
        if params["off"] == 9:
            raise RuntimeError("off")
        for _ in range(params["laps"]):
            y = torch.conv2d(x, weight, padding=1)
        return y * (1 + params["off"] / 1000)

    backward_data = backward_weight = forward


LAPS = {NATIVE: BY_NAME[NATIVE], "laps": Laps()}


def laps(n: int, off: int = 0) -> Program:
    return Program("laps", (("laps", n), ("off", off)))


def test_programs_are_checked_and_then_timed(capsys):
    live = Live(LAPS)
    before = Laps.calls
    got = live.run(SMALL, [laps(1), laps(12), laps(1, 1), laps(1, 9)], laps(2))
    assert [(m.program, m.status) for m in got] == [
        (laps(1), "ok"), (laps(12), "ok"), (laps(1, 1), "wrong"), (laps(1, 9), "failed"),
    ]  # fmt: skip
    assert got[0].time_us < got[1].time_us / 3
    assert got[2].time_us is None
    assert "laps failed" in capsys.readouterr().err
    # wrong and failed ones ran once; the slow one was not timed as often as the fast one
    counted = Laps.calls - before
    assert 0 < counted < 4 + 3 * 12
    assert live.run(SMALL, [laps(1, 1)], laps(2)) == [Measured(laps(1, 1), "wrong")]


def test_times_of_batches_are_made_comparable(monkeypatch):
    """The machine is half as fast in the second batch: native and the default say so."""
    from convselect.base import timing

    speed = [1.0]

    def interleaved(functions, rounds, **options):
        times = {n: speed[0] * (40.0 if n == NATIVE else 80.0 if n == str(laps(2)) else 60.0) for n in functions}
        return {n: timing.Timing((us,) * rounds, (us,) * rounds) for n, us in times.items()}

    monkeypatch.setattr(timing, "interleaved", interleaved)
    live = Live(LAPS)
    first = live.run(SMALL, [Program(NATIVE), laps(1)], laps(2))
    speed[0] = 2.0
    second = live.run(SMALL, [laps(12)], laps(2))
    assert [m.time_us for m in (*first, *second)] == pytest.approx([40, 60, 60])


@pytest.mark.slow
def test_only_what_is_clearly_faster_takes_the_defaults_place():
    large = conv_problem(4, 32, 48, 48, 32, 3, 3, padding=1)  # long enough that what dispatch costs does not count
    live = Live(LAPS)
    verdict = live.confirm(large, [laps(1), laps(12), laps(1, 1)], laps(12))
    assert verdict.program in (laps(1), Program(NATIVE))
    assert verdict.speedup > 3
    kept = live.confirm(large, [laps(12), laps(2)], Program(NATIVE))
    assert kept == Verdict(Program(NATIVE), 1.0, 1.0, kept.rounds)
    # a program that is wrong when it is checked again cannot win, and native stands in for a default that is
    assert live.confirm(large, [laps(1, 1)], laps(1, 9)).program == Program(NATIVE)


# ---- the next run -----------------------------------------------------------------------------------------------

PATCH = """
import json, sys, torch
import convselect
from convselect.store import process as store_process
from convselect.kernels.pool import BY_NAME
from convselect.kernels._space import Parameter, Space
from convselect.base.problem import conv_problem

ROWS = tuple(json.loads(sys.argv[2]))
kind, ran = type(BY_NAME["im2col_gemm"]), []
kind.why_not = lambda self, problem: None
kind.same_as_native = lambda self, problem: None
kind.space = lambda self, p: Space((Parameter("rows", ROWS),), default=lambda p: {"rows": ROWS[0]})


def run_checked(self, a, b, problem, params=None, bias=None):
    ran.append(None if params is None else dict(params))
    return torch.conv2d(a, b, bias, padding=1)


kind.run_checked = run_checked
store_process.configure(sys.argv[1])
P = conv_problem(1, 8, 20, 20, 8, 3, 3, padding=1, threads=torch.get_num_threads())
"""
KEEP = """
from convselect.base import settings
from convselect.tune.programs import Program
from convselect.tune.runner import Verdict
from convselect.tune.tuning import Outcome, keep

best = Program("im2col_gemm", (("rows", 4),))
keep([Outcome(P, {"net": 1}, Program("native"), Verdict(best, 1.7, 1.6, 60), 64)], settings.current())
"""
USE = """
layer = torch.nn.Conv2d(8, 8, 3, padding=1)
x = torch.randn(1, 8, 20, 20)
out = []
for policy in ("auto", "verify", "measure"):
    ran.clear()
    with torch.no_grad(), convselect.use(policy):
        y = convselect.conv2d(x, layer.weight, layer.bias, padding=1)
    assert torch.allclose(y, torch.conv2d(x, layer.weight, layer.bias, padding=1), atol=1e-5)
    settings = convselect.base.settings._changed(convselect.base.settings.current(), policy)
    choice = convselect.eager.resolve.choice_for(P, settings)
    out.append([choice.algorithm, choice.source, choice.params and dict(choice.params), list(ran)])
print(json.dumps(out))
"""


def process(code: str, store: Path, rows: str = "[1, 2, 4]") -> str:
    run = fresh.run(["-c", PATCH + code, str(store), rows], env={**os.environ, "CONVSELECT_POLICY": "auto"})
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_next_process_runs_what_was_tuned(tmp_path):
    store = tmp_path / "store.sqlite"
    process(KEEP, store)
    with Store(store, read_only=True) as kept:
        (one,) = [stored.decision for stored in kept.decisions()]
    assert (one.source, one.params, one.gain, one.samples) == ("tune", {"rows": 4}, 1.7, 60)
    for algorithm, source, params, ran in json.loads(process(USE, store)):
        assert (algorithm, source, params) == ("im2col_gemm", "store", {"rows": 4})
        assert ran == [{"rows": 4}]


def test_parameters_that_are_no_longer_valid_are_not_used(tmp_path):
    store = tmp_path / "store.sqlite"
    process(KEEP, store)
    for _, source, params, ran in json.loads(process(USE, store, "[1, 2, 8]")):
        assert source != "store"
        assert params is None
        assert {"rows": 4} not in ran


# ---- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    path = tmp_path / "store.sqlite"
    store_process.configure(path)
    yield path
    store_process.configure("off")


def command(*arguments: str):
    return CliRunner().invoke(main._app(), ["tune", *arguments])


SHORT = "1x8x12x12 8 3x3 p1"


def test_the_command_keeps_what_it_found_and_goes_on(own_store):
    told = command(SHORT, "--trials", "24", "--threads", "1", "--json", "--directions", "forward,backward_data")
    assert told.exit_code == 0, told.output
    values = json.loads(told.stdout)
    assert [one["problem"].split()[0] for one in values["problems"]] == ["forward", "backward_data"]
    assert all(one["speedup"] >= 1 for one in values["problems"])
    assert values["trials"] <= 24 + 2 * len(BY_NAME)
    assert not values["interrupted"]
    with Store(own_store, read_only=True) as kept:
        found = {str(s.decision.problem): s.decision for s in kept.decisions()}
    for one in values["problems"]:
        decision = found[one["problem"]]
        assert decision.source == "tune"
        program = Program.parse(one["program"])
        assert decision.algorithm == program.algorithm
        assert decision.params == params_of(decision.problem, program)
    again = command(SHORT, "--trials", "1", "--threads", "1", "--directions", "forward,backward_data")
    assert again.exit_code == 0, again.output
    assert f"{values['trials']} programs were measured by earlier searches" in again.output
    assert "geometric mean" in again.output


def test_interrupted_it_keeps_what_was_found(own_store, monkeypatch):
    step, steps = Tuning.step, []

    def interrupt(self, most=None):
        if len(steps) == 1:
            raise KeyboardInterrupt
        steps.append(1)
        return step(self, most)

    monkeypatch.setattr(Tuning, "step", interrupt)
    told = command(SHORT, "--trials", "100", "--threads", "1")
    assert told.exit_code == 130, told.output
    assert "what was found is kept" in told.output
    with Store(own_store, read_only=True) as kept:
        assert [s.decision.source for s in kept.decisions()] == ["tune"]


def test_targets(tmp_path):
    from convselect.cli import tune

    found = tune.problems(["resnet18"], None, "forward", 1)
    assert sum(calls["resnet18"] for calls in found.values()) == 20
    assert found[max(found, key=lambda p: found[p]["resnet18"])]["resnet18"] > 1
    both = tune.problems(["resnet18", SHORT], "1,3,64,64", "backward_weight", 3)
    assert {str(p.direction) for p in both} == {"backward_weight"}
    assert {p.threads for p in both} == {3}
    assert any(SHORT in calls for calls in both.values())
    (tmp_path / "own.py").write_text("import torch\ndef net(): return torch.nn.Conv2d(3, 4, 3)\n")
    code = "from convselect.cli import tune; print(*tune.problems(['own:net'], '1,3,8,8', 'forward', 1))"
    run = fresh.run(["-c", code], cwd=tmp_path)
    assert run.stdout.split()[:4] == ["forward", "N=1", "C=3", "H=8"], run.stderr
    layers = tmp_path / "layers.csv"
    header = "model,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups"
    layers.write_text(f"{header}\nnet,1,4,9,9,4,3,3,1,1,1,1,1,1,1\n")
    assert len(tune.problems([str(layers)], None, "forward,backward_data", 1)) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "neither a built-in network (resnet18,"),
        (["1x8x12 8 3x3"], "no problem"),
        (["os:getcwd"], "needs --input"),
        ([SHORT, "--objective", "target"], "belong together"),
        ([SHORT, "--objective", "fast"], "must be one of"),
        ([SHORT, "--strategy", "guess"], "strategy must be"),
        ([SHORT, "--directions", "sideways"], "sideways"),
        (["missing.csv"], "missing.csv"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, reason, own_store):
    told = command(*arguments)
    assert told.exit_code == 2
    assert reason in told.output
    assert not own_store.exists()
