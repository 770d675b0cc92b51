"""Words of memory that show writes: found, and used only where they show all of them."""

from __future__ import annotations

import pytest
import torch
from networks import CONV, conv_bn, distance, eager, randomised
from torch import nn

import convselect
from convselect.freeze import forward as freezing
from convselect.freeze import watch, words
from convselect.kernels import _library

pytestmark = pytest.mark.skipif(not _library.available(), reason="the C library compares words")
needs_layout = pytest.mark.skipif(words.tensor_layout() is None, reason="this PyTorch keeps them elsewhere")
needs_tags = pytest.mark.skipif(not words.dictionaries_have_tags(), reason="this Python has none")


@needs_tags
def test_dictionaries():
    d, other = {"a": 1}, {"b": 2}
    for change in (lambda: d.update(a=3), lambda: d.pop("a"), lambda: other.setdefault("c", 1)):
        seen = words.Words([d, other])
        assert seen.same()
        change()
        assert not seen.same()


@needs_layout
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t.detach()[0].zero_(),
        lambda t: setattr(t, "data", torch.ones(4, 3)),
        lambda t: setattr(t, "data", t.data[2:]),
        lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.ones(4, 3))),
        lambda t: t.untyped_storage().resize_(4096),
    ],
)
@torch.no_grad()
def test_tensors(write):
    tensors = [nn.Parameter(torch.randn(4, 3)), torch.zeros(5)]
    seen = words.Words((), tensors, words.tensor_layout())
    assert seen.same()
    write(tensors[0])
    assert not seen.same()


@needs_layout
def test_tensors_of_inference_mode_have_no_counter():
    with torch.inference_mode():
        t = torch.ones(3)
    assert words.Words((), [t], words.tensor_layout()).same()


@torch.no_grad()
def test_a_layout_that_misses_a_write_is_not_used():
    right = words.tensor_layout()
    if right is None:
        pytest.skip("no layout")
    assert words._shows_writes(right)
    for wrong in (right._replace(version=right.version - 8), right._replace(storage=right.counter)):
        assert not words._shows_writes(wrong)


@needs_tags
@needs_layout
def test_a_call_asks_nobody_while_the_words_are_the_same(monkeypatch):
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    x = torch.randn(1, 3, 9, 9)
    convselect.freeze(model, x)
    model(x)
    model(x)
    asked = []
    monkeypatch.setattr(watch.Watch, "_changed_objects", lambda self: asked.append(1) or set())
    model(x)
    assert not asked
    with torch.no_grad():
        model[0][0].weight.add_(1)
    model(x)
    assert asked


@needs_tags
@needs_layout
def test_what_changes_nothing_is_asked_about_a_few_times_only():
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    x = torch.randn(1, 3, 9, 9)
    convselect.freeze(model, x)
    forward = vars(model)["forward"]
    for _ in range(40):
        model[0]._forward_hooks["x"] = None
        del model[0]._forward_hooks["x"]
        assert distance(model(x), eager(model, x)) < CONV
    assert forward._renewals == 0
    handle = model[1].register_forward_hook(lambda module, given, y: y * 2)
    assert distance(model(x), eager(model, x)) < CONV
    handle.remove()


@pytest.mark.parametrize("have", [True, False])
def test_hooks_modes_and_modules_are_noticed(have, monkeypatch):
    if not have:
        for module in (watch, freezing):
            monkeypatch.setattr(module, "dictionaries_have_tags", lambda: False)
    model = randomised(nn.Sequential(conv_bn(3, 8, activation=nn.ReLU()), conv_bn(8, 8)))
    x = torch.randn(1, 3, 9, 9)
    convselect.freeze(model, x)
    model(x)
    handle = model[0][0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert distance(model(x), eager(model, x)) < CONV
    handle.remove()
    model[1] = randomised(conv_bn(8, 8))
    assert distance(model(x), eager(model, x)) < CONV
    model[0][1].training = True
    with pytest.raises(RuntimeError):
        model(x)
