from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fake_model import use_fake
from race import GAINS, PREDICTED, QUICK, SLOW, racing
from torch import nn

import convselect
from convselect.base import lru, settings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.choice import budgets
from convselect.choice.choose import Choice
from convselect.choice.outcome import Measured
from convselect.choice.trial import MOST_CALLS
from convselect.eager import live_trial, resolve
from convselect.eager.live_trial import LiveTrial
from convselect.kernels.pool import ALL
from convselect.model import loaded

CONV3 = conv_problem(1, 32, 16, 16, 32, 3, 3, padding=1)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 256, 1, padding_mode="reflect"),  # large enough to be worth a choice
        nn.Flatten(),
    )


def test_a_model_is_explained_per_layer_and_direction(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm")
    model = network()
    convselect.convert(model)
    statistics = model[1].running_mean.clone()
    found = convselect.explain(model, torch.randn(2, 3, 20, 20))
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
        assert {r.direction for r in convselect.explain(model, torch.randn(2, 3, 20, 20))} == {"forward"}


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
    assert (row.algorithm, row.source) == ("winograd4", "model")
    assert (row.predicted_gain, row.measured_gain, row.spread) == (pytest.approx(3.0), None, None)
    (double,) = convselect.explain_problem(CONV3._replace(dtype="float64"))
    assert "precision 'native' allows" in double.why_not["winograd6"]
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
    found = convselect.explain(network(), torch.randn(1, 3, 20, 20))
    text = str(found)
    assert "1x3x20x20 -> 8, 3x3 p1" in text
    assert "winograd4" in text
    assert "not winograd6:" in found.details()
    data = json.loads(found.to_json())
    assert len(data["rows"]) == len(found)
    assert ConvProblem.parse(data["rows"][0]["problem"]) == found.rows[0].problem


def test_a_model_is_summed_up_per_direction(monkeypatch):
    use_fake(monkeypatch, "winograd4", "im2col_gemm", gain=2.0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 512, 1))
    with torch.no_grad():
        found = convselect.explain(model, torch.randn(1, 8, 20, 20))
    said = found.summary()
    assert said == {
        "forward": {
            "algorithms": {"winograd4": 2, "im2col_gemm": 1}, "on_trial": 0, "predicted": pytest.approx(2.0),
            "predicted_share": 1.0, "measured": None, "measured_share": 0.0,
        }
    }  # fmt: skip
    assert "forward: 2 winograd4, 1 im2col_gemm; by operations predicted 2.00x" in str(found)
    assert json.loads(found.to_json())["summary"]["forward"]["algorithms"] == {"winograd4": 2, "im2col_gemm": 1}


def test_predicted_and_measured_gains_are_summed_up_apart(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    (row,) = convselect.explain_problem(CONV3)
    # Half of the operations twice as fast, half as fast as before: 1 / (0.5 / 2 + 0.5).
    fast = replace(row, predicted_gain=2.0, measured_gain=3.0)
    native = replace(row, predicted_gain=1.0, measured_gain=None)
    unknown = replace(row, predicted_gain=None, measured_gain=None)
    both = convselect.Explanation((fast, native))
    said = both.summary()["forward"]
    assert (said["predicted"], said["predicted_share"]) == (pytest.approx(4 / 3), 1.0)
    # A row without a number is not counted as native's.
    assert (said["measured"], said["measured_share"]) == (pytest.approx(3.0), 0.5)
    assert "; by operations predicted 1.33x, measured 3.00x (over 50% of them)" in str(both)
    nothing = convselect.Explanation((unknown, unknown))
    assert nothing.summary()["forward"]["predicted"] is None
    assert str(nothing).splitlines()[-1] == "forward: 2 winograd4"


def test_what_is_too_small_for_a_choice_says_so(monkeypatch):
    use_fake(monkeypatch, "im2col_gemm")
    (row,) = convselect.explain_problem(conv_problem(1, 8, 4, 4, 8, 1, 1), policy="verify")
    assert (row.algorithm, row.source, row.predicted_gain, row.measured_gain) == ("native", "small", 1.0, None)
    assert row.why_not["im2col_gemm"] == "The convolution is so small that native runs at once."


@pytest.mark.parametrize("source", ["store", "verify", "measure", "memory"])
def test_other_sources_appear_as_they_are(monkeypatch, source):
    use_fake(monkeypatch, "fft")
    measured = None if source == "memory" else Measured(7, 1.5)
    monkeypatch.setattr(resolve, "found_for", lambda *_: Choice("winograd4", source, measured=measured))
    (row,) = convselect.explain_problem(CONV3)
    assert (row.algorithm, row.source, row.spread) == ("winograd4", source, None)
    assert (row.measured_gain, row.rounds) == ((None, 0) if measured is None else (1.5, 7))
    assert row.predicted_gain == pytest.approx(2.0)  # the model's word today, if the choice does not know it
    expected = "Timing has settled on winograd4, measured 1.50x" if measured else "winograd4 was chosen before"
    assert expected in row.why_not["im2col_gemm"]
    assert expected in row.why_not["native"]
    assert "by name" in row.why_not["reference"]


def test_native_settled_by_timing_is_as_fast_as_native(monkeypatch):
    use_fake(monkeypatch, "fft")
    for source, gain in (("verify", 1.0), ("model", None)):
        monkeypatch.setattr(resolve, "found_for", lambda *_, source=source: Choice("native", source, None, 1.0))
        (row,) = convselect.explain_problem(CONV3)
        assert (row.predicted_gain, row.measured_gain) == (1.0, gain)


# ---- trials ---------------------------------------------------------------------------------------------------------

X = torch.randn(2, 4, 20, 20)


@pytest.fixture
def race():
    with racing() as pool:
        yield pool


def until(rounds: int, layer: nn.Module) -> LiveTrial:
    """Calls until the layer's trial has this many rounds, or is over."""
    convselect.explain(layer, X)
    ((_, entry),) = resolve.choices.entries.items()
    found = entry.found
    while found.choice is None and found.trial.rounds < rounds:
        layer(X)
    return found


def test_an_open_trial_tells_how_it_stands(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        (row,) = convselect.explain(layer, X)
        # Nothing was timed: the prediction is called one, and is in no other column.
        assert (row.source, row.measured_gain, row.spread) == ("trial", None, None)
        assert row.predicted_gain == pytest.approx(PREDICTED[row.algorithm])
        assert (row.trial.rounds, row.trial.calls, row.trial.most_calls) == (0, 0, MOST_CALLS)
        assert row.trial.candidates == {SLOW: None, QUICK: None}
        assert row.trial.predicted == pytest.approx(PREDICTED)
        assert f"It is on trial; this one is predicted {PREDICTED[QUICK]:.2f}x." in row.why_not.values()
        trial = until(2, layer)
        found = convselect.explain(layer, X)
    (row,) = found
    assert (row.algorithm, row.source, row.rounds) == (QUICK, "trial", 2)
    assert row.trial.leader == QUICK
    assert (row.trial.rounds, row.trial.calls, row.trial.waiting) == (2, trial.trial.calls, False)
    assert row.trial.candidates == pytest.approx(GAINS)
    assert row.measured_gain == pytest.approx(GAINS[QUICK])
    assert row.spread == pytest.approx((GAINS[QUICK], GAINS[QUICK]))
    assert row.predicted_gain == pytest.approx(PREDICTED[QUICK])
    assert 0 < row.probability < 1
    assert row.why_not[SLOW] == (
        "Measured 0.83x (0.83 to 0.83) native's speed in 2 rounds so far, predicted 2.40x; winograd4 1.82x (1.82 to "
        "1.82)."
    )
    assert "compared with it" in row.why_not["native"]
    assert row.why_not["fft"] == "Others are on trial; this one is predicted 0.50x."
    calls = trial.trial.calls
    for told in (f"{QUICK} leads", f"trial: 2 rounds, {calls} of 60 calls", "2.00x", "1.82x (1.82 to 1.82)"):
        assert told in str(found)
    assert f"is on trial: {QUICK} leads after 2 rounds, {calls} of 60 calls" in found.details()
    said = found.summary()["forward"]
    assert (said["on_trial"], said["predicted"], said["measured"]) == (1, pytest.approx(2.0), None)
    plain = json.loads(found.to_json())["rows"][0]
    assert plain["trial"]["leader"] == QUICK
    assert plain["trial"]["candidates"] == pytest.approx(GAINS)
    assert plain["spread"] == pytest.approx([GAINS[QUICK]] * 2)


def test_a_settled_trial_has_both_gains(race):
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        until(1, layer)
        race[QUICK].delays = [100.0]  # one round is slower
        trial = until(99, layer)
        found = convselect.explain(layer, X)
    assert trial.choice is not None
    (row,) = found
    assert (row.algorithm, row.source, row.trial) == (QUICK, "verify", None)
    assert row.predicted_gain == pytest.approx(2.0)
    assert row.measured_gain == pytest.approx(GAINS[QUICK])
    assert row.rounds == trial.trial.rounds
    low, high = row.spread
    assert low < high == pytest.approx(GAINS[QUICK])
    # The trial has taught the model something since, but what it had predicted stays.
    assert row.predicted[SLOW] == pytest.approx(PREDICTED[SLOW])
    assert f"measured 1.82x ({low:.2f} to 1.82)" in row.why_not["native"]
    assert "predicted 2.40x" in row.why_not[SLOW]
    assert f"1.82x ({low:.2f} to 1.82)" in str(found)
    assert "2.00x" in str(found)
    assert found.summary()["forward"]["measured"] == pytest.approx(GAINS[QUICK])


def test_native_that_won_a_trial_shows_what_it_was_compared_with(race):
    race[QUICK].us = 1400.0
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        until(99, layer)
        (row,) = convselect.explain(layer, X)
    assert (row.algorithm, row.source, row.predicted_gain, row.measured_gain) == ("native", "verify", 1.0, 1.0)
    for name in (QUICK, SLOW):
        assert row.why_not[name].startswith("Measured 0.")
        assert row.why_not[name].endswith(f"predicted {PREDICTED[name]:.2f}x.")


def test_explaining_changes_no_trial(race):
    model = nn.Sequential(convselect.SelectedConv2d(4, 4, 3, padding=1, policy="verify"))
    with torch.no_grad():
        trial = until(1, model)
        before = (trial.trial.calls, trial.trial.turns, trial.trial.rounds, trial.trial.measured())
        texts = {convselect.explain(model, X).to_json() for _ in range(5)}
    assert len(texts) == 1
    assert before == (trial.trial.calls, trial.trial.turns, trial.trial.rounds, trial.trial.measured())


def test_a_trial_that_has_to_wait_says_so(race, monkeypatch):
    monkeypatch.setattr(resolve, "FAVOURITE", 9.0)  # native has the first call
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        layer(X)
        (row,) = convselect.explain(layer, X)
        assert (row.trial.leader, row.trial.waiting) == (SLOW, False)
        monkeypatch.setattr(type(live_trial.account), "allows", lambda self, *_: False)
        found = convselect.explain(layer, X)
        (row,) = found
        assert (row.algorithm, row.source, row.trial.waiting) == ("native", "trial", True)
        assert "trial: 0 rounds, 1 of 60 calls, waiting" in str(found)
        assert "native runs, untimed" in found.details()
        trial = until(99, layer)
        (row,) = convselect.explain(layer, X)
    assert trial.choice.algorithm == "native"
    assert (row.algorithm, row.source, row.trial, row.measured_gain) == ("native", "model", None, None)
    assert row.why_not[QUICK] == (
        "The trial could not tell (no trial could begin in 60 calls), and native runs; this one was predicted 2.00x."
    )


def test_what_gave_a_wrong_result_is_named(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    monkeypatch.setitem(budgets.distrusted, "winograd4", "winograd4 gave a wrong result in this process.")
    found = convselect.explain_problem(CONV3)
    assert found.rows[0].algorithm == "native"
    assert "not winograd4: winograd4 gave a wrong result in this process." in found.details()


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
