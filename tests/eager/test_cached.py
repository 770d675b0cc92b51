"""Cached calls outside Python against the same calls in Python, call by call."""

from __future__ import annotations

import gc
import random
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from _parity import in_python
from fresh import run
from kinds import CASES, CONV1D, CONV2D, KINDS
from pairs import pairs

import convselect
from convselect.base import lru
from convselect.eager import cached, checks, execute
from convselect.eager.dispatch import conv2d, dispatcher
from convselect.eager.plan import make_plan, plans

pytestmark = pytest.mark.skipif(not cached.is_live(), reason="the compiled part of the eager path is not built")

every_kind = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.dimensions < 3], ids=str)
CALLS = 6
"""Enough for a call to be described, and to be run from its description after that."""


@pytest.fixture(autouse=True)
def _empty_caches():
    lru.clear()
    yield
    lru.clear()


def caches():
    """The compiled function of each kind."""
    from convselect.eager import kinds

    return {
        "conv2d": conv2d,
        "conv1d": kinds.conv1d,
        "conv_transpose1d": kinds.conv_transpose1d,
        "conv_transpose2d": kinds.conv_transpose2d,
    }


def fitting(kind, operands, arguments):
    """Names of algorithms that compute this call in C."""
    found = []
    for name in ("direct", "winograd2", "winograd4", "depthwise", "grouped", "fft_tiled"):
        try:
            kind.ours(*operands, policy=name, **arguments)
        except convselect.NotApplicable:
            continue
        found.append(name)
    return found


def step(kind, operands, arguments, policy, wanted, grad_y=None):
    """(y, the gradients that are wanted), y's strides among them."""
    leaves = [
        t.detach().clone().requires_grad_(on) if t is not None else None for t, on in zip(operands, wanted, strict=True)
    ]
    leaves = [
        None if leaf is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t).requires_grad_(on)
        for leaf, t, on in zip(leaves, operands, wanted, strict=True)
    ]
    y = kind.ours(*leaves, policy=policy, **arguments)
    found = [y.detach()]
    if any(on and t is not None for t, on in zip(operands, wanted, strict=True)):
        y.backward(torch.ones_like(y).cumsum(-1) if grad_y is None else grad_y.expand_as(y))
        found += [None if t is None else t.grad for t in leaves]
    return found


def assert_equal(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride()
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


NOTHING, EVERYTHING = (False,) * 3, (True,) * 3
CASES_OF_CALLS = pairs(
    (torch.float32, torch.bfloat16), ("contiguous", "moved"),
    (NOTHING, EVERYTHING, (False, True, True), (True, False, False), (False, False, True)),
)  # fmt: skip
"""(dtype, layout, wanted gradients)."""


@pytest.mark.parametrize(("kind", "case"), CASES, ids=str)
def test_the_same_bits_and_strides(kind, case):
    """Of every algorithm in C and of native, for operands in several layouts and every set of wanted gradients."""
    rng = random.Random(case)
    for dtype in (torch.float32, torch.bfloat16):
        operands, arguments = kind.operands(case, dtype)
        operands = list(operands)
        if rng.random() < 0.3:
            operands[2] = None
        for name in ("native", *fitting(kind, operands, arguments)):
            for layout, wanted in (row[1:] for row in CASES_OF_CALLS if row[0] == dtype):
                x = operands[0]
                if layout == "moved":
                    channel = x.dim() - kind.dimensions - 1
                    x = x.movedim(channel, -1).contiguous().movedim(-1, channel)
                given = (x, operands[1], operands[2])
                with in_python():
                    expected = step(kind, given, arguments, name, wanted)
                for _ in range(CALLS):
                    assert_equal(step(kind, given, arguments, name, wanted), expected)
            one = torch.ones((), dtype=dtype)  # as the gradient of a sum: one value, expanded
            with in_python():
                expected = step(kind, operands, arguments, name, (True,) * 3, one)
            for _ in range(CALLS):
                assert_equal(step(kind, operands, arguments, name, (True,) * 3, one), expected)


@every_kind
def test_calls_do_run_outside_python(kind, monkeypatch):
    """All of a training step but the first calls: nothing of Python's `execute` runs any more."""
    (x, weight, bias), arguments = kind.operands("plain")
    for _ in range(CALLS):
        step(kind, (x, weight, bias), arguments, "direct", (True, True, True))
    count = 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return execute.execute(*args, **kwargs)

    from convselect.eager import kinds, plan

    monkeypatch.setattr(plan, "execute", counted)
    monkeypatch.setattr(kinds, "execute", counted)
    for _ in range(CALLS):
        step(kind, (x, weight, bias), arguments, "direct", (True, True, True))
    assert count == 0
    assert caches()[kind.name].count() >= 1


@every_kind
def test_errors_are_pytorchs(kind):
    """Of calls whose kind is known by now: a changed saved tensor, a graph used twice; and of calls that fit none."""
    (x, weight, bias), arguments = kind.operands("plain")

    def messages(function, **more):
        found = []
        for _ in range(CALLS):
            leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
            y = function(leaf * 1, w, bias, **arguments, **more)
            y.sum().backward()
            with pytest.raises(RuntimeError) as twice:
                y.sum().backward()
            changed = leaf * 1
            y = function(changed, w, bias, **arguments, **more)
            changed.add_(1)
            with pytest.raises(RuntimeError) as modified:
                y.sum().backward()
            with pytest.raises(RuntimeError) as channels:
                function(x[:, :-1], weight, bias, **arguments, **more)
            found.append(
                (str(twice.value)[:60], "modified by an inplace operation" in str(modified.value), str(channels.value))
            )
        return found

    assert messages(kind.ours, policy="direct") == messages(kind.native)


@every_kind
def test_higher_derivatives_hooks_and_saved_tensors(kind):
    (x, weight, bias), arguments = kind.operands("plain", torch.float32)
    for policy in ("native", "direct"):
        for _ in range(CALLS):
            step(kind, (x, weight, bias), arguments, policy, (True, True, True))
        for function, more in ((kind.native, {}), (kind.ours, {"policy": policy})):
            leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
            seen, packed = [], []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, p=packed: p.append(t.shape) or t, lambda t: t):
                y = function(leaf, w, bias, **arguments, **more)
            y.register_hook(lambda g, s=seen: s.append(g.shape))
            (first,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
            first.square().sum().backward()
            result = (leaf.grad, w.grad, seen, sorted(packed))
            if function is kind.native:
                expected = result
        torch.testing.assert_close(result[:2], expected[:2], rtol=2e-3, atol=2e-2)
        assert result[2] == expected[2]
        assert set(result[3]) >= {tuple(x.shape), tuple(weight.shape)}


def test_modes_transforms_and_autocast_are_not_passed_by():
    """Calls whose key is known, under everything that has to see or change them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    (x, weight, bias), arguments = CONV2D.operands("plain")

    def call():
        return convselect.conv2d(x, weight, bias, **arguments)

    with convselect.use("auto"):
        for _ in range(CALLS):
            expected = call()
        with Counting() as mode:
            call()
        assert torch.ops.aten.convolution.default in mode.seen
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert call().dtype == torch.bfloat16
        per_image = torch.func.vmap(lambda one: convselect.conv2d(one[None], weight, bias, **arguments)[0])(x)
        torch.testing.assert_close(per_image, expected, rtol=1e-4, atol=1e-4)
        _, tangent = torch.func.jvp(
            lambda t: convselect.conv2d(t, weight, None, **arguments), (x,), (torch.ones_like(x),)
        )
        torch.testing.assert_close(
            tangent, F.conv2d(torch.ones_like(x), weight, None, **arguments), rtol=1e-4, atol=1e-4
        )
        with torch.inference_mode():
            assert call().is_inference()
        assert not call().is_inference()
        traced = torch.jit.trace(lambda t: convselect.conv2d(t, weight, bias, **arguments), x)
        assert "aten::_convolution" in str(traced.inlined_graph)


def test_forward_mode_derivatives_of_a_known_call():
    from torch.autograd import forward_ad

    (x, weight, bias), arguments = CONV2D.operands("plain")
    for _ in range(CALLS):
        convselect.conv2d(x, weight, bias, policy="direct", **arguments)
    with forward_ad.dual_level():
        y = convselect.conv2d(forward_ad.make_dual(x, x), weight, bias, policy="direct", **arguments)
        tangent = forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(tangent, F.conv2d(x, weight, None, **arguments), rtol=1e-4, atol=1e-4)


def test_values_that_spoil_a_transform_are_natives(monkeypatch):
    """A NaN, an infinity, and a weight that counts."""
    x, weight = torch.randn(1, 16, 16, 16), torch.randn(16, 16, 3, 3)

    def call():
        return convselect.conv2d(x, weight, None, padding=1)

    from _parity import favouring

    with favouring("winograd4"):
        for _ in range(CALLS):
            call()
        for value in (float("nan"), float("inf")):
            x[0, 3, 5, 5] = value
            torch.testing.assert_close(
                call(), F.conv2d(x, weight, None, padding=1), rtol=1e-3, atol=1e-3, equal_nan=True
            )
        x[0, 3, 5, 5] = 0
        weight.fill_(1.0)
        x.copy_(torch.randint(-4, 5, x.shape))
        assert torch.equal(call(), F.conv2d(x, weight, None, padding=1))


def test_results_are_still_checked(monkeypatch):
    """A share of them, drawn as if all calls went through Python; and what was wrong never runs again."""
    from _parity import favouring

    with favouring("direct"):
        x, weight = torch.randn(1, 16, 8, 8), torch.randn(16, 16, 3, 3)
        for _ in range(CALLS):
            convselect.conv2d(x, weight, None, padding=1)
        checked = []
        original = checks.is_right
        monkeypatch.setattr(checks, "is_right", lambda *args, **kwargs: checked.append(1) or original(*args, **kwargs))
        monkeypatch.setattr(checks, "SHARE", 0.2)  # a check of 100 us after every 50 calls of 10
        calls = 4000
        for _ in range(calls):
            convselect.conv2d(x, weight, None, padding=1)
        assert calls / 1000 < len(checked) < calls / 2


def test_settings_threads_and_flags_make_other_kinds(monkeypatch):
    (x, weight, bias), arguments = CONV2D.operands("plain")
    for _ in range(CALLS):
        convselect.conv2d(x, weight, bias, policy="direct", **arguments)
    before = conv2d.count()
    with convselect.use("winograd2"):
        for _ in range(CALLS):
            y = convselect.conv2d(x, weight, bias, **arguments)
    with convselect.use("im2col_gemm"):
        for _ in range(CALLS):
            z = convselect.conv2d(x, weight, bias, **arguments)
    assert conv2d.count() > before
    assert not torch.equal(y, z)
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-4)


def test_from_eight_threads_at_once():
    """One layer, and no lock held while a kernel runs."""
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1, policy="direct")
    x = torch.randn(2, 8, 12, 12)
    expected = layer(x)
    wrong = []

    def work():
        torch.set_num_threads(1)
        for _ in range(200):
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            (grad,) = torch.autograd.grad(y.sum(), leaf)
            if not torch.allclose(y, expected, atol=1e-4) or grad.shape != x.shape:
                wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_references_do_not_add_up():
    """Of tensors and of plans, over many calls, also of calls that fail."""
    layer = convselect.SelectedConv2d(4, 4, 3, padding=1, policy="direct")
    x = torch.randn(1, 4, 8, 8)

    def many():
        for _ in range(2000):
            leaf = x.detach().requires_grad_()
            layer(leaf).sum().backward()
        for _ in range(50):
            with pytest.raises(RuntimeError):
                layer(x[:, :3])

    def alive():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects()), len(gc.get_objects())

    many()
    before = alive()
    many()
    after = alive()
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 200


def test_settings_stay_alive_while_a_key_has_their_address():
    (x, weight, bias), arguments = CONV2D.operands("plain")
    with convselect.use("auto", workspace_bytes=123_457) as settings:
        before = sys.getrefcount(settings)
        for calls in (1, CALLS):  # not described yet, and described
            for _ in range(calls):
                convselect.conv2d(x, weight, bias, **arguments)
            for held in list(lru._ALL):  # what Python itself holds of them, and nobody is told
                held.entries.clear()
            assert sys.getrefcount(settings) > before
        lru.forget_entries()
        assert sys.getrefcount(settings) == before


def test_cleared_with_the_plans():
    (x, weight, bias), arguments = CONV2D.operands("plain")
    for _ in range(CALLS):
        convselect.conv2d(x, weight, bias, policy="direct", **arguments)
    assert conv2d.count() > 0
    lru.forget_entries()
    assert conv2d.count() == 0
    assert len(plans) == 0


def test_no_more_kinds_than_the_capacity():
    cache = cached._loaded.Cache(dispatcher(torch.conv2d, make_plan), cached.describe, 16, 2, False)
    weight = torch.randn(4, 4, 3, 3)
    for size in range(3, 60):
        for _ in range(3):
            cache(torch.randn(1, 4, size, size), weight, None, ((1, 1), (1, 1), (1, 1), 1), None)
        assert cache.count() <= 16


@pytest.mark.parametrize(
    "geometry", [((True, 1), (1, 1), (1, 1), 1), ((1.0, 1), (1, 1), (1, 1), 1), ((1, 1), "some", (1, 1), 1)]
)
def test_what_is_no_int_is_not_taken_for_one(geometry):
    x, weight = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
    for _ in range(CALLS):
        conv2d(x, weight, None, ((1, 1), (1, 1), (1, 1), 1))

    def outcome(function, *arguments):
        try:
            return function(*arguments).shape
        except Exception as error:
            return type(error), str(error)

    assert outcome(conv2d, x, weight, None, geometry) == outcome(torch.conv2d, x, weight, None, *geometry)


def test_after_fork():
    code = """
import os, torch, convselect
from convselect.eager import cached
layer = convselect.SelectedConv2d(4, 4, 3, padding=1, policy="direct")
x = torch.randn(1, 4, 8, 8)
torch.set_num_threads(1)
for _ in range(8): y = layer(x)
child = os.fork()
if child == 0:
    for _ in range(8): z = layer(x)
    os._exit(0 if torch.equal(y, z) else 1)
print(os.waitpid(child, 0)[1], cached.is_live())
"""
    assert run(["-c", code]).stdout.split() == ["0", "True"]


def test_one_dimension_shares_nothing_with_two():
    """The same numbers in another number of dimensions are another kind."""
    (x, weight, bias), arguments = CONV1D.operands("plain")
    for _ in range(CALLS):
        y = convselect.conv1d(x, weight, bias, policy="direct", **arguments)
    z = convselect.conv2d(x[:, :, None], weight[:, :, None], bias, padding=(0, 1), policy="direct")
    torch.testing.assert_close(y[:, :, None], z)
