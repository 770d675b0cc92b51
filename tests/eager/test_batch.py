"""Batch invariance: every image of a batch gets the bits it gets alone."""

from __future__ import annotations

import random

import pytest
import torch
from fake_model import FakePredictor, use_fake
from kinds import CONV3D, TRANSPOSED2D
from pairs import pairwise
from problems import arranged, operands_of, random_operands
from torch import nn

import convselect
from convselect.base import lru
from convselect.base.problem import ConvProblem, Direction, canonical_strides, conv_problem, layout_of
from convselect.base.settings import use
from convselect.choice.budgets import refusal
from convselect.eager import batch as eager_batch
from convselect.eager import resolve
from convselect.explain import explain_problem
from convselect.kernels.pool import ALL, BY_NAME
from convselect.model import loaded

DECLARED = [
    a.name for a in ALL if a.batch_invariant(conv_problem(1, 16, 9, 9, 16, 3, 3, padding=1)) and a.name != "reference"
]
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD_DATA)


@pytest.fixture(autouse=True)
def _forget():
    lru.clear()
    yield
    lru.clear()


def drawn(generator: random.Random) -> ConvProblem:
    """Some convolution; small, but of more than one block in each kernel now and then."""
    pick = generator.choice
    kind = pick(("dense", "dense", "depthwise", "grouped"))
    groups = {"dense": 1, "depthwise": pick((3, 8, 20, 33)), "grouped": pick((2, 4))}[kind]
    C = groups * {"dense": pick((1, 3, 16, 40, 130)), "depthwise": 1, "grouped": pick((2, 4, 8, 16))}[kind]
    K = groups * {"dense": pick((1, 5, 16, 70)), "depthwise": pick((1, 1, 2)), "grouped": pick((2, 4, 16))}[kind]
    R, S = pick(((3, 3), (3, 3), (1, 1), (5, 5), (7, 7), (1, 3), (3, 1), (2, 2), (1, 7)))
    unit = generator.random() < 0.7
    return conv_problem(
        pick((2, 3, 5, 8)), C, pick((8, 14, 23, 31)), pick((7, 16, 21, 33)), K, R, S,
        padding=(pick((0, R // 2)), pick((0, S // 2))),
        stride=1 if unit else pick((2, 3)), dilation=1 if unit else pick((1, 2)), groups=groups,
        direction=pick(DIRECTIONS), dtype=pick(("float32", "float32", "bfloat16")),
        layout=pick(("contiguous", "channels_last")), threads=torch.get_num_threads(),
    )  # fmt: skip


def test_those_that_declare_it_are_known():
    # What runs a batch at once is worth a test of its own; a new declaration has to come by here.
    if BY_NAME["direct"].why_not(conv_problem(1, 8, 8, 8, 8, 3, 3)) is None:
        winograd = (f"winograd{m}" for m in range(2, 8))
        assert sorted(DECLARED) == ["depthwise", "direct", "grouped", "patches", "thin", *winograd]
    assert "native" not in DECLARED


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", DECLARED)
def test_what_declares_it_gives_each_image_its_bits(name, threads):
    torch.set_num_threads(threads)
    algorithm, generator, seen = BY_NAME[name], random.Random(7), set()
    while len(seen) < 60:
        problem = drawn(generator)
        if min(problem.P, problem.Q) < 1 or algorithm.why_not(problem) is not None or problem in seen:
            continue
        seen.add(problem)
        assert algorithm.batch_invariant(problem)
        a, b = operands_of(problem, *random_operands(problem, problem.layout, seed=len(seen)))
        whole = algorithm.run(a, b, problem)
        for n in range(problem.N):
            alone = algorithm.run(a[n : n + 1].clone(), b, problem._replace(N=1))
            assert torch.equal(whole[n : n + 1], alone), problem


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("winograd4", conv_problem(6, 96, 56, 56, 64, 3, 3, padding=1)),
        ("winograd7", conv_problem(3, 64, 28, 28, 80, 3, 3, padding=1)),
        ("direct", conv_problem(5, 128, 28, 28, 192, 3, 3, padding=1, stride=2)),
        ("direct", conv_problem(5, 512, 7, 7, 128, 1, 1, layout="channels_last")),
        ("patches", conv_problem(3, 3, 64, 64, 192, 16, 16, stride=16)),
        ("depthwise", conv_problem(4, 96, 56, 56, 96, 7, 7, padding=3, groups=96)),
        ("grouped", conv_problem(4, 128, 28, 28, 128, 3, 3, padding=1, groups=32)),
    ],
)
def test_it_holds_at_the_sizes_of_real_layers(name, problem, threads):
    torch.set_num_threads(threads)
    algorithm = BY_NAME[name]
    if algorithm.why_not(problem) is not None:
        pytest.skip("the C kernels are missing")
    for direction in DIRECTIONS:
        posed = problem._replace(direction=direction, threads=threads)
        a, b = operands_of(posed, *random_operands(posed, posed.layout))
        whole = algorithm.run(a, b, posed)
        for n in range(posed.N):
            assert torch.equal(whole[n : n + 1], algorithm.run(a[n : n + 1].clone(), b, posed._replace(N=1)))


# ---- calls ----------------------------------------------------------------------------------------------------------

CALLS = {
    "3x3": (dict(kernel_size=3, padding=1), 24, 32, 1, 19, 17),
    "1x1": (dict(kernel_size=1), 40, 24, 1, 13, 9),
    "strided": (dict(kernel_size=3, padding=1, stride=2), 7, 12, 1, 21, 18),
    "5x5 same": (dict(kernel_size=5, padding="same"), 6, 5, 1, 15, 15),
    "even kernel same": (dict(kernel_size=(2, 4), padding="same"), 5, 6, 1, 11, 12),
    "dilated": (dict(kernel_size=3, padding=2, dilation=2), 8, 8, 1, 16, 15),
    "grouped": (dict(kernel_size=3, padding=1), 16, 16, 4, 12, 14),
    "depthwise": (dict(kernel_size=3, padding=1), 12, 12, 12, 17, 16),
    "one channel": (dict(kernel_size=3, padding=1), 1, 9, 1, 14, 13),
    "one pixel": (dict(kernel_size=1), 33, 17, 1, 1, 1),
    "whole image": (dict(kernel_size=(5, 4)), 6, 9, 1, 5, 4),
}
ARRANGEMENTS = ("contiguous", "channels_last", "every other", "every other, channels_last", "transposed", "offset")


def batch(how: str, N: int, C: int, H: int, W: int) -> torch.Tensor:
    x = torch.randn(2 * N, C, H, W)
    if how.startswith("every other"):
        return (x.contiguous(memory_format=torch.channels_last) if "," in how else x)[::2]
    return arranged(x[:N], how)


def check(module, x: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Each image of y and of grad_x, and the same of each image alone, at its place in the batch and by itself."""
    x = x.detach().requires_grad_()
    y = module(x)
    grad_y = torch.randn_like(y) if gradient is None else gradient
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    for n in range(len(x)):
        for image in (x[n : n + 1].detach(), x[n : n + 1].detach().clone()):
            image.requires_grad_()
            alone = module(image)
            assert torch.equal(alone, y[n : n + 1]), f"y of image {n}"
            (grad,) = torch.autograd.grad(alone, image, grad_y[n : n + 1])
            assert torch.equal(grad, grad_x[n : n + 1]), f"grad_x of image {n}"
        with torch.no_grad():
            assert torch.equal(module(x[n : n + 1].clone()), y[n : n + 1]), f"y of image {n} without gradients"


@pytest.mark.slow
@pairwise(
    {
        "policy": ["native", "auto", "im2col_gemm", "native_channels_last"],
        "how": {how: how for how in ARRANGEMENTS},
        "threads": [1, 2],
    }
)
def test_images_of_a_batch_get_their_own_bits(monkeypatch, policy, how, threads):
    torch.set_num_threads(threads)
    use_fake(monkeypatch, "winograd4", "depthwise", "grouped", "fft", "direct")
    for keywords, C, K, groups, H, W in CALLS.values():
        layer = convselect.SelectedConv2d(C, K, groups=groups, **keywords)
        with use(policy, batch_invariant=True):
            check(layer, batch(how, 4, C, H, W))


@pytest.mark.parametrize("policy", ["winograd4", "direct", "fft", "fft_tiled", "im2col_gemm"])
def test_forced_algorithms_too(policy):
    layer = convselect.SelectedConv2d(24, 32, 3, padding=1)
    for how in ("contiguous", "channels_last"):
        with use(policy, batch_invariant=True):
            check(layer, batch(how, 5, 24, 19, 17))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_element_types(monkeypatch, dtype):
    use_fake(monkeypatch, "upcast", "winograd4")
    layer = convselect.SelectedConv2d(16, 24, 3, padding=1, dtype=dtype)
    for policy in ("auto", "native"):
        with use(policy, batch_invariant=True):
            check(layer, torch.randn(4, 16, 14, 12, dtype=dtype))


class _ByTheBatch:
    """Makes winograd4 give other numbers in another batch."""

    def __init__(self, monkeypatch) -> None:
        algorithm = BY_NAME["winograd4"]
        run = algorithm.run_checked

        def run_checked(a, b, problem, params=None, bias=None):
            if problem.direction != Direction.BACKWARD_WEIGHT:  # a sum over the batch
                self.batches.append(problem.N)
            return run(a, b, problem, params, bias) * (1 + problem.N)

        self.batches: list[int] = []
        monkeypatch.setattr(algorithm, "run_checked", run_checked)
        monkeypatch.setattr(algorithm, "batch_invariant", lambda problem: False)


def test_an_algorithm_that_looks_at_the_batch_does_not_get_one(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    spy = _ByTheBatch(monkeypatch)
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    x = torch.randn(3, 8, 16, 16)
    with pytest.raises(AssertionError, match="y of image 0"):  # without the setting this test would notice
        check(layer, x)
    with use(batch_invariant=True):
        spy.batches.clear()
        check(layer, x)
    assert set(spy.batches) == {1}


def test_a_model_that_looks_at_the_batch_is_asked_about_one_image(monkeypatch):
    class ByTheBatch:
        def predict(self, problem):
            return FakePredictor("winograd4" if problem.N == 1 else "im2col_gemm").predict(problem)

    predictor = ByTheBatch()
    monkeypatch.setattr(loaded, "get", lambda: predictor)
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    problem = conv_problem(6, 8, 12, 12, 8, 3, 3, padding=1)
    assert explain_problem(problem).rows[0].algorithm == "im2col_gemm"
    with use(batch_invariant=True):
        assert explain_problem(problem).rows[0].algorithm == "winograd4"
        check(layer, torch.randn(6, 8, 12, 12))


def test_what_declares_it_runs_at_once_within_its_budget(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    algorithm, batches = BY_NAME["winograd4"], []
    run = algorithm.run_checked

    def run_checked(a, b, problem, params=None, bias=None):
        batches.append(problem.N)
        return run(a, b, problem, params, bias)

    monkeypatch.setattr(algorithm, "run_checked", run_checked)
    monkeypatch.setattr(algorithm, "batch_invariant", lambda problem: True)
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(6, 8, 40, 40)
    with torch.no_grad(), use(batch_invariant=True):
        whole = layer(x)
        assert batches == [6]
        monkeypatch.setattr(algorithm, "workspace_bytes", lambda p: 1000 * p.N)
        with use(workspace_bytes=1000):
            assert torch.equal(layer(x), whole)
    assert batches == [6] + [1] * 6


def test_one_bad_image_sends_only_itself_to_native(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    x = torch.randn(4, 8, 16, 16)
    with torch.no_grad(), use(batch_invariant=True):
        good = layer(x)
        x[2, 3, 5, 5] = torch.inf
        bad = layer(x)
        assert torch.equal(layer(x[2:3]), bad[2:3])
    assert [torch.equal(good[n], bad[n]) for n in range(4)] == [True, True, False, True]
    assert bad[2].isfinite().sum() == bad[2].numel() - 8 * 9


def test_the_weight_gradient_is_what_it_is_without(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(4, 8, 16, 16)
    grad_y = torch.randn(4, 8, 16, 16)
    layer(x).backward(grad_y)
    plain, bias = layer.weight.grad.clone(), layer.bias.grad.clone()
    layer.zero_grad()
    with use(batch_invariant=True):
        layer(x).backward(grad_y)
    assert torch.equal(layer.weight.grad, plain)
    assert torch.equal(layer.bias.grad, bias)


def test_strides_and_values_are_those_of_native():
    for keywords, C, K, groups, H, W in CALLS.values():
        layer = convselect.SelectedConv2d(C, K, groups=groups, **keywords)
        for how in ARRANGEMENTS:
            x = batch(how, 3, C, H, W).requires_grad_()
            want = nn.functional.conv2d(
                x, layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, groups
            )
            (want_x,) = torch.autograd.grad(want.square().sum(), x)
            with use("native", batch_invariant=True):
                got = layer(x)
                (got_x,) = torch.autograd.grad(got.square().sum(), x)
            assert got.stride() == want.stride()
            assert got_x.stride() == want_x.stride()
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got_x, want_x, rtol=1e-4, atol=1e-4)


def test_empty_and_unbatched_inputs():
    layer = convselect.SelectedConv2d(4, 6, 3, padding=1)
    x = torch.randn(3, 4, 9, 9)
    with use("native", batch_invariant=True):
        assert layer(x[:0]).shape == (0, 6, 9, 9)
        assert torch.equal(layer(x[1]), layer(x)[1])


def test_functional_convolutions_under_enabled(monkeypatch):
    use_fake(monkeypatch, "winograd4", "direct")
    plain = nn.Conv2d(24, 32, 3, padding=1)
    for policy in ("auto", "native", "im2col_gemm"):
        with convselect.enabled(policy, batch_invariant=True):
            check(plain, torch.randn(5, 24, 19, 17))
            check(plain, batch("channels_last", 5, 24, 19, 17))


@pytest.mark.compile
@pytest.mark.parametrize("policy", ["native", "auto", "im2col_gemm"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(monkeypatch, policy, dynamic):
    use_fake(monkeypatch, "winograd4", "direct")
    torch._dynamo.reset()
    layer = convselect.SelectedConv2d(24, 32, 3, padding=1)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    with use(policy, batch_invariant=True):
        for how in ("contiguous", "channels_last"):
            x = batch(how, 4, 24, 19, 17)
            check(compiled, x)
            with torch.no_grad():
                assert torch.equal(compiled(x), layer(x))
    torch._dynamo.reset()


@pytest.mark.compile
@pytest.mark.parametrize("kind", [TRANSPOSED2D, CONV3D], ids=str)
def test_other_kinds_compiled(monkeypatch, kind):
    use_fake(monkeypatch, "winograd4", "direct")
    torch._dynamo.reset()
    layer = kind.selected(16, 16, 3, padding=1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = kind.x(3, 16, size=9)
    with use("auto", batch_invariant=True), torch.no_grad():
        y = compiled(x)
        assert torch.equal(y, layer(x))
        for n in range(3):
            assert torch.equal(y[n : n + 1], compiled(x[n : n + 1]))
    torch._dynamo.reset()


def test_frozen_models_run_as_they_were(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).eval()
    convselect.convert(model)
    x = torch.randn(3, 8, 14, 14)
    with torch.no_grad(), use(batch_invariant=True):
        want = model(x)
        convselect.freeze(model, x)
        assert torch.equal(model(x), want)
        for n in range(3):
            assert torch.equal(model(x[n : n + 1]), want[n : n + 1])


def test_what_has_to_be_compiled_first_is_not_chosen_on_a_gpu(with_triton):
    problem = conv_problem(4, 32, 28, 28, 32, 3, 3, padding=1, groups=32, device="cuda")
    with use(batch_invariant=True) as invariant, use(batch_invariant=False) as plain:
        reason = refusal(BY_NAME["depthwise_triton"], problem, invariant)
        assert "batch invariance rules that out" in reason
        assert refusal(BY_NAME["depthwise_triton"], problem, plain) != reason


@pytest.mark.parametrize("policy", ["native", "auto", "im2col_gemm", "direct", "winograd4"])
def test_b42_a_batch_equals_its_images_on_request(monkeypatch, policy):
    """Results for a batch differ from one-by-one because another algorithm is used (pytorch/pytorch#134908)."""
    use_fake(monkeypatch, "im2col_gemm")
    if policy != "auto" and BY_NAME[policy].why_not(conv_problem(2, 4, 8, 6, 3, 3, 3)) is not None:
        pytest.skip("the C kernels are missing")
    layer = convselect.SelectedConv2d(4, 3, 3)
    for layout in ("contiguous", "channels_last"):
        with use(policy, batch_invariant=True):
            check(layer, batch(layout, 2, 4, 8, 6))


def test_choices_under_other_settings_do_not_leak(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    layer, x = convselect.SelectedConv2d(8, 8, 3, padding=1), torch.randn(3, 8, 12, 12)
    problem = conv_problem(3, 8, 12, 12, 8, 3, 3, padding=1)
    with torch.no_grad():
        layer(x)
    assert resolve.choice_for(problem, convselect.base.settings.current()).per_image is None
    with use(batch_invariant=True) as settings:
        assert resolve.choice_for(problem, settings).per_image is settings
        weight = problem.with_direction(Direction.BACKWARD_WEIGHT)
        assert resolve.choice_for(weight, settings).per_image is None


def test_images_are_handed_over_alike_wherever_they_lie():
    whole = torch.randn(3, 1, 5, 7)
    in_channels_last = torch.empty_like(whole, memory_format=torch.channels_last).copy_(whole)
    assert in_channels_last.stride() != whole.stride()  # of one channel, so that both are contiguous
    for batch_ in (whole, in_channels_last, whole.transpose(2, 3), whole.expand(3, 4, 5, 7)):
        layout = layout_of(batch_[:1])
        layout = layout if layout == "channels_last" else "contiguous"
        for n in range(3):
            image = eager_batch._canonical(batch_[n : n + 1], layout)
            assert image.stride() == canonical_strides(tuple(image.shape), layout)
            assert image.data_ptr() % 64 == 0
            assert torch.equal(image, batch_[n : n + 1])
