"""Constant expressions: what is one, its value in float64, its sources and its name."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from rewriting import randomised_norms, traced
from torch import fx, nn

from convselect.freeze.algebra.constants import Constants, constant_nodes, is_constant
from convselect.freeze.algebra.rewrite import rewrite

aten = torch.ops.aten


def reader(module):
    return lambda node: operator.attrgetter(node.target)(module)


def layers(module):
    return [node for node in module.graph.nodes if node.target is aten.convolution.default]


def block():
    torch.manual_seed(0)
    return randomised_norms(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)))


def test_values_are_in_float64():
    model = block()
    module = traced(model, torch.randn(1, 4, 6, 6))
    rewrite(module.graph)
    (conv,) = layers(module)
    constants = Constants(reader(module))
    weight, bias = constants.values(conv.args[1:3])
    assert weight.dtype == bias.dtype == torch.float64
    double = traced(model.double(), torch.randn(1, 4, 6, 6, dtype=torch.float64))
    rewrite(double.graph)
    want = Constants(reader(double)).values(layers(double)[0].args[1:3])
    # The graph of float32 holds its numbers and parameters alike, so nothing is rounded on the way.
    torch.testing.assert_close([weight, bias], want, rtol=1e-14, atol=1e-14)
    assert constants.value(conv.args[1]).equal(weight)


def test_values_follow_parameters():
    model = block()
    module = traced(model, torch.randn(1, 4, 6, 6))
    rewrite(module.graph)
    constants, (conv,) = Constants(reader(module)), layers(module)
    before = constants.value(conv.args[2])
    with torch.no_grad():
        model[3].bias += 1
    torch.testing.assert_close(constants.value(conv.args[2]), before + 1)


def test_parameters_may_have_other_strides_by_then():
    """A view in the graph is of the strides that a weight had while it was traced."""
    weight = torch.randn(8, 4, 3, 3)
    module = traced(lambda x: F.conv2d(x, weight.view(8, 36).view(8, 4, 3, 3) * 2), torch.randn(1, 4, 6, 6))
    changed = weight.contiguous(memory_format=torch.channels_last)
    value = Constants(lambda _: changed).value(layers(module)[0].args[1])
    assert value.equal(weight.double() * 2)


def test_rounding_is_that_of_the_model():
    """Fake quantisation rounds what float32 gives; in float64 the same weight may fall on the other side."""
    torch.manual_seed(0)
    weight = torch.randn(64, 4, 3, 3)
    rounded = lambda w: (w / 0.1).round() * 0.1  # noqa: E731
    weight[0, 0, 0, 0] = 0.25  # 2.5 in float32, less than that in float64
    steps = Constants(lambda _: weight).value(layers(traced(lambda x: F.conv2d(x, rounded(weight)), torch.ones(1, 4, 6, 6)))[0].args[1])  # fmt: skip # noqa: E501
    assert (steps / 0.1).round().equal((weight / 0.1).round().double())
    assert steps.dtype == torch.float64


def test_several_results_and_integers():
    weight, index = torch.randn(4, 4, 1, 1), torch.tensor([1, 0, 3, 2])
    f = lambda x: F.conv2d(x, F.batch_norm(weight.view(1, 4, 4), None, None, training=True).view(4, 4, 1, 1)[index])  # noqa: E731
    module = traced(f, torch.randn(1, 4, 3, 3))
    (conv,) = layers(module)
    normal = F.batch_norm(weight.double().view(1, 4, 4), None, None, training=True)
    torch.testing.assert_close(Constants(reader(module)).value(conv.args[1]), normal.view(4, 4, 1, 1)[index])


def test_sources_and_keys():
    names = ("0.weight", "1.weight", "1.running_var", "1.running_mean", "1.bias", "0.bias")

    def conv_of(shape, eps=1e-5):
        model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, eps=eps)).eval()
        named = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        module = traced(model, torch.randn(shape))
        rewrite(module.graph)
        read = reader(module)
        return Constants(read, lambda node: named[id(read(node))]), layers(module)[0], named, read

    constants, conv, named, read = conv_of((1, 4, 6, 6))
    assert {named[id(read(source))] for source in constants.sources(conv.args[1])} == set(names[:3])
    assert {named[id(read(source))] for source in constants.sources(conv.args[2])} == set(names[1:])
    again, other, *_ = conv_of((2, 4, 8, 9))
    assert [again.key(a) for a in other.args[1:3]] == [constants.key(a) for a in conv.args[1:3]]
    assert constants.key(conv.args[1]) != constants.key(conv.args[2])
    changed, other, *_ = conv_of((1, 4, 6, 6), eps=1e-3)
    assert changed.key(other.args[1]) != constants.key(conv.args[1])


def test_what_is_constant():
    weight = torch.randn(4, 4, 3, 3)

    def f(x):
        fixed = weight * torch.full((4, 1, 1, 1), 2.0)
        noisy = weight + torch.rand(4, 1, 1, 1)
        return F.conv2d(x, fixed) + F.conv2d(x, noisy) + F.conv2d(x, weight * x.mean())

    module = traced(f, torch.randn(1, 4, 6, 6))
    fixed, noisy, moving = layers(module)
    assert [is_constant(conv.args[1]) for conv in (fixed, noisy, moving)] == [True, False, False]
    found = constant_nodes(module.graph)
    assert [conv.args[1] in found for conv in (fixed, noisy, moving)] == [True, False, False]
    assert not is_constant(module.graph.find_nodes(op="placeholder")[0])
    with pytest.raises(ValueError, match="no constant expression"):
        Constants(reader(module)).value(noisy.args[1])


def test_what_a_graph_writes_to_is_not_constant():
    graph = fx.Graph()
    buffer, kept = graph.get_attr("buffer"), graph.get_attr("kept")
    graph.call_function(aten.add_.Tensor, (buffer, 1))
    read, other = (graph.call_function(aten.mul.Tensor, (node, 2)) for node in (buffer, kept))
    graph.output((read, other))
    assert constant_nodes(graph) == {kept, other}


def test_deep_expressions():
    graph = fx.Graph()
    node = graph.get_attr("start")
    for _ in range(3000):
        node = graph.call_function(aten.add.Tensor, (node, 1))
    graph.output(node)
    constants = Constants(lambda _: torch.zeros(2))
    assert is_constant(node)
    assert constants.value(node).tolist() == [3000, 3000]
    assert len(constants.sources(node)) == 1
    assert len(constants.key(node)) == 32
