"""`with convselect.enabled():`, `enable()` and `disable()`: functional convolutions choose, here only."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from _parity import OTHER, algorithms_of, assert_same, assert_same_run, bound, favouring, run
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend, EagerAndRecordGraphs
from torch.overrides import BaseTorchFunctionMode

import convselect
from convselect import NotApplicable

GEMM = "im2col_gemm"
X, W, B = torch.randn(2, 4, 8, 9), torch.randn(6, 4, 3, 3), torch.randn(6)
LIMIT = 4 * bound(torch.float32, GEMM)


@pytest.fixture(autouse=True)
def _choose_gemm():
    with favouring(GEMM):
        yield
        assert torch._C._len_torch_function_stack() == 0


def ran(call=lambda: F.conv2d(X, W, B)):
    return algorithms_of(call)


# ---- what goes through ------------------------------------------------------------------------------------------

SPELLINGS = {
    "positional": lambda: F.conv2d(X, W, B, 1, 1, 1, 1),
    "torch.conv2d": lambda: torch.conv2d(X, W),
    "keywords": lambda: F.conv2d(input=X, weight=W, bias=B, stride=(1, 2), padding=2),
    "mixed": lambda: F.conv2d(X, weight=W, padding="same"),
    "lists": lambda: F.conv2d(X, W, stride=[2, 1]),
    "unbatched": lambda: F.conv2d(X[0], W, B),
    "nn.Conv2d": lambda: nn.Conv2d(4, 3, 3)(X),
    "nn.Conv2d, circular": lambda: nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")(X),
    "a converted layer": lambda: convselect.SelectedConv2d(4, 3, 3)(X),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_goes_through_once(spelling):
    call = SPELLINGS[spelling]
    torch.manual_seed(3)
    want = call()
    with convselect.enabled():
        assert ran(call) == [GEMM]
        torch.manual_seed(3)
        assert_same(call(), want, LIMIT, spelling)
    if spelling != "a converted layer":
        assert ran(call) == []


@pytest.mark.parametrize("arguments", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_gradients_and_strides(arguments, channels_last):
    x = X.contiguous(memory_format=torch.channels_last) if channels_last else X
    want = run(F.conv2d, (x, W, B), **arguments)
    with convselect.enabled():
        got = run(F.conv2d, (x, W, B), **arguments)
    assert_same_run(got, want, LIMIT, "enabled")


def test_a_backward_outside_takes_the_choice_of_its_forward():
    leaf, weight = X.clone().requires_grad_(), W.clone().requires_grad_()
    with convselect.enabled():
        y = F.conv2d(leaf, weight)
    assert set(ran(lambda: y.sum().backward())) == {GEMM}


def test_other_functions_pass():
    with convselect.enabled():
        assert ran(lambda: F.conv_tbc(torch.randn(7, 2, 4), torch.randn(3, 4, 6), B)) == []
        assert torch.add(X, 1, alpha=2).equal(X + 2)


WRONG = {
    "no weight": (lambda: F.conv2d(X), TypeError),
    "nothing": (lambda: F.conv2d(), TypeError),
    "too many": (lambda: F.conv2d(X, W, B, 1, 1, 1, 1, 1), TypeError),
    "unknown name": (lambda: F.conv2d(X, W, policy="native"), TypeError),
    "a name twice": (lambda: F.conv2d(X, W, weight=W), TypeError),
    "channels": (lambda: F.conv2d(X, W[:, :3]), RuntimeError),
    "no tensors": (lambda: F.conv2d([1.0], W), TypeError),
    "dtype": (lambda: F.conv2d(X.double(), W), RuntimeError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_pytorch(wrong):
    call, kind = WRONG[wrong]
    with pytest.raises(kind) as stock:
        call()
    with convselect.enabled(), pytest.raises(kind) as own:
        call()
    assert str(own.value) == str(stock.value)


def test_what_is_left_to_pytorch():
    class Mine(torch.Tensor):
        pass

    integers = torch.arange(36).view(1, 1, 6, 6), torch.ones(1, 1, 3, 3, dtype=torch.int64)
    want = F.conv2d(*integers)
    with convselect.enabled():
        assert ran(lambda: F.conv2d(*integers)) == []
        assert torch.equal(F.conv2d(*integers), want)
        assert type(F.conv2d(X.as_subclass(Mine), W)) is Mine
        assert ran(lambda: F.conv2d(X.as_subclass(Mine), W)) == []
        assert F.conv2d(X.to("meta"), W.to("meta")).is_meta
        traced = torch.jit.trace(lambda x: F.conv2d(x, W), X)
        symbolic = torch.fx.symbolic_trace(lambda x: F.conv2d(x, W))
    assert "aten::conv2d" in str(traced.graph) or "aten::_convolution" in str(traced.graph)
    assert [n.target for n in symbolic.graph.nodes if n.op == "call_function"] == [torch.conv2d]


def test_forced_policies_and_budgets_hold_inside_and_end_with_it():
    conv = convselect.SelectedConv2d(4, 6, 3)
    with convselect.enabled(OTHER):
        assert ran() == ran(lambda: conv(X)) == [OTHER]
        with convselect.enabled("native"):
            assert ran() == []
        with convselect.use(GEMM):
            assert ran() == [GEMM]
        assert ran() == [OTHER]
        with pytest.raises(NotApplicable, match="subclasses"):
            F.conv2d(X.as_subclass(type("Other", (torch.Tensor,), {})), W)
    with convselect.enabled(workspace_bytes=0):
        assert ran() == []
    with pytest.raises(ValueError, match="precision"), convselect.enabled(precision="rough"):
        pass
    assert convselect.base.settings.current() is convselect.base.settings.defaults()
    with convselect.enabled("winograd4"), pytest.raises(NotApplicable, match="winograd4"):
        F.conv2d(X, W[:, :, :2, :2])


# ---- our own native calls ---------------------------------------------------------------------------------------


class Passing(BaseTorchFunctionMode):
    """A mode that does nothing, as the default device's does for existing tensors."""


@pytest.mark.parametrize("over", [(), ("mode",), ("device",), ("mode", "enabled", "device")], ids=str)
def test_a_settled_call_is_not_chosen_again(over):
    """A layer with the policy native runs native, whatever other modes are in between; so do algorithms' own calls."""
    modes = {"mode": Passing, "device": lambda: torch.device("cpu"), "enabled": convselect.enabled}
    layer = convselect.SelectedConv2d(4, 6, 3, policy="native")
    with convselect.enabled():
        stack = [modes[name]() for name in over]
        for mode in stack:
            mode.__enter__()
        try:
            assert ran(lambda: layer(X)) == []
            assert ran(lambda: convselect.conv2d(X, W, policy=OTHER)) == [OTHER]
            assert ran() == [GEMM]
        finally:
            for mode in reversed(stack):
                mode.__exit__(None, None, None)


def test_other_modes_see_the_convolutions_that_are_native():
    seen = []

    class Watching(BaseTorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching(), convselect.enabled("native"):
        F.conv2d(X, W)
    assert torch.conv2d in seen


# ---- nesting, threads, decorator --------------------------------------------------------------------------------


def test_nests_and_ends_with_errors():
    with pytest.raises(KeyError), convselect.enabled(), convselect.enabled(OTHER):
        raise KeyError
    assert ran() == []
    again = convselect.enabled(OTHER)
    with again, again:
        assert ran() == [OTHER]
    assert ran() == []
    assert convselect.base.settings.current().policy == "auto"


def test_decorator():
    @convselect.enabled(OTHER)
    def work(depth):
        return ran() if depth == 0 else work(depth - 1)

    assert work(2) == [OTHER]
    assert ran() == []


def in_thread(call):
    result = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def test_other_threads_notice_nothing():
    with convselect.enabled(OTHER):
        assert in_thread(ran) == []
        assert ran() == [OTHER]

    def own():
        with convselect.enabled(OTHER):
            return ran()

    assert in_thread(own) == [OTHER]


def test_threads_that_are_in_and_out():
    """Half of them inside: each sees its own, and all values are right."""
    want = F.conv2d(X, W)
    errors = []

    def work(inside):
        try:
            for _ in range(40):
                if inside:
                    with convselect.enabled():
                        got = F.conv2d(X, W)
                    assert_same(got, want, LIMIT, "inside")
                else:
                    assert torch.equal(F.conv2d(X, W), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


# ---- enable and disable -----------------------------------------------------------------------------------------


@pytest.fixture
def _disabled_afterwards():
    yield
    torch.set_default_device(None)
    convselect.disable()


@pytest.mark.usefixtures("_disabled_afterwards")
def test_enable_lasts_until_disable_in_its_thread():
    convselect.disable()  # without an enable: nothing
    convselect.enable()
    convselect.enable()
    assert ran() == [GEMM]
    assert torch._C._len_torch_function_stack() == 1
    assert in_thread(ran) == []  # threads started later included
    assert in_thread(lambda: (convselect.enable(), ran())[1]) == [GEMM]
    with convselect.use(OTHER):
        assert ran() == [OTHER]
    in_thread(convselect.disable)
    assert ran() == [GEMM]
    convselect.disable()
    assert ran() == []


@pytest.mark.usefixtures("_disabled_afterwards")
def test_enable_and_disable_inside_other_contexts():
    """Those that are open close as they expect to, and what is enabled by a context stays."""
    with Passing(), convselect.enabled(OTHER):
        convselect.enable()
        assert ran() == [OTHER]
        convselect.disable()
        assert ran() == [OTHER]
        convselect.enable()
    assert ran() == [GEMM]
    with convselect.enabled(OTHER):
        convselect.disable()
        assert ran() == [OTHER]
    assert ran() == []


@pytest.mark.usefixtures("_disabled_afterwards")
@pytest.mark.parametrize("device_first", [False, True])
def test_enable_beside_a_default_device(device_first):
    if device_first:
        torch.set_default_device("cpu")
        convselect.enable()
    else:
        convselect.enable()
        torch.set_default_device("cpu")
    assert ran() == [GEMM]
    torch.set_default_device(None)
    assert ran() == [GEMM]
    convselect.disable()
    assert ran() == []


# ---- with the rest ----------------------------------------------------------------------------------------------


class WeightStandardised(nn.Conv2d):
    """A subclass with a forward of its own, as timm's."""

    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std(dim=(1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), WeightStandardised(6, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)
    )


def gradients(model, x):
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("convert", [False, True])
def test_models_converted_or_not(convert):
    model = network()
    want = gradients(copy.deepcopy(model), X)
    if convert:
        assert len(convselect.summary(convselect.convert(model)).converted) == 3
    with convselect.enabled():
        got = gradients(model, X)
        assert len(ran(lambda: model(X))) == 3
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, 10 * LIMIT, f"result {i}")
    assert len(ran(lambda: model(X))) == (3 if convert else 0)


@pytest.mark.compile
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(where, backend):
    """No graph break, no recompilation, the right numbers; with the context around the compiled call or within."""
    model = network()
    want = gradients(model, X)

    def inside(x):
        with convselect.enabled():
            return model(x)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model if where == "outside" else inside, backend=counter, fullgraph=True)
    for _ in range(3):
        if where == "outside":
            with convselect.enabled():
                y = compiled(X)
        else:
            y = compiled(X)
        got = [y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))]
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, 10 * LIMIT, f"result {i}")
    assert counter.frame_count == 1


@pytest.mark.compile
@pytest.mark.parametrize("over", [(), ("mode",)], ids=str)
def test_compiled_layers_that_are_native_stay_native(over):
    layer = convselect.SelectedConv2d(4, 6, 3, policy="native")

    def targets(function):
        torch._dynamo.reset()
        recorder = EagerAndRecordGraphs()
        with convselect.enabled(), Passing() if over else contextlib.nullcontext():
            torch.compile(function, backend=recorder, fullgraph=True)(X)
        return [n.target for graph in recorder.graphs for n in graph.graph.nodes if n.op == "call_function"]

    assert targets(layer) == [torch.conv2d]
    assert targets(lambda x: F.conv2d(x, W)) == [torch.ops.convselect.conv2d.default]


@pytest.mark.compile
def test_compiled_outside_is_not_what_runs_inside_and_back():
    """Dynamo guards on the modes: code compiled outside serves the outside."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: F.conv2d(x, W), backend=counter)
    want = F.conv2d(X, W)
    for _ in range(2):
        assert_same(compiled(X), want, LIMIT, "outside")
        with convselect.enabled():
            assert_same(compiled(X), want, LIMIT, "inside")
    assert counter.frame_count == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(dtype):
    with torch.autocast("cpu", dtype=dtype):
        want = run(F.conv2d, (X, W, B), padding=1)
        with convselect.enabled():
            got = run(F.conv2d, (X, W, B), padding=1)
            assert ran() == [GEMM]
    assert_same_run(got, want, 2 * bound(dtype, GEMM), "autocast")


def test_functional_transforms():
    weight = torch.randn(3, 6, 4, 3, 3)
    functions = {
        "vmap": lambda: torch.func.vmap(lambda w: F.conv2d(X, w))(weight),
        "grad": lambda: torch.func.grad(lambda w: F.conv2d(X, w).square().sum())(W),
        "jvp": lambda: torch.func.jvp(lambda x: F.conv2d(x, W), (X,), (X,))[1],
        "per sample": lambda: torch.func.vmap(
            torch.func.grad(lambda w, x: F.conv2d(x[None], w).square().sum()), (None, 0)
        )(W, X),
        "forward AD": lambda: _tangent(lambda x: F.conv2d(x, W)),
    }
    for name, function in functions.items():
        want = function()
        with convselect.enabled():
            got = function()
            assert GEMM in ran(function), name
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=name)


def _tangent(function):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(X, X))).tangent


def test_frozen_models():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).eval()
    with torch.inference_mode():
        want = model(X)
        convselect.freeze(model, X)
        with convselect.enabled():
            torch.testing.assert_close(model(X), want, rtol=1e-3, atol=1e-4)
    convselect.unfreeze(model)
