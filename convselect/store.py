"""The store: measured times on disk, with the environment they were measured in. One SQLite file.

    environment   device, instruction set, versions, malloc settings: what must be the same for times to be compared
    problem       one line of text each, `str(ConvProblem)`
    measurement   one algorithm on one problem in one environment: status, clock, minimum, median, p20, p80, rounds
    sentinel      a fixed problem's time before and after each block of problems: how far the machine drifted meanwhile
    choice        what was settled for a problem: algorithm, parameters, where that came from

A problem's measurements are written in one transaction, so an interrupted collector leaves whole problems behind.
SQLite's rollback journal and file locks make two processes on one machine safe; a reader never sees half a problem.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convselect.model.dataset import MACHINE, Row, environment_path, write_rows
from convselect.problem import ConvProblem

SCHEMA_VERSION = 1
APPLICATION_ID = 0x63766C73  # "cvls": says whose file this is
BUSY_S = 30.0
"""How long a writer waits for another one."""

_SCHEMA = """
create table environment (
    id integer primary key, fingerprint text not null unique, description text not null, created text not null);
create table problem (id integer primary key, text text not null unique);
create table measurement (
    environment integer not null references environment, problem integer not null references problem,
    algorithm text not null, revision integer not null, repeat integer not null, pool text not null,
    block integer not null, model text not null, status text not null, clock text not null,
    min_us real, median_us real, p20_us real, p80_us real, wall_us real, rounds integer not null,
    primary key (environment, problem, algorithm, revision, repeat)) without rowid;
create table sentinel (
    environment integer not null references environment, block integer not null, before_us real not null,
    after_us real not null, primary key (environment, block)) without rowid;
create table choice (
    environment integer not null references environment, problem integer not null references problem,
    algorithm text not null, params text, source text not null, gain real, made text not null,
    primary key (environment, problem)) without rowid;
"""
_TIMES = ("min_us", "median_us", "p20_us", "p80_us", "wall_us")
# What differs from run to run without making times incomparable.
_PASSING = ("load_average", "threads", "cpus")


class StoreError(RuntimeError):
    """The file is no store, a damaged one, or one of a newer version; the message says which."""


def fingerprint(environment: Mapping[str, Any]) -> str:
    """Of what must be equal for times to be compared: all of a description but load and thread count (a problem has its
    own)."""
    kept = {key: value for key, value in environment.items() if key not in _PASSING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """A store's file, opened; made where it does not exist. Use as a context manager, or `close`.

    Raises:
        StoreError: where the file is not a store, or of a newer version.
        OSError: where it cannot be made or opened.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"there is no directory {self.path.parent}")
        try:
            self._db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path} cannot be opened: {error}") from error
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StoreError(f"{self.path} is not a readable store: {error}") from error
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.execute("pragma foreign_keys = on")
        with self._writing() if self._version() == 0 else contextlib.nullcontext():
            version = self._version()  # asked again under the lock: another process may have been first
            if version == 0:
                if self._db.execute("select count(*) from sqlite_master").fetchone()[0]:
                    raise StoreError(f"{self.path} is a database of something else")
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"pragma application_id = {APPLICATION_ID}")
                self._db.execute(f"pragma user_version = {SCHEMA_VERSION}")
                return
        if self._db.execute("pragma application_id").fetchone()[0] != APPLICATION_ID:
            raise StoreError(f"{self.path} is a database of something else")
        if version > SCHEMA_VERSION:
            raise StoreError(f"{self.path} has version {version}; this convselect reads up to {SCHEMA_VERSION}")

    def _version(self) -> int:
        return int(self._db.execute("pragma user_version").fetchone()[0])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- environments -------------------------------------------------------------------------------------------

    def environment(self, description: Mapping[str, Any]) -> int:
        """The number of the environment with this description's fingerprint; entered now if it is new."""
        mark = fingerprint(description)
        with self._writing():
            self._db.execute(
                "insert or ignore into environment (fingerprint, description, created) values (?, ?, ?)",
                (mark, json.dumps(description, sort_keys=True), _now()),
            )
            found = self._db.execute("select id from environment where fingerprint = ?", (mark,)).fetchone()
        return int(found[0])

    def environments(self) -> dict[int, dict[str, Any]]:
        """Number -> description of every environment."""
        rows = self._db.execute("select id, description from environment order by id")
        return {int(number): json.loads(text) for number, text in rows}

    # ---- measurements -------------------------------------------------------------------------------------------

    def add(self, environment: int, rows: Sequence[Row], *, pool: str, block: int = 0) -> None:
        """One problem's measurements, all or none. What is there already, under the same revision, is replaced.

        Args:
            pool: names the algorithms that were candidates, so that a later, larger pool counts the problem as new.
            block: the stretch of time between two sentinels that these belong to.
        """
        with self._writing():
            for row in rows:
                text = str(row.problem)
                self._db.execute("insert or ignore into problem (text) values (?)", (text,))
                times = [None if value != value else value for value in (getattr(row, name) for name in _TIMES)]
                self._db.execute(
                    "insert or replace into measurement values "
                    "(?, (select id from problem where text = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (environment, text, row.algorithm, row.revision, row.repeat, pool, block, row.model, row.status,
                     row.clock, *times, row.rounds),
                )  # fmt: skip

    def add_sentinel(self, environment: int, block: int, before_us: float, after_us: float) -> None:
        """The fixed problem's time around a block."""
        with self._writing():
            self._db.execute(
                "insert or replace into sentinel values (?, ?, ?, ?)", (environment, block, before_us, after_us)
            )

    def drift(self, environment: int) -> dict[int, float]:
        """Block -> by how much the sentinel's time changed across it, as a ratio of at least 1."""
        rows = self._db.execute(
            "select block, before_us, after_us from sentinel where environment = ? order by block", (environment,)
        )
        return {int(block): max(before / after, after / before) for block, before, after in rows}

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


def user_cache() -> Path:
    """Where this user's files of convselect lie: `CONVSELECT_CACHE`, else below `XDG_CACHE_HOME` or ~/.cache."""
    own = os.environ.get("CONVSELECT_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "convselect"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
