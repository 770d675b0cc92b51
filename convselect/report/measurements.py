"""Measured times -> who wins how often and by how much, and how good the shipped model's choices are on them."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convselect.choice.choose import PLAN_COST_US
from convselect.machine.environment import run_environment
from convselect.measure.rows import MACHINE, Row, environment_path, read_rows
from convselect.model import evaluate as ev
from convselect.model.dataset import Table, is_wide, read_wide
from convselect.model.inference import Predictor, artifact_path
from convselect.problem import ConvProblem

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
        speedup: over the reference on the problems where it wins, geometric mean; None without wins.
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
    """One problem, as it was timed and as the model would have it; times in us."""

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
        machine: where the times were measured: device, family, torch, ..; of all those of a store the one with most.
        other_machines: how many more there are, which are left out.
        reference: what speed-ups are over: "native", or, where nobody measured that, the best single algorithm.
        overall, by: figures of `evaluate.judge` for the model's choices, on all problems and by group (title -> group
            -> figures). Without a model, those of the oracle.
        gains_best, gains_chosen: speed-up over the reference of the fastest, and of the model's choice, by problem;
            the latter is empty without a model.
        artifact: the model's name, "" without one; `trained_on`: whether it has learned from this very file.
        worst, slower: problems on which the choice is furthest from the fastest, and those on which it is slower than
            the reference, worst first.
        noise: `evaluate.label_noise`; None without second measurements.
        choices: of a store, `choices_in_all` of them; `choice_sources`: how many come from where.
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
    """Read a store, our CSV of times (`.gz` as well) or other people's wide CSV, and judge a model's choices on it.

    Times are as measured; every algorithm but native pays what running through a plan costs on top, as in
    `convselect evaluate`. The default budget of precision holds.

    Args:
        artifact: a model file; by default the one shipped for the kind of machine that measured.

    Raises:
        ValueError, StoreError: where the file cannot be read as any of these; `ArtifactError`: a damaged model file;
        OSError.
    """
    name, rows, machine, others, table, choices, sources = _read(Path(path))
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    noise = ev.label_noise(rows)
    shown = tuple(sorted(choices, key=lambda one: one.used, reverse=True)[:CHOICES])
    environment = run_environment()
    if table is None:
        return DataReport(
            name, machine, others, len(rows), 0, "native", (), {}, {}, (), (), "", False, (), (), noise, shown,
            len(choices), sources, environment, made,
        )  # fmt: skip
    times = ev.admitted(table)
    members = np.arange(len(times))
    best = np.nanargmin(times, 1)
    if table.native is not None:
        reference, base = "native", times[:, table.native]
    else:
        order = ev.fixed_order(times)
        reference, base = (
            f"the best single algorithm ({table.names[order[0]]})",
            times[members, ev.best_single(times, order)],
        )
    predictor = _predictor(artifact, machine)
    choice = best
    if predictor is not None:
        from convselect.model.judging import artifact_gains

        if not set(predictor.card.algorithm_names) & set(table.names):
            raise ValueError(f"the model {predictor.card.family} knows none of the algorithms in {name}")
        choice = ev.chosen(artifact_gains(predictor, table), times, predictor.card.margin, table.native)
    groups = {
        title: {
            group: ev.judge(choice[of], times[of], table.native)
            for group in sorted(set(labels))
            if len(of := np.flatnonzero([label == group for label in labels]))
        }
        for title, labels in ev.by_group(table).items()
    }
    taken = times[members, choice]

    def cases(order: Sequence[int]) -> tuple[Case, ...]:
        return tuple(
            Case(
                table.models[i], table.problems[i], float(base[i]), table.names[best[i]], float(times[i, best[i]]),
                table.names[choice[i]], float(taken[i]),
            )
            for i in order
        )  # fmt: skip

    regret = taken / times[members, best]
    worst = [int(i) for i in np.argsort(-regret)[:WORST] if regret[i] > 1]
    loss = taken / base
    slower = [int(i) for i in np.argsort(-loss)[:WORST] if loss[i] > ev.SLOWER]
    judged = predictor is not None
    card_files = predictor.card.data.get("files", ()) if predictor is not None else ()
    return DataReport(
        name, machine, others, len(rows), len(table.problems), reference, _shares(table.names, times, base),
        ev.judge(choice, times, table.native), groups, tuple((base / times[members, best]).tolist()),
        tuple((base / taken).tolist()) if judged else (), predictor.card.family if predictor is not None else "",
        Path(path).name in card_files, cases(worst) if judged else (), cases(slower) if judged else (), noise, shown,
        len(choices), sources, environment, made,
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


def _read(
    path: Path,
) -> tuple[str, list[Row], dict[str, Any], int, Table | None, list[Kept], dict[str, int]]:
    from convselect.store.store import Store, is_store

    name = path.name
    if not is_store(path):
        if is_wide(path):
            wide = read_wide(path)
            places = sorted(set(wide.models))  # GPUs in some files, networks in others
            about: dict[str, Any] = {"device": ", ".join(places)} if len(places) <= 3 else {}
            return name, [], about, 0, wide, [], {}
        beside = environment_path(path)
        machine = json.loads(beside.read_text())["machine"] if beside.exists() else {}
        rows = read_rows(path)
        return name, rows, machine, 0, _table(rows), [], {}
    with Store(path, read_only=True) as store:
        by_machine: dict[str, list[Row]] = {}
        machines: dict[str, dict[str, Any]] = {}
        for number, description in store.environments().items():
            one = {key: description.get(key) for key in MACHINE}
            mark = json.dumps(one, sort_keys=True)
            machines[mark] = one
            by_machine.setdefault(mark, []).extend(store.rows(number))
        choices = [
            Kept(d.problem, d.algorithm, d.params, d.source, d.gain, d.budgets, stored.used[:10])
            for stored in store.decisions(damaged=[])
            for d in [stored.decision]
        ]
    measured = sorted((mark for mark in by_machine if by_machine[mark]), key=lambda mark: -len(by_machine[mark]))
    first = measured[0] if measured else next(iter(machines), None)
    rows = by_machine[first] if first is not None else []
    sources = dict(Counter(one.source for one in choices).most_common())
    return (
        name, rows, machines[first] if first is not None else {}, max(0, len(measured) - 1), _table(rows), choices,
        sources,
    )  # fmt: skip


def _table(rows: Sequence[Row]) -> Table | None:
    try:
        table = Table.from_rows(rows)
    except ValueError:  # nothing was measured with native and another algorithm
        return None
    from convselect.model.train import PLAN_COST_CUDA_US  # with the training code, which only this needs

    costs_us = np.array([PLAN_COST_US[p.direction] if p.device == "cpu" else PLAN_COST_CUDA_US for p in table.problems])
    table.times_us[:, 1:] += costs_us[:, None]
    return table
