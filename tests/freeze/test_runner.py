"""Many calls of the C library as one: their order and arguments, failures, slots, signals, threads, memory."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import time
import weakref

import pytest
import torch
from networks import CONV, Residual, conv_bn, distance, eager, needs_library, randomised
from torch import nn

import convselect
from convselect.freeze import program
from convselect.freeze.bound import Bound
from convselect.freeze.kernel import FixedCall
from convselect.freeze.runner import Runner, Slot, joined, word_of
from convselect.kernels import _library

pytestmark = needs_library

OK, NONFINITE = _library.OK, _library.NONFINITE
INT64, POINTER = ctypes.c_int64, ctypes.c_void_p


def function(run, *parameters, result=ctypes.c_int32):
    return ctypes.CFUNCTYPE(result, *parameters)(run)


def never(i, status):
    raise AssertionError(f"step {i} returned {status}")


def recorder(n, calls, status=OK):
    """A function of n integers that notes them."""
    return function(lambda *values: calls.append(values) or status, *(INT64,) * n)


def c_function(name, *parameters, result=ctypes.c_int32):
    found = ctypes.CDLL(None)[name]
    found.argtypes, found.restype = parameters, result
    return found


# ---- order and arguments ----------------------------------------------------------------------------------------


def test_every_number_of_arguments_in_order():
    calls = []
    bounds = [Bound(recorder(n, calls), tuple(range(10 * n, 11 * n)), None) for n in (3, 8, 0, 1, 7, 2, 6, 5, 4)]
    for _ in range(2):
        calls.clear()
        Runner(bounds, never).run()
        assert calls == [bound.arguments for bound in bounds]


def test_arguments_of_every_kind():
    calls = []
    structure = _library.Epilogue(None, None, 3, 0)
    numbers = (ctypes.c_int32 * 2)(4, 5)
    given = [
        (-1, -1), (2**63 + 1, -(2**63) + 1), (None, 0), (ctypes.c_int32(-7), -7), (ctypes.c_void_p(None), 0),
        (ctypes.c_void_p(12), 12), (ctypes.byref(structure), ctypes.addressof(structure)),
        (numbers, ctypes.addressof(numbers)),
    ]  # fmt: skip
    Runner([Bound(recorder(8, calls), tuple(what for what, _ in given), (structure, numbers))], never).run()
    assert calls == [tuple(value for _, value in given)]


def test_parameters_of_32_bits():
    calls = []
    narrow = function(lambda *values: calls.append(values) or OK, ctypes.c_int32, POINTER, *(ctypes.c_int32,) * 6)
    Runner([Bound(narrow, (-5, 2**40, -6, 1, 2, 3, -(2**31), 2**31 - 1), None)], never).run()
    assert calls == [(-5, 2**40, -6, 1, 2, 3, -(2**31), 2**31 - 1)]


def test_what_cannot_be_an_argument():
    calls = []
    one, nine = recorder(1, calls), recorder(9, calls)
    real = function(lambda value: OK, ctypes.c_double)
    long = function(lambda value: 0, INT64, result=INT64)
    for wrong, bound in (
        (ValueError, Bound(nine, tuple(range(9)), None)),
        (ValueError, Bound(one, (2**64,), None)),
        (TypeError, Bound(one, (1.0,), None)),
        (TypeError, Bound(one, (ctypes.c_double(1.0),), None)),
        (TypeError, Bound(one, (torch.zeros(1),), None)),
        (TypeError, Bound(one, (_library.Epilogue(),), None)),
        (TypeError, Bound(real, (1,), None)),
        (TypeError, Bound(long, (1,), None)),
    ):
        with pytest.raises(wrong):
            Runner([bound], never)
    assert not calls


def test_a_function_without_a_result_cannot_fail():
    """What is left in the register of the result is the address of memory: it would be read as a status."""
    memory = ctypes.create_string_buffer(4)
    fill = c_function("memset", POINTER, ctypes.c_int32, ctypes.c_size_t, result=None)
    Runner([Bound(fill, (memory, ord("a") + i, 4 - i), memory) for i in range(3)], never).run()
    assert memory.raw == b"ccba"
    call = FixedCall(Bound(fill, (memory, ord("z"), 4), memory), torch.zeros(1), lambda status: never(0, status))
    assert call() is call.out
    assert memory.raw == b"zzzz"


# ---- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [{0}, {1}, {3}, {0, 1, 2, 3}, {1, 3}, set()])
def test_a_failed_step_is_computed_otherwise_and_the_rest_goes_on(failing):
    done = []
    bounds = [
        Bound(function(lambda i: done.append(i) or (NONFINITE if i in failing else OK), INT64), (i,), None)
        for i in range(4)
    ]
    runner = Runner(bounds, lambda i, status: done.append((i, status)))
    for _ in range(2):
        done.clear()
        runner.run()
        assert done == [what for i in range(4) for what in ([i, (i, NONFINITE)] if i in failing else [i])]


def test_an_error_ends_the_run_and_not_the_runner():
    done, failing = [], {1}
    bounds = [Bound(function(lambda i: done.append(i) or i in failing, INT64), (i,), None) for i in range(3)]

    def otherwise(i, status):
        raise MemoryError(f"{i} {status}")

    runner = Runner(bounds, otherwise)
    with pytest.raises(MemoryError, match="1 1"):
        runner.run()
    assert done == [0, 1]
    failing.clear()
    runner.run()
    assert done == [0, 1, 0, 1, 2]


# ---- slots ------------------------------------------------------------------------------------------------------


def test_slots_are_set_anew_at_every_call():
    calls, fields = [], []
    structure = _library.Epilogue(11, 12, 0, 0)
    look = function(lambda _: fields.append((structure.bias, structure.residual)) or OK, POINTER)
    bounds = [
        Bound(recorder(3, calls), (1, Slot(1), Slot(0, 64)), None),
        Bound(look, (ctypes.byref(structure),), structure),
        Bound(recorder(1, calls), (Slot(1, -8),), None),
    ]
    runner = Runner(bounds, never, [(word_of(structure, "residual"), Slot(0))])
    for a, b in ((1000, 2000), (3000, 4000)):
        runner.run((a, b))
        assert calls[-2:] == [(1, b, a + 64), (b - 8,)]
        assert fields[-1] == (11, a)


# ---- signals, threads, memory -----------------------------------------------------------------------------------


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Bound(c_function("raise", ctypes.c_int32), (int(signal.SIGINT),), None)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("pause_us", [1, 70_000])
def test_an_interrupt_is_seen_after_the_run_or_after_50_ms(pause_us, interruptible):
    memory = ctypes.create_string_buffer(1)
    fill = c_function("memset", POINTER, ctypes.c_int32, ctypes.c_size_t, result=None)
    pause = c_function("usleep", ctypes.c_uint32)
    bounds = [interruptible, Bound(pause, (pause_us,), None), Bound(fill, (memory, 1, 1), memory)]
    with pytest.raises(KeyboardInterrupt):
        Runner(bounds, never).run()
    assert pause_us == 1 or memory.raw == b"\0"


def test_a_run_of_any_length_is_finished():
    calls = []
    pause = Bound(c_function("usleep", ctypes.c_uint32), (30_000,), None)
    bounds = [bound for i in range(4) for bound in (pause, Bound(recorder(1, calls), (i,), None))]
    Runner(bounds, never).run()
    assert calls == [(0,), (1,), (2,), (3,)]


def test_other_threads_run_meanwhile():
    started = threading.Event()
    pause = Bound(c_function("usleep", ctypes.c_uint32), (40_000,), None)
    runner = Runner([pause] * 3, never)
    thread = threading.Thread(target=lambda: started.set() or runner.run())
    thread.start()
    started.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0.002)
        turns += 1
    assert turns >= 3


class Owner:
    pass


def test_owners_live_as_long_as_the_runner():
    owner, calls = Owner(), []
    alive = weakref.ref(owner)
    runner = Runner([Bound(recorder(0, calls), (), owner)] * 2, never)
    del owner
    gc.collect()
    runner.run()
    assert alive() is not None
    del runner
    assert alive() is None


# ---- programs ---------------------------------------------------------------------------------------------------


def test_neighbours_are_joined_and_the_others_are_not():
    done = []

    def call(i):
        bound = Bound(function(lambda i: done.append(i) or (NONFINITE if i == 5 else OK), INT64), (i,), None)
        return FixedCall(bound, torch.tensor(i), lambda status: done.append((i, status)))

    functions = [call(0), print, call(2), call(3), print, call(5), call(6), call(7)]
    together = joined(functions)
    assert {i: out.item() for i, (out, _) in together.items()} == {i: i for i in (2, 3, 5, 6, 7)}
    assert [i for i, (_, run) in together.items() if run is not None] == [2, 5]
    together[2][1]()
    together[5][1]()
    assert done == [2, 3, 5, (5, NONFINITE), 6, 7]


def network():
    layers = [conv_bn(3, 8, activation=nn.ReLU()), Residual("shortcut"), Residual("iadd")]
    return randomised(nn.Sequential(*layers, conv_bn(8, 8, 1, activation=nn.SiLU()), nn.Conv2d(8, 4, 1)))


@pytest.mark.parametrize("forced", ["nchw kernels", "nhwc kernels"], indirect=True)
def test_a_program_computes_the_same_bits(forced, monkeypatch):
    x, results, series = torch.randn(2, 3, 23, 19), [], []

    for join in (joined, lambda functions: {}):
        monkeypatch.setattr(
            program, "joined", lambda functions, join=join: series.append(join(functions)) or series[-1]
        )
        model = convselect.freeze(network(), x)
        results += [model(x), model(x), model(x[:1]), model(x)]
    assert max(map(len, series)) >= 4
    assert all(torch.equal(a, b) for a, b in zip(results[:4], results[4:], strict=True))
    assert distance(results[0], eager(network(), x)) < CONV


@pytest.mark.parametrize("forced", ["nchw kernels", "nhwc kernels"], indirect=True)
def test_kernels_that_fail_within_a_program(forced, monkeypatch):
    """Every second C call of the joined ones fails, as without memory."""
    failed = []

    def broken(functions):
        calls = [f for f in functions if isinstance(f, FixedCall)][1::2]
        out = function(lambda *_: failed.append(1) or _library.NO_MEMORY)
        return joined([f._replace(bound=Bound(out, (), None)) if f in calls else f for f in functions])

    monkeypatch.setattr(program, "joined", broken)
    model, x = network(), torch.randn(2, 3, 23, 19)
    want = eager(model, x)
    convselect.freeze(model, x)
    failed.clear()
    assert distance(model(x), want) < CONV
    assert len(failed) >= 2


@pytest.mark.parametrize("forced", ["nhwc kernels"], indirect=True)
def test_a_frozen_model_gives_its_memory_back(forced, monkeypatch):
    outs = []

    def watched(functions):
        found = joined(functions)
        outs.extend(weakref.ref(out) for out, _ in found.values())
        return found

    monkeypatch.setattr(program, "joined", watched)
    model, x = network(), torch.randn(1, 3, 23, 19)
    convselect.freeze(model, x)
    model(x)
    assert any(out() is not None for out in outs)
    convselect.unfreeze(model)
    gc.collect()
    assert all(out() is None for out in outs)
