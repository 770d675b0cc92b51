"""Every example, as a user would run it, at its smallest size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from convselect.kernels import _library

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parent.parent / "examples"
TESTED = {"serve_resnet50", "train_unet", "large_kernel_convnet", "export_aoti", "segment_volume"}


def run(name: str, *arguments: object, cwd: Path, **environment: str) -> str:
    """What `python examples/NAME.py --quick` prints, run from another folder."""
    done = subprocess.run(
        [sys.executable, "-W", "error::convselect.ConvselectWarning", EXAMPLES / f"{name}.py", "--quick",
         *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, cwd=cwd, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed_and_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED
    listed = set(re.findall(r"\| \[(\w+)\.py\]", (EXAMPLES / "README.md").read_text()))
    assert listed == TESTED


def test_serving_is_quick_to_start_the_second_time(tmp_path):
    pytest.importorskip("rich")
    first = run("serve_resnet50", "--store", tmp_path / "s.sqlite", cwd=tmp_path)
    second = run("serve_resnet50", "--store", tmp_path / "s.sqlite", "--freeze", cwd=tmp_path)
    sources = [re.search(r"choices by (\{.*\})", out)[1] for out in (first, second)]
    assert sources == ["{'measure': 53}", "{'store': 53}"]
    ready_s = [float(re.search(r"converted: ready after ([\d.]+) s", out)[1]) for out in (first, second)]
    assert ready_s[1] < ready_s[0]
    assert [line.split()[0] for line in second.splitlines()[-3:]] == ["stock", "converted", "frozen"]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_training_on_two_processes(tmp_path):
    out = run("train_unet", cwd=tmp_path)
    losses = re.findall(r"(\w+): loss ([\d.]+) at first, ([\d.]+) after", out)
    assert [name for name, *_ in losses] == ["stock", "converted"]
    assert all(float(last) < float(first) for _, first, last in losses)
    directions = set(re.findall(r"^(\w+): \d", out, re.MULTILINE))
    assert directions == {"forward", "backward_data", "backward_weight"}


def test_large_kernels_layer_by_layer(tmp_path):
    out = run("large_kernel_convnet", cwd=tmp_path)
    assert len(re.findall(r"^ .* forward .*x *$", out, re.MULTILINE)) == 12  # explained
    assert len(re.findall(r"^  \S+ .* ms .* x$", out, re.MULTILINE)) == 12  # measured
    assert "whole network" in out
    if _library.available():
        assert "fft_tiled" in out or "depthwise   model" in out


def test_segmenting_a_volume(tmp_path):
    pytest.importorskip("rich")
    out = run("segment_volume", cwd=tmp_path)
    assert re.search(r"^4 windows of 16x16x16 in a volume of 24x24x16", out, re.MULTILINE)
    assert re.search(r"converted [\d.]+ s: [\d.]+ times faster", out)


def test_exporting(tmp_path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    out = run("export_aoti", cwd=tmp_path, AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL="O0")
    ours = int(re.search(r"(\d) of 6 convolutions are convselect's", out)[1])
    assert ours > 0 or not _library.available()
    assert "converted: " in out


def test_exporting_without_a_compiler_says_so(tmp_path):
    out = run("export_aoti", cwd=tmp_path, CXX=str(tmp_path / "none"))
    assert "C++ compiler" in out
