"""Predicted parameters beside simpler methods: on recorded programs, and on a made-up space where the truth is known.

    python -m benchmarks.parameters benchmarks/results/programs-cpu-x86-avx512.csv.gz --out run.json
    python -m benchmarks.parameters --synthetic 150

In the made-up space what is best depends on sizes against registers and caches, hardware limits forbid a part of it,
and every program has a time, so that a prediction is never judged by a neighbour's. Latency is that of a loaded file's
`params_for`, with the questions to the space, on problems that it was not asked about before.
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
from convselect._cli_params import _print, examples
from convselect.kernels import BY_NAME
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.model.parameter_artifact import ParameterPredictor, parameter_path
from convselect.model.parameter_training import evaluated, train_parameters
from convselect.model.parameters import Example, example
from convselect.model.sequence import Recipe
from convselect.problem import ConvProblem, conv_problem

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
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Cross-validate every method by problem, and time predictions."""
    import torch

    torch.set_num_threads(1)
    recipe = Recipe(target=target, steps=steps, seed=seed)
    told: dict[str, Any] = {"environment": timing.environment()}
    if synthetic:
        told["made_up"] = evaluated(made_up(synthetic, seed), recipe)
        _print(told["made_up"])
    if files:
        of = examples(files)
        told["files"] = [path.name for path in files]
        told["figures"] = evaluated(of, recipe)
        _print(told["figures"])
        told["latency_us"] = latency_us(of, seed)
        print(told["latency_us"])
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    app()
