"""Helpers for tests of a process's view of its store: choices, stores filled with them, fresh processes."""

from __future__ import annotations

import os
import random
import sys
import textwrap
import warnings

import fresh
from places import TESTS
from stores import numbered

import convselect
from convselect.kernels.pool import BY_NAME
from convselect.store import file
from convselect.store import process as store_process
from convselect.store.store import Decision, Store

BUDGETS = "native 8B"


def decided(i, algorithm="im2col_gemm", **changes):
    revision = BY_NAME[algorithm].revision if algorithm in BY_NAME else 1
    return Decision(numbered(i), BUDGETS, algorithm, None, "verify", 1.5, revision, 9)._replace(**changes)


def again(path):
    """Begin as a new process would."""
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
    """Look up and remember as a program does; returns what the first look-ups found."""
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


def noise(path):
    path.write_bytes(random.Random(1).randbytes(20_000))


def in_a_process(code, **environment):
    """Run code in a fresh process; returns what it printed."""
    head = """
        import os, sys, warnings
        import convselect
        from convselect.store import process as store_process
        from process_store import BUDGETS, Saying, decided, numbered, use
    """
    env = {k: v for k, v in os.environ.items() if k not in ("CONVSELECT_CACHE", "CONVSELECT_STORE", "XDG_CACHE_HOME")}
    env |= {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    env = {k: v for k, v in {**env, **environment}.items() if v is not None}
    result = fresh.run(["-W", "error::ResourceWarning", "-c", textwrap.dedent(head) + textwrap.dedent(code)], env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout
