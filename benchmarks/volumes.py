"""Layers of networks on volumes: every algorithm that takes them, against PyTorch's conv3d, by direction.

    python -m benchmarks.volumes                             # about three minutes
    python -m benchmarks.volumes --layers "3x1x1" "1x1x1"    # those whose names have one of these texts
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.volumes

Each result is compared with float64 before it is timed; times are of the calling thread, interleaved in one process.
Layers that are computed as images have one side more: conv2d of that image.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from torch import Tensor

from convselect.base import timing
from convselect.base.problem import ConvProblem, Direction
from convselect.base.volumes import image_of, volume_problem
from convselect.demo.tables import print_environment
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine.environment import run_environment
from convselect.measure import measure

LAYERS: dict[str, ConvProblem] = {
    "3x3x3 16, 32x64x64": volume_problem(1, 16, 32, 64, 64, 16, 3, 3, 3, padding=1),
    "3x3x3 32, 32x64x64": volume_problem(1, 32, 32, 64, 64, 32, 3, 3, 3, padding=1),
    "3x3x3 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 3, 3, 3, padding=1),
    "3x3x3 128, 8x16x16": volume_problem(1, 128, 8, 16, 16, 128, 3, 3, 3, padding=1),
    "3x3x3 s2 32 to 64, 32x64x64": volume_problem(1, 32, 32, 64, 64, 64, 3, 3, 3, stride=2, padding=1),
    "3x3x3 1 to 32, 64x64x64": volume_problem(1, 1, 64, 64, 64, 32, 3, 3, 3, padding=1),
    "stem 3x7x7 s122 3 to 64, 8x112x112": volume_problem(
        1, 3, 8, 112, 112, 64, 3, 7, 7, stride=(1, 2, 2), padding=(1, 3, 3)
    ),
    "depthwise 3x3x3 32, 32x64x64": volume_problem(1, 32, 32, 64, 64, 32, 3, 3, 3, padding=1, groups=32),
    "1x3x3 64, 16x56x56": volume_problem(1, 64, 16, 56, 56, 64, 1, 3, 3, padding=(0, 1, 1)),
    "3x1x1 144 to 64, 8x56x56": volume_problem(1, 144, 8, 56, 56, 64, 3, 1, 1, padding=(1, 0, 0)),
    "3x1x1 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 3, 1, 1, padding=(1, 0, 0)),
    "3x1x1 s2 128, 8x28x28": volume_problem(1, 128, 8, 28, 28, 128, 3, 1, 1, stride=(2, 1, 1), padding=(1, 0, 0)),
    "7x1x1 32, 16x32x32": volume_problem(1, 32, 16, 32, 32, 32, 7, 1, 1, padding=(3, 0, 0)),
    "1x1x1 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 1, 1, 1),
    "1x1x1 32 to 128, 16x64x64": volume_problem(1, 32, 16, 64, 64, 128, 1, 1, 1),
    "2x2x2 s2 32 to 64, 32x64x64": volume_problem(1, 32, 32, 64, 64, 64, 2, 2, 2, stride=2),
    "patch 4x4x4 1 to 96, 64x64x64": volume_problem(1, 1, 64, 64, 64, 96, 4, 4, 4, stride=4),
    "patch 2x4x4 3 to 96, 16x112x112": volume_problem(1, 3, 16, 112, 112, 96, 2, 4, 4, stride=(2, 4, 4)),
}
CONV2D = "conv2d"
_EXCLUDED = {"native", "reference", "native_contiguous"}


def sides(problem: ConvProblem, a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Name -> a call that computes this direction, shaped as the image's where it is computed as one."""
    found: dict[str, Callable[[], Tensor]] = {"native": lambda: BY_NAME["native"].run(a, b, problem)}
    image, x, y = image_of(problem), a, b
    if image is not None:
        x, y = a.flatten(3), b.flatten(3)
        found[CONV2D] = lambda: BY_NAME["native"].run(x, y, image)
    taken = problem if image is None else image
    for algorithm in ALL:
        if algorithm.name in _EXCLUDED or not algorithm.automatic:
            continue
        if algorithm.why_not(taken) is None and algorithm.same_as_native(taken) is None:
            found[algorithm.name] = lambda run=algorithm.run: run(x, y, taken)  # type: ignore[misc]
    return found


def gains(problem: ConvProblem, rounds: int) -> tuple[float, dict[str, float]]:
    """(conv3d's median time in us, name -> how many times as fast), those that are wrong or far behind left out."""
    a, b = measure.operands(problem)
    with torch.no_grad():
        calls = sides(problem, a, b)
        native = BY_NAME["native"]
        want = native.run(a.double(), b.double(), problem._replace(dtype="float64"))
        for name, call in list(calls.items()):
            got = call()
            if measure.compared(got.view(want.shape), want, problem)[1] is not None:
                print(f"{name} is wrong on {problem}")
                del calls[name]
        quick = timing.interleaved(calls, 2)
        best = {name: t.on_thread_clock.min_us for name, t in quick.items()}
        kept = {name: call for name, call in calls.items() if name == "native" or best[name] <= 1.5 * best["native"]}
        times = {name: t.on_thread_clock.median_us for name, t in timing.interleaved(kept, rounds, seed=1).items()}
    native_us = times.pop("native")
    return native_us, {name: native_us / t for name, t in sorted(times.items(), key=lambda item: item[1])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=[""], help="texts, of which a layer's name has one")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="contiguous")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    print_environment(Console(), run_environment())
    for name, layer in LAYERS.items():
        if not any(text in name for text in asked.layers):
            continue
        for direction in Direction:
            problem = layer._replace(direction=direction, layout=asked.layout)
            native_us, found = gains(problem, asked.rounds)
            speed = problem.flops / native_us / 1e3
            best = ", ".join(f"{side} {gain:.2f}" for side, gain in list(found.items())[:5])
            print(f"{name:36} {direction:16} {native_us / 1e3:8.2f} ms {speed:5.0f} GFLOP/s   {best}", flush=True)


if __name__ == "__main__":
    main()
