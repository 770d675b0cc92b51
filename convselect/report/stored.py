"""Times of single problems that were measured on this machine before."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import choice_environment
from convselect.measure.rows import MACHINE, Row, environment_path, read_rows
from convselect.problem import ConvProblem
from convselect.store import process

Times = Mapping[ConvProblem, Mapping[str, Row]]
"""Problem -> algorithm -> its row."""


def stored_times(path: str | Path | None) -> Times:
    """What a store or CSV file, by default the user's own store, holds of this machine, under the algorithms' revisions
    of today.

    Raises:
        ValueError: where a file that was named holds nothing of this machine. StoreError, OSError: where it cannot be
            read.
    """
    here = {name: choice_environment("cpu")[1][name] for name in MACHINE}
    rows: list[Row] = []
    machines: list[dict[str, Any]] = []
    for about, found in _measurements(path):
        machine = {name: about.get(name) for name in MACHINE}
        machines.append(machine)
        if machine == here:
            rows += found
    if path is not None and not rows:
        others = "; ".join(f"{m['device']}, {m['family']}, torch {m['torch']}" for m in machines)
        raise ValueError(f"{path} holds no times of this machine" + (f", but of {others}" if others else ""))
    times: dict[ConvProblem, dict[str, Row]] = {}
    for row in rows:
        algorithm = BY_NAME.get(row.algorithm)
        if row.status in ("ok", "censored") and not row.repeat and algorithm and algorithm.revision == row.revision:
            times.setdefault(row.problem, {})[row.algorithm] = row
    return times


def _measurements(path: str | Path | None) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """(machine, rows) of a file, or of the user's own store where there is one that can be read."""
    import sqlite3

    from convselect.store.store import Store, StoreError, is_store

    try:
        file = process.user_path() if path is None else Path(path)
        if path is None and not file.exists():
            return
        if not is_store(file):
            yield json.loads(environment_path(file).read_text())["machine"], read_rows(file)
            return
        with Store(file, read_only=True) as store:
            for number, about in store.environments().items():
                if store.measurements(number):
                    yield about, store.rows(number)
    except (StoreError, sqlite3.Error, OSError):
        if path is not None:
            raise
