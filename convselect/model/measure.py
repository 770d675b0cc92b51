"""Draw problems from real networks and measure every algorithm of the pool on each: the training data.

    python -m convselect.model.measure --problems layers.csv --out times.csv --minutes 30 --count 1000

Per problem: every applicable automatic algorithm within the workspace budget is checked against float64 first (wrong is
recorded and never timed), then timed in interleaved rounds; those hopelessly behind after two warm rounds are
dropped from the rest, native never. With one thread the label is the minimum CPU time of the calling thread, which
neighbours on the machine disturb least; with more it is wall time. Can be interrupted and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convselect import settings, timing
from convselect.kernels import ALL, BY_NAME, Algorithm
from convselect.model import host
from convselect.model.dataset import KERNEL_CLASSES, NATIVE, Row, append_rows, kernel_class, read_rows
from convselect.model.inference import SIXTEEN_BIT_FLAGS
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem

ERROR_BOUNDS = {"float64": 1e-11, "float32": 2e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Relative L2 error beyond which a result is a mistake, whatever its error grade: some ten times the loosest grade."""

FLOPS_CAP = 5e9  # some 60 ms a call on one thread; admits the large layers of VGG at batch 1
# Native runs these at a fraction of the dense rate; the cap is on time.
_CAP_DIVISOR = {"depthwise": 12, "grouped": 4, "large": 2}
_EMULATED_DIVISOR = 8  # 16-bit types that the processor does not compute in
BYTES_CAP = 2**28

_CLASS_WEIGHTS = dict(zip(KERNEL_CLASSES, (0.22, 0.20, 0.16, 0.16, 0.08, 0.12, 0.06), strict=True))
_BATCHES = (1, 2, 8)
_WARM_ROUNDS, _ROUNDS, _SLOW_ROUNDS = 2, 9, 7
_SLOW_US = 5_000.0
_DROP_FACTOR = 2.5


# ---- drawing ----------------------------------------------------------------------------------------------------


def read_layers(path: str | Path) -> list[tuple[str, ConvProblem]]:
    """(model, forward problem) of each line of a CSV file of layers.

    Columns: `model` (or `source`), N C H W K R S, stride_h/w, pad_h/w, dil_h/w, groups; others are ignored.
    """
    layers = []
    with Path(path).open(newline="") as file:
        for line in csv.DictReader(file):
            sizes = [int(line[name]) for name in ("N", "C", "H", "W", "K", "R", "S")]
            stride, padding, dilation = ((int(line[f"{a}_h"]), int(line[f"{a}_w"])) for a in ("stride", "pad", "dil"))
            problem = conv_problem(
                *sizes, stride=stride, padding=padding, dilation=dilation, groups=int(line["groups"])
            )
            if problem.P > 0 and problem.Q > 0:
                layers.append((line["model"] if "model" in line else line["source"], problem))
    return layers


def random_layers(count: int, seed: int = 0) -> list[tuple[str, ConvProblem]]:
    """`count` layers of log-uniform sizes, most of them tiny: networks have few of those, and the cost of a call, not
    of its arithmetic, decides there. Their names make ten families: they are no relatives, and splits may part them."""
    rng = np.random.default_rng(seed)

    def size(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    layers: list[tuple[str, ConvProblem]] = []
    while len(layers) < count:
        R = int(rng.choice([1, 1, 3, 3, 3, 5, 7]))
        C, K = size(1, 64), size(1, 64)
        groups = C if rng.random() < 0.15 else 1
        problem = conv_problem(
            1, C, size(R, 64), size(R, 64), C if groups > 1 else K, R, R,
            stride=int(rng.choice([1, 1, 1, 2])), padding=R // 2, groups=groups,
        )  # fmt: skip
        layers.append((f"loguniform{'abcdefghij'[len(layers) % 10]}", problem))
    return layers


def flops_cap(problem: ConvProblem, flags: Mapping[str, bool]) -> float:
    """FLOPs up to which one native call of this kind of problem is expected to stay below about 60 ms."""
    cap = FLOPS_CAP / _CAP_DIVISOR.get(kernel_class(problem), 1)
    needed = SIXTEEN_BIT_FLAGS.get(problem.dtype)
    return cap if needed is None or any(flags.get(f, False) for f in needed) else cap / _EMULATED_DIVISOR


def draw(
    layers: Sequence[tuple[str, ConvProblem]],
    count: int,
    *,
    seed: int = 0,
    threads: int = 1,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    flags: Mapping[str, bool] | None = None,
) -> Iterator[tuple[str, ConvProblem]]:
    """`count` different problems: stratified by kernel class, all three directions, batch 1, 2 or 8, 70 % contiguous.

    The first of `dtypes` gets 85 % (all, if it is the only one). Problems over the caps are drawn again with a
    smaller batch. Ends early where the layers do not yield so many. The same arguments give the same problems.
    """
    flags = flags or {}
    rng = np.random.default_rng(seed)
    of_class: dict[str, list[tuple[str, ConvProblem]]] = {}
    for layer in layers:
        of_class.setdefault(kernel_class(layer[1]), []).append(layer)
    classes = sorted(of_class)
    weights = np.array([_CLASS_WEIGHTS[name] for name in classes])
    seen: set[ConvProblem] = set()
    for _ in range(100 * count):
        if len(seen) == count or not classes:
            return
        candidates = of_class[classes[rng.choice(len(classes), p=weights / weights.sum())]]
        model, problem = candidates[rng.integers(len(candidates))]
        direction = list(Direction)[rng.integers(3)]
        dtype = dtypes[0] if len(dtypes) == 1 or rng.random() < 0.85 else dtypes[int(rng.integers(1, len(dtypes)))]
        batch = int(rng.choice(_BATCHES))
        channels_last, weight_follows = rng.random() < 0.3, rng.random() < 0.85
        problem = problem._replace(direction=direction, dtype=dtype, threads=threads)
        fitting = [n for n in _BATCHES if n <= batch and _fits(problem._replace(N=n), flags)]
        if not fitting:
            continue
        problem = problem._replace(N=fitting[-1])
        problem = with_layouts(problem, channels_last, channels_last and weight_follows)
        if problem not in seen:
            seen.add(problem)
            yield model, problem


def _fits(problem: ConvProblem, flags: Mapping[str, bool]) -> bool:
    return problem.flops <= flops_cap(problem, flags) and problem.bytes <= BYTES_CAP


def with_layouts(problem: ConvProblem, channels_last: bool, weight_channels_last: bool) -> ConvProblem:
    """The problem with these memory layouts, named as `layout_of` names them: one channel or pixel is contiguous."""
    streamed = problem.y_shape if problem.direction == Direction.BACKWARD_DATA else problem.x_shape
    layouts = []
    for wanted, shape in ((channels_last, streamed), (weight_channels_last, problem.weight_shape)):
        distinct = shape[1] > 1 and shape[2] * shape[3] > 1
        layouts.append(CHANNELS_LAST if wanted and distinct else CONTIGUOUS)
    return problem._replace(layout=layouts[0], weight_layout=layouts[1])


# ---- measuring --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within this context torch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def operands(problem: ConvProblem) -> tuple[Tensor, Tensor]:
    """Random operands of `Algorithm.run` in the problem's shapes, dtype and layouts; the same for the same problem."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(problem).encode()))
    p = problem

    def random(shape: tuple[int, ...], layout: str, scale: float = 1.0) -> Tensor:
        format = torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format
        values = torch.randn(shape, generator=generator) * scale
        return values.to(p.torch_dtype).contiguous(memory_format=format)

    weight_scale = ((p.C // p.groups) * p.R * p.S) ** -0.5
    if p.direction == Direction.FORWARD:
        return random(p.x_shape, p.layout), random(p.weight_shape, p.weight_layout, weight_scale)
    if p.direction == Direction.BACKWARD_DATA:
        return random(p.y_shape, p.layout), random(p.weight_shape, p.weight_layout, weight_scale)
    return random(p.x_shape, p.layout), random(p.y_shape, p.layout)


def measure_problem(
    model: str,
    problem: ConvProblem,
    algorithms: Iterable[Algorithm] = ALL,
    *,
    workspace_bytes: int | None = None,
    deadline_s: float = 6.0,
) -> list[Row]:
    """One row per applicable automatic algorithm (native always), checked first, then timed, on `problem.threads`.

    Args:
        workspace_bytes: budget per algorithm; default: that of the settings in force.
        deadline_s: bound on the timed rounds after the first two; two rounds are always run.
    """
    if workspace_bytes is None:
        workspace_bytes = settings.current().workspace_bytes
    a, b = operands(problem)
    pool = [
        algorithm
        for algorithm in algorithms
        if algorithm.automatic
        and algorithm.why_not(problem) is None
        and algorithm.same_as_native(problem) is None
        and (algorithm.name == NATIVE or algorithm.workspace_bytes(problem) <= workspace_bytes)
    ]
    native = BY_NAME[NATIVE]
    with torch.no_grad(), threads(problem.threads):
        want = native.run(a.double(), b.double(), problem._replace(dtype="float64"))
        result_format = _format(native.run(a, b, problem))
        status = {algorithm.name: _check(algorithm, a, b, problem, want) for algorithm in pool}
        del want
        calls: dict[str, Callable[[], object]] = {
            algorithm.name: _call(algorithm, a, b, problem, result_format)
            for algorithm in pool
            if status[algorithm.name] == "ok"
        }
        samples = _timed(calls, zlib.crc32(str(problem).encode()), deadline_s, status, wall=problem.threads > 1)
    rows = []
    for algorithm in pool:
        row = Row(model, problem, algorithm.name, algorithm.revision, status[algorithm.name])
        if algorithm.name in samples:
            wall, thread = samples[algorithm.name]
            clock, label = ("wall", wall) if problem.threads > 1 else ("thread", thread)
            median, p20, p80 = (float(np.percentile(label, percent)) for percent in (50, 20, 80))
            row = row._replace(clock=clock, min_us=min(label), median_us=median, p20_us=p20, p80_us=p80)
            row = row._replace(wall_us=float(np.median(wall)), rounds=len(label))
        rows.append(row)
    return rows


def _format(tensor: Tensor) -> torch.memory_format:
    return torch.contiguous_format if tensor.is_contiguous() else torch.channels_last


def _call(
    algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, format: torch.memory_format
) -> Callable[[], Tensor]:
    # What dispatch adds is part of the price: restoring the strides that native's result has, and the check that a
    # transform's result is finite.
    def call() -> Tensor:
        result = algorithm.run(a, b, problem)
        if algorithm.spreads_nonfinite:
            result.sum(dtype=torch.float32 if result.element_size() == 2 else None).item()
        return result.contiguous(memory_format=format)

    return call


def _check(algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, want: Tensor) -> str:
    try:
        got = algorithm.run(a, b, problem)
    except Exception as error:  # whatever it is, it must not end the collection, nor pass unseen
        print(f"{algorithm.name} failed on {problem}: {type(error).__name__}: {error}", file=sys.stderr)
        return "failed"
    if got.shape != want.shape or got.dtype != problem.torch_dtype:
        return "wrong"
    relative = torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)
    return "ok" if relative.item() <= ERROR_BOUNDS[problem.dtype] else "wrong"  # NaN is wrong


def _timed(
    calls: Mapping[str, Callable[[], object]], seed: int, deadline_s: float, status: dict[str, str], *, wall: bool
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """name -> (wall, thread) samples in us; marks those dropped after the warm rounds as censored in `status`."""
    if not calls:
        return {}
    deadline = timing.Deadline(deadline_s)
    first = timing.interleaved(calls, _WARM_ROUNDS, seed=seed)
    samples = {name: (t.samples_us, t.thread_us) for name, t in first.items()}
    best = {name: min(pair[0 if wall else 1]) for name, pair in samples.items()}
    fastest = min(best.values())
    kept = {name: call for name, call in calls.items() if name == NATIVE or best[name] <= _DROP_FACTOR * fastest}
    for name in calls.keys() - kept.keys():
        status[name] = "censored"
    rounds = (_SLOW_ROUNDS if fastest > _SLOW_US else _ROUNDS) - _WARM_ROUNDS
    # Native alone is settled: more rounds would not change that it wins.
    if len(kept) > 1 and not deadline.passed:
        rest = timing.interleaved(kept, rounds, seed=seed + 1, deadline_s=deadline.remaining_s)
        for name, t in rest.items():
            wall_us, thread_us = samples[name]
            samples[name] = (wall_us + t.samples_us, thread_us + t.thread_us)
    return samples


# ---- collecting -------------------------------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What must be the same for two files of times to be mixed."""
    capability = host.cpu_capability()
    return {
        "family": host.family_of_host(capability),
        "host_flags": host.host_flags(capability),
        "device": timing.environment()["device"],
        "torch": torch.__version__,
    }


def environment_path(out: str | Path) -> Path:
    return Path(f"{out}.env.json")


def collect(
    problems: Iterable[tuple[str, ConvProblem]],
    out: str | Path,
    algorithms: Iterable[Algorithm] = ALL,
    *,
    minutes: float | None = None,
    description: Mapping[str, object] | None = None,
    on_problem: Callable[[ConvProblem, bool], object] | None = None,
) -> int:
    """Measure problems and append to `out`, skipping those it holds; returns how many were measured now.

    `on_problem(problem, measured)` is called after each. Stops after the problem during which `minutes` have passed.

    Raises:
        ValueError: where `out` was begun on another machine, with other processor features or another torch.
    """
    algorithms = tuple(algorithms)
    here = machine()
    record = environment_path(out)
    if Path(out).exists() and record.exists():
        there = json.loads(record.read_text())["machine"]
        if there != here:
            raise ValueError(f"{out} was measured on {there}, this is {here}; measure into a new file")
    done = {row.problem for row in read_rows(out)} if Path(out).exists() else set()
    record.write_text(
        json.dumps(
            {
                "machine": here,
                "algorithms": {a.name: a.revision for a in algorithms if a.automatic},
                "environment": timing.environment(),
                **(description or {}),
            },
            indent=2,
        )
        + "\n"
    )
    deadline = timing.Deadline(None if minutes is None else 60 * minutes)
    measured = 0
    for model, problem in problems:
        if deadline.passed:
            break
        new = problem not in done
        if new:
            append_rows(out, measure_problem(model, problem, algorithms))
            done.add(problem)
            measured += 1
        if on_problem is not None:
            on_problem(problem, new)
    return measured


def main(argv: Sequence[str] | None = None) -> None:
    from tqdm import tqdm  # type: ignore[import-untyped]  # optional, for this command only

    parser = argparse.ArgumentParser(prog="convselect.model.measure", description="Measure the pool on real layers.")
    parser.add_argument("--problems", help="CSV file of layers: model, N, C, H, W, K, R, ...")
    parser.add_argument("--random", type=int, default=0, help="so many small random layers besides, or instead")
    parser.add_argument("--out", required=True, help="CSV file of times; appended to, problems in it are skipped")
    parser.add_argument("--minutes", type=float, help="stop after this long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", type=int, default=500, help="problems to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"], choices=list(ERROR_BOUNDS))
    options = parser.parse_args(argv)
    layers = read_layers(options.problems) if options.problems else []
    layers += random_layers(options.random, options.seed)
    if not layers:
        parser.error("--problems or --random is needed")
    drawn = draw(
        layers,
        options.count,
        seed=options.seed,
        threads=options.threads,
        dtypes=options.dtypes,
        flags=host.host_flags(),
    )
    source = Path(options.problems).name if options.problems else "random"
    description = {"problems": source, "random": options.random, "threads": options.threads, "seed": options.seed}
    with tqdm(total=options.count, unit="problem", dynamic_ncols=True) as bar:

        def show(problem: ConvProblem, _: bool) -> None:
            bar.set_postfix_str(f"{kernel_class(problem)} {problem.direction}")
            bar.update()

        measured = collect(
            drawn,
            options.out,
            minutes=options.minutes,
            description=description,
            on_problem=show,
        )
    print(f"{measured} problems measured into {options.out}")


if __name__ == "__main__":
    main()
