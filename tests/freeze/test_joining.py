"""Concatenations that are written in place: what lies where, and that nobody notices but the clock."""

from __future__ import annotations

import ctypes
import mmap
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, distance, eager, needs_library, randomised
from torch import nn

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.timing import Timing
from convselect.freeze import joining, layer, plan, program

pytestmark = needs_library
KERNELS = ("depthwise", "winograd4", "winograd2", "product", "direct")


def force(monkeypatch, layout):
    """Nothing is measured: this layout between the layers, and kernels of the C library."""

    def fastest(functions, *_):
        return next((name for name in KERNELS if name in functions), "native")

    monkeypatch.setattr(plan, "timed", lambda functions, *_: {n: Timing((float(n != layout),)) for n in functions})
    monkeypatch.setattr(layer, "fastest", fastest)
    monkeypatch.setattr(_Noted, "layout", layout, raising=False)


@pytest.fixture(params=[CHANNELS_LAST, CONTIGUOUS])
def forced_kernels(request, monkeypatch):
    force(monkeypatch, request.param)
    return request.param


class _Noted(joining.Joining):
    """Keeps what was made last."""

    last: _Noted
    layout: str  # that is forced

    def __init__(self, steps, *others):
        super().__init__(steps, *others)
        self.steps = steps
        _Noted.last = self

    def parts(self):
        """(parts in place, parts) of each concatenation of four dimensions, in order."""
        joins = [step for step in self.steps if self._is_join(step)]
        return [(len(self.there(step) or ()), len(step.args[0])) for step in joins]


@pytest.fixture(autouse=True)
def _noted(monkeypatch):
    monkeypatch.setattr(program, "Joining", _Noted)
    monkeypatch.setattr(program, "laid_out", apart)
    monkeypatch.setattr(program, "pages", SimpleNamespace(empty=guarded))


def apart(wanted):
    """Each value on pages of its own, with its end at the end of the last, and one page more."""
    starts, size = {}, 0
    for value, (n_bytes, _, _) in wanted.items():
        size += -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        starts[value] = size - -(-n_bytes // 64) * 64
        size += mmap.PAGESIZE
    guarded.ends = [start + -(-wanted[value].n_bytes // 64) * 64 for value, start in starts.items()]
    return starts, size


def guarded(n_bytes):
    """Memory full of NaN: whatever is read before it is written shows. Behind each value nothing may be read."""
    memory = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
    block = torch.frombuffer(memory, dtype=torch.uint8)
    block.view(torch.float32).fill_(float("nan"))
    for end in guarded.ends:
        page = ctypes.c_void_p(block.data_ptr() + end)
        assert ctypes.CDLL(None).mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return block


def check(model, *shape, calls=3):
    """The frozen model against itself, several times, with results that stay."""
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(calls)]
    convselect.freeze(model, inputs[0])
    # A plan whose result is wrong is not taken, and the model itself runs.
    assert [kind.layout for kind in convselect.summary(model).inputs] == [_Noted.layout]
    got = [model(x) for x in inputs]
    for x, mine in zip(inputs, got, strict=True):
        want = eager(model, x)
        for a, b in zip(*([t] if isinstance(t, torch.Tensor) else t for t in (mine, want)), strict=True):
            assert a.stride() == b.stride()
            assert distance(a, b) < CONV
    convselect.unfreeze(model)


class Graph(nn.Module):
    """A network as a function of its layers, which are made when they are first called for."""

    def __init__(self, f, *shape):
        super().__init__()
        self.f, self.layers = f, nn.ModuleDict()
        with torch.no_grad():
            self(torch.randn(shape))
        randomised(self)

    def conv(self, name, x, out, kernel=3, **options):
        if name not in self.layers:
            groups = options.get("groups", 1)
            options.setdefault("padding", kernel // 2)
            self.layers[name] = nn.Conv2d(x.shape[1], out, kernel, **{**options, "groups": groups})
        return self.layers[name](x)

    def forward(self, x):
        return self.f(self, x)


def dense(net, x):
    found = [net.conv("stem", x, 16)]
    for i in range(3):
        y = net.conv(f"narrow {i}", torch.cat(found, 1).relu(), 24, 1).relu()
        found.append(net.conv(f"new {i}", y, 8))
    return net.conv("last", torch.cat(found, 1), 5, 1)


def ghost(net, x):
    y = net.conv("primary", x, 12, 1).relu()
    y = torch.cat([y, net.conv("cheap", y, 12, groups=12).relu()], 1)
    return net.conv("last", y, 6, 1)


def inception(net, x):
    x = net.conv("stem", x, 8).relu()
    parts = [
        net.conv("a", x, 5, 1).relu(),
        net.conv("b", net.conv("b0", x, 7, 1).relu(), 11).relu(),
        F.max_pool2d(x, 3, 1, 1),
        F.avg_pool2d(x, 3, 1, 1),
        x.sigmoid() * 2,
    ]
    return net.conv("last", torch.cat(parts, 1), 9)


def nested(net, x):
    a, b, c = (net.conv(name, x, n).relu() for name, n in (("a", 4), ("b", 6), ("c", 5)))
    inner = torch.cat([b, a], 1)
    return net.conv("last", torch.cat([c, inner], 1), 4, 1) + net.conv("inner", inner, 4)


def slices(net, x):
    x = net.conv("stem", x, 16).relu()
    a, b, c = x[:, :4], *x[:, 4:].split([5, 7], 1)
    y = net.conv("a", a, 4)
    z = net.conv("b", y + a, 6) + net.conv("c", b, 6, 1)
    return net.conv("last", torch.cat([z, y, c, F.avg_pool2d(c, 3, 1, 1)], 1), 3, 1)


# The concatenations, in order: (parts in place, parts).
ALL_IN_PLACE = {
    "dense": (dense, [(1, 1), (2, 2), (3, 3), (4, 4)]),
    "ghost": (ghost, [(2, 2)]),
    "inception": (inception, [(5, 5)]),
    "nested": (nested, [(2, 2), (2, 2)]),
    "slices": (slices, [(2, 4)]),  # a slice lies where it is, and its average is made there
}


@pytest.mark.parametrize("name", ALL_IN_PLACE)
def test_all_parts_are_in_place(name, forced_kernels):
    f, expected = ALL_IN_PLACE[name]
    check(Graph(f, 1, 3, 12, 10), 1, 3, 12, 10)
    if name == "slices" and forced_kernels == CONTIGUOUS:
        expected = [(3, 4)]  # what a residual was added to as well
    assert _Noted.last.parts() == expected


# ---- what must not lie in a concatenation ---------------------------------------------------------------------------


def two(net, x):
    return net.conv("a", x, 6).relu(), net.conv("b", x, 4).relu()


def returned(net, x):
    a, b = two(net, x)
    return a, torch.cat([a, b], 1).relu()


def view_returned(net, x):
    a, b = two(net, x)
    return a[:, 2:4], torch.cat([a, b], 1).relu()


def result(net, x):
    a, b = two(net, x)
    return torch.cat([a, b], 1), a.sigmoid()


def twice(net, x):
    a, b = two(net, x)
    return net.conv("last", torch.cat([a, b, a], 1), 4)


def in_two_orders(net, x):
    a, b = two(net, x)
    return net.conv("last", torch.cat([a, b], 1), 4) + net.conv("other", torch.cat([b, a], 1), 4)


def as_a_residual(net, x):
    a, b = two(net, x)
    return net.conv("last", torch.cat([a, b], 1), 4), (net.conv("c", b, 6) + a).relu()


def read_by_a_result(net, x):
    a, b = two(net, x)
    return net.conv("last", torch.cat([a, b], 1), 4), net.conv("c", b, 6, 1)


def with_a_residual(net, x):
    a, b = two(net, x)
    c = (net.conv("c", b, 6) + a).relu()
    return net.conv("last", torch.cat([c, b], 1), 4)


def averaged(net, x):
    a, b = two(net, x)
    return net.conv("last", torch.cat([a, b], 1) * a.mean((2, 3), keepdim=True).repeat(1, 2, 1, 1)[:, :10], 4)


def of_the_input(net, x):
    return net.conv("last", torch.cat([x, x.relu(), net.conv("a", x, 4)], 1), 4)


def of_one_channel(net, x):
    x = net.conv("stem", x, 8).relu()
    return net.conv("last", torch.cat([net.conv("a", x, 1).relu(), x.sigmoid() * 2, net.conv("b", x, 4)], 1), 4)


def along_the_rows(net, x):
    return net.conv("last", torch.cat(two(net, x)[:1] * 2, 2), 4)


# How many of the parts may be in place in NHWC, where pixels are further apart than they have channels.
KEPT = {
    returned: 1, view_returned: 1, result: 0, twice: 1, in_two_orders: 2, as_a_residual: 1, read_by_a_result: 2,
    with_a_residual: 1,
    averaged: 1, of_the_input: 0, of_one_channel: 2, along_the_rows: 0,
}  # fmt: skip


@pytest.mark.parametrize("f", KEPT, ids=lambda f: f.__name__)
def test_what_does_not_lie_in_a_concatenation(f, forced_kernels):
    check(Graph(f, 1, 3, 9, 10), 1, 3, 9, 10)
    if forced_kernels == CHANNELS_LAST:
        assert sum(there for there, _ in _Noted.last.parts()) == KEPT[f]


def test_results_of_two_calls_are_separate_memory(forced_kernels):
    model = Graph(result, 1, 3, 9, 10)
    convselect.freeze(model, torch.randn(1, 3, 9, 10))
    first = model(torch.randn(1, 3, 9, 10))
    kept = [t.clone() for t in first]
    model(torch.randn(1, 3, 9, 10))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_pixels_that_would_share_sets_of_the_cache_are_moved_apart(forced_kernels):
    def f(net, x):
        a, b = net.conv("a", x, 500, 1), net.conv("b", x, 12, 1)
        return net.conv("last", torch.cat([a, b], 1).relu(), 4, 1)

    check(Graph(f, 1, 3, 5, 4), 1, 3, 5, 4)
    joins = _Noted.last
    root = next(iter(joins.places.values())).root
    assert joins.n_bytes(root) == 4 * 20 * (528 if forced_kernels == CHANNELS_LAST else 512)


# ---- random networks ------------------------------------------------------------------------------------------------


def drawn(seed):
    """A random network of convolutions, concatenations, slices, sums and pools."""
    plan = random.Random(seed)
    choices = [plan.random() for _ in range(200)]

    def f(net, x):
        draws = iter(choices)

        def pick(options):
            return options[int(next(draws) * len(options))]

        values = [net.conv("stem", x, 8).relu()]
        for i in range(12):
            v, what = (
                pick(values[-4:]),
                pick(["conv", "conv", "deep", "cat", "cat", "cat", "slice", "sum", "pool", "act"]),
            )
            if what == "conv":
                v = net.conv(f"{i}", v, pick([3, 4, 8, 17, 32]), pick([1, 3]))
                v = pick([v, v.relu(), F.silu(v)])
            elif what == "deep":
                v = net.conv(f"{i}", v, v.shape[1], 3, groups=v.shape[1])
            elif what == "cat":
                v = torch.cat([v, *(pick(values[-4:]) for _ in range(pick([1, 1, 2])))], 1)
            elif what == "slice":
                cut = max(1, v.shape[1] // 3)
                v = v[:, cut : cut + max(1, v.shape[1] // 2)]
            elif what == "sum":
                v = net.conv(f"{i}", pick(values[-4:]), v.shape[1], 1) + v
            elif what == "pool":
                v = pick([F.max_pool2d, F.avg_pool2d])(v, 3, 1, 1)
            else:
                v = v.sigmoid() * v
            values.append(v if v.shape[1] < 80 else net.conv(f"{i} down", v, 16, 1))
        last = net.conv("last", torch.cat(values[-3:], 1), 6, 1)
        return (last, pick(values)) if pick([True, False]) else last

    return f


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_random_networks(seed, images, forced_kernels):
    shape = (images, 3, 9, 8)
    check(Graph(drawn(seed + 100 * images), *shape), *shape, calls=2)


def test_random_networks_have_parts_in_place(monkeypatch):
    """Else the test before would show nothing."""
    force(monkeypatch, CHANNELS_LAST)
    found = []
    for seed in range(3):
        check(Graph(drawn(seed + 100), 1, 3, 9, 8), 1, 3, 9, 8, calls=1)
        found += _Noted.last.parts()
    assert sum(there for there, _ in found) >= sum(parts for _, parts in found) // 3 > 2


class Skip(nn.Module):
    """A U-Net of volumes of one level."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv3d(8, 16, 3, padding=1), nn.Conv3d(16, 32, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose3d(32, 16, 2, 2), nn.Conv3d(32, 8, (3, 1, 1))

    def forward(self, x):
        skip = F.relu(self.first(x))
        return self.last(torch.cat([self.up(F.relu(self.down(skip))), F.group_norm(skip, 4)], 1)).relu_()


def test_skips_of_volumes(forced_kernels):
    """In place in NCDHW; copied in NDHWC, where kernels of volumes know of no gaps, and of several volumes."""
    for batch in (1, 2):
        check(randomised(Skip()), batch, 8, 4, 6, 8)
        assert _Noted.last.parts() == ([(2, 2)] if forced_kernels == CONTIGUOUS and batch == 1 else [])
