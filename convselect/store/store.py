"""The store: choices and measured times on disk, with the environment they were made in. One SQLite file.

    environment   device, instruction set, versions, malloc settings: all that must be equal for times to be compared
    problem       one line of text each, `str(ConvProblem)`
    measurement   one algorithm on one problem in one environment: status, clock, minimum, median, p20, p80, rounds
    sentinel      a fixed problem's time before and after each block of problems: how far the machine drifted meanwhile
    choice        the choice for a problem under some budgets: algorithm, its parameters and revision, its source, when
                  it was made and last used
    self_test, correction   what this machine has learnt besides: `learnt.py`

A problem's measurements are written in one transaction, so after an interruption the store has only complete problems.
SQLite's journal and file locks make many processes on one machine safe; a reader never sees half a problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from convselect.base.problem import ConvProblem
from convselect.measure.rows import MACHINE, TIMES, Row, environment_path, write_rows
from convselect.store import schema
from convselect.store.choices import Choices, problem_of
from convselect.store.decision import Decision
from convselect.store.file import (
    SCHEMA_VERSION,
    BusyStoreError,
    DamagedStoreError,
    StoreError,
    StoreVersionError,
    is_store,
    now,
)

__all__ = [
    "SCHEMA_VERSION", "BusyStoreError", "DamagedStoreError", "Decision", "Store", "StoreError", "StoreVersionError",
    "export", "is_store", "pool_fingerprint",
]  # fmt: skip

_INTO_PROBLEM = "insert or ignore into problem (text) values (?)"
_INTO_MEASUREMENT = f"into measurement values (?, (select id from problem where text = ?){', ?' * 15})"
_COLUMNS = f"model, algorithm, revision, status, clock, {', '.join(TIMES)}, rounds, repeat, block, pool"
_INTO_SENTINEL = "insert or replace into sentinel values (?, ?, ?, ?)"


class Store(Choices):
    """A whole store; arguments and errors are those of `StoreFile`. Use as a context manager, or `close`."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- measurements -------------------------------------------------------------------------------------------

    def add(self, environment: int, rows: Sequence[Row], *, pool: str, block: int = 0) -> None:
        """Write one problem's measurements, all or none. Existing ones of the same revision are overwritten.

        Args:
            pool: `pool_fingerprint` of the candidates, so that for a later, larger pool the problem counts as new.
            block: number of the period between two sentinels in which these were made.
        """
        time = now()
        with self.writing():
            for row in rows:
                text = str(row.problem)
                self._db.execute(_INTO_PROBLEM, (text,))
                times = [None if value != value else value for value in (getattr(row, name) for name in TIMES)]
                self._db.execute(
                    f"insert or replace {_INTO_MEASUREMENT}",
                    (environment, text, row.algorithm, row.revision, row.repeat, pool, block, row.model, row.status,
                     row.clock, *times, row.rounds, time),
                )  # fmt: skip

    def add_sentinel(self, environment: int, block: int, before_us: float, after_us: float) -> None:
        """Write the fixed problem's time before and after a block."""
        with self.writing():
            self._db.execute(_INTO_SENTINEL, (environment, block, before_us, after_us))

    def drift(self, environment: int) -> dict[int, float]:
        """Block -> ratio, at least 1, between the sentinel's times before and after it."""
        rows = self._db.execute(
            "select block, before_us, after_us from sentinel where environment = ? order by block", (environment,)
        )
        found = [schema.row(schema.SentinelRow, row, f"a block in {self.path}") for row in rows]
        return {
            one.block: max(one.before_us / one.after_us, one.after_us / one.before_us) for one in found
        }  # fmt: skip

    def measurements(self, environment: int) -> int:
        """Number of measurements in an environment."""
        found = self._db.execute("select count(*) from measurement where environment = ?", (environment,)).fetchone()
        return int(found[0])

    def next_block(self, environment: int) -> int:
        """The first number that no block of an environment has."""
        found = self._db.execute("select max(block) from measurement where environment = ?", (environment,)).fetchone()
        return 0 if found[0] is None else schema.row(schema.Block, found, f"a block in {self.path}").block + 1

    def measured(self, environment: int, pool: str, repeat: int = 0) -> set[ConvProblem]:
        """The problems on which this pool was measured in an environment."""
        rows = self._db.execute(
            "select distinct text from measurement join problem on problem.id = problem "
            "where environment = ? and pool = ? and repeat = ?",
            (environment, pool, repeat),
        )
        return {problem_of(text) for (text,) in rows}

    def rows(self, environment: int | None = None, max_drift: float | None = None) -> list[Row]:
        """All measurements of one environment or of all, in the order in which problems were added.

        Args:
            max_drift: leave out blocks across which the sentinel moved by more than this ratio.
        """
        condition, values = ("", ()) if environment is None else ("where environment = ?", (environment,))
        found = self._db.execute(
            f"select environment, text, {_COLUMNS} from measurement join problem on problem.id = problem {condition} "
            "order by environment, problem, repeat, algorithm",
            values,
        ).fetchall()
        drifting: set[tuple[int, int]] = set()
        if max_drift is not None:
            for number in self.environments():
                drifting |= {(number, block) for block, ratio in self.drift(number).items() if ratio > max_drift}
        problems: dict[str, ConvProblem] = {}
        rows = []
        for number, text, *columns in found:
            one = schema.row(schema.MeasurementRow, columns, f"a time in {self.path}")
            if (number, one.block) in drifting:
                continue
            if text not in problems:
                problems[text] = problem_of(text)
            known = {name: us for name in TIMES if (us := getattr(one, name)) is not None}
            rows.append(
                Row(one.model, problems[text], one.algorithm, one.revision, one.status, one.clock, **known,
                    rounds=one.rounds, repeat=one.repeat)
            )  # fmt: skip
        return rows

    def add_from(self, other: Store, theirs: int, ours: int) -> tuple[int, int]:
        """Copy the measurements of another store's environment, with their blocks; existing ones are kept.

        Args:
            theirs: number of the environment in the other store.
            ours: its number here.

        Returns:
            The numbers of measurements that were added, and that existed already.

        Raises:
            InvalidRowError: if a row of the other holds what no version writes.
        """
        rows = other._db.execute(
            f"select text, {_COLUMNS} from measurement join problem on problem.id = problem where environment = ?",
            (theirs,),
        ).fetchall()
        for text, *columns in rows:
            problem_of(text), schema.row(schema.MeasurementRow, columns, f"a time in {other.path}")
        sentinels = other._db.execute(
            "select block, before_us, after_us from sentinel where environment = ?", (theirs,)
        ).fetchall()
        for sentinel in sentinels:
            schema.row(schema.SentinelRow, sentinel, f"a block in {other.path}")
        first, time, blocks, added = self.next_block(ours), now(), set(), 0
        with self.writing():
            for text, model, algorithm, revision, status, clock, *times, rounds, repeat, block, pool in rows:
                self._db.execute(_INTO_PROBLEM, (text,))
                entered = self._db.execute(
                    f"insert or ignore {_INTO_MEASUREMENT}",
                    (
                        ours,
                        text,
                        algorithm,
                        revision,
                        repeat,
                        pool,
                        first + block,
                        model,
                        status,
                        clock,
                        *times,
                        rounds,
                        time,
                    ),
                ).rowcount
                added += entered
                if entered:
                    blocks.add(block)
            kept = [(ours, first + block, *times) for block, *times in sentinels if block in blocks]
            self._db.executemany(_INTO_SENTINEL, kept)
        return added, len(rows) - added


def export(store: Store, path: str | Path, *, max_drift: float | None = None) -> int:
    """Write a store's measurements as CSV (`.gz`: compressed) with its environments beside them, in `<path>.env.json`;
    returns the number of rows.

    Args:
        max_drift: leave out blocks across which the sentinel moved by more than this ratio.

    Raises:
        ValueError: if the store is empty, or holds times of several machines, which must not be mixed in one file.
    """
    environments = list(store.environments().values())
    machines = [{name: one.get(name) for name in MACHINE} for one in environments]
    rows = store.rows(max_drift=max_drift)
    if not rows:
        raise ValueError(f"{store.path} holds no measurements")
    if any(machine != machines[0] for machine in machines):
        raise ValueError(f"{store.path} holds times of {len(machines)} machines or settings of one")
    drift = {number: store.drift(number) for number in store.environments()}
    ratios = [ratio for of_environment in drift.values() for ratio in of_environment.values()]
    about = {
        "machine": machines[0],
        "algorithms": {row.algorithm: row.revision for row in rows},
        "problems": len({row.problem for row in rows}),
        "measured_twice": len({row.problem for row in rows if row.repeat}),
        "blocks": {"all": len(ratios), "drifting": sum(ratio > max_drift for ratio in ratios) if max_drift else None},
        "environments": environments,
    }
    write_rows(path, rows)
    environment_path(path).write_text(json.dumps(about, indent=1) + "\n")
    return len(rows)


def pool_fingerprint(revisions: Mapping[str, int]) -> str:
    """A short text that identifies a pool by its algorithms' names and revisions."""
    text = ",".join(f"{name}:{revision}" for name, revision in sorted(revisions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
