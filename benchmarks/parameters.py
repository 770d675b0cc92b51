"""Predicted parameters beside simpler methods: on recorded programs, and on a made-up space where the truth is known.

    python -m benchmarks.parameters benchmarks/results/programs-cpu-x86-avx512.csv.gz --out run.json
    python -m benchmarks.parameters --synthetic 150
    python -m benchmarks.parameters programs.csv.gz --live 40 --out run.json

In the made-up space what is best depends on sizes against registers and caches, hardware limits forbid a part of it,
and every program has a time, so that a prediction is never judged by a neighbour's. Latency is that of a loaded file's
`params_for`, with the questions to the space, on problems that it was not asked about before.

`--live` measures predictions of held-out problems here, in turns with the defaults and with the best program on record,
which is measured again: the best of many measurements was partly luck.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from convselect import timing
from convselect.cli.params import _print, examples
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import run_environment
from convselect.model.parameter_artifact import ParameterPredictor, parameter_path
from convselect.model.parameter_figures import Predicted, best_fixed, neighbour
from convselect.model.parameter_training import WIDTH, evaluated, train_parameters, usable
from convselect.model.parameters import Example, example
from convselect.model.sequence import Recipe, export, train
from convselect.problem import ConvProblem, conv_problem
from convselect.tune.programs import Program
from convselect.tune.runner import Live

app = typer.Typer(add_completion=False)
L1_BYTES, L2_BYTES = 32 * 2**10, 2**20

# ---- a made-up space --------------------------------------------------------------------------------------------


def _allowed(p: ConvProblem, v: Values) -> bool:
    rows, columns, depth = v.get("rows", 1), v.get("columns", 16), v.get("depth", 16)
    if v.get("packed") and p.gemm.k < 64:
        return False
    return rows * columns <= 448 and columns * depth * 4 <= L1_BYTES and depth < 2 * max(p.gemm.k, 16)


def made_up_space() -> Space:
    """Blocks of a matrix product: at most 28 registers of 16 floats, a panel within L1."""
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
    """Work, times what is wasted at the edges, what registers and caches do not hold, and packing that pays for weights
    beyond L2."""
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
    """Examples of so many problems like a network's layers, every program timed, with `noise` as relative deviation."""
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
    """Predictions measured here, for so many problems, a share of `most` at a time being held out of training.

    Returns: algorithm -> `examples`; geometric means over them of the default's time over: the prediction's (`gain`,
        `gain_low` two standard errors below), the one fixed program's (`best_fixed`), the nearest neighbour's and the
        best recorded program's (`tuned`); `of_tuned`, the tuned time over the prediction's; `slower`, the share of
        predictions more than 2 % slower than the default; `native`, native's time over the default's.
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
    """Logarithms of the default's time over each method's."""

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
    """Median and 90th percentile of a first `params_for`, per algorithm, of networks of the size that ships; CPU time
    of the thread."""
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


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="Recorded programs.")] = None,
    synthetic: Annotated[int, typer.Option(help="Problems of the made-up space; 0: none.")] = 0,
    target: Annotated[str, typer.Option(help="best, near or ratio.")] = "ratio",
    steps: int = Recipe().steps,
    seed: int = 0,
    live_problems: Annotated[
        int, typer.Option("--live", help="So many held-out problems of each network are measured here.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Cross-validate every method by problem, and time predictions."""
    import torch

    torch.set_num_threads(1)
    recipe = Recipe(target=target, steps=steps, seed=seed)
    told: dict[str, Any] = {"environment": run_environment()}
    if synthetic:
        told["made_up"] = evaluated(made_up(synthetic, seed), recipe)
        _print(told["made_up"])
    if files:
        of = examples(files)
        told["files"] = [path.name for path in files]
        told["figures"] = evaluated(of, recipe)
        _print(told["figures"])
        if live_problems:
            told["live"] = live(of, recipe, live_problems)
            print(json.dumps(told["live"], indent=1))
        told["latency_us"] = latency_us(of, seed)
        print(told["latency_us"])
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    app()
