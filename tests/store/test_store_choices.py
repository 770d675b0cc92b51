"""Choices in a store: they come back unchanged or not at all; bounds; files of other versions, other disks."""

from __future__ import annotations

import datetime
import sqlite3

import pytest
from stores import HERE, MARK, P1, P2, A, B, numbered, rows_of

from convselect.store import choices
from convselect.store import file as store_file
from convselect.store.file import kind_of, on_network
from convselect.store.store import (
    SCHEMA_VERSION,
    BusyStoreError,
    DamagedStoreError,
    Store,
    StoreVersionError,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.sqlite"


def test_a_decision_comes_back_as_it_went_in(path):
    with Store(path) as store:
        here = store.environment(HERE)
        store.put_choices(here, [A, B, A._replace(budgets="exact 0B", algorithm="direct")])
    with Store(path) as store:
        assert store.decision(MARK, P1, "native 8B") == A
        assert store.decision(MARK, P2, "native 8B") == B
        assert store.decision(MARK, P1, "exact 0B").algorithm == "direct"
        assert store.decision(MARK, P1, "another") is None
        assert store.decision("another", P1, "native 8B") is None
        assert store.decision(MARK, numbered(5), "native 8B") is None
        assert store.counts() == (3, 0)


def test_a_later_decision_replaces_an_earlier_and_can_be_dropped(path):
    with Store(path) as store:
        here = store.environment(HERE)
        store.put_choices(here, [A, A._replace(budgets="other")])
        store.put_choices(here, [A._replace(algorithm="fft", params=None, gain=float("nan"))])
        found = store.decision(MARK, P1, "native 8B")
        assert (found.algorithm, found.params, found.gain) == ("fft", None, None)
        assert store.drop(here, P1, "native 8B") == 1
        assert store.decision(MARK, P1, "native 8B") is None
        assert store.decision(MARK, P1, "other") is not None
        assert store.drop(here, P1) == 1
        assert store.drop(here, P1) == 0


def test_decisions_are_written_all_or_none(path):
    with Store(path) as store:
        here = store.environment(HERE)
        with pytest.raises(sqlite3.IntegrityError):
            store.put_choices(here, [A, B._replace(algorithm=None)])
        assert store.counts() == (0, 0)
        with pytest.raises(sqlite3.IntegrityError):
            store.put_choices(here + 1, [A])
        store.put_choices(here, [A])
        assert [one.decision for one in store.decisions()] == [A]


def test_one_environment_has_one_fingerprint_whatever_its_description(path):
    with Store(path) as store:
        here = store.environment({"device": "x"}, "mark")
        assert store.environment({"device": "y"}, "mark") == here
        store.put_choices(here, [A])
        assert store.decision("mark", P1, "native 8B") == A
        assert store.fingerprints() == {here: "mark"}


def test_reading_writes_once_a_day_at_most(path, monkeypatch):
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A, B])
        written = store._db.total_changes
        for _ in range(100):
            store.decision(MARK, P1, "native 8B")
        store.note_use()
        assert store._db.total_changes == written  # made today
        monkeypatch.setattr(choices, "now", lambda: "2999-01-01T00:00:00+00:00")
        for _ in range(100):
            store.decision(MARK, P1, "native 8B")
        assert store._db.total_changes == written
        store.note_use()
        assert store._db.total_changes == written + 1
        assert {one.decision.problem: one.used[:4] for one in store.decisions()}[P1] == "2999"
        assert {one.decision.problem: one.used[:4] for one in store.decisions()}[P2] != "2999"


def stamped(store, here, count, monkeypatch):
    """Enter choices, each used a second after the previous one."""
    for i in range(count):
        time = datetime.datetime(2030, 1, 1) + datetime.timedelta(seconds=i)
        monkeypatch.setattr(choices, "now", lambda time=time: time.isoformat())
        store.put_choices(here, [A._replace(problem=numbered(i))])


def test_the_least_recently_used_are_forgotten_first(path, monkeypatch):
    with Store(path) as store:
        here = store.environment(HERE)
        stamped(store, here, 20, monkeypatch)
        monkeypatch.setattr(choices, "now", lambda: "2030-01-02T00:00:00")
        assert store.decision(MARK, numbered(0), "native 8B")  # read, and so no longer the oldest
        store.note_use()
        assert store.prune(rows=5) == 15
        assert sorted(one.decision.problem.C for one in store.decisions()) == [1, 17, 18, 19, 20]
        assert len(store.problem_texts()) == 5
        assert store.prune(unused_since="2030-01-01T00:00:18") == 2
        assert sorted(one.decision.problem.C for one in store.decisions()) == [1, 19, 20]


def test_measurements_count_and_go_as_choices_do(path, monkeypatch):
    with Store(path) as store:
        here, there = store.environment(HERE), store.environment({**HERE, "torch": "9"})
        store.add(here, rows_of(P2, "a", "b", "native"), pool="p")
        store.add_sentinel(there, 0, 1, 1)
        store.put_choices(there, [A])
        stamped(store, here, 3, monkeypatch)
        assert store.counts() == (4, 3)
        assert store.prune(environment=there) == 1
        assert list(store.environments()) == [here]
        assert store.prune(rows=3) == 3
        assert store.prune(rows=3) == 0
        assert store.dangling() == []


def test_fresh_measurements_do_not_push_choices_out(path, monkeypatch):
    with Store(path) as store:
        here = store.environment(HERE)
        stamped(store, here, 10, monkeypatch)
        monkeypatch.undo()
        store.add(here, rows_of(P1, *(f"a{i}" for i in range(100))), pool="p")
        store._db.execute("update measurement set used = '2999'")
        assert store.prune(rows=30) == 80
        assert store.counts() == (10, 20)
        assert store.prune(rows=5) == 25
        assert [one.decision.problem.C for one in store.decisions()] == [6, 7, 8, 9, 10]


def test_a_bound_in_bytes_makes_the_file_smaller(path, monkeypatch):
    with Store(path) as store:
        here = store.environment(HERE)
        store.put_choices(here, [A._replace(problem=numbered(i)) for i in range(5000)])
        before = store.used_bytes
        assert before > 1_000_000
        store.prune(size_bytes=300_000)
        assert 100_000 < store.used_bytes <= 300_000
        assert store.counts()[0] > 300
    assert path.stat().st_size <= 400_000  # the log has been truncated


def test_what_is_read_only_is_only_read(path):
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A])
    before = path.read_bytes()
    with Store(path, read_only=True) as store:
        assert store.decision(MARK, P1, "native 8B") == A
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.put_choices(1, [A])
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        Store(path.with_name("none"), read_only=True)
    assert all(not file.stat().st_size or "-shm" in file.name for file in path.parent.iterdir() if file != path)


# ---- files of other versions, and on other disks ----------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("version", [1, SCHEMA_VERSION + 1])
def test_a_store_of_another_version_is_refused_and_not_touched(version, read_only, path):
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A])
        store._db.execute(f"pragma user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match=f"version {version}"):
        Store(path, read_only=read_only)
    assert path.read_bytes() == before
    assert all(not file.stat().st_size or "-shm" in file.name for file in path.parent.iterdir() if file != path)


def test_errors_say_what_kind_they_are(path):
    path.write_bytes(b"noise" * 1000)
    with pytest.raises(DamagedStoreError):
        Store(path)
    path.unlink()
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A])
        store._db.execute("pragma user_version = 99")
    with pytest.raises(StoreVersionError, match="version 99"):
        Store(path)
    with Store(path.with_name("t")) as held, held.writing():
        with Store(held.path, busy_s=0.01) as second, pytest.raises(sqlite3.OperationalError) as locked:
            second.put_choices(1, [A])
        assert kind_of(locked.value) == "busy"
    texts = {
        "database is locked": "busy", "database table is locked": "busy", "locking protocol": "other",
        "disk I/O error": "other", "database or disk is full": "other", "unable to open database file": "other",
        "database disk image is malformed": "damaged", "file is not a database": "damaged",
    }  # fmt: skip
    assert {text: kind_of(sqlite3.OperationalError(text)) for text in texts} == texts
    assert kind_of(OSError()) == "other"


def test_a_file_that_is_locked_whole_is_busy(path):
    Store(path).close()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("pragma locking_mode = exclusive")
    holder.execute("begin exclusive")
    holder.execute("insert into problem (text) values ('x')")
    with pytest.raises(BusyStoreError, match="in use"):
        Store(path, busy_s=0.01)
    holder.execute("rollback")
    holder.close()
    Store(path).close()


def test_a_choice_that_was_changed_behind_our_back_is_no_choice(path):
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A, B])
        store._db.execute("update choice set algorithm = 'winograd5' where algorithm = 'winograd4'")
        with pytest.raises(DamagedStoreError, match="not what was written"):
            store.decision(MARK, P1, "native 8B")
        assert store.decision(MARK, P2, "native 8B") == B
        damaged = []
        assert [one.decision for one in store.decisions(damaged=damaged)] == [B]
        assert len(damaged) == 1


def test_pages_are_looked_through_when_a_file_is_first_opened(path):
    with Store(path) as store:
        store.put_choices(store.environment(HERE), [A._replace(problem=numbered(i)) for i in range(500)])
    data = bytearray(path.read_bytes())
    for page in range(3, len(data) // 4096):
        data[page * 4096 : page * 4096 + 8] = b"\xff" * 8
    path.write_bytes(data)
    store_file._checked.clear()
    with pytest.raises(DamagedStoreError):
        Store(path)


MOUNTS = """
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
tmpfs /home/me/ram tmpfs rw 0 0
//box/share /mnt/with\\040space cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("place", "network"),
    [
        ("/home/me/.cache/s", True),
        ("/home/me/ram/s", False),
        ("/homes/s", False),
        ("/var/s", False),
        ("/mnt/with space/s", True),
    ],
)
def test_network_mounts_are_known(place, network):
    assert on_network(place, lambda: MOUNTS) == network


def test_on_a_network_mount_the_journal_is_rolled_back(path, monkeypatch):
    monkeypatch.setattr(store_file, "on_network", lambda path: True)
    with Store(path) as store:
        assert store.journal == "delete"
        store.put_choices(store.environment(HERE), [A])
    monkeypatch.undo()
    with Store(path) as store:
        assert store.journal == "wal"
        assert store.decision(MARK, P1, "native 8B") == A
