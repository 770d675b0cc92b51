"""What a file of measured times holds: problems by kind, and how well two measurements of a problem agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import quantiles
from typing import NamedTuple

from benchmarks._markdown import table
from convselect.base.problem import CHANNELS_LAST, ConvProblem
from convselect.measure.rows import NATIVE, Row

KINDS = (
    "images, NCHW", "images, NHWC", "one row (1-D, transposed 1-D)", "volumes", "two threads", "bfloat16", "float16",
    "float64", "batch of 8 and more", "measured twice",
)  # fmt: skip
"""What problems are counted by; one problem may be of several kinds."""


class Contents(NamedTuple):
    """A file of times in numbers.

    Attributes:
        rows: one per problem, algorithm and measurement.
        problems: different ones that have a time of native's.
        kinds: those of `KINDS`; the last is the number of problems that were measured once more, independently.
        statuses: rows by status.
        agreement: (median, 90th percentile) of how far a gain over native differs between the two measurements of a
            problem, as a factor >= 1, over all algorithms but native; NaN if nothing was measured twice.
    """

    rows: int
    problems: int
    kinds: Mapping[str, int]
    statuses: Mapping[str, int]
    agreement: tuple[float, float]


def contents(rows: Iterable[Row]) -> Contents:
    statuses: Counter[str] = Counter()
    times: dict[ConvProblem, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        statuses[row.status] += 1
        if row.status == "ok":
            times[row.problem][row.repeat][row.algorithm] = row.median_us
    problems = {p: of for p, of in times.items() if NATIVE in of[0]}
    kinds = Counter(kind for p in problems for kind in _kinds(p))
    twice = [(of[0], of[1]) for of in problems.values() if NATIVE in of[1]]
    kinds["measured twice"] = len(twice)
    return Contents(statuses.total(), len(problems), kinds, statuses, _agreement(twice))


def _kinds(p: ConvProblem) -> Iterable[str]:
    if p.D > 1 or p.T > 1:
        yield "volumes"
    elif p.H == 1 and p.R == 1:
        yield "one row (1-D, transposed 1-D)"
    else:
        yield "images, NHWC" if p.layout == CHANNELS_LAST else "images, NCHW"
    if p.threads == 2:
        yield "two threads"
    if p.dtype != "float32":
        yield p.dtype
    if p.N >= 8:
        yield "batch of 8 and more"


def _agreement(twice: Iterable[tuple[Mapping[str, float], Mapping[str, float]]]) -> tuple[float, float]:
    factors = [
        math.exp(abs(math.log(first[NATIVE] / first[name] * again[name] / again[NATIVE])))
        for first, again in twice
        for name in first.keys() & again.keys() - {NATIVE}
    ]
    if len(factors) < 2:
        return math.nan, math.nan
    deciles = quantiles(factors, n=10)
    return deciles[4], deciles[8]


def contents_table(files: Mapping[str, Contents]) -> str:
    """`files`: title -> contents. Kinds that no file has are left out."""
    kinds = [kind for kind in KINDS if any(of.kinds.get(kind) for of in files.values())]
    statuses = sorted({status for of in files.values() for status in of.statuses})
    of_all = list(files.values())
    rows = [
        ["problems", *(f"{of.problems:,}" for of in of_all)],
        *([kind, *(f"{of.kinds.get(kind, 0):,}" for of in of_all)] for kind in kinds),
        ["rows", *(f"{of.rows:,}" for of in of_all)],
        *([f"rows that are {status}", *(f"{of.statuses.get(status, 0):,}" for of in of_all)] for status in statuses),
        [
            "gain over native, two measurements differ by: median / p90",
            *(" / ".join(f"{100 * (factor - 1):.1f} %" for factor in of.agreement) for of in of_all),
        ],
    ]
    return table(("", *files), rows)
