"""The parts of `benchmarks.trials` that call single layers. Each returns its figures and, for the file, the rows."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import torch

from benchmarks import _trials_lies as lies
from benchmarks._trials_layers import (
    FIRST,
    LEAST_SPEED,
    First,
    Layer,
    compare_settled,
    draw,
    first_calls,
    forget,
    running_total,
)
from benchmarks._trials_machine import Figure, quantile
from convselect.base.problem import ConvProblem, conv_problem
from convselect.model import loaded

OnStep = Callable[[float], object]
Rows = list[dict[str, Any]]
EARLY, LATE = 45, 60
LYING_FLOPS = 1e8
"""Operations of a problem for the model that lies: the worst algorithms are many times slower than native."""
LEAST_RATIO = 0.95
"""Speed relative to native below which a problem of the lying model is measured again."""
SEEN = 2000


class Counts(NamedTuple):
    """How much of each part is run."""

    problems: int = 126
    untimed: int = 60
    untimed_calls: int = 150
    lies: int = 30
    spoilt: int = 8
    sizes: int = 40
    repeats: int = 3
    layers: int = 6
    layer_sizes: int = 21


QUICK = Counts(5, 3, 30, 2, 1, 2, 1, 2, 6)


def warm_up() -> None:
    """The process's own first times: the model is loaded, libraries and their threads start."""
    for kernel, groups in ((3, 1), (1, 1), (3, 16)):
        layer = Layer(conv_problem(1, 16, 20, 20, 16, kernel, kernel, padding=kernel // 2, groups=groups))
        with torch.no_grad():
            for side in ("stock", "default"):
                for _ in range(20):
                    layer.call(side)()
    forget()


def row_of(one: First) -> dict[str, Any]:
    return {
        "problem": str(one.problem), "directions": one.directions, "tried": one.tried, "settled": one.settled,
        "calls": one.calls, f"first {EARLY}": one.ratio(EARLY), f"first {FIRST}": one.ratio(FIRST),
        "excess": one.excess, "native_us": median(one.native_us), "speed": [list(s) for s in one.speed],
    }  # fmt: skip


# ---- 1, 3, 4, 8 -----------------------------------------------------------------------------------------------------


def drawn_layers(
    layers: Sequence[ConvProblem], count: int, most_flops: float, backward: float, seed: int, on_step: OnStep
) -> tuple[list[Figure], Rows]:
    """The first calls of problems of every class, nothing being known from one to the next; then the settled choices.

    A problem over a target for the worst is run a second time, and "confirmed" is the better of the two.
    """
    source = random.Random(seed)
    problems = draw(layers, count, most_flops, seed)
    with_backward = set(random.Random(seed + 1).sample(range(len(problems)), round(backward * len(problems))))
    found, again = list[First](), dict[int, First]()
    for index, problem in enumerate(problems):
        layer = Layer(problem, backward=index in with_backward, bias=source.random() < 0.5)
        found.append(one := first_calls(layer, source))
        if one.settled is not None:
            compare_settled(layer, one)
        forget()
        if one.ratio(EARLY) > 1.5 or one.excess > 1.0:
            again[index] = first_calls(layer, source)
            forget()
        on_step((index + 1) / len(problems))
    return [*_settling(found), *_first(found, again), *_settled(found), *_total(8, found, 1.03)], [
        row_of(one) | ({"again": row_of(again[i])} if i in again else {}) for i, one in enumerate(found)
    ]


def _settling(found: Sequence[First]) -> list[Figure]:
    tried = [one for one in found if one.tried]
    calls = [float(one.settled or one.calls) for one in tried]
    open_ = sum(one.settled is None for one in tried)
    return [
        Figure(1, "calls until settled: median", quantile(calls, 0.5), None, len(tried), "calls"),
        Figure(1, "calls until settled: p95", quantile(calls, 0.95), None, len(tried), "calls"),
        Figure(1, "calls until settled: worst", max(calls, default=math.nan), 60, len(tried), "calls"),
        Figure(1, "still open at the end", 100 * open_ / max(1, len(tried)), None, len(tried), "%"),
        Figure(1, "problems that had a trial", 100 * len(tried) / max(1, len(found)), None, len(found), "%"),
    ]


def _first(found: Sequence[First], again: dict[int, First]) -> list[Figure]:
    ratios, excess = [one.ratio(EARLY) for one in found], [one.excess for one in found]
    ratios_again = [min(r, again[i].ratio(EARLY)) if i in again else r for i, r in enumerate(ratios)]
    excess_again = [min(e, again[i].excess) if i in again else e for i, e in enumerate(excess)]
    late = [one.ratio(FIRST, after=LATE) for one in found]
    n, early, first = len(found), f"first {EARLY} over native's", f"first {FIRST}, excess over 6 calls + 300 us"
    return [
        Figure(3, f"{early}: geometric mean", geometric_mean(ratios), 0.75, n),
        Figure(3, f"{early}: p95", quantile(ratios, 0.95), 1.15, n),
        Figure(3, f"{early}: worst", max(ratios), None, n),
        Figure(3, f"{early}: worst, confirmed", max(ratios_again), 1.5, n),
        Figure(3, f"calls {LATE + 1} to {FIRST} over native's: geometric mean", geometric_mean(late), None, n),
        Figure(3, f"calls {LATE + 1} to {FIRST} over native's: p95", quantile(late, 0.95), None, n),
        Figure(3, f"{first}: worst", max(excess), None, n),
        Figure(3, f"{first}: worst, confirmed", max(excess_again), 1.0, n),
    ]


def _settled(found: Sequence[First]) -> list[Figure]:
    speeds = [one.settled_speed for one in found if one.settled_speed is not None]
    slow = sum(speed < LEAST_SPEED for speed in speeds)
    n = len(speeds)
    return [
        Figure(4, f"settled below {LEAST_SPEED} of native's speed", 100 * slow / max(1, n), 2.0, n, "%"),
        Figure(4, "settled: slowest, native's time over its own", min(speeds, default=math.nan), None, n),
        Figure(4, "settled: geometric mean", geometric_mean(speeds) if speeds else math.nan, None, n),
    ]


def _total(part: int, found: Sequence[First], target: float, title: str = "") -> list[Figure]:
    largest, last, calls = running_total(found, SEEN)
    seen = f"from call {SEEN:,} on" if calls >= SEEN else "in all"
    return [
        Figure(part, f"{title}total over native's, largest {seen}", largest, target, calls),
        Figure(part, f"{title}total over native's, at the end", last, None, calls),
    ]


# ---- 2 --------------------------------------------------------------------------------------------------------------


def untimed_calls(path: Path, counts: Counts, threads: int) -> tuple[list[Figure], Rows]:
    """In a process of its own, whose clocks count."""
    command = (sys.executable, "-m", "benchmarks._trials_untimed", path, counts.untimed, counts.untimed_calls, threads)
    done = subprocess.run(tuple(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    excess, opened = measured["excess_us"], measured["open"]
    return [
        Figure(2, "untimed call over settled native: median", quantile(excess, 0.5), 1.0, len(excess), "us"),
        Figure(2, "untimed call over settled native: p80", quantile(excess, 0.8), None, len(excess), "us"),
        Figure(2, "untimed among calls of open trials", 100 * len(excess) / max(1, opened), None, opened, "%"),
    ], [measured]


# ---- 7 --------------------------------------------------------------------------------------------------------------


def lying_model(
    layers: Sequence[ConvProblem], count: int, most_flops: float, seed: int, on_step: OnStep
) -> tuple[list[Figure], Rows]:
    """A model that nominates the three slowest algorithms. What is learnt at one problem is known at the next."""
    source, found, rows = random.Random(seed), list[First](), Rows()
    problems = draw(layers, count, min(most_flops, LYING_FLOPS), seed + 2)
    worst = {}
    for index, problem in enumerate(problems):
        worst[lies.sizes(problem)] = lies.worst_algorithms(problem._replace(threads=torch.get_num_threads()))
        on_step(0.5 * (index + 1) / len(problems))
    forget()
    loaded.override(lies.LyingPredictor(worst))  # type: ignore[arg-type]
    try:
        # Compared when all have been called: what a process computes pays for trials.
        called = [Layer(problem) for problem in problems]
        for index, layer in enumerate(called):
            found.append(first_calls(layer, source, most=FIRST))
            on_step(0.5 + 0.25 * (index + 1) / len(problems))
        for index, (layer, one) in enumerate(zip(called, found, strict=True)):
            compare_settled(layer, one, LEAST_RATIO)
            rows.append(row_of(one) | {"worst": worst[lies.sizes(layer.problem)]})
            on_step(0.75 + 0.25 * (index + 1) / len(problems))
    finally:
        loaded.use_local()
        forget()
    n = len(found)
    return [
        Figure(7, f"lying model, after {FIRST} calls over native's: worst", max(_slowness(f) for f in found), 1.05, n),
        Figure(7, f"lying model, first {FIRST}, excess: worst", max(one.excess for one in found), 1.0, n),
        *_total(7, found, 1.03, "lying model, "),
    ], rows


def _slowness(one: First) -> float:
    """The least of the times measured, over native's."""
    return 1 / max(speed.median for speed in one.speed)


# ---- 9 --------------------------------------------------------------------------------------------------------------

SPOILERS: dict[str, Callable[[torch.Tensor], object]] = {
    "NaN": lambda x: x.view(-1)[x.numel() // 2 :][:1].fill_(math.nan),
    "infinity": lambda x: x.view(-1)[x.numel() // 2 :][:1].fill_(math.inf),
    "times 1e30": lambda x: x.mul_(1e30),
}


def spoilt_inputs(
    layers: Sequence[ConvProblem], count: int, most_flops: float, seed: int, on_step: OnStep
) -> tuple[list[Figure], Rows]:
    """Inputs with one NaN or one infinity, or times 1e30, nothing being known from one to the next."""
    source, figures, rows = random.Random(seed), list[Figure](), Rows()
    problems = draw([p for p in layers if min(p.R, p.S) >= 3], count, min(most_flops, LYING_FLOPS), seed + 3)
    for step, (kind, spoil) in enumerate(SPOILERS.items()):
        found = []
        for index, problem in enumerate(problems):
            runs = list[First]()
            while len(runs) < 2 and (not runs or runs[0].excess > 1.0):  # as in part 3
                runs.append(first_calls(Layer(problem, spoil=spoil), source, most=FIRST))
                forget()
            found.append(min(runs, key=lambda one: one.excess))
            rows += [row_of(one) | {"kind": kind} for one in runs]
            on_step((step + (index + 1) / len(problems)) / len(SPOILERS))
        excess = max(one.excess for one in found)
        figures.append(Figure(9, f"{kind}: first {FIRST}, excess: worst, confirmed", excess, 1.0, len(found)))
    return figures, rows


# ---- 10 -------------------------------------------------------------------------------------------------------------


def share_on_trial(layers: int, sizes: int, seed: int, on_step: OnStep) -> tuple[list[Figure], Rows]:
    """Layers that meet many N, H and W in random order, each until it is settled, or `FIRST` times. What is learnt at
    one size is known at the next."""
    source, rows = random.Random(seed), Rows()
    geometries = [(64, 64, 3, 1, 1), (64, 128, 1, 1, 1), (48, 96, 3, 2, 1), (96, 96, 3, 1, 96), (64, 64, 3, 1, 8),
                  (32, 48, 5, 1, 1)]  # fmt: skip
    requests = [
        conv_problem(
            source.choice((1, 1, 2, 4)), C, source.randint(10, 56), source.randint(10, 56), K, R, R,
            stride=stride, padding=R // 2, groups=groups,
        )
        for C, K, R, stride, groups in geometries[:layers]
        for _ in range(sizes)
    ]  # fmt: skip
    source.shuffle(requests)
    forget()
    with torch.no_grad():
        for index, problem in enumerate(requests):
            layer = Layer(problem)
            call = layer.call("default")
            call()
            tried, calls = layer.on_trial(), 1
            while calls < FIRST and layer.on_trial():
                call()
                calls += 1
            rows.append({"problem": str(problem), "tried": tried, "calls": calls})
            on_step((index + 1) / len(requests))
    forget()
    third = len(rows) // 3
    shares = [100 * sum(row["tried"] for row in rows[i * third : (i + 1) * third]) / max(1, third) for i in range(3)]
    names = ("first", "second", "last")
    figures = [
        Figure(10, f"on trial, {name} third", share, None, third, "%")
        for name, share in zip(names, shares, strict=True)
    ]
    fall = shares[2] / shares[0] if shares[0] else 0.0
    return [*figures, Figure(10, "on trial, last third over the first", fall, 0.9, third)], rows
