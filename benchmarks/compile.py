"""torch.compile'd networks: converted against nn.Conv2d, and both against eager.

    python -m benchmarks.compile
    python -m benchmarks.compile resnet18 unet --no-training --size 64 --out run.json
    python -m benchmarks.compile unet_3d

All four sides run float32 on the same number of threads and are timed interleaved, a forward pass at batch 1 and a
training step (forward, backward, SGD) at batch 8, of volumes at batch 2. Every side's output, or every gradient, is
compared with the same network in float64 before anything is timed. The process restarts itself once with malloc set to
keep freed memory, for all sides alike. Compiling takes a minute or two per network.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from benchmarks._networks import (
    GRADIENT_BOUND,
    OUTPUT_BOUND,
    OUTPUT_FACTOR,
    TRAINING_BATCH,
    Training,
    _split_wrong,
    converted,
    distance,
)
from benchmarks.models import MODELS, build, calibrate_batch_norm
from convselect.base import timing
from convselect.demo.demo import restart_with_tuned_malloc
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment

NETWORKS = ("resnet18", "unet", "mobilenet_v2", "convnext_tiny")
TARGETS = {"resnet18": 1.3, "unet": 2.0, "mobilenet_v2": 1.0, "convnext_tiny": 1.0}
"""Compiled and converted over compiled, inference; training must reach 1.0 everywhere."""
VOLUMES = "unet_3d"
"""The network of volumes, measured if named."""
VOLUMES_BATCH = 2
SIDES = ("eager", "converted", "compiled", "compiled converted")
MAX_ROUNDS = 100


@dataclass
class CompileResult:
    """One network in one mode. `over_compiled` and `over_eager`: how many times faster the compiled and converted
    network is, as the median over rounds with 20th and 80th percentile; None if a side was wrong."""

    network: str
    mode: str
    rounds: int
    median_us: dict[str, float]
    p20_us: dict[str, float]
    p80_us: dict[str, float]
    error: dict[str, float]
    over_compiled: tuple[float, float, float] | None
    over_eager: tuple[float, float, float] | None
    missing: dict[str, str] = field(default_factory=dict)


def _timed(
    network: str,
    mode: str,
    sides: dict[str, Callable[[], object]],
    error: dict[str, float],
    bound: float,
    seconds: float,
) -> CompileResult:
    missing: dict[str, str] = {}
    right = _split_wrong(sides, error, bound, missing)
    times = timing.interleaved(right, MAX_ROUNDS, deadline_s=seconds)

    def over(side: str) -> tuple[float, float, float] | None:
        if side not in times or SIDES[3] not in times:
            return None
        found = timing.ratio(times[side], times[SIDES[3]])
        return (found.median, found.p20, found.p80)

    rounds = min((len(t.samples_us) for t in times.values()), default=0)
    return CompileResult(
        network, mode, rounds, *({n: getattr(t, what) for n, t in times.items()} for what in ("median_us", "p20_us",
        "p80_us")), error, over("compiled"), over("eager"), missing,
    )  # fmt: skip


class _UNet3d(nn.Module):
    """3-D U-Net (Çiçek et al. 2016, arXiv 1606.06650) of three levels: 3x3x3 layers of 16, 32 and 64 channels, and
    transposed ones that double all three dimensions. (N, 1, D, H, W) to (N, 2, D, H, W)."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.inward = nn.ModuleList(self._two(a, b) for a, b in zip((1, *widths), widths, strict=False))
        steps = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in steps)
        self.outward = nn.ModuleList(self._two(2 * b, b) for _, b in steps)
        self.head = nn.Conv3d(widths[0], 2, 1)

    @staticmethod
    def _two(c_in: int, c_out: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for c in (c_in, c_out):
            layers += [nn.Conv3d(c, c_out, 3, padding=1, bias=False), nn.BatchNorm3d(c_out), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.inward):
            x = block(x if i == 0 else nn.functional.max_pool3d(x, 2))
            kept.append(x)
        for up, block, skip in zip(self.up, self.outward, kept[-2::-1], strict=True):
            x = block(torch.cat([skip, up(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


def built(network: str) -> tuple[nn.Module, Tensor]:
    """As `benchmarks.models.build`, of volumes too."""
    if network != VOLUMES:
        return build(network)
    torch.manual_seed(0)
    x = torch.randn(1, 1, 16, 48, 48)
    return calibrate_batch_norm(_UNet3d().eval(), x), x


def sized(network: str, size: int | None, batch: int) -> tuple[nn.Module, Tensor]:
    """The network and an input; `size` is another height and width of the images, or of the slices."""
    model, x = built(network)
    _, C, *depth, H, W = x.shape
    generator = torch.Generator().manual_seed(1)
    return model, torch.randn((batch, C, *depth, size or H, size or W), generator=generator)


def inference(network: str, *, size: int | None, seconds: float) -> CompileResult:
    model, x = sized(network, size, 1)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        ours = converted(model)
        torch._dynamo.reset()
        models: dict[str, Callable[[Tensor], Tensor]] = dict(
            zip(SIDES, (model, ours, torch.compile(model), torch.compile(converted(model))), strict=True)
        )
        sides = {name: (lambda m=m: m(x)) for name, m in models.items()}
        error = {name: distance([side()], [exact]) for name, side in sides.items()}
        bound = max(OUTPUT_BOUND, OUTPUT_FACTOR * error["eager"])
        return _timed(network, "inference N=1", sides, error, bound, seconds)


def training(network: str, *, size: int | None, seconds: float) -> CompileResult:
    batch = VOLUMES_BATCH if network == VOLUMES else TRAINING_BATCH
    model, x = sized(network, size, batch)
    exact = [g.clone() for g in Training(copy.deepcopy(model).double(), x.double()).gradients()]
    torch._dynamo.reset()
    steps: dict[str, Training] = {}
    for name in SIDES:
        own = copy.deepcopy(model)
        steps[name] = Training(converted(own) if "converted" in name else own, x)
        if "compiled" in name:
            steps[name].model = torch.compile(steps[name].model)
    error = {name: distance(side.gradients(), exact) for name, side in steps.items()}
    sides: dict[str, Callable[[], object]] = {name: side.step for name, side in steps.items()}
    return _timed(network, f"training N={batch}", sides, error, GRADIENT_BOUND, seconds)


# ---- reporting ------------------------------------------------------------------------------------------------------


def target_of(result: CompileResult) -> float:
    return 1.0 if result.mode.startswith("training") else TARGETS.get(result.network, 1.0)


def table(results: Iterable[CompileResult]) -> Table:
    made = Table(title="Compiled and converted: times faster (target)", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("network", no_wrap=True)
    made.add_column("mode", no_wrap=True)
    for heading in ("eager\nms", "converted\nms", "compiled\nms", "compiled and\nconverted, ms"):
        made.add_column(heading, justify="right", no_wrap=True)
    for heading in ("over\ncompiled", "p20..p80\n", "over\neager", "rounds\n"):
        made.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        target = target_of(r)
        over, spread = "-", "-"
        if r.over_compiled is not None:
            median, p20, p80 = r.over_compiled
            over = f"[{'green' if median >= target else 'red'}]{median:.2f}[/] ({target:.1f})"
            spread = f"{p20:.2f}..{p80:.2f}"
        made.add_row(
            r.network, r.mode,
            *(f"{r.median_us[side] / 1e3:.1f}" if side in r.median_us else "wrong" for side in SIDES),
            over, spread, "-" if r.over_eager is None else f"{r.over_eager[0]:.2f}", str(r.rounds),
        )  # fmt: skip
    return made


app = typer.Typer(add_completion=False)


@app.command()
def run(
    networks: Annotated[
        list[str] | None, typer.Argument(help=f"of {', '.join((*MODELS, VOLUMES))}; by default {', '.join(NETWORKS)}")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="height and width of the images; the networks' own by default")
    ] = None,
    seconds: Annotated[float, typer.Option(help="bound on each timing")] = 20.0,
    threads: Annotated[int, typer.Option()] = 1,
    training_too: Annotated[bool, typer.Option("--training/--no-training")] = True,
    malloc: Annotated[
        bool, typer.Option("--malloc-tuning/--no-malloc-tuning", help="restart with malloc tuned")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, with the environment")] = None,
) -> None:
    """torch.compile'd networks: converted against nn.Conv2d. Exit status 1 if a result was wrong."""
    names = networks or list(NETWORKS)
    for name in names:
        if name not in (*MODELS, VOLUMES):
            raise typer.BadParameter(f"unknown network {name!r}; known are {', '.join((*MODELS, VOLUMES))}")
    if malloc:
        restart_with_tuned_malloc()
    torch.set_num_threads(threads)
    # Into a pipe rich would squeeze the table into 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    env = run_environment()
    print_environment(console, env)
    results = []
    for name in names:
        for measure in (inference, training) if training_too else (inference,):
            console.print(f"{name}: {measure.__name__}")
            results.append(measure(name, size=size, seconds=seconds))
    console.print(table(results))
    for r in results:
        for side, reason in r.missing.items():
            console.print(escape(f"{r.network}, {r.mode}, {side}: {reason}"), soft_wrap=True)
    if out is not None:
        arguments: dict[str, Any] = dict(networks=names, size=size, seconds=seconds, threads=threads, out=out.name)
        written = {"environment": env, "arguments": arguments, "results": [asdict(r) for r in results]}
        out.write_text(json.dumps(written, indent=1) + "\n")
    raise typer.Exit(1 if any(r.missing for r in results) else 0)


if __name__ == "__main__":
    app()
