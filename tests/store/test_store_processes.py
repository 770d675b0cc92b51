"""Many processes on one store, killed at random while they write: what was committed stays, nothing breaks, none hangs.

A worker notes in a file of its own, durably, which write has been committed. One that was killed first checks that all
it noted is there, and then continues after its last note. `CONVSELECT_TEST_OPERATIONS` sets the operations of each of
the eight workers (the full proof is 10,000).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from places import TESTS
from stores import HERE, MARK, numbered

from convselect.measure.rows import Row
from convselect.store import file as store_file
from convselect.store.store import Decision, Store

OPERATIONS = int(os.environ.get("CONVSELECT_TEST_OPERATIONS", 700))
WORKERS = 8
BATCH = 4


def problem_of(worker, slot, member=0):
    return numbered(10_000 * worker + 10 * slot + member)


def operate(store, here, worker, operation, last):
    """One read or write; returns the slot written, or None. `last`: slot -> operation of its last committed write."""
    choice = random.Random(1_000_003 * worker + operation)
    slot, kind = choice.randrange(200), choice.random()
    if kind < 0.4:  # several choices that belong together
        store.put_choices(here, [
            Decision(problem_of(worker, slot, i), "b", "fft", {"operation": operation}, "verify", 1.0, 1, operation)
            for i in range(BATCH)
        ])  # fmt: skip
        return slot
    if kind < 0.5:
        rows = [
            Row("n", problem_of(worker, slot), f"a{i}", 1, "ok", "wall", min_us=1.0 + operation) for i in range(BATCH)
        ]
        store.add(here, rows, pool="p", block=worker)
        return slot + 1000
    if kind < 0.9:  # its own: never older than the last note
        found = [store.decision(MARK, problem_of(worker, slot, i), "b") for i in range(BATCH)]
        seen = [None if one is None else one.samples for one in found]
        assert slot not in last or min(seen) >= last[slot], (slot, seen, last[slot])
        return None
    # Another worker's: whole batches, never half of one; reading verifies the checksum of every row.
    other = (worker + 1) % WORKERS
    store._db.execute("begin")
    seen = {
        None if one is None else one.samples
        for one in (store.decision(MARK, problem_of(other, slot, i), "b") for i in range(BATCH))
    }
    store._db.execute("commit")
    assert len(seen) == 1, seen
    return None


def noted(path):
    """(next operation, slot -> last operation written), from a worker's notes. An unfinished line does not count."""
    last, operation = {}, -1
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            operation, slot = json.loads(line)
            if slot is not None:
                last[slot] = operation
    return operation + 1, last


def work(store_path, notes, worker, operations):
    first, last = noted(notes)
    with Store(store_path) as store, notes.open("ab", buffering=0) as file:
        size = file.tell()
        whole = notes.read_bytes().rfind(b"\n") + 1
        if size != whole:  # killed in the middle of a note
            os.truncate(notes, whole)
        here = store.environment(HERE)
        for slot, operation in last.items():
            if slot < 1000:
                assert store.decision(MARK, problem_of(worker, slot), "b").samples >= operation
        for operation in range(first, operations):
            slot = operate(store, here, worker, operation, last)
            if slot is not None:
                last[slot] = operation
            if slot is not None or operation == operations - 1:
                file.write(json.dumps([operation, slot]).encode() + b"\n")
                os.fsync(file.fileno())


def proof(folder, operations, kill, shared_seconds, journal):
    """Run the workers, forked from this process, killing and restarting them; returns (kills, seconds, writes)."""
    store_file.on_network = lambda path: journal == "delete"
    path = folder / "s.sqlite"
    Store(path).close()
    notes = [folder / f"notes-{i}" for i in range(WORKERS)]
    running, kills, dice = {}, 0, random.Random(3)

    def start(worker):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(path, notes[worker], worker, operations)
                status = 0
            except BaseException:
                import traceback

                (folder / f"error-{worker}").write_text(traceback.format_exc())
            finally:
                os._exit(status)
        running[child] = worker

    started = time.monotonic()
    for worker in range(WORKERS):
        start(worker)
    while running:
        assert time.monotonic() - started < shared_seconds, "hangs"
        time.sleep(dice.uniform(0.01, 0.1))
        if kill and running:
            victim = dice.choice(list(running))
            os.kill(victim, signal.SIGKILL)
            kills += 1
        while running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                break
            worker = running.pop(child)
            if os.WIFSIGNALED(status):
                start(worker)
            else:
                error = folder / f"error-{worker}"
                assert os.WEXITSTATUS(status) == 0, error.read_text() if error.exists() else status
    seconds = time.monotonic() - started

    writes = 0
    with Store(path) as store:
        assert store.journal == journal
        assert store.problems(thorough=True) == []
        assert store.dangling() == []
        damaged = []
        list(store.decisions(damaged=damaged))
        assert damaged == []
        assert len(store.environments()) == 1
        times = {(row.problem, row.algorithm): row.min_us for row in store.rows()}
        for worker in range(WORKERS):
            reached, last = noted(notes[worker])
            assert reached == operations
            writes += len(notes[worker].read_bytes().split(b"\n")) - 1
            for slot, operation in last.items():
                for i in range(BATCH):
                    if slot < 1000:
                        found = store.decision(MARK, problem_of(worker, slot, i), "b")
                        assert found.samples == found.params["operation"] == operation
                    else:
                        assert times[problem_of(worker, slot - 1000), f"a{i}"] == 1 + operation
    return kills, seconds, writes


PROOF = """
    import sys
    from pathlib import Path
    from test_store_processes import proof
    print(*proof(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "kill", float(sys.argv[4]), sys.argv[5]))
"""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("how", "journal"), [("kill", "wal"), ("leave", "wal"), ("kill", "delete")])
def test_eight_processes_read_and_write_while_they_are_killed(how, journal, tmp_path):
    operations = OPERATIONS if journal == "wal" else OPERATIONS // 4
    seconds = 120 + OPERATIONS / 10
    arguments = [str(tmp_path), str(operations), how, str(seconds), journal]
    result = subprocess.run(  # forked from a process that runs nothing else
        [sys.executable, "-c", textwrap.dedent(PROOF), *arguments],
        capture_output=True, text=True, timeout=seconds + 60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    kills, took, writes = map(float, result.stdout.split())
    print(f"{kills:.0f} kills, {writes:.0f} committed writes in {took:.1f} s")
    assert writes >= WORKERS * operations * 0.4
    assert (kills >= 5) == (how == "kill")


def test_eight_threads_read_and_write(tmp_path):
    """Each with a connection of its own."""
    path, errors = tmp_path / "s.sqlite", []

    def run(worker):
        try:
            work(path, tmp_path / f"notes-{worker}", worker, OPERATIONS // 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    with Store(path) as store:
        assert store.problems(thorough=True) == []
        for worker in range(WORKERS):
            for slot, operation in noted(tmp_path / f"notes-{worker}")[1].items():
                if slot < 1000:
                    assert store.decision(MARK, problem_of(worker, slot), "b").samples == operation


def test_threads_make_one_new_store_together(tmp_path):
    """A process that finds the tables that another made a moment ago also finds their version."""
    errors = []

    def make(path, together):
        together.wait()
        try:
            Store(path).close()
        except Exception as error:
            errors.append(error)

    for i in range(30):
        together = threading.Barrier(WORKERS)
        threads = [threading.Thread(target=make, args=(tmp_path / f"{i}.sqlite", together)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
