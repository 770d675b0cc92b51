"""Calibration: what a correction does to a model that is off, who gets it, and what is left alone."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict

import fresh
import numpy as np
import pytest
import torch

import convselect
from convselect.base import lru, warnings
from convselect.base.problem import Direction, conv_problem
from convselect.kernels.pool import BY_NAME
from convselect.machine import host
from convselect.machine.environment import cpu_fingerprint
from convselect.measure.plan_cost import fixed_cost_us
from convselect.measure.rows import KERNEL_CLASSES, Row, kernel_class
from convselect.model import calibrate, evaluate, loaded, train
from convselect.model.artifact import ArtifactError, Calibration
from convselect.model.inference import ARTIFACTS, Predictor, artifact_path

SHIPPED = sorted(ARTIFACTS.glob("cpu-*.npz"))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("CONVSELECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CONVSELECT_ARTIFACT", raising=False)
    monkeypatch.setattr(warnings, "_given", set())
    loaded.unload()
    lru.clear()
    yield
    loaded.unload()
    lru.clear()


def as_predicted(predictor, off):
    """Rows of a machine on which the model is right but for a constant factor per algorithm, ln of it in `off`."""

    def measure(problem):
        prediction = predictor.predict(problem)
        rows = []
        for name in predictor.card.algorithm_names:
            if name in BY_NAME and BY_NAME[name].why_not(problem) is None:
                gain = 0.0 if name == "native" else prediction.log_gain(name) + off.get(name, 0.0)
                us = 1e5 * math.exp(-gain) - fixed_cost_us(problem, name)
                rows.append(Row("m", problem, name, 1, "ok", "thread", us, us, us, us, us, 9))
        return rows

    return measure


def test_the_problems_are_of_every_kind_and_small():
    problems = calibrate.problems(threads=2)
    assert 40 <= len(problems) <= 60
    assert {p.direction for p in problems[:20]} == set(Direction)
    assert {kernel_class(p) for p in problems} >= set(KERNEL_CLASSES) - {"other"}
    assert {p.threads for p in problems} == {2}
    assert max(p.flops for p in problems) < 2e9


def test_a_constant_factor_is_found_and_shrunk():
    gains = [("a", 0.7, 0.2)] * 11 + [("a", 0.2, 0.0), ("b", 0.1, 0.4), ("native", 0.0, 0.0)]
    gains += [("a", -2.0, -0.5), ("c", -2.0, -0.5)]  # hopeless either way
    bias, times = calibrate.fit_bias(gains)
    assert times == {"a": 12, "b": 1}
    assert bias["a"] == pytest.approx(0.5 * 12 / 16)
    assert bias["b"] == pytest.approx(-0.3 / 5)


def test_a_model_that_is_off_is_corrected_and_one_that_is_right_is_left_alone(monkeypatch):
    path = SHIPPED[0]
    monkeypatch.setattr(loaded, "path_for_host", lambda: path)
    monkeypatch.setattr(host, "host_flags", lambda *a: Predictor.load(path).card.host_flags)
    plain = Predictor.load(path)
    off = {"im2col_gemm": 0.6, "fft_tiled": -0.4}
    report = calibrate.calibrate(1e9, measure=as_predicted(plain, off))
    assert report.problems == len(calibrate.problems())
    assert report.bias["im2col_gemm"] == pytest.approx(0.6, abs=0.2)
    assert report.times["im2col_gemm"] >= 8
    assert all(abs(bias) < 1e-6 for name, bias in report.bias.items() if name not in off)
    assert report.path == loaded.calibration_path()

    problem = conv_problem(1, 64, 28, 28, 64, 1, 1)
    found = loaded.get()
    moved = found.predict(problem).log_gain("im2col_gemm") - plain.predict(problem).log_gain("im2col_gemm")
    assert moved == pytest.approx(report.bias["im2col_gemm"], abs=1e-3)
    assert found.predict(problem).log_gain("native") == 0

    loaded.unload()
    calibrate.calibrate(1e9, measure=as_predicted(plain, {}))
    same = loaded.get().predict(problem)
    np.testing.assert_allclose(same.logits, plain.predict(problem).logits, atol=1e-4)


def test_time_ends_it_and_a_dry_run_keeps_nothing(monkeypatch):
    monkeypatch.setattr(loaded, "path_for_host", lambda: SHIPPED[0])
    monkeypatch.setattr(host, "host_flags", lambda *a: Predictor.load(SHIPPED[0]).card.host_flags)
    seen = []
    report = calibrate.calibrate(
        0.0, measure=as_predicted(Predictor.load(SHIPPED[0]), {}), write=False, on_problem=lambda *n: seen.append(n)
    )
    assert report.problems == 0
    assert report.path is None
    assert not loaded.calibration_path().exists()
    assert seen == []


def calibration(path, **changes):
    right = Calibration(cpu_fingerprint(), path.stem, loaded.digest(path), {"im2col_gemm": 0.3}, 20)
    return {**asdict(right), **changes}


@pytest.mark.parametrize(
    ("changes", "applied"),
    [({}, True), ({"fingerprint": "another"}, False), ({"digest": "old"}, False), ({"artifact": "cpu-arm"}, False)],
    ids=["of here", "another machine", "an earlier model", "another model"],
)
def test_a_calibration_is_of_one_machine_and_one_model(monkeypatch, changes, applied):
    path = SHIPPED[0]
    monkeypatch.setattr(loaded, "path_for_host", lambda: path)
    written = loaded.calibration_path()
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps(calibration(path, **changes)))
    head = loaded.get()._arrays["head"]
    assert np.array_equal(head, Predictor.load(path)._arrays["head"]) != applied


def test_a_strange_machine_gets_the_nearest_model_only_once_calibrated(monkeypatch):
    nowhere = artifact_path("cpu-x86-avx1024-c")
    monkeypatch.setattr(loaded, "path_for_host", lambda: nowhere)
    nearest = loaded.nearest_artifact()
    assert nearest.stem.startswith("cpu-x86-")
    assert nearest.stem.endswith("-c")
    with pytest.warns(convselect.ConvselectWarning, match="`convselect calibrate` fits the nearest"):
        assert loaded.get() is None
    loaded.unload()
    written = loaded.calibration_path()
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps(calibration(nearest)))
    assert loaded.get().card.family == nearest.stem
    loaded.unload()
    written.write_text(json.dumps(calibration(nearest, digest="old")))
    with pytest.warns(convselect.ConvselectWarning, match="of an earlier model"):
        monkeypatch.setattr(warnings, "_given", set())
        assert loaded.get() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint": 1}', '{"bias": 3}'])
def test_a_damaged_calibration_is_one_warning_and_native(monkeypatch, text):
    monkeypatch.setattr(loaded, "path_for_host", lambda: SHIPPED[0])
    written = loaded.calibration_path()
    written.parent.mkdir(parents=True)
    written.write_text(text)
    with pytest.raises(ArtifactError):
        Calibration.from_json(text)
    with pytest.warns(convselect.ConvselectWarning, match="calibration is damaged"):
        assert loaded.get() is None
    with torch.no_grad():
        convselect.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))


def test_a_foreign_model_is_better_with_a_few_problems_of_here():
    """On a synthetic machine on which one algorithm is 1.8 times slower than the model learned, 20 problems regain most
    of the loss."""
    rng = np.random.default_rng(0)
    problems = []
    for _ in range(300):
        C, K = (int(2 ** rng.uniform(3, 9)) for _ in range(2))
        R, H = int(rng.choice([1, 3])), int(rng.choice([14, 28]))
        problems.append(conv_problem(1, C, H, H, K, R, R, padding=R // 2))
    there = np.ones((300, 2)) * 1000
    there[:, 1] = [600 if p.C > 60 else 1500 for p in problems]
    here = there * [1, 1.8]
    model = train.fit(train.design(problems), there, train.Recipe(steps=150))
    gains = train.log_gains(model, train.design(problems), 8.0)
    before = evaluate.judge(evaluate.chosen(gains, here, 0.1), here)
    probes = [("a", float(np.log(here[i, 0] / here[i, 1])), float(gains[i, 1])) for i in range(20)]
    bias, _ = calibrate.fit_bias(probes)
    after = evaluate.judge(evaluate.chosen(gains + np.array([0, bias["a"]]), here, 0.1), here)
    assert before["slower_than_native_share"] > 0.4
    assert after["slower_than_native_share"] < 0.1


def test_the_command(tmp_path):
    line = ["-m", "convselect.cli.main", "calibrate", "--seconds", "1", "--dry-run"]
    # One thread: beside other tests, waiting for a second one would be taken for a bad timer.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = fresh.run(line, env=environment)
    assert done.returncode == 0, done.stderr
    assert "problems timed" in done.stdout
    assert "nothing was kept" in done.stdout
