"""Statistics, normalisation, softmax, pooling and concatenation against PyTorch in float64."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F

from convselect.freeze import pooling, reduce
from convselect.kernels import _library

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
LAST, FIRST = torch.channels_last, torch.contiguous_format
FORMATS = pytest.mark.parametrize("layout", [FIRST, LAST], ids=["NCHW", "NHWC"])
EPS = 2.0**-24
NAN, INF = math.nan, math.inf


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setattr(_library, "isa", lambda: request.param)
    return request.param


def run(bound):
    assert bound is not None
    assert bound.function(*bound.arguments) == _library.OK


def empty(shape, layout=FIRST):
    return torch.full(shape, NAN).contiguous(memory_format=layout) if len(shape) == 4 else torch.full(shape, NAN)


def image(*shape, layout=FIRST, scale=1.0, shift=0.0):
    return (scale * torch.randn(shape) + shift).contiguous(memory_format=layout)


# ---- means ----------------------------------------------------------------------------------------------------------


@FORMATS
def test_means_of_pixels(layout, level):
    r = random.Random(1)
    sizes = [(1, 1, 1, 1), (2, 960, 7, 7), (1, 16, 113, 97), (1, 513, 3, 3), (3, 1, 5, 5), (1, 7, 1, 1)]
    sizes += [(r.randint(1, 3), r.randint(1, 67), r.randint(1, 67), r.randint(1, 67)) for _ in range(12)]
    for shape in sizes:
        x = image(*shape, layout=layout, shift=3.0)
        for out in (empty((*shape[:2], 1, 1)), empty(shape[:2])):
            run(reduce.mean(x, out))
            want = x.double().mean((2, 3)).view(out.shape)
            # Partial sums of 64 terms: few roundings of the size of the mean.
            assert ((out - want).abs() <= 8 * EPS * want.abs()).all(), shape


def test_long_sums_are_as_exact_as_short_ones(level):
    x = torch.full((1, 3, 1000, 1000), 0.1)
    for layout in (FIRST, LAST):
        run(reduce.mean(x.contiguous(memory_format=layout), out := empty((1, 3))))
        assert ((out.double() - x[0, 0, 0, 0].item()).abs() <= 16 * EPS * 0.1).all()


STATISTICS = {
    "total": (reduce.total, lambda x, dim: x.sum(dim, keepdim=True)),
    "norm": (reduce.norm, lambda x, dim: torch.linalg.vector_norm(x, 2, dim, keepdim=True)),
    "variance": (reduce.variance, lambda x, dim: x.var(dim, keepdim=True)),
    "variance of all": (
        lambda x, out, dim: reduce.variance(x, out, dim, 0),
        lambda x, dim: x.var(dim, correction=0, keepdim=True),
    ),
    "largest": (reduce.largest, lambda x, dim: x.amax(dim, keepdim=True)),
}


@FORMATS
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name, layout, level):
    ours, plain = STATISTICS[name]
    r = random.Random(3)
    sizes = [(1, 513, 3, 3), (2, 70, 7, 7), (1, 3, 67, 41), (1, 1, 2, 1)]
    sizes += [(r.randint(1, 3), r.randint(1, 67), r.randint(1, 35), r.randint(2, 35)) for _ in range(5)]
    for shape in sizes:
        x = image(*shape, layout=layout, shift=3.0)
        for dim in ((2, 3), (1,)):
            if name == "variance" and math.prod(shape[d] for d in dim) == 1:
                continue
            want = plain(x.double(), dim)
            run(ours(x, out := torch.full_like(want, NAN, dtype=torch.float32), dim))
            # Sums of 64 terms, means within 2^-24 of their size: squares of what is off stay below the rest.
            assert ((out - want).abs() <= 24 * EPS * (want.abs() + (name == "total"))).all(), (shape, dim)


def test_a_nan_is_the_largest(level):
    for n in (3, 16, 77, 300):
        x = torch.randn(n, n)
        for place in {0, 1, n // 2, n - 1}:
            y = x.clone()
            y[place, n - 1 - place] = NAN
            for dim in (0, 1):
                run(reduce.largest(y, out := empty((n,)), [dim]))
                assert torch.equal(out.nan_to_num(99.0), y.amax(dim).nan_to_num(99.0))
    run(reduce.largest(torch.full((5, 40), -INF), out := empty((5,)), [1]))
    assert torch.equal(out, torch.full((5,), -INF))


def test_the_variance_of_large_values_close_together(level):
    x = 1e4 + torch.randn(1, 6, 40, 40)
    for layout in (FIRST, LAST):
        run(reduce.variance(x.contiguous(memory_format=layout), out := empty((1, 6)), (2, 3)))
        torch.testing.assert_close(out.double(), x.double().var((2, 3)), rtol=1e-5, atol=0)


def test_a_variance_of_one_value_is_left_to_pytorch():
    assert reduce.variance(torch.randn(3, 1), empty((3, 1)), [1]) is None


def test_means_over_other_dimensions(level):
    tokens = torch.randn(3, 37, 45) + 2
    for dim in (0, 1, 2, -1):
        shape = list(tokens.shape)
        shape[dim] = 1
        run(reduce.mean(tokens, out := empty(shape), [dim]))
        want, size = (t.mean(dim, keepdim=True) for t in (tokens.double(), tokens.double().abs()))
        assert ((out - want).abs() <= 8 * EPS * size).all()
    run(reduce.mean(tokens, out := empty((45,)), [0, 1]))
    torch.testing.assert_close(out.double(), tokens.double().mean((0, 1)), rtol=8 * EPS, atol=0)
    assert reduce.mean(tokens, empty((37,)), [0, 2]) is None  # no neighbours


# ---- layer norm, softmax --------------------------------------------------------------------------------------------


def off_norm(got, x, weight, bias, eps, dim):
    """The worst error, in units of 2^-24 of what is added up: the normalised value times the weight, the bias, and the
    mean's rounding in units of the deviation."""
    x = x.double()
    shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    mean, deviation = x.mean(dim, keepdim=True), (x.var(dim, unbiased=False, keepdim=True) + eps).sqrt()
    w = torch.ones(x.shape[dim]).double() if weight is None else weight.double()
    b = torch.zeros(x.shape[dim]).double() if bias is None else bias.double()
    w, b, value = w.view(shape), b.view(shape), (x - mean) / deviation
    size = w.abs() * (value.abs() + (x.abs() + mean.abs()) / deviation) + b.abs()
    return ((got.double() - (value * w + b)).abs() / (EPS * size + 1e-30)).max().item()


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm_over_the_last_dimension(affine, level):
    for shape in ((1, 1), (197, 192), (5, 17), (2, 3, 67), (1, 5000), (3, 1, 16)):
        x = 3 * torch.randn(shape) + 5
        weight, bias = (torch.randn(shape[-1]) if there else None for there in affine)
        run(reduce.layer_norm(x, weight, bias, 1e-6, out := empty(shape)))
        assert off_norm(out, x, weight, bias, 1e-6, -1) <= 10, shape
    want = F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    torch.testing.assert_close(out, want)


@FORMATS
def test_layer_norm_over_channels(layout, level):
    for shape in ((2, 96, 7, 9), (1, 40, 8, 8), (3, 1, 5, 5), (1, 133, 1, 67), (1, 7, 12, 23)):
        x = image(*shape, layout=layout, scale=2.0, shift=-4.0)
        weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
        run(reduce.layer_norm(x, weight, bias, 1e-6, out := torch.full_like(x, NAN), 1))
        assert off_norm(out, x, weight, bias, 1e-6, 1) <= 10, shape
        want = out.clone()
        run(reduce.layer_norm(x, weight, bias, 1e-6, x, 1))
        assert torch.equal(x, want)  # in place


def test_softmax(level):
    for shape in ((1, 1), (3, 1000), (2, 4, 49, 49), (1, 5, 17), (2, 5000)):
        x = 4 * torch.randn(shape)
        run(reduce.softmax(x, out := empty(shape)))
        want = x.double().softmax(-1)
        assert ((out - want).abs() <= 24 * EPS * want + 1e-40).all(), shape  # of e^x, x rounded at up to 20
        run(reduce.softmax(x, x))
        assert torch.equal(x, out)


def test_softmax_of_what_is_not_finite(level):
    rows = torch.randn(7, 37)
    rows[0, 3], rows[1, 36], rows[2, 5], rows[4, 0] = NAN, INF, -INF, 3e38
    rows[3], rows[5, :30] = -INF, -INF
    run(reduce.softmax(rows, out := empty(rows.shape)))
    torch.testing.assert_close(out, rows.softmax(-1), equal_nan=True)


# ---- pooling --------------------------------------------------------------------------------------------------------


def pool_cases(seed, count):
    """(shape, kernel, stride, padding, dilation, ceil_mode) that PyTorch takes."""
    listed = [
        ((1, 64, 24, 24), (3, 3), (2, 2), (1, 1), (1, 1), False),
        ((1, 20, 14, 15), (2, 2), (2, 2), (0, 0), (1, 1), False),
        ((1, 20, 15, 15), (2, 2), (2, 2), (0, 0), (1, 1), True),
        ((1, 40, 9, 9), (3, 3), (1, 1), (1, 1), (1, 1), False),
        ((1, 33, 7, 7), (7, 7), (7, 7), (0, 0), (1, 1), False),
    ]
    yield from listed
    r = random.Random(seed)
    while count:
        shape = (r.choice((1, 2)), *(r.randint(1, 67) for _ in range(1)), r.randint(1, 40), r.randint(1, 67))
        kernel = (r.randint(1, 5), r.randint(1, 5))
        stride = (r.randint(1, 4), r.randint(1, 5))
        padding = (r.randint(0, kernel[0] // 2), r.randint(0, kernel[1] // 2))
        dilation = (r.choice((1, 1, 2)), r.choice((1, 1, 3)))
        ceil_mode = r.random() < 0.4
        x = torch.empty(shape, device="meta")
        try:
            F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
        except RuntimeError:
            continue  # no output
        count -= 1
        yield shape, kernel, stride, padding, dilation, ceil_mode


@FORMATS
def test_max_pool(layout, level):
    for shape, *arguments in pool_cases(1, 60):
        x = image(*shape, layout=layout)
        want = F.max_pool2d(x, *arguments)
        out = torch.full_like(want, NAN, memory_format=layout)
        run(pooling.max_pool(x, out, *arguments))
        assert torch.equal(out, want), (shape, arguments)


@FORMATS
def test_max_pool_of_what_is_not_finite(layout, level):
    r = random.Random(3)
    for shape, *arguments in pool_cases(2, 20):
        x = image(*shape, layout=layout)
        for value in (NAN, INF, -INF, INF, NAN):
            x[tuple(r.randrange(n) for n in shape)] = value
        want = F.max_pool2d(x, *arguments)
        run(pooling.max_pool(x, out := torch.full_like(want, 7.0, memory_format=layout), *arguments))
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
    x = torch.full((1, 5, 4, 4), -INF).contiguous(memory_format=layout)
    run(pooling.max_pool(x, out := empty((1, 5, 2, 2), layout), 2))
    assert (out == -INF).all()


@FORMATS
@pytest.mark.parametrize("counts_padding", [True, False])
def test_avg_pool(layout, counts_padding, level):
    for i, (shape, kernel, stride, padding, _, ceil_mode) in enumerate(pool_cases(3, 60)):
        x = image(*shape, layout=layout, shift=2.0)
        divisor = 5 if i % 7 == 0 else None
        arguments = (kernel, stride, padding, ceil_mode, counts_padding, divisor)
        try:
            want = F.avg_pool2d(x.double(), *arguments)
        except RuntimeError:
            continue
        out = torch.full_like(want, NAN, dtype=torch.float32, memory_format=layout)
        run(pooling.avg_pool(x, out, *arguments))
        size = F.avg_pool2d(x.double().abs(), *arguments)
        assert ((out - want).abs() <= 12 * EPS * size).all(), (shape, arguments)


def test_strides_and_sizes_as_pytorch_takes_them():
    x = image(1, 3, 9, 8)
    for kernel, stride in ((2, None), ([2], []), ((3, 2), [2]), ([2, 3], (1, 2))):
        want = F.max_pool2d(x, kernel, stride if stride != [] else None)
        run(pooling.max_pool(x, out := torch.full_like(want, NAN), kernel, stride))
        assert torch.equal(out, want)


# ---- concatenation --------------------------------------------------------------------------------------------------


@FORMATS
def test_concatenation_of_channels(layout):
    for shapes in ((3,), (1, 5), (64, 32, 32), (7, 17, 1, 30)):
        for N, H, W in ((1, 1, 1), (2, 5, 7), (1, 40, 41)):
            parts = [image(N, C, H, W, layout=layout) for C in shapes]
            run(reduce.concatenate(parts, out := empty((N, sum(shapes), H, W), layout), 1))
            assert torch.equal(out, torch.cat(parts, 1))


def test_concatenation_over_any_dimension():
    r = random.Random(5)
    for dims, dim in itertools.product((1, 2, 3, 4), range(-4, 4)):
        if not -dims <= dim < dims:
            continue
        sizes = [r.randint(1, 9) for _ in range(dims)]
        parts = []
        for _ in range(3):
            sizes[dim] = r.randint(0, 5)
            parts.append(torch.randn(sizes))
        want = torch.cat(parts, dim)
        if want.numel():
            run(reduce.concatenate(parts, out := torch.full_like(want, NAN), dim))
            assert torch.equal(out, want)


@FORMATS
def test_parts_of_larger_tensors_are_joined(layout):
    x, y = image(2, 12, 5, 6, layout=layout), image(2, 9, 5, 6, layout=layout)
    whole = image(2, 20, 5, 6, layout=layout)
    want = whole.clone()
    want[:, 3:13] = torch.cat([x[:, 2:6], y[:, :6]], 1)
    run(reduce.concatenate([x[:, 2:6], y[:, :6]], whole[:, 3:13], 1))
    assert torch.equal(whole, want)


@FORMATS
def test_group_norm(layout, level):
    for N, C, H, W, groups in [
        (1, 24, 9, 7, 4),
        (2, 600, 3, 5, 3),
        (1, 64, 28, 28, 1),
        (3, 5, 1, 2, 5),
        (1, 1, 6, 6, 1),
    ]:
        x = image(N, C, H, W, layout=layout, scale=2.0, shift=5.0)
        for weight, bias in ((torch.rand(C) + 0.5, torch.randn(C)), (None, torch.randn(C)), (None, None)):
            run(reduce.group_norm(x, groups, weight, bias, 1e-3, out := torch.full_like(x, NAN)))
            want = F.group_norm(x.double(), groups, *(None if t is None else t.double() for t in (weight, bias)), 1e-3)
            assert ((out - want).abs() <= 1e-5 * (want.abs() + 1)).all()
            for activation, plain in (("leaky_relu", lambda t: F.leaky_relu(t, 0.3)), ("silu", F.silu)):
                run(reduce.group_norm(x, groups, weight, bias, 1e-3, after := torch.full_like(x, NAN), activation, 0.3))
                assert ((after - plain(want)).abs() <= 1e-5 * (want.abs() + 1)).all()
        run(reduce.group_norm(x, groups, None, None, 1e-3, x))  # in place
        torch.testing.assert_close(x, out, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_volumes(layout, level):
    """Group norms, and pooling by windows of one tap along the depth, or along it only."""
    x = torch.randn(2, 12, 5, 6, 7).contiguous(memory_format=layout)
    run(reduce.group_norm(x, 4, None, None, 1e-3, out := torch.full_like(x, NAN)))
    assert ((out - F.group_norm(x.double(), 4, None, None, 1e-3)).abs() <= 1e-5 * (out.abs() + 1)).all()
    for arguments in (((1, 2, 3), (1, 2, 2), (0, 1, 1)), ((3, 1, 1), (2, 1, 1), (1, 0, 0)), ((1, 1, 2),)):
        for plain, ours in ((F.max_pool3d, pooling.max_pool), (F.avg_pool3d, pooling.avg_pool)):
            want = plain(x.double(), *arguments)
            run(ours(x, out := torch.full(want.shape, NAN).contiguous(memory_format=layout), *arguments))
            assert ((out - want).abs() <= 1e-6 * (want.abs() + 1)).all()
    assert pooling.max_pool(x, torch.empty(2, 12, 2, 3, 3), 2) is None  # along all axes
    other = torch.channels_last_3d if layout == torch.contiguous_format else torch.contiguous_format
    out = torch.empty(2, 12, 2, 6, 7).contiguous(memory_format=other)
    assert pooling.max_pool(x, out, (2, 1, 1)) is None
    assert pooling.avg_pool(x[..., ::2], out[..., ::2], (2, 1, 1)) is None
    assert reduce.group_norm(x.transpose(2, 3), 4, None, None, 1e-3, out.new_empty(2, 12, 6, 5, 7)) is None


# ---- all of them ----------------------------------------------------------------------------------------------------


@FORMATS
def test_any_number_of_threads_gives_the_same_bits(layout):
    x, y = image(2, 70, 33, 35, layout=layout), image(2, 30, 33, 35, layout=layout)
    weight = torch.randn(70)
    pooled = F.max_pool2d(x, 3, 2, 1)
    calls = [
        (lambda out: reduce.mean(x, out), empty((2, 70, 1, 1))),
        (lambda out: reduce.layer_norm(x, weight, None, 1e-5, out, 1), x),
        (lambda out: reduce.softmax(x.view(-1), out.view(-1)) if layout is FIRST else reduce.mean(x, out), x),
        (lambda out: reduce.norm(x, out, (2, 3)), empty((2, 70, 1, 1))),
        (lambda out: reduce.group_norm(x, 5, weight, None, 1e-5, out), x),
        (lambda out: pooling.max_pool(x, out, 3, 2, 1), pooled),
        (lambda out: pooling.avg_pool(x, out, 3, 2, 1), pooled),
        (lambda out: reduce.concatenate([x, y], out, 1), torch.cat([x, y], 1)),
    ]
    for number, (make, like) in enumerate(calls):
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            out = torch.full_like(like, NAN) if like.dim() != 4 or like.shape[2] > 1 else empty(like.shape)
            bound = make(out)
            if bound is None:
                assert number == 2
                break
            run(bound)
            results.append(out)
        assert all(torch.equal(result, results[0]) for result in results), number
        assert number == 2 or not results[0].isnan().any()


def test_what_is_not_covered():
    x, last = image(2, 6, 8, 10), image(2, 6, 8, 10, layout=LAST)
    small = empty((2, 6, 4, 5))
    assert pooling.max_pool(last, small, 2) is None  # another layout
    assert pooling.max_pool(x, empty((2, 6, 4, 4)), 2) is None
    assert pooling.max_pool(x.double(), small, 2) is None
    assert pooling.max_pool(x, small, 2, 2, 2) is None  # PyTorch refuses this padding
    assert pooling.max_pool(x[0], small[0], 2) is None
    assert pooling.max_pool(x[:, ::2], small[:, ::2], 2) is None
    assert pooling.avg_pool(x, small, 2, divisor_override=0) is None
    assert reduce.mean(x, empty((2, 7, 1, 1))) is None
    assert reduce.mean(last, empty((2, 6, 8, 1)), [3]) is None  # the result would be in another order
    assert reduce.layer_norm(x, torch.ones(6), None, 1e-5, torch.empty_like(last), 1) is None
    assert reduce.layer_norm(x, torch.ones(5), None, 1e-5, torch.empty_like(x), 1) is None
    assert reduce.group_norm(x, 4, None, None, 1e-5, torch.empty_like(x)) is None
    assert reduce.group_norm(x, 2, None, None, 1e-5, torch.empty_like(last)) is None
    assert reduce.group_norm(x, 2, torch.ones(5), None, 1e-5, torch.empty_like(x)) is None
    assert reduce.softmax(last, torch.empty_like(last)) is None
    memory = torch.randn(1000)
    assert reduce.softmax(memory[:900].view(9, 100), memory[50:950].view(9, 100)) is None
    assert reduce.concatenate([x, last], empty((2, 12, 8, 10)), 1) is None
    assert reduce.concatenate([x, x], empty((2, 13, 8, 10)), 1) is None
    assert reduce.concatenate([], empty((1,)), 0) is None
    assert reduce.concatenate([memory[:5], memory[5:10]], memory[3:13], 0) is None


def channels(*shape, first, count, seed=0):
    """Some channels of a larger image in NHWC, and the larger image."""
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(memory_format=torch.channels_last)
    return whole[:, first : first + count], whole


@pytest.mark.parametrize("average", [True, False])
def test_pools_of_some_channels(average, level):
    x, _ = channels(2, 40, 7, 6, first=5, count=21)
    out, whole = channels(2, 50, 4, 3, first=17, count=21, seed=1)
    before = whole.clone()
    pool, f = (pooling.avg_pool, F.avg_pool2d) if average else (pooling.max_pool, F.max_pool2d)
    run(pool(x, out, 3, 2, 1))
    torch.testing.assert_close(out, f(x, 3, 2, 1))
    assert torch.equal(whole[:, :17], before[:, :17])
    assert torch.equal(whole[:, 38:], before[:, 38:])


def test_pools_between_channels_of_the_same_pixels(level):
    x, whole = channels(1, 40, 6, 6, first=3, count=18)
    out, want = whole[:, 21:39], F.max_pool2d(x, 3, 1, 1)
    run(pooling.max_pool(x, out, 3, 1, 1))
    assert torch.equal(out, want)
    assert pooling.max_pool(x, whole[:, 20:38], 3, 1, 1) is None
    assert pooling.max_pool(x, x, 3, 1, 1) is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_parts_that_are_in_their_place_are_not_copied(layout, level):
    parts = [torch.randn(1, n, 5, 6).contiguous(memory_format=layout) for n in (3, 17, 4, 9)]
    whole = torch.full((1, 33, 5, 6), 7.0).contiguous(memory_format=layout)
    run(reduce.concatenate(parts, whole, 1, there=(1, 3)))
    for part, got, there in zip(parts, whole.split([3, 17, 4, 9], 1), (False, True, False, True), strict=True):
        assert torch.equal(got, torch.full_like(part, 7.0) if there else part)
    assert reduce.concatenate(parts, whole, 1, there=range(4)) is None
