"""Margins for leaving native by what predictions are off by inside networks.

Models learn from convolutions timed one at a time, with operands in the caches. In a network an algorithm gains more or
less than that, and by how much depends on the algorithm: `thin` loses 0.3 of its predicted ln(t_native / t), `direct`
and `depthwise` gain. `python -m benchmarks.in_networks` times the model's first choice and native on the calls of
networks; what is measured there minus what is predicted is a residual. With the mean m and the standard deviation s of
the residuals of a kind of problems and an algorithm, a call whose predicted gain is the margin

    z s - m,    z the normal quantile of `CERTAINTY`

is faster than native with that probability. This is the one-sided bound of split conformal prediction by class
(Mondrian: Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World, 2005, section 4.5), with normal quantiles
in place of empirical ones, since classes have 5 to 100 calls. Both moments are shrunk, as if `PRIOR` calls of what is
known without the kind had been measured too: for a kind those of its algorithm in all kinds, for an algorithm a mean of
0 and the deviation for which the margin is `UNKNOWN`. The layers of those networks are among what the model was trained
on, so s^2 grows by how far its predictions are from those of models that have not seen a problem's network (`unseen`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from convselect.base.problem import ConvProblem
from convselect.kernels.pool import BY_NAME
from convselect.measure import plan_cost
from convselect.measure.rows import NATIVE, Row
from convselect.model.dataset import read_measurements
from convselect.model.evaluate import Floats, Margins
from convselect.model.features import ELSEWHERE, margin_kind

CERTAINTY = 0.65
"""About as many problems of networks held out are then slower than native as with one margin for all."""
UNKNOWN = 0.15
"""The margin where nothing was measured in networks."""
PRIOR = 5.0
FLOOR = 0.05
"""No margin is lower: the networks measured are a few, on one machine."""
MOST = 0.7
NEAR = 0.6
"""Calls with a larger prediction say nothing about the margin: they leave native in any case, and are off by more."""
MOST_RESIDUAL = 0.8
"""Residuals are limited to this: one disturbed call must not decide."""

_Z = NormalDist().inv_cdf(CERTAINTY)


class Inside(NamedTuple):
    """An algorithm on a layer's calls within a network; `gain` is ln(t_native / t), what its plan costs included."""

    network: str
    problem: ConvProblem
    algorithm: str
    gain: float


def read(paths: Sequence[str | Path], family: str) -> list[Inside]:
    """What files of times within networks hold.

    Raises:
        ValueError: if they are of another family of machines, or of several; OSError.
    """
    rows, machine = read_measurements(paths)
    if machine["family"] != family:
        raise ValueError(f"the times in networks were measured on {machine['family']}, not on {family}")
    return from_rows(rows)


def from_rows(rows: Iterable[Row]) -> list[Inside]:
    """One for each algorithm but native that has been timed beside native in a network, by medians."""
    times: dict[tuple[str, ConvProblem], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.status == "ok":
            times[row.model, row.problem][row.algorithm] = row.median_us
    found = []
    for (network, problem), of in times.items():
        for name in sorted(of.keys() - {NATIVE}) if NATIVE in of else ():
            cost_us = 0.0 if plan_cost.computes_in_c(name) else plan_cost.PLAN_COST_US[problem.direction]
            found.append(Inside(network, problem, name, math.log(of[NATIVE] / (of[name] + cost_us))))
    return found


class Moments(NamedTuple):
    """Mean and variance of residuals."""

    mean: float
    variance: float

    def margin(self, unseen: float = 0.0) -> float:
        """Args: unseen: variance to be added, of predictions for networks that the model has not seen."""
        return round(min(max(_Z * math.sqrt(self.variance + unseen) - self.mean, FLOOR), MOST), 3)

    def with_residuals(self, residuals: Sequence[float]) -> Moments:
        """These moments, as if they were those of `PRIOR` residuals, together with further ones."""
        total = PRIOR + len(residuals)
        mean = (PRIOR * self.mean + sum(residuals)) / total
        squares = PRIOR * (self.variance + self.mean**2) + sum(r * r for r in residuals)
        return Moments(mean, squares / total - mean**2)


NOTHING = Moments(0.0, (UNKNOWN / _Z) ** 2)


def unseen(names: Sequence[str], own: Floats, held_out: Floats, times_us: Floats) -> dict[str, float]:
    """Algorithm (all tile sizes of Winograd's: one) -> variance of what a model predicts around what models trained on
    other networks do, of problems on which leaving native is in question.

    Args:
        own, held_out: predicted ln(t_native / t), (n, c); times_us: (n, c), NaN if an algorithm does not apply.
    """
    squares: dict[str, list[float]] = defaultdict(list)
    in_question = np.isfinite(times_us) & (own > -UNKNOWN) & (own <= NEAR)
    for column, name in enumerate(names):
        off = (held_out - own)[in_question[:, column], column]
        squares[_group(name)] += np.square(np.clip(off, -MOST_RESIDUAL, MOST_RESIDUAL)).tolist()
    return {group: sum(of) / len(of) for group, of in squares.items() if of}


def fitted(inside: Sequence[Inside], predicted: Sequence[float], unseen: Mapping[str, float]) -> Margins:
    """Kind of problems -> algorithm -> margin, for all kinds and algorithms measured in networks; under `ELSEWHERE`
    those of algorithms that need more than `UNKNOWN`: what an algorithm loses in networks it is taken to lose in all
    kinds, what it gains only where that was measured.

    Args:
        predicted: ln(t_native / t) of each; NaN: left out.
        unseen: as the function of this name gives it.
    """
    by_algorithm: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one, said in zip(inside, predicted, strict=True):
        kind = margin_kind(one.problem)
        if kind != ELSEWHERE and said <= NEAR:  # which NaN is not
            residual = min(max(one.gain - said, -MOST_RESIDUAL), MOST_RESIDUAL)
            by_algorithm[_group(one.algorithm)].append(residual)
            by_kind[kind, _group(one.algorithm)].append(residual)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*BY_NAME, *(one.algorithm for one in inside)}):
        members[_group(name)].append(name)
    of_all = {group: NOTHING.with_residuals(residuals) for group, residuals in sorted(by_algorithm.items())}
    for group, moments in of_all.items():
        if (margin := moments.margin(unseen.get(group, 0.0))) > UNKNOWN:
            found[ELSEWHERE] |= dict.fromkeys(members[group], margin)
    for (kind, group), residuals in sorted(by_kind.items()):
        margin = of_all[group].with_residuals(residuals).margin(unseen.get(group, 0.0))
        found[kind] = {**found[ELSEWHERE], **found[kind], **dict.fromkeys(members[group], margin)}
    return {kind: of for kind, of in found.items() if of}


def _group(algorithm: str) -> str:
    """Tile sizes of Winograd's algorithm teach of each other."""
    return algorithm.rstrip("0123456789")
