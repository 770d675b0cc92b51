"""1-D and transposed layers in models: `convert`, `revert`, `enabled`, `summary`, `explain`, graphs; and small networks
of the kinds that have them."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from _parity import OTHER, algorithms_of, assert_same, bound, favouring
from kinds import KINDS, NEW, TRANSPOSED1D, TRANSPOSED2D
from race import racing
from torch import nn

import convselect
from convselect import NotApplicable
from convselect.base.problem import Direction
from convselect.eager import resolve
from convselect.layer import chooses

GEMM = "im2col_gemm"
LIMIT = 4 * bound(torch.float32, GEMM)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
TRANSPOSED = pytest.mark.parametrize("kind", [TRANSPOSED1D, TRANSPOSED2D], ids=str)


@pytest.fixture(autouse=True)
def _choose_gemm():
    with favouring(GEMM):
        yield


# ---- convert, revert ------------------------------------------------------------------------------------------------


@every_kind
def test_a_mark_and_nothing_else(kind):
    layer = kind.stock(3, 4, 3, stride=2)
    x = kind.x(2, 3)
    want, before, text = layer(x), dict(layer.__dict__), repr(layer)
    assert algorithms_of(lambda: layer(x)) == []
    assert convselect.convert(layer) is layer
    assert type(layer) is kind.stock
    assert chooses(layer)
    assert layer.__dict__ == {**before, "_convselect": True, "policy": None}
    assert repr(layer) == f"{text[:-1]}, convselect)"
    assert algorithms_of(lambda: layer(x)) == [GEMM]
    assert_same(layer(x).detach(), want.detach(), LIMIT, "converted")
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert chooses(twin)
        assert algorithms_of(lambda twin=twin: twin(x)) == [GEMM]
    assert convselect.revert(layer) is layer
    assert layer.__dict__ == before
    assert repr(layer) == text
    assert torch.equal(layer(x), want)


@every_kind
def test_built_layers_become_plain_ones(kind):
    layer = kind.selected(3, 4, 3, policy="native")
    assert convselect.summary(layer).converted == {"": "native"}
    assert type(convselect.revert(layer)) is kind.stock
    assert "policy" not in layer.__dict__
    parametrised = torch.nn.utils.parametrizations.weight_norm(kind.selected(3, 4, 3))
    convselect.revert(parametrised)
    assert isinstance(parametrised, kind.stock)
    assert not isinstance(parametrised, kind.selected)
    assert convselect.summary(convselect.convert(parametrised)).converted == {"": None}


@every_kind
def test_policies_of_layers(kind):
    kernel = 3 if kind.dimensions < 3 else (3, 1, 1)  # those of volumes that fft takes: along the depth
    layer = convselect.convert(kind.stock(3, 4, kernel), policy="fft")
    x = kind.x(1, 3)
    assert algorithms_of(lambda: layer(x)) == ["fft"]
    layer.policy = "native"
    assert algorithms_of(lambda: layer(x)) == []
    layer.policy, layer.stride = "fft", (2,) * kind.dimensions
    with pytest.raises(NotApplicable, match="stride 1" if kind.dimensions < 3 else "images"):
        layer(x)


@TRANSPOSED
def test_output_sizes_and_errors_of_transposed_layers(kind):
    stock, mine = kind.pair_of(3, 4, 3, stride=2)
    converted = convselect.convert(copy.deepcopy(stock))
    x = kind.x(2, 3, size=5)
    for size in (11, 12):
        sizes = [size] * kind.dimensions
        want = stock(x, output_size=sizes)
        for layer in (mine, converted):
            for given in (sizes, (2, 4, *sizes), torch.Size(sizes)):
                assert algorithms_of(lambda layer=layer, given=given: layer(x, given)) == [GEMM]
                assert_same(layer(x, given).detach(), want.detach(), LIMIT, "output_size")
    for wrong in ([10] * kind.dimensions, [13] * kind.dimensions, [11]):
        if wrong == [11] and kind.dimensions == 1:
            continue
        with pytest.raises(ValueError, match=r"output_size|output size") as raised:
            stock(x, wrong)
        for layer in (mine, converted):
            with pytest.raises(ValueError, match=r"output_size|output size") as own:
                layer(x, wrong)
            assert str(own.value) == str(raised.value)
    for layer in (stock, mine, converted):
        layer.padding_mode = "circular"
        with pytest.raises(ValueError, match="Only `zeros` padding mode"):
            layer(x)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_padding_modes_in_one_dimension(mode):
    for padding in (2, "same"):
        stock = nn.Conv1d(3, 4, 4, padding=padding, padding_mode=mode)
        mine = convselect.convert(copy.deepcopy(stock))
        for x in (torch.randn(2, 3, 9), torch.randn(3, 9), torch.randn(2, 9, 3).transpose(1, 2)):
            assert algorithms_of(lambda mine=mine, x=x: mine(x)) == [GEMM]
            assert_same(mine(x).detach(), stock(x).detach(), LIMIT, f"{mode} {padding}")


# ---- enabled --------------------------------------------------------------------------------------------------------


@every_kind
def test_functions_choose_where_it_is_enabled(kind):
    (x, weight, bias), arguments = kind.operands("stride")
    want = kind.native(x, weight, bias, **arguments)
    layer = kind.stock(3, 4, 3)
    with convselect.enabled():
        for call in (
            lambda: kind.native(x, weight, bias, **arguments),
            lambda: kind.native(input=x, weight=weight, **arguments),
            lambda: layer(kind.x(2, 3)),
            lambda: kind.ours(x, weight, bias, **arguments),
        ):
            assert algorithms_of(call) == [GEMM]
        assert_same(kind.native(x, weight, bias, **arguments), want, LIMIT, "enabled")
        for wrong in (lambda: kind.native(x), lambda: kind.native(x, weight, policy="native")):
            with pytest.raises(TypeError):
                wrong()
    with convselect.enabled("native"):
        assert torch.equal(kind.native(x, weight, bias, **arguments), want)
    assert algorithms_of(lambda: kind.native(x, weight, bias, **arguments)) == []


# ---- summary, explain -----------------------------------------------------------------------------------------------


@every_kind
def test_what_is_explained_is_what_runs(kind):
    layer = convselect.convert(kind.stock(4, 8, 3, stride=2, padding=1, dilation=2))
    x = kind.x(2, 4, size=12).requires_grad_()
    found = convselect.explain(layer, x)
    convselect.clear()
    y = layer(x)
    y.backward(torch.randn_like(y))
    ran = {(str(p), entry.found.algorithm) for (p, _), entry in resolve.choices.entries.items()}
    assert {(str(row.problem), row.algorithm) for row in found} == ran
    own = Direction.BACKWARD_DATA if kind.transposed else Direction.FORWARD
    assert next(row.direction for row in found) == own
    assert {row.direction for row in found} == set(Direction)
    with torch.no_grad():
        assert len(convselect.explain(layer, x)) == 1
    report = convselect.summary(layer)
    assert {choice.problem.direction for choice in report.predicted} == set(Direction)
    assert all(choice.layers == ("",) for choice in report.predicted)


@TRANSPOSED
def test_an_output_size_is_explained(kind):
    layer, x = kind.stock(4, 8, 3, stride=2), kind.x(2, 4, size=5)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = layer

        def forward(self, x, **more):
            return self.up(x, **more)

    for size in (11, 12):
        (row, _) = convselect.explain(Decoder(), x, output_size=[size] * kind.dimensions)
        assert row.problem.W - size == 0


def test_a_store_of_2d_choices_serves_the_others(tmp_path):
    """A store knows problems, and neither layers nor dimensions."""
    x, weight = torch.randn(2, 4, 1, 40), torch.randn(6, 4, 1, 3)
    with racing(tmp_path / "store.sqlite"), torch.no_grad():
        for _ in range(80):
            convselect.conv2d(x, weight, None, (1, 1), (0, 1))
        (entry,) = resolve.choices.entries.values()
        assert entry.found.choice.source == "verify"
        convselect.clear()
        convselect.conv1d(x.squeeze(2), weight.squeeze(2), None, 1, 1)
        (entry,) = resolve.choices.entries.values()
        choice = getattr(entry.found, "choice", entry.found)
        assert choice.source == "store"


# ---- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@every_kind
@pytest.mark.parametrize("policy", [None, "native", GEMM])
def test_compiled_without_a_break(kind, policy):
    torch._dynamo.reset()
    layer = convselect.convert(kind.stock(3, 4, 3, stride=2), policy=policy)
    x = kind.x(2, 3).requires_grad_()
    want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    assert_same(y.detach(), layer(x).detach(), LIMIT, "compiled")
    for got, stock in zip(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), want, strict=True):
        assert_same(got, stock, LIMIT, "gradient")
    function = torch.compile(lambda x: kind.ours(x, layer.weight, stride=2), backend="aot_eager", fullgraph=True)
    assert_same(function(x).detach(), kind.native(x, layer.weight, stride=2).detach(), LIMIT, "function")
    torch._dynamo.reset()


@pytest.mark.compile
@every_kind
def test_exported(kind):
    layer = convselect.convert(kind.stock(3, 4, 3, stride=2)).eval()
    x = kind.x(2, 3)
    for strict in (False, True):
        program = torch.export.export(layer, (x,), strict=strict)
        assert_same(program.module()(x).detach(), layer(x).detach(), LIMIT, "exported")
        names = {str(node.target) for node in program.graph.nodes}
        assert f"convselect.{kind.name.replace('1d', '2d')}.default" in names


@pytest.mark.compile
@every_kind
def test_enabled_inside_a_compiled_function(kind):
    torch._dynamo.reset()
    (x, weight, bias), arguments = kind.operands("stride")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        with convselect.enabled():
            return kind.native(x, weight, bias, **arguments)

    assert_same(compiled(x), kind.native(x, weight, bias, **arguments), LIMIT, "compiled")
    torch._dynamo.reset()


@every_kind
def test_scripted_traced_and_fx(kind):
    for layer in (convselect.convert(kind.stock(3, 4, 3, stride=2)), kind.selected(3, 4, 3, stride=2)):
        model, x = nn.Sequential(layer, nn.ReLU()), kind.x(2, 3)
        want = model(x).detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same(torch.jit.script(model)(x).detach(), want, LIMIT, "scripted")
            assert_same(torch.jit.trace(model, x)(x).detach(), want, LIMIT, "traced")
        graph = torch.fx.symbolic_trace(model)
        assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
        assert algorithms_of(lambda graph=graph, x=x: graph(x)) == [GEMM]


# ---- networks -------------------------------------------------------------------------------------------------------


def generator():
    """DCGAN's, small."""
    layers: list[nn.Module] = []
    for channels, out, stride, padding in ((8, 16, 1, 0), (16, 12, 2, 1), (12, 8, 2, 1)):
        layers += [
            nn.ConvTranspose2d(channels, out, 4, stride, padding, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(True),
        ]
    return nn.Sequential(*layers, nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh()), torch.randn(2, 8, 1, 1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        side = self.down(x)
        return self.last(torch.cat([side, self.up(self.deep(side))], 1))


class Conformer(nn.Module):
    """Its convolution module, and the two layers in front of Whisper's encoder."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(10, 12, 3, padding=1)
        self.second = nn.Conv1d(12, 12, 3, stride=2, padding=1)
        self.wide = nn.Conv1d(12, 24, 1)
        self.depthwise = nn.Conv1d(12, 12, 15, padding="same", groups=12)
        self.norm = nn.BatchNorm1d(12)
        self.back = nn.Conv1d(12, 12, 1)

    def forward(self, x):
        x = F.gelu(self.second(F.gelu(self.first(x)))).transpose(1, 2)
        inner = F.glu(self.wide(x.transpose(1, 2)), dim=1)
        return x + self.back(F.silu(self.norm(self.depthwise(inner)))).transpose(1, 2)


def vocoder():
    """HiFi-GAN's upsampling, with weight normalisation."""
    norm = torch.nn.utils.parametrizations.weight_norm
    layers = [
        nn.Conv1d(8, 16, 7, padding=3), norm(nn.ConvTranspose1d(16, 8, 16, 8, padding=4)), nn.LeakyReLU(0.1),
        norm(nn.Conv1d(8, 8, 3, dilation=3, padding=3)), nn.LeakyReLU(0.1),
        norm(nn.ConvTranspose1d(8, 4, 4, 2, padding=1)), nn.LeakyReLU(0.1), nn.Conv1d(4, 1, 7, padding=3), nn.Tanh(),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.randn(2, 8, 9)


class VolumeUNet(nn.Module):
    """nnU-Net's shape: a strided stage, instance norm, a transposed convolution and a skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01))
        self.down = nn.Sequential(nn.Conv3d(8, 16, 3, 2, 1), nn.InstanceNorm3d(16, affine=True), nn.LeakyReLU(0.01))
        self.up = nn.ConvTranspose3d(16, 8, 2, 2)
        self.back = nn.Conv3d(16, 8, 3, padding=1)
        self.head = nn.Conv3d(8, 3, 1)

    def forward(self, x):
        first = self.first(x)
        return self.head(F.leaky_relu(self.back(torch.cat([first, self.up(self.down(first))], 1)), 0.01))


def video():
    """R(2+1)D: slices, then along the time."""
    layers = [
        nn.Conv3d(3, 10, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(10), nn.ReLU(),
        nn.Conv3d(10, 12, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(12), nn.ReLU(),
        nn.Conv3d(12, 14, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False), nn.BatchNorm3d(14), nn.ReLU(),
        nn.Conv3d(14, 16, (3, 1, 1), (2, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(16), nn.ReLU(),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.randn(2, 3, 6, 16, 20)


NETWORKS = {
    "DCGAN": generator,
    "volumes": lambda: (VolumeUNet(), torch.randn(1, 1, 6, 10, 12)),
    "video": video,
    "U-Net": lambda: (UNet(), torch.randn(2, 3, 16, 20)),
    "Conformer": lambda: (Conformer(), torch.randn(2, 10, 30)),
    "vocoder": vocoder,
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("favourite", [None, GEMM, OTHER, "fft"])
def test_networks_give_the_same_results_and_gradients(network, favourite):
    torch.manual_seed(1)
    stock, x = NETWORKS[network]()
    mine = convselect.convert(copy.deepcopy(stock))
    count = sum(isinstance(m, tuple(kind.stock for kind in KINDS)) for m in stock.modules())
    assert len(convselect.summary(mine).converted) == count > 3
    with favouring(favourite):
        for training in (True, False):
            results = []
            for model in (stock, mine):
                model.train(training)
                leaf = x.clone().requires_grad_()
                y = model(leaf)
                results.append((y.detach(), *torch.autograd.grad(y.square().mean(), [leaf, *model.parameters()])))
            for want, got in zip(*results, strict=True):
                if want.norm() > 1e-5:  # a bias before batch norm has no gradient but noise
                    assert_same(got, want, 1e-3, network)


def test_a_named_algorithm_is_not_frozen_away():
    model = convselect.convert(UNet().eval())
    model.up.policy = GEMM
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        convselect.freeze(model, x)
        assert GEMM in algorithms_of(lambda: model(x))
    assert f"the policy of up asks for {GEMM}" in convselect.summary(model).not_fused[""]


@pytest.mark.parametrize("network", [name for name in NETWORKS if name not in ("volumes", "video")])
def test_networks_are_frozen(network):
    model, x = NETWORKS[network]()
    model.eval()
    with torch.no_grad():
        want = model(x)
        convselect.freeze(convselect.convert(model), x)
        torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-4)
    report = convselect.summary(model)
    new = {name for name, module in model.named_modules() if isinstance(module, tuple(kind.stock for kind in NEW))}
    assert new <= report.converted.keys()
    assert report.frozen == ("",)
    assert new <= report.fused.keys() | report.merged.keys()
