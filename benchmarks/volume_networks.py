"""Networks of volumes: medical images and video, stock and converted, inference and training steps.

    pip install monai dynamic-network-architectures       # --no-deps leaves torch alone
    python -m benchmarks.volume_networks                  # all, one thread: about ten minutes
    python -m benchmarks.volume_networks --networks r3d_18 --modes inference
    python -m benchmarks.volume_networks --layers         # each layer by every algorithm: where a network gains nothing

Float32, NCDHW, sizes that take PyTorch 0.1 to 1.5 s at batch 1. Results, and gradients of training steps, are compared
with the same network in float64 before anything is timed. "converted" is the default policy, whose trials are over
before its timing begins; "auto" does what the rules say. Sides are timed interleaved, on one thread in the clock of the
process. Networks whose library is missing are left out; the video ones are written out here.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import convselect
from benchmarks import _against, _networks, _timm, volumes
from benchmarks._tables import geometric_mean
from benchmarks._trials_machine import restart
from benchmarks.models import calibrate_batch_norm, he_initialise
from convselect.aten.volumes import transposed_volume, volume_of
from convselect.base import timing
from convselect.base.problem import ConvProblem, Direction
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment

Built = tuple[nn.Module, Tensor]
MODES = ("inference", "training")
SIDES = ("eager", "auto", "converted")
MOST_CALLS = 40
"""Until trials are over: `choice.trial` ends one after 3.5 times its native calls, or 60."""


def _input(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ---- medical images, from their libraries ---------------------------------------------------------------------------


def unet() -> Built:
    """MONAI's UNet with residual units, as its tutorial of spleens has it (Kerfoot et al. 2019)."""
    from monai.networks.nets import UNet  # type: ignore[import-not-found]

    model = UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(16, 32, 64, 128, 256), strides=(2, 2, 2, 2),
        num_res_units=2, norm="batch",
    )  # fmt: skip
    return model, _input(1, 1, 96, 96, 96)


def segresnet() -> Built:
    """MONAI's SegResNet (Myronenko 2018, arXiv 1810.11654), four modalities, as its tutorial of brain tumours."""
    from monai.networks.nets import SegResNet

    model = SegResNet(blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1), init_filters=16, in_channels=4, out_channels=3)
    return model, _input(1, 4, 64, 64, 64)


def _mednext(kernel: int, size: int) -> Built:
    from monai.networks.nets.mednext import MedNeXt  # type: ignore[import-not-found]

    model = MedNeXt(
        spatial_dims=3, init_filters=32, in_channels=1, out_channels=3, kernel_size=kernel,
        encoder_expansion_ratio=2, decoder_expansion_ratio=2, bottleneck_expansion_ratio=2,
        blocks_down=(2, 2, 2, 2), blocks_bottleneck=2, blocks_up=(2, 2, 2, 2),
    )  # fmt: skip
    return model, _input(1, 1, size, size, size)


def mednext() -> Built:
    """MedNeXt-S (Roy et al. 2023, arXiv 2303.09975): depthwise 3x3x3 between 1x1x1."""
    return _mednext(3, 48)


def mednext_k5() -> Built:
    """The same with 5x5x5."""
    return _mednext(5, 32)


def nnunet() -> Built:
    """nnU-Net's plain network (Isensee et al. 2021): two convolutions a stage, 2x2x2 transposed in the decoder."""
    from dynamic_network_architectures.architectures.unet import PlainConvUNet  # type: ignore[import-not-found]

    model = PlainConvUNet(
        input_channels=1, n_stages=5, features_per_stage=(32, 64, 128, 256, 320), conv_op=nn.Conv3d,
        kernel_sizes=3, strides=(1, 2, 2, 2, 2), n_conv_per_stage=2, num_classes=3, n_conv_per_stage_decoder=2,
        conv_bias=True, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip
    return model, _input(1, 1, 64, 64, 64)


# ---- video, written out ---------------------------------------------------------------------------------------------


def _along(c_in: int, c_out: int, middle: int | None, stride: int) -> nn.Sequential:
    """A 3x3x3 convolution, or 1x3x3 and 3x1x1 with `middle` channels between, and its normalisation."""
    if middle is None:
        return nn.Sequential(nn.Conv3d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm3d(c_out))
    return nn.Sequential(
        nn.Conv3d(c_in, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(middle),
        nn.ReLU(), nn.Conv3d(middle, c_out, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(c_out),
    )  # fmt: skip


class _Basic(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int, split: bool) -> None:
        super().__init__()
        middle = c_in * c_out * 27 // (c_in * 9 + 3 * c_out) if split else None
        self.first = _along(c_in, c_out, middle, stride)
        self.second = _along(c_out, c_out, middle, 1)
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(nn.Conv3d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm3d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


def _video(*stem: nn.Module, split: bool) -> Built:
    stages, c_in = [], 64
    for c_out in (64, 128, 256, 512):
        stages += [_Basic(c_in, c_out, 1 if c_out == 64 else 2, split), _Basic(c_out, c_out, 1, split)]
        c_in = c_out
    head = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400))
    return nn.Sequential(*stem, *stages, *head), _input(1, 3, 8, 112, 112)


def r3d_18() -> Built:
    """ResNet-18 of 3x3x3 convolutions (Tran et al. 2018, arXiv 1711.11248), eight frames of 112x112."""
    stem = nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)
    return _video(stem, nn.BatchNorm3d(64), nn.ReLU(), split=False)


def r2plus1d_18() -> Built:
    """The same with each convolution split into 1x3x3 and 3x1x1."""
    image = nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False)
    depth = nn.Conv3d(45, 64, (3, 1, 1), 1, (1, 0, 0), bias=False)
    norms = nn.BatchNorm3d(45), nn.BatchNorm3d(64)
    return _video(image, norms[0], nn.ReLU(), depth, norms[1], nn.ReLU(), split=True)


NETWORKS: dict[str, Callable[[], Built]] = {
    made.__name__: made for made in (unet, segresnet, mednext, mednext_k5, nnunet, r3d_18, r2plus1d_18)
}


def build(name: str) -> Built:
    """In evaluation mode, with random weights in which every branch matters.

    Raises:
        ImportError: its library is missing.
    """
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    _timm.enliven(he_initialise(model, 0), 0)
    calibrate_batch_norm(model, x)
    return model.eval(), x


# ---- measuring ------------------------------------------------------------------------------------------------------


class Step:
    """A training step of one side: forward, a loss, backward and SGD at a rate that changes nothing visible."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model.train(), x
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()  # random masks would differ between the sides
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)

    def __call__(self) -> list[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        y = self.model(self.x)
        y.square().mean().backward()
        self.optimizer.step()
        return [p.grad for p in self.model.parameters() if p.grad is not None]


class Inference:
    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x

    @torch.inference_mode()
    def __call__(self) -> list[Tensor]:
        return [self.model(self.x)]


def measure(name: str, mode: str, *, rounds: int, seconds: float, layout: str) -> dict[str, Any]:
    """Errors of all sides, and times of those that are right: milliseconds and gains over eager."""
    model, x = build(name)
    side_of: Callable[[nn.Module, Tensor], Callable[[], list[Tensor]]] = Inference if mode == "inference" else Step
    exact = [t.clone() for t in side_of(copy.deepcopy(model).double(), x.double())()]
    if layout == "channels_last":
        model, x = model.to(memory_format=torch.channels_last_3d), x.contiguous(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    sides = {}
    for side in SIDES:
        own = copy.deepcopy(model)
        if side != "eager":
            convselect.convert(own, policy="auto" if side == "auto" else None)
        sides[side] = side_of(own, x)
    error = {side: _networks.distance(call(), exact) for side, call in sides.items()}
    least = _networks.OUTPUT_BOUND if mode == "inference" else _networks.GRADIENT_BOUND
    missing: dict[str, str] = {}
    right = _networks._split_wrong(sides, error, max(least, _networks.OUTPUT_FACTOR * error["eager"]), missing)
    calls = _settle(right["converted"]) if "converted" in right else 0
    times, _, _ = _against.clocked(right, rounds, seconds, torch.get_num_threads())
    return {
        "network": name, "mode": mode, "layout": layout, "threads": torch.get_num_threads(), "error": error,
        "missing": missing, "calls until settled": calls,
        "median_ms": {side: t.median_us / 1e3 for side, t in times.items()},
        "over_eager": {side: timing.ratio(times["eager"], t).median for side, t in times.items()},
    }  # fmt: skip


def _settle(call: Any) -> int:
    """Call until no layer is on trial; how often."""
    for count in range(MOST_CALLS):  # those of a training step's backward begin with the first call
        if count and not convselect.summary(call.model).on_trial:
            return count
        call()
    return MOST_CALLS


# ---- layer by layer -------------------------------------------------------------------------------------------------


def layers(model: nn.Module, x: Tensor, directions: Sequence[Direction]) -> Iterator[tuple[ConvProblem, int]]:
    """The problems of the network's convolutions, and how often each occurs."""
    found: dict[ConvProblem, int] = {}

    def note(module: Any, given: tuple[Tensor, ...]) -> None:
        m, transposed = module, isinstance(module, nn.ConvTranspose3d)
        geometry = (m.stride, m.padding, m.dilation, m.groups)
        if transposed:
            problem = transposed_volume(
                given[0], m.weight, (m.stride, m.padding, m.output_padding, m.groups, m.dilation)
            )
        else:
            problem = volume_of(given[0], m.weight, geometry)
        assert problem is not None, m
        own = Direction.BACKWARD_DATA if transposed else Direction.FORWARD
        for direction in directions:
            other = {own: Direction.FORWARD, Direction.FORWARD: own}.get(direction, direction)
            key = problem._replace(direction=other)
            found[key] = found.get(key, 0) + 1

    kinds = (nn.Conv3d, nn.ConvTranspose3d)
    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    yield from found.items()


def show_layers(name: str, modes: Sequence[str], rounds: int) -> None:
    model, x = build(name)
    for problem, count in layers(model, x, list(Direction) if "training" in modes else [Direction.FORWARD]):
        print(f"{name} {count}x {volumes.line(problem, rounds, problem.brief)}", flush=True)


# ---- the command ----------------------------------------------------------------------------------------------------


def table(results: Sequence[dict[str, Any]], mode: str) -> Table:
    """One row per network, and the geometric means."""
    made = Table(title=f"{mode}: times faster than eager PyTorch", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("network", no_wrap=True)
    for heading in ("eager ms", *SIDES[1:], "error eager", "error converted", "calls"):
        made.add_column(heading, justify="right", no_wrap=True)
    rows = [r for r in results if r["mode"] == mode]
    for r in rows:
        gains = [f"{r['over_eager'][side]:.2f}" if side in r["over_eager"] else "wrong" for side in SIDES[1:]]
        errors = [f"{r['error'][side]:.0e}" for side in ("eager", "converted")]
        made.add_row(r["network"], f"{r['median_ms']['eager']:.0f}", *gains, *errors, str(r["calls until settled"]))
    made.add_section()
    means = [[r["over_eager"][side] for r in rows if side in r["over_eager"]] for side in SIDES[1:]]
    made.add_row("geometric mean", "", *(f"{geometric_mean(of):.2f}" if of else "-" for of in means))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a result of ours was wrong."""
    parser = argparse.ArgumentParser(prog="benchmarks.volume_networks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="contiguous")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12, help="at most, of each network")
    parser.add_argument("--seconds", type=float, default=30.0, help="bound on the timing of each network")
    parser.add_argument("--layers", action="store_true", help="every layer by every algorithm, and no networks")
    parser.add_argument("--out", type=Path, help="JSON file, written after each network")
    asked = parser.parse_args(argv)
    restart(None)
    convselect.set_store("off")
    torch.set_num_threads(asked.threads)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    environment = run_environment()
    print_environment(console, environment)
    results: list[dict[str, Any]] = []
    for name in asked.networks:
        try:
            if asked.layers:
                show_layers(name, asked.modes, asked.rounds)
                continue
            for mode in asked.modes:
                options = dict(rounds=asked.rounds, seconds=asked.seconds, layout=asked.layout)
                results.append(measure(name, mode, **options))
                print(json.dumps(results[-1]), flush=True)
                convselect.clear()
        except ImportError as missing:
            console.print(f"{name}: left out, {missing}")
        if asked.out is not None:
            asked.out.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")
    for mode in asked.modes if results else ():
        console.print(table(results, mode))
    return 1 if any(r["missing"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
