"""Volumes, frozen: every candidate in every geometry, what stands between layers, and networks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import CONV, check_candidate, distance, eager, needs_library, randomised, unfrozen, use_forced
from pairs import pairs
from torch import nn

import convselect
from benchmarks.memory import Live
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.settings import current, exactly
from convselect.freeze import layer as freeze_layer
from convselect.freeze import plan
from convselect.freeze.capture import capture
from convselect.freeze.freeze import frozen_forwards
from convselect.freeze.program import Program, Registry
from convselect.freeze.views import views_of
from convselect.kernels._common import format_of
from convselect.store import process

LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)


def posed(layer, x, *after):
    """(step, frozen layer, what it computes in float64) of a layer with a batch norm and what follows it."""
    norm = nn.BatchNorm3d(layer.out_channels)
    model = randomised(nn.Sequential(layer, norm, *after))
    with torch.no_grad():
        ((step, frozen),) = Program(capture(model, (x,)), Registry()).layers.items()
        return step, frozen, model.double()(x.double())


def found(step, frozen, x, layout, residual=None, settings=None):
    """Candidates, with x and residual as they read them."""
    views = views_of(step)
    x, residual = (None if t is None else t.contiguous(memory_format=format_of(layout, 5)) for t in (x, residual))
    x, residual = views.of_x(x), views.of_residual(residual)
    return frozen.candidates(x, residual, layout, settings or current()), x, residual


def check_every(step, frozen, x, want):
    names = set()
    for layout in LAYOUTS:
        candidates, given, _ = found(step, frozen, x, layout)
        for candidate in candidates:
            check_candidate(candidate, given, None, views_of(step).of_residual(want))
        names |= {candidate.name for candidate in candidates}
    return names


# ---- layers ---------------------------------------------------------------------------------------------------------

GEOMETRIES = {
    "kernel": (1, 2, 3, (1, 3, 3), (3, 1, 1), (2, 4, 4), (3, 7, 7), (1, 1, 3)), "stride": (1, 2, (1, 2, 2), (2, 1, 1)),
    "padding": (0, 1, (1, 0, 0), (0, 1, 1)), "dilation": (1, 2, (2, 1, 1)), "groups": (1, 2, 16),
    "size": ((1, 13, 14), (3, 14, 13), (6, 13, 13), (5, 1, 1)), "batch": (1, 2),
}  # fmt: skip


def geometries(kind):
    for kernel, stride, padding, dilation, groups, size, batch in pairs(*GEOMETRIES.values()):
        layer = kind(16, 32, kernel, stride, padding, dilation=dilation, groups=groups)
        try:
            with torch.no_grad():
                layer(torch.randn(1, 16, *size))
        except RuntimeError:  # no such convolution: larger than its input, or an output padding that it needs
            continue
        yield layer, size, batch


@needs_library
@pytest.mark.parametrize("kind", [nn.Conv3d, nn.ConvTranspose3d])
def test_every_candidate(kind):
    names, count = set(), 0
    for layer, size, batch in geometries(kind):
        x = torch.randn(batch, 16, *size)
        step, frozen, want = posed(layer, x, nn.LeakyReLU(0.2))
        assert (step.target.activation, step.target.slope) == ("leaky_relu", 0.2)
        with torch.no_grad():
            names |= check_every(step, frozen, x, want)
        count += 1
    assert count > 15
    usual = {"native", "direct", "winograd2", "winograd4"}
    own = {"onednn_packed", "depthwise_slices", "direct_slices", "winograd4_slices", "depthwise"}
    assert names > usual | (own if kind is nn.Conv3d else {"product_phases", "direct_phases"})


KINDS = {
    "3x3x3": ((3, 1, 1), None, {"winograd4", "direct"}, {"winograd4", "direct_slices"}),
    "3x3x3 of one slice": ((3, 1, 1), None, {"winograd4"}, {"direct_slices"}),
    "1x3x3": (((1, 3, 3), 1, (0, 1, 1)), None, {"winograd4"}, {"winograd4_slices", "direct_slices"}),
    "3x1x1": (((3, 1, 1), 1, (1, 0, 0)), "columns", {"winograd4", "direct"}, {"direct"}),
    "1x1x1": ((1,), "columns", {"direct"}, {"product", "direct"}),
    "1x1x1 at stride 2": ((1, 2), None, {"direct"}, {"product_slices"}),
    "3x1x1 at stride 2": (((3, 1, 1), (2, 1, 1), (1, 0, 0)), "columns", {"direct"}, {"direct"}),
    "1x3x3 of one slice": (((1, 3, 3), 1, (0, 1, 1)), "slice", {"winograd4", "direct"}, {"winograd4", "direct"}),
}


@needs_library
@pytest.mark.parametrize("name", KINDS)
def test_what_runs_which_layer(name):
    arguments, seen_as, contiguous, last = KINDS[name]
    depth = 1 if name.endswith("of one slice") else 6
    x = torch.randn(1, 16, depth, 9, 9)
    step, frozen, want = posed(nn.Conv3d(16, 32, *arguments), x)
    assert step.seen_as == seen_as
    with torch.no_grad():
        check_every(step, frozen, x, want)
    for layout, wanted in zip(LAYOUTS, (contiguous, last), strict=True):
        candidates, given, _ = found(step, frozen, x, layout)
        assert given.dim() == (5 if seen_as is None else 4)
        assert wanted <= {c.name for c in candidates}
        exact, _, _ = found(step, frozen, x, layout, settings=exactly(current()))
        assert not any(c.tile for c in exact)


@needs_library
@pytest.mark.parametrize("kernel", [3, (1, 3, 3), (3, 1, 1), (2, 1, 2)])
def test_residuals_of_every_candidate(kernel):
    """Also where one call does not make the whole sum."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(8, 16, kernel)

        def forward(self, x, other):
            return F.silu(self.conv(x) + other)

    model, x = randomised(Sum()), torch.randn(2, 8, 6, 7, 8)
    with torch.no_grad():
        other = torch.randn_like(model.conv(x))
        ((step, frozen),) = Program(capture(model, (x, other)), Registry()).layers.items()
        want = views_of(step).of_residual(model.double()(x.double(), other.double()))
        for layout in LAYOUTS:
            candidates, given, residual = found(step, frozen, x, layout, other)
            assert len(candidates) > 2
            for candidate in candidates:
                check_candidate(candidate, given, residual, want)


@needs_library
@pytest.mark.parametrize("kernel", [3, (1, 3, 3)])
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 4, 4), (4, 8, 8)])
def test_values_that_are_not_finite_stay_where_they_are(kernel, place):
    step, frozen, _ = posed(nn.Conv3d(16, 16, kernel, padding=[k // 2 for k in (kernel if kernel != 3 else (3,) * 3)]),
                            torch.randn(1, 16, 5, 9, 9))  # fmt: skip
    x = torch.randn(1, 16, 5, 9, 9)
    x[(0, 3, *place)] = torch.inf
    with torch.no_grad():
        want = frozen.native(x)
        for layout in LAYOUTS:
            for candidate in found(step, frozen, x, layout)[0]:
                given = x.contiguous(memory_format=format_of(layout, 5))
                got = candidate.bind(None, None, None)(given, None)
                torch.testing.assert_close(got.isfinite(), want.isfinite(), msg=candidate.name)


@needs_library
def test_packed_weights_follow():
    """Those of slices and rows are kept, too, and written again in place."""
    for kind, arguments in ((nn.Conv3d, (3, 1, 1)), (nn.ConvTranspose3d, (2, 2))):
        x = torch.randn(1, 16, 4, 6, 6)
        model = randomised(nn.Sequential(kind(16, 16, *arguments)))
        with torch.no_grad():
            ((step, frozen),) = Program(capture(model, (x,)), Registry()).layers.items()
            candidates, given, _ = found(step, frozen, x, CHANNELS_LAST)
            runs = [(c.name, c.bind(None, None, None)) for c in candidates if c.pack is not None]
            assert {"direct_slices", "product_phases"} & {name for name, _ in runs}
            model[0].weight.mul_(-2.0)
            model[0].bias.add_(1.0)
            assert frozen.refold()
            for name, run in runs:
                assert distance(run(given, None), model(x)) < CONV, name


@needs_library
def test_threads_share_the_rows():
    x = torch.randn(2, 16, 3, 5, 6)
    layer, results = nn.ConvTranspose3d(16, 8, (2, 3, 2), (2, 3, 2)), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            step, frozen, want = posed(layer.float(), x, nn.SiLU())
            with torch.no_grad():
                candidates, given, _ = found(step, frozen, x, CHANNELS_LAST)
                (products,) = (c for c in candidates if c.name == "product_phases")
                check_candidate(products, given, None, want)
                results.append(products.bind(None, None, None)(given, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, results[0]) for one in results)


# ---- between layers -------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    """A function between two convolutions of volumes."""

    def __init__(self, function, c=8):
        super().__init__()
        self.a, self.b = nn.Conv3d(c, c, 3, padding=1), nn.Conv3d(c, c, 3, padding=1)
        self.thin = nn.Conv3d(c, c, (3, 1, 1), padding=(1, 0, 0))
        self.norm, self.weight = nn.BatchNorm3d(c), nn.Parameter(torch.ones(c, 1, 1, 1))
        self.instance, self.several = nn.InstanceNorm3d(c, affine=True), nn.PReLU(c)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self, self.a(x)))


BETWEEN = {
    "nothing": lambda m, y: y,
    "batch norm": lambda m, y: F.relu(m.norm(y)),
    "instance norm": lambda m, y: F.leaky_relu(m.instance(y), 0.1),
    "plain instance norm": lambda m, y: F.instance_norm(y),
    "instance norm read twice": lambda m, y: (lambda z: F.relu(z) + z)(m.instance(y)),
    "group norm": lambda m, y: F.silu(F.group_norm(y, 4)),
    "several slopes": lambda m, y: m.several(y),
    "elu": lambda m, y: F.elu(y),
    "residual": lambda m, y: F.relu(y + m.b(F.relu(y))),
    "along the depth": lambda m, y: F.relu(m.norm(m.thin(y)) + y),
    "scale": lambda m, y: y * m.weight,
    "concatenation": lambda m, y: torch.cat([m.b(y)[:, :4], F.relu(y)[:, :4]], 1),
    "skip": lambda m, y: m.b(y + 1) + torch.cat([m.thin(y), F.relu(m.b(y))], 1)[:, 4:12],
    "slices": lambda m, y: m.thin(y[..., 1:]),
    "nearest": lambda m, y: F.interpolate(y, scale_factor=2.0),
    "trilinear": lambda m, y: F.interpolate(y, scale_factor=2.0, mode="trilinear"),
    "maximum": lambda m, y: F.max_pool3d(F.relu(y), 2),
    "maximum of some": lambda m, y: F.max_pool3d(y, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "maximum along the depth": lambda m, y: F.max_pool3d(y, (2, 1, 1), (2, 1, 1)),
    "maximum with a border": lambda m, y: F.max_pool3d(y, 3, 2, 1, ceil_mode=True),
    "average": lambda m, y: F.avg_pool3d(y, 3, 2, 1),
    "average without the border": lambda m, y: F.avg_pool3d(y, (3, 1, 3), 2, (1, 0, 1), count_include_pad=False),
    "average by a divisor": lambda m, y: F.avg_pool3d(y, 2, divisor_override=3),
    "adaptive": lambda m, y: F.adaptive_avg_pool3d(y, (2, 3, 3)),
    "gate": lambda m, y: y * F.adaptive_avg_pool3d(y, 1).sigmoid(),
    "padded": lambda m, y: F.pad(y, (2, 0, 0, 1, 1, 0)),
    "reflected": lambda m, y: F.pad(y, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "cut": lambda m, y: m.b(y)[:, :, :-1],
    "sequence": lambda m, y: F.layer_norm(y.flatten(2).transpose(1, 2), (8,)).transpose(1, 2).unflatten(2, y.shape[2:]),
}


@use_forced
@pytest.mark.parametrize("name", BETWEEN)
def test_what_stands_between_layers(name):
    model, x = randomised(Calls(BETWEEN[name])), torch.randn(2, 8, 4, 7, 6)
    want = eager(model.double(), x.double())
    model.float()
    convselect.freeze(model, x)
    assert convselect.summary(model).not_fused == {}
    for _ in range(2):
        got = model(x)
        assert distance(got, want) < CONV
        assert got.stride() == eager(model, x).stride()
    assert unfrozen(model) == 1


@needs_library
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [2, 3])
def test_instance_norms_are_one_call_with_their_activation(dims, layout):
    conv, norm = ((nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))[dims - 2]
    for batch, affine in ((1, True), (2, True), (2, False)):
        model = randomised(nn.Sequential(conv(8, 8, 1), norm(8, affine=affine), nn.LeakyReLU(0.3)))
        x = torch.randn(batch, 8, *(4, 5, 6)[:dims]).contiguous(memory_format=format_of(layout, dims + 2))
        with torch.no_grad():
            program = Program(capture(model, (x,)), Registry())
        called = [step for step in program.steps if step.kind == "call" and "clone" not in str(step.target)]
        assert [str(step.target) for step in called] == ["group_norm_then"], called


# ---- networks -------------------------------------------------------------------------------------------------------


def block(c_in, c_out, stride=1):
    return nn.Sequential(nn.Conv3d(c_in, c_out, 3, stride, 1), nn.InstanceNorm3d(c_out, affine=True), nn.LeakyReLU())


class Segments(nn.Module):
    """A small U-Net of volumes."""

    def __init__(self):
        super().__init__()
        self.first, self.down = block(1, 8), nn.Sequential(block(8, 16, 2), block(16, 16))
        self.up, self.last = nn.ConvTranspose3d(16, 8, 2, 2), nn.Sequential(block(16, 8), nn.Conv3d(8, 3, 1))

    def forward(self, x):
        skip = self.first(x)
        return self.last(torch.cat([self.up(self.down(skip)), skip], 1))


class Video(nn.Module):
    """Blocks of R(2+1)D and of a 3-D ResNet (Tran et al. 2018, arXiv 1711.11248)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 8, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(8), nn.ReLU(),
            nn.Conv3d(8, 16, (3, 1, 1), padding=(1, 0, 0), bias=False), nn.BatchNorm3d(16), nn.ReLU(),
        )  # fmt: skip
        self.a = nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.BatchNorm3d(16))
        self.b = nn.Sequential(nn.Conv3d(16, 32, 3, 2, 1), nn.BatchNorm3d(32))
        self.skip, self.fc = nn.Conv3d(16, 32, 1, 2), nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.a(x))
        return self.fc(F.adaptive_avg_pool3d(F.relu(self.b(x) + self.skip(x)), 1).flatten(1))


NETWORKS = {"segments": (Segments, (1, 8, 12, 8)), "video": (Video, (3, 4, 16, 18))}


@use_forced
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    build, size = NETWORKS[name]
    model, x = randomised(build()), torch.randn(2, *size)
    convselect.freeze(model, x)
    report = convselect.summary(model)
    assert report.frozen == ("",)
    assert report.left_alone == {}
    for given in (x, x, torch.randn(1, *size), torch.randn(1, *size)):
        got, want = model(given), eager(model, given)
        assert distance(got, want) < 3 * CONV
        assert got.stride() == want.stride()
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Conv3d):
                layer.weight.mul_(-1.5)
    assert distance(model(x), eager(model, x)) < 3 * CONV
    assert unfrozen(model) == 1


def test_explained_and_summarised():
    model = randomised(nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8), nn.GELU(), nn.ConvTranspose3d(8, 4, 2, 2)))
    x = torch.randn(1, 4, 5, 6, 7)
    report = convselect.summary(convselect.freeze(model, x))
    assert report.fused == {"0": ("batch norm", "bias", "gelu"), "3": ("bias",)}
    assert report.folded == {"1": "0"}
    assert "(1, 4, 5, 6, 7)" in str(report)
    assert convselect.explain(model[0], x)


@use_forced
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    model, x = randomised(Segments()).to(dtype), torch.randn(1, 1, 4, 8, 8, dtype=dtype)
    convselect.freeze(model, x)
    for _ in range(2):
        got, want = model(x), eager(model, x)
        assert got.dtype == dtype
        assert distance(got, want) < {torch.float64: 1e-13}.get(dtype, 5e-2)


@use_forced
def test_without_a_batch_and_with_other_sizes():
    model = randomised(nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(8, 4, 2, 2)))
    for shape in ((4, 5, 6, 7), (1, 4, 5, 6, 7), (2, 4, 1, 6, 7)):
        x = torch.randn(shape)
        convselect.freeze(model) if not frozen_forwards(model) else None
        for _ in range(2):
            assert distance(model(x), eager(model, x)) < CONV


def test_a_second_plan_measures_nothing(tmp_path, monkeypatch):
    """Choices for volumes are kept in the store as others are."""
    process.configure(tmp_path / "store.sqlite")
    model, x = randomised(Segments()), torch.randn(1, 1, 4, 8, 8)
    first = convselect.summary(convselect.freeze(copy.deepcopy(model), x)).inputs[0]
    process.flush()
    process.configure(tmp_path / "store.sqlite")  # as a process that has chosen nothing yet

    def refuse(*_, **__):
        raise AssertionError("measured again")

    for module, name in ((freeze_layer, "fastest"), (plan, "timed")):
        monkeypatch.setattr(module, name, refuse)
    second = convselect.summary(convselect.freeze(model, x)).inputs[0]
    assert (second.layout, second.chosen) == (first.layout, first.chosen if first.layout else {})
    assert distance(model(x), eager(model, x)) < 3 * CONV


@use_forced
def test_intermediates_take_no_more_memory_than_eager_needs():
    model, x = randomised(Segments()), torch.randn(1, 1, 8, 16, 16)
    with torch.no_grad(), Live() as live:
        model(x)
    assert live.peak >= 16 * 8 * 16 * 16 * 4
    convselect.freeze(model, x)
    (row,) = convselect.summary(model).inputs
    assert row.intermediates_bytes <= live.peak


@use_forced
def test_one_copy_of_each_weight_is_kept():
    model, x = randomised(Segments()), torch.randn(1, 1, 4, 8, 8)
    convselect.freeze(model, x)
    model(x)
    ((_, made),) = frozen_forwards(model)[""].plans()
    for layer, packs in made.packs.items():
        assert len(packs) == 1
        held = layer._alive()
        if None not in packs:
            assert held is None or any(cell[0] is held for cell, _, _ in layer._packs.values())
