"""Beyond recorded times: a made-up space with known best programs, predictions measured anew, and latency.

In the made-up space the best program depends on sizes relative to registers and caches, hardware limits forbid part of
the space, and every program has a time, so that no prediction is judged by a neighbour's.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from typing import Any

from benchmarks.predicted_parameters.artifact import ParameterPredictor, parameter_path
from benchmarks.predicted_parameters.figures import Predicted, best_fixed, neighbour
from benchmarks.predicted_parameters.sequence import Recipe, export, train
from benchmarks.predicted_parameters.tokens import Example, example
from benchmarks.predicted_parameters.training import WIDTH, train_parameters, usable
from convselect.base import timing
from convselect.base.problem import ConvProblem, conv_problem
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels.pool import BY_NAME
from convselect.tune.programs import Program
from convselect.tune.runner import Live

L1_BYTES, L2_BYTES = 32 * 2**10, 2**20

# ---- a made-up space --------------------------------------------------------------------------------------------


def _allowed(p: ConvProblem, v: Values) -> bool:
    rows, columns, depth = v.get("rows", 1), v.get("columns", 16), v.get("depth", 16)
    if v.get("packed") and p.gemm.k < 64:
        return False
    return rows * columns <= 448 and columns * depth * 4 <= L1_BYTES and depth < 2 * max(p.gemm.k, 16)


def made_up_space() -> Space:
    """Blocks of a matrix product: at most 28 registers of 16 floats, and a panel that fits L1."""
    return Space(
        (
            Parameter("packed", (0, 1), STRUCTURE),
            Parameter("rows", (1, 2, 4, 8, 16, 28)),
            Parameter("columns", (16, 32, 64, 128)),
            Parameter("depth", (16, 32, 64, 128, 256, 512)),
            Parameter("ahead", (0, 1, 2, 4), "annotation"),
        ),
        default=lambda p: {"packed": 0, "rows": 8, "columns": 32, "depth": 16, "ahead": 0},
        allowed=_allowed,
        rules=(Rule("packed or not", lambda p, _: True, lambda *_: [{"packed": 0}, {"packed": 1}]),),
    )


def made_up_time_us(p: ConvProblem, v: Values) -> float:
    """Work, times factors for waste at the edges, reuse in registers and caches, and packing, which pays for weights
    larger than L2."""
    _, m, n, k = p.gemm
    waste = math.ceil(m / v["rows"]) * v["rows"] / m * math.ceil(n / v["columns"]) * v["columns"] / n
    reuse = 1 + 1.5 / v["rows"] + 8 / v["columns"]
    depth = min(v["depth"], k)
    loop = 1 + 12 / depth + (0.15 if v["columns"] * depth * 4 > L1_BYTES / 2 else 0)
    large = p.weight_bytes > L2_BYTES
    pack = (0.85 if large else 1.05) if v["packed"] else 1.0
    ahead = 1 + 0.03 * abs(v["ahead"] - (2 if p.x_bytes > L2_BYTES else 0))
    return p.flops / 1e5 * waste * reuse * loop * pack * ahead


def made_up(count: int, seed: int = 0, noise: float = 0.01) -> list[Example]:
    """`count` examples of problems like a network's layers, every program timed, with relative deviation `noise`."""
    source, space, found = random.Random(seed), made_up_space(), {}
    while len(found) < count:
        side = source.choice((7, 14, 20, 28, 40, 56, 80, 112))
        c, kernel = source.choice((3, 16, 24, 32, 64, 96, 128, 256, 512)), source.choice((1, 3, 5))
        k, stride = source.choice((8, 16, 24, 32, 64, 128, 256, 512)), source.choice((1, 1, 2))
        p = conv_problem(1, c, side, side, k, kernel, kernel, stride=stride, padding=kernel // 2)
        if p in found:
            continue
        times = [(v, made_up_time_us(p, v) * math.exp(source.gauss(0, noise))) for v in space.programs(p)]
        one = example(p, "made_up", space, times)
        assert one is not None
        found[p] = one
    return list(found.values())


# ---- measured anew ----------------------------------------------------------------------------------------------


def live(of: list[Example], recipe: Recipe, count: int, most: float = 0.25) -> dict[str, dict[str, float]]:
    """Measure predictions here, in turns with the default and with the best recorded program. That one is measured
    again because the best of many measurements was partly luck.

    Args:
        count: number of problems per signature.
        most: share of problems held out of training at a time.

    Returns: algorithm -> `examples`, their number; geometric means over them of the default's time over that of: the
        prediction (`gain`; `gain_low` two standard errors below), the one fixed program (`best_fixed`), the nearest
        neighbour's program (`neighbour`) and the best recorded program (`tuned`); `of_tuned`, the tuned time over the
        prediction's; `slower`, the share of predictions more than 2 % slower than the default; `native`, native's time
        over the default's.
    """
    runner, found = Live(), {}
    for signature, examples_ in usable(of).items():
        algorithms = sorted({one.algorithm for one in examples_})
        problems = list(dict.fromkeys(one.problem for one in examples_))
        random.Random(recipe.seed).shuffle(problems)
        asked = problems[:count]
        size = max(1, math.ceil(most * len(problems)))
        for begin in range(0, len(asked), size):
            held = set(asked[begin : begin + size])
            known = [one for one in examples_ if one.problem not in held]
            arrays = export(train(known, algorithms, recipe))
            methods: dict[str, Any] = {
                "gain": Predicted(arrays, algorithms, signature, WIDTH, True),
                "best_fixed": best_fixed(known),
                "neighbour": neighbour(known),
                "tuned": lambda one: one.best,
            }
            for one in examples_:
                if one.problem in held:
                    ratios = _measured(runner, one, methods)
                    print(one.algorithm, one.problem, {k: round(math.exp(v), 3) for k, v in ratios.items()}, flush=True)
                    found.setdefault(one.algorithm, []).append(ratios)
    return {name: _summary(rows) for name, rows in sorted(found.items())}


def _measured(runner: Live, one: Example, methods: dict[str, Any]) -> dict[str, float]:
    """Logarithms of the default's time over that of each method's program."""

    def program(sequence: Any) -> Program:
        return Program(one.algorithm, tuple(one.signature.decode(sequence).items()))

    default, native = program(one.default), Program("native")
    said = {name: program(method(one) or one.default) for name, method in methods.items()}
    times = runner.compare(one.problem, (default, native, *said.values()), 40, 1.5)
    found = {name: math.log(timing.ratio(times[default], times[p]).median) for name, p in said.items()}
    return {**found, "native": math.log(timing.ratio(times[native], times[default]).median)}


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    told = {name: math.exp(statistics.fmean(row[name] for row in rows)) for name in rows[0]}
    gains = [row["gain"] for row in rows]
    error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    told["gain_low"] = math.exp(statistics.fmean(gains) - 2 * error)
    told["of_tuned"] = told["gain"] / told["tuned"]
    told["slower"] = sum(gain < -math.log(1.02) for gain in gains) / len(gains)
    return {"examples": len(rows), **{name: round(value, 4) for name, value in told.items()}}


# ---- latency ----------------------------------------------------------------------------------------------------


def latency_us(of: list[Example], seed: int = 0) -> dict[str, float]:
    """Median and 90th percentile, per algorithm, of a loaded file's `params_for`, including the space's checks, on
    problems not asked about before, with networks of the default recipe's size; CPU time of the thread."""
    revisions = {name: a.revision for name, a in BY_NAME.items()}
    with tempfile.TemporaryDirectory() as folder:
        train_parameters(of, "latency", folder, revisions, Recipe(steps=2, seed=seed))
        predictor = ParameterPredictor.load(parameter_path("latency", folder))
    found: dict[str, list[float]] = {}
    thread_ns = timing.SYSTEM_CLOCK.thread_ns
    for _ in range(3):
        for one in of:
            begun = thread_ns()
            predictor.params_for(one.problem, BY_NAME[one.algorithm], always=True)
            found.setdefault(one.algorithm, []).append((thread_ns() - begun) / 1e3)
    told = {}
    for name, times in found.items():
        told[name] = round(statistics.median(times), 1)
        told[f"{name} p90"] = round(statistics.quantiles(times, n=10)[-1], 1)
    return told
