"""`model/margins.py`: margins from what predictions are off by inside networks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic import MACHINE, QUICK, synthetic, write

from convselect.base.problem import conv_problem
from convselect.measure.plan_cost import PLAN_COST_US
from convselect.measure.rows import Row
from convselect.model import margins, train
from convselect.model.inference import Predictor
from convselect.model.margins import FLOOR, MOST, NOTHING, UNKNOWN, Inside, Moments, fitted

POINTWISE = conv_problem(1, 64, 28, 28, 64, 1, 1)
DENSE = conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)


def measured(problem, algorithm, *off):
    """(calls in networks, predictions of 0.3) that differ by this."""
    return [Inside("net", problem, algorithm, 0.3 + r) for r in off], [0.3] * len(off)


def test_where_nothing_was_measured_the_margin_is_that_for_all():
    assert NOTHING.margin() == UNKNOWN
    assert fitted([], [], {}) == {}


def test_moments_are_those_of_all_residuals_together():
    first, more = np.random.default_rng(0).normal(0.1, 0.3, (2, int(margins.PRIOR)))
    start = Moments(float(first.mean()), float(first.var()))
    together = np.concatenate([first, more])
    assert start.with_residuals(more.tolist()) == pytest.approx((together.mean(), together.var()))


def test_what_gains_in_networks_needs_less_and_only_there():
    found = fitted(*measured(POINTWISE, "direct", *[0.1, 0.14] * 20), {})
    assert found == {"forward contiguous 1x1": {"direct": FLOOR}}


def test_what_loses_in_networks_needs_more_everywhere():
    found = fitted(*measured(POINTWISE, "thin", *[-0.3, -0.4] * 20), {})
    here, elsewhere = found["forward contiguous 1x1"]["thin"], found["elsewhere"]["thin"]
    assert elsewhere > 2 * UNKNOWN
    assert here == pytest.approx(0.35, abs=0.05)  # such a call gains nothing
    assert fitted(*measured(POINTWISE, "thin", *[-9.0] * 400), {})["elsewhere"]["thin"] == MOST
    calls, said = measured(POINTWISE, "thin", -0.4, -0.4, -0.4)
    dense, said_of_dense = measured(DENSE, "direct", 0.0)
    assert fitted([*calls, *dense], [*said, *said_of_dense], {})["forward contiguous 3x3"]["thin"] > UNKNOWN


def test_the_margin_grows_with_the_spread():
    narrow, wide = ([0.0, spread, -spread] * 10 for spread in (0.05, 0.4))
    low, high, unseen = (
        fitted(*measured(DENSE, "direct", *off), more)["forward contiguous 3x3"]["direct"]
        for off, more in ((narrow, {}), (wide, {}), (narrow, {"direct": 0.09}))
    )
    assert low < UNKNOWN
    assert low < unseen < high


def test_tile_sizes_of_winograds_algorithm_teach_of_each_other():
    of = fitted(*measured(DENSE, "winograd4", *[-0.3] * 20), {})["forward contiguous 3x3"]
    assert set(of) == {f"winograd{m}" for m in range(2, 8)}
    assert len(set(of.values())) == 1


def test_calls_with_large_predictions_or_none_say_nothing():
    calls = [Inside("net", DENSE, "direct", -1.0)] * 30
    assert fitted(calls, [2.0, float("nan")] * 15, {}) == {}
    threaded = [one._replace(problem=DENSE._replace(threads=2)) for one in calls]
    assert fitted(threaded, [0.3] * 30, {}) == {}


def test_predictions_for_unseen_networks_differ_where_leaving_native_is_in_question():
    own = np.array([[0.0, 0.1, 0.2], [0.0, 3.0, 0.2], [0.0, -2.0, 0.2]])
    held = own + np.array([0.0, 0.3, 0.1])
    times = np.ones((3, 3))
    times[1, 2] = np.nan
    found = margins.unseen(("native", "direct", "winograd4"), own, held, times)
    assert found["direct"] == pytest.approx(0.09)
    assert found["winograd"] == pytest.approx(0.01)


def test_gains_are_of_medians_of_the_same_network_with_the_cost_of_a_plan():
    def row(network, name, median, status="ok"):
        return Row(network, POINTWISE, name, 1, status, "thread", 1.0, median, 1.0, 1.0, 1.0, 9)

    rows = [row("a", "native", 300), row("a", "direct", 200), row("a", "im2col_gemm", 275), row("b", "direct", 100)]
    rows += [row("b", "native", 100), row("c", "direct", 1), row("a", "thin", 1, "wrong")]
    found = {(one.network, one.algorithm): one.gain for one in margins.from_rows(rows)}
    cost = PLAN_COST_US[POINTWISE.direction]
    assert found == pytest.approx({
        ("a", "direct"): math.log(1.5), ("a", "im2col_gemm"): math.log(300 / (275 + cost)), ("b", "direct"): 0.0,
    })  # fmt: skip


@pytest.mark.slow
def test_training_fits_margins_to_times_within_networks(tmp_path):
    times = write(tmp_path / "times.csv", synthetic(150))
    inside = []
    for i in range(12):  # where the times of single convolutions say 1.6, networks show 0.8
        problem = conv_problem(1, 32 + 8 * i, 28, 28, 64, 1, 1)
        for name, us in (("native", 800.0), ("gemm", 1000.0 - PLAN_COST_US[problem.direction])):
            inside.append(Row("alexnet_0", problem, name, 1, "ok", "thread", us, us, us, us, us, 9))
    inside = write(tmp_path / "inside.csv", inside)
    card = train.train([times], "cpu-x86-avx2", tmp_path, QUICK, n_folds=2, in_networks=[inside])
    assert card.margins["elsewhere"]["gemm"] > UNKNOWN
    assert card.data["in_networks"] == {"files": ["inside.csv"], "calls": 12}
    held_out = card.figures["held_out"]
    assert held_out["one_margin"]["native_kept_share"] < held_out["overall"]["native_kept_share"]
    said = Predictor.load(tmp_path / "cpu-x86-avx2.npz").predict(conv_problem(1, 64, 28, 28, 64, 1, 1))
    assert said.margin_of("gemm") == card.margins["forward contiguous 1x1"]["gemm"] > said.margin_of("tiles")
    other = write(tmp_path / "other.csv", synthetic(5), {**MACHINE, "family": "cpu-x86-avx512"})
    with pytest.raises(ValueError, match="not on cpu-x86-avx2"):
        train.train([times], "cpu-x86-avx2", tmp_path, QUICK, n_folds=2, in_networks=[other])
