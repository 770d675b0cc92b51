"""Programs of algorithms with parameters: each computes the same convolution, within the memory it says."""

from __future__ import annotations

import functools
import itertools
import os
import random

import _guarded
import pytest
import torch
from _memory import peak_extra_bytes

from convselect.base import lru, settings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.eager import resolve
from convselect.kernels import _library
from convselect.kernels._space import Space
from convselect.kernels.pool import ALL, BY_NAME
from convselect.kernels.reference import ALGORITHMS as REFERENCE
from convselect.measure.measure import ERROR_BOUNDS, operands
from convselect.store import process
from convselect.store.store import Decision

pytestmark = pytest.mark.skipif(not _library.available(), reason="the parameters are those of the C kernels")
BOUNDS = (2.5e-6, 3e-6, 1e-5, 2e-5)
"""Relative L2 error by grade, see docs/budgets.md; weight gradients are allowed twice as much."""
PROBLEMS = {
    "3x3": conv_problem(1, 24, 15, 17, 40, 3, 3, padding=1),
    "3x3 many channels": conv_problem(1, 130, 9, 8, 70, 3, 3, padding=1),
    "3x3 batch, NHWC": conv_problem(3, 36, 14, 14, 33, 3, 3, padding=1, layout="channels_last"),
    "1x1": conv_problem(2, 48, 13, 11, 80, 1, 1),
    "1x1 NHWC": conv_problem(2, 48, 13, 11, 80, 1, 1, layout="channels_last"),
    "5x5 stride 2": conv_problem(1, 20, 19, 16, 36, 5, 5, stride=2, padding=2),
    "depthwise": conv_problem(2, 35, 23, 19, 35, 3, 3, padding=1, groups=35),
    "depthwise NHWC": conv_problem(2, 35, 23, 19, 35, 3, 3, padding=1, groups=35, layout="channels_last"),
    "depthwise NHWC, stride 2": conv_problem(
        1, 40, 23, 38, 40, 5, 5, stride=2, padding=2, groups=40, layout="channels_last"
    ),
    "depthwise large": conv_problem(1, 24, 30, 31, 24, 13, 13, padding=6, groups=24),
    "depthwise, 16 bits": conv_problem(1, 20, 40, 9, 40, 7, 7, padding=3, groups=20, dtype="bfloat16"),
    "few per group": conv_problem(2, 32, 26, 37, 32, 3, 3, padding=1, groups=8),
    "few per group, NHWC": conv_problem(1, 33, 20, 31, 66, 3, 3, padding=1, stride=2, groups=3, layout="channels_last"),
    "9x9": conv_problem(1, 18, 40, 37, 21, 9, 9, padding=4),
    "9x9 NHWC": conv_problem(2, 18, 40, 37, 21, 9, 9, padding=4, layout="channels_last"),
    "dilated": conv_problem(1, 6, 90, 40, 5, 7, 7, padding=6, dilation=2),
    "groups": conv_problem(2, 64, 12, 12, 64, 3, 3, padding=1, groups=2, dtype="bfloat16"),
}
WITH_SPACE = sorted(a.name for a in ALL if type(a).space is not type(ALL[0]).space and "cpu" in a.devices)


def cases() -> list[tuple[str, ConvProblem]]:
    found = []
    for name, (problem, direction) in itertools.product(WITH_SPACE, itertools.product(PROBLEMS.values(), Direction)):
        posed = problem.with_direction(direction)
        if BY_NAME[name].why_not(posed) is None and BY_NAME[name].space(posed) is not None:
            found.append((name, posed))
    return found


def space_of(name: str, problem: ConvProblem) -> Space:
    space = BY_NAME[name].space(problem)
    assert space is not None
    return space


@functools.lru_cache(maxsize=128)
def posed(problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both operands, and the float64 result, which takes longer than a program's."""
    a, b = operands(problem)
    return a, b, REFERENCE[0].run(a.double(), b.double(), problem._replace(dtype="float64"))


def assert_right(name: str, problem: ConvProblem, got: torch.Tensor, want: torch.Tensor, what) -> None:
    error = ((got.double() - want).norm() / want.norm()).item()
    if problem.dtype == "float32":
        bound = BOUNDS[BY_NAME[name].error_grade(problem)] * (1 + (problem.direction == Direction.BACKWARD_WEIGHT))
    else:
        bound = ERROR_BOUNDS[problem.dtype]
    assert error <= bound, (what, error)


def test_there_are_algorithms_with_parameters():
    some = {"winograd4", "winograd7", "direct", "depthwise", "grouped", "thin", "fft_tiled", "im2col_gemm"}
    assert some <= set(WITH_SPACE)
    assert set(WITH_SPACE) == {name for name, _ in cases()}
    for name in WITH_SPACE:
        assert {problem.direction for algorithm, problem in cases() if algorithm == name} == set(Direction)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "problem"), cases(), ids=str)
def test_every_value_of_every_parameter_is_right(name, problem):
    a, b, want = posed(problem)
    algorithm, space = BY_NAME[name], space_of(name, problem)
    default = dict(space.default(problem))
    base = algorithm.run(a, b, problem)
    assert torch.equal(base, algorithm.run(a, b, problem, default))
    for parameter in space.parameters:
        for value in parameter.values:
            params = {**default, parameter.name: value}
            if space.is_valid(problem, params):
                assert_right(name, problem, algorithm.run(a, b, problem, params), want, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SPACE)
def test_programs_drawn_at_random_on_one_thread_and_two(name):
    source, count = random.Random(name), 0
    drawn = [problem for algorithm, problem in cases() if algorithm == name]
    for i in range(120):
        problem = drawn[i % len(drawn)]._replace(threads=1 + i % 2)
        torch.set_num_threads(problem.threads)
        a, b, want = posed(problem)
        params = space_of(name, problem).sample(problem, source)
        assert_right(name, problem, BY_NAME[name].run(a, b, problem, params), want, params)
        bias = torch.randn(problem.K, dtype=a.dtype) if problem.direction == Direction.FORWARD else None
        checked = BY_NAME[name].run_checked(a, b, problem, params, bias)
        assert checked is not None
        if bias is not None:
            checked = checked - bias.view(-1, 1, 1)
        if problem.dtype == "float32":
            torch.testing.assert_close(checked, BY_NAME[name].run(a, b, problem, params), rtol=1e-3, atol=1e-4)
        count += 1
    assert count == 120


@pytest.mark.parametrize(("name", "problem"), cases()[::5], ids=str)
def test_what_is_no_program_is_refused(name, problem):
    a, b = operands(problem)
    default = dict(space_of(name, problem).default(problem))
    first = next(iter(default))
    for wrong in (
        {},
        {**default, first: 12345},
        {**default, "colour": 1},
        {k: v for k, v in default.items() if k != first},
    ):
        with pytest.raises(ValueError, match=r"has no program|must be even"):
            BY_NAME[name].run(a, b, problem, wrong)


@pytest.mark.parametrize(("name", "problem"), cases(), ids=str)
def test_no_program_takes_more_memory_than_is_fair(name, problem):
    algorithm, space, source = BY_NAME[name], space_of(name, problem), random.Random(1)
    before = algorithm.workspace_bytes(problem)
    assert before == algorithm.workspace_bytes(problem, dict(space.default(problem)))
    for _ in range(20):
        needed = algorithm.workspace_bytes(problem, space.sample(problem, source))
        assert needed <= max(2 * before, before + 32 * 2**20)


def test_spaces_are_large_and_lead_somewhere():
    for name, problem in cases():
        space = space_of(name, problem)
        assert sum(1 for _ in itertools.islice(space.programs(problem), 20)) >= 4, (name, str(problem))
        assert 1 <= len(space.sketches(problem)) < 10


@pytest.mark.sanitizer
def test_no_program_touches_a_byte_beside_an_operand_or_result():
    """At every instruction set, each with the same number of cases, and by one to three threads."""
    levels = _library.library().cs_best_isa() + 1
    kernels = ["cs_winograd", "cs_direct", "cs_depthwise", "cs_grouped", "cs_thin", "cs_fft"]
    specs = {
        str(side): dict(kernels=kernels, sides=[side], random=100, seed=13 + side, listed="", programs=True)
        for side in (True, False)
    }
    for ran in _guarded.run_all(specs).values():
        assert ran.pop("tuned") > 500 / 3 * levels
        for name in kernels:
            assert sum(n for case, n in ran.items() if case.startswith(name)) > 50 / 3 * levels, name


@pytest.mark.slow
def test_workspaces_hold_for_programs():
    """The library's scratch memory of the calling thread, and what torch allocates, while a program runs."""
    library, source, large = _library.library(), random.Random(5), 2 << 20
    assert library is not None
    torch.set_num_threads(1)
    for name, problem in cases():
        if problem.direction == Direction.BACKWARD_WEIGHT and problem.layout != "contiguous":
            continue  # a problem does not tell the layout of grad_y
        a, b = operands(problem)
        for _ in range(3):
            params = space_of(name, problem).sample(problem, source)
            BY_NAME[name].run(a, b, problem, params)
            library.cs_free_scratch()
            copies = peak_extra_bytes(lambda n=name, p=problem, v=params, o=(a, b): BY_NAME[n].run(*o, p, v))
            held = library.cs_scratch_bytes()
            # Blocks are whole pages, large ones of two megabytes.
            slack = 2 * large if held >= large else 2 * 4096
            assert copies + held <= BY_NAME[name].workspace_bytes(problem, params) + slack, (name, problem, params)


def test_a_stored_program_keeps_within_the_memory_that_is_allowed(tmp_path):
    problem = conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)
    space = space_of("winograd6", problem)
    needs = {tuple(p.items()): BY_NAME["winograd6"].workspace_bytes(problem, p) for p in space.programs(problem)}
    params, most = dict(max(needs, key=needs.__getitem__)), max(needs.values())
    least = BY_NAME["winograd6"].workspace_bytes(problem)
    assert most > least
    process.configure(tmp_path / "store.sqlite")
    try:
        for allowed, source in ((most, "store"), (most - 1, "model")):
            with settings.use("auto", precision="fast", workspace_bytes=allowed) as used:
                found = Decision(
                    problem, used.budgets, "winograd6", params, "tune", 2.0, BY_NAME["winograd6"].revision, 9
                )
                process.remember(found)
                lru.clear()
                assert (resolve.choice_for(problem, used).source == "store") == (source == "store")
    finally:
        process.configure(os.environ.get("CONVSELECT_STORE"))
        lru.clear()
