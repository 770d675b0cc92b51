"""Mixed precision, checkpoints, pruning, reparametrisation, quantisation, subclasses: converted beside the original."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from _parity import OTHER, algorithms_of, assert_same, bound, favouring
from places import ROOT, TESTS
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import convselect
from convselect.base import lru
from convselect.layer import chooses
from convselect.model import loaded

GEMM = "im2col_gemm"
LIMIT = 10 * bound(torch.float32, GEMM)
X = torch.randn(2, 3, 9, 10)
HOWS = ["converted", "enabled"]


@pytest.fixture(autouse=True)
def _choose_gemm():
    with favouring(GEMM):
        yield


class Scaled(nn.Module):
    """Calls F.conv2d itself, with a weight that is made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 3, 3) / 7)
        self.gain = nn.Parameter(torch.ones(4, 1, 1, 1))

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight * self.gain, None, 1, 1)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.SiLU(), Scaled(), nn.SiLU(), nn.Conv2d(4, 2, 1))


def context(how):
    return convselect.enabled() if how == "enabled" else convselect.use()


def two(how, make=network):
    """The stock model and the one to compare, which chooses by being converted or by its context."""
    stock = make()
    mine = copy.deepcopy(stock)
    if how == "converted":
        assert convselect.summary(convselect.convert(mine)).converted
    return stock, mine


def same(got, want, limit=LIMIT, what=""):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same(g, w, limit, f"{what} {i}")


# ---- mixed precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_regions_nested_and_disabled(how, dtype):
    """Each part in the precision of its region, the backward outside of all; autocast's cache of cast weights too."""
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    results = []
    for model in two(how):
        x = X.clone().requires_grad_()
        inside = context(how) if results else convselect.use()
        with inside, torch.autocast("cpu", dtype=dtype):
            first = model[:2](x)
            with torch.autocast("cpu", enabled=False):
                second = model[2:4](first.float())
                with torch.autocast("cpu", dtype=other):
                    third = model[4](second)
            again = model[:2](x)
        assert (first.dtype, second.dtype, third.dtype, again.dtype) == (dtype, torch.float32, other, dtype)
        loss = first.float().square().sum() + third.float().square().sum() + again.float().sum()
        loss.backward()
        results.append([first.detach(), second.detach(), third.detach(), x.grad, *(p.grad for p in model.parameters())])
    same(results[1], results[0], 4 * bound(torch.bfloat16, GEMM))


@pytest.mark.parametrize("how", HOWS)
def test_grad_scaler(how):
    """Scaled losses, a step that is skipped because a gradient overflowed, and the scale that halves: as stock."""
    results = []
    for model in two(how):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        scales = []
        for i in range(5):
            x = X * 1e30 if i == 2 else X
            optimizer.zero_grad()
            with context(how) if results else convselect.use(), torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, [p.detach() for p in model.parameters()]))
    assert results[0][0] == results[1][0] == [4096.0, 8192.0, 4096.0, 4096.0, 8192.0]
    same(results[1][1], results[0][1], 4 * bound(torch.float16, GEMM))


# ---- grad modes, checkpointing ----------------------------------------------------------------------------------


class ByGradMode:
    """A predictor that would prefer another algorithm with gradients than without."""

    def predict(self, problem):
        from _parity import Favourite

        return Favourite(GEMM if torch.is_grad_enabled() else OTHER)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_takes_the_same_algorithms(use_reentrant, autocast, monkeypatch):
    """Reentrant checkpoints run forward without gradients and again with them. The bits must not change in between."""
    monkeypatch.setattr(loaded, "get", ByGradMode)
    lru.clear()
    _, model = two("converted")
    outputs, ran, kept = [], [], []
    # Not of the last layer: recomputing stops once everything is there that was saved.
    model[3].register_forward_hook(lambda module, args, y: outputs.append(y.detach().clone()))
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ran.append(algorithms_of(lambda: kept.append(checkpoint(model, x, use_reentrant=use_reentrant))))
        loss = kept[0].float().square().sum()
        ran.append(algorithms_of(loss.backward))
    assert len(outputs) == 2
    assert torch.equal(outputs[0], outputs[1])
    assert len(ran[0]) == 2
    assert ran[1][:2] == ran[0]


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_under_enabled_are_recomputed_natively(use_reentrant, backward_inside):
    """PyTorch suspends torch-function modes in a backward pass: the same sizes and kinds of saved tensors, the same
    gradients."""
    stock, mine = two("enabled")
    results = []
    for model in (stock, mine):
        x = X.clone().requires_grad_()
        with context("enabled" if model is mine else "converted"):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            loss = y.square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    same(results[1], results[0])


@pytest.mark.parametrize("how", HOWS)
def test_saved_tensors_are_those_of_the_stock_layer(how):
    """Hooks that move saved tensors elsewhere see the same tensors, and the backward takes what they give back."""
    results = []
    for model in two(how):
        packed = []

        def pack(t, packed=packed):
            packed.append((tuple(t.shape), t.dtype, t.is_leaf and t.requires_grad))
            return t.detach().numpy().copy()

        with (
            context(how) if results else convselect.use(),
            torch.autograd.graph.saved_tensors_hooks(pack, torch.tensor),
        ):
            y = model(X)
        y.square().sum().backward()
        results.append((sorted(map(str, packed)), [p.grad for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    same(results[1][1], results[0][1])


@pytest.mark.parametrize("how", HOWS)
def test_no_grad_and_inference_mode(how):
    stock, model = two(how)
    with context(how):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                y = model(X)
                assert not y.requires_grad
                assert y.is_inference() == (mode is torch.inference_mode)
                assert_same(y, stock(X), LIMIT, mode.__name__)
            y = model(X)
            assert y.requires_grad


@pytest.mark.parametrize("how", HOWS)
def test_functional_call_and_transforms(how):
    """Per-sample gradients of a whole model, its Jacobian-vector product and Hessian-vector product."""
    from torch.func import functional_call, grad, jvp, vmap

    results = []
    for model in two(how):
        parameters = {k: p.detach() for k, p in model.named_parameters()}

        def loss(parameters, x, model=model):
            return functional_call(model, parameters, (x[None],)).square().sum()

        def tangent(p, loss=loss):
            return jvp(lambda q: loss(q, X[0]), (p,), (p,))[1]

        with context(how) if results else convselect.use():
            per_sample = vmap(grad(loss), (None, 0))(parameters, X)
            product = grad(tangent)(parameters)
        results.append([*per_sample.values(), *product.values(), tangent(parameters)[None]])
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


# ---- pruning and reparametrisation ------------------------------------------------------------------------------


def train(model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
    return [loss.detach()[None], *(t.detach() for t in model.state_dict().values())]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("method", ["l1", "random structured", "custom mask", "global"])
def test_pruning(method, order):
    def cut(model):
        torch.manual_seed(2)
        if method == "l1":
            prune.l1_unstructured(model[0], "weight", 0.5)
            prune.l1_unstructured(model[0], "bias", 2)
        elif method == "random structured":
            prune.random_structured(model[0], "weight", 2, dim=0)
        elif method == "custom mask":
            prune.custom_from_mask(model[0], "weight", (torch.rand(6, 3, 3, 3) > 0.4).float())
        else:
            prune.global_unstructured([(model[0], "weight"), (model[4], "weight")], prune.L1Unstructured, amount=0.3)

    stock, mine = network(), network()
    cut(stock)
    if order == "before":
        cut(mine)
    assert len(convselect.summary(convselect.convert(mine)).converted) == 2
    if order == "after":
        cut(mine)
    assert list(mine.state_dict()) == list(stock.state_dict())
    same(train(mine), train(stock), what=method)
    for model in (stock, mine):
        prune.remove(model[0], "weight")
    assert prune.is_pruned(mine) == prune.is_pruned(stock)
    same([mine(X)], [stock(X)])
    assert chooses(mine[0])
    assert algorithms_of(lambda: mine(X)) == [GEMM, GEMM]


class LowRank(nn.Module):
    """A reparametrisation that adds trained parameters, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 2) / 4), nn.Parameter(torch.randn(2, 27) / 4)

    def forward(self, weight):
        return weight + (self.a @ self.b).view_as(weight)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "wrap",
    [
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        lambda layer: parametrize.register_parametrization(layer, "weight", LowRank()),
    ],
    ids=["weight_norm", "spectral_norm", "low rank"],
)
def test_reparametrised_layers_train_alike(wrap, order):
    models = []
    for selected in (False, True):
        model = network()
        if selected and order == "after":
            convselect.convert(model)
        torch.manual_seed(3)
        wrap(model[0])
        if selected and order == "before":
            convselect.convert(model)
        assert chooses(model[0]) == selected
        models.append(model)
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    want, got = (train(model) for model in models)
    same(got, want)
    with convselect.enabled():
        assert len(algorithms_of(lambda: models[0](X))) == 3


# ---- quantisation -----------------------------------------------------------------------------------------------


def _ao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.ao.quantization as ao
    if not {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines):
        pytest.skip("this torch has no quantised kernels")
    return ao


class Plain(nn.Module):
    def __init__(self, ao):
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        torch.manual_seed(4)
        self.conv, self.relu = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x):
        return self.dequant(self.last(self.relu(self.conv(self.quant(x)))))


@pytest.mark.parametrize("aware", [False, True], ids=["after training", "aware training"])
@pytest.mark.parametrize("prepared_first", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_eager_quantisation(aware, prepared_first):
    """`torch.ao` swaps modules by their class, which converting does not change. Before and after it values are right,
    and `convert` leaves quantised layers alone."""
    ao = _ao()
    stock = Plain(ao)
    stock.qconfig = ao.get_default_qat_qconfig("fbgemm") if aware else ao.get_default_qconfig("fbgemm")
    mine = copy.deepcopy(stock)
    if not prepared_first:
        convselect.convert(mine)
        with torch.no_grad():
            same([mine(X)], [stock(X)])
    results = []
    for model in (stock, mine):
        model.train(aware)
        (ao.prepare_qat if aware else ao.prepare)(model, inplace=True)
        if model is mine and prepared_first:
            report = convselect.summary(convselect.convert(model))
            assert list(report.converted) == ["conv", "last"]
        with convselect.enabled() if model is mine else convselect.use():
            float_results = model(X)
        ao.convert(model.eval(), inplace=True)
        report = convselect.summary(convselect.convert(model))
        assert not report.converted
        assert set(report.left_alone) == {"conv", "last"}
        with convselect.enabled():
            results.append((float_results.detach(), model(X)))
    assert_same(results[1][0], results[0][0], 0.05 if aware else LIMIT, "observed")
    step = float(stock.last.scale)
    # A rounding that crosses a quantisation step moves a value by that step.
    assert (results[0][1] - results[1][1]).abs().max() <= 2.01 * step


@pytest.mark.filterwarnings("ignore")
def test_what_quantisation_does_to_a_converted_model():
    """What is not quantised goes on choosing."""
    ao = _ao()
    stock = Plain(ao).eval()
    mine = copy.deepcopy(stock)
    convselect.convert(mine)
    want = stock(X)
    dynamic = ao.quantize_dynamic(copy.deepcopy(mine), {nn.Linear}, torch.qint8)
    same([dynamic(X)], [want])
    assert chooses(dynamic.conv)


# ---- subclasses -------------------------------------------------------------------------------------------------


class Wrapped(torch.Tensor):
    """A wrapper subclass: holds a tensor and unwraps at `__torch_dispatch__`, as quantised and distributed ones do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map_only

        cls.seen.append(func)
        out = func(*tree_map_only(cls, lambda t: t.inner, args), **tree_map_only(cls, lambda t: t.inner, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, out)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("which", ["weight", "input"])
def test_wrapper_subclasses(which, how):
    Wrapped.seen = []
    stock, mine = two(how, lambda: nn.Sequential(nn.Conv2d(3, 4, 3)))
    want = stock(X)
    if which == "weight":
        mine[0].weight = nn.Parameter(Wrapped(mine[0].weight.detach()))
    with context(how):
        y = mine(Wrapped(X) if which == "input" else X)
        y.sum().backward()
    assert torch.ops.aten.convolution.default in Wrapped.seen
    assert isinstance(y, Wrapped)
    torch.testing.assert_close(y.inner.detach(), want.detach())
    assert mine[0].weight.grad is not None


def test_masked_and_nested_and_sparse_operands_raise_what_pytorch_raises():
    from torch.masked import masked_tensor

    weight = torch.randn(4, 3, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operands = [
            masked_tensor(X, X > 0),
            torch.nested.nested_tensor([X[0], X[1]]),
            X.to_sparse(),
        ]
    for x in operands:
        outcomes = []
        for function in (nn.functional.conv2d, convselect.conv2d):
            try:
                outcomes.append(type(function(x, weight)))
            except Exception as error:
                outcomes.append((type(error), str(error)[:60]))
        with convselect.enabled():
            try:
                outcomes.append(type(nn.functional.conv2d(x, weight)))
            except Exception as error:
                outcomes.append((type(error), str(error)[:60]))
        assert outcomes[0] == outcomes[1] == outcomes[2]


# ---- the page ---------------------------------------------------------------------------------------------------


def test_the_page_names_tests_that_exist():
    page = ROOT / "docs" / "compatibility.md"
    if not page.exists():
        pytest.skip("an installed package has no documents around it")
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", page.read_text())
    assert len(named) > 40
    for file, name in named:
        source = next(TESTS.rglob(f"{file}.py")).read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}.py has no {name}"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    assert all("`test_" in row for row in rows if not row.startswith("| feature")), "a row without a test"
