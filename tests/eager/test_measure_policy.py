"""Policy "measure": everything is timed before the first call."""

from __future__ import annotations

import pytest
import torch

import convselect
from convselect.base import lru
from convselect.base.problem import Direction, conv_problem
from convselect.choice.choose import NATIVE
from convselect.eager import measured, resolve
from convselect.kernels.pool import BY_NAME
from convselect.store import process


def test_measure_decides_before_the_first_call_in_every_direction(store, monkeypatch):
    asked = []
    original = measured.measured
    monkeypatch.setattr(measured, "measured", lambda p, s: asked.append(p.direction) or original(p, s))
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1, policy="measure")
    # In the layout that y has: if forward is native, as on some machines, gradients are asked for by that one.
    grad = torch.randn(1, 8, 14, 14)
    for _ in range(3):
        layer(torch.randn(1, 8, 14, 14, requires_grad=True)).backward(grad)
    assert sorted(asked) == sorted(Direction)
    sources = {entry.found.source for entry in resolve.choices.entries.values()}
    assert sources == {"measure"}
    # Another process finds it in the store.
    process.flush()
    lru.clear()
    monkeypatch.setattr("convselect.measure.measure.measure_problem", lambda *_, **__: pytest.fail("measured again"))
    layer(torch.randn(1, 8, 14, 14, requires_grad=True)).backward(grad)
    assert {entry.found.source for entry in resolve.choices.entries.values()} == {"store"}


def test_measure_never_takes_a_wrong_algorithm(store, monkeypatch):
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)

    def wrong(a, b, problem, params=None):
        return torch.zeros(problem.result_shape)

    for name in ("winograd2", "winograd4", "direct", "im2col_gemm"):
        monkeypatch.setattr(BY_NAME[name], "run", wrong)
    with convselect.use("measure") as used:
        found = resolve.eager_choice(problem, used)
    assert found.source == "measure"
    assert found.algorithm not in ("winograd2", "winograd4", "direct", "im2col_gemm")


def test_measure_respects_budgets_and_keeps_out_of_deterministic_mode_graphs_and_modes(store):
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)
    with convselect.use("measure", precision="exact", workspace_bytes=0, disable="direct") as used:
        choice = resolve.eager_choice(problem, used)
        assert choose_grade(choice.algorithm, problem)
        assert choice.algorithm != "direct"
        deterministic = resolve.eager_choice(problem._replace(deterministic=True), used)
        assert deterministic.source in ("model", "fallback")
        assert resolve.choice_for(problem._replace(N=2), used).source in ("model", "fallback")


def choose_grade(name: str, problem) -> bool:
    return name == NATIVE or BY_NAME[name].error_grade(problem) == 0


def test_measure_without_memory_is_the_models_choice_for_now(store, monkeypatch):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr("convselect.measure.measure.measure_problem", short)
    problem = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)
    with convselect.use("measure") as used:
        assert resolve.eager_choice(problem, used).source in ("model", "fallback")
    monkeypatch.undo()
    with convselect.use("measure") as used:
        assert resolve.eager_choice(problem, used).source == "measure"
