"""benchmarks.trials: what it draws and how it sums up; and a quick run of every part, whose times are not looked at."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from places import ROOT

pytest.importorskip("typer")
import typer

import convselect
from benchmarks import _trials_networks as networks
from benchmarks import trials
from benchmarks._classes import read_problems
from benchmarks._trials_layers import ALLOWED_US, FIRST, First, draw, running_total
from benchmarks._trials_lies import LyingPredictor, sizes
from benchmarks._trials_machine import Figure
from convselect.base.problem import conv_problem
from convselect.base.settings import Settings
from convselect.base.timing import Ratio
from convselect.choice.choose import nominees
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import kernel_class

PROBLEM = conv_problem(1, 4, 8, 8, 4, 3, 3, padding=1)


def first(default, native, **kwargs):
    return First(PROBLEM, 1, [default] * FIRST, [native] * FIRST, calls=FIRST, **kwargs)


def test_drawn_problems_are_of_every_class_and_within_the_bound():
    drawn = draw(read_problems(), 40, 1e8, 0)
    assert len(drawn) == len(set(drawn)) == 40
    assert len({kernel_class(p) for p in drawn}) >= 6
    assert {p.N for p in drawn} >= {1, 8}
    assert max(p.flops for p in drawn) <= 1e8
    assert drawn == draw(read_problems(), 40, 1e8, 0) != draw(read_problems(), 40, 1e8, 1)


def test_excess_is_in_units_of_what_a_trial_may_cost():
    allowed_us = 6 * 100.0 + ALLOWED_US
    assert first(100.0 + allowed_us / FIRST, 100.0).excess == pytest.approx(1.0)
    assert first(50.0, 100.0).excess < 0
    assert first(150.0, 100.0).ratio(45) == pytest.approx(1.5)


def test_settled_is_the_first_call_without_an_open_trial():
    assert (first(1, 1).tried, first(1, 1).settled) == (False, 1)
    assert (first(1, 1, opened=30).tried, first(1, 1, opened=30).settled) == (True, 31)
    assert first(1, 1, opened=FIRST).settled is None


@pytest.mark.parametrize(("speeds", "counts"), [((1.2,), 1.2), ((0.9, 0.91, 1.0), 1.0), ((0.9, 0.91, 0.95), 0.91)])
def test_a_choice_is_slow_only_if_it_was_slow_every_time(speeds, counts):
    assert first(1, 1, speed=[Ratio(s, s, s) for s in speeds]).settled_speed == counts


def test_the_running_total_begins_once_enough_calls_were_seen():
    found = [first(200.0, 100.0), first(100.0, 100.0)]
    assert running_total(found, 100) == (2.0, 1.5, 200)
    assert running_total(found, 10_000) == (1.5, 1.5, 200)


def test_a_figure_meets_its_target_or_does_not():
    assert Figure(1, "", 1.0, 1.0, 5).met is True
    assert Figure(1, "", 1.1, 1.0, 5).met is False
    assert Figure(1, "", math.nan, 1.0, 5).met is False
    assert Figure(1, "", math.nan, 1.0, 0).met is None
    assert Figure(1, "", 1.0, None, 5).met is None


def test_parts_are_read():
    assert trials.read_parts("") == tuple(range(1, 11))
    assert trials.read_parts("3,5") == (3, 5)
    for wrong in ("11", "a", "1,,2"):
        with pytest.raises(typer.BadParameter):
            trials.read_parts(wrong)


def test_the_lying_model_nominates_what_it_was_given():
    worst = ["im2col_gemm", "direct"]
    predictor = LyingPredictor({sizes(PROBLEM): worst})
    prediction = predictor.predict(PROBLEM)
    assert nominees(PROBLEM, BY_NAME, Settings(), prediction) == worst
    assert set(prediction.ranked) == set(BY_NAME)
    assert predictor.predict(PROBLEM._replace(H=9)) is None


def test_networks_are_what_they_say():
    encoder, x = networks.encoder(), torch.randn(1, 3, 33, 40)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in encoder.modules()) == 19
    with torch.no_grad():
        assert encoder(x).shape == (1, 256, 3, 3)
        assert networks.vae_decoder(16)(torch.randn(1, 4, 4, 5)).shape == (1, 3, 32, 40)


@pytest.mark.slow
def test_a_quick_run_has_every_part(tmp_path):
    output = tmp_path / "run.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trials", "--quick", "--output", str(output)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "target" in done.stdout
    assert "met" in done.stdout
    written = json.loads(output.read_text())
    assert written["environment"]["threads"] == 1
    assert written["environment"]["convselect"] == convselect.__version__
    assert written["options"]["quick"] is True
    assert {figure["part"] for figure in written["figures"]} == set(range(1, 11))
    for figure in written["figures"]:
        assert set(figure) == {"part", "name", "value", "unit", "target", "met", "count"}
        assert (figure["met"] is None) == (figure["target"] is None or figure["count"] == 0)
    assert set(written["rows"]) == set(trials.GROUPS)
    assert all(written["rows"].values())
