"""Derivatives of every algorithm: numeric ones, second ones, and the transforms of torch.func."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from _parity import NAMES, OTHER, assert_same_run, bound, favouring, native, ours, problem_of, run
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import convselect
from convselect.base.problem import Direction
from convselect.kernels.pool import BY_NAME


@pytest.fixture(autouse=True)
def _empty_caches():
    """And no predictor, unless a test brings its own."""
    with favouring(None):
        yield


# ---- derivatives ------------------------------------------------------------------------------------------------

# name -> (x shape, weight shape, arguments): small, and together awkward enough.
WITHOUT_FLOAT64 = ("upcast", "depthwise", "direct", "grouped", "patches", "thin", "winograd3", "winograd5", "winograd7")
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
    """Float64 operands for one case, laid out so that the algorithm applies; None if it does not apply at all."""
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


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    """Each element of the Jacobians for two, random projections of them for the others: what is derived is the same
    code, which only calls another algorithm."""
    for operands, arguments in cases(name, DERIVATIVES):
        extras = name in ("im2col_gemm", OTHER)
        assert gradcheck(
            lambda *o, a=arguments: ours(name)(*o, **a),
            operands,
            check_forward_ad=True,
            check_batched_grad=extras,
            check_batched_forward_grad=extras,
            check_undefined_grad=True,
            fast_mode=not extras,
        )


@pytest.mark.slow
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
            fast_mode=not extras,
        )


@pytest.mark.slow
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


@pytest.mark.slow
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
