"""Forks: no store is used by two processes, nothing is lost, none hangs."""

from __future__ import annotations

import os

import pytest
from process_store import BUDGETS, again, decided, filled, in_a_process, numbered, stored

from convselect.store import process as store_process
from convselect.store.choices import Choices

pytestmark = pytest.mark.usefixtures("fresh_process")


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
