"""Measured times -> one artifact, with the figures that it reached on network families it had not seen.

    python -m convselect.model.train times.csv --family cpu-x86-avx2 --out convselect/model/artifacts

Target: ratio-preserving probabilities, p ~ t**-alpha over applicable algorithms, masked cross-entropy. Its minimum is
softmax(-alpha ln t), so that logit differences / alpha are predicted log slowdowns. alpha = 1 is the paper's;
4 did better on held-out families because near-equal algorithms are told apart.

Held-out figures come from cross-validation by network family; the margin below which native is kept is chosen on
folds other than the judged one. The shipped network is then trained on everything, with the margin chosen on all.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convselect.choose import GRADE_OF_PRECISION
from convselect.features import features
from convselect.kernels import BY_NAME
from convselect.model import reformer
from convselect.model.dataset import Table, family_of, folds, kernel_class, ratio_target, read_rows
from convselect.model.inference import Card, Predictor, artifact_path, save
from convselect.model.measure import environment_path, threads
from convselect.problem import ConvProblem, Direction

MARGINS = (0.2, 0.25, 0.3)
"""Candidates for the predicted ln(t_native / t) up to which native is kept. None is lower, although 0.08 would do on
these measurements: they find their operands in the caches, and in ResNet-18 at two threads, algorithms predicted at
1.1 to 1.3 times native's speed ran at 0.9 to 1.1 in place. From 0.08 to 0.2 a hundredth of the speed-up goes, and so do
half of the problems that become slower."""
MARGIN_COST = 0.005
"""Geometric speed-up, relative, that a margin may cost for the harm it prevents."""
SLOWER = 1.02
"""A problem counts as slower than native from here on: differences below are noise."""
MIN_PROBLEMS_PER_DTYPE = 30
"""An element type with fewer measured problems is declined at run time."""

PLAN_COST_US = {Direction.FORWARD: 25.0, Direction.BACKWARD_DATA: 60.0, Direction.BACKWARD_WEIGHT: 60.0}
"""What running through a plan costs beyond the algorithm itself: `python -m benchmarks.overhead` prints it. It is what
decides on tiny problems."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Recipe:
    """How one network is trained. The same recipe and data give the same network on the same machine."""

    alpha: float = 4.0
    steps: int = 400
    batch: int = 256
    learning_rate: float = 5e-3
    weight_decay: float = 0.03
    dropout: float = 0.2
    seed: int = 0


def design(problems: Sequence[ConvProblem]) -> Tensor:
    """Feature matrix (n, n_features), float32."""
    return torch.from_numpy(np.stack([features(problem) for problem in problems]))


def masked_cross_entropy(logits: Tensor, target: Tensor, applicable: Tensor) -> Tensor:
    """Mean of -sum_i p_i ln y_i with y the softmax over applicable algorithms only; all (n, c)."""
    log_y = torch.log_softmax(logits.masked_fill(~applicable, -torch.inf), 1)
    return -(target * log_y.masked_fill(~applicable, 0.0)).sum(1).mean()


def fit(x: Tensor, times_us: Floats, recipe: Recipe) -> reformer.Reformer:
    """Train one Reformer on features x (n, n_features) and times (n, c), NaN = not applicable. In evaluation mode.

    Raises:
        ValueError: with fewer than two problems, or so many classes that the network would exceed `PAPER_PARAMETERS`.
    """
    n, n_classes = times_us.shape
    if n < 2:
        raise ValueError(f"{n} problems are too few to train on")
    applicable = torch.from_numpy(np.isfinite(times_us))
    target = torch.from_numpy(ratio_target(times_us, recipe.alpha)).float()
    # Matrices this small lose more to handing out work than they gain, much more on a busy machine.
    with torch.random.fork_rng(devices=[]), threads(1):
        torch.manual_seed(recipe.seed)
        model = reformer.Reformer(x.shape[1], n_classes, dropout=recipe.dropout)
        if model.n_parameters() > reformer.PAPER_PARAMETERS:
            raise ValueError(f"{model.n_parameters()} parameters; the bound is {reformer.PAPER_PARAMETERS}")
        model.fit_input(x)
        optimiser = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.learning_rate, total_steps=recipe.steps)
        model.train()
        for _ in range(recipe.steps):
            # Without replacement within a batch; batch norm needs at least two.
            batch = torch.randperm(n)[: recipe.batch]
            loss = masked_cross_entropy(model(x[batch]), target[batch], applicable[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    return model.eval()


def log_gains(model: reformer.Reformer, x: Tensor, alpha: float) -> Floats:
    """Predicted ln(t_native / t), (n, c); column 0 is native."""
    with torch.no_grad():
        logits = model(x).double().numpy()
    gains: Floats = (logits - logits[:, :1]) / alpha
    return gains


# ---- judging ----------------------------------------------------------------------------------------------------


def chosen(gains: Floats, times_us: Floats, margin: float) -> npt.NDArray[np.int64]:
    """What `choose` takes, (n,): the best applicable by prediction, or native (0) up to the margin."""
    masked = np.where(np.isfinite(times_us), gains, -np.inf)
    best = masked.argmax(1)
    return np.where(masked.max(1) > margin, best, 0)


def admitted(table: Table, precision: str = "native") -> Floats:
    """The times (n, c) of what `choose` may take under a precision budget; NaN for algorithms over it.

    Networks learn from all times, so that they serve every budget; figures and margin are for the default one.
    """
    times = table.times_us.copy()
    for column, name in enumerate(table.names):
        algorithm = BY_NAME.get(name)
        if algorithm is not None:
            over = [algorithm.error_grade(problem) > GRADE_OF_PRECISION[precision] for problem in table.problems]
            times[over, column] = np.nan
    return times


def judge(choice: npt.NDArray[np.int64], times_us: Floats) -> dict[str, float]:
    """How good choices (n,) are on measured times (n, c). Fraction of oracle = oracle time / chosen time."""
    native = times_us[:, 0]
    oracle = np.nanmin(times_us, 1)
    taken = times_us[np.arange(len(choice)), choice]
    fraction, slowdown = oracle / taken, taken / native
    return {
        "problems": len(choice),
        "fraction_of_oracle_mean": float(fraction.mean()),
        "fraction_of_oracle_p10": float(np.percentile(fraction, 10)),
        "fraction_of_oracle_min": float(fraction.min()),
        "native_fraction_of_oracle_mean": float((oracle / native).mean()),
        "speedup_geomean": _geomean(1 / slowdown),
        "oracle_speedup_geomean": _geomean(native / oracle),
        "speedup_total_time": float(native.sum() / taken.sum()),
        "slower_than_native_share": float((slowdown > SLOWER).mean()),
        "worst_slowdown": float(slowdown.max()),
        "top1": float((taken == oracle).mean()),
        "native_kept_share": float((choice == 0).mean()),
    }


def _geomean(ratios: Floats) -> float:
    return float(np.exp(np.log(ratios).mean()))


def best_margin(gains: Floats, times_us: Floats) -> float:
    """The margin that harms the fewest problems among those that cost next to no speed (`MARGIN_COST`)."""
    figures = {margin: judge(chosen(gains, times_us, margin), times_us) for margin in MARGINS}
    fastest = max(f["speedup_geomean"] for f in figures.values())
    cheap = [m for m in MARGINS if figures[m]["speedup_geomean"] >= fastest * (1 - MARGIN_COST)]
    return min(cheap, key=lambda m: (figures[m]["slower_than_native_share"], m))


def cross_validate(table: Table, recipe: Recipe, n_folds: int = 5) -> tuple[Floats, dict[str, Any]]:
    """(held-out log gains (n, c), figures). The margin for a fold is chosen on the other folds' held-out gains."""
    x, times = design(table.problems), admitted(table)
    fold, kept_apart = folds(table.models, n_folds, recipe.seed)
    gains = np.zeros_like(times)
    for k in np.unique(fold):
        held = fold == k
        model = fit(x[torch.from_numpy(~held)], table.times_us[~held], recipe)
        gains[held] = log_gains(model, x[torch.from_numpy(held)], recipe.alpha)
    choice = np.zeros(len(times), np.int64)
    for k in np.unique(fold):
        held = fold == k
        choice[held] = chosen(gains[held], times[held], best_margin(gains[~held], times[~held]))
    figures: dict[str, Any] = {
        "split": f"{len(np.unique(fold))} folds by {kept_apart}",
        "overall": judge(choice, times),
        "without_margin": judge(chosen(gains, times, 0.0), times),
    }
    for title, labels in (
        ("by_direction", [str(p.direction) for p in table.problems]),
        ("by_kernel_class", [kernel_class(p) for p in table.problems]),
        ("by_dtype", [p.dtype for p in table.problems]),
        # Random layers have no relatives to be kept apart from, and are easier or harder than those of networks.
        ("by_source", ["random" if family_of(m).startswith("loguniform") else "network" for m in table.models]),
    ):
        groups = {name: np.array([label == name for label in labels]) for name in sorted(set(labels))}
        figures[title] = {name: judge(choice[members], times[members]) for name, members in groups.items()}
    return gains, figures


# ---- the whole way ----------------------------------------------------------------------------------------------


def read_measured(paths: Sequence[str | Path]) -> tuple[Table, dict[str, Any]]:
    """(table, the machine that measured it) of files written by `measure`.

    Raises:
        ValueError: where the files come from machines whose times must not be mixed.
    """
    machines = [json.loads(environment_path(path).read_text())["machine"] for path in paths]
    for path, machine in zip(paths, machines, strict=True):
        if machine != machines[0]:
            raise ValueError(f"{path} was measured on {machine}, {paths[0]} on {machines[0]}")
    table = Table.from_rows(row for path in paths for row in read_rows(path))
    # `measure` times algorithms bare. Native needs no plan; every other column pays for its own.
    costs_us = np.array([PLAN_COST_US[problem.direction] for problem in table.problems])
    table.times_us[:, 1:] += costs_us[:, None]
    return table, machines[0]


def train(
    paths: Sequence[str | Path],
    family: str,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    n_folds: int = 5,
    min_problems_per_dtype: int = MIN_PROBLEMS_PER_DTYPE,
) -> Card:
    """Read, cross-validate, fit on everything, write `<out>/<family>.npz` and `.json`, read back and compare.

    Raises:
        ValueError: on data that cannot be mixed, that are of another family, or too few.
    """
    recipe = recipe or Recipe()
    table, machine = read_measured(paths)
    if machine["family"] != family:
        raise ValueError(f"these times were measured on {machine['family']}, not on {family}")
    by_dtype = Counter(problem.dtype for problem in table.problems)
    dtypes = tuple(sorted(dtype for dtype, count in by_dtype.items() if count >= min_problems_per_dtype))
    if not dtypes:
        raise ValueError(f"no element type has {min_problems_per_dtype} measured problems: {dict(by_dtype)}")
    gains, figures = cross_validate(table, recipe, n_folds)
    margin = best_margin(gains, admitted(table))
    x = design(table.problems)
    model = fit(x, table.times_us, recipe)
    card = Card(
        family=family,
        algorithm_names=table.names,
        alpha=recipe.alpha,
        margin=margin,
        dtypes=dtypes,
        host_flags=machine["host_flags"],
        threads=tuple(sorted({problem.threads for problem in table.problems})),
        revisions=table.revisions,
        versions={"torch": machine["torch"], "numpy": np.__version__},
        data={
            "problems": len(table.problems),
            "times": int(np.isfinite(table.times_us).sum()),
            "files": [Path(path).name for path in paths],
            "network_families": len({family_of(model) for model in table.models}),
            "by_dtype": dict(sorted(by_dtype.items())),
            "by_direction": dict(sorted(Counter(str(p.direction) for p in table.problems).items())),
            "by_kernel_class": dict(sorted(Counter(kernel_class(p) for p in table.problems).items())),
            "wins": {name: int(n) for name, n in zip(table.names, _wins(table), strict=True)},
            "device": machine["device"],
            "recipe": asdict(recipe),
            "parameters": model.n_parameters(),
        },
        figures={"held_out": figures},
    )
    path = artifact_path(family, out)
    save(path, card, reformer.fold(model))
    _compare(Predictor.load(path), model, x, recipe.alpha)
    return card


def _wins(table: Table) -> list[int]:
    fastest = np.nanargmin(table.times_us, 1)
    return [int((fastest == i).sum()) for i in range(len(table.names))]


def _compare(predictor: Predictor, model: reformer.Reformer, x: Tensor, alpha: float) -> None:
    """What ships must be what was trained: folding and float16 may move a predicted log gain by 0.02 at most."""
    want = log_gains(model, x, alpha)
    logits = np.stack([predictor.logits(row) for row in x.numpy()]).astype(np.float64)
    moved = np.abs((logits - logits[:, :1]) / alpha - want).max()
    if not moved <= 0.02:
        raise ValueError(f"the stored network differs from the trained one by {moved:.3f} in predicted log gain")


def report(card: Card) -> str:
    """The held-out figures as a few lines of text."""
    held_out = card.figures["held_out"]
    lines = [f"{card.family}: {card.data['problems']} problems, {held_out['split']}, margin {card.margin:g}"]
    groups: list[tuple[str, Mapping[str, float]]] = [("overall", held_out["overall"])]
    for title in ("by_source", "by_direction", "by_kernel_class", "by_dtype"):
        groups += held_out[title].items()
    lines.append(f"{'':>16} {'n':>5} {'of oracle: mean':>15} {'p10':>5} {'min':>5} {'speed-up':>8} {'oracle':>6} "
                 f"{'slower':>6} {'worst':>5} {'top-1':>5}")  # fmt: skip
    for name, f in groups:
        lines.append(
            f"{name:>16} {f['problems']:5.0f} {f['fraction_of_oracle_mean']:15.3f} {f['fraction_of_oracle_p10']:5.2f} "
            f"{f['fraction_of_oracle_min']:5.2f} {f['speedup_geomean']:8.3f} {f['oracle_speedup_geomean']:6.3f} "
            f"{f['slower_than_native_share']:6.1%} {f['worst_slowdown']:5.2f} {f['top1']:5.2f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="convselect.model.train", description="Measured times -> artifact.")
    parser.add_argument("times", nargs="+", help="CSV files written by convselect.model.measure")
    parser.add_argument("--family", required=True, help='device family, for example "cpu-x86-avx2"')
    parser.add_argument("--out", required=True, help="folder for <family>.npz and <family>.json")
    parser.add_argument("--alpha", type=float, default=Recipe.alpha, help="exponent of the target; 1 is the paper's")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--folds", type=int, default=5)
    options = parser.parse_args(argv)
    recipe = Recipe(alpha=options.alpha, steps=options.steps, seed=options.seed)
    card = train(options.times, options.family, options.out, recipe, n_folds=options.folds)
    print(report(card))


if __name__ == "__main__":
    main()
