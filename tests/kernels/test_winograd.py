"""Winograd: exact transforms, three directions on awkward problems, rounding error, blocking, workspace."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
import torch
from _memory import peak_extra_bytes
from pairs import pairwise
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.kernels import _library, _winograd_transforms
from convselect.kernels import _winograd_torch as winograd
from convselect.kernels._contract import Grade
from convselect.kernels.reference import Reference
from convselect.kernels.winograd import ALGORITHMS, TILES, Winograd

IN_TORCH = tuple(_winograd_transforms.POINTS)
# C kernels in the tiles for 3x3, the PyTorch formulation in those that it has.
IN_TORCH_BY_ID = {f"torch-winograd{m}": ("torch", Winograd(m)) for m in IN_TORCH}
BY_ID = {f"c-winograd{m}": ("c", Winograd(m)) for m in TILES[3, 3]} | IN_TORCH_BY_ID


def of_all(axes: dict = {}, which: dict = BY_ID) -> pytest.MarkDecorator:  # noqa: B006
    """Every implementation and algorithm, each with every value of each axis."""
    return pairwise({"implementation,algorithm": which} | axes, indirect=["implementation"])


ALL, ALL_IN_TORCH = of_all(), of_all(which=IN_TORCH_BY_ID)
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)
DIRECTION, LAYOUT = {"direction": list(Direction)}, {"layout": ["contiguous", "channels_last"]}
REFERENCE = Reference()


@pytest.fixture(autouse=True, params=["c", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on the C kernels and on the PyTorch formulation; those of one's inner parts name it."""
    if request.param == "c" and not _library.available():
        pytest.skip("the C kernels are not built here")
    if request.param == "torch":
        monkeypatch.setattr(_library, "available", lambda: False)
    return str(request.param)


in_torch = pytest.mark.parametrize("implementation", ["torch"], indirect=True)


def operands(problem: ConvProblem, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal data in the problem's dtype and layout, in the order of `Algorithm.run`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        data = torch.randn(shape, generator=generator, dtype=torch.float64).to(problem.torch_dtype)
        return data.contiguous(memory_format=torch.channels_last) if problem.layout == "channels_last" else data

    x, weight, grad_y = normal(problem.x_shape), normal(problem.weight_shape), normal(problem.y_shape)
    return {
        Direction.FORWARD: (x, weight),
        Direction.BACKWARD_DATA: (grad_y, weight),
        Direction.BACKWARD_WEIGHT: (x, grad_y),
    }[problem.direction]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def refused(algorithm: Winograd, problem: ConvProblem) -> bool:
    """Whether a 3x3 problem is one that large tiles are not made for."""
    small = algorithm.m == 7 and min(problem.H, problem.W, problem.P, problem.Q) < 7
    return small or (algorithm.m not in IN_TORCH and not algorithm._in_c(problem))


def check(algorithm: Winograd, problem: ConvProblem, a: Tensor, b: Tensor) -> None:
    if problem.R == problem.S == 3 and refused(algorithm, problem):
        assert algorithm.why_not(problem) is not None
        return
    assert algorithm.why_not(problem) is None
    want = REFERENCE.run(a.double(), b.double(), problem)
    before = a.clone(), b.clone()
    got = algorithm.run(a, b, problem)
    assert got.shape == want.shape
    assert got.dtype == problem.torch_dtype
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    tolerance = FORWARD[problem.dtype, algorithm.error_grade(problem)]
    if problem.direction == Direction.BACKWARD_WEIGHT:
        tolerance *= WEIGHT_GRADIENT_FACTOR
    assert relative_error(got, want) <= tolerance


# ---- transforms -----------------------------------------------------------------------------------------------------


def times(matrix: list[list[Fraction]], vector: list[int] | list[Fraction]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


def transposed(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    return [list(column) for column in zip(*matrix, strict=True)]


@in_torch
@pytest.mark.parametrize("m", [2, 4, 6])
def test_transforms_are_exact(m: int) -> None:
    AT, G, BT = _winograd_transforms.transforms(m)
    d = [(7 * i * i - 3 * i + 2) % 11 - 5 for i in range(m + 2)]
    g = [3, -4, 9]
    products = [u * v for u, v in zip(times(G, g), times(BT, d), strict=True)]
    assert times(AT, products) == [sum(g[r] * d[q + r] for r in range(3)) for q in range(m)]

    grad_y = [(5 * i) % 7 - 2 for i in range(m)]
    products = [u * v for u, v in zip(times(transposed(AT), grad_y), times(BT, d), strict=True)]
    assert times(transposed(G), products) == [sum(grad_y[q] * d[q + r] for q in range(m)) for r in range(3)]


@in_torch
@pytest.mark.parametrize("m", [2, 4, 6])
def test_data_transforms_are_exact_in_float32(m: int) -> None:
    exact = _winograd_transforms.transforms(m)
    arrays = _winograd_transforms.arrays(m, "float32")
    assert [[Fraction(float(v)) for v in row] for row in arrays.BT] == exact.BT
    assert [[Fraction(float(v)) for v in row] for row in arrays.AT] == exact.AT


# ---- rounding error -------------------------------------------------------------------------------------------------

# Relative L2 error in float32 on normal data, about 1.5 times what is measured with up to 512 channels.
BOUNDS = {
    "winograd2": {"forward": 6e-7, "backward_data": 6e-7, "backward_weight": 8e-7},
    "winograd3": {"forward": 8e-7, "backward_data": 8e-7, "backward_weight": 1e-6},
    "winograd4": {"forward": 2e-6, "backward_data": 2e-6, "backward_weight": 2e-6},
    "winograd5": {"forward": 3e-6, "backward_data": 3e-6, "backward_weight": 3e-6},
    "winograd6": {"forward": 9e-6, "backward_data": 9e-6, "backward_weight": 8e-6},
    "winograd7": {"forward": 1e-5, "backward_data": 1e-5, "backward_weight": 1e-5},  # the grade itself
}


@of_all(DIRECTION | {"C,K": {"256-64": (256, 64), "512-32": (512, 32), "32-512": (32, 512)}})
def test_float32_error(algorithm: Winograd, direction: Direction, C: int, K: int) -> None:
    problem = conv_problem(1, C, 20, 20, K, 3, 3, padding=1, direction=direction)
    a, b = operands(problem)
    want = REFERENCE.run(a.double(), b.double(), problem)
    assert relative_error(algorithm.run(a, b, problem), want) <= BOUNDS[algorithm.name][direction.value]


@ALL
@DIRECTIONS
def test_error_grade_holds_on_rectified_data(algorithm: Winograd, direction: Direction) -> None:
    """Activations after a ReLU: half zeros, a mean that the transforms have to cancel."""
    problem = conv_problem(2, 256, 20, 20, 48, 3, 3, padding=1, direction=direction)
    a, b = operands(problem)
    check(algorithm, problem, a.relu(), b)


def test_grades(implementation: str) -> None:
    problem = conv_problem(1, 8, 8, 8, 8, 3, 3)
    grades = {m: Winograd(m).error_grade(problem) for m in (2, 4, 5, 6)}
    in_c = implementation == "c"
    large = {5: Grade.NEAR if in_c else Grade.CLOSE, 6: Grade.CLOSE if in_c else Grade.LOOSE}
    assert grades == {2: Grade.DIRECT, 4: Grade.NEAR, **large}
    # The error of few results scatters, and that of F(7x7) has no room to.
    assert Winograd(7).error_grade(problem) == Grade.LOOSE
    assert Winograd(7).error_grade(conv_problem(1, 8, 16, 16, 32, 3, 3)) == Grade.CLOSE
    half = problem._replace(dtype="float16")
    assert {a.error_grade(half) for a in ALGORITHMS} == {Grade.DIRECT}


# ---- the three directions -------------------------------------------------------------------------------------------

AWKWARD = {
    "no padding": conv_problem(1, 3, 9, 14, 5, 3, 3),
    "one output": conv_problem(2, 4, 3, 3, 4, 3, 3),
    "1x1 image": conv_problem(3, 5, 1, 1, 7, 3, 3, padding=1),
    "1x1 image in padding 2": conv_problem(1, 5, 1, 1, 7, 3, 3, padding=2),
    "asymmetric": conv_problem(3, 4, 11, 7, 6, 3, 3, padding=(0, 1, 2, 0)),
    "asymmetric, wide": conv_problem(1, 4, 6, 13, 6, 3, 3, padding=(4, 0, 1, 3)),
    "padding 3": conv_problem(2, 4, 8, 5, 6, 3, 3, padding=3),
    "padding 4": conv_problem(1, 2, 2, 2, 3, 3, 3, padding=4),
    "one row": conv_problem(1, 8, 1, 40, 8, 3, 3, padding=(1, 1, 0, 0)),
    "one channel": conv_problem(2, 1, 17, 12, 1, 3, 3, padding=1),
    "groups": conv_problem(3, 6, 10, 9, 9, 3, 3, padding=1, groups=3),
    "depthwise": conv_problem(2, 7, 15, 8, 7, 3, 3, padding=1, groups=7),
    "multiplier": conv_problem(2, 5, 9, 13, 15, 3, 3, padding=(1, 2, 0, 1), groups=5),
    "to one channel per group": conv_problem(2, 12, 9, 13, 4, 3, 3, padding=1, groups=4),
    "several blocks": conv_problem(2, 80, 33, 30, 66, 3, 3, padding=1),
    # More than 32 output channels whose transformed weight exceeds a chunk.
    "weight in chunks": conv_problem(1, 300, 7, 8, 260, 3, 3, padding=1),
}


@of_all(DIRECTION | {"problem": AWKWARD} | LAYOUT)
def test_awkward(algorithm: Winograd, direction: Direction, problem: ConvProblem, layout: str) -> None:
    problem = problem._replace(direction=direction, layout=layout, weight_layout=layout)
    check(algorithm, problem, *operands(problem))


@of_all(
    DIRECTION
    | {
        "dtype": ["float16", "bfloat16", "float64"],
        "name": ["asymmetric, wide", "multiplier", "groups", "weight in chunks"],
    }
)
def test_dtypes(algorithm: Winograd, direction: Direction, dtype: str, name: str) -> None:
    problem = AWKWARD[name]._replace(direction=direction, dtype=dtype)
    check(algorithm, problem, *operands(problem))


@ALL
@DIRECTIONS
def test_strided_operands(algorithm: Winograd, direction: Direction) -> None:
    problem = conv_problem(2, 6, 11, 9, 8, 3, 3, padding=1, groups=2, direction=direction, layout="strided")
    a, b = operands(problem)
    sliced = torch.empty(*(2 * n + 1 for n in a.shape), dtype=a.dtype)[1::2, 1::2, 1::2, 1::2]
    check(algorithm, problem, sliced.copy_(a), b.transpose(2, 3).contiguous().transpose(2, 3))
    check(algorithm, problem, a[:1, :1].expand_as(a), b.flip(1))
    check(algorithm, problem, a[..., :1].expand_as(a), b[:, :, :1].expand_as(b))


@ALL
def test_result_is_in_the_layout_of_the_problem(algorithm: Winograd) -> None:
    for layout, memory_format in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
        for direction in (Direction.FORWARD, Direction.BACKWARD_DATA):
            problem = conv_problem(2, 6, 9, 8, 5, 3, 3, padding=1, direction=direction, layout=layout)
            assert algorithm.run(*operands(problem), problem).is_contiguous(memory_format=memory_format)


@ALL
@DIRECTIONS
def test_empty_batch(algorithm: Winograd, direction: Direction) -> None:
    problem = conv_problem(0, 6, 9, 8, 5, 3, 3, padding=1, direction=direction)
    result = algorithm.run(*operands(problem), problem)
    assert result.shape == problem.result_shape
    assert not result.any()


@ALL
def test_direction_follows_the_method(algorithm: Winograd) -> None:
    """The methods do what their names say, whatever direction the problem carries."""
    problem = conv_problem(1, 4, 8, 8, 4, 3, 3, padding=1, direction=Direction.BACKWARD_WEIGHT)
    x, weight = operands(problem.with_direction(Direction.FORWARD))
    want = REFERENCE.forward(x.double(), weight.double(), problem)
    assert relative_error(algorithm.forward(x, weight, problem), want) < 1e-5


# ---- blocking and memory --------------------------------------------------------------------------------------------


@of_all(DIRECTION | LAYOUT | {"tiles": [1, 7, 20]}, IN_TORCH_BY_ID)
def test_small_blocks(
    algorithm: Winograd, direction: Direction, layout: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "MOST_FOR_GEMM", tiles)
    monkeypatch.setattr(winograd, "MOST_TILES", tiles)
    problem = conv_problem(
        3, 4, 14, 11, 6, 3, 3, padding=(0, 3, 2, 1), groups=2, direction=direction, layout=layout, dtype="float64"
    )
    plan = winograd._plan(problem, algorithm.m)
    assert all(block.tiles <= tiles for block in plan.blocks())
    check(algorithm, problem, *operands(problem))


@ALL_IN_TORCH
@DIRECTIONS
def test_blocks_cover_every_tile_once(algorithm: Winograd, direction: Direction) -> None:
    for shape in ((1, 3, 1, 1), (5, 64, 30, 17), (2, 512, 14, 300), (70, 16, 7, 7)):
        N, C, H, W = shape
        plan = winograd._plan(conv_problem(N, C, H, W, C, 3, 3, padding=1, direction=direction), algorithm.m)
        count = torch.zeros(N, plan.rows, plan.columns, dtype=torch.int64)
        for b in plan.blocks():
            count[b.n : b.n + b.N, b.i : b.i + b.P, b.j : b.j + b.Q] += 1
        assert bool((count == 1).all())


@ALL_IN_TORCH
@DIRECTIONS
def test_cases_take_the_paths_they_are_named_for(algorithm: Winograd, direction: Direction) -> None:
    for cases in (AWKWARD, MEMORY):
        chunked = cases["weight in chunks"]._replace(direction=direction)
        c_out = chunked.C if direction == Direction.BACKWARD_DATA else chunked.K
        assert winograd._plan(chunked, algorithm.m).chunk < c_out
    blocked = MEMORY["wide rows"]._replace(direction=direction)
    assert len(list(winograd._plan(blocked, algorithm.m).blocks())) > 1


MEMORY = {
    "several blocks": conv_problem(2, 64, 40, 44, 80, 3, 3, padding=1),
    "weight in chunks": conv_problem(1, 256, 10, 10, 320, 3, 3, padding=1),
    "wide rows": conv_problem(1, 96, 8, 600, 64, 3, 3, padding=1),
    "narrowing": conv_problem(1, 256, 28, 28, 16, 3, 3, padding=1),
    "widening": conv_problem(1, 16, 28, 28, 256, 3, 3, padding=1),
    "groups": conv_problem(2, 128, 20, 20, 128, 3, 3, padding=1, groups=4),
    "depthwise": conv_problem(2, 192, 30, 30, 192, 3, 3, padding=1, groups=192),
    "multiplier": conv_problem(1, 96, 30, 30, 288, 3, 3, padding=1, groups=96),
}


@of_all(DIRECTION | {"case": list(MEMORY)}, IN_TORCH_BY_ID)
def test_workspace_is_an_upper_bound(algorithm: Winograd, direction: Direction, case: str) -> None:
    measured, stated = measured_and_stated(algorithm, MEMORY[case]._replace(direction=direction))
    assert measured <= stated
    # A bound that is of use: what it has over the measured peak is a copy of the weight that only some operands need.
    assert stated <= 1.5 * measured + winograd._SMALL_BYTES


@of_all(
    DIRECTION
    | {
        "case": ["several blocks", "weight in chunks", "multiplier"],
        "change": [{"layout": "channels_last"}, {"dtype": "bfloat16"}, {"dtype": "float64"}],
    }
)
def test_workspace_of_layouts_and_dtypes(
    algorithm: Winograd, direction: Direction, case: str, change: dict[str, str]
) -> None:
    problem = MEMORY[case]._replace(direction=direction, **change)
    problem = problem._replace(weight_layout=problem.layout)
    if refused(algorithm, problem):
        assert algorithm.why_not(problem) is not None
        return
    measured, stated = measured_and_stated(algorithm, problem)
    assert measured <= stated


def measured_and_stated(algorithm: Winograd, problem: ConvProblem) -> tuple[int, int]:
    a, b = operands(problem)
    return peak_extra_bytes(lambda: algorithm.run(a, b, problem)), algorithm.workspace_bytes(problem)


@ALL
@DIRECTIONS
def test_workspace_stays_bounded(algorithm: Winograd, direction: Direction) -> None:
    for shape in ((64, 64, 224, 224), (1, 512, 512, 512), (1, 2048, 8, 4096), (256, 3, 640, 640)):
        N, C, H, W = shape
        problem = conv_problem(N, C, H, W, C, 3, 3, padding=1, direction=direction)
        transformed = 4 * (algorithm.m + 2) ** 2 * C * C
        assert algorithm.workspace_bytes(problem) <= 64 * 2**20 + transformed + 2 * problem.weight_bytes


# ---- refusals, modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (conv_problem(1, 4, 8, 8, 4, 9, 9), "9x9"),
        (conv_problem(1, 4, 8, 8, 4, 3, 2), "3x2"),
        (conv_problem(1, 4, 8, 8, 4, 3, 3, stride=(1, 2)), "stride 1x2"),
        (conv_problem(1, 4, 8, 8, 4, 3, 3)._replace(device="cuda"), "cuda"),
    ],
)
@ALL
def test_why_not(algorithm: Winograd, problem: ConvProblem, word: str) -> None:
    sentence = algorithm.why_not(problem)
    assert sentence is not None
    assert word in sentence
    assert sentence.endswith(".")


@ALL
def test_first_call_in_inference_mode_leaves_later_calls_usable(algorithm: Winograd) -> None:
    _winograd_transforms.arrays.cache_clear()
    problem = conv_problem(1, 4, 9, 9, 4, 3, 3, padding=1)
    x, weight = operands(problem)
    with torch.inference_mode():
        algorithm.forward(x, weight, problem)
    y = algorithm.forward(x, weight, problem)
    assert not y.is_inference()
    scale = torch.ones((), requires_grad=True)
    (y * scale).sum().backward()
    assert scale.grad is not None


@ALL
@DIRECTIONS
def test_more_threads(algorithm: Winograd, direction: Direction) -> None:
    torch.set_num_threads(2)  # conftest.py restores it
    problem = conv_problem(2, 33, 30, 27, 34, 3, 3, padding=1, direction=direction, threads=2)
    check(algorithm, problem, *operands(problem))


@ALL
def test_threads_get_the_same_result(algorithm: Winograd) -> None:
    problem = conv_problem(1, 16, 30, 30, 16, 3, 3, padding=1)
    x, weight = operands(problem)
    want = algorithm.forward(x, weight, problem)
    _winograd_transforms.arrays.cache_clear()
    results: list[Tensor] = []
    workers = [threading.Thread(target=lambda: results.append(algorithm.forward(x, weight, problem))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 4
    # Threads may split a GEMM differently, so equality is up to rounding.
    assert all(torch.allclose(result, want, rtol=1e-4, atol=1e-4) for result in results)


@ALL
def test_nonfinite_input_is_not_hidden(algorithm: Winograd) -> None:
    """It may spread (`spreads_nonfinite`), but wherever a direct sum is not finite neither is this."""
    assert algorithm.spreads_nonfinite
    problem = conv_problem(1, 3, 12, 12, 3, 3, 3, padding=1)
    x, weight = operands(problem)
    x[0, 1, 5, 6] = float("inf")
    want = REFERENCE.forward(x, weight, problem)
    assert not algorithm.forward(x, weight, problem)[~want.isfinite()].isfinite().any()


# ---- other kernels than 3x3 -----------------------------------------------------------------------------------------


@pairwise(
    DIRECTION
    | LAYOUT
    | {
        "dtype": ["float32", "bfloat16", "float16"],
        "R,S": {f"{R}x{S}": (R, S) for R, S in TILES if (R, S) != (3, 3)},
    }
)
def test_other_kernels(implementation: str, direction: Direction, layout: str, dtype: str, R: int, S: int) -> None:
    """Computed in C for the tiles of the table; a sentence in all other cases."""
    problem = conv_problem(
        2, 20, 13, 17, 35, R, S, padding=(R // 2, 1, 0, S // 2), direction=direction, layout=layout, dtype=dtype
    )
    ran = []
    for algorithm in ALGORITHMS:
        sentence = algorithm.why_not(problem)
        if sentence is None:
            check(algorithm, problem, *operands(problem))
            ran.append(algorithm.m)
        else:
            assert f"{R}x{S}" in sentence
    assert tuple(ran) == (TILES[R, S] if implementation == "c" else ())


DILATED = {
    "uneven phases": conv_problem(2, 20, 19, 23, 35, 3, 3, padding=(3, 0, 1, 4), dilation=(2, 3)),
    "same": conv_problem(2, 33, 28, 30, 40, 3, 3, padding=2, dilation=2),
    "no padding": conv_problem(1, 8, 20, 33, 16, 3, 3, dilation=(4, 5)),
    "rows only": conv_problem(1, 17, 30, 12, 16, 3, 3, padding=(3, 1), dilation=(3, 1)),
    "columns only": conv_problem(1, 16, 9, 41, 17, 3, 3, padding=(1, 4), dilation=(1, 4)),
    "dilation over image": conv_problem(1, 9, 5, 6, 20, 3, 3, padding=8, dilation=8),
    "more padding than reach": conv_problem(1, 5, 6, 7, 4, 3, 3, padding=9, dilation=2),
    "groups": conv_problem(2, 40, 13, 16, 34, 3, 3, padding=2, dilation=2, groups=2),
    # 48 tiles at a time: spans end within groups of 20 phases.
    "spans of parts of groups": conv_problem(1, 300, 3, 130, 20, 3, 3, padding=(1, 20), dilation=(1, 20)),
    "5x5": conv_problem(1, 20, 31, 27, 19, 5, 5, padding=6, dilation=3),
    "7x7": conv_problem(1, 16, 33, 30, 24, 7, 7, padding=6, dilation=2),
    "1x3, wide": conv_problem(2, 24, 2, 300, 20, 1, 3, padding=(0, 64), dilation=(5, 64)),
    "1x5, one row": conv_problem(2, 20, 1, 70, 35, 1, 5, padding=(0, 9), dilation=(1, 4)),
    "2x1": conv_problem(1, 16, 41, 6, 24, 2, 1, padding=(3, 0), dilation=(4, 1)),
    "7x1": conv_problem(1, 24, 61, 5, 16, 7, 1, padding=(9, 0), dilation=(3, 2)),
}
"""The dilation of an axis of one tap says nothing."""


@pairwise(DIRECTION | LAYOUT | {"dtype": ["float32", "bfloat16"], "name": list(DILATED)})
def test_dilated(implementation: str, direction: Direction, layout: str, dtype: str, name: str) -> None:
    """On phases in C; a sentence without it."""
    problem = DILATED[name]._replace(direction=direction, layout=layout, weight_layout=layout, dtype=dtype)
    ran = 0
    for algorithm in ALGORITHMS:
        if algorithm.m not in TILES[problem.R, problem.S]:
            continue
        sentence = algorithm.why_not(problem)
        if implementation == "torch":
            assert "C kernels" in (sentence or "")
        elif sentence is None:
            check(algorithm, problem, *operands(problem))
            ran += 1
        else:
            assert "phases of dilation" in sentence
    assert ran > 0 or implementation == "torch"


@pytest.mark.parametrize("implementation", ["c"], indirect=True)
@pairwise(
    {
        "layout": ["contiguous", "channels_last"],
        "direction": [Direction.FORWARD, Direction.BACKWARD_DATA],
        "m": [2, 4, 5],
    }
)
def test_a_phase_is_computed_as_an_image_of_its_own(
    implementation: str, layout: str, direction: Direction, m: int
) -> None:
    """Bit for bit, in blocks as on several threads; bias included."""
    problem = conv_problem(2, 40, 22, 26, 40, 3, 3, padding=(3, 2), dilation=(3, 2), direction=direction, layout=layout)
    alone = conv_problem(2, 40, 8, 13, 40, 3, 3, padding=1, direction=direction, layout=layout)
    a, b = operands(problem)
    bias = torch.randn(40) if direction == Direction.FORWARD else None
    got, _ = _library.call_checked("cs_winograd", a, b, problem, (m,), bias)
    torch.set_num_threads(3)
    assert torch.equal(got, _library.call_checked("cs_winograd", a, b, problem, (m,), bias)[0])
    for i in range(3):
        for j in range(2):
            phase = a[:, :, i::3, j::2]
            part = alone._replace(H=phase.shape[2], W=phase.shape[3])
            want, _ = _library.call_checked("cs_winograd", phase.contiguous(), b, part, (m,), bias)
            assert torch.equal(got[:, :, i::3, j::2], want)


def test_what_c_does_not_compute() -> None:
    """float64 goes to the PyTorch formulation, and so 5x5 in float64 nowhere."""
    problem = conv_problem(1, 4, 9, 9, 4, 3, 3, padding=1, dtype="float64")
    check(Winograd(4), problem, *operands(problem))
    assert "C kernels" in (Winograd(5).why_not(problem) or "")
    assert Winograd(4).why_not(conv_problem(1, 4, 9, 9, 4, 5, 5, padding=2, dtype="float64")) is not None


@pytest.mark.parametrize(("R", "m"), [(3, 7), (5, 5), (7, 3)])
def test_large_tiles_want_images_of_their_size(implementation: str, R: int, m: int) -> None:
    """In smaller ones most taps meet padding, and few digits are left: Python's rule is the C kernel's."""
    for H, W in ((6, 40), (40, 6), (1, 1)):
        problem = conv_problem(1, 4, H, W, 4, R, R, padding=R // 2)
        assert Winograd(m).why_not(problem) is not None
        if implementation == "c":
            with pytest.raises(RuntimeError):
                _library.call("cs_winograd", *operands(problem), problem, (m,))
    if implementation == "c":  # 20 rows are phases of 6 and 7
        problem = conv_problem(1, 4, 20, 40, 4, R, R, padding=3 * (R // 2), dilation=3)
        assert "phases of dilation 3x3" in (Winograd(m).why_not(problem) or "")
        with pytest.raises(RuntimeError):
            _library.call("cs_winograd", *operands(problem), problem, (m,))
        assert Winograd(m).why_not(problem._replace(H=21)) is None
    assert (Winograd(m).why_not(conv_problem(1, 4, 7, 7, 4, R, R, padding=R // 2)) is None) == (implementation == "c")
