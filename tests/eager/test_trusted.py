"""`trusted`: a self-test once per process, and what passed once per machine."""

from __future__ import annotations

import os
import threading
import timeit

import fresh
import pytest
import torch
from clocks import Like, raises

import convselect
from convselect.base import warnings as _warnings
from convselect.base.problem import Direction, conv_problem
from convselect.eager import trusted as module
from convselect.eager.trusted import trusted
from convselect.kernels.pool import ALL, BY_NAME
from convselect.store import lessons
from convselect.store import process as store_process

P = conv_problem(8, 64, 28, 28, 64, 3, 3, padding=1)


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """A store of its own, and nothing known yet."""
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(_warnings, "_given", set())
    convselect.set_store(tmp_path / "s.sqlite")
    yield tmp_path / "s.sqlite"
    convselect.set_store("off")
    store_process._process = None


def next_process(path):
    module._known.clear()
    _warnings._given.clear()
    convselect.set_store(path)


def test_every_algorithm_of_this_machine_is_trusted_where_it_applies():
    for algorithm in ALL:
        for direction in Direction:
            p = P.with_direction(direction)
            if algorithm.automatic and algorithm.why_not(p) is None and algorithm.same_as_native(p) is None:
                assert trusted(algorithm, p), (algorithm.name, direction)


def test_it_runs_once_and_what_passed_not_even_in_the_next_process(path):
    honest = Like("honest")
    for _ in range(3):
        assert trusted(honest, P)
        assert trusted(honest, P._replace(N=1, C=32))
    assert honest.calls == 2  # without and with a bias
    next_process(path)
    assert trusted(honest, P)
    assert honest.calls == 2
    for other in ({"direction": Direction.BACKWARD_DATA}, {"dtype": "bfloat16"}, {"layout": "channels_last"}):
        before = honest.calls
        assert trusted(honest, P._replace(**other))
        assert honest.calls > before, other
    before, honest.revision = honest.calls, 2
    assert trusted(honest, P)
    assert honest.calls > before


@pytest.mark.parametrize("change", [lambda y: y * 1.1, lambda y: y[:1], raises, lambda y: y * float("nan")])
def test_a_liar_is_warned_of_once_and_tried_again_by_the_next_process(change, path):
    liar = Like("liar", change)
    with pytest.warns(convselect.ConvselectWarning, match=r"liar failed its self-test \(.+\); it is not used") as said:
        for _ in range(3):
            assert not trusted(liar, P)
            assert not trusted(liar, P.with_direction(Direction.BACKWARD_DATA))
    assert len(said) == 1
    assert liar.calls == 2
    next_process(path)
    with pytest.warns(convselect.ConvselectWarning, match="liar"):
        assert not trusted(liar, P)
    assert liar.calls == 3
    liar.change = lambda y: y  # repaired without a new revision
    next_process(path)
    assert trusted(liar, P)


def test_without_a_store_every_process_tests(path):
    convselect.set_store("off")
    honest = Like("honest")
    assert trusted(honest, P)
    assert trusted(honest, P)
    assert honest.calls == 2
    next_process("off")
    assert trusted(honest, P)
    assert honest.calls == 4
    assert not path.exists()


def test_gpus_and_what_cannot_be_tested_are_not_trusted():
    honest = Like("honest")
    assert not trusted(honest, P._replace(device="cuda"))
    assert not trusted(Like("never", refusal="It does nothing."), P)
    broken = Like("broken")
    broken.why_not = raises
    assert not trusted(broken, P)
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not trusted(honest, P)
    assert honest.calls == 0
    assert module._known == {}
    assert trusted(honest, P)


def test_threads_agree():
    honest, found = Like("honest"), []
    threads = [threading.Thread(target=lambda: found.append(trusted(honest, P))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6


def test_once_known_it_is_a_look_up():
    assert trusted(BY_NAME["im2col_gemm"], P)
    algorithm = BY_NAME["im2col_gemm"]
    assert min(timeit.repeat(lambda: trusted(algorithm, P), number=1000, repeat=5)) < 5e-3  # 0.4 us measured


def test_processes_share_what_passed(path):
    code = """
        from convselect.base.problem import conv_problem
        from convselect.eager import trusted as module
        from convselect.kernels.pool import BY_NAME
        from convselect.measure import self_test
        whole, runs = self_test.self_test, []
        self_test.self_test = lambda *a: runs.append(1) or whole(*a)
        p = conv_problem(8, 64, 28, 28, 64, 3, 3, padding=1)
        print(module.trusted(BY_NAME["im2col_gemm"], p), len(runs))
    """.replace("\n        ", "\n")
    env = {**os.environ, "CONVSELECT_STORE": str(path)}
    assert [fresh.run(["-c", code], env=env, check=True).stdout.split() for _ in range(3)] == [
        ["True", "1"], ["True", "0"], ["True", "0"],
    ]  # fmt: skip
    assert len(lessons.self_tests()) == 1
