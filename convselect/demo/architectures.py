"""Well-known convolutional networks written out in plain `torch.nn`, for the demonstration and the benchmarks.

The layer sequence and the parameter counts are those of the published models; the weights are not: they are drawn by
`he_initialise`, and `calibrate_batch_norm` sets the running statistics, so that activations keep order one from the
first layer to the last and a relative error says something about every layer in between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv_bn(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, activation: type[nn.Module] | None = None
) -> nn.Sequential:
    """Convolution with "half" padding and no bias, batch normalisation, and an activation if one is named."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    block = nn.Sequential(conv, nn.BatchNorm2d(c_out))
    if activation is not None:
        block.append(activation(inplace=True))
    return block


def _pooled_head(features: int, classes: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, classes))


# ---- ResNet ---------------------------------------------------------------------------------------------------------


class _Residual(nn.Module):
    """relu(body(x) + shortcut(x)); the shortcut is a 1x1 convolution if the shape changes."""

    def __init__(self, body: nn.Module, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut = nn.Identity() if stride == 1 and c_in == c_out else _conv_bn(c_in, c_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _basic_block(c_in: int, width: int, stride: int) -> _Residual:
    body = nn.Sequential(_conv_bn(c_in, width, 3, stride, activation=nn.ReLU), _conv_bn(width, width, 3))
    return _Residual(body, c_in, width, stride)


def _bottleneck(c_in: int, width: int, stride: int) -> _Residual:
    body = nn.Sequential(
        _conv_bn(c_in, width, 1, activation=nn.ReLU),
        _conv_bn(width, width, 3, stride, activation=nn.ReLU),  # "v1.5": the stride sits on the 3x3
        _conv_bn(width, 4 * width, 1),
    )
    return _Residual(body, c_in, 4 * width, stride)


def _resnet(
    block: Callable[[int, int, int], _Residual], depths: tuple[int, ...], expansion: int, classes: int
) -> nn.Sequential:
    stem = _conv_bn(3, 64, 7, 2, activation=nn.ReLU)
    model = nn.Sequential(stem, nn.MaxPool2d(3, 2, 1))
    c_in = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for i in range(depth):
            model.append(block(c_in, width, 2 if stage > 0 and i == 0 else 1))
            c_in = width * expansion
    return model.append(_pooled_head(c_in, classes))


def resnet18(classes: int = 1000) -> nn.Module:
    """ResNet-18 (He et al., 2015, "Deep Residual Learning for Image Recognition", table 1). (N, 3, H, W) to logits."""
    return _resnet(_basic_block, (2, 2, 2, 2), 1, classes)


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 (He et al., 2015, table 1), stride on the 3x3 convolution. (N, 3, H, W) to logits."""
    return _resnet(_bottleneck, (3, 4, 6, 3), 4, classes)


# ---- VGG ------------------------------------------------------------------------------------------------------------


def vgg16(classes: int = 1000, *, batch_norm: bool = False, classifier: str = "full") -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014, table 1, configuration D). (N, 3, H, W) to logits.

    Args:
        batch_norm: a batch normalisation after each convolution.
        classifier: "full" is the published one with three linear layers (124 of the 138 million parameters);
            "pooled" is a global average and one linear layer, the same convolutions in a ninth of the memory.

    Raises:
        ValueError: for another classifier.
    """
    features = nn.Sequential()
    c_in = 3
    for depth, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            features.append(nn.Conv2d(c_in, width, 3, padding=1))
            if batch_norm:
                features.append(nn.BatchNorm2d(width))
            features.append(nn.ReLU(inplace=True))
            c_in = width
        features.append(nn.MaxPool2d(2))
    if classifier == "pooled":
        return nn.Sequential(features, _pooled_head(c_in, classes))
    if classifier != "full":
        raise ValueError(f"classifier must be 'full' or 'pooled', not {classifier!r}")
    head = nn.Sequential(nn.AdaptiveAvgPool2d(7), nn.Flatten())
    for n_in, n_out in ((512 * 7 * 7, 4096), (4096, 4096)):
        head.extend((nn.Linear(n_in, n_out), nn.ReLU(inplace=True), nn.Dropout(0.5)))
    return nn.Sequential(features, head.append(nn.Linear(4096, classes)))


# ---- U-Net ----------------------------------------------------------------------------------------------------------


def _double_conv(c_in: int, c_out: int) -> nn.Sequential:
    return nn.Sequential(_conv_bn(c_in, c_out, 3, activation=nn.ReLU), _conv_bn(c_out, c_out, 3, activation=nn.ReLU))


class _UNet(nn.Module):
    def __init__(self, width: int, classes: int, upsampling: str) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.inward = nn.ModuleList(_double_conv(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up, self.outward = nn.ModuleList(), nn.ModuleList()
        for low, high in zip(widths[:0:-1], widths[-2::-1], strict=True):
            if upsampling == "transposed":
                self.up.append(nn.ConvTranspose2d(low, high, 2, 2))
            else:
                bilinear = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
                self.up.append(nn.Sequential(bilinear, nn.Conv2d(low, high, 1)))
            self.outward.append(_double_conv(2 * high, high))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.inward):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, block in zip(self.up, self.outward, strict=True):
            x = block(torch.cat((skips.pop(), up(x)), dim=1))
        logits: Tensor = self.head(x)
        return logits


def unet(width: int = 32, classes: int = 2, *, upsampling: str = "transposed") -> nn.Module:
    """U-Net (Ronneberger et al., 2015, figure 1) with padded convolutions and batch normalisation.

    (N, 3, H, W), H and W multiples of 16, to (N, classes, H, W). `width` is that of the first level and doubles with
    each of four halvings; the paper's is 64.

    Raises:
        ValueError: for an upsampling other than "transposed" and "bilinear".
    """
    if upsampling not in ("transposed", "bilinear"):
        raise ValueError(f"upsampling must be 'transposed' or 'bilinear', not {upsampling!r}")
    return _UNet(width, classes, upsampling)


# ---- MobileNet V2 ---------------------------------------------------------------------------------------------------


class _SkipWhereSame(nn.Module):
    """body(x), plus x if body keeps its shape."""

    def __init__(self, body: nn.Module, skip: bool) -> None:
        super().__init__()
        self.body = body
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.skip else y


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """MobileNet V2, width 1.0 (Sandler et al., 2018, table 2). (N, 3, H, W) to logits."""
    model = nn.Sequential(_conv_bn(3, 32, 3, 2, activation=nn.ReLU6))
    c_in = 32
    for expansion, c_out, depth, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(depth):
            stride, hidden = first_stride if i == 0 else 1, c_in * expansion
            body = nn.Sequential()
            if expansion > 1:
                body.append(_conv_bn(c_in, hidden, 1, activation=nn.ReLU6))
            body.append(_conv_bn(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6))
            body.append(_conv_bn(hidden, c_out, 1))
            model.append(_SkipWhereSame(body, stride == 1 and c_in == c_out))
            c_in = c_out
    model.append(_conv_bn(c_in, 1280, 1, activation=nn.ReLU6))
    return model.append(_pooled_head(1280, classes, dropout=0.2))


# ---- ConvNeXt -------------------------------------------------------------------------------------------------------


class _ChannelNorm(nn.LayerNorm):
    """Layer normalisation over C of (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, layer_scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pointwise = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.pointwise(y) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext_tiny(classes: int = 1000, *, layer_scale: float = 0.1) -> nn.Module:
    """ConvNeXt-T (Liu et al., 2022, "A ConvNet for the 2020s", section 3). (N, 3, H, W) to logits.

    `layer_scale` starts at 1e-6 in the paper, which would leave every block's result, and any error in it, invisible;
    0.1 is the order of the trained values. Stochastic depth is left out: it is off at inference.
    """
    depths, widths = (3, 3, 9, 3), (96, 192, 384, 768)
    model = nn.Sequential(nn.Conv2d(3, widths[0], 4, 4), _ChannelNorm(widths[0], eps=1e-6))
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        if stage > 0:
            model.extend((_ChannelNorm(widths[stage - 1], eps=1e-6), nn.Conv2d(widths[stage - 1], width, 2, 2)))
        model.extend(_ConvNeXtBlock(width, layer_scale) for _ in range(depth))
    head = (nn.AdaptiveAvgPool2d(1), _ChannelNorm(widths[-1], eps=1e-6), nn.Flatten(), nn.Linear(widths[-1], classes))
    return model.extend(head)


# ---- Large kernels --------------------------------------------------------------------------------------------------


def replknet_small(classes: int = 1000, *, width: int = 64, depths: tuple[int, ...] = (1, 1, 2, 1)) -> nn.Module:
    """A narrow, shallow RepLKNet-31 (Ding et al., 2022, "Scaling Up Your Kernels to 31x31"). (N, 3, H, W) to logits.

    Depthwise kernels 31, 29, 27 and 13 in the four stages as published, in the form with the parallel 5x5 branch
    merged. The published base model has width 128 and depths (2, 2, 18, 2).
    """
    model = nn.Sequential(
        _conv_bn(3, width, 3, 2, activation=nn.ReLU),
        _conv_bn(width, width, 3, groups=width, activation=nn.ReLU),
        _conv_bn(width, width, 1, activation=nn.ReLU),
        _conv_bn(width, width, 3, 2, groups=width, activation=nn.ReLU),
    )
    for stage, (depth, kernel) in enumerate(zip(depths, (31, 29, 27, 13), strict=True)):
        c = width * 2**stage
        if stage > 0:
            model.append(_conv_bn(c // 2, c, 1, activation=nn.ReLU))
            model.append(_conv_bn(c, c, 3, 2, groups=c, activation=nn.ReLU))
        for _ in range(depth):
            large = nn.Sequential(
                nn.BatchNorm2d(c),
                _conv_bn(c, c, 1, activation=nn.ReLU),
                _conv_bn(c, c, kernel, groups=c, activation=nn.ReLU),
                _conv_bn(c, c, 1),
            )
            feed_forward = nn.Sequential(nn.BatchNorm2d(c), _conv_bn(c, 4 * c, 1), nn.GELU(), _conv_bn(4 * c, c, 1))
            model.extend((_SkipWhereSame(large, skip=True), _SkipWhereSame(feed_forward, skip=True)))
    return model.extend((nn.BatchNorm2d(c), _pooled_head(c, classes)))


# ---- Initialisation -------------------------------------------------------------------------------------------------


@torch.no_grad()
def he_initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every convolution and linear weight from N(0, 2 / fan_in) and zero the biases, in place; returns the model.

    He et al., 2015, "Delving Deep into Rectifiers", equation 10. Does not touch the global random state. For a
    transposed convolution fan_in is the number of terms that meet in one output element, C R S / stride^2.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            continue
        weight = module.weight
        if isinstance(module, nn.ConvTranspose2d):
            fan_in = weight.shape[0] // module.groups * math.prod(weight.shape[2:]) / math.prod(module.stride)
        else:
            fan_in = weight[0].numel()
        weight.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
        if module.bias is not None:
            module.bias.zero_()
    return model


@contextlib.contextmanager
def _restored_modes(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def calibrate_batch_norm(model: nn.Module, x: Tensor) -> nn.Module:
    """Set each batch normalisation's running mean and variance to those of its input when `model` sees `x`.

    One pass in which the normalisations use the batch they see and keep it whole (momentum 1), everything else runs
    as at inference. In place; modes and momenta are restored; returns the model.

    Raises:
        ValueError: from PyTorch, if a normalisation sees a single value per channel.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    with _restored_modes(model):
        model.eval()
        try:
            for norm in norms:
                norm.train()
                norm.momentum = 1.0
            model(x)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return model


class Architecture(NamedTuple):
    """How to build a network, and the (N, C, H, W) it is usually fed."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, int, int, int]


ARCHITECTURES: dict[str, Architecture] = {
    "resnet18": Architecture(resnet18, (1, 3, 224, 224)),
    "resnet50": Architecture(resnet50, (1, 3, 224, 224)),
    "vgg16": Architecture(vgg16, (1, 3, 224, 224)),
    "unet": Architecture(unet, (1, 3, 256, 256)),
    "mobilenet_v2": Architecture(mobilenet_v2, (1, 3, 224, 224)),
    "convnext_tiny": Architecture(convnext_tiny, (1, 3, 224, 224)),
    "replknet_small": Architecture(replknet_small, (1, 3, 224, 224)),
}
