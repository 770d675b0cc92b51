from __future__ import annotations

import os
import threading

from convselect.base.lru import LRU, Entry


def test_the_least_recently_used_go():
    lru = LRU(8)
    for key in range(8):
        lru.put(key, Entry())
    lru.entries[0].age = lru.clock + 1  # as a hit does
    lru.put(8, Entry())
    assert 0 in lru.entries
    assert 1 not in lru.entries
    assert 8 in lru.entries
    assert len(lru) == 8


def test_capacity_zero_keeps_nothing():
    lru = LRU(0)
    lru.put("a", Entry())
    assert len(lru) == 0


def test_many_threads():
    lru = LRU(64)
    errors = []

    def work(seed):
        try:
            for i in range(3000):
                key = (seed * i) % 257
                entry = lru.entries.get(key)
                if entry is None:
                    lru.put(key, Entry())
                else:
                    entry.age = lru.clock
        except Exception as error:  # pragma: no cover
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(lru) <= 64


def test_a_lock_held_at_fork_does_not_hang_the_child():
    lru = LRU(4)
    with lru._lock:
        pid = os.fork()
        if pid == 0:  # the child: nobody here will ever release the parent's lock
            lru.put("child", Entry())
            os._exit(0 if len(lru) == 1 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
