"""Choices in a store, and the environments they were made in: look up, write, drop, and prune if there are too many.
Everything that dispatch needs of a store is here, so that a look-up does not import the code for measurements."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from convselect.base.problem import ConvProblem
from convselect.machine import environment as machine
from convselect.store import schema
from convselect.store.decision import Decision
from convselect.store.file import DamagedStoreError, InvalidRowError, now
from convselect.store.learnt import Learnt


class Stored(NamedTuple):
    """A choice with the number of its environment, and when it was made and last used (UTC)."""

    environment: int
    decision: Decision
    made: str
    used: str


_COLUMNS = "c.algorithm, c.params, c.source, c.gain, c.revision, c.samples, c.made, c.used, c.checksum"


class Choices(Learnt):
    """The choices of a store; arguments and errors are those of `StoreFile`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # (environment, problem, budgets) of choices read for the first time today; written with the next choice.
        self._read: set[tuple[int, int, str]] = set()
        super().__init__(*arguments, **options)

    def close(self, *, quickly: bool = False) -> None:
        """Close the file. Unless `quickly`, note first which choices were read."""
        if not quickly:
            with contextlib.suppress(sqlite3.Error):  # harmless: the choices count as unused for one more day
                self.note_use()
        super().close()

    # ---- environments -------------------------------------------------------------------------------------------

    def environment(self, description: Mapping[str, Any], fingerprint: str | None = None) -> int:
        """The number of the environment with this fingerprint, by default the description's; new ones are added."""
        fingerprint = machine.fingerprint(description) if fingerprint is None else fingerprint
        with self.writing():
            self._db.execute(
                "insert or ignore into environment (fingerprint, description, created) values (?, ?, ?)",
                (fingerprint, json.dumps(description, sort_keys=True), now()),
            )
            found = self._db.execute("select id from environment where fingerprint = ?", (fingerprint,)).fetchone()
        return int(found[0])

    def environments(self) -> dict[int, dict[str, Any]]:
        """Number -> description of every environment. Raises InvalidRowError if one has none."""
        found = {}
        for number, text in self._db.execute("select id, description from environment order by id"):
            try:
                found[int(number)] = schema.read(schema.description_in, text)
            except ValueError as error:
                raise InvalidRowError(
                    f"{self.path} has an environment {number} without a description: {error}"
                ) from None
        return found

    def fingerprints(self) -> dict[int, str]:
        """Number -> fingerprint of every environment."""
        rows = self._db.execute("select id, fingerprint from environment order by id")
        return {int(number): str(text) for number, text in rows}

    # ---- choices ------------------------------------------------------------------------------------------------

    def decision(self, fingerprint: str, problem: ConvProblem, budgets: str) -> Decision | None:
        """The choice for a problem under these budgets in the environment with this fingerprint; None if there is none,
        or if it is one of those that are left out (`invalid`).

        Raises:
            DamagedStoreError: if the row is not what was written.
            sqlite3.Error: if the file cannot be read.
        """
        text = str(problem)
        row = self._db.execute(
            f"select {_COLUMNS}, c.environment, c.problem from environment e, problem p, choice c "
            "where e.fingerprint = ? and p.text = ? and c.environment = e.id and c.problem = p.id and c.budgets = ?",
            (fingerprint, text, budgets),
        ).fetchone()
        if row is None:
            return None
        *columns, environment, number = row
        try:
            found, _, used = self._decision(problem, text, budgets, columns)
        except InvalidRowError as error:
            self.leave_out(error)
            return None
        if not self.read_only and used[:10] != now()[:10]:
            self._read.add((environment, number, budgets))
        return found

    def _decision(
        self, problem: ConvProblem, text: str, budgets: str, columns: Sequence[Any]
    ) -> tuple[Decision, str, str]:
        """The choice, when it was made, and when it was last used.

        Raises:
            DamagedStoreError: if the checksum is wrong.
            InvalidRowError: if it is right, and the row is not a choice all the same.
        """
        *columns, checksum = columns
        if _checksum(text, budgets, tuple(columns[:6])) != checksum:
            raise DamagedStoreError(f"{self.path} is not a readable store: a choice is not what was written")
        what = f"the choice for {text} in {self.path}"
        row = schema.row(schema.ChoiceRow, columns, what)
        try:
            params = None if row.params is None else schema.read(schema.params_in, row.params)
        except ValueError as error:
            raise InvalidRowError(f"{what}: its parameters are no parameters: {error}") from None
        found = Decision(
            problem, budgets, row.algorithm, params, row.source, row.gain, row.revision, row.samples
        )  # fmt: skip
        return found, row.made, row.used

    def put_choices(
        self, environment: int, decisions: Sequence[Decision], *, made: Sequence[str] | None = None
    ) -> None:
        """Write these, in one transaction; each overwrites an earlier one for its problem and budgets.

        Args:
            made: when each was made; default: now.

        Raises:
            sqlite3.Error: if writing failed; then none of them is written.
        """
        time = now()
        with self.writing():
            self._write_use(time)
            for i, one in enumerate(decisions):
                text = str(one.problem)
                params = None if one.params is None else json.dumps(dict(one.params), sort_keys=True)
                gain = float(one.gain) if one.gain is not None and 0 < one.gain <= 1e6 else None  # and not NaN
                values = (one.algorithm, params, one.source, gain, int(one.revision), int(one.samples))
                self._db.execute("insert or ignore into problem (text) values (?)", (text,))
                self._db.execute(
                    "insert or replace into choice values "
                    "(?, (select id from problem where text = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (environment, text, one.budgets, *values, made[i] if made else time, time,
                     _checksum(text, one.budgets, values)),
                )  # fmt: skip
        self._read.clear()

    def note_use(self) -> None:
        """Write down which choices were read. Each is noted once a day, with the next choice written or by this."""
        if self._read and not self.read_only:
            with self.writing():
                self._write_use(now())
            self._read.clear()

    def _write_use(self, time: str) -> None:
        self._db.executemany(
            "update choice set used = ? where environment = ? and problem = ? and budgets = ?",
            [(time, *key) for key in self._read],
        )

    def drop(self, environment: int, problem: ConvProblem, budgets: str | None = None) -> int:
        """Delete the choices for a problem, under these budgets or under all; returns how many there were."""
        condition, values = ("", ()) if budgets is None else (" and budgets = ?", (budgets,))
        with self.writing():
            return self._db.execute(
                "delete from choice where environment = ? "
                f"and problem = (select id from problem where text = ?){condition}",
                (environment, str(problem), *values),
            ).rowcount

    def decisions(
        self, environment: int | None = None, problem: ConvProblem | None = None, damaged: list[str] | None = None
    ) -> Iterator[Stored]:
        """All choices, in order of environment, then of the problems' numbers.

        Args:
            damaged: if given, damaged and invalid rows are named here, and nothing is raised.

        Raises:
            DamagedStoreError: if a row is damaged.
            InvalidRowError: if it holds what no version writes.
        """
        rows = self._db.execute(
            f"select c.environment, p.text, c.budgets, {_COLUMNS} from choice c "
            "join problem p on p.id = c.problem join environment e on e.id = c.environment "
            "where (?1 is null or c.environment = ?1) and (?2 is null or p.text = ?2) "
            "order by c.environment, c.problem, c.budgets",
            (environment, None if problem is None else str(problem)),
        ).fetchall()
        for number, text, budgets, *columns in rows:
            try:
                problem, budgets = (
                    problem_of(text),
                    schema.row(schema.Budgets, [budgets], f"the budgets for {text}").text,
                )
                found, made, used = self._decision(problem, text, budgets, columns)
            except (DamagedStoreError, InvalidRowError) as error:
                if damaged is None:
                    raise
                damaged.append(
                    f"{text} ({budgets}): {error}" if isinstance(error, InvalidRowError) else f"{text} ({budgets})"
                )
                continue
            yield Stored(number, found, made, used)

    def problem_texts(self) -> list[str]:
        """Every problem with an entry, as text."""
        return [str(text) for (text,) in self._db.execute("select text from problem order by id")]

    # ---- bounds -------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int]:
        """(choices, measurements)."""
        found = self._db.execute("select (select count(*) from choice), (select count(*) from measurement)").fetchone()
        return int(found[0]), int(found[1])

    def prune(
        self,
        *,
        rows: int | None = None,
        size_bytes: int | None = None,
        unused_since: str | None = None,
        environment: int | None = None,
    ) -> int:
        """Delete until all of these hold, least recently used first; returns the number of deleted rows.

        Measurements are deleted before choices: a call may wait for a choice, while measurements can be imported again.
        Self-tests and corrections have bounds of their own (`learnt.py`); they go by age or with their environment, and
        all of them if nothing else may stay or their space is needed.

        Args:
            rows: keep at most this many choices and measurements.
            size_bytes: keep at most this many bytes of pages in use.
            unused_since: delete what was last used before this time (UTC, ISO 8601).
            environment: delete everything of this environment.
        """
        with self.writing():
            gone = 0
            if environment is not None:
                for name in ("choice", "measurement"):
                    gone += self._db.execute(f"delete from {name} where environment = ?", (environment,)).rowcount
                self._db.execute("delete from sentinel where environment = ?", (environment,))
                gone += sum(self.learnt_counts(environment))  # which go with it
                self._db.execute("delete from environment where id = ?", (environment,))
            if unused_since is not None:
                for name in ("choice", "measurement"):
                    gone += self._db.execute(f"delete from {name} where used < ?", (unused_since,)).rowcount
                gone += self._forget_learnt(unused_since)
            if rows is not None and (excess := sum(self.counts()) - rows) > 0:
                gone += self._forget(excess)
            if rows == 0:
                gone += self._forget_learnt()
            self._forget_problems(gone)
            while size_bytes is not None and self.used_bytes > size_bytes and (left := sum(self.counts())):
                gone += self._forget(left // 10 + 1)
                self._forget_problems(gone)
            if size_bytes is not None and self.used_bytes > size_bytes:
                gone += self._forget_learnt()
        self._db.executescript("pragma incremental_vacuum")  # `execute` would free one page
        return gone

    def _forget(self, count: int) -> int:
        keys = self._db.execute(
            "select 'choice', environment, problem, budgets, null, null, used from choice union all "
            "select 'measurement', environment, problem, algorithm, revision, repeat, used from measurement "
            "order by 1 desc, used limit ?",
            (count,),
        ).fetchall()
        self._db.executemany(
            "delete from choice where environment = ? and problem = ? and budgets = ?",
            [key[1:4] for key in keys if key[0] == "choice"],
        )
        self._db.executemany(
            "delete from measurement where environment = ? and problem = ? and algorithm = ? and revision = ? "
            "and repeat = ?",
            [key[1:6] for key in keys if key[0] == "measurement"],
        )
        return len(keys)

    def _forget_problems(self, gone: int) -> None:
        """Delete problems that nothing refers to any more, unless `gone`, the number of deleted rows, is 0."""
        if gone:
            self._db.execute(
                "delete from problem where not exists (select 1 from choice where problem = problem.id) "
                "and not exists (select 1 from measurement where problem = problem.id)"
            )


def problem_of(text: Any) -> ConvProblem:
    """A problem in a store. Raises InvalidRowError if the text is not one."""
    try:
        return ConvProblem.parse(str(text))
    except ValueError as error:
        raise InvalidRowError(str(error)) from None


def _checksum(text: str, budgets: str, values: tuple[Any, ...]) -> int:
    """CRC-32 over everything in a choice: SQLite's own checks do not notice a flipped bit in a text."""
    return zlib.crc32(repr((text, budgets, *values)).encode())
