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
    "patch 2x2x2 1 to 48, 64x64x64": volume_problem(1, 1, 64, 64, 64, 48, 2, 2, 2, stride=2),
    "patch 16x16x16 1 to 256, 64x64x64": volume_problem(1, 1, 64, 64, 64, 256, 16, 16, 16, stride=16),
    "2x2x2 s2 64 to 128, 16x32x32": volume_problem(1, 64, 16, 32, 32, 128, 2, 2, 2, stride=2),
    "2x2x2 s2 256 to 320, 8x8x8": volume_problem(1, 256, 8, 8, 8, 320, 2, 2, 2, stride=2),
    "1x2x2 s122 32 to 64, 16x64x64": volume_problem(1, 32, 16, 64, 64, 64, 1, 2, 2, stride=(1, 2, 2)),
    "5x5x5 16, 16x32x32": volume_problem(1, 16, 16, 32, 32, 16, 5, 5, 5, padding=2),
    "5x5x5 32, 16x32x32": volume_problem(1, 32, 16, 32, 32, 32, 5, 5, 5, padding=2),
    "5x5x5 64, 8x16x16": volume_problem(1, 64, 8, 16, 16, 64, 5, 5, 5, padding=2),
    "7x7x7 16, 16x32x32": volume_problem(1, 16, 16, 32, 32, 16, 7, 7, 7, padding=3),
    "stem 5x5x5 1 to 16, 32x64x64": volume_problem(1, 1, 32, 64, 64, 16, 5, 5, 5, padding=2),
    "stem 7x7x7 s2 1 to 64, 32x64x64": volume_problem(1, 1, 32, 64, 64, 64, 7, 7, 7, stride=2, padding=3),
    "depthwise 5x5x5 32, 16x32x32": volume_problem(1, 32, 16, 32, 32, 32, 5, 5, 5, padding=2, groups=32),
    "depthwise 7x7x7 48, 16x32x32": volume_problem(1, 48, 16, 32, 32, 48, 7, 7, 7, padding=3, groups=48),
    "depthwise 3x3x3 s2 32, 32x64x64": volume_problem(1, 32, 32, 64, 64, 32, 3, 3, 3, stride=2, padding=1, groups=32),
    "depthwise 3x3x3 512, 4x7x7": volume_problem(1, 512, 4, 7, 7, 512, 3, 3, 3, padding=1, groups=512),
    "depthwise 3x3x3 64, 4x8x8": volume_problem(1, 64, 4, 8, 8, 64, 3, 3, 3, padding=1, groups=64),
    "dilated 3x3x3 d2 32, 16x32x32": volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=2, dilation=2),
    "dilated 3x3x3 d4 16, 32x32x32": volume_problem(1, 16, 32, 32, 32, 16, 3, 3, 3, padding=4, dilation=4),
    "grouped 3x3x3 g4 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 3, 3, 3, padding=1, groups=4),
    "grouped 3x3x3 g8 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 3, 3, 3, padding=1, groups=8),
    "grouped 3x3x3 g32 128, 8x28x28": volume_problem(1, 128, 8, 28, 28, 128, 3, 3, 3, padding=1, groups=32),
    "3x3x3 4, 32x64x64": volume_problem(1, 4, 32, 64, 64, 4, 3, 3, 3, padding=1),
    "3x3x3 8, 32x64x64": volume_problem(1, 8, 32, 64, 64, 8, 3, 3, 3, padding=1),
    "3x3x3 8 to 16, 32x32x32": volume_problem(1, 8, 32, 32, 32, 16, 3, 3, 3, padding=1),
    "3x3x3 s2 8 to 16, 32x64x64": volume_problem(1, 8, 32, 64, 64, 16, 3, 3, 3, stride=2, padding=1),
    "3x3x3 24, 16x32x32": volume_problem(1, 24, 16, 32, 32, 24, 3, 3, 3, padding=1),
    "3x3x3 40 to 20, 16x32x32": volume_problem(1, 40, 16, 32, 32, 20, 3, 3, 3, padding=1),
    "3x3x3 2 to 8, 32x64x64": volume_problem(1, 2, 32, 64, 64, 8, 3, 3, 3, padding=1),
    "3x3x3 4 to 32, 32x64x64": volume_problem(1, 4, 32, 64, 64, 32, 3, 3, 3, padding=1),
    "3x3x3 32 to 1, 32x64x64": volume_problem(1, 32, 32, 64, 64, 1, 3, 3, 3, padding=1),
    "3x3x3 s2 1 to 16, 64x64x64": volume_problem(1, 1, 64, 64, 64, 16, 3, 3, 3, stride=2, padding=1),
    "3x3x3 s2 24 to 48, 32x32x32": volume_problem(1, 24, 32, 32, 32, 48, 3, 3, 3, stride=2, padding=1),
    "3x3x3 s2 4, 32x64x64": volume_problem(1, 4, 32, 64, 64, 4, 3, 3, 3, stride=2, padding=1),
    "3x3x3 s2 128 to 256, 8x16x16": volume_problem(1, 128, 8, 16, 16, 256, 3, 3, 3, stride=2, padding=1),
    "1x3x3 128 to 230, 8x28x28": volume_problem(1, 128, 8, 28, 28, 230, 1, 3, 3, padding=(0, 1, 1)),
    "1x3x3 256 to 460, 4x14x14": volume_problem(1, 256, 4, 14, 14, 460, 1, 3, 3, padding=(0, 1, 1)),
    "dilated 3x3x3 d2 64, 8x16x16": volume_problem(1, 64, 8, 16, 16, 64, 3, 3, 3, padding=2, dilation=2),
    "dilated 3x3x3 d2 8, 16x32x32": volume_problem(1, 8, 16, 32, 32, 8, 3, 3, 3, padding=2, dilation=2),
    "dilated 5x5x5 d2 16, 16x32x32": volume_problem(1, 16, 16, 32, 32, 16, 5, 5, 5, padding=4, dilation=2),
    "dilated 2x2x2 d2 16, 16x32x32": volume_problem(1, 16, 16, 32, 32, 16, 2, 2, 2, dilation=2),
    "grouped 3x3x3 g64 128, 8x28x28": volume_problem(1, 128, 8, 28, 28, 128, 3, 3, 3, padding=1, groups=64),
    "grouped 3x3x3 g2 8, 16x32x32": volume_problem(1, 8, 16, 32, 32, 8, 3, 3, 3, padding=1, groups=2),
    "grouped 3x3x3 s2 g4 64, 16x32x32": volume_problem(1, 64, 16, 32, 32, 64, 3, 3, 3, stride=2, padding=1, groups=4),
    "grouped 5x5x5 g4 32, 16x32x32": volume_problem(1, 32, 16, 32, 32, 32, 5, 5, 5, padding=2, groups=4),
    "5x5x5 4 to 8, 32x32x32": volume_problem(1, 4, 32, 32, 32, 8, 5, 5, 5, padding=2),
    "5x5x5 s2 16 to 32, 32x32x32": volume_problem(1, 16, 32, 32, 32, 32, 5, 5, 5, stride=2, padding=2),
    "3x3x1 16, 32x64x64": volume_problem(1, 16, 32, 64, 64, 16, 3, 3, 1, padding=(1, 1, 0)),
    "2x2x2 16, 16x32x32": volume_problem(1, 16, 16, 32, 32, 16, 2, 2, 2),
    "4x4x4 s2 16 to 32, 32x32x32": volume_problem(1, 16, 32, 32, 32, 32, 4, 4, 4, stride=2, padding=1),
    "head 3x3x3 16 to 2, 32x64x64": volume_problem(1, 16, 32, 64, 64, 2, 3, 3, 3, padding=1),
    "head 3x3x3 32 to 3, 16x32x32": volume_problem(1, 32, 16, 32, 32, 3, 3, 3, 3, padding=1),
    "batch 4: 3x3x3 16, 16x32x32": volume_problem(4, 16, 16, 32, 32, 16, 3, 3, 3, padding=1),
    "batch 4: 3x3x3 64, 8x16x16": volume_problem(4, 64, 8, 16, 16, 64, 3, 3, 3, padding=1),
    "small 3x3x3 8, 8x8x8": volume_problem(1, 8, 8, 8, 8, 8, 3, 3, 3, padding=1),
    "small 3x3x3 16, 8x8x8": volume_problem(1, 16, 8, 8, 8, 16, 3, 3, 3, padding=1),
    "small 3x3x3 64, 4x4x4": volume_problem(1, 64, 4, 4, 4, 64, 3, 3, 3, padding=1),
    "small 3x3x3 s2 16 to 32, 8x8x8": volume_problem(1, 16, 8, 8, 8, 32, 3, 3, 3, stride=2, padding=1),
    "deep 3x3x3 256, 4x8x8": volume_problem(1, 256, 4, 8, 8, 256, 3, 3, 3, padding=1),
    "deep 3x3x3 320, 4x4x4": volume_problem(1, 320, 4, 4, 4, 320, 3, 3, 3, padding=1),
    "deep 3x3x3 s2 256 to 320, 8x8x8": volume_problem(1, 256, 8, 8, 8, 320, 3, 3, 3, stride=2, padding=1),
    "1x3x3 s122 64 to 128, 8x28x28": volume_problem(
        1, 64, 8, 28, 28, 128, 1, 3, 3, stride=(1, 2, 2), padding=(0, 1, 1)
    ),
    "stem 1x7x7 s122 3 to 45, 8x112x112": volume_problem(
        1, 3, 8, 112, 112, 45, 1, 7, 7, stride=(1, 2, 2), padding=(0, 3, 3)
    ),
    "3x3x3 s122 32 to 64, 8x64x64": volume_problem(1, 32, 8, 64, 64, 64, 3, 3, 3, stride=(1, 2, 2), padding=1),
    "1x1x1 s2 64 to 128, 8x56x56": volume_problem(1, 64, 8, 56, 56, 128, 1, 1, 1, stride=2),
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


def line(problem: ConvProblem, rounds: int, name: str) -> str:
    """What `gains` found, the five fastest."""
    native_us, found = gains(problem, rounds)
    speed = problem.flops / native_us / 1e3
    best = ", ".join(f"{side} {gain:.2f}" for side, gain in list(found.items())[:5])
    return f"{name:36} {problem.direction:16} {native_us / 1e3:8.2f} ms {speed:5.0f} GFLOP/s   {best}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="*", default=[""], help="texts, of which a layer's name has one")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="contiguous")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    print_environment(Console(), run_environment())
    for name, layer in LAYERS.items():
        if not any(text in name for text in asked.layers):
            continue
        for direction in Direction:
            problem = layer._replace(
                direction=direction, layout=asked.layout, weight_layout=asked.layout, dtype=asked.dtype
            )
            print(line(problem, asked.rounds, name), flush=True)


if __name__ == "__main__":
    main()
