"""All pairs in place of all combinations: most mistakes need two particular values to meet, hardly any need four."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value of each axis, such that any two values of any two axes meet in at least one row.

    Greedy: a row starts from a pair that has not been met, and takes on each further axis the value that meets most
    partners for the first time. There are about as many rows as the two longest axes have pairs, always the same ones.
    """
    if len(axes) == 1:
        return [(value,) for value in axes[0]]
    order = sorted(range(len(axes)), key=lambda axis: -len(axes[axis]))
    waiting = {
        ((i, a), (k, b)): None
        for i, k in itertools.combinations(order, 2)
        for a, b in itertools.product(range(len(axes[i])), range(len(axes[k])))
    }
    used = [[0] * len(axis) for axis in axes]
    rows = []
    while waiting and all(axes):
        row = dict(next(iter(waiting)))
        for k in order:
            if k not in row:
                row[k] = min(
                    range(len(axes[k])),
                    key=lambda b: (-sum(_pair(order, i, a, k, b) in waiting for i, a in row.items()), used[k][b]),
                )
        for (i, a), (k, b) in itertools.combinations(row.items(), 2):
            waiting.pop(_pair(order, i, a, k, b), None)
        for i, a in row.items():
            used[i][a] += 1
        rows.append(tuple(axes[i][row[i]] for i in range(len(axes))))
    return rows


def _pair(order: list[int], i: int, a: int, k: int, b: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((i, a), (k, b)) if order.index(i) < order.index(k) else ((k, b), (i, a))


def pairwise(axes: Mapping[str, Sequence[Any] | Mapping[str, Any]], **options: Any) -> pytest.MarkDecorator:
    """`parametrize` over pairs. An axis is a sequence of values, or a mapping from ids to values; a name "a,b" stands
    for an axis whose values are tuples."""
    labelled = [v if isinstance(v, Mapping) else {str(value): value for value in v} for v in axes.values()]
    names = [name for axis in axes for name in axis.split(",")]
    rows = []
    for labels in pairs(*map(list, labelled)):
        values = [axis[label] for axis, label in zip(labelled, labels, strict=True)]
        flat = [part for name, v in zip(axes, values, strict=True) for part in (v if "," in name else (v,))]
        rows.append(pytest.param(*flat, id="-".join(labels)))
    return pytest.mark.parametrize(names, rows, **options)
