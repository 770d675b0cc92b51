"""The store: rows come back as they went in, whole problems or nothing, with several writers, on any file."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from places import TESTS
from stores import HERE, P1, P2, rows_of
from typer.testing import CliRunner

from convselect.cli import store as cli_store
from convselect.machine.environment import fingerprint, user_cache
from convselect.measure.rows import Row
from convselect.model.dataset import read_measurements
from convselect.store.store import SCHEMA_VERSION, Store, StoreError, export, is_store, pool_fingerprint


def test_rows_come_back_as_they_went_in(tmp_path):
    wrong = Row("net", P1, "wrong one", 3, "wrong")
    with Store(tmp_path / "s.sqlite") as store:
        here = store.environment(HERE)
        store.add(here, [*rows_of(P1, "a", "native"), wrong], pool="p")
        store.add(here, rows_of(P2, "native"), pool="p", block=1)
        store.add(here, rows_of(P1, "native", repeat=1), pool="p", block=2)
    with Store(tmp_path / "s.sqlite") as store:
        found = store.rows()
        assert found[:2] == rows_of(P1, "a", "native")
        assert found[2][:6] == wrong[:6]
        assert math.isnan(found[2].min_us)
        assert found[3:] == [*rows_of(P1, "native", repeat=1), *rows_of(P2, "native")]
        assert store.measured(here, "p") == {P1, P2}
        assert store.measured(here, "p", repeat=1) == {P1}
        assert store.measured(here, "another pool") == set()
        assert store.next_block(here) == 3


def test_a_second_measurement_under_the_same_number_replaces_the_first(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        here = store.environment(HERE)
        store.add(here, rows_of(P1, "native", us=10), pool="p")
        store.add(here, rows_of(P1, "native", us=20), pool="p")
        assert [row.min_us for row in store.rows()] == [20]


def test_environments_are_told_apart_by_what_makes_times_incomparable(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        here = store.environment({**HERE, "load_average": 0.1})
        assert store.environment({**HERE, "load_average": 7.5, "threads": 2}) == here
        there = store.environment({**HERE, "torch": "2.14.0"})
        assert there != here
        store.add(here, rows_of(P1, "native"), pool="p")
        store.add(there, rows_of(P2, "native"), pool="p")
        assert [row.problem for row in store.rows(environment=there)] == [P2]
        assert store.measured(here, "p") == {P1}
        assert store.environments()[there]["torch"] == "2.14.0"
    assert fingerprint(HERE) != fingerprint({**HERE, "device": "another"})


def test_drifting_blocks_can_be_left_out(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        here = store.environment(HERE)
        for block, (problem, after) in enumerate(((P1, 102.0), (P2, 80.0))):
            store.add(here, rows_of(problem, "native"), pool="p", block=block)
            store.add_sentinel(here, block, 100.0, after)
        assert store.drift(here) == {0: pytest.approx(1.02), 1: pytest.approx(1.25)}
        assert len(store.rows()) == 2
        assert [row.problem for row in store.rows(max_drift=1.05)] == [P1]


def test_export_is_read_back_as_the_store_is(tmp_path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        here = store.environment(HERE)
        for block, (problem, after) in enumerate(((P1, 102.0), (P2, 80.0))):
            store.add(here, rows_of(problem, "native"), pool="p", block=block)
            store.add_sentinel(here, block, 100.0, after)
        for name in ("a.csv", "a.csv.gz"):
            assert export(store, tmp_path / name) == 2
            assert read_measurements([tmp_path / name]) == read_measurements([path])
        assert export(store, tmp_path / "b.csv", max_drift=1.05) == 1
        assert [row.problem for row in read_measurements([tmp_path / "b.csv"])[0]] == [P1]
        assert json.loads((tmp_path / "b.csv.env.json").read_text())["blocks"] == {"all": 2, "drifting": 1}
        store.environment({**HERE, "family": "g"})
        with pytest.raises(ValueError, match="2 machines"):
            export(store, tmp_path / "c.csv")
    with Store(tmp_path / "empty.sqlite") as store, pytest.raises(ValueError, match="no measurements"):
        export(store, tmp_path / "c.csv")
    assert not (tmp_path / "c.csv").exists()


def test_the_command_line_shows_and_exports(tmp_path):
    path = tmp_path / "s.sqlite"
    with Store(path) as store:
        store.add(store.environment(HERE), rows_of(P1, "native"), pool="p")
    run = CliRunner().invoke(cli_store.app, ["show", str(path)])
    assert run.exit_code == 0
    assert run.output.split()[-5:] == ["1", "0", "1", "0", "0"]
    assert CliRunner().invoke(cli_store.app, ["export", str(path), str(tmp_path / "o.csv")]).exit_code == 0
    assert len(read_measurements([tmp_path / "o.csv"])[0]) == 1
    for command in (["show", "nowhere"], ["export", "nowhere", "o.csv"], ["show", __file__]):
        failed = CliRunner().invoke(cli_store.app, command)
        assert failed.exit_code == 2
        assert f"convselect store {command[0]}: " in failed.output
    assert not Path("nowhere").exists()


def test_an_error_leaves_nothing_of_a_problem(tmp_path):
    bad = [*rows_of(P1, "native"), Row("net", P1, "a", 1, None)]  # type: ignore[arg-type]  # no status
    with Store(tmp_path / "s.sqlite") as store:
        here = store.environment(HERE)
        with pytest.raises(sqlite3.IntegrityError):
            store.add(here, bad, pool="p")
        assert store.rows() == []
        store.add(here, rows_of(P1, "native"), pool="p")
        assert len(store.rows()) == 1


WRITER = """
    import sys
    from convselect.store.store import Store
    from stores import HERE, rows_of
    from convselect.base.problem import conv_problem

    path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Store(path) as store:
        here = store.environment(HERE)
        for i in range(first, first + count):
            problem = conv_problem(1, 1 + i, 9, 9, 8, 3, 3)
            store.add(here, rows_of(problem, *(f"a{n}" for n in range(20))), pool="p")
            print(i, flush=True)
"""


def writer(path, first, count):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(first), str(count)],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def test_processes_write_side_by_side(tmp_path):
    path = tmp_path / "s.sqlite"
    writers = [writer(path, 100 * i, 25) for i in range(3)]
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    with Store(path) as store:
        assert len(store.environments()) == 1
        assert len(store.rows()) == 3 * 25 * 20


def test_a_killed_writer_leaves_whole_problems(tmp_path):
    path = tmp_path / "s.sqlite"
    process = writer(path, 0, 10**6)
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with Store(path) as store:
        per_problem = {}
        for row in store.rows():
            per_problem[row.problem] = per_problem.get(row.problem, 0) + 1
        assert len(per_problem) >= 5
        assert set(per_problem.values()) == {20}
        store.add(store.environment(HERE), rows_of(P2, "native"), pool="p")


def test_what_is_no_store_is_refused(tmp_path):
    noise, other, empty, newer = (tmp_path / name for name in ("noise", "other", "empty", "newer"))
    noise.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(StoreError, match="not a readable store"):
        Store(noise)
    with sqlite3.connect(other) as db:
        db.execute("create table theirs (x)")
    with pytest.raises(StoreError, match="something else"):
        Store(other)
    empty.touch()
    Store(empty).close()  # SQLite's own idea of an empty database
    with Store(newer):
        pass
    with sqlite3.connect(newer) as db:
        db.execute(f"pragma user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match=f"version {SCHEMA_VERSION + 1}"):
        Store(newer)
    with pytest.raises(OSError, match="no directory"):
        Store(tmp_path / "missing" / "s.sqlite")
    assert is_store(newer)
    assert not is_store(noise)
    assert noise.read_bytes() == bytes(range(256)) * 20


def test_a_pool_is_named_by_algorithms_and_revisions():
    assert pool_fingerprint({"a": 1, "b": 2}) == pool_fingerprint({"b": 2, "a": 1})
    assert len({pool_fingerprint({"a": 1}), pool_fingerprint({"a": 2}), pool_fingerprint({"a": 1, "b": 1})}) == 3


def test_the_users_folder(monkeypatch):
    monkeypatch.delenv("CONVSELECT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(user_cache()) == "/x/convselect"
    monkeypatch.setenv("CONVSELECT_CACHE", "/y")
    assert str(user_cache()) == "/y"
