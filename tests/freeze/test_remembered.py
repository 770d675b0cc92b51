"""Choices that outlive a model: a later plan for the same measures nothing, and checks all the same."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import CONV, Residual, conv_bn, distance, eager, randomised
from torch import nn

import convselect
from convselect.base.problem import conv_problem
from convselect.base.settings import current
from convselect.freeze import candidates, plan, residual
from convselect.freeze import layer as freeze_layer
from convselect.freeze.remembered import Key, Remembered
from convselect.store import process


@pytest.fixture
def store(tmp_path):
    process.configure(tmp_path / "store.sqlite")
    return tmp_path / "store.sqlite"


def refuse(*_, **__):
    raise AssertionError("measured again")


@pytest.fixture
def model():
    return randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), Residual(), nn.Conv2d(8, 4, 1)))


def test_a_second_plan_measures_nothing(model, store, monkeypatch):
    x = torch.randn(1, 3, 24, 24)
    first = convselect.summary(convselect.freeze(copy.deepcopy(model), x)).inputs[0]
    process.flush()
    process.configure(store)  # as a process that has chosen nothing yet
    for module, name in ((freeze_layer, "fastest"), (plan, "timed"), (residual, "fastest"), (candidates, "timed")):
        monkeypatch.setattr(module, name, refuse)
    second = convselect.summary(convselect.freeze(model, x)).inputs[0]
    assert (second.layout, second.chosen) == (first.layout, first.chosen if first.layout else {})
    assert distance(model(x), eager(model, x)) < CONV


def test_a_choice_that_does_not_exist_any_more_is_made_again(model, monkeypatch):
    x = torch.randn(1, 3, 24, 24)
    monkeypatch.setattr(Remembered, "get", lambda self, key: "of another version")
    row = convselect.summary(convselect.freeze(model, x)).inputs[0]
    assert "of another version" not in {row.layout, *row.chosen.values()}
    assert distance(model(x), eager(model, x)) < CONV


def test_other_budgets_and_sizes_are_other_choices():
    remembered, settings = Remembered(), current()
    problem = conv_problem(1, 8, 9, 9, 8, 3, 3, padding=1)
    key = Key("conv", problem, "channels_last relu residual", settings)
    assert remembered.get(key) is None
    remembered.put(key, "direct")
    assert remembered.get(key) == "direct"
    assert remembered.get(key._replace(form="channels_last None residual")) is None
    with convselect.use(precision="exact"):
        assert remembered.get(key._replace(settings=current())) is None
    other = key._replace(problem=problem._replace(H=30, W=30))
    assert remembered.get(other) is None
    assert remembered.for_any_size(other) == "direct"
