"""Forwards that can be captured only in part, or not at all; and any spelling of the same."""

from __future__ import annotations

import contextvars
import copy
import subprocess
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, Flagged, distance, eager, frozen_outputs, randomised, unfrozen, use_forced
from torch import nn

import convselect
from convselect.freeze.capture import Uncapturable, capture
from convselect.freeze.freeze import frozen_forwards


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(4, 4, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x)


class CountsInBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.conv(x)


class WritesToTable(nn.Module):
    """Makes a table of weights, by writing to it what is read under another name too, or not."""

    def __init__(self, twice=False):
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), twice
        self.start, self.places = nn.Parameter(torch.randn(4, 1, 3)), nn.Linear(3, 1)

    def forward(self, x):
        table = self.places(self.start)
        seen = table.view(-1) if self.twice else None
        table = F.relu(table, inplace=True)
        y = self.norm(self.conv(x)) * table
        return y if seen is None else y + seen.sum()


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(x) + torch.rand(1)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x, mask=None, scale=2.0):
        y = self.conv(x) * scale
        return y if mask is None else y * mask


@use_forced
def test_data_dependent_control_flow():
    model = randomised(Flagged())
    convselect.freeze(model, torch.rand(1, 8, 6, 6))
    report = convselect.summary(model)
    assert set(report.frozen) == {"a", "b"}
    assert report.not_fused[""] == "It was not captured as a whole: forward reads a value of a tensor."
    assert report.fused["a.0"] == ("batch norm", "bias", "relu")
    for x in (torch.rand(1, 8, 6, 6), -torch.rand(1, 8, 6, 6)):
        model(x)
        assert distance(model(x), eager(model, x)) < CONV
    with pytest.raises(RuntimeError, match="unfreeze"):
        model.train()
    assert unfrozen(model) == 2


@pytest.mark.parametrize("kind", [Counts, CountsInBuffer, Noise])
def test_side_effects_keep_happening(kind):
    model = randomised(kind())
    x = torch.randn(1, 4, 5, 5)
    report = convselect.summary(convselect.freeze(model, x))
    assert report.frozen == ("conv",)
    assert "" in report.not_fused
    before = int(getattr(model, "calls", 0))
    outputs = [model(x) for _ in range(4)]
    if kind is Noise:
        assert not torch.equal(outputs[2], outputs[3])
    else:
        assert int(model.calls) - before == 4


@use_forced
@pytest.mark.parametrize("twice", [False, True])
def test_tables_made_of_weights_in_place(twice, recwarn):
    model, x = randomised(WritesToTable(twice)), torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        model.places.bias += 3
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.frozen == (("conv", "places") if twice else ("",))
    assert ("norm" in report.folded) is not twice
    frozen = convselect.freeze(model, x)
    for _ in range(3):
        with torch.no_grad():
            assert distance(frozen(x), want) < CONV
    assert not [w for w in recwarn if "planning raised" in str(w.message)]


class Recorded(nn.Module):
    """Asks hooks, as models of transformers do: they stay in the layers, and note results while a forward asks."""

    def __init__(self, collector, asks):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(2)))
        self.collector, self.asks = collector, asks
        self.hooked = False

    def forward(self, x):
        if not self.asks:
            return self.layers(x)
        if not self.hooked:
            self.hooked = True
            for layer in self.layers:
                layer.register_forward_hook(_noting(self.collector))
        found = []
        token = self.collector.set(found)
        try:
            y = self.layers(x)
        finally:
            self.collector.reset(token)
        return (y, *found)


def _noting(collector):
    def hook(module, args, output):
        if collector.get() is not None:
            collector.get().append(output)

    hook.__module__ = "transformers.utils.output_capturing"
    return hook


@pytest.fixture
def collector(monkeypatch):
    made = contextvars.ContextVar("collector", default=None)
    module = types.SimpleNamespace(_active_collector=made)
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", module)
    return made


def test_hooks_that_note_results_are_captured(collector):
    model, x = randomised(Recorded(collector, asks=True)), torch.randn(1, 4, 6, 6)
    with torch.no_grad():
        want = model(x)
        convselect.freeze(model, x)
        got = model(x)
    assert convselect.summary(model).frozen == ("",)
    assert len(convselect.summary(model).folded) == 2
    assert len(got) == len(want) == 3
    assert all(distance(a, b) < CONV for a, b in zip(got, want, strict=True))


def test_a_forward_around_a_frozen_one_gets_what_its_hooks_note(collector):
    inner, x = randomised(Recorded(collector, asks=False)), torch.randn(1, 4, 6, 6)
    inner.layers[0].register_forward_hook(_noting(collector))
    with torch.no_grad():
        want = inner(x)
        convselect.freeze(inner, x)
        found = []
        token = collector.set(found)
        assert distance(inner(x), want) < CONV
        collector.reset(token)
        assert len(found) == 1
        assert distance(inner(x), want) < CONV
        assert len(found) == 1
        assert convselect.summary(inner).frozen == ("",)
        seen = []
        inner.layers[1].register_forward_hook(lambda *_: seen.append(1))
        assert distance(inner(x), want) < CONV
        assert seen == [1]


class OfMany(nn.Module):
    """As detectors and decoders of pyramids are called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, images, size=None):
        images = list(images.values()) if isinstance(images, dict) else images
        y = sum(self.layers(x) for x in images)
        return y if size is None else F.interpolate(y, size)


@pytest.mark.parametrize("container", [list, tuple, lambda images: dict(enumerate(images))])
def test_tensors_in_containers(container):
    model, images = randomised(OfMany()), container([torch.randn(1, 4, 6, 6), torch.randn(1, 4, 6, 6)])
    with torch.no_grad():
        want = model(images)
        convselect.freeze(model)
        for _ in range(4):
            assert distance(model(images), want) < CONV
    report = convselect.summary(model)
    assert report.frozen == ("layers",)
    assert [row.module for row in report.inputs] == ["layers"]
    assert "an argument of its forward is a" in report.not_fused[""]


def test_containers_do_not_undo_a_plan():
    model, x = randomised(OfMany()), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        want = model(x[:, None]), model([x])
        convselect.freeze(model, x[:, None])
        for _ in range(3):
            assert distance(model([x]), want[1]) < CONV
        assert distance(model(x[:, None]), want[0]) < CONV
    assert convselect.summary(model).frozen == ("",)


def test_sizes_in_a_tuple_are_part_of_the_kind():
    model, x = randomised(OfMany()), torch.randn(2, 1, 4, 6, 6)
    sizes = (3, 3), (12, 9), torch.Size((3, 3))
    with torch.no_grad():
        want = [model(x, size) for size in sizes]
        convselect.freeze(model)
        for _ in range(2):
            assert all(distance(model(x, size), y) < CONV for size, y in zip(sizes, want, strict=True))
    assert len(convselect.summary(model).inputs) == 3


def test_optional_arguments():
    model = randomised(Optional())
    x, mask = torch.randn(1, 4, 5, 5), torch.rand(1, 1, 5, 5)
    convselect.freeze(model, x)
    with torch.no_grad():
        for args, kwargs in (((x,), {}), ((x, mask), {}), ((), {"x": x}), ((x,), {"mask": mask, "scale": 3.0})):
            want = Optional.forward(model, *args, **kwargs)
            for _ in range(2):
                assert distance(model(*args, **kwargs), want) < CONV
    with pytest.raises(TypeError):
        model()


def test_models_without_layers():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()).eval()
    report = convselect.summary(convselect.freeze(model, torch.randn(1, 4)))
    assert report.frozen == ()
    model.train()
    assert unfrozen(model) == 0


@use_forced
def test_a_lone_convolution():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3)))[0]
    x = torch.randn(1, 3, 8, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.frozen == ("",)
    assert distance(model(x[0]), eager(model, x[0])) < CONV  # no batch dimension


def test_reasons_for_what_is_left_alone():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv3d(4, 4, 1), nn.Flatten(1, 2)),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
    ).eval()  # fmt: skip
    x = torch.randn(1, 4, 6, 6)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.not_fused == {}
    assert set(report.fused) | set(report.merged) == {"0", "1.1", "2", "3"}
    assert report.merged.keys() | report.merged.values() == {"2", "3"}  # nothing is between these two
    assert "3 layers frozen in 1 parts" in str(report)
    forced = nn.Sequential(nn.Conv2d(4, 4, 1), convselect.SelectedConv2d(4, 4, 1, policy="native")).eval()
    want, got, report = frozen_outputs(forced, x)
    assert distance(got, want) < CONV
    assert report.frozen == ("0",)
    assert report.not_fused == {
        "": "It was not captured as a whole: the policy of 1 asks for native.",
        "1": "It was not captured as a whole: the policy of the module asks for native.",
    }


class Spelled(nn.Module):
    """A convolution, a normalisation and an activation, each spelled in one of many ways."""

    def __init__(self, how):
        super().__init__()
        self.how, self.conv, self.norm = how, nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.table = torch.rand(6, 1, 1)  # neither a parameter nor a buffer

    def forward(self, x):
        conv, norm = self.conv, self.norm
        if self.how == "functional":
            y = F.conv2d(x, conv.weight, None)
            y = F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
            return F.relu(y)
        if self.how == "method":
            return norm(torch.conv2d(x, conv.weight)).relu_()
        if self.how == "by hand":
            y = (conv(x) - norm.running_mean[:, None, None]) / torch.sqrt(norm.running_var[:, None, None] + norm.eps)
            return torch.clamp(y * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1), min=0)
        if self.how == "standardised":
            w = conv.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
            return F.relu(norm(F.conv2d(x, w)))
        if self.how == "attribute":
            return F.relu(norm(conv(x)) * self.table)
        if self.how == "literal":
            return F.relu(norm(conv(x)) * torch.tensor([2.0]))
        raise AssertionError(self.how)


@use_forced
@pytest.mark.parametrize("how", ["functional", "method", "by hand", "standardised", "attribute", "literal"])
def test_any_spelling(how):
    model = randomised(Spelled(how))
    x = torch.randn(2, 4, 9, 8)
    want, got, report = frozen_outputs(model, x)
    assert distance(got, want) < CONV
    assert report.folded == {"norm": "conv"}
    assert report.fused["conv"][0] == "batch norm"
    assert report.fused["conv"][-1] == "relu"
    with torch.no_grad():
        model.norm.running_mean.add_(1)
        model.conv.weight.mul_(2)
    assert distance(model(x), eager(model, x)) < CONV
    model.table = torch.rand(6, 1, 1)
    assert distance(model(x), eager(model, x)) < CONV


ELSEWHERE = torch.tensor([3.0])  # in no module: nobody could say whether it changes


class Unfit(nn.Module):
    """What a list of operations with fixed sizes cannot say."""

    def __init__(self, how):
        super().__init__()
        self.how, self.conv, self.scale = how, nn.Conv2d(4, 4, 1), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = self.conv(x)
        if self.how == "item":
            return y * y.mean().item()
        if self.how == "item of a tensor elsewhere":
            return y * ELSEWHERE[0].item()
        if self.how == "mask":
            return y[y > 0].sum()
        if self.how == "nonzero":
            return y.nonzero().float().mean()
        if self.how == "object":
            return Holder(y)
        raise AssertionError(self.how)


class Holder:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("how", ["item", "item of a tensor elsewhere", "mask", "nonzero", "object"])
def test_what_depends_on_more_than_sizes(how):
    model = randomised(Unfit(how))
    for x in (torch.randn(1, 4, 5, 5), -torch.rand(1, 4, 5, 5)):
        convselect.freeze(model, x)
        with torch.no_grad():
            model.scale.add_(1)
            ELSEWHERE.add_(1)
            got, want = model(-x), eager(model, -x)
        got, want = (got.value, want.value) if how == "object" else (got, want)
        assert distance(got, want) < CONV
    assert convselect.summary(model).frozen == ("conv",)


class Reads(nn.Module):
    """Sizes that are in buffers, as those of EnCodec's layers, and a number that is a parameter."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 3), nn.Parameter(torch.tensor(2.0))
        self.register_buffer("border", torch.tensor([1, 2]))

    def forward(self, x):
        more = self.border.sum() - self.border[1] + torch.tensor(1)
        return self.conv(F.pad(x, (int(more), int(more)))) * self.scale.item()


@use_forced
@pytest.mark.parametrize("inference", [False, True])
def test_values_of_constants_may_be_read(inference):
    with torch.inference_mode(inference):
        model, x = randomised(Reads()), torch.randn(1, 4, 5, 5)
    convselect.freeze(model, x)
    assert convselect.summary(model).frozen == ("",)
    assert convselect.summary(model).not_fused == {}
    for _ in range(2):
        assert distance(model(x), eager(model, x)) < CONV
    with torch.inference_mode(inference), torch.no_grad():
        model.scale.mul_(-3)
    for _ in range(9):  # tensors made in inference mode have no version counter
        model(x)
    assert distance(model(x), eager(model, x)) < CONV
    with torch.inference_mode(inference):
        model.border[0] = 4
    for _ in range(9):
        model(x)
    for _ in range(2):
        got, want = model(x), eager(model, x)
        assert got.shape == want.shape == (1, 4, 3, 13)
        assert distance(got, want) < CONV


X = torch.randn(2, 4, 5, 5)
DRAW_NOTHING = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.eye(5)),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=True),
    "native dropout in evaluation": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "rrelu in evaluation": lambda x: F.rrelu(x),
}
DRAW = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "native dropout by default": lambda x: torch.native_dropout(x, 0.5, None)[0],
    "rrelu": lambda x: F.rrelu(x, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "a permutation": lambda x: x[:, torch.randperm(4)],
}


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(4, 4, 1), function

    def forward(self, x):
        return self.function(self.conv(x))


@pytest.mark.parametrize("name", DRAW_NOTHING)
def test_what_draws_no_numbers_with_these_arguments(name):
    model = randomised(Function(DRAW_NOTHING[name]))
    want, got, report = frozen_outputs(model, X)
    assert report.frozen == ("",)
    assert distance(got, want) < CONV


@pytest.mark.parametrize("name", DRAW)
def test_what_draws_numbers(name):
    model = Function(DRAW[name]).eval()
    with torch.no_grad(), pytest.raises(Uncapturable, match="random numbers"):
        capture(model, (X,))


def test_weights_are_shared_by_kinds_of_input():
    model = randomised(nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    convselect.freeze(model)
    for size in (8, 9, 10):
        model(torch.randn(1, 4, size, size))
    forward = vars(model)["forward"]
    assert len(forward.plans()) == 3
    assert len({id(layer) for _, plan in forward.plans() for layer in plan.program.layers.values()}) == 1


@pytest.mark.process
def test_freezing_imports_neither_dynamo_nor_sympy():
    """Each takes longer than planning with known choices."""
    script = (
        "import sys, torch, convselect\n"
        "from torch import nn\n"
        "norm = nn.BatchNorm2d(8)\n"
        "model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1),\n"
        "    nn.Flatten(), nn.Linear(8, 4)).eval()\n"
        "convselect.freeze(model, torch.randn(1, 3, 16, 16))\n"
        "assert convselect.summary(model).frozen == ('',)\n"
        "print([name for name in ('torch._dynamo', 'sympy', 'triton') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_has_a_kernel_stays_whole():
    """Also once torch._decomp is imported, which spells nearest upsampling as a gather."""
    import torch._decomp.decompositions

    for conv, size in ((nn.Conv1d, (6,)), (nn.Conv2d, (4, 6)), (nn.Conv3d, (2, 4, 6))):
        model = nn.Sequential(conv(4, 4, 1), nn.Upsample(scale_factor=2), nn.ReLU(), conv(4, 4, 1)).eval()
        with torch.no_grad():
            graph = capture(model, (torch.randn(1, 4, *size),)).graph
        assert sum("upsample_nearest" in str(node.target) for node in graph.nodes) == 1
        assert not any("index" in str(node.target) for node in graph.nodes)


class ChoosesItsForward(nn.Module):
    """As FasterNet's partial convolution: the constructor sets `forward` to one of several methods."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.forward = self.forward_split

    def forward_split(self, x):
        a, b = torch.split(x, [4, 4], dim=1)
        return torch.cat((self.conv(a), b), 1)


def test_a_method_set_as_forward_is_captured():
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), ChoosesItsForward(), nn.Conv2d(8, 3, 1)))
    x = torch.randn(1, 3, 12, 12)
    want = eager(model, x)
    copied = copy.deepcopy(model)
    convselect.freeze(copied)
    with torch.inference_mode():
        assert distance(copied(x), want) < 1e-5
    assert list(frozen_forwards(copied)) == [""]  # one part: the model itself
    convselect.unfreeze(copied)
    assert copied[1].forward == copied[1].forward_split
    with torch.inference_mode():
        assert torch.equal(copied(x), want)


@pytest.mark.parametrize("of_another", [True, False])
def test_another_function_set_as_forward_is_not(of_another):
    model = nn.Sequential(ChoosesItsForward(), nn.Conv2d(8, 3, 1))
    model[0].forward = ChoosesItsForward().forward_split if of_another else lambda x: x
    with pytest.raises(Uncapturable, match="the forward of 0 was replaced"):
        capture(model, (torch.randn(1, 8, 6, 6),))


class Caches(nn.Module):
    """As LeViT's attention: what is added is made in the first call in evaluation mode, and kept in a dictionary."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.table = nn.Parameter(torch.randn(4))
        self.cache = {}

    def forward(self, x):
        key = str(x.device)
        if key not in self.cache:
            self.cache[key] = self.table[[2, 0, 1, 3]].view(1, 4, 1, 1)
        return self.conv(x) + self.cache[key]


def test_tensors_in_dictionaries_of_modules_are_found_and_watched():
    model, x = randomised(nn.Sequential(nn.Conv2d(4, 4, 1), Caches())), torch.randn(1, 4, 6, 6)
    with torch.inference_mode(False), torch.no_grad():
        want = model(x)
        convselect.freeze(model, x)
        assert list(frozen_forwards(model)) == [""]
        assert frozen_forwards(model)[""].why_original is None
        assert distance(model(x), want) < 1e-6
        model[1].cache["cpu"] = torch.zeros(1, 4, 1, 1)
        assert distance(model(x), want - model[1].table[[2, 0, 1, 3]].view(1, 4, 1, 1)) < 1e-6
        model[1].cache.clear()
        assert distance(model(x), want) < 1e-6


def test_a_dictionary_that_a_forward_fills_is_as_before():
    model = randomised(Caches())
    with torch.no_grad(), pytest.raises(Uncapturable, match="changes attributes"):
        capture(model, (torch.randn(1, 4, 6, 6),))
    assert model.cache == {}
