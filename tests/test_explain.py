from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_model import use_fake
from torch import nn

import convselect
from convselect.base import lru, settings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.choice.choose import Choice
from convselect.eager import resolve
from convselect.kernels.pool import ALL
from convselect.model import loaded

CONV3 = conv_problem(1, 32, 16, 16, 32, 3, 3, padding=1)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, padding_mode="reflect"),
        nn.Flatten(),
    )


def test_a_model_is_explained_per_layer_and_direction(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    model = network()
    convselect.convert(model)
    statistics = model[1].running_mean.clone()
    found = convselect.explain(model, torch.randn(2, 3, 12, 12))
    assert [(r.layer, r.direction, r.algorithm) for r in found] == [
        ("0", "forward", "winograd4"),  # the image needs no gradient
        ("0", "backward_weight", "winograd4"),
        ("3", "forward", "im2col_gemm"),
        ("3", "backward_data", "im2col_gemm"),
        ("3", "backward_weight", "im2col_gemm"),
    ]
    assert torch.equal(model[1].running_mean, statistics)
    assert model[1].num_batches_tracked == 0
    with torch.no_grad():
        assert {r.direction for r in convselect.explain(model, torch.randn(2, 3, 12, 12))} == {"forward"}


def test_what_is_explained_is_what_runs(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    model = network()
    convselect.convert(model)
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    ran = []
    for algorithm in ALL:
        original = algorithm.run_checked

        def spy(a, b, problem, params=None, bias=None, original=original, name=algorithm.name):
            ran.append((str(problem.direction), name, problem))
            return original(a, b, problem, params, bias)

        monkeypatch.setattr(algorithm, "run_checked", spy)
    model(x).square().sum().backward()
    assert sorted(ran) == sorted((r.direction, r.algorithm, r.problem) for r in convselect.explain(model, x))


def test_every_other_algorithm_has_a_reason(monkeypatch):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    for problem in (CONV3, CONV3._replace(R=1, S=1, pad_top=0, pad_bottom=0, pad_left=0, pad_right=0)):
        for direction in Direction:
            (row,) = convselect.explain_problem(problem.with_direction(direction))
            assert set(row.why_not) == {a.name for a in ALL} - {row.algorithm}
            assert all(reason.strip() for reason in row.why_not.values())
    (row,) = convselect.explain_problem(CONV3)
    assert (row.algorithm, row.source, row.gain) == ("winograd4", "model", pytest.approx(3.0))
    (double,) = convselect.explain_problem(CONV3._replace(dtype="float64"))
    assert "admits at most" in double.why_not["winograd6"]
    assert "by name" in row.why_not["reference"]
    assert "3.00x" in row.why_not["native"]


def test_probability_is_shared_by_what_applies(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    for problem in (CONV3, CONV3._replace(R=1, S=1, pad_top=0, pad_bottom=0, pad_left=0, pad_right=0)):
        (row,) = convselect.explain_problem(problem)
        assert row.probability == pytest.approx(1 / sum(a.why_not(problem) is None for a in ALL))


def test_forced_and_refused():
    (row,) = convselect.explain_problem(CONV3, policy="im2col_gemm")
    assert (row.algorithm, row.source, row.probability) == ("im2col_gemm", "forced", None)
    assert row.why_not["native"] == "im2col_gemm was asked for by name."
    with pytest.raises(convselect.NotApplicable):
        convselect.explain_problem(CONV3, policy="upcast")


def test_it_prints_and_serialises(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    found = convselect.explain(network(), torch.randn(1, 3, 12, 12))
    text = str(found)
    assert "1x3x12x12 -> 8, 3x3 p1" in text
    assert "winograd4" in text
    assert "not winograd6:" in found.details()
    data = json.loads(found.to_json())
    assert len(data["rows"]) == len(found)
    assert ConvProblem.parse(data["rows"][0]["problem"]) == found.rows[0].problem


def test_a_model_is_summed_up_per_direction(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm", gain=2.0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 1))
    with torch.no_grad():
        found = convselect.explain(model, torch.randn(1, 8, 12, 12))
    said = found.summary()
    assert said == {"forward": {"algorithms": {"winograd4": 2, "im2col_gemm": 1}, "gain": pytest.approx(2.0)}}
    assert "forward: 2 winograd4, 1 im2col_gemm; expected gain 2.00x" in str(found)
    assert json.loads(found.to_json())["summary"]["forward"]["algorithms"] == {"winograd4": 2, "im2col_gemm": 1}
    # Half of the operations twice as fast: 1 / (0.5 + 0.5 / 2).
    fast, slow = (replace(found.rows[0], gain=gain) for gain in (2.0, None))
    assert convselect.Explanation((fast, slow)).summary()["forward"]["gain"] == pytest.approx(4 / 3)
    assert convselect.Explanation((slow,)).summary()["forward"]["gain"] is None


@pytest.mark.parametrize("source", ["store", "verify", "measure", "trial", "memory"])
def test_other_sources_appear_as_they_are(monkeypatch, source):
    use_fake(monkeypatch, "fft")
    choice = Choice("winograd4", source, None, 1.5)
    monkeypatch.setattr(resolve, "choice_for", lambda *_: choice)
    (row,) = convselect.explain_problem(CONV3)
    assert (row.algorithm, row.source, row.gain) == ("winograd4", source, 1.5)
    expected = {"trial": "are being timed", "memory": "was chosen before"}.get(
        source, "Timing has settled on winograd4"
    )
    assert expected in row.why_not["im2col_gemm"]
    assert expected in row.why_not["native"]
    assert "by name" in row.why_not["reference"]


def test_it_prints_without_rich(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rich", None)
    assert "forward" in str(convselect.explain_problem(CONV3, policy="native"))


def test_without_a_model_it_says_so(monkeypatch):
    monkeypatch.setattr(loaded, "get", lambda: None)
    lru.clear()
    found = convselect.explain(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
    assert "No trained model" in str(found)
    assert {r.source for r in found} == {"fallback"}


def test_short():
    p = conv_problem(
        2, 8, 9, 7, 16, 3, 5, stride=(2, 1), padding=(1, 1, 2, 2), dilation=2, groups=4, dtype="bfloat16",
        layout="channels_last",
    )  # fmt: skip
    assert p.brief == "2x8x9x7 -> 16, 3x5 s(2,1) p(1,1,2,2) d2 g4 bfloat16 channels_last"


def test_settings_in_force_are_the_ones_explained(monkeypatch):
    use_fake(monkeypatch, "winograd6", "im2col_gemm")
    double = CONV3._replace(dtype="float64")
    with settings.use(precision="fast"):
        assert convselect.explain_problem(double).rows[0].algorithm == "winograd6"
    assert convselect.explain_problem(double).rows[0].algorithm == "im2col_gemm"
