"""Self-tests and corrections in the store: kept across processes, by the promises that hold for choices."""

from __future__ import annotations

import json
import math
import sqlite3

import pytest
from process_store import BUDGETS, Saying, again, decided, filled, in_a_process, kept_aside, numbered, stored
from stores import HERE, MARK

import convselect
from convselect.machine.environment import cpu_fingerprint
from convselect.store import exchange, learnt, lessons
from convselect.store import process as store_process
from convselect.store.store import DamagedStoreError, Store

pytestmark = pytest.mark.usefixtures("fresh_process")
KEY = ("winograd6", 3, "forward", "float32", "contiguous")
OTHER = ("fft", 1, "backward_data", "bfloat16", "channels_last")


def teach(n=1.0):
    lessons.remember_self_test(KEY)
    lessons.remember_correction("m1", "winograd6 forward", "C=64 K=64 R=3 S=3", n, -0.25)
    lessons.remember_correction("m1", "fft forward", "C=64 K=64 R=3 S=3", 2, 0.5)
    lessons.remember_correction("m2", "fft forward", "C=64 K=64 R=3 S=3", 3, 0.125)


def corrections(model="m1"):
    return {one[:2]: one[2:] for one in lessons.corrections(model)}


M1 = {
    ("winograd6 forward", "C=64 K=64 R=3 S=3"): (1.0, -0.25),
    ("fft forward", "C=64 K=64 R=3 S=3"): (2.0, 0.5),
}  # fmt: skip


def tables(path):
    db = sqlite3.connect(path)
    found = {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
    db.close()
    return found


def counts(path):
    with Store(path) as store:
        return store.learnt_counts()


def test_they_are_there_at_once_and_in_the_next_process(path):
    assert lessons.self_tests() == set()
    assert lessons.corrections("m1") == []
    assert not path.exists()
    teach()
    assert lessons.self_tests() == {KEY}
    assert corrections() == M1
    assert not path.exists()
    again(path)
    assert lessons.self_tests() == {KEY}
    assert corrections() == M1
    assert corrections("m2") == {("fft forward", "C=64 K=64 R=3 S=3"): (3.0, 0.125)}
    assert corrections("m3") == {}
    lessons.remember_correction("m1", "fft forward", "C=64 K=64 R=3 S=3", 5, 0.75)
    assert corrections()["fft forward", "C=64 K=64 R=3 S=3"] == (5.0, 0.75)
    again(path)
    assert corrections()["fft forward", "C=64 K=64 R=3 S=3"] == (5.0, 0.75)
    assert counts(path) == (1, 3)


def test_a_failure_is_stored_but_not_passed_on(path):
    lessons.remember_self_test(KEY)
    lessons.remember_self_test(KEY, passed=False)
    lessons.remember_self_test(OTHER, passed=False)
    assert lessons.self_tests() == set()
    again(path)
    assert lessons.self_tests() == set()
    assert counts(path) == (2, 0)
    lessons.remember_self_test(KEY)
    again(path)
    assert lessons.self_tests() == {KEY}


def test_another_version_or_machine_has_its_own(path, monkeypatch):
    teach()
    again(path)
    monkeypatch.setattr(lessons, "__version__", "0.0.0")
    assert lessons.self_tests() == set()
    assert corrections() == M1
    monkeypatch.undo()
    monkeypatch.setattr(lessons.environment, "fingerprint_of", lambda _: "another")
    again(path)
    assert lessons.self_tests() == set()
    assert corrections() == {}


def test_they_are_written_together_with_choices(path, monkeypatch):
    for i in range(store_process.QUEUE - 2):
        lessons.remember_correction("m", f"a{i}", "layer", 1, 0.1)
    store_process.remember(decided(1))
    assert not path.exists()
    lessons.remember_self_test(KEY)
    assert path.exists()
    assert stored(path) == [decided(1)]
    assert counts(path) == (1, store_process.QUEUE - 2)
    assert len(store_process._process.lessons) == 0
    for n in range(1000):  # the last value is what counts
        lessons.remember_correction("m", "a0", "layer", n, 0.1)
    assert len(store_process._process.lessons) == 1


def test_at_exit_they_are_written_and_another_process_reads_them(path):
    code = """
        from convselect.store import lessons
        lessons.remember_self_test(("winograd6", 3, "forward", "float32", "contiguous"))
        lessons.remember_correction("m1", "fft forward", "C=1", 2, 0.5)
    """
    in_a_process(code, CONVSELECT_STORE=str(path))
    out = in_a_process(
        "from convselect.store import lessons; print(lessons.self_tests(), lessons.corrections('m1'))",
        CONVSELECT_STORE=str(path),
    )
    assert out.strip() == f"{ {KEY} } {[('fft forward', 'C=1', 2.0, 0.5)]}"


@pytest.mark.parametrize("off", ["off", "/proc/none/s.sqlite"])
def test_without_a_file_they_are_this_processs(off):
    convselect.set_store(off)
    with Saying() as warned:
        teach()
        assert lessons.self_tests() == {KEY}
        assert corrections() == M1
        store_process.flush()
        assert lessons.self_tests() == {KEY}
        assert corrections() == M1
    assert len(warned.said) == (off != "off")


def test_what_is_kept_in_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(lessons, "REMEMBERED", 10)
    convselect.set_store("off")
    for i in range(50):
        lessons.remember_correction("m", f"a{i}", "layer", 1, 0.1)
    assert sorted(corrections("m")) == [(f"a{i}", "layer") for i in range(40, 50)]


def test_what_is_not_finite_is_left_out(path):
    for n, mean in ((1, math.nan), (math.inf, 0.0), (1, -math.inf)):
        lessons.remember_correction("m", "a", "layer", n, mean)
    again(path)
    assert lessons.corrections("m") == []


# ---- files ------------------------------------------------------------------------------------------------------


def test_an_older_file_gets_the_tables_with_the_first_row(path):
    filled(path)
    assert not tables(path) & {"self_test", "correction"}
    assert (lessons.self_tests(), corrections(), counts(path)) == (set(), {}, (0, 0))
    with Store(path) as store:
        assert exchange.verify(store) == {}
    teach()
    again(path)
    assert tables(path) >= {"self_test", "correction"}
    assert lessons.self_tests() == {KEY}
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    lessons.remember_correction("m9", "a", "C=1", 1, 0.1)
    store_process.flush()
    db = sqlite3.connect(path)  # an older version removes the environment
    db.execute("pragma foreign_keys = on")
    db.execute("delete from choice")
    db.execute("delete from environment")
    db.commit()
    db.close()
    assert counts(path) == (0, 0)
    teach()  # this process knows the environment's number of before
    again(path)
    assert corrections() == M1


@pytest.mark.parametrize("with_tables", [False, True])
def test_the_system_store_is_read_and_never_written(with_tables, path, tmp_path, monkeypatch):
    system = tmp_path / "system.sqlite"
    convselect.set_store(system)
    store_process.remember(decided(1))
    if with_tables:
        teach()
        lessons.remember_correction("m1", "only here", "C=1", 1, 0.1)
    store_process.flush()
    monkeypatch.setenv("CONVSELECT_SYSTEM_STORE", str(system))
    again(path)
    before = system.read_bytes()
    teach(n=9)
    again(path)
    assert lessons.self_tests() == {KEY}
    expected = {**M1, ("winograd6 forward", "C=64 K=64 R=3 S=3"): (9.0, -0.25)}
    assert corrections() == expected | ({("only here", "C=1"): (1.0, 0.1)} if with_tables else {})
    assert system.read_bytes() == before


def test_a_read_only_file(path):
    filled(path)
    with Store(path, read_only=True) as store:
        assert (store.self_tests(cpu_fingerprint(), lessons.__version__), store.learnt_counts()) == (set(), (0, 0))
        assert store.corrections(cpu_fingerprint(), "m1") == {}
    teach()
    store_process.flush()
    with Store(path, read_only=True) as store:
        assert store.self_tests(cpu_fingerprint(), lessons.__version__) == {KEY}
        assert store.learnt_counts() == (1, 3)


@pytest.mark.parametrize(
    "change",
    [
        "update self_test set algorithm = 'winograd4'", "update correction set mean = 0.5 where n = 1.0",
        "update correction set layer = 'C=65'",
    ],
)  # fmt: skip
def test_a_row_that_is_not_what_was_written_is_damage(change, path):
    teach()
    store_process.flush()
    store_process._process.close()
    db = sqlite3.connect(path)
    db.execute(change)
    db.commit()
    db.close()
    with Store(path) as store:
        assert len(exchange.verify(store)["rows"]) >= 1
        with pytest.raises(DamagedStoreError):
            exchange.merge(store, store)
    with Saying() as warned:
        again(path)
        found = lessons.self_tests(), corrections()
        assert (set(), {}) in (found, (found[0], {}), (set(), found[1]))
        teach()
        again(path)
        assert corrections() == M1
    assert len(warned.said) == 1
    assert len(kept_aside(path)) == 1


def test_a_locked_file_keeps_nobody_waiting_and_loses_nothing(path, monkeypatch):
    teach()
    store_process.flush()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("begin immediate")
    lessons.remember_self_test(OTHER)
    store_process.flush()
    assert lessons.self_tests() == {KEY, OTHER}
    assert corrections() == M1
    holder.execute("rollback")
    holder.close()
    again(path)
    assert lessons.self_tests() == {KEY, OTHER}


def test_many_processes_write_at_once(path):
    code = """
        from convselect.store import lessons
        def work(n):
            for i in range(1, 101):
                lessons.remember_correction("m", f"worker {n}", f"C={i}", i, n + i / 100)
                lessons.remember_self_test((f"a{n}", i, "forward", "float32", "contiguous"))
            store_process.flush()
            os._exit(0)
        with Saying() as warned:
            children = []
            for n in range(6):
                child = os.fork()
                if child == 0:
                    work(n)
                children.append(child)
            statuses = [os.waitpid(child, 0)[1] for child in children]
        print(statuses, warned.said, len(lessons.self_tests()), len(lessons.corrections("m")))
    """
    assert in_a_process(code, CONVSELECT_STORE=str(path)).strip() == f"{[0] * 6} [] 600 600"


def test_a_child_leaves_what_waits_to_its_parent(path):
    code = """
        from convselect.store import lessons
        lessons.remember_correction("m", "a", "C=1", 1, 0.5)
        if os.fork() == 0:
            print(lessons.corrections("m"), len(store_process._process.lessons), flush=True)
            os._exit(0)
        os.wait()
    """
    assert in_a_process(code, CONVSELECT_STORE=str(path)).strip() == "[('a', 'C=1', 1.0, 0.5)] 0"
    assert counts(path) == (0, 1)


def test_the_tables_are_bounded_and_the_oldest_go_first(path, monkeypatch):
    monkeypatch.setitem(learnt.MOST, "correction", 100)
    monkeypatch.setitem(learnt.MOST, "self_test", 10)
    times = iter(f"2030-01-01T00:00:{i:02d}+00:00" for i in range(60))
    monkeypatch.setattr(learnt, "now", lambda: next(times))
    with Store(path) as store:
        here = store.environment(HERE)
        for batch in range(12):
            rows = {("m", f"a{batch}", f"C={i}"): (1.0, 0.1) for i in range(10)}
            store.put_learnt(here, "1", {(f"a{batch}", 1, "f", "d", "l"): True}, rows)
        assert store.learnt_counts() == (10, 100)
        assert {key[1] for key in store.corrections(MARK, "m")} == {f"a{i}" for i in range(2, 12)}
        assert {key[0] for key in store.self_tests(MARK, "1")} == {f"a{i}" for i in range(2, 12)}


# ---- commands ---------------------------------------------------------------------------------------------------


def test_they_are_merged_pruned_and_counted(tmp_path):
    with Store(tmp_path / "a.sqlite") as one, Store(tmp_path / "b.sqlite") as two:
        here, there = one.environment({**HERE, "device": "x"}), two.environment(HERE)
        one.environment(HERE)
        two.put_learnt(there, "1", {KEY: True, OTHER: False}, {("m", "a", "C=1"): (1.0, 0.5)})
        assert exchange.merge(one, two) == exchange.Taken(self_tests=2, corrections=1)
        assert exchange.merge(one, two) == exchange.Taken()
        assert one.self_tests(MARK, "1") == {KEY}
        assert one.corrections(MARK, "m") == {("m", "a", "C=1"): (1.0, 0.5)}
        assert (one.learnt_counts(here), one.learnt_counts()) == ((0, 0), (2, 1))
        two._db.execute("update correction set made = '2001'")
        one.put_learnt(2, "1", {}, {("m", "a", "C=1"): (7.0, 0.5)})
        assert exchange.merge(one, two).corrections == 0
        assert exchange.merge(one, two, replace=True).corrections == 1
        assert one.corrections(MARK, "m") == {("m", "a", "C=1"): (1.0, 0.5)}  # its time is 2001, too
        assert one.prune(rows=100) == 0
        assert one.prune(unused_since="2002") == 1
        assert one.prune(rows=0) == 2
        assert two.prune(environment=there) == 3
        assert two.learnt_counts() == (0, 0)
        assert two.dangling() == []


def test_status_and_list_count_them(path):
    from typer.testing import CliRunner

    from convselect.cli.store import app

    teach()
    store_process.flush()
    told = store_process.status()
    assert (told["rows"], told["self_tests"], told["corrections"]) == (0, 1, 3)
    (one,) = json.loads(CliRunner().invoke(app, ["list", str(path), "--json"]).output)["environments"]
    assert (one["self_tests"], one["corrections"]) == (1, 3)
    assert "self tests" in CliRunner().invoke(app, ["list", str(path)]).output
