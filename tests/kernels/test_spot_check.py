"""The spot check: right results pass, wrong ones are caught as often as they should be, in C and in PyTorch."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from _guarded import random_problems
from problems import LAYOUTS, PROBLEMS, VOLUMES, arranged, operands_of, random_operands

from convselect.base.problem import Direction, conv_problem
from convselect.kernels import _library, _spot_check, _spot_check_torch
from convselect.kernels._contract import NotApplicable
from convselect.kernels._spot_check import Finding, check, limit, spot_check
from convselect.kernels.pool import ALL, BY_NAME
from convselect.kernels.reference import Reference

needs_library = pytest.mark.skipif(not _library.available(), reason="the C library is not installed")
EVERY_DTYPE = ("float32", "float64", "float16", "bfloat16")
DIRECT = BY_NAME["im2col_gemm"]
SPREADS = BY_NAME["fft"]
IMAGES = conv_problem(8, 8, 56, 56, 6, 3, 3, padding=1)


@pytest.fixture(params=["C", "torch"])
def both(request, monkeypatch):
    """The test runs with the C library and without."""
    if request.param == "C" and not _library.available():
        pytest.skip("the C library is not installed")
    _spot_check._prepared.cache_clear()
    limit.cache_clear()
    if request.param == "torch":
        monkeypatch.setattr(_library, "available", lambda: False)
    yield request.param
    _spot_check._prepared.cache_clear()
    limit.cache_clear()


def exact(problem, a, b, bias=None) -> torch.Tensor:
    y = Reference().run(a.double(), b.double(), problem._replace(dtype="float64"))
    return (y if bias is None else y + bias.double().view(-1, 1, 1)).to(problem.torch_dtype)


def by_torch(result, a, b, p, bias, limit, spreads, places, seed):
    strides = (a.stride(), b.stride(), result.stride())
    places = _spot_check.places_within(p, strides, places, _spot_check.MOST_TERMS)
    return _spot_check_torch.spot_check(result, a, b, p, bias, limit, spreads, places, seed)


def caught(result, operands, problem, times: int = 200, algorithm=DIRECT, bias=None, places: int = 8) -> float:
    """The share of checks that find something wrong."""
    findings = [
        check(algorithm, result, *operands, problem, bias, places=places, seed=seed * 7919) for seed in range(times)
    ]
    return sum(finding is not None and not finding.right for finding in findings) / times


# ---- right results ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_right_results_pass(dtype):
    checked: set[str] = set()
    for i, (listed, direction) in enumerate((p, d) for p in PROBLEMS.values() for d in Direction):
        p = listed._replace(direction=direction, dtype=dtype)
        a, b = operands_of(p, *random_operands(p, seed=i))
        for algorithm in ALL:
            if "cpu" not in algorithm.devices or algorithm.why_not(p) is not None:
                continue
            try:
                result = algorithm.run(a, b, p)
            except NotApplicable:
                continue
            checked.add(algorithm.name)
            finding = check(algorithm, result, a, b, p, places=16, seed=i)
            assert finding is not None
            assert finding.right, f"{algorithm.name} {finding} {p}"
    assert {"native", "im2col_gemm"} <= checked


@pytest.mark.parametrize("direction", Direction, ids=str)
def test_of_volumes_right_results_pass_and_wrong_ones_do_not(direction):
    for i, listed in enumerate(VOLUMES.values()):
        p = listed._replace(direction=direction)
        a, b = operands_of(p, *random_operands(p, LAYOUTS[i % 6], seed=i))
        right = Reference().run(a, b, p)
        finding = check(DIRECT, right, a, b, p, places=16, seed=i)
        assert finding is not None
        assert finding.right, f"{finding} {p}"
        assert len(finding.place) == 5
        if listed is VOLUMES["3x3x3 one voxel"]:  # most of a gradient is no sum at all
            continue
        for wrong in (right * 1.1, right.roll(1, 2) if right.shape[2] > 2 else right + 1, right.flip(-1) + right):
            shares = [check(DIRECT, wrong, a, b, p, places=16, seed=seed).right for seed in range(3)]
            assert not any(shares), f"{p}"
        if direction == Direction.FORWARD:
            bias = torch.randn(p.K)
            assert check(DIRECT, right + bias.view(-1, 1, 1, 1), a, b, p, bias, places=16, seed=i).right
            assert not check(DIRECT, right, a, b, p, bias, places=16, seed=i).right


def test_of_volumes_every_dimension_is_looked_at():
    shape = (3, 5, 7, 9, 11)
    seen = [{_spot_check_torch.choose(shape, False, seed, i, 8)[d] for seed in range(60) for i in range(8)}
            for d in range(5)]  # fmt: skip
    assert [len(s) for s in seen] == list(shape)


@needs_library
def test_c_and_torch_find_the_same():
    problems = [
        p._replace(direction=direction, dtype=EVERY_DTYPE[i % 4])
        for i, p in enumerate(PROBLEMS.values())
        for direction in Direction
    ]
    for i, p in enumerate([*problems, *random_problems(5, 60)]):
        a, b = operands_of(p, *random_operands(p, LAYOUTS[i % 6], LAYOUTS[i // 6 % 6], seed=i))
        bias = torch.randn(2 * p.K)[::2].to(p.torch_dtype) if p.direction == Direction.FORWARD and i % 2 else None
        how = LAYOUTS[i % 5]
        right = exact(p, a, b, bias)
        result = arranged(right, "contiguous" if how == "expanded" else how)
        for spreads, factor in ((False, 1.0), (True, 1.0), (False, 1.5), (True, 1.5)):
            given = result * factor
            given = arranged(given, how) if how in ("channels_last", "transposed", "channel_slice") else given
            got = spot_check(given, a, b, p, bias, limit=8.0, spreads=spreads, places=12, seed=i)
            want = by_torch(given, a, b, p, bias, 8.0, spreads, 12, i)
            assert got is not None
            assert want is not None
            assert got.right == want.right
            # Strides leave some gradients without a single term: 1.5 times nothing is right.
            assert got.right == (factor == 1 or got.expected == 0), f"{got} {p}"
            if p.dtype != "float64":
                assert (got.place, got.got) == (want.place, want.got) or got.ratio < 8
                assert got.ratio == pytest.approx(want.ratio, rel=1e-3, abs=1e-3)


@needs_library
def test_places_are_spread():
    shape = (16, 40, 56, 56)
    rows, edges, total = set(), 0, 0
    for seed in range(50):
        places = [_spot_check_torch.choose(shape, False, seed, i, 8) for i in range(8)]
        assert [n // 2 for n, *_ in places] == list(range(8))  # a stratum of images each
        rows |= {row for _, _, row, _ in places}
        edges += sum(c in (0, size - 1) for place in places for c, size in zip(place[1:], shape[1:], strict=True))
        total += 24
        assert all(0 <= c < size for place in places for c, size in zip(place, shape, strict=True))
    assert len(rows) == 56
    assert 0.1 < edges / total < 0.3


# ---- wrong ones -------------------------------------------------------------------------------------------------


def position(size: int, first: int, end: int) -> float:
    """The probability that an index is in first .. end - 1, by the rule of csrc/spot_check.c: three in four are
    anywhere, the others the first (1/4), the last (1/4), or one of the last eight (1/2)."""
    few = min(size, 8)
    near = (first == 0) / 4 + (end == size) / 4 + max(0, end - max(first, size - few)) / few / 2
    return 0.75 * (end - first) / size + 0.25 * near


def seen(share: float, places: int = 8) -> float:
    return 1 - (1 - share) ** places


SIZE, TILE = IMAGES.P, slice(24, 30)
# What is wrong, and the share of checks of 8 places that see it.
MISTAKES = {
    "everything": (lambda y: y.mul_(1.01), 1.0),
    "one image": (lambda y: y[3].zero_(), 1.0),  # each is a stratum
    "one channel": (lambda y: y[:, 2].zero_(), seen(position(IMAGES.K, 2, 3))),
    "one row": (lambda y: y[:, :, 20].zero_(), seen(position(SIZE, 20, 21))),
    "last row": (lambda y: y[:, :, -1].zero_(), seen(position(SIZE, SIZE - 1, SIZE))),
    "last column": (lambda y: y[..., -1].zero_(), seen(position(SIZE, SIZE - 1, SIZE))),
    "last vector": (lambda y: y[..., -4:].mul_(1.5), seen(position(SIZE, SIZE - 4, SIZE))),
    "one tile": (lambda y: y[:, :, TILE, TILE].mul_(1.1), seen(position(SIZE, 24, 30) ** 2)),
    "tile at the corner": (lambda y: y[:, :, :6, :6].mul_(1.1), seen(position(SIZE, 0, 6) ** 2)),
    "shifted": (lambda y: y.copy_(y.roll(1, 3)), 1.0),
    "transposed": (lambda y: y.copy_(y.transpose(2, 3).clone()), 1.0),
    "garbage": (lambda y: y.copy_(torch.randn_like(y)), 1.0),
    "NaN": (lambda y: y.fill_(float("nan")), 1.0),
    "infinite": (lambda y: y.fill_(float("inf")), 1.0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("algorithm", [DIRECT, SPREADS], ids=["direct", "spreads"])
@needs_library
def test_a_mistake_is_caught(mistake, algorithm):
    change, share = MISTAKES[mistake]
    operands = random_operands(IMAGES)[:2]
    right = exact(IMAGES, *operands)
    assert caught(right, operands, IMAGES, algorithm=algorithm) == 0
    change(right)
    got, deviation = caught(right, operands, IMAGES, 400, algorithm), (share * (1 - share) / 400) ** 0.5
    assert abs(got - share) <= 4 * deviation + 0.01, f"{got} of the checks, not {share}"


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("direction", Direction)
def test_a_mistake_is_caught_in_every_direction_and_dtype(direction, dtype, both):
    p = conv_problem(2, 24, 12, 13, 16, 3, 3, padding=1, direction=direction, dtype=dtype)
    operands = operands_of(p, *random_operands(p))
    right = exact(p, *operands)
    assert caught(right, operands, p, 5) == 0
    assert caught(right * 1.05, operands, p, 5, places=32) == 1
    assert caught(right.flip(0), operands, p, 5) == 1


def test_one_nan_is_caught_where_it_is_looked_at(both):
    p = conv_problem(1, 4, 3, 3, 1, 1, 1)
    operands = random_operands(p)[:2]
    result = exact(p, *operands)
    result[0, 0, 2, 1] = float("nan")
    finding = check(DIRECT, result, *operands, p, places=200, seed=1)
    assert finding.place == (0, 0, 2, 1)
    assert (finding.ratio, finding.right) == (math.inf, False)
    assert math.isnan(finding.got)


def test_a_missing_bias_is_caught(both):
    x, weight, _ = random_operands(IMAGES)
    bias = torch.randn(IMAGES.K)
    y = exact(IMAGES, x, weight)
    assert caught(y, (x, weight), IMAGES, 5) == 0
    assert caught(y, (x, weight), IMAGES, 5, bias=bias) == 1
    assert caught(y + bias.view(-1, 1, 1), (x, weight), IMAGES, 5, bias=bias) == 0
    assert caught(y + bias.view(-1, 1, 1), (x, weight), IMAGES, 5, bias=bias.double()) == 0


def test_another_shape_or_dtype_is_infinitely_wrong(both):
    x, weight, _ = random_operands(IMAGES)
    y = exact(IMAGES, x, weight)
    for result in (y[:, :-1], y[0], y.double(), y.flatten(), y.half(), y.unsqueeze(0), torch.empty(0), y.int()):
        finding = check(DIRECT, result, x, weight, IMAGES, places=2, seed=0)
        assert finding.ratio == math.inf
        assert not finding.right


# ---- no false alarms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_operands_do_not_alarm(value, both):
    for direction in Direction:
        p = conv_problem(1, 4, 12, 12, 6, 3, 3, padding=1, direction=direction)
        a, b = operands_of(p, *random_operands(p))
        a[0, 1, 5, 5] = value
        result = Reference().run(a, b, p)
        for algorithm in (DIRECT, SPREADS):
            assert caught(result, (a, b), p, 5, algorithm, places=64) == 0


def test_sums_that_overflow_are_passed_over(both):
    p = conv_problem(1, 4, 6, 6, 3, 3, 3, padding=1)
    x, weight, _ = random_operands(p)
    x = x * 1e38
    y = torch.full(p.y_shape, math.inf)
    assert check(DIRECT, y, x, weight * 1e3, p, places=8, seed=0) is None
    p = p._replace(dtype="float16")
    x = torch.full(p.x_shape, 300.0, dtype=torch.float16)
    weight = torch.full(p.weight_shape, 300.0, dtype=torch.float16)
    assert check(DIRECT, y.half(), x, weight, p, places=8, seed=0) is None


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
def test_results_below_the_smallest_normal_number_may_be_zero(dtype, both):
    p = conv_problem(1, 4, 6, 6, 3, 3, 3, padding=1, dtype=dtype)
    x, weight, _ = random_operands(p)
    tiny = torch.finfo(p.torch_dtype).smallest_normal
    if dtype == "float16":  # kept, but with few bits
        small = (x * 1e-4, weight * 1e-2)
        assert caught(exact(p, *small), small, p, 5) == 0
        return
    # Operands, products or only results that are subnormal.
    for scale_x, scale_w in ((tiny / 4, 1.0), (tiny * 8, 1.0), (tiny**0.5, tiny**0.5), (tiny / 4, 1e3)):
        a = (x.double() * scale_x).to(p.torch_dtype)
        b = (weight.double() * scale_w).to(p.torch_dtype)
        for algorithm in (DIRECT, SPREADS):
            right = exact(p, a, b)
            assert caught(right, (a, b), p, 5, algorithm) == 0
            assert caught(torch.where(right.abs() < tiny, 0, right), (a, b), p, 5, algorithm) == 0
            flushed = torch.where(a.abs() < tiny, 0, a), torch.where(b.abs() < tiny, 0, b)
            assert caught(exact(p, *flushed), (a, b), p, 5, algorithm) == 0


def test_errors_beside_a_bright_object_are_a_transforms_own(both):
    for direction in Direction:
        p = conv_problem(1, 4, 32, 32, 4, 3, 3, padding=1, direction=direction)
        a, b = operands_of(p, *random_operands(p))
        a[..., 16:] = 0
        result = exact(p, a, b)
        noisy = result + 1e-6 * result.abs().max() * torch.randn_like(result)
        assert caught(result, (a, b), p, 10, DIRECT) == caught(result, (a, b), p, 10, SPREADS) == 0
        assert caught(noisy, (a, b), p, 10, SPREADS) == 0
        if direction != Direction.BACKWARD_WEIGHT:
            assert caught(noisy, (a, b), p, 10, DIRECT) == 1
        assert caught(result + 0.01 * result.abs().max(), (a, b), p, 10, SPREADS) == 1


@needs_library
def test_letterboxed_images_and_outliers_pass_through_every_algorithm():
    for direction in Direction:
        for p in (conv_problem(2, 8, 28, 28, 8, 3, 3, padding=1), conv_problem(1, 4, 30, 30, 4, 5, 5, padding=2)):
            p = p._replace(direction=direction)
            for kind in range(3):
                a, b = operands_of(p, *random_operands(p, seed=kind))
                a = a.relu() if kind == 0 else a
                a[:, :, :9] = 0
                if kind == 2:
                    a[0, 1, 20, 20] = 1e3
                for algorithm in ALL:
                    if "cpu" in algorithm.devices and algorithm.why_not(p) is None:
                        result = algorithm.run(a, b, p)
                        assert caught(result, (a, b), p, 10, algorithm, places=32) == 0, f"{algorithm} {kind} {p}"


@needs_library
@pytest.mark.parametrize("name", ["direct", "im2col_gemm", "fft", "winograd4"])
def test_constants_whose_additions_all_round_the_same_way_pass(name):
    """The worst that a sum can do; which constants are bad differs."""
    generator = torch.Generator().manual_seed(11)
    dense = conv_problem(1, 1024, 7, 7, 4, 3, 3, padding=1)
    pixels = conv_problem(4, 4, 56, 56, 4, 3, 3, padding=1)
    for p in (dense, pixels.with_direction(Direction.BACKWARD_WEIGHT)):
        for _ in range(12):
            c, e = (torch.rand(2, generator=generator) + 0.5).tolist()
            a, b = operands_of(p, torch.full(p.x_shape, c), torch.full(p.weight_shape, e), torch.full(p.y_shape, e))
            result = BY_NAME[name].run(a, b, p)
            assert caught(result, (a, b), p, 2, BY_NAME[name], places=64) == 0


# ---- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("direction", Direction)
def test_strides_of_all_kinds(how, direction, both):
    p = conv_problem(2, 4, 9, 11, 6, 3, 3, padding=(2, 0, 1, 3), stride=(1, 2), groups=2, direction=direction)
    a, b = operands_of(p, *random_operands(p, how, how))
    result = exact(p, a, b)
    if how != "expanded":
        result = arranged(result, how)
    assert caught(result, (a, b), p, 5) == 0
    assert caught(result * 1.5, (a, b), p, 5, places=16) == 1


def test_lazily_negated_tensors(both):
    p = conv_problem(1, 4, 6, 6, 3, 3, 3, padding=1)
    x, weight, _ = random_operands(p)
    negated = torch.complex(x, -x).conj().imag
    assert negated.is_neg()
    y = exact(p, x, weight)
    assert caught(y, (negated, weight), p, 5) == 0
    assert caught(torch.complex(y, -y).conj().imag, (x, weight), p, 5) == 0
    zeros = torch._efficientzerotensor(p.x_shape)
    assert caught(torch.zeros(p.y_shape), (zeros, weight), p, 5) == 0


def test_nothing_to_check(both):
    x, weight, _ = random_operands(IMAGES)
    meta = torch.empty(IMAGES.y_shape, device="meta")
    assert check(DIRECT, meta, x, weight, IMAGES, places=2, seed=0) is None
    assert check(DIRECT, x.to_sparse(), x, weight, IMAGES, places=2, seed=0) is None
    empty = IMAGES._replace(N=0)
    assert check(DIRECT, torch.empty(empty.y_shape), x[:0], weight, empty, places=2, seed=0) is None


def test_an_operand_that_does_not_fit_is_an_error(both):
    x, weight, _ = random_operands(IMAGES)
    y = exact(IMAGES, x, weight)
    for a, b, bias in (
        (x[:1], weight, None), (x, weight.double(), None), (x, weight[0], None), (x, weight, torch.zeros(2)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="for forward"):
            check(DIRECT, y, a, b, IMAGES, bias, places=2, seed=0)


def test_a_gradient_is_not_required(both):
    x, weight, _ = (t.requires_grad_() for t in random_operands(IMAGES))
    y = torch.conv2d(x, weight, padding=1)
    assert caught(y, (x, weight), IMAGES, 3, bias=torch.zeros(IMAGES.K, requires_grad=True)) == 0


def test_the_work_is_bounded():
    p = conv_problem(8, 64, 112, 112, 64, 3, 3, padding=1)
    strides = tuple(torch.empty(shape, device="meta").stride() for shape in (p.x_shape, p.y_shape, p.weight_shape))
    last = tuple(
        torch.empty(shape, device="meta", memory_format=torch.channels_last).stride()
        for shape in (p.x_shape, p.y_shape)
    )
    assert _spot_check.places_within(p, strides, 8, 10**6) == 8
    w = p.with_direction(Direction.BACKWARD_WEIGHT)
    assert _spot_check.places_within(w, strides, 64, 10**6) == 10**6 // (8 * 112 * 112)
    assert _spot_check.places_within(w, (*last, strides[2]), 8, 10**6) == 1
    assert _spot_check.places_within(w, strides, 8, 10) == 1


def test_seeds_of_64_bits_and_beyond(both):
    x, weight, _ = random_operands(IMAGES)
    y = exact(IMAGES, x, weight) * 1.5
    seeds = [0, 1, 2**63, 2**64 - 1, 2**64, -1]
    findings = [check(DIRECT, y, x, weight, IMAGES, places=1, seed=seed) for seed in seeds]
    assert findings[0] == findings[4]
    assert findings[3] == findings[5]
    assert len({f.place for f in findings}) == 4


@needs_library
def test_a_check_passes_few_frames_of_python():
    x, weight, _ = random_operands(IMAGES)
    y = exact(IMAGES, x, weight)
    check(DIRECT, y, x, weight, IMAGES, places=8, seed=0)
    frames: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        finding = check(DIRECT, y, x, weight, IMAGES, places=8, seed=0)
    finally:
        sys.setprofile(before)
    assert isinstance(finding, Finding)
    assert len(frames) <= 8
