"""Memory in huge pages: blocks that never overlap and are given back, asked for by several threads and processes."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import threading

import pytest
import torch
from networks import conv_bn, randomised
from torch import nn

import convselect
from convselect.freeze import pages

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages to ask for")


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Chunks of this test only."""
    found: list = []
    monkeypatch.setattr(pages, "_chunks", found)
    yield found
    gc.collect()


def free_bytes(chunk):
    return sum(end - start for start, end in chunk.free)


def test_blocks_lie_apart_at_multiples_of_64_and_hold_what_they_were_given(chunks):
    rng, blocks = random.Random(0), {}
    for i in range(400):
        n = rng.choice((1, 4095, 4096, 5000, 70_000, 1 << 20))
        t = pages.empty(n)
        assert t.shape == (n,)
        assert t.dtype == torch.uint8
        assert t.data_ptr() % 64 == 0
        blocks[i] = t.fill_(i % 251)
        if rng.random() < 0.6:
            del blocks[rng.choice(list(blocks))]
        del t
    assert all((t == i % 251).all() for i, t in blocks.items())
    taken = sum(-(-t.numel() // 64) * 64 for t in blocks.values() if t.numel() >= 4096)
    assert sum(pages.CHUNK - free_bytes(chunk) for chunk in chunks) == taken
    for chunk in chunks:
        assert all(a_end < b_start for (_, a_end), (b_start, _) in zip(chunk.free, chunk.free[1:], strict=False))


def test_a_block_lives_as_long_as_any_view_of_it(chunks):
    t = pages.empty(1 << 20)
    view = t[4:].view(-1, 3)[2:].fill_(7)
    del t
    other = pages.empty(pages.CHUNK - (1 << 20)).fill_(9)
    assert len(chunks) == 1
    assert (view == 7).all()
    del view
    assert free_bytes(chunks[0]) == 1 << 20
    del other
    assert not chunks


def test_a_block_of_any_size(chunks):
    small, large = pages.empty(5000), pages.empty(3 * pages.CHUNK + 1).fill_(1)
    assert len(chunks) == 2
    assert large.sum(dtype=torch.int64) == large.numel()
    del large
    assert len(chunks) == 1
    assert small.numel() == 5000
    assert pages.empty(0).numel() == 0


def test_whole_pages_that_are_free_go_back_to_the_system():
    keep = pages.empty(4096).fill_(3)
    t = pages.empty(4 * pages.HUGE_PAGE).fill_(1)
    before = resident_bytes()
    del t
    assert before - resident_bytes() > 2.5 * pages.HUGE_PAGE
    assert (keep == 3).all()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_no_memory_of_this_kind(monkeypatch, chunks):
    def refused(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(pages.mmap, "mmap", refused)
    assert pages.empty(1 << 20).fill_(2).numel() == 1 << 20
    assert not chunks
    with pytest.raises(RuntimeError):
        pages.empty(1 << 60)  # as PyTorch says it


def test_moved_tensors_keep_values_and_strides():
    for t in (
        torch.randn(8, 16, 5, 7).to(memory_format=torch.channels_last), torch.randn(3, 4), torch.tensor(2.5),
        torch.randn(40, 80).bfloat16().t(), torch.empty(0, 3),
    ):  # fmt: skip
        copy = pages.moved(t)
        assert torch.equal(copy, t)
        assert (copy.stride(), copy.dtype) == (t.stride(), t.dtype)
        assert t.numel() == 0 or copy.data_ptr() != t.data_ptr()


def test_threads():
    wrong = []

    def work(seed):
        rng, mine = random.Random(seed), []
        for _ in range(150):
            mine.append(pages.empty(rng.randrange(4096, 200_000)).fill_(seed))
            if len(mine) > 6:
                wrong.extend(t for t in [mine.pop(rng.randrange(6))] if not (t == seed).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_is_not_stopped_by_a_lock_of_its_parents():
    before = pages.empty(8192).fill_(4)
    with pages._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            ok = (before == 4).all() and bool((pages.empty(8192).fill_(5) == 5).all()) and bool((before == 4).all())
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_a_frozen_model_has_its_weights_and_intermediates_there(forced, chunks):
    model = randomised(nn.Sequential(conv_bn(32, 32), conv_bn(32, 32), conv_bn(32, 32)))
    x = torch.randn(1, 32, 24, 24)
    convselect.freeze(model, x)
    y = model(x)
    weights, intermediates = 3 * 32 * 32 * 9 * 4, 2 * 32 * 24 * 24 * 4
    assert sum(pages.CHUNK - free_bytes(chunk) for chunk in chunks) >= weights + intermediates
    convselect.unfreeze(model)
    gc.collect()
    assert not chunks
    assert y.shape == (1, 32, 24, 24)
