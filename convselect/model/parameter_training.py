"""Measured programs -> one file of parameter networks, with what each reached on problems it had not seen.

convselect train-params benchmarks/results/programs-cpu-x86-avx512.csv.gz --family cpu-x86-avx512-c --out FOLDER
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from convselect.model.parameter_artifact import NetworkCard, ParameterCard, finite, parameter_path, save
from convselect.model.parameter_figures import compared, figures, held_out
from convselect.model.parameters import Example, Signature, coverage, grouped
from convselect.model.sequence import Recipe, export, train

LEAST_PROBLEMS = 10
"""A signature with fewer measured problems gets no network."""
WIDTH = 4
"""Of the beam that ships."""
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
    """Cross-validate by problem, train one network per signature on everything, and write the file.

    Args:
        revisions: algorithm -> the revision that was measured.
        data: what the card says of where the times come from.
        measured: algorithm -> its "gain" and "gain_low" as predictions of held-out problems were measured anew
            (`python -m benchmarks.parameters --live`): they decide, in place of those from the recorded times, whether
            an algorithm keeps its default.

    Raises:
        ValueError: where no signature has enough problems.
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
    """Those of signatures with enough problems.

    Raises:
        ValueError: where there are none.
    """
    found = {s: of for s, of in grouped(examples).items() if len({one.problem for one in of}) >= LEAST_PROBLEMS}
    if not found:
        raise ValueError(f"there is no algorithm with parameters measured on {LEAST_PROBLEMS} problems")
    return found


def evaluated(
    examples: Sequence[Example], recipe: Recipe | None = None, folds: int = 5
) -> dict[str, dict[str, dict[str, float]]]:
    """Algorithms that share a network -> method -> figures on held-out problems, every method and target.

    Raises:
        ValueError: where no signature has enough problems.
    """
    return {
        " ".join(sorted({one.algorithm for one in of})): compared(of, recipe or Recipe(), folds)
        for of in usable(examples).values()
    }
