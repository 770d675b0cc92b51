"""`convselect.conv2d` against `F.conv2d`: values, strides, errors, dtypes, caches, threads and processes."""

from __future__ import annotations

import itertools
import random
import textwrap
import threading

import fresh
import pytest
import torch
import torch.nn.functional as F
from _parity import (
    CONSUMERS,
    NAMES,
    OTHER,
    Favourite,
    algorithms_of,
    assert_same,
    assert_same_run,
    bound,
    favouring,
    native,
    problem_of,
    run,
    run_or_refuse,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pairs import pairs

import convselect
from convselect import NotApplicable
from convselect.aten.strides import result_strides
from convselect.base.problem import DTYPE_NAMES, Direction
from convselect.eager import plan as eager_plan
from convselect.eager import resolve
from convselect.eager.plan import plans
from convselect.kernels._native_ops import overruns_in_channels_last
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded

FORCEABLE = tuple(name for name in NAMES if name not in ("native", "upcast", "depthwise", "grouped"))


@pytest.fixture(autouse=True)
def _empty_caches():
    """And no predictor, unless a test brings its own."""
    with favouring(None):
        yield


def forced(name):
    return lambda *operands, **arguments: convselect.conv2d(*operands, policy=name, **arguments)


def operands_for(x_shape=(2, 4, 8, 9), weight_shape=(6, 4, 3, 3), dtype=torch.float32):
    return torch.randn(x_shape).to(dtype), torch.randn(weight_shape).to(dtype), torch.randn(weight_shape[0]).to(dtype)


# ---- values and strides -----------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "channels_last", "expanded", "channel_slice", "transposed", "offset", "permuted", "as made")


def made(shape, how, dtype, generator):
    """A standard normal tensor in one of the memory arrangements that callers produce."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    N, C, H, W = shape
    if how == "channels_last":  # the strides of torch.empty, also if one channel or pixel leaves a choice
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last).copy_(values)
    if how == "as made":  # a no-op if one channel or pixel makes the tensor channels_last already
        return values.contiguous(memory_format=torch.channels_last)
    if how == "expanded":
        return values[:1, :1].expand(shape)
    if how == "channel_slice":
        wide = torch.full((N, 2 * C + 1, H, W), float("nan"), dtype=dtype).contiguous(memory_format=torch.channels_last)
        wide[:, 1 : C + 1] = values
        return wide[:, 1 : C + 1]
    if how == "transposed":
        return values.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "offset":
        flat = torch.full((values.numel() + 1,), float("nan"), dtype=dtype)
        flat[1:] = values.flatten()
        return flat[1:].view(shape)
    if how == "permuted":
        return values.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    assert how == "contiguous", how
    return values


def native_may_crash(p):
    """Whether PyTorch 2.13 itself reads or writes out of bounds: strided 1x1 kernels in channels_last, and strided
    16-bit convolutions with an output or a kernel tap that meets nothing but padding, or pixels that no tap meets."""

    def blind(size, taps, outputs, stride, padding, dilation):
        hits = [[0 <= q * stride - padding + s * dilation < size for s in range(taps)] for q in range(outputs)]
        return not all(map(any, hits)) or not all(map(any, zip(*hits, strict=True))) or stride > taps

    rows = (p.H, p.R, p.P, p.stride_h, p.pad_top, p.dil_h)
    columns = (p.W, p.S, p.Q, p.stride_w, p.pad_left, p.dil_w)
    strided_16_bit = p.element_bytes == 2 and p.stride != (1, 1)
    return overruns_in_channels_last(p) or (strided_16_bit and (blind(*rows) or blind(*columns)))


@st.composite
def calls(draw):
    """Operands and arguments of one valid call."""
    small = st.integers(1, 3)
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    C, K = groups * draw(small), groups * draw(small)
    R, S = draw(st.sampled_from([(3, 3), (3, 3), (1, 1), (2, 3), (4, 2), (5, 5), (1, 3)]))
    dilation = draw(st.sampled_from([1, 1, 2, (1, 2)]))
    padding = draw(st.sampled_from([0, 1, 2, (1, 0), [0, 2], "same", "valid"]))
    stride = 1 if padding == "same" else draw(st.sampled_from([1, 1, 2, (2, 1), [1, 3]]))
    x_shape = (draw(small), C, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = made(x_shape, draw(st.sampled_from(LAYOUTS)), dtype, generator)
    weight = made((K, C // groups, R, S), draw(st.sampled_from(LAYOUTS)), dtype, generator)
    bias = draw(st.sampled_from([None, torch.randn(K, generator=generator).to(dtype)]))
    arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    problem = problem_of(x, weight, **arguments)
    assume(problem.P > 0 and problem.Q > 0 and not native_may_crash(problem))
    return (x, weight, bias), arguments, draw(st.sampled_from([c for c in CONSUMERS if c != "real"]))


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
def test_values_and_strides_of_random_calls(call):
    """Every algorithm that applies, forced and as an automatic choice: y and all gradients are native's."""
    operands, arguments, consumer = call
    x, weight, bias = operands
    problem = problem_of(x, weight, **arguments)
    want = run(native, operands, (True, True, bias is not None), consumer, **arguments)
    # If nearly everything cancels, relative errors mean nothing.
    assume(all(t is None or t.double().norm() > 0.05 * t.numel() ** 0.5 for t in (want.y, *want.grads)))
    for name in NAMES:
        limit = 2 * bound(x.dtype, name)
        convselect.clear()
        reason = BY_NAME[name].why_not(problem)
        if reason is not None:
            with pytest.raises(NotApplicable):
                convselect.conv2d(*operands, **arguments, policy=name)
        else:
            y = convselect.conv2d(*operands, **arguments, policy=name)
            assert_same(y, want.y, limit, f"{name} {problem}: y")
            for i, direction in enumerate((Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT)):
                mask = (i == 0, i == 1, bias is not None)
                got = run_or_refuse(name, problem, direction, operands, mask, consumer, **arguments)
                if got is None:
                    continue
                assert_same(got.grads[i], want.grads[i], 2 * limit, f"{name} {problem}: {direction} after {consumer}")
                assert_same(got.grads[2], want.grads[2], limit, f"{name} {problem}: grad_bias")
        with favouring(name):
            got = run(convselect.conv2d, operands, (True, True, bias is not None), consumer, **arguments)
            assert_same_run(got, want, 2 * limit, f"auto, {name} preferred, {problem}, {consumer}")


@pytest.mark.slow
def test_strides_of_many_random_calls():
    """Strides alone are cheap to compare: two thousand calls, with one pixel or one channel a group among them."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    compared = 0
    while compared < 2000:
        G, N = rng.choice([1, 1, 2, 3, 4]), rng.randint(1, 3)
        C, K = G * rng.randint(1, 3), G * rng.randint(1, 3)
        H, W = rng.choice([1, 1, 2, 3, 5, 8]), rng.choice([1, 1, 2, 3, 5, 8])
        if rng.random() < 0.05:  # for which oneDNN takes a single image as well
            N, C, K, H, W = 1, 16 * G, 8 * G, 24, 24
        R, S = rng.choice([(3, 3), (1, 1), (2, 3), (1, 3), (5, 5), (3, 1)])
        padding, dilation = rng.choice([0, 1, 2, "same"]), rng.choice([1, 1, 2])
        stride = 1 if padding == "same" else rng.choice([1, 1, 2])
        arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": G}
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
        layouts = rng.choice(LAYOUTS), rng.choice(LAYOUTS)
        x = made((N, C, H, W), layouts[0], dtype, generator)
        weight = made((K, C // G, R, S), layouts[1], dtype, generator)
        problem = problem_of(x, weight, **arguments)
        if problem.P < 1 or problem.Q < 1 or native_may_crash(problem):
            continue
        compared += 1
        got = tuple(result_strides(x, weight, problem))
        assert got == strides_of(native, (x, weight), arguments), (str(problem), layouts)


def strides_of(function, operands, arguments):
    x, weight = (t.detach().requires_grad_() for t in operands)
    y = function(x, weight, **arguments)
    grads = torch.autograd.grad((y * y).sum(), [x, weight])
    return y.stride(), *(g.stride() for g in grads)


@pytest.mark.slow
def test_strides_where_one_channel_or_pixel_leaves_a_choice():
    """1x1 kernels, one channel, one pixel: the strides of the operands then decide, and aten's backends differ. Every
    shape in every two layouts; any two of these and the dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [  # N, C, H, W, K, R, S, groups
        (2, 3, 4, 5, 4, 1, 1, 1), (2, 3, 4, 5, 1, 1, 1, 1), (1, 1, 4, 5, 4, 1, 1, 1), (2, 4, 4, 5, 4, 1, 1, 4),
        (2, 4, 4, 5, 4, 1, 1, 2), (2, 4, 4, 5, 4, 3, 3, 4), (2, 4, 4, 5, 8, 3, 3, 4), (1, 1, 5, 5, 1, 3, 3, 1),
        (2, 1, 5, 5, 3, 3, 3, 1), (2, 3, 1, 1, 4, 1, 1, 1), (2, 3, 1, 4, 4, 1, 3, 1), (1, 16, 12, 12, 8, 3, 3, 1),
        (2, 3, 5, 5, 4, 3, 1, 1),
    ]  # fmt: skip
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for shape, (x_layout, weight_layout), dtype in pairs(shapes, [*itertools.product(LAYOUTS, LAYOUTS)], dtypes):
        N, C, H, W, K, R, S, groups = shape
        operands = (
            made((N, C, H, W), x_layout, dtype, generator),
            made((K, C // groups, R, S), weight_layout, dtype, generator),
        )
        arguments = {"groups": groups}
        problem = problem_of(*operands, **arguments)
        names = [n for n in (OTHER, "native_contiguous") if BY_NAME[n].why_not(problem) is None]
        want = strides_of(native, operands, arguments)
        with favouring(names[0]):
            got = strides_of(convselect.conv2d, operands, arguments)
        assert got == want, (shape, x_layout, weight_layout, dtype)


@pytest.mark.parametrize("favourite", [None, OTHER, "im2col_gemm"])
def test_every_requires_grad_mask(favourite):
    operands = operands_for()
    with favouring(favourite):
        for bits in range(8):
            mask = (bool(bits & 1), bool(bits & 2), bool(bits & 4))
            want, got = (run(f, operands, mask, padding=1) for f in (native, convselect.conv2d))
            assert [g is None for g in got.grads] == [not m for m in mask]
            assert_same_run(got, want, bound(torch.float32, "im2col_gemm"), f"{mask}")
            leaves = [t.detach().requires_grad_(m) for t, m in zip(operands, mask, strict=True)]
            assert convselect.conv2d(*leaves).requires_grad == any(mask)
            with torch.no_grad():
                assert not convselect.conv2d(*leaves).requires_grad


@pytest.mark.parametrize("name", FORCEABLE)
def test_output_is_no_view_and_may_be_changed_in_place(name):
    x, weight, bias = operands_for()
    for needs_grad in (False, True):
        for b in (bias, None):
            for channels_last in (False, True):
                operand = x.contiguous(memory_format=torch.channels_last) if channels_last and name != OTHER else x
                if name == "native_contiguous":
                    operand = x.contiguous(memory_format=torch.channels_last)
                y = convselect.conv2d(operand, weight.clone().requires_grad_(needs_grad), b, padding=1, policy=name)
                want = F.relu(F.conv2d(operand, weight, b, padding=1))
                assert not y._is_view()
                y.relu_()
                torch.testing.assert_close(y.detach(), want, rtol=1e-3, atol=1e-3)
                if needs_grad:
                    y.sum().backward()


@pytest.mark.parametrize("name", FORCEABLE)
def test_no_argument_is_modified(name):
    operands = operands_for()
    if name == "native_contiguous":
        operands = (operands[0].contiguous(memory_format=torch.channels_last), *operands[1:])
    before = [t.clone() for t in operands]
    run(lambda *o: forced(name)(*o, padding=1), operands, (True, name != "native_contiguous", True))
    convselect.conv2d(*operands, padding=1, policy=name)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


def test_negated_and_zero_tensors():
    """Tensors whose memory is not what they say: a lazy negation, and a zero without memory."""
    x, weight, bias = operands_for()
    negated = torch.view_as_complex(torch.stack([x, x], -1)).conj().imag
    assert negated.is_neg()
    zero = torch._efficientzerotensor(x.shape)
    for name in FORCEABLE:
        for operand in (negated, zero):
            if BY_NAME[name].why_not(problem_of(operand, weight, padding=1)) is None:
                got = convselect.conv2d(operand, weight, bias, padding=1, policy=name)
                torch.testing.assert_close(got, F.conv2d(operand, weight, bias, padding=1), rtol=1e-3, atol=1e-3)


# ---- autocast ---------------------------------------------------------------------------------------------------


def autocast_run(function, operands, backward_inside, dtype, nested, **arguments):
    leaves = [t.detach().requires_grad_() for t in operands]
    with torch.autocast("cpu", dtype=dtype):
        if nested:
            with torch.autocast("cpu", enabled=False):
                y = function(*leaves, **arguments)
        else:
            y = function(*leaves, **arguments)
        if backward_inside:
            grads = torch.autograd.grad(y.float().square().sum(), leaves)
    if not backward_inside:
        grads = torch.autograd.grad(y.float().square().sum(), leaves)
    return y.detach(), grads


@pytest.mark.parametrize("favourite", [None, OTHER, "upcast", "im2col_gemm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(favourite, dtype):
    operands = operands_for()
    with favouring(favourite):
        for backward_inside in (False, True):
            for nested in (False, True):
                for _ in range(2):  # the second call comes from the cache
                    (want, want_grads), (got, grads) = (
                        autocast_run(f, operands, backward_inside, dtype, nested, padding=1)
                        for f in (native, convselect.conv2d)
                    )
                    assert got.dtype == (torch.float32 if nested else dtype)
                    # Gradients are float32 (the leaves' own), rounded to 16 bits on the way.
                    limit = bound(torch.float32, "im2col_gemm") if nested else bound(dtype)
                    assert_same(got, want, limit, f"{favourite} nested={nested} y")
                    for g, w in zip(grads, want_grads, strict=True):
                        assert g.dtype == torch.float32
                        assert_same(g, w, limit, f"{favourite} nested={nested} inside={backward_inside}")


@pytest.mark.parametrize("policy", ["auto", OTHER, "im2col_gemm"])
def test_autocast_and_float64(policy):
    """Autocast leaves float64 alone, and aten refuses what then does not fit."""
    x, weight, bias = operands_for(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = convselect.conv2d(x, weight, bias, policy=policy), F.conv2d(x, weight, bias)
        assert_same(got, want, bound(torch.float64, "im2col_gemm"), "float64")
        for wrong in ((x, weight.float(), bias), (x.float(), weight, bias), (x.float(), weight.float(), bias)):
            # Float operands with a float64 bias, too: first a good call, so that the second finds a plan.
            convselect.conv2d(x.float(), weight.float(), bias.float(), policy=policy)
            with pytest.raises(RuntimeError) as stock:
                F.conv2d(*wrong)
            with pytest.raises(RuntimeError) as raised:
                convselect.conv2d(*wrong, policy=policy)
            assert str(raised.value) == str(stock.value)


def test_autocast_16_bit_operands_and_mixtures():
    """Under autocast every floating operand is cast, so mixtures are fine; outside they are errors."""
    x, weight, bias = operands_for()
    for policy in ("auto", "upcast", OTHER):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for operands in ((x.half(), weight, bias), (x, weight.bfloat16(), bias.half())):
                got, want = convselect.conv2d(*operands, policy=policy), F.conv2d(*operands)
                assert_same(got, want, bound(torch.bfloat16), policy)
        for operands in ((x.half(), weight, bias), (x, weight.bfloat16(), bias.half())):
            with pytest.raises(RuntimeError, match="should be the same"):
                convselect.conv2d(*operands, policy=policy)


# ---- what is not finite -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORCEABLE)
def test_nan_and_infinity_stay_where_native_has_them(name):
    """One bad input pixel, one bad weight, one bad gradient: the pattern of NaN and infinity is native's exactly."""
    x, weight, bias = operands_for((2, 3, 12, 12), (4, 3, 3, 3))
    if name == "native_contiguous":
        x = x.contiguous(memory_format=torch.channels_last)

    def pattern(t):
        return t.isnan(), t.isposinf(), t.isneginf()

    def bad(t, index, value):
        t = t.clone(memory_format=torch.preserve_format)
        t[index] = value
        return t

    for value in (float("nan"), float("inf"), -float("inf")):
        # Whether a bad weight or gradient is multiplied with the zeros of the padding is a question on which aten's own
        # backends differ: those cases have no padding, or a gradient that is finite ("sum").
        for operands, padding, consumers in (
            ((bad(x, (1, 2, 5, 6), value), weight, bias), 1, ("sum", "square")),
            ((bad(x, (0, 0, 0, 0), value), weight, bias), 1, ("sum",)),
            ((x, weight, bad(bias, (3,), value)), 1, ("sum",)),
            ((x, bad(weight, (2, 1, 0, 1), value), bias), 0, ("sum", "square")),
        ):
            got = convselect.conv2d(*operands, padding=padding, policy=name)
            want = F.conv2d(*operands, padding=padding)
            assert 0 < (~want.isfinite()).sum() < want.numel()
            for g, w in zip(pattern(got), pattern(want), strict=True):
                assert torch.equal(g, w), f"{name}, {value}"
            with favouring(name):
                for consumer in consumers:
                    a, b = (run(f, operands, consumer=consumer, padding=padding) for f in (convselect.conv2d, native))
                    for i, (mine, stock) in enumerate(zip(a.grads, b.grads, strict=True)):
                        if name in ("direct", "thin") and i == 0 and not operands[1].isfinite().all():
                            # Beyond the edge of grad_y are zeros, with which these multiply a bad weight.
                            assert (mine.isfinite() <= stock.isfinite()).all()
                            continue
                        for g, w in zip(pattern(mine), pattern(stock), strict=True):
                            assert torch.equal(g, w), f"{name}, {value}, gradient after {consumer}"


@pytest.mark.parametrize("name", FORCEABLE)
def test_a_bad_weight_stays_in_its_channel(name):
    x, weight, bias = operands_for((2, 3, 12, 12), (4, 3, 3, 3))
    if name == "native_contiguous":
        x = x.contiguous(memory_format=torch.channels_last)
    weight[2, 1, 0, 1] = float("nan")
    got = convselect.conv2d(x, weight, bias, padding=1, policy=name)
    assert got[:, 2, 1:-1, 1:-1].isnan().all()
    assert got[:, [0, 1, 3]].isfinite().all()


# ---- nothing to compute -----------------------------------------------------------------------------------------

EMPTY = {
    "batch": ((0, 3, 5, 5), (4, 3, 3, 3), 1),
    "height": ((2, 3, 0, 5), (4, 3, 3, 3), 2),
    "input channels": ((2, 0, 5, 5), (4, 0, 3, 3), 1),
    "output channels": ((2, 3, 5, 5), (0, 3, 3, 3), 1),
    "kernel": ((2, 3, 5, 5), (4, 3, 0, 3), 1),
    "unbatched": ((3, 0, 5), (4, 3, 3, 3), 2),
}


def attempt(function, operands, **arguments):
    """(run, None) or (None, error)."""
    try:
        return run(function, operands, **arguments), None
    except RuntimeError as error:
        return None, error


@pytest.mark.parametrize("which", EMPTY)
@pytest.mark.parametrize("policy", ["auto", OTHER, "im2col_gemm"])
def test_empty_operands(which, policy):
    x_shape, weight_shape, padding = EMPTY[which]
    operands = (torch.randn(x_shape), torch.randn(weight_shape), torch.randn(weight_shape[0]))
    with favouring(OTHER):
        (want, want_error), (got, error) = (attempt(f, operands, padding=padding) for f in (native, forced(policy)))
        assert (type(error), str(error)) == (type(want_error), str(want_error))
        if want is not None:
            assert_same_run(got, want, 0.0, f"{which} {policy}")
        assert len(plans) == len(resolve.choices) == 0, "empty calls must not fill the caches"


# ---- refusals and errors ----------------------------------------------------------------------------------------


def test_other_dtypes():
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.complex64, torch.complex128):
        x, weight = (torch.ones(s).to(dtype) for s in ((1, 2, 5, 5), (3, 2, 3, 3)))
        try:
            want = F.conv2d(x, weight)
        except Exception as error:
            with pytest.raises(type(error)):
                convselect.conv2d(x, weight)
        else:
            assert torch.equal(convselect.conv2d(x, weight), want)
        with pytest.raises(NotApplicable, match=f"not {dtype}"):
            convselect.conv2d(x, weight, policy=OTHER)


def bad_calls():
    x, weight, bias = operands_for()
    good = {"input": x, "weight": weight, "bias": bias, "padding": 1}
    changes = {
        "wrong channels": {"input": x[:, :3]},
        "2-D input": {"input": x[0, 0]},
        "5-D input": {"input": x[None]},
        "3-D weight": {"weight": weight[0]},
        "5-D weight": {"weight": weight[None]},
        "bias too short": {"bias": bias[:-1]},
        "bias too long": {"bias": torch.randn(7)},
        "one bias for all": {"bias": torch.randn(1)},
        "2-D bias": {"bias": bias[None]},
        "scalar bias": {"bias": bias[0]},
        "weight dtype": {"weight": weight.double()},
        "input dtype": {"input": x.bfloat16()},
        "bias dtype": {"bias": bias.double()},
        "bias 16-bit": {"bias": bias.half()},
        "kernel over input": {"weight": torch.randn(6, 4, 11, 3)},
        "negative padding": {"padding": -1},
        "negative padding, one side": {"padding": (1, -1)},
        "zero stride": {"stride": 0},
        "negative stride": {"stride": (1, -2)},
        "zero dilation": {"dilation": 0},
        "same and stride": {"padding": "same", "stride": 2},
        "unknown padding": {"padding": "full"},
        "groups do not divide C": {"groups": 3},
        "groups do not divide K": {"weight": torch.randn(5, 2, 3, 3), "bias": None, "groups": 2},
        "no groups": {"groups": 0},
        "negative groups": {"groups": -1},
        "array input": {"input": x.numpy()},
        "no input": {"input": None},
        "no weight": {"weight": None},
        "list weight": {"weight": [1.0]},
        "list bias": {"bias": [1.0] * 6},
        "float stride": {"stride": 1.0},
        "float strides": {"stride": (1.0, 1.0)},
        "one float stride": {"stride": (1, 1.0)},
        "float padding": {"padding": 1.0},
        "float paddings": {"padding": (1.0, 1.0)},
        "float dilation": {"dilation": (1.0, 1.0)},
        "float groups": {"groups": 1.0},
        "bool groups": {"groups": True},
        "text groups": {"groups": "1"},
        "three strides": {"stride": (1, 1, 1)},
        "no strides": {"stride": ()},
        "three paddings": {"padding": (1, 1, 1)},
        "four paddings": {"padding": (1, 1, 1, 1)},
        "three dilations": {"dilation": [1, 1, 1]},
        "nested strides": {"stride": [[1], [1]]},
        "dictionary": {"stride": {1: 1}},
        "None stride": {"stride": None},
        "None padding": {"padding": None},
        "sparse input": {"input": x.to_sparse()},
        "sparse weight": {"weight": weight.to_sparse()},
        "sparse bias": {"bias": bias.to_sparse()},
    }
    return good, changes


@pytest.mark.parametrize("policy", ["auto", "native", OTHER, "im2col_gemm"])
def test_bad_input_raises_what_native_raises(policy):
    """Also when a good call of the same shapes has left a plan behind."""
    good, changes = bad_calls()
    with favouring(OTHER):
        for what, change in changes.items():
            arguments = {**good, **change}
            with pytest.raises((RuntimeError, TypeError, ValueError)) as stock:
                F.conv2d(**arguments)
            for _ in range(2):
                with pytest.raises(stock.type) as raised:
                    convselect.conv2d(**arguments, policy=policy)
                assert raised.type is stock.type, what
                if stock.type is not TypeError:  # TypeErrors list the arguments as they were passed
                    assert str(raised.value) == str(stock.value), what
                else:
                    assert str(raised.value).startswith("conv2d()"), what
                convselect.conv2d(**good, policy=policy)
                assert len(plans) == 1, f"{what} left a plan"


@pytest.mark.parametrize("policy", ["auto", OTHER])
def test_bad_bias_under_autocast_on_the_cached_path(policy):
    x, weight, bias = operands_for()
    with favouring(OTHER), torch.autocast("cpu", dtype=torch.bfloat16):
        for wrong in (bias[:-1], bias.double(), bias.long()):
            convselect.conv2d(x, weight, bias, policy=policy)
            with pytest.raises(RuntimeError) as stock:
                F.conv2d(x, weight, wrong)
            with pytest.raises(RuntimeError) as raised:
                convselect.conv2d(x, weight, wrong, policy=policy)
            assert str(raised.value) == str(stock.value)


def test_arguments_that_native_takes_as_well():
    """Sequences of one, numpy integers, torch.Size, meta tensors, mkldnn tensors: whatever aten makes of them."""
    import numpy as np

    x, weight, bias = operands_for()
    want = F.conv2d(x, weight, bias, 2, 1)
    for policy in ("auto", OTHER):
        for stride, padding in (
            ((2,), (1,)), ([2], [1]), (np.int64(2), np.int64(1)), ((np.int64(2), 2), (1, np.int32(1))),
            (torch.Size((2, 2)), torch.Size((1, 1))), ([2, 2], (1, 1)),
        ):  # fmt: skip
            got = convselect.conv2d(x, weight, bias, stride, padding, policy=policy)
            assert_same(got, want, bound(torch.float32), f"{stride!r} {padding!r}")
        on_meta = convselect.conv2d(x.to("meta"), weight.to("meta"), bias.to("meta"), 2, 1, policy=policy)
        assert (on_meta.device.type, on_meta.shape) == ("meta", want.shape)
        assert convselect.conv2d(x, weight.to("meta"), bias, 2, 1, policy=policy).device.type == (
            F.conv2d(x, weight.to("meta"), bias, 2, 1).device.type
        )
    if torch.backends.mkldnn.is_available():
        packed = x.to_mkldnn()
        torch.testing.assert_close(
            convselect.conv2d(packed, weight, bias, 2, 1).to_dense(), F.conv2d(packed, weight, bias, 2, 1).to_dense()
        )


def test_forced_refusal_says_why():
    x, weight, _ = operands_for(weight_shape=(6, 4, 5, 5))
    for name in NAMES:
        reason = BY_NAME[name].why_not(problem_of(x, weight, stride=2))
        if reason is None:
            convselect.conv2d(x, weight, stride=2, policy=name)
            continue
        for call in (
            lambda name=name: convselect.conv2d(x, weight, stride=2, policy=name),
            lambda name=name: _in_context(name, lambda: convselect.conv2d(x, weight, stride=2)),
        ):
            for _ in range(2):  # the refusal is not forgotten the second time
                with pytest.raises(NotApplicable) as raised:
                    call()
                assert reason in str(raised.value)
                assert name in str(raised.value)
    assert issubclass(NotApplicable, RuntimeError)


def _in_context(policy, call):
    with convselect.use(policy):
        return call()


def test_tensor_subclasses_are_native_or_refused():
    class Logged(torch.Tensor):
        calls: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls.append(function.__name__)
            return super().__torch_function__(function, types, args, kwargs or {})

    x, weight, bias = operands_for()
    for operands in (
        (x.as_subclass(Logged), weight, bias),
        (x, weight.as_subclass(Logged), bias),
        (x, weight, bias.as_subclass(Logged)),
    ):
        with favouring(OTHER):
            convselect.conv2d(x, weight, bias)  # a plan for the same shapes
            Logged.calls.clear()
            y = convselect.conv2d(*operands)
            assert type(y) is Logged
            assert "conv2d" in Logged.calls
        with pytest.raises(NotApplicable, match="subclasses"):
            convselect.conv2d(*operands, policy=OTHER)


# ---- modes that watch -------------------------------------------------------------------------------------------


def test_dispatch_modes_see_aten():
    """FlopCounterMode, selective checkpointing and their like count and replay aten operators."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, bias = (t.requires_grad_() for t in operands_for())

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function(x, weight, bias, padding=1).sum().backward()
        return counter.get_total_flops()

    with favouring("im2col_gemm"):
        convselect.conv2d(x, weight, bias, padding=1)
        assert flops(convselect.conv2d) == flops(F.conv2d) > 0
        graph = make_fx(lambda *o: convselect.conv2d(*o, padding=1))(x.detach(), weight.detach(), bias.detach())
        assert torch.ops.aten.convolution.default in {node.target for node in graph.graph.nodes}


# ---- policies ---------------------------------------------------------------------------------------------------


def test_contexts_nest_and_arguments_win():
    x, weight, bias = operands_for()

    def ran(**arguments):
        return algorithms_of(lambda: convselect.conv2d(x, weight, bias, **arguments)) or ["native"]

    assert ran() == ["native"]
    with convselect.use(OTHER) as outer:
        assert outer.policy == OTHER
        assert ran() == [OTHER]
        with convselect.use("im2col_gemm"):
            assert ran() == ["im2col_gemm"]
            with convselect.use(precision="exact"):  # only what is named changes
                assert ran() == ["im2col_gemm"]
            assert ran(policy="reference") == ["reference"]
            assert ran(policy="auto") == ["native"]
        assert ran() == [OTHER]
        with pytest.raises(KeyError), convselect.use("reference"):
            raise KeyError
        assert ran() == [OTHER]
    assert ran() == ["native"]


def test_backward_runs_under_the_settings_of_its_forward():
    x, weight, bias = operands_for()
    x.requires_grad_()
    weight.requires_grad_()
    with convselect.use("im2col_gemm"):
        y = convselect.conv2d(x, weight, bias)
    assert set(algorithms_of(lambda: y.sum().backward())) == {"im2col_gemm"}


def test_threads_start_from_the_defaults():
    x, weight, bias = operands_for()
    seen = []

    def other_thread():
        seen.append(convselect.base.settings.current().policy)
        seen.extend(algorithms_of(lambda: convselect.conv2d(x, weight, bias)))

    with convselect.use(OTHER):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        assert seen == ["auto"]


def test_unknown_policy():
    x, weight, bias = operands_for()
    for call in (
        lambda: convselect.conv2d(x, weight, bias, policy="winograd9"),
        lambda: _in_context("winograd9", lambda: convselect.conv2d(x, weight, bias)),
        lambda: convselect.SelectedConv2d(3, 3, 3, policy="winograd9"),
        lambda: convselect.convert(torch.nn.Conv2d(3, 3, 3), policy="winograd9"),
    ):
        with pytest.raises(ValueError, match="unknown policy 'winograd9'") as raised:
            call()
        assert all(name in str(raised.value) for name in ("auto", *NAMES))


def python(code, **environment):
    """Run code in a fresh interpreter; its standard output."""
    import os

    result = fresh.run(["-c", textwrap.dedent(code)], timeout=120, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_environment_sets_the_policy():
    code = """
        import torch, convselect
        from convselect.eager import plan as eager_plan
        ran = []
        original = eager_plan.execute
        eager_plan.execute = lambda choice, *rest: (ran.append(choice.algorithm), original(choice, *rest))[1]
        layer = convselect.SelectedConv2d(3, 4, 3)
        layer(torch.randn(1, 3, 8, 8)).sum().backward()
        with convselect.use("native"):
            layer(torch.randn(1, 3, 8, 8)).sum().backward()
        print(*ran, convselect.base.settings.current().precision, eager_plan.plans.capacity)
    """
    out = python(code, CONVSELECT_POLICY="im2col_gemm", CONVSELECT_PRECISION="exact", CONVSELECT_CACHE_ENTRIES="77")
    assert out.split() == ["im2col_gemm", "im2col_gemm", "exact", "77"]


# ---- caches -----------------------------------------------------------------------------------------------------


def test_one_plan_for_every_spelling():
    x, weight, bias = operands_for()
    spellings = (1, (1, 1), [1, 1])
    for stride in spellings:
        for padding in spellings:
            for dilation in spellings:
                convselect.conv2d(x, weight, bias, stride, padding, dilation)
    assert len(plans) == 1
    assert len(resolve.choices) == 1
    convselect.SelectedConv2d(4, 6, 3, padding=1).requires_grad_(False)(x)
    assert len(plans) == 1
    convselect.conv2d(x, weight, bias, 2)
    assert len(plans) == 2


def test_what_the_plan_cache_tells_apart():
    """Each of these may change the answer, so none may find another's plan."""
    x, weight, bias = operands_for()
    threads = torch.get_num_threads()
    changes = {
        "grad mode": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
        "policy": lambda: convselect.use(OTHER),
        "precision": lambda: convselect.use(precision="fast"),
        "workspace": lambda: convselect.use(workspace_bytes=1),
        "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False),
    }
    convselect.conv2d(x, weight, bias)
    for count, (what, change) in enumerate(changes.items(), 2):
        for _ in range(2):
            with change():
                convselect.conv2d(x, weight, bias)
            assert len(plans) == count, what
            convselect.conv2d(x, weight, bias)
            assert len(plans) == count, what
    before = len(plans)
    precision = torch.backends.mkldnn.conv.fp32_precision
    try:
        torch.set_num_threads(threads + 1)
        convselect.conv2d(x, weight, bias)
        assert len(plans) == before + 1, "threads"
        torch.use_deterministic_algorithms(True)
        convselect.conv2d(x, weight, bias)
        assert len(plans) == before + 2, "deterministic"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
        convselect.conv2d(x, weight, bias)
        assert len(plans) == before + 3, "float32 precision"
    finally:
        torch.backends.mkldnn.conv.fp32_precision = precision
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    for operands in (
        (x.double(), weight.double(), bias.double()),
        (x.contiguous(memory_format=torch.channels_last), weight, bias),
        (x, weight.contiguous(memory_format=torch.channels_last), bias),
        (x, weight, None),
        (x.clone().requires_grad_(), weight, bias),
        (x, weight.clone().requires_grad_(), bias),
        (x, weight, bias.clone().requires_grad_()),
    ):
        before = len(plans)
        convselect.conv2d(*operands)
        assert len(plans) == before + 1


def test_caches_are_bounded(monkeypatch):
    weight = torch.randn(3, 2, 3, 3)
    with favouring(OTHER):
        monkeypatch.setattr(plans, "capacity", 8)
        monkeypatch.setattr(resolve.choices, "capacity", 8)
        often = torch.randn(1, 2, 4, 4)
        for width in range(5, 45):
            x = torch.randn(1, 2, 4, width)
            torch.testing.assert_close(convselect.conv2d(x, weight), F.conv2d(x, weight))
            convselect.conv2d(often, weight)
            assert len(plans) <= 8
            assert len(resolve.choices) <= 8
        assert any(key[0] == often.shape for key in plans.entries), "the one in use was forgotten"
        monkeypatch.setattr(plans, "capacity", 0)
        monkeypatch.setattr(resolve.choices, "capacity", 0)
        convselect.clear()
        torch.testing.assert_close(convselect.conv2d(often, weight), F.conv2d(often, weight))
        assert len(plans) == 0


def test_backward_plans_are_bounded():
    """Gradients whose strides never repeat must not pile up."""
    x, weight, _ = operands_for((1, 2, 6, 6), (3, 2, 3, 3))
    x.requires_grad_()
    with favouring(OTHER):
        for extra in range(60):
            y = convselect.conv2d(x, weight)
            wide = torch.randn(1, 3, 4, 5 + extra)
            (got,) = torch.autograd.grad(y, x, wide[..., :4])
            (want,) = torch.autograd.grad(F.conv2d(x, weight), x, wide[..., :4])
            torch.testing.assert_close(got, want)
        (plan,) = plans.entries.values()
        assert len(plan._backward) <= eager_plan._BACKWARD_PLANS


def test_eight_threads(monkeypatch):
    """Different shapes from eight threads through a cache that keeps overflowing."""
    monkeypatch.setattr(plans, "capacity", 16)
    monkeypatch.setattr(resolve.choices, "capacity", 16)
    weight = torch.randn(3, 2, 3, 3)
    errors = []

    def hammer(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for i in range(60):
                x = torch.randn(1, 2, 4 + (seed + i) % 5, 4 + i % 12, generator=generator).requires_grad_(i % 2 == 0)
                y, want = convselect.conv2d(x, weight), F.conv2d(x, weight)
                torch.testing.assert_close(y, want)
                if x.requires_grad:
                    (got,), (stock,) = (torch.autograd.grad(t.sum(), x) for t in (y, want))
                    torch.testing.assert_close(got, stock)
                if i % 20 == 19:
                    convselect.clear()
        except BaseException as error:
            errors.append(error)

    with favouring(OTHER):
        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        assert len(plans) <= 16


def test_fork():
    """A forked child has working caches, also when another thread of the parent held their locks. (Fresh process: a
    parent that has run OpenMP threads cannot fork, with or without us.)"""
    out = python(
        """
        import os, threading, warnings
        import torch
        torch.set_num_threads(1)
        import convselect
        from convselect.eager import resolve
        from convselect.eager.plan import plans
        from convselect.model import loaded
        warnings.simplefilter("ignore")
        x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
        convselect.conv2d(x, weight, policy="im2col_gemm")
        held, done = threading.Event(), threading.Event()
        def hold():
            with plans._lock, resolve.choices._lock, loaded._lock:
                held.set()
                done.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            ok = True
            for width in range(8, 12):
                x = torch.randn(1, 3, 8, width)
                ok &= torch.allclose(convselect.conv2d(x, weight, policy="im2col_gemm"),
                                     torch.conv2d(x, weight), atol=1e-4)
                convselect.conv2d(x, weight)
            convselect.clear()
            os._exit(0 if ok else 1)
        for _ in range(600):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            import time; time.sleep(0.1)
        else:
            os.kill(child, 9)
            status = "hung"
        done.set()
        thread.join()
        print(status)
        """
    )
    assert out.strip() == "0"


# ---- an algorithm that fails ------------------------------------------------------------------------------------


def test_an_automatic_choice_that_fails_falls_back_to_native(monkeypatch):
    from convselect.base import warnings

    def broken(self, *arguments):
        raise MemoryError("no memory today")

    algorithm = type(BY_NAME[OTHER])
    x, weight, bias = (t.requires_grad_() for t in operands_for())
    monkeypatch.setattr(warnings, "_given", set())
    for method in ("forward", "backward_data", "backward_weight"):
        monkeypatch.setattr(algorithm, method, broken)
    with favouring(OTHER):
        with pytest.warns(convselect.ConvselectWarning, match=f"{OTHER} found too little.*no memory today.*native"):
            got = run(convselect.conv2d, (x, weight, bias), padding=1)
        assert_same_run(got, run(native, (x, weight, bias), padding=1), bound(x.dtype), "fallback")
        run(convselect.conv2d, (x, weight, bias), padding=1)  # the warning came once
    with pytest.raises(MemoryError):
        convselect.conv2d(x, weight, bias, policy=OTHER)


def test_budgets_hold_for_automatic_choices(monkeypatch):
    x, weight, bias = operands_for()
    with favouring(OTHER):
        assert algorithms_of(lambda: convselect.conv2d(x, weight, bias)) == [OTHER]
        with convselect.use(workspace_bytes=0):
            assert algorithms_of(lambda: convselect.conv2d(x, weight, bias)) == []
    with favouring("reference"):  # never chosen, however well it is predicted
        assert algorithms_of(lambda: convselect.conv2d(x, weight, bias)) == []
    monkeypatch.setattr(loaded, "get", lambda: Favourite(OTHER, gain=0.01))
    convselect.clear()
    assert algorithms_of(lambda: convselect.conv2d(x, weight, bias)) == [], "a gain below the margin"


def test_supported_dtypes_are_those_of_the_problem():
    assert set(DTYPE_NAMES) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
