"""The written-out networks are the published ones, and calibration keeps their activations at order one."""

from __future__ import annotations

import importlib

import pytest
import torch
from places import ROOT
from torch import nn

from convselect.demo.architectures import (
    ARCHITECTURES,
    calibrate_batch_norm,
    convnext_tiny,
    he_initialise,
    mobilenet_v2,
    replknet_small,
    resnet18,
    resnet50,
    unet,
    vgg16,
)


@pytest.fixture(autouse=True)
def one_thread():
    """Layers this small lose more to waking a second thread than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(build, **arguments) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(**arguments).parameters())


@pytest.mark.parametrize(
    ("build", "arguments", "published"),
    [
        # The figures in torchvision's model documentation.
        (resnet18, {}, 11_689_512),
        (resnet50, {}, 25_557_032),
        (vgg16, {}, 138_357_544),
        (vgg16, {"batch_norm": True}, 138_365_992),
        (mobilenet_v2, {}, 3_504_872),
        (convnext_tiny, {}, 28_589_128),
        # 64..1024 with batch normalisation, transposed convolutions and one class, as widely reimplemented.
        (unet, {"width": 64, "classes": 1}, 31_037_633),
    ],
)
def test_parameter_counts_are_the_published_ones(build, arguments, published) -> None:
    assert count(build, **arguments) == published


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_registered_network_runs_on_its_input(name) -> None:
    build, shape = ARCHITECTURES[name]
    with torch.device("meta"):
        y = build().eval()(torch.empty(shape))
    assert y.shape == ((1, 2, *shape[2:]) if name == "unet" else (1, 1000))


def test_pooled_vgg_keeps_the_convolutions_and_drops_the_classifier() -> None:
    with torch.device("meta"):
        full, pooled = vgg16(), vgg16(classifier="pooled")
    shapes = [[m.weight.shape for m in model.modules() if isinstance(m, nn.Conv2d)] for model in (full, pooled)]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 13
    assert sum(p.numel() for p in pooled.parameters()) < 16_000_000


def test_bilinear_unet_has_no_transposed_convolution_and_the_same_output() -> None:
    with torch.device("meta"):
        model = unet(8, upsampling="bilinear").eval()
        y = model(torch.empty(1, 3, 32, 48))
    assert y.shape == (1, 2, 32, 48)
    assert not any(isinstance(m, nn.ConvTranspose2d) for m in model.modules())


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="classifier"):
        vgg16(classifier="tiny")
    with pytest.raises(ValueError, match="upsampling"):
        unet(upsampling="nearest")


def test_large_kernel_network_has_31x31_depthwise_kernels() -> None:
    with torch.device("meta"):
        convs = [m for m in replknet_small().modules() if isinstance(m, nn.Conv2d)]
    kernels = {m.kernel_size[0] for m in convs if m.groups == m.in_channels and m.kernel_size[0] > 3}
    assert kernels == {31, 29, 27, 13}


@pytest.mark.parametrize("build", [resnet18, mobilenet_v2, replknet_small, lambda: unet(16)])
def test_calibration_brings_every_normalised_activation_to_order_one(build) -> None:
    x = 5 + 3 * torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    model = he_initialise(build()).eval()
    calibrate_batch_norm(model, x)
    spreads: dict[str, float] = {}

    def watch(name: str):
        return lambda module, inputs, output: spreads.update({name: output.std().item()})

    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(watch(name))
    with torch.no_grad():
        y = model(x)
    assert len(spreads) >= 18
    assert all(0.5 < spread < 2 for spread in spreads.values()), spreads
    assert 0.1 < y.std() < 10


def test_he_initialisation_alone_keeps_vgg_at_order_one() -> None:
    model = he_initialise(vgg16(classifier="pooled")).eval()
    with torch.no_grad():
        y = model[0](torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)))
    assert 0.1 < y.square().mean().sqrt() < 10


def test_he_initialisation_has_the_stated_variance_and_no_side_effect() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = nn.Sequential(nn.Conv2d(64, 128, 3, groups=2), nn.ConvTranspose2d(128, 64, 2, 2), nn.Linear(64, 512))
    torch.set_rng_state(before)
    he_initialise(model, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    # fan_in: 32 channels x 9 taps; 128 channels x 1 tap per output element; 64 features.
    for module, fan_in in zip(model, (288, 128, 64), strict=True):
        assert module.weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.03)
        assert not module.bias.any()
    again = he_initialise(nn.Sequential(nn.Conv2d(64, 128, 3, groups=2)), seed=3)
    assert torch.equal(again[0].weight, model[0].weight)


def test_calibration_restores_modes_and_momenta_and_changes_no_parameter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.5), nn.BatchNorm2d(4))
    model[2].train()
    model[3].eval()
    parameters = [p.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    calibrate_batch_norm(model, torch.randn(2, 3, 8, 8))
    assert [m.training for m in model.modules()] == modes
    assert model[1].momentum == 0.3
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))


def test_benchmarks_use_the_same_networks(monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    models = importlib.import_module("benchmarks.models")
    assert models.MODELS is ARCHITECTURES
    model, x = models.build("mobilenet_v2")
    with torch.no_grad():
        y = model(x)
    assert y.shape == (1, 1000)
    assert 0.1 < y.std() < 10
