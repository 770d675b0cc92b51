"""The choice as a pure function: no tensor, no clock, no machine."""

from __future__ import annotations

import itertools
import math

import pytest
from fake_model import FakePredictor

from convselect.base import settings
from convselect.base.problem import Direction, conv_problem
from convselect.base.settings import _intern
from convselect.choice import budgets
from convselect.choice.budgets import refusal
from convselect.choice.choose import Choice, choose, forced, nominees
from convselect.kernels._contract import Grade, NotApplicable
from convselect.kernels.native import Native
from convselect.kernels.pool import BY_NAME

AUTO = _intern("auto", "native", 2**30)
CONV3 = conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)
CONV1 = conv_problem(1, 64, 56, 56, 64, 1, 1)


def test_without_anything_to_go_by_it_is_native():
    assert choose(CONV3, BY_NAME, AUTO) == Choice("native", "fallback")

    class Silent:
        def predict(self, problem):
            return None

    assert choose(CONV3, BY_NAME, AUTO, predictor=Silent()) == Choice("native", "fallback")


def test_the_model_is_masked_after_ranking():
    choice = choose(CONV1, BY_NAME, AUTO, predictor=FakePredictor("winograd4", "fft", "im2col_gemm"))
    assert choice.algorithm == "im2col_gemm"  # the first two cannot do 1x1
    assert choice.source == "model"
    assert choice.predicted_gain == pytest.approx(2.0)


def test_a_gain_within_the_margin_is_not_worth_leaving_native():
    for gain, expected in ((1.05, "native"), (1.2, "im2col_gemm")):
        choice = choose(CONV3, BY_NAME, AUTO, predictor=FakePredictor("im2col_gemm", gain=gain))
        assert choice.algorithm == expected


def test_unknown_names_are_passed_over():
    class FromTheFuture(FakePredictor):
        pass

    predictor = FromTheFuture("winograd4")
    predictor._ranked.insert(0, "quantum")
    assert choose(CONV3, BY_NAME, AUTO, predictor=predictor).algorithm == "winograd4"


def test_budgets_are_applied():
    loose, double = FakePredictor("winograd6"), CONV3._replace(dtype="float64")
    assert BY_NAME["winograd6"].error_grade(double) == Grade.LOOSE
    assert choose(double, BY_NAME, AUTO, predictor=loose).algorithm == "native"
    assert choose(double, BY_NAME, _intern("auto", "fast", 2**30), predictor=loose).algorithm == "winograd6"
    assert choose(CONV3, BY_NAME, _intern("auto", "exact", 2**30), predictor=FakePredictor("winograd4")).algorithm == (
        "native"
    )
    assert choose(CONV3, BY_NAME, _intern("auto", "native", 1), predictor=FakePredictor("winograd4")).algorithm == (
        "native"
    )
    assert "MiB" in (refusal(BY_NAME["winograd4"], CONV3, _intern("auto", "native", 1)) or "")
    # Large tiles are for those who ask for speed: in deep networks their errors are multiplied.
    ranking = FakePredictor("winograd7", "winograd6", "winograd5")
    assert choose(CONV3, BY_NAME, AUTO, predictor=ranking).algorithm == "winograd5"
    assert choose(CONV3, BY_NAME, _intern("auto", "fast", 2**30), predictor=ranking).algorithm == "winograd7"


def test_store_then_model():
    stored = Choice("winograd2", "store")
    arguments = dict(predictor=FakePredictor("winograd4"))
    assert choose(CONV3, BY_NAME, AUTO, store=lambda p: stored, **arguments) is stored
    assert choose(CONV3, BY_NAME, AUTO, store=lambda p: None, **arguments).source == "model"


def test_a_stored_choice_that_no_longer_holds_is_ignored():
    for gone in (Choice("quantum", "store"), Choice("winograd4", "store"), Choice("reference", "store")):
        assert choose(CONV1, BY_NAME, AUTO, store=lambda p, c=gone: c).algorithm == "native"


def test_forced():
    used = _intern("winograd4", "exact", 0)  # a request is a request: budgets bind the automatic choice
    assert choose(CONV3, BY_NAME, used) == Choice("winograd4", "forced")
    with pytest.raises(NotApplicable) as error:
        choose(CONV1, BY_NAME, used)
    assert BY_NAME["winograd4"].why_not(CONV1) in str(error.value)
    with pytest.raises(ValueError, match=r"unknown policy 'winograd1'.*winograd4"):
        choose(CONV3, BY_NAME, _intern("winograd1", "native", 0))


def test_same_as_native_is_skipped_automatically_and_runs_when_forced():
    predictor = FakePredictor("native_contiguous", "im2col_gemm")
    assert choose(CONV3, BY_NAME, AUTO, predictor=predictor).algorithm == "im2col_gemm"
    assert choose(CONV3, BY_NAME, _intern("native_contiguous", "native", 0)).algorithm == "native_contiguous"


def test_native_needs_no_budget():
    assert refusal(Native(), CONV3, _intern("auto", "exact", 0)) is None


def test_settings_are_interned_and_checked():
    with settings.use(policy="native") as first, settings.use(precision="fast") as second:
        assert (second.policy, second.precision) == ("native", "fast")
        assert settings.current() is second
        with settings.use(precision="native") as third:
            assert third is first
    assert settings.current().policy == "auto"
    with pytest.raises(ValueError, match="precision must be one of"), settings.use(precision="sloppy"):
        pass
    with pytest.raises(ValueError, match="negative"), settings.use(workspace_bytes=-1):
        pass


def test_process_defaults():
    before = settings.current()
    try:
        settings.set_defaults(precision="exact")
        assert settings.current().precision == "exact"
        with settings.use(precision="fast"):
            assert settings.current().precision == "fast"
    finally:
        settings.set_defaults(precision=before.precision)
    assert settings.current() is before


def test_log_gain_is_a_natural_logarithm():
    assert FakePredictor("fft").predict(CONV3).log_gain("fft") == pytest.approx(math.log(2))


def test_nominees_are_near_the_best_that_may_run_here():
    gains = {"fft": 2.0, "winograd4": 1.0, "direct": 0.9, "im2col_gemm": 0.85, "winograd2": 0.5, "native": 0.0}

    class Prediction:
        ranked = sorted(gains, key=lambda name: -gains[name])

        def log_gain(self, name):
            return gains[name]

    def found(**budgets):
        with settings.use(**budgets) as used:
            return nominees(CONV3, BY_NAME, used, Prediction())

    # fft does not pay for kernels this small: what may not run is no reason to leave out the next best.
    first = "fft" if refusal(BY_NAME["fft"], CONV3, AUTO) is None else "winograd4"
    assert found()[0] == first
    assert found(disable="fft") == ["winograd4", "direct", "im2col_gemm"]
    assert found(disable="fft,winograd4") == ["direct", "im2col_gemm"]
    gains.update(dict.fromkeys(gains, -0.2))
    assert found(disable="fft") == []


# ---- error has a price ----------------------------------------------------------------------------------------------


def test_no_transform_for_what_takes_a_few_microseconds():
    """Sizes of PyTorch's own tests of gradients, whose tolerance is a few units in the last place."""
    used = AUTO
    for size, batch, padding in itertools.product((6, 7), (1, 2), (0, 1, 2)):
        for direction in Direction:
            small = conv_problem(batch, 2, size, size, 3, 3, 3, padding=padding, direction=direction)
            found = choose(small, BY_NAME, used, predictor=FakePredictor("winograd4", "winograd2", "fft", "direct"))
            assert BY_NAME[found.algorithm].direct_sums
            assert "rounding errors" in refusal(BY_NAME["winograd4"], small, used)
    assert forced(small, "winograd4", BY_NAME).algorithm == "winograd4"
    larger = small._replace(N=16)
    assert larger.flops >= budgets.LEAST_FLOPS
    assert choose(larger, BY_NAME, used, predictor=FakePredictor("winograd4")).algorithm == "winograd4"
