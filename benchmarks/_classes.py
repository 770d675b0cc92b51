"""The classes of convolutions that benchmarks report on, with targets and problems of each.

`problems.csv` holds up to 60 layers a class, spread over sizes: layer shapes of the timm models (Apache-2.0), as far as
`results/times-cpu-x86-avx512.csv.gz` has them, and for kernels larger than timm's those of `LARGE` below. It was
written by

    python -m benchmarks._classes

and is not changed, so that figures of different days are for the same problems; `--layers` of `benchmarks.run` reads
another list. Classes that came later (`LATER`) have layers of libraries' own tests too, and 3x3 layers of timm's models
with a dilation, as far as `results/times-cpu-x86-avx512-c.csv.gz` has them. Each layer is listed at batch 1 and 8, if
one native call takes at most about 0.5 s.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from convselect.base.problem import CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.measure.rows import read_rows
from convselect.model.sampling import BYTES_CAP, read_layers

PROBLEMS = Path(__file__).parent / "problems.csv"
TIMES = Path(__file__).parent / "results" / "times-cpu-x86-avx512.csv.gz"
LATER_TIMES = TIMES.with_name("times-cpu-x86-avx512-c.csv.gz")
COLUMNS = (
    "model", "N", "C", "H", "W", "K", "R", "S",
    "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w", "groups",
)  # fmt: skip
BATCHES = (1, 8)
LAYERS_PER_CLASS = 60


class KernelClass(NamedTuple):
    """A kind of convolution.

    Attributes:
        holds: whether a problem is of this kind, by its geometry.
        targets: direction -> intended geometric mean of nn.Conv2d's time over ours; without directions that have none.
        flops_cap: bound on a problem's operations: as many as native does in about 0.5 s on one thread at its slowest.
        dtypes: element types; empty: that of the command line.
    """

    name: str
    title: str
    holds: Callable[[ConvProblem], bool]
    targets: dict[Direction, float]
    flops_cap: float
    dtypes: tuple[str, ...] = ()


def _targets(*values: float | None) -> dict[Direction, float]:
    return {direction: value for direction, value in zip(Direction, values, strict=True) if value is not None}


def _dense(p: ConvProblem) -> bool:
    return p.groups == 1 and p.dilation == (1, 1)


def _is_3x3(p: ConvProblem) -> bool:
    return _dense(p) and p.R == p.S == 3 and p.stride == (1, 1) and min(p.C, p.K) >= 32


def _depthwise(low: int, high: float) -> Callable[[ConvProblem], bool]:
    return lambda p: p.is_depthwise and p.K == p.C and low <= min(p.R, p.S) and max(p.R, p.S) <= high


CLASSES = (
    KernelClass(
        "3x3", "3x3, stride 1, C and K >= 32, images >= 14",
        lambda p: _is_3x3(p) and min(p.H, p.W) >= 14, _targets(3.0, 2.6, 3.0), 20e9,
    ),
    KernelClass(
        "3x3-7x7", "3x3, stride 1, images of 7x7, N = 8",
        lambda p: _is_3x3(p) and p.H == p.W == 7 and p.N == 8, _targets(2.4, 1.5, 2.2), 20e9,
    ),
    KernelClass("depthwise", "depthwise 3x3 to 7x7", _depthwise(3, 7), _targets(1.5, 1.7, 2.0), 2e9),
    KernelClass("depthwise-7", "depthwise 7x7 alone", _depthwise(7, 7), _targets(None, None, 8.0), 2e9),
    KernelClass("depthwise-11+", "depthwise 11x11 and up", _depthwise(11, float("inf")), _targets(30, None, 6), 0.6e9),
    KernelClass(
        "grouped", "grouped, 4 to 16 channels a group, 2x2 and up",
        lambda p: 1 < p.groups < p.C and min(p.R, p.S) > 1
        and 4 <= p.C // p.groups <= 16 and 4 <= p.K // p.groups <= 16,
        _targets(3.0, 2.0, 2.0), 2e9,
    ),
    KernelClass(
        "dense-9+", "dense 9x9 and up, stride 1",
        lambda p: _dense(p) and min(p.R, p.S) >= 9 and p.stride == (1, 1), _targets(4.0, 4.0, 4.0), 12e9,
    ),
    KernelClass(
        "1x1", "1x1, stride 1", lambda p: _dense(p) and p.R == p.S == 1 and p.stride == (1, 1),
        _targets(None, None, None), 20e9,
    ),
    KernelClass(
        "3x3-s2", "3x3, stride 2, C >= 16",
        lambda p: _dense(p) and p.R == p.S == 3 and p.stride == (2, 2) and p.C >= 16,
        _targets(None, None, None), 20e9,
    ),
    KernelClass(
        "strided", "3x3, 5x5, 7x7, stride 2, C and K >= 32",
        lambda p: _dense(p) and p.R == p.S and p.R in (3, 5, 7) and p.stride == (2, 2) and min(p.C, p.K) >= 32,
        _targets(1.25, 1.5, 1.6), 20e9,
    ),
    KernelClass(
        "stem", "stems: C = 3, kernels below 9x9", lambda p: _dense(p) and p.C == 3 and max(p.R, p.S) < 9,
        _targets(1.15, None, 2.0), 8e9,
    ),
    KernelClass(
        "dilated", "dilated 3x3, stride 1, C and K >= 32",
        lambda p: p.groups == 1 and p.R == p.S == 3 and p.stride == (1, 1) and min(p.dilation) > 1
        and min(p.C, p.K) >= 32, _targets(2.2, 2.2, 2.5), 12e9,
    ),
    KernelClass(
        "patches", "patches: kernel = stride, 2x2 and up, no padding",
        lambda p: p.groups == 1 and p.is_patch and min(p.R, p.S) > 1, _targets(1.2, 2.0, 2.0), 12e9,
    ),
    KernelClass(
        "thin", "C or K <= 8, no stems, 1x1 or patches",
        lambda p: _dense(p) and min(p.C, p.K) <= 8 and p.C != 3 and max(p.R, p.S) > 1 and not p.is_patch,
        _targets(1.5, 1.5, 1.5), 4e9,
    ),
    KernelClass(
        "one-row", "1xN and Nx1 of 15 and more, depthwise or of one channel",
        lambda p: min(p.R, p.S) == 1 and max(p.R, p.S) >= 15 and p.dilation == p.stride == (1, 1)
        and (p.is_depthwise or p.C == p.K == 1), _targets(5.0, 5.0, 5.0), 1e9,
    ),
    KernelClass(
        "16-bit", "bfloat16 and float16, all of the above", lambda _: True, _targets(15, 15, 15), 1e9,
        ("bfloat16", "float16"),
    ),
)  # fmt: skip
LATER = ("strided", "dilated", "patches", "thin", "one-row")
BY_NAME = {kernel_class.name: kernel_class for kernel_class in CLASSES}

# (C, image side, kernel side, groups): layers like those of RepLKNet and SLaK, and of restoration networks from 9x9 on.
LARGE = (
    (96, 56, 11, 96), (64, 56, 13, 64), (192, 28, 13, 192), (384, 14, 13, 384), (64, 56, 21, 64), (64, 56, 31, 64),
    (64, 28, 31, 64), (192, 28, 31, 192), (384, 14, 27, 384),
    (64, 56, 9, 1), (32, 112, 9, 1), (128, 28, 9, 1), (32, 64, 11, 1), (64, 28, 11, 1), (64, 56, 13, 1),
    (32, 64, 15, 1), (16, 128, 31, 1), (32, 56, 31, 1), (64, 28, 21, 1),
)  # fmt: skip


def spread(problems: Iterable[ConvProblem], count: int) -> list[ConvProblem]:
    """`count` of the problems, evenly spaced in their order by operations, with the smallest and the largest; all if
    there are no more; the middle one for a count of 1.

    Raises:
        ValueError: if `count` is less than one.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    ordered = sorted(set(problems), key=lambda p: (p.flops, str(p)))
    if len(ordered) <= count:
        return ordered
    if count == 1:
        return [ordered[len(ordered) // 2]]
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def read_problems(path: str | Path = PROBLEMS) -> list[ConvProblem]:
    """The forward problems of a CSV file of layers, in the format of `convselect.model.sampling.read_layers`."""
    return [problem for _, problem in read_layers(path)]


def drawn(kernel_class: KernelClass, problems: Iterable[ConvProblem], count: int, dtype: str) -> list[ConvProblem]:
    """`count` problems of this class, spread over sizes, for each of its element types (`dtype` if it has none)."""
    members = [p for p in problems if kernel_class.holds(p) and p.flops <= kernel_class.flops_cap]
    picked = spread(members, count)
    return [p._replace(dtype=name) for p in picked for name in kernel_class.dtypes or (dtype,)]


# ---- writing the list -----------------------------------------------------------------------------------------------


def measured_layers(path: str | Path = TIMES) -> dict[ConvProblem, str]:
    """Layer at batch 1 -> model of every forward geometry in a file of measured times; random layers are left out."""
    layers: dict[ConvProblem, str] = {}
    for row in read_rows(path):
        p = row.problem
        if p.symmetric_padding and p.pad_top == p.pad_bottom and not row.model.startswith("loguniform"):
            layer = p._replace(
                direction=Direction.FORWARD,
                N=1,
                dtype="float32",
                layout=CONTIGUOUS,
                weight_layout=CONTIGUOUS,
                threads=1,
            )
            layers[layer] = min(row.model, layers.get(layer, row.model))
    return layers


def select(
    layers: dict[ConvProblem, str], later: dict[ConvProblem, str] | None = None, per_class: int = LAYERS_PER_CLASS
) -> list[tuple[str, ConvProblem]]:
    """(model, problem) of up to `per_class` problems of each class, at both batches if the class's cap allows.

    Args:
        later: the layers for `LATER`; default: the same.
    """
    layers = dict(layers)
    for C, side, kernel, groups in LARGE:
        problem = conv_problem(1, C, side, side, C, kernel, kernel, padding=kernel // 2, groups=groups)
        layers.setdefault(problem, f"large_{kernel}x{kernel}")
    chosen: dict[ConvProblem, str] = {}
    for kernel_class in CLASSES:
        if kernel_class.dtypes:
            continue
        is_later = kernel_class.name in LATER
        source = later if later is not None and is_later else layers
        batches = [layer._replace(N=N) for layer in source for N in BATCHES]
        members = [p for p in batches if kernel_class.holds(p) and p.flops <= kernel_class.flops_cap]
        if is_later:  # thin layers of so many operations have images of gigabytes
            members = [p for p in members if p.bytes <= BYTES_CAP]
        for problem in spread(members, per_class):
            chosen.setdefault(problem, source[problem._replace(N=1)])
    return [(model, problem) for problem, model in chosen.items()]


def write_problems(selected: Sequence[tuple[str, ConvProblem]], path: str | Path = PROBLEMS) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for model, p in selected:
            sizes = (p.N, p.C, p.H, p.W, p.K, p.R, p.S, *p.stride, p.pad_top, p.pad_left, *p.dilation, p.groups)
            writer.writerow((model, *sizes))


if __name__ == "__main__":
    write_problems(select(measured_layers(), measured_layers(LATER_TIMES)))
