"""The direct C kernel: every instruction set, the epilogue, frozen weights, threads, scratch memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from activations import ACTIVATIONS, SLOPE
from pairs import pairs, pairwise
from problems import PROBLEMS, operands_of, random_operands, relative_error
from tolerances import tolerance
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction, conv_problem, layout_of
from convselect.kernels import _library
from convselect.kernels.direct import Direct, forward_packed, pack
from convselect.kernels.reference import Reference

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

DIRECT, REFERENCE = Direct(), Reference()
LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
LAYOUTS = ("contiguous", "channels_last")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
every_level = pytest.mark.parametrize("level", LEVELS)
every_direction = pytest.mark.parametrize("direction", list(Direction), ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

# Of a size at which blocks, chunks and panels come in more than one and end in a rest.
LARGER = {
    "stride 2": conv_problem(2, 40, 30, 29, 70, 3, 3, padding=1, stride=2),
    "stride (2, 3), dilated": conv_problem(1, 20, 31, 33, 36, 3, 5, padding=(2, 4), stride=(2, 3), dilation=(3, 2)),
    "dilation 2": conv_problem(2, 64, 14, 14, 72, 3, 3, padding=2, dilation=2),
    "groups": conv_problem(2, 64, 14, 14, 96, 3, 3, padding=1, groups=2),
    "stem": conv_problem(1, 3, 64, 64, 40, 7, 7, padding=3, stride=2),
    "small images, by panels": conv_problem(2, 512, 7, 7, 260, 1, 1),
    "rows alias in the cache": conv_problem(1, 1024, 5, 5, 48, 1, 1),
    "several chunks, by panels": conv_problem(1, 256, 14, 14, 160, 3, 3, padding=1),
    "few output channels": conv_problem(1, 96, 28, 28, 24, 1, 1),
    "patch": conv_problem(2, 24, 28, 28, 48, 2, 2, stride=2),
    "odd padding": conv_problem(3, 17, 9, 8, 33, 4, 3, padding=(3, 1, 0, 4)),
}


def prepared(problem: ConvProblem, layout: str, weight_layout: str) -> tuple[ConvProblem, Tensor, Tensor]:
    a, b = operands_of(problem, *random_operands(problem, layout, weight_layout))
    weight_format = layout_of(b) if problem.direction != Direction.BACKWARD_WEIGHT else "contiguous"
    return problem._replace(layout=layout_of(a), weight_layout=weight_format), a, b


def exact(problem: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    return REFERENCE.run(a.double(), b.double(), problem._replace(dtype="float64"))


@every_direction
def test_every_instruction_set_agrees_with_the_reference(direction, nan_memory):
    """Any two of problem, dtype and layouts, in every direction and on every level."""
    weight_layouts = LAYOUTS[: 1 if direction == Direction.BACKWARD_WEIGHT else 2]
    problems = list({**PROBLEMS, **LARGER}.items())
    dtypes = ("float32", "bfloat16", "float16")
    for (name, listed), dtype, layout, weight_layout in pairs(problems, dtypes, LAYOUTS, weight_layouts):
        p, a, b = prepared(listed._replace(direction=direction, dtype=dtype), layout, weight_layout)
        want = exact(p, a, b)
        for level in LEVELS:
            error = relative_error(_library.call("cs_direct", a, b, p, isa_level=level), want)
            assert error <= tolerance(DIRECT, p), f"{name} {dtype} {layout} {weight_layout}, {level}: {error:.1e}"


@every_direction
def test_operands_of_a_weight_gradient_may_differ_in_layout(direction, nan_memory):
    for x_layout, y_layout in itertools.product(LAYOUTS, LAYOUTS):
        p = LARGER["odd padding"]._replace(direction=Direction.BACKWARD_WEIGHT)
        x, _, grad_y = random_operands(p)
        x, grad_y = (t.contiguous(memory_format=FORMATS[f]) for t, f in ((x, x_layout), (grad_y, y_layout)))
        for level in LEVELS:
            got = _library.call("cs_direct", x, grad_y, p._replace(layout=x_layout), isa_level=level)
            assert relative_error(got, exact(p, x, grad_y)) <= tolerance(DIRECT, p)


# ---- epilogue and frozen weights ------------------------------------------------------------------------------------

FROZEN = [PROBLEMS["3x3"], PROBLEMS["1x1"], *LARGER.values(), conv_problem(2, 48, 8, 8, 64, 1, 1)]


@pairwise(
    {"level": LEVELS, "layout": LAYOUTS, "dtype": ["float32", "bfloat16", "float16"], "activation": list(ACTIVATIONS)}
)
def test_epilogue_and_frozen_weights(level, layout, dtype, activation, nan_memory):
    for listed in FROZEN:
        p, x, weight = prepared(listed._replace(dtype=dtype), layout, layout)
        p = p._replace(layout=layout)
        bias, residual = torch.randn(p.K), torch.randn(p.y_shape).to(p.torch_dtype)
        packed = pack(weight, p, isa_level=level)
        y = exact(p, x, weight)
        for given_bias, given_residual in itertools.product((None, bias), (None, residual)):
            want = y if given_bias is None else y + bias.double()[:, None, None]
            want = want if given_residual is None else want + residual.double()
            epilogue = (given_bias, given_residual, activation)
            got = _library.call("cs_direct", x, weight, p, (), *epilogue, isa_level=level, slope=SLOPE)
            assert relative_error(got, ACTIVATIONS[activation](want)) <= tolerance(DIRECT, p)
            frozen = forward_packed(x, packed, p, *epilogue, isa_level=level, slope=SLOPE)
            assert torch.equal(frozen, got)
            assert layout_of(frozen) == layout_of(got)


def test_a_packed_weight_serves_other_sizes_and_batches():
    p, x, weight = prepared(LARGER["stride 2"], "channels_last", "contiguous")
    packed = pack(weight, p)
    x = torch.cat([x, x])[..., 3:].contiguous(memory_format=torch.channels_last)
    other = p._replace(N=x.shape[0], W=x.shape[3])
    assert relative_error(forward_packed(x, packed, other), exact(other, x, weight)) <= tolerance(DIRECT, p)


def test_what_does_not_fit_is_refused():
    p, x, weight = prepared(LARGER["patch"], "contiguous", "contiguous")
    packed = pack(weight, p)
    with pytest.raises(ValueError, match="weight"):
        pack(weight[1:], p)
    with pytest.raises(ValueError, match="packed"):
        forward_packed(x, packed[1:], p)
    with pytest.raises(ValueError, match="x torch"):
        forward_packed(x[1:], packed, p)
    with pytest.raises(ValueError, match="bias"):
        forward_packed(x, packed, p, bias=torch.zeros(p.K + 1))
    with pytest.raises(ValueError, match="residual"):
        forward_packed(x, packed, p, residual=torch.zeros(1))


@every_level
@every_layout
def test_activations_of_extreme_values(level, layout):
    """One channel of weight 1: the activation itself, on a full tile and on a rest."""
    nan, inf = float("nan"), float("inf")
    values = [nan, inf, -inf, 0.0, -0.0, 88.0, -87.5, -89.0, -100.0, 1e-30, -1e-30, 7.0, -1e38, 1e38]
    x = torch.tensor([*values, *torch.linspace(-90, 90, 5000)]).view(1, 1, 1, -1)
    weight = torch.ones(40, 1, 1, 1)
    x = x.contiguous(memory_format=FORMATS[layout])
    # One channel is dense in both layouts, which counts as NCHW: two, of which one has weight 0, are not.
    x = torch.cat([x, torch.zeros_like(x)], 1).contiguous(memory_format=FORMATS[layout])
    weight = torch.cat([weight, torch.zeros_like(weight)], 1)
    p = conv_problem(1, 2, 1, x.shape[3], 40, 1, 1, layout=layout)
    for activation, function in ACTIVATIONS.items():
        got = _library.call("cs_direct", x, weight, p, activation=activation, isa_level=level, slope=SLOPE)
        want = function(x[:, :1].double()).float().expand_as(got)
        # Of e^u with |u| up to 88, where u is a rounded square or cube, half a unit of u is 50 of the result.
        rtol = {"gelu": 5e-5, "gelu_tanh": 1e-5}.get(activation, 1e-6)
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-36, equal_nan=True)


@every_level
def test_activations_to_a_few_units(level):
    """All bits of a sigmoid's or silu's exponential: errors in units of 2^-24 of the result."""
    x = torch.linspace(-85, 85, 60_001)
    x = torch.stack([x, torch.zeros_like(x)]).view(1, 2, 1, -1)
    weight = torch.zeros(9, 2, 1, 1)
    weight[:, 0] = 1
    p = conv_problem(1, 2, 1, x.shape[3], 9, 1, 1)
    for activation, units in {"silu": 4.5, "sigmoid": 4.5, "tanh": 4.5, "hardswish": 2.5}.items():
        got = _library.call("cs_direct", x, weight, p, activation=activation, isa_level=level)
        want = ACTIVATIONS[activation](x[:, :1].double())
        off = (got.double() - want).abs() / (want.abs() * 2.0**-24 + 1e-37)
        assert off.max() <= units, (activation, off.max().item(), x[0, 0, 0, off.max(1).values.argmax()].item())


def test_gelu_is_that_of_pytorch():
    x = torch.linspace(-6, 6, 1000, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), torch.nn.functional.gelu(x))
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x), torch.nn.functional.gelu(x, approximate="tanh"))


# ---- threads, values, memory ----------------------------------------------------------------------------------------


@every_direction
@every_layout
def test_threads_do_not_change_a_bit(direction, layout):
    for listed in LARGER.values():
        p, a, b = prepared(listed._replace(direction=direction), layout, "contiguous")
        results = []
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(DIRECT.run(a, b, p._replace(threads=threads)))
        assert all(torch.equal(results[0], other) for other in results[1:])


@every_level
@every_layout
def test_nan_stays_where_a_direct_sum_has_it(level, layout):
    p, x, weight = prepared(LARGER["odd padding"], layout, "contiguous")
    for value in (float("nan"), float("inf")):
        x[1, 3, 4, 5] = value
        got = _library.call("cs_direct", x, weight, p, isa_level=level)
        assert torch.equal(got.isfinite(), torch.conv2d(torch.nn.functional.pad(x, (0, 4, 3, 1)), weight).isfinite())


@pytest.mark.slow
@every_level
@every_direction
def test_scratch_is_within_the_stated_workspace(level, direction):
    library = _library.library()
    big = {
        "3x3": conv_problem(2, 64, 56, 56, 64, 3, 3, padding=1),
        "1x1": conv_problem(1, 256, 56, 56, 64, 1, 1),
        "31x31": conv_problem(1, 2, 60, 60, 3, 31, 31, padding=15),
        "late": conv_problem(1, 256, 7, 7, 512, 3, 3, padding=1),
    }
    for (name, listed), layout, dtype in pairs([*{**LARGER, **big}.items()], LAYOUTS, ("float32", "bfloat16")):
        p, a, b = prepared(listed._replace(direction=direction, dtype=dtype), layout, "contiguous")
        library.cs_free_scratch()
        _library.call("cs_direct", a, b, p, isa_level=level)
        # Two blocks, each rounded up to 2 MiB. A wider instruction set takes no less.
        assert library.cs_scratch_bytes() <= DIRECT.workspace_bytes(p) + 2 * 2**21, f"{name} {layout} {dtype}"
    library.cs_free_scratch()


def test_why_not():
    p = LARGER["groups"]
    assert DIRECT.why_not(p) is None
    assert "float64" in DIRECT.why_not(p._replace(dtype="float64"))
    assert "cuda" in DIRECT.why_not(p._replace(device="cuda"))
    assert "channels per group" in DIRECT.why_not(p._replace(groups=8))
    assert "channels per group" in DIRECT.why_not(conv_problem(1, 32, 8, 8, 32, 3, 3, groups=32))
