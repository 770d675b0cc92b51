"""Networks of timm with random weights in which every layer matters, for `benchmarks.timm_networks`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks._rivals import Absent
from benchmarks.models import calibrate_batch_norm, he_initialise

NAMES = (
    "resnet50", "wide_resnet50_2", "seresnet50", "resnext50_32x4d", "resnetv2_50", "res2net50_26w_4s", "densenet121",
    "inception_v3", "vgg16", "dla34", "cspdarknet53", "hrnet_w18_small", "ese_vovnet19b_dw", "regnety_016", "repvgg_b0",
    "mobileone_s0", "mobilenetv3_large_100", "mobilenetv4_conv_small", "efficientnet_b0", "efficientnetv2_rw_s",
    "ghostnet_100", "repghostnet_100", "nfnet_l0", "convnext_tiny", "convnextv2_nano", "edgenext_small",
    "inception_next_tiny", "poolformerv2_s12", "fastvit_t8", "coatnet_nano_rw_224",
)  # fmt: skip
_CALIBRATION_BATCH = 4  # a normalisation may stand behind a pooling to 1x1
_NEGLIGIBLE = 1e-2
_BRANCH_SCALE = 0.3


def build(name: str, *, reparameterised: bool = False, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """(a network in evaluation mode, one image of the size it was made for).

    Args:
        name: of timm, or `module:function`, a function that returns a network and an input.
        reparameterised: merge parallel branches as timm does for deployment.

    Raises:
        Absent: timm is not installed.
        ValueError: timm has no network of this name.
    """
    torch.manual_seed(seed)
    if ":" in name:
        module, _, function = name.partition(":")
        make: Callable[[], tuple[nn.Module, Tensor]] = getattr(importlib.import_module(module), function)
        model, x = make()
        return model.eval(), x
    model, shape = _create(name)
    enliven(he_initialise(model, seed), seed)
    images = torch.randn((_CALIBRATION_BATCH, *shape), generator=torch.Generator().manual_seed(seed))
    calibrate_batch_norm(model, images)
    if reparameterised:
        from timm.utils.model import reparameterize_model  # type: ignore[import-not-found]

        model = reparameterize_model(model)
    return model.eval(), images[:1].clone()


def _create(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    if importlib.util.find_spec("timm") is None:
        raise Absent("timm is not installed")
    from tests.torchvision_stub import without_torchvision  # timm wants it for image transforms only

    with without_torchvision():
        import timm
    if not timm.is_model(name):
        raise ValueError(f"timm has no network {name!r}")
    model = timm.create_model(name, pretrained=False).eval()
    return model, tuple(model.pretrained_cfg["input_size"])


@torch.no_grad()
def enliven(model: nn.Module, seed: int = 0) -> nn.Module:
    """Let every branch add to the result. Networks are made so that their residual branches start at zero, or nearly:
    a mistake in one would not be seen, and folding them away would be allowed.

    Scales of normalisations are drawn from U(0.5, 1.5), their shifts and all other biases from N(0, 0.1^2). Other
    parameters that hold one negligible value (layer scales, gains) become 0.3.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        normalises = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias" and parameter.dim() == 1:
                parameter.normal_(0.0, 0.1, generator=generator)
            elif normalises and name == "weight":
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif parameter.abs().max() <= _NEGLIGIBLE and parameter.min() == parameter.max():
                parameter.fill_(_BRANCH_SCALE)
    return model
