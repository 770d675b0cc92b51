"""Read measured times, with the machine that measured them, from stores and CSV files; and those of this machine."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convselect.base.problem import ConvProblem
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import choice_environment
from convselect.measure.rows import MACHINE, Row, environment_path, read_rows
from convselect.store import process
from convselect.store.store import Store, StoreError, is_store

Times = Mapping[ConvProblem, Mapping[str, Row]]
"""Problem -> algorithm -> its row."""


def read_times(path: str | Path, max_drift: float | None = None) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """(machine, rows) for each environment of a store, or of one of our CSV files.

    Args:
        max_drift: in a store, leave out blocks across which the sentinel moved by more than this ratio.

    Yields:
        machine: the values of `MACHINE`, None if unknown; empty if a CSV file has no environment file beside it.

    Raises:
        StoreError, OSError, ValueError: if it cannot be read, or is neither.
    """
    if is_store(path):
        with Store(path, read_only=True) as store:
            for number, about in store.environments().items():
                yield {name: about.get(name) for name in MACHINE}, store.rows(number, max_drift)
        return
    beside = environment_path(path)
    about = json.loads(beside.read_text())["machine"] if beside.exists() else {}
    yield {name: about.get(name) for name in MACHINE if about}, read_rows(path)


def times_here(path: str | Path | None = None) -> Times:
    """The times of this machine in a store or CSV file, by default the user's own store, of the algorithms' present
    revisions. Second measurements are left out. An own store that is missing or unreadable has none.

    Raises:
        ValueError: if `path` was given and holds no times of this machine.
        StoreError, OSError: if it cannot be read.
    """
    here = {name: choice_environment("cpu")[1][name] for name in MACHINE}
    try:
        found = list(read_times(process.user_path() if path is None else path))
    except (StoreError, sqlite3.Error, OSError):
        if path is not None:
            raise
        found = []
    measured = [(machine, rows) for machine, rows in found if rows]
    rows = [row for machine, of_machine in measured if machine == here for row in of_machine]
    if path is not None and not rows:
        names = "; ".join(f"{m.get('device')}, {m.get('family')}, torch {m.get('torch')}" for m, _ in measured)
        raise ValueError(f"{path} holds no times of this machine" + (f", but of {names}" if names else ""))
    times: dict[ConvProblem, dict[str, Row]] = {}
    for row in rows:
        algorithm = BY_NAME.get(row.algorithm)
        if row.status in ("ok", "censored") and not row.repeat and algorithm and algorithm.revision == row.revision:
            times.setdefault(row.problem, {})[row.algorithm] = row
    return times
