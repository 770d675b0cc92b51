"""Winograd at stride 2: the three directions, both parities of the padding, outliers, threads, rounding, refusals."""

from __future__ import annotations

import pytest
import torch
from pairs import pairwise
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels._contract import Grade
from convselect.kernels.reference import Reference
from convselect.kernels.winograd import STRIDED_TILES, Winograd
from convselect.tune.features import estimate

pytestmark = pytest.mark.skipif(not _library.available(), reason="the C kernels are not built here")
TILES = {f"F{m}-{R}x{R}": (m, R) for (R, _), sizes in STRIDED_TILES.items() for m in sizes}
REFERENCE = Reference()


def operands(p: ConvProblem, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        data = torch.randn(shape, generator=generator).to(p.torch_dtype)
        return data.contiguous(memory_format=torch.channels_last) if p.layout == CHANNELS_LAST else data

    x, weight, grad_y = normal(p.x_shape), normal(p.weight_shape), normal(p.y_shape)
    if p.direction == Direction.FORWARD:
        return x, weight
    return (grad_y, weight) if p.direction == Direction.BACKWARD_DATA else (x, grad_y)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def sizes(R: int) -> dict[str, ConvProblem]:
    def two(*shape: int, padding: int | tuple[int, ...], groups: int = 1) -> ConvProblem:
        N, C, H, W, K = shape
        return conv_problem(N, C, H, W, K, R, R, stride=2, padding=padding, groups=groups)

    half = R // 2
    return {
        "usual": two(2, 20, 17, 14, 40, padding=half),
        "other parity": two(1, 16, 23, 18, 33, padding=half + 1),
        "not square": two(1, 5, 10, 31, 18, padding=(half, half + 1, half + 2, 0)),
        "one output": two(2, 4, R, R, 4, padding=0),
        "unread last row and column": two(1, 8, R + 5, R + 3, 4, padding=0),
        "1x1 image": two(3, 5, 1, 1, 7, padding=half),
        "groups": two(2, 34, 13, 16, 68, padding=half, groups=2),
        "several blocks": two(1, 80, 9, 12, 100, padding=half),
    }


NAMES = list(sizes(3))


@pairwise(
    {
        "tile": list(TILES.values()),
        "name": NAMES,
        "direction": list(Direction),
        "layout": [CONTIGUOUS, CHANNELS_LAST],
        "dtype": ["float32", "float32", "bfloat16", "float16"],
        "isa": sorted(level for level in _library.ISAS.values() if level <= _library.isa()),
    }
)
def test_three_directions(
    tile: tuple[int, int], name: str, direction: Direction, layout: str, dtype: str, isa: int
) -> None:
    m, R = tile
    p = sizes(R)[name]._replace(direction=direction, layout=layout, weight_layout=layout, dtype=dtype)
    a, b = operands(p)
    assert Winograd(m).why_not(p) is None
    got = _library.call("cs_winograd", a, b, p, (m,), isa_level=isa)
    tolerance = FORWARD[dtype, Winograd(m).error_grade(p)]
    if direction == Direction.BACKWARD_WEIGHT:
        tolerance *= WEIGHT_GRADIENT_FACTOR
    assert error(got, REFERENCE.run(a.double(), b.double(), p)) <= tolerance
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize(("m", "R"), TILES.values(), ids=TILES)
def test_rounding(m: int, R: int, direction: Direction) -> None:
    """On normal and on rectified data."""
    p = conv_problem(1, 192, 28, 28, 64, R, R, stride=2, padding=R // 2, direction=direction)
    a, b = operands(p)
    bound = {3: 4e-7, 4: 4e-7, 5: 6e-7, 6: 1.2e-6, 7: 2e-6, 8: 5e-6}[m + (R - 1) // 2]
    for first in (a, a.relu()):
        want = REFERENCE.run(first.double(), b.double(), p)
        assert error(Winograd(m).run(first, b, p), want) <= bound


@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_same_bits_whatever_the_number_of_threads(
    direction: Direction, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = conv_problem(2, 40, 29, 30, 70, 3, 3, stride=2, padding=1, direction=direction)._replace(layout=layout)
    a, b = operands(p)
    for m in (3, 4):
        results = []
        for threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            results.append(_library.call("cs_winograd", a, b, p, (m,)))
        if direction == Direction.BACKWARD_WEIGHT:  # spans are as long as blocks allow, and these are shared
            assert error(results[1], results[0].double()) <= 1e-6
        else:
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("padding", [1, 2])
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA], ids=str)
@pytest.mark.parametrize("size", [17, 70])
def test_an_outlier_stays_where_it_is(direction: Direction, padding: int, size: int) -> None:
    """Tiles that hold it are computed again as direct sums, in images of few tiles and of many; with bias, residual and
    activation where there are any."""
    for R, sizes_of in ((3, (3, 4, 7)), (4, (2, 4)), (5, (4, 5)), (7, (4,))):
        p = conv_problem(1, 20, size, size, 24, R, R, stride=2, padding=padding, direction=direction)
        a, b = operands(p)
        a[0, 3, 6, 5] = 1e8
        spoilt = a.clone().zero_()
        spoilt[0, 3, 6, 5] = 1.0
        forward = direction == Direction.FORWARD
        bias, residual = torch.randn(p.K), torch.randn(p.result_shape)
        sees = REFERENCE.run(spoilt.double(), torch.ones_like(b).double(), p) != 0
        want = REFERENCE.run(a.double(), b.double(), p)
        if forward:
            want = torch.relu(want + bias.double()[:, None, None] + residual.double())
        for m in sizes_of:
            rest = (bias, residual, "relu") if forward else ()
            got, usable = _library.call_checked("cs_winograd", a, b, p, (m,), *rest)
            assert usable
            assert (got.double() - want).abs().masked_fill(sees, 0).max() <= 1e-3, (R, m)


def test_a_weight_gradient_that_one_product_dominates_is_left_to_others() -> None:
    p = conv_problem(1, 16, 64, 64, 16, 3, 3, stride=2, padding=1, direction=Direction.BACKWARD_WEIGHT)
    x, grad_y = operands(p)
    assert _library.call_checked("cs_winograd", x, grad_y, p, (4,))[1]
    x[0, 2, 9, 9], grad_y[0, 2, 4, 4] = 1e8, 1e8
    assert not _library.call_checked("cs_winograd", x, grad_y, p, (4,))[1]


def test_an_infinity_is_noticed() -> None:
    p = conv_problem(1, 16, 20, 20, 16, 3, 3, stride=2, padding=1)
    x, weight = operands(p)
    x[0, 2, 9, 9] = torch.inf
    assert Winograd(4).run_checked(x, weight, p) is None


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (conv_problem(1, 4, 9, 9, 4, 3, 3, stride=(2, 1)), "stride 2x1"),
        (conv_problem(1, 4, 9, 9, 4, 3, 3, stride=3), "stride 3x3"),
        (conv_problem(1, 4, 9, 9, 4, 1, 3, stride=2), "1x3"),
        (conv_problem(1, 4, 9, 9, 4, 3, 3, stride=2, dilation=(1, 2)), "dilation 1x2"),
        (conv_problem(1, 4, 9, 9, 4, 3, 3, stride=2, dtype="float64"), "float64"),
        (
            conv_problem(
                1, 4, 9, 9, 4, 3, 3, stride=2, padding=(1, 1, 0, 0), direction=Direction.BACKWARD_DATA
            ),
            "both even or both odd",
        ),
    ],
)  # fmt: skip
def test_why_not(problem: ConvProblem, word: str) -> None:
    sentence = Winograd(4).why_not(problem)
    assert sentence is not None
    assert word in sentence
    if problem.dtype == "float32":  # Python's rule is the C kernel's
        with pytest.raises(RuntimeError):
            _library.call("cs_winograd", *operands(problem), problem, (4,))


def test_tiles_that_there_are_not() -> None:
    p = conv_problem(1, 4, 9, 9, 4, 3, 3, stride=2)
    assert "for 3x3 at stride 2 there is winograd3" in (Winograd(2).why_not(p) or "")
    assert Winograd(7).why_not(conv_problem(1, 4, 3, 3, 4, 3, 3, stride=2)) is None  # no tile has many points


def test_grades() -> None:
    for (R, S), sizes_of in STRIDED_TILES.items():
        for m in sizes_of:
            grade = Winograd(m).error_grade(conv_problem(1, 64, 28, 28, 64, R, S, stride=2))
            points = m + (R - 1) // 2
            assert grade == (Grade.DIRECT if points <= 5 else Grade.NEAR if points <= 7 else Grade.CLOSE)


def test_a_tile_of_stride_2_is_counted_as_such() -> None:
    """By the tuner's estimate: 81 positions for 4 x 4 outputs, 49 tiles of 28 x 28."""
    for direction in Direction:
        p = conv_problem(1, 64, 56, 56, 32, 3, 3, stride=2, padding=1, direction=direction)
        found = estimate(p, "winograd4")
        assert (found.tiles, found.taps, found.flops) == (49, 81, 2 * 49 * 81 * 64 * 32)
