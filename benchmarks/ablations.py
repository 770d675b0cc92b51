"""Ablations: target x number of Γ-blocks, and sets of features, at several seeds.

    python -m benchmarks.ablations times.csv.gz --out benchmarks/results/ablations-cpu.json
    python -m benchmarks.ablations miopen_times_gfx908.csv.gz --split problem --steps 1500 --batch 512 --out ...

Per row, on held-out problems of one fold: test accuracy, fraction of oracle, geometric speed-up over native (if
there is one) and over the best single rule, and the time of one choice in numpy, without features.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from convselect.base import timing
from convselect.machine.environment import run_environment
from convselect.model import evaluate as ev
from convselect.model import reformer
from convselect.model.artifact import Card
from convselect.model.dataset import Table
from convselect.model.features import FEATURE_NAMES
from convselect.model.inference import Predictor
from convselect.model.train import Recipe, design, fit, log_gains, read_measured

TARGETS = (("one_hot", 1.0), ("softmax", 1.0), ("ratio", 1.0), ("ratio", 4.0), ("ratio", 8.0))
WIDTHS = {
    1: ((256, 64),),
    2: ((64, 128), (256, 64)),
    3: reformer.DEFAULT_WIDTHS,
    4: ((64, 128), (256, 128), (256, 64), (64, 32)),
}
_DERIVED = ("flops", "bytes", "intensity", "gemm_m", "gemm_n", "gemm_k")
_SHAPE = tuple(name for name in FEATURE_NAMES if name.startswith(("twos", "waste")))
FEATURE_SETS = ("raw, z-scored", "log2", "log2 + derived", "log2 + derived + divisibility and waste")


def columns(name: str, x: torch.Tensor) -> torch.Tensor:
    """The feature matrix (n, d) of a set; other features are constant, so that the network has the same size."""
    index = {feature: i for i, feature in enumerate(FEATURE_NAMES)}
    out = x.clone()
    drop = [index[f] for f in (*_DERIVED, *_SHAPE)]
    if name == "log2 + derived":
        drop = [index[f] for f in _SHAPE]
    elif name == FEATURE_SETS[3]:
        drop = []
    out[:, drop] = 0.0
    if name == "raw, z-scored":
        sizes = [i for f, i in index.items() if f in ("N", "C", "H", "W", "K", "R", "S", "P", "Q", "C/G", "K/G", "G")]
        out[:, sizes] = torch.exp2(out[:, sizes])
    return out


def one(
    table: Table, fold: ev.Ints, recipe: Recipe, features: str = FEATURE_SETS[3]
) -> tuple[dict[str, float], reformer.Reformer]:
    """Figures on the fold numbered 0 of a network trained on the others."""
    held = fold == 0
    train, test = table.part(~held), table.part(held)
    model = fit(columns(features, design(train.problems)), train.times_us, recipe)
    gains = log_gains(model, columns(features, design(test.problems)), recipe.alpha, table.native)
    times = ev.admitted(test)
    choice = ev.chosen(gains, times, -np.inf, table.native)
    found = ev.judge(choice, times, table.native)
    single = ev.best_single(times, ev.fixed_order(ev.admitted(train)))
    rows = np.arange(len(choice))
    figures = {
        "top1": found["top1"],
        "fraction_of_oracle": found["fraction_of_oracle_mean"],
        "speedup_over_best_single": ev.geomean(times[rows, single] / times[rows, choice]),
        "parameters": float(model.n_parameters()),
    }
    if table.native is not None:
        figures["speedup_over_native"] = found["speedup_geomean"]
    return figures, model


def inference_us(model: reformer.Reformer, table: Table, alpha: float) -> float:
    card = Card("ablation", table.names, alpha, 0.0, ("float32",), device="none")
    predictor = Predictor(card, reformer.fold(model))
    x = design(table.problems[:1]).numpy()[0]

    def calls() -> None:
        for _ in range(100):
            predictor.logits(x)

    return timing.interleaved({"": calls}, 7)[""].median_us / 100


def run(table: Table, fold: ev.Ints, recipe: Recipe, seeds: int, console: Console) -> list[dict[str, Any]]:
    """One row per setting: means and standard deviations over the seeds."""
    settings: list[tuple[str, Recipe, str]] = []
    for target, alpha in TARGETS:
        for blocks, widths in WIDTHS.items():
            title = f"{target}{f' a={alpha:g}' if target == 'ratio' else ''}, {blocks} blocks"
            settings.append((title, replace(recipe, target=target, alpha=alpha, widths=widths), FEATURE_SETS[3]))
    settings += [(f"features: {name}", replace(recipe, ignored=()), name) for name in FEATURE_SETS]
    rows = []
    for title, setting, features in settings:
        found, us = [], 0.0
        for seed in range(seeds):
            figures, model = one(table, fold, replace(setting, seed=seed), features)
            found.append(figures)
            us = inference_us(model, table, setting.alpha)
        row: dict[str, Any] = {"setting": title, "inference_us": us}
        for name in found[0]:
            values = [f[name] for f in found]
            row[name], row[f"{name}_sd"] = float(np.mean(values)), float(np.std(values, ddof=1)) if seeds > 1 else 0.0
        rows.append(row)
        console.print(f"{title}: top-1 {row['top1']:.4f}, of oracle {row['fraction_of_oracle']:.4f}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ablations", description="Targets, blocks, features.")
    parser.add_argument("times", type=Path, nargs="+")
    parser.add_argument("--split", default="family", choices=ev.SPLITS)
    parser.add_argument("--fold", type=int, default=0, help="which of the five folds is held out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--alpha", type=float, default=8.0, help="of the feature sets' target")
    parser.add_argument("--dropout", type=float, default=Recipe.dropout)
    parser.add_argument("--all-features", action="store_true", help="targets and blocks see what CPU recipes ignore")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    table, _ = read_measured(options.times)
    fold, kept = ev.split(table, options.split)
    fold = (fold - options.fold) % (int(fold.max()) + 1)
    recipe = Recipe(steps=options.steps, batch=options.batch, alpha=options.alpha, dropout=options.dropout)
    if options.all_features:
        recipe = replace(recipe, ignored=())
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    rows = run(table, fold, recipe, options.seeds, console)
    shown = Shown(
        title=f"{len(table.problems)} problems, one fold of 5 by {kept}, {options.seeds} seeds", box=SIMPLE_HEAD
    )
    for name in ("setting", "top-1", "of oracle", "over native", "over best single", "parameters", "us"):
        shown.add_column(name, justify="left" if name == "setting" else "right")
    for row in rows:
        native = (
            "-" if table.native is None else f"{row['speedup_over_native']:.3f} ± {row['speedup_over_native_sd']:.3f}"
        )
        shown.add_row(
            row["setting"], f"{row['top1']:.4f} ± {row['top1_sd']:.4f}",
            f"{row['fraction_of_oracle']:.4f} ± {row['fraction_of_oracle_sd']:.4f}", native,
            f"{row['speedup_over_best_single']:.3f}", f"{row['parameters']:.0f}", f"{row['inference_us']:.0f}",
        )  # fmt: skip
    console.print(shown)
    if options.out:
        env = run_environment()
        arguments = {**vars(options), "times": [p.name for p in options.times], "out": options.out.name}
        options.out.write_text(json.dumps({"environment": env, "arguments": arguments, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
