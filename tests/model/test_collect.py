"""Collecting: resumed, bounded in time, drift noticed, some problems twice, on other processes, as a command."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import fresh
import pytest
from clocks import NATIVE, TINY, Like, raises
from command_lines import outcomes

from convselect.base import timing
from convselect.base.problem import conv_problem
from convselect.machine.environment import MALLOC_VARIABLES, run_environment
from convselect.measure.rows import Row
from convselect.model import collect as collection
from convselect.model.collect import collect
from convselect.model.dataset import read_measurements
from convselect.store.store import Store

MODELS = ("anet1", "bnet2", "cnet3")
ITEMS = list(zip(MODELS, TINY, strict=True))
MANY = [(f"net{i}", conv_problem(1, 1 + i, 5, 5, 4, 3, 3)) for i in range(30)]


def fake_runner(asked=None):
    """Rows without measuring."""

    def run(items):
        for model, problem, repeat in items:
            if asked is not None:
                asked.append((problem, repeat))
            yield [Row(model, problem, "native", 1, "ok", "thread", 5.0, 5, 5, 5, 5, 9, repeat)]

    return run


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "s.sqlite") as opened:
        yield opened


def test_problems_are_measured_checked_and_not_measured_again(store):
    bad, same = Like("bad", lambda y: -y), Like("same", revision=3)
    pool = [NATIVE, bad, same, Like("breaks", raises), Like("forced only", automatic=False)]
    report = collect(ITEMS[:2], store, algorithms=pool, repeat_share=0)
    assert (report.measured, report.skipped, report.repeated) == (2, 0, 0)
    assert bad.calls == 2
    assert report.wrong == [("bad", problem) for problem in TINY[:2]]
    assert report.failed == [("breaks", problem) for problem in TINY[:2]]

    seen = []
    report = collect(ITEMS, store, algorithms=pool, repeat_share=0, on_problem=lambda p, new: seen.append((p, new)))
    assert (report.measured, report.skipped) == (1, 2)
    assert seen == [(TINY[0], False), (TINY[1], False), (TINY[2], True)]
    assert bad.calls == 3
    rows = store.rows()
    assert {(row.model, row.problem) for row in rows} == set(ITEMS)
    assert {row.algorithm: row.status for row in rows} == {
        "native": "ok", "bad": "wrong", "same": "ok", "breaks": "failed"
    }  # fmt: skip
    assert {row.algorithm: row.revision for row in rows} == {"native": 1, "bad": 1, "same": 3, "breaks": 1}

    # A new algorithm, or a new revision of one, makes old problems new.
    assert collect(ITEMS, store, algorithms=[*pool, Like("new")], repeat_share=0).measured == 3
    assert collect(ITEMS, store, algorithms=[NATIVE, Like("same", revision=4)], repeat_share=0).measured == 3


def test_the_store_says_where_it_was_measured(store):
    collect(ITEMS[:1], store, algorithms=[NATIVE, Like("same")], repeat_share=0)
    (description,) = store.environments().values()
    assert description["family"].startswith("cpu-")
    assert description["torch"] == run_environment()["torch"]
    assert set(description["malloc"]) == set(MALLOC_VARIABLES)
    rows, machine = read_measurements([store.path])
    assert machine == {name: description[name] for name in ("family", "host_flags", "device", "torch")}
    assert {row.algorithm for row in rows} == {"native", "same"}


def test_some_problems_are_measured_twice(store):
    asked = []
    report = collect(MANY, store, runner=fake_runner(asked), repeat_share=0.2, sentinel=lambda: 1.0)
    assert (report.measured, report.repeated) == (30, 6)
    again = [problem for problem, repeat in asked if repeat]
    assert asked[:30] == [(problem, 0) for _, problem in MANY]
    assert len(set(again)) == 6
    assert {row.problem for row in store.rows() if row.repeat} == set(again)


def test_drift_is_noticed_block_by_block(store):
    readings = iter([100.0, 101.0, 121.2, 121.2])  # one between two blocks serves both
    report = collect(MANY, store, runner=fake_runner(), repeat_share=0, block_size=10, sentinel=lambda: next(readings))
    assert report.drift == {0: pytest.approx(1.01), 1: pytest.approx(1.2), 2: pytest.approx(1.0)}
    assert report.drifting == [1]
    assert len(store.rows(max_drift=collection.DRIFT)) == 20
    # Going on begins a block of its own.
    more = [(f"more{i}", conv_problem(2, 1 + i, 5, 5, 4, 3, 3)) for i in range(3)]
    report = collect(more, store, runner=fake_runner(), repeat_share=0, sentinel=lambda: 90.0)
    assert set(report.drift) == {3}


def test_time_is_shared_between_first_and_second_measurements(store):
    now = 0

    def tick():
        nonlocal now
        now += 1
        return now * 1_000_000_000

    clock = timing.Clock(tick, tick)
    report = collect(
        MANY, store, runner=fake_runner(), minutes=0.4, repeat_share=0.5, sentinel=lambda: 1.0, clock=clock
    )
    assert 5 < report.measured < 20  # a second passes at each look: 16 of 24 s for the first
    assert 0 < report.repeated <= report.measured / 2 + 1
    assert collect(MANY, store, runner=fake_runner(), minutes=0.0, sentinel=lambda: 1.0).measured == 0


def test_an_interrupt_keeps_what_there_is(store):
    def run(items):
        for i, rows in enumerate(fake_runner()(items)):
            if i == 4:
                raise KeyboardInterrupt
            yield rows

    report = collect(MANY, store, runner=run, sentinel=lambda: 1.0)
    assert report.interrupted
    assert report.measured == len(store.rows()) == 4
    assert collect(MANY, store, runner=fake_runner(), repeat_share=0, sentinel=lambda: 1.0).measured == 26


def test_the_sentinel_is_a_time(store):
    assert 1 < collection.sentinel_us() < 1e6


# ---- the clock --------------------------------------------------------------------------------------------------


def test_a_clock_that_does_not_measure_is_found_out():
    timing.assert_trustworthy()

    def clock(step):
        now = 0

        def read():
            nonlocal now
            now += step
            return now

        return timing.Clock(read, read)

    with pytest.raises(AssertionError, match=r"8 times the arithmetic took 1\.00"):
        timing.assert_known_workload(clock(1000))
    real = timing.SYSTEM_CLOCK.wall_ns
    with pytest.raises(AssertionError, match="FLOP/s"):
        timing.assert_known_workload(timing.Clock(lambda: real() // 100_000, lambda: 0))


# ---- processes of Dask ------------------------------------------------------------------------------------------


@pytest.mark.process
def test_workers_measure_one_at_a_time_and_the_client_writes(store):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        pids = set(client.run(os.getpid).values())
        assert len(pids) == 2
        assert os.getpid() not in pids
        runner, description = collection.on_dask(client)
        assert description["family"] == collection.environment()["family"]
        report = collect(ITEMS, store, runner=runner, description=description, repeat_share=0.4)
        assert (report.measured, report.repeated) == (3, 1)
        assert {(row.model, row.problem) for row in store.rows()} == set(ITEMS)
        assert not report.wrong + report.failed

        # Measuring overlaps nowhere: each task notes when it held the lock.
        spans = sorted(client.gather([client.submit(_held, i, pure=False) for i in range(6)]))
        assert len({pid for _, _, pid in spans}) == 2
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))


def _held(_):
    import unittest.mock

    spans = []

    def measure(model, problem, repeat):
        begin = time.monotonic()
        time.sleep(0.05)
        spans.append((begin, time.monotonic(), os.getpid()))
        return []

    with unittest.mock.patch.object(collection, "measure_problem", measure):
        collection.measure_task("m", TINY[0], 0)
    return spans[0]


# ---- the command ------------------------------------------------------------------------------------------------

LAYERS = (
    "model,N,C,H,W,K,R,S,stride_h,stride_w,pad_h,pad_w,dil_h,dil_w,groups\n"
    "resnet18,1,8,9,8,4,3,3,1,1,1,1,1,1,1\nresnet18,1,8,9,8,16,1,1,1,1,0,0,1,1,1\n"
)


AS_STARTED = "--no-malloc-tuning"
"""Else a command starts Python a second time, which takes longer than most of these measure; one below does."""


def command(*arguments, **options):
    return fresh.run(["-m", "convselect.cli.main", *map(str, arguments)], **options)


def test_the_command_measures_goes_on_and_trains(tmp_path: Path):
    layers, out = tmp_path / "layers.csv", tmp_path / "s.sqlite"
    layers.write_text(LAYERS)
    arguments = ["collect", layers, "--out", out, "--count", 40, "--dtype", "float32", "--repeat", 0.1, AS_STARTED]
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(r"(\d+) problems measured into .*s.sqlite, (\d+) of them twice; 0 were there already", done.stdout)
    with Store(out) as store:
        rows = store.rows()
    assert {row.status for row in rows} <= {"ok", "censored"}
    assert {row.problem.N for row in rows} <= {1, 2, 8, 32}
    assert any(row.model.startswith("loguniform") for row in rows)
    assert any(row.model == "resnet18" for row in rows)
    assert any(row.repeat for row in rows)
    assert "0 problems measured" in command(*arguments).stdout

    family = collection.environment()["family"]
    done = command("train", out, "--family", family, "--out", tmp_path, "--steps", 20, "--folds", 2)
    assert done.returncode == 0, done.stderr
    assert "of oracle" in done.stdout
    card = json.loads((tmp_path / f"{family}.json").read_text())
    assert card["data"]["files"] == ["s.sqlite"]
    refused = command("train", out, "--family", "cpu-of-another-kind", "--out", tmp_path)
    assert refused.returncode == 2
    assert "not on cpu-of-another-kind" in refused.stderr


def test_the_command_measures_a_models_own_calls(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))\n"
    )
    where = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}}
    own = ["collect", "--model", "mine:net", "--input", "2,3,8,8", "--repeat", 0, AS_STARTED]
    done = command(*own, "--out", "s.sqlite", **where)
    assert done.returncode == 0, done.stderr
    assert "5 problems measured" in done.stdout  # two forward, two weight gradients, one data gradient
    done = command(*own, "--inference", "--threads", 1, "--threads", 2, "--out", "t.sqlite", **where)
    assert "4 problems measured" in done.stdout


REFUSED = {
    "give CSV files of layers, or --model": [],
    "go together": ["--model", "a:b"],
    "missing.csv": ["missing.csv"],
    "dtype must be one of": ["layers.csv", "--dtype", "int8"],
    "one of --workers": ["layers.csv", "--workers", "1", "--scheduler", "tcp://x:1"],
}


def test_the_command_refuses_with_one_line(tmp_path):
    (tmp_path / "layers.csv").write_text(LAYERS)
    lines = [["collect", *arguments, "--out", "s.sqlite"] for arguments in REFUSED.values()]
    for message, (status, said) in zip(REFUSED, outcomes(lines, tmp_path), strict=True):
        assert status == 2
        assert message in said
        assert "Traceback" not in said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_stopped_command_can_be_gone_on_with(tmp_path, how):
    (tmp_path / "layers.csv").write_text(LAYERS)
    out = tmp_path / "s.sqlite"
    line = [sys.executable, "-m", "convselect.cli.main", "collect", "layers.csv", "--out", str(out), "--repeat", "0"]
    line += [AS_STARTED] if how == signal.SIGKILL else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # A shell starts background jobs, and with them all that they start, deaf to SIGINT; a terminal does not.
    process = subprocess.Popen(
        line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if out.exists():
            with Store(out) as store:
                if len(store.rows()) > 20:
                    break
        time.sleep(0.05)
    process.send_signal(how)
    stdout, stderr = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert b"interrupted" in stdout, stderr
        assert process.returncode == 130
    with Store(out) as store:
        before = store.rows()
        assert {row.problem for row in before} == {row.problem for row in before if row.algorithm == "native"}  # whole
        assert collect([("m", TINY[0])], store, repeat_share=0).measured == 1
        assert {row for row in before if row.status == "ok"} < {row for row in store.rows() if row.status == "ok"}
    assert len(before) > 20


def test_the_commands_own_workers_keep_malloc_as_it_is(tmp_path):
    pytest.importorskip("distributed")
    (tmp_path / "layers.csv").write_text(LAYERS)
    out = tmp_path / "s.sqlite"
    arguments = [
        "layers.csv",
        "--count",
        4,
        "--random",
        0,
        "--dtype",
        "float32",
        "--repeat",
        0,
        "--workers",
        2,
        AS_STARTED,
    ]
    # Dask leaves its settings behind in the environment of every process that starts workers, this one included.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = command("collect", *arguments, "--out", out, cwd=tmp_path, env=plain)
    assert done.returncode == 0, done.stderr
    assert "4 problems measured" in done.stdout
    with Store(out) as store:
        (description,) = store.environments().values()
    assert set(description["malloc"].values()) == {None}
