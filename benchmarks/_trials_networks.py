"""Networks for `benchmarks.trials`, in processes of their own.

    python -m benchmarks._trials_networks once SIDE THREADS QUICK     # three networks, once each: a JSON line
    python -m benchmarks._trials_networks serve SIDE THREADS          # an encoder; sizes on stdin, times on stdout

SIDE is "stock" or a policy.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convselect
from benchmarks._trials_machine import Figure, clock, once
from benchmarks.models import MODELS, he_initialise, vgg16

NETWORKS = ("vgg16", "unet", "vae_decoder")
SIZES = (100, 300)


# ---- networks -------------------------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    """19 convolutions: 3x3 with stride 1 and 2, and 1x1, each with a ReLU. (N, 3, H, W) to (N, 256, H / 16, W / 16)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    width = 32
    for wider in (64, 128, 192, 256):
        for c_in, c_out, kernel, stride in (
            (width, wider, 3, 2),
            (wider, wider, 3, 1),
            (wider, wider // 2, 1, 1),
            (wider // 2, wider, 3, 1),
        ):
            layers += [nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2), nn.ReLU()]
        width = wider
    layers += [nn.Conv2d(width, width, 1), nn.ReLU()]
    return nn.Sequential(*layers)


class _Block(nn.Module):
    """A residual block of two 3x3 convolutions, after group normalisation and SiLU."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.norm, self.second_norm = nn.GroupNorm(16, c_in), nn.GroupNorm(16, c_out)
        self.shortcut = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.silu(self.second_norm(self.first(F.silu(self.norm(x))))))
        result: Tensor = self.shortcut(x) + y
        return result


def vae_decoder(width: int = 64) -> nn.Module:
    """A decoder as in latent diffusion, without attention: residual blocks, three doublings of the image by nearest
    neighbours and a 3x3 convolution. (N, 4, H, W) to (N, 3, 8 H, 8 W)."""
    widths = (4 * width, 4 * width, 2 * width, width)
    layers: list[nn.Module] = [nn.Conv2d(4, widths[0], 3, padding=1), _Block(widths[0], widths[0])]
    c_in = widths[0]
    for level, c_out in enumerate(widths):
        layers += [_Block(c_in, c_out), _Block(c_out, c_out)]
        if level < len(widths) - 1:
            layers += [nn.Upsample(scale_factor=2), nn.Conv2d(c_out, c_out, 3, padding=1)]
        c_in = c_out
    layers += [nn.GroupNorm(16, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)]
    return nn.Sequential(*layers)


def _subject(network: str, quick: bool) -> tuple[nn.Module, tuple[int, ...]]:
    """(network, shape of its input). VGG-16 has a pooled classifier: the published one is 124 million parameters
    without a convolution."""
    if network == "vae_decoder":
        return vae_decoder(), (1, 4, 4, 4) if quick else (1, 4, 24, 24)
    model = vgg16(classifier="pooled") if network == "vgg16" else MODELS[network].build()
    return model, (1, 3, 32, 32) if quick else MODELS[network].input_shape


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _side(model: nn.Module, side: str) -> nn.Module:
    he_initialise(model.eval())
    return model if side == "stock" else convselect.convert(model, policy=side)


def run_once(side: str, quick: bool) -> dict[str, float]:
    """Network -> microseconds of its first forward pass in this process, the prediction's model and plans included."""
    torch.manual_seed(0)
    ready = []
    for network in NETWORKS:
        model, shape = _subject(network, quick)
        ready.append((network, _side(model, side), torch.randn(shape)))
    with torch.inference_mode():
        return {name: once(partial(model, x), clock()) for name, model, x in ready}


def serve(side: str, lines: IO[str]) -> None:
    """Answer each line, a height and a width, with the microseconds of a forward pass of the encoder."""
    model, now = _side(encoder(), side), clock()
    with torch.inference_mode():
        for line in lines:
            height, width = map(int, line.split())
            x = torch.randn(1, 3, height, width)
            print(once(partial(model, x), now), flush=True)


# ---- who asks them --------------------------------------------------------------------------------------------------


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks._trials_networks", *map(str, arguments)]


class _Server:
    def __init__(self, side: str, threads: int) -> None:
        self.process = subprocess.Popen(
            _command("serve", side, threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"CONVSELECT_STORE": "off"},
        )  # fmt: skip

    def ask(self, height: int, width: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{height} {width}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def unseen_sizes(
    policy: str, threads: int, count: int, seed: int, on_step: Callable[[float], object]
) -> tuple[list[Figure], list[dict[str, float]]]:
    """Each of `count` random sizes once, stock, default and "auto" in processes of their own, in random order. What
    was learned at one size is known at the next; there is no store. One small size is run before."""
    source, rows = random.Random(seed), list[dict[str, float]]()
    servers = {side: _Server(side, threads) for side in ("stock", policy, "auto")}
    try:
        for server in servers.values():
            server.ask(64, 64)
        for step in range(count):
            size = source.randint(*SIZES), source.randint(*SIZES)
            order = source.sample(sorted(servers), len(servers))
            rows.append({"H": size[0], "W": size[1]} | {side: servers[side].ask(*size) for side in order})
            on_step((step + 1) / count)
    finally:
        for server in servers.values():
            server.process.kill()
            server.process.communicate()
    total = {side: sum(row[side] for row in rows) for side in servers}
    figures = [
        Figure(5, "unseen sizes, default over stock", total[policy] / total["stock"], 0.80, count),
        Figure(5, 'unseen sizes, "auto" over stock', total["auto"] / total["stock"], None, count),
    ]
    return figures, rows


def fresh_processes(
    policy: str, threads: int, repeats: int, folder: Path, quick: bool, on_step: Callable[[float], object]
) -> tuple[list[Figure], list[dict[str, dict[str, float]]]]:
    """Three networks once each in a fresh process: stock, default with an empty store, default with the store that the
    run before left."""

    def once_in_child(side: str, store: str) -> dict[str, float]:
        done = subprocess.run(
            _command("once", side, threads, int(quick)), env=os.environ | {"CONVSELECT_STORE": store},
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        times: dict[str, float] = json.loads(done.stdout)
        return times

    rows = []
    for repeat in range(repeats):
        store, row = str(folder / f"store-{repeat}.sqlite"), dict[str, dict[str, float]]()
        sides = [("stock", "stock", "off"), ("empty", policy, store), ("left", policy, store)]
        for name, side, kept in sides if repeat % 2 else [*sides[1:], sides[0]]:
            row[name] = once_in_child(side, kept)
            on_step((repeat + len(row) / 3) / repeats)
        rows.append(row)
    titles = {"empty": "fresh process, empty store, over stock", "left": "fresh process, store of the run before"}
    figures = [
        Figure(6, title, _over(rows, name, NETWORKS), 0.75, repeats) for name, title in titles.items()
    ]  # fmt: skip
    figures += [
        Figure(6, f"  {network}, empty store", _over(rows, "empty", [network]), None, repeats) for network in NETWORKS
    ]
    return figures, rows


def _over(rows: Sequence[dict[str, dict[str, float]]], name: str, networks: Sequence[str]) -> float:
    """Median time of these networks together, over stock's."""
    mine, stock = (median(sum(row[side][n] for n in networks) for row in rows) for side in (name, "stock"))
    return mine / stock


def main(task: str, side: str, threads: str, quick: str = "0") -> None:
    torch.set_num_threads(int(threads))
    if task == "once":
        print(json.dumps(run_once(side, quick == "1")))
    else:
        serve(side, sys.stdin)


if __name__ == "__main__":
    main(*sys.argv[1:])
