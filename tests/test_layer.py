"""The life of a `SelectedConv2d` beside an `nn.Conv2d`: built, copied, stored, edited, wrapped, traced, trained."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import textwrap
import warnings

import fresh
import pytest
import torch
import torch.nn.functional as F
from _parity import OTHER, assert_same, bound, favouring
from kinds import CONV2D, KINDS
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import convselect
from convselect import NotApplicable, SelectedConv2d
from convselect.eager.plan import plans
from convselect.layer import chooses

# What an automatic choice takes in these tests: one algorithm that copies layouts, one that is no aten convolution.
FAVOURITES = [None, OTHER, "im2col_gemm"]
LIMIT = 4 * bound(torch.float32, "im2col_gemm")

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture(params=FAVOURITES, autouse=True)
def favourite(request):
    """Everything holds without a predictor and with one that prefers something else than native."""
    with favouring(request.param):
        yield request.param


pair_of = CONV2D.pair_of


def both(stock, mine, x, limit=LIMIT, what=""):
    """Same output and same gradients of x and of every parameter, strides included."""
    results = []
    for model in (stock, mine):
        leaf = x.detach().requires_grad_(x.is_floating_point())
        y = model(leaf)
        wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
        results.append((y.detach(), *torch.autograd.grad(y.float().square().mean(), wanted)))
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        assert_same(got, want, limit, f"{what} result {i}")
    return results[1][0]


def python(code, **environment):
    """Run code in a fresh interpreter; (standard output, standard error)."""
    result = fresh.run(["-c", textwrap.dedent(code)], env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def only_once(favourite):
    """For tests that bring their own processes, or to which the favourite makes no difference."""
    if favourite is not None:
        pytest.skip("once is enough")


# ---- construction and state -------------------------------------------------------------------------------------


@every_kind
def test_attributes_repr_and_state_are_the_stock_ones(kind):
    for args, kwargs in kind.constructions():
        stock, mine = kind.pair_of(*args, **kwargs)
        assert isinstance(mine, kind.stock)
        assert stock.__dict__.keys() == mine.__dict__.keys()
        for name, value in stock.__dict__.items():
            if not name.startswith("_"):
                assert getattr(mine, name) == value
                assert type(getattr(mine, name)) is type(value), name
        assert repr(mine) == "Selected" + repr(stock)
        assert list(mine.state_dict()) == list(stock.state_dict())
        assert mine.state_dict()._metadata == stock.state_dict()._metadata
        assert mine.__constants__ == stock.__constants__
        both(stock, mine, kind.x(2, args[0], dtype=kwargs.get("dtype", torch.float32)))


@every_kind
def test_same_initialisation(kind):
    torch.manual_seed(5)
    stock = kind.stock(3, 4, 3)
    torch.manual_seed(5)
    mine = kind.selected(3, 4, 3)
    assert torch.equal(stock.weight, mine.weight)
    assert torch.equal(stock.bias, mine.bias)
    mine.reset_parameters()
    assert not torch.equal(stock.weight, mine.weight)


@every_kind
def test_signature_is_the_stock_one(kind):
    import inspect

    stock, mine = (inspect.signature(one).parameters for one in (kind.stock, kind.selected))
    assert [(p.name, p.kind, p.default) for p in stock.values()] == [
        (p.name, p.kind, p.default) for p in mine.values() if p.name != "policy"
    ]
    assert list(mine)[-1] == "policy"


def test_constructor_errors_are_the_stock_ones():
    for args, kwargs in (
        ((3, 4, 3), {"groups": 2}), ((3, 4, 3), {"padding": "full"}), ((3, 4, 3), {"padding": "same", "stride": 2}),
        ((3, 4, 3), {"padding_mode": "mirror"}), ((3, 4, 3), {"groups": 0}),
    ):  # fmt: skip
        with pytest.raises(ValueError) as stock:  # noqa: PT011
            nn.Conv2d(*args, **kwargs)
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            SelectedConv2d(*args, **kwargs)
        assert str(raised.value) == str(stock.value)


@every_kind
def test_policy_argument(kind):
    layer = kind.selected(3, 4, 3, policy=OTHER)
    assert layer.policy == OTHER
    assert repr(layer).endswith(f"policy='{OTHER}')")
    x = kind.x(1, 3)
    want = kind.native(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), want)
    layer.policy = "upcast"
    with pytest.raises(NotApplicable, match="float32 needs no cast"):
        layer(x)
    with convselect.use("reference"), pytest.raises(NotApplicable):  # the layer's own policy wins
        layer(x)
    layer.policy = None
    torch.testing.assert_close(layer(x), want)
    assert kind.selected(3, 4, 3).policy is None
    assert "policy" not in kind.selected(3, 4, 3).__dict__
    assert copy.deepcopy(kind.selected(3, 4, 3, policy=OTHER)).policy == OTHER


@every_kind
def test_copy_and_pickle_after_use(kind):
    for args, kwargs in kind.constructions():
        stock, mine = kind.pair_of(*args, **kwargs)
        x = kind.x(2, args[0], dtype=kwargs.get("dtype", torch.float32))
        for layer in (stock, mine):
            layer(x).sum().backward()
        stored = io.BytesIO()
        torch.save(mine, stored)
        stored.seek(0)
        loaded = torch.load(stored, weights_only=False)
        for twin in (copy.deepcopy(mine), copy.copy(mine), pickle.loads(pickle.dumps(mine)), loaded):
            assert type(twin) is kind.selected
            assert repr(twin) == repr(mine)
            both(stock, twin, x)
        deep = copy.deepcopy(mine)
        assert deep.weight.grad is copy.deepcopy(stock).weight.grad is None  # PyTorch copies no gradients
        with torch.no_grad():
            deep.weight.zero_()
        both(stock, mine, x)


def test_whole_model_from_a_fresh_process(tmp_path, favourite):
    only_once(favourite)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    convselect.convert(model)
    convselect.convert(model[2:], policy="native")
    x = torch.randn(1, 3, 6, 6)
    torch.save((model, x, model(x)), tmp_path / "model.pt")
    out, _ = python(
        f"""
        import torch
        model, x, y = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
        import convselect
        with convselect.use("im2col_gemm"):
            torch.testing.assert_close(model(x), y)
        print(*(type(m).__name__ for m in model), *convselect.summary(model).converted)
        """
    )
    assert out.split() == ["Conv2d", "ReLU", "Conv2d", "0", "2"]


@every_kind
def test_state_dicts_go_both_ways(kind):
    stock, mine = kind.pair_of(3, 4, 3)
    x = kind.x(1, 3)
    mine(x)
    for assign in (False, True):
        source = kind.stock(3, 4, 3)
        mine.load_state_dict(source.state_dict(), assign=assign)
        both(source, mine, x)
        stock.load_state_dict(mine.state_dict(), assign=assign)
        both(stock, mine, x)
    with pytest.raises(RuntimeError, match="size mismatch"):
        mine.load_state_dict(kind.stock(3, 4, 5).state_dict())
    for skip in (torch.nn.utils.skip_init(kind.selected, 3, 4, 3), kind.selected(3, 4, 3, device="meta")):
        skip = skip.to_empty(device="cpu")
        skip.load_state_dict(stock.state_dict())
        both(stock, skip, x)


@every_kind
def test_meta_device(kind):
    layer = kind.selected(3, 4, 3, device="meta")
    x = kind.x(2, 3)
    y = layer(x.to("meta"))
    assert (y.shape, y.device.type) == (kind.stock(3, 4, 3)(x).shape, "meta")


# ---- attributes are read at every call ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_padding_modes(mode):
    x = torch.randn(2, 3, 9, 8)
    for padding in (2, (1, 2), "same", 0):
        stock, mine = pair_of(3, 4, (3, 4), padding=padding, padding_mode=mode)
        both(stock, mine, x, what=f"{mode} {padding}")
        both(stock, mine, x.contiguous(memory_format=torch.channels_last), what=f"{mode} {padding} channels_last")
        both(stock, mine, x[0], what=f"{mode} {padding} unbatched")
    stock, mine = pair_of(3, 4, 3, padding=1)
    both(stock, mine, x)
    stock.padding_mode = mine.padding_mode = mode
    both(stock, mine, x, what=f"changed to {mode}")
    stock.padding_mode = mine.padding_mode = "zeros"
    both(stock, mine, x, what="changed back")


def test_edits_of_geometry_are_honoured():
    x = torch.randn(2, 4, 12, 11)
    stock, mine = pair_of(4, 8, 3)
    edits = (
        ("stride", 2), ("stride", [1, 2]), ("stride", (2, 1)), ("padding", (1, 0)), ("padding", [2, 2]), ("padding", 1),
        ("dilation", [2, 1]), ("dilation", 2), ("stride", (1, 1)), ("padding", "same"), ("padding", "valid"),
    )  # fmt: skip
    for name, value in edits:
        both(stock, mine, x)
        for layer in (stock, mine):
            setattr(layer, name, copy.copy(value))
        both(stock, mine, x, what=f"{name}={value}")
    for layer in (stock, mine):
        layer.groups = 2
        layer.weight = nn.Parameter(stock.weight.detach()[:, :2].clone())
    both(stock, mine, x, what="groups=2")
    for layer in (stock, mine):
        layer.bias = None
    both(stock, mine, x, what="no bias")
    lists = [1, 1]
    for layer in (stock, mine):
        layer.padding = 0
        layer.stride = lists
    both(stock, mine, x)
    lists[0] = 2  # in place: the same object says something else now
    both(stock, mine, x, what="list edited in place")


def test_overrides_of_conv_forward():
    x = torch.randn(1, 3, 8, 8)
    layer = SelectedConv2d(3, 4, 3)
    layer._conv_forward = lambda input, weight, bias: input.new_full((1,), 7.0)
    assert layer(x).item() == 7.0
    del layer._conv_forward

    class Scaled(SelectedConv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    scaled = Scaled(3, 4, 3)
    torch.testing.assert_close(scaled(x), 2 * F.conv2d(x, scaled.weight, scaled.bias))

    class Standardised(SelectedConv2d):  # timm's way
        def forward(self, input):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return self._conv_forward(input, weight, self.bias)

    standardised = Standardised(3, 4, 3)
    weight = standardised.weight - standardised.weight.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(standardised(x), F.conv2d(x, weight, standardised.bias))


# ---- stale weights ------------------------------------------------------------------------------------------------


@every_kind
def test_every_way_to_change_a_weight(kind):
    x = kind.x(2, 3)
    stock, mine = kind.pair_of(3, 4, 3, padding=1)

    def data_copy(layer, new):
        layer.weight.data.copy_(new)

    def data_assign(layer, new):
        layer.weight.data = new.clone()

    def in_place(layer, new):
        with torch.no_grad():
            layer.weight.mul_(-2.0)

    def one_element(layer, new):
        layer.weight.data.flatten()[0] = 3.0

    def through_numpy(layer, new):
        layer.weight.detach().numpy().flat[-1] = -4.0

    def load(layer, new):
        layer.load_state_dict({"weight": new.clone(), "bias": layer.bias.detach().clone()}, assign=True)

    def new_parameter(layer, new):
        layer.weight = nn.Parameter(new.clone())

    def set_(layer, new):
        with torch.no_grad():
            layer.weight.set_(new.clone())

    def channels_last(layer, new):
        if kind.dimensions == 2:
            layer.to(memory_format=torch.channels_last)

    def optimizer(layer, new):
        opt = torch.optim.SGD(layer.parameters(), lr=0.5)
        layer(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    def foreach(layer, new):
        with torch.no_grad():
            torch._foreach_mul_([layer.weight, layer.bias], 0.5)

    def bias_data(layer, new):
        layer.bias.data.fill_(0.25)

    ways = (
        data_copy, data_assign, in_place, one_element, through_numpy, load, new_parameter, set_, channels_last,
        optimizer, foreach, bias_data,
    )  # fmt: skip
    for way in ways:
        both(stock, mine, x, what=f"before {way.__name__}")
        before = mine(x).detach()
        new = torch.randn_like(stock.weight)
        for layer in (stock, mine):
            way(layer, new)
        after = both(stock, mine, x, what=way.__name__)
        assert way is channels_last or not torch.allclose(before, after)
        with torch.no_grad():
            torch.testing.assert_close(mine(x), stock(x))


def test_training_follows_the_stock_layer():
    """Ten steps of SGD with momentum: same losses."""

    def train(make):
        torch.manual_seed(1)
        model = nn.Sequential(
            make(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), make(8, 8, 3, stride=2, groups=2), nn.ReLU(),
            make(8, 4, 1), nn.Flatten(), nn.LazyLinear(3),
        )  # fmt: skip
        x, target = torch.randn(6, 3, 9, 9), torch.arange(6) % 3
        model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    want, got = train(nn.Conv2d), train(SelectedConv2d)
    assert want[-1] < want[0]
    assert got == pytest.approx(want, rel=1e-3)


# ---- hooks and parametrizations -----------------------------------------------------------------------------------


@every_kind
def test_hooks(kind):
    x = kind.x(2, 3)
    logs = []
    for layer in kind.pair_of(3, 4, 3):
        log = []
        layer.register_forward_pre_hook(lambda m, args, log=log: log.append(("pre", args[0].shape)) or (args[0] * 2,))
        layer.register_forward_hook(lambda m, args, y, log=log: log.append(("post", y.shape)) or y + 1)
        layer.register_full_backward_pre_hook(lambda m, g, log=log: log.append(("bpre", g[0].stride())))
        layer.register_full_backward_hook(
            lambda m, gi, go, log=log: log.append(("bpost", gi[0].shape, gi[0].stride(), go[0].shape))
        )
        layer.weight.register_hook(lambda g, log=log: log.append(("weight", g.shape, g.stride())))
        layer.bias.register_post_accumulate_grad_hook(lambda p, log=log: log.append(("bias", p.grad.shape)))
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        logs.append((log, y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad))
    assert sorted(map(str, logs[0][0])) == sorted(map(str, logs[1][0]))
    assert len(logs[0][0]) == 6
    for want, got in zip(logs[0][1:], logs[1][1:], strict=True):
        assert_same(got, want, LIMIT, "hooks")


WRAPPERS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}


@every_kind
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_parametrizations_before_and_after_convert(kind, wrapper):
    x = kind.x(2, 3)
    torch.manual_seed(3)
    stock = kind.stock(3, 4, 3, padding=1)
    before, after = copy.deepcopy(stock), copy.deepcopy(stock)
    built = kind.selected(3, 4, 3, padding=1)
    built.load_state_dict(stock.state_dict())
    wrap = WRAPPERS[wrapper]
    torch.manual_seed(4)
    stock = wrap(stock)
    torch.manual_seed(4)
    before = wrap(before)
    assert list(convselect.summary(convselect.convert(before)).converted) == [""]
    convselect.convert(after)
    torch.manual_seed(4)
    after = wrap(after)
    torch.manual_seed(4)
    built = wrap(built)
    for layer in (before, after, built):
        assert chooses(layer)
        assert list(layer.state_dict()) == list(stock.state_dict())
        for training in (True, False):
            for model in (stock, layer):
                model.train(training)
            other, mine = stock, layer
            if wrapper != "old weight_norm":  # which cannot be copied, stock or not; power iterations move buffers
                other, mine = copy.deepcopy(stock), copy.deepcopy(layer)
                assert type(mine) is type(layer)
            both(other, mine, x, what=f"{wrapper} training={training}")
    if not wrapper.startswith("old"):
        for layer in (before, after, built):
            parametrize.remove_parametrizations(layer, "weight")
            assert type(layer) is (kind.selected if layer is built else kind.stock)
            assert chooses(layer)
            torch.testing.assert_close(layer(x), kind.native(x, layer.weight, layer.bias, padding=1))


# ---- devices, dtypes, layouts -------------------------------------------------------------------------------------


def test_channels_last_modules():
    for args, kwargs in (((3, 8, 3), {"padding": 1}), ((8, 8, 1), {}), ((8, 8, 3), {"groups": 8}), ((1, 4, 3), {})):
        stock, mine = pair_of(*args, **kwargs)
        for layer in (stock, mine):
            layer.to(memory_format=torch.channels_last)
        assert mine.weight.stride() == stock.weight.stride()
        x = torch.randn(2, args[0], 7, 7)
        for operand in (x, x.contiguous(memory_format=torch.channels_last)):
            both(stock, mine, operand)
        for layer in (stock, mine):
            layer.zero_grad()
            layer(x.contiguous(memory_format=torch.channels_last)).sum().backward()
        assert mine.weight.grad.stride() == stock.weight.grad.stride()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype_conversions(kind, dtype):
    stock, mine = kind.pair_of(3, 4, 3, padding=1)
    x = kind.x(2, 3)
    both(stock, mine, x)
    stock, mine = stock.to(dtype), mine.to(dtype)
    both(stock, mine, x.to(dtype), 4 * bound(dtype, "im2col_gemm"))
    stock, mine = stock.float(), mine.float()
    both(stock, mine, x)
    for method in ("half", "bfloat16", "double"):
        y = getattr(copy.deepcopy(mine), method)()(getattr(x, method)())
        assert y.dtype == getattr(x, method)().dtype


@every_kind
def test_memory_is_not_kept(kind):
    """No plan or choice holds on to an input, a weight or an output."""
    import gc
    import weakref

    layer = kind.selected(3, 4, 3)
    x = kind.x(1, 3).requires_grad_()
    y = layer(x)
    y.sum().backward()
    watched = [weakref.ref(t) for t in (x, y, layer.weight, x.grad)]
    assert len(plans) == 1
    del x, y, layer
    gc.collect()
    assert all(w() is None for w in watched)


# ---- grad modes ---------------------------------------------------------------------------------------------------


@every_kind
def test_inference_mode_first_then_training(kind):
    stock, mine = kind.pair_of(3, 4, 3, padding=1)
    x = kind.x(2, 3)
    for _ in range(2):
        with torch.inference_mode():
            y = mine(x)
            assert y.is_inference()
            torch.testing.assert_close(y, stock(x))
        with torch.no_grad():
            y = mine(x)
            assert not y.requires_grad
            assert not y.is_inference()
        both(stock, mine, x)
    mine.requires_grad_(False)
    assert not mine(x).requires_grad
    mine.weight.requires_grad_()
    y = mine(x)
    assert y.requires_grad
    y.sum().backward()
    assert mine.weight.grad is not None
    assert mine.bias.grad is None


@every_kind
def test_inference_tensor_in_grad_mode(kind):
    stock, mine = kind.pair_of(3, 4, 3)
    with torch.inference_mode():
        x = kind.x(1, 3)
    mine(kind.x(1, 3))
    with pytest.raises(RuntimeError) as wanted:
        stock(x)
    with pytest.raises(RuntimeError) as raised:
        mine(x)
    assert str(raised.value) == str(wanted.value)
    for layer in (stock, mine):
        layer.requires_grad_(False)
    torch.testing.assert_close(mine(x), stock(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoint(use_reentrant, autocast):
    from torch.utils.checkpoint import checkpoint

    results = []
    for make in (nn.Conv2d, SelectedConv2d):
        torch.manual_seed(2)
        model = nn.Sequential(make(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), make(6, 4, 3))
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            loss = y.float().square().mean()
        loss.backward()
        results.append((y.detach(), x.grad, *(p.grad for p in model.parameters())))
    # Batch norm behind a bfloat16 convolution magnifies roundings that fall the other way.
    limit = 0.05 if autocast else 1e-4
    for want, got in zip(*results, strict=True):
        if want.norm() < 1e-4:  # a bias before batch norm has no gradient but noise
            assert got.norm() < 1e-3
            continue
        assert_same(got, want, limit, "checkpoint")


@every_kind
def test_saved_tensors_hooks_and_double_backward(kind):
    stock, mine = kind.pair_of(3, 4, 3, padding=1, dtype=torch.float64)
    x = kind.x(1, 3, size=6, dtype=torch.float64)
    results = []
    for layer in (stock, mine):
        packed = []
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, p=packed: p.append(t.shape) or t.clone(), lambda t: t):
            y = layer(leaf)
        assert {x.shape, layer.weight.shape} <= set(packed)
        (grad,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
        penalty = (grad.norm(dim=1) - 1).square().mean()
        results.append((grad.detach(), *torch.autograd.grad(penalty, [layer.weight, layer.bias, leaf])))
    for want, got in zip(*results, strict=True):
        # aten computes second derivatives by transposed convolutions, whose strides are no promise of anybody's.
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@every_kind
def test_backward_twice_is_the_stock_error(kind):
    stock, mine = kind.pair_of(3, 4, 3)
    messages = []
    for layer in (stock, mine):
        y = layer(kind.x(1, 3)).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError) as raised:
            y.backward()
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@every_kind
def test_weight_changed_between_forward_and_backward(kind):
    messages = []
    for layer in kind.pair_of(3, 4, 3):
        y = layer(kind.x(1, 3).requires_grad_())
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            y.sum().backward()
        messages.append(re.sub(r"version \d+", "version", str(raised.value).split("Hint")[0]))
    assert messages[0] == messages[1]


@every_kind
def test_module_errors_are_the_stock_ones(kind):
    stock, mine = kind.pair_of(3, 4, 3)
    mine(kind.x(1, 3))
    for x in (
        kind.x(1, 2), kind.x(), *(() if kind.transposed else (kind.x(1, 3, size=2),)), torch.randn(1, 1, 3, 8, 8),
        torch.randn(1, 3, 8, 8, dtype=torch.float64), torch.ones(1, 3, 8, 8, dtype=torch.int64),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as wanted:
            stock(x)
        with pytest.raises(RuntimeError) as raised:
            mine(x)
        assert str(raised.value) == str(wanted.value)
    for x in (None, [1.0], 3):
        with pytest.raises(TypeError, match=str(kind)):
            mine(x)


# ---- tracers and compilers ----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, make=nn.Conv2d):
        super().__init__()
        self.first = make(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = make(4, 4, 3, padding=1, padding_mode="reflect", bias=False)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x)))) + x.mean()


def test_fx_symbolic_trace():
    torch.manual_seed(0)
    net = Net().eval()
    stock_graph = torch.fx.symbolic_trace(net)
    x = torch.randn(2, 3, 8, 8)
    want = net(x)
    convselect.convert(net)
    graph = torch.fx.symbolic_trace(net)
    assert [(n.op, str(n.target)) for n in graph.graph.nodes] == [
        (n.op, str(n.target)) for n in stock_graph.graph.nodes
    ]
    assert graph.first is net.first
    torch.testing.assert_close(graph(x), want)
    torch.testing.assert_close(copy.deepcopy(graph)(x), want)

    class OpensConvolutions(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return not isinstance(module, nn.Conv2d) and super().is_leaf_module(module, name)

    opened = torch.fx.GraphModule(net, OpensConvolutions().trace(net))
    assert [n.target for n in opened.graph.nodes if n.op == "call_module"] == ["norm"]
    torch.testing.assert_close(opened(x), want)


def test_fuse_conv_bn():
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    torch.manual_seed(0)
    stock, mine = pair_of(3, 4, 3, padding=1)
    norm = nn.BatchNorm2d(4)
    norm(torch.randn(8, 4, 5, 5) * 3 + 1)
    for module in (stock, mine, norm):
        module.eval()
    x = torch.randn(2, 3, 8, 8)
    fused, want = fuse_conv_bn_eval(mine, norm), fuse_conv_bn_eval(stock, norm)
    assert type(fused) is SelectedConv2d
    both(want, fused, x)
    torch.testing.assert_close(fused(x), norm(mine(x)), rtol=1e-4, atol=1e-5)


def test_jit_trace(favourite):
    torch.manual_seed(0)
    net = Net().eval()
    x, other = torch.randn(2, 3, 8, 8), torch.randn(1, 3, 9, 7)
    want = net(x), net(other)
    convselect.convert(net)
    net(x)  # with plans already made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(net, x)
    assert "aten::_convolution" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), want[0])
    torch.testing.assert_close(traced(other), want[1])


def test_jit_script(favourite):
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(2, 3, 8, 8)
    want = net(x)
    convselect.convert(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(net)
    torch.testing.assert_close(scripted(x), want)
    assert chooses(net.first)


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch.manual_seed(0)
    stock = Net()
    mine = copy.deepcopy(stock)
    convselect.convert(mine)
    mine(torch.randn(1, 3, 8, 8))
    torch._dynamo.reset()
    compiled = torch.compile(mine, backend=backend, fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    stock(torch.zeros(1, 3, 8, 8)), mine.norm.load_state_dict(stock.norm.state_dict())
    stock.eval(), mine.eval()
    both(stock, compiled, x, 1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), stock(x), rtol=1e-4, atol=1e-4)
    with convselect.use("native"):
        torch.testing.assert_close(compiled(x), stock(x), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.compile
def test_export():
    torch.manual_seed(0)
    net = Net().eval()
    x = torch.randn(2, 3, 8, 8)
    want = net(x)
    convselect.convert(net)
    net(x)
    for strict in (False, True):
        program = torch.export.export(net, (x,), strict=strict)
        assert sum("conv2d" in str(n.target) or "convolution" in str(n.target) for n in program.graph.nodes) == 2
        torch.testing.assert_close(program.module()(x), want, rtol=1e-4, atol=1e-4)


# ---- distributed --------------------------------------------------------------------------------------------------


def test_distributed_data_parallel(tmp_path, favourite):
    """World of one over gloo: same gradients as the stock model, no warning that it does not give."""
    only_once(favourite)
    out, err = python(
        f"""
        import sys, warnings
        sys.path.insert(0, {str(__file__).rsplit("/", 1)[0]!r})
        import torch, torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        import convselect
        from _parity import favouring

        dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)

        def step(selected, channels_last):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(),
                                  nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 3, stride=2))
            x = torch.randn(2, 3, 10, 10)
            if channels_last:
                model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
            if selected:
                assert len(convselect.summary(convselect.convert(model)).converted) == 4
            parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    model.zero_grad(set_to_none=False)
                    parallel(x).square().sum().backward()
            return [p.grad.clone() for p in model.parameters()], sorted(str(w.message) for w in caught)

        for favourite in (None, "native_channels_last", "im2col_gemm"):
            with favouring(favourite):
                for channels_last in (False, True):
                    want, stock_warnings = step(False, channels_last)
                    got, own_warnings = step(True, channels_last)
                    for w, g in zip(want, got):
                        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)
                    assert set(own_warnings) <= set(stock_warnings), set(own_warnings) - set(stock_warnings)
                    print("strides" in " ".join(own_warnings))
        dist.destroy_process_group()
        """
    )
    assert len(out.split()) == 6
    assert err.count("strides") <= 1, err


def test_threaded_data_parallel_replicas():
    """`nn.parallel.replicate` copies modules by their class and __dict__."""
    stock, mine = pair_of(3, 4, 3)
    replica = mine._replicate_for_data_parallel()
    replica.weight, replica.bias = mine.weight.detach(), mine.bias.detach()
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(replica(x), stock(x))
    assert type(replica) is SelectedConv2d
