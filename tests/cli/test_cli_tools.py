"""`convselect explain | bench | doctor`: what is printed, JSON, exit statuses."""

from __future__ import annotations

import json

import pytest
from fake_model import use_fake
from typer.testing import CliRunner

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.cli import main
from convselect.doctor import doctor
from convselect.kernels.pool import BY_NAME
from convselect.model import calibrate

SHORT = "1x8x12x12 -> 8, 3x3 p1"


def run(*arguments: str):
    return CliRunner().invoke(main._app(), [*arguments])


def test_explain(monkeypatch):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    told = run("explain", SHORT)
    assert told.exit_code == 0
    assert "takes winograd4" in told.output
    assert run("explain", *SHORT.replace("-> ", "").split()).output == told.output
    (row,) = json.loads(run("explain", SHORT, "--json").output)["rows"]
    assert (row["algorithm"], row["source"], row["measured_gain"], row["trial"]) == ("winograd4", "model", None, None)
    assert row["predicted_gain"] == pytest.approx(3.0)
    # the JSON's problem is what all commands read
    assert run("explain", row["problem"]).output == told.output
    assert set(row["why_not"]) == set(BY_NAME) - {"winograd4"}


def test_bench(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    told = run("bench", SHORT, "--seconds", "0.01")
    assert told.exit_code == 0, told.output
    assert "chosen, model" in told.output
    done = run("bench", SHORT, "--seconds", "0.01", "--all-directions", "--threads", "2", "--json")
    values = json.loads(done.output)
    problems = [ConvProblem.parse(one["problem"]) for one in values["problems"]]
    assert [str(p.direction) for p in problems] == ["forward", "backward_data", "backward_weight"]
    assert {p.threads for p in problems} == {2}
    assert values["environment"]["torch"]
    assert values["settings"]["precision"] == "native"
    done = run("bench", SHORT, "--seconds", "0.01", "--directions", "backward_weight, forward", "--json")
    assert [one["problem"].split()[0] for one in json.loads(done.output)["problems"]] == ["backward_weight", "forward"]


def test_bench_fails_where_an_algorithm_is_wrong(monkeypatch):
    right = BY_NAME["im2col_gemm"].forward
    monkeypatch.setattr(BY_NAME["im2col_gemm"], "forward", lambda *arguments: right(*arguments) * 1.01)
    for more in ([], ["--json"]):
        done = run("bench", SHORT, "--seconds", "0.01", *more)
        assert done.exit_code == 1
        assert "wrong or failed: im2col_gemm" in done.stderr
    assert "im2col_gemm" not in run("bench", SHORT, "--seconds", "0.01", "--directions", "backward_data").stderr


@pytest.mark.parametrize("arguments", [["1x8x12"], [SHORT, "--directions", "sideways"], ["forward N=1 C=3"]])
def test_what_cannot_be_read_is_refused(arguments):
    done = run("bench", *arguments)
    assert done.exit_code == 2
    assert "convselect bench: " in done.stderr


@pytest.mark.parametrize(("levels", "status"), [((), 0), (("note",), 0), (("note", "slower"), 1), (("broken",), 2)])
def test_doctor_exits_by_the_worst(monkeypatch, levels, status):
    advice = tuple(doctor.Advice(level, f"do {level}") for level in levels)
    report = doctor.Report({}, {}, {}, {}, {}, {}, {}, {}, {}, advice)
    monkeypatch.setattr(doctor, "examine", lambda: report)
    told = run("doctor")
    assert told.exit_code == status
    assert all(f"{level}: do {level}" in told.output for level in levels)
    assert ("all is well" in told.output) == (not levels)
    assert json.loads(run("doctor", "--json").output)["status"] == status


def test_calibrate_prints_json(monkeypatch):
    report = calibrate.Report("cpu-x86", 3, {"fft": 0.25}, {"fft": 2}, None)
    monkeypatch.setattr(timing, "assert_trustworthy", lambda: None)
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: report)
    done = run("calibrate", "--no-malloc-tuning", "--dry-run", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "artifact": "cpu-x86", "problems": 3, "bias": {"fft": 0.25}, "times": {"fft": 2}, "path": None,
    }  # fmt: skip
    assert "+0.25 in ln(t_native / t)" in run("calibrate", "--no-malloc-tuning", "--dry-run").stdout
