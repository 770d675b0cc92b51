"""fft and fft_tiled against float64: wrap-around, tile edges, chunking, memory."""

from __future__ import annotations

import pytest
import torch
from _memory import peak_extra_bytes
from pairs import pairwise
from problems import arranged, operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.kernels import _fft_plan, _library, fft
from convselect.kernels.reference import Reference

WHOLE, TILED = fft.ALGORITHMS
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)
DIRECTION = {"direction": list(Direction)}

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


@pairwise(DIRECTION | {"dtype": ["float32", "float64", "float16", "bfloat16"], "name": list(AWKWARD)})
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


def give_back_scratch() -> None:
    if _library.available():
        _library.library().cs_free_scratch()


def scratch_bytes() -> int:
    """What the C library holds for this thread."""
    return _library.library().cs_scratch_bytes() if _library.available() else 0


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


@pytest.mark.slow
@DIRECTIONS
@pytest.mark.parametrize("algorithm", [WHOLE, TILED], ids=lambda a: a.name)
def test_workspace_bound(algorithm, direction):
    """The bound holds, and is within a factor of 5 of the truth, or nothing would ever be admitted. The element type
    alternates over problems and over directions."""
    first = list(Direction).index(direction)
    for i, (name, problem) in enumerate(MEMORY.items(), first):
        problem = problem._replace(direction=direction, dtype=("float32", "bfloat16")[i % 2])
        operands = operands_of(problem, *random_operands(problem))
        algorithm.run(*operands, problem)  # the tables of cosines are made once
        give_back_scratch()
        peak = peak_extra_bytes(lambda run=algorithm.run, o=operands, p=problem: run(*o, p))
        # Two blocks of scratch memory, each rounded up to whole pages of 2 MiB.
        held = scratch_bytes()
        slack = min(held, 2 * 2**21)
        assert peak + held - slack <= algorithm.workspace_bytes(problem) <= 5 * (peak + held) + 2**16, name


@DIRECTIONS
@pytest.mark.parametrize("algorithm", [WHOLE, TILED], ids=lambda a: a.name)
def test_workspace_stays_bounded(algorithm, direction):
    """On problems whose spectra would take gigabytes all at once."""
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


@pytest.mark.slow
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


# ---- the C kernel ---------------------------------------------------------------------------------------------------

needs_c = pytest.mark.skipif(not _library.available(), reason="the C library is not installed")
IN_C = {
    "tiles": conv_problem(2, 20, 50, 43, 33, 9, 5, padding=(4, 3, 0, 9)),
    "whole": conv_problem(3, 5, 12, 11, 18, 5, 5, padding=2),
    "padding over kernel": conv_problem(1, 4, 8, 8, 5, 3, 3, padding=12),
    "kernel over image": conv_problem(2, 3, 5, 6, 7, 9, 7, padding=6),
    "groups": conv_problem(2, 12, 30, 40, 24, 5, 5, padding=2, groups=3),
    "one pixel": conv_problem(2, 4, 1, 1, 5, 3, 3, padding=1),
    "many chunks": conv_problem(9, 96, 40, 40, 40, 9, 9, padding=4),
    "dilated": conv_problem(2, 20, 50, 43, 33, 5, 3, padding=(9, 4, 0, 9), dilation=(4, 3)),
    "dilated, whole": conv_problem(3, 5, 23, 22, 18, 5, 5, padding=4, dilation=2),
    "dilation over image": conv_problem(1, 4, 8, 9, 5, 3, 3, padding=11, dilation=10),
    "dilated, wrapping": conv_problem(1, 7, 30, 31, 6, 5, 5, padding=4, dilation=2),
    "row kernel": conv_problem(2, 20, 3, 150, 33, 1, 9, padding=(1, 0, 0, 12)),
    "row kernel, dilated": conv_problem(2, 5, 1, 300, 18, 1, 11, padding=(0, 25), dilation=(1, 5)),
    "row kernel, many taps": conv_problem(1, 12, 1, 260, 24, 1, 130, padding=(0, 0, 129, 0), groups=3),
}


def run_in_c(problem: ConvProblem, operands, tile: int, level: int | None = None):
    return _library.call("cs_fft", *operands, problem, (tile,), isa_level=level)


@needs_c
@pairwise(
    DIRECTION
    | {"dtype": ["float32", "bfloat16", "float16"], "layout": ["contiguous", "channels_last"], "name": list(IN_C)}
)
def test_every_tile_and_instruction_set(name, layout, dtype, direction, nan_memory):
    problem = IN_C[name]._replace(direction=direction, dtype=dtype, layout=layout, weight_layout=layout)
    operands = operands_of(problem, *random_operands(problem, layout, layout))
    want = Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))
    for tile in _fft_plan.kernel_tiles(problem):
        for level in range(_library.library().cs_best_isa() + 1):
            error = relative_error(run_in_c(problem, operands, tile, level), want)
            assert error <= tolerance(TILED, problem), (tile, level)


@needs_c
@DIRECTIONS
def test_threads_change_no_bit(direction):
    problem = IN_C["many chunks"]._replace(direction=direction)
    operands = operands_of(problem, *random_operands(problem))
    alone = run_in_c(problem, operands, 24)
    torch.set_num_threads(3)
    assert torch.equal(run_in_c(problem, operands, 24), alone)


@needs_c
@pytest.mark.parametrize("name", ["tiles", "dilated"])
def test_bias_and_activation(name):
    problem = IN_C[name]
    x, weight = random_operands(problem)[:2]
    bias, residual = torch.randn(problem.K), torch.randn(problem.y_shape)
    for layout in (torch.contiguous_format, torch.channels_last):
        there = x.contiguous(memory_format=layout)
        got = _library.call("cs_fft", there, weight, problem, (32,), bias=bias, residual=residual, activation="relu")
        sides = (problem.pad_left, problem.pad_right, problem.pad_top, problem.pad_bottom)
        exact = torch.nn.functional.pad(x.double(), sides)
        exact = torch.conv2d(exact, weight.double(), bias.double(), dilation=problem.dilation)
        exact = torch.relu(exact + residual)
        assert relative_error(got, exact) < 1e-6


@needs_c
@DIRECTIONS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["tiles", "row kernel"])
def test_what_is_not_finite_is_noticed(name, value, direction):
    problem = IN_C[name]._replace(direction=direction)
    operands = operands_of(problem, *random_operands(problem))
    assert TILED.run_checked(*operands, problem, {"tile": 32}) is not None
    operands[0][-1, -1, -1, -1] = value
    assert TILED.run_checked(*operands, problem, {"tile": 32}) is None


@needs_c
def test_the_kernel_is_used_where_it_fits(monkeypatch):
    used = []
    real = _library.call

    def call(name, a, b, problem, before, **parameters):
        used.append(before)
        return real(name, a, b, problem, before, **parameters)

    monkeypatch.setattr(_library, "call", call)
    taken = conv_problem(1, 8, 40, 40, 8, 9, 9, padding=4)
    others = (
        taken._replace(dtype="float64"),
        conv_problem(1, 8, 40, 40, 8, 9, 9, padding=4, groups=8),
        conv_problem(1, 8, 40, 40, 8, 9, 1, padding=(4, 0)),
        conv_problem(1, 8, 140, 140, 8, 51, 51, padding=25),
    )
    for problem in others:
        check(TILED, problem)
        assert not used
    # However far its taps are apart, a dilated kernel is a small one on phases.
    for problem in (
        taken,
        taken._replace(dil_h=2, dil_w=2),
        conv_problem(1, 8, 40, 40, 8, 1, 9, padding=(0, 4)),
        conv_problem(1, 8, 1, 900, 8, 1, 400, padding=(0, 0, 399, 0)),  # longer kernels than PyTorch's tiles take
        conv_problem(1, 8, 700, 9, 8, 3, 3, padding=1, dilation=(300, 1)),
    ):
        check(TILED, problem)
        assert used
        used.clear()


def test_kernel_tiles_follow_the_problem():
    def side(H, kernel, **sizes):
        return _fft_plan.kernel_tile_side(conv_problem(1, 64, H, H, 64, kernel, kernel, padding=kernel // 2, **sizes))

    assert side(28, 21) == 48  # one tile holds 28 rows and 10 of padding
    assert side(224, 5) < side(224, 31) == 64
    assert side(224, 51) is None
