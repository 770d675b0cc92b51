"""How calls become plans, and what happens when something goes wrong on the way."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from fake_model import FakePredictor, use_fake
from problems import relative_error
from torch import nn

import convselect
from convselect.base import lru
from convselect.base import warnings as _warnings
from convselect.base.problem import Direction
from convselect.eager import resolve
from convselect.eager.plan import plans
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded


@pytest.fixture
def winograd(monkeypatch):
    use_fake(monkeypatch, "winograd4")


def spy(monkeypatch, name: str) -> list[Direction]:
    """The directions that an algorithm is run in from now on."""
    ran: list[Direction] = []
    algorithm, original = BY_NAME[name], BY_NAME[name].run_checked

    def run_checked(a, b, problem, params=None, bias=None):
        ran.append(problem.direction)
        return original(a, b, problem, params, bias)

    monkeypatch.setattr(algorithm, "run_checked", run_checked)
    return ran


X, W = torch.randn(2, 8, 12, 12), torch.randn(8, 8, 3, 3) * 0.2


def test_one_plan_and_one_choice_per_kind_of_call(winograd):
    for _ in range(3):
        convselect.conv2d(X, W, padding=1)
    assert len(plans) == 1
    assert len(resolve.choices) == 1
    convselect.conv2d(X[:1], W, padding=1)
    assert len(plans) == 2


def test_the_choice_is_made_once(monkeypatch):
    asked = []

    class Counting(FakePredictor):
        def predict(self, problem):
            asked.append(problem)
            return super().predict(problem)

    predictor = Counting("winograd4")
    monkeypatch.setattr(loaded, "get", lambda: predictor)
    lru.clear()
    for _ in range(3):
        x = X.clone().requires_grad_()
        convselect.conv2d(x, W.clone().requires_grad_(), padding=1).sum().backward()
    assert sorted(str(p.direction) for p in asked) == ["backward_data", "backward_weight", "forward"]


def test_backward_choices_wait_for_the_backward(winograd):
    x = X.clone().requires_grad_()
    y = convselect.conv2d(x, W.clone().requires_grad_(), padding=1)
    assert {p.direction for p, _ in resolve.choices.entries} == {Direction.FORWARD}
    y.sum().backward()
    assert {p.direction for p, _ in resolve.choices.entries} == set(Direction)


def test_the_gradient_that_nobody_needs_is_not_computed(winograd, monkeypatch):
    ran = spy(monkeypatch, "winograd4")
    convselect.conv2d(X, W.clone().requires_grad_(), padding=1).sum().backward()
    assert ran == [Direction.FORWARD, Direction.BACKWARD_WEIGHT]


def test_all_native_is_torch_conv2d_itself(monkeypatch):
    use_fake(monkeypatch)
    y = convselect.conv2d(X, W.clone().requires_grad_(), padding=1)
    assert type(y.grad_fn).__name__ == "ConvolutionBackward0"


def test_native_forward_with_another_backward(monkeypatch):
    class BackwardOnly(FakePredictor):
        def predict(self, problem):
            forward = problem.direction == Direction.FORWARD
            return FakePredictor("native" if forward else "winograd4").predict(problem)

    predictor = BackwardOnly()
    monkeypatch.setattr(loaded, "get", lambda: predictor)
    lru.clear()
    ran = spy(monkeypatch, "winograd4")
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    convselect.conv2d(x, w, padding=1).square().sum().backward()
    assert ran == [Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT]
    want = X.clone().requires_grad_()
    F.conv2d(want, W, padding=1).square().sum().backward()
    assert relative_error(x.grad, want.grad) < 1e-5


def test_settings_of_the_forward_hold_in_its_backward(monkeypatch):
    use_fake(monkeypatch)
    ran = spy(monkeypatch, "winograd2")
    x = X.clone().requires_grad_()
    with convselect.use(policy="winograd2"):
        y = convselect.conv2d(x, W, padding=1)
    y.sum().backward()
    assert ran == [Direction.FORWARD, Direction.BACKWARD_DATA]


def test_a_failing_automatic_choice_is_one_warning_and_a_native_result(winograd, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of tiles")

    monkeypatch.setattr(BY_NAME["winograd4"], "run_checked", fail)
    monkeypatch.setattr(_warnings, "_given", set())
    with pytest.warns(convselect.ConvselectWarning, match="out of tiles") as caught:
        for _ in range(3):
            torch.testing.assert_close(convselect.conv2d(X, W, padding=1), F.conv2d(X, W, padding=1))
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="out of tiles"):
        convselect.conv2d(X, W, padding=1, policy="winograd4")


def test_output_may_be_changed_in_place(winograd):
    """nn.ReLU(inplace=True) after a convolution: autograd forbids it on a view that a custom function returned."""
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for policy in ("winograd4", "im2col_gemm", "fft", "native_channels_last"):
            x = X.to(memory_format=memory_format).clone().requires_grad_()
            y = convselect.conv2d(x, W, padding=1, policy=policy)
            y.relu_().sum().backward()
            assert x.grad is not None


def test_modes_and_tracers_see_aten(winograd):
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for conv in (F.conv2d, convselect.conv2d):
        with FlopCounterMode(display=False) as counter:
            conv(X, W, None, 1, 1)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: convselect.conv2d(x, W, padding=1), X)
    assert "aten::_convolution" in str(traced.graph) or "aten::conv2d" in str(traced.graph)
    assert convselect.conv2d(X.to("meta"), W.to("meta"), padding=1).device.type == "meta"


def test_torchscript_compiles_a_converted_layer(winograd):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 4, 3, padding="same"),
    )
    x = torch.randn(1, 3, 8, 8)
    want = model(x)
    convselect.convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.script(model)(x), want)


def test_a_weight_that_overflows_in_the_transform_does_not_show(winograd):
    """Winograd adds up to a hundred times the operands on the way; results that native has finite stay finite."""
    x = X * 1e37
    w = torch.zeros_like(W)
    w[:, :, 1, 1] = torch.eye(8)
    want = F.conv2d(x, w, padding=1)
    assert want.isfinite().all()
    got = convselect.conv2d(x, w, padding=1, policy="winograd6")
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e33)


def test_nested_and_layer_policies(monkeypatch):
    use_fake(monkeypatch)
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1, policy="winograd2")
    ran = spy(monkeypatch, "winograd2")
    with torch.no_grad(), convselect.use(policy="im2col_gemm"):
        layer(X)
    assert ran == [Direction.FORWARD]
    layer.policy = None
    with torch.no_grad(), convselect.use(policy="im2col_gemm"), convselect.use(policy="native"):
        layer(X)
    assert ran == [Direction.FORWARD]
    with pytest.raises(ValueError, match="unknown policy"):
        convselect.SelectedConv2d(8, 8, 3, policy="winograd1")


def test_a_copy_of_a_model_shares_nothing_but_the_caches(winograd):
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    layer(X).sum().backward()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
        assert layer(X).abs().sum() > 0
        torch.testing.assert_close(twin(X), twin.bias.view(1, -1, 1, 1).expand_as(twin(X)))


def test_tracing_a_layer_for_the_first_time_warns_of_nothing(winograd):
    """Sizes are tensors under torch.jit.trace; looking at them as numbers would be a TracerWarning each."""
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(layer, X, check_trace=False)
    assert "aten::_convolution" in str(traced.inlined_graph)
    assert not resolve.choices.entries
