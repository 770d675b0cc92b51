"""Rewriting graphs by algebra: each identity, and where it must not be used."""

from __future__ import annotations

import functools
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from rewriting import randomised_norms, rewritten, traced
from torch import fx, nn

from convselect.freeze.algebra import spelling, writing
from convselect.freeze.algebra.constants import constant_nodes, is_mutation
from convselect.freeze.algebra.norms import batch_norms
from convselect.freeze.algebra.rewrite import rewrite

aten = torch.ops.aten


@functools.cache
def r(*shape, seed=0):
    """A random tensor, made once: `traced` calls a function before tracing it, so that this is a constant then."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = r(2, 4, 8, 7)
W1, W3, W5, DEEP = r(4, 4, 1, 1), r(4, 4, 3, 3), r(4, 4, 5, 5), r(4, 1, 3, 3)
B, S, T = r(4), r(4, 1, 1, seed=1) + 2, r(1, 4, 1, 1, seed=2)
LIN, R13, R31 = r(4, 4, seed=3), r(4, 4, 1, 3), r(4, 4, 3, 1)


def operator_nodes(graph):
    constants = constant_nodes(graph)
    return [node for node in graph.nodes if node.op == "call_function" and node not in constants]


def conv(x, weight=W3, bias=B, **kwargs):
    kwargs.setdefault("padding", weight.shape[-1] // 2)
    return F.conv2d(x, weight, bias, **kwargs)


def one(name, **others):
    return {name: 1, **others}


# ---- batch normalisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 6), (2, 4, 5, 3), (2, 4, 2, 3, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_any_dimensions(shape, affine):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = randomised_norms(kind(4, affine=affine)).double()
    left, applied = rewritten(norm, r(*shape))
    assert left == {"mul": 1, "add": 1}
    assert applied["batch_norms"] == 1


def norm_graph(target, *tail):
    """A graph of one operator, as other ways of tracing than `make_fx` write it."""
    graph = fx.Graph()
    names = ("weight", "bias", "mean", "var")
    root = nn.Module()
    for i, name in enumerate(names):
        root.register_buffer(name, r(4, seed=i).abs() + 0.5)
    x = graph.placeholder("x")
    x.meta["val"] = X
    node = graph.call_function(target, (x, *(graph.get_attr(name) for name in names), *tail))
    if target is not aten.batch_norm.default:
        node = graph.call_function(operator.getitem, (node, 0))
    node.meta["val"] = X
    graph.output(node)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    ("target", "tail"),
    [
        (aten.native_batch_norm.default, (False, 0.1, 1e-3)),
        (aten._native_batch_norm_legit.default, (False, 0.1, 1e-3)),
        (aten._native_batch_norm_legit_no_training.default, (0.1, 1e-3)),
        (aten._batch_norm_no_update.default, (0.1, 1e-3)),
        (aten.batch_norm.default, (False, 0.1, 1e-3, True)),
    ],
)
def test_operators_of_batch_norm(target, tail):
    module = norm_graph(target, *tail)
    want = module(X)
    assert rewrite(module.graph)["batch_norms"] == 1
    module.recompile()
    torch.testing.assert_close(module(X), want)


def test_batch_norms_that_stay():
    mean, var = r(4), r(4).abs() + 0.5
    batch = lambda x: F.batch_norm(x, None, None, B, B, training=True) * 1  # noqa: E731
    assert rewritten(batch, X)[0] == {"native_batch_norm": 1, "getitem": 1, "mul": 1}
    moving = lambda x: F.batch_norm(x, x.mean((0, 2, 3)), var)  # noqa: E731
    assert rewritten(moving, X)[0]["native_batch_norm"] == 1
    saved = lambda x: torch.native_batch_norm(x, None, None, mean, var, False, 0.1, 1e-5)[:2]  # noqa: E731
    assert rewritten(saved, X)[0]["native_batch_norm"] == 1
    training = lambda x: torch.native_batch_norm(x * 1, None, None, r(4), r(4), True, 0.1, 1e-5)[0]  # noqa: E731
    assert rewritten(training, X)[1] == {}, "it writes to its running statistics"
    assert batch_norms(traced(training, X).graph) == 0
    # Another layout than the result's: a view behind it might be impossible.
    sequence = lambda x: F.batch_norm(x.permute(0, 2, 1), mean, var).view(-1)  # noqa: E731
    assert rewritten(sequence, r(2, 6, 4))[0]["native_batch_norm"] == 1


# ---- into the layer before ------------------------------------------------------------------------------------------

SCALED = {
    "number": lambda y: y * 3,
    "channels": lambda y: y * S,
    "divided": lambda y: y / S,
    "shifted": lambda y: y + T,
    "less": lambda y: y - 0.5,
    "from": lambda y: T - y,
    "one minus": lambda y: 1 - y,
    "reversed": lambda y: torch.rsub(y, T, alpha=3),
    "negative": lambda y: -y,
    "alpha": lambda y: torch.add(y, T, alpha=2),
    "alpha of it": lambda y: torch.sub(T, y, alpha=3),
    "a tensor of one": lambda y: y * r(1),
    "no dimensions": lambda y: y * r(),
    "several": lambda y: ((y * S + T) / 2 - S) * T,
    "permuted": lambda y: (y.permute(0, 2, 3, 1) * B).permute(0, 3, 1, 2),
    "through a view": lambda y: y.flatten(2) * B[:, None] + S.flatten()[:, None],
    "in pixels": lambda y: y.permute(0, 2, 3, 1).reshape(-1, 4) * B,
    "averaged": lambda y: y.mean((2, 3)) * B + 1,
    "pooled": lambda y: F.avg_pool2d(y, 2) * S + T,
    "resized": lambda y: F.interpolate(y, scale_factor=2) * S + T,
    "padded pool": lambda y: F.avg_pool2d(y, 3, 1, 1) * S,
}
LAYERS = {
    "conv": conv,
    "no bias": lambda x: conv(x, bias=None),
    "depthwise": lambda x: conv(x, DEEP, groups=4),
    "grouped": lambda x: conv(x, r(4, 2, 3, 3), stride=2, groups=2),
    "transposed": lambda x: F.conv_transpose2d(x, W3, B, stride=2),
    "grouped transposed": lambda x: F.conv_transpose2d(x, r(4, 2, 3, 3), B, stride=2, groups=2),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_scale_and_shift_go_into_a_layer(layer):
    for name, f in SCALED.items():
        left, _ = rewritten(lambda x, f=f: f(LAYERS[layer](x)), X)
        assert not left.keys() & {"mul", "div", "add", "sub", "rsub", "neg"}, name
        assert left["convolution"] == 1, name


@pytest.mark.parametrize("bias", [None, B])
def test_scale_and_shift_go_into_a_linear_layer(bias):
    image = lambda x: F.linear(x.permute(0, 2, 3, 1), LIN, bias).permute(0, 3, 1, 2) * S + T  # noqa: E731
    assert rewritten(image, X)[0] == {"permute": 2, "linear": 1}
    assert rewritten(lambda x: F.linear(x, LIN, bias) * B - 1, r(5, 4))[0] == {"linear": 1}


@pytest.mark.parametrize(
    "f",
    [
        lambda y: y * r(1, 1, 8, 1),  # rows
        lambda y: y + r(8, 7),
        lambda y: y.permute(0, 2, 3, 1) * r(8, 1, 1),
        lambda y: y.reshape(2, 2, 2, 8, 7) * r(2, 1, 1),  # channels in two parts
        lambda y: y.reshape(2, 2, 4, 28) * r(4, 1),  # others that are as many
        lambda y: y.mean(1) * r(8, 1),
        lambda y: y * r(2, 1, 1, 1),  # images
        lambda y: y * y.mean((2, 3), keepdim=True),  # no constant
        lambda y: F.avg_pool2d(y, 3, 1, 1) + S,  # zeros of the padding are averaged
        lambda y: y.float() * 2,
        lambda y: y * r(3, 1, 4, 1, 1),  # one image becomes three
        lambda y: F.relu(y) * S,
        lambda y: torch.div(y, 2, rounding_mode="floor"),
        lambda y: 1 / y,
        lambda y: y.sum((2, 3)) + 1,
    ],
)
def test_what_does_not_go_into_the_layer_before(f):
    _, applied = rewritten(lambda x: f(conv(x)), X, rtol=1e-6)
    assert "into_layer_before" not in applied


def test_another_reader_keeps_a_layer_as_it_is():
    for f in (
        lambda y: (y * S, y),
        lambda y: (y * S).relu() + y.sigmoid(),
        lambda y: (y.permute(0, 2, 3, 1) * B, y.permute(0, 2, 3, 1)),
    ):
        left, applied = rewritten(lambda x, f=f: f(conv(x)), X)
        assert "into_layer_before" not in applied
        assert left["mul"] == 1


def test_layers_that_take_nothing():
    moving = lambda x: conv(x, W3 * x.mean()) * S  # noqa: E731
    assert rewritten(moving, X)[0]["mul"] == 2


def test_one_channel_that_becomes_several():
    assert rewritten(lambda x: conv(x, r(1, 4, 3, 3), None) * S, X)[0] == {"convolution": 1, "mul": 1}


def test_integers_stay():
    counts = torch.arange(12).reshape(1, 3, 2, 2)
    assert rewritten(lambda x: (x * 2 * 3 + 1) / 2 / 1, counts)[0] == {"mul": 2, "add": 1, "div": 2}
    # A float constant makes a float of an integer: that is no scale of what was there.
    assert rewritten(lambda x: x * 1.0, counts)[0] == {"mul": 1}


def test_a_wider_constant_widens():
    weight = torch.randn(4, 4, 3, 3)
    assert rewritten(lambda x: F.conv2d(x, weight) * S, X.float(), rtol=1e-5)[0] == {"convolution": 1, "mul": 1}


# ---- into the layers after ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("f", [SCALED[name] for name in ("number", "channels", "several", "from", "negative")])
def test_scale_and_shift_go_into_the_layers_after(groups, f):
    weight = r(8, 4 // groups, 3, 3)
    assert rewritten(lambda x: F.conv2d(f(x.relu()), weight, groups=groups), X)[0] == {"relu": 1, "convolution": 1}


def test_several_readers_of_a_scale():
    both = lambda x: [conv(y, padding=0, weight=w) for y in [x.relu() * S + T] for w in (W3, W1)]  # noqa: E731
    assert rewritten(both, X)[0] == {"relu": 1, "convolution": 2}
    pooled = lambda x: [g(y) for y in [x.relu() * S] for g in (conv, lambda y: conv(F.avg_pool2d(y, 2)))]  # noqa: E731
    assert rewritten(pooled, X)[0] == {"relu": 1, "convolution": 2, "avg_pool2d": 1}
    linear = lambda x: F.linear((x.relu() * S + T).mean((2, 3)), LIN, B)  # noqa: E731
    assert rewritten(linear, X)[0] == {"relu": 1, "mean": 1, "view": 1, "linear": 1}


def test_padding_takes_a_scale_but_no_shift():
    assert rewritten(lambda x: conv(x * S), X)[0] == {"convolution": 1}
    assert rewritten(lambda x: conv(x + T), X)[0] == {"convolution": 1, "add": 1}
    assert rewritten(lambda x: conv(x * S + T), X)[0] == {"convolution": 1, "mul": 1, "add": 1}
    assert rewritten(lambda x: F.conv_transpose2d(x * S, W3), X)[0] == {"convolution": 1}
    groups = lambda x: F.conv_transpose2d(x * S, r(4, 2, 3, 3), groups=2)  # noqa: E731
    assert rewritten(groups, X)[0] == {"convolution": 1}
    assert rewritten(lambda x: F.conv_transpose2d(x + T, W3), X)[0] == {"convolution": 1, "add": 1}
    pool = lambda x: conv(F.avg_pool2d(x + T, 3, 1, 1), W1)  # noqa: E731
    assert rewritten(pool, X)[0] == {"convolution": 1, "add": 1, "avg_pool2d": 1}


@pytest.mark.parametrize(
    "f",
    [
        lambda y: (conv(y), y),
        lambda y: conv(y) + y.relu(),
        lambda y: conv(F.max_pool2d(y, 2)),
        lambda y: conv(y, W3 * y.mean()),
        lambda y: F.linear(y, r(3, 7)),  # columns, not channels
    ],
)
def test_what_does_not_go_into_the_layers_after(f):
    assert "into_layers_after" not in rewritten(lambda x: f(x.relu() * S), X)[1]


def test_a_view_that_needs_the_product():
    """Without the multiplication, the view would be of memory with gaps."""
    gaps = lambda x: F.conv1d((x[:, :, ::2] * S).view(2, 4, 28), r(4, 4, 1))  # noqa: E731
    assert rewritten(gaps, X)[0] == {"slice": 1, "mul": 1, "view": 1, "convolution": 1}
    whole = lambda x: F.conv1d((x.sin() * S).view(2, 4, 56), r(4, 4, 1))  # noqa: E731
    assert rewritten(whole, X)[0] == {"sin": 1, "view": 1, "convolution": 1}


# ---- constants together ---------------------------------------------------------------------------------------------


def test_constants_come_together():
    assert rewritten(lambda x: x * S * 2 * T / 3, X)[0] == {"mul": 1}
    assert rewritten(lambda x: (x * r(8, 1)) * r(7), X)[0] == {"mul": 2}, "not as a larger constant"
    shared = lambda x: (y * 3 + y.relu() for y in [x * 2])  # noqa: E731
    assert rewritten(lambda x: next(shared(x)), X)[0]["mul"] == 2


def test_a_constant_goes_to_the_gate():
    gate = lambda x: torch.sigmoid(x.mean((2, 3), keepdim=True))  # noqa: E731
    module = traced(lambda x: x * gate(x) * 2 * S, X)
    rewrite(module.graph)
    sizes = [node.meta["val"].numel() for node in module.graph.nodes if node.target is aten.mul.Tensor]
    assert sorted(sizes)[-1] == X.numel()
    assert sum(size == X.numel() for size in sizes) == 1
    rewritten(lambda x: x * gate(x) * 2 * S, X)
    # One value per row does not fit into one per channel.
    assert "constants_together" not in rewritten(lambda x: x * gate(x) * r(8, 1), X)[1]
    assert "constants_together" not in rewritten(lambda x: (x * gate(x)) + T, X)[1]
    assert "constants_together" not in rewritten(lambda x: x.sin() * x.cos() * 2, X)[1]


# ---- parallel layers ------------------------------------------------------------------------------------------------

BRANCHES = {
    "3x3 and 1x1": lambda x: conv(x) + conv(x, W1),
    "and x": lambda x: conv(x) + conv(x, W1) + x,
    "x and 1x1": lambda x: x + conv(x, W1),
    "any association": lambda x: (x + conv(x, W1)) + (conv(x, W5, None) + conv(x, bias=None)),
    "differences": lambda x: conv(x) - (conv(x, W1) - x),
    "scaled": lambda x: (conv(x) * S + conv(x, W1, None) / 2) * 3 - (x * T - S),
    "alpha": lambda x: torch.add(conv(x), conv(x, W1), alpha=0.25),
    "depthwise": lambda x: conv(x, DEEP, groups=4) + conv(x, r(4, 1, 1, 1), groups=4) * S + x * T,
    "groups": lambda x: conv(x, r(4, 2, 3, 3), groups=2) + x,
    "strided": lambda x: conv(x, stride=2) + conv(x, W1, stride=2),
    "1x3 in 3x3": lambda x: conv(x, R13, padding=(0, 1)) + conv(x) + conv(x, R31, padding=(1, 0)),
    "twice the same": lambda x: y + y if (y := conv(x)) is not None else None,
    "off centre": lambda x: conv(x[..., :6], r(4, 4, 4, 4), stride=2, padding=1) + conv(x[..., :6], stride=2),
    "even": lambda x: conv(x, r(4, 4, 2, 2), padding=1) + conv(x, r(4, 4, 2, 2, seed=1), padding=1),
    "dilated": lambda x: conv(x, dilation=2, padding=2) + conv(x, W1) + x,
    "3x3 in dilated 5x5": lambda x: conv(x, W5, dilation=2, padding=4) + conv(x, dilation=2, padding=2),
    "token mixer": lambda x: x + S * (conv(x, DEEP, groups=4) + x * T - (x * S + T)),
    "permuted": lambda x: F.linear(x.permute(0, 2, 3, 1), LIN) + F.linear(x.permute(0, 2, 3, 1), LIN.T) * B,
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_parallel_layers_are_one(name):
    left, applied = rewritten(BRANCHES[name], X)
    assert applied["parallel_layers"] >= 1
    assert left["convolution"] + left["linear"] == 1
    assert not left.keys() & {"add", "sub", "mul"}


def test_linear_layers_beside_their_operand():
    x = r(3, 5, 4)
    assert rewritten(lambda x: x + F.linear(x, LIN, B) * B - F.linear(x, LIN.T), x)[0] == {"linear": 1}
    assert "parallel_layers" not in rewritten(lambda x: x + F.linear(x, r(1, 4)), x)[1]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: conv(x) + conv(x.relu(), W1),  # other operands
        lambda x: conv(x, DEEP, groups=4) + conv(x),  # other groups
        lambda x: conv(x, stride=2) + conv(x, r(4, 4, 2, 2), padding=0, stride=2)[:, :, :4, :1] * 2,  # broadcast
        lambda x: conv(x, R13, padding=(0, 1)) + conv(x, R31, padding=(1, 0)),  # a cross
        lambda x: conv(x) + conv(x, dilation=2, padding=2),
        lambda x: conv(x, dilation=3, padding=3) + conv(x, W5, dilation=2, padding=4),
        lambda x: conv(x, r(8, 1, 3, 3), None, groups=4) + torch.cat([x, x], 1),
        lambda x: conv(x, stride=2, padding=1) + conv(x[:, :, 1:, 1:], W1, stride=2)[:, :, :, :1],
        lambda x: conv(x, W3, padding=0) + x[:, :, 1:-1, 1:-1],
        lambda x: (conv(x) + r(8, 7)) * S + r(8, 1) * x,
        lambda x: F.conv_transpose2d(x, W1) + F.conv_transpose2d(x, W1.mT),
        lambda x: x * 2 + x,
        # Of one size, but with other strides, or filters that are read elsewhere
        lambda x: conv(x, W5, stride=4, padding=3) + conv(x, stride=3, padding=1),
        lambda x: conv(x, r(4, 4, 9, 7), stride=2, padding=(8, 6)) + x,
        lambda x: x + conv(x, r(4, 4, 2, 2), dilation=2, padding=1),
        lambda x: conv(x, W5) + conv(x, dilation=2, padding=2),
        lambda x: conv(x, stride=2) + conv(x, r(4, 4, 4, 1), stride=2, padding=(1, 0)),
        lambda x: (conv(x) + x.relu() + x.cos() + x.sin()) * S + x,  # three products in place of one
        lambda x: y + F.linear(y, LIN) if (y := x.permute(0, 2, 3, 1)) is not None else None,  # other strides
    ],
)
def test_branches_that_stay_apart(f):
    assert "parallel_layers" not in rewritten(f, X)[1]


def test_branches_with_other_readers():
    shared = lambda x: [y + conv(x), y] if (y := conv(x, W1)) is not None else None  # noqa: E731
    assert rewritten(shared, X)[0] == {"convolution": 2, "add": 1}
    inner = lambda x: [y.relu(), y + conv(x, W5)] if (y := conv(x, W1) + conv(x)) is not None else None  # noqa: E731
    left, _ = rewritten(inner, X)
    assert left == {"convolution": 2, "add": 1, "relu": 1}, "the inner sum is one layer, which two read"


def test_other_terms_of_a_sum_stay():
    other = X.relu()
    left, _ = rewritten(lambda x, z: z.relu() - (conv(x) + x) * 2 + z.sigmoid() * S, X, other)
    assert left == {"relu": 1, "sigmoid": 1, "convolution": 1, "mul": 1, "add": 2}
    two = lambda x, z: conv(x) + conv(z, W1) + x + z + conv(z)  # noqa: E731
    assert rewritten(two, X, other)[0] == {"convolution": 2, "add": 1}


def test_a_merged_layer_spreads_no_nan_further():
    """A filter of 1x1 padded to 3x3 sees no more than the 3x3 beside it."""
    x = X.clone()
    x[0, 1, 4, 3] = math.nan
    module = traced(BRANCHES["and x"], x)
    want = module(x).isnan()
    rewrite(module.graph)
    module.recompile()
    assert module(x).isnan().equal(want)


GATES = {
    "attention": lambda x, g: x + x * g,
    "less": lambda x, g: (x * g) * 2 - x / 2,
    "response": lambda x, g: x + torch.addcmul(T, S[None], x * g),
    "scaled": lambda x, g: (g * x * S + x * T) * 3 - T,
}


@pytest.mark.parametrize("name", GATES)
def test_a_common_factor_is_taken_out(name):
    def f(x):
        y = x.sin()
        return GATES[name](y, torch.sigmoid(y.mean((2, 3), keepdim=True)))

    module = traced(f, X)
    rewrite(module.graph)
    whole = [
        n for n in operator_nodes(module.graph) if n.meta["val"].shape == X.shape and n.target is not aten.sin.default
    ]
    shifts = 1 if name in ("response", "scaled") else 0
    assert len(whole) == 1 + shifts
    rewritten(f, X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, g: x + (x * g + x.cos()),
        lambda x, g: [x + y, y] if (y := x * g) is not None else None,
        lambda x, g: x + x * x.cos(),
        lambda x, g: x.cos() + x * g,
        lambda x, g: x + x * g.mean(1, keepdim=True) * S,  # one gate for all channels
        lambda x, g: x * r(8, 1) + x * g,
    ],
)
def test_factors_that_stay(f):
    def g(x):
        y = x.sin()
        return f(y, torch.sigmoid(y.mean((2, 3), keepdim=True)))

    assert "common_factors" not in rewritten(g, X)[1]


def test_addcmul():
    assert rewritten(lambda x: torch.addcmul(T, conv(x), S[None], value=2), X)[0] == {"convolution": 1}
    assert rewritten(lambda x: torch.addcmul(conv(x), S[None], T), X)[0] == {"convolution": 1}
    assert rewritten(lambda x: torch.addcmul(x, x.sin(), x.cos()), X)[0] == {"sin": 1, "cos": 1, "addcmul": 1}


# ---- layers in a row ------------------------------------------------------------------------------------------------

WIDE, NARROW = r(16, 4, 1, 1), r(4, 16, 1, 1)


@pytest.mark.parametrize("bias", [None, r(16)])
@pytest.mark.parametrize("stride", [1, 2])
def test_two_layers_in_a_row_are_one(bias, stride):
    pairs = {
        "1x1, 1x1": lambda x: conv(conv(x, WIDE, bias), NARROW, stride=stride),
        "1x1, 3x3": lambda x: F.conv2d(conv(x, WIDE, bias), r(4, 16, 3, 3), B, stride=stride, dilation=2),
        "3x3, 1x1": lambda x: conv(conv(x, r(16, 4, 3, 3), bias, stride=2), NARROW, None, stride=stride),
    }
    for name, f in pairs.items():
        assert rewritten(f, X)[0] == {"convolution": 1}, name
    b = None if bias is None else bias
    assert rewritten(lambda x: F.linear(F.linear(x, r(16, 4), b), r(4, 16)), r(3, 4))[0] == {"linear": 1}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: conv(conv(x, r(2, 4, 1, 1), None), r(16, 2, 1, 1), None),  # through fewer channels is cheaper
        lambda x: conv(conv(x, WIDE, r(16)), r(4, 16, 3, 3)),  # the padding sees no bias
        lambda x: conv(conv(x, r(16, 4, 3, 3), None), r(4, 16, 3, 3)),
        lambda x: conv(conv(x, r(16, 2, 1, 1), None, groups=2), NARROW),
        lambda x: conv(conv(x, WIDE, None), r(4, 4, 1, 1), groups=4),
        lambda x: conv(conv(x, WIDE, None).relu(), NARROW),
        lambda x: conv(conv(x, WIDE, r(16)), NARROW, padding=1),
        lambda x: F.conv_transpose2d(conv(x, WIDE, None), r(16, 4, 1, 1)),
        lambda x: F.linear(conv(x, WIDE, None).mean((2, 3)), r(4, 16)),
    ],
)
def test_layers_that_stay_apart(f):
    assert "layers_in_a_row" not in rewritten(f, X)[1]


def test_a_value_between_layers_that_is_read():
    read = lambda x: [conv(y, NARROW), y] if (y := conv(x, WIDE, None)) is not None else None  # noqa: E731
    assert "layers_in_a_row" not in rewritten(read, X)[1]


# ---- spelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (lambda x: F.linear(x, LIN, B), r(3, 4)),
        (lambda x: F.linear(x, LIN), r(3, 4)),
        (lambda x: F.linear(x, LIN, B), r(2, 3, 4)),
        (lambda x: F.linear(x, LIN), r(2, 3, 2, 4)),
        (lambda x: x @ LIN, r(3, 4)),
        (lambda x: x @ LIN.transpose(0, 1) + B, r(2, 3, 4)),
        (lambda x: torch.addmm(B, x, LIN, beta=2, alpha=3), r(3, 4)),
        (lambda x: torch.addmm(B[None], x, LIN.permute(1, 0)), r(3, 4)),
        (lambda x: F.linear(x.sin().transpose(1, 2), LIN, B), r(2, 4, 3)),
        (lambda x: x.sin().permute(0, 2, 3, 1) @ LIN, X),
    ],
)
def test_products_with_a_weight_are_linear_layers(f, x):
    left = rewritten(f, x)[0]
    assert left["linear"] == 1
    assert left.keys() <= {"linear", "sin", "permute", "transpose"}


def test_a_border_of_zeros_is_a_padding():
    for border in ((1, 1), (2, 2, 1, 1), (0, 0, 3, 3)):
        assert rewritten(lambda x, b=border: conv(F.pad(x, b), stride=2, padding=(1, 0)), X)[0] == {"convolution": 1}
    assert rewritten(lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), W3), X)[0] == {"convolution": 1}
    twice = lambda x: [conv(y), y.relu()] if (y := F.pad(x, (1, 1))) is not None else None  # noqa: E731
    assert rewritten(twice, X)[0]["constant_pad_nd"] == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: conv(F.pad(x, (0, 1, 0, 1))),
        lambda x: conv(F.pad(x, (1, 1), value=1)),
        lambda x: conv(F.pad(x, (-1, -1))),
        lambda x: conv(F.pad(x[:, :2], (0, 0, 0, 0, 1, 1))),
        lambda x: F.conv_transpose2d(F.pad(x, (1, 1)), W3),
        lambda x: F.max_pool2d(F.pad(x, (1, 1)), 2),
    ],
)
def test_borders_that_stay(f):
    assert "paddings" not in rewritten(f, X)[1]


def test_products_that_are_no_layers():
    assert rewritten(lambda x: x @ x.T, r(3, 4))[0]["linear"] == 0
    assert rewritten(lambda x: LIN @ x, r(4, 4))[0] == {"mm": 1}
    assert rewritten(lambda x: torch.addmm(r(3, 4), x, LIN), r(3, 4))[0] == {"addmm": 1}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.mean((-1, -2), keepdim=True),
        lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
        lambda x: F.avg_pool2d(x, (8, 7))[:, :, 0, 0],
        lambda x: x.mean((3, 2)),
    ],
)
def test_means_of_images(f):
    module = traced(f, X)
    rewrite(module.graph)
    (mean,) = (node for node in module.graph.nodes if node.target is aten.mean.dim)
    assert mean.args[1:] == ([2, 3], True)
    rewritten(f, X)


def test_other_means_stay():
    for f in (
        lambda x: x.mean((1, 2)),
        lambda x: x.mean(),
        lambda x: x.mean((2, 3), dtype=torch.float32),
        lambda x: F.adaptive_avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 7),
    ):
        assert "image_means" not in rewritten(f, X, rtol=1e-6)[1]


@pytest.mark.parametrize(
    ("name", "f"),
    [
        ("relu", lambda x: x.clamp(min=0)),
        ("relu", lambda x: x.clamp_min(0)),
        ("hardtanh", lambda x: x.clamp(-1, 2)),
        ("hardtanh", F.relu6),
        ("hardsigmoid", lambda x: F.relu6(x + 3) / 6),
        ("hardsigmoid", lambda x: (x + 3).clamp(0, 6) * (1 / 6)),
        ("hardswish", lambda x: x * F.relu6(x + 3) / 6),
        ("hardswish", lambda x: x * (F.relu6(x + 3) / 6)),
        ("hardswish", lambda x: (x / 6) * (3 + x).clamp(0, 6)),
        ("hardswish", lambda x: F.hardsigmoid(x) * x),
        ("silu", lambda x: x * torch.sigmoid(x)),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("gelu", lambda x: 0.5 * (x * (torch.erf(x * 2**-0.5) + 1))),
        ("gelu", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("gelu", lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (0.044715 * x * x * x + x))) / 2),
        ("gelu", lambda x: 0.5 * x * (1 + torch.tanh(x * math.sqrt(2 / math.pi) * (1 + 0.044715 * x * x)))),
    ],
)
def test_activations_written_out(name, f):
    assert rewritten(lambda x: f(x.sin() * 4), X)[0] == {"sin": 1, "mul": 1, name: 1}


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * F.relu6(x + 2) / 6,
        lambda x: x * F.relu6(x + 3) / 5,
        lambda x: x * (x + 3).clamp(0, 5) / 6,
        lambda x: x.relu() * torch.sigmoid(x),
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
        lambda x: x * 0.5 * (1 + torch.erf(x / 1.41)),
        lambda x: x * 0.5 * (2 + torch.erf(x / math.sqrt(2))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**2))),
        lambda x: x.clamp(min=1),
        lambda x: (x * y, y) if (y := torch.sigmoid(x)) is not None else None,
    ],
)
def test_formulas_that_are_something_else(f):
    left, _ = rewritten(f, X)
    assert not left.keys() & {"gelu", "silu", "hardswish", "hardsigmoid", "relu"} - (
        {"relu"} if left["relu"] else set()
    )
    assert left.keys() & {"mul", "clamp_min", "clamp", "sigmoid"}


# ---- identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * 1,
        lambda x: 1.0 * x,
        lambda x: x / 1,
        lambda x: x + 0,
        lambda x: 0 + x,
        lambda x: x - 0,
        lambda x: x.clone(),
        lambda x: x.contiguous(),
        lambda x: x.view(2, 4, 8, 7),
        lambda x: x.view(2, 4, 56).view(2, 4, 8, 7),
        lambda x: x.permute(0, 1, 2, 3),
        lambda x: x[:, :4],
        lambda x: x.expand(2, 4, 8, 7),
        lambda x: x.detach(),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.pad(x, (0, 0, 0, 0)),
        lambda x: F.avg_pool2d(x, 1),
        lambda x: x.to(torch.float64, copy=True),
    ],
)
def test_what_does_nothing_vanishes(f):
    assert rewritten(lambda x: f(x.sin()).cos(), X)[0] == {"sin": 1, "cos": 1}


def test_dropout_as_other_tracers_write_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.native_dropout.default, (x, 0.5, False))
    z = graph.call_function(operator.getitem, (y, 0))
    out = graph.call_function(aten.cos.default, (graph.call_function(aten.dropout.default, (z, 0.5, False)),))
    for node in (x, z, *graph.nodes):
        node.meta["val"] = X
    graph.output(out)
    assert spelling.identities(graph) == 2
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: 0 - x,
        lambda x: x * 2,
        lambda x: x + 1,
        lambda x: torch.sub(0, x.sin()),
        lambda x: x.view(2, 4, 56),
        lambda x: x[:, 1:],
        lambda x: x[:, ::2],
        lambda x: x.permute(0, 1, 3, 2),
        lambda x: F.pad(x, (0, 1)),
        lambda x: F.avg_pool2d(x, 1, 2),
        lambda x: x.to(torch.float32),
        lambda x: F.dropout(x, 0.5),
        lambda x: x.permute(0, 2, 3, 1).contiguous().view(-1, 4),
    ],
)
def test_what_does_something_stays(f):
    module = traced(lambda x: f(x.sin()).cos(), X)
    before = [node.target for node in module.graph.nodes if node.op == "call_function"]
    spelling.identities(module.graph)
    assert [node.target for node in module.graph.nodes if node.op == "call_function"] == before


def test_equal_calls_are_one():
    assert rewritten(lambda x: x.sin().relu() * x.sin().sigmoid(), X)[0] == {
        "sin": 1,
        "relu": 1,
        "sigmoid": 1,
        "mul": 1,
    }
    norms = lambda x: F.layer_norm(x, (7,)) + F.layer_norm(x, (7,), eps=1e-3)  # noqa: E731
    assert rewritten(norms, X)[0]["native_layer_norm"] == 2
    module = traced(lambda x: F.dropout(x) * F.dropout(x) + F.dropout(x.cos()), X)
    assert spelling.repeated_calls(module.graph) == 0
    assert rewritten(lambda x: [x.sin(), x.sin()], X)[0] == {"sin": 2}, "results are not one tensor"


def test_results_share_no_memory_that_they_did_not():
    for f in (
        lambda x: x.clone(),
        lambda x: x * 1,
        lambda x: x.view(2, 4, 8, 7),
        lambda x: (y, y.clone()) if (y := x.sin()) is not None else None,
        lambda x: (y + 0).view(-1) if (y := x.sin()) is not None else None,
        lambda x: (S * 1, x.sin()),
    ):
        module = traced(f, X)
        before = len(module.graph.nodes)
        spelling.identities(module.graph)
        assert len(module.graph.nodes) == before


def test_a_copy_with_other_strides_stays():
    copy = lambda x: x.sin().contiguous(memory_format=torch.channels_last).cos()  # noqa: E731
    assert rewritten(copy, X)[0] == {"sin": 1, "clone": 1, "cos": 1}


# ---- the whole ------------------------------------------------------------------------------------------------------


def test_a_graph_that_writes_stays():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    y = graph.call_function(aten.mul.Tensor, (x, 1))
    y.meta["val"] = X
    graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output(y)
    assert rewrite(graph) == {}
    assert len(graph.nodes) == 4


def test_views_in_place():
    vector = lambda x: F.linear(x, LIN, B)  # noqa: E731
    assert any(node.target is aten.squeeze_.dim for node in traced(vector, r(4)).graph.nodes)
    assert rewritten(vector, r(4))[0]["linear"] == 1
    # What PyTorch does to the mean of an image in channels_last.
    for strides, count in (((4, 1, 4, 4), 1), ((4, 4, 1, 1), 0)):
        module = traced(lambda x: x.mean((2, 3), keepdim=True).cos(), X)
        (mean,) = (node for node in module.graph.nodes if node.target is aten.mean.dim)
        with module.graph.inserting_after(mean):
            given = module.graph.call_function(aten.as_strided_.default, (mean, [2, 4, 1, 1], list(strides)))
        mean.replace_all_uses_with(given, lambda user, given=given: user is not given)
        assert writing.views_in_place(module.graph) == count


def test_a_write_to_all_of_a_value():
    """The value that was there before is not read, and so not made."""

    def overwritten(x):
        y = F.silu(x)
        y[:] = x.sin()
        return y * 2

    left, _ = rewritten(overwritten, X)
    assert not {"silu", "copy"} & left.keys()


def test_what_is_written_to_values_of_the_graph_itself():
    """`functionalize` sees no values that come from weights alone."""

    def made_of_weights(x):
        table = F.linear(r(1, 3, 4), LIN, B)
        return x * F.relu(table, inplace=True).sum()

    module = traced(made_of_weights, X)
    writes = [node for node in module.graph.nodes if is_mutation(node)]
    assert {node.target for node in writes} >= {aten.relu_.default}
    want = module(X)
    rewrite(module.graph)
    module.recompile()
    assert not any(is_mutation(node) for node in module.graph.nodes)
    assert torch.allclose(module(X), want)


def _written(*, of_input=False, part=False, seen=False, kept=False, before=False):
    """x.exp() * 2, the product in place, and who else looks at that memory."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X

    def call(target, *args, like=X):
        node = graph.call_function(target, args)
        node.meta["val"] = like
        return node

    y = x if of_input else call(aten.exp.default, x)
    read_before = call(aten.neg.default, y) if before else None
    name = call(aten.view.default, y, list(X.shape)) if seen else None
    written = call(aten.slice.Tensor, y, 1, 0, 2, like=X[:, :2]) if part else y
    z = call(aten.mul_.Tensor, written, 2, like=written.meta["val"])
    graph.output([t for t in (z, name, y if kept else None, read_before) if t is not None])
    return graph, z


@pytest.mark.parametrize("how", [{}, {"before": True}])
def test_a_write_becomes_a_new_value(how):
    graph, z = _written(**how)
    assert writing.writes_to_own(graph) == 1
    assert z.target is aten.mul.Tensor


@pytest.mark.parametrize("how", ["of_input", "part", "seen", "kept"])
def test_a_write_that_others_see_stays(how):
    graph, z = _written(**{how: True})
    assert writing.writes_to_own(graph) == 0
    assert z.target is aten.mul_.Tensor


def test_a_node_that_does_not_say_its_shape():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.mul.Tensor, (x, 2)))
    with pytest.raises(ValueError, match="does not say what tensor it is"):
        rewrite(graph)
