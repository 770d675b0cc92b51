"""Judge choices by measured times: figures, splits, and cross-validation of anything that ranks algorithms.

In this file `times_us` is (n, c) with NaN if an algorithm does not apply, and `gains` (n, c) are predicted
ln(t_reference / t); the reference is native or, if native was not measured, any constant per problem.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from convselect.kernels._contract import GRADE_OF_PRECISION
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import Row, kernel_class, special_kind
from convselect.model.dataset import Table, family_of, folds
from convselect.model.features import margins_for

MARGINS = (0.15, 0.2, 0.25, 0.3, 0.4)
"""Candidates for the predicted ln(t_native / t) up to which native is kept. None is lower, although 0.1 would do for
the measurements: their operands are in the caches, and in ResNet-18 at two threads, algorithms with predicted speeds of
1.1 to 1.3 times native's had 0.9 to 1.1 inside the network. Going from 0.1 to 0.15 loses 0.5 % of the speed-up, and
removes 40 % of the problems that become slower."""
MARGIN_COST = 0.005
"""Relative loss of geometric mean speed-up that a margin may cost for the slow-downs it prevents."""
SLOWER = 1.02
"""From this ratio of times on a problem counts as slower than native: smaller differences are noise."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# ---- figures ----------------------------------------------------------------------------------------------------


def admitted(table: Table, precision: str = "native") -> Floats:
    """The times (n, c) of the algorithms that `choose` may take under a precision budget; NaN for others.

    Models learn from all times, so that they serve every budget; figures and margin are for the default budget.
    """
    times = table.times_us.copy()
    for column, name in enumerate(table.names):
        algorithm = BY_NAME.get(name) if table.native is not None else None
        if algorithm is not None:
            over = [
                algorithm.error_grade(problem) > GRADE_OF_PRECISION[precision]
                or (precision == "exact" and not algorithm.direct_sums)
                for problem in table.problems
            ]
            times[over, column] = np.nan
    return times


def chosen(gains: Floats, times_us: Floats, margin: float | Floats, native: int | None = 0) -> Ints:
    """The choices of `choose`, (n,): of the applicable algorithms that are predicted to gain more than their margin the
    one with the best prediction, or native if there is none.

    Args:
        margin: one, or one for each problem and algorithm (n, c), as `margins_of` gives them.
    """
    masked = np.where(np.isfinite(times_us), gains, -np.inf)
    if native is not None:
        enough = masked > margin
        enough[:, native] = True
        masked = np.where(enough, masked, -np.inf)
    best: Ints = masked.argmax(1).astype(np.int64)
    return best


Margins = Mapping[str, Mapping[str, float]]
"""Kind of problems (`features.margin_kind`) -> algorithm -> margin."""


def margins_of(table: Table, margin: float, margins: Margins) -> float | Floats:
    """The margins of an artifact's card for each problem and algorithm of a table, (n, c); `margin` itself if there are
    no others."""
    if not margins:
        return margin
    found = np.full(table.times_us.shape, margin)
    for i, problem in enumerate(table.problems):
        for name, own in (margins_for(problem, margins) or {}).items():
            if name in table.names:
                found[i, table.names.index(name)] = own
    return found


def best_of(gains: Floats, times_us: Floats, k: int) -> Ints:
    """The fastest, as measured, of the k best by prediction, (n,): the choice after timing k candidates."""
    order = np.argsort(-np.where(np.isfinite(times_us), gains, -np.inf), axis=1)[:, :k]
    of_those = np.take_along_axis(np.where(np.isfinite(times_us), times_us, np.inf), order, 1)
    picked: Ints = np.take_along_axis(order, of_those.argmin(1)[:, None], 1)[:, 0]
    return picked


def fixed_order(times_us: Floats) -> list[int]:
    """Columns, sorted by how often they are fastest. The best fixed rule is to take the first of them that applies."""
    wins = Counter(np.nanargmin(times_us, 1).tolist())
    return sorted(range(times_us.shape[1]), key=lambda column: (-wins[column], column))


def best_single(times_us: Floats, order: Sequence[int]) -> Ints:
    """The choices of the rule "the first of `order` that applies", (n,)."""
    finite = np.isfinite(times_us)[:, list(order)]
    taken: Ints = np.array(order, np.int64)[finite.argmax(1)]
    return taken


def judge(choice: Ints, times_us: Floats, native: int | None = 0) -> dict[str, float]:
    """Figures of choices (n,) on measured times (n, c). Fraction of oracle = oracle time / chosen time; figures that
    compare with native are left out if native was not measured."""
    rows = np.arange(len(choice))
    oracle, taken = np.nanmin(times_us, 1), times_us[rows, choice]
    fraction = oracle / taken
    found = {
        "problems": len(choice),
        "fraction_of_oracle_mean": float(fraction.mean()),
        "fraction_of_oracle_p10": float(np.percentile(fraction, 10)),
        "fraction_of_oracle_min": float(fraction.min()),
        "top1": float((taken == oracle).mean()),
        "top1_within_5_percent": float((taken <= 1.05 * oracle).mean()),
    }
    if native is not None:
        base = times_us[:, native]
        slowdown = taken / base
        speedup, best = geomean(1 / slowdown), geomean(base / oracle)
        found |= {
            "native_fraction_of_oracle_mean": float((oracle / base).mean()),
            "speedup_geomean": speedup,
            "oracle_speedup_geomean": best,
            "speedup_share_of_oracle": speedup / best,
            "speedup_total_time": float(base.sum() / taken.sum()),
            "slower_than_native_share": float((slowdown > SLOWER).mean()),
            "worst_slowdown": float(slowdown.max()),
            "native_kept_share": float((choice == native).mean()),
        }
    return found


def geomean(ratios: Floats) -> float:
    return float(np.exp(np.log(ratios).mean()))


def best_margin(gains: Floats, times_us: Floats, native: int | None = 0) -> float:
    """Of the margins that cost next to no speed (`MARGIN_COST`), the one with the fewest slower problems; 0 without
    native."""
    if native is None:
        return 0.0
    found = {margin: judge(chosen(gains, times_us, margin, native), times_us, native) for margin in MARGINS}
    fastest = max(f["speedup_geomean"] for f in found.values())
    cheap = [m for m in MARGINS if found[m]["speedup_geomean"] >= fastest * (1 - MARGIN_COST)]
    return min(cheap, key=lambda m: (found[m]["slower_than_native_share"], m))


def source_of(model: str) -> str:
    """The kind of list that a layer is from: "network"; "random"; or "test list", the edge cases of libraries' own
    tests, which no network has. The models of those are named `library:list`."""
    if family_of(model).startswith("loguniform"):
        return "random"
    return "test list" if ":" in model else "network"


def by_group(table: Table) -> dict[str, list[str]]:
    """Title -> the group each problem is in."""
    return {
        "by_direction": [str(p.direction) for p in table.problems],
        "by_kernel_class": [kernel_class(p) for p in table.problems],
        "by_kind": [f"{p.direction} {special_kind(p)}" for p in table.problems],
        "by_dtype": [p.dtype for p in table.problems],
        # Random layers have no relatives in other folds, and are easier or harder than those of networks.
        "by_source": [source_of(m) for m in table.models],
        "by_threads": [str(p.threads) for p in table.problems],
    }


# ---- confidence -------------------------------------------------------------------------------------------------


def confidence(gains: Floats, times_us: Floats, sharpness: float) -> Floats:
    """The probability of the algorithm with the best prediction, (n,): a softmax over applicable algorithms."""
    scores = np.where(np.isfinite(times_us), gains * sharpness, -np.inf)
    scores -= scores.max(1, keepdims=True)
    result: Floats = 1.0 / np.exp(scores).sum(1)
    return result


def best_sharpness(gains: Floats, times_us: Floats) -> float:
    """The factor on gains that calibrates their softmax best: least cross-entropy with the measured winner, over a grid
    with ratio 2^(1/4)."""
    winner = np.nanargmin(times_us, 1)

    def loss(sharpness: float) -> float:
        scores = np.where(np.isfinite(times_us), gains * sharpness, -np.inf)
        scores -= scores.max(1, keepdims=True)
        log_y = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        return float(-log_y[np.arange(len(winner)), winner].mean())

    grid: list[float] = [2.0 ** (i / 4) for i in range(-8, 33)]
    return min(grid, key=loss)


def reliability(confidences: Floats, right: npt.NDArray[np.bool_], bins: int = 10) -> dict[str, list[float]]:
    """Per bin of confidence: mean confidence, share right, number; and `ece`, the expected calibration error, in a
    list of one."""
    index = np.minimum((confidences * bins).astype(int), bins - 1)
    rows = [(confidences[index == b].mean(), right[index == b].mean(), (index == b).sum()) for b in set(index.tolist())]
    rows.sort()
    ece = float(sum(abs(said - true) * n for said, true, n in rows)) / len(right)
    said, true, counts = (list(map(float, column)) for column in zip(*rows, strict=True))
    return {"confidence": said, "right": true, "problems": counts, "ece": [ece]}


# ---- splits -----------------------------------------------------------------------------------------------------

SPLITS = ("family", "random", "class", "batch", "problem")


def split(table: Table, how: str, n_folds: int = 5, seed: int = 0) -> tuple[Ints, str]:
    """(fold of each problem, the unit that folds keep together). All but "random" keep groups together: network
    families, kernel classes, batch sizes, or, with "problem", the same sizes in other directions, element types and
    layouts.

    Raises:
        ValueError: if the split is not in `SPLITS`, or there is only one group.
    """
    if how == "family":
        return folds(table.models, n_folds, seed)
    if how == "random":
        return np.random.default_rng(seed).permutation(len(table.problems)).astype(np.int64) % n_folds, "random"
    if how == "problem":
        # A hash, so that a problem is on the same side in every data set and every version.
        keys = [",".join(map(str, p[1:17])) for p in table.problems]
        return np.array([zlib.crc32(key.encode()) % n_folds for key in keys], np.int64), "problem"
    if how not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {how!r}")
    labels = [kernel_class(p) if how == "class" else p.N for p in table.problems]
    distinct = sorted(set(labels), key=str)
    if len(distinct) < 2:
        raise ValueError(f"all problems are of one {how}: nothing can be held out")
    return np.array([distinct.index(label) for label in labels], np.int64), how


Fit = Callable[[Table], Callable[[Table], Floats]]
"""Learns from one table; the returned function predicts gains (n, c) for another."""


def held_out(table: Table, fit: Fit, fold: Ints, only: Iterable[int] | None = None) -> tuple[Floats, Ints]:
    """(gains (m, c), indices (m,)) of the problems of the folds `only` (default: all), each fold predicted by a model
    trained on the other folds."""
    gains = np.full(table.times_us.shape, np.nan)
    wanted = sorted(set(fold.tolist())) if only is None else list(only)
    for k in wanted:
        gains[fold == k] = fit(table.part(fold != k))(table.part(fold == k))
    members = np.flatnonzero(np.isin(fold, wanted))
    return gains[members], members


def cross_validated(
    table: Table, fit: Fit, fold: Ints, only: Iterable[int] | None = None
) -> tuple[Floats, dict[str, Any]]:
    """(held-out gains (m, c), figures on those problems)."""
    gains, members = held_out(table, fit, fold, only)
    return gains, figures_of(table, fit, fold, gains, members)


def figures_of(
    table: Table, fit: Fit, fold: Ints, gains: Floats, members: Ints, by_kind: Margins | None = None
) -> dict[str, Any]:
    """Figures of held-out gains. The margin of a fold is chosen on the other folds' held-out gains; if only one fold
    was held out, on one of the others with a model trained on the rest.

    Args:
        gains, members: as `held_out` gives them.
        by_kind: margins that take its place.
    """
    times, native, of = admitted(table)[members], table.native, fold[members]
    part, by_kind = table.part(members), by_kind or {}
    choice, one = np.zeros(len(members), np.int64), np.zeros(len(members), np.int64)
    distinct = sorted(set(of.tolist()))
    for k in distinct:
        held = of == k
        if native is None:
            margin = 0.0
        elif len(distinct) > 1:
            margin = best_margin(gains[~held], times[~held], native)
        else:
            inner, inner_fold = table.part(fold != k), fold[fold != k]
            inside, inner_members = held_out(inner, fit, inner_fold, only=[int(inner_fold.min())])
            margin = best_margin(inside, admitted(inner)[inner_members], native)
        one[held] = chosen(gains[held], times[held], margin, native)
        choice[held] = chosen(gains[held], times[held], margins_of(part.part(held), margin, by_kind), native)
    order = fixed_order(times)
    found: dict[str, Any] = {
        "overall": judge(choice, times, native),
        **({"one_margin": judge(one, times, native)} if by_kind else {}),
        "without_margin": judge(chosen(gains, times, 0.0, native), times, native),
        "best_of_2": judge(best_of(gains, times, 2), times, native),
        "best_of_3": judge(best_of(gains, times, 3), times, native),
        "best_single": judge(best_single(times, order), times, native),
    }
    sharpness = best_sharpness(gains, times)
    best = chosen(gains, times, -np.inf, None)
    right = times[np.arange(len(best)), best] == np.nanmin(times, 1)
    found["reliability"] = reliability(confidence(gains, times, sharpness), right)
    for title, labels in by_group(part).items():
        groups = {name: np.array([label == name for label in labels]) for name in sorted(set(labels))}
        found[title] = {name: judge(choice[g], times[g], native) for name, g in groups.items()}
    return found


# ---- label noise ------------------------------------------------------------------------------------------------


def label_noise(rows: Iterable[Row]) -> dict[str, float] | None:
    """Noise of the labels, from second measurements: how often the winner changes, and the fraction of oracle that the
    first measurement's winner reaches in the second measurement. None without second measurements.

    Differences between models that are smaller than 1 minus the second figure mean nothing.
    """
    times: dict[int, dict[Any, dict[str, float]]] = {0: {}, 1: {}}
    for row in rows:
        if row.status in ("ok", "censored") and row.repeat in times:
            times[row.repeat].setdefault(row.problem, {})[row.algorithm] = row.min_us
    fractions, changed, scatter = [], 0, []
    for problem, second in times[1].items():
        first = times[0].get(problem, {})
        both = [name for name in second if name in first]
        if len(both) > 1:
            winner = min(both, key=first.__getitem__)
            best = min(both, key=second.__getitem__)
            changed += winner != best
            fractions.append(second[best] / second[winner])
            scatter += [abs(np.log(second[name] / first[name])) for name in both]
    if not fractions:
        return None
    return {
        "problems": len(fractions),
        "winner_changes_share": changed / len(fractions),
        "fraction_of_oracle_mean": float(np.mean(fractions)),
        "fraction_of_oracle_p10": float(np.percentile(fractions, 10)),
        "median_relative_change_of_a_time": float(np.expm1(np.median(scatter))),
    }


def summary(title: str, found: Mapping[str, float]) -> list[str]:
    """One line of a table of figures; "-" for figures that need native if it was not measured."""

    def cell(name: str, form: str) -> str:
        return format(found[name], form) if name in found else "-"

    cells = (
        ("fraction_of_oracle_mean", ".4f"), ("fraction_of_oracle_p10", ".3f"), ("fraction_of_oracle_min", ".2f"),
        ("top1", ".1%"), ("top1_within_5_percent", ".1%"), ("speedup_geomean", ".3f"),
        ("oracle_speedup_geomean", ".3f"), ("speedup_share_of_oracle", ".1%"), ("slower_than_native_share", ".1%"),
        ("worst_slowdown", ".2f"),
    )  # fmt: skip
    return [title, f"{found['problems']:.0f}", *(cell(name, form) for name, form in cells)]


SUMMARY_HEADER = (
    "", "n", "of oracle", "p10", "min", "top-1", "in 5 %", "speed-up", "oracle's", "share", "slower", "worst"
)  # fmt: skip
