"""Measured times as one table for training, from stores, our CSV files and those of others; network families, folds."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, conv_problem
from convselect.measure.plan_cost import PLAN_COST_CUDA_US, PLAN_COST_US, computes_in_c
from convselect.measure.rows import NATIVE, Row, read_text
from convselect.store.times import read_times


def family_of(model: str) -> str:
    """The network family of a model name: "resnet" for "resnet50d" and "tf_resnet50"."""
    found = re.match(r"(?:(?:tf|test|legacy)_)*([a-z]+)", model.lower())
    return found.group(1) if found else model.lower()


def read_measurements(paths: Sequence[str | Path], max_drift: float | None = None) -> tuple[list[Row], dict[str, Any]]:
    """(rows, the machine that measured them: family, host_flags, device, torch) of stores and of our CSV files. Of
    files that hold both images and volumes, the images': a model has features of one or the other.

    Args:
        max_drift: leave out blocks of a store across which the sentinel moved by more than this ratio.

    Raises:
        ValueError: if they come from machines whose times must not be mixed, or hold nothing.
        OSError: if a file cannot be read.
    """
    rows: list[Row] = []
    machines: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        for machine, found in read_times(path, max_drift):
            if not machine:
                raise FileNotFoundError(f"{path} does not say where it was measured: there is no {path}.env.json")
            rows += found
            machines.append((str(path), machine))
    for name, machine in machines:
        if machine != machines[0][1]:
            raise ValueError(f"{name} was measured on {machine}, {machines[0][0]} on {machines[0][1]}")
    if not rows:
        raise ValueError(f"{', '.join(map(str, paths))} hold no measurements")
    return [row for row in rows if not row.problem.is_volume] or rows, machines[0][1]


# ---- tables -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Times of all algorithms on all problems.

    Attributes:
        problems, models: one per line; the model the problem was taken from.
        names: algorithms, "native" first, then by name; one per column.
        times_us: (problems, names), NaN if an algorithm does not apply, was wrong or failed.
        revisions: revision of each algorithm, as measured.
    """

    problems: list[ConvProblem]
    models: list[str]
    names: tuple[str, ...]
    times_us: npt.NDArray[np.float64]
    revisions: dict[str, int]

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> Table:
        """Make a table of the latest revision of each algorithm, with the lower time of two rows for the same problem.
        Left out are second measurements (`repeat`), which serve to judge the first, and problems without a time for
        native or for any other algorithm.

        Raises:
            ValueError: if nothing is left.
        """
        rows = [row for row in rows if not row.repeat]
        revisions: dict[str, int] = {}
        for row in rows:
            revisions[row.algorithm] = max(row.revision, revisions.get(row.algorithm, row.revision))
        times: dict[ConvProblem, dict[str, float]] = {}
        models: dict[ConvProblem, str] = {}
        refused: set[tuple[ConvProblem, str]] = set()
        for row in rows:
            if row.revision != revisions[row.algorithm]:
                continue
            if row.status in ("ok", "censored"):
                of_problem = times.setdefault(row.problem, {})
                models.setdefault(row.problem, row.model)
                of_problem[row.algorithm] = min(row.min_us, of_problem.get(row.algorithm, float("inf")))
            else:
                refused.add((row.problem, row.algorithm))
        for problem, name in refused:
            times.get(problem, {}).pop(name, None)
        kept = [problem for problem, of_problem in times.items() if NATIVE in of_problem and len(of_problem) > 1]
        if not kept:
            raise ValueError("no problem was measured with native and at least one other algorithm")
        others = sorted({name for problem in kept for name in times[problem]} - {NATIVE})
        names = (NATIVE, *others)
        table = np.array([[times[problem].get(name, np.nan) for name in names] for problem in kept], np.float64)
        return cls(kept, [models[p] for p in kept], names, table, {name: revisions[name] for name in names})

    @property
    def native(self) -> int | None:
        """The column of "native"; None if there is none."""
        return self.names.index(NATIVE) if NATIVE in self.names else None

    def with_plan_costs(self, *, free_in_c: bool = False) -> Table:
        """The table with the cost of running through a plan added to every time but native's, which needs no plan.

        Args:
            free_in_c: for calls that run outside Python: C kernels cost nothing more either.
        """
        costs_us = [PLAN_COST_US[p.direction] if p.device == "cpu" else PLAN_COST_CUDA_US for p in self.problems]
        paying = [name != NATIVE and not (free_in_c and computes_in_c(name)) for name in self.names]
        return replace(self, times_us=self.times_us + np.outer(costs_us, paying))

    def part(self, members: npt.NDArray[Any]) -> Table:
        """The table of some of its problems: a mask or indices (m,)."""
        chosen = np.arange(len(self.problems))[members]
        return Table(
            [self.problems[i] for i in chosen], [self.models[i] for i in chosen], self.names, self.times_us[chosen],
            self.revisions,
        )  # fmt: skip


# ---- other people's times ---------------------------------------------------------------------------------------

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_LAYOUTS = {"nchw": CONTIGUOUS, "nhwc": CHANNELS_LAST}


def read_wide(path: str | Path) -> Table:
    """A table of times measured by others: CSV (`.gz`: compressed) with one line per problem and one column
    `<name>_ms` per algorithm, milliseconds, empty if it does not apply.

    Columns N C H W K R S stride_h/w pad_h/w dil_h/w groups are needed; direction (default: forward), dtype (FP32),
    layout (NCHW) and a source (`model`, `source` or `arch`) may be missing. Lines with fewer than two times are left
    out, since they offer no choice.

    Raises:
        ValueError: if columns are missing, a cell is not a number, or nothing is left; with file and line.
    """
    reader = csv.DictReader(read_text(path).splitlines())
    columns = [name for name in reader.fieldnames or () if name.endswith("_ms")]
    if not columns:
        raise ValueError(f"{path} has no column of times, <name>_ms")
    problems, models, times = [], [], []
    for line in reader:
        try:
            row = [float(line[name]) * 1e3 if line[name] else float("nan") for name in columns]
            problem = _wide_problem(line)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {type(error).__name__}: {error}") from None
        if sum(value == value for value in row) > 1 and problem.P > 0 and problem.Q > 0:
            problems.append(problem)
            models.append(next((line[name] for name in ("model", "source", "arch") if line.get(name)), "unknown"))
            times.append(row)
    if not problems:
        raise ValueError(f"{path} holds no problem with two times")
    names = tuple(name.removesuffix("_ms") for name in columns)
    return Table(problems, models, names, np.array(times, np.float64), dict.fromkeys(names, 1))


def _wide_problem(line: Mapping[str, str]) -> ConvProblem:
    sizes = [int(line[name]) for name in ("N", "C", "H", "W", "K", "R", "S")]
    stride, padding, dilation = ((int(line[f"{a}_h"]), int(line[f"{a}_w"])) for a in ("stride", "pad", "dil"))
    dtype, layout = line.get("dtype") or "FP32", line.get("layout") or "NCHW"
    if dtype.lower() not in _DTYPES or layout.lower() not in _LAYOUTS:
        raise ValueError(f"unknown dtype {dtype!r} or layout {layout!r}")
    layout = _LAYOUTS[layout.lower()]
    return conv_problem(
        *sizes, stride=stride, padding=padding, dilation=dilation, groups=int(line["groups"]),
        direction=line.get("direction") or "forward", dtype=_DTYPES[dtype.lower()],
        layout=layout, weight_layout=layout,
    )  # fmt: skip


def is_wide(path: str | Path) -> bool:
    """Whether a CSV file has columns `<name>_ms`."""
    return any(name.endswith("_ms") for name in read_text(path).partition("\n")[0].strip().split(","))


# ---- splits -----------------------------------------------------------------------------------------------------


def folds(models: Sequence[str], n_folds: int, seed: int = 0) -> tuple[npt.NDArray[np.int64], str]:
    """(fold number of each problem, the unit that folds keep together: "family" or "problem").

    All problems of a network family are in one fold: layers of related networks are near duplicates, and a split that
    separates them gives figures that are too good. With fewer families than folds there are as many folds as families;
    with one family, problems are split at random.
    """
    order = np.random.default_rng(seed)
    families = [family_of(model) for model in models]
    distinct = sorted(set(families))
    if len(distinct) == 1:
        return order.permutation(len(models)).astype(np.int64) % n_folds, "problem"
    n_folds = min(n_folds, len(distinct))
    sizes = np.zeros(n_folds, np.int64)
    fold_of: dict[str, int] = {}
    # Put the largest family first, always into the smallest fold; the order of ties depends on the seed alone.
    count = {family: families.count(family) for family in distinct}
    shuffled = [distinct[i] for i in order.permutation(len(distinct))]
    for family in sorted(shuffled, key=lambda f: -count[f]):
        fold_of[family] = int(sizes.argmin())
        sizes[fold_of[family]] += count[family]
    return np.array([fold_of[family] for family in families], np.int64), "family"


def ratio_target(times: npt.NDArray[np.float64], alpha: float = 1.0) -> npt.NDArray[np.float64]:
    """Ratio-preserving probabilities p_i = t_i**-alpha / sum_k t_k**-alpha per row, (n, c) -> (n, c); 0 for NaN.

    alpha = 1 is the target of ICLR 2025 submission 13039 (a kernel b times faster gets b times the probability, in
    any unit of time); larger exponents sharpen it, infinity is one-hot. Computed in logarithms, so that nothing
    overflows.

    Raises:
        ValueError: if a row has no finite time, or a time is not positive.
    """
    finite = np.isfinite(times)
    if not finite.any(axis=-1).all():
        raise ValueError("a problem has no applicable algorithm")
    if (times[finite] <= 0).any():
        raise ValueError("a time is not positive")
    scores = np.where(finite, -alpha * np.log(np.where(finite, times, 1.0)), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: npt.NDArray[np.float64] = weights / weights.sum(axis=-1, keepdims=True)
    return result
