"""Searches replayed against recorded times of this repository, and the command that compares them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from _toy_space import problems, programs, recorded
from places import ROOT
from typer.testing import CliRunner

from benchmarks import search
from benchmarks._recorded import RecordedPrograms, Replay, beside, read_recorded, replayed, write_recorded
from convselect.base import settings
from convselect.choice.choose import NATIVE
from convselect.tune import runner
from convselect.tune.cost_model import CostModel
from convselect.tune.programs import Program, Programs
from convselect.tune.records import Measured
from convselect.tune.tuning import Tuning

FILE = ROOT / "benchmarks" / "results" / "programs-cpu-x86-avx512.csv.gz"


@pytest.fixture(scope="module")
def real():
    if not FILE.exists():
        pytest.skip("an installed package has no recorded times beside it")
    return read_recorded(FILE)


def test_the_recorded_times_are_whole(real):
    assert len(real) >= 8
    about = json.loads(beside(FILE).read_text())
    assert {"environment", "revisions", "kinds"} <= set(about)
    for one in real:
        assert len(one.times_us) >= 150
        assert Program(NATIVE) in one.times_us
        assert one.chosen in one.times_us
        assert sum(one.calls.values()) >= 1
        assert min(one.times_us.values()) > 1
        assert len(one.programs().tunable) >= 1


@pytest.mark.slow
def test_the_cost_model_orders_programs_that_it_has_not_seen(real):
    told = search.model_quality(real, "lightgbm", by_problem=False)
    # 1x1 layers are measured no better than their programs differ; elsewhere it is right far more often.
    assert told.pairwise > 0.75
    assert told.recall > 0.65
    assert told.r2 > 0.95
    transformed = [one for one in real if "unet" in one.calls]
    assert search.model_quality(transformed, "lightgbm", by_problem=False).pairwise > 0.88


@pytest.mark.slow
def test_evolution_beats_random_search_on_real_times(real):
    some = [one for one in real if "unet" in one.calls][:6]
    told = search.compare_searches(some, [48], 2, 8, "lightgbm")[48]
    assert told["speedup_evolution"] > told["speedup_random"]
    assert told["of_best_evolution"] > 0.98
    assert told["better"] > told["worse"]


@pytest.mark.slow
def test_the_command_compares_on_any_file(tmp_path):
    of = [recorded(problem, 60, seed=i) for i, problem in enumerate(problems()[:3])]
    write_recorded(tmp_path / "times.csv", of, {})
    arguments = ["replay", str(tmp_path / "times.csv"), "--trials", "16", "--trials", "24", "--seeds", "1"]
    ran = CliRunner().invoke(search.app, [*arguments, "--out", str(tmp_path / "out.json")])
    assert ran.exit_code == 0, ran.output
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["programs"] == sum(len(one.times_us) for one in of)
    assert set(told["random against evolution"]) == {"16", "24"}
    assert set(told["schedules, toy"]) == {"16", "24"}
    assert told["best recorded"]["least"] >= 1
    figures = told["random against evolution"]["24"]
    assert 0 < figures["of_best_random"] <= 1
    assert 0 < figures["reach"] <= 1


@pytest.mark.slow
def test_the_first_trials_of_a_long_search_are_those_of_a_short_one():
    one = recorded(problems()[0], 80)
    long = search.curve(one, "evolution", 40, 0, 8, "lightgbm")
    short = search.curve(one, "evolution", 20, 0, 8, "lightgbm")
    assert long[:20] == short
    assert long == np.minimum.accumulate(long).tolist()
    assert search.first_at(long, long[-1]) == long.index(long[-1]) + 1
    assert search.first_at(long, 0.0) is None


def test_programs_of_a_list_of_layers_are_recorded_beside_their_defaults(tmp_path, monkeypatch):
    layers, path = tmp_path / "layers.csv", tmp_path / "programs.csv"
    header = "model,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups"
    layers.write_text(f"{header}\na,1,16,9,9,24,1,1,1,1,0,0,1,1,1\nb,1,16,9,9,16,3,3,1,1,1,1,1,1,16\n")
    batches, run = [], runner.Live.run

    def seen(self, problem, programs, default):
        batches.append(programs)
        return run(self, problem, programs, default)

    monkeypatch.setattr(runner.Live, "run", seen)
    arguments = ["record", str(path), "--network", str(layers), "--each", "3", "--rounds", "4"]
    told = CliRunner().invoke(search.app, [*arguments, "--algorithm", "direct", "--algorithm", "depthwise"])
    assert told.exit_code == 0, told.output
    recorded = read_recorded(path)
    assert [one.calls for one in recorded] == [{"layers": 1}] * 2
    for one in recorded:
        assert Program(NATIVE) in one.times_us
        (name,) = {program.algorithm for program in one.measured} - {"native"}
        default = Programs.of(one.problem, settings.current()).default(name)
        # In one batch, so that nothing but the program differs.
        assert any(batch[0] == default and {p.algorithm for p in batch} == {name} for batch in batches)
        assert len([p for p in one.measured if p.algorithm == name]) == 4
    assert {p.algorithm for one in recorded for p in one.measured} <= {"native", "direct", "depthwise"}


@pytest.mark.slow
def test_replay_finds_what_was_recorded():
    of = [recorded(p, 150, seed=i) for i, p in enumerate(problems()[:2])]
    search = Tuning(replayed(of), Replay(of), model=CostModel(trees=60), batch=8)
    search.run(trials=120)
    for i, (one, task) in enumerate(zip(of, search.tasks, strict=True)):
        assert set(task.search.times_us) <= set(one.times_us)
        assert task.best_us < 1.06 * min(one.times_us.values())
        verdict = search.confirm(i)
        assert verdict.program == task.search.best
        assert verdict.speedup == pytest.approx(one.times_us[one.chosen] / task.best_us)


@pytest.mark.parametrize("name", ["times.csv", "times.csv.gz"])
def test_recorded_times_are_read_as_they_were_written(tmp_path, name):
    of = [recorded(p, 20) for p in problems()[:2]]
    of[0].measured[Program("other", (("packed", 0), ("rows", 1), ("columns", 1), ("depth", 1), ("ahead", 1)))] = (
        Measured(Program("other", (("packed", 0), ("rows", 1), ("columns", 1), ("depth", 1), ("ahead", 1))), "wrong")
    )
    write_recorded(tmp_path / name, of, {"environment": {"device": "here"}})
    got = read_recorded(tmp_path / name)
    assert [(g.problem, g.calls, g.chosen, list(g.measured)) for g in got] == [
        (o.problem, o.calls, o.chosen, list(o.measured)) for o in of
    ]
    assert got[0].measured.keys() - got[0].times_us.keys() == {list(of[0].measured)[-1]}
    for a, b in zip(got, of, strict=True):
        assert a.times_us == {p: pytest.approx(us, abs=0.01) for p, us in b.times_us.items()}
        spaces = a.programs().spaces
        assert {p.name: p.kind for p in spaces["blocked"].parameters}["packed"] == "structure"
    assert json.loads(beside(tmp_path / name).read_text())["environment"] == {"device": "here"}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no recorded programs"):
        read_recorded(tmp_path / "other.csv")


def test_recorded_programs_stand_for_those_that_are_not():
    problem = problems()[0]
    whole = programs(problem)
    one = recorded(problem, 60)
    few = one.programs()
    source = random.Random(0)
    assert few.defaults()[0] == Program(NATIVE)
    assert few.default("blocked") == whole.default("blocked")
    for _ in range(50):
        wanted = whole.sample(source)
        got = few.settle(wanted)
        assert got in one.measured
        assert got.algorithm == wanted.algorithm
        assert few.settle(got) == got
        assert few.sample(source) in one.measured
    assert few.settle(Program("elsewhere")) is None
    near = whole.default("blocked").values
    assert few.settle(whole.made("blocked", near)) == whole.default("blocked")
    assert RecordedPrograms(problem, [Program(NATIVE)]).sample(source) is None
