"""fft and fft_tiled against float64: wrap-around, tile edges, chunking, memory."""

from __future__ import annotations

import pytest
import torch
from _memory import peak_extra_bytes
from problems import arranged, operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.kernels import _fft_plan, fft
from convselect.kernels.reference import Reference
from convselect.problem import ConvProblem, Direction, conv_problem

WHOLE, TILED = fft.ALGORITHMS
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)

AWKWARD = {
    "no padding": conv_problem(2, 3, 20, 13, 4, 5, 4),
    "uneven padding": conv_problem(3, 4, 40, 33, 6, 5, 3, padding=(0, 3, 7, 1)),
    "padding over kernel": conv_problem(1, 2, 8, 8, 2, 3, 3, padding=12),
    "padding over kernel on one side": conv_problem(2, 2, 30, 41, 3, 3, 5, padding=(0, 9, 11, 0)),
    "kernel over image": conv_problem(2, 2, 5, 6, 3, 9, 7, padding=6),
    "one pixel": conv_problem(3, 3, 1, 1, 2, 3, 3, padding=1),
    "one row": conv_problem(1, 2, 1, 128, 2, 7, 7, padding=3),
    "one column": conv_problem(2, 2, 77, 1, 2, 3, 1, padding=(1, 0)),
    "row kernel": conv_problem(2, 3, 6, 70, 2, 1, 9),
    "dilated": conv_problem(2, 2, 40, 41, 3, 3, 5, padding=(3, 1, 2, 9), dilation=(3, 2)),
    "groups, multiplier 2": conv_problem(3, 6, 20, 44, 12, 5, 5, padding=2, groups=3),
    "depthwise": conv_problem(2, 6, 50, 30, 6, 9, 9, padding=4, groups=6),
    "depthwise, multiplier 3, dilated": conv_problem(3, 4, 24, 36, 12, 3, 3, padding=3, dilation=3, groups=4),
    "one channel to many": conv_problem(2, 1, 19, 37, 5, 7, 5, padding=3),
    "many taps": conv_problem(1, 2, 50, 60, 3, 35, 33, padding=17),
}


def error_of(algorithm, problem: ConvProblem, operands, params=None) -> float:
    want = Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))
    got = algorithm.run(*operands, problem, params)
    assert got.shape == problem.result_shape
    assert got.dtype == problem.torch_dtype
    return relative_error(got, want)


def check(algorithm, problem: ConvProblem, params=None, layout: str = "contiguous") -> None:
    assert algorithm.why_not(problem) is None
    operands = operands_of(problem, *random_operands(problem, layout, layout))
    before = [t.clone() for t in operands]
    assert error_of(algorithm, problem, operands, params) <= tolerance(algorithm, problem)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


@DIRECTIONS
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_problems(name, dtype, direction, nan_memory):
    problem = AWKWARD[name]._replace(direction=direction, dtype=dtype)
    check(WHOLE, problem)
    check(TILED, problem)
    smallest = max(16, 2 * -(-max(problem.kernel_extent) // 2))
    check(TILED, problem, {"tile": smallest})


@DIRECTIONS
@pytest.mark.parametrize("layout", ["channels_last", "expanded", "channel_slice", "offset", "transposed"])
def test_any_strides(layout, direction):
    for name in ("uneven padding", "groups, multiplier 2", "depthwise", "dilated"):
        check(WHOLE, AWKWARD[name]._replace(direction=direction), layout=layout)
        check(TILED, AWKWARD[name]._replace(direction=direction), {"tile": 32}, layout=layout)


@DIRECTIONS
@pytest.mark.parametrize("groups", [1, 4])
def test_tile_boundaries(direction, groups):
    """Outputs just below, at and above multiples of a tile's 24 results; both axes meet every case."""
    for height, width in ((23, 49), (24, 48), (25, 47), (48, 24), (72, 71), (73, 25), (1, 96)):
        check(
            TILED,
            conv_problem(2, 4, height, width, 4, 9, 9, padding=4, groups=groups, direction=direction),
            {"tile": 32},
        )


@DIRECTIONS
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_chunks_join(direction, groups, monkeypatch):
    """With budgets of a few KiB every loop over groups, channels, images, tile rows and columns takes many turns."""
    problem = conv_problem(3, 6, 41, 45, 12, 5, 5, padding=2, groups=groups, direction=direction)
    seen = set()
    for budget in (1, 20_000, 90_000, 300_000):
        monkeypatch.setattr(_fft_plan, "SPECTRUM_BYTES", budget)
        monkeypatch.setattr(_fft_plan, "HELD_SPECTRUM_BYTES", budget * 2)
        monkeypatch.setattr(_fft_plan, "CPU_PIECE_BYTES", budget // 8)
        _fft_plan.plan_of.cache_clear()
        check(WHOLE, problem)
        check(TILED, problem, {"tile": 16})
        plan = _fft_plan.plan_of(problem, 16)
        seen.add((plan.groups, plan.outer_chunk, plan.images, plan.tile_rows, plan.tile_cols))
    monkeypatch.undo()
    _fft_plan.plan_of.cache_clear()
    assert len(seen) >= 3


@pytest.mark.parametrize("algorithm", [WHOLE, TILED], ids=lambda a: a.name)
def test_one_hot(algorithm):
    """A single one under a kernel of ones yields 51 * 51 ones and zeros elsewhere, whatever tile it falls into."""
    problem = conv_problem(1, 1, 2048, 2048, 1, 51, 51, padding=25)
    x = torch.zeros(problem.x_shape)
    x[0, 0, 500, 300] = 1
    y = algorithm.forward(x, torch.ones(problem.weight_shape), problem)
    assert y.sum().item() == pytest.approx(2601, abs=0.05)
    want = torch.zeros_like(y)
    want[0, 0, 475:526, 275:326] = 1
    assert (y - want).abs().max().item() < 1e-5


MEMORY = {
    "dense 9x9": conv_problem(1, 64, 56, 56, 64, 9, 9, padding=4),
    "batch": conv_problem(8, 32, 56, 56, 48, 7, 7, padding=3),
    "large kernel": conv_problem(1, 16, 128, 128, 16, 31, 31, padding=15),
    "depthwise": conv_problem(2, 64, 56, 56, 64, 31, 31, padding=15, groups=64),
    "stem": conv_problem(1, 3, 224, 224, 64, 11, 11, padding=5),
    "one row": conv_problem(1, 2, 1, 128, 2, 7, 7, padding=3),
    "many channels": conv_problem(1, 256, 14, 14, 256, 7, 7, padding=3),
    "groups": conv_problem(4, 64, 40, 40, 128, 5, 5, padding=2, groups=4),
    "dilated": conv_problem(2, 4, 40, 44, 6, 3, 3, padding=4, dilation=4),
    "one channel": conv_problem(1, 1, 500, 500, 8, 63, 63),
}


@DIRECTIONS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", [WHOLE, TILED], ids=lambda a: a.name)
def test_workspace_bound(algorithm, dtype, direction):
    """The bound holds, and is within a factor of 5 of the truth, or nothing would ever be admitted."""
    for name, problem in MEMORY.items():
        problem = problem._replace(direction=direction, dtype=dtype)
        operands = operands_of(problem, *random_operands(problem))
        algorithm.run(*operands, problem)  # the tables of cosines are made once
        peak = peak_extra_bytes(lambda run=algorithm.run, o=operands, p=problem: run(*o, p))
        assert peak <= algorithm.workspace_bytes(problem) <= 5 * peak + 2**16, name


@DIRECTIONS
@pytest.mark.parametrize("algorithm", [WHOLE, TILED], ids=lambda a: a.name)
def test_workspace_stays_bounded(algorithm, direction):
    """Where spectra of everything at once would take gigabytes."""
    for problem in (
        conv_problem(64, 128, 56, 56, 256, 7, 7, padding=3),
        conv_problem(1, 64, 1, 128, 64, 7, 7, padding=3),
        conv_problem(16, 1024, 28, 28, 1024, 31, 31, padding=15, groups=1024),
    ):
        assert algorithm.workspace_bytes(problem._replace(direction=direction)) <= 256 * 2**20
    # A single plane of this one takes 75 MB.
    vast = conv_problem(1, 1, 4222, 4222, 30, 127, 127, direction=direction)
    assert algorithm.workspace_bytes(vast) <= (1500 if algorithm is WHOLE else 400) * 2**20


def test_one_row_is_not_padded_to_a_square():
    plan = _fft_plan.plan_of(conv_problem(1, 64, 1, 128, 64, 7, 7, padding=3), None)
    assert plan.rows.length <= 8
    assert plan.cols.length <= 144


def test_fast_lengths():
    for n in range(1, 300):
        for even in (False, True):
            length = _fft_plan.fast_length(n, even)
            rest = length
            for prime in (2, 3, 5, 7):
                while rest % prime == 0:
                    rest //= prime
            assert rest == 1
            assert n <= length <= 2 * n
            assert not (even and length % 2)


def test_error_grade(nan_memory):
    """CLOSE is a promise of 1e-5; what is measured on long sums is far below it."""
    for direction in Direction:
        problem = conv_problem(2, 64, 60, 60, 64, 9, 9, padding=4, direction=direction)
        operands = operands_of(problem, *random_operands(problem))
        for algorithm in (WHOLE, TILED):
            assert error_of(algorithm, problem, operands) < 1.5e-6


def test_why_not():
    for algorithm in (WHOLE, TILED):
        assert "stride" in algorithm.why_not(conv_problem(1, 3, 9, 9, 3, 3, 3, stride=(1, 2)))
        assert "1x1" in algorithm.why_not(conv_problem(1, 3, 9, 9, 3, 1, 1))
        assert algorithm.why_not(conv_problem(1, 3, 9, 9, 3, 1, 2)) is None
    wide = conv_problem(1, 1, 300, 300, 1, 299, 299)
    assert "299" in TILED.why_not(wide)
    assert WHOLE.why_not(wide) is None


def test_tile_parameter():
    problem = conv_problem(1, 2, 60, 60, 2, 9, 9, padding=4)
    operands = operands_of(problem, *random_operands(problem))
    for tile in (8, 33):
        with pytest.raises(ValueError, match=str(tile)):
            TILED.run(*operands, problem, {"tile": tile})
    assert _fft_plan.tile_side(conv_problem(1, 64, 56, 56, 64, 9, 9, padding=4)) == 32
    assert _fft_plan.tile_side(conv_problem(1, 16, 128, 128, 16, 31, 31, padding=15)) == 64


@DIRECTIONS
def test_empty_batch(direction):
    problem = conv_problem(0, 3, 12, 12, 4, 3, 3, padding=1, direction=direction)
    operands = operands_of(problem, *random_operands(problem))
    for algorithm in (WHOLE, TILED):
        got = algorithm.run(*operands, problem)
        assert got.shape == problem.result_shape
        assert not got.any()


def test_argument_layout_does_not_matter_for_values():
    problem = AWKWARD["dilated"]
    x, weight, _ = random_operands(problem)
    plain = WHOLE.forward(x, weight, problem)
    assert torch.equal(plain, WHOLE.forward(arranged(x, "transposed"), arranged(weight, "channels_last"), problem))
