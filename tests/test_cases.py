"""What broke others: public reports of wrong numbers, gradients, layouts and errors in convolution libraries, each with
the parameters of the report, each run with automatic choice and with every algorithm forced that says it applies.

The identifiers (B01, ...) are ours; the kinds are named in the tests.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import types
import warnings

import fresh
import pytest
import torch
import torch.nn.functional as F
from fake_model import use_fake
from problems import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

import convselect
from convselect.base import lru
from convselect.base.problem import Direction, conv_problem, layout_of
from convselect.choice.choose import Choice, choose
from convselect.eager import resolve
from convselect.eager.plan import plans
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine.environment import cpu_fingerprint
from convselect.store.store import Store, StoreError

FORCED = [a.name for a in ALL if a.automatic and "cpu" in a.devices]
EVERY = ["auto", *FORCED]
DOUBLE_BOUND = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _automatic_choice_is_not_native(monkeypatch):
    """Automatic choice must take part in every case with something else than native."""
    use_fake(monkeypatch, "winograd4", "fft_tiled", "depthwise", "im2col_gemm")


def applies(policy: str, x, weight, stride=1, padding=0, dilation=1, groups=1, directions=tuple(Direction)) -> bool:
    if policy == "auto":
        return True
    N, C, H, W = x.shape if x.dim() == 4 else (1, *x.shape)
    K, _, R, S = weight.shape
    dtype = str(x.dtype).removeprefix("torch.")
    problem = conv_problem(
        N, C, H, W, K, R, S, stride=stride, padding=padding, dilation=dilation, groups=groups, dtype=dtype,
        layout=layout_of(x) if x.dim() == 4 else "contiguous", weight_layout=layout_of(weight),
    )  # fmt: skip
    return all(BY_NAME[policy].why_not(problem.with_direction(d)) is None for d in directions)


def both(policy, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, loss=None):
    """(ours, native, float64), each [y, grad_x, grad_weight, grad_bias]; the strides of ours and native must agree."""
    results = []
    for conv, dtype in ((convselect.conv2d, None), (F.conv2d, None), (F.conv2d, torch.float64)):
        a, w = (_leaf(t, dtype) for t in (x, weight))
        b = None if bias is None else _leaf(bias, dtype)
        with convselect.use(policy=policy):
            y = conv(a, w, b, stride, padding, dilation, groups)
            (y.square().sum() if loss is None else loss(y)).backward()
        results.append([y.detach(), a.grad, w.grad, None if b is None else b.grad])
    ours, native, exact = results
    for got, want, true in zip(ours, native, exact, strict=True):
        if got is None:
            continue
        assert got.shape == want.shape
        assert got.stride() == want.stride()
        assert got.dtype == want.dtype
        assert relative_error(got, true) <= DOUBLE_BOUND[x.dtype] + 2 * relative_error(want, true)
    return ours, native, exact


def _leaf(t: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    t = t.detach()
    if dtype is not None:
        t = t.to(dtype)
    return t.requires_grad_()


# ---- numbers, forward --------------------------------------------------------------------------------------------

NUMBERS = {
    "B01 channels_last weight, one-channel input": dict(x=(1, 1, 40, 40), w=(64, 1, 3, 3), padding=1, weight="cl"),
    "B04 tiny bfloat16": dict(x=(1, 1, 2, 2), w=(1, 1, 2, 2), dtype=torch.bfloat16),
    "B05 output width 1 under stride 3": dict(x=(2, 16, 9, 3), w=(8, 16, 3, 3), stride=3, dtype=torch.bfloat16),
    "B06 depthwise multiplier 16": dict(x=(2, 2, 9, 9), w=(32, 1, 3, 3), groups=2),
    "B06 depthwise multiplier 2": dict(x=(2, 2, 9, 9), w=(4, 1, 3, 3), groups=2),
    "B08 odd channels, stride (2, 3), wide padding": dict(
        x=(2, 33, 34, 41), w=(34, 33, 3, 3), stride=(2, 3), padding=(4, 5)
    ),
    "B10 strided data gradient, narrow image": dict(x=(2, 32, 16, 15), w=(32, 32, 3, 3), stride=2, padding=1),
    "B12 channels just past a tile, float16": dict(x=(1, 68, 35, 35), w=(76, 68, 3, 3), stride=2, dtype=torch.float16),
    "B13 even, dilated, padded": dict(x=(1, 1, 1, 2), w=(2, 1, 2, 4), stride=2, padding=2, dilation=(2, 1)),
    "B16 one pixel, 125x1 kernel": dict(x=(20, 16, 1, 1), w=(1, 16, 125, 1), stride=2, padding=63),
    "B20 groups": dict(x=(2, 4, 6, 6), w=(8, 2, 3, 3), groups=2, dtype=torch.float64),
    "B41 grouped float16": dict(x=(2, 32, 16, 16), w=(32, 1, 3, 3), padding=1, groups=32, dtype=torch.float16),
    "B45 one output pixel": dict(x=(1, 3, 3, 3), w=(3, 3, 3, 3)),
}


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("case", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers(case, policy):
    dtype = case.get("dtype", torch.float32)
    arguments = {k: case[k] for k in ("stride", "padding", "dilation", "groups") if k in case}
    x, w = torch.randn(case["x"]).to(dtype), (torch.randn(case["w"]) * 0.2).to(dtype)
    if case.get("weight") == "cl":
        w = w.to(memory_format=torch.channels_last)
    if applies(policy, x, w, **arguments):
        both(policy, x, w, torch.randn(w.shape[0]).to(dtype), **arguments)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_b02_weight_is_a_slice_with_unpacked_strides(policy, dtype):
    x, w = torch.randn(2, 16, 12, 20).to(dtype), (torch.randn(3, 16, 3, 3, 3) * 0.1).to(dtype)[:, :, 1]
    assert not w.is_contiguous()
    if applies(policy, x, w):
        ours, _, _ = both(policy, x, w)
        packed, _, _ = both(policy, x, w.contiguous())
        assert relative_error(ours[0], packed[0]) <= DOUBLE_BOUND[dtype]


@pytest.mark.parametrize("policy", EVERY)
def test_b04_all_ones_is_exactly_four(policy):
    x = w = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    if applies(policy, x, w, directions=[Direction.FORWARD]):
        assert convselect.conv2d(x, w, policy=policy).item() == 4.0


@pytest.mark.parametrize("policy", EVERY)
def test_b09_stride_over_kernel_after_an_uneven_pad(policy):
    x, w = F.pad(torch.randn(1, 32, 67, 4), (1, 0)).bfloat16(), (torch.randn(48, 32, 1, 1) * 0.2).bfloat16()
    if applies(policy, x, w, stride=(3, 1)):
        ours, _, _ = both(policy, x, w, stride=(3, 1))
        assert ours[0].shape == (1, 48, 23, 5)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("strides", [(0, 0), (7, 7), (10**9, 3)])
def test_b16_odd_strides_on_dimensions_of_one(policy, strides):
    storage = torch.randn(5, 8)
    x = storage.as_strided((5, 8, 1, 1), (8, 1, *strides))
    w = torch.randn(3, 8, 3, 1)
    if applies(policy, x, w, padding=1):
        both(policy, x, w, torch.randn(3), padding=1)


def test_b13_trace_and_optimize_for_inference_equals_eager():
    layer = nn.Conv2d(1, 2, (2, 4), stride=2, padding=2, dilation=(2, 1)).eval()
    convselect.convert(layer)
    x = torch.zeros(1, 1, 1, 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit warns of its own retirement
        traced = torch.jit.optimize_for_inference(torch.jit.trace(layer, x))
        assert traced(x).shape == (1, 2, 2, 2)
        torch.testing.assert_close(traced(x), layer(x))


# ---- gradients and autograd modes --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_b17_gradients_that_are_not_packed(policy):
    x, w, b = torch.randn(2, 8, 9, 7), torch.randn(8, 8, 3, 3) * 0.2, torch.randn(8)
    if not applies(policy, x, w, padding=1):
        return
    other = torch.randn(2, 8, 9, 7)
    losses = [
        lambda y: y.sum(),
        lambda y: torch.cat([y, other.to(y.dtype)], 1).square().sum(),
        lambda y: y.permute(0, 2, 3, 1).contiguous().square().sum(),
    ]
    for loss in losses:
        both(policy, x, w, b, padding=1, loss=loss)


@pytest.mark.parametrize("policy", EVERY)
def test_b18_kernel_is_a_transposed_view(policy):
    x = torch.arange(1.0, 19).view(1, 2, 3, 3)
    base = torch.arange(1.0, 17).view(2, 2, 2, 2)
    if not applies(policy, x, base.transpose(0, 1)):
        return
    grads = []
    for packed in (False, True):
        a, leaf = x.clone().requires_grad_(), base.clone().requires_grad_()
        kernel = leaf.transpose(0, 1)
        y = convselect.conv2d(a, kernel.contiguous() if packed else kernel, policy=policy)
        y.square().sum().backward()
        grads.append((a.grad, leaf.grad))
    for view, copy_ in zip(*grads, strict=True):
        torch.testing.assert_close(view, copy_, rtol=2e-5, atol=1e-2)


@pytest.mark.parametrize("policy", EVERY)
def test_b20_b21_gradcheck_and_double_backward_with_groups(policy):
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    if not applies(policy, x, w, padding=1, groups=2):
        return
    lru.clear()
    with convselect.use(policy=policy):
        assert torch.autograd.gradcheck(
            lambda *t: convselect.conv2d(*t, padding=1, groups=2), (x, w, b), fast_mode=True
        )
        assert torch.autograd.gradgradcheck(
            lambda *t: convselect.conv2d(*t, padding=1, groups=2), (x, w, b), fast_mode=True
        )
    # Double backward asks for nothing but the three directions of this one geometry.
    shapes = {problem.weight_shape for problem, _ in resolve.choices.entries}
    assert shapes <= {(4, 2, 3, 3)}


@pytest.mark.parametrize("policy", EVERY)
def test_b23_vmap_over_both_operands_without_bias(policy):
    x, w = torch.randn(4, 1, 4, 5, 5), torch.randn(4, 3, 4, 3, 3)
    if not applies(policy, x[0], w[0]):
        return
    with convselect.use(policy=policy):
        if policy in ("direct", "patches", "thin"):  # folded into groups of four channels, which they leave to others
            with pytest.raises(convselect.NotApplicable, match="group"):
                torch.vmap(convselect.conv2d)(x, w)
            return
        got = torch.vmap(convselect.conv2d)(x, w)
    want = torch.stack([F.conv2d(a, b) for a, b in zip(x, w, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_b23_per_sample_gradients():
    layer = nn.Conv2d(4, 8, 3, groups=2)
    plain = copy.deepcopy(layer)
    convselect.convert(layer)
    parameters = {k: v.detach() for k, v in layer.named_parameters()}

    def loss(module, values, sample):
        return torch.func.functional_call(module, values, (sample[None],)).square().sum()

    samples = torch.randn(5, 4, 6, 6)
    got, want = (
        torch.vmap(torch.func.grad(lambda v, s, m=m: loss(m, v, s)), in_dims=(None, 0))(parameters, samples)
        for m in (layer, plain)
    )
    assert got["weight"].shape == (5, 8, 2, 3, 3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- layout and metadata ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_b26_strides_where_one_channel_makes_the_layout_ambiguous(policy, memory_format):
    for x_shape, w_shape, padding in (
        ((2, 3, 7, 9), (1, 3, 1, 1), 0),
        ((2, 1, 7, 9), (4, 1, 3, 3), 1),
        ((1, 1, 7, 5), (5, 1, 1, 1), 0),
        ((3, 1, 28, 28), (16, 1, 3, 3), 0),
        ((2, 4, 1, 1), (6, 4, 1, 1), 0),
    ):
        x = torch.empty(x_shape, memory_format=memory_format).normal_()
        w = torch.randn(w_shape)
        if applies(policy, x, w, padding=padding):
            both(policy, x, w, torch.randn(w_shape[0]), padding=padding)


@pytest.mark.parametrize("policy", EVERY)
def test_b27_weight_gradient_strides_of_1x1_in_channels_last(policy):
    x = torch.randn(2, 4, 16, 16).to(memory_format=torch.channels_last)
    w = torch.randn(4, 4, 1, 1)
    if applies(policy, x, w):
        both(policy, x, w, torch.randn(4))


def test_b29_tensor_subclass_goes_through():
    class Marked(torch.Tensor):
        pass

    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(1, 3, 8, 8)
    want = layer(x)
    convselect.convert(layer)
    y = layer(x.as_subclass(Marked))
    assert type(y) is Marked
    torch.testing.assert_close(y.as_subclass(torch.Tensor), want)
    with convselect.use(policy="im2col_gemm"), pytest.raises(convselect.NotApplicable, match="subclass"):
        layer(x.as_subclass(Marked))


# ---- API and error parity ---------------------------------------------------------------------------------------


def layers(*args, **kwargs):
    """A plain layer and its converted twin."""
    plain = nn.Conv2d(*args, **kwargs)
    ours = copy.deepcopy(plain)
    convselect.convert(ours)
    return plain, ours


@pytest.mark.parametrize("policy", ["auto", "im2col_gemm", "winograd2"])
def test_b30_circular_padding_of_one_axis(policy):
    plain, ours = layers(6, 1, 3, padding=(0, 1), padding_mode="circular")
    x = torch.randn(1, 6, 20, 10)
    with convselect.use(policy=policy):
        assert ours(x).shape == (1, 1, 18, 10)
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["auto", "im2col_gemm", "winograd2"])
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate", "zeros"])
def test_b32_unbatched_input(mode, policy):
    plain, ours = layers(8, 8, 3, padding=1, padding_mode=mode)
    x = torch.randn(8, 32, 32)
    with convselect.use(policy=policy):
        y = ours(x)
        assert y.shape == (8, 32, 32)
        assert y.stride() == plain(x).stride()
        torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(y, ours(x[None])[0])


def test_b33_reflect_padding_over_the_input_raises():
    _, ours = layers(1, 10, 3, padding=1, padding_mode="reflect")
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        ours(torch.randn(1, 1, 1, 10))


@pytest.mark.parametrize("policy", EVERY)
def test_b34_same_padding_of_even_kernels_goes_to_the_bottom_right(policy):
    x = torch.randn(1, 3, 16, 16)
    for kernel, dilation, pads in (((2, 2), 1, (0, 1, 0, 1)), ((4, 2), (1, 3), (1, 2, 1, 2))):
        w = torch.randn(3, 3, *kernel) * 0.3
        if not applies(policy, x, w, padding="same", dilation=dilation):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that uneven padding copies
            ours, _, _ = both(policy, x, w, padding="same", dilation=dilation)
        assert ours[0].shape == (1, 3, 16, 16)
        want = F.conv2d(F.pad(x, pads), w, dilation=dilation)
        torch.testing.assert_close(ours[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["auto", "im2col_gemm"])
def test_b36_wrong_sizes_raise_the_usual_errors(policy):
    _, ours = layers(1, 1, 3, stride=2, dilation=2)
    with convselect.use(policy=policy):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            ours(torch.randn(1, 1, 4, 4))
        _, wide = layers(16, 4, 3)
        with pytest.raises(RuntimeError, match=r"Expected 3D \(unbatched\) or 4D \(batched\) input"):
            wide(torch.randn(1, 16, 5, 5, 5))
        x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
        convselect.conv2d(x, w, torch.randn(1))  # a good call first: the next one finds it in the cache
        with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional with 1 elements"):
            convselect.conv2d(x, w, torch.randn(2))


def test_b37_integers_as_native():
    for dtype, dilation in itertools.product((torch.uint8, torch.int32, torch.int64), (1, 2)):
        x, w = torch.randint(0, 5, (1, 4, 7, 7), dtype=dtype), torch.randint(0, 3, (3, 4, 3, 3), dtype=dtype)
        try:
            want = F.conv2d(x, w, dilation=dilation)
        except NotImplementedError as error:
            with pytest.raises(NotImplementedError, match=str(error)[:40].replace("(", ".").replace(")", ".")):
                convselect.conv2d(x, w, dilation=dilation)
        else:
            got = convselect.conv2d(x, w, dilation=dilation)
            assert got.dtype == dtype
            assert torch.equal(got, want)
    _, ours = layers(4, 3, 3)
    with pytest.raises(RuntimeError, match=r"(?i)byte.*float|unsigned char.*float"):
        ours(torch.ones(1, 4, 5, 5, dtype=torch.uint8))


def test_b39_complex_gradients_and_forced_refusal():
    x = torch.randn(1, 4, 5, 5, dtype=torch.complex128, requires_grad=True)
    w = torch.randn(2, 4, 3, 3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: convselect.conv2d(a, b, padding=1), (x, w), fast_mode=True)
    for name in FORCED:
        if name != "native":
            with pytest.raises(convselect.NotApplicable, match="complex128"):
                convselect.conv2d(x, w, padding=1, policy=name)


# ---- non-finite and precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_b40_one_bad_pixel_stays_in_its_window(policy, value):
    x, w = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
    if not applies(policy, x, w, padding=1):
        return
    x[0, 1, 3, 4] = value
    ours, native = (
        conv(x, w, None, 1, 1).isfinite() for conv in (lambda *a: convselect.conv2d(*a, policy=policy), F.conv2d)
    )
    assert torch.equal(ours, native)
    assert (~ours).sum() == 4 * 9
    assert ours[1].all()
    clean = torch.randn(2, 4, 8, 8)
    w[0, 0, 0, 0] = value
    bad = ~convselect.conv2d(clean, w, padding=1, policy=policy).isfinite()
    assert bad[:, 0].any()
    assert not bad[:, 1:].any()


@pytest.mark.parametrize("policy", EVERY)
def test_b42_a_batch_differs_from_its_images_by_no_more_than_rounding(policy):
    x, w, b = torch.randn(2, 4, 8, 6), torch.randn(3, 4, 3, 3), torch.randn(3)
    if applies(policy, x, w):
        with convselect.use(policy=policy):
            whole = convselect.conv2d(x, w, b)
            single = torch.cat([convselect.conv2d(image, w, b) for image in x.split(1)])
        torch.testing.assert_close(whole, single, rtol=1e-5, atol=2e-5)


# ---- size limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_b45_an_empty_batch_gives_zero_gradients_and_is_not_remembered(policy):
    junk = [torch.full((64,), float("nan")) for _ in range(100)]
    del junk
    _, layer = layers(3, 3, 3)
    lru.clear()
    x = torch.empty(0, 3, 3, 3, requires_grad=True)
    with convselect.use(policy=policy):
        y = layer(x)
        y.sum().backward()
    assert y.shape == (0, 3, 1, 1)
    assert x.grad.shape == (0, 3, 3, 3)
    assert torch.equal(layer.weight.grad, torch.zeros_like(layer.weight))
    assert torch.equal(layer.bias.grad, torch.zeros(3))
    assert not plans.entries
    assert not resolve.choices.entries


@pytest.mark.parametrize("policy", EVERY)
def test_b47_large_kernel_with_large_padding(policy):
    x, w = torch.zeros(1, 1, 600, 500), torch.ones(1, 1, 51, 51)
    x[0, 0, 300, 200] = 1.0
    if applies(policy, x, w, padding=25, directions=[Direction.FORWARD]):
        y = convselect.conv2d(x, w, padding=25, policy=policy)
        assert y.sum().item() == pytest.approx(2601.0, rel=1e-5)
        box = torch.zeros_like(y)
        box[0, 0, 275:326, 175:226] = 1.0
        torch.testing.assert_close(y, box, rtol=1e-5, atol=1e-5)


def test_b49_workspace_is_a_hard_gate_before_any_choice():
    large = [
        conv_problem(32, 128, 1, 128, 128, 7, 7, padding=3),
        conv_problem(1, 1, 4222, 4222, 30, 127, 127),
        conv_problem(1, 1, 1100, 1100, 1, 127, 127),
    ]
    budget = 256 * 2**20
    with convselect.use(workspace_bytes=budget) as used:
        for problem, direction in itertools.product(large, Direction):
            chosen = resolve.choice_for(problem.with_direction(direction), used).algorithm
            if chosen != "native":
                assert BY_NAME[chosen].workspace_bytes(problem.with_direction(direction)) <= budget


# ---- stale or wrong cached state --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", EVERY)
def test_b50_every_forward_uses_the_weight_as_it_is_now(policy):
    plain, layer = layers(4, 4, 3, bias=False)
    plain.eval(), layer.eval()
    x = torch.randn(1, 4, 8, 8)
    if not applies(policy, x, layer.weight, directions=[Direction.FORWARD]):
        return

    def assign(module):
        module.load_state_dict({"weight": torch.full((4, 4, 3, 3), 0.25)}, assign=True)

    def step(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.enable_grad():
            F.conv2d(x, module.weight).sum().backward()
        optimizer.step()

    def replace(module):
        module.weight.data = torch.ones(4, 4, 3, 3)

    changes = [
        lambda m: m.weight.data.copy_(torch.zeros(4, 4, 3, 3)),
        replace,
        lambda m: m.weight.mul_(2),
        assign,
        step,
        lambda m: m.weight.data.flatten()[:3].fill_(7.0),
    ]
    with torch.no_grad(), convselect.use(policy=policy):
        for change in changes:
            layer(x)
            change(plain)
            change(layer)
            torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", EVERY)
def test_b52_training_works_after_a_first_call_in_inference_mode(policy):
    plain, layer = layers(4, 4, 3, padding=1)
    x = torch.randn(1, 4, 8, 8)
    if not applies(policy, x, layer.weight, padding=1):
        return
    with convselect.use(policy=policy):
        with torch.inference_mode():
            layer(x)
            inside = torch.randn(1, 4, 8, 8)
        layer(x).sum().backward()
        plain(x).sum().backward()
        torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            layer(inside)


def test_b54_shapes_without_end_leave_a_bounded_cache(monkeypatch):
    monkeypatch.setattr(plans, "capacity", 64)
    monkeypatch.setattr(resolve.choices, "capacity", 64)
    _, layer = layers(2, 2, 3, padding=1)
    with torch.no_grad():
        for width in range(8, 308):
            layer(torch.randn(1, 2, 4, width))
    assert 0 < len(plans) <= 64
    assert 0 < len(resolve.choices) <= 64


@pytest.mark.parametrize("policy", ["auto", "im2col_gemm", "winograd2"])
def test_b55_attributes_changed_after_construction_count(policy):
    plain, layer = layers(3, 4, 3, padding=1)
    x = torch.randn(1, 3, 8, 8)
    with convselect.use(policy=policy):
        layer(x)
        for module in (plain, layer):
            module.padding_mode = "circular"
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-4)
        layer._conv_forward = types.MethodType(lambda self, a, w, b: torch.zeros(1), layer)
        assert torch.equal(layer(x), torch.zeros(1))
    plain, layer = layers(4, 4, 3, padding=1)
    x = torch.randn(1, 4, 9, 9)
    for name, value in (("stride", (2, 2)), ("padding", [2, 2]), ("dilation", (2, 2)), ("stride", [1, 1])):
        for module in (plain, layer):
            setattr(module, name, value)
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-4)


# ---- module life cycle and conversion ---------------------------------------------------------------------------


def test_b56_deepcopy_after_forward_and_backward():
    _, layer = layers(4, 4, 3)
    x = torch.randn(1, 4, 8, 8)
    layer(x).sum().backward()
    twin = copy.deepcopy(layer)
    assert type(twin) is nn.Conv2d
    assert list(convselect.summary(twin).converted) == [""]
    assert twin.weight is not layer.weight
    torch.testing.assert_close(twin(x), layer(x))
    assert layer.__dict__.keys() - nn.Conv2d(4, 4, 3).__dict__.keys() == {"_convselect", "policy"}


def test_b60_shared_and_tied_modules():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv)
    convselect.convert(model)
    assert model[0] is model[2] is conv
    assert len(list(model.parameters())) == 2
    assert len(model.state_dict()) == 4
    first, second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    second.weight = first.weight
    tied = nn.Sequential(first, second)
    convselect.convert(tied)
    assert tied[0].weight is tied[1].weight


def test_b61_subclasses_with_a_forward_of_their_own_keep_it():
    class CentredConv2d(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight - self.weight.mean(), self.bias)

    model = nn.Sequential(CentredConv2d(4, 4, 3), nn.Conv2d(4, 4, 3, bias=False))
    x = torch.randn(1, 4, 8, 8)
    want = model(x)
    report = convselect.summary(convselect.convert(model))
    assert type(model[0]) is CentredConv2d
    assert list(report.converted) == ["0", "1"]
    torch.testing.assert_close(model(x), want)


def test_b62_revert_gives_the_very_class_back():
    plain, layer = layers(3, 4, 3)
    assert isinstance(layer, nn.Conv2d)
    assert convselect.revert(layer) is layer
    assert type(layer) is nn.Conv2d
    assert layer.__dict__.keys() == plain.__dict__.keys()


def test_b63_attributes_are_those_of_conv2d_and_spellings_share_a_plan():
    plain, layer = layers(6, 6, 31, padding=15, groups=6, bias=False)
    for name in ("kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(plain, name) == getattr(layer, name)
        assert type(getattr(plain, name)) is type(getattr(layer, name))
    lru.clear()
    x, w = torch.randn(1, 6, 40, 40), layer.weight
    with torch.no_grad():
        for padding in (15, (15, 15), [15, 15]):
            convselect.conv2d(x, w, None, 1, padding, 1, 6)
            convselect.conv2d(x, w, None, (1, 1), padding, [1, 1], 6)
        layer(x)
    assert len(plans) == 1


def test_b64_conv_bn_fusion():
    conv, norm = nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    convselect.convert(conv)
    conv.eval(), norm.eval()
    x = torch.randn(1, 4, 8, 8)
    want = norm(conv(x))
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    assert list(convselect.summary(fused).converted) == [""]
    torch.testing.assert_close(fused(x), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm(conv(x)), want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERY)
def test_b76_weight_at_an_odd_address_and_expanded_operands(policy):
    flat = torch.randn(145)
    w = flat[1:].view(4, 4, 3, 3)
    for x, weight in (
        (torch.randn(1, 4, 8, 8), w),
        (torch.randn(1, 4, 1, 1).expand(3, 4, 9, 9), w),
        (torch.randn(1, 4, 8, 8), torch.randn(1, 4, 1, 1).expand(4, 4, 3, 3)),
    ):
        if applies(policy, x, weight, padding=1):
            both(policy, x, weight, padding=1)
    gc.collect(1)


# ---- compilers, processes, files ---------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("strict", [False, True])
def test_b66_export_with_dynamic_batch_and_height_and_string_padding(strict):
    layer = nn.Conv2d(1, 8, 3, padding="same").eval()
    x, later = torch.randn(2, 1, 28, 28), torch.randn(5, 1, 40, 28)
    want = layer(later)
    convselect.convert(layer)
    dynamic = {0: torch.export.Dim("N", min=1, max=64), 2: torch.export.Dim("H", min=8, max=256)}
    program = torch.export.export(layer, (x,), dynamic_shapes=(dynamic,), strict=strict)
    got = program.module()(later)
    assert got.shape == (5, 8, 40, 28)
    assert relative_error(got, want) <= DOUBLE_BOUND[torch.float32]


@pytest.mark.parametrize("changed", [False, True], ids=["made in between", "changed in between"])
def test_b68_a_checkpoint_passes_whatever_happens_to_the_choice_in_between(changed, monkeypatch):
    """Number, sizes and dtypes of what is saved must not depend on the algorithm."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, 3)
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    results = []
    for selected in (False, True):
        if selected:
            convselect.convert(layer)
        x.grad = layer.weight.grad = layer.bias.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(layer, x, use_reentrant=False)
        use_fake(monkeypatch, "im2col_gemm" if changed else "winograd4")  # and forgets the choice that was made
        y.float().square().sum().backward()
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    for got, want in zip(results[1], results[0], strict=True):
        assert got.stride() == want.stride()
        assert relative_error(got, want) <= 2 * DOUBLE_BOUND[torch.bfloat16]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", ["auto", "native"])
def test_b69_first_call_of_a_shape_inside_a_cuda_graph(policy):
    layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
    x = torch.randn(8, 64, 28, 28, device="cuda")
    want = layer(x)
    convselect.convert(layer, policy=policy)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(torch.randn(1, 64, 8, 8, device="cuda"))  # libraries load before a capture, with or without us
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(y.cpu(), want.detach().cpu()) <= 1e-3


def test_b71_importing_and_building_starts_no_threads_and_a_fork_after_use_works():
    """A process that has run OpenMP threads cannot fork, with or without us; so we must not run any unasked."""
    code = textwrap.dedent(
        """
        import os, sys, warnings
        import torch
        from torch import nn
        warnings.simplefilter("ignore")
        threads = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
        before = threads()
        import convselect
        model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 13, 1))
        wide = nn.Conv2d(1, 2, (1, 2))
        convselect.convert(model), convselect.convert(wide), convselect.SelectedConv2d(3, 4, 3)
        assert threads() == before, (threads(), before)
        torch.set_num_threads(1)

        def run():
            model(torch.randn(4, 3, 32, 32)).sum().backward()
            wide(torch.randn(1, 1, 1, 24000)).sum().backward()
            with convselect.use("im2col_gemm"):
                model(torch.randn(4, 3, 32, 32)).sum().backward()
        run()
        child = os.fork()
        run()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]


_WRITERS = """
import os, signal, sys
from convselect.model.dataset import Row
from convselect.base.problem import conv_problem
from convselect.store.store import Store

def write(worker, told):
    with Store(sys.argv[1]) as store:
        environment = store.environment({"device": "cpu"})
        for i in range(50):
            problem = conv_problem(1, 3, 8 + i, 8 + worker, 4, 3, 3)
            row = Row("b72", problem, "native", 1, "ok", "wall", min_us=1.0, median_us=1.0, p20_us=1.0, p80_us=1.0,
                      wall_us=1.0, rounds=1, repeat=0)
            store.add(environment, [row], pool="p")
            if told is not None:
                os.write(told, b".")

children, (heard, told) = [], os.pipe()
for worker in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        try:
            write(worker, told)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    if worker == 0:
        os.close(told)
        told = None
for _ in range(5):
    os.read(heard, 1)  # at once if the worker has ended
os.kill(children[0], signal.SIGKILL)
print(*(os.waitpid(child, 0)[1] for child in children[1:]))
"""


def test_b72_eight_writers_one_of_them_killed(tmp_path):
    """No entry lost, none half written; what is then damaged or foreign is refused, not read."""
    path = tmp_path / "times.sqlite"
    Store(path).close()
    done = fresh.run(["-c", _WRITERS, str(path)], timeout=280)
    assert done.stdout.split() == ["0"] * 7, done.stderr
    with Store(path) as store:
        widths = [row.problem.W for row in store.rows()]
    assert all(widths.count(8 + i) == 50 for i in range(1, 8))
    assert widths.count(8) >= 5
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 3], b"\0" * len(whole), b"{}"):
        path.write_bytes(damaged)
        with pytest.raises((StoreError, OSError)), Store(path) as store:
            store.rows()


@pytest.mark.parametrize("home", ["missing", "a file", "unset"])
def test_b73_the_layer_works_without_a_usable_folder_of_the_user(home, tmp_path):
    """Read-only disks are made here as folders that cannot be: root may write everywhere else."""
    blocked = tmp_path / "blocked"
    if home == "a file":
        blocked.write_text("")
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "CONVSELECT_CACHE")}
    if home != "unset":
        environment |= {"HOME": str(blocked / "home"), "CONVSELECT_CACHE": str(blocked / "cache")}
    code = (
        "import warnings, torch, convselect\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for size in (8, 9):\n"
        "        convselect.SelectedConv2d(3, 4, 3)(torch.randn(1, 3, size, 8)).sum().backward()\n"
        "assert sum(issubclass(w.category, convselect.ConvselectWarning) for w in caught) <= 1\n"
    )
    result = fresh.run(["-c", code], env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    assert not (blocked / "cache").exists()  # using a layer writes nothing


def test_b74_a_correction_of_another_machine_or_model_is_never_used(tmp_path, monkeypatch):
    from convselect.model import loaded

    found = sorted(loaded.nearest_artifact().parent.glob("cpu-x86-avx*.npz"))[0]
    monkeypatch.undo()  # the real choice
    monkeypatch.setenv("CONVSELECT_ARTIFACT", str(found))
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("CONVSELECT_CALIBRATION", str(path))
    problem = conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)

    def gain(**changes):
        own = dict(fingerprint=cpu_fingerprint(), artifact=found.stem, digest=loaded.digest(found), problems=1)
        path.write_text(json.dumps({**own, "bias": dict.fromkeys(BY_NAME, 24.0), **changes}))
        convselect.unload()
        return loaded.get().predict(problem).log_gain("im2col_gemm")

    assert gain() > 20
    for changes in ({"fingerprint": "another"}, {"artifact": "another"}, {"digest": "another"}):
        assert gain(**changes) < 20
    convselect.unload()


def test_b74_a_choice_that_is_gone_or_refuses_falls_back():
    problem = conv_problem(1, 3, 8, 8, 4, 3, 3)
    for name in ("was_here_once", "depthwise"):  # the second cannot do this one
        remembered = Choice(name, "store")
        choice = choose(problem, BY_NAME, convselect.base.settings.current(), store=lambda _, found=remembered: found)
        assert choice.algorithm == "native"
