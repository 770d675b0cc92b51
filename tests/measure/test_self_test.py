"""The self-test: every algorithm of this machine passes, a lying one fails, and nobody else notices that it ran."""

from __future__ import annotations

import math

import pytest
import torch
from clocks import Like, raises
from torch.utils._python_dispatch import TorchDispatchMode

from convselect.base.problem import Direction, conv_problem
from convselect.base.volumes import volume_problem
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure import measure
from convselect.measure import self_test as tests
from convselect.measure.self_test import self_test

KINDS = (
    conv_problem(8, 64, 56, 56, 64, 3, 3, padding=1),
    conv_problem(8, 64, 56, 56, 128, 3, 3, stride=2, padding=1),
    conv_problem(8, 256, 56, 56, 64, 1, 1),
    conv_problem(8, 96, 56, 56, 96, 7, 7, padding=3, groups=96),
    conv_problem(8, 128, 28, 28, 128, 3, 3, padding=1, groups=8),
    conv_problem(4, 3, 224, 224, 64, 16, 16, stride=16),
    conv_problem(1, 256, 33, 33, 256, 3, 3, padding=6, dilation=6),
    conv_problem(2, 16, 64, 64, 16, 1, 7, padding=(0, 0, 3, 3)),
    conv_problem(1, 32, 64, 64, 32, 13, 13, padding=6),
)
VOLUMES = (
    volume_problem(2, 32, 32, 64, 64, 32, 3, 3, 3, padding=1),
    volume_problem(2, 32, 32, 64, 64, 64, 3, 3, 3, padding=1, stride=2),
    volume_problem(1, 64, 16, 32, 32, 64, 1, 3, 3, padding=(0, 1, 1)),
    volume_problem(1, 1, 64, 128, 128, 32, 3, 3, 3, padding=1),
    volume_problem(1, 32, 16, 32, 32, 32, 5, 5, 5, padding=2, groups=32),
    volume_problem(1, 1, 64, 64, 64, 96, 4, 4, 4, stride=4),
    volume_problem(1, 32, 16, 32, 32, 32, 3, 3, 3, padding=2, dilation=2),
)
P = KINDS[0]


def applying(p):
    return [
        one
        for one in ALL
        if one.name != "native"
        and "cpu" in one.devices
        and one.why_not(p) is None
        and one.same_as_native(p) is None
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_all_algorithms_of_this_machine_pass(dtype, layout):
    seen = set()
    for kind in KINDS:
        weight = "contiguous" if layout == "strided" else layout
        for direction in Direction:
            p = kind._replace(direction=direction, dtype=dtype, layout=layout, weight_layout=weight)
            for algorithm in applying(p):
                assert self_test(algorithm, p) == (True, None), (algorithm.name, p)
                seen.add(algorithm.name)
    assert len(seen) >= 5, seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_all_that_take_volumes_pass(dtype, layout):
    seen = set()
    for kind in VOLUMES:
        for direction in Direction:
            p = kind._replace(direction=direction, dtype=dtype, layout=layout)
            for algorithm in applying(p):
                small = tests.small_problem(algorithm, p)
                assert small.is_volume
                assert (small.T, small.stride_d, small.dil_d) == (p.T, p.stride_d, p.dil_d)
                assert small.O >= 2
                assert self_test(algorithm, p) == (True, None), (algorithm.name, p)
                seen.add(algorithm.name)
    assert {"im2col_gemm"} <= seen


def changed(y, by=0.5):
    y = y.clone()
    y.view(-1)[7] += by * y.abs().max()
    return y


LIES = {
    "one value": (changed, "float32", "relative error"),
    "one value in 16 bits": (lambda y: changed(y, by=0.2), "bfloat16", "a value that is off"),
    "NaN": (lambda y: changed(y, by=math.nan), "float32", "relative error nan"),
    "shape": (lambda y: y[:1], "float32", "shape"),
    "dtype": (lambda y: y.double(), "float32", "was expected"),
    "raises": (raises, "float32", "no luck"),
    "scaled": (lambda y: y * 1.001, "float32", "relative error"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("direction", list(Direction))
def test_a_lying_algorithm_fails(lie, direction):
    change, dtype, said = LIES[lie]
    passed, wrong = self_test(Like("liar", change), P._replace(direction=direction, dtype=dtype))
    assert passed is False
    assert said in wrong
    assert str(direction) in wrong
    assert self_test(Like("honest"), P._replace(direction=direction, dtype=dtype)) == (True, None)


def test_a_bias_that_is_left_out_and_changed_operands_are_found():
    class Forgetful(Like):
        def run_checked(self, a, b, problem, params=None, bias=None):
            return self.run(a, b, problem, params)

    class Greedy(Like):
        def run_checked(self, a, b, problem, params=None, bias=None):
            found = self.run(a, b, problem, params)
            a.zero_()
            return found

    class Nothing(Like):
        def run_checked(self, *_):
            return None

    assert "with a bias" in self_test(Forgetful("liar"), P)[1]
    assert "operands were changed" in self_test(Greedy("liar"), P)[1]
    assert "not finite" in self_test(Nothing("liar"), P)[1]
    assert self_test(Like("honest"), P) == (True, None)  # whose operands are the same ones, restored


def test_short_memory_says_nothing_about_an_algorithm():
    def short(y):
        raise MemoryError

    assert self_test(Like("short", short), P)[0] is None
    assert self_test(Like("unready", may_be_unready=True, ready=lambda *_: False), P)[0] is None


# ---- the problem ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda p: p.brief)
def test_it_is_small_and_of_the_same_kind(kind):
    for algorithm in applying(kind):
        small = tests.small_problem(algorithm, kind)
        same = ("R", "S", "stride", "padding", "dilation", "dtype", "layout", "threads", "is_depthwise", "is_pointwise")
        assert [getattr(small, name) for name in same] == [getattr(kind, name) for name in same]
        assert (small.groups > 1) == (kind.groups > 1)
        assert small.flops <= tests.MOST_FLOPS
        assert small.P >= 2
        assert small.Q >= 2
        if kind.groups == 1 and min(kind.C, kind.K) > 16 and kind.R < 13:
            assert (small.C, small.K) == (18, 19)


def test_what_the_algorithm_demands_decides():
    class Wide(Like):
        least = 64

        def why_not(self, problem):
            return None if self.least <= problem.C else "It needs more channels."

    assert tests.small_problem(Wide("wide"), P).C == 64
    assert tests.small_problem(Wide("wider", least=32), P._replace(C=16)).C == 32  # a probe
    assert tests.small_problem(Wide("widest", least=1000), P) is None
    assert self_test(Wide("widest", least=1000), P)[0] is None
    large = P._replace(C=1000)
    assert tests.small_problem(Wide("widest", least=1000), large) is None  # more than 2e7 operations
    pointwise = conv_problem(1, 1000, 3, 3, 9, 1, 1)
    assert tests.small_problem(Wide("widest", least=1000), pointwise).C == 1000


@pytest.mark.parametrize("direction", list(Direction))
def test_native_in_float64_is_the_reference(direction):
    """Kernels of more than nine taps are judged by native in float64."""
    for kind in KINDS:
        small = tests.small_problem(BY_NAME["reference"], kind._replace(direction=direction))
        a, b = (t.double() for t in measure.operands(small))
        p = small._replace(dtype="float64")
        torch.testing.assert_close(BY_NAME["native"].run(a, b, p), BY_NAME["reference"].run(a, b, p))


# ---- nobody notices ---------------------------------------------------------------------------------------------


class Watching(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Watching.seen += 1
        return function(*args, **(kwargs or {}))


def test_the_state_of_torch_stays_and_does_not_matter(monkeypatch):
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    winograd = BY_NAME["winograd2"]
    surroundings = [
        torch.inference_mode(), torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"),
    ]  # fmt: skip
    for surrounding in surroundings:
        tests._recent.cache_clear()
        with surrounding:
            assert self_test(winograd, P._replace(threads=2)) == (True, None), surrounding
    torch.set_default_dtype(torch.float64)
    try:
        tests._recent.cache_clear()
        assert self_test(winograd, P) == (True, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_it_does_not_run_while_operators_are_watched():
    with Watching():
        assert self_test(BY_NAME["im2col_gemm"], P)[0] is None
    assert Watching.seen == 0
    found = []
    torch.func.vmap(lambda x: found.append(self_test(BY_NAME["im2col_gemm"], P)) or x)(torch.zeros(2))
    assert found[0][0] is None
    torch.jit.trace(lambda x: found.append(self_test(BY_NAME["im2col_gemm"], P)) or x + 1, torch.zeros(2))
    assert found[1][0] is None
