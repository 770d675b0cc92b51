"""The work of `convselect evaluate`: judges existing artifacts, and selectors trained for this, on one set of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convselect.base import timing
from convselect.machine.environment import run_environment
from convselect.model import evaluate as ev
from convselect.model.dataset import Table, read_measurements
from convselect.model.features import features_of, names_of
from convselect.model.inference import Predictor
from convselect.model.selectors import named, r_squared
from convselect.model.train import Recipe, design, fit, is_foreign, learner, log_gains, read_measured

CURVE = (1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of the training data's networks of a learning curve."""


def judge_all(
    paths: Sequence[str | Path],
    artifact: str | Path | None,
    selectors: Sequence[str],
    how: str,
    n_folds: int,
    one_fold: bool,
    recipe: Recipe,
    *,
    learning_curve: bool = False,
    figures: str | Path | None = None,
) -> dict[str, Any]:
    """Judge an artifact on all problems, and each selector on problems that it was not trained on.

    Returns:
        `lines` for a table under `evaluate.SUMMARY_HEADER`, `judged` (name -> all figures), `noise`
        (`evaluate.label_noise`), `problems`, `split`, `written` (paths of figures), `learning_curve`, `trained_on`
        (those of the files that the artifact's card names: its figures on them are too good).

    Raises:
        ValueError, OSError: on data that cannot be read or split; `ArtifactError`: on a damaged artifact;
        `selectors.Missing`, ModuleNotFoundError: if a package is not installed.
    """
    table, _ = read_measured(paths)
    fold, kept_apart = ev.split(table, how, n_folds, recipe.seed)
    if one_fold and len(set(fold.tolist())) < 3:
        raise ValueError("of two folds none is left to choose the margin on when one is held out: take three or more")
    judged: dict[str, Any] = {}
    seen: list[str] = []
    last: tuple[ev.Ints, ev.Ints] | None = None  # problems, choices
    if artifact is not None:
        predictor = Predictor.load(artifact)
        gains = artifact_gains(predictor, table)
        judged[Path(artifact).stem] = _as_it_is(table, gains, predictor)
        last = np.arange(len(table.problems)), artifact_choice(predictor, table, gains)
        seen = sorted(set(predictor.card.data.get("files", ())) & {Path(path).name for path in paths})
    for name in selectors:
        judged[name], last = _trained(name, table, fold, one_fold, recipe)
    curve = _learning_curve(table, fold, recipe) if learning_curve else None
    result: dict[str, Any] = {
        "problems": len(table.problems),
        "split": "as it is" if not selectors else f"{len(set(fold.tolist()))} folds by {kept_apart}",
        "environment": run_environment(),
        "lines": _lines(judged),
        "judged": judged,
        "noise": None if any(map(is_foreign, paths)) else ev.label_noise(read_measurements(paths)[0]),
        "learning_curve": curve,
        "trained_on": seen,
        "written": [],
    }
    if figures is not None and last is not None:
        from convselect.model.figures import draw

        members, choice = last
        part, times = table.part(members), ev.admitted(table)[members]
        result["written"] = draw(figures, part, times, choice, list(judged.values())[-1]["reliability"], curve)
    return result


def _chosen(table: Table, members: ev.Ints, gains: ev.Floats, margin: float) -> tuple[ev.Ints, ev.Ints]:
    """(problems (m,), the choices for them (m,))."""
    return members, ev.chosen(gains, ev.admitted(table)[members], margin, table.native)


def _trained(
    name: str, table: Table, fold: ev.Ints, one_fold: bool, recipe: Recipe
) -> tuple[dict[str, Any], tuple[ev.Ints, ev.Ints]]:
    """(figures of a selector on problems that it was not trained on, those problems and its choices)."""
    first = int(fold.min())
    only = [first] if one_fold else None
    learn = learner(recipe) if name == "reformer" else named(name, recipe.seed)
    gains, found = ev.cross_validated(table, learn, fold, only)
    members = np.flatnonzero(np.isin(fold, fold if only is None else only))
    margin = ev.best_margin(gains, ev.admitted(table)[members], table.native)
    rest = table.part(fold != first)
    found["choice_us"] = reformer_us(table, recipe) if name == "reformer" else choice_us(learn(rest), table)
    if name == "mlp":  # what such models are usually judged by
        found["r_squared"] = r_squared(rest, table.part(fold == first), recipe.seed)
    return found, _chosen(table, members, gains, margin)


def artifact_gains(predictor: Predictor, table: Table) -> ev.Floats:
    """Predicted gains (n, c) in the table's order of algorithms; unknown algorithms are never the best."""
    card = predictor.card
    logits = np.stack([predictor.logits(features_of(p)) for p in table.problems]).astype(np.float64) / card.alpha
    gains = np.full(table.times_us.shape, -np.inf)
    for column, name in enumerate(table.names):
        if name in card.algorithm_names:
            gains[:, column] = logits[:, card.algorithm_names.index(name)]
    return gains if table.native is None else gains - gains[:, [table.native]]


def artifact_choice(predictor: Predictor, table: Table, gains: ev.Floats) -> ev.Ints:
    """The choices (n,) of an artifact with its margins, from the gains that `artifact_gains` gives."""
    margins = ev.margins_of(table, predictor.card.margin, predictor.card.margins)
    return ev.chosen(gains, ev.admitted(table), margins, table.native)


def _as_it_is(table: Table, gains: ev.Floats, predictor: Predictor) -> dict[str, Any]:
    times, native = ev.admitted(table), table.native
    choice = artifact_choice(predictor, table, gains)
    best = ev.chosen(gains, times, -np.inf, None)
    sharpness = predictor.card.sharpness or predictor.card.alpha
    right = times[np.arange(len(best)), best] == np.nanmin(times, 1)
    found: dict[str, Any] = {
        "overall": ev.judge(choice, times, native),
        **{f"best_of_{k}": ev.judge(ev.best_of(gains, times, k), times, native) for k in (2, 3)},
        "reliability": ev.reliability(ev.confidence(gains, times, sharpness), right),
        "choice_us": _median_us([lambda p=p: predictor.logits(features_of(p)) for p in table.problems[:200]]),
    }
    for title, labels in ev.by_group(table).items():
        groups = {name: np.array([label == name for label in labels]) for name in sorted(set(labels))}
        found[title] = {name: ev.judge(choice[g], times[g], native) for name, g in groups.items()}
    return found


def _lines(judged: dict[str, Any]) -> list[list[str]]:
    lines = []
    for name, found in judged.items():
        lines.append(ev.summary(f"{name} ({found['choice_us']:.0f} us)", found["overall"]))
        for part in ("without_margin", "best_of_2", "best_of_3"):
            if part in found:
                lines.append(ev.summary(f"  {part.replace('_', ' ')}", found[part]))
        for title in ("by_source", "by_direction", "by_kernel_class", "by_kind", "by_dtype", "by_threads"):
            if len(judged) == 1 and len(found[title]) > 1:
                lines += [ev.summary(f"  {group}", f) for group, f in found[title].items()]
    return lines


# ---- what a choice costs ----------------------------------------------------------------------------------------


def choice_us(predict: Any, table: Table) -> float:
    """Median time of one choice, its features included, us."""
    singles = [table.part(np.array([i])) for i in range(min(20, len(table.problems)))]
    return _median_us([lambda one=one: predict(one) for one in singles])


def reformer_us(table: Table, recipe: Recipe) -> float:
    """The same for a Reformer in the form that ships, in numpy; the time does not depend on its weights."""
    from convselect.model import reformer
    from convselect.model.artifact import Card

    part = table.part(np.arange(min(300, len(table.problems))))
    model = fit(design(part.problems), part.times_us, replace(recipe, steps=2, norm="batch"))
    names = names_of(table.problems[0])
    card = Card("timing", table.names, recipe.alpha, 0.0, ("float32",), device="none", feature_names=names)
    predictor = Predictor(card, reformer.fold(model))
    return _median_us([lambda p=p: predictor.logits(features_of(p)) for p in table.problems[:200]])


def _median_us(calls: Sequence[Any]) -> float:
    def one_after_the_other() -> None:
        for call in calls:
            call()

    return timing.interleaved({"": one_after_the_other}, 5)[""].median_us / len(calls)


def _learning_curve(table: Table, fold: ev.Ints, recipe: Recipe) -> dict[int, dict[str, float]]:
    """Training problems -> figures on the first fold, without a margin. Parts of the data are all problems of some of
    the networks, drawn at random, since who measures more measures more networks."""
    first = fold.min()
    train, held = table.part(fold != first), table.part(fold == first)
    times = ev.admitted(held)
    networks = sorted(set(train.models))
    rank = dict(zip(networks, np.random.default_rng(recipe.seed).permutation(len(networks)).tolist(), strict=True))
    ranks = np.array([rank[model] for model in train.models])
    curve = {}
    for share in CURVE:
        part = train.part(ranks < max(1, round(share * len(networks))))
        if len(part.problems) < 2:
            continue
        model = fit(design(part.problems), part.times_us, recipe)
        gains = log_gains(model, design(held.problems), recipe.alpha, held.native)
        best = ev.chosen(gains, times, -np.inf, held.native)
        curve[len(part.problems)] = ev.judge(best, times, held.native)
    return curve
