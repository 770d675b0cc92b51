"""Convolutions of one dimension, frozen: layers of height 1 on views, with all that runs between them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, check_candidate, distance, eager, needs_library, randomised, unfrozen, use_forced
from pairs import pairs
from torch import nn

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.settings import current, exactly
from convselect.freeze.candidates import FORMATS
from convselect.freeze.capture import capture
from convselect.freeze.freeze import frozen_forwards
from convselect.freeze.program import Program, Registry


class Calls(nn.Module):
    """A function between two convolutions of one dimension."""

    def __init__(self, function, c=16, inner=16, **kwargs):
        super().__init__()
        self.a, self.b = nn.Conv1d(c, inner, 3, padding=1), nn.Conv1d(kwargs.pop("out", inner), c, 3, **kwargs)
        self.norm, self.weight = nn.BatchNorm1d(inner), nn.Parameter(torch.ones(inner, 1))
        self.function = function

    def forward(self, x):
        return self.b(self.function(self, self.a(x)))


BETWEEN = {
    "nothing": lambda m, y: y,
    "batch norm": lambda m, y: F.relu(m.norm(y)),
    "leaky relu": lambda m, y: F.leaky_relu(y, 0.1),
    "elu": lambda m, y: F.elu(y),
    "tanh": lambda m, y: y.tanh(),
    "gelu": lambda m, y: F.gelu(y),
    "silu": lambda m, y: F.silu(m.norm(y)),
    "residual": lambda m, y: y + m.b(F.relu(y)),
    "scale": lambda m, y: y * m.weight,
    "group norm": lambda m, y: F.silu(F.group_norm(y, 4)),
    "layer norm": lambda m, y: F.layer_norm(y.transpose(1, 2), (16,)).transpose(1, 2),
    "glu": lambda m, y: F.glu(torch.cat([y, y + 1], 1), dim=1),
    "concatenation": lambda m, y: torch.cat([m.b(y)[:, :8], F.relu(y)[:, :8]], 1),
    "upsampled": lambda m, y: F.interpolate(y, scale_factor=2.0),
    "interpolated": lambda m, y: F.interpolate(y, size=17, mode="nearest"),
    "pooled": lambda m, y: F.max_pool1d(F.relu(y), 2),
    "averaged": lambda m, y: F.avg_pool1d(y, 3, stride=2),
    "gate": lambda m, y: y * y.mean(-1, keepdim=True).sigmoid(),
    "sequence": lambda m, y: (y.permute(0, 2, 1) + 1).relu().permute(0, 2, 1),
    "padded": lambda m, y: F.pad(y, (2, 0)),
    "reflected": lambda m, y: F.pad(y, (3, 2), mode="reflect"),
    "repeated": lambda m, y: F.pad(y, (0, 2), mode="replicate"),
    "repeated often": lambda m, y: F.pad(y, (20, 20), mode="replicate"),
    "not reflected": lambda m, y: F.pad(y, (0, 0), mode="reflect") * 2,
    "circular": lambda m, y: F.pad(y, (2, 1), mode="circular"),
    "cut": lambda m, y: m.b(y)[..., :-1],
}


@use_forced
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("batch", [1, 2])
def test_what_stands_between_layers(name, batch):
    model, x = randomised(Calls(BETWEEN[name], padding=1)), torch.randn(batch, 16, 40)
    want = eager(model.double(), x.double())
    model.float()
    convselect.freeze(model, x)
    assert convselect.summary(model).not_fused == {}
    for _ in range(2):
        got = model(x)
        assert distance(got, want) < CONV
        assert got.stride() == eager(model, x).stride()
    assert unfrozen(model) == 1


GEOMETRIES = {
    "kernel": (1, 2, 3, 4, 7, 10), "stride": (1, 2, 5), "dilation": (1, 3), "groups": (1, 2, 16), "padding": (0, 1, 9),
}  # fmt: skip


@use_forced
@pytest.mark.parametrize("values", pairs(*GEOMETRIES.values()))
def test_geometries(values):
    kernel, stride, dilation, groups, padding = values
    conv = nn.Conv1d(16, 32, kernel, stride, padding, dilation, groups)
    model = randomised(nn.Sequential(conv, nn.BatchNorm1d(32), nn.ReLU()))
    x = torch.randn(2, 16, 45)
    convselect.freeze(model, x)
    assert distance(model(x), eager(model, x)) < CONV


@use_forced
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype):
    model = randomised(Calls(BETWEEN["batch norm"])).to(dtype)
    x = torch.randn(1, 16, 30, dtype=dtype)
    convselect.freeze(model, x)
    for _ in range(2):
        got, want = model(x), eager(model, x)
        assert got.dtype == want.dtype
        assert distance(got, want) < {torch.float64: 1e-14}.get(dtype, 2e-2)


@use_forced
def test_other_lengths_and_no_batch():
    model = randomised(Calls(BETWEEN["silu"]))
    for shape in ((1, 16, 40), (1, 16, 41), (3, 16, 40), (16, 40)):
        x = torch.randn(shape)
        model.norm.eval()
        convselect.freeze(model) if not frozen_forwards(model) else None
        for _ in range(2):
            if len(shape) == 3:
                assert distance(model(x), eager(model, x)) < CONV
    x, plain = torch.randn(16, 40), randomised(Calls(BETWEEN["gelu"]))
    convselect.freeze(plain, x)
    assert distance(plain(x), eager(plain, x)) < CONV


@use_forced
@pytest.mark.parametrize("expands", [False, True])
def test_inverted_residuals(expands):
    """Also as one call: `freeze/residual.py`."""
    c = 64 if expands else 16
    first = [nn.Conv1d(16, c, 1), nn.BatchNorm1d(c), nn.ReLU6()] if expands else []
    body = nn.Sequential(
        *first, nn.Conv1d(c, c, 3, padding=1, groups=c), nn.BatchNorm1d(c), nn.ReLU6(), nn.Conv1d(c, 16, 1)
    )

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.last = body, nn.Conv1d(16, 16, 3)

        def forward(self, x):
            x = self.last(x)
            return self.last(x + self.body(x))

    model, x = randomised(Block()), torch.randn(2, 16, 50)
    convselect.freeze(model, x)
    for _ in range(2):
        assert distance(model(x), eager(model, x)) < CONV


def test_explained_and_summarised():
    model = randomised(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 3)), nn.GELU()))
    x = torch.randn(1, 8, 20)
    convselect.freeze(model, x)
    report = convselect.summary(model)
    assert report.fused == {"0": ("bias", "gelu")}
    assert report.left_alone == {}
    assert "(1, 8, 20)" in str(report)
    assert convselect.explain(model[0], x)
    alone = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 16, 3)).eval()
    convselect.freeze(alone, x)
    assert convselect.summary(alone).fused == {"": ("bias",)}


# ---- long filters --------------------------------------------------------------------------------------------------


def of_length(other, y):
    return F.pad(other, (0, y.shape[-1] - other.shape[-1]))


def split(taps, dilation, padding, residual, length=70):
    """(layer, its input and residual, what it computes) of a filter of so many taps."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(32, 48, taps, padding=padding, dilation=dilation)
            self.other = nn.Conv1d(32, 48, 1)

        def forward(self, x):
            y = self.conv(x)
            return F.gelu(y + of_length(self.other(x), y) if residual else y)

    model, x = randomised(Layer()), torch.randn(2, 32, length)
    with torch.no_grad():
        program = Program(capture(model, (x,)), Registry())
        layer = next(layer for step, layer in program.layers.items() if step.target.name == "conv")
        y = model.conv.double()(x.double())
        other = of_length(model.other.double()(x.double()), y)
        want = F.gelu(y + other if residual else y).unsqueeze(2)
    return layer, x.unsqueeze(2), other.float().unsqueeze(2) if residual else None, want


@needs_library
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
@pytest.mark.parametrize("taps", range(8, 15))
@pytest.mark.parametrize(("dilation", "padding"), [(1, 0), (1, 5), (2, 7), (3, 18)])
@pytest.mark.parametrize("residual", [False, True])
def test_long_filters_are_two(taps, dilation, padding, residual, layout):
    layer, x, other, want = split(taps, dilation, padding, residual)
    x, other = (None if t is None else t.contiguous(memory_format=FORMATS[layout]) for t in (x, other))
    found = [c for c in layer.candidates(x, other, layout, current()) if c.name.endswith("_split")]
    assert {c.tile for c in found} == ({4} if taps in (13, 14) else {4, 6})
    with torch.no_grad():
        for candidate in found:
            check_candidate(candidate, x, other, want)


@needs_library
@pytest.mark.parametrize("place", [0, 40, 69])
def test_a_long_filter_keeps_nan_where_it_is(place):
    """Either of the two kernels may decline values that are not finite: the layer is native's then."""
    layer, x, other, _ = split(11, 1, 5, True)
    x[0, 3, 0, place] = torch.nan
    with torch.no_grad():
        want = layer.native(x, other)
        for candidate in layer.candidates(x, other, CONTIGUOUS, current()):
            if candidate.name.endswith("_split"):
                out, scratch = torch.empty_like(want), torch.empty(candidate.scratch_bytes, dtype=torch.uint8)
                for got in (candidate.bind(x, other, out, scratch)(), candidate.bind(None, None, None)(x, other)):
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)


@needs_library
@pytest.mark.parametrize(("taps", "stride"), [(2, 2), (3, 2), (3, 1), (10, 5), (4, 6)])
@pytest.mark.parametrize("channels", [1, 48, 64])
@pytest.mark.parametrize("residual", [False, True])
def test_windows_are_rows_of_a_product(taps, stride, channels, residual):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(channels, 64, taps, stride)

        def forward(self, x, other):
            return F.silu(self.conv(x) + other if residual else self.conv(x))

    model, x = randomised(Layer()), torch.randn(1, channels, 301)
    with torch.no_grad():
        other = torch.randn(model.conv(x).shape)
        (layer,) = Program(capture(model, (x, other)), Registry()).layers.values()
        want = model.double()(x.double(), other.double()).unsqueeze(2)
        x, other = (t.unsqueeze(2).contiguous(memory_format=torch.channels_last) for t in (x, other))
        given = other if residual else None
        found = {c.name: c for c in layer.candidates(x, given, CHANNELS_LAST, current())}
        assert ("strassen_windows" in found) == (taps * channels % 2 == 0)  # Strassen's halves
        if "strassen_windows" in found:
            check_candidate(found["strassen_windows"], x, given, want)
        exact = layer.candidates(x, given, CHANNELS_LAST, exactly(current()))
        assert "strassen_windows" not in {c.name for c in exact}


@needs_library
def test_padded_windows_are_no_rows():
    for model in (nn.Conv1d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 3, dilation=2), nn.Conv1d(64, 64, 3, groups=2)):
        x = torch.randn(1, 64, 300)
        with torch.no_grad():
            (layer,) = Program(capture(nn.Sequential(model).eval(), (x,)), Registry()).layers.values()
            x = x.unsqueeze(2).contiguous(memory_format=torch.channels_last)
            found = {c.name for c in layer.candidates(x, None, CHANNELS_LAST, current())}
        assert "direct" in found
        assert "strassen_windows" not in found


# ---- borders --------------------------------------------------------------------------------------------------------


def causal(dims, function):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            kind = (nn.Conv1d, nn.Conv2d)[dims - 1]
            norm = (nn.BatchNorm1d, nn.BatchNorm2d)[dims - 1]
            self.conv = kind(16, 16, 3, dilation=2)
            self.padding = kind(16, 16, 3, padding=4, dilation=2)
            self.step = kind(16, 16, 4, stride=2, padding=1)
            self.norm = norm(16)

        def forward(self, x):
            return function(self, x)

    return Causal()


# Function, and how many steps the program has: zeros and cuts are steps only if they are left alone.
BORDERS = {
    "zeros before": (lambda m, x: F.relu(m.conv(F.pad(x, (4, 0)))), 1),
    "zeros on both sides": (lambda m, x: F.relu(m.conv(F.pad(x, (3, 1)))), 1),
    "zeros and a padding": (lambda m, x: F.relu(m.padding(F.pad(x, (0, 2)))), 1),
    "cut at the end": (lambda m, x: F.relu(m.padding(x)[..., :-4]), 1),
    "cut, then normalised": (lambda m, x: m.norm(m.padding(x)[..., :-4]).relu(), 1),
    "cut at both ends": (lambda m, x: m.padding(x)[..., 2:-1], 1),
    "cut of steps": (lambda m, x: m.step(F.pad(x, (0, 3)))[..., :-1], 1),
    "cut of steps into the input": (lambda m, x: m.step(x)[..., :-1], 2),
    "cut into the input": (lambda m, x: m.padding(x)[..., 6:], 2),
    "cut of channels": (lambda m, x: m.padding(x)[:, 3:9], 2),
    "every other one": (lambda m, x: m.padding(x)[..., ::2], 2),
    "whole read too": (lambda m, x: (lambda y: (y[..., :-4], y))(m.padding(x)), 2),
    "ones before": (lambda m, x: m.conv(F.pad(x, (4, 0), value=1.0)), 2),
    "cropped": (lambda m, x: m.conv(F.pad(x, (-2, 1))), 2),
    "zeros read too": (lambda m, x: (lambda p: (m.conv(p), p))(F.pad(x, (4, 0))), 2),
}


@use_forced
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("name", BORDERS)
def test_zeros_and_cuts(name, dims):
    function, steps = BORDERS[name]
    model, x = randomised(causal(dims, function)), torch.randn(2, 16, *(14, 33)[2 - dims :])
    with torch.no_grad():
        kinds = [step.kind for step in Program(capture(model, (x,)), Registry()).steps]
    assert len([kind for kind in kinds if kind not in ("constant", "read")]) == steps, kinds
    convselect.freeze(model, x)
    want = eager(model, x)
    for _ in range(2):
        got = model(x)
        for a, b in zip(*((t,) if torch.is_tensor(t) else t for t in (got, want)), strict=True):
            assert distance(a, b) < CONV
            assert a.stride() == b.stride()


def test_zeros_of_convolutions_that_are_not_frozen_stay():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(4, 12, 1)

        def forward(self, x):
            y = self.conv(x)
            return F.conv1d(F.pad(y, (2, 0)), y.reshape(-1, 12, 3))[..., :-1]

    model, x = randomised(Own()), torch.randn(1, 4, 12)
    convselect.freeze(model, x)
    assert distance(model(x), eager(model, x)) < CONV


@needs_library
@pytest.mark.parametrize("forced", ["nchw kernels", "nhwc kernels"], indirect=True)
def test_chains_stay_in_c(forced):
    """One call of C, and no PyTorch between the first layer and the last."""

    def function(m, y):
        z = F.group_norm(F.leaky_relu(m.norm(y), 0.2) + y, 4)
        return F.glu(torch.cat([F.elu(z), z.tanh()], 1), 1)

    model, x = randomised(Calls(function, 32, 32)), torch.randn(1, 32, 60)
    convselect.freeze(model, x)
    (plan,) = [plan for _, plan in frozen_forwards(model)[""].plans()]
    assert plan.layout == forced
    found = plan._make().__globals__
    called = [value for name, value in found.items() if name[0] == "f" and name[1:].isdigit()]
    assert len(called) <= 3, called
