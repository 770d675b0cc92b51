"""The doctor: a healthy process, and each way of being ill, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fresh
import psutil
import pytest

import convselect
from convselect.doctor import doctor, findings
from convselect.kernels import _library
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine.environment import run_environment
from convselect.model.artifact import save
from convselect.model.inference import ARTIFACTS, Predictor

PACKAGE = Path(convselect.__file__).parent


@pytest.fixture
def ask(tmp_path):
    """Runs the command in a fresh process with these variables; returns (exit status, report)."""

    def asked(*, raw: bool = False, **variables: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CONVSELECT_")}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CONVSELECT_CACHE": str(tmp_path / "cache")}
        command = ["-m", "convselect.cli.main", "doctor", *([] if raw else ["--json"])]
        done = fresh.run(command, env={**environment, "OMP_NUM_THREADS": "1", **variables})
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout if raw else json.loads(done.stdout)

    return asked


def advice(report, level):
    return [one["text"] for one in report["advice"] if one["level"] == level]


def test_healthy(ask, tmp_path):
    status, report = ask()
    assert (status, report["status"]) == (0, 0), report["advice"]
    assert report["versions"]["convselect"] == convselect.__version__
    assert set(report["algorithms"]) == set(BY_NAME)
    for name, found in report["algorithms"].items():
        assert found["revision"] == BY_NAME[name].revision
        assert found["live"] == (found["why_not"] is None)
    assert report["algorithms"]["winograd7"]["live"]
    assert "cuda" in report["algorithms"]["direct_triton"]["why_not"]
    assert report["library"]["loaded"]
    assert report["model"]["usable"]
    assert report["model"]["digest"]
    assert report["model"]["held_out"]["fraction_of_oracle_mean"] > 0.5
    assert not report["calibration"]["in_use"]
    assert report["self_test"]["checked"] > 30
    assert report["self_test"]["worst_error"]["float32"] < 1e-4
    assert report["store"]["path"] == str(tmp_path / "cache" / "store.sqlite")
    assert not (tmp_path / "cache").exists()  # looking begins no file


def test_it_prints(ask):
    status, text = ask(raw=True, CONVSELECT_POLICYY="auto")
    assert status == 1
    for word in ("installed", "oneDNN", "winograd4 (r2)", "held_out", "self-test", "what to do next"):
        assert word in text
    assert "Do you mean CONVSELECT_POLICY " in text


def test_without_the_c_kernels(ask):
    status, report = ask(CONVSELECT_NO_NATIVE="1")
    assert status == 1
    assert not report["library"]["loaded"]
    assert "CONVSELECT_NO_NATIVE=1 switches them off" in report["library"]["why_not"]
    assert any("Unset it" in text for text in advice(report, "slower"))
    assert not report["algorithms"]["winograd7"]["live"]
    assert report["algorithms"]["winograd4"]["live"]
    assert report["variables"] == {
        "CONVSELECT_NO_NATIVE": "1",
        "CONVSELECT_CACHE": report["variables"]["CONVSELECT_CACHE"],
    }


@pytest.mark.parametrize("library", ["missing", "not a library"])
def test_a_library_that_cannot_be_loaded(ask, tmp_path, library):
    path = tmp_path / "lib.so"
    if library != "missing":
        path.write_text(library)
    status, report = ask(CONVSELECT_LIBRARY=str(path))
    assert status == 1
    assert str(path) in report["library"]["why_not"]


@pytest.mark.parametrize("damage", ["missing", "cut", "noise"])
def test_a_damaged_artifact_is_broken(ask, tmp_path, damage):
    path = tmp_path / "mine.npz"
    whole = next(ARTIFACTS.glob("cpu-*.npz")).read_bytes()
    if damage != "missing":
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"noise")
    status, report = ask(CONVSELECT_ARTIFACT=str(path))
    assert status == 2
    assert not report["model"]["usable"]
    (text,) = advice(report, "broken")
    assert str(path) in text
    assert "Unset CONVSELECT_ARTIFACT" in text
    assert report["advice"][0]["level"] == "broken"


def test_an_algorithm_that_has_changed_since_training_is_named(ask, tmp_path):
    predictor = Predictor.load(next(ARTIFACTS.glob("cpu-*-c.npz")))
    then = BY_NAME["winograd4"].revision - 1
    card = replace(predictor.card, revisions={**predictor.card.revisions, "winograd4": then}, family="elsewhere")
    save(tmp_path / "old.npz", card, predictor._arrays)
    status, report = ask(CONVSELECT_ARTIFACT=str(tmp_path / "old.npz"))
    assert status == 1
    assert report["model"]["moved_revisions"]["winograd4"] == f"{then} -> {then + 1}"
    assert any(f"winograd4 (trained on r{then}, now r{then + 1})" in text for text in advice(report, "slower"))
    assert any("is a model of elsewhere" in text for text in advice(report, "note"))


def test_a_misspelt_variable_is_pointed_out(ask):
    status, report = ask(
        CONVSELECT_PRECISON="fast", CONVSELECT_XYZZY="1", CONVSELECT_LOG="loud", CONVSELECT_DISABLE="foo"
    )
    assert status == 1
    said = " ".join(advice(report, "slower"))
    assert "CONVSELECT_PRECISON. Do you mean CONVSELECT_PRECISION (exact, native, fast)?" in said
    assert "CONVSELECT_XYZZY. Unset it." in said
    assert "CONVSELECT_LOG=loud" in said
    assert "CONVSELECT_DISABLE names foo" in said


def test_a_policy_that_names_nothing_is_broken(ask):
    status, report = ask(CONVSELECT_POLICY="winogard4")
    assert status == 2
    assert "Do you mean winograd4?" in advice(report, "broken")[0]


@pytest.mark.parametrize("content", ["noise", "{}"])
def test_a_damaged_calibration_is_broken(ask, tmp_path, content):
    (tmp_path / "c.json").write_text(content)
    status, report = ask(CONVSELECT_CALIBRATION=str(tmp_path / "c.json"))
    assert status == 2
    assert any("convselect calibrate" in text for text in advice(report, "broken"))


def test_the_calibration_of_another_machine_is_left_out(ask, tmp_path):
    written = {"fingerprint": "another", "artifact": "x", "digest": "y", "bias": {}, "problems": 3}
    (tmp_path / "c.json").write_text(json.dumps(written))
    status, report = ask(CONVSELECT_CALIBRATION=str(tmp_path / "c.json"))
    assert status == 1
    assert not report["calibration"]["in_use"]
    assert "another machine" in report["calibration"]["why_not"]


def test_the_store(ask, tmp_path):
    assert ask(CONVSELECT_STORE="off")[0] == 0  # somebody's decision
    (tmp_path / "folder").mkdir()
    status, report = ask(CONVSELECT_STORE=str(tmp_path / "folder"))
    assert status == 1
    assert not report["store"]["enabled"]
    assert any("The store is off" in text for text in advice(report, "slower"))


def test_more_threads_than_processors(monkeypatch):
    here = run_environment()
    monkeypatch.setattr(doctor, "run_environment", lambda: {**here, "cpus": 2, "threads": 8})
    found = doctor.examine()
    assert any("8 threads and may use 2 processors" in one.text and one.level == "slower" for one in found.advice)


def test_a_wrong_algorithm_is_found(monkeypatch):
    fft = BY_NAME["fft"]
    right = fft.backward_data
    monkeypatch.setattr(fft, "backward_data", lambda *arguments: right(*arguments) * 1.01)
    monkeypatch.setattr(BY_NAME["im2col_gemm"], "forward", lambda *arguments: 1 / 0)
    found = doctor.examine()
    assert found.status == 2
    assert set(found.self_test["wrong"]) == {"fft backward_data", "im2col_gemm forward"}
    assert "CONVSELECT_DISABLE=fft,im2col_gemm" in found.advice[0].text
    assert json.loads(found.to_json())["status"] == 2
    assert "broken: Wrong results" in str(found)


def test_a_busy_process_is_named(monkeypatch):
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    # However busy the machine is, this one alone is looked at.
    monkeypatch.setattr(psutil, "process_iter", lambda _: [_with_name(psutil.Process(pid)) for pid in (busy.pid, 1)])
    monkeypatch.setattr(findings, "BUSY_PERCENT", 2.0)
    monkeypatch.setattr(findings, "LOOK_S", 0.5)
    try:
        assert any(f" {busy.pid} at " in text for _ in range(10) for text in findings.busy_processes())
    finally:
        busy.kill()
        busy.wait()


def _with_name(process):
    process.info = {"name": process.name()}
    return process


def test_every_variable_that_is_read_is_known():
    read = {name for file in PACKAGE.rglob("*.py") for name in re.findall(r"\bCONVSELECT_[A-Z_]+\b", file.read_text())}
    assert read == set(doctor.VARIABLES)


def test_every_algorithm_for_this_kind_of_device_is_probed():
    if not _library.available():
        pytest.skip("most algorithms need the C kernels")
    for algorithm in ALL:
        assert (findings.probe_for(algorithm)[0] is not None) == ("cpu" in algorithm.devices)
