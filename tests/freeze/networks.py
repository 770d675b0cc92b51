"""Networks and helpers that the tests of freezing share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convselect
from convselect.demo.architectures import he_initialise
from convselect.kernels import _library

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
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for t, low, high in ((module.running_mean, -0.3, 0.3), (module.running_var, 0.5, 2.0)):
                    t.copy_(torch.rand(t.shape, generator=generator) * (high - low) + low)
                if module.affine:
                    module.weight.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
                    module.bias.copy_(torch.rand(module.bias.shape, generator=generator) - 0.5)
            elif isinstance(module, nn.modules.conv._ConvNd) and module.bias is not None:
                module.bias.copy_(torch.rand(module.bias.shape, generator=generator) - 0.5)
    return model.eval()


def eager(model, *args):
    """What the model computes by itself, nothing in it frozen."""
    twin = copy.deepcopy(model)
    convselect.unfreeze(twin)
    with torch.no_grad():
        return twin(*args)


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


def check_candidate(candidate, x, residual, want, tolerance=CONV):
    """On memory of its own, and on given memory, which it does not read before it writes it."""
    got = candidate.bind(None, None, None)(x, residual)
    assert distance(got, want) < tolerance, candidate.name
    if candidate.writes_out:
        out = torch.full_like(got, torch.nan)
        scratch = torch.full((candidate.scratch_bytes,), 255, dtype=torch.uint8)  # NaN, as floats
        run = candidate.bind(x, residual, out, *([scratch] if candidate.scratch_bytes else []))
        for _ in range(2):
            run(x, residual)
            assert distance(out, want) < tolerance, candidate.name
            out.fill_(torch.nan)


def frozen_outputs(model, x):
    """(eager output, frozen output at the call that plans, frozen output after it)."""
    with torch.no_grad():
        want = model(x)
    report = convselect.summary(convselect.freeze(model, x))
    return want, model(x), report


class Flagged(nn.Module):
    """Control flow that depends on data, around convolutions that do not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv_bn(8, 8, activation=nn.ReLU()), conv_bn(8, 8)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def unfrozen(model):
    """In how many parts the model was frozen; it no longer is."""
    count = len(convselect.summary(model).frozen)
    assert convselect.unfreeze(model) is model
    assert convselect.summary(model).frozen == ()
    return count
