"""The demonstration end to end, as a user starts it, and the parts that decide what its numbers mean."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch
from command_lines import outcomes
from places import ROOT
from torch import nn

pytest.importorskip("rich")
pytest.importorskip("typer")

from rich.console import Console

from convselect.base.timing import Ratio
from convselect.demo import demo, tables
from convselect.doctor import compare
from convselect.kernels.pool import ALL
from convselect.summary import summary

# On a machine no model was trained for everything here must hold as well, with native throughout.
pytestmark = pytest.mark.filterwarnings("ignore:.*there is no trained model:convselect.ConvselectWarning")

RATIO = Ratio(0.5, 0.4, 0.6)

# Smooth, so that no gradient jumps: then rounding is all that separates float32 from float64.
USER_MODULE = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GELU(), nn.Dropout(0.5), nn.Conv2d(16, 16, 3, padding=1, groups=4),
        nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        y = self.conv(x)
        return {"maps": (y, y.tanh()), "count": torch.tensor(3)}

def frozen():
    return nn.Conv2d(3, 4, 3).requires_grad_(False)

def number():
    return 7

def broken():
    raise RuntimeError("no weights\\nfor you")
"""


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "usermodel.py").write_text(USER_MODULE)
    return tmp_path


def environment() -> dict[str, str]:
    untuned = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return untuned | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"}


def convselect(workdir: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return fresh.run(["-m", "convselect.cli.main", *arguments], cwd=workdir, env=environment() | variables)


def test_quick_demo_of_a_users_model(workdir: Path) -> None:
    arguments = ["--model", "usermodel:small", "--input", "2,3,16,16", "--seconds", "0.5", "--threads", "1"]
    done = convselect(workdir, "demo", "--quick", *arguments, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    assert "set by this command" in done.stdout  # restarted itself with malloc tuned
    for text in ("what runs where", "against the same model in float64", "interleaved", "3 convolutions converted"):
        assert text in done.stdout
    results = json.loads((workdir / "out.json").read_text())
    assert results["environment"]["threads"] == 1
    assert results["environment"]["malloc"]["MALLOC_TRIM_THRESHOLD_"]
    (model,) = results["models"]
    assert model["name"] == "usermodel:small"
    assert model["input_shape"] == [2, 3, 16, 16]

    errors = {e["quantity"]: e for e in model["errors"]}
    assert set(errors) == {"output", "all gradients", "worst parameter's gradient"}
    for error in errors.values():
        # Five layers of float32 rounding; a different dropout mask or a wrong gradient would be of order one.
        assert 0 < error["native"] < 1e-5
        assert 0 < error["converted"] < 2e-5

    assert [s["mode"] for s in model["speeds"]] == ["inference", "training"]
    for speed in model["speeds"]:
        assert speed["rounds"] >= 2
        assert 0 < speed["ratio"]["p20"] <= speed["ratio"]["median"] <= speed["ratio"]["p80"]
        assert 0 < speed["native_us"] < 60e6
        assert 0 < speed["converted_us"] < 60e6

    posed = {(layer, c["direction"]) for c in model["choices"] for layer in c["layers"]}
    directions = ("forward", "backward_data", "backward_weight")
    expected = {(layer, d) for layer in ("0", "3", "6") for d in directions}
    assert posed == expected - {("0", "backward_data")}  # nobody asked for the gradient of the image


def test_malloc_is_left_alone_on_request_and_a_users_setting_always(workdir: Path) -> None:
    arguments = ["demo", "--model", "usermodel:frozen", "--input", "1,3,8,8", "--seconds", "0.1", "--json", "o.json"]
    done = convselect(workdir, *arguments, "--no-malloc-tuning")
    assert done.returncode == 0, done.stderr
    assert "malloc: as it is" in done.stdout
    results = json.loads((workdir / "o.json").read_text())
    assert not any(results["environment"]["malloc"].values())
    # Frozen parameters: nothing to train, so only inference is reported.
    assert [s["mode"] for s in results["models"][0]["speeds"]] == ["inference"]
    assert [e["quantity"] for e in results["models"][0]["errors"]] == ["output"]

    done = convselect(workdir, *arguments, MALLOC_TRIM_THRESHOLD_="12345678")
    assert done.returncode == 0, done.stderr
    malloc = json.loads((workdir / "o.json").read_text())["environment"]["malloc"]
    assert malloc["MALLOC_TRIM_THRESHOLD_"] == "12345678"
    assert malloc["MALLOC_MMAP_THRESHOLD_"]


BAD_REQUESTS = (
    (["--model", "usermodel", "--input", "1,3,8,8"], "must be module:function"),
    (["--model", "nosuchmodule:f", "--input", "1,3,8,8"], "cannot import 'nosuchmodule'"),
    (["--model", "usermodel:nothing", "--input", "1,3,8,8"], "has no function 'nothing'"),
    (["--model", "usermodel:number", "--input", "1,3,8,8"], "returned int, not a torch.nn.Module"),
    (["--model", "usermodel:broken", "--input", "1,3,8,8"], "failed: RuntimeError: no weights for you"),
    (["--model", "usermodel:small", "--input", "1,3,8"], "four positive numbers"),
    (["--model", "usermodel:small"], "--model and --input"),
    (["--json", "nowhere/out.json"], "there is no directory"),
    (["--only", "alexnet"], "unknown network 'alexnet'"),
    (["--model", "usermodel:small", "--input", "1,4,8,8"], "on an input of 1,4,8,8, forward: RuntimeError"),
)


def test_bad_requests_are_one_line_and_exit_code_2(workdir: Path) -> None:
    lines = [["demo", "--no-malloc-tuning", "--quick", *arguments] for arguments, _ in BAD_REQUESTS]
    for (status, said), (arguments, message) in zip(outcomes(lines, workdir, environment()), BAD_REQUESTS, strict=True):
        assert status == 2, (arguments, said)
        assert message in said, arguments
        assert "Traceback" not in said, arguments
        assert len(said.strip().splitlines()) == 1, arguments


def test_quick_demo_of_a_built_in_network(workdir: Path) -> None:
    done = convselect(
        workdir, "demo", "--quick", "--only", "resnet18", "--seconds", "0.5", "--threads", "1", "--json", "o.json"
    )
    assert done.returncode == 0, done.stderr
    (model,) = json.loads((workdir / "o.json").read_text())["models"]
    assert model["name"] == "resnet18"
    errors = {e["quantity"]: e for e in model["errors"]}
    assert errors["output"]["native"] < 2e-5
    assert errors["output"]["converted"] < 1e-4
    assert len({layer for c in model["choices"] for layer in c["layers"]}) == 20


def test_a_forced_policy_is_obeyed_or_refused(workdir: Path) -> None:
    arguments = ["demo", "--no-malloc-tuning", "--model", "usermodel:frozen", "--input", "1,3,8,8", "--seconds", "0.1"]
    done = convselect(workdir, *arguments, "--json", "o.json", CONVSELECT_POLICY="im2col_gemm")
    assert done.returncode == 0, done.stderr
    (choice,) = json.loads((workdir / "o.json").read_text())["models"][0]["choices"]
    assert (choice["algorithm"], choice["source"]) == ("im2col_gemm", "forced")
    done = convselect(workdir, *arguments, CONVSELECT_POLICY="depthwise")
    assert done.returncode == 2
    assert "depthwise cannot do this convolution" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines() -> None:
    def shown(terminal: bool) -> str:
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
        subject = demo.Subject("mine", nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8))
        threads = torch.get_num_threads()
        results = demo.run_demo(None, subject, seconds=0.1, threads=1, console=console)
        assert torch.get_num_threads() == threads
        assert [m["name"] for m in results["models"]] == ["mine"]
        return out.getvalue()

    assert "━" in shown(True)
    plain = shown(False)
    assert "━" not in plain
    assert "\x1b" not in plain
    assert "mine: timing training\n" in plain


def test_demo_notices_a_wrong_conversion(monkeypatch) -> None:
    def spoil(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model[0].weight[0, 0, 0, 0] += 0.1
        return model

    monkeypatch.setattr(demo.convselect, "convert", spoil)
    subject = demo.Subject("m", nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(1, 3, 8, 8))
    result = demo.run_model(subject, 0.1, lambda stage, fraction: None)
    output = result.errors[0]
    assert output.native < 1e-6
    assert output.converted > 1e-3


def test_the_users_model_is_not_touched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    demo.run_model(demo.Subject("m", model, torch.randn(2, 3, 8, 8)), 0.1, lambda stage, fraction: None)
    assert not summary(model).converted
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_models_that_return_containers_are_compared_whole(workdir: Path, monkeypatch) -> None:
    monkeypatch.chdir(workdir)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(workdir)])
    monkeypatch.delitem(sys.modules, "usermodel", raising=False)
    subject = demo.load_user_model("usermodel:Several", (1, 3, 8, 8))
    monkeypatch.delitem(sys.modules, "usermodel", raising=False)
    outputs = compare.tensors(subject.model(subject.x))
    assert [t.shape for t in outputs] == [(1, 4, 6, 6), (1, 4, 6, 6)]
    result = demo.run_model(subject, 0.1, lambda stage, fraction: None)
    assert [e.quantity for e in result.errors] == ["output", "all gradients", "worst parameter's gradient"]
    assert all(e.converted < 1e-5 for e in result.errors)


def test_distance() -> None:
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0])
    assert compare.distance([a, b], [a, b]) == 0
    assert compare.distance([a + torch.tensor([0.3, 0.4]), b], [a, b]) == pytest.approx(0.1, rel=1e-6)
    assert compare.distance([b], [b]) == 0
    assert compare.distance([b + 1], [b]) == math.inf
    assert math.isnan(compare.distance([a * math.nan], [a]))


def test_worst_gradient_leaves_out_those_that_vanish_exactly() -> None:
    # The bias before batch normalisation has gradient 0 in exact arithmetic: relative to that any rounding is huge.
    subject = demo.Subject(
        "m", nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh()), torch.randn(2, 3, 12, 12)
    )
    result = demo.run_model(subject, 0.1, lambda stage, fraction: None)
    worst = result.errors[2]
    assert worst.native < 1e-4
    assert worst.converted < 1e-4


def test_plain_results_are_json_with_named_ratios() -> None:
    speed = tables.Speed("inference", 2, 1.0, 2.0, RATIO, RATIO)
    result = tables.ModelResult("m", (1, 3, 8, 8), "", "", (), (), (speed,))
    values = json.loads(json.dumps(tables.plain(result)))
    assert values["speeds"][0]["ratio"] == {"median": 0.5, "p20": 0.4, "p80": 0.6}


def test_explain_command_gives_a_reason_for_every_algorithm(workdir: Path) -> None:
    line = "forward N=1 C=64 H=56 W=56 K=64 R=3 S=3 pad_top=1 pad_bottom=1 pad_left=1 pad_right=1"
    done = convselect(workdir, "explain", line)
    assert done.returncode == 0, done.stderr
    assert "takes " in done.stdout
    for algorithm in ALL:
        assert algorithm.name in done.stdout
    assert convselect(workdir, "explain", *line.split()).stdout == done.stdout


NO_CONVOLUTIONS = (
    ("sideways N=1 C=1 H=1 W=1 K=1 R=1 S=1", "sideways"),
    ("forward N=1 C=1 H=4 W=4 K=1 R=3 S=3 Z=2", "unknown field 'Z'"),
    ("forward N=1", "missing"),
    ("forward N=1 C=0 H=4 W=4 K=1 R=3 S=3", "C must be at least 1"),
    ("forward N=1 C=3 H=4 W=4 K=4 R=3 S=3 groups=2", "multiples of groups"),
    ("forward N=1 C=3 H=4 W=4 K=4 R=5 S=5", "more than the padded image"),
    ("forward N=1 C=3 H=4 W=4 K=4 R=1 S=1 dtype=int8", "dtype"),
)


def test_explain_command_refuses_what_is_no_convolution(workdir: Path) -> None:
    found = outcomes([["explain", line] for line, _ in NO_CONVOLUTIONS], workdir, environment())
    for (status, said), (line, message) in zip(found, NO_CONVOLUTIONS, strict=True):
        assert status == 2, (line, said)
        assert message in said, line
        assert "Traceback" not in said, line


def test_without_the_tools_extra_one_line_says_what_to_install(workdir: Path) -> None:
    (workdir / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    done = convselect(workdir, "demo")
    assert done.returncode == 1
    assert "pip install 'convselect[tools]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
