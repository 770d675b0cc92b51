"""Small networks, whose time is mostly the overhead of calls: converted against stock.

    python -m benchmarks.small_networks [--policy auto] [--rounds 40]

One thread, interleaved in one process, CPU time, the median of the ratios of rounds; float32, batch 1 and 32, inference
and training step. Trials, where the policy holds any, are over before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import convselect
from benchmarks import _timm
from benchmarks._tables import geometric_mean
from benchmarks._trials_machine import restart
from convselect.base import timing
from convselect.eager import cached
from convselect.machine.environment import run_environment

SAMPLE_US = 3000.0
"""Calls are repeated up to about this long, so that the clock costs nothing."""
SETTLE = 80


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        # He et al. 2016, option A: every other pixel, and zeros for the new channels.
        return F.relu(y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more)))


def resnet20() -> nn.Module:
    """He et al. 2016, section 4.2, n = 3."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width = 16
    for outputs in (16, 32, 64):
        for block in range(3):
            layers.append(_Residual(width, outputs, 2 if block == 0 and outputs > 16 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def dqn() -> nn.Module:
    """Mnih et al. 2015."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 18),
    )  # fmt: skip


def lenet5() -> nn.Module:
    """LeCun et al. 1998, with rectifiers and maxima."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def mobilenetv3_small() -> nn.Module:
    return _timm.build("mobilenetv3_small_100")[0]


def squeeze_and_excite() -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(144, 16, 1), nn.ReLU(), nn.Conv2d(16, 144, 1), nn.Sigmoid())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-20, 32x32": (resnet20, (3, 32, 32)),
    "DQN, 84x84": (dqn, (4, 84, 84)),
    "LeNet-5, 28x28": (lenet5, (1, 28, 28)),
    "MobileNetV3-small, 96x96": (mobilenetv3_small, (3, 96, 96)),
    "squeeze-and-excite, 144 channels": (squeeze_and_excite, (144, 1, 1)),
}


def inference(model: nn.Module, x: Tensor) -> Callable[[], object]:
    model.eval()

    def run() -> object:
        with torch.no_grad():
            return model(x)

    return run


def step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    model.train()
    if x.shape[0] == 1:  # batch norm cannot learn from one value
        model.eval()

    def run() -> object:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return run


def ratio(stock: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """(median, p20, p80) of stock's time over ours."""
    for _ in range(SETTLE):
        ours()
    stock()
    watch = timing.interleaved({"stock": stock}, 3)["stock"]
    calls = max(1, int(SAMPLE_US / max(min(watch.thread_us), 1.0)))

    def repeated(run: Callable[[], object]) -> Callable[[], None]:
        def sample() -> None:
            for _ in range(calls):
                run()

        return sample

    found = timing.interleaved({"stock": repeated(stock), "ours": repeated(ours)}, rounds)
    ratios = sorted(a / b for a, b in zip(found["stock"].thread_us, found["ours"].thread_us, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 5], ratios[len(ratios) * 4 // 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--networks", nargs="*", help="beginnings of names")
    options = parser.parse_args()
    restart(None)
    torch.set_num_threads(1)
    console = Console()
    console.print(json.dumps(run_environment()), markup=False, soft_wrap=True)
    console.print(f"cached calls run {'outside' if cached.is_live() else 'in'} Python")
    all_of: list[float] = []
    for name, (make, shape) in NETWORKS.items():
        if options.networks and not any(name.startswith(one) for one in options.networks):
            continue
        for batch in (1, 32):
            torch.manual_seed(0)
            stock = make()
            ours = convselect.convert(copy.deepcopy(stock), policy=options.policy)
            x = torch.randn(batch, *shape)
            cells: list[Any] = []
            for how in (inference, step):
                found = ratio(how(stock, x), how(ours, x), options.rounds)
                all_of.append(found[0])
                cells.append(f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})")
            console.print(f"{name}, batch {batch}: inference {cells[0]}, training step {cells[1]}", markup=False)
    console.print(f"geometric mean {geometric_mean(all_of):.2f}, least {min(all_of):.2f}")


if __name__ == "__main__":
    main()
