"""Audits: one call in many of a settled choice is timed against native."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from race import X, on_trial

import convselect
from convselect.base import lru
from convselect.base.problem import conv_problem
from convselect.choice.choose import NATIVE, Choice
from convselect.eager import checks, resolve
from convselect.eager.plan import plans
from convselect.store import process


def test_an_audit_gives_up_what_has_become_slow(race):
    weight = torch.randn(4, 4, 3, 3)
    with convselect.use(audit=8), torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        (trial,) = on_trial()
        assert trial.choice.algorithm == "quick"
        natives = len(race[NATIVE].runs)
        for _ in range(80):
            convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) - natives == 10
        race["quick"].us = 1100.0
        for _ in range(8 * 40):
            convselect.conv2d(X, weight, padding=1)
        assert trial.choice.algorithm == NATIVE
        assert [plan.native for plan in plans.entries.values()] == [True]
        decision = process.look_up(trial.problem, convselect.base.settings.current().budgets)
        assert decision is not None
        assert decision.algorithm == NATIVE


def test_a_stored_choice_is_audited_as_well_and_none_without_asking(race):
    weight = torch.randn(4, 4, 3, 3)
    with torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        natives = len(race[NATIVE].runs)
        for _ in range(600):
            convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) == natives
        lru.clear()
        with convselect.use(audit=100):
            for _ in range(600):
                convselect.conv2d(X, weight, padding=1)
        assert len(race[NATIVE].runs) == natives + 6


def test_a_watched_choice_that_fails_is_native_for_that_call(race):
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    with convselect.use(audit=8), torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        original, calls = race["quick"].result, iter(range(10_000))

        def fails(*arguments):
            if next(calls) % 3 == 0:
                raise MemoryError
            return original(*arguments)

        race["quick"].result = fails
        for _ in range(40):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    (trial,) = on_trial()
    assert trial.choice.algorithm == "quick"


def test_an_audited_choice_keeps_its_parameters(race, monkeypatch):
    given = []
    original = race["quick"].run_checked

    def run_checked(a, b, problem, params=None, bias=None):
        given.append(params)
        return original(a, b, problem, None, bias)

    monkeypatch.setattr(race["quick"], "run_checked", run_checked)
    weight, problem = torch.randn(4, 4, 3, 3), conv_problem(2, 4, 10, 10, 4, 3, 3, padding=1)
    stored = Choice("quick", "store", {"tile": 3})
    monkeypatch.setattr(resolve, "_stored", lambda p, s: stored)
    with convselect.use(audit=4), torch.no_grad():
        for _ in range(12):
            convselect.conv2d(X, weight, padding=1)
        assert resolve.choice_for(problem, convselect.base.settings.current()) is stored
    assert given
    assert set(map(str, given)) == {"{'tile': 3}"}


def test_an_audited_choice_is_checked_like_others(race):
    """The call is repeated natively, and the algorithm is not chosen again."""
    weight = torch.randn(4, 4, 3, 3)
    expected = F.conv2d(X, weight, padding=1)
    with convselect.use(audit=8), torch.no_grad():
        for _ in range(60):
            convselect.conv2d(X, weight, padding=1)
        assert on_trial()[0].choice.algorithm == "quick"
        race["quick"].result = lambda a, b, problem, *_: torch.zeros(problem.result_shape)
        checks.due.left = 2
        for _ in range(2):
            convselect.conv2d(X, weight, padding=1)
        with pytest.warns(convselect.ConvselectWarning, match="quick is wrong on forward"):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
        runs = len(race["quick"].runs)
        for _ in range(60):
            assert torch.equal(convselect.conv2d(X, weight, padding=1), expected)
    assert len(race["quick"].runs) == runs
