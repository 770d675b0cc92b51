"""Large values spoil no result that does not see them: what transforms promise element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from problems import operands_of
from tolerances import elementwise

import convselect
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.base.volumes import volume_problem
from convselect.kernels import _library
from convselect.kernels._range import carries
from convselect.kernels.pool import ALL, BY_NAME
from convselect.kernels.reference import Reference

SPREADING = [a for a in ALL if a.spreads_nonfinite and "cpu" in a.devices]
PROBLEMS = {
    "3x3": conv_problem(2, 16, 20, 23, 24, 3, 3, padding=1),
    "3x3 few tiles": conv_problem(1, 24, 8, 8, 16, 3, 3, padding=1),
    "3x3 one channel": conv_problem(1, 1, 28, 28, 8, 3, 3),
    "3x3 groups": conv_problem(2, 12, 18, 18, 12, 3, 3, padding=1, groups=3),
    "3x3 dilated": conv_problem(2, 12, 27, 30, 12, 3, 3, padding=(3, 2), dilation=(3, 2)),
    "3x3 strided": conv_problem(2, 12, 37, 40, 12, 3, 3, stride=2, padding=1),
    "5x5": conv_problem(1, 8, 21, 20, 8, 5, 5, padding=2),
    "7x7": conv_problem(1, 8, 24, 24, 8, 7, 7, padding=3),
    "13x13": conv_problem(1, 8, 40, 40, 8, 13, 13, padding=6),
    "1x3": conv_problem(1, 8, 12, 40, 8, 1, 3, padding=(0, 1)),
    "7x1": conv_problem(1, 8, 40, 12, 8, 7, 1, padding=(3, 0)),
    "3x3x3": volume_problem(2, 9, 5, 14, 19, 12, 3, 3, 3, padding=1),
    "3x3x3 few tiles": volume_problem(1, 12, 3, 8, 8, 9, 3, 3, 3, padding=1),
    "3x3x3 groups, dilated": volume_problem(1, 6, 8, 12, 13, 6, 3, 3, 3, padding=1, dilation=(2, 1, 1), groups=2),
    "3x3x3 strided": volume_problem(1, 6, 7, 21, 24, 8, 3, 3, 3, stride=2, padding=1),
    "5x3x3 stride (2, 1, 1)": volume_problem(1, 6, 8, 13, 14, 8, 5, 3, 3, stride=(2, 1, 1), padding=(2, 1, 1)),
}


def spoil(kind: str, t: torch.Tensor, value: float) -> torch.Tensor:
    """`t` with large values in it. A NaN would be found by other means."""
    t = t.clone()
    h, w = t.shape[2] // 2, t.shape[3] // 3
    pixel = (h, w, *(size // 4 for size in t.shape[4:]))
    if kind == "pixel":
        t[(0, 0, *pixel)] = value
    elif kind == "corner":
        t[(-1,) * t.dim()] = -value
    elif kind == "points":
        t[(slice(None), 0, *pixel)] = value
        t[(0, -1, *range(1, t.dim() - 1))] = value / 3
    elif kind == "stripe":
        t[:, :, h] = value
    elif kind == "half":
        t[:, :, :, w:] = value
    elif kind == "image":
        t[0] *= value
    elif kind == "box":  # nothing large, but windows that see only zeros
        t[:, :, :h] = 0
    return t


KINDS = ("nothing", "pixel", "corner", "points", "stripe", "half", "image", "box")
VALUES = (300.0, 1e4, 1e6, 1e10, 1e30)


def reference(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.double(), b.double()
    if p.is_volume:
        return Reference().run(a, b, p._replace(dtype="float64"))
    if p.direction == Direction.FORWARD:
        return F.conv2d(a, b, None, p.stride, (p.pad_top, p.pad_left), p.dilation, p.groups)
    output_mask = [p.direction == Direction.BACKWARD_DATA, p.direction == Direction.BACKWARD_WEIGHT, False]
    grad_y, x, weight = (
        (a, torch.empty(p.x_shape).double(), b) if output_mask[0] else (b, a, torch.empty(p.weight_shape).double())
    )
    results = torch.ops.aten.convolution_backward(
        grad_y, x, weight, None, p.stride, (p.pad_top, p.pad_left), p.dilation, False, (0, 0), p.groups, output_mask
    )
    return results[0] if output_mask[0] else results[1]


def want_and_unit(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact results, and the unit of their errors: eps times the size of a result's own sum, or of the median one
    of its image if that is larger."""
    sizes = reference(p, a.abs(), b.abs())
    images = [sizes] if p.direction == Direction.BACKWARD_WEIGHT else list(sizes)
    floors = torch.stack([image[image > 0].median() for image in images])
    floor = torch.maximum(sizes, floors.view(-1, *(1,) * (sizes.dim() - 1)))
    eps = torch.finfo(torch.float64 if p.dtype == "float64" else torch.float32).eps
    return reference(p, a, b), eps * floor


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_results_that_do_not_see_a_large_value_are_right(name, direction):
    problem = PROBLEMS[name].with_direction(direction)
    generator = torch.Generator().manual_seed(0)
    x, weight, grad_y = (
        torch.randn(s, generator=generator) for s in (problem.x_shape, problem.weight_shape, problem.y_shape)
    )
    ran, given_up, known = set(), set(), {}
    for i, (algorithm, kind) in enumerate(itertools.product(SPREADING, KINDS)):
        p = problem._replace(layout=(CONTIGUOUS, CHANNELS_LAST)[i % 2])
        if algorithm.why_not(p) is not None:
            continue
        a, b = operands_of(p, x, weight, grad_y)
        for value in VALUES[:1] if kind in ("nothing", "box") else VALUES:
            large = spoil(kind, a, value)
            last = torch.channels_last_3d if p.is_volume else torch.channels_last
            stored = large.contiguous(memory_format=last) if p.layout == CHANNELS_LAST else large
            got = algorithm.run_checked(stored, b, p)
            ran.add(kind)
            if got is None:
                given_up.add(kind)
                continue
            if (kind, value) not in known:  # the same for every algorithm
                known[kind, value] = want_and_unit(p, large, b)
            want, unit = known[kind, value]
            found, limit = ((got.double() - want).abs() / unit).max().item(), elementwise(algorithm, p)
            assert found <= limit, f"{algorithm.name} {kind} {value}: {found:.0f} over {limit:.0f}, {p}"
    assert ran == set(KINDS)
    assert not given_up & {"nothing", "box"}


@pytest.mark.parametrize("value", [1e4, 1e6, 1e10, 9.96921e36, -3.4e38])
def test_a_nodata_value_stays_where_it_is(value):
    """A layer of 64 channels with one pixel that marks missing data; stock's error elsewhere is 2.7e-6."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
    x = torch.randn(1, 64, 56, 56)
    x[0, 0, 28, 28] = value
    sees = torch.zeros(1, 1, 56, 56, dtype=torch.bool)
    sees[:, :, 27:30, 27:30] = True
    with torch.no_grad():
        want = F.conv2d(x.double(), conv.weight.double(), padding=1)
        for name in ("winograd2", "winograd4", "winograd6", "winograd7", "fft", "fft_tiled"):
            with convselect.use(policy=name):
                got = convselect.conv2d(x, conv.weight, padding=1)
            error = (got.double() - want).abs().masked_fill(sees, 0).max().item()
            assert error <= 1e-4, (name, error)


@pytest.mark.skipif(not _library.available(), reason="the C library is missing")
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_computed_again_are_finished_as_all_others(layout, dtype, monkeypatch):
    """Bias, residual and activation; the same bits whatever the number of threads."""
    p = conv_problem(2, 20, 23, 18, 40, 3, 3, padding=1, dtype=dtype)._replace(layout=layout)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=generator) for s in (p.x_shape, p.weight_shape))
    bias, residual = (
        torch.randn(p.K, generator=generator),
        torch.randn(p.y_shape, generator=generator).to(p.torch_dtype),
    )
    x = (
        spoil("pixel", x, 1e8)
        .to(p.torch_dtype)
        .to(memory_format=torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format)
    )
    weight = weight.to(p.torch_dtype)
    want = torch.relu(reference(p, x, weight) + bias.double()[:, None, None] + residual.double())
    sees = torch.zeros(want.shape, dtype=torch.bool)
    sees[0, :, 10:13, 5:8] = True
    for m in (2, 4, 6):
        results = []
        for threads in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            out, usable = _library.call_checked("cs_winograd", x, weight, p, (m,), bias, residual, "relu")
            assert usable
            results.append(out)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        error = (results[0].double() - want).abs().masked_fill(sees, 0).max().item()
        assert error <= (1e-3 if dtype == "float32" else 0.3), (m, error)


def test_what_pytorchs_operations_can_carry():
    p = conv_problem(1, 4, 20, 20, 4, 9, 9, padding=4)
    x, weight = torch.randn(p.x_shape), torch.randn(p.weight_shape)
    assert carries(x, weight, p)
    assert carries(x * 1e20, weight, p)
    assert not carries(spoil("pixel", x, 1e5), weight, p)
    back = p.with_direction(Direction.BACKWARD_WEIGHT)
    assert carries(x, torch.randn(p.y_shape), back)
    assert not carries(x, spoil("pixel", torch.randn(p.y_shape), 1e7), back)
    assert (
        BY_NAME["fft"].run_checked(spoil("pixel", x, 1e5).double(), weight.double(), p._replace(dtype="float64"))
        is None
    )
