"""What a machine has learnt besides choices, in a store: which algorithms passed their self-test, and how far real
calls were from the model's predictions.

Both tables are made with the first row that needs them, so that a file without them is a whole store: older versions
write such files, and ignore the tables. Rows go with their environment, in older versions, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from convselect.store import schema
from convselect.store.file import DamagedStoreError, InvalidRowError, StoreFile, now

TestKey = tuple[str, int, str, str, str]
"""(algorithm, revision, direction, dtype, layout)."""
CorrectionKey = tuple[str, str, str]
"""(digest of the model, "algorithm direction", layer: a problem without N, H and W)."""

MOST = {"self_test": 5_000, "correction": 20_000}
"""Most rows of each table in a file; the oldest are forgotten first."""

_TABLES = (
    """create table if not exists self_test (
    environment integer not null references environment on delete cascade, algorithm text not null,
    revision integer not null, direction text not null, dtype text not null, layout text not null,
    version text not null, passed integer not null, made text not null, checksum integer not null,
    primary key (environment, algorithm, revision, direction, dtype, layout, version)) without rowid""",
    """create table if not exists correction (
    environment integer not null references environment on delete cascade, model text not null,
    algorithm text not null, layer text not null, n real not null, mean real not null, made text not null,
    checksum integer not null, primary key (environment, model, algorithm, layer)) without rowid""",
)
_COLUMNS = {
    "self_test": "algorithm, revision, direction, dtype, layout, version, passed",
    "correction": "model, algorithm, layer, n, mean",
}
_KEYS = {
    "self_test": "environment, algorithm, revision, direction, dtype, layout, version",
    "correction": "environment, model, algorithm, layer",
}


_ROWS: dict[str, type[Any]] = {"self_test": schema.SelfTestRow, "correction": schema.CorrectionRow}


class Learnt(StoreFile):
    """The self-tests and corrections of a store; arguments and errors are those of `StoreFile`."""

    def has_learnt(self) -> bool:
        """Whether the file has the two tables."""
        found = self._db.execute("select count(*) from sqlite_master where name in ('self_test', 'correction')")
        return bool(found.fetchone()[0] == len(_TABLES))

    # ---- reading ------------------------------------------------------------------------------------------------

    def self_tests(self, fingerprint: str, version: str) -> set[TestKey]:
        """What has passed in the environment with this fingerprint, under this version of convselect.

        Raises:
            DamagedStoreError: if a row is not what was written.
            sqlite3.Error: if the file cannot be read.
        """
        rows = self._learnt("self_test", "and version = ? order by made desc", fingerprint, version)
        return {(name, revision, *rest) for name, revision, *rest, _, passed in rows if passed}

    def corrections(self, fingerprint: str, model: str) -> dict[CorrectionKey, tuple[float, float]]:
        """(model, algorithm, layer) -> (n, mean) of one model in the environment with this fingerprint, the newest
        20,000 at most; errors as those of `self_tests`."""
        rows = self._learnt("correction", "and model = ? order by made desc", fingerprint, model)
        return {(model, algorithm, layer): (n, mean) for model, algorithm, layer, n, mean in rows}

    def _learnt(self, table: str, condition: str, fingerprint: str, *values: str) -> list[tuple[Any, ...]]:
        if not self.has_learnt():
            return []
        found = self._db.execute(
            f"select {_COLUMNS[table]}, checksum from {table} "
            f"where environment = (select id from environment where fingerprint = ?) {condition} limit {MOST[table]}",
            (fingerprint, *values),
        ).fetchall()
        if any(_checksum(row[:-1]) != row[-1] for row in found):
            raise DamagedStoreError(f"{self.path} is not a readable store: a {table} is not what was written")
        rows = []
        for row in found:
            try:
                schema.row(_ROWS[table], row[:-1], f"a {table} in {self.path}")
                rows.append(row[:-1])
            except InvalidRowError as error:
                self.leave_out(error)
        return rows

    def learnt_counts(self, environment: int | None = None) -> tuple[int, int]:
        """(self-tests, corrections), of one environment or of all."""
        if not self.has_learnt():
            return 0, 0
        tests, corrections = (
            self._db.execute(
                f"select count(*) from {table} where ?1 is null or environment = ?1", (environment,)
            ).fetchone()[0]
            for table in _COLUMNS
        )
        return int(tests), int(corrections)

    def damaged_learnt(self) -> list[str]:
        """Every row that is not what was written, or holds what no version writes, as text."""
        found = []
        for table, columns in _COLUMNS.items() if self.has_learnt() else ():
            for *row, checksum in self._db.execute(f"select {columns}, checksum from {table}"):
                if _checksum(tuple(row)) != checksum:
                    found.append(f"{table} {row}")
                    continue
                try:
                    schema.row(_ROWS[table], row, table)
                except InvalidRowError as error:
                    found.append(str(error))
        return found

    # ---- writing ------------------------------------------------------------------------------------------------

    def put_learnt(
        self,
        environment: int,
        version: str,
        tests: Mapping[TestKey, bool],
        corrections: Mapping[CorrectionKey, tuple[float, float]],
    ) -> None:
        """Write self-tests (whether each passed) and corrections (n, mean), in one transaction; each overwrites an
        earlier one of its key. If the file then has too many, the oldest are forgotten.

        Args:
            version: of convselect, for the self-tests.

        Raises:
            sqlite3.Error: if writing failed; then none of them is written.
        """
        time = now()
        rows: list[tuple[str, tuple[Any, ...]]] = [
            ("self_test", (*key, version, int(passed))) for key, passed in tests.items()
        ]
        rows += [("correction", (*key, *values)) for key, values in corrections.items()]
        with self.writing():
            self._put(environment, [(table, row, time) for table, row in rows])

    def _put(self, environment: int, rows: list[tuple[str, tuple[Any, ...], str]]) -> None:
        """Write (table, row, made) each, within a transaction."""
        for statement in _TABLES:
            self._db.execute(statement)
        for table, row, made in rows:
            marks = ", ?" * (len(row) + 2)
            self._db.execute(
                f"insert or replace into {table} values (?{marks})", (environment, *row, made, _checksum(row))
            )
        for table, most in MOST.items():
            if self._db.execute(f"select count(*) from {table}").fetchone()[0] > most:
                self._forget_oldest(table, most * 9 // 10)  # a bit more than necessary: not every write has to

    def _forget_oldest(self, table: str, kept: int) -> int:
        return self._db.execute(
            f"delete from {table} where ({_KEYS[table]}) in "
            f"(select {_KEYS[table]} from {table} order by made desc limit -1 offset ?)",
            (kept,),
        ).rowcount

    def _forget_learnt(self, before: str | None = None) -> int:
        """Delete what was made before a time (UTC, ISO 8601), by default everything; returns the number of rows."""
        if not self.has_learnt():
            return 0
        return sum(
            self._db.execute(f"delete from {table} where ?1 is null or made < ?1", (before,)).rowcount
            for table in _COLUMNS
        )

    def add_learnt_from(self, other: Learnt, theirs: int, ours: int, *, replace: bool = False) -> tuple[int, int]:
        """Copy what another store has in one environment. Of two rows of a key the later stays; with `replace`, theirs.

        Args:
            theirs: number of the environment in the other store.
            ours: its number here.

        Returns:
            The numbers of self-tests and of corrections that were copied.

        Raises:
            DamagedStoreError, InvalidRowError: if a row of the other is damaged, or holds what no version writes.
        """
        if not other.has_learnt():
            return 0, 0
        copied = [0, 0]
        here = {one: str(made) for _, one, _, made, _ in self._whole(ours)} if self.has_learnt() else {}
        new = []
        for kind, key, row, made, checksum in other._whole(theirs):
            if _checksum(row) != checksum:
                raise DamagedStoreError(f"{other.path} is not a readable store: {key[0]} is not what was written")
            schema.row(_ROWS[key[0]], row, f"a {key[0]} in {other.path}")
            schema.row(schema.Made, [made], f"a {key[0]} in {other.path}")
            if replace or made > here.get(key, ""):
                new.append((key[0], row, made))
                copied[kind] += 1
        if new:
            with self.writing():
                self._put(ours, new)
        return copied[0], copied[1]

    def _whole(self, environment: int) -> list[tuple[int, tuple[Any, ...], tuple[Any, ...], str, int]]:
        """(0 or 1, table and key, row, when it was made, checksum) of all in an environment."""
        found = []
        for kind, (table, columns) in enumerate(_COLUMNS.items()):
            parts = len(_KEYS[table].split(", ")) - 1
            for *row, made, checksum in self._db.execute(
                f"select {columns}, made, checksum from {table} where environment = ?", (environment,)
            ):
                found.append((kind, (table, *row[:parts]), tuple(row), made, checksum))
        return found


def _checksum(row: tuple[Any, ...]) -> int:
    """CRC-32 of a row without environment and time: SQLite's own checks do not notice a flipped bit in a text."""
    return zlib.crc32(repr(row).encode())
