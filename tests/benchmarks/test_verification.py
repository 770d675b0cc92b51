"""benchmarks.verification: who is nominated by the model and by a lying one, on times that are invented or few."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("rich")

from benchmarks import _real_trials
from benchmarks.verification import LIE, figures, honest, lying, trial_of, trials
from convselect.base.problem import conv_problem
from convselect.choice.choose import NOMINATED
from convselect.choice.outcome import Prior
from convselect.choice.trial import NATIVE
from convselect.eager.resolve import PRIOR_SD

NAMES = (NATIVE, "a", "b", "c", "d")
TIMES = np.array([100.0, 50.0, 60.0, 400.0, np.nan])
GAINS = np.array([0.0, 0.6, 0.45, 0.2, 0.9])


def test_candidates_are_those_near_the_best_with_what_is_predicted():
    assert honest(GAINS, TIMES) == {1: 0.6, 2: 0.45}
    assert honest(-GAINS, TIMES) == {}
    assert list(lying(GAINS, TIMES).items()) == [(3, LIE), (2, LIE), (1, LIE)]
    assert len(lying(np.zeros(9), np.arange(1.0, 10.0))) == NOMINATED
    assert math.exp(LIE) == pytest.approx(3)


def test_trials_begin_with_predictions_and_a_favourite():
    trial = trial_of({"a": 0.6, "b": 0.45}, seed=1)
    assert trial.priors == {"a": Prior(0.6, PRIOR_SD), "b": Prior(0.45, PRIOR_SD)}
    assert trial.turn() == "a"
    assert trial_of({"a": 0.1}).turn() == NATIVE
    assert trial_of({}).outcome is not None


@pytest.mark.parametrize(("nominate", "least"), [(honest, 0.97), (lying, 0.79)])
def test_replayed_trials(nominate, least):
    table = SimpleNamespace(problems=[None] * 20, names=NAMES)
    found = trials(table, np.tile(TIMES, (20, 1)), np.tile(GAINS, (20, 1)), nominate, 0.03, 0.0)
    assert found["settled"] == 1.0
    assert found["slower > 2 %"] == 0.0
    assert found["of oracle"] >= least  # the liar's three have both of the good ones
    assert found["turns"] < 30


def test_figures_of_what_is_used():
    found = figures(np.array([0, 1, 3]), np.tile(TIMES, (3, 1)))
    assert found["of oracle"] == pytest.approx((0.5 + 1 + 0.125) / 3)
    assert (found["slower > 2 %"], found["worst"]) == (pytest.approx(1 / 3), 4.0)


def test_trials_on_real_calls(monkeypatch, tmp_path):
    tiny = [conv_problem(1, 4, 8, 8, 4, 3, 3, padding=1), conv_problem(1, 8, 10, 10, 8, 1, 1)]
    monkeypatch.setattr(_real_trials, "read_problems", lambda path: tiny)
    found = _real_trials.really(tmp_path / "none.csv", 2)
    assert found.pop("problems") == {"count": 2.0}
    assert set(found) == {"verify", "verify, lying model"}
    for row in found.values():
        assert row["settled"] == 1.0
        assert row["turns"] <= 60
