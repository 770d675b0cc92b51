"""The networks of the benchmarks: those of the package, which the demonstration needs if only that is installed.

`MODELS` maps a name to (builder, input shape (N, C, H, W)); `build(name)` gives one ready to compare numbers on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from convselect.demo.architectures import (
    ARCHITECTURES,
    Architecture,
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

__all__ = [
    "MODELS",
    "Architecture",
    "build",
    "calibrate_batch_norm",
    "convnext_tiny",
    "he_initialise",
    "mobilenet_v2",
    "replknet_small",
    "resnet18",
    "resnet50",
    "unet",
    "vgg16",
]

MODELS = ARCHITECTURES


def build(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """A network in evaluation mode, He-initialised and calibrated, and the standard normal input it was calibrated on.

    Raises:
        KeyError: for a name that is not in `MODELS`.
    """
    architecture = MODELS[name]
    x = torch.randn(architecture.input_shape, generator=torch.Generator().manual_seed(seed))
    model = he_initialise(architecture.build(), seed).eval()
    return calibrate_batch_norm(model, x), x
