"""Other tools find the same layers in a converted model as in the stock one; what is lost is noticed."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings

import fresh
import pytest
import torch
from _parity import algorithms_of, favouring
from torch import nn

import convselect
from convselect.base import warnings as own_warnings
from convselect.layer import SelectedConv2d, chooses

GEMM = "im2col_gemm"
X = torch.randn(2, 3, 9, 10, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _choose_gemm():
    with favouring(GEMM):
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.second(self.relu(self.norm(self.first(x)))))


def network(*, converted=True):
    torch.manual_seed(0)
    model = Net().eval()
    return convselect.convert(model) if converted else model


def kinds(model):
    return [type(module) for module in model.modules()]


def shown(result):
    """The names of a model's classes (those of traced models are made anew each time), or the value."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in kinds(result)] if isinstance(result, nn.Module) else result


# ---- tools of PyTorch -------------------------------------------------------------------------------------------


def _ao():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.ao.quantization as ao
        import torch.ao.quantization.quantize_fx as fx
    if "x86" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no quantised kernels")
    return ao, fx


def fx_static(model):
    ao, fx = _ao()
    prepared = fx.prepare_fx(model, ao.get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    return fx.convert_fx(prepared)


def fx_dynamic(model):
    ao, fx = _ao()
    every = ao.QConfigMapping().set_global(ao.default_dynamic_qconfig)
    return fx.convert_fx(fx.prepare_fx(model, every, (X,)))


def fx_aware_training(model):
    ao, fx = _ao()
    prepared = fx.prepare_qat_fx(model.train(), ao.get_default_qat_qconfig_mapping("x86"), (X,))
    prepared(X).sum().backward()
    assert sum("qat" in kind.__module__ for kind in kinds(prepared)) == 3
    return fx.convert_fx(prepared.eval())


def eager_static(model):
    ao, _ = _ao()
    ao.fuse_modules(model, [["first", "norm", "relu"]], inplace=True)
    whole = nn.Sequential(ao.QuantStub(), model, ao.DeQuantStub()).eval()
    whole.qconfig = ao.get_default_qconfig("x86")
    ao.prepare(whole, inplace=True)
    whole(X)
    return ao.convert(whole)


def eager_aware_training(model):
    ao, _ = _ao()
    whole = nn.Sequential(ao.QuantStub(), model, ao.DeQuantStub()).train()
    whole.qconfig = ao.get_default_qat_qconfig("x86")
    ao.prepare_qat(whole, inplace=True)
    whole(X)
    return ao.convert(whole.eval())


def fx_fuse(model):
    from torch.fx.experimental.optimization import fuse

    return fuse(model)


def fuse_conv_bn(model):
    return torch.nn.utils.fusion.fuse_conv_bn_eval(model.first, model.norm)


def weight_norm(model):
    torch.nn.utils.parametrizations.weight_norm(model.first)
    assert type(model.first).__bases__ == (nn.Conv2d,)
    torch.nn.utils.parametrize.remove_parametrizations(model.first, "weight")
    return model


def flops(model):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(X)
    return counter.get_total_flops()


def scripted(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = torch.jit.script(model)
    return whole.first.code, str(whole.first.graph).split("\n", 1)[0].split("(")[0]


def symbolic(model):
    return [(node.op, str(node.target)) for node in torch.fx.symbolic_trace(model).graph.nodes]


def loaded_with_an_allow_list(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals([Net, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Module, set]):
        return torch.load(file, weights_only=True)


# The tool -> how many layers of its result still choose; None: its result is no model.
TOOLS = {
    fx_static: 0, fx_dynamic: 3, fx_aware_training: 0, eager_static: 0, eager_aware_training: 0, fx_fuse: 3,
    fuse_conv_bn: 1, weight_norm: 3, flops: None, scripted: None, symbolic: None, loaded_with_an_allow_list: 3,
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
@pytest.mark.filterwarnings("ignore")
def test_tools_find_the_same_layers(tool):
    want, got = tool(network(converted=False)), tool(network())
    assert shown(got) == shown(want)
    if TOOLS[tool] is not None:
        assert len(convselect.summary(got).converted) == TOOLS[tool]
        if TOOLS[tool]:
            # Something was done, by the stock tool as well, and what is left computes the same, chosen.
            with torch.no_grad():
                torch.testing.assert_close(got(X), want(X), rtol=1e-4, atol=1e-4)
                assert GEMM in algorithms_of(lambda: got(X))
        else:
            assert sum("quantized" in kind.__module__ and "Conv" in kind.__name__ for kind in kinds(got)) >= 3


# ---- tools that the test environment may have ---------------------------------------------------------------------


def ptflops(model):
    """It counts modules, and calls of torch.matmul besides: those of an algorithm would count twice."""
    count = pytest.importorskip("ptflops").get_model_complexity_info
    with convselect.use("native"):
        return count(model, (3, 12, 12), as_strings=False, print_per_layer_stat=False, verbose=False)


def fvcore(model):
    return pytest.importorskip("fvcore.nn").FlopCountAnalysis(model, X).unsupported_ops_warnings(False).total()


def torchinfo(model):
    found = pytest.importorskip("torchinfo").summary(model, input_data=X, verbose=0)
    return found.total_mult_adds, found.total_params


def thop(model):
    return pytest.importorskip("thop").profile(model, (X,), verbose=False)


def opacus(model):
    pytest.importorskip("opacus")
    from opacus import GradSampleModule
    from opacus.validators import ModuleValidator

    chain = nn.Sequential(model.first, model.relu, model.second)
    assert ModuleValidator.validate(chain) == []
    samples = GradSampleModule(chain.train())
    samples(X).square().sum().backward()
    return [round(float(p.grad_sample.norm()), 2) for p in samples.parameters()]


@pytest.mark.parametrize("tool", [ptflops, fvcore, torchinfo, thop, opacus], ids=lambda tool: tool.__name__)
@pytest.mark.filterwarnings("ignore")
def test_other_tools_count_the_same(tool):
    assert tool(network()) == tool(network(converted=False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft():
    """Adapters are built from the layer's class: plain, and converted by another `convert`."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(network(), peft.LoraConfig(r=2, target_modules=["first", "last"]))
    assert len(convselect.summary(adapted).converted) == 3
    assert sum(why == "It was not converted." for why in convselect.summary(adapted).left_alone.values()) == 4
    assert len(convselect.summary(convselect.convert(adapted)).converted) == 7
    want = network(converted=False)(X)
    torch.testing.assert_close(adapted(X), want, rtol=1e-4, atol=1e-4)
    merged = adapted.merge_and_unload()
    assert kinds(merged) == kinds(network(converted=False))
    assert len(convselect.summary(merged).converted) == 3


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_quantisation_of_exported_programs():
    """It works on aten's operators: under "native" the program is stock's; otherwise there is an error, not silence."""
    tools = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    def quantised(model, policy):
        with convselect.use(policy):
            program = torch.export.export(model, (X,)).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = tools.prepare_pt2e(program, quantizer)
        prepared(X)
        return [str(node.target) for node in tools.convert_pt2e(prepared).graph.nodes]

    want = quantised(network(converted=False), "auto")
    assert sum("dequantize_per_channel" in target for target in want) == 3
    assert quantised(network(), "native") == want
    with pytest.raises(ValueError, match="not an aten conv2d"):
        quantised(network(), "auto")


@pytest.mark.compile
@pytest.mark.parametrize("how", ["default", "use", "policy"])
def test_an_export_with_operators_of_ours_warns_once(how, monkeypatch):
    monkeypatch.setattr(own_warnings, "_given", set())
    model = convselect.convert(network(converted=False), policy="auto" if how == "policy" else None)
    context = convselect.use("auto") if how == "use" else contextlib.nullcontext()
    with context, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", convselect.ConvselectWarning)
        for _ in range(2):
            program = torch.export.export(model, (X,))
    assert any("convselect" in str(node.target) for node in program.graph.nodes)
    own = [str(one.message) for one in told if issubclass(one.category, convselect.ConvselectWarning)]
    assert len(own) == (how == "default")
    assert all('use("native")' in message for message in own)


# ---- re-parametrisation --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A block that is trained with two branches and deployed with one new convolution, as RepVGG's and MobileOne's."""

    def __init__(self):
        super().__init__()
        self.wide, self.point, self.deployed = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1), None

    def forward(self, x):
        return self.wide(x) + self.point(x) if self.deployed is None else self.deployed(x)

    def reparameterize(self):
        self.deployed = nn.Conv2d(3, 3, 3, padding=1)
        with torch.no_grad():
            self.deployed.weight.copy_(self.wide.weight + nn.functional.pad(self.point.weight, (1, 1, 1, 1)))
            self.deployed.bias.copy_(self.wide.bias + self.point.bias)
        del self.wide, self.point


def test_layers_that_replace_converted_ones_are_noticed_and_converted_by_another_call():
    model = convselect.convert(nn.Sequential(Branches(), nn.Conv2d(3, 4, 1)), policy=GEMM)
    want = model(X)
    model[0].reparameterize()
    report = convselect.summary(model)
    assert (report.converted, list(report.left_alone)) == ({"1": GEMM}, ["0.deployed"])
    assert "1 convolutions converted, 1 left alone" in str(report)
    assert convselect.summary(convselect.convert(model)).converted == {"0.deployed": None, "1": GEMM}
    torch.testing.assert_close(model(X), want, rtol=1e-4, atol=1e-4)


# ---- copies, pickles, replicas ------------------------------------------------------------------------------------


def test_whatever_copies_the_dictionary_gets_a_layer_of_its_own():
    layer = convselect.convert(nn.Conv2d(3, 4, 3))
    twin = nn.Conv2d.__new__(nn.Conv2d)
    twin.__dict__.update(layer.__dict__)
    replica = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight.detach() * 2, layer.bias.detach()
    for one, stride, weight in (
        (copy.copy(layer), 2, layer.weight), (twin, 2, layer.weight), (replica, 1, replica.weight),
        (copy.deepcopy(layer), 2, layer.weight), (pickle.loads(pickle.dumps(layer)), 2, layer.weight),
    ):  # fmt: skip
        one.stride = stride
        assert chooses(one)
        assert algorithms_of(lambda one=one: one(X)) == [GEMM]
        torch.testing.assert_close(one(X), nn.functional.conv2d(X, weight, layer.bias, stride), rtol=1e-4, atol=1e-5)
    assert layer.stride == (1, 1)
    del layer, twin, replica


def test_a_pickle_names_nothing_of_ours_and_is_converted_where_this_package_is_imported(tmp_path):
    torch.save(convselect.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), policy=GEMM), tmp_path / "model.pt")
    code = f"""
import sys
import torch
from torch import nn

allowed = [nn.Sequential, nn.Conv2d, nn.Module, set]
with torch.serialization.safe_globals(allowed):
    model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=True)
x = torch.randn(1, 3, 8, 8)
want = model(x)
assert not any(name.startswith("convselect") for name in sys.modules)
import convselect
assert convselect.summary(model).converted == {{"0": {GEMM!r}}}
torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
"""
    fresh.run(["-c", code], check=True)


def test_pickles_of_earlier_versions_load():
    """They name the class that converting gave a layer then."""
    old = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
    want = old(X)
    for layer in old:
        layer.__class__ = SelectedConv2d
    old[1].policy = "native"
    stored = pickle.dumps(old)
    assert b"SelectedConv2d" in stored
    model = pickle.loads(stored)
    assert convselect.summary(convselect.convert(model)).converted == {"0": None, "1": "native"}
    torch.testing.assert_close(model(X), want, rtol=1e-4, atol=1e-4)
    assert algorithms_of(lambda: model[0](X)) == [GEMM]
    assert kinds(convselect.revert(model)) == [nn.Sequential, nn.Conv2d, nn.Conv2d]
    assert [layer.__dict__.keys() for layer in model] == [nn.Conv2d(1, 1, 1).__dict__.keys()] * 2
    assert convselect.summary(convselect.convert(model)).converted == {"0": None, "1": None}


# ---- what nn.Conv2d.forward does now ------------------------------------------------------------------------------


def test_a_convolution_of_somebody_else_is_called():
    """On the instance, as tiling for diffusion models puts it there, or in a class that a layer is given."""

    class Doubled(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return 2 * super()._conv_forward(input, weight, bias)

    layer = convselect.convert(nn.Conv2d(3, 4, 3))
    want = nn.functional.conv2d(X, layer.weight, layer.bias)
    layer._conv_forward = lambda input, weight, bias: -nn.functional.conv2d(input, weight, bias)
    torch.testing.assert_close(layer(X), -want)
    del layer._conv_forward
    assert algorithms_of(lambda: layer(X)) == [GEMM]
    layer.__class__ = Doubled
    torch.testing.assert_close(layer(X), 2 * want)
    assert convselect.summary(layer).converted == {}


def test_a_forward_that_somebody_else_put_into_the_class_is_called():
    code = """
import torch
from torch import nn

stock, calls = nn.Conv2d.forward, []
def forward(self, input):
    calls.append(self)
    return stock(self, input)
nn.Conv2d.forward = forward
import convselect
plain, ours = nn.Conv2d(1, 1, 1), convselect.convert(nn.Conv2d(1, 1, 1))
x = torch.randn(1, 1, 4, 4)
torch.testing.assert_close(plain(x), torch.conv2d(x, plain.weight, plain.bias))
torch.testing.assert_close(ours(x), torch.conv2d(x, ours.weight, ours.bias))
assert calls == [plain]
"""
    fresh.run(["-c", code], check=True)


def test_plain_layers_run_as_before_and_the_stock_forward_is_the_one_repeated():
    stock = nn.Conv2d.forward.__wrapped__
    assert nn.Conv2d.forward.__code__.co_names[0] == "_convselect"  # and not `around_another`
    plain = nn.Conv2d(3, 4, 3)
    assert algorithms_of(lambda: plain(X)) == []
    assert torch.equal(plain(X), stock(plain, X))
    with convselect.enabled():
        assert algorithms_of(lambda: plain(X)) == [GEMM]


def test_an_attribute_of_that_name_is_not_taken_for_a_policy():
    taken, named = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    taken.policy, named.policy = {"bits": 8}, "native"
    report = convselect.summary(convselect.convert(nn.ModuleList([taken, named])))
    assert report.converted == {"1": "native"}
    assert "attribute" in report.left_alone["0"]
    assert convselect.revert(taken).policy == {"bits": 8}


@pytest.mark.compile
def test_compiled_calls_notice_what_becomes_of_a_layer():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    seen = []

    def call():
        torch.testing.assert_close(compiled(X), block(X), rtol=1e-4, atol=1e-5)
        seen.append(counter.frame_count)

    call()
    convselect.convert(block)
    call()
    call()
    block[0].policy = "native"
    call()
    block[0]._conv_forward = lambda input, weight, bias: input[:, :1]
    call()
    del block[0]._conv_forward
    convselect.revert(block)
    call()
    torch._dynamo.reset()
    assert seen == [1, 2, 2, 3, 4, 4]


@pytest.mark.compile
@pytest.mark.parametrize("converted", [False, True])
def test_equal_blocks_share_their_graphs(converted):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return x + self.conv(x)

    blocks, counter = nn.Sequential(*(Block() for _ in range(9))), CompileCounter()
    if converted:
        convselect.convert(blocks)
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    blocks(X)
    torch._dynamo.reset()
    assert counter.frame_count == 2  # the first input requires no gradient, as in stock PyTorch
