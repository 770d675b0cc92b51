"""What finishes a frozen layer's result if no kernel does, and what oneDNN calls it."""

from __future__ import annotations

import pytest
import torch
from activations import ACTIVATIONS, SLOPE

from convselect.base.timing import Timing
from convselect.freeze import candidates
from convselect.freeze.candidates import (
    ONEDNN_ACTIVATIONS,
    Candidate,
    agreeing,
    distance,
    fastest,
    finish,
    onednn_takes,
)
from convselect.kernels import _library
from convselect.kernels._contract import Grade


def test_every_activation_is_known():
    assert set(_library.ACTIVATIONS) == set(ACTIVATIONS) == {*ONEDNN_ACTIVATIONS, "leaky_relu"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finish(activation):
    y, residual = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    want = ACTIVATIONS[activation](y + residual)
    torch.testing.assert_close(finish(y, residual, activation, SLOPE), want)


def test_an_unknown_activation_is_refused():
    with pytest.raises(KeyError):
        finish(torch.zeros(1), None, "softmax")


@pytest.mark.skipif(not onednn_takes("float32"), reason="no oneDNN")
@pytest.mark.parametrize("activation", ONEDNN_ACTIVATIONS)
def test_onednn(activation):
    x, weight = 3 * torch.randn(5, 8), torch.randn(6, 8)
    got = torch.ops.mkldnn._linear_pointwise(x, weight, None, *ONEDNN_ACTIVATIONS[activation])
    torch.testing.assert_close(got, ACTIVATIONS[activation](x @ weight.T), rtol=1e-5, atol=1e-5)


def test_where_products_cancel_their_size_decides():
    """Two sums of 1,000 products that nearly cancel differ by much more than a unit of their result."""
    want = torch.full((4,), 1e-3)
    x = torch.zeros(1)

    def found(off, spread):
        candidate = Candidate("other", Grade.DIRECT, lambda *_: lambda x, residual: want + off)
        return bool(agreeing([candidate], x, None, want, lambda: spread))

    assert found(1e-9, 0.0)
    assert not found(2e-8, 0.0)
    assert found(2e-8, 1.0)
    assert not found(1e-5, 1.0)
    assert not found(float("nan"), 1e30)


def test_checks_say_how_long_a_call_took():
    x = torch.ones(1)
    took_us = {}
    right = Candidate("right", Grade.DIRECT, lambda *_: lambda x, residual: x)
    wrong = Candidate("wrong", Grade.DIRECT, lambda *_: lambda x, residual: x + 1)
    assert set(agreeing([right, wrong], x, None, x, took_us=took_us)) == {"right"} == set(took_us)
    assert took_us["right"] > 0


@pytest.fixture
def made_up(monkeypatch):
    """Clocks show what this dictionary says; returns it, and the rounds that were timed of each."""
    times_us, rounds = {}, {}

    def timed(functions, count, deadline_s, *, first=True):
        for name in functions:
            rounds.setdefault(name, []).append((count, first))
        return {name: Timing((times_us[name],)) for name in functions}

    monkeypatch.setattr(candidates, "timed", timed)
    return times_us, rounds


def _choose(times_us, took_us=None, handicaps=None):
    return fastest(dict.fromkeys(times_us), 15, 0.25, handicaps, took_us)


def test_of_long_calls_those_far_behind_are_not_timed(made_up):
    times_us, rounds = made_up
    times_us |= {"native": 9e4, "slow": 2.4e4, "near": 1.05e4, "best": 1e4}
    assert _choose(times_us, {"native": 9e4, "slow": 1.9e4, "near": 1.1e4, "best": 1.2e4}) == "best"
    assert "native" not in rounds
    assert len(rounds["slow"]) == 1  # near enough at first, with memory that was new
    assert len(rounds["near"]) == len(rounds["best"]) == 2
    assert sum(count for count, _ in rounds["best"]) <= 4
    assert not any(first for of in rounds.values() for _, first in of)


def test_a_long_call_without_rivals_is_not_timed(made_up):
    times_us, rounds = made_up
    times_us |= {"native": 9e4, "best": 1e4}
    assert _choose(times_us, dict(times_us)) == "best"
    assert rounds == {}


def test_the_least_of_all_times_counts(made_up):
    times_us, _ = made_up
    times_us |= {"a": 1.1e4, "b": 1.0e4}
    assert _choose(times_us, {"a": 0.9e4, "b": 1.2e4}) == "a"
    assert _choose(times_us, {"a": 0.9e4, "b": 1.2e4}, {"a": 1.3}) == "b"
    assert _choose(times_us, {"b": 1.2e4}) == "b"  # what was not timed before is


def test_short_calls_are_timed_as_often_as_ever(made_up):
    times_us, rounds = made_up
    times_us |= {"native": 900.0, "near": 105.0, "best": 100.0}
    assert _choose(times_us, {"native": 90.0, "near": 500.0, "best": 600.0}) == "best"
    assert rounds == {"native": [(2, True)], "near": [(2, True), (15, True)], "best": [(2, True), (15, True)]}
    assert _choose(times_us) == "best"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_distances(dtype):
    want = torch.randn(7, 300, dtype=torch.float64).to(dtype)
    got = (want.double() * (1 + 3e-2 * torch.rand(7, 300))).to(dtype)
    exact = float((got.double() - want.double()).norm() / want.double().norm())
    assert distance(got, want) == pytest.approx(exact, rel=1e-6)
    assert distance(got.float(), want) == pytest.approx(exact, rel=1e-6)
    assert distance(want, want) == 0.0
    assert distance(torch.full_like(want, torch.nan), want) == torch.inf == distance(want[1:], want)
    tiny = torch.full((3,), 1e-38, dtype=dtype)
    assert distance(2 * tiny, tiny) == pytest.approx(1.0, rel=1e-2)  # squares would be 0
    assert distance(tiny, 0 * tiny) == pytest.approx(float(tiny.double().norm()))
