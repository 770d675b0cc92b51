"""`convert` and `revert`: in place, by a mark, nothing else touched; and what `summary` says of it."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import pickle
import re
import warnings

import pytest
import torch
from _parity import OTHER, favouring
from race import GAINS, PREDICTED, QUICK, SLOW, racing
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import convselect
from convselect import SelectedConv2d
from convselect.base.problem import ConvProblem, Direction
from convselect.choice import budgets, trial
from convselect.choice.choose import Choice
from convselect.choice.outcome import Measured
from convselect.eager import live_trial, resolve
from convselect.layer import chooses

ADDED = {"_convselect": True, "policy": None}  # to a converted layer's __dict__: plain data, since pickles have it


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


def converted(model):
    """Names of the layers that choose, after converting what there is to convert."""
    return list(convselect.summary(convselect.convert(model)).converted)


def state_of(model):
    """Everything of every module that converting must not touch: which objects it holds, under which names."""

    def held(value):
        return [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else id(value)

    return [(id(m), [(name, held(value)) for name, value in m.__dict__.items()]) for m in model.modules()]


def test_only_marks_are_added():
    model = small_net()
    x, before, want = input_(), state_of(model), small_net()(input_())
    assert convselect.convert(model) is model
    report = convselect.summary(model)
    assert report.converted == {"0": None, "1.conv": None, "2": None}
    assert report.left_alone == {}
    assert [type(m) for m in (model[0], model[1].conv, model[2])] == [nn.Conv2d] * 3
    assert all(layer.__dict__.items() >= ADDED.items() for layer in (model[0], model[1].conv, model[2]))
    after = [(i, [(name, held) for name, held in items if name not in ADDED]) for i, items in state_of(model)]
    assert after == before
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    assert repr(model) == re.sub(r"(Conv2d.*)\)", r"\1, convselect)", repr(small_net()))
    assert "policy='native')" in repr(convselect.convert(small_net(), policy="native"))


def test_revert_restores_everything():
    model = small_net()
    before, text = state_of(model), repr(model)
    convselect.convert(model, policy=OTHER)
    assert "policy" in model[0].__dict__
    assert convselect.revert(model) is model
    assert [type(m) for m in (model[0], model[1].conv, model[2])] == [nn.Conv2d] * 3
    assert state_of(model) == before
    assert repr(model) == text
    assert convselect.revert(model) is model
    assert state_of(model) == before
    assert converted(model) == ["0", "1.conv", "2"]


def test_twice():
    model = small_net()
    convselect.convert(model, policy="native", where=lambda name, module: name == "0")
    assert not chooses(model[2])
    convselect.convert(model, policy="auto")
    assert convselect.summary(model).converted == {
        "0": "native",
        "1.conv": "auto",
        "2": "auto",
    }  # the first keeps its own
    before = state_of(model)
    assert converted(model) == ["0", "1.conv", "2"]
    assert state_of(model) == before


def test_a_bare_layer():
    layer = nn.Conv2d(3, 4, 3)
    weight = layer.weight
    assert "(the model itself): It was not converted." in str(convselect.summary(layer))
    assert converted(layer) == [""]
    assert chooses(layer)
    assert layer.weight is weight
    assert convselect.revert(layer) is layer
    assert not chooses(layer)


def test_no_convolutions():
    report = convselect.summary(convselect.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert report.converted == {}
    assert report.left_alone == {}
    assert "0 convolutions converted" in str(report)


def test_where_sees_names_and_layers():
    model = small_net()
    seen = []

    def depthwise(name, layer):
        seen.append((name, type(layer)))
        return layer.groups > 1

    report = convselect.summary(convselect.convert(model, where=depthwise))
    assert seen == [("0", nn.Conv2d), ("1.conv", nn.Conv2d), ("2", nn.Conv2d)]
    assert list(report.converted) == ["2"]
    assert report.left_alone == {"0": "It was not converted.", "1.conv": "It was not converted."}


def test_policy():
    model = small_net()
    convselect.convert(model, policy="im2col_gemm")
    assert {m.policy for m in model.modules() if chooses(m)} == {"im2col_gemm"}
    assert SelectedConv2d.policy is None
    torch.testing.assert_close(model(input_()), small_net()(input_()), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="unknown policy 'fastest'"):
        convselect.convert(small_net(), policy="fastest")
    untouched = small_net()
    with pytest.raises(ValueError, match="unknown policy"):
        convselect.convert(untouched, policy="fastest")
    assert not chooses(untouched[0])


FUNCTIONS = (convselect.convert, convselect.revert, convselect.freeze, convselect.unfreeze, convselect.summary)


@pytest.mark.parametrize("wrong", [None, torch.randn(2), [nn.Conv2d(1, 1, 1)], nn.Conv2d, Block, lambda x: x])
def test_only_modules(wrong):
    for function in FUNCTIONS:
        with pytest.raises(
            TypeError, match=rf"^{function.__name__} takes an nn\.Module, not {type(wrong).__name__}\.$"
        ):
            function(wrong)


class Pipeline:
    """Holds modules and is none, as a diffusers pipeline."""

    def __init__(self):
        self.text_encoder, self.scheduler, self.watermark = nn.Linear(2, 2), object(), None
        self.unet, self.vae = small_net(), nn.Sequential(nn.ConvTranspose2d(1, 1, 1))


class PipelineWithComponents(Pipeline):
    @property
    def components(self):
        return {"vae": self.vae, "text_encoder": self.text_encoder, "unet": self.unet, "scheduler": self.scheduler}


class PipelineThatIsBroken(Pipeline):
    @property
    def components(self):
        raise ValueError("components were expected")


class PipelineWithNothing:
    components = "none"


def test_pipelines_are_told_what_to_convert():
    for function in FUNCTIONS:
        verb = {"summary": "summarise"}.get(function.__name__, function.__name__)
        for kind, names in (
            (Pipeline, "unet, vae"),
            (PipelineWithComponents, "vae, unet"),
            (PipelineThatIsBroken, "unet, vae"),
        ):
            pipeline = kind()
            with pytest.raises(TypeError) as caught:
                function(pipeline)
            assert str(caught.value) == (
                f"{function.__name__} takes an nn.Module, not {kind.__name__}; {verb} its modules instead: {names}."
            )
            assert not chooses(pipeline.unet[0])
        with pytest.raises(TypeError, match=r"not PipelineWithNothing\.$"):
            function(PipelineWithNothing())


# ---- sharing ------------------------------------------------------------------------------------------------------


def test_shared_modules_are_converted_once():
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = input_()
    want = model(x)
    assert converted(model) == ["0"]
    assert model[0] is model[2] is shared
    assert chooses(shared)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    convselect.revert(model)
    assert not chooses(shared)


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
                assert chooses(average.module[0])
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
    assert chooses(twin[0])
    assert twin[0].policy == "native"
    torch.testing.assert_close(twin(input_()), model(input_()))


# ---- left alone ---------------------------------------------------------------------------------------------------


def test_what_is_left_alone_and_why():
    replaced = WithForward(3, 4, 3)
    replaced.forward = replaced.forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {
            "lazy": (nn.LazyConv2d(4, 3), "lazy"),
            "transposed_lazy": (nn.LazyConvTranspose2d(3, 4), "lazy"),
            "one_d_lazy": (nn.LazyConv1d(3, 4), "lazy"),
            "three_d_lazy": (nn.LazyConv3d(3, 4), "lazy"),
            "transposed_three_d_lazy": (nn.LazyConvTranspose3d(3, 4), "lazy"),
            "with_a_policy": (WithPolicy(3, 4, 3), "`policy`"),
            "with_a_broken_policy": (WithBrokenPolicy(3, 4, 3), "`policy`"),
            "no_function": (WithNoFunction(3, 4, 3), "no Python function"),
            "replaced": (replaced, "was replaced"),
            "quantized": (torch.ao.nn.quantized.Conv2d(3, 4, 3), "quantised"),
            "linear": (nn.Linear(3, 4), None),
            "pool": (nn.MaxPool2d(2), None),
        }
    model = nn.ModuleDict({name: module for name, (module, _) in modules.items()})
    model["plain"] = nn.Conv2d(3, 4, 3)
    states = {name: dict(vars(module)) for name, module in model.items() if name != "plain"}
    untouched = convselect.summary(model).left_alone
    report = convselect.summary(convselect.convert(model))
    assert list(report.converted) == ["plain"]
    assert untouched == {**report.left_alone, "plain": "It was not converted."}
    expected = {name: word for name, (_, word) in modules.items() if word is not None}
    assert set(report.left_alone) == set(expected)
    for name, word in expected.items():
        assert word in report.left_alone[name], (name, report.left_alone[name])
        assert report.left_alone[name].endswith(".")
        assert name in str(report)
        assert report.left_alone[name] in str(report)
    assert {name: dict(vars(module)) for name, module in model.items() if name != "plain"} == states


class WithForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)


class WithPolicy(nn.Conv2d):
    policy = "never mind"

    def forward(self, x):
        return super().forward(x)


class WithBrokenPolicy(nn.Conv2d):
    @property
    def policy(self):
        raise RuntimeError("not yet")


class WithNoFunction(nn.Conv2d):
    forward = functools.partial(nn.functional.relu)


def test_lazy_layers_convert_after_their_first_call():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU())
    assert "lazy" in convselect.summary(convselect.convert(model)).left_alone["0"]
    x = input_()
    want = model(x)
    assert converted(model) == ["0"]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


# ---- parametrized -------------------------------------------------------------------------------------------------


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrized_net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    parametrizations.weight_norm(model[0])
    parametrize.register_parametrization(model[0], "weight", Halved())
    parametrize.register_parametrization(model[0], "bias", Halved())
    return model


def test_parametrized_layers():
    x, model = input_(), parametrized_net()
    want, keys = model(x), list(model.state_dict())
    ids = [id(p) for p in model.parameters()]
    assert converted(model) == ["0", "1"]
    assert chooses(model[0])
    assert parametrize.is_parametrized(model[0], "weight")
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == ids
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    before = [type(layer) for layer in model]
    assert converted(model) == ["0", "1"]
    assert [type(layer) for layer in model] == before
    assert convselect.summary(model).left_alone == {}
    with parametrize.cached():
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(model)
    assert chooses(twin[0])
    torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())

    # Back, with the parametrizations still on it, as on a copy: PyTorch gives both the same class ...
    convselect.revert(twin)
    assert not chooses(twin[0])
    assert type(twin[0]) is type(model[0])
    assert type(twin[0]).__bases__ == (nn.Conv2d,)
    torch.testing.assert_close(twin(x), want, rtol=1e-4, atol=1e-5)
    assert converted(twin) == ["0", "1"]
    convselect.revert(twin)

    # ... or without them, taken off before or after.
    for after in (False, True):
        model = convselect.convert(parametrized_net())
        for step in (0, 1) if after else (1, 0):
            if step:
                convselect.revert(model)
            else:
                parametrize.remove_parametrizations(model[0], "weight")
                parametrize.remove_parametrizations(model[0], "bias")
            assert chooses(model[0]) == (after and not step)
            torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
        assert type(model[0]) is nn.Conv2d


def test_parametrizations_put_on_after_converting():
    """The class that `parametrize` makes then has ours for its base; reverting must still find its way."""
    x = input_()
    layer = nn.Conv2d(3, 4, 3)
    convselect.convert(layer)
    parametrize.register_parametrization(layer, "weight", Halved())
    want = layer(x)
    convselect.revert(layer)
    assert not chooses(layer)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Conv2d


def test_subclasses_of_ours_are_not_reverted():
    class Mine(SelectedConv2d):
        pass

    layer = Mine(3, 4, 3)
    convselect.revert(nn.Sequential(layer))
    assert type(layer) is Mine
    assert converted(nn.Sequential(layer)) == ["0"]
    assert type(layer) is Mine


# ---- compiled and scripted ----------------------------------------------------------------------------------------


@pytest.mark.compile
def test_compiled_and_scripted_models_still_run():
    model = small_net().eval()
    x = input_()
    want = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), want)
    assert len(converted(compiled)) == 3
    assert chooses(model[0])
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    convselect.revert(compiled)
    torch.testing.assert_close(compiled(x), want)
    torch._dynamo.reset()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted, traced = torch.jit.script(model), torch.jit.trace(model, x)
    for module in (scripted, traced):
        assert converted(module) == []
        torch.testing.assert_close(module(x), want)
    mixed = nn.Sequential(scripted, nn.Unflatten(1, (4, 25)), nn.Unflatten(2, (5, 5)), nn.Conv2d(4, 2, 1))
    before = mixed(x)
    assert converted(mixed) == ["3"]
    torch.testing.assert_close(mixed(x), before, rtol=1e-4, atol=1e-5)


def test_fx_graph_modules():
    graph = torch.fx.symbolic_trace(small_net().eval())
    x = input_()
    want = graph(x)
    assert converted(graph) == ["0", "1.conv", "2"]
    torch.testing.assert_close(graph(x), want, rtol=1e-4, atol=1e-5)
    graph.recompile()
    torch.testing.assert_close(graph(x), want, rtol=1e-4, atol=1e-5)


# ---- summaries ----------------------------------------------------------------------------------------------------


def mixed_net():
    """Folded, frozen by themselves, an image and a volume, and not traceable as a whole."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.head = nn.Conv2d(4, 4, 1, bias=False)
            self.up = nn.Conv3d(4, 2, 1)

        def forward(self, x):
            y = self.head(self.body(x))
            return self.up(y[:, :, None]) if y.sum() > 0 else self.up(-y[:, :, None])

    torch.manual_seed(3)
    return Branches().eval()


def test_a_summary_of_an_untouched_model():
    model = small_net()
    before = state_of(model)
    report = convselect.summary(model)
    assert state_of(model) == before
    assert report.left_alone == dict.fromkeys(("0", "1.conv", "2"), "It was not converted.")
    empty = (report.converted, report.folded, report.fused, report.not_fused, report.frozen, report.inputs)
    assert not any((*empty, report.on_trial, report.measured, report.predicted, report.distrusted))
    assert str(report).splitlines() == [
        "0 convolutions converted, 3 left alone",
        *(f"  {name}: It was not converted." for name in ("0", "1.conv", "2")),
    ]


def test_policies_are_named_with_their_layers():
    model = convselect.convert(small_net(), policy="direct", where=lambda name, _: name != "1.conv")
    text = str(convselect.summary(convselect.convert(model)))
    assert text.splitlines()[:2] == ["3 convolutions converted, 0 left alone", "  policy direct: 0, 2"]


def test_convert_and_freeze_chain():
    model, x = mixed_net(), input_()
    want = model(x)
    chained = convselect.freeze(convselect.convert(model), x)
    assert chained is model
    torch.testing.assert_close(chained(x), want, rtol=1e-4, atol=1e-5)
    report = convselect.summary(model)
    assert list(report.converted) == ["body.0", "head", "up"]
    assert report.left_alone == {}
    assert set(report.frozen) == {"body", "head", "up"}
    assert report.folded == {"body.1": "body.0"}
    assert report.fused == {"body.0": ("batch norm", "bias", "relu"), "head": (), "up": ("bias",)}
    assert list(report.not_fused) == [""]
    chosen = [(row.module, list(row.chosen)) for row in report.inputs]
    assert chosen == [("body", ["body.0"]), ("head", ["head"]), ("up", ["up"])]
    sizes = ("(2, 3, 7, 7)", "(2, 4, 7, 7)", "(2, 4, 1, 7, 7)")
    assert all(size in row.input for size, row in zip(sizes, report.inputs, strict=True))
    # None if the store knows what was measured before.
    assert all(row.eager_us is None or min(row.eager_us, row.frozen_us) > 0 for row in report.inputs)
    text = str(report)
    assert "3 convolutions converted, 0 left alone" in text
    assert "3 layers frozen in 3 parts, 1 batch normalisations folded" in text
    assert "  body.0: batch norm, bias, relu" in text
    assert "  not fused: (the model itself): It was not captured as a whole" in text
    assert json.loads(report.to_json())["frozen"] == list(report.frozen)


def test_each_step_is_undone_by_itself():
    model, x = mixed_net(), input_()
    before = state_of(model)
    untouched = convselect.summary(model)
    convselect.freeze(convselect.convert(model), x)
    assert convselect.unfreeze(model) is model
    assert convselect.summary(model).frozen == ()
    assert convselect.summary(model) == convselect.summary(convselect.convert(mixed_net()))
    convselect.freeze(model, x)
    assert convselect.revert(model) is model
    frozen = convselect.summary(model)
    assert frozen.converted == {}
    assert frozen.left_alone == {}  # all are frozen
    assert set(frozen.fused) == {"body.0", "head", "up"}
    convselect.unfreeze(model)
    assert convselect.summary(model) == untouched
    assert state_of(model) == before


def test_summaries_of_copies_are_those_of_the_model():
    model = convselect.freeze(convselect.convert(mixed_net(), policy="auto", where=lambda name, _: name == "head"))
    want = convselect.summary(model)
    assert want.converted == {"head": "auto"}
    pickle_, state = mixed_net(), model.state_dict()
    pickle_.load_state_dict(state)
    assert list(state) == list(pickle_.state_dict())
    assert convselect.summary(copy.deepcopy(model)) == want
    assert convselect.summary(copy.deepcopy(copy.deepcopy(model))) == want


def test_summaries_of_loaded_models():
    model = convselect.freeze(convselect.convert(small_net().eval(), where=lambda name, _: name == "2"))
    want = convselect.summary(model)
    assert convselect.summary(pickle.loads(pickle.dumps(model))) == want
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert convselect.summary(torch.load(file, weights_only=False)) == want


def test_names_are_those_in_the_model_that_is_asked():
    inner = convselect.freeze(mixed_net(), input_())
    alone = convselect.summary(inner)
    outer = nn.ModuleDict({"a": nn.Sequential(inner, nn.ConvTranspose2d(1, 1, 1)), "up": nn.Conv2d(1, 1, 1)})
    report = convselect.summary(outer)
    assert report.frozen == tuple(f"a.0.{name}" for name in alone.frozen)
    assert report.folded == {"a.0.body.1": "a.0.body.0"}
    # Nobody asked to freeze what is around it.
    assert list(report.not_fused) == ["a.0"]
    assert list(report.left_alone) == ["a.1", "up"]
    part = convselect.summary(inner.body)
    assert part.frozen == ("",)
    assert part.folded == {"1": "0"}
    assert part.not_fused == {}


def test_what_is_measured_and_on_trial_is_told(favourite, monkeypatch):
    for clock in ("_wall_ns", "_thread_ns"):  # every call takes 1 us, whatever else the machine does
        monkeypatch.setattr(live_trial, clock, itertools.count(0, 1000).__next__)
    monkeypatch.setattr(live_trial.LiveTrial, "_allowed", lambda self: True)  # a turn costs many such calls
    monkeypatch.setattr(trial, "ALLOWANCE_US", 1e6)
    model, x = convselect.convert(small_net()), input_()
    assert (convselect.summary(model).on_trial, convselect.summary(model).measured) == ((), ())
    with convselect.use("verify"), torch.no_grad():
        model(x)
        report = convselect.summary(model)
        if favourite is None:  # nothing speaks for a trial
            assert report.on_trial == ()
            return
        assert {row.layers for row in report.on_trial} == {("0",), ("1.conv",), ("2",)}
        assert {(row.source, row.trial.rounds, row.trial.calls) for row in report.on_trial} == {("trial", 0, 1)}
        assert all(row.trial.candidates == {favourite: None} for row in report.on_trial)
        row = report.on_trial[1]
        assert f"on trial: {row.problem}: {row.algorithm} leads after 0 rounds, 1 of 60 calls" in str(report)
        assert "0 choices measured, 3 on trial, 0 predicted only" in str(report)
        assert json.loads(report.to_json())["on_trial"][1]["trial"]["leader"] == row.algorithm
        for _ in range(200):
            model(x)
    report = convselect.summary(model)
    assert report.on_trial == ()
    assert {row.layers for row in report.measured} == {("0",), ("1.conv",), ("2",)}
    assert {row.source for row in report.measured} == {"verify"}
    row = report.measured[0]
    assert f"measured: {row.problem}: native ({', '.join(row.layers)})" in str(report)
    assert (row.predicted_gain, row.measured_gain) == (1.0, 1.0)
    assert "3 choices measured, 0 on trial, 0 predicted only" in str(report)
    assert json.loads(report.to_json())["measured"][0]["problem"] == str(row.problem)


def test_measured_choices_go_by_geometry_and_policy():
    same = {"kernel_size": 3, "padding": "same", "dilation": 2}
    model = nn.Sequential(
        SelectedConv2d(4, 4, **same), SelectedConv2d(4, 4, **same, policy="measure"),
        SelectedConv2d(4, 4, 3, padding=2),
        SelectedConv2d(4, 4, 3, dilation=2, padding=2, padding_mode="reflect"), nn.Conv2d(4, 4, **same),
    )  # fmt: skip
    problem = ConvProblem(Direction.FORWARD, 1, 4, 9, 9, 4, 3, 3, 1, 1, 2, 2, 2, 2, 2, 2)
    put = resolve.choices.put
    for policy, source in (("verify", "verify"), ("measure", "measure"), ("auto", "model"), ("native", "forced")):
        with convselect.use(policy) as used:
            measured = Measured(9, 1.5, 1.4, 1.6) if source in ("verify", "measure") else None
            put((problem, used), resolve._Chosen(Choice("direct", source, None, 2.5, measured=measured)))
    report = convselect.summary(model)
    assert [(row.layers, row.source, row.algorithm) for row in report.measured] == [
        (("0",), "verify", "direct"),
        (("0", "1"), "measure", "direct"),
    ]
    for row in report.measured:
        assert (row.predicted_gain, row.measured_gain, row.spread, row.rounds) == (2.5, 1.5, (1.4, 1.6), 9)
    told = f"{problem}: direct, measured 1.50x (1.40 to 1.60) in 9 rounds, predicted 2.50x (0)"
    assert f"measured: {told}" in str(report)
    # What only the model has said is counted, and not listed among what was measured.
    (row,) = report.predicted
    assert (row.layers, row.source, row.predicted_gain, row.measured_gain) == (("0",), "model", 2.5, None)
    assert str(report).splitlines()[-1] == "2 choices measured, 0 on trial, 1 predicted only"
    assert json.loads(report.to_json())["predicted"][0]["problem"] == str(problem)
    assert convselect.summary(model[4]).measured == ()


def test_what_is_on_trial_has_its_leader_and_both_gains():
    model, x = nn.Sequential(SelectedConv2d(4, 4, 3, padding=1)), torch.randn(2, 4, 10, 10)
    with racing(), torch.no_grad():
        while not (report := convselect.summary(model)).on_trial or report.on_trial[0].trial.rounds < 2:
            model(x)
        (row,) = report.on_trial
        assert (row.algorithm, row.trial.leader, row.rounds) == (QUICK, QUICK, 2)
        assert (row.predicted_gain, row.measured_gain) == pytest.approx((PREDICTED[QUICK], GAINS[QUICK]))
        assert row.spread == pytest.approx((GAINS[QUICK], GAINS[QUICK]))
        assert row.trial.candidates == pytest.approx(GAINS)
        assert f"{QUICK} leads after {row.trial}, measured 1.82x (1.82 to 1.82), predicted 2.00x" in str(row)
        assert f"; {SLOW}, measured 0.83x, predicted 2.40x (0)" in str(row)
        while (report := convselect.summary(model)).on_trial:
            model(x)
    (row,) = report.measured
    assert (row.algorithm, row.source, row.trial) == (QUICK, "verify", None)
    assert (row.predicted_gain, row.measured_gain) == pytest.approx((PREDICTED[QUICK], GAINS[QUICK]))


def test_what_is_not_used_any_more_is_told(monkeypatch):
    why = "fft gave a wrong result in this process."
    monkeypatch.setitem(budgets.distrusted, "fft", why)
    report = convselect.summary(small_net())
    assert report.distrusted == {"fft": why}
    assert str(report).splitlines()[-1] == f"not used any more: {why}"
    assert json.loads(report.to_json())["distrusted"] == {"fft": why}
