"""`freeze`: the same outputs as the model in evaluation mode, no stale weight, nothing left behind by `unfreeze`."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_model import use_fake
from torch import nn

import convselect
from convselect.demo.architectures import ARCHITECTURES, calibrate_batch_norm, he_initialise
from convselect.freeze import layer as freeze_layer
from convselect.freeze import plan, residual
from convselect.freeze.capture import ConvChain
from convselect.freeze.conv import FrozenConv
from convselect.freeze.watch import Watch
from convselect.kernels import _library
from convselect.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.timing import Timing

TOLERANCE = 2e-4  # relative L2 over a whole network of up to 53 convolutions, each within 1e-5
CONV = 2e-5  # over one or two convolutions


def distance(got, want):
    return (torch.linalg.vector_norm(got.double() - want.double()) / torch.linalg.vector_norm(want.double())).item()


def randomised(model, seed=0):
    """In evaluation mode, with weights, statistics and affine parameters that make every folded term matter."""
    generator = torch.Generator().manual_seed(seed)
    he_initialise(model, seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for t, low, high in ((module.running_mean, -0.3, 0.3), (module.running_var, 0.5, 2.0)):
                    t.copy_(torch.rand(t.shape, generator=generator) * (high - low) + low)
                if module.affine:
                    module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
                    module.bias.copy_(torch.rand(module.bias.shape, generator=generator) - 0.5)
            elif isinstance(module, nn.Conv2d) and module.bias is not None:
                module.bias.copy_(torch.rand(module.bias.shape, generator=generator) - 0.5)
    return model.eval()


def eager(model, *args):
    """What the model computes by itself, nothing in it frozen."""
    twin = copy.deepcopy(model)
    convselect.unfreeze(twin)
    with torch.no_grad():
        return twin(*args)


KERNELS = ("winograd4", "winograd6", "winograd2", "depthwise", "grouped", "direct")
PREFERENCES = {
    "nchw kernels": (CONTIGUOUS, (*KERNELS, "onednn_packed")),
    "nhwc kernels": (CHANNELS_LAST, (*KERNELS, "onednn_packed")),
    "nhwc onednn": (CHANNELS_LAST, ("gemm", "onednn_packed")),
    "nchw native": (CONTIGUOUS, ()),
}


@pytest.fixture(params=PREFERENCES)
def forced(request, monkeypatch):
    """Nothing is measured: the layout and the candidates are these, so that each is really what runs."""
    layout, names = PREFERENCES[request.param]

    def timed(functions, rounds, deadline_s):
        return {name: Timing((1.0 if name == layout else 2.0,)) for name in functions}

    def fastest(functions, rounds, deadline_s, handicaps=None):
        return next((name for name in names if name in functions), "native")

    monkeypatch.setattr(plan, "timed", timed)
    monkeypatch.setattr(freeze_layer, "fastest", fastest)
    monkeypatch.setattr(residual, "fastest", lambda *_: "block" if "direct" in names else "apart")
    return layout


needs_library = pytest.mark.skipif(not _library.available(), reason="there is no C library")
use_forced = pytest.mark.usefixtures("forced")


def conv_bn(c_in, c_out, kernel=3, activation=None, **kwargs):
    layers = [nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2, **kwargs), nn.BatchNorm2d(c_out)]
    return nn.Sequential(*layers, *([activation] if activation is not None else []))


class Residual(nn.Module):
    """activation(body(x) + shortcut(x)), in several spellings."""

    def __init__(self, how="add", activation="relu"):
        super().__init__()
        self.body = nn.Sequential(conv_bn(8, 8, activation=nn.ReLU(inplace=True)), conv_bn(8, 8))
        self.shortcut = conv_bn(8, 8, 1) if how == "shortcut" else nn.Identity()
        self.how, self.activation = how, activation

    def forward(self, x):
        y = self.body(x)
        if self.how == "iadd":
            y += x
        elif self.how == "method":
            y = y.add_(x)
        elif self.how == "reversed":
            y = x + y
        else:
            y = torch.add(y, self.shortcut(x))
        return {"relu": F.relu, "relu6": F.relu6, "silu": F.silu, "none": lambda t: t}[self.activation](y)


class Unpacked(nn.Module):
    def forward(self, values):
        return values[0]


def frozen_outputs(model, x):
    """(eager output, frozen output at the call that plans, frozen output after it)."""
    with torch.no_grad():
        want = model(x)
    report = convselect.freeze(model, x)
    return want, model(x), report


# ---- whole networks ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_networks_compute_the_same(name):
    model = he_initialise(ARCHITECTURES[name].build()).eval()
    calibrate_batch_norm(model, torch.randn(4, 3, 64, 64))
    keys, state = list(model.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(1, 3, 64, 64)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < TOLERANCE
    assert got.stride() == want.stride()
    assert not got.requires_grad
    assert report.parts == ("",)
    n_norms = sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert len(report.folded) == n_norms - (name == "replknet_small") * 11  # those that come before a convolution
    assert list(model.state_dict()) == keys
    assert convselect.unfreeze(model) == 1
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_another_size_and_batch_plan_anew():
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), nn.MaxPool2d(2), conv_bn(8, 8)))
    report = convselect.freeze(model, torch.randn(1, 3, 16, 16))
    for shape in ((1, 3, 20, 12), (3, 3, 16, 16), (1, 3, 16, 16)):
        x = torch.randn(shape)
        for _ in range(2):
            assert distance(model(x), eager(model, x)) < CONV
    assert len(report.chosen) == 3


@use_forced
def test_many_sizes_stop_measuring_and_stay_right():
    model = randomised(nn.Sequential(conv_bn(2, 4, activation=nn.ReLU()), conv_bn(4, 4)))
    report = convselect.freeze(model)
    for size in range(4, 30):
        x = torch.randn(1, 2, size, size)
        model(x)
        assert distance(model(x), eager(model, x)) < CONV
    assert 1 < len(report.chosen) <= 16  # bounded


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


# ---- folding and fusing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_folding_is_exact(affine, bias):
    conv, norm = nn.Conv2d(3, 5, 3, bias=bias).double(), nn.BatchNorm2d(5, eps=1e-3, affine=affine).double()
    model = randomised(nn.Sequential(conv, norm))
    frozen = FrozenConv(ConvChain(conv, "0", norm, "1"))
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    with torch.no_grad():
        assert distance(F.conv2d(x, frozen.weight, frozen.bias), model(x)) < 1e-15


@use_forced
@pytest.mark.parametrize("how", ["add", "iadd", "method", "reversed", "shortcut"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "silu", "none"])
def test_residuals_are_fused(how, activation):
    model = randomised(Residual(how, activation))
    x = torch.randn(1, 8, 10, 9) * 4
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    last = ("residual",) if activation == "none" else ("residual", activation)
    assert report.fused["body.1.0"] == ("batch norm", "bias", *last)
    assert report.fused["body.0.0"] == ("batch norm", "bias", "relu")


@use_forced
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(inplace=True), nn.SiLU(inplace=True)])
def test_activations_are_fused(activation):
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), activation))
    x = torch.randn(1, 3, 9, 9) * 5
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.fused == {"0": ("bias", type(activation).__name__.lower())}


class Uses(nn.Module):
    """Values that are read twice, written in place or broadcast: what must not be fused."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.norm, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.gate = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        y = self.a(x)
        if self.how == "twice":
            return self.norm(y) + y
        if self.how == "doubled":
            return y + y
        if self.how == "input written":
            x = self.b(x) * 2
            y = self.a(x)
            x.relu_()
            return y + x
        if self.how == "identity written":
            x = self.b(x) * 2
            return F.relu(x, inplace=True) + self.a(x) + x
        if self.how == "written before":
            z = self.b(y)
            y.mul_(3)
            return z + y
        if self.how == "broadcast":
            return y + self.gate(x)
        if self.how == "broadcast up":
            return self.gate(x) + y
        if self.how == "pixel":
            return torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))) * y
        if self.how == "view kept":
            return y.flatten(1), F.relu(self.b(y)).permute(0, 2, 3, 1)
        if self.how == "alpha":
            return torch.add(y, x, alpha=2)
        if self.how == "threshold":
            return F.silu(self.norm(y)).chunk(2, 1)[1]
        raise AssertionError(self.how)


@use_forced
@pytest.mark.parametrize(
    "how",
    ["twice", "doubled", "input written", "identity written", "written before", "broadcast", "broadcast up", "pixel",
     "view kept", "alpha", "threshold"],
)  # fmt: skip
def test_what_must_not_be_fused(how):
    model = randomised(Uses(how))
    x = torch.randn(2, 4, 6, 7)
    with torch.no_grad():
        want = model(x)
    convselect.freeze(model, x)
    first = model(x)
    second = model(torch.randn(2, 4, 6, 7))  # must not write into what the call before returned
    for got, expected in zip(first, want, strict=True) if isinstance(want, tuple) else [(first, want)]:
        assert distance(got, expected) < CONV
        assert got.stride() == expected.stride()
    del second


@pytest.mark.parametrize("how", ["plain", "no bias", "relu", "read twice", "scaled after"])
@use_forced
def test_linear_layers(how):
    model = randomised(ConvNeXtLike(how))
    x = torch.randn(2, 6, 9, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert got.stride() == want.stride()
    assert report.fused["one"] == ("bias", "gelu")
    expected = {
        "plain": ("scale", "bias", "residual"),
        "no bias": ("scale", "residual"),
        "relu": ("scale", "bias", "residual", "relu"),
        "read twice": ("bias",),
        "scaled after": ("bias", "residual"),
    }
    assert report.fused["two"] == expected[how]
    with torch.no_grad():
        model.scale.mul_(2)
        model.one.bias.add_(1)
    assert distance(model(x), eager(model, x)) < CONV
    model.two.weight.data.mul_(2)
    assert distance(model(x), eager(model, x)) < CONV


@use_forced
def test_input_is_written_as_before():
    model = randomised(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)))
    x = torch.randn(1, 4, 6, 6)
    convselect.freeze(model, x.clone())
    mine = x.clone()
    model(mine)
    assert torch.equal(mine, x.relu())
    new = torch.randn(1, 4, 9, 9)
    mine = new.clone()
    model(mine)  # plans
    assert torch.equal(mine, new.relu())


@use_forced
def test_outputs_are_separate_memory():
    model = randomised(nn.Sequential(conv_bn(4, 4, activation=nn.ReLU()), conv_bn(4, 4, activation=nn.ReLU())))
    x, other = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8)
    convselect.freeze(model, x)
    first = model(x)
    kept = first.clone()
    model(other)
    assert torch.equal(first, kept)


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
        report = convselect.freeze(model, x)
        assert distance(model(x), eager(model, x)) < CONV
    names = {name for part in report.chosen.values() for name in part.values()}
    # In float32 all of Winograd in C is within "native", so that only "exact" keeps something out.
    assert precision != "exact" or not names & {"winograd4", "winograd6"}


# ---- blocks in one call ---------------------------------------------------------------------------------------------


class Inverted(nn.Module):
    """An inverted residual block; `watched`: something else sees what is between its layers."""

    def __init__(self, c_in=12, deep=40, c_out=12, kernel=3, stride=1, expands=True, watched=None, activation=nn.ReLU6):
        super().__init__()
        deep = deep if expands else c_in
        self.expand = conv_bn(c_in, deep, 1, activation()) if expands else nn.Identity()
        self.depthwise = conv_bn(deep, deep, kernel, activation(), groups=deep, stride=stride)
        self.project = conv_bn(deep, c_out, 1)
        self.residual, self.watched = c_in == c_out and stride == 1, watched

    def forward(self, x):
        expanded = self.expand(x)
        deep = self.depthwise(expanded)
        y = self.project(deep)
        if self.residual:
            y = x + y
        return {None: (y,), "expanded": (y, expanded), "deep": (y, deep)}[self.watched]


def blocks_of(report):
    return {name for part in report.chosen.values() for name, chosen in part.items() if chosen == "block"}


INVERTED = {
    "residual": ({}, 3),
    "stride": ({"stride": 2, "c_out": 20}, 3),
    "5x5": ({"kernel": 5, "activation": nn.SiLU}, 3),
    "two layers": ({"expands": False, "c_out": 7, "activation": nn.ReLU}, 2),
    "what is expanded is seen": ({"watched": "expanded"}, 2),
    "what is deep is seen": ({"watched": "deep"}, 0),
    "an activation of its own": ({"activation": nn.GELU}, 0),
    "7x7": ({"kernel": 7}, 0),
}


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
@pytest.mark.parametrize("case", INVERTED)
def test_blocks(case, forced):
    options, fused = INVERTED[case]
    model = randomised(Inverted(**options))
    for shape in ((1, 12, 14, 15), (2, 12, 5, 3)):
        x = torch.randn(shape)
        want, got, report = frozen_outputs(model, x)
        for a, b in zip(got, want, strict=True):
            assert distance(a, b) < CONV
            assert a.stride() == b.stride()
        assert len(blocks_of(report)) == fused
        assert convselect.unfreeze(model) == 1
        with torch.no_grad():
            assert all(map(torch.equal, model(x), want))


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
@pytest.mark.parametrize("layer", ["expand", "depthwise", "project"])
def test_blocks_notice_changes_and_keep_nonfinite_values(layer, forced):
    model = randomised(nn.Sequential(Inverted(), Unpacked(), Inverted(stride=2), Unpacked()))
    x = torch.randn(1, 12, 14, 14)
    report = convselect.freeze(model, x)
    assert len(blocks_of(report)) == 6
    before = model(x)
    with torch.no_grad():
        getattr(model[0], layer)[0].weight.mul_(1.5)
        getattr(model[2], layer)[1].bias.add_(0.5)
    want = eager(model, x)
    assert distance(before, want) > 1e-2
    assert distance(model(x), want) < CONV
    x[0, 2, 3, 4] = float("nan")
    assert torch.equal(model(x).isnan(), eager(model, x).isnan())
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x).isnan(), model(x).isnan())


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_blocks_compute_the_same_bits_on_any_number_of_threads(forced):
    model = randomised(Inverted(16, 96, 16))
    x = torch.randn(2, 16, 40, 33)
    convselect.freeze(model)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        model(x)
        results.append(model(x)[0].clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_library
@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_a_block_keeps_within_the_workspace_budget(forced):
    model = randomised(Inverted(16, 96, 16))
    x = torch.randn(1, 16, 30, 30)
    with convselect.use(workspace_bytes=64 << 10):
        report = convselect.freeze(model, x)
        assert distance(model(x)[0], eager(model, x)[0]) < CONV
    assert not blocks_of(report)


@pytest.mark.parametrize("faster", ["apart", "block"])
def test_a_block_that_is_not_faster_is_not_used(faster, monkeypatch):
    monkeypatch.setattr(residual, "fastest", lambda *_: faster)
    model = randomised(Inverted(16, 96, 16))
    with torch.no_grad():
        report = convselect.freeze(model, torch.randn(1, 16, 30, 30))
    assert faster == "block" or not blocks_of(report)


@use_forced
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool2d((1, 2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_global_average_pools(pool, dtype):
    model = randomised(nn.Sequential(conv_bn(3, 21, activation=nn.ReLU()), pool, nn.Flatten())).to(dtype)
    x = torch.randn(2, 3, 9, 7).to(dtype)
    want, got, _ = frozen_outputs(model, x)
    assert distance(got, want) < (CONV if dtype == torch.float32 else 3e-2)
    assert got.stride() == want.stride()


# ---- weights that change -------------------------------------------------------------------------------------------


def changes():
    def new(t):
        return torch.rand_like(t) + 0.5

    def load(model):
        model.load_state_dict({k: new(v) if v.is_floating_point() else v for k, v in model.state_dict().items()})

    def load_assign(model):
        state = {k: new(v) if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    def in_place(get):
        def change(model):
            with torch.no_grad():
                get(model).mul_(1.5)

        return change

    def data_replaced(model):
        model[0].weight.data = new(model[0].weight)

    def data_written(model):
        model[0].weight.data.copy_(new(model[0].weight))

    def replaced(model):
        model[0].weight = nn.Parameter(new(model[0].weight))

    def buffer_replaced(model):
        model[1].running_var = new(model[1].running_var)

    def optimizer_step(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(model.parameters(), 0.1).step()
        for p in model.parameters():
            p.grad = None

    def numpy(model):
        model[3].weight.detach().numpy()[:] *= 2

    def module_replaced(model):
        model[3] = randomised(nn.Sequential(nn.Conv2d(6, 4, 1)), seed=7)

    def norm_dropped(model):
        model[1] = nn.Identity().eval()

    def bias_dropped(model):
        model[0].bias = None

    def doubles(model):
        model.double().float()

    return {
        "load_state_dict": load,
        "load_state_dict assign": load_assign,
        "weight in place": in_place(lambda m: m[0].weight),
        "bias in place": in_place(lambda m: m[0].bias),
        "gamma in place": in_place(lambda m: m[1].weight),
        "beta in place": in_place(lambda m: m[1].bias),
        "mean in place": in_place(lambda m: m[1].running_mean),
        "variance in place": in_place(lambda m: m[1].running_var),
        "data replaced": data_replaced,
        "data written": data_written,
        "parameter replaced": replaced,
        "buffer replaced": buffer_replaced,
        "optimizer step": optimizer_step,
        "numpy": numpy,
        "module replaced": module_replaced,
        "norm dropped": norm_dropped,
        "bias dropped": bias_dropped,
        "double and back": doubles,
    }


@use_forced
@pytest.mark.parametrize("route", changes())
def test_a_changed_weight_is_noticed_at_once(route):
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1)))
    x = torch.randn(1, 3, 9, 8)
    convselect.freeze(model, x)
    before = model(x)
    changes()[route](model)
    want = eager(model, x)
    if route != "double and back":
        assert distance(before, want) > 1e-2  # the change is one that shows
    for _ in range(3):
        assert distance(model(x), want) < CONV
    convselect.unfreeze(model)
    assert torch.equal(model(x), want)


@pytest.mark.parametrize(("get", "calls"), [(lambda m: m[1].running_mean, 8), (lambda m: m[0].bias, 8)])
@pytest.mark.parametrize("replace", [True, False])
def test_small_tensors_behind_the_counter_are_noticed_within_eight_calls(get, calls, replace):
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(1, 3, 9, 8)
    convselect.freeze(model, x)
    if replace:
        get(model).data = get(model) + 1
    else:
        get(model).data.add_(1)
    for _ in range(calls):
        model(x)
    assert distance(model(x), eager(model, x)) < CONV


def test_one_element_behind_the_counter_is_noticed_within_a_round():
    model = randomised(nn.Sequential(nn.Conv2d(64, 128, 3), nn.Conv2d(128, 16, 1)))
    x = torch.randn(1, 64, 5, 5)
    convselect.freeze(model, x)
    model(x)
    model[0].weight.data[5, 3, 1, 1] = 10.0
    want = eager(model, x)
    n_bytes = sum(p.numel() * 4 for p in model.parameters())
    rounds = next(i for i in range(100) if distance(model(x), want) < CONV)
    assert 0 < rounds <= n_bytes // 65536 + 4
    assert distance(model(x), want) < CONV


@use_forced
def test_model_halved_in_place():
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)))
    x = torch.randn(1, 3, 9, 8)
    convselect.freeze(model, x)
    model.bfloat16()
    x = x.bfloat16()
    for _ in range(2):
        got = model(x)
        assert got.dtype == torch.bfloat16
        assert distance(got, eager(model, x)) < 3e-2


def test_watch_says_which_group():
    tensors = [torch.randn(8, 8) for _ in range(3)]
    groups = [[({"t": t}, "t")] for t in tensors]
    watch = Watch(groups)
    assert watch.changed() == set()
    tensors[1].add_(1)
    assert watch.changed() == {1}
    watch.accept()
    tensors[2].data.add_(1)
    assert watch.changed() == {2}
    watch.accept()
    tensors[0].numpy()[0, 0] += 1
    assert watch.changed_anywhere() == {0}


def test_watch_sees_lone_numbers_of_equal_value_replaced():
    owner = {"t": torch.ones(1)}
    watch = Watch([[(owner, "t")]])
    owner["t"] = torch.ones(1)
    assert watch.changed() == {0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 7)[::2, 1:4],
        lambda: torch.randn(4, 3, 3, 3).permute(0, 2, 3, 1),
        lambda: torch.randn(1).expand(4),
        lambda: torch.randn(7).bfloat16(),
        lambda: torch.empty(0),
    ],
)
def test_watch_takes_any_memory(make):
    t = make()
    watch = Watch([[({"t": t}, "t")]])
    assert watch.changed_anywhere() == set()
    if t.numel():
        t.data[..., :1].add_(1)
        assert watch.changed_anywhere() == {0}


# ---- training ------------------------------------------------------------------------------------------------------


def test_refuses_to_train():
    model = randomised(nn.Sequential(conv_bn(3, 4), nn.ReLU()))
    x = torch.randn(1, 3, 6, 6)
    convselect.freeze(model, x)
    for enter in (model.train, lambda: model.train(True), lambda: nn.Sequential(model).train()):
        with pytest.raises(RuntimeError, match="unfreeze"):
            enter()
    assert model.eval() is model
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(x.clone().requires_grad_())
    with torch.no_grad():
        model(x.clone().requires_grad_())
    assert not model(x).requires_grad  # parameters do require gradients; results of a frozen model do not
    assert torch.is_grad_enabled()
    model[0][1].train()
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(x)
    model[0][1].eval()
    model(x)
    convselect.unfreeze(model)
    model.train()
    model(x).sum().backward()
    assert model[0][0].weight.grad is not None


def test_takes_modules_in_evaluation_mode():
    with pytest.raises(RuntimeError, match="eval"):
        convselect.freeze(nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError):
        convselect.freeze(lambda x: x)
    with pytest.raises(TypeError):
        convselect.unfreeze("model")


def test_dropout_in_training_mode_is_refused():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5)))
    convselect.freeze(model, torch.randn(1, 3, 4, 4))
    model[1].train()
    with pytest.raises(RuntimeError, match="unfreeze"):
        model(torch.randn(1, 3, 4, 4))


@use_forced
def test_inference_mode():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    with torch.inference_mode():
        convselect.freeze(model, x)
        inside = model(x)
    assert distance(model(x), eager(model, x)) < CONV
    assert distance(inside, eager(model, x)) < CONV
    model.body[0][0].weight.data.mul_(2)
    assert distance(model(x), eager(model, x)) < CONV


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        x = torch.randn(1, 3, 8, 8)
        convselect.freeze(model, x)
        assert distance(model(x), eager(model, x)) < CONV


# ---- unfreeze, copies ----------------------------------------------------------------------------------------------


def snapshot(model):
    return {
        name: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_unfreeze_restores_every_attribute():
    model = randomised(nn.Sequential(Residual("shortcut"), nn.Dropout(), Flagged(), nn.Conv2d(8, 4, 1)))
    model[3].register_forward_hook(lambda *_: None)
    before, ids = snapshot(model), [id(t) for t in model.state_dict(keep_vars=True).values()]
    x = torch.randn(1, 8, 7, 7)
    want = eager(model, x)
    convselect.freeze(model, x)
    model(x)
    assert convselect.unfreeze(model) > 1
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name].keys() == before[name].keys()
        for key, value in before[name].items():
            same = after[name][key] == value if isinstance(value, dict) and not value else after[name][key] is value
            if isinstance(value, dict) and value:
                same = all(after[name][key][k] is v for k, v in value.items())
            assert same or after[name][key] == value, (name, key)
    assert [id(t) for t in model.state_dict(keep_vars=True).values()] == ids
    assert torch.equal(model(x), want)
    assert convselect.unfreeze(model) == 0


def test_freezing_again_starts_anew():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    convselect.freeze(model, x)
    assert distance(model(x), eager(model, x)) < CONV
    assert convselect.unfreeze(model) == 1


@use_forced
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_copies_are_frozen_and_independent(copied):
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    want = eager(model, x)
    other = copied(model)
    assert distance(other(x), want) < CONV
    assert distance(other(x), want) < CONV
    with pytest.raises(RuntimeError, match="unfreeze"):
        other.train()
    if copied is not copy.copy:
        with torch.no_grad():
            other.body[0][0].weight.mul_(3)
        assert distance(other(x), want) > 1e-2
        assert distance(other(x), eager(other, x)) < CONV
        assert distance(model(x), want) < CONV
    assert convselect.unfreeze(other) == 1
    assert torch.equal(other(x), eager(other, x))


def test_saved_and_loaded_whole():
    model = randomised(Residual())
    x = torch.randn(1, 8, 7, 7)
    convselect.freeze(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert distance(loaded(x), eager(model, x)) < CONV
    assert convselect.unfreeze(loaded) == 1


def test_state_dict_of_a_frozen_model():
    model = randomised(Residual("shortcut"))
    keys = list(model.state_dict())
    convselect.freeze(model, torch.randn(1, 8, 7, 7))
    assert list(model.state_dict()) == keys
    fresh = Residual("shortcut").eval()
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(1, 8, 7, 7)
    assert distance(model(x), fresh(x)) < CONV


def test_a_dropped_model_is_freed():
    model = randomised(Residual())
    convselect.freeze(model, torch.randn(1, 8, 7, 7))
    gone = []
    torch.utils.weak.weakref.finalize(model, gone.append, True)
    del model
    gc.collect()
    assert gone == [True]


# ---- hooks ---------------------------------------------------------------------------------------------------------


@use_forced
@pytest.mark.parametrize("which", ["", "0", "0.body", "0.body.0.0", "0.body.0.2", "1"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_run(which, when):
    model = randomised(nn.Sequential(Residual(), nn.Conv2d(8, 4, 1)))
    x = torch.randn(1, 8, 7, 7)
    seen = []

    def hook(module, args, output):
        seen.append(output)
        return output * 2

    if when == "before":
        handle = model.get_submodule(which).register_forward_hook(hook)
    convselect.freeze(model, x)
    if when == "after":
        handle = model.get_submodule(which).register_forward_hook(hook)
    seen.clear()
    got = model(x)
    assert len(seen) == 1
    kept = seen[0].clone()
    model(torch.randn(1, 8, 7, 7))
    assert torch.equal(seen[0], kept)  # what a hook keeps is not overwritten
    handle.remove()
    plain = model(x)
    assert len(seen) == 2
    convselect.unfreeze(model)
    assert distance(plain, eager(model, x)) < CONV
    model.get_submodule(which).register_forward_hook(hook)
    assert distance(got, model(x)) < CONV


def test_pre_hooks_and_global_hooks_run():
    model = randomised(nn.Sequential(conv_bn(4, 4, activation=nn.ReLU()), nn.Conv2d(4, 4, 1)))
    x = torch.randn(1, 4, 6, 6)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    want = eager(model, x)
    convselect.freeze(model, x)
    assert distance(model(x), want) < CONV
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(x)
    finally:
        handle.remove()
    assert {"Conv2d", "BatchNorm2d", "ReLU"} <= set(seen)


def test_report_names_what_has_hooks():
    model = randomised(nn.Sequential(conv_bn(4, 4), nn.Conv2d(4, 4, 1)))
    model[0][0].register_forward_hook(lambda *_: None)
    report = convselect.freeze(model)
    assert report.left_alone == {"0.0": "it has hooks"}
    assert report.parts == ("", "0.0")


# ---- what cannot be traced -----------------------------------------------------------------------------------------


class ConvNeXtLike(nn.Module):
    """A linear layer's scale and, across a permutation, its residual."""

    def __init__(self, how):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(6, 6, 7, padding=3, groups=6), nn.LayerNorm(6)
        self.one, self.two = nn.Linear(6, 24), nn.Linear(24, 6, bias=how != "no bias")
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.how = how

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.two(F.gelu(self.one(y)))
        if self.how == "read twice":
            y = y * self.scale + y
        elif self.how == "scaled after":
            y = (y + x.permute(0, 2, 3, 1)) * self.scale
        else:
            y = y * self.scale
        y = y.permute(0, 3, 1, 2)
        return F.relu(x + y) if self.how == "relu" else x + y


class Flagged(nn.Module):
    """Control flow that depends on data, around convolutions that do not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv_bn(8, 8, activation=nn.ReLU()), conv_bn(8, 8)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(4, 4, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x)


class CountsInBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.conv(x)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x) + torch.rand(1)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x, mask=None, scale=2.0):
        y = self.conv(x) * scale
        return y if mask is None else y * mask


@use_forced
def test_data_dependent_control_flow():
    model = randomised(Flagged())
    report = convselect.freeze(model)
    assert set(report.parts) == {"a", "b"}
    assert "not traced" in report.left_alone[""]
    for x in (torch.rand(1, 8, 6, 6), -torch.rand(1, 8, 6, 6)):
        model(x)
        assert distance(model(x), eager(model, x)) < CONV
    with pytest.raises(RuntimeError, match="unfreeze"):
        model.train()
    assert convselect.unfreeze(model) == 2


@pytest.mark.parametrize("kind", [Counts, CountsInBuffer, Noise])
def test_side_effects_keep_happening(kind):
    model = randomised(kind())
    x = torch.randn(1, 4, 5, 5)
    report = convselect.freeze(model)
    assert report.parts == ("conv",)
    assert "" in report.left_alone
    before = int(getattr(model, "calls", 0))
    outputs = [model(x) for _ in range(4)]
    if kind is Noise:
        assert not torch.equal(outputs[2], outputs[3])
    else:
        assert int(model.calls) - before == 4


class KeepsSome(nn.Module):
    """How many images go on depends on the data."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv_bn(4, 4, activation=nn.ReLU()), conv_bn(4, 4)

    def forward(self, x):
        return self.b(self.a(x[x.mean((1, 2, 3)) > 0]))


@use_forced
def test_sizes_that_depend_on_data():
    model = randomised(KeepsSome())
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0]).view(4, 1, 1, 1)
    x = torch.rand(4, 4, 6, 5)
    convselect.freeze(model, x * signs)
    for now in (signs, -signs, signs.flip(0), signs.abs()):
        got, want = model(x * now), eager(model, x * now)
        assert got.stride() == want.stride()
        assert distance(got, want) < CONV


@use_forced
def test_optional_arguments():
    model = randomised(Optional())
    x, mask = torch.randn(1, 4, 5, 5), torch.rand(1, 1, 5, 5)
    convselect.freeze(model, x)
    with torch.no_grad():
        for args, kwargs in (((x,), {}), ((x, mask), {}), ((), {"x": x}), ((x,), {"mask": mask, "scale": 3.0})):
            want = Optional.forward(model, *args, **kwargs)
            for _ in range(2):
                assert distance(model(*args, **kwargs), want) < CONV
    with pytest.raises(TypeError):
        model()


def test_models_without_convolutions():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    report = convselect.freeze(model, torch.randn(1, 4))
    assert report.parts == ()
    model.train()
    assert convselect.unfreeze(model) == 0


@use_forced
def test_a_lone_convolution():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3)))[0]
    x = torch.randn(1, 3, 8, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.parts == ("",)
    assert distance(model(x[0]), eager(model, x[0])) < CONV  # no batch dimension


def test_errors_are_pytorchs():
    model = randomised(nn.Sequential(conv_bn(3, 4)))
    convselect.freeze(model, torch.randn(1, 3, 8, 8))
    for bad in (torch.randn(1, 5, 8, 8), torch.randn(3), torch.zeros(1, 3, 8, 8, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            model(bad)
    with pytest.raises(TypeError):
        model()


def test_reasons_for_convolutions_left_alone():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)), convselect.SelectedConv2d(4, 4, 1, policy="native"),
    ).eval()  # fmt: skip
    x = torch.randn(1, 4, 6, 6)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert {name: why.split()[0] for name, why in report.left_alone.items()} == {
        "1": "a", "2": "padding", "3": "ParametrizedConv2d", "4": "its",
    }  # fmt: skip
    text = str(report)
    assert "1 layers frozen in 1 parts" in text
    assert "transposed" in text


# ---- together with the rest ---------------------------------------------------------------------------------------
@use_forced
def test_converted_models(monkeypatch):
    use_fake(monkeypatch)
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), Residual()))
    x = torch.randn(1, 3, 12, 12)
    convselect.convert(model)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert len(report.folded) == 3
    assert all(isinstance(m, convselect.SelectedConv2d) for m in model.modules() if isinstance(m, nn.Conv2d))
    with convselect.use(policy="native"):
        assert torch.equal(model(x), eager(model, x))


def test_autocast_and_functional_transforms_run_the_original():
    model = randomised(nn.Sequential(conv_bn(3, 4)))
    x = torch.randn(2, 3, 8, 8)
    convselect.freeze(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
        assert not model(x).requires_grad
    with torch.no_grad():
        assert distance(torch.func.vmap(model)(x.unsqueeze(1)).squeeze(1), eager(model, x)) < CONV
    assert distance(torch.jit.trace(model, x, check_trace=False)(x), eager(model, x)) < CONV
    assert distance(torch.compile(model, backend="eager", fullgraph=True)(x), eager(model, x)) < CONV
    assert distance(torch.export.export(model, (x,)).module()(x), eager(model, x)) < CONV
    assert str(inspect.signature(model.forward)).startswith("(input")


def test_without_the_c_library():
    code = (
        "import torch, convselect; from torch import nn; torch.manual_seed(0);"
        "model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).eval();"
        "x = torch.randn(1, 16, 20, 20); want = model(x); report = convselect.freeze(model, x);"
        "assert torch.allclose(model(x), want, atol=1e-5);"
        "print(*(c for part in report.chosen.values() for c in part.values()))"
    )
    environment = {**os.environ, "CONVSELECT_NO_NATIVE": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert set(out.stdout.split()) <= {"native", "onednn_packed", "gemm"}


@use_forced
def test_threads_do_not_meet():
    model = randomised(nn.Sequential(conv_bn(8, 16, activation=nn.ReLU()), conv_bn(16, 16), nn.Conv2d(16, 8, 1)))
    inputs = [torch.randn(1, 8, 20, 20) for _ in range(4)]
    wanted = [eager(model, x) for x in inputs]
    convselect.freeze(model, inputs[0])
    wrong = []

    def work(x, want):
        torch.set_num_threads(1)
        for _ in range(50):
            if distance(model(x), want) > CONV:
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_thread_counts():
    model = randomised(Residual())
    x = torch.randn(1, 8, 12, 12)
    report = convselect.freeze(model, x)
    torch.set_num_threads(2)
    model(x)
    assert distance(model(x), eager(model, x)) < CONV
    assert len(report.chosen) == 2


@use_forced
def test_memory_starts_as_nan(nan_memory):
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), Residual("shortcut"), nn.Conv2d(8, 4, 1)))
    x = torch.randn(1, 3, 11, 9)
    want, got, _ = frozen_outputs(model, x)
    assert distance(got, want) < CONV


def test_numpy_is_enough():
    """The watch sums memory as 64-bit integers: a swap of halves inside one word must show."""
    t = torch.tensor([1.0, 2.0, 3.0, 4.0])
    watch = Watch([[({"t": t}, "t")]])
    t.numpy()[:] = np.array([2.0, 1.0, 3.0, 4.0], np.float32)
    assert watch.changed_anywhere() == {0}
