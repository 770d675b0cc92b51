"""The gain from trials on real calls, replayed on measured times with noise, with held-out models and a lying one.

    python -m benchmarks.verification benchmarks/results/times-cpu-x86-avx512-c.csv.gz
    python -m benchmarks.verification benchmarks/problems.csv --real 100

A model is trained on other network families than those it nominates for. The lying model nominates the three slowest
algorithms that the budgets admit, and predicts three times native's speed for them. A trial begins with the
predictions, with a favourite if there is one, and knows nothing of other trials. Every problem is called 1,000 times; a
call takes the measured time of its algorithm, times exp(N(0, sd^2)), and sometimes an interruption of twice the time on
average. "First 100 calls" is their time over native's under the same noise, including the overhead of trials.

With `--real COUNT`, nothing is replayed: that many problems of a list are called on this machine, the shipped model and
the lying one nominate (the lying one by times measured just before), and afterwards the algorithm that a trial settled
on is timed against native, interleaved.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from benchmarks._real_trials import really
from convselect.choice.budgets import LEAST_FLOPS
from convselect.choice.choose import NOMINATED, NOMINATION_GAP, NOMINATION_LEAST
from convselect.choice.outcome import Prior
from convselect.choice.replay import replay
from convselect.choice.trial import NATIVE, Trial
from convselect.eager.resolve import FAVOURITE, PRIOR_SD
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import run_environment
from convselect.model import evaluate as ev
from convselect.model.dataset import Table
from convselect.model.train import Recipe, learner, read_measured

CALLS = 1000
NOISE = ((0.03, 0.01), (0.1, 0.05), (0.2, 0.1))
"""(standard deviation of ln t, share of interrupted calls)."""
MARGIN = 0.15
LIE = math.log(3.0)
"""What the lying model predicts as ln(t_native / t)."""
COLUMNS = (
    "of oracle", "p10", "slower > 2 %", "> 5 %", "worst", "settled", "turns",
    "first 100: all", "median", "p95", "worst",
)  # fmt: skip


def too_small(table: Table) -> npt.NDArray[np.bool_]:
    """(n, c): transforms of problems that are not worth their rounding errors, as `budgets.refusal` has it. The oracle
    may take them."""
    flops = np.array([problem.flops for problem in table.problems])
    transforms = np.array([name in BY_NAME and not BY_NAME[name].direct_sums for name in table.names])
    return (flops < LEAST_FLOPS)[:, None] & transforms[None]


def honest(gains: ev.Floats, times_us: ev.Floats) -> dict[int, float]:
    """Column -> predicted ln(t_native / t) of the candidates, as `choose.nominees` takes them."""
    allowed = [c for c in np.argsort(-gains) if c and np.isfinite(times_us[c])]
    best = max((gains[c] for c in allowed), default=0.0)
    likely = [c for c in allowed if gains[c] >= max(best - NOMINATION_GAP, NOMINATION_LEAST)]
    return {int(c): float(gains[c]) for c in likely[:NOMINATED]}


def lying(gains: ev.Floats, times_us: ev.Floats) -> dict[int, float]:
    slowest = [c for c in np.argsort(-np.nan_to_num(times_us)) if c and np.isfinite(times_us[c])]
    return dict.fromkeys(map(int, slowest[:NOMINATED]), LIE)


def trial_of(predicted: Mapping[str, float], seed: int = 0) -> Trial:
    """As calls hold it: candidates with what is predicted of them, the most promising first."""
    first = next(iter(predicted), None)
    favourite = first if first is not None and predicted[first] >= FAVOURITE else None
    return Trial({name: Prior(gain, PRIOR_SD) for name, gain in predicted.items()}, favourite=favourite, seed=seed)


def noisy(times_us: ev.Floats, names: Sequence[str], sd: float, spikes: float, seed: int) -> Callable[[str], float]:
    source = random.Random(seed)
    of = dict(zip(names, times_us, strict=True))

    def time_us(name: str) -> float:
        us = float(of[name]) * math.exp(sd * source.gauss(0, 1))
        return us * (1 + source.expovariate(0.5)) if source.random() < spikes else us

    return time_us


def trials(
    table: Table,
    times_us: ev.Floats,
    gains: ev.Floats,
    nominate: Callable[..., dict[int, float]],
    sd: float,
    spikes: float,
) -> dict[str, float]:
    """Figures over all problems. A problem's times carry the cost of a plan already, so trials add none."""
    rows = []
    for i in range(len(table.problems)):
        trial = trial_of({table.names[c]: gain for c, gain in nominate(gains[i], times_us[i]).items()}, seed=i)
        first = replay(trial, noisy(times_us[i], table.names, sd, spikes, i), 100)
        time_us = noisy(times_us[i], table.names, sd, spikes, i + 1)
        plain = sum(time_us(NATIVE) for _ in range(100))
        replay(trial, noisy(times_us[i], table.names, sd, spikes, -i), CALLS - 100)
        used = trial.outcome.algorithm if trial.outcome else NATIVE
        rows.append((table.names.index(used), trial.outcome is not None, trial.turns, first, plain))
    choice = np.array([row[0] for row in rows])
    judged = figures(choice, times_us)
    first, plain = np.array([row[3] for row in rows]), np.array([row[4] for row in rows])
    judged["settled"] = float(np.mean([row[1] for row in rows]))
    judged["turns"] = float(np.mean([row[2] for row in rows]))
    judged["first 100: all"] = float(first.sum() / plain.sum())
    for name, value in zip(("median", "p95", "most"), np.quantile(first / plain, [0.5, 0.95, 1.0]), strict=True):
        judged[f"first 100: {name}"] = float(value)
    return judged


def figures(choice: ev.Ints, times_us: ev.Floats) -> dict[str, float]:
    """Figures of the algorithms used in the end."""
    used = times_us[np.arange(len(choice)), choice]
    fraction, slowdown = np.nanmin(times_us, 1) / used, used / times_us[:, 0]
    return {
        "of oracle": float(fraction.mean()),
        "p10": float(np.quantile(fraction, 0.1)),
        "slower > 2 %": float(np.mean(slowdown > 1.02)),
        "slower > 5 %": float(np.mean(slowdown > 1.05)),
        "worst": float(slowdown.max()),
    }


def measure(times: Path, fold: int, steps: int, limit: int | None = None) -> dict[str, dict[str, float]]:
    """Title -> figures, on the problems of one fold, by a model that was trained on the others."""
    table, _ = read_measured([times])
    folds, _ = ev.split(table, "family", 5, 0)
    model = learner(Recipe(steps=steps))(table.part(folds != fold))
    held = table.part(np.flatnonzero(folds == fold)[:limit])
    times_us = ev.admitted(held)
    gains = np.where(too_small(held), -np.inf, model(held))
    alone = ev.chosen(gains, times_us, MARGIN)
    result = {"native": figures(np.zeros(len(alone), np.int64), times_us), "model alone": figures(alone, times_us)}
    for sd, spikes in NOISE:
        for name, nominate in (("verify", honest), ("verify, lying model", lying)):
            result[f"{name}, noise {sd:.0%}"] = trials(held, times_us, gains, nominate, sd, spikes)
    result["lying model alone"] = figures(
        np.array([next(iter(lying(g, t))) for g, t in zip(gains, times_us, strict=True)]), times_us
    )
    result["problems"] = {"count": float(len(held.problems))}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.verification", description="What trials on real calls are worth.")
    parser.add_argument("times", type=Path, help="CSV or store of measured times; with --real a list of layers")
    parser.add_argument("--fold", type=int, default=0, help="the held-out one of five folds by network family")
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="training steps")
    parser.add_argument("--limit", type=int, help="maximum number of problems")
    parser.add_argument("--real", type=int, metavar="COUNT", help="call this many layers of a list on this machine")
    parser.add_argument("--out", type=Path, help="JSON file to write, with the environment")
    options = parser.parse_args(argv)
    if options.real:
        result = really(options.times, options.real)
    else:
        result = measure(options.times, options.fold, options.steps, options.limit)
    count = int(result.pop("problems")["count"])
    title = f"{count} {'' if options.real else 'held-out '}problems of {options.times.name}"
    shown = Shown(title=title, box=SIMPLE_HEAD, title_justify="left")
    shown.add_column("")
    for column in COLUMNS:
        shown.add_column(column, justify="right")
    names = (
        "of oracle", "p10", "slower > 2 %", "slower > 5 %", "worst", "settled", "turns", "first 100: all",
        "first 100: median", "first 100: p95", "first 100: most",
    )  # fmt: skip
    for title, found in result.items():
        shown.add_row(title, *(_cell(name, found.get(name)) for name in names))
    Console(highlight=False, width=None if sys.stdout.isatty() else 170).print(shown)
    if options.out:
        about = {
            "environment": run_environment(),
            "times": options.times.name,
            "fold": options.fold,
            "problems": count,
        }
        options.out.write_text(json.dumps({**about, "figures": result}, indent=1) + "\n")
    return 0


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if "slower" in name or name == "settled":
        return f"{value:.1%}"
    return f"{value:.1f}" if name == "turns" else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
