"""An algorithm's self-test: a small convolution of the kind at hand, compared with float64, in a millisecond or two.

It has the kernel, stride, padding, dilation, kind of groups, layouts, element type and threads of the problem at hand,
up to two images of about 15 x 18 pixels, and 17 to 19 channels, so that vectors have tails. It is passed if every value
is near float64's, with and without a bias in the forward direction, and the operands are what they were.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from convselect.base.problem import CONTIGUOUS, STRIDED, ConvProblem, Direction, conv_problem
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME
from convselect.measure import measure

MOST_FLOPS, MOST_BYTES = 2e7, 4 * 2**20
"""No larger problem is taken for a test."""
SLICES, ROWS, COLUMNS, IN_CHANNELS, OUT_CHANNELS = 4, 15, 18, 18, 19
"""Sizes of a small problem, where the one at hand is not smaller."""
MOST_TAPS = 9
"""The reference takes kernels up to this size, in a millisecond; larger ones, for each tap of which it takes as long as
native does for all, native in float64. A test compares the two."""

PROBES = (
    conv_problem(2, 16, 14, 14, 16, 3, 3, padding=1),
    conv_problem(2, 16, 14, 14, 32, 1, 1),
    conv_problem(1, 16, 14, 14, 16, 3, 3, padding=1, groups=16),
    conv_problem(1, 32, 14, 14, 32, 3, 3, padding=1, groups=8),
    conv_problem(1, 16, 14, 14, 16, 3, 3, padding=1, layout="channels_last", weight_layout="channels_last"),
    conv_problem(1, 4, 24, 24, 4, 11, 11, padding=5),
    conv_problem(1, 8, 14, 14, 8, 3, 3, stride=2, padding=1, dtype="bfloat16"),
    conv_problem(1, 16, 14, 14, 16, 5, 5, padding=2),
    conv_problem(1, 16, 14, 14, 16, 7, 7, padding=3),
    conv_problem(1, 16, 14, 14, 16, 1, 7, padding=(0, 0, 3, 3)),
    conv_problem(1, 16, 14, 14, 16, 2, 2, stride=2, direction=Direction.BACKWARD_WEIGHT),
)
"""Small convolutions; every algorithm that has an implementation for a machine does one of them."""


class Case(NamedTuple):
    """Operands of `Algorithm.run`, the result in float64, and a bias (K,) for the forward direction."""

    a: Tensor
    b: Tensor
    exact: Tensor
    bias: Tensor | None


def self_test(algorithm: Algorithm, problem: ConvProblem) -> tuple[bool | None, str | None]:
    """(True, None): it passed. (False, what is wrong): it failed. (None, why): there was no test, since it has no small
    problem of this kind, is not ready, or has not enough memory; or because the operators run here would be seen: under
    a dispatch mode, a tracer or a functorch transform.

    The random numbers of torch, autograd and the number of threads are left as they are. For CPUs.
    """
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None  # type: ignore[no-untyped-call]
    ):
        return None, "operators are being watched"
    small = small_problem(algorithm, problem)
    if small is None:
        return None, f"{algorithm.name} has no small problem of the kind of {problem}"
    if algorithm.may_be_unready and not algorithm.ready(small):
        return None, f"{algorithm.name} is not ready"
    try:
        with _undisturbed(small.threads):
            _, wrong = tried(algorithm, small, _recent(small))
    except Exception as error:  # of operands, or of the reference
        return None, f"{type(error).__name__}: {error}"
    if wrong is not None and any(sign in wrong for sign in ("MemoryError", "can't allocate memory")):
        return None, wrong
    return wrong is None, None if wrong is None else f"{small.direction} of {small.brief}: {wrong}"


@contextlib.contextmanager
def _undisturbed(threads: int) -> Iterator[None]:
    with contextlib.ExitStack() as entered:
        entered.enter_context(torch._C.DisableTorchFunction())  # modes, and a default device that is not the CPU
        entered.enter_context(torch.inference_mode(mode=False))
        entered.enter_context(torch.no_grad())
        entered.enter_context(torch.autocast("cpu", enabled=False))
        if threads != torch.get_num_threads():
            entered.enter_context(measure.threads(threads))
        yield


# ---- which problem ----------------------------------------------------------------------------------------------


def small_problem(algorithm: Algorithm, problem: ConvProblem) -> ConvProblem | None:
    """The problem on which an algorithm is tested before it does the one at hand: a small one, one with all its
    channels, a probe, or the problem itself; the first that the algorithm does otherwise than native, with at most
    2e7 operations. None if there is none."""
    for one in _candidates(problem):
        if one.flops > MOST_FLOPS or one.bytes > MOST_BYTES:
            continue
        if algorithm.why_not(one) is None and algorithm.same_as_native(one) is None:
            return one
    return None


def _candidates(p: ConvProblem) -> Iterator[ConvProblem]:
    few = next((one for part in (1, 2, 4, 8) if (one := _small(p, part)).flops <= MOST_FLOPS), p)
    yield few
    yield few._replace(N=1, C=p.C, K=p.K, groups=p.groups)
    kind = {name: getattr(p, name) for name in ("direction", "dtype", "layout", "weight_layout", "threads")}
    flags = {name: getattr(p, name) for name in ("deterministic", "tf32", "frozen")}
    for probe in () if p.is_volume else PROBES:
        yield probe._replace(**kind, **flags)
    yield p


@functools.lru_cache(maxsize=64)
def _small(p: ConvProblem, part: int) -> ConvProblem:
    """At most two images of 15 x 18 pixels, or what the kernel needs for three outputs; one image if the kernel is
    large; of volumes at most four slices, or what three outputs need. Groups keep their channels, up to 18 and 19
    divided by `part`, and there are as many as fill 17 channels."""
    per_in, per_out = p.C // p.groups, p.K // p.groups
    groups = 1 if p.groups == 1 else min(p.groups, max(2, -(-17 // min(per_in, per_out))))
    height, width = p.kernel_extent
    return p._replace(
        N=min(p.N, 2 if p.T * p.R * p.S <= MOST_TAPS else 1),
        D=min(p.D, max(SLICES, p.depth_extent - p.pad_front - p.pad_back + 2 * p.stride_d)),
        C=groups * min(per_in, max(1, IN_CHANNELS // part)),
        K=groups * min(per_out, max(1, OUT_CHANNELS // part)),
        H=min(p.H, max(ROWS, height - p.pad_top - p.pad_bottom + 2 * p.stride_h)),
        W=min(p.W, max(COLUMNS, width - p.pad_left - p.pad_right + 2 * p.stride_w)),
        groups=groups,
    )


# ---- the test itself --------------------------------------------------------------------------------------------


def case(problem: ConvProblem) -> Case:
    """What an algorithm is tested with: random operands, always the same for a problem."""
    a, b = (t.to(problem.device) for t in measure.operands(problem))
    judge = BY_NAME["reference" if problem.T * problem.R * problem.S <= MOST_TAPS else "native"]
    wide = problem._replace(dtype="float64", layout=CONTIGUOUS, weight_layout=CONTIGUOUS)
    exact = judge.run(a.double().contiguous(), b.double().contiguous(), wide)
    bias = None
    if problem.direction == Direction.FORWARD:
        own = torch.Generator().manual_seed(zlib.crc32(str(problem).encode()) + 1)
        bias = torch.randn(problem.K, generator=own, dtype=torch.float32).to(problem.device, problem.torch_dtype)
    if problem.layout == STRIDED:
        a = _spread(a)
        b = _spread(b) if problem.direction == Direction.BACKWARD_WEIGHT else b
    if problem.weight_layout == STRIDED and problem.direction != Direction.BACKWARD_WEIGHT:
        b = _spread(b)
    return Case(a, b, exact, bias)


_recent = functools.lru_cache(maxsize=4)(case)
"""Of several algorithms that are tested for one call, all but the first find the reference's result here."""


def _spread(t: Tensor) -> Tensor:
    """The same values, with a gap after each row."""
    *sizes, width = t.shape
    return t.new_zeros(*sizes, width + 3)[..., :width].copy_(t)


def tried(algorithm: Algorithm, problem: ConvProblem, case: Case) -> tuple[float, str | None]:
    """(relative L2 error, what is wrong), without and with a bias. For callers that have switched autograd off."""
    given, worst, results = (case.a.clone(), case.b.clone()), 0.0, []
    for bias in (None,) if case.bias is None else (None, case.bias):
        try:
            got = algorithm.run_checked(case.a, case.b, problem, None, bias)
        except Exception as raised:
            return 0.0, f"{type(raised).__name__}: {raised}"
        finally:
            changed = not (torch.equal(given[0], case.a) and torch.equal(given[1], case.b))
            if changed:  # another algorithm needs them as they were
                case.a.copy_(given[0])
                case.b.copy_(given[1])
        if changed:
            return 0.0, "its operands were changed"
        if got is None:
            return 0.0, "a result that is not finite"
        results.append(
            got
        )  # kept: else the second could lie where the first did, and have its values where it has none
        exact = case.exact if bias is None else case.exact + bias.double().view(-1, *(1,) * (case.exact.dim() - 2))
        error, wrong = measure.compared(got, exact, problem, each=True)
        if wrong is not None:
            return error, wrong if bias is None else f"with a bias, {wrong}"
        worst = max(worst, error)
    return worst, None
