"""Single layers, convolution + batch normalisation + ReLU: frozen ones against ONNX Runtime and OpenVINO.

    python -m benchmarks.single_layers                       # about ten minutes
    python -m benchmarks.single_layers --isa avx2 --out run.json
    python -m benchmarks.single_layers --kinds 1x1 "depthwise 7x7" --rounds 40

Batch 1, float32. Each side's result is compared with float64 before anything is timed, and sides are timed interleaved
on one clock, as in `benchmarks.timm_networks`. The frozen layer is timed with NCHW and with NHWC operands, and the
faster of the two counts: within a frozen network a layer has the layout that suits the network.

A rival's call includes its reordering of the input and the result, which it does once per network, not per layer. So
its convolution by itself is reported too, in wall-clock time from its own profile ("alone"): the bound to beat in a
network. What a call costs without arithmetic is the row "call", which is in no mean.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import convselect
from benchmarks import _rivals
from benchmarks._against import clocked
from benchmarks._networks import OUTPUT_BOUND, distance
from benchmarks._rivals import Absent, Side
from benchmarks._tables import geometric_mean
from benchmarks._trials_machine import restart
from benchmarks.models import calibrate_batch_norm
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, conv_problem
from convselect.cli.console import progress
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment

CALL = "call"
FROZEN = ("frozen", "frozen channels_last")
RIVALS = ("onnxruntime", "openvino")
_LAYOUTS = {CONTIGUOUS: "NCHW", CHANNELS_LAST: "NHWC", None: "as it was"}
_SAMPLE_US = 500.0  # at least, so that reading the clock, a system call, is no part of it
_CONVOLUTIONS = ("Conv", "FusedConv", "Convolution", "GroupConvolution")  # as the two name them


class Layer(NamedTuple):
    kind: str
    C: int
    K: int
    size: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    dilation: int = 1

    @property
    def padding(self) -> int:
        """ "Half"; none for patches."""
        return 0 if self.kernel == self.stride else self.dilation * (self.kernel - 1) // 2

    @property
    def problem(self) -> ConvProblem:
        return conv_problem(
            1, self.C, self.size, self.size, self.K, self.kernel, self.kernel,
            stride=self.stride, padding=self.padding, groups=self.groups, dilation=self.dilation,
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" g{self.groups}" if 1 < self.groups < self.C else ""
        return f"{self.C}->{self.K} {self.size}x{self.size}{f' s{self.stride}' if self.stride > 1 else ''}{more}"


def _layers(kind: str, *rows: tuple[int, ...], **same: int) -> list[Layer]:
    return [Layer(kind, *row, **same) for row in rows]


def _depthwise(kind: str, kernel: int, *rows: tuple[int, int, int]) -> list[Layer]:
    return [Layer(kind, C, C, size, kernel, stride, C) for C, size, stride in rows]


def _grouped(kind: str, per_group: int, *rows: tuple[int, int]) -> list[Layer]:
    return [Layer(kind, C, C, size, 3, 1, C // per_group) for C, size in rows]


LAYERS: list[Layer] = [
    *_layers("3x3", (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7), kernel=3),
    *_layers("3x3 s2", (64, 128, 56), (128, 128, 56), (256, 256, 28), (512, 512, 14), kernel=3, stride=2),
    *_layers("stem", (3, 64, 224, 7, 2), (3, 32, 224, 3, 2), (3, 16, 224, 3, 2)),
    *_depthwise("depthwise 3x3", 3, (32, 112, 1), (144, 56, 1), (480, 14, 1), (960, 7, 1), (96, 112, 2), (240, 28, 2)),
    *_depthwise("depthwise 5x5", 5, (240, 28, 1), (672, 14, 1), (1152, 7, 1), (144, 56, 2)),
    *_depthwise("depthwise 7x7", 7, (96, 56, 1), (192, 28, 1), (384, 14, 1), (768, 7, 1)),
    *_grouped("grouped, 24 each", 24, (120, 28), (336, 14), (888, 7)),
    *[_grouped("grouped, 4 to 32 each", n, (32 * n, size))[0] for n, size in ((4, 56), (8, 28), (16, 14), (32, 7))],
    *_layers(
        "1x1", (64, 256, 56), (256, 64, 56), (24, 144, 56), (96, 576, 14), (1024, 256, 14), (512, 2048, 7),
        (2048, 512, 7), (160, 960, 7), (960, 160, 7),
    ),
    *_layers("1x1 s2", (256, 512, 56), (512, 1024, 28), (1024, 2048, 14), stride=2),
    *_layers("patches", (3, 96, 224, 4, 4), (96, 192, 56, 2, 2), (384, 768, 14, 2, 2), (3, 384, 224, 16, 16)),
    *_layers("dilated", (256, 256, 28), (128, 128, 28), kernel=3, dilation=2),
    *_layers(CALL, (8, 8, 2)),
]  # fmt: skip


@dataclass
class Row:
    """One layer.

    Attributes:
        us: side -> median time of a call; "eager" is `torch.conv2d` and the rest in NCHW.
        least_us: side -> the least time of a call.
        alone_us: rival -> its convolution by itself, the least of some wall-clock times, and no more than its call.
        over: rival -> its time over the frozen layer's, median of rounds.
        isa: what OpenVINO's kernel calls itself.
        chosen: side -> what the frozen layer runs.
    """

    kind: str
    layer: str
    problem: str
    flops: int
    rounds: int = 0
    us: dict[str, float] = field(default_factory=dict)
    least_us: dict[str, float] = field(default_factory=dict)
    alone_us: dict[str, float] = field(default_factory=dict)
    over: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    isa: str = ""
    chosen: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        """The faster of the frozen sides; "" if neither has a time."""
        return min((name for name in FROZEN if name in self.us), key=self.us.__getitem__, default="")

    @property
    def frozen_us(self) -> float:
        return self.us.get(self.fastest, math.nan)

    @property
    def gflops(self) -> float:
        return self.flops / self.frozen_us / 1e3

    @property
    def over_best(self) -> float:
        """NaN if no rival has a time."""
        return min(self.over.values(), default=math.nan)

    @property
    def over_alone(self) -> float:
        """The faster rival's convolution by itself over the frozen layer's call, the least of either; NaN if none is
        known."""
        return min(self.alone_us.values(), default=math.nan) / self.least_us.get(self.fastest, math.nan)


def build(layer: Layer) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    p = layer.problem
    conv = nn.Conv2d(
        p.C, p.K, layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups, bias=False
    )  # fmt: skip
    norm = nn.BatchNorm2d(p.K)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_(0.0, 0.5)
    x = torch.randn(p.x_shape)
    return calibrate_batch_norm(nn.Sequential(conv, norm, nn.ReLU()).eval(), x), x


def measure(layer: Layer, *, threads: int, rounds: int, seconds: float) -> Row:
    """In this process, on as many threads as torch has."""
    model, x = build(layer)
    row = Row(layer.kind, str(layer), str(layer.problem), layer.problem.flops)
    sides: dict[str, Side] = {"eager": lambda: model(x)}
    with torch.inference_mode(False), torch.no_grad():
        _add_rivals(sides, row, model, x, threads)
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        _add_frozen(sides, row, model, x)
        row.error = {name: distance([side()], [exact]) for name, side in sides.items()}
        for name in [name for name in sides if not row.error[name] <= OUTPUT_BOUND]:
            del sides[name]
            row.missing[name] = f"wrong: its relative error is {row.error[name]:.1e}"
        _time(sides, row, threads, rounds, seconds)
    return row


def _add_frozen(sides: dict[str, Side], row: Row, model: nn.Module, x: Tensor) -> None:
    for name, layout in zip(FROZEN, (torch.contiguous_format, torch.channels_last), strict=True):
        own, own_x = copy.deepcopy(model).to(memory_format=layout), x.contiguous(memory_format=layout)
        convselect.freeze(own, own_x)
        inputs = convselect.summary(own).inputs
        row.chosen[name] = ", ".join(f"{_LAYOUTS[of.layout]} {' '.join(of.chosen.values())}" for of in inputs)
        sides[name] = lambda own=own, own_x=own_x: own(own_x)  # type: ignore[misc]


def _add_rivals(sides: dict[str, Side], row: Row, model: nn.Module, x: Tensor, threads: int) -> None:
    makers = {
        "onnxruntime": (_rivals.onnxruntime_side, _rivals.onnxruntime_nodes),
        "openvino": (_rivals.openvino_side, _rivals.openvino_nodes),
    }
    for name, (side, nodes) in makers.items():
        try:
            onnx = _rivals.onnx_bytes(model, x)
            sides[name] = side(onnx, x, threads)
            found = [node for node in nodes(onnx, x, threads) if node.kind in _CONVOLUTIONS]
        except Absent as reason:
            row.missing[name] = str(reason)
            continue
        if found:
            row.alone_us[name] = sum(node.us for node in found)
            row.isa = found[0].how or row.isa


def _time(sides: dict[str, Side], row: Row, threads: int, rounds: int, seconds: float) -> None:
    repeats = {name: _repeats(side) for name, side in sides.items()}
    repeated = {name: _repeated(side, repeats[name]) for name, side in sides.items()}
    times, _, _ = clocked(repeated, rounds, seconds, threads)
    row.us = {name: t.median_us / repeats[name] for name, t in times.items()}
    row.least_us = {name: t.min_us / repeats[name] for name, t in times.items()}
    row.alone_us = {rival: min(us, row.least_us.get(rival, us)) for rival, us in row.alone_us.items()}
    row.rounds = len(times["eager"].samples_us)
    if ours := row.fastest:
        for rival in set(RIVALS) & row.us.keys():
            row.over[rival] = timing.ratio(times[rival], times[ours]).median * repeats[ours] / repeats[rival]


def _repeats(side: Side) -> int:
    """Calls per sample."""
    once = timing.interleaved({"": side}, 5)[""].min_us
    return max(1, math.ceil(_SAMPLE_US / once))


def _repeated(side: Side, count: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(count):
            side()

    return run


# ---- reporting ------------------------------------------------------------------------------------------------------


def kinds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Kind -> geometric means of `over` per rival, of the best rival of each layer, and of the convolutions alone."""
    found: dict[str, dict[str, float]] = {}
    of_kind = {kind: [r for r in rows if r.kind == kind] for kind in dict.fromkeys(r.kind for r in rows)}
    whole = {**of_kind, "all": [r for r in rows if r.kind != CALL]}
    for kind, group in whole.items():
        values = {rival: [r.over[rival] for r in group if rival in r.over] for rival in RIVALS}
        values["best"] = [r.over_best for r in group if r.over]
        values["alone"] = [r.over_alone for r in group if r.alone_us]
        found[kind] = {name: geometric_mean(ratios) for name, ratios in values.items()}
    return found


def layers_table(rows: Sequence[Row]) -> Table:
    made = Table(title="Times of one call in us; frozen over rivals", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("kind", no_wrap=True)
    made.add_column("layer", no_wrap=True)
    for heading in ("frozen\n", "GFLOP/s\n", "eager\n", "onnx-\nrun.", "alone\n", "open-\nvino", "alone\n",
                    "/ onnx-\nrun.", "/ open-\nvino", "/ best\nalone"):  # fmt: skip
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("runs", no_wrap=True)
    last = ""
    for r in rows:
        cells = [f"{r.frozen_us:.0f}", f"{r.gflops:.0f}", _us(r.us.get("eager"))]
        for rival in RIVALS:
            cells += [_us(r.us.get(rival)), _us(r.alone_us.get(rival))]
        cells += [_coloured(value) for value in (*(r.over.get(v, math.nan) for v in RIVALS), r.over_alone)]
        made.add_row(r.kind if r.kind != last else "", r.layer, *cells, r.chosen.get(r.fastest, ""))
        last = r.kind
    return made


def kinds_table(rows: Sequence[Row]) -> Table:
    made = Table(title="Frozen over rivals, geometric means", title_justify="left", box=SIMPLE_HEAD)
    made.add_column("kind", no_wrap=True)
    for heading in (*RIVALS, "best of both", "best of both alone"):
        made.add_column(heading, justify="right")
    for kind, values in kinds(rows).items():
        if kind == "all":
            made.add_section()
        made.add_row(kind, *(_coloured(value) for value in values.values()))
    return made


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _coloured(value: float) -> str:
    return "-" if math.isnan(value) else f"[{'green' if value >= 1 else 'red'}]{value:.2f}[/]"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks.single_layers", description=(__doc__ or "").split("\n")[0])
    known = list(dict.fromkeys(layer.kind for layer in LAYERS))
    made.add_argument("--kinds", nargs="+", choices=known, default=known, metavar="KIND", help=", ".join(known))
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--rounds", type=int, default=40, help="at most, of each layer")
    made.add_argument("--seconds", type=float, default=6.0, help="bound on the timing of each layer")
    made.add_argument("--isa", choices=["avx2"], help="do as if the processor had no more than this")
    made.add_argument("--out", type=Path, help="JSON file to write, with the environment")
    made.add_argument("--no-malloc-tuning", action="store_true", help="leave malloc as it is")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a frozen layer was wrong."""
    options = parser().parse_args(argv)
    if not options.no_malloc_tuning:
        restart(options.isa)
    convselect.set_store("off")
    torch.set_num_threads(options.threads)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    environment = {**run_environment(), "packages": _rivals.versions()}
    print_environment(console, environment)
    console.print(", ".join(f"{name} {version}" for name, version in _rivals.versions().items()))
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redrawn between layers only: a thread that draws would be timed as well.
    todo = [layer for layer in LAYERS if layer.kind in options.kinds]
    with progress(*columns, auto_refresh=False) as bar:
        task = bar.add_task("", total=len(todo))
        for layer in todo:
            bar.update(task, description=escape(f"{layer.kind} {layer}"), refresh=True)
            rows.append(measure(layer, threads=options.threads, rounds=options.rounds, seconds=options.seconds))
            bar.advance(task)
    console.print(layers_table(rows))
    console.print(kinds_table(rows))
    isas = sorted({r.isa for r in rows if r.isa})
    console.print("OpenVINO's kernels: " + (", ".join(isas) or "-") + ". ONNX Runtime's cannot be limited.")
    for r in rows:
        for side, reason in r.missing.items():
            console.print(escape(f"{r.kind} {r.layer}, {side}: {reason}"), soft_wrap=True)
    if options.out:
        written = {"environment": environment, "kinds": kinds(rows), "rows": [asdict(r) for r in rows]}
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 1 if any(side in FROZEN for r in rows for side in r.missing) else 0


if __name__ == "__main__":
    sys.exit(main())
