"""torch.compile and torch.export: what a converted model becomes there, against nn.Conv2d's and against eager."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable

import pytest
import torch
from _parity import bound, favouring
from fake_model import use_fake
from kinds import CONV2D, CONV3D, TRANSPOSED1D, TRANSPOSED2D, TRANSPOSED3D
from pairs import pairwise
from problems import relative_error
from test_ops import ran
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import convselect
from benchmarks.models import MODELS
from convselect import NotApplicable, SelectedConv2d
from convselect.base import settings, timing
from convselect.base.problem import Direction
from convselect.graph import ops

pytestmark = pytest.mark.compile

OURS = "convselect.conv2d.default"
ATEN = "aten.convolution.default"


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    convselect.clear()
    with warnings.catch_warnings():
        # Deprecations of autograd.Function or of a lowering inside torch itself are not this package's.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
    torch._dynamo.reset()
    convselect.clear()


def tiny() -> nn.Sequential:
    """3x3, 1x1, uneven padding, another padding mode, groups."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, (3, 4), padding="same"),
        nn.ReLU(), nn.Conv2d(8, 6, 1, bias=False), nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect", groups=2),
    )  # fmt: skip


def decoder() -> nn.Sequential:
    """Transposed layers: doubling, with an output padding, grouped, of rows in between."""
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1, bias=False),
        nn.Flatten(2), nn.ConvTranspose1d(4, 6, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(6, 4, 3, groups=2),
    )  # fmt: skip


def volumes() -> nn.Sequential:
    """Of volumes: 3x3x3, along the depth, uneven padding, transposed."""
    return nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 6, (3, 1, 1), padding=(1, 0, 0)),
        nn.Conv3d(6, 6, (2, 3, 1), padding="same", bias=False), nn.ReLU(), nn.ConvTranspose3d(6, 4, 2, 2),
    )  # fmt: skip


NETS = {"images": (tiny, (3, 9, 8)), "decoder": (decoder, (3, 5, 6)), "volumes": (volumes, (3, 4, 5, 6))}


def stock_and_input(net: str, batch: int = 2) -> tuple[nn.Sequential, Tensor]:
    make, shape = NETS[net]
    return make(), torch.randn(batch, *shape)


def operators_of(model: nn.Module) -> list[str]:
    """What its layers are in a graph, if none is native."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    way = {True: "_transpose", False: ""}
    images = [len(m.kernel_size) < 3 or m.kernel_size == (3, 1, 1) for m in layers]  # along the depth: on views
    return [
        f"convselect.conv{way['Transpose' in type(m).__name__]}{2 if image else 3}d.default"
        for m, image in zip(layers, images, strict=True)
    ]


def converted(model: nn.Module, policy: str | None = None) -> nn.Module:
    model = copy.deepcopy(model)
    convselect.convert(model, policy=policy)
    return model


def recorder() -> tuple[Callable, dict[str, list]]:
    """A backend that runs graphs as they are, and the convolutions of the graphs that it was given, per kind; "sizes"
    has the rank of each one's first operand."""
    seen: dict[str, list] = {"forward": [], "backward": [], "inference": [], "sizes": []}

    def note(kind):
        def compiler(graph, _):
            found = [n for n in graph.graph.nodes if n.op == "call_function" and "conv" in str(n.target)]
            seen[kind] += [str(n.target) for n in found]
            seen["sizes"] += [n.args[0].meta["val"].dim() for n in found]
            return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=note("forward"), bw_compiler=note("backward"), inference_compiler=note("inference")
    )
    return backend, seen


def step(model: Callable, x: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients of x and of the parameters)."""
    x = x.detach().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.square().mean(), [x, *parameters]))


def assert_close(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]], limit: float) -> None:
    """Outputs, and all gradients taken as one vector; strides of gradients to the last number."""
    assert relative_error(got[0], want[0]) <= limit
    assert got[0].stride() == want[0].stride()
    flat = [torch.cat([g.reshape(-1) for g in grads]) for grads in (got[1], want[1])]
    assert relative_error(*flat) <= limit
    assert [g.stride() for g in got[1]] == [w.stride() for w in want[1]]


# ---- what the graph holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "dynamic"), [("images", False), ("images", True), ("decoder", True), ("volumes", False)]
)
def test_a_native_choice_is_the_graph_of_conv2d(net, dynamic):
    stock, x = stock_and_input(net)
    graphs = []
    for model in (stock, converted(stock)):
        torch._dynamo.reset()
        backend, seen = recorder()
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
        with favouring(None):
            step(compiled, x, list(model.parameters()))
            with torch.no_grad():
                compiled(x)
        graphs.append(seen)
    assert graphs[0] == graphs[1]
    assert graphs[1]["forward"] == graphs[1]["inference"] == [ATEN] * len(operators_of(stock))
    with favouring("im2col_gemm"), convselect.use("native"):
        torch._dynamo.reset()
        backend, seen = recorder()
        torch.compile(converted(stock), backend=backend, fullgraph=True, dynamic=dynamic)(x)
        assert set(seen["forward"]) == {ATEN}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("gain", [1.55, 1.65])
@pytest.mark.parametrize("kind", [CONV2D, TRANSPOSED2D, CONV3D], ids=str)
def test_small_gains_are_left_to_the_compiler(kind, gain, dynamic, monkeypatch):
    """It fuses native convolutions with what follows; an eager call takes them all the same."""
    use_fake(monkeypatch, "im2col_gemm", gain=gain)
    layer, x = kind.selected(3, 4, 3), kind.x(2, 3)
    backend, seen = recorder()
    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)(x)
    assert seen["inference"] == ([ATEN] if gain < 1.6 else [f"convselect.{kind}.default"])
    assert convselect.explain(layer, x).rows[0].algorithm == "im2col_gemm"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [CONV2D, TRANSPOSED2D, CONV3D, TRANSPOSED3D], ids=str)
def test_each_direction_is_chosen_by_itself(kind, dynamic, monkeypatch):
    """A forward or a backward direction that is native is aten's operator, whatever the others are."""
    layer = kind.selected(4, 4, 3, padding=1)
    x = kind.x(2, 4, size=6)
    forward, backward = [f"convselect.{kind}.default"], "aten.convolution_backward.default"
    # In its problem a transposed convolution is a grad-input, and its own grad-input a forward.
    itself, of_input, of_weight = Direction
    if kind.transposed:
        itself, of_input = of_input, itself
    grads = {of_input: f"convselect.{kind}_grad_input.default", of_weight: f"convselect.{kind}_grad_weight.default"}
    for away in Direction:

        class OneDirection:
            name, ranked, direction = "im2col_gemm", ("im2col_gemm", "native"), away

            def predict(self, problem):
                self.gain = float(problem.direction == self.direction)
                return self

            def log_gain(self, name):
                return self.gain if name == self.name else 0.0

            def margin_of(self, name):
                return 0.0

            def probability(self, name):
                return 0.5

        torch._dynamo.reset()
        convselect.clear()
        monkeypatch.setattr(convselect.model.loaded, "get", OneDirection)
        want = step(kind.stock.forward.__get__(layer), x, list(layer.parameters()))
        backend, seen = recorder()
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
        got = step(compiled, x, list(layer.parameters()))
        assert_close(got, want, bound(x.dtype, "im2col_gemm"))
        if dynamic:  # the operators choose when they run
            assert seen["forward"] == forward
            assert seen["backward"] == [*grads.values()]
        elif away == itself:
            assert (seen["forward"], seen["backward"]) == (forward, [backward])
        else:
            assert seen["forward"] == [ATEN]
            assert sorted(seen["backward"]) == sorted([backward, grads[away]])


def test_no_gradient_no_backward_choice(monkeypatch):
    """Gradients that nobody needs make no operator of a convolution whose forward is native."""
    from convselect.graph import traced

    asked = []
    original = traced.choice_for
    monkeypatch.setattr(traced, "choice_for", lambda p, s: (asked.append(p.direction), original(p, s))[1])
    layer = SelectedConv2d(4, 4, 3)
    x = torch.randn(1, 4, 8, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
    assert asked == [Direction.FORWARD]
    del asked[:]
    compiled(x)  # grad mode is guarded
    assert asked == [Direction.FORWARD, Direction.BACKWARD_WEIGHT]


def test_settings_count_as_they_stand_while_tracing(monkeypatch):
    x = torch.randn(1, 3, 8, 8)
    model = converted(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)))
    found = ran(monkeypatch)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with convselect.use("winograd2"):
            compiled(x)
        compiled(x)
        with convselect.use("im2col_gemm"):
            compiled(x)
        assert [name for name, _ in found] == ["winograd2"] * 3
        model[0].policy = "im2col_gemm"  # an attribute of the layer, which dynamo watches
        compiled(x)
        assert found[-1][0] == "im2col_gemm"
        model[0].policy = "native"
        compiled(x)
        model[0].policy = None
        torch._dynamo.reset()
        with convselect.use("winograd4"):
            compiled(x)
        assert [name for name, _ in found[-2:]] == ["im2col_gemm", "winograd4"]


@pytest.mark.parametrize("kind", [CONV2D, TRANSPOSED1D, TRANSPOSED2D, CONV3D], ids=str)
def test_dynamic_shapes_choose_at_run_time_within_the_settings_of_the_trace(kind, monkeypatch):
    from convselect.graph import run

    model = converted(nn.Sequential(kind.stock(3, 4, 3, padding=1)))
    asked = []
    original = run.choice_for
    monkeypatch.setattr(
        run, "choice_for", lambda p, s: (asked.append((p.N, s.precision, s.workspace_bytes)), original(p, s))[1]
    )
    with favouring("im2col_gemm"), torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
        with convselect.use(precision="fast", workspace_bytes=2**27):
            compiled(kind.x(2, 3))
        for x in (kind.x(5, 3), kind.x(5, 3)):
            assert_close((compiled(x), [x]), (kind.stock.forward(model[0], x), [x]), bound(x.dtype, "im2col_gemm"))
    assert asked == [(2, "fast", 2**27), (5, "fast", 2**27)]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("gain", "name"), [(1.2, ATEN), (1.65, OURS)])
def test_kernels_along_the_depth_are_images(gain, name, dynamic, monkeypatch):
    """Native, too: PyTorch's own conv2d of the image is faster than its conv3d. Not if results had other strides."""
    use_fake(monkeypatch, "im2col_gemm", gain=gain)
    layer, x = CONV3D.selected(4, 6, (3, 1, 1), padding=(1, 0, 0)), torch.randn(17, 4, 5, 3, 4)
    parameters = list(layer.parameters())
    for given in (x, x[0]):
        backend, seen = recorder()
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
        want = step(nn.Conv3d.forward.__get__(layer), given, parameters)
        assert_close(step(compiled, given, parameters), want, bound(x.dtype, "im2col_gemm"))
        assert seen["forward"] == [name]
        assert set(seen["sizes"]) == {4}
    x = x.contiguous(memory_format=torch.channels_last_3d)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    want = step(nn.Conv3d.forward.__get__(layer), x, parameters)
    assert_close(step(compiled, x, parameters), want, bound(x.dtype, "im2col_gemm"))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_forced_policies_refuse_while_tracing(strict):
    x = torch.randn(1, 3, 9, 9)
    layer = SelectedConv2d(3, 4, 5, stride=2, policy="winograd2")
    with pytest.raises(RuntimeError, match=r"winograd2 cannot do this convolution.*at stride 2"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with pytest.raises(NotApplicable, match="at stride 2"):
        torch.compile(layer, backend="eager")(x)
    with pytest.raises((NotApplicable, torch._dynamo.exc.Unsupported), match="at stride 2"):
        torch.export.export(layer, (x,), strict=strict)
    whole = SelectedConv2d(3, 4, 3, policy="winograd2").to(torch.complex64)
    with pytest.raises((NotApplicable, torch._dynamo.exc.Unsupported), match="computes floats"):
        torch.export.export(whole, (x.to(torch.complex64),), strict=strict)


def test_forced_policies_refuse_other_kinds_too():
    """What no algorithm of this name does for volumes or for transposed convolutions, by its own sentence."""
    cases = (
        (CONV3D, {}, "fft", "needs images"), (TRANSPOSED2D, {"stride": 2}, "winograd2", "at stride 2"),
        (TRANSPOSED1D, {}, "depthwise", "depthwise"),
    )  # fmt: skip
    for kind, arguments, policy, reason in cases:
        torch._dynamo.reset()
        layer = kind.selected(3, 4, 5, policy=policy, **arguments)
        with pytest.raises(RuntimeError, match=f"{policy} cannot do this convolution.*{reason}"):
            torch.compile(layer, backend="eager", fullgraph=True)(kind.x(1, 3))
    for kind in (CONV3D, TRANSPOSED2D):  # what is symbolic is PyTorch's, unless an algorithm is asked for
        torch._dynamo.reset()
        weight = kind.selected(3, 3, 3).weight.detach()
        function = lambda x, n, k=kind, w=weight: k.ours(x, w, padding=(n,) * k.dimensions, policy="im2col_gemm")  # noqa: E731
        with pytest.raises(RuntimeError, match="strides and paddings of symbolic size are left to PyTorch"):
            torch.compile(function, backend="eager", fullgraph=True, dynamic=True)(kind.x(1, 3), 2)


def test_unknown_policies_are_named_while_tracing():
    layer = SelectedConv2d(3, 4, 3)
    with convselect.use("winograd1"):
        with pytest.raises(RuntimeError, match="unknown policy 'winograd1'"):
            torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(1, 3, 8, 8))
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="unknown policy 'winograd1'"):
            torch.compile(layer, backend="eager")(torch.randn(1, 3, 8, 8))


def test_a_forced_backward_refuses_before_it_runs():
    """depthwise kernels cannot do everything in every direction; what the gradient needs is known while tracing."""
    layer = SelectedConv2d(4, 4, 3, padding=1, policy="reference")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 4, 6, 6)
    want = step(nn.Conv2d.forward.__get__(layer), x, list(layer.parameters()))
    assert_close(step(compiled, x, list(layer.parameters())), want, bound(x.dtype))


# ---- same as eager --------------------------------------------------------------------------------------------------

NETWORKS = ("resnet18", "unet", "mobilenet_v2", "convnext_tiny")


def network(name: str) -> tuple[nn.Module, Tensor]:
    """A benchmark network on a small image; no dropout, so that two runs are alike."""
    architecture = MODELS[name]
    model = architecture.build()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    size = 32 if name == "unet" else 64  # batch normalisation over a handful of pixels would amplify every rounding
    return model.train(), torch.randn(3, architecture.input_shape[1], size, size)


def shallow(name: str, model: nn.Module) -> nn.Module:
    """One block of each kind: tracing takes its time per layer, and minutes in deep networks with symbolic sizes."""
    if name == "unet":  # one level below the first
        model.inward, model.up, model.outward = model.inward[:2], model.up[-1:], model.outward[-1:]
        return model
    blocks = [b for a, b in zip((None, *model), model, strict=False) if repr(a) != repr(b)]
    # Later blocks are only wider: up to the second stage, the first one after a halving.
    return nn.Sequential(*blocks[: {"resnet18": 5, "mobilenet_v2": 4, "convnext_tiny": 6}[name]])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [*((name, False) for name in NETWORKS), ("unet", True)],  # another dynamic one: below
)
def test_networks_equal_eager(name, dynamic):
    """Forward and a training step, one full graph by aot_eager; the automatic choice is "direct" if that applies."""
    stock, x = network(name)
    if name != "resnet18":  # one from end to end
        stock = shallow(name, stock)
    reference = copy.deepcopy(stock)  # batch normalisation keeps running sums
    with favouring("direct"):
        model = converted(stock)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
        for batch in (x, x[:2]) if dynamic else (x,):
            got = step(compiled, batch, list(model.parameters()))
            want = step(reference, batch, list(reference.parameters()))
            # A network's worth of rounding errors: tens of layers, each within the table's row for one.
            assert relative_error(got[0], want[0]) <= 20 * bound(x.dtype, "direct")
            flat = [torch.cat([g.reshape(-1) for g in grads]) for grads in (got[1], want[1])]
            assert relative_error(*flat) <= 2e-2  # one ReLU in a million that rounding switches is 1e-3
            assert [g.stride() for g in got[1]] == [w.stride() for w in want[1]]
    # With dynamic shapes stock layers, too, are compiled again for another batch: the next test counts both.
    assert dynamic or counter.frame_count == 1
    assert {str(node.target) for graph in counter.graphs for node in graph.graph.nodes} >= {OURS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "dynamic"), [("resnet18", None), ("convnext_tiny", None), ("resnet18", True)])
def test_networks_have_as_many_graphs_as_conv2d(name, dynamic):
    """Depthwise layers and others. Which layers a network has otherwise does not matter: guards are on their marks."""
    stock, x = network(name)
    stock = shallow(name, stock)
    counts = []
    with favouring("direct"):
        for model in (stock, converted(stock)):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(model.eval(), backend=counter, fullgraph=True, dynamic=dynamic)
            for batch in (x, x[:2], x[:2].contiguous(memory_format=torch.channels_last)):
                with torch.no_grad():
                    compiled(batch)
            counts.append(counter.frame_count)
    assert counts[0] == counts[1] >= 1


@pairwise(
    {
        "favourite": ["im2col_gemm", "native_channels_last", "winograd2"],
        "layout": ["nchw", "nhwc"],
        "backend": ["eager", "aot_eager"],
        "net": list(NETS),
    }
)
def test_layouts_and_backends(net, backend, layout, favourite):
    stock, x = stock_and_input(net)
    if layout == "nhwc":
        memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        stock, x = stock.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)
    with favouring(favourite):
        model = converted(stock)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for batch in (x, x[:1], x):
            want = step(stock, batch, list(stock.parameters()))
            assert_close(step(compiled, batch, list(model.parameters())), want, 4 * bound(x.dtype, favourite))


@pytest.mark.parametrize("net", ["images", "volumes"])
def test_as_many_graphs_and_recompilations_as_conv2d(net):
    stock, x = stock_and_input(net, 4)
    stock.eval()
    nhwc = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    batches = [x, x[:3], x[:2], nhwc, x[..., :5], x.requires_grad_()]
    if net != "images":
        batches = batches[:4]  # what guards look at is the same for all kinds
    counts = {}
    with favouring("im2col_gemm"):
        for name, model in (("stock", stock), ("converted", converted(stock))):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(model, backend=counter, fullgraph=True)
            for batch in batches:
                compiled(batch)
                with torch.no_grad():
                    compiled(batch.detach())
            counts[name] = counter.frame_count
    assert counts["converted"] == counts["stock"] > 1


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(CONV2D, "eager"), *((k, "aot_eager") for k in (CONV2D, TRANSPOSED1D, TRANSPOSED2D, CONV3D))],
    ids=str,
)
def test_autocast_and_unbatched_inputs(kind, backend):
    stock = nn.Sequential(kind.stock(3, 8, 3, padding=1), kind.stock(8, 4, 3, padding=1 if kind.transposed else "same"))
    for dtype in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        with favouring("im2col_gemm"), torch.autocast("cpu", dtype=dtype):
            model = converted(stock)
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            for x in (kind.x(2, 3, size=6), kind.x(3, size=6)):
                want = step(stock, x, list(stock.parameters()))
                got = step(compiled, x, list(model.parameters()))
                assert got[0].dtype == want[0].dtype == dtype
                assert_close(got, want, 2 * bound(dtype))


def test_functional_call_and_python_arguments():
    weight, bias = torch.randn(4, 3, 3, 3), torch.randn(4)

    def function(x, weight, bias, padding):
        return convselect.conv2d(x, weight, bias, stride=2, padding=padding, policy="im2col_gemm").relu()

    x = torch.randn(2, 3, 9, 9)
    for padding in (1, (0, 2), [2, 1], "valid"):
        torch._dynamo.reset()  # or the second number would be a symbol
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        want = torch.nn.functional.conv2d(x, weight, bias, 2, padding).relu()
        torch.testing.assert_close(compiled(x, weight, bias, padding), want, rtol=1e-4, atol=1e-4)


def test_numbers_that_dynamo_makes_symbolic():
    """Integer arguments are, from their second value on: such a convolution is aten's, with as many graphs as without
    us."""
    x, weight = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3)
    counts = []
    with favouring("im2col_gemm"):
        for conv in (torch.nn.functional.conv2d, convselect.conv2d):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(
                lambda x, p, conv=conv: conv(x, weight, padding=(p, p)), backend=counter, fullgraph=True
            )
            for padding in (1, 2, 3, 4):
                want = torch.nn.functional.conv2d(x, weight, padding=padding)
                torch.testing.assert_close(compiled(x, padding), want, rtol=1e-4, atol=1e-4)
            counts.append(counter.frame_count)
        assert counts[0] == counts[1]
        torch._dynamo.reset()
        forced = torch.compile(
            lambda x, p: convselect.conv2d(x, weight, padding=(p, p), policy="winograd2"),
            backend="eager",
            dynamic=True,
        )
        torch._dynamo.utils.counters.clear()
        assert forced(x, 3).shape == (1, 4, 13, 13), "refused by the graph, and run between two graphs"
        # Dynamo's time goes by functions of ours that it traces there: 97, 14 s, if none is left out.
        assert torch._dynamo.utils.counters["frames"]["ok"] <= 60


def test_transforms_inside_a_compiled_function_are_left_to_aten():
    layer = SelectedConv2d(3, 4, 3, padding=1)
    x = torch.randn(5, 2, 3, 8, 8)
    loss = lambda t: layer(t).square().sum()  # noqa: E731
    functions = {
        "vmap": torch.vmap(lambda t: layer(t)),  # vmap asks a module for its repr, which dynamo cannot follow
        "grad": lambda x: torch.func.grad(loss)(x[0]),
        "jvp": lambda x: torch.func.jvp(layer, (x[0],), (x[1],))[1],
    }
    with favouring("im2col_gemm"):
        for name, function in functions.items():
            torch._dynamo.reset()
            got = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
            torch.testing.assert_close(got, function(x), rtol=1e-4, atol=1e-4, msg=name)


def test_checkpointed_blocks():
    from torch.utils.checkpoint import checkpoint

    stock = tiny().eval()  # computing again would count twice in batch normalisation
    x = torch.randn(2, 3, 9, 8)
    with favouring("im2col_gemm"):
        model = converted(stock)
        backend, seen = recorder()
        compiled = torch.compile(lambda t: checkpoint(model, t, use_reentrant=False), backend=backend, fullgraph=True)
        got = step(compiled, x, list(model.parameters()))
        assert_close(got, step(stock, x, list(stock.parameters())), bound(x.dtype, "im2col_gemm") * 4)
        assert OURS in seen["backward"], "nothing was computed again"


def test_sizes_without_a_hint_are_native():
    from torch._dynamo.decorators import mark_unbacked

    layer = SelectedConv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 8, 8)
    mark_unbacked(x, 0)
    backend, seen = recorder()
    with favouring("im2col_gemm"):
        got = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert seen["forward"] == [ATEN]
    torch.testing.assert_close(got, nn.Conv2d.forward(layer, x))


# ---- export ---------------------------------------------------------------------------------------------------------


@pairwise(
    {
        "strict": {"not strict": False, "strict": True},
        "dynamic": {"static": False, "dynamic": True},
        "net": list(NETS),
    }
)
def test_export_saves_loads_and_runs(tmp_path, net, dynamic, strict):
    stock, x = stock_and_input(net)
    stock.eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    with favouring("im2col_gemm"):
        program = torch.export.export(
            converted(stock), (x,), strict=strict, dynamic_shapes=({0: batch},) if dynamic else None
        )
        nodes = [n for n in program.graph.nodes if str(n.target).startswith("convselect.")]
        assert [str(n.target) for n in nodes] == operators_of(stock)
        places = [8 if "transpose" in str(n.target) else 7 for n in nodes]
        names = {n.args[i] if len(n.args) > i else "" for n, i in zip(nodes, places, strict=True)}
        assert names == {"" if dynamic else "im2col_gemm"}
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for given in (x, torch.randn(5, *x.shape[1:])) if dynamic else (x,):
            torch.testing.assert_close(loaded(given), stock(given), rtol=1e-4, atol=1e-5)
        decomposed = program.run_decompositions().module()
        torch.testing.assert_close(decomposed(x), stock(x), rtol=1e-4, atol=1e-5)


def test_an_exported_model_runs_in_a_fresh_process(tmp_path):
    stock = tiny().eval()
    x = torch.randn(2, 3, 9, 8)
    with favouring("im2col_gemm"):
        torch.export.save(torch.export.export(converted(stock), (x,)), tmp_path / "model.pt2")
    torch.save((x, stock(x)), tmp_path / "values.pt")
    code = f"""
    import torch, convselect
    x, want = torch.load({str(tmp_path / "values.pt")!r})
    got = torch.export.load({str(tmp_path / "model.pt2")!r}).module()(x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(convselect.graph.ops.plans) == 4
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_onnx_gets_atens_operators(monkeypatch):
    """What torch.onnx.export does first, with the flag it sets while it does."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    model, x = converted(tiny().eval()), torch.randn(2, 3, 9, 8)
    with favouring("im2col_gemm"):
        targets = {str(n.target) for n in torch.export.export(model, (x,)).graph.nodes}
        assert OURS not in targets
        assert any("aten.conv2d" in target for target in targets)
        model[0].policy = "im2col_gemm"
        with pytest.raises(NotApplicable, match="ONNX"):
            torch.export.export(model, (x,))


@pytest.mark.parametrize("kind", [CONV2D, TRANSPOSED2D, CONV3D], ids=str)
def test_an_exported_model_may_be_trained(kind):
    """The backward choices are those of the run."""
    stock = nn.Sequential(kind.stock(3, 4, 3, padding=1), nn.ReLU(), kind.stock(4, 4, 3))
    x = kind.x(2, 3)
    with favouring("im2col_gemm"):
        program = torch.export.export(converted(stock), (x,)).module()
        got = step(program, x, list(program.parameters()))
    assert_close(got, step(stock, x, list(stock.parameters())), bound(x.dtype, "im2col_gemm") * 4)


# ---- Inductor -------------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler on CPUs"
)


@needs_compiler
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_inductor(dynamic):
    """Which moves layouts about as it likes: a mixture of aten's convolutions and ours, NCHW and NHWC."""
    stock = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1, stride=2),
        nn.ReLU(), nn.Conv2d(8, 4, 3, padding="same"),
    )  # fmt: skip
    x = torch.randn(2, 3, 9, 8)
    with favouring("winograd2"):
        model = converted(stock)
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
        for batch in (x, torch.randn(3, 3, 9, 8)) if dynamic else (x,):
            for layout in (torch.contiguous_format, torch.channels_last):
                batch = batch.contiguous(memory_format=layout)
                got = step(compiled, batch, list(model.parameters()))
                want = step(stock, batch, list(stock.parameters()))
                assert relative_error(got[0], want[0]) <= 4 * bound(x.dtype, "winograd2")
                assert got[0].stride() == want[0].stride()
                for g, w in zip(got[1], want[1], strict=True):
                    torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-5)


@needs_compiler
@pytest.mark.timeout(600)
def test_inductor_with_other_kinds():
    """A step through transposed layers and volumes, whose layouts Inductor moves as well."""
    images = nn.Sequential(nn.ConvTranspose2d(3, 8, 2, 2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1))
    behind = nn.Sequential(nn.Conv3d(2, 4, (2, 3, 3), padding=(1, 1, 1)), nn.ReLU(), nn.Conv3d(4, 3, (3, 1, 1)))
    stock = nn.Sequential(images.to(memory_format=torch.channels_last), nn.Unflatten(1, (2, 2)), behind)
    x = torch.randn(2, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    with favouring("im2col_gemm"):
        model = converted(stock)
        got = step(torch.compile(model, fullgraph=True), x, list(model.parameters()))
        want = step(stock, x, list(stock.parameters()))
        assert relative_error(got[0], want[0]) <= 4 * bound(x.dtype, "im2col_gemm")
        for g, w in zip(got[1], want[1], strict=True):
            torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-5)


@needs_compiler
@pytest.mark.timeout(600)
def test_ahead_of_time_inductor(tmp_path):
    stock = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2)).eval()
    x = torch.randn(2, 3, 24, 23)
    batch = torch.export.Dim("batch", min=1, max=64)
    # Not what compiling many models would be quickest with, but one.
    quick = {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with favouring("winograd2"), torch.no_grad(), torch._inductor.config.patch(quick):
        program = torch.export.export(converted(stock), (x,), dynamic_shapes=({0: batch},))
        assert OURS in {str(n.target) for n in program.graph.nodes}
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for given in (x, torch.randn(5, 3, 24, 23)):
            torch.testing.assert_close(loaded(given), stock(given), rtol=1e-4, atol=1e-5)


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["chosen", "choosing"])
def test_nothing_measures_or_waits_during_capture(monkeypatch, dynamic):
    """A CUDA graph may be under construction whenever a layer or an operator meets a new shape."""

    def forbidden(*_, **__):
        raise AssertionError("not while a graph is being captured")

    for name, value in vars(timing).items():
        if callable(value) and getattr(value, "__module__", None) == timing.__name__:
            monkeypatch.setattr(timing, name, forbidden)
    for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", forbidden)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer = SelectedConv2d(4, 4, 3, padding=1)
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    with favouring("im2col_gemm"):
        layer(x).sum().backward()
        name = "" if dynamic else "im2col_gemm"
        arguments = ([1, 1], [1] * 4, [1, 1], 1, name, name, name, str(settings.current()))
        ops.conv2d(x, layer.weight, layer.bias, *arguments).sum().backward()
