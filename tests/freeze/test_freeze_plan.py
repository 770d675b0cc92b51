"""Plans: shapes, layouts, dtypes and budgets; every layout and candidate computes the model's own result."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, Residual, conv_bn, distance, eager, frozen_outputs, randomised, use_forced
from torch import nn
from torch.utils import _pytree as pytree

import convselect
from convselect.base.timing import Timing
from convselect.freeze import forward as freezing
from convselect.freeze import layer as freeze_layer
from convselect.freeze import plan
from convselect.freeze.kernel import STEM


def test_another_size_and_batch_plan_anew():
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), nn.MaxPool2d(2), conv_bn(8, 8)))
    convselect.freeze(model, torch.randn(1, 3, 16, 16))
    for shape in ((1, 3, 20, 12), (3, 3, 16, 16), (1, 3, 16, 16)):
        x = torch.randn(shape)
        for _ in range(2):
            assert distance(model(x), eager(model, x)) < CONV
    assert len(convselect.summary(model).inputs) == 3


@use_forced
def test_many_sizes_stop_measuring_and_stay_right():
    model = randomised(nn.Sequential(conv_bn(2, 4, activation=nn.ReLU()), conv_bn(4, 4)))
    convselect.freeze(model)
    for size in range(4, 30):
        x = torch.randn(1, 2, size, size)
        model(x)
        assert distance(model(x), eager(model, x)) < CONV
    assert 1 < len(convselect.summary(model).inputs) <= 16  # bounded


@use_forced
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_layouts_and_dtypes(dtype, memory_format):
    model = randomised(nn.Sequential(conv_bn(4, 8, activation=nn.ReLU()), Residual(), nn.Conv2d(8, 4, 1))).to(dtype)
    x = torch.randn(2, 4, 9, 10).to(dtype).contiguous(memory_format=memory_format)
    want, got, _ = frozen_outputs(model, x)
    bound = {torch.float64: 1e-13, torch.float32: CONV, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    assert distance(got, want) < bound
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())


@use_forced
def test_strided_input():
    model = randomised(nn.Sequential(conv_bn(4, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    whole = torch.randn(2, 8, 9, 20)
    for x in (whole[:, ::2, :, 3:12], whole.transpose(2, 3)[:, :4], whole[:, :1].expand(2, 4, 9, 20)):
        want, got, _ = frozen_outputs(model, x)
        assert distance(got, want) < CONV
        convselect.unfreeze(model)


@use_forced
def test_nonfinite_values_stay_where_they_belong():
    model = randomised(nn.Sequential(conv_bn(16, 16, activation=nn.ReLU()), conv_bn(16, 16)))
    x = torch.randn(1, 16, 24, 24)
    convselect.freeze(model, x)
    x[0, 3, 5, 6] = float("nan")
    want = eager(model, x)
    assert torch.equal(model(x).isnan(), want.isnan())
    x[0, 3, 5, 6] = 1.0
    assert distance(model(x), eager(model, x)) < CONV
    with torch.no_grad():
        model[0][0].weight[2, 0, 0, 0] = float("nan")
    assert torch.equal(model(x).isnan(), eager(model, x).isnan())
    with torch.no_grad():
        model[0][0].weight[2, 0, 0, 0] = 0.5
    assert distance(model(x), eager(model, x)) < CONV


@pytest.mark.parametrize("precision", ["exact", "native", "fast"])
def test_precision_budget(precision):
    model = randomised(nn.Sequential(conv_bn(16, 16), conv_bn(16, 16)))
    x = torch.randn(1, 16, 28, 28)
    with convselect.use(precision=precision):
        report = convselect.summary(convselect.freeze(model, x))
        assert distance(model(x), eager(model, x)) < CONV
    names = {name for row in report.inputs for name in row.chosen.values()}
    # In float32 all of Winograd in C is within "native", so that only "exact" keeps something out.
    assert precision != "exact" or not any("winograd" in name for name in names)


def test_errors_are_pytorchs():
    model = randomised(nn.Sequential(conv_bn(3, 4)))
    convselect.freeze(model, torch.randn(1, 3, 8, 8))
    for bad in (torch.randn(1, 5, 8, 8), torch.randn(3), torch.zeros(1, 3, 8, 8, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            model(bad)
    with pytest.raises(TypeError):
        model()


def test_thread_counts():
    model = randomised(Residual())
    x = torch.randn(1, 8, 12, 12)
    convselect.freeze(model, x)
    torch.set_num_threads(2)
    model(x)
    assert distance(model(x), eager(model, x)) < CONV
    assert len(convselect.summary(model).inputs) == 2


def test_a_stem_reads_the_image_where_it_lies(monkeypatch):
    def timed(functions, *_):
        return {name: Timing((1.0 if name == "channels_last" else 2.0,)) for name in functions}

    def fastest(functions, *_):
        return next(name for name in (STEM.label, "native") if name in functions)

    monkeypatch.setattr(plan, "timed", timed)
    monkeypatch.setattr(freeze_layer, "fastest", fastest)
    model = randomised(nn.Sequential(conv_bn(3, 20, 3, activation=nn.ReLU(), stride=2), conv_bn(20, 8, 3)))
    x = torch.randn(2, 3, 21, 18)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert got.stride() == want.stride()
    assert report.inputs[0].chosen == {"0.0": STEM.label, "1.0": "native"}
    for other in (torch.randn(2, 3, 21, 18), x.contiguous(memory_format=torch.channels_last)):
        assert distance(model(other), eager(model, other)) < CONV


def test_constants_of_sizes_that_are_gone_are_dropped():
    model = randomised(SizedTable())
    convselect.freeze(model)
    registry = None
    for size in range(4, 30):
        x = torch.randn(1, 4, size, size)
        for _ in range(2):
            assert distance(model(x), eager(model, x)) < CONV
        registry = vars(model)["forward"]._registry
    assert len(registry.entries) <= 2 * 16


class SizedTable(nn.Module):
    """A table of parameters stretched to the size of the image."""

    def __init__(self):
        super().__init__()
        self.conv, self.table = nn.Conv2d(4, 4, 1), nn.Parameter(torch.randn(1, 4, 8, 8))

    def forward(self, x):
        return self.conv(x) + F.interpolate(self.table, x.shape[2:], mode="bilinear")


@use_forced
def test_weights_that_become_finite_are_frozen():
    model = randomised(nn.Sequential(conv_bn(8, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    x = torch.randn(1, 8, 12, 12)
    with torch.no_grad():
        model[0][0].weight[0, 0, 0, 0] = float("nan")
    convselect.freeze(model, x)
    assert torch.equal(model(x).isnan(), eager(model, x).isnan())
    with torch.no_grad():
        model[0][0].weight[0, 0, 0, 0] = 0.5
    for _ in range(2):
        assert distance(model(x), eager(model, x)) < CONV
    assert convselect.summary(model).inputs[0].chosen


@use_forced
def test_an_expanded_input_of_a_pointwise_operation():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mean = nn.Conv2d(3, 4, 3), nn.Parameter(torch.rand(3, 1, 1))

        def forward(self, x):
            return self.conv(torch.sigmoid(x) * x - self.mean)

    model = randomised(Shifted())
    x = torch.randn(1, 1, 9, 8).expand(2, 3, 9, 8)
    want, got, _ = frozen_outputs(model, x)
    assert distance(got, want) < CONV


def test_a_fault_in_planning_costs_speed_and_no_more(monkeypatch):
    """Whatever the reason: the parts are tried, and the result is the model's own."""
    model = randomised(nn.Sequential(conv_bn(8, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    make = freezing.make_plan

    def faulty(program, *rest):
        if len(program.layers) > 1:
            raise KeyError("relu_39")
        return make(program, *rest)

    monkeypatch.setattr(freezing, "make_plan", faulty)
    x = torch.randn(1, 8, 12, 12)
    with pytest.warns(UserWarning, match="relu_39"):
        convselect.freeze(model, x)
    report = convselect.summary(model)
    assert report.frozen == ("0", "1")
    assert "relu_39" in report.not_fused[""]
    assert distance(model(x), eager(model, x)) < CONV


def test_results_that_show_memory_of_the_plan_are_copies():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 8, 1)

        def forward(self, x):
            y = torch.sigmoid(self.conv(x)) * 2
            return y.flatten(1), y.chunk(2, 1), y[:, 3], y.permute(0, 2, 3, 1)

    model, x = randomised(Views()), torch.randn(2, 4, 5, 6)
    convselect.freeze(model, x)
    first = model(x)
    kept = copy.deepcopy(first)
    model(torch.randn(2, 4, 5, 6))
    for got, want in zip(pytree.tree_leaves(first), pytree.tree_leaves(kept), strict=True):
        assert torch.equal(got, want)


def test_memory_that_measuring_held_is_given_back(monkeypatch):
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    given_back = []
    monkeypatch.setattr(freezing._library, "give_back", lambda: given_back.append(1))
    x = torch.randn(1, 3, 12, 12)
    convselect.freeze(model, x)
    assert given_back
    given_back.clear()
    model(x)
    assert not given_back
