"""Figures for the quality of the cost model of `convselect tune`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from convselect.tune.programs import Floats

CLEAR = 0.02
"""Measurements cannot reliably distinguish programs whose times differ by less than this share."""


class Quality(NamedTuple):
    """How predictions compare with measured throughput on held-out programs.

    Attributes:
        pairwise: share of pairs of programs of one problem that are in the right order.
        clear_pairs: the same for pairs whose times differ by more than `CLEAR`.
        recall: share of a problem's k fastest that are among the k predicted fastest.
        r2, rmse: of normalised throughput, over all.
    """

    pairwise: float
    clear_pairs: float
    recall: float
    r2: float
    rmse: float


def quality(pairs: Sequence[tuple[Floats, Floats]], k: int = 30) -> Quality:
    """Figures from (true, predicted) throughput per problem; the first three are means over problems."""
    pairwise = [pairwise_accuracy(true, said) for true, said in pairs]
    clear = [pairwise_accuracy(true, said, CLEAR) for true, said in pairs]
    recalls = [recall_at(true, said, k) for true, said in pairs]
    true, said = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
    error = float(((true - said) ** 2).mean())
    r2 = 1 - error / max(float(true.var()), 1e-12)
    return Quality(float(np.mean(pairwise)), float(np.mean(clear)), float(np.mean(recalls)), r2, error**0.5)


def pairwise_accuracy(true: Floats, said: Floats, least: float = 0.0) -> float:
    """Share of pairs in the right order, among those whose times differ by more than the share `least`; predicted ties
    count half."""
    upper = np.triu_indices(len(true), 1)
    want = np.sign(true[:, None] - true[None, :])[upper]
    got = np.sign(said[:, None] - said[None, :])[upper]
    ratio = np.abs(np.log(true[:, None] / true[None, :]))[upper]
    counted = (want != 0) & (ratio > math.log1p(least))
    return float((0.5 + 0.5 * (want * got)[counted]).mean()) if counted.any() else 1.0


def recall_at(true: Floats, said: Floats, k: int) -> float:
    """Share of the k fastest that are among the k predicted fastest; k is at most the number of programs."""
    k = min(k, len(true))
    best, predicted = (set(np.argsort(-values, kind="stable")[:k].tolist()) for values in (true, said))
    return len(best & predicted) / k
