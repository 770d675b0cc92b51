"""Networks that people use, from timm, diffusers and torchvision: converted, and as they are under `enabled()`, beside
the original; those of torchvision frozen as well.

Random weights and small images. Two things would magnify rounding without end and say nothing about convolutions, so
they are taken out of both sides: batch normalisation over two images of a pixel (its statistics are taken once, then
kept), and kinks, at which a rounding that crosses zero takes the other branch (smooth activations stand in). Every
convolution that an algorithm of ours can do is done by one of ours.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools

import pytest
import torch
from _parity import algorithms_of
from fake_model import use_fake
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR
from torch import nn
from torchvision_stub import loaded_torchvision, without_torchvision

import convselect
from convselect.kernels._contract import Grade

pytestmark = pytest.mark.slow

# Name -> what it has that others have not.
TIMM = {
    "resnet18": "3x3 and strided 1x1",
    "skresnet18": "two dilations side by side",
    "dla46x_c": "32 groups",
    "regnetx_002": "groups of eight channels",
    "mobilenetv2_050": "inverted residuals",
    "mobilenetv3_small_050": "5x5 depthwise, squeeze and excitation on one pixel",
    "tf_mobilenetv3_small_minimal_100": "Conv2dSame: padding computed in the forward",
    "tf_mixnet_s": "kernels of 3 to 9 in one layer",
    "lcnet_035": "narrow",
    "ghostnet_050": "cheap operations",
    "repvgg_a0": "parallel branches",
    "mobileone_s0": "parallel branches, depthwise",
    "convnext_atto": "7x7 depthwise, patches",
    "edgenext_xx_small": "3x3 to 9x9 depthwise, attention",
    "inception_next_atto": "1x11 and 11x1 depthwise",
    "mobilevit_xxs": "convolutions around transformers",
    "fastvit_t8": "reparametrised mixers",
    "nf_regnet_b0": "weight-standardised convolutions",
    "test_nfnet": "weight-standardised, gains",
    "vit_tiny_patch16_224": "one patch convolution",
}


@pytest.fixture(scope="module")
def torchvision():
    found = loaded_torchvision()
    if found is None:
        pytest.skip("there is no torchvision for this torch")
    return found


@pytest.fixture(scope="module")
def timm():
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install 'convselect[models]'")
    with without_torchvision():
        import timm
    return timm


@pytest.fixture
def diffusers():
    return pytest.importorskip("diffusers", reason="diffusers is not installed: pip install 'convselect[models]'")


@pytest.fixture(autouse=True)
def _never_native_if_it_can_be_helped(monkeypatch):
    use_fake(monkeypatch, "winograd4", "depthwise", "grouped", "direct", "im2col_gemm")


def gradients(model, inputs):
    """The output and each parameter's gradient, by name."""
    model.zero_grad()
    leaf = inputs[0].clone().requires_grad_()
    y = model(leaf, *inputs[1:])
    if not isinstance(y, torch.Tensor):
        y = y["out"] if isinstance(y, dict) and "out" in y else y.sample
    # Weighed, so that no part of the output has a gradient of its mean only.
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"the output": y.detach(), "the input's gradient": leaf.grad, **grads}


def assert_equal(got, want, calls, what):
    """Each convolution adds at most the table's error to its result and its gradients, and a result passes through all
    of them in the worst case, forward and back. Gradients far smaller than the others' (of biases in front of a
    normalisation, say) are the rest of sums that cancel: they are held to a thousandth of the typical size."""
    limit = 2 * calls * FORWARD["float32", Grade.NEAR] * WEIGHT_GRADIENT_FACTOR
    sizes = [g.norm() / g.numel() ** 0.5 for g in want.values()]
    floor = 1e-3 * torch.stack(sizes).median()
    assert got.keys() == want.keys()
    for name, w in want.items():
        g = got[name]
        assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride()), f"{what}: {name}"
        error = (g - w).norm() / torch.maximum(w.norm(), floor * w.numel() ** 0.5)
        assert error <= limit, f"{what}: {name} is {error:.1e} off, {limit:.1e} allowed"


KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid)


def settle(model, inputs):
    """Evaluation mode, with the statistics of these inputs and without kinks."""
    for name, module in list(model.named_modules()):
        if isinstance(module, KINKED):
            model.set_submodule(name, nn.Sigmoid() if isinstance(module, nn.Hardsigmoid) else nn.SiLU())
        elif isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.abs().max() <= 1e-5:  # gains that start at nothing would hide what they multiply
                parameter.uniform_(0.2, 0.6)
        model.train()(*inputs)
    model.eval()


def compare(model, inputs):
    """Original, converted, and the original under `enabled()`; how many convolutions ran in algorithms of ours."""
    settle(model, inputs)
    calls = len([m for m in model.modules() if isinstance(m, nn.Conv2d)])
    want = gradients(model, inputs)
    converted = copy.deepcopy(model)
    report = convselect.summary(convselect.convert(converted))
    assert list(converted.state_dict()) == list(model.state_dict())
    converted.load_state_dict(model.state_dict(), strict=True)
    ours = algorithms_of(lambda: assert_equal(gradients(converted, inputs), want, calls, "converted"))

    def inside():
        with convselect.enabled():
            assert_equal(gradients(model, inputs), want, calls, "enabled")

    within = algorithms_of(inside)
    assert not convselect.summary(model).converted
    assert set(within) - {"native"}
    assert len(within) >= len(ours)
    if report.converted:
        assert set(ours) - {"native"}
    assert not convselect.summary(convselect.revert(converted)).converted
    return len(ours), len(within)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name, timm):
    arguments = {"img_size": 64} if name.startswith("vit") else {}
    model = timm.create_model(name, pretrained=False, num_classes=10, **arguments)
    ours, within = compare(model, (torch.randn(2, 3, 64, 64),))
    # Subclasses with a forward of their own included, which the tf_ models and the normaliser-free ones have.
    assert within == ours


def test_timm_in_channels_last(timm):
    model = timm.create_model("mobilenetv3_small_050", num_classes=10).to(memory_format=torch.channels_last)
    compare(model, (torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last),))


def test_reparameterised_models(timm):
    """New layers are plain, and another `convert` takes them in."""
    from timm.layers import convert_sync_batchnorm
    from timm.utils.model import reparameterize_model

    stock = timm.create_model("repvit_m0_9", num_classes=10).eval()
    model = convselect.convert(copy.deepcopy(stock))
    layers = len(convselect.summary(model).converted)
    assert len(convselect.summary(convert_sync_batchnorm(copy.deepcopy(model))).converted) == layers
    stock, model = reparameterize_model(stock), reparameterize_model(model)
    kinds = [type(m) for m in model.modules()]
    assert kinds == [type(m) for m in stock.modules()]
    report = convselect.summary(model)
    assert set(report.left_alone.values()) == {"It was not converted."}
    convselect.convert(model)
    assert len(report.converted) < len(convselect.summary(model).converted) == kinds.count(nn.Conv2d) < layers
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-3, atol=1e-4)


def test_unet(diffusers):
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8, attention_head_dim=8,
    )  # fmt: skip
    compare(model, (torch.randn(1, 3, 16, 16), torch.tensor([7])))


def test_vae(diffusers):
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    compare(model, (torch.randn(1, 3, 32, 32),))


# ---- torchvision ----------------------------------------------------------------------------------------------------

# Name -> what it has that others have not. The last two are detectors.
TORCHVISION = {
    "squeezenet1_1": "no normalisation",
    "shufflenet_v2_x0_5": "channels in halves, views of them",
    "densenet121": "concatenations",
    "mnasnet0_5": "5x5 depthwise of strides 1 and 2",
    "lraspp_mobilenet_v3_large": "segmentation: results of two sizes, interpolated",
    "deeplabv3_mobilenet_v3_large": "segmentation: dilations of 12, 24 and 36",
    "ssdlite320_mobilenet_v3_large": "depthwise heads on six sizes, down to a pixel",
    "fasterrcnn_mobilenet_v3_large_320_fpn": "one head on every size of a pyramid",
}


class Detector(nn.Module):
    """What a detector's convolutions compute, in one tensor, from a call as people make it: which boxes are left at the
    end changes with the last digit. In training, where it would want boxes, it is the backbone alone."""

    HEADS = ("RPNHead", "SSDLiteHead")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.model.backbone(images)
        found: list[torch.Tensor] = []

        def keep(module, given, result):
            found.extend(itertools.chain.from_iterable(result.values() if isinstance(result, dict) else result))

        heads = [module for module in self.model.modules() if type(module).__name__ in self.HEADS]
        handles = [head.register_forward_hook(keep) for head in heads]
        try:
            assert {"boxes", "labels", "scores"} <= self.model(list(images))[0].keys()
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([t.flatten() for t in found])


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name, torchvision):
    options = {"weights_backbone": None} if "mobilenet" in name else {}
    if name.startswith("fasterrcnn"):
        options |= {"min_size": 64, "max_size": 64}
    model = torchvision.models.get_model(name, weights=None, **options)
    images = torch.randn(2, 3, 64, 64)
    if not hasattr(model, "transform"):
        compare(model, (images,))
        frozen, original = model, copy.deepcopy(model)
    else:
        compare(Detector(model), (images,))
        frozen, original = model.backbone, copy.deepcopy(model.backbone)
    convselect.freeze(frozen, images)
    with torch.no_grad():
        got, want = frozen(images), original(images)
    calls = len([m for m in original.modules() if isinstance(m, nn.Conv2d)])
    got, want = ({"the output": t} if isinstance(t, torch.Tensor) else dict(t) for t in (got, want))
    assert_equal(got, want, calls, "frozen")
    assert convselect.summary(frozen).frozen
