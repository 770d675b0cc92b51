"""Steps between the layers: each kind of operation in one pass of the C library, and the same where it cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, distance, eager, frozen_outputs, needs_library, randomised
from torch import nn

import convselect
from convselect.freeze import forward as freezing
from convselect.freeze import passes, plan

pytestmark = needs_library


def attended(y, v, mask):
    """Two heads of 4 channels, over pixels, as CoAtNet has it: with copies, and the result back in an image."""
    q, k = (t.flatten(2).view(2, 2, 4, 63).transpose(-1, -2).contiguous() for t in (y, v))
    out = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    return out.transpose(-1, -2).reshape(2, 8, 7, 9)


OPERATIONS = {
    "gate": lambda y, v: y * torch.sigmoid(v.mean((2, 3), keepdim=True)),
    "gate of pixels": lambda y, v: y * F.hardsigmoid(v.mean(1, keepdim=True)),
    "numbers": lambda y, v: 2 - (y * v + 1) / 3 - v * 0.5,
    "reversed": lambda y, v: torch.rsub(y, v) + torch.sub(v, 1.5),
    "tails": lambda y, v: F.hardswish(y) + F.gelu(v) + torch.tanh(y) * F.gelu(v, approximate="tanh"),
    "more tails": lambda y, v: F.elu(y, 0.7) + F.softplus(v) + F.mish(y) + F.leaky_relu(v, 0.2),
    "clamps": lambda y, v: y.clamp(-1, 1) + v.clamp(min=0.1) + F.relu6(y * 4) + F.hardtanh(v) + v.clamp(max=0.3),
    "roots": lambda y, v: (y.abs() + 1).sqrt() + (v.square() + 1).rsqrt() + (y.exp() + 1).log() + v**2,
    "extrema": lambda y, v: torch.maximum(y, v) - torch.minimum(y, -v) + (y * y + 1).reciprocal(),
    "max pool": lambda y, v: F.max_pool2d(y, 3, 2, 1) + F.max_pool2d(v, 2, ceil_mode=True),
    "average pool": lambda y, v: F.avg_pool2d(y, 3, 2, 1) + F.avg_pool2d(v, 2, ceil_mode=True, count_include_pad=False),
    "mean": lambda y, v: y.mean((2, 3)) + v.mean((2, 3), keepdim=True).flatten(1),
    "norm": lambda y, v: y / (torch.linalg.vector_norm(v, dim=(2, 3), keepdim=True) + 1),
    "sum": lambda y, v: y + v.sum((2, 3), keepdim=True),
    "variance": lambda y, v: y * v.var((2, 3), correction=0, keepdim=True),
    "largest": lambda y, v: y + v.amax((2, 3), keepdim=True),
    "group norm": lambda y, v: F.group_norm(y, 1) * F.group_norm(v, 4),
    "attention": lambda y, v: attended(y, v, None),
    "attention with a mask": lambda y, v: attended(y, v, torch.ones(63, 63).tril().log()),
    "concatenation": lambda y, v: torch.cat([y, v, y], 1),
    "layer norm of channels": lambda y, v: F.layer_norm(y.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2) + v,
    "softmax": lambda y, v: torch.softmax(y.flatten(2), -1),
    "shuffle": lambda y, v: (y + v).view(2, 2, 4, 7, 9).transpose(1, 2).reshape(2, 8, 7, 9) * 2,
    "split": lambda y, v: torch.cat([a * b for a, b in zip(y.chunk(4, 1), v.split(2, 1), strict=True)], 1),
}


# Operands that lie in an order which the pass does not take.
BY_ATEN = {("layer norm of channels", "contiguous"), ("shuffle", "channels_last"), ("softmax", "channels_last")}


class Between(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.last, self.name = nn.LazyConv2d(4, 1), name

    def forward(self, x):
        y = OPERATIONS[self.name](self.one(x), self.two(x))
        return self.last(y) if y.dim() == 4 else y


def made(name):
    model = Between(name)
    model(torch.randn(2, 3, 9, 11))
    if isinstance(model.last, nn.LazyConv2d):  # never called
        model.last = nn.Identity()
    return randomised(model)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_pass(name, layout, monkeypatch):
    monkeypatch.setattr(freezing, "_LAYOUTS", (layout,))
    maker_of, taken = passes.maker_of, []
    monkeypatch.setattr(plan, "maker_of", lambda *args: taken.append(maker_of(*args)) or taken[-1])
    model, x = made(name), torch.randn(2, 3, 9, 11)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert got.stride() == want.stride()
    if (name, layout) not in BY_ATEN:
        assert any(maker is not None for maker in taken)
    for _ in range(2):
        again = torch.randn(2, 3, 9, 11)
        assert distance(model(again), eager(model, again)) < CONV
    assert report.frozen == ("",)


def test_what_the_library_does_not_take_is_computed_by_aten(monkeypatch):
    monkeypatch.setattr(passes.pointwise, "bind", lambda *_: None)
    monkeypatch.setattr(passes.reduce, "mean", lambda *_: None)
    x = torch.randn(2, 3, 9, 11)
    want, got, _ = frozen_outputs(made("gate"), x)
    assert distance(got, want) < CONV


def test_a_wrong_pass_is_not_taken(monkeypatch):
    right = passes.pointwise.bind

    def wrong(instructions, inputs, out):
        return right([("neg", (passes.pointwise.Input(0),))], inputs, out)

    monkeypatch.setattr(passes.pointwise, "bind", wrong)
    x = torch.randn(2, 3, 9, 11)
    want, got, _ = frozen_outputs(made("gate"), x)
    assert distance(got, want) < CONV


class Scaled(Between):
    def __init__(self):
        super().__init__("gate")
        self.last, self.scale = nn.Identity(), nn.Parameter(torch.rand(1, 1, 7, 9))

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_constant_among_the_operands_is_watched():
    model, x = randomised(Scaled()), torch.randn(2, 3, 9, 11)
    convselect.freeze(model, x)
    with torch.no_grad():
        model.scale.mul_(3)
    assert distance(model(x), eager(model, x)) < CONV
    model.scale = nn.Parameter(torch.rand(1, 1, 7, 9))
    assert distance(model(x), eager(model, x)) < CONV
