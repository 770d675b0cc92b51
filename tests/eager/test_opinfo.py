"""PyTorch's own samples for conv2d, run on ours: values within rounding, dtypes, strides and errors to the letter.

They are imported inside the tests that need them: that takes seconds, and most runs leave these tests out."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from _parity import NAMES, assert_same, assert_same_run, bound, favouring, native, ours, problem_of, run, run_or_refuse
from torch import nn

import convselect
from convselect import NotApplicable, SelectedConv2d
from convselect.base.problem import Direction
from convselect.kernels.pool import BY_NAME

pytestmark = pytest.mark.slow
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64)
DIRECTION_OF = (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT)
POLICIES = ("auto", *NAMES)
CONSUMERS = ("sum", "square")  # whose gradients are expanded, and dense


@functools.cache
def op():
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == "nn.functional.conv2d")


@functools.cache
def modules():
    from torch.testing._internal.common_modules import module_db

    return {info.module_cls: info for info in module_db}


@pytest.fixture(autouse=True)
def _empty_caches():
    """And no predictor, unless a test brings its own."""
    with favouring(None):
        yield


@functools.cache
def samples(dtype, requires_grad):
    """(x, weight, bias), keyword arguments; the operands with the strides that OpInfo gives them."""
    torch.manual_seed(0)
    found = []
    for sample in op().sample_inputs("cpu", dtype, requires_grad=requires_grad):
        weight, bias = (*sample.args, None)[:2]
        kwargs = dict(sample.kwargs)
        if "bias" in kwargs:
            bias = kwargs.pop("bias")
        found.append(((sample.input, weight, bias), kwargs))
    return found


@functools.cache
def run_natively(dtype, requires_grad, i, mask, consumer):
    """What every algorithm is compared with."""
    operands, arguments = samples(dtype, requires_grad)[i]
    return run(native, operands, mask, consumer, **arguments)


def compare_forced(name, operands, arguments, consumer, want) -> bool:
    """Forward and both gradients of one forced algorithm against native; each direction runs or refuses in its own
    words. True if anything ran."""
    x, weight, bias = operands
    problem = problem_of(x, weight, **{k: v for k, v in arguments.items() if k != "bias"})
    limit = bound(x.dtype, name)
    if BY_NAME[name].why_not(problem) is not None:
        with pytest.raises(NotApplicable) as raised:
            ours(name)(*operands, **arguments)
        assert BY_NAME[name].why_not(problem) in str(raised.value)
        return False
    assert_same(ours(name)(*operands, **arguments).detach(), want.y, limit, f"{name} {problem}: y")
    for i, direction in enumerate(DIRECTION_OF):
        mask = (i == 0, i == 1, bias is not None)
        got = run_or_refuse(name, problem, direction, operands, mask, consumer, **arguments)
        if got is None:
            continue
        assert_same(got.grads[i], want.grads[i], limit, f"{name} {problem}: {direction}")
        assert_same(got.grads[2], want.grads[2], limit, f"{name} {problem}: grad_bias")
    return True


def test_samples_cover_what_matters():
    """OpInfo is a moving target: these are the cases the tests below count on."""
    seen = [(operands, arguments) for operands, arguments in samples(torch.float32, True)]
    assert len(seen) >= 20
    assert any(operands[0].dim() == 3 for operands, _ in seen)
    assert any(operands[2] is None for operands, _ in seen)
    assert any(arguments.get("groups", 1) > 1 for _, arguments in seen)
    assert {"same", "valid"} <= {a.get("padding") for _, a in seen if isinstance(a.get("padding"), str)}


# What a predictor prefers changes nothing in types that only native has.
@pytest.mark.parametrize(
    ("favourite", "dtype"),
    [
        *itertools.product([None, *NAMES], FLOATS),
        *itertools.product([None, *NAMES[:2]], DTYPES[len(FLOATS):]),
    ],
    ids=str,
)  # fmt: skip
def test_opinfo_samples_auto(favourite, dtype):
    """Automatic choice, with a predictor that prefers each algorithm in turn, and with none."""
    assert dtype in op().dtypes
    differentiable = dtype.is_floating_point or dtype.is_complex
    limit = bound(dtype, favourite or "native")
    with favouring(favourite):
        # Without gradients, which is the same forward, for one of them each; which one changes with the favourite.
        alone = FLOATS[[None, *NAMES].index(favourite) % len(FLOATS)]
        for requires_grad in (False, True) if dtype == alone else (differentiable,):
            for i, (operands, arguments) in enumerate(samples(dtype, requires_grad)):
                mask = (requires_grad, requires_grad, requires_grad and operands[2] is not None)
                # Complex convolution is native's on both sides; its loss would have to be real.
                consumer = "sum" if not dtype.is_complex else "real"
                want = run_natively(dtype, requires_grad, i, mask, consumer)
                got = run(ours(None), operands, mask, consumer, **arguments)
                assert_same_run(got, want, limit, f"{favourite} {arguments}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opinfo_samples_forced(name, dtype):
    """The consumer alternates over samples and over element types, so every sample meets both."""
    first = FLOATS.index(dtype)
    ran = []
    for i, (operands, arguments) in enumerate(samples(dtype, False)):
        consumer = CONSUMERS[(first + i) % 2]
        want = run_natively(dtype, False, i, (True, True, True), consumer)
        ran.append(compare_forced(name, operands, arguments, consumer, want))
    problems = [problem_of(o[0], o[1], **a) for o, a in samples(dtype, False)]
    assert sum(ran) == sum(BY_NAME[name].why_not(p) is None for p in problems)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64], ids=str)
def test_dtypes_that_only_native_has(dtype):
    for operands, arguments in samples(dtype, False):
        assert torch.equal(convselect.conv2d(*operands, **arguments), native(*operands, **arguments))
        for name in NAMES:
            if name == "native":
                assert torch.equal(ours(name)(*operands, **arguments), native(*operands, **arguments))
            else:
                with pytest.raises(NotApplicable, match=f"{name} cannot .* not {dtype}"):
                    ours(name)(*operands, **arguments)


def test_error_inputs():
    """The errors are aten's own, under every policy. (An integer convolution is refused before that by name.)"""
    count = 0
    for error in op().error_inputs("cpu"):
        sample = error.sample_input
        arguments = (sample.input, *sample.args)
        with pytest.raises(error.error_type, match=error.error_regex) as stock:
            F.conv2d(*arguments, **sample.kwargs)
        for policy in POLICIES:
            if policy not in ("auto", "native") and not sample.input.is_floating_point():
                continue
            with pytest.raises(error.error_type, match=error.error_regex) as raised:
                convselect.conv2d(*arguments, **sample.kwargs, policy=policy)
            assert raised.type is stock.type
            assert str(raised.value) == str(stock.value)
            count += 1
    assert count > 50


# ---- modules ----------------------------------------------------------------------------------------------------


def module_samples(dtype):
    torch.manual_seed(1)
    info = modules()[nn.Conv2d]
    for sample in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True):
        assert not sample.forward_input.kwargs
        layer = nn.Conv2d(*sample.constructor_input.args, **sample.constructor_input.kwargs, device="cpu", dtype=dtype)
        yield layer, sample.forward_input.args[0]


def run_module(layer, x):
    x = x.detach().requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad((y * y).sum(), [x, *layer.parameters()])
    return y.detach(), grads


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("favourite", [None, *NAMES])
def test_moduleinfo_samples(favourite, dtype):
    """Built, loaded and converted layers give what nn.Conv2d gives for PyTorch's module samples."""
    limit = bound(dtype, favourite or "native")
    count = 0
    with favouring(favourite):
        for layer, x in module_samples(dtype):
            want, want_grads = run_module(layer, x)
            built = SelectedConv2d(
                layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
                layer.groups, layer.bias is not None, layer.padding_mode, dtype=dtype,
            )  # fmt: skip
            built.load_state_dict(layer.state_dict())
            converted = copy.deepcopy(layer)
            assert list(convselect.summary(convselect.convert(converted)).converted) == [""]
            for other in (built, converted):
                got, grads = run_module(other, x)
                assert_same(got, want, limit, f"{favourite} {layer} y")
                for g, w in zip(grads, want_grads, strict=True):
                    assert_same(g, w, 4 * limit, f"{favourite} {layer} gradient")
            count += 1
    assert count >= 4


def test_lazy_module_samples_are_left_alone():
    info = modules()[nn.LazyConv2d]
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for sample in inputs:
        layer = nn.LazyConv2d(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        report = convselect.summary(convselect.convert(layer))
        assert type(layer) is nn.LazyConv2d
        assert "lazy" in report.left_alone[""]
        layer(*sample.forward_input.args, **sample.forward_input.kwargs)
        assert type(layer) is nn.Conv2d
        assert list(convselect.summary(convselect.convert(layer)).converted) == [""]
