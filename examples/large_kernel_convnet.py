"""A ConvNet with 31x31 depthwise kernels, inference on a CPU: what is chosen per layer, and what it gains.

    python examples/large_kernel_convnet.py            # about 20 seconds
    python examples/large_kernel_convnet.py --quick    # a tiny one

PyTorch's own convolution is furthest from what the processor can do for large depthwise kernels (Ding et al., 2022,
"Scaling Up Your Kernels to 31x31").
"""

import argparse
import copy

import torch
from torch import nn

import convselect
from convselect.base.timing import interleaved, ratio


class LargeKernelBlock(nn.Module):
    """x + a large depthwise convolution between two 1x1, then x + a 1x1 feed-forward."""

    def __init__(self, channels, kernel):
        super().__init__()
        self.large = nn.Sequential(
            nn.Conv2d(channels, channels, 1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1),
        )
        self.feed_forward = nn.Sequential(
            nn.Conv2d(channels, 4 * channels, 1), nn.GELU(), nn.Conv2d(4 * channels, channels, 1)
        )

    def forward(self, x):
        x = x + self.large(x)
        return x + self.feed_forward(x)


def build(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 4, stride=4),
        LargeKernelBlock(width, 31),
        nn.Conv2d(width, 2 * width, 2, stride=2),
        LargeKernelBlock(2 * width, 29),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 1000),
    )


def inputs_of_convolutions(model, x):
    """Layer name -> its input."""
    seen = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0]}))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d)
    ]
    model(x)
    for hook in hooks:
        hook.remove()
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny network, for a test")
    args = parser.parse_args()
    width, size, rounds = (8, 96, 3) if args.quick else (64, 224, 15)

    torch.manual_seed(0)
    stock = build(width).eval()
    model = convselect.convert(copy.deepcopy(stock))
    x = torch.randn(1, 3, size, size)

    # "auto" does what the model predicts from the first call on; the default would check it on the first real calls.
    with torch.inference_mode(), convselect.use("auto"):
        print(convselect.explain(model, x))

        want, got = stock(x), model(x)
        error = float((got - want).norm() / want.norm())
        print(f"\nlogits: {error:.0e} from stock PyTorch's")
        assert error < 1e-4

        print("\ntimes faster, measured layer by layer (medians of interleaved runs):")
        for name, given in inputs_of_convolutions(stock, x).items():
            plain, selected = stock.get_submodule(name), model.get_submodule(name)
            calls = {"stock": lambda f=plain, x=given: f(x), "converted": lambda f=selected, x=given: f(x)}
            timings = interleaved(calls, rounds)
            gain = ratio(timings["stock"], timings["converted"]).median
            kind = f"{plain.kernel_size[0]}x{plain.kernel_size[1]}{' depthwise' if plain.groups > 1 else ''}"
            print(f"  {name:<18} {kind:<16} {timings['stock'].median_us / 1e3:8.2f} ms  {gain:5.2f} x")

        timings = interleaved({"stock": lambda: stock(x), "converted": lambda: model(x)}, rounds)
        whole = ratio(timings["stock"], timings["converted"])
        print(
            f"\nwhole network: {timings['stock'].median_us / 1e3:.1f} ms stock, "
            f"{timings['converted'].median_us / 1e3:.1f} ms converted, "
            f"{whole.median:.2f} times faster (p20 {whole.p20:.2f}, p80 {whole.p80:.2f})"
        )


if __name__ == "__main__":
    main()
