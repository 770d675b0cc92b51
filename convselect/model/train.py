"""Train one artifact from measured times, with its figures on held-out network families.

    convselect train times.sqlite --family cpu-x86-avx2-c --out convselect/model/artifacts

Target: ratio-preserving probabilities, p ~ t**-alpha over applicable algorithms, masked cross-entropy. Its minimum is
softmax(-alpha ln t), so that logit differences / alpha are predicted log slowdowns. alpha = 1 is the paper's; larger
ones did better on held-out families, since they separate nearly equal algorithms (`python -m benchmarks.ablations`).

Held-out figures come from cross-validation by network family; the margin below which native is kept is chosen on
folds other than the judged one. The shipped network is then trained on all problems, with the margin chosen on all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.machine.host import has_c_kernels
from convselect.measure.measure import threads
from convselect.measure.rows import kernel_class
from convselect.model import margins, reformer
from convselect.model.artifact import Card, save
from convselect.model.dataset import Table, family_of, is_wide, read_measurements, read_wide
from convselect.model.evaluate import (
    Fit,
    Floats,
    Ints,
    Margins,
    admitted,
    best_margin,
    best_sharpness,
    cross_validated,
    figures_of,
    held_out,
    split,
    summary,
)
from convselect.model.features import FEATURE_NAMES, VOLUME_FEATURE_NAMES, features_of, kinds, names_of
from convselect.model.inference import OF_VOLUMES, Predictor, artifact_path
from convselect.model.targets import loss_of, native_line, probabilities
from convselect.store.store import is_store

MIN_PROBLEMS_PER_DTYPE = 30
"""An element type with fewer measured problems is declined at run time."""
LEAST_TIMES = 5
"""An algorithm with fewer times of a kind of problems is not chosen for them by prediction."""

LIMITS = (
    "Times were measured with operands in the caches, one convolution at a time; what a choice does to its neighbours' "
    "caches and layouts is not in them. Sizes outside the measured range are clipped to it; thread counts above those "
    "measured raise the margin. Other machines of the same family differ."
)


FOREIGN_LIMITS = (
    "Other people's measurements, as published: not checked here, noise unknown, and an algorithm without a time may "
    "be one that nobody tried. There is no native to fall back to. For comparison with other models, not for "
    "dispatch: its device is none that a problem has."
)


IGNORED = ("waste_gemm", "twos_C/G", "twos_K/G", "twos_N", "twos_W", "twos_H", "twos_P")
"""Features of tiled matrix products, left out by default. On the MI100 GPU they are worth 0.8 points of accuracy. For
CPU kernels only vectors matter, and with the few thousand problems measured there these features did harm."""


@dataclass(frozen=True)
class Recipe:
    """How one network is trained. The same recipe and data give the same network on the same machine.

    Attributes:
        target, alpha: see `targets`.
        widths: (hidden, out) of each Γ-block; None for `reformer.DEFAULT_WIDTHS`, of volumes `reformer.VOLUME_WIDTHS`.
        norm, dropout: used in the blocks. Layer normalisation cannot be folded, so it is for comparisons only.
        ignored: features, by the beginning of their names, that the network does not see.
        average: decay of the running mean of the weights, which is shipped in place of the last weights; 0: ship the
            last weights.
    """

    target: str = "ratio"
    alpha: float = 8.0
    widths: tuple[tuple[int, int], ...] | None = None
    norm: str = "batch"
    dropout: float = 0.2
    steps: int = 3000
    batch: int = 256
    learning_rate: float = 5e-3
    weight_decay: float = 0.03
    average: float = 0.998
    ignored: tuple[str, ...] = IGNORED
    seed: int = 0


def design(problems: Sequence[ConvProblem]) -> Tensor:
    """Feature matrix (n, n_features), float32."""
    return torch.from_numpy(np.stack([features_of(problem) for problem in problems]))


def fit(x: Tensor, times_us: Floats, recipe: Recipe) -> reformer.Reformer:
    """Train one Reformer on features x (n, n_features) and times (n, c), NaN = not applicable. In evaluation mode.

    Raises:
        ValueError: with fewer than two problems, or with too many classes for a network within `PAPER_PARAMETERS`.
    """
    n, n_classes = times_us.shape
    if n < 2:
        raise ValueError(f"{n} problems are too few to train on")
    applicable = torch.from_numpy(np.isfinite(times_us))
    target = torch.from_numpy(probabilities(recipe.target, times_us, recipe.alpha)).float()
    log_t = torch.from_numpy(np.log(np.where(np.isfinite(times_us), times_us, 1.0))).float()
    loss_function = loss_of(recipe.target, recipe.alpha)
    # For matrices this small several threads cost more than they gain, much more on a busy machine.
    with torch.random.fork_rng(devices=[]), threads(1):
        torch.manual_seed(recipe.seed)
        of_images = x.shape[1] == len(FEATURE_NAMES)
        widths = recipe.widths or (reformer.DEFAULT_WIDTHS if of_images else reformer.VOLUME_WIDTHS)
        model = reformer.Reformer(x.shape[1], n_classes, widths, norm=recipe.norm, dropout=recipe.dropout)
        if recipe.widths is None and model.n_parameters() > reformer.PAPER_PARAMETERS:
            raise ValueError(f"{model.n_parameters()} parameters; the bound is {reformer.PAPER_PARAMETERS}")
        model.fit_input(x)
        names = FEATURE_NAMES if of_images else VOLUME_FEATURE_NAMES
        if recipe.ignored:
            model.ignore([i for i, name in enumerate(names) if name.startswith(recipe.ignored)])
        optimiser = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.learning_rate, total_steps=recipe.steps)
        averaged = None
        if recipe.average:
            # Average over at most a fifth of the training, so that the initial weights do not count.
            decay = min(recipe.average, 1 - 5 / max(recipe.steps, 6))
            averaged = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=True
            )
        model.train()
        for _ in range(recipe.steps):
            # Without replacement within a batch; batch norm needs at least two.
            batch = torch.randperm(n)[: recipe.batch]
            loss = loss_function(model(x[batch]), target[batch], log_t[batch], applicable[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            if averaged is not None:
                averaged.update_parameters(model)
    if averaged is not None:
        average = averaged.module
        assert isinstance(average, reformer.Reformer)
        return average.eval()
    return model.eval()


def log_gains(model: reformer.Reformer, x: Tensor, alpha: float, native: int | None = 0) -> Floats:
    """Predicted ln(t_native / t), (n, c); without native, relative to the mean of all."""
    with torch.no_grad():
        logits = model(x).double().numpy()
    base = logits.mean(1, keepdims=True) if native is None else logits[:, native : native + 1]
    gains: Floats = (logits - base) / alpha
    return gains


def learner(recipe: Recipe) -> Fit:
    """A Reformer as something to cross-validate."""

    def learn(table: Table) -> Callable[[Table], Floats]:
        model = fit(design(table.problems), table.times_us, recipe)
        return lambda other: log_gains(model, design(other.problems), recipe.alpha, table.native)

    return learn


def cross_validate(
    table: Table, recipe: Recipe, n_folds: int = 5, how: str = "family", only: Sequence[int] | None = None
) -> tuple[Floats, dict[str, Any]]:
    """(held-out log gains, figures) of a Reformer; of all folds, or of those in `only`."""
    fold, kept_apart = split(table, how, n_folds, recipe.seed)
    gains, found = cross_validated(table, learner(recipe), fold, only)
    return gains, {"split": _folds(fold, kept_apart), **found}


def _folds(fold: Ints, kept_apart: str) -> str:
    return f"{len(set(fold.tolist()))} folds by {kept_apart}"


# ---- the whole way ----------------------------------------------------------------------------------------------


def read_measured(paths: Sequence[str | Path]) -> tuple[Table, dict[str, Any]]:
    """(table, the machine that measured it) of stores and CSV files of times, or of wide CSV files of others, whose
    machine is known only from the file's name.

    Raises:
        ValueError: if they come from machines whose times must not be mixed.
    """
    if all(is_foreign(path) for path in paths):
        tables = [read_wide(path) for path in paths]
        names = tables[0].names
        if any(table.names != names for table in tables):
            raise ValueError(f"the files measure different algorithms: {', '.join(map(str, paths))}")
        whole = Table(
            [p for table in tables for p in table.problems], [m for table in tables for m in table.models], names,
            np.concatenate([table.times_us for table in tables]), tables[0].revisions,
        )  # fmt: skip
        return whole, {"family": None, "host_flags": {}, "device": ", ".join(sorted(set(whole.models))), "torch": ""}
    rows, machine = read_measurements(paths)
    table = Table.from_rows(rows)
    # Calls of volumes go through Python.
    in_c = has_c_kernels(machine["family"]) and not table.problems[0].is_volume
    return table.with_plan_costs(free_in_c=in_c), machine


def is_foreign(path: str | Path) -> bool:
    """Whether a file is a wide CSV measured by others."""
    return not is_store(path) and is_wide(path)


def train(
    paths: Sequence[str | Path],
    family: str,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    n_folds: int = 5,
    how: str = "family",
    min_problems_per_dtype: int = MIN_PROBLEMS_PER_DTYPE,
    in_networks: Sequence[str | Path] = (),
) -> Card:
    """Read, cross-validate, fit on everything, write `<out>/<family>.npz` and `.json`, read back and compare.

    `in_networks` are files of times of calls within networks (`python -m benchmarks.in_networks`), from which margins
    by kind of problem are fitted; without them there is one margin for all.

    A split by "problem" holds out one fold and ships the network trained on the others: the figures are then those of
    the shipped network itself. Times of volumes make an artifact of their own, whose family begins with `OF_VOLUMES`.

    Raises:
        ValueError: if the data cannot be mixed, are of another family, or are too few; `in_networks` likewise.
    """
    recipe = recipe or Recipe()
    table, machine = read_measured(paths)
    of_volumes = table.problems[0].is_volume
    measured_on = f"{OF_VOLUMES}{machine['family']}" if of_volumes else machine["family"]
    if measured_on not in (family, None):
        raise ValueError(f"these times were measured on {measured_on}, not on {family}")
    by_dtype = Counter(problem.dtype for problem in table.problems)
    dtypes = tuple(sorted(dtype for dtype, count in by_dtype.items() if count >= min_problems_per_dtype))
    if not dtypes:
        raise ValueError(f"no element type has {min_problems_per_dtype} measured problems: {dict(by_dtype)}")
    only = [0] if how == "problem" else None
    inside = margins.read(in_networks, family) if in_networks else []
    fold, kept_apart = split(table, how, n_folds, recipe.seed)
    gains, members = held_out(table, learner(recipe), fold, only)
    held, learnt = table.part(members), table if only is None else table.part(fold != 0)
    times = admitted(held)
    x = design(learnt.problems)
    model = fit(x, learnt.times_us, recipe)
    by_kind = _margins(model, recipe.alpha, held, gains, inside) if inside else {}
    figures = figures_of(table, learner(recipe), fold, gains, members, by_kind)
    card = Card(
        family=family,
        algorithm_names=table.names,
        alpha=recipe.alpha,
        margin=best_margin(gains, times, table.native),
        margins=by_kind,
        sharpness=best_sharpness(gains, times),
        native_line=_line(x, learnt) if has_c_kernels(machine["family"]) and not of_volumes else (),
        dtypes=dtypes,
        device=table.problems[0].device if machine["family"] else family,
        tf32=any(problem.tf32 for problem in table.problems),
        host_flags=machine["host_flags"],
        threads=tuple(sorted({problem.threads for problem in table.problems})),
        revisions=table.revisions,
        timed=timed(learnt),
        versions={"torch": machine["torch"], "numpy": np.__version__},
        data={
            **_described(table, learnt),
            "files": [Path(path).name for path in paths],
            **({"in_networks": {"files": [Path(p).name for p in in_networks], "calls": len(inside)}} if inside else {}),
            "device": machine["device"],
            "recipe": json.loads(json.dumps(asdict(recipe))),  # as it will be read back: with lists for tuples
            "parameters": model.n_parameters(),
        },
        figures={"held_out": {"split": _folds(fold, kept_apart), **figures}},
        limits=LIMITS if machine["family"] else FOREIGN_LIMITS,
        feature_names=names_of(table.problems[0]),
    )
    path = artifact_path(family, out)
    save(path, card, reformer.fold(model))
    _compare(Predictor.load(path), model, x, recipe.alpha, table.native)
    return card


def _margins(
    model: reformer.Reformer, alpha: float, held: Table, held_out: Floats, inside: Sequence[margins.Inside]
) -> Margins:
    """Margins by kind of the model that ships; `held_out` are the gains (n, c) of the problems `held` as models predict
    them that have not seen them."""
    own = log_gains(model, design(held.problems), alpha, held.native)
    said = log_gains(model, design([one.problem for one in inside]), alpha, held.native)
    at = [held.names.index(one.algorithm) if one.algorithm in held.names else None for one in inside]
    predicted = [float("nan") if i is None else float(row[i]) for row, i in zip(said, at, strict=True)]
    return margins.fitted(inside, predicted, margins.unseen(held.names, own, held_out, admitted(held)))


def _line(x: Tensor, table: Table) -> tuple[float, ...]:
    return native_line(x.numpy(), table.times_us[:, table.native or 0])


def _described(table: Table, learnt: Table) -> dict[str, Any]:
    """The card's description of the data: all measurements, and the part used for training."""

    def counts(labels: Iterable[str]) -> dict[str, int]:
        return dict(sorted(Counter(labels).items()))

    return {
        "problems": len(learnt.problems),
        "times": int(np.isfinite(learnt.times_us).sum()),
        "network_families": len({family_of(model) for model in table.models}),
        "by_dtype": counts(problem.dtype for problem in table.problems),
        "by_direction": counts(str(problem.direction) for problem in table.problems),
        "by_kernel_class": counts(kernel_class(problem) for problem in table.problems),
        "wins": {name: int(n) for name, n in zip(table.names, _wins(table), strict=True)},
    }


def timed(table: Table) -> dict[str, tuple[str, ...]]:
    """Algorithm -> the kinds of problems of which it has at least `LEAST_TIMES` times."""
    counts = {name: Counter[str]() for name in table.names}
    for problem, times_us in zip(table.problems, table.times_us, strict=True):
        of = kinds(problem)
        for name, time_us in zip(table.names, times_us, strict=True):
            if np.isfinite(time_us):
                counts[name].update(of)
    return {
        name: tuple(sorted(kind for kind, n in found.items() if n >= LEAST_TIMES)) for name, found in counts.items()
    }


def _wins(table: Table) -> list[int]:
    fastest = np.nanargmin(table.times_us, 1)
    return [int((fastest == i).sum()) for i in range(len(table.names))]


def _compare(predictor: Predictor, model: reformer.Reformer, x: Tensor, alpha: float, native: int | None) -> None:
    """Check that the artifact agrees with the trained model: predicted log gains may differ by at most 0.02, from
    folding and float16."""
    x = x[:5000]
    want = log_gains(model, x, alpha, native)
    logits = np.stack([predictor.logits(row) for row in x.numpy()]).astype(np.float64)
    base = logits.mean(1, keepdims=True) if native is None else logits[:, native : native + 1]
    moved = np.abs((logits - base) / alpha - want).max()
    if not moved <= 0.02:
        raise ValueError(f"the stored network differs from the trained one by {moved:.3f} in predicted log gain")


def report(card: Card) -> list[list[str]]:
    """The held-out figures as lines of cells under `evaluate.SUMMARY_HEADER`."""
    held_out = card.figures["held_out"]
    lines = [summary("overall", held_out["overall"])]
    parts = [name for name in ("one_margin", "without_margin", "best_of_2", "best_of_3") if name in held_out]
    lines += [summary(name.replace("_", " "), held_out[name]) for name in parts]
    for title in ("by_source", "by_direction", "by_kernel_class", "by_kind", "by_dtype", "by_threads"):
        lines += [summary(name, found) for name, found in held_out.get(title, {}).items()]  # older ones lack some
    return lines
