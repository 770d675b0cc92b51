"""What may go wrong with a process's store: files, locks, disks, permissions. One warning, and memory from then on."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import subprocess
import sys

import pytest
from places import TESTS
from process_store import (
    BUDGETS,
    Saying,
    again,
    decided,
    filled,
    in_a_process,
    kept_aside,
    noise,
    numbered,
    stored,
    use,
)

from convselect.base import timing
from convselect.base import warnings as _warnings
from convselect.store import file
from convselect.store import process as store_process
from convselect.store.store import SCHEMA_VERSION, Store, StoreVersionError

pytestmark = pytest.mark.usefixtures("fresh_process")


def foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("create table theirs (x)")
    db.close()


def truncated(path):
    filled(path, 300)
    store_process._process.close()
    os.truncate(path, path.stat().st_size // 3)


def zeros(path):
    path.write_bytes(bytes(8192))


@pytest.mark.parametrize("spoil", [noise, truncated, foreign, zeros])
def test_a_file_that_is_no_store_is_kept_aside_and_a_new_one_begun(spoil, path):
    spoil(path)
    before = path.read_bytes()
    again(path)
    with Saying() as warned:
        assert use() == [None] * 5
        again(path)
        use()
    assert len(warned.said) == 1
    (aside,) = kept_aside(path)
    assert str(aside) in warned.said[0]
    assert aside.read_bytes() == before
    assert len(stored(path)) == 200
    assert store_process.status()["healthy"]


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_file_of_another_version_is_left_where_it_is(version, path):
    filled(path)
    store_process._process.close()
    db = sqlite3.connect(path)
    db.execute(f"pragma user_version = {version}")
    db.close()
    before = path.read_bytes()
    again(path)
    with Saying() as warned:
        assert use() == [None] * 5
    assert len(warned.said) == 1
    assert f"version {version}" in warned.said[0]
    assert path.read_bytes() == before
    assert kept_aside(path) == []
    with pytest.raises(StoreVersionError):
        Store(path)


def test_flipped_bits_never_change_an_answer(path):
    """Whichever bits are flipped, a look-up finds what was written, or nothing."""
    filled(path, 40)
    store_process._process.close()
    whole, flip = path.read_bytes(), random.Random(7)
    outcomes = {"found": 0, "nothing": 0, "aside": 0}
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(flip.choice((1, 1, 8, 200))):
            data[flip.randrange(len(data))] ^= 1 << flip.randrange(8)
        for one in path.parent.iterdir():
            one.unlink()
        path.write_bytes(data)
        _warnings._given.clear()
        with Saying() as warned:
            again(path)
            for i in range(40):
                found = store_process.look_up(numbered(i), BUDGETS)
                assert found in (None, decided(i))
                outcomes["found" if found else "nothing"] += 1
            store_process.remember(decided(1000))
            store_process.flush()
            assert store_process.look_up(numbered(1000), BUDGETS) == decided(1000)
            store_process._process.close()
        assert len(warned.said) <= 1
        outcomes["aside"] += len(kept_aside(path))
    assert min(outcomes.values()) >= 10, outcomes


def test_a_file_locked_for_ever_is_given_up_and_costs_little(path, monkeypatch):
    filled(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("pragma locking_mode = exclusive")
    holder.execute("begin exclusive")
    holder.execute("insert into problem (text) values ('x')")
    monkeypatch.setattr(store_process, "EVERY_S", 0.0)
    again(path)
    started = timing.Deadline(None)
    with Saying() as warned:
        assert use() == [None] * 5
    assert started.elapsed_s < (store_process.TRIES + 1) * store_process.BUSY_S + 2
    assert len(warned.said) == 1
    assert "in use" in warned.said[0]
    assert not store_process.status()["enabled"]
    holder.execute("rollback")
    holder.close()
    assert len(stored(path)) == 3


def test_a_file_locked_for_a_while_is_written_later(path, monkeypatch):
    filled(path)
    again(path)
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")
    with Saying() as warned:
        store_process.remember(decided(50))
        store_process.flush()
        assert store_process.look_up(numbered(50), BUDGETS) == decided(50)
        assert store_process.look_up(numbered(1), BUDGETS) == decided(1)  # readers do not wait for a writer
        assert len(stored(path)) == 3
        holder.execute("rollback")
        holder.close()
        store_process.flush()
    assert warned.said == []
    assert len(stored(path)) == 4


class _Failing:
    """A connection that fails as on a bad mount."""

    def __init__(self, inner, text, at):
        self._inner, self._text, self._at = inner, text, at

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def execute(self, statement, *arguments):
        if statement.lstrip().startswith(self._at):
            raise sqlite3.OperationalError(self._text)
        return self._inner.execute(statement, *arguments)


@pytest.mark.parametrize(
    "text", ["database is locked", "disk I/O error", "locking protocol", "attempt to write a readonly database"]
)
@pytest.mark.parametrize(
    "at", ["pragma user_version", "pragma journal_mode = wal", "select c.algorithm", "begin", "insert", "commit"]
)
def test_errors_of_network_mounts(text, at, path, monkeypatch):
    filled(path)
    before = stored(path)
    monkeypatch.setattr(store_process, "EVERY_S", 0.0)
    whole = file.StoreFile._connect
    monkeypatch.setattr(file.StoreFile, "_connect", lambda self, *a: _Failing(whole(self, *a), text, at))
    again(path)
    with Saying() as warned:
        found = use(2 * store_process.QUEUE)
    if at == "pragma journal_mode = wal":  # then it is the other journal
        assert warned.said == []
        found, before = found[:3], found[:3]
    else:
        assert len(warned.said) == 1, warned.said
        assert text in warned.said[0]
        assert not store_process.status()["enabled"]
    monkeypatch.undo()
    for i, one in enumerate(found):
        assert one in (None, decided(i))
    assert [one for one in stored(path) if one.problem.C <= 3] == before[:3]
    assert kept_aside(path) == []


def test_a_disk_that_is_full(path):
    """Simulated by a limit on file size, which needs no mount: writing fails in the middle of a transaction."""
    filled(path)
    limit = path.stat().st_size + 30_000
    out = in_a_process(
        f"""
        import resource
        store_process.look_up(numbered(0), BUDGETS)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        with Saying() as warned:
            found = use(3000)
        assert found[:3] == [decided(i) for i in range(3)], found
        print(len(warned.said), store_process.status()["enabled"], warned.said)
        """,
        CONVSELECT_STORE=str(path),
    )
    assert out.startswith("1 False"), out
    kept = stored(path)
    assert kept[:3] == [decided(i) for i in range(3)]
    assert len(kept) < 3000
    assert (len(kept) - 3) % store_process.QUEUE == 0  # whole transactions
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_small_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        out = in_a_process(
            """
            with Saying() as warned:
                assert use(3000) == [None] * 5
            print(len(warned.said), store_process.status()["enabled"], warned.said)
            """,
            CONVSELECT_STORE=str(disk / "s.sqlite"),
        )
        assert out.startswith("1 False"), out
        assert "full" in out
        # The disk is too full even for opening the log again: its files are copied and read elsewhere.
        for one in disk.iterdir():
            (tmp_path / one.name).write_bytes(one.read_bytes())
    finally:
        subprocess.run(["umount", disk], check=True)
    with Store(tmp_path / "s.sqlite") as store:
        assert store.problems(thorough=True) == []
        assert store.counts()[0] % store_process.QUEUE == 0


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_folder_or_file_that_may_only_be_read(what, path):
    """Run as a user without permission: root may write everywhere."""
    filled(path)
    store_process._process.close()
    before = path.read_bytes()
    os.chmod(path, 0o444)
    os.chmod(path.parent, 0o555 if what == "folder" else 0o755)
    if what == "file" and os.geteuid() == 0:
        os.chown(path.parent, 65534, -1)
    for parent in (*path.parents,)[1:]:
        if not parent.stat().st_mode & 0o001:
            os.chmod(parent, parent.stat().st_mode | 0o011)
    out = in_a_process(
        """
        import convselect.store.choices
        from convselect.machine.environment import choice_environment
        choice_environment("cpu")
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)
        with Saying() as warned:
            found = use()
        print(len(warned.said), found == [None] * 5 or found[:3] == [decided(i) for i in range(3)], warned.said)
        """,
        CONVSELECT_STORE=str(path),
    )
    assert out.startswith("1 True"), out
    assert path.read_bytes() == before
    assert kept_aside(path) == []


@pytest.mark.parametrize("home", ["none", "a file", "another user's"])
def test_without_a_usable_cache(home, tmp_path):
    cache = tmp_path / "cache"
    environment = {"HOME": None, "CONVSELECT_CACHE": None}
    if home == "a file":
        cache.write_text("")
        environment["CONVSELECT_CACHE"] = str(cache / "below")
    elif home == "another user's":
        if os.geteuid():
            pytest.skip("needs root to give a folder away")
        cache.mkdir()
        os.chown(cache, 65534, 65534)
        environment["CONVSELECT_CACHE"] = str(cache)
    out = in_a_process(
        f"""
        if {home == "none"}:
            import pwd
            def nobody(uid): raise KeyError(uid)
            pwd.getpwuid = nobody
        with Saying() as warned:
            assert use() == [None] * 5
        print(len(warned.said), store_process.status()["enabled"], warned.said)
        """,
        **environment,
    )
    assert out.startswith("1 False"), out
    assert home != "none" or "no home directory" in out
    assert not cache.is_dir() or not list(cache.iterdir())


def test_two_processes_that_find_one_damaged_file_keep_it_once(path):
    noise(path)
    code = "with Saying() as warned:\n    use(5)\nprint(len(warned.said))"
    env = {
        **os.environ,
        "CONVSELECT_STORE": str(path),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    head = "import convselect\nfrom convselect.store import process\nfrom process_store import Saying, use\n"
    processes = [
        subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, env=env, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert all(one.strip() in ("0", "1") for one in said)
    assert "1\n" in said
    assert len(kept_aside(path)) == 1
    assert len(stored(path)) == 5
