"""Times of the algorithms for volumes as multiples of native's, in one process and in turns.

    python -m benchmarks.volumes                        # on one thread, all layers
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.volumes --layers stem depthwise

Every result is compared with float64 native before it is timed. A time is CPU time of the calling thread on one thread
(other processes disturb it least), else time that passes; a ratio is the median of those of the rounds. Layers are
those of networks for medical volumes and video: nnU-Net, MONAI's U-Nets, MedNeXt.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Sequence

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from convselect.base import timing
from convselect.base.problem import ConvProblem, Direction
from convselect.base.volumes import volume_problem
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME
from convselect.measure.measure import ERROR_BOUNDS, threads

LAYERS: dict[str, ConvProblem] = {
    "16 channels": volume_problem(1, 16, 32, 64, 64, 16, 3, 3, 3, padding=1),
    "32 channels": volume_problem(1, 32, 32, 64, 64, 32, 3, 3, 3, padding=1),
    "64 channels": volume_problem(1, 64, 16, 32, 32, 64, 3, 3, 3, padding=1),
    "128 channels": volume_problem(1, 128, 8, 16, 16, 128, 3, 3, 3, padding=1),
    "320 channels": volume_problem(1, 320, 4, 8, 8, 320, 3, 3, 3, padding=1),
    "stem": volume_problem(1, 1, 64, 64, 64, 32, 3, 3, 3, padding=1),
    "stride 2": volume_problem(1, 32, 32, 64, 64, 64, 3, 3, 3, stride=2, padding=1),
    "depthwise": volume_problem(1, 32, 32, 64, 64, 32, 3, 3, 3, padding=1, groups=32),
    "depthwise 5": volume_problem(1, 32, 16, 32, 32, 32, 5, 5, 5, padding=2, groups=32),
    "depthwise 7": volume_problem(1, 32, 16, 32, 32, 32, 7, 7, 7, padding=3, groups=32),
}
ALGORITHMS = ("winograd2", "winograd3", "winograd4", "winograd6", "depthwise", "direct")


def operands(problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Random operands of `Algorithm.run`."""
    generator = torch.Generator().manual_seed(0)
    x, weight, y = (
        torch.randn(s, generator=generator) for s in (problem.x_shape, problem.weight_shape, problem.y_shape)
    )
    weight *= math.prod(problem.weight_shape[1:]) ** -0.5
    if problem.direction == Direction.FORWARD:
        return x, weight
    return (y, weight) if problem.direction == Direction.BACKWARD_DATA else (x, y)


def measured(problem: ConvProblem, rounds: int, algorithms: Sequence[Algorithm]) -> tuple[float, dict[str, float]]:
    """Native's time in ms, and how many times as fast each of `algorithms` is that takes the problem.

    Raises:
        AssertionError: if a result is wrong.
    """
    a, b = operands(problem)
    native = BY_NAME["native"]
    want = native.run(a.double(), b.double(), problem._replace(dtype="float64"))
    calls = {"native": functools.partial(native.run, a, b, problem)}
    for algorithm in algorithms:
        if algorithm.why_not(problem) is None:
            error = float((algorithm.run(a, b, problem) - want).norm() / want.norm())
            assert error <= ERROR_BOUNDS["float32"], f"{algorithm.name} {problem}: {error:.1e}"
            calls[algorithm.name] = functools.partial(algorithm.run, a, b, problem)
    del want
    times = timing.interleaved(calls, rounds)
    if problem.threads == 1:
        times = {name: of.on_thread_clock for name, of in times.items()}
    ratios = {name: timing.ratio(times["native"], of).median for name, of in times.items() if name != "native"}
    return times["native"].median_us / 1e3, ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    names = [name for name in ALGORITHMS if name in BY_NAME]
    table = Table(box=SIMPLE_HEAD, title="times native in the same run")
    for column in ("layer", "direction", "native, ms", *names):
        table.add_column(column, no_wrap=True)
    with torch.no_grad(), threads(options.threads):
        for layer in options.layers:
            for direction in Direction:
                problem = LAYERS[layer]._replace(direction=direction, threads=options.threads)
                native_ms, ratios = measured(problem, options.rounds, [BY_NAME[name] for name in names])
                cells = (f"{ratios[name]:.2f}" if name in ratios else "" for name in names)
                table.add_row(f"{layer}: {LAYERS[layer].brief}", direction, f"{native_ms:.2f}", *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
