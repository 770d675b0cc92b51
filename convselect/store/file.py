"""A store's file: open it, check it, write to it in short transactions, set it aside if it is damaged.

Its journal is a write-ahead log, so that readers and a writer do not wait for each other. If SQLite cannot have one, as
on network mounts, whose processes share no memory, it is the rollback journal.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

SCHEMA_VERSION = 2
APPLICATION_ID = 0x63766C73  # "cvls": marks the file as convselect's
BUSY_S = 30.0
"""How long a writer waits for another one, in seconds."""
_LOG_BYTES = 4 * 2**20
"""Size to which a write-ahead log is truncated once its contents are in the main file."""

_SCHEMA = """
create table environment (
    id integer primary key, fingerprint text not null unique, description text not null, created text not null);
create table problem (id integer primary key, text text not null unique);
create table measurement (
    environment integer not null references environment, problem integer not null references problem,
    algorithm text not null, revision integer not null, repeat integer not null, pool text not null,
    block integer not null, model text not null, status text not null, clock text not null,
    min_us real, median_us real, p20_us real, p80_us real, wall_us real, rounds integer not null,
    used text not null, primary key (environment, problem, algorithm, revision, repeat)) without rowid;
create table sentinel (
    environment integer not null references environment, block integer not null, before_us real not null,
    after_us real not null, primary key (environment, block)) without rowid;
create table choice (
    environment integer not null references environment, problem integer not null references problem,
    budgets text not null, algorithm text not null, params text, source text not null, gain real,
    revision integer not null, samples integer not null, made text not null, used text not null,
    checksum integer not null, primary key (environment, problem, budgets)) without rowid;
create index choice_used on choice (used);
create index measurement_used on measurement (used);
create index measurement_problem on measurement (problem);
create index choice_problem on choice (problem);
"""
_NETWORK = ("nfs", "cifs", "smb", "afs", "9p", "ceph", "lustre", "gpfs", "gluster", "beegfs", "fuse.sshfs", "ncp")
_checked: set[tuple[str, int, int]] = set()
"""Files whose pages this process has checked: path, device, inode."""


class StoreError(RuntimeError):
    """The file is not a store, is damaged, or has another version; the message says which.

    Attributes:
        inode: inode of the file that was opened, if known: by now its name may belong to another file.
    """

    inode: int | None = None


class StoreVersionError(StoreError):
    """The store has another version's schema."""


class DamagedStoreError(StoreError):
    """The file is not an SQLite file, is damaged, or holds another program's tables."""


class InvalidRowError(StoreError):
    """A row holds what no version writes, under a checksum that is right."""


class BusyStoreError(StoreError):
    """Another process has locked the store."""


def kind_of(error: BaseException) -> str:
    """ "busy" if another process has locked the file, so that waiting may help, "damaged" if its contents are at fault,
    else "other": no space, no permission, a failing disk or file system."""
    if isinstance(error, BusyStoreError):
        return "busy"
    if isinstance(error, DamagedStoreError):
        return "damaged"
    if not isinstance(error, sqlite3.Error):
        return "other"
    code, text = getattr(error, "sqlite_errorcode", None), str(error)  # the code exists from Python 3.11 on
    if code is not None:
        return {5: "busy", 6: "busy", 11: "damaged", 26: "damaged"}.get(code & 0xFF, "other")
    if text.endswith("is locked"):
        return "busy"
    return "damaged" if "malformed" in text or "not a database" in text else "other"


def now() -> str:
    """Date and time in UTC, to the second; sorts as text."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class StoreFile:
    """Opens a store's file, and makes it if it does not exist. Must be closed with `close`.

    Args:
        read_only: nothing is made or changed; the directory may be read-only, too.
        busy_s: how long to wait for another process, in seconds.
        shared: whether several threads use this object, one at a time (which the caller ensures).

    Raises:
        StoreError: if the file is not a store (`DamagedStoreError`), has another schema version (`StoreVersionError`),
            or is locked for longer than `busy_s` (`BusyStoreError`).
        OSError: if it cannot be made or opened.
    """

    def __init__(
        self, path: str | Path, *, read_only: bool = False, busy_s: float = BUSY_S, shared: bool = False
    ) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self.invalid: list[str] = []
        """Rows that hold what no version writes: they are left out. The first few, in words."""
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"there is no directory {self.path.parent}")
        if not self.path.exists():
            if read_only:
                raise FileNotFoundError(f"there is no file {self.path}")
            if self.path.is_symlink():
                raise FileNotFoundError(f"{self.path} is a symbolic link to nothing")
        elif not self.path.is_file():  # SQLite would wait for a pipe for ever
            raise OSError(f"{self.path} is not a regular file")
        modes = ["mode=ro"] if read_only else [""]
        if read_only and not any(_has_content(f"{self.path}{end}") for end in ("-wal", "-journal")):
            modes.append("immutable=1")
        self.inode = _inode(self.path)
        for mode in modes:
            try:
                self._db = self._connect(mode, busy_s, shared)
                try:
                    self._open()
                except BaseException:
                    self._db.close()
                    raise
                self.inode = self.inode or _inode(self.path)
                return
            except StoreError as error:
                error.inode = self.inode
                raise
            except sqlite3.DatabaseError as error:
                # If there is no log beside the file, and none can be made, read it as a file that never changes.
                if mode == modes[-1] or kind_of(error) != "other":
                    raise self._translated(error) from error

    def _connect(self, mode: str, busy_s: float, shared: bool) -> sqlite3.Connection:
        name = f"file:{quote(str(self.path.absolute()))}?{mode}" if mode else str(self.path)
        return sqlite3.connect(
            name, timeout=busy_s, isolation_level=None, uri=bool(mode), check_same_thread=not shared,
            cached_statements=64,
        )  # fmt: skip

    def _translated(self, error: sqlite3.DatabaseError) -> Exception:
        kind = kind_of(error)
        if kind == "damaged":
            damaged = DamagedStoreError(f"{self.path} is not a readable store: {error}")
            damaged.inode = self.inode
            return damaged
        if kind == "busy":
            return BusyStoreError(f"{self.path} is in use: {error}")
        return OSError(f"{self.path} cannot be opened: {error}")

    def _open(self) -> None:
        self._db.execute("pragma foreign_keys = on")
        if self._version() == 0 and not self.read_only and not self._has_tables():
            self._db.execute("pragma auto_vacuum = incremental")  # takes effect only before the first table
            self._set_journal()
            with self.writing():
                if self._version() == 0 and not self._has_tables():  # else another process was first
                    for statement in _SCHEMA.split(";"):  # `executescript` would end the transaction
                        self._db.execute(statement)
                    self._db.execute(f"pragma application_id = {APPLICATION_ID}")
                    self._db.execute(f"pragma user_version = {SCHEMA_VERSION}")
        if self._db.execute("pragma application_id").fetchone()[0] != APPLICATION_ID:
            raise DamagedStoreError(f"{self.path} is a database of something else")
        # Read again: another process may just have made the tables, in one transaction with both numbers.
        if (version := self._version()) != SCHEMA_VERSION:
            raise StoreVersionError(f"{self.path} has version {version}; this convselect reads {SCHEMA_VERSION}")
        self._check_once()
        if not self.read_only:
            self._set_journal()

    def _version(self) -> int:
        return int(self._db.execute("pragma user_version").fetchone()[0])

    def _has_tables(self) -> bool:
        return bool(self._db.execute("select count(*) from sqlite_master").fetchone()[0])

    def _check_once(self) -> None:
        """Check the file's pages, once per process, so that later look-ups do not wait for it."""
        found = self.path.stat()
        key = (str(self.path.absolute()), found.st_dev, found.st_ino)
        if key not in _checked:
            if wrong := self.problems():
                raise DamagedStoreError(f"{self.path} is not a readable store: {wrong[0]}")
            _checked.add(key)

    def problems(self, *, thorough: bool = False) -> list[str]:
        """Faults of the file's pages, at most ten lines; `thorough` compares indices with their tables too."""
        what = "integrity_check" if thorough else "quick_check"
        return [str(line) for (line,) in self._db.execute(f"pragma {what}(10)") if line != "ok"]

    def dangling(self) -> list[str]:
        """Rows with a broken reference: their table, and the table they refer to."""
        return [
            f"{table}: a row of no {parent}" for table, _, parent, _ in self._db.execute("pragma foreign_key_check")
        ]

    # ---- the journal --------------------------------------------------------------------------------------------

    def _set_journal(self) -> None:
        if self.journal == "wal":
            # If the machine crashes, the last transactions may be lost, but nothing is damaged; a killed process loses
            # none.
            self._db.execute("pragma synchronous = normal")
            self._db.execute(f"pragma journal_size_limit = {_LOG_BYTES}")
            return
        if on_network(self.path):
            return
        with contextlib.suppress(sqlite3.OperationalError):  # in use, or a file system without shared memory
            if self._db.execute("pragma journal_mode = wal").fetchone()[0] == "wal":
                self._set_journal()

    @property
    def journal(self) -> str:
        """ "wal", or "delete": the rollback journal."""
        return str(self._db.execute("pragma journal_mode").fetchone()[0])

    # ---- transactions -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction: everything is written or nothing."""
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already
                self._db.execute("rollback")
            raise

    @property
    def used_bytes(self) -> int:
        """Bytes of pages that hold something."""
        pages, free, size = (
            int(self._db.execute(f"pragma {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def compact(self) -> None:
        """Give free pages back to the file system."""
        self._db.execute("vacuum")

    def leave_out(self, error: InvalidRowError) -> None:
        """Note a row that is left out."""
        if len(self.invalid) < 10:
            self.invalid.append(str(error))

    def close(self) -> None:
        self._db.close()


def is_store(path: str | Path) -> bool:
    """Whether a file begins as SQLite's do. Raises OSError if it cannot be read, or is no regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def set_aside(path: Path, inode: int | None) -> Path | None:
    """Rename a damaged file, and SQLite's files beside it, so that a new one can be made. It is not deleted, since its
    owner may want it.

    Args:
        inode: inode of the file that was found damaged; another file with this name is not touched.

    Returns:
        The new name; None if another process renamed it first.

    Raises:
        OSError: if it cannot be renamed.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # not available everywhere; two processes at once are rare
            import fcntl

            fcntl.flock(folder, fcntl.LOCK_EX)
        if inode is None or _inode(path) != inode:
            return None
        stem = f"{path.name}.damaged-{datetime.date.today().isoformat()}"
        names = (stem, *(f"{stem}-{i}" for i in range(2, 1000)))
        aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
        for end in ("-wal", "-shm", "-journal", ""):  # a new file must not find the log of the old one
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{end}", f"{aside}{end}")
        return aside
    finally:
        os.close(folder)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _has_content(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


def on_network(path: Path, mounts: Callable[[], str] | None = None) -> bool:
    """Whether a file is on a mount to which other machines may write as well; False if that is not known."""
    try:
        text = mounts() if mounts is not None else Path("/proc/self/mounts").read_text(errors="replace")
        place = os.path.realpath(path)
    except OSError:
        return False
    longest, kind = -1, ""
    for line in text.splitlines():
        _, mount, found, *_ = (*line.split(), "", "", "")
        mount = mount.replace("\\040", " ").rstrip("/")
        if (place == mount or place.startswith(mount + "/")) and len(mount) >= longest:
            longest, kind = len(mount), found
    return kind.startswith(_NETWORK)
