"""Transposed convolutions, frozen: every candidate in every geometry, on memory of its own and on given memory."""

from __future__ import annotations

import pytest
import torch
from networks import CONV, check_candidate, distance, eager, needs_library, randomised, unfrozen, use_forced
from pairs import pairs
from torch import nn

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.settings import current
from convselect.freeze.candidates import FORMATS
from convselect.freeze.capture import capture
from convselect.freeze.program import Program, Registry
from convselect.freeze.transposed import FrozenTransposed

KINDS = {
    1: (nn.ConvTranspose1d, nn.BatchNorm1d),
    2: (nn.ConvTranspose2d, nn.BatchNorm2d),
}
GEOMETRIES = {
    "kernel": (1, 2, 3, 4, 7), "stride": (1, 2, 3), "padding": (0, 1, 2), "output_padding": (0, 1),
    "groups": (1, 2, 16), "dilation": (1, 2), "size": (1, 2, 9), "batch": (1, 2),
}  # fmt: skip


def geometries():
    """(arguments of a layer, size, batch) of transposed convolutions that exist."""
    for kernel, stride, padding, more, groups, dilation, size, batch in pairs(*GEOMETRIES.values()):
        more = more if more < max(stride, dilation) and more < stride else 0
        results = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + more + 1
        if results > 0:
            yield (kernel, stride, padding, more, groups, True, dilation), size, batch


def captured(dims, arguments, size, batch, *after):
    kind, norm = KINDS[dims]
    model = randomised(nn.Sequential(kind(16, 32, *arguments), norm(32), *after))
    x = torch.randn(batch, 16, *(size, size + 1)[-dims:] if dims == 2 else (size,))
    with torch.no_grad():
        return model, x, Program(capture(model, (x,)), Registry())


@needs_library
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize(("arguments", "size", "batch"), list(geometries()))
def test_every_candidate(arguments, size, batch, dims, layout):
    model, x, program = captured(dims, arguments, size, batch, nn.LeakyReLU(0.2))
    (step,) = program.layers
    layer = program.layers[step]
    assert isinstance(layer, FrozenTransposed)
    assert step.target.activation == "leaky_relu"
    with torch.no_grad():
        want = model.double()(x.double())
        x, want = (t.unsqueeze(2) if dims == 1 else t for t in (x, want))
        x = x.contiguous(memory_format=FORMATS[layout])
        for candidate in layer.candidates(x, None, layout, current()):
            check_candidate(candidate, x, None, want)


@needs_library
@pytest.mark.parametrize("dims", KINDS)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (4, 2, 1), (16, 8, 4), (3, 1, 1)])
def test_phases_of_usual_layers_are_candidates(dims, kernel, stride, padding):
    """As decoders and vocoders have them; a kernel of the C library that keeps its weight packed computes them."""
    _, x, program = captured(dims, (kernel, stride, padding), 6, 1)
    (layer,) = program.layers.values()
    x = x.unsqueeze(2) if dims == 1 else x
    names = {c.name for c in layer.candidates(x, None, CHANNELS_LAST, current())}
    if (stride**dims) <= 64:
        assert {"direct_phases", "direct", "native"} & names == {"direct_phases", "direct", "native"}


class Decoder(nn.Module):
    """Up and down again, with a skip connection and a residual."""

    def __init__(self, dims, cut=0):
        super().__init__()
        (up, norm), down = KINDS[dims], (nn.Conv1d, nn.Conv2d)[dims - 1]
        self.first, self.down = down(8, 16, 3, padding=1), down(16, 16, 3, padding=1, stride=2)
        self.up, self.norm = up(16, 16, 4, 2, 0 if cut else 1), norm(16)
        self.cut, self.last = cut, down(32, 8, 1)

    def forward(self, x):
        x = self.first(x).relu()
        y = self.up(self.down(x).relu())
        y = torch.relu(self.norm(y[..., self.cut : -self.cut] if self.cut else y) + x)
        return self.last(torch.cat([x, y], 1)).tanh()


@use_forced
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("dims", "cut"), [(1, 0), (1, 1), (2, 0)])
def test_decoders(dims, cut, batch):
    model, x = randomised(Decoder(dims, cut)), torch.randn(batch, 8, *(12, 10)[-dims:])
    convselect.freeze(model, x)
    report = convselect.summary(model)
    assert report.not_fused == {}
    assert report.folded == {"norm": "up"}
    want = eager(model, x)
    for _ in range(2):
        got = model(x)
        assert distance(got, want) < CONV
        assert got.stride() == want.stride()
    x = torch.randn(1, 8, *(16, 14)[-dims:])
    assert distance(model(x), eager(model, x)) < CONV
    assert distance(model(x), eager(model, x)) < CONV
    with torch.no_grad():
        model.up.weight.mul_(-1.5)
        model.up.bias.add_(1)
    assert distance(model(x), eager(model, x)) < CONV
    assert unfrozen(model) == 1


@use_forced
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dims", KINDS)
def test_other_types(dims, dtype):
    model, x = randomised(Decoder(dims)).to(dtype), torch.randn(1, 8, *(12, 10)[-dims:], dtype=dtype)
    convselect.freeze(model, x)
    got, want = model(x), eager(model, x)
    assert got.dtype == dtype
    assert distance(got, want) < {torch.float64: 1e-14}.get(dtype, 3e-2)


def test_a_model_of_transposed_layers_only_is_frozen():
    model = randomised(nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()))
    x = torch.randn(1, 8, 6, 6)
    convselect.freeze(model, x)
    report = convselect.summary(model)
    assert report.frozen == ("",)
    assert report.fused == {"0": ("batch norm", "bias", "relu")}
    assert distance(model(x), eager(model, x)) < CONV
