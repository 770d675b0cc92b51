"""Folded weights: exact, and folded again when a tensor that they come from changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, distance, eager, needs_library, randomised, use_forced
from torch import nn

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.settings import current
from convselect.freeze import layer
from convselect.freeze.capture import capture
from convselect.freeze.program import Program, Registry


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_folding_is_exact(affine, bias):
    conv, norm = nn.Conv2d(3, 5, 3, bias=bias).double(), nn.BatchNorm2d(5, eps=1e-3, affine=affine).double()
    model = randomised(nn.Sequential(conv, norm))
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    program = Program(capture(model, (x,)), Registry())
    assert len(program.steps) == 1
    frozen = program.layers[program.steps[0]]
    with torch.no_grad():
        assert distance(F.conv2d(x, frozen.weight, frozen.bias), model(x)) < 1e-15


@needs_library
def test_one_pixel_has_the_product_in_both_layouts():
    model, x = randomised(nn.Sequential(nn.Conv2d(24, 40, 1), nn.ReLU())), torch.randn(1, 24, 1, 1)
    with torch.no_grad():
        program = Program(capture(model, (x,)), Registry())
        frozen = program.layers[program.steps[0]]
        for layout in (CONTIGUOUS, CHANNELS_LAST):
            found = {c.name: c for c in frozen.candidates(x, None, layout, current())}
            assert distance(found["product"].bind(None, None, None)(x), model(x)) < CONV


@needs_library
def test_layers_of_one_row_are_left_to_kernels_with_packed_weights(monkeypatch):
    """Warm times, in which a call of BLAS may win, say nothing of a weight that comes from memory."""
    compared = []

    def first(functions, *_):
        compared.append(set(functions))
        return next(iter(functions))

    monkeypatch.setattr(layer, "fastest", first)
    model = randomised(nn.Sequential(nn.Conv2d(24, 40, 1), nn.ReLU()))
    for size, others in ((1, False), (3, True)):
        with torch.no_grad():
            convselect.freeze(model)(torch.randn(1, 24, size, size))
        convselect.unfreeze(model)
        assert compared
        assert all({"direct", "product"} & names and ("native" in names) == others for names in compared)
        compared.clear()


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
        model[3] = randomised(nn.Sequential(type(model[3])(6, 4, 1)), seed=7)

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


KINDS = {
    "2-D": (nn.Conv2d, nn.BatchNorm2d, (9, 8)),
    "1-D": (nn.Conv1d, nn.BatchNorm1d, (9,)),
    "transposed": (nn.ConvTranspose2d, nn.BatchNorm2d, (5, 4)),
    "transposed 1-D": (nn.ConvTranspose1d, nn.BatchNorm1d, (5,)),
}


@use_forced
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", changes())
def test_a_changed_weight_is_noticed_at_once(route, kind):
    conv, norm, size = KINDS[kind]
    model = randomised(nn.Sequential(conv(3, 6, 3), norm(6), nn.ReLU(), conv(6, 4, 1)))
    x = torch.randn(1, 3, *size)
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
