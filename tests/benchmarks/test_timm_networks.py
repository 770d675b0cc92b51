"""Networks against other runtimes: builds, sides, processes of their own, the file of results. No timm, no rivals."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import _against, _networks, _rivals, _timm, _timm_tables, timm_networks
from benchmarks._against import Result
from convselect.base.timing import Ratio

TINY = f"{__name__}:tiny"


def tiny():
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8, 4)), torch.randn(1, 3, 8, 8)


@pytest.fixture
def no_rivals(monkeypatch):
    """Whether they are there is the machine's business."""

    def absent(*_, **__):
        raise _rivals.Absent("not here")

    monkeypatch.setattr(_rivals, "onnx_bytes", absent)


def options(**changed):
    arguments = vars(timm_networks.parser().parse_args(["--rounds", "2", "--seconds", "0.05"]))
    return argparse.Namespace(**arguments | changed)


def result(network="a", mode="inference", threads=1, frozen=2.0, onnxruntime=4.0, **more):
    gains = {"eager": 1.0, "onnxruntime": onnxruntime, "frozen": frozen}
    us = {name: 1e3 / gain for name, gain in gains.items()}
    over = {name: Ratio(gain, gain, gain) for name, gain in gains.items()}
    frozen_over = {name: Ratio(frozen / gains[name], 0.0, 9.0) for name in ("eager", "onnxruntime")}
    return Result(network, mode, threads, "AVX2", "cpu", 5, us, us, us, us, over, frozen_over, {}, {}, **more)


# ---- networks -------------------------------------------------------------------------------------------------------


def test_thirty_networks():
    assert len(_timm.NAMES) == len(set(_timm.NAMES)) == 30


def test_every_branch_matters_after_enliven():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
            self.gamma = nn.Parameter(torch.full((3,), 1e-6))
            self.gain = nn.Parameter(torch.tensor(0.0))
            self.large = nn.Parameter(torch.ones(3))
            nn.init.zeros_(self.norm.weight)

    model = _timm.enliven(Scaled())
    assert (model.norm.weight >= 0.5).all()
    assert model.norm.weight.std() > 0
    assert model.norm.bias.std() > 0
    assert model.conv.bias.abs().min() > 0
    assert model.gamma.tolist() == pytest.approx([0.3] * 3)
    assert model.gain.item() == pytest.approx(0.3)
    assert model.large.tolist() == [1.0] * 3
    assert torch.equal(_timm.enliven(Scaled()).norm.weight, model.norm.weight)  # the same in each process


def test_unknown_networks_are_refused(monkeypatch):
    monkeypatch.setattr(_timm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(_rivals.Absent, match="timm is not installed"):
        _timm.build("resnet18")


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_inference(no_rivals):
    model, x = _timm.build(TINY)
    assert not model.training
    found = _against.inference("tiny", model, x, threads=1, rounds=2, seconds=0.05)
    assert set(found.over_eager) == {"eager", "eager channels_last", "converted", "frozen"}
    assert found.missing == {"onnxruntime": "not here", "openvino": "not here"}
    assert not found.wrong
    assert max(found.error.values()) < 1e-5
    assert max(found.max_error.values()) < 1e-5
    assert found.over_eager["eager"] == (1.0, 1.0, 1.0)
    assert found.best_rival in ("eager", "eager channels_last")
    assert found.frozen_over.keys() == {"eager", "eager channels_last"}
    assert found.over_best == found.frozen_over[found.best_rival]
    assert found.seconds["frozen"] > 0
    assert found.spinning_us is None
    assert Result.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_wrong_frozen_network_is_not_timed(no_rivals, monkeypatch):
    monkeypatch.setattr(_networks, "_frozen", lambda model, x: lambda: 1.001 * model(x))
    found = _against.inference("tiny", *_timm.build(TINY), threads=1, rounds=2, seconds=0.05)
    assert "frozen" not in found.over_eager
    assert found.missing["frozen"] == "wrong: its relative error is 1.0e-03"
    assert found.max_error["frozen"] == pytest.approx(1e-3, rel=0.05)
    assert found.wrong == ["frozen"]
    assert found.over_best is None


def test_a_side_that_raises_loses_only_itself(no_rivals, monkeypatch):
    monkeypatch.setattr(_networks, "_frozen", lambda model, x: lambda: 1 / 0)
    found = _against.inference("tiny", *_timm.build(TINY), threads=1, rounds=2, seconds=0.05)
    assert found.missing["frozen"] == "failed: ZeroDivisionError: division by zero"
    assert "converted" in found.over_eager


def test_spinning_threads_are_timed_alone(monkeypatch):
    model, x = _timm.build(TINY)
    asked = []

    def side(onnx, x, threads, spin=False):
        asked.append((threads, spin))
        return lambda: model(x)

    monkeypatch.setattr(_rivals, "onnx_bytes", lambda *_: b"")
    monkeypatch.setattr(_rivals, "onnxruntime_side", side)
    monkeypatch.setattr(_rivals, "openvino_side", side)
    found = _against.inference("tiny", model, x, threads=2, rounds=2, seconds=0.05)
    assert asked == [(2, False), (2, False), (2, True)]
    assert found.clock == "wall"
    assert found.spinning_us > 0


def test_training():
    found = _against.training("tiny", *_timm.build(TINY), threads=1, rounds=2, seconds=0.05)
    assert set(found.over_eager) == set(_against.TRAINING_SIDES)
    assert max(found.error.values()) < 1e-4
    assert found.mode == "training"


# ---- processes of their own -----------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_crash_or_a_network_that_takes_too_long_loses_only_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(_networks.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", "tests:tests/benchmarks")
    fine = f"{__name__.rpartition('.')[2]}:tiny"
    instead = {"crashing": "import os; os._exit(7)", "endless": "while True: pass"}
    real = subprocess.run

    def started(command, **more):
        network = command[command.index("--models") + 1]
        if network in instead:
            command = [sys.executable, "-S", "-c", instead[network]]
        return real(command, **more | ({"timeout": 0.1} if network == "endless" else {}))

    monkeypatch.setattr(timm_networks.subprocess, "run", started)
    out = tmp_path / "run.json"
    arguments = ["--models", *instead, fine, "--no-malloc-tuning", "--again", "--rounds", "2", "--seconds", "0.05"]
    assert timm_networks.main([*arguments, "--out", str(out)]) == 1
    found = json.loads(out.read_text())
    assert [r["network"] for r in found["results"]] == [fine]
    assert found["results"][0]["seconds"]["frozen again"] > 0  # in a third process, which measures nothing
    assert found["failed"] == {
        "crashing, inference, threads 1": "ended with status 7: no message",
        "endless, inference, threads 1": "took more than 1800 s",
    }


# ---- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """The command without measuring; returns the networks asked for."""
    asked = []

    def measured(network, mode, threads, options):
        asked.append(network)
        return "no reason" if network == "bad" else result(network, mode, threads, missing=missing)

    missing: dict[str, str] = {}
    asked_of = type("Asked", (), {"networks": asked, "missing": missing})
    monkeypatch.setattr(timm_networks, "_measured", measured)
    return asked_of


def run(*arguments):
    return timm_networks.main(["--no-malloc-tuning", *arguments])


def test_results_are_kept_and_failures_measured_again(tmp_path, counted, capsys):
    out = str(tmp_path / "run.json")
    assert run("--models", "a", "bad", "--out", out) == 1
    assert run("--models", "a", "bad", "b", "--out", out, "--resume") == 1
    assert counted.networks == ["a", "bad", "bad", "b"]
    found = json.loads((tmp_path / "run.json").read_text())
    assert [r["network"] for r in found["results"]] == ["a", "b"]
    assert found["failed"] == {"bad, inference, threads 1": "no reason"}
    assert not list(tmp_path.glob("*.part"))
    printed = capsys.readouterr().out
    assert "frozen over onnxruntime: 0.500, faster on 0 of 2" in printed
    assert "bad, inference, threads 1: no reason" in printed


def test_a_file_is_neither_overwritten_nor_mixed(tmp_path, counted):
    out = tmp_path / "run.json"
    assert run("--models", "a", "--out", str(out)) == 0
    with pytest.raises(SystemExit, match="--resume adds"):
        run("--models", "a", "--out", str(out))
    other = json.loads(out.read_text())
    other["environment"]["torch"] = "1.0"
    out.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="another torch"):
        run("--models", "a", "--out", str(out), "--resume")


def test_what_is_wrong_of_ours_is_an_error_and_a_missing_rival_is_not(counted):
    counted.missing["openvino"] = "not here"
    assert run("--models", "a") == 0
    counted.missing["converted"] = "wrong: its relative error is 1.0e-03"
    assert run("--models", "a") == 1


def test_both_numbers_of_threads_and_training(counted):
    assert run("--models", "a", "--threads", "1", "2", "--training") == 0
    assert counted.networks == ["a"] * 4


def test_the_best_rival_is_the_one_over_which_least_is_gained():
    """Medians of ratios may say so where those over eager PyTorch do not."""
    close = result(frozen=3.9, onnxruntime=4.0)
    close.frozen_over["eager"] = Ratio(0.9, 0.9, 0.9)
    assert close.best_rival == "eager"
    assert close.over_best.median == 0.9
    assert result(frozen=3.0).best_rival == "onnxruntime"


def test_summary_and_table():
    results = [result("a", frozen=2.0), result("b", frozen=8.0), result("c", threads=2)]
    first, second = timm_networks.summary(results)
    assert (first["threads"], first["networks"], second["threads"]) == (1, 2, 2)
    assert first["over_eager"] == pytest.approx({"eager": 1, "onnxruntime": 4, "frozen": 4})
    assert first["frozen_over"] == pytest.approx({"best": 1, "eager": 4, "onnxruntime": 1})
    assert first["frozen_wins"] == {"best": 1, "eager": 2, "onnxruntime": 1}
    made = timm_networks.table(results, "inference", 1)
    assert list(made.columns[0].cells) == ["a", "b", "geometric mean"]  # the worst first


def test_the_table_of_the_pages():
    a, b, slow = result("a", frozen=2.0), result("b", frozen=8.0), result("b", threads=2, frozen=0.1)
    runs = {isa: {"results": [asdict(r) for r in of]} for isa, of in (("A", [a, b, slow]), ("B", [b]))}
    header, _, *rows = _timm_tables.timm_table(runs).splitlines()
    assert header.count("frozen / best rival") == 2
    assert rows == [  # the worst first; OpenVINO is not there, and only one run has a
        "| a | 4.00 / - / 2.00 | 0.50 | - / - / - | - |",
        "| b | 4.00 / - / 8.00 | 2.00 | 4.00 / - / 8.00 | 2.00 |",
        "| geometric mean | 4.00 / - / 4.00 | 1.00 | 4.00 / - / 8.00 | 2.00 |",
    ]
    *_, mean = _timm_tables.timm_table({"A": runs["A"]}).splitlines()
    assert mean == "| geometric mean | 4.00 / - / 4.00 | 1.00 |"


def test_a_network_in_this_process(no_rivals):
    before = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = timm_networks._measured(TINY, "inference", before + 1, options(together=True))
    assert found.threads == before + 1
    assert torch.get_num_threads() == before
