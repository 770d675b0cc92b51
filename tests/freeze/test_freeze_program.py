"""Programs: memory laid out beforehand, steps that are not layers, sizes that depend on data, several threads."""

from __future__ import annotations

import threading

import pytest
import torch
from networks import CONV, Residual, conv_bn, distance, eager, frozen_outputs, randomised, use_forced
from torch import nn

import convselect


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
@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool2d((1, 2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_global_average_pools(pool, dtype):
    model = randomised(nn.Sequential(conv_bn(3, 21, activation=nn.ReLU()), pool, nn.Flatten())).to(dtype)
    x = torch.randn(2, 3, 9, 7).to(dtype)
    want, got, _ = frozen_outputs(model, x)
    assert distance(got, want) < (CONV if dtype == torch.float32 else 3e-2)
    assert got.stride() == want.stride()


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


@use_forced
def test_memory_starts_as_nan(nan_memory):
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), Residual("shortcut"), nn.Conv2d(8, 4, 1)))
    x = torch.randn(1, 3, 11, 9)
    want, got, _ = frozen_outputs(model, x)
    assert distance(got, want) < CONV
