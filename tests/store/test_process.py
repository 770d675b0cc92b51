"""The store as a process sees it: quick and bounded. `test_process_failing.py` has what may go wrong."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
import timeit
from pathlib import Path

import pytest
import torch
from process_store import BUDGETS, again, decided, filled, in_a_process, numbered, stored

import convselect
from convselect.base import timing
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment as machine_environment
from convselect.machine.environment import choice_environment, cpu_fingerprint
from convselect.store import process as store_process
from convselect.store.choices import Choices
from convselect.store.store import Store

pytestmark = pytest.mark.usefixtures("fresh_process")


def test_a_choice_is_there_at_once_and_in_the_next_process(path):
    assert store_process.look_up(numbered(1), BUDGETS) is None
    assert not path.exists()  # a look-up makes no file
    store_process.remember(decided(1))
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    assert not path.exists()
    again(path)
    assert store_process.look_up(numbered(1), BUDGETS) == decided(1)
    assert store_process.look_up(numbered(1), "exact 8B") is None
    assert store_process.look_up(numbered(1)._replace(threads=7), BUDGETS) is None


@pytest.mark.parametrize("exists", [False, True])
def test_a_look_up_imports_only_what_it_needs(exists, path):
    """Without a file nothing of a store, not even sqlite3; with one, nothing of measurements."""
    if exists:
        filled(path)
        store_process._process.close()
    code = """
        import sys
        from convselect.base.problem import conv_problem
        from convselect.store import process
        found = process.look_up(conv_problem(1, 1, 9, 9, 8, 3, 3), "native 8B")
        names = ("sqlite3", "choices", "file", "store")
        print(found is not None, *(n for n in names if n in sys.modules or f"convselect.store.{n}" in sys.modules))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True,
        env={**os.environ, "CONVSELECT_STORE": str(path), "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip
    assert out.split() == (["True", "sqlite3", "choices", "file"] if exists else ["False"])


def test_choices_are_written_together(path, monkeypatch):
    calls = []
    whole = Choices.put_choices
    monkeypatch.setattr(Choices, "put_choices", lambda self, *a, **k: calls.append(len(a[1])) or whole(self, *a, **k))
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
            monkeypatch.setattr(machine_environment, "cpu_model", lambda: "another")
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
    fingerprints = {choice_environment("cuda")[0]}
    assert choice_environment("cuda")[1]["family"] == "cuda-sm90"
    for name, value in (("name", "another"), ("capability", (8, 0)), ("cudnn", 90200), ("driver", 13000)):
        card[name] = value
        monkeypatch.setattr(machine_environment, "_known", {})
        fingerprints.add(choice_environment("cuda")[0])
    assert len(fingerprints) == 5


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


def test_a_look_up_is_quick(path):
    """Measured at 20 us, budgeted at 60; three times that because the machine may be shared."""
    for i in range(500):
        store_process.remember(decided(i))
    store_process.flush()
    problems = [numbered(i) for i in range(500)]
    assert all(store_process.look_up(problem, BUDGETS) for problem in problems)
    times = timeit.repeat(lambda: [store_process.look_up(p, BUDGETS) for p in problems], number=1, repeat=7)
    assert min(times) / len(problems) < 180e-6


def test_an_environment_that_was_removed_is_entered_again(path):
    store_process.remember(decided(1))
    store_process.flush()
    with Store(path) as store:
        store.prune(environment=1)
    store_process.remember(decided(2))
    store_process.flush()
    assert stored(path) == [decided(2)]


def test_the_end_of_a_process_writes_what_waits(path):
    in_a_process("store_process.remember(decided(1))", CONVSELECT_STORE=str(path))
    assert stored(path) == [decided(1)]


def test_nothing_is_left_open_or_beside_the_file(path):
    in_a_process("use()", CONVSELECT_STORE=str(path))
    assert [one.name for one in path.parent.iterdir()] == [path.name]


# ---- threads and signals ----------------------------------------------------------------------------------------


def test_a_handler_that_comes_in_the_middle_of_a_write_finds_memory_only(path, monkeypatch):
    filled(path)
    again(path)
    whole, found = Choices.put_choices, []

    def interrupted(self, *arguments, **options):
        with self.writing():  # a second transaction would fail
            found.append(store_process.look_up(numbered(60), BUDGETS))
            found.append(store_process.look_up(numbered(0), BUDGETS))
            store_process.remember(decided(61))
            store_process.flush()
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Choices, "put_choices", interrupted)
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
