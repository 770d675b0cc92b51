"""The store: choices and measured times on disk, with the environment they were made in. One SQLite file.

    environment   device, instruction set, versions, malloc settings: what must be the same for times to be compared
    problem       one line of text each, `str(ConvProblem)`
    measurement   one algorithm on one problem in one environment: status, clock, minimum, median, p20, p80, rounds
    sentinel      a fixed problem's time before and after each block of problems: how far the machine drifted meanwhile
    choice        what was settled for a problem under some budgets: algorithm, its parameters and revision, where that
                  came from, when it was made and last used

A problem's measurements are written in one transaction, so an interrupted collector leaves whole problems behind.
SQLite's journal and file locks make many processes on one machine safe; a reader never sees half a problem.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convselect.machine.environment import fingerprint
from convselect.measure.rows import MACHINE, Row, environment_path, write_rows
from convselect.problem import ConvProblem
from convselect.store.choices import Choices, Decision, Stored
from convselect.store.file import (
    APPLICATION_ID,
    BUSY_S,
    SCHEMA_VERSION,
    BusyStoreError,
    DamagedStoreError,
    NewerStoreError,
    StoreError,
    now,
)

_TIMES = ("min_us", "median_us", "p20_us", "p80_us", "wall_us")


class Store(Choices):
    """A store's file, opened; made where it does not exist. Use as a context manager, or `close`.

    Args:
        read_only: nothing is made or changed; the file may lie where nobody may write.
        busy_s: how long to wait for another process, in seconds.
        shared: whether several threads use this one, one at a time.

    Raises:
        StoreError: where the file is not a store, of a newer version, or locked for longer than `busy_s`.
        OSError: where it cannot be made or opened.
    """

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- environments -------------------------------------------------------------------------------------------

    def environment(self, description: Mapping[str, Any], mark: str | None = None) -> int:
        """The number of the environment with this fingerprint, by default the description's; entered now if new."""
        mark = fingerprint(description) if mark is None else mark
        with self.writing():
            self._db.execute(
                "insert or ignore into environment (fingerprint, description, created) values (?, ?, ?)",
                (mark, json.dumps(description, sort_keys=True), now()),
            )
            found = self._db.execute("select id from environment where fingerprint = ?", (mark,)).fetchone()
        return int(found[0])

    def environments(self) -> dict[int, dict[str, Any]]:
        """Number -> description of every environment."""
        rows = self._db.execute("select id, description from environment order by id")
        return {int(number): json.loads(text) for number, text in rows}

    def fingerprints(self) -> dict[int, str]:
        """Number -> fingerprint of every environment."""
        return {
            int(number): text
            for number, text in self._db.execute("select id, fingerprint from environment order by id")
        }

    # ---- measurements -------------------------------------------------------------------------------------------

    def add(self, environment: int, rows: Sequence[Row], *, pool: str, block: int = 0) -> None:
        """One problem's measurements, all or none. What is there already, under the same revision, is replaced.

        Args:
            pool: names the algorithms that were candidates, so that a later, larger pool counts the problem as new.
            block: the stretch of time between two sentinels that these belong to.
        """
        time = now()
        with self.writing():
            for row in rows:
                text = str(row.problem)
                self._db.execute("insert or ignore into problem (text) values (?)", (text,))
                times = [None if value != value else value for value in (getattr(row, name) for name in _TIMES)]
                self._db.execute(
                    "insert or replace into measurement values "
                    "(?, (select id from problem where text = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (environment, text, row.algorithm, row.revision, row.repeat, pool, block, row.model, row.status,
                     row.clock, *times, row.rounds, time),
                )  # fmt: skip

    def add_sentinel(self, environment: int, block: int, before_us: float, after_us: float) -> None:
        """The fixed problem's time around a block."""
        with self.writing():
            self._db.execute(
                "insert or replace into sentinel values (?, ?, ?, ?)", (environment, block, before_us, after_us)
            )

    def drift(self, environment: int) -> dict[int, float]:
        """Block -> by how much the sentinel's time changed across it, as a ratio of at least 1."""
        rows = self._db.execute(
            "select block, before_us, after_us from sentinel where environment = ? order by block", (environment,)
        )
        return {int(block): max(before / after, after / before) for block, before, after in rows}

    def measurements(self, environment: int) -> int:
        """How many there are in an environment."""
        of = self._db.execute("select count(*) from measurement where environment = ?", (environment,)).fetchone()
        return int(of[0])

    def next_block(self, environment: int) -> int:
        found = self._db.execute("select max(block) from measurement where environment = ?", (environment,)).fetchone()
        return 0 if found[0] is None else int(found[0]) + 1

    def measured(self, environment: int, pool: str, repeat: int = 0) -> set[ConvProblem]:
        """The problems that this pool was measured on here."""
        rows = self._db.execute(
            "select distinct text from measurement join problem on problem.id = problem "
            "where environment = ? and pool = ? and repeat = ?",
            (environment, pool, repeat),
        )
        return {ConvProblem.parse(text) for (text,) in rows}

    def rows(self, environment: int | None = None, max_drift: float | None = None) -> list[Row]:
        """All measurements, in the order of their entry by problem; of one environment, or of all.

        Args:
            max_drift: leave out blocks across which the sentinel moved by more than this ratio.
        """
        condition, values = ("", ()) if environment is None else ("where m.environment = ?", (environment,))
        found = self._db.execute(
            "select p.text, m.model, m.algorithm, m.revision, m.status, m.clock, m.min_us, m.median_us, m.p20_us, "
            "m.p80_us, m.wall_us, m.rounds, m.repeat, m.environment, m.block from measurement m "
            f"join problem p on p.id = m.problem {condition} order by m.environment, m.problem, m.repeat, m.algorithm",
            values,
        ).fetchall()
        drifting: set[tuple[int, int]] = set()
        if max_drift is not None:
            for number in self.environments():
                drifting |= {(number, block) for block, ratio in self.drift(number).items() if ratio > max_drift}
        problems: dict[str, ConvProblem] = {}
        rows = []
        for text, model, algorithm, revision, status, clock, *times, rounds, repeat, number, block in found:
            if (number, block) in drifting:
                continue
            problem = problems.setdefault(text, ConvProblem.parse(text))
            numbers = {
                name: float("nan") if value is None else value for name, value in zip(_TIMES, times, strict=True)
            }
            rows.append(
                Row(model, problem, algorithm, revision, status, clock, **numbers, rounds=rounds, repeat=repeat)
            )
        return rows

    def add_from(self, other: Store, theirs: int, ours: int) -> tuple[int, int]:
        """Take over the measurements of another store's environment, with their blocks; what is there already stays.

        Returns:
            How many were entered, and how many were there.
        """
        columns = (
            "text, algorithm, revision, repeat, pool, block, model, status, clock, min_us, median_us, p20_us, p80_us"
        )
        rows = other._db.execute(
            f"select {columns}, wall_us, rounds from measurement join problem on problem.id = problem "
            "where environment = ?",
            (theirs,),
        ).fetchall()
        sentinels = other._db.execute(
            "select block, before_us, after_us from sentinel where environment = ?", (theirs,)
        ).fetchall()
        first, time, blocks, added = self.next_block(ours), now(), set(), 0
        with self.writing():
            for text, algorithm, revision, repeat, pool, block, *rest in rows:
                self._db.execute("insert or ignore into problem (text) values (?)", (text,))
                entered = self._db.execute(
                    "insert or ignore into measurement values "
                    "(?, (select id from problem where text = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (ours, text, algorithm, revision, repeat, pool, first + block, *rest, time),
                ).rowcount
                added += entered
                if entered:
                    blocks.add(block)
            self._db.executemany(
                "insert or replace into sentinel values (?, ?, ?, ?)",
                [(ours, first + block, *times) for block, *times in sentinels if block in blocks],
            )
        return added, len(rows) - added


def export(store: Store, path: str | Path, *, max_drift: float | None = None) -> int:
    """Write a store's measurements as CSV (`.gz`: compressed) with its environments beside them, in `<path>.env.json`;
    how many rows there are.

    Args:
        max_drift: leave out blocks across which the sentinel moved by more than this ratio.

    Raises:
        ValueError: where the store is empty, or holds times of several machines, which one file must not mix.
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


def pool_mark(revisions: Mapping[str, int]) -> str:
    """A short text that names a pool of algorithms and their revisions."""
    text = ",".join(f"{name}:{revision}" for name, revision in sorted(revisions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_store(path: str | Path) -> bool:
    """Whether a file begins as SQLite's do."""
    with open(path, "rb") as file:
        return file.read(16) == b"SQLite format 3\0"


__all__ = [
    "APPLICATION_ID",
    "BUSY_S",
    "SCHEMA_VERSION",
    "BusyStoreError",
    "DamagedStoreError",
    "Decision",
    "NewerStoreError",
    "Store",
    "StoreError",
    "Stored",
    "export",
    "is_store",
    "pool_mark",
]
