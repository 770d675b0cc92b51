"""What a predicted gain is worth inside a network: each layer's own calls, by native and by the model's first choice.

    python -m benchmarks.in_networks --out in-networks.csv.gz          # networks of timm, one thread
    python -m benchmarks.in_networks --batch 2 --backward --out ..     # both gradients too, added to the file

Models are trained on times of single convolutions, with operands that the processor's caches hold. In a network inputs
were written a while ago, weights read in the pass before, and native's own buffers evicted. So in every second pass
all layers run native, in every other the algorithm with the best prediction that may be chosen; each layer's calls are
timed by themselves. Margins are fitted to these times (`model/margins.py`, `convselect train --in-networks`).
`--isa avx2` limits PyTorch, oneDNN and this package to AVX2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import _networks, _timm
from benchmarks._trials_machine import restart
from convselect.aten.arguments import problem_of, y_layout
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.base.settings import Settings
from convselect.base.timing import Deadline, Timing
from convselect.choice.budgets import refusal
from convselect.demo.tables import print_environment
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import choice_environment, run_environment
from convselect.measure import plan_cost
from convselect.measure.rows import MACHINE, NATIVE, Row, environment_path, kernel_class, write_rows
from convselect.model import loaded, margins
from convselect.model.dataset import read_measurements

NETWORKS = (
    "resnet50", "seresnet50", "resnext50_32x4d", "res2net50_26w_4s", "dla34", "cspdarknet53", "repvgg_b0",
    "mobileone_s0", "mobilenetv3_large_100", "efficientnet_b0", "repghostnet_100", "nfnet_l0", "convnext_tiny",
    "poolformerv2_s12", "edgenext_small", "inception_next_tiny",
)  # fmt: skip
LEAST_GAIN = -0.05
"""Predicted ln(t_native / t) from which a layer's first choice is run."""


class Calls:
    """Which algorithm each problem's calls run in the other passes, and what the calls took, us."""

    def __init__(self) -> None:
        self.said: dict[ConvProblem, tuple[str, float]] = {}
        self.us: dict[ConvProblem, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.native = True

    def candidate(self, problem: ConvProblem) -> tuple[str, float]:
        """(the algorithm that is run, its predicted ln(t_native / t)); native if none is worth a call."""
        if problem not in self.said:
            self.said[problem] = (NATIVE, 0.0)
            predictor = loaded.get_for(problem)
            said = None if predictor is None else predictor.predict(problem)
            for name in () if said is None else said.ranked:
                if said is None or said.log_gain(name) < LEAST_GAIN:
                    break
                if name != NATIVE and name in BY_NAME and refusal(BY_NAME[name], problem, Settings()) is None:
                    self.said[problem] = (name, said.log_gain(name))
                    break
        return self.said[problem]

    def run(self, a: Tensor, b: Tensor, problem: ConvProblem) -> Tensor:
        name, _ = self.candidate(problem)
        name = NATIVE if self.native else name
        algorithm, clock = BY_NAME[name], timing.SYSTEM_CLOCK.thread_ns
        begun = clock()
        result = algorithm.run(a, b, problem)
        if algorithm.spreads_nonfinite:
            result.sum().item()  # as the call that dispatch makes
        self.us[problem][name].append((clock() - begun) / 1e3)
        return result


class _Timed(torch.autograd.Function):
    """A convolution without bias; `calls` runs and times all three directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, problem: ConvProblem, calls: Calls) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.problem, ctx.calls = problem, calls
        return calls.run(x, weight, problem)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        (x, weight), problem = ctx.saved_tensors, ctx.problem
        of_x = problem._replace(direction=Direction.BACKWARD_DATA, layout=y_layout(x, weight, problem))
        grad_x = ctx.calls.run(grad, weight, of_x) if ctx.needs_input_grad[0] else None
        return grad_x, ctx.calls.run(x, grad, problem.with_direction(Direction.BACKWARD_WEIGHT)), None, None


def watch(model: nn.Module, calls: Calls) -> None:
    """Let the plain 2-D layers of a network run through `calls`."""

    def forward(layer: nn.Conv2d, x: Tensor) -> Tensor:
        problem = problem_of(x, layer.weight, (layer.stride, layer.padding, layer.dilation, layer.groups))
        assert problem is not None
        y: Tensor = _Timed.apply(x, layer.weight, problem, calls)
        return y if layer.bias is None else y + layer.bias[:, None, None]

    for layer in model.modules():
        if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
            layer.forward = forward.__get__(layer)  # type: ignore[method-assign]


def measure(
    network: str, batch: int, backward: bool, passes: int, seconds: float, layout: str = CONTIGUOUS
) -> list[Row]:
    """Times of native and of the candidate for each problem that has one."""
    model, x = _timm.build(network)
    if batch > 1:
        x = torch.randn((batch, *x.shape[1:]), generator=torch.Generator().manual_seed(1))
    if layout == CHANNELS_LAST:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    calls = Calls()
    watch(model, calls)
    step = _networks.Training(model, x) if backward else None

    def once() -> None:
        if step is not None:
            step.step()
        else:
            with torch.no_grad():
                model(x)

    for calls.native in (True, False):
        once()
    calls.us.clear()
    deadline = Deadline(seconds)
    for number in range(2 * passes):
        calls.native = number % 2 == 0
        once()
        if deadline.passed and number >= 7 and not calls.native:
            break
    found = []
    for problem, of in calls.us.items():
        if len(of) == 2:  # a layer in front may leave another layout behind in one kind of pass
            for name, samples in of.items():
                t = Timing(tuple(samples))
                times = (t.min_us, t.median_us, t.p20_us, t.p80_us)
                found.append(
                    Row(network, problem, name, BY_NAME[name].revision, "ok", "thread", *times, rounds=len(samples))
                )
    return found


def written(path: Path, rows: Sequence[Row], environment: Mapping[str, Any]) -> None:
    """Write rows, with those that the file has already, and the machine beside them.

    Raises:
        SystemExit: the file's rows were measured on another machine.
    """
    machine = {name: choice_environment("cpu")[1][name] for name in MACHINE}
    old: list[Row] = []
    if path.exists():
        old, of = read_measurements([path])
        if of != machine:
            raise SystemExit(f"{path} was measured on {of}")
    new = {(row.model, row.problem) for row in rows}
    write_rows(path, [*(row for row in old if (row.model, row.problem) not in new), *rows])
    environment_path(path).write_text(
        json.dumps({"machine": machine, "environment": dict(environment)}, indent=1) + "\n"
    )


def summary(rows: Sequence[Row]) -> Table:
    """By direction, class and algorithm: what is predicted and what was measured, ln(t_native / t)."""
    made = Table(title="ln(t_native / t) in networks", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("direction", "class", "algorithm", "n", "predicted", "measured", "difference, sd", "slower, all"):
        made.add_column(heading, justify="left" if heading in ("direction", "class", "algorithm") else "right")
    made.add_column("of those predicted\n0.02 to 0.15: n, measured, slower", justify="right")
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for one in margins.from_rows(rows):
        predictor = loaded.get_for(one.problem)
        said = None if predictor is None else predictor.predict(one.problem)
        if said is not None:
            key = str(one.problem.direction), kernel_class(one.problem), one.algorithm.rstrip("0123456789")
            groups[key].append((said.log_gain(one.algorithm), one.gain))
    for key, group in sorted(groups.items()):
        expected, got = zip(*group, strict=True)
        off = [g - e for e, g in group]
        small = [g for e, g in group if 0.02 < e <= 0.15]
        near = f"{len(small)}" + (f", {mean(small):+.2f}, {_slower(small):.0%}" if small else "")
        made.add_row(
            *key, str(len(group)), f"{mean(expected):.2f}", f"{mean(got):.2f}",
            f"{mean(off):+.2f}, {pstdev(off):.2f}", f"{_slower(got):.0%}", near,
        )  # fmt: skip
    return made


def _slower(gains: Sequence[float]) -> float:
    return sum(gain < -0.02 for gain in gains) / len(gains)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.in_networks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=NETWORKS, metavar="NAME", help="of timm, or module:function")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--backward", action="store_true", help="training steps: both gradients too")
    parser.add_argument("--channels-last", action="store_true", help="weights and images in this layout")
    parser.add_argument("--passes", type=int, default=15, help="of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="bound on the passes of a network, after four each")
    parser.add_argument("--isa", choices=["avx2"], help="do as if the processor had no more than this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, help="measure nothing: what a file holds, beside what is predicted")
    options = parser.parse_args(argv)
    restart(options.isa)
    torch.set_num_threads(1)
    plan_cost.outside_python = True  # as after `convselect build`
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    if options.show:
        console.print(summary(read_measurements([options.show])[0]))
        return 0
    environment = run_environment()
    print_environment(console, environment)
    rows: list[Row] = []
    for network in options.models:
        layout = CHANNELS_LAST if options.channels_last else CONTIGUOUS
        rows += measure(network, options.batch, options.backward, options.passes, options.seconds, layout)
        if options.out:
            written(options.out, rows, environment)
    console.print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
