"""The store as a process sees it: quick, bounded, and never in the way, whatever the disk does."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch
from places import TESTS
from stores import numbered

import convselect
from convselect import timing
from convselect import warnings as _warnings
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment as machine_environment
from convselect.machine.environment import choice_environment, cpu_fingerprint
from convselect.store import file
from convselect.store import process as store_process
from convselect.store.choices import Choices
from convselect.store.store import SCHEMA_VERSION, Decision, NewerStoreError, Store

BUDGETS = "native 8B"


def decided(i, algorithm="im2col_gemm", **changes):
    revision = BY_NAME[algorithm].revision if algorithm in BY_NAME else 1
    return Decision(numbered(i), BUDGETS, algorithm, None, "verify", 1.5, revision, 9)._replace(**changes)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No store but the test's, nothing warned of yet, every file still to be looked through."""
    for name in ("CONVSELECT_STORE", "CONVSELECT_SYSTEM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_warnings, "_given", set())
    monkeypatch.setattr(file, "_checked", set())
    yield
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        convselect.set_store("off")
    store_process._process = None


@pytest.fixture
def path(tmp_path):
    convselect.set_store(tmp_path / "s.sqlite")
    return tmp_path / "s.sqlite"


def again(path):
    """As a new process would begin."""
    file._checked.clear()
    convselect.set_store(path)


def stored(path):
    with Store(path) as store:
        return [one.decision for one in store.decisions()]


def filled(path, count=3):
    """A store on disk with choices that hold here."""
    convselect.set_store(path)
    for i in range(count):
        store_process.remember(decided(i))
    again(path)
    assert len(stored(path)) == count


# ---- what it does -----------------------------------------------------------------------------------------------


def test_a_choice_is_there_at_once_and_in_the_next_process(path):
    assert store_process.look_up(numbered(1), BUDGETS) is None
    assert not path.exists()  # looking makes nothing
    store_process.remember(decided(1))
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    assert not path.exists()
    again(path)
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    assert store_process.look_up(numbered(1), "exact 8B") is None
    assert store_process.look_up(numbered(1)._replace(threads=7), BUDGETS) is None


def test_choices_are_written_together(path, monkeypatch):
    calls = []
    whole = Choices.decide
    monkeypatch.setattr(Choices, "decide", lambda self, *a, **k: calls.append(len(a[1])) or whole(self, *a, **k))
    for i in range(2 * store_process.QUEUE + 3):
        store_process.remember(decided(i))
    assert calls == [store_process.QUEUE] * 2
    assert store_process.status()["waiting"] == 3
    store_process.flush()
    assert calls == [store_process.QUEUE] * 2 + [3]
    store_process.flush()
    assert len(calls) == 3


def test_after_a_while_the_next_call_writes(path, monkeypatch):
    monkeypatch.setattr(store_process, "EVERY_S", 0.0)
    convselect.set_store(path)
    store_process.remember(decided(1))
    assert stored(path) == [decided(1)]
    monkeypatch.setattr(store_process, "EVERY_S", 60.0)
    convselect.set_store(path)
    store_process.remember(decided(2))
    assert len(stored(path)) == 1
    store_process._process.written = timing.Deadline(0)
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    assert len(stored(path)) == 2


def test_an_upgraded_algorithm_has_no_choice_until_it_is_measured_again(path):
    old = decided(1, revision=BY_NAME["im2col_gemm"].revision + 1)
    store_process.remember(old)
    again(path)
    assert store_process.look_up(numbered(1), BUDGETS) is None
    assert stored(path) == [old]  # and can still be read
    store_process.remember(decided(1))
    again(path)
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)


def test_a_choice_of_another_machine_is_not_found(path, monkeypatch):
    filled(path)
    for what in ("torch", "device"):
        monkeypatch.setattr(machine_environment, "_known", {})
        if what == "torch":
            monkeypatch.setattr(torch, "__version__", "0.0")
        else:
            monkeypatch.setattr(timing, "cpu_model", lambda: "another")
        again(path)
        assert store_process.look_up(numbered(0), BUDGETS) is None
        monkeypatch.undo()
    monkeypatch.setattr(machine_environment, "_known", {})
    again(path)
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)


def test_the_fingerprint_is_the_machines():
    assert choice_environment("cpu")[0] == cpu_fingerprint()


def test_a_gpus_fingerprint_is_of_card_and_versions(monkeypatch):
    monkeypatch.setattr(machine_environment, "_known", {})
    monkeypatch.setattr(machine_environment, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = {"name": "a card", "capability": (9, 0), "cudnn": 90100, "driver": 12040}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card["name"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: card["capability"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: card["cudnn"])
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: card["driver"], raising=False)
    marks = {choice_environment("cuda")[0]}
    assert choice_environment("cuda")[1]["family"] == "cuda-sm90"
    for name, value in (("name", "another"), ("capability", (8, 0)), ("cudnn", 90200), ("driver", 13000)):
        card[name] = value
        monkeypatch.setattr(machine_environment, "_known", {})
        marks.add(choice_environment("cuda")[0])
    assert len(marks) == 5


def test_a_gpu_that_does_not_answer_has_no_store_and_the_processor_keeps_its_own(path, monkeypatch):
    monkeypatch.setattr(machine_environment, "_has_cuda", lambda: True)

    def silent():
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "current_device", silent)
    here, there = decided(1), decided(1)._replace(problem=numbered(1)._replace(device="cuda"))
    assert store_process.look_up(there.problem, BUDGETS) is None
    store_process.remember(there)
    store_process.remember(here)
    assert store_process.look_up(there.problem, BUDGETS) == there
    again(path)
    assert stored(path) == [here]


def test_the_users_store_comes_before_the_systems(path, tmp_path, monkeypatch):
    system = tmp_path / "system" / "s.sqlite"
    convselect.set_store(system)
    for i in range(2):
        store_process.remember(decided(i, gain=7.0))
    store_process.flush()
    store_process._process.close()
    before = system.read_bytes()
    monkeypatch.setenv("CONVSELECT_SYSTEM_STORE", str(system))
    convselect.set_store(path)
    store_process.remember(decided(0))
    again(path)
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert store_process.look_up(numbered(1), BUDGETS).gain == 7
    assert store_process.look_up(numbered(2), BUDGETS) is None
    assert store_process.status()["system_store"] == str(system)
    assert system.read_bytes() == before
    convselect.set_store("off")
    assert store_process.look_up(numbered(1), BUDGETS) is None


def test_a_system_store_that_cannot_be_read_is_left_out(path, tmp_path, monkeypatch):
    filled(path)
    system = tmp_path / "system.sqlite"
    system.write_bytes(b"noise" * 999)
    monkeypatch.setenv("CONVSELECT_SYSTEM_STORE", str(system))
    convselect.set_store(path)
    with pytest.warns(convselect.ConvselectWarning, match="system store is left out") as caught:
        for i in range(5):
            store_process.look_up(numbered(i), BUDGETS)
    assert len(caught) == 1
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert system.read_bytes() == b"noise" * 999


def test_off_is_off(path, monkeypatch):
    for off in (lambda: convselect.set_store("off"), lambda: convselect.set_store(None)):
        monkeypatch.setenv("CONVSELECT_STORE", "off")
        off()
        store_process.remember(decided(1))
        assert store_process.look_up(numbered(1), BUDGETS) is None
        assert (store_process.status()["enabled"], store_process.status()["path"]) == (False, None)
    assert not path.exists()


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVSELECT_CACHE", str(tmp_path / "cache"))
    convselect.set_store(None)
    assert store_process.status()["path"] == str(tmp_path / "cache" / "store.sqlite")
    store_process.remember(decided(1))
    store_process.flush()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("CONVSELECT_STORE", "~/x.sqlite")
    convselect.set_store(None)
    assert store_process.user_path() == Path.home() / "x.sqlite"


def test_status_tells_how_it_stands(path):
    told = store_process.status()
    assert (told["enabled"], told["exists"], told["healthy"], told["why_off"]) == (True, False, True, None)
    filled(path)
    again(path)
    told = store_process.status()
    assert (told["enabled"], told["exists"], told["healthy"], told["journal"]) == (True, True, True, "wal")
    assert (told["rows"], told["waiting"], told["system_store"]) == (3, 0, None)
    assert told["bytes"] > 0


def test_the_store_is_bounded(path, monkeypatch):
    monkeypatch.setattr(store_process, "ROWS", 200)
    for i in range(1000):
        store_process.remember(decided(i))
    store_process.flush()
    with Store(path) as store:
        assert 150 < store.counts()[0] <= 200
        assert store.decision(cpu_fingerprint(), numbered(999), BUDGETS)
    monkeypatch.setattr(store_process, "ROWS", 10**6)
    monkeypatch.setattr(store_process, "SIZE_BYTES", 300_000)
    for i in range(1000, 3000):
        store_process.remember(decided(i))
    store_process.flush()
    assert path.stat().st_size < 500_000


def test_an_environment_that_was_removed_is_entered_again(path):
    store_process.remember(decided(1))
    store_process.flush()
    with Store(path) as store:
        store.prune(environment=1)
    store_process.remember(decided(2))
    store_process.flush()
    assert stored(path) == [decided(2)]


# ---- what may go wrong ------------------------------------------------------------------------------------------


class Saying:
    """Collects this package's warnings."""

    def __enter__(self):
        self._caught = warnings.catch_warnings(record=True)
        self._list = self._caught.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._caught.__exit__(*error)

    @property
    def said(self):
        return [str(one.message) for one in self._list if issubclass(one.category, convselect.ConvselectWarning)]


def use(count=200):
    """Look-ups and decisions as a program makes them; the answers."""
    found = [store_process.look_up(numbered(i), BUDGETS) for i in range(5)]
    for i in range(count):
        store_process.remember(decided(1000 + i))
        assert store_process.look_up(numbered(1000 + i), BUDGETS) == decided(1000 + i)
    store_process.flush()
    assert store_process.look_up(numbered(999 + count), BUDGETS) == decided(999 + count)
    assert store_process.look_up(numbered(1000), BUDGETS) in (None, decided(1000))
    return found


def kept_aside(path):
    return sorted(
        one for one in path.parent.iterdir() if ".damaged-" in one.name and not one.name.endswith(("-wal", "-shm"))
    )


def foreign(path):
    with sqlite3.connect(path) as db:
        db.execute("create table theirs (x)")
    db.close()


def newer(path):
    filled(path)
    store_process._process.close()
    db = sqlite3.connect(path)
    db.execute(f"pragma user_version = {SCHEMA_VERSION + 1}")
    db.close()


def noise(path):
    path.write_bytes(random.Random(1).randbytes(20_000))


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


def test_a_newer_file_is_left_where_it_is(path):
    newer(path)
    before = path.read_bytes()
    again(path)
    with Saying() as warned:
        assert use() == [None] * 5
    assert len(warned.said) == 1
    assert f"version {SCHEMA_VERSION + 1}" in warned.said[0]
    assert path.read_bytes() == before
    assert kept_aside(path) == []
    with pytest.raises(NewerStoreError):
        Store(path)


def test_flipped_bits_never_change_an_answer(path):
    """Whatever is flipped, a look-up finds what was written, or nothing."""
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
    """A connection that fails as those on bad mounts do."""

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


def in_a_process(code, **environment):
    """Run code in a fresh process; what it printed. Warnings of ours are counted in `said`."""
    head = """
        import os, sys, warnings
        import convselect
        from convselect.store import process as store_process
        from test_process import Saying, decided, numbered, use, BUDGETS
    """
    env = {k: v for k, v in os.environ.items() if k not in ("CONVSELECT_CACHE", "CONVSELECT_STORE", "XDG_CACHE_HOME")}
    env |= {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    env = {k: v for k, v in {**env, **environment}.items() if v is not None}
    result = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_a_disk_that_is_full(path):
    """By a limit on the size of files, which needs no mount: writing fails in the middle of a transaction."""
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
        # The disk leaves no room even for opening the log again: what is there is read as it stands elsewhere.
        for one in disk.iterdir():
            (tmp_path / one.name).write_bytes(one.read_bytes())
    finally:
        subprocess.run(["umount", disk], check=True)
    with Store(tmp_path / "s.sqlite") as store:
        assert store.problems(thorough=True) == []
        assert store.counts()[0] % store_process.QUEUE == 0


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_folder_or_file_that_may_only_be_read(what, path):
    """As a user whom permissions hold back: root may write everywhere."""
    filled(path)
    store_process._process.close()
    before = path.read_bytes()
    os.chmod(path, 0o444)
    os.chmod(path.parent, 0o555 if what == "folder" else 0o777)
    for parent in (*path.parents,)[1:]:
        if not parent.stat().st_mode & 0o001:
            os.chmod(parent, parent.stat().st_mode | 0o011)
    out = in_a_process(
        """
        import convselect.store.store, convselect.kernels, convselect.machine.environment
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


def test_the_end_of_a_process_writes_what_waits(path):
    in_a_process("store_process.remember(decided(1))", CONVSELECT_STORE=str(path))
    assert stored(path) == [decided(1)]


def test_nothing_is_left_open_or_beside_the_file(path):
    in_a_process("use()", CONVSELECT_STORE=str(path))
    assert [one.name for one in path.parent.iterdir()] == [path.name]


# ---- threads and forks ------------------------------------------------------------------------------------------


def test_threads_and_forks_share_one_store(path):
    """Eight threads look up and decide while the process forks; children do the same; nothing is lost, none hangs."""
    out = in_a_process(
        """
        import threading
        wrong, stop = [], threading.Event()

        def work(first, count):
            for i in range(first, first + count):
                store_process.remember(decided(i))
                if store_process.look_up(numbered(i), BUDGETS) != decided(i):
                    wrong.append(i)
                back = first + (i - first) // 2
                if store_process.look_up(numbered(back), BUDGETS) != decided(back):
                    wrong.append(back)

        with Saying() as warned:
            threads = [threading.Thread(target=work, args=(1000 * n, 400)) for n in range(8)]
            for thread in threads:
                thread.start()
            children = []
            for n in range(8):
                child = os.fork()
                if child == 0:
                    work(10_000 + 1000 * n, 100)
                    store_process.flush()
                    os._exit(bool(wrong) or bool(warned.said))
                children.append(child)
            statuses = [os.waitpid(child, 0)[1] for child in children]
            for thread in threads:
                thread.join()
            store_process.flush()
        print(wrong, statuses, warned.said, store_process.status()["rows"])
        """,
        CONVSELECT_STORE=str(path),
    )
    assert out.strip() == f"[] {[0] * 8} [] {8 * 400 + 8 * 100}"
    found = {one.problem.C - 1 for one in stored(path)}
    assert found == {1000 * n + i for n in range(8) for i in range(400)} | {
        10_000 + 1000 * n + i for n in range(8) for i in range(100)
    }


def test_a_fork_in_the_middle_of_a_look_up_leaves_the_child_without_a_store(path, monkeypatch):
    """As a signal handler might do it. The parent's connection is neither used nor closed there."""
    filled(path)
    again(path)
    children = []
    whole = Choices.decision

    def forking(self, *arguments):
        if not children:
            children.append(os.fork())
        return whole(self, *arguments)

    monkeypatch.setattr(Choices, "decision", forking)
    parent = os.getpid()
    found = store_process.look_up(numbered(0), BUDGETS)
    if os.getpid() != parent:
        ok = store_process.look_up(numbered(1), BUDGETS) is None and "forked" in store_process.status()["why_off"]
        os._exit(0 if ok else 1)
    assert os.waitpid(children[0], 0)[1] == 0
    assert found == decided(0)
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)


def test_a_handler_that_comes_in_the_middle_of_a_write_finds_memory_only(path, monkeypatch):
    filled(path)
    again(path)
    whole, found = Choices.decide, []

    def interrupted(self, *arguments, **options):
        with self.writing():  # a second transaction would fail
            found.append(store_process.look_up(numbered(60), BUDGETS))
            found.append(store_process.look_up(numbered(0), BUDGETS))
            store_process.remember(decided(61))
            store_process.flush()
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Choices, "decide", interrupted)
    store_process.remember(decided(60))
    store_process.flush()
    assert found == [decided(60), None]
    monkeypatch.undo()
    store_process.flush()
    assert stored(path)[3:] == [decided(60), decided(61)]


def test_a_thread_that_waits_for_the_store_does_not_stop_others_for_long(path, monkeypatch):
    filled(path)
    again(path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")
    slow = threading.Thread(target=lambda: [store_process.remember(decided(50)), store_process.flush()])
    started = timing.Deadline(None)
    slow.start()
    assert store_process.look_up(numbered(0), BUDGETS) == decided(0)
    assert started.elapsed_s < 3 * store_process.BUSY_S
    slow.join()
    holder.execute("rollback")
    holder.close()


def test_two_processes_that_find_one_damaged_file_keep_it_once(path):
    noise(path)
    code = "with Saying() as warned:\n    use(5)\nprint(len(warned.said))"
    env = {
        **os.environ,
        "CONVSELECT_STORE": str(path),
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    head = "import convselect\nfrom convselect.store import process\nfrom test_process import Saying, use\n"
    processes = [
        subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, env=env, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert all(one.strip() in ("0", "1") for one in said)
    assert "1\n" in said
    assert len(kept_aside(path)) == 1
    assert len(stored(path)) == 5
