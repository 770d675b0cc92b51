"""Trials on real calls of real algorithms: `python -m benchmarks.verification LIST --real COUNT`. Each trial is alone:
it knows nothing of the others, nor of what they cost."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from benchmarks._classes import read_problems
from convselect.base import settings
from convselect.base.problem import ConvProblem, Direction
from convselect.base.timing import SYSTEM_CLOCK, interleaved
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE, NOMINATED, Choice, nominees
from convselect.choice.outcome import Prior
from convselect.eager import checks, live_trial
from convselect.eager.live_trial import LiveTrial
from convselect.eager.resolve import FAVOURITE, PRIOR_SD
from convselect.eager.trusted import trusted
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure.measure import measure_problem, operands
from convselect.model import loaded

CALLS = 100
LIE = math.log(3.0)
"""What the lying model predicts as ln(t_native / t)."""
MOST_FLOPS = 4e8
"""Most operations of a problem, so that hundreds of calls of the slowest algorithms do not take too long."""


def really(path: Path, count: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """Title -> figures, over problems drawn from a list of layers."""
    torch.set_num_threads(1)
    layers, source = [p for p in read_problems(path) if p.flops < MOST_FLOPS], random.Random(seed)
    drawn = [source.choice(layers).with_direction(source.choice(list(Direction))) for _ in range(count)]
    rows: dict[str, list[tuple[float, ...]]] = {"verify": [], "verify, lying model": []}
    predictor = loaded.get()
    used_settings = settings.current()
    for problem in track(drawn, description="problems"):
        measured = measure_problem("", problem, ALL, deadline_s=0.2)
        times = {row.algorithm: row.min_us for row in measured if row.status in ("ok", "censored")}
        admitted = [name for name in times if name != NATIVE and refusal(BY_NAME[name], problem, used_settings) is None]
        prediction = None if predictor is None else predictor.predict(problem)
        a, b = operands(problem)

        def run(name: str, problem: ConvProblem = problem, a: Tensor = a, b: Tensor = b) -> Tensor | None:
            return BY_NAME[name].run_checked(a, b, problem, None, None)

        def is_right(
            name: str, result: Tensor, places: int, problem: ConvProblem = problem, a: Tensor = a, b: Tensor = b
        ) -> bool:
            return checks.is_right(name, result, a, b, problem, None, places)

        for title in rows:
            predicted: dict[str, float] = {}
            if title != "verify":
                predicted = dict.fromkeys(sorted(admitted, key=lambda name: -times[name])[:NOMINATED], LIE)
            elif prediction is not None:
                names = nominees(problem, BY_NAME, used_settings, prediction)
                predicted = {name: prediction.log_gain(name) for name in names}
            best = next(iter(predicted), None)
            favoured = best is not None and predicted[best] >= FAVOURITE and trusted(BY_NAME[best], problem)
            live_trial.account.clear()
            trial = LiveTrial(
                problem, Choice(NATIVE, "model"), {name: Prior(gain, PRIOR_SD) for name, gain in predicted.items()},
                favourite=best if favoured else None,
            )  # fmt: skip
            first = plain = 0.0
            with torch.no_grad():
                for _ in range(CALLS):
                    start = SYSTEM_CLOCK.thread_ns()
                    if trial.choice is None:
                        trial.run(run, a.device, is_right)
                    else:
                        run(trial.choice.algorithm)
                    middle = SYSTEM_CLOCK.thread_ns()
                    run(NATIVE)
                    first, plain = first + middle - start, plain + SYSTEM_CLOCK.thread_ns() - middle
                used = NATIVE if trial.choice is None else trial.choice.algorithm
                slowdown = 1.0
                if used != NATIVE:
                    timed = interleaved({name: lambda n=name: run(n) for name in (NATIVE, used)}, 15, deadline_s=1.0)
                    slowdown = timed[used].on_thread_clock.median_us / timed[NATIVE].on_thread_clock.median_us
            rows[title].append((slowdown, first, plain, trial.choice is not None, trial.trial.turns))
    result = {}
    for title, found in rows.items():
        slowdown, first, plain, settled, turns = (np.array(column, dtype=float) for column in zip(*found, strict=True))
        ratios = first / plain
        result[title] = {
            "slower > 2 %": float(np.mean(slowdown > 1.02)), "slower > 5 %": float(np.mean(slowdown > 1.05)),
            "worst": float(slowdown.max()), "settled": float(settled.mean()), "turns": float(turns.mean()),
            "first 100: all": float(first.sum() / plain.sum()), "first 100: median": float(np.median(ratios)),
            "first 100: p95": float(np.quantile(ratios, 0.95)), "first 100: most": float(ratios.max()),
        }  # fmt: skip
    result["problems"] = {"count": float(len(drawn))}
    return result
