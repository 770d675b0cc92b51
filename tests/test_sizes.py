"""Sizes that a caller gives are bounded before anything is looped over or allocated: every call ends at once, as
PyTorch's does, with PyTorch's error."""

from __future__ import annotations

import itertools
import random
import signal
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from fake_model import use_fake

import convselect
from convselect.base.problem import MOST_BYTES, ConvProblem, Direction, conv_problem
from convselect.choice.budgets import refusal
from convselect.doctor import bench
from convselect.kernels._fft_plan import fast_length
from convselect.kernels._native_ops import unsound_in_16_bit
from convselect.kernels.pool import ALL

X, WEIGHT = torch.randn(1, 4, 8, 8), torch.randn(4, 4, 3, 3)
HUGE = (2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**70)
NONE = (0, -1, -(2**31), -(2**63), -(2**64))
SECONDS = 5.0
pytestmark = pytest.mark.filterwarnings("ignore::convselect.ConvselectWarning")


@contextmanager
def at_once():
    def late(*_):
        raise AssertionError(f"took {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(function, *args, **kwargs):
    """The result's shape, or the error: its type, and what it says about memory."""
    try:
        with at_once():
            return tuple(function(*args, **kwargs).shape)
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError, IndexError) as error:
        return type(error).__name__, "allocate memory" in str(error)


def calls(seed: int, count: int):
    """Arguments with one or two numbers that are far off."""
    rng = random.Random(seed)
    for _ in range(count):
        arguments: dict[str, object] = {}
        for name in rng.sample(("stride", "padding", "dilation", "groups"), rng.choice((1, 1, 2))):
            number = rng.choice(HUGE + NONE)
            pair = rng.choice((number, (number, 1), (1, number), (number, number)))
            arguments[name] = number if name == "groups" else pair
        yield arguments


@pytest.mark.parametrize("policy", ["auto", "verify", "measure", "native"])
def test_calls_end_as_pytorchs_do(monkeypatch, policy):
    use_fake(monkeypatch, "fft", "winograd6", "im2col_gemm", "direct", "native_channels_last")
    layer = convselect.SelectedConv2d(4, 4, 3, policy=policy)
    for arguments in calls(1, 150):
        want = outcome(F.conv2d, X, WEIGHT, **arguments)
        assert outcome(convselect.conv2d, X, WEIGHT, policy=policy, **arguments) == want, arguments
        for name, value in arguments.items():
            setattr(layer, name, value if name == "groups" or isinstance(value, tuple) else (value, value))
        as_pairs = {name: getattr(layer, name) for name in arguments}
        assert outcome(layer, X) == outcome(F.conv2d, X, WEIGHT, **as_pairs), arguments
        layer.stride, layer.padding, layer.dilation, layer.groups = (1, 1), (0, 0), (1, 1), 1


def test_named_algorithms_raise_what_pytorch_raises_or_that_they_do_not_apply():
    for algorithm, arguments in itertools.product(ALL, calls(2, 40)):
        want = outcome(F.conv2d, X, WEIGHT, **arguments)
        got = outcome(convselect.conv2d, X, WEIGHT, policy=algorithm.name, **arguments)
        applies_not = ("NotApplicable", False)
        assert got == want or (got == applies_not and want[0] not in ("ValueError", "TypeError")), (
            algorithm,
            arguments,
        )
        if want == ("RuntimeError", True):  # PyTorch found too little memory
            assert got in (want, applies_not, ("RuntimeError", False)), (algorithm, arguments)


def test_a_named_algorithm_leaves_to_pytorch_what_no_memory_holds():
    for padding in (2**31, 2**40, (2**40, 0)):
        want = outcome(F.conv2d, X, WEIGHT, padding=padding)
        assert want[0] == "RuntimeError"
        assert outcome(convselect.conv2d, X, WEIGHT, padding=padding, policy="fft") == want
    assert outcome(convselect.conv2d, X, WEIGHT, stride=2**40, policy="direct")[0] == "NotApplicable"


@pytest.mark.compile
@pytest.mark.parametrize("arguments", [{"padding": 2**40}, {"stride": 2**40}, {"dilation": 2**40}], ids=str)
def test_compiled(arguments):
    def of(function):
        torch.compiler.reset()
        return outcome(torch.compile(function, backend="aot_eager"), X)

    mine = of(lambda x: convselect.conv2d(x, WEIGHT, **arguments, policy="auto"))
    assert mine == of(lambda x: F.conv2d(x, WEIGHT, **arguments))


def test_views_of_one_number_have_any_size(monkeypatch):
    use_fake(monkeypatch, "fft", "winograd6", "im2col_gemm", "direct", "native_channels_last")
    one = torch.ones(1)
    cases = [
        (one.expand(2**20, 4, 2**20, 2**10), WEIGHT), (one.expand(1, 2**30, 2**10, 2**10), one.expand(1, 2**30, 3, 3)),
        (X, one.expand(2**40, 4, 3, 3)), (one.expand(1, 1, 2**40, 2**5), one.expand(1, 1, 2**35, 3)),
        (one.expand(2**61, 1, 1, 1), one.expand(1, 1, 1, 1)),
    ]  # fmt: skip
    for x, weight in cases:
        want = outcome(F.conv2d, x, weight)
        assert isinstance(want[0], str)  # none of them can be computed
        assert outcome(convselect.conv2d, x, weight, policy="auto") == want, (x.shape, weight.shape)
    half = conv_problem(1, 1, 2**33, 3, 1, 2**31, 3, stride=2, padding=1, dtype="bfloat16")
    with at_once():
        assert unsound_in_16_bit(half)


def problems(seed: int, count: int):
    """Problems with one or two sizes far off, as a file or a command may name them."""
    rng = random.Random(seed)
    base = conv_problem(1, 8, 28, 28, 8, 3, 3, padding=1)
    for _ in range(count):
        names = rng.sample(ConvProblem._fields[1:17], rng.choice((1, 1, 2)))
        p = base._replace(**{name: rng.choice(HUGE) for name in names}, direction=rng.choice(list(Direction)))
        p = p._replace(dtype=rng.choice(("float32", "bfloat16")))
        if p.groups > 1:
            p = p._replace(C=p.groups, K=p.groups)
        if p.P > 0 and p.Q > 0:
            yield p


def test_whatever_is_asked_of_a_problem_is_answered_at_once():
    for p in problems(3, 200):
        with at_once(), convselect.use(policy="auto") as used:
            (row,) = convselect.explain_problem(p)
        assert (row.algorithm, row.source) == ("native", "fallback") or not p.is_oversized
        for algorithm in ALL:
            with at_once():
                algorithm.error_grade(p)
                algorithm.same_as_native(p)
                refused = refusal(algorithm, p, used)
                assert refused or algorithm.name == "native" or not p.is_oversized
                if not p.is_oversized and algorithm.why_not(p) is None:
                    assert algorithm.workspace_bytes(p) >= 0
                    algorithm.space(p)


def test_commands_refuse_what_no_tensor_can_be():
    for p in problems(4, 100):
        with at_once():
            if p.is_oversized:
                with pytest.raises(ValueError, match=r"below 2\*\*31|span|no size may be larger|cannot be"):
                    bench.parse(str(p))
            else:
                assert bench.parse(str(p)) == p
    with pytest.raises(ValueError, match="digits"), at_once():
        bench.parse(f"1x64x56x{'9' * 5000} 64 3x3")
    with pytest.raises(ValueError, match="threads"), at_once():
        bench.parse("1x64x56x56 64 3x3 t9999999999")
    with pytest.raises(ValueError, match="GiB of operands"), at_once():
        bench.bench(bench.parse("1x1x2000000000x1000 1 1x1"))


def test_what_is_oversized():
    p = conv_problem(1, 8, 28, 28, 8, 3, 3, padding=1)
    assert p.is_possible
    assert not p.is_oversized
    assert not p._replace(N=2**30).is_oversized
    assert p._replace(stride_h=2**31).is_possible
    assert p._replace(stride_h=2**31).is_oversized
    wide = p._replace(pad_top=2**24, pad_left=2**24, stride_h=2**24, stride_w=2**24)
    assert wide.is_possible
    assert wide.is_oversized
    assert not p._replace(N=2**31 - 1, H=2**20).is_possible
    assert p._replace(C=1, groups=1, K=1, N=1, H=2**20, W=MOST_BYTES // 2**22).is_possible


def test_lengths_of_transforms():
    def slow(n: int, even: bool) -> int:
        while True:
            rest = n
            for prime in (2, 3, 5, 7):
                while rest % prime == 0:
                    rest //= prime
            if rest == 1 and not (even and n % 2):
                return n
            n += 1

    for n, even in itertools.product([*range(1, 600), 4999, 44101], (False, True)):
        assert fast_length(n, even) == slow(n, even)
    with at_once():
        assert fast_length(2**40 + 1, True) < 1.01 * 2**40
