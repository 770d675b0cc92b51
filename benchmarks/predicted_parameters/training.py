"""Measured programs -> one file of parameter networks, with their figures on held-out problems."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import _recorded
from benchmarks.predicted_parameters.artifact import NetworkCard, ParameterCard, finite, parameter_path, save
from benchmarks.predicted_parameters.figures import compared, figures, held_out
from benchmarks.predicted_parameters.sequence import Recipe, export, train
from benchmarks.predicted_parameters.tokens import Example, Signature, coverage, example, grouped
from convselect.base.problem import ConvProblem
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment
from convselect.tune import records
from convselect.tune.programs import Program

LEAST_PROBLEMS = 10
"""A signature with fewer measured problems gets no network."""
WIDTH = 4
"""Beam width of the file's networks."""
LIMITS = (
    "Trained on few problems, of the directions, layouts, batch and thread counts that its networks cover. A fraction "
    "is of the best measured program, which is a lucky minimum of many."
)


def train_parameters(
    examples: Sequence[Example],
    family: str,
    out: str | os.PathLike[str],
    revisions: Mapping[str, int],
    recipe: Recipe | None = None,
    *,
    folds: int = 5,
    data: Mapping[str, Any] | None = None,
    measured: Mapping[str, Mapping[str, float]] | None = None,
) -> ParameterCard:
    """Cross-validate by problem, train one network per signature on all problems, and write the file.

    Args:
        revisions: algorithm -> the revision that was measured.
        data: the card's description of the training data.
        measured: algorithm -> "gain" and "gain_low" of predictions for held-out problems that were measured anew
            (`study --live`). They, instead of those from the recorded times, decide whether an algorithm keeps its
            default.

    Raises:
        ValueError: if no signature has enough problems.
    """
    recipe = recipe or Recipe()
    cards, arrays, told = [], [], {}
    for signature, of in usable(examples).items():
        algorithms = sorted({one.algorithm for one in of})
        judged = held_out(of, recipe, folds=folds, widths=(WIDTH,))
        told[" ".join(algorithms)] = {name: finite(figures(j)) for name, j in judged.items()}
        own = {a: finite(figures([j for j in judged[f"k={WIDTH}"] if j.of.algorithm == a])) for a in algorithms}
        for name, figures_ in own.items():
            figures_.update((measured or {}).get(name, {}))
        network = NetworkCard(
            names=signature.names,
            values=signature.values,
            algorithms=tuple(algorithms),
            revisions={name: revisions[name] for name in algorithms},
            covers=coverage(one.problem for one in of),
            figures=own,
            k=WIDTH,
        )
        cards.append(network)
        arrays.append(export(train(of, algorithms, recipe)))
    card = ParameterCard(
        family=family,
        networks=tuple(cards),
        versions={"torch": str(torch.__version__), "numpy": np.__version__},
        data={
            **(data or {}),
            "problems": len({one.problem for one in examples}),
            "programs": sum(len(one.times_us) for one in examples),
            "recipe": dataclasses.asdict(recipe),
        },
        figures=told,
        limits=LIMITS,
    )
    save(parameter_path(family, out), card, arrays)
    return card


def usable(examples: Sequence[Example]) -> dict[Signature, list[Example]]:
    """Examples by signature, without signatures that have too few problems.

    Raises:
        ValueError: if no signature has enough.
    """
    found = {s: of for s, of in grouped(examples).items() if len({one.problem for one in of}) >= LEAST_PROBLEMS}
    if not found:
        raise ValueError(f"there is no algorithm with parameters measured on {LEAST_PROBLEMS} problems")
    return found


def evaluated(
    examples: Sequence[Example], recipe: Recipe | None = None, folds: int = 5
) -> dict[str, dict[str, dict[str, float]]]:
    """Algorithms that share a network -> method -> figures on held-out problems, for every method and target.

    Raises:
        ValueError: if no signature has enough problems.
    """
    return {
        " ".join(sorted({one.algorithm for one in of})): compared(of, recipe or Recipe(), folds)
        for of in usable(examples).values()
    }


# ---- files ------------------------------------------------------------------------------------------------------


def examples(files: Sequence[Path]) -> list[Example]:
    """Every problem and algorithm with parameters that these files have times of. Algorithms are today's.

    Args:
        files: recorded programs (`.csv`, `.csv.gz`), or logs of `convselect tune` (`.jsonl`).

    Raises:
        ValueError, OSError: if a file cannot be read, or holds something else.
    """
    times: dict[ConvProblem, dict[Program, float]] = {}
    for path in files:
        for problem, of in _times(path):
            times.setdefault(problem, {}).update(of)
    found = []
    for problem, of in times.items():
        for name in dict.fromkeys(program.algorithm for program in of):
            algorithm = BY_NAME.get(name)
            if algorithm is None or algorithm.why_not(problem) is not None:
                continue
            space = algorithm.space(problem)
            if space is not None:
                own = [(program.values, time_us) for program, time_us in of.items() if program.algorithm == name]
                one = example(problem, name, space, own)
                if one is not None:
                    found.append(one)
    return found


def _times(path: Path) -> list[tuple[ConvProblem, dict[Program, float]]]:
    revisions = {name: a.revision for name, a in BY_NAME.items()}
    if path.suffix == ".jsonl":
        if not path.exists():
            raise OSError(f"there is no {path}")
        measured = records.Log(path, environment.fingerprint_of("cpu") or "", revisions).read()
        return [
            (problem, {p: m.time_us for p, m in of.items() if m.time_us is not None})
            for problem, of in measured.items()
        ]
    about = _recorded.beside(path)
    then = json.loads(about.read_text()).get("revisions", {}) if about.exists() else {}
    # Times of an algorithm that has changed since no longer hold.
    changed = {name for name, revision in then.items() if revisions.get(name) != revision}
    return [
        (one.problem, {p: t for p, t in one.times_us.items() if p.algorithm not in changed})
        for one in _recorded.read_recorded(path)
    ]


def worst_measured(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """Algorithm -> the worst of each figure among files of `study --live`.

    Raises:
        ValueError, OSError: if a file has no such figures, or cannot be read.
    """
    worst: dict[str, dict[str, float]] = {}
    for path in files:
        try:
            for name, of in json.loads(path.read_text())["live"].items():
                known = worst.setdefault(name, {"gain": math.inf, "gain_low": math.inf, "of_tuned": math.inf})
                for key in known:
                    known[key] = min(known[key], float(of[key]))
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{path} has no predictions that were measured") from None
    return worst
