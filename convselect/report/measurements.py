"""Measured times -> how often and by how much each algorithm wins, and how good the shipped model's choices are."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convselect.machine.environment import run_environment
from convselect.measure import plan_cost
from convselect.measure.rows import NATIVE
from convselect.model import evaluate as ev
from convselect.model.dataset import Table, is_wide, read_wide
from convselect.model.inference import Predictor, artifact_path
from convselect.store.store import Store, is_store
from convselect.store.times import read_times

if TYPE_CHECKING:
    from convselect.base.problem import ConvProblem
    from convselect.measure.rows import Row

WORST = 20
"""Cases shown of each kind."""
CHOICES = 200
"""Choices of a store shown, the most recently used first."""


@dataclass(frozen=True)
class Share:
    """One algorithm.

    Attributes:
        applies, wins: problems it was timed on, and on which it is the fastest.
        share: wins over all problems.
        speedup: over the reference on the problems that it wins, geometric mean; None without wins.
        on_all: the same on all problems it was timed on.
    """

    algorithm: str
    applies: int
    wins: int
    share: float
    speedup: float | None
    on_all: float


@dataclass(frozen=True)
class Case:
    """One problem, with measured times and the model's choice; times in us."""

    source: str
    problem: ConvProblem
    reference_us: float
    best: str
    best_us: float
    choice: str
    choice_us: float


@dataclass(frozen=True)
class Kept:
    """One choice of a store; `params` are None for an algorithm's defaults."""

    problem: ConvProblem
    algorithm: str
    params: Mapping[str, Any] | None
    source: str
    gain: float | None
    budgets: str
    used: str


@dataclass(frozen=True)
class DataReport:
    """All about one file of times; `page.render` makes a page of it. Without measurements only `choices` say anything.

    Attributes:
        machine: the machine that measured: device, family, torch, ...; the one with most times if a store has several.
        other_machines: number of other machines; their times are left out.
        reference: the baseline of speed-ups: "native", or, if that was not measured, the best single algorithm.
        overall, by: figures of `evaluate.judge` for the model's choices, on all problems and by group (title -> group
            -> figures). Without a model, those of the oracle.
        gains_best, gains_chosen: speed-up over the reference of the fastest, and of the model's choice, by problem;
            the latter is empty without a model.
        artifact: the model's name, "" without one; `trained_on`: whether it was trained on this file.
        worst, slower: problems on which the choice is furthest from the fastest, and those on which it is slower than
            the reference, worst first.
        noise: `evaluate.label_noise`; None without second measurements.
        choices: the latest choices of a store, out of `choices_in_all`; `choice_sources`: source -> number of choices.
    """

    name: str
    machine: Mapping[str, Any]
    other_machines: int
    rows: int
    problems: int
    reference: str
    shares: tuple[Share, ...]
    overall: Mapping[str, float]
    by: Mapping[str, Mapping[str, Mapping[str, float]]]
    gains_best: tuple[float, ...]
    gains_chosen: tuple[float, ...]
    artifact: str
    trained_on: bool
    worst: tuple[Case, ...]
    slower: tuple[Case, ...]
    noise: Mapping[str, float] | None
    choices: tuple[Kept, ...]
    choices_in_all: int
    choice_sources: Mapping[str, int]
    environment: Mapping[str, Any]
    made: str


def of_data(path: str | Path, artifact: str | Path | None = None) -> DataReport:
    """Read a store, our CSV of times (`.gz` as well) or a wide CSV of others, and judge a model's choices on it.

    Times are as measured; the cost of running through a plan is added to all but native, as in `convselect evaluate`.
    The default precision budget holds.

    Args:
        artifact: a model file; by default the one shipped for the kind of machine that measured.

    Raises:
        ValueError, StoreError: if the file cannot be read as any of these; `ArtifactError`: a damaged model file;
        OSError.
    """
    found = _read(Path(path))
    judged: dict[str, Any] = dict(
        problems=0, reference=NATIVE, shares=(), overall={}, by={}, gains_best=(), gains_chosen=(), artifact="",
        trained_on=False, worst=(), slower=(),
    )  # fmt: skip
    if found.table is not None:
        judged = _judged(found.table, _predictor(artifact, found.machine), Path(path).name)
    return DataReport(
        name=Path(path).name, machine=found.machine, other_machines=found.other_machines, rows=len(found.rows),
        noise=ev.label_noise(found.rows), choices=tuple(found.choices[:CHOICES]), choices_in_all=len(found.choices),
        choice_sources=dict(Counter(one.source for one in found.choices).most_common()),
        environment=run_environment(),
        made=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), **judged,
    )  # fmt: skip


def _judged(table: Table, predictor: Predictor | None, name: str) -> dict[str, Any]:
    """The fields of a `DataReport` that are computed from measured times and a model."""
    times = ev.admitted(table)
    members, best = np.arange(len(times)), np.nanargmin(times, 1)
    if table.native is not None:
        reference, base = NATIVE, times[:, table.native]
    else:
        order = ev.fixed_order(times)
        reference = f"the best single algorithm ({table.names[order[0]]})"
        base = times[members, ev.best_single(times, order)]
    choice = best
    if predictor is not None:
        from convselect.model.judging import artifact_choice, artifact_gains

        if not set(predictor.card.algorithm_names) & set(table.names):
            raise ValueError(f"the model {predictor.card.family} knows none of the algorithms in {name}")
        choice = artifact_choice(predictor, table, artifact_gains(predictor, table))
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for title, labels in ev.by_group(table).items():
        for group in sorted(set(labels)):
            of = np.flatnonzero([label == group for label in labels])
            groups.setdefault(title, {})[group] = ev.judge(choice[of], times[of], table.native)
    taken, fastest = times[members, choice], times[members, best]

    def cases(badness: ev.Floats, least: float) -> tuple[Case, ...]:
        """The worst cases, worst first, of those worse than `least`."""
        return tuple(
            Case(
                table.models[i], table.problems[i], float(base[i]), table.names[best[i]], float(fastest[i]),
                table.names[choice[i]], float(taken[i]),
            )
            for i in np.argsort(-badness)[:WORST].tolist()
            if badness[i] > least and predictor is not None
        )  # fmt: skip

    return dict(
        problems=len(table.problems), reference=reference, shares=_shares(table.names, times, base),
        overall=ev.judge(choice, times, table.native), by=groups, gains_best=tuple((base / fastest).tolist()),
        gains_chosen=() if predictor is None else tuple((base / taken).tolist()),
        artifact="" if predictor is None else predictor.card.family,
        trained_on=predictor is not None and name in predictor.card.data.get("files", ()),
        worst=cases(taken / fastest, 1.0), slower=cases(taken / base, ev.SLOWER),
    )  # fmt: skip


def _shares(names: Sequence[str], times: ev.Floats, base: ev.Floats) -> tuple[Share, ...]:
    best = np.nanargmin(times, 1)
    found = []
    for column, name in enumerate(names):
        timed = np.isfinite(times[:, column])
        if timed.any():
            gains = base[timed] / times[timed, column]
            wins = best == column
            speedup = ev.geomean(base[wins] / times[wins, column]) if wins.any() else None
            count = int(wins.sum())
            found.append(Share(name, int(timed.sum()), count, count / len(times), speedup, ev.geomean(gains)))
    return tuple(sorted(found, key=lambda one: -one.wins))


def _predictor(artifact: str | Path | None, machine: Mapping[str, Any]) -> Predictor | None:
    if artifact is not None:
        return Predictor.load(artifact)
    family = machine.get("family")
    shipped = artifact_path(str(family))
    return Predictor.load(shipped) if family and shipped.exists() else None


@dataclass(frozen=True)
class _Found:
    """A file's contents: rows of the machine with most of them, the number of other machines, choices by last use,
    latest first. `table` is None without measurements."""

    rows: Sequence[Row]
    machine: Mapping[str, Any]
    other_machines: int
    table: Table | None
    choices: Sequence[Kept] = ()


def _read(path: Path) -> _Found:
    choices: list[Kept] = []
    if is_store(path):
        with Store(path, read_only=True) as store:
            choices = [
                Kept(d.problem, d.algorithm, d.params, d.source, d.gain, d.budgets, stored.used[:10])
                for stored in sorted(store.decisions(damaged=[]), key=lambda one: one.used, reverse=True)
                for d in [stored.decision]
            ]
    elif is_wide(path):
        wide = read_wide(path)
        places = sorted(set(wide.models))  # GPUs in some files, networks in others
        return _Found((), {"device": ", ".join(places)} if len(places) <= 3 else {}, 0, wide)
    machines: list[Mapping[str, Any]] = []
    rows: list[list[Row]] = []
    for machine, found in read_times(path):
        if machine not in machines:
            machines.append(machine)
            rows.append([])
        rows[machines.index(machine)] += found
    if not machines:
        return _Found((), {}, 0, None, choices)
    most = max(range(len(rows)), key=lambda i: len(rows[i]))
    others = sum(map(bool, rows)) - bool(rows[most])
    return _Found(rows[most], machines[most], others, _table(rows[most]), choices)


def _table(rows: Sequence[Row]) -> Table | None:
    try:
        return Table.from_rows(rows).with_plan_costs(free_in_c=plan_cost.outside_python)
    except ValueError:  # nothing was measured with native and another algorithm
        return None
