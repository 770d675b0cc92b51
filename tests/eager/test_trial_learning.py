"""What a trial on real calls teaches: the next size of the same layer needs none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from race import on_trial

import convselect
from convselect.base import lru, settings
from convselect.base.problem import conv_problem
from convselect.choice.choose import NATIVE
from convselect.choice.trial import HOPELESS
from convselect.eager import learning, resolve
from convselect.model import loaded
from convselect.store import process

GAINS = {"quick": math.log(1000 / 325), "slow": math.log(1000 / 1525)}


def call(size: int, times: int = 60, **options) -> None:
    x, weight = torch.randn(2, 4, size, size), torch.randn(4, 4, 3, 3)
    expected = F.conv2d(x, weight, padding=1)
    with torch.no_grad(), convselect.use(**options):
        for _ in range(times):
            assert torch.equal(convselect.conv2d(x, weight, padding=1), expected)


def problem(size: int):
    return conv_problem(2, 4, size, size, 4, 3, 3, padding=1)


def estimate(name: str, size: int = 10):
    one = problem(size)
    learnt = learning.learnt_about(loaded.identity(one), "cpu")
    return learnt.estimate(name, one.direction, learning.layer_of(one))


def test_residuals_are_what_was_measured_less_what_the_model_alone_predicted(race):
    call(10)
    one = problem(10)
    learnt = learning.learnt_about(loaded.identity(one), "cpu")
    layer = learning.layer_of(one)
    for name in ("quick", "slow"):
        n, residual = learnt._by_direction["forward"][name].layers[layer]
        assert (n, residual) == (1, pytest.approx(GAINS[name] - 0.7))
    call(14, policy="auto")  # holds no trials, and learns nothing
    assert estimate("quick").of_layer == 1


def test_what_is_learnt_in_float64_corrects_nothing_in_float32(race):
    """In float64 predictions are derived with a wide doubt, so that what trials find is far from them."""
    ours, theirs = loaded.identity(problem(10)), loaded.identity(problem(10)._replace(dtype="float64"))
    assert ours
    assert theirs not in ("", ours)


def test_the_next_size_runs_what_the_first_one_found_without_a_trial(race):
    race.trusted = {"quick"}
    call(10)
    before = race.counts()
    call(14)
    call(20)
    assert race.counts() == before | {"quick": before["quick"] + 120}
    assert len(on_trial()) == 1
    choice = resolve.choice_for(problem(14), settings.current())
    assert (choice.algorithm, choice.source, choice.measured) == ("quick", "model", None)
    assert choice.predicted_gain == pytest.approx(math.exp(0.7 + estimate("quick").shift))
    assert 2.0 < choice.predicted_gain < 1000 / 325


def test_unless_it_has_not_passed_its_self_test(race):
    call(10)
    call(14)
    assert len(on_trial()) == 2
    # The second trial knows what the first has found.
    prior = on_trial()[1].trial.priors["quick"]
    assert prior.mean > 0.9
    assert prior.sd < 0.3


def test_the_next_size_is_native_without_a_trial_if_the_first_one_was(race):
    race["quick"].us = race["slow"].us = 2000.0
    race.trusted = {"quick", "slow"}
    call(10)
    call(14)
    natives = race.counts()
    call(20)
    assert race.counts() == natives  # aten's own calls
    assert len(on_trial()) == 1
    choice = resolve.choice_for(problem(20), settings.current())
    assert (choice.algorithm, choice.source) == (NATIVE, "model")


def test_equals_are_native_without_a_trial_after_a_few_sizes(race):
    race["quick"].us = race["slow"].us = 1000.0
    race.model.gain = 0.3
    trials = []
    for size in (8, 10, 12, 14, 16, 18):
        call(size)
        trials.append(len(on_trial()))
    assert trials[-1] <= 2
    assert trials[-3:] == [trials[-1]] * 3
    assert resolve.choice_for(problem(18), settings.current()).algorithm == NATIVE


def test_another_layer_has_a_trial_but_with_what_the_algorithm_has_shown(race):
    call(10)
    with torch.no_grad():
        convselect.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
    other = on_trial()[1].trial.priors
    assert other["quick"].mean > 0.7
    assert other.get("slow", other["quick"]).mean < other["quick"].mean + 1e-9
    assert next(iter(other)) == "quick"


def test_what_was_hopeless_at_its_first_call_counts_as_half_as_fast(race):
    race["slow"].us = 4100.0 + 200.0
    call(10)
    n, residual = (
        learning.learnt_about(loaded.identity(problem(10)), "cpu")
        ._by_direction["forward"]["slow"]
        .layers[learning.layer_of(problem(10))]
    )
    assert (n, residual) == (1, pytest.approx(HOPELESS - 0.7))


def test_later_processes_know_it(race):
    race.trusted = {"quick"}
    call(10)
    found = estimate("quick")
    assert found.of_layer == 1
    process.flush()
    lru.clear()
    assert estimate("quick") == found
    before = race.counts()
    call(14)
    assert race.counts() == before | {"quick": before["quick"] + 60}


def test_without_a_store_it_is_known_in_this_process(race):
    process.configure("off")
    race.trusted = {"quick"}
    call(10)
    call(14)
    assert len(on_trial()) == 1


def test_what_failed_for_memory_teaches_this_process_only(race):
    def fails(*_):
        raise MemoryError

    race["slow"].result = fails
    call(10)
    assert estimate("quick").of_layer == 1
    assert estimate("slow").of_layer == 0
    process.flush()
    lru.clear()
    assert estimate("quick").of_layer == 0


@pytest.mark.parametrize("options", [{"audit": 50}, {"disable": "slow"}])
def test_budgets_and_audits_learn_and_profit_as_well(race, options):
    race.trusted = {"quick"}
    call(10, **options)
    before = len(race["slow"].runs)
    call(14, **options)
    assert len(race["slow"].runs) == before
    found = [t for t in on_trial() if t.problem == problem(14)]
    if "audit" in options:  # watched
        assert [t.choice.algorithm for t in found] == ["quick"]
    else:
        assert found == []


def test_the_models_own_policy_and_deterministic_mode_do_not_use_it(race):
    race["quick"].us = race["slow"].us = 2000.0
    call(10)
    assert resolve.choice_for(problem(14), settings.current()).algorithm == NATIVE
    with convselect.use("auto") as used:
        assert resolve.choice_for(problem(14), used).predicted_gain == pytest.approx(math.exp(0.7))
    deterministic = problem(14)._replace(deterministic=True)
    assert resolve.choice_for(deterministic, settings.current()).predicted_gain == pytest.approx(math.exp(0.7))


def test_settling_does_not_load_the_model_again(race, monkeypatch):
    """It may have been released while nothing new came up: loading it takes milliseconds of somebody's call."""
    call(10, times=1)
    monkeypatch.setattr(loaded, "get_for", lambda _: pytest.fail("the model was asked for"))
    call(10)
    assert on_trial()[0].choice.algorithm == "quick"
