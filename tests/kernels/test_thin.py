"""Few input or output channels, vectors along the rows of the image: against float64, for every instruction set of this
machine."""

from __future__ import annotations

import itertools

import pytest
import torch
from activations import ACTIVATIONS, SLOPE
from pairs import pairwise
from problems import operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, STRIDED, ConvProblem, Direction, conv_problem
from convselect.kernels import _library, thin
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference

ALGORITHM = thin.ALGORITHMS[0]
ISA_LEVELS = range(_library.library().cs_best_isa() + 1) if _library.available() else ()
pytestmark = pytest.mark.skipif(not _library.available(), reason="the C kernels are not built")
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)
ISAS = pytest.mark.parametrize("isa_level", ISA_LEVELS)

AWKWARD = {
    "one to one": conv_problem(2, 1, 14, 67, 1, 3, 3, padding=1),
    "one to five": conv_problem(1, 1, 9, 31, 5, 3, 3, padding=1),
    "five to one": conv_problem(1, 5, 9, 31, 1, 3, 3, padding=1),
    "two to seven": conv_problem(2, 2, 11, 130, 7, 5, 5, padding=2),
    "three to three, one row of taps": conv_problem(1, 3, 5, 70, 3, 1, 15, padding=(0, 7)),
    "one column of taps": conv_problem(1, 1, 40, 21, 1, 31, 1, padding=(15, 0)),
    "many to three": conv_problem(1, 40, 8, 33, 3, 3, 3, padding=1),
    "sixteen to sixteen, stride 2, dilation 2": conv_problem(1, 16, 13, 40, 16, 3, 3, stride=2, dilation=2),
    "stride (3, 2), dilation (2, 3)": conv_problem(1, 4, 19, 37, 6, 3, 3, stride=(3, 2), padding=4, dilation=(2, 3)),
    "stride over kernel": conv_problem(2, 3, 11, 36, 4, 2, 2, stride=5, padding=1),
    "stride over image": conv_problem(1, 2, 6, 9, 3, 3, 3, stride=20, padding=1),
    "uneven padding": conv_problem(3, 3, 6, 19, 6, 2, 4, padding=(2, 0, 1, 3)),
    "padding over kernel": conv_problem(2, 3, 5, 6, 4, 3, 3, padding=9),
    "padding over kernel, stride 2": conv_problem(2, 3, 5, 6, 4, 3, 3, stride=2, padding=(8, 5, 3, 9)),
    "kernel over image": conv_problem(2, 3, 4, 3, 4, 7, 7, padding=4),
    "pixels that no output meets": conv_problem(1, 2, 9, 35, 3, 1, 1, stride=4),
    "dilation leaves pixels out": conv_problem(1, 2, 9, 36, 3, 2, 2, dilation=7),
    "1x1": conv_problem(2, 3, 9, 17, 4, 1, 1),
    "one pixel": conv_problem(3, 4, 1, 1, 5, 3, 3, padding=1),
    "one column": conv_problem(2, 3, 70, 1, 4, 3, 3, padding=1),
}


def run(problem: ConvProblem, operands, isa_level: int | None = None, **options) -> torch.Tensor:
    return _library.call("cs_thin", *operands, problem, isa_level=isa_level, **options)


def prepared(problem: ConvProblem, layout: str = "contiguous", weight_layout: str = "contiguous"):
    seen = {"contiguous": CONTIGUOUS, "channels_last": CHANNELS_LAST, "offset": CONTIGUOUS}
    problem = problem._replace(layout=seen.get(layout, STRIDED), weight_layout=seen.get(weight_layout, STRIDED))
    assert ALGORITHM.why_not(problem) is None
    return problem, operands_of(problem, *random_operands(problem, layout, weight_layout))


def expected(problem: ConvProblem, operands) -> torch.Tensor:
    return Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))


@pairwise(
    {
        "isa_level": ISA_LEVELS,
        "direction": list(Direction),
        "dtype": ["float32", "float16", "bfloat16"],
        "layout": ["contiguous", "channels_last"],
        "weight_layout": ["contiguous", "channels_last"],
    }
)
def test_awkward_problems(isa_level, direction, dtype, layout, weight_layout, nan_memory):
    for name, problem in AWKWARD.items():
        problem, operands = prepared(problem._replace(direction=direction, dtype=dtype), layout, weight_layout)
        before = [t.clone() for t in operands]
        got = run(problem, operands, isa_level)
        assert got.shape == problem.result_shape
        assert got.dtype == problem.torch_dtype
        assert relative_error(got, expected(problem, operands)) <= tolerance(ALGORITHM, problem), name
        assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True)), name


@DIRECTIONS
@pytest.mark.parametrize("layout", ["expanded", "channel_slice", "offset", "transposed"])
def test_any_strides(direction, layout):
    for name in ("two to seven", "uneven padding", "stride over kernel"):
        problem, operands = prepared(AWKWARD[name]._replace(direction=direction), layout, layout)
        got = ALGORITHM.run(*operands, problem)
        assert relative_error(got, expected(problem, operands)) <= tolerance(ALGORITHM, problem)


@ISAS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_epilogue(isa_level, dtype, layout):
    for name in ("one to five", "stride (3, 2), dilation (2, 3)", "one pixel"):
        problem, operands = prepared(AWKWARD[name]._replace(dtype=dtype), layout)
        bias = torch.randn(problem.K)
        residual = torch.randn(problem.y_shape).to(problem.torch_dtype)
        plain = expected(problem, operands)
        for activation, added in itertools.product(ACTIVATIONS, (None, residual)):
            want = plain + bias.double().view(1, -1, 1, 1) + (0 if added is None else added.double())
            options = {"bias": bias, "residual": added, "activation": activation, "slope": SLOPE}
            got = run(problem, operands, isa_level, **options)
            assert relative_error(got, ACTIVATIONS[activation](want)) <= tolerance(ALGORITHM, problem)


@ISAS
@DIRECTIONS
def test_the_same_bits_on_every_number_of_threads_and_in_every_layout(direction, isa_level, monkeypatch):
    """The order of a sum is the problem's: also that of a weight gradient, which is cut into parts. (The number is the
    kernel's alone: teams of PyTorch's own would wait for busy cores.)"""
    for problem in (
        conv_problem(1, 1, 90, 200, 1, 5, 5, padding=2),
        conv_problem(3, 3, 40, 61, 6, 3, 3, stride=2, padding=1),
    ):
        problem, operands = prepared(problem._replace(direction=direction))
        last = [t.contiguous(memory_format=torch.channels_last) for t in operands]
        results = []
        for threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(run(problem, operands, isa_level))
            results.append(run(problem._replace(layout=CHANNELS_LAST), last, isa_level))
        assert all(torch.equal(results[0], other) for other in results[1:])


@ISAS
def test_programs(isa_level):
    """Every value of every parameter, and sums of another order at most within the tolerance."""
    for direction in Direction:
        problem, operands = prepared(AWKWARD["two to seven"]._replace(direction=direction))
        want = expected(problem, operands)
        for program in ALGORITHM.space(problem).programs(problem):
            tune = tuple(program.get(name, 0) for name in ALGORITHM.slots)
            assert relative_error(run(problem, operands, isa_level, tune=tune), want) <= tolerance(ALGORITHM, problem)


@ISAS
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_value_that_is_not_finite_reaches_only_what_meets_it(isa_level, layout):
    """Vectors reach beyond the row and the window of a tap: what they find there must not count, not even times 0."""
    for direction in Direction:
        for name in ("one to five", "many to three", "stride (3, 2), dilation (2, 3)", "stride over kernel"):
            problem, (a, b) = prepared(AWKWARD[name]._replace(direction=direction), layout)
            for at in (0, a.shape[3] - 1, a.shape[3] // 2, min(16, a.shape[3] - 1)):
                bad = a.clone(memory_format=torch.preserve_format)
                bad[0, 0, a.shape[2] // 2, at] = torch.inf
                got, want = run(problem, (bad, b), isa_level), expected(problem, (bad, b))
                assert torch.equal(got.isfinite(), want.isfinite()), (name, direction, at)


def test_whole_numbers_are_exact():
    for direction in Direction:
        problem = AWKWARD["two to seven"]._replace(direction=direction)
        a, b = (torch.randint(-9, 9, t.shape).float() for t in operands_of(problem, *random_operands(problem)))
        assert torch.equal(run(problem, (a, b)).double(), expected(problem, (a, b)))


def test_who_it_is_for():
    assert "single group" in ALGORITHM.why_not(conv_problem(1, 8, 9, 9, 8, 3, 3, groups=8))
    assert "at most 16" in ALGORITHM.why_not(conv_problem(1, 17, 9, 9, 40, 3, 3))
    assert "float32" in ALGORITHM.why_not(AWKWARD["1x1"]._replace(dtype="float64"))
    assert ALGORITHM.why_not(conv_problem(1, 64, 9, 9, 3, 3, 3)) is None
    assert ALGORITHM.batch_invariant(AWKWARD["1x1"])
    assert BY_NAME["thin"] is ALGORITHM
