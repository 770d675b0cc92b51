"""Converted layers of classes that compute something of their own: the same results, and their convolutions choose."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from _parity import algorithms_of, assert_same, bound, favouring
from fresh import run as run_fresh
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.nn.functional import conv2d as imported
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torchvision_stub import without_torchvision

import convselect
from convselect.layer import chooses, subclasses
from convselect.layer.mode import Choosing

GEMM = "im2col_gemm"
LIMIT = 20 * bound(torch.float32, GEMM)


@pytest.fixture(autouse=True)
def _choose_gemm():
    with favouring(GEMM), convselect.use("auto"):
        yield
        assert torch._C._len_torch_function_stack() == 0


# ---- classes ------------------------------------------------------------------------------------------------------


class NothingOfItsOwn(nn.Conv2d):
    pass


class Doubled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledTwice(Doubled):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledWeight(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class BothOfItsOwn(DoubledWeight):
    def forward(self, x):
        return self._conv_forward(x, self.weight - 1, self.bias)


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std(dim=(1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)


class Imported(nn.Conv2d):
    def forward(self, x):
        return imported(x, weight=self.weight, bias=self.bias, stride=1, padding=[2, 1])


def helper(x, layer):
    return torch.conv2d(F.pad(x, (1, 0, 2, 0)), layer.weight, layer.bias, layer.stride)


class Helped(nn.Conv2d):
    def forward(self, x):
        return helper(x, self)


class Mixin:
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self.stride) + 1


class Mixed(Mixin, nn.Conv2d):
    pass


class Twice(nn.Conv2d):
    """Two convolutions, of which the second is a layer inside."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.inner = nn.Conv2d(self.out_channels, 5, 1)

    def forward(self, x):
        return self.inner(F.conv2d(x, self.weight, self.bias))


class PowerIteration(nn.Conv2d):
    """Changes a buffer whenever it runs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("u", torch.ones(self.out_channels))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        flat = self.weight.flatten(1)
        with torch.no_grad():
            v = F.normalize(flat.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(flat @ v, dim=0))
        return F.conv2d(x, self.weight / (self.u @ flat @ v), self.bias)


class Noisy(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight + torch.randn_like(self.weight), self.bias)


class Normed(nn.Conv2d):
    """As detectron2's: a norm and an activation behind it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, bias=False, **kwargs)
        self.norm, self.activation = nn.BatchNorm2d(self.out_channels), F.relu

    def forward(self, x):
        x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return self.activation(self.norm(x))


class Masked1d(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(F.pad(x, (2, 0)), self.weight * (self.weight > 0), self.bias)


class Inflated3d(nn.Conv3d):
    def forward(self, x):
        return self._conv_forward(x, self.weight * 0.5, self.bias)


class Modulated(nn.ConvTranspose2d):
    def forward(self, x, output_size=None):
        return F.conv_transpose2d(x, self.weight * 2, self.bias, self.stride, self.padding)


class Resized(nn.ConvTranspose1d):
    def forward(self, x):
        return super().forward(x, output_size=[x.shape[-1] + 2])


class Upsampled(nn.ConvTranspose3d):
    def forward(self, x):
        return super().forward(x) - 1


class FromTheGround(nn.modules.conv._ConvNd):
    """Not one of PyTorch's six layers."""

    def __init__(self, C, K, size):
        size = nn.modules.utils._pair(size)
        super().__init__(C, K, size, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, True, "zeros")

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias)


KINDS = {
    kind.__name__: kind
    for kind in (
        NothingOfItsOwn, Doubled, DoubledTwice, DoubledWeight, BothOfItsOwn, Standardised, Imported, Helped, Mixed,
        Twice, PowerIteration, Noisy, Normed, Masked1d, Inflated3d, Modulated, Resized, Upsampled, FromTheGround,
    )
}  # fmt: skip
OF_TIMM = ("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame", "Conv2dSame", "Conv2dSameExport")
FOR_QUANTISATION = ("qat.Conv1d", "qat.Conv2d", "qat.Conv3d", "ConvBn2d", "ConvReLU2d", "ConvBnReLU1d")
NAMES = (*KINDS, *OF_TIMM, *FOR_QUANTISATION)
SCRIPTED = ("NothingOfItsOwn", "Standardised", "Imported", "Masked1d", *OF_TIMM[:-1])
"""Those that PyTorch's script compiler takes."""
COMPILED = [name for name in (*KINDS, *OF_TIMM) if name not in ("Noisy", "Conv2dSameExport")]
"""Without those that draw random numbers, or that are not compiled into one graph as they are."""


def made(name):
    torch.manual_seed(0)
    if name in OF_TIMM:
        with without_torchvision():
            pytest.importorskip("timm.layers", exc_type=ImportError)
        module = sys.modules[f"timm.layers.{'conv2d_same' if name.startswith('Conv2d') else 'std_conv'}"]
        return getattr(module, name)(4, 6, 3)
    if name in FOR_QUANTISATION:
        from torch.ao.nn import intrinsic, qat
        from torch.ao.quantization import get_default_qat_qconfig

        kind = getattr(qat, name[4:]) if name.startswith("qat.") else getattr(intrinsic.qat, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return kind(4, 6, 3, qconfig=get_default_qat_qconfig("x86"))
    return KINDS[name](4, 6, 3)


def input_of(layer, N=2):
    torch.manual_seed(1)
    return torch.randn(N, 4, *(9, 8, 7)[: len(layer.kernel_size)])


def results(layer, x):
    """y, gradients, and buffers afterwards."""
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    y = layer(x)
    wanted = [p for p in layer.parameters() if p.requires_grad]
    weights = torch.arange(y.numel()).cos().view(y.shape)  # a norm's result has a sum, and squares, of its own
    grads = torch.autograd.grad((y * weights).sum(), [x, *wanted])
    return [y.detach(), *grads, *(b.detach().clone() for b in layer.buffers() if b.is_floating_point())]


def assert_alike(got, want, what):
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, LIMIT, f"{what}: result {i}")


# ---- what converting keeps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_results_gradients_and_buffers_are_those_of_the_class(name):
    stock = made(name)
    mine = convselect.convert(copy.deepcopy(stock))
    assert type(mine) is type(stock)
    assert chooses(mine)
    assert set(vars(mine)) - set(vars(stock)) == {"_convselect", "policy"}
    assert mine.state_dict().keys() == stock.state_dict().keys()
    x = input_of(stock)
    for call in range(3):
        assert_alike(results(mine, x), results(stock, x), f"call {call}")
    assert getattr(mine, "calls", None) == getattr(stock, "calls", None)
    assert GEMM in algorithms_of(lambda: mine(x))
    assert algorithms_of(lambda: stock(x)) == []


@pytest.mark.parametrize("name", NAMES)
def test_reverted_it_is_what_it_was(name):
    layer = made(name)
    before = set(vars(layer))
    convselect.revert(convselect.convert(layer))
    assert set(vars(layer)) == before
    assert not chooses(layer)
    assert algorithms_of(lambda: layer(input_of(layer))) == []
    assert list(convselect.summary(layer).left_alone.values())[:1] == ["It was not converted."]


@pytest.mark.parametrize("name", NAMES)
def test_a_named_algorithm_runs_every_time(name):
    """A layer whose calls are PyTorch's own may do without the mode, but not if it was asked for by name."""
    layer = convselect.convert(made(name).eval(), policy=GEMM)
    x = input_of(layer)
    with torch.no_grad():
        for _ in range(4):
            assert GEMM in algorithms_of(lambda: layer(x))
        convselect.convert(convselect.revert(layer), policy="native")
        assert set(algorithms_of(lambda: layer(x))) <= {"native"}


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_hooks(name):
    layer = convselect.convert(made(name).eval())
    x = input_of(layer)
    seen = []
    want = results(layer, x)
    twins = {"deepcopy": copy.deepcopy(layer), "copy": copy.copy(layer)}
    if name in KINDS or name.startswith(("Std", "Scaled")):
        twins["pickle"] = pickle.loads(pickle.dumps(layer))
    for how, twin in twins.items():
        handles = [
            twin.register_forward_pre_hook(lambda *_: seen.append("before")),
            twin.register_forward_hook(lambda *_: seen.append("after")),
        ]
        assert chooses(twin), how
        assert GEMM in algorithms_of(lambda twin=twin: twin(x)), how
        assert seen == ["before", "after"]
        for handle in handles:
            handle.remove()
        seen.clear()
        if how == "deepcopy" and name not in ("PowerIteration", "ConvBn2d", "ConvBnReLU1d"):
            assert_alike(results(twin, x), want, how)


@pytest.mark.process
def test_a_pickle_is_converted_in_another_process(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "from torch import nn\n"
        "class Doubled(nn.Conv2d):\n"
        "    def forward(self, x):\n"
        "        return 2 * super().forward(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    layer = importlib.import_module("elsewhere").Doubled(4, 6, 3)
    (tmp_path / "layer").write_bytes(pickle.dumps(convselect.convert(layer)))
    code = (
        "import pickle, sys, convselect\n"
        "from convselect.layer import chooses\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "layer = pickle.load(open(sys.argv[1] + '/layer', 'rb'))\n"
        "print(chooses(layer), hasattr(type(layer).forward, '_convselect_routes'), type(layer).__name__)\n"
    )
    done = run_fresh(["-c", code, str(tmp_path)])
    assert done.stdout.split() == ["True", "True", "Doubled"], done.stderr


def test_classes_share_nothing_but_the_method():
    layer, other = convselect.convert(made("DoubledTwice")), made("Doubled")
    assert chooses(layer)
    assert algorithms_of(lambda: other(input_of(other))) == []
    # A mix-in is not touched: it may belong to other modules.
    convselect.convert(made("Mixed"))
    assert not hasattr(Mixin.forward, "_convselect_routes")


def test_a_method_that_is_put_in_later_is_plain_until_converted_again():
    class Mine(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight)

    layer = convselect.convert(Mine(4, 6, 3))
    Mine.forward = lambda self, x: F.conv2d(x, self.weight, self.bias)
    assert not chooses(layer)
    assert convselect.summary(layer).left_alone == {"": "It was not converted."}
    assert chooses(convselect.convert(layer))
    assert GEMM in algorithms_of(lambda: layer(input_of(layer)))


def test_an_error_leaves_no_mode_behind():
    layer = convselect.convert(made("Standardised"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="channels"):
            layer(torch.randn(1, 3, 9, 9))
        assert torch._C._len_torch_function_stack() == 0
    with pytest.raises(TypeError):
        layer()


# ---- with the rest of PyTorch ---------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_without_a_break(name):
    stock = made(name).eval()
    layer = convselect.convert(copy.deepcopy(stock))
    x = input_of(layer)
    torch._dynamo.reset()
    recorded = EagerAndRecordGraphs()
    compiled = torch.compile(layer, backend=recorded, fullgraph=True)
    with torch.no_grad():
        assert_same(compiled(x), stock(x), LIMIT, name)
    (graph,) = recorded.graphs
    assert any("convselect" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["Standardised", "Doubled", "DoubledWeight", "Masked1d", "Modulated", "Inflated3d"])
def test_exported(name):
    layer = convselect.convert(made(name).eval())
    x = input_of(layer)
    program = torch.export.export(layer, (x,))
    assert any("convselect" in str(node.target) for node in program.graph.nodes)
    assert_same(program.module()(x), layer(x), LIMIT, name)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_and_traced(name):
    stock = made(name).eval()
    layer = convselect.convert(copy.deepcopy(stock))
    x = input_of(layer)
    want = stock(x)
    assert torch.equal(torch.jit.script(layer)(x), want)
    assert torch.equal(torch.jit.trace(layer, x)(x), want)
    assert torch.jit.script(layer).code == torch.jit.script(stock).code
    assert GEMM in algorithms_of(lambda: layer(x))


@pytest.mark.parametrize("name", ["Standardised", "Doubled"])
def test_symbolically_traced(name):
    model = nn.Sequential(made(name))
    want = [node.target for node in torch.fx.symbolic_trace(model).graph.nodes]
    graph = torch.fx.symbolic_trace(convselect.convert(model))
    assert [node.target for node in graph.graph.nodes] == want


def test_functional_call_and_transforms():
    stock = made("Standardised")
    layer = convselect.convert(copy.deepcopy(stock))
    x = input_of(stock)
    weights = {name: p.detach() + 0.1 for name, p in stock.named_parameters()}

    def of(module):
        def loss(weights, one):
            return torch.func.functional_call(module, weights, (one.unsqueeze(0),)).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)

    got, want = of(layer), of(stock)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_checkpoints_are_recomputed_by_the_same_algorithm(reentrant):
    stock = made("Standardised")
    layer = convselect.convert(copy.deepcopy(stock))
    x = input_of(stock).requires_grad_()

    def gradient(module):
        y = checkpoint(module, x, use_reentrant=reentrant)
        return torch.autograd.grad(y.square().sum(), x) if not reentrant else (y.square().sum().backward(), x.grad)[1:]

    if reentrant:
        want, x.grad = gradient(stock), None
    else:
        want = gradient(stock)
    assert_alike(list(gradient(layer)), list(want), "checkpoint")
    x.grad = None
    assert set(algorithms_of(lambda: gradient(layer))) == {GEMM}


def test_autocast_and_double_backward():
    stock = made("Standardised")
    layer = convselect.convert(copy.deepcopy(stock))
    x = input_of(stock)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == stock(x).dtype == torch.bfloat16
    small = stock.double()
    assert torch.autograd.gradgradcheck(
        convselect.convert(small), torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    )


def test_parametrized_subclasses():
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

    stock = made("Standardised")
    parametrize.register_parametrization(stock, "weight", Halved())
    layer = copy.deepcopy(stock)
    assert chooses(convselect.convert(layer))
    assert_alike(results(layer, input_of(layer)), results(stock, input_of(stock)), "parametrized")
    assert GEMM in algorithms_of(lambda: layer(input_of(layer)))
    parametrize.remove_parametrizations(layer, "weight")
    assert chooses(layer)


def test_threads_have_modes_of_their_own():
    layers = [convselect.convert(made(name).eval()) for name in ("Standardised", "Doubled", "Helped")]
    x = input_of(layers[0])
    with torch.no_grad():
        want = [layer(x) for layer in layers]
    failures = []

    def work():
        try:
            with torch.no_grad(), convselect.use("auto"):
                for _ in range(20):
                    for layer, w in zip(layers, want, strict=True):
                        assert_same(layer(x), w, LIMIT, "in a thread")
            assert torch._C._len_torch_function_stack() == 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- with enabled() and policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Standardised", "Doubled", "DoubledWeight", "Twice"])
def test_inside_enabled_its_own_policy_holds(name):
    layer = convselect.convert(made(name).eval(), policy="native")
    layer_inner = getattr(layer, "inner", None)
    x = input_of(layer)
    with convselect.enabled(GEMM), torch.no_grad():
        for _ in range(3):
            assert set(algorithms_of(lambda: layer(x))) <= {"native"}
        layer.policy = None
        if layer_inner is not None:
            layer_inner.policy = None
        assert GEMM in algorithms_of(lambda: layer(x))


def test_a_layer_inside_keeps_its_own_policy():
    layer = made("Twice").eval()
    convselect.convert(layer, policy="native", where=lambda name, _: name == "inner")
    convselect.convert(layer, policy=GEMM, where=lambda name, _: name == "")
    with torch.no_grad():
        assert sorted(algorithms_of(lambda: layer(input_of(layer)))) in ([GEMM], [GEMM, "native"])


# ---- without the mode -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counting(monkeypatch):
    """How often a mode was entered."""
    entered = []
    with monkeypatch.context() as patch:
        patch.setattr(subclasses, "_push", lambda mode: (entered.append(type(mode).__name__), push(mode))[1])
        push = torch._C._push_on_torch_function_stack
        yield entered


@pytest.mark.parametrize("name", ["Standardised", "Doubled", "Masked1d", "Modulated"])
def test_calls_that_are_pytorchs_own_need_no_mode(name, monkeypatch):
    layer = convselect.convert(made(name).eval())
    x = input_of(layer)
    with favouring(None), torch.no_grad(), counting(monkeypatch) as entered:
        calls = 2 * subclasses._LOOK_AGAIN + 2
        for _ in range(calls):
            layer(x)
        assert entered == ["_Looking"] * 2
        entered.clear()
        layer(input_of(layer, N=1))  # another kind of call
        assert entered == ["_Looking"]
    with favouring(GEMM), torch.no_grad():  # what was settled is forgotten with the plans
        assert GEMM in algorithms_of(lambda: layer(x))


def test_what_chooses_goes_on_in_the_mode(monkeypatch):
    layer = convselect.convert(made("Standardised").eval())
    x = input_of(layer)
    with torch.no_grad(), counting(monkeypatch) as entered:
        for _ in range(4):
            layer(x)
    assert entered == ["_Looking", *["Choosing"] * 3]


def test_a_call_by_super_needs_none(monkeypatch):
    layer = convselect.convert(made("DoubledTwice").eval())
    with torch.no_grad(), counting(monkeypatch) as entered:
        for _ in range(4):
            assert layer(input_of(layer)).shape == (2, 6, 7, 6)
        assert len(entered) == 1
        assert GEMM in algorithms_of(lambda: layer(input_of(layer)))


def test_what_is_left_to_pytorch_for_now_is_not_settled():
    """Under a dispatch mode every call is aten's; afterwards it is not."""
    from torch.utils.flop_counter import FlopCounterMode

    layer = convselect.convert(made("Standardised").eval())
    x = input_of(layer)
    with torch.no_grad():
        with FlopCounterMode(display=False):
            layer(x)
        assert GEMM in algorithms_of(lambda: layer(x))


def test_kinds_of_calls_are_bounded():
    layer = convselect.convert(made("Standardised").eval())
    with torch.no_grad():
        for width in range(3, 3 + subclasses._MOST_KINDS + 5):
            layer(torch.randn(1, 4, 3, width))
    assert 0 < len(subclasses._known[layer]) <= subclasses._MOST_KINDS
    count = len(subclasses._known)
    del layer
    assert len(subclasses._known) < count


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_explained_is_what_runs():
    layer = made("Helped")  # pads itself
    x = input_of(layer)
    for one in (layer, convselect.convert(copy.deepcopy(layer))):
        with torch.no_grad():
            (row,) = convselect.explain(one, x)
        assert (row.problem.H, row.problem.W, row.algorithm) == (11, 9, GEMM)
        assert chooses(one) == (one is not layer)
    assert len(convselect.explain(layer, x)) == 2  # with the gradient of the weight
    twice = convselect.explain(nn.ModuleList([made("Twice")])[0].eval(), x)
    assert {row.layer for row in twice} == {"", "inner"}
    with pytest.raises(RuntimeError):
        convselect.explain(layer, x[:, :1])
    assert torch._C._len_torch_function_stack() == 0


def test_the_summary_names_layers_that_pad_themselves():
    model = nn.Sequential(made("Helped"), Standardised(6, 4, 3))
    convselect.convert(model)
    with torch.no_grad():
        model(input_of(model[0]))
    predicted = convselect.summary(model).predicted
    assert {choice.layers for choice in predicted} == {("0",), ("1",)}
    assert list(convselect.summary(model).converted) == ["0", "1"]


def test_the_mode_of_enabled_is_the_same():
    assert issubclass(convselect.enabled, Choosing)
