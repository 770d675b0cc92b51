"""`benchmarks/gpu_run.py` from end to end on the CPU: kernels in the interpreter, a clock that only counts."""

from __future__ import annotations

import json

import pytest
import typer
from tiny_triton import Tiny

from benchmarks import _gpu_compile, gpu_run
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import read_rows
from convselect.model.dataset import read_measurements


def run(out, **options) -> int:
    given = dict(minutes=9.0, phases=",".join(gpu_run.PHASES), count=3, checks=None, workers=1, dry_run=True)
    with pytest.raises(typer.Exit) as ended:
        gpu_run.main(out, **{**given, **options})
    return ended.value.exit_code


@pytest.fixture
def tiny(monkeypatch):
    algorithm = Tiny()
    monkeypatch.setitem(BY_NAME, algorithm.name, algorithm)
    monkeypatch.setattr(_gpu_compile, "ALL", (algorithm,))
    return algorithm


def test_everything_is_measured_and_written(tiny, tmp_path, capsys):
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    # Both configurations in three directions on the one layer that the algorithm is for.
    assert results["numerics"]["counts"] == {"ok": 6, "wrong": 0, "failed": 0, "not_reached": 0}
    assert {line["configurations"] for line in results["numerics"]["summary"]} == {2}
    rows, machine = read_measurements([tmp_path / "times.csv"])
    assert machine["device"] == "none (dry run)"
    assert len({row.problem for row in rows}) == 9
    assert {row.clock for row in rows} == {"event"}
    assert {row.status for row in rows} == {"ok"}
    assert "tiny_triton" in {row.algorithm for row in rows if row.problem.R == 1}
    assert {row.algorithm for row in rows if row.problem.R == 3} >= {"native"}
    assert results["times"] == {"measured": 9, "left": 0}
    assert results["bandwidth"]["memory_bytes_per_s"] > 0
    assert any("tiny_triton" in name for name in results["cost"]["host"]["us_per_call"])
    assert results["cost"]["ways"]["compile, tiny_triton"] == "ok"
    assert {line["class"] for line in results["report"]["speedups"]} == {
        "depthwise 2x2 to 7x7", "1x1", "grouped, NCHW",
    }  # fmt: skip
    assert "Triton's results against float64" in shown
    assert json.loads((tmp_path / "env.json").read_text())["triton"].startswith("3.")


def test_it_goes_on_where_it_ended(tiny, tmp_path):
    assert run(tmp_path, phases="numerics,times", count=1, checks=2) == 0
    assert len((tmp_path / "numerics.csv").read_text().splitlines()) == 3
    rows = read_rows(tmp_path / "times.csv")
    with (tmp_path / "times.csv").open("a") as file:
        file.write("cut,off,in,the,mid")
    with (tmp_path / "numerics.csv").open("a") as file:
        file.write("tiny_triton,ok,1.0")
    assert run(tmp_path, phases="numerics,times") == 0
    assert read_rows(tmp_path / "times.csv")[: len(rows)] == rows
    assert len({row.problem for row in read_rows(tmp_path / "times.csv")}) == 9
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["numerics"]["counts"]["ok"] == 6


def test_no_time_measures_nothing_and_says_what_is_left(tiny, tmp_path):
    assert run(tmp_path, minutes=0.0, phases="numerics,times,report") == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["numerics"]["counts"]["not_reached"] == 6
    assert results["times"] == {"measured": 0, "left": 9}


def test_a_wrong_kernel_is_found_by_numerics_and_never_timed(tiny, tmp_path, monkeypatch, capsys):
    right = tiny.forward
    monkeypatch.setattr(tiny, "forward", lambda *given: right(*given) * 1.1)
    assert run(tmp_path, phases="numerics,times") == 1
    counts = json.loads((tmp_path / "results.json").read_text())["numerics"]["counts"]
    assert (counts["ok"], counts["wrong"]) == (4, 2)
    wrong = [row for row in read_rows(tmp_path / "times.csv") if row.algorithm == "tiny_triton" and row.status != "ok"]
    assert {(str(row.problem.direction), row.status, row.rounds) for row in wrong} == {("forward", "wrong", 0)}
    assert "wrong: tiny_triton" in capsys.readouterr().out


def test_a_kernel_that_raises_is_on_record_and_ends_nothing(tiny, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no such\ntile")

    monkeypatch.setattr(tiny, "backward_weight", fail)
    assert run(tmp_path, phases="numerics,times") == 1
    text = (tmp_path / "numerics.csv").read_text()
    assert text.count("failed") == 2
    assert "no such tile" in text
    assert json.loads((tmp_path / "results.json").read_text())["times"]["measured"] == 9


def test_algorithms_of_the_pool_run_dry(tmp_path):
    assert run(tmp_path, phases="numerics,times,report", count=1, checks=12) == 0
    assert set(BY_NAME) >= {row.algorithm for row in read_rows(tmp_path / "times.csv")}
