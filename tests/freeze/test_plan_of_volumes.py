"""Planning networks whose layers take long: what is not timed, or not finished, since it cannot be the best."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import convselect
from convselect.base.settings import Settings
from convselect.base.timing import Timing
from convselect.freeze import layer as freeze_layer
from convselect.freeze import plan
from convselect.freeze.layer import Search
from convselect.freeze.remembered import Remembered


def _search(took_us, other_us):
    return Search(Settings(), Remembered(), True, lambda: None, took_us=took_us, other_us=other_us)


def test_a_layout_is_behind_if_it_could_not_catch_up():
    other = [1e4, 1e4, 1e4, 1e4]
    assert not _search([1e5], None).is_behind
    assert not _search([1.5e4, 1.5e4], other).is_behind  # 30 and 10 ms to come, of 44
    assert _search([2e4, 2e4], other).is_behind
    assert not _search([1e4] * 4, other).is_behind
    assert not _search([], other).is_behind
    assert not _search([200.0, 200.0], [100.0] * 4).is_behind  # too short to tell


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1)).eval()


@pytest.mark.parametrize(("factor", "layouts"), [(3.0, 1), (1.0, 2)])
def test_the_other_layout_is_given_up_where_it_is_behind(model, monkeypatch, factor, layouts):
    seen, finished = [], []
    choose, choose_each = freeze_layer.FrozenLayer.choose, plan._choose_each

    def chosen(self, x, residual, layout, search, largest):
        found = choose(self, x, residual, layout, search, largest)
        seen.append(layout)
        search.took_us[-1] = 2e4 * (factor if layout == "channels_last" else 1.0)
        return found

    def walked(program, tensors, search, layout, limits):
        found = choose_each(program, tensors, search, layout, limits)
        finished.append(found is not None)
        return found

    monkeypatch.setattr(freeze_layer.FrozenLayer, "choose", chosen)
    monkeypatch.setattr(plan, "_choose_each", walked)
    x = torch.randn(1, 3, 4, 8, 8)
    with torch.no_grad():
        want = model(x)
        frozen = convselect.freeze(model)
        frozen(x)
        assert torch.allclose(frozen(x), want, atol=1e-5)
    assert sum(finished) == layouts
    assert seen.count("contiguous") == 2
    assert seen.count("channels_last") == (1 if layouts == 1 else 2)


@pytest.mark.parametrize(("eager_us", "rounds"), [(9000.0, 0), (3000.0, 9), (500.0, 9)])
def test_a_model_that_is_clearly_slower_is_timed_once(monkeypatch, eager_us, rounds):
    counts = {}

    def timed(functions, count, deadline_s):
        for name in functions:
            counts[name] = count
        return {name: Timing((2500.0 if name == "contiguous" else 3000.0,)) for name in functions}

    monkeypatch.setattr(plan, "timed", timed)
    monkeypatch.setattr(plan, "timed_once", lambda function: (function(), eager_us))
    found = plan._compared({"eager": lambda: None, "contiguous": lambda: None})
    assert counts.get("eager", 0) == rounds
    assert found["contiguous"].median_us == 2500.0
    assert found["eager"].median_us == (eager_us if not rounds else 3000.0)
