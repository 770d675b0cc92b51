"""PyTorch's own samples for conv2d, run on ours: values within rounding, dtypes, strides and errors to the letter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from _parity import NAMES, OTHER, assert_same, assert_same_run, bound, favouring, native, problem_of, run, run_or_refuse
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

import convselect
from convselect import NotApplicable, SelectedConv2d
from convselect.kernels.pool import BY_NAME
from convselect.problem import Direction

OP = next(op for op in op_db if op.name == "nn.functional.conv2d")
MODULES = {info.module_cls: info for info in module_db}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.complex64, torch.int64)
DIRECTION_OF = (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT)
POLICIES = ("auto", *NAMES)


@pytest.fixture(autouse=True)
def _empty_caches():
    """And no predictor, unless a test brings its own."""
    with favouring(None):
        yield


def samples(dtype, requires_grad):
    """(x, weight, bias), keyword arguments; the operands with the strides that OpInfo gives them."""
    torch.manual_seed(0)
    for sample in OP.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        weight, bias = (*sample.args, None)[:2]
        kwargs = dict(sample.kwargs)
        if "bias" in kwargs:
            bias = kwargs.pop("bias")
        yield (sample.input, weight, bias), kwargs


def ours(policy):
    return lambda *operands, **arguments: convselect.conv2d(*operands, policy=policy, **arguments)


def compare_forced(name, operands, arguments, consumer) -> bool:
    """Forward and both gradients of one forced algorithm against native; each direction runs or refuses in its own
    words. True if anything ran."""
    x, weight, bias = operands
    problem = problem_of(x, weight, **{k: v for k, v in arguments.items() if k != "bias"})
    want = run(native, operands, consumer=consumer, **arguments)
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


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d in OP.dtypes], ids=str)
@pytest.mark.parametrize("favourite", [None, *NAMES])
def test_opinfo_samples_auto(favourite, dtype):
    """Automatic choice, with a predictor that prefers each algorithm in turn, and with none."""
    differentiable = dtype.is_floating_point or dtype.is_complex
    limit = bound(dtype, favourite or "native")
    with favouring(favourite):
        for requires_grad in (False, True) if differentiable else (False,):
            for operands, arguments in samples(dtype, requires_grad):
                mask = (requires_grad, requires_grad, requires_grad and operands[2] is not None)
                # Complex convolution is native's on both sides; its loss would have to be real.
                consumer = "sum" if not dtype.is_complex else "real"
                want, got = (run(f, operands, mask, consumer, **arguments) for f in (native, ours(None)))
                assert_same_run(got, want, limit, f"{favourite} {arguments}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_opinfo_samples_forced(name, dtype):
    ran = [compare_forced(name, o, a, c) for c in ("sum", "square") for o, a in samples(dtype, False)]
    problems = [problem_of(o[0], o[1], **a) for o, a in samples(dtype, False)]
    assert sum(ran) == 2 * sum(BY_NAME[name].why_not(p) is None for p in problems)


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
    for error in OP.error_inputs("cpu"):
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
    info = MODULES[nn.Conv2d]
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
    info = MODULES[nn.LazyConv2d]
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=True)
    for sample in inputs:
        layer = nn.LazyConv2d(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        report = convselect.summary(convselect.convert(layer))
        assert type(layer) is nn.LazyConv2d
        assert "lazy" in report.left_alone[""]
        layer(*sample.forward_input.args, **sample.forward_input.kwargs)
        assert type(layer) is nn.Conv2d
        assert list(convselect.summary(convselect.convert(layer)).converted) == [""]


# ---- derivatives ------------------------------------------------------------------------------------------------

# name -> (x shape, weight shape, arguments): small, and together awkward enough.
WITHOUT_FLOAT64 = ("upcast", "depthwise", "direct", "grouped", "winograd3", "winograd5", "winograd7")
DERIVATIVES = {
    "3x3": ((2, 2, 4, 5), (2, 2, 3, 3), {"padding": 1}),
    "groups": ((1, 4, 4, 4), (4, 2, 3, 3), {"padding": (1, 0), "groups": 2}),
    "stride, dilation": ((1, 2, 6, 5), (2, 2, 2, 3), {"stride": (2, 1), "padding": 1, "dilation": (2, 1)}),
    "same, even": ((1, 2, 4, 3), (2, 2, 2, 4), {"padding": "same"}),
    "depthwise": ((1, 2, 5, 4), (2, 1, 3, 3), {"padding": 1, "groups": 2}),
    "1x1": ((2, 3, 2, 3), (2, 3, 1, 1), {}),
    "unbatched": ((2, 4, 4), (2, 2, 3, 3), {"padding": 1}),
}
SECOND_ORDER = ("groups", "stride, dilation", "same, even", "depthwise", "1x1")


def derivative_operands(name, key):
    """Float64 operands for one case, laid out so that the algorithm applies; None where it does not apply at all."""
    x_shape, weight_shape, arguments = DERIVATIVES[key]
    torch.manual_seed(2)
    # Standard normals of this size keep the Jacobians of order one.
    x, weight = torch.randn(x_shape, dtype=torch.float64), torch.randn(weight_shape, dtype=torch.float64)
    if name == "native_contiguous":
        weight = weight.contiguous(memory_format=torch.channels_last)
        x = x if x.dim() == 3 else x.contiguous(memory_format=torch.channels_last)
    problem = problem_of(x, weight, **arguments)
    if any(BY_NAME[name].why_not(problem.with_direction(d)) is not None for d in Direction):
        return None
    bias = torch.randn(weight_shape[0], dtype=torch.float64)
    return tuple(t.requires_grad_() for t in (x, weight, bias)), arguments


def cases(name, keys):
    found = [c for c in (derivative_operands(name, key) for key in keys) if c is not None]
    if not found:
        assert name in WITHOUT_FLOAT64, f"{name} applies to none of the cases"
        pytest.skip("it does not compute in float64")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    for operands, arguments in cases(name, DERIVATIVES):
        extras = name in ("im2col_gemm", OTHER)
        assert gradcheck(
            lambda *o, a=arguments: ours(name)(*o, **a),
            operands,
            check_forward_ad=True,
            check_batched_grad=extras,
            check_batched_forward_grad=extras,
            check_undefined_grad=True,
        )


@pytest.mark.parametrize("name", NAMES)
def test_gradgradcheck(name):
    for operands, arguments in cases(name, SECOND_ORDER):
        extras = name == "im2col_gemm"
        assert gradgradcheck(
            lambda *o, a=arguments: ours(name)(*o, **a),
            operands,
            check_fwd_over_rev=extras,
            check_rev_over_rev=True,
            check_batched_grad=extras,
        )


@pytest.mark.parametrize("favourite", [OTHER, "im2col_gemm"])
def test_derivatives_of_an_automatic_choice(favourite):
    with favouring(favourite):
        for operands, arguments in cases(favourite, ("3x3", "groups")):
            assert gradcheck(lambda *o, a=arguments: convselect.conv2d(*o, **a), operands, check_forward_ad=True)
            assert gradgradcheck(lambda *o, a=arguments: convselect.conv2d(*o, **a), operands)


# ---- torch.func -------------------------------------------------------------------------------------------------


def transforms():
    """name -> function of (conv, x, weight, bias): what people write on top of a convolution."""
    from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

    def loss(conv):
        return lambda x, w, b: conv(x, w, b).sin().sum()

    def many(t, dim=0):
        scaled = torch.stack([t, 0.5 * t, t.flip(-1)])
        return scaled.movedim(0, dim)

    return {
        "grad": lambda conv, x, w, b: grad(loss(conv), argnums=(0, 1, 2))(x, w, b),
        "grad of grad": lambda conv, x, w, b: grad(lambda v: grad(loss(conv), argnums=1)(v, w, b).square().sum())(x),
        "vmap x": lambda conv, x, w, b: vmap(conv, in_dims=(0, None, None))(many(x), w, b),
        "vmap x, inner batch": lambda conv, x, w, b: vmap(conv, in_dims=(1, None, None))(many(x, 1), w, b),
        "vmap weight": lambda conv, x, w, b: vmap(conv, in_dims=(None, 0, None))(x, many(w), b),
        "vmap bias": lambda conv, x, w, b: vmap(conv, in_dims=(None, None, 0))(x, w, many(b)),
        "vmap x, bias": lambda conv, x, w, b: vmap(conv, in_dims=(0, None, 0))(many(x), w, many(b)),
        "vmap all": lambda conv, x, w, b: vmap(conv, in_dims=(2, 3, 1))(many(x, 2), many(w, 3), many(b, 1)),
        "vmap of vmap": lambda conv, x, w, b: vmap(vmap(conv, in_dims=(0, None, None)), in_dims=(None, 0, None))(
            many(x), many(w), b
        ),
        "ensemble gradients": lambda conv, x, w, b: vmap(grad(loss(conv), argnums=(0, 1, 2)), in_dims=(None, 0, 0))(
            x, many(w), many(b)
        ),
        "per-sample gradients": lambda conv, x, w, b: vmap(grad(loss(conv), argnums=(1, 2)), in_dims=(0, None, None))(
            many(x), w, b
        ),
        "jvp": lambda conv, x, w, b: jvp(conv, (x, w, b), (x.cos(), w.cos(), b.cos())),
        "jvp of the weight": lambda conv, x, w, b: jvp(lambda v: conv(x, v, b), (w,), (w.cos(),)),
        "jvp of the bias": lambda conv, x, w, b: jvp(lambda v: conv(x, w, v), (b,), (b.cos(),)),
        "vjp": lambda conv, x, w, b: vjp(conv, x, w, b)[1](conv(x, w, b).detach().cos()),
        "jacrev": lambda conv, x, w, b: jacrev(conv, argnums=(0, 1, 2))(x, w, b),
        "jacfwd": lambda conv, x, w, b: jacfwd(conv, argnums=(0, 1, 2))(x, w, b),
        "hessian": lambda conv, x, w, b: hessian(lambda v: loss(conv)(x, v, b))(w),
        "forward over reverse": lambda conv, x, w, b: jvp(
            lambda v: grad(loss(conv), argnums=(0, 1))(x, v, b), (w,), (w.cos(),)
        ),
        "functional.jacobian": lambda conv, x, w, b: torch.autograd.functional.jacobian(
            lambda v: conv(x, v, b), w, vectorize=True
        ),
    }


@pytest.mark.parametrize("key", ["3x3", "same, even", "groups", "1x1"])
@pytest.mark.parametrize("name", NAMES)
def test_function_transforms(name, key):
    case = derivative_operands(name, key)
    if case is None:
        return
    operands, arguments = case
    operands = tuple(t.detach() for t in operands)
    for what, transform in transforms().items():
        convselect.clear()  # a plan may be made inside a transform ...
        want = transform(lambda *o: F.conv2d(*o, **arguments), *operands)
        for _ in range(2):  # ... or outlive it
            got = transform(lambda *o: ours(name)(*o, **arguments), *operands)
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m, what=what: f"{what}: {m}")
        # A plan made under a transform serves plain calls as well.
        plain, stock = run(ours(name), operands, **arguments), run(native, operands, **arguments)
        assert_same_run(plain, stock, bound(torch.float64, name), f"{name} after {what}")


@pytest.mark.parametrize("favourite", [None, OTHER, "im2col_gemm"])
def test_per_sample_gradients_of_a_model(favourite):
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten(), nn.Linear(60, 2))
    model.double()
    x, target = torch.randn(5, 2, 4, 5, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])

    def per_sample(m):
        parameters = {k: p.detach() for k, p in m.named_parameters()}

        def loss(p, one, label):
            return F.cross_entropy(functional_call(m, p, (one[None],)), label[None])

        return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, target)

    want = per_sample(model)
    chosen = copy.deepcopy(model)
    convselect.convert(chosen)
    with favouring(favourite):
        torch.testing.assert_close(per_sample(chosen), want, rtol=1e-9, atol=1e-10)
