"""`convert` and `revert`: in place, by class, nothing else touched."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from _parity import OTHER, favouring
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import convselect
from convselect import SelectedConv2d


@pytest.fixture(params=[None, OTHER], autouse=True)
def favourite(request):
    with favouring(request.param):
        yield request.param


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Block(4), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten(1))


def input_():
    return torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(1))


def state_of(model):
    """Everything of every module that converting must not touch: which objects it holds, under which names."""

    def held(value):
        return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else id(value)

    return [(id(m), [(name, held(value)) for name, value in m.__dict__.items()]) for m in model.modules()]


def test_only_classes_change():
    model = small_net()
    x, before, want = input_(), state_of(model), small_net()(input_())
    report = convselect.convert(model)
    assert report.converted == ("0", "1.conv", "2")
    assert report.left_alone == {}
    assert [type(m) for m in (model[0], model[1].conv, model[2])] == [SelectedConv2d] * 3
    assert state_of(model) == before
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert repr(model) == repr(small_net()).replace("Conv2d", "SelectedConv2d")


def test_revert_restores_everything():
    model = small_net()
    before, text = state_of(model), repr(model)
    convselect.convert(model, policy=OTHER)
    assert "policy" in model[0].__dict__
    assert convselect.revert(model) == 3
    assert [type(m) for m in (model[0], model[1].conv, model[2])] == [nn.Conv2d] * 3
    assert state_of(model) == before
    assert repr(model) == text
    assert convselect.revert(model) == 0
    assert convselect.convert(model).converted == ("0", "1.conv", "2")


def test_twice():
    model = small_net()
    convselect.convert(model, where=lambda name, module: name == "0")
    assert type(model[2]) is nn.Conv2d
    report = convselect.convert(model)
    assert report.converted == ("1.conv", "2")
    assert report.left_alone == {"0": "chooses already"}
    again = convselect.convert(model)
    assert again.converted == ()
    assert set(again.left_alone) == {"0", "1.conv", "2"}


def test_a_bare_layer():
    layer = nn.Conv2d(3, 4, 3)
    weight = layer.weight
    assert convselect.convert(layer).converted == ("",)
    assert type(layer) is SelectedConv2d
    assert layer.weight is weight
    assert "(the model itself)" in str(convselect.convert(layer))
    assert convselect.revert(layer) == 1
    assert type(layer) is nn.Conv2d


def test_no_convolutions():
    report = convselect.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert report.converted == ()
    assert report.left_alone == {}
    assert "0 convolutions converted" in str(report)


def test_where_sees_names_and_layers():
    model = small_net()
    seen = []

    def depthwise(name, layer):
        seen.append((name, type(layer)))
        return layer.groups > 1

    report = convselect.convert(model, where=depthwise)
    assert seen == [("0", nn.Conv2d), ("1.conv", nn.Conv2d), ("2", nn.Conv2d)]
    assert report.converted == ("2",)
    assert set(report.left_alone) == {"0", "1.conv"}
    assert all("where" in reason for reason in report.left_alone.values())


def test_policy():
    model = small_net()
    convselect.convert(model, policy="im2col_gemm")
    assert {m.policy for m in model.modules() if isinstance(m, SelectedConv2d)} == {"im2col_gemm"}
    assert SelectedConv2d.policy is None
    torch.testing.assert_close(model(input_()), small_net()(input_()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="unknown policy 'fastest'"):
        convselect.convert(small_net(), policy="fastest")
    untouched = small_net()
    with pytest.raises(ValueError, match="unknown policy"):
        convselect.convert(untouched, policy="fastest")
    assert type(untouched[0]) is nn.Conv2d


@pytest.mark.parametrize("wrong", [None, torch.randn(2), [nn.Conv2d(1, 1, 1)], nn.Conv2d, lambda x: x])
def test_only_modules(wrong):
    for function in (convselect.convert, convselect.revert):
        with pytest.raises(TypeError, match=r"nn\.Module"):
            function(wrong)


# ---- sharing ------------------------------------------------------------------------------------------------------


def test_shared_modules_are_converted_once():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = input_()
    want = model(x)
    report = convselect.convert(model)
    assert report.converted == ("0",)
    assert model[0] is model[2] is shared
    assert type(shared) is SelectedConv2d
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert convselect.revert(model) == 1
    assert type(shared) is nn.Conv2d


def test_tied_weights_stay_tied():
    first, second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=2, dilation=2)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight
    convselect.convert(model)
    assert model[0].weight is model[1].weight
    x = input_()
    for m in (model, twin):
        m(x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad, rtol=1e-4, atol=1e-4)
    assert len(list(model.parameters())) == 3


def test_hooks_survive():
    model = small_net()
    calls = []
    model[0].register_forward_hook(lambda m, a, y: calls.append("forward"))
    model[0].register_forward_pre_hook(lambda m, a: calls.append("pre"))
    model[0].register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    model[0].weight.register_hook(lambda g: calls.append("weight"))
    model[0].register_state_dict_post_hook(lambda *a: calls.append("state"))
    convselect.convert(model)
    model(input_()).sum().backward()
    model.state_dict()
    assert sorted(calls) == ["backward", "forward", "pre", "state", "weight"]


def test_optimizer_and_average_go_on():
    """An optimizer made before converting, its momentum, and a weight average copied after it."""

    def train(convert_at):
        model = small_net()
        head = nn.Linear(4 * 25, 3)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01)
        torch.manual_seed(2)
        nn.init.normal_(head.weight, std=0.1)
        losses, average = [], None
        for step in range(6):
            if step == convert_at:
                convselect.convert(model)
                average = torch.optim.swa_utils.AveragedModel(model)
                assert type(average.module[0]) is SelectedConv2d
                assert average.module[0].weight is not model[0].weight
            loss = nn.functional.cross_entropy(head(model(input_())), torch.tensor([0, 2]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if average is not None:
                average.update_parameters(model)
                average(input_())
        assert convert_at is None or len(optimizer.state) == len(list(model.parameters())) + 2
        return losses

    want = train(None)
    assert want[-1] < want[0]
    for convert_at in (0, 3):
        assert train(convert_at) == pytest.approx(want, rel=1e-3)


def test_a_deep_copy_is_independent():
    model = small_net()
    convselect.convert(model, policy="native")
    twin = copy.deepcopy(model)
    convselect.revert(model)
    assert type(twin[0]) is SelectedConv2d
    assert twin[0].policy == "native"
    torch.testing.assert_close(twin(input_()), model(input_()))


# ---- left alone ---------------------------------------------------------------------------------------------------


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class OwnConvForward(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight * 2, bias)


class NothingOfItsOwn(nn.Conv2d):
    pass


def test_what_is_left_alone_and_why():
    qat = pytest.importorskip("torch.ao.nn.qat")
    from torch.ao.quantization import get_default_qat_qconfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {
            "own_forward": (OwnForward(3, 4, 3), "subclass"),
            "own_conv_forward": (OwnConvForward(3, 4, 3), "subclass"),
            "nothing_of_its_own": (NothingOfItsOwn(3, 4, 3), "subclass"),
            "lazy": (nn.LazyConv2d(4, 3), "lazy"),
            "transposed": (nn.ConvTranspose2d(3, 4, 3), "transposed"),
            "transposed_lazy": (nn.LazyConvTranspose2d(3, 4), "transposed"),
            "one_d": (nn.Conv1d(3, 4, 3), "Conv1d"),
            "three_d": (nn.Conv3d(3, 4, 3), "Conv3d"),
            "qat": (qat.Conv2d(3, 4, 3, qconfig=get_default_qat_qconfig("x86")), "subclass"),
            "quantized": (torch.ao.nn.quantized.Conv2d(3, 4, 3), "quantised"),
            "linear": (nn.Linear(3, 4), None),
            "pool": (nn.MaxPool2d(2), None),
        }
    model = nn.ModuleDict({name: module for name, (module, _) in modules.items()})
    model["plain"] = nn.Conv2d(3, 4, 3)
    kinds = {name: type(module) for name, module in model.items()}
    report = convselect.convert(model)
    assert report.converted == ("plain",)
    expected = {name: word for name, (_, word) in modules.items() if word is not None}
    assert set(report.left_alone) == set(expected)
    for name, word in expected.items():
        assert word in report.left_alone[name], (name, report.left_alone[name])
        assert name in str(report)
        assert report.left_alone[name] in str(report)
    assert {name: type(module) for name, module in model.items() if name != "plain"} == {
        name: kind for name, kind in kinds.items() if name != "plain"
    }
    x = input_()
    own = model["own_forward"]
    torch.testing.assert_close(own(x), 2 * nn.functional.conv2d(x, own.weight, own.bias))


def test_lazy_layers_convert_after_their_first_call():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    assert "lazy" in convselect.convert(model).left_alone["0"]
    x = input_()
    want = model(x)
    assert convselect.convert(model).converted == ("0",)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


# ---- parametrized -------------------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrized_layers():
    x = input_()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[0], "weight", Halved())
    parametrize.register_parametrization(model[0], "bias", Halved())
    want, keys = model(x), list(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    assert convselect.convert(model).converted == ("0", "1")
    assert isinstance(model[0], SelectedConv2d)
    assert parametrize.is_parametrized(model[0], "weight")
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == ids
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert convselect.convert(model).left_alone == {"0": "chooses already", "1": "chooses already"}
    with parametrize.cached():
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(model)
    assert isinstance(twin[0], SelectedConv2d)
    torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())

    # Back, with the parametrizations still on it ...
    assert convselect.revert(twin) == 2
    assert not isinstance(twin[0], SelectedConv2d)
    assert type(twin[0]).__bases__ == (nn.Conv2d,)
    assert type(twin[0]).__name__ == "ParametrizedConv2d"
    torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)
    assert convselect.convert(twin).converted == ("0", "1")
    convselect.revert(twin)
    parametrize.remove_parametrizations(twin[0], "weight")
    parametrize.remove_parametrizations(twin[0], "bias")
    assert type(twin[0]) is nn.Conv2d
    torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)

    # ... or after they were taken off.
    parametrize.remove_parametrizations(model[0], "weight")
    parametrize.remove_parametrizations(model[0], "bias")
    assert type(model[0]) is SelectedConv2d
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert convselect.revert(model) == 2
    assert type(model[0]) is nn.Conv2d


def test_parametrizations_put_on_after_converting():
    """The class that `parametrize` makes then has ours for its base; reverting must still find its way."""
    x = input_()
    layer = nn.Conv2d(3, 4, 3)
    convselect.convert(layer)
    parametrize.register_parametrization(layer, "weight", Halved())
    want = layer(x)
    assert convselect.revert(layer) == 1
    assert not isinstance(layer, SelectedConv2d)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Conv2d


def test_subclasses_of_ours_are_not_reverted():
    class Mine(SelectedConv2d):
        pass

    layer = Mine(3, 4, 3)
    assert convselect.revert(nn.Sequential(layer)) == 0
    assert type(layer) is Mine
    assert convselect.convert(nn.Sequential(layer)).left_alone == {"0": "chooses already"}


# ---- compiled and scripted ----------------------------------------------------------------------------------------


@pytest.mark.compile
def test_compiled_and_scripted_models_still_run():
    model = small_net().eval()
    x = input_()
    want = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), want)
    report = convselect.convert(compiled)
    assert len(report.converted) == 3
    assert type(model[0]) is SelectedConv2d
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    convselect.revert(compiled)
    torch.testing.assert_close(compiled(x), want)
    torch._dynamo.reset()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)
    for module in (scripted, traced):
        assert convselect.convert(module).converted == ()
        torch.testing.assert_close(module(x), want)
    mixed = nn.Sequential(scripted, nn.Unflatten(1, (4, 25)), nn.Unflatten(2, (5, 5)), nn.Conv2d(4, 2, 1))
    before = mixed(x)
    assert convselect.convert(mixed).converted == ("3",)
    torch.testing.assert_close(mixed(x), before, rtol=1e-4, atol=1e-5)


def test_fx_graph_modules():
    graph = torch.fx.symbolic_trace(small_net().eval())
    x = input_()
    want = graph(x)
    assert convselect.convert(graph).converted == ("0", "1.conv", "2")
    torch.testing.assert_close(graph(x), want, rtol=1e-4, atol=1e-5)
    graph.recompile()
    torch.testing.assert_close(graph(x), want, rtol=1e-4, atol=1e-5)
