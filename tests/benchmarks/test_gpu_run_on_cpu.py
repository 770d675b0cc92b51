"""What `benchmarks/gpu_run.py` plans, compiles, reports and leaves for training; the run itself is in
`interpreted/test_gpu_run.py`."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections import Counter
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
import torch
import typer
from places import TESTS
from tiny_triton import Tiny

from benchmarks import _gpu_compile, _gpu_device, _gpu_numerics, _gpu_problems, _gpu_report, _gpu_times, gpu_run
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, Direction, conv_problem
from convselect.kernels.pool import BY_NAME
from convselect.kernels.triton.launch import Launch
from convselect.measure.rows import Row, environment_path, kernel_class, write_rows
from convselect.model import train
from convselect.model.dataset import read_measurements
from convselect.model.inference import Predictor, artifact_path

pytestmark = pytest.mark.usefixtures("with_triton")

CUDA = dataclasses.replace(_gpu_device.dry(), kind="cuda")


# ---- what is measured -------------------------------------------------------------------------------------------


def test_the_listed_cases_are_first_and_all_there():
    cases = _gpu_problems.cases()
    assert [case.number for case in cases] == list(range(1, 51))
    assert all(case.problem.P > 0 and case.problem.Q > 0 and case.problem.device == "cuda" for case in cases)
    planned = _gpu_problems.plan()
    assert len(planned) == len({case.problem for case in planned}) == _gpu_problems.COUNT
    assert {case.problem for case in planned[:50]} == {case.problem for case in cases}
    assert planned[49].problem.flops > 1e12  # the one that takes seconds is the last of them
    assert _gpu_problems.plan(60) == planned[:60]


def test_the_plan_covers_kinds_types_layouts_and_batches():
    planned = [case.problem for case in _gpu_problems.plan()]
    kinds = Counter(kernel_class(p) for p in planned)
    assert kinds["depthwise"] > 50
    assert min(kinds[kind] for kind in ("1x1", "3x3", "strided", "grouped", "large")) >= 15
    types = Counter((p.dtype, p.tf32) for p in planned)
    assert min(types[key] for key in (("float32", True), ("float32", False))) >= 30
    assert min(types["float16", False], types["bfloat16", False]) >= 60
    assert min(Counter(p.layout for p in planned).values()) > 80
    assert min(Counter(p.N for p in planned)[n] for n in (1, 32, 128)) >= 30
    assert all(p.bytes <= 1 << 30 for p in planned[50:])


def test_every_algorithm_of_the_pool_has_problems():
    planned = [p for case in _gpu_problems.plan() for p in _gpu_problems.directions(case)]
    names = Counter(a.name for p in planned for a in _gpu_times.pool_for(p))
    automatic = {a.name for a in BY_NAME.values() if a.automatic and "cuda" in a.devices}
    assert set(names) == automatic - _gpu_times.NEEDS_NO_TIME
    assert names["native"] == len(planned)


def test_checks_reach_every_configuration_in_every_direction():
    checks = _gpu_numerics.plan([Tiny()], CUDA)
    tried = {(str(c.problem.direction), c.problem.dtype, c.params["BLOCK"]) for c in checks}
    types = {dtype for dtype, _ in _gpu_numerics.TYPES} - {"float64"}
    assert tried == {(str(d), dtype, block) for d in Direction for dtype in types for block in (64, 32)}
    assert len({c.key for c in checks}) == len(checks)


def test_bounds_are_for_what_is_computed():
    p = conv_problem(1, 1, 3, 3, 1, 3, 3)
    assert _gpu_numerics.bound_of(p._replace(tf32=True)) > 100 * _gpu_numerics.bound_of(p)
    assert _gpu_numerics.bound_of(p._replace(tf32=True, dtype="float16")) == 6e-4
    assert _gpu_numerics.bound_of(p.with_direction(Direction.BACKWARD_WEIGHT)) == 2 * _gpu_numerics.bound_of(p)


def test_operands_rotate_through_more_than_the_cache():
    device = dataclasses.replace(_gpu_device.dry(), cache_bytes=10_000)
    p = conv_problem(1, 8, 9, 9, 8, 3, 3, layout=CHANNELS_LAST, direction="backward_weight")
    pairs = _gpu_device.rotating(p, device)
    assert sum(t.numel() * 4 for pair in pairs for t in pair) > 2 * device.cache_bytes
    assert all(t.is_contiguous(memory_format=torch.channels_last) for pair in pairs for t in pair)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_float32_is_tf32_only_where_the_problem_says_so():
    p = conv_problem(1, 1, 3, 3, 1, 3, 3)
    before = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
    # PyTorch's own test helpers, which other tests of this process may have imported, forbid setting them.
    with torch.backends.__allow_nonbracketed_mutation():
        for tf32 in (True, False):
            with _gpu_device.precision_of(p._replace(tf32=tf32)):
                assert torch.backends.cudnn.allow_tf32 is tf32
                assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


# ---- compiling --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.process
def test_launches_are_compiled_in_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    p = conv_problem(1, 8, 4, 4, 8, 1, 1, dtype="float16", device="cuda")
    good = list(_gpu_compile.launches_of([p, p._replace(R=3)], [Tiny()]))
    assert len(good) == 1
    bad = Launch("_tiny_kernels", "broken", (1, 1, 1), ("float16",), (("N", 32),))
    done, failed = _gpu_compile.compile_all([*good, *good, bad], 90, timing.Deadline(120), workers=1)
    assert done == set(good)
    assert "no_such_thing" in failed[bad]
    assert list(tmp_path.rglob("*.cubin"))
    assert _gpu_compile.compile_all([], 90, timing.Deadline(1)) == (set(), {})


@pytest.mark.process
def test_a_compiler_that_crashes_is_started_again_and_given_up_on(monkeypatch):
    pools = []

    class Pool:
        def __init__(self, *_, **__):
            self.crashed = False
            pools.append(self)

        def submit(self, _, launch, arch):
            future: Future = Future()
            self.crashed = self.crashed or launch.kernel == "crash"
            if self.crashed:
                future.set_exception(BrokenProcessPool("gone"))
            else:
                future.set_result(None)
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(_gpu_compile.concurrent.futures, "ProcessPoolExecutor", Pool)
    launches = [Launch("m", kernel, (1, 1, 1), (), ()) for kernel in ("crash", "a", "b")]
    done, failed = _gpu_compile.compile_all(reversed(launches), 90, timing.Deadline(60))
    assert done == set(launches[1:])
    assert list(failed) == launches[:1]
    assert len(pools) == _gpu_compile.ATTEMPTS


def test_what_is_not_compiled_is_not_timed():
    p = conv_problem(1, 8, 4, 4, 8, 1, 1, device="cuda")
    tiny = Tiny()
    assert not _gpu_times._is_compiled(tiny, p, set())
    assert _gpu_times._is_compiled(tiny, p, set(tiny.launches(p)))
    assert _gpu_times._is_compiled(tiny, p, None)
    assert _gpu_times._is_compiled(BY_NAME["native"], p, set())


# ---- what the times say -----------------------------------------------------------------------------------------


def synthetic_rows(count: int = 45) -> list[Row]:
    rows = []
    for case in _gpu_problems.plan(count):
        for p in _gpu_problems.directions(case):
            best = 0.25 if p.is_depthwise else 1.3
            for name, us in (("native", 100.0), ("depthwise_triton", 100.0 * best), ("im2col_gemm", 90.0)):
                rows.append(Row(case.model, p, name, 1, "ok", "event", us, us, us, us, us, 13))
    return rows


def test_the_report_holds_speedups_against_targets_shares_and_answers():
    times = _gpu_report.times_of(synthetic_rows())
    speedups = {(s["class"], s["direction"]): s for s in _gpu_report.speedups(times)}
    small = speedups["depthwise 2x2 to 7x7", "forward"]
    assert small["best"] == pytest.approx(4.0)
    assert small["reached"] is True
    assert small["winners"] == {"depthwise_triton": small["problems"]}
    assert speedups["depthwise 9x9 and up", "backward_weight"]["reached"] is False
    assert speedups["dense, 16 bit", "forward"]["best"] == pytest.approx(1 / 0.9)
    assert speedups["dense, 16 bit", "forward"]["triton"] == pytest.approx(1 / 1.3)
    shares = _gpu_report.bandwidth_shares(times, 3e12)
    assert {s["kernel"] for s in shares} == {"3x3", "7x7"}
    for share in shares:
        assert share["problems"] >= 2
        assert share["worst"] <= share["mean"] <= share["best"]
    asked = _gpu_report.questions(times)
    lines = next(q["lines"] for q in asked if "bfloat16" in q["question"])
    assert {line["dtype"] for line in lines} <= {"bfloat16", "float16"}
    assert all(q["lines"] for q in asked if "2**31" not in q["question"] and "float64" not in q["question"])
    assert json.dumps([_gpu_report.speedups(times), shares, asked])
    wrong = [Row("m", conv_problem(1, 1, 3, 3, 1, 3, 3), "native", 1, "wrong")]
    assert _gpu_report.speedups(_gpu_report.times_of(wrong)) == []


def test_a_model_is_trained_from_the_times(tmp_path, monkeypatch):
    path = tmp_path / "times.csv"
    write_rows(path, synthetic_rows())
    machine = {**_gpu_device.environment(_gpu_device.dry()), "family": "cuda-sm90", "device": "a GPU"}
    environment_path(path).write_text(json.dumps({"machine": machine}))
    rows, found = read_measurements([path])
    assert found["family"] == "cuda-sm90"
    assert len(rows) == 3 * 3 * 45
    recipe = train.Recipe(steps=40)
    card = train.train([path], "cuda-sm90", tmp_path, recipe, n_folds=2, min_problems_per_dtype=10)
    assert (card.device, card.tf32, card.family) == ("cuda", True, "cuda-sm90")
    assert "bfloat16" in card.dtypes
    predictor = Predictor.load(artifact_path("cuda-sm90", tmp_path), host_flags={})
    p = conv_problem(64, 96, 28, 28, 96, 3, 3, padding=1, groups=96, dtype="bfloat16", device="cuda", threads=8)
    assert predictor.predict(p) is not None
    with pytest.raises(ValueError, match="not on cuda-sm80"):
        train.train([path], "cuda-sm80", tmp_path, recipe)


# ---- the command ------------------------------------------------------------------------------------------------


def call(out, **options):
    given = dict(minutes=0.0, phases="report", count=1, checks=1, workers=1, dry_run=True)
    with pytest.raises(typer.Exit) as ended:
        gpu_run.main(out, **{**given, **options})
    return ended.value.exit_code


def test_refusals(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(tmp_path, dry_run=False) == 2
    assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(typer.BadParameter, match="unknown phases nonsense"):
        gpu_run.main(tmp_path, phases="nonsense", dry_run=True)
    assert call(tmp_path) == 0
    known = json.loads((tmp_path / "env.json").read_text())
    (tmp_path / "env.json").write_text(json.dumps({**known, "cudnn": 90000}))
    assert call(tmp_path) == 2
    assert "another cudnn" in capsys.readouterr().err


def test_a_lost_device_ends_the_run_with_a_status_of_its_own(tmp_path, monkeypatch, capsys):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    device = _gpu_device.dry()
    broken = dataclasses.replace(device, events=device.events._replace(synchronise=lost))
    monkeypatch.setattr(_gpu_device, "dry", lambda: broken)
    monkeypatch.setitem(gpu_run.RUN, "report", lambda run: run.device.assert_alive() or True)
    assert call(tmp_path) == 3
    assert "illegal memory access" in capsys.readouterr().err


def test_the_phases_end_in_time(tmp_path):
    run = SimpleNamespace(seconds=600.0, whole=SimpleNamespace(elapsed_s=100.0))
    ends = [gpu_run.Run.deadline(run, phase).seconds for phase in gpu_run.PHASES]
    assert ends == sorted(ends)
    assert ends[0] == pytest.approx(0.26 * 600 - 100)
    assert math.isclose(ends[-1], 500)
