"""Sliding-window segmentation of a volume of 192 x 192 x 128 on a CPU, as for a scan: stock and converted, in turns.

    python examples/segment_volume.py                # a minute or two
    python examples/segment_volume.py --monai        # MONAI's SegResNet in place of the U-Net written out here
    python examples/segment_volume.py --quick        # a small volume, a tiny network

Needs `pip install 'convselect[tools]'` for the progress bar. Weights and volume are random: speed does not depend on
them.
"""

import argparse
import copy
import itertools

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import convselect
from convselect.base.timing import Deadline


def double_conv(c_in, c_out):
    layers = []
    for c in (c_in, c_out):
        layers += [nn.Conv3d(c, c_out, 3, padding=1), nn.InstanceNorm3d(c_out, affine=True), nn.LeakyReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """(N, 1, D, H, W) to the logits of `classes`; three levels, as nnU-Net builds them (Isensee et al. 2021)."""

    def __init__(self, width, classes):
        super().__init__()
        self.down1, self.down2 = double_conv(1, width), double_conv(width, 2 * width)
        self.bottom = double_conv(2 * width, 4 * width)
        self.up2, self.out2 = nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), double_conv(4 * width, 2 * width)
        self.up1, self.out1 = nn.ConvTranspose3d(2 * width, width, 2, 2), double_conv(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        fine = self.down1(x)
        middle = self.down2(F.max_pool3d(fine, 2))
        coarse = self.bottom(F.max_pool3d(middle, 2))
        middle = self.out2(torch.cat((middle, self.up2(coarse)), 1))
        return self.head(self.out1(torch.cat((fine, self.up1(middle)), 1)))


def monai_segresnet(width, classes):
    from monai.networks.nets import SegResNet

    return SegResNet(blocks_down=(1, 2, 2), blocks_up=(1, 1), init_filters=width, in_channels=1, out_channels=classes)


def starts(size, window, overlap):
    """Where windows begin along an axis: evenly spaced, the last one at its end."""
    step = max(1, int(window * (1 - overlap)))
    count = -(-(size - window) // step) + 1
    return [round(i * (size - window) / max(count - 1, 1)) for i in range(count)]


def weight_of(window):
    """A bump (D, H, W): results near the borders of a window count less, since they have seen less around them."""
    axes = [torch.exp(-0.5 * ((torch.arange(n) - (n - 1) / 2) / (n / 8)) ** 2) for n in window]
    return (axes[0][:, None, None] * axes[1][:, None] * axes[2]).clamp_min(1e-3)


def segment(models, volume, window, overlap, classes):
    """Name -> (logits (classes, D, H, W), seconds). Models take turns, so that other load hits all."""
    size, bump = volume.shape[2:], weight_of(window)
    sums = {name: torch.zeros(classes, *size) for name in models}
    norm, seconds = torch.zeros(size), dict.fromkeys(models, 0.0)
    places = list(itertools.product(*(starts(n, w, overlap) for n, w in zip(size, window, strict=True))))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        for place in bar.track(places, description="windows"):
            at = tuple(slice(p, p + w) for p, w in zip(place, window, strict=True))
            part = volume[(..., *at)].contiguous()
            for name, model in models.items():
                began = Deadline(None)
                logits = model(part)[0]
                seconds[name] += began.elapsed_s
                sums[name][(slice(None), *at)] += logits * bump
            norm[at] += bump
    return {name: (total / norm, seconds[name]) for name, total in sums.items()}, len(places)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small volume and a tiny network, for a test")
    parser.add_argument("--monai", action="store_true", help="MONAI's SegResNet: pip install monai")
    parser.add_argument("--overlap", type=float, default=0.25, help="of neighbouring windows, as a share of their size")
    args = parser.parse_args()
    size, window, width = ((24, 24, 16), (16, 16, 16), 4) if args.quick else ((192, 192, 128), (96, 96, 64), 16)
    classes = 3

    torch.manual_seed(0)
    stock = (monai_segresnet(2 * width, classes) if args.monai else UNet(width, classes)).eval()
    models = {"stock": stock, "converted": convselect.convert(copy.deepcopy(stock))}
    volume = torch.randn(1, 1, *size)
    with torch.inference_mode():
        found, count = segment(models, volume, window, args.overlap, classes)

    (want, stock_s), (got, converted_s) = found["stock"], found["converted"]
    error = float((got - want).norm() / want.norm())
    same = float((got.argmax(0) == want.argmax(0)).float().mean())
    print(f"{count} windows of {'x'.join(map(str, window))} in a volume of {'x'.join(map(str, size))}")
    print(f"logits: {error:.0e} from stock PyTorch's; {same:.4%} of the voxels have the same class")
    # Trials, in which native and candidates take turns on the first windows, are part of the converted time.
    print(f"stock {stock_s:.2f} s, converted {converted_s:.2f} s: {stock_s / converted_s:.2f} times faster")
    print(str(convselect.summary(models["converted"])).splitlines()[-1])
    assert error < 1e-4
    assert same > 0.999


if __name__ == "__main__":
    main()
