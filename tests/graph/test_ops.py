"""The operators of compiled graphs: as `torch.library.opcheck` and aten would have them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from _parity import assert_same, bound
from problems import PROBLEMS, random_operands
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import convselect
from convselect.base import settings as settings_file
from convselect.base import warnings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.graph import ops
from convselect.kernels._contract import NotApplicable
from convselect.kernels.pool import BY_NAME

LAYOUTS = ("contiguous", "channels_last", "transposed")
AUTO = "{}"  # all at their defaults
# One problem for each algorithm that it applies to in all three directions.
ALGORITHMS = {
    "native": "3x3", "native_channels_last": "stride 2", "native_contiguous": "groups 2", "im2col_gemm": "stride 2",
    "winograd2": "3x3 uneven padding", "winograd4": "3x3 odd image", "winograd6": "3x3 many channels", "fft": "9x9",
    "fft_tiled": "31x31", "depthwise": "depthwise 7x7", "direct": "stem 7x7 stride 2",
    "grouped": "groups, few channels", "patches": "patch with a rest",
}  # fmt: skip
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


def geometry(p: ConvProblem) -> tuple[list[int], list[int], list[int], int]:
    return [*p.stride], [p.pad_top, p.pad_bottom, p.pad_left, p.pad_right], [*p.dilation], p.groups


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def calls(p: ConvProblem, layout: str = "contiguous", algorithm: str = "", settings: str = AUTO):
    """(operator, arguments) for all three, on leaves."""
    x, weight, grad_y = random_operands(p, layout)
    rest = geometry(p)
    bias = torch.linspace(-1, 1, p.K, dtype=x.dtype)
    names = (algorithm,) * 3
    return [
        (ops.conv2d, (leaf(x), leaf(weight), leaf(bias), *rest, *names, settings)),
        (ops.conv2d_grad_input, (leaf(grad_y), leaf(weight), x.shape, x.stride(), *rest, algorithm, settings)),
        (ops.conv2d_grad_weight, (leaf(x), leaf(grad_y), weight.shape, weight.stride(), *rest, algorithm, settings)),
    ]


def native(p: ConvProblem, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """(y, grad_x, grad_weight) of aten, with the bias and the gradient that `calls` has."""
    x, weight, grad_y = random_operands(p, layout)
    x, weight = leaf(x), leaf(weight)
    padded = F.pad(x, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom)) if not p.symmetric_padding else x
    padding = (p.pad_top, p.pad_left) if p.symmetric_padding else (0, 0)
    bias = torch.linspace(-1, 1, p.K, dtype=x.dtype)
    y = F.conv2d(padded, weight, bias, p.stride, padding, p.dilation, p.groups)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad_y)


# ---- values, strides and opcheck ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_three_directions_are_atens(name, layout):
    """By the choice of the run, and an algorithm that has other strides of its own; strides of fakes included."""
    p = PROBLEMS[name]
    want = native(p, layout)
    for algorithm in ("", "native_channels_last"):
        for (op, arguments), expected in zip(calls(p, layout, algorithm), want, strict=True):
            if algorithm and any(BY_NAME[algorithm].why_not(p.with_direction(d)) is not None for d in Direction):
                continue
            with torch.no_grad():
                got = op(*arguments)
            assert_same(got, expected, bound(got.dtype, "im2col_gemm"), f"{name} {layout} {op}")
            torch.library.opcheck(op, arguments, test_utils=CHEAP)


COMPILED = [
    "3x3 uneven padding", "one pixel", "one channel", "1x1 stride 2", "stride 2 leaves a rest", "patch 4x4",
    "dilation (3, 1)", "groups 2", "depthwise multiplier 2", "even kernel, same, dilated", "one row",
]  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "layout"),
    [*(("3x3", layout) for layout in LAYOUTS), *zip(COMPILED, itertools.cycle(LAYOUTS), strict=False)],
)
def test_opcheck(name, layout):
    """With AOTDispatcher on symbolic sizes too: gradients compiled and not compiled. The test above has every problem
    in every layout."""
    with convselect.use("im2col_gemm"):
        for op, arguments in calls(PROBLEMS[name], layout, settings=""):
            torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_opcheck_of_each_algorithm(algorithm):
    p = PROBLEMS[ALGORITHMS[algorithm]]
    for direction in Direction:
        assert BY_NAME[algorithm].why_not(p.with_direction(direction)) is None, "choose another problem for it"
    for layout in ("contiguous", "channels_last"):
        for (op, arguments), expected in zip(calls(p, layout, algorithm), native(p, layout), strict=True):
            torch.library.opcheck(op, arguments, test_utils=CHEAP)
            assert_same(op(*arguments).detach(), expected, bound(expected.dtype, algorithm), f"{algorithm} {op}")


def test_operators_say_what_compilers_ask():
    for op in (ops.conv2d, ops.conv2d_grad_input, ops.conv2d_grad_weight):
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.tags)
        assert not op._schema.is_mutable


def test_what_aten_refuses_raises_atens_error():
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 2, 3, 3)
    geometry = ([1, 1], [1] * 4, [1, 1], 1)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 2 channels, but got 3") as ours:
        ops.conv2d(x, weight, None, *geometry)
    with pytest.raises(RuntimeError) as atens:
        F.conv2d(x, weight, padding=1)
    assert str(ours.value) == str(atens.value)
    assert ops.conv2d(x[:0], weight[:, :1].expand(4, 3, 3, 3), None, *geometry).shape == (0, 4, 8, 8)


# ---- choice and fallback --------------------------------------------------------------------------------------------

P3 = conv_problem(1, 4, 8, 8, 4, 3, 3, padding=1)


def ran(monkeypatch) -> list[tuple[str, Direction]]:
    """What algorithms run from now on, except native if aten runs it."""
    found: list[tuple[str, Direction]] = []
    for algorithm in BY_NAME.values():

        def run_checked(a, b, problem, params=None, bias=None, of=algorithm, original=algorithm.run_checked):
            found.append((of.name, problem.direction))
            return original(a, b, problem, params, bias)

        monkeypatch.setattr(algorithm, "run_checked", run_checked)
    return found


def test_each_direction_runs_what_it_names(monkeypatch):
    found = ran(monkeypatch)
    x, weight, _ = random_operands(P3)
    x, weight = leaf(x), leaf(weight)
    names = ("winograd2", "im2col_gemm", "native_channels_last")
    ops.conv2d(x, weight, None, *geometry(P3), *names, AUTO).square().sum().backward()
    assert found == list(zip(names, Direction, strict=True))
    del found[:]
    # A direction that is native is aten's, and a gradient that nobody wants is not computed.
    ops.conv2d(x, weight.detach(), None, *geometry(P3), "native", "im2col_gemm", "native", AUTO).sum().backward()
    assert found == [("im2col_gemm", Direction.BACKWARD_DATA)]


def test_settings_of_the_graph_or_of_the_run(monkeypatch):
    found = ran(monkeypatch)
    x, weight, _ = random_operands(P3)
    for settings, inside in (("", "winograd2"), ('{"policy": "im2col_gemm"}', "im2col_gemm")):
        with convselect.use("winograd2"):
            ops.conv2d(x, weight, None, *geometry(P3), settings=settings)
        assert found.pop() == (inside, Direction.FORWARD)
        if settings:
            ops.conv2d(x, weight, None, *geometry(P3), settings=settings)
            assert found.pop() == (inside, Direction.FORWARD)
    settings = convselect.use("winograd4", precision="fast", workspace_bytes=17)
    with settings as inner:
        assert settings_file.parse(str(inner)) is inner


def test_an_algorithm_that_fails_falls_back(monkeypatch):
    monkeypatch.setattr(warnings, "_given", set())

    def run_checked(*_):
        raise MemoryError("out of tiles")

    monkeypatch.setattr(BY_NAME["winograd2"], "run_checked", run_checked)
    for (op, arguments), expected in zip(calls(P3, "contiguous", "winograd2"), native(P3, "contiguous"), strict=True):
        if op is ops.conv2d:
            with pytest.warns(
                convselect.ConvselectWarning, match=r"winograd2 found too little memory .*out of tiles.*"
            ):
                got = op(*arguments)
        else:
            got = op(*arguments)  # warned once
        assert_same(got.detach(), expected, bound(got.dtype), str(op))
    for op, arguments in calls(P3, "contiguous", "winograd2", '{"policy": "winograd2"}'):
        with pytest.raises(MemoryError):
            op(*arguments)


@pytest.mark.parametrize(
    ("name", "reason"), [("winograd2", "at stride 2"), ("winograd_of_tomorrow", "no such algorithm")]
)
def test_a_graph_from_elsewhere_may_name_what_does_not_apply(monkeypatch, name, reason):
    """Another machine, or another version, traced it."""
    monkeypatch.setattr(warnings, "_given", set())
    convselect.clear()
    p = PROBLEMS["stride 2"]
    op, arguments = calls(p, "contiguous", name)[0]
    with pytest.warns(convselect.ConvselectWarning, match=f"a graph asks for {name}; native runs instead.*{reason}"):
        got = op(*arguments)
    assert_same(got.detach(), native(p, "contiguous")[0], bound(got.dtype), name)
    if name in BY_NAME:
        with pytest.raises(NotApplicable, match=reason):
            op(*arguments[:-1], f'{{"policy": "{name}"}}')


def test_plans_are_found_again_and_forgotten(monkeypatch):
    convselect.clear()
    x, weight, _ = random_operands(P3)
    for _ in range(3):
        ops.conv2d(x, weight, None, *geometry(P3), "im2col_gemm")
    assert len(ops.plans) == 1
    ops.conv2d(x.contiguous(memory_format=torch.channels_last), weight, None, *geometry(P3), "im2col_gemm")
    with convselect.use(precision="fast"):
        ops.conv2d(x, weight, None, *geometry(P3), "im2col_gemm")
    assert len(ops.plans) == 3
    convselect.clear()
    assert len(ops.plans) == 0


# ---- derivatives, batches, counts -----------------------------------------------------------------------------------

GRADIENTS = {
    "stride and bias": conv_problem(2, 2, 5, 6, 3, 3, 2, stride=(2, 1), padding=1, dtype="float64"),
    "groups, dilation": conv_problem(1, 4, 6, 5, 2, 2, 2, dilation=2, groups=2, dtype="float64"),
    "uneven padding": conv_problem(1, 2, 4, 5, 2, 2, 3, padding=(1, 0, 2, 1), dtype="float64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [("im2col_gemm",) * 3, ("native", "im2col_gemm", "native"), ("", "", "")])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_gradients(name, names):
    p = GRADIENTS[name]
    with convselect.use("im2col_gemm"):
        (_, forward), *backward = calls(p, settings="")
        assert gradcheck(lambda *t: ops.conv2d(*t, *geometry(p), *names), forward[:3])
        assert gradgradcheck(lambda *t: ops.conv2d(*t, *geometry(p), *names), forward[:3])
        for op, arguments in backward:
            rest = (*arguments[2:-2], names[0], "")
            assert gradcheck(lambda a, b, op=op, rest=rest: op(a, b, *rest), arguments[:2])
            assert gradgradcheck(lambda a, b, op=op, rest=rest: op(a, b, *rest), arguments[:2])


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_wants(mask):
    x, weight, _ = random_operands(P3)
    operands = [t.detach().requires_grad_(m) for t, m in zip((x, weight, torch.randn(4)), mask, strict=True)]
    for names in (("im2col_gemm",) * 3, ("native", "native", "im2col_gemm")):
        y = ops.conv2d(*operands, *geometry(P3), *names, AUTO)
        wanted = operands[mask.index(True)]
        (got,) = torch.autograd.grad(y.square().sum(), wanted)
        (want,) = torch.autograd.grad(F.conv2d(*operands, padding=1).square().sum(), wanted)
        assert_same(got, want, bound(got.dtype, "im2col_gemm"), str(mask))
    with torch.no_grad():
        assert not ops.conv2d(*operands, *geometry(P3)).requires_grad


@pytest.mark.parametrize("batched", ["x", "weight", "both", "all", "bias"])
@pytest.mark.parametrize("groups", [1, 2])
def test_vmap(groups, batched):
    p = conv_problem(2, 4, 7, 6, 6, 3, 3, padding=(1, 0, 1, 1), stride=(2, 1), groups=groups)
    B, rest = 3, geometry(p)
    x, weight, grad_y = torch.randn(B, *p.x_shape), torch.randn(B, *p.weight_shape), torch.randn(B, *p.y_shape)
    bias = torch.randn(B, p.K)

    def over(op, operands, names, move=0):
        """`op` under vmap and in a loop; operands that are not named are the same for all."""
        dims = tuple(move if n in names else None for n in operands)
        given = [t.movedim(0, move) if n in names else t[0] for n, t in operands.items()]
        got = torch.vmap(op, in_dims=dims)(*given)
        want = torch.stack(
            [op(*(t[i] if n in names else t[0] for n, t in operands.items())) for i in range(B)],
        )
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    names = {"x": ("x",), "weight": ("weight",), "both": ("x", "weight"), "all": ("x", "weight", "bias")}
    chosen = names.get(batched, ("bias",))
    with convselect.use("im2col_gemm"):
        over(lambda *t: ops.conv2d(*t, *rest), {"x": x, "weight": weight, "bias": bias}, chosen)
        over(
            lambda *t: ops.conv2d(*t, None, *rest),
            {"x": x, "weight": weight},
            chosen if chosen[0] != "bias" else ("x",),
            2,
        )
        if batched != "bias":
            size, strides = p.x_shape, x[0].stride()
            given = tuple({"x": "grad_y"}.get(n, n) for n in chosen if n != "bias")
            over(
                lambda *t: ops.conv2d_grad_input(*t, size, strides, *rest),
                {"grad_y": grad_y, "weight": weight},
                given,
                1,
            )
            size2, strides2 = p.weight_shape, weight[0].stride()
            given = tuple({"weight": "grad_y"}.get(n, n) for n in chosen if n != "bias")
            over(lambda *t: ops.conv2d_grad_weight(*t, size2, strides2, *rest), {"x": x, "grad_y": grad_y}, given, 1)


@pytest.mark.parametrize("name", ["3x3", "1x1 stride 2", "depthwise multiplier 2", "groups 2", "patch 4x4"])
def test_flops_are_atens(name):
    from torch.utils.flop_counter import FlopCounterMode

    ops.register_flop_formulas()
    p = PROBLEMS[name]
    x, weight, _ = (leaf(t) for t in random_operands(p))

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function().sum().backward()
        return counter.get_total_flops()

    padding = (p.pad_top, p.pad_left)
    want = flops(lambda: F.conv2d(x, weight, None, p.stride, padding, p.dilation, p.groups))
    for names in (("im2col_gemm",) * 3, ("native",) * 3, ("native", "im2col_gemm", "native")):
        assert flops(lambda names=names: ops.conv2d(x, weight, None, *geometry(p), *names, AUTO)) == want > 0
