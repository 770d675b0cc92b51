"""The operators of compiled graphs: as `torch.library.opcheck` and aten would have them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from _parity import assert_same, bound
from problems import PROBLEMS, VOLUMES, random_operands
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import convselect
from convselect.base import settings as settings_file
from convselect.base import warnings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.base.volumes import image_of, volume_problem
from convselect.graph import ops
from convselect.kernels import _native_ops, _native_volumes
from convselect.kernels._contract import NotApplicable
from convselect.kernels.pool import BY_NAME

LAYOUTS = ("contiguous", "channels_last", "transposed")
AUTO = "{}"  # all at their defaults
FAMILIES = {family.name: family for family in ops.FAMILIES}
CONV2D = FAMILIES["conv2d"]
every_family = pytest.mark.parametrize("family", ops.FAMILIES, ids=lambda family: family.name)


def output_padding(p: ConvProblem, family: ops.Family) -> tuple[int, ...]:
    """Of the transposed convolution that maps the problem's y to its x."""
    return (_native_volumes if family.dimensions == 3 else _native_ops).output_padding(p)


def has_transposed(p: ConvProblem, family: ops.Family) -> bool:
    steps = (p.stride_d, *p.stride)[-family.dimensions :]
    return p.symmetric_padding and all(m < s for m, s in zip(output_padding(p, family), steps, strict=True))


def problems_of(family: ops.Family) -> dict[str, ConvProblem]:
    problems = VOLUMES if family.dimensions == 3 else PROBLEMS
    return {n: p for n, p in problems.items() if not family.transposed or has_transposed(p, family)}


# One problem for each algorithm that it applies to in all three directions, and some for the other kinds.
ALGORITHMS = [
    *(("conv2d", algorithm, name) for algorithm, name in {
        "native": "3x3", "native_channels_last": "stride 2", "native_contiguous": "groups 2",
        "im2col_gemm": "stride 2", "winograd2": "3x3 uneven padding", "winograd4": "3x3 odd image",
        "winograd6": "3x3 many channels", "fft": "9x9", "fft_tiled": "31x31", "depthwise": "depthwise 7x7",
        "direct": "stem 7x7 stride 2", "grouped": "groups, few channels", "patches": "patch with a rest",
    }.items()),
    ("conv_transpose2d", "winograd4", "3x3 odd image"),
    ("conv_transpose2d", "direct", "4x4 stride 2"),
    ("conv_transpose2d", "patches", "patch with a rest"),
    ("conv3d", "winograd4", "3x3x3 many channels"),
    ("conv3d", "depthwise", "depthwise 3x3x3"),
    ("conv3d", "direct", "stem 7x7x7 stride 2"),
    ("conv3d", "winograd4", "3x1x1"),
    ("conv_transpose3d", "direct", "2x2x2 stride 2"),
    ("conv_transpose3d", "winograd4", "3x3x3"),
]  # fmt: skip
CHEAP = ("test_schema", "test_autograd_registration", "test_faketensor")


def geometry(p: ConvProblem, family: ops.Family = CONV2D) -> tuple[object, ...]:
    n = family.dimensions
    stride, dilation = [p.stride_d, *p.stride][-n:], [p.dil_d, *p.dilation][-n:]
    sides = [p.pad_front, p.pad_back, p.pad_top, p.pad_bottom, p.pad_left, p.pad_right][-2 * n :]
    if family.transposed:
        return stride, sides[::2], dilation, p.groups, [*output_padding(p, family)]
    return stride, sides, dilation, p.groups


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def operands_of(p: ConvProblem, layout: str, family: ops.Family) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input, weight, grad_output, bias); a transposed convolution's input is the problem's grad_y."""
    x, weight, grad_y = random_operands(p, layout)
    if family.transposed:
        x, grad_y = grad_y, x
    return x, weight, grad_y, torch.linspace(-1, 1, grad_y.shape[1], dtype=x.dtype)


def calls(
    p: ConvProblem, layout: str = "contiguous", algorithm: str = "", settings: str = AUTO, family: ops.Family = CONV2D
):
    """(operator, arguments) for all three, on leaves."""
    x, weight, grad_y, bias = operands_of(p, layout, family)
    rest = geometry(p, family)
    names, size = (algorithm,) * 3, (weight.shape, weight.stride())
    return [
        (family.forward, (leaf(x), leaf(weight), leaf(bias), *rest, *names, settings)),
        (family.grad_input, (leaf(grad_y), leaf(weight), x.shape, x.stride(), *rest, algorithm, settings)),
        (family.grad_weight, (leaf(x), leaf(grad_y), *size, *rest, algorithm, settings)),
    ]


def natively(p: ConvProblem, family: ops.Family, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's function of this name."""
    n = family.dimensions
    function = getattr(F, family.name)
    stride, padding, dilation, groups, *more = geometry(p, family)
    if more:
        return function(x, weight, bias, stride, padding, more[0], groups, dilation)
    if p.symmetric_padding:
        return function(x, weight, bias, stride, padding[::2], dilation, groups)
    sides = [padding[2 * i + j] for i in reversed(range(n)) for j in (0, 1)]
    return function(F.pad(x, sides), weight, bias, stride, 0, dilation, groups)


def native(p: ConvProblem, layout: str, family: ops.Family = CONV2D) -> tuple[Tensor, Tensor, Tensor]:
    """(y, grad_x, grad_weight) of aten, with the bias and the gradient that `calls` has."""
    x, weight, grad_y, bias = operands_of(p, layout, family)
    x, weight = leaf(x), leaf(weight)
    y = natively(p, family, x, weight, bias)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad_y)


# ---- values, strides and opcheck ------------------------------------------------------------------------------------


EVERY = [
    *((CONV2D, name, layout) for name in PROBLEMS for layout in LAYOUTS),
    # Of the others each problem in one layout: what layouts do is the same code.
    *(
        (family, name, layout)
        for family in ops.FAMILIES[1:]
        for name, layout in zip(problems_of(family), itertools.cycle(LAYOUTS), strict=False)
    ),
]


@pytest.mark.parametrize(("family", "name", "layout"), EVERY, ids=lambda v: getattr(v, "name", v))
def test_the_three_directions_are_atens(family, name, layout):
    """By the choice of the run, and an algorithm that has other strides of its own; strides of fakes included."""
    p = problems_of(family)[name]
    want = native(p, layout, family)
    for algorithm in ("", "native_channels_last"):
        if algorithm and any(BY_NAME[algorithm].why_not(p.with_direction(d)) is not None for d in Direction):
            continue
        for (op, arguments), expected in zip(calls(p, layout, algorithm, family=family), want, strict=True):
            with torch.no_grad():
                got = op(*arguments)
            assert_same(got, expected, bound(got.dtype, "im2col_gemm"), f"{name} {layout} {op}")
            torch.library.opcheck(op, arguments, test_utils=CHEAP)


COMPILED = [
    "3x3 uneven padding", "one pixel", "1x1 stride 2", "stride 2 leaves a rest", "depthwise multiplier 2",
    "even kernel, same, dilated",
]  # fmt: skip


@pytest.mark.compile
@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [
        *(("conv2d", "3x3", layout) for layout in LAYOUTS),
        *zip(("conv2d",) * len(COMPILED), COMPILED, itertools.cycle(LAYOUTS), strict=False),
        ("conv_transpose2d", "stride 2 leaves a rest", "channels_last"),
        ("conv3d", "3x3x3 uneven padding", "channels_last"),
        ("conv3d", "3x1x1", "transposed"),
        ("conv_transpose3d", "3x3x3 stride (1, 2, 2)", "contiguous"),
    ],
)
def test_opcheck(family, name, layout):
    """With AOTDispatcher on symbolic sizes too: gradients compiled and not compiled. The test above has every problem
    in every layout."""
    family = FAMILIES[family]
    with convselect.use("im2col_gemm"):
        for op, arguments in calls(problems_of(family)[name], layout, settings="", family=family):
            torch.library.opcheck(op, arguments)


@pytest.mark.parametrize(("family", "algorithm", "name"), ALGORITHMS)
def test_opcheck_of_each_algorithm(family, algorithm, name):
    family = FAMILIES[family]
    p = problems_of(family)[name]
    image = image_of(p) or p if family.dimensions == 3 else p
    for direction in Direction:
        assert BY_NAME[algorithm].why_not(image.with_direction(direction)) is None, "choose another problem for it"
    for layout in ("contiguous", "channels_last"):
        wanted = native(p, layout, family)
        for (op, arguments), expected in zip(calls(p, layout, algorithm, family=family), wanted, strict=True):
            torch.library.opcheck(op, arguments, test_utils=CHEAP)
            assert_same(op(*arguments).detach(), expected, bound(expected.dtype, algorithm), f"{algorithm} {op}")


def test_operators_say_what_compilers_ask():
    for op in (op for f in ops.FAMILIES for op in (f.forward, f.grad_input, f.grad_weight)):
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.tags)
        assert not op._schema.is_mutable


def test_programs_exported_before_find_their_operators():
    """A saved graph holds names and arguments in order; what is added may only come behind, with a default."""
    shape = "int[2] stride, int[4] padding, int[2] dilation, int groups"
    assert str(ops.conv2d._schema).startswith(
        f"convselect::conv2d(Tensor input, Tensor weight, Tensor? bias, {shape}, "
        'str algorithm="", str grad_input="", str grad_weight="", str settings=""'
    )
    assert str(ops.conv2d_grad_input._schema).startswith(
        "convselect::conv2d_grad_input(Tensor grad_output, Tensor weight, SymInt[4] input_size, SymInt[4] "
        f'input_stride, {shape}, str algorithm="", str settings=""'
    )
    assert str(ops.conv2d_grad_weight._schema).startswith(
        "convselect::conv2d_grad_weight(Tensor input, Tensor grad_output, SymInt[4] weight_size, SymInt[4] "
        f'weight_stride, {shape}, str algorithm="", str settings=""'
    )


def test_what_aten_refuses_raises_atens_error():
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 2, 3, 3)
    geometry = ([1, 1], [1] * 4, [1, 1], 1)
    with pytest.raises(RuntimeError, match=r"expected input.* to have 2 channels, but got 3") as ours:
        ops.conv2d(x, weight, None, *geometry)
    with pytest.raises(RuntimeError) as atens:
        F.conv2d(x, weight, padding=1)
    assert str(ours.value) == str(atens.value)
    assert ops.conv2d(x[:0], weight[:, :1].expand(4, 3, 3, 3), None, *geometry).shape == (0, 4, 8, 8)


def test_what_has_no_convolution_the_other_way_round_is_atens():
    """An output padding of a stride or more, which a dilation allows; and volumes that are no floats."""
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(3, 4, 2, 2)
    got = FAMILIES["conv_transpose2d"].forward(x, weight, None, [1, 1], [0, 0], [3, 3], 1, [2, 2], "im2col_gemm")
    torch.testing.assert_close(got, F.conv_transpose2d(x, weight, dilation=3, output_padding=2))
    x, weight = torch.ones(1, 2, 3, 3, 3, dtype=torch.int64), torch.ones(4, 2, 2, 2, 2, dtype=torch.int64)
    got = FAMILIES["conv3d"].forward(x, weight, None, [1] * 3, [0] * 6, [1] * 3, 1)
    assert torch.equal(got, F.conv3d(x, weight))


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


SMALL = {
    "conv2d": P3, "conv_transpose2d": P3, "conv3d": volume_problem(1, 4, 5, 6, 7, 4, 3, 3, 3, padding=1),
    "conv_transpose3d": volume_problem(1, 4, 5, 6, 7, 4, 3, 3, 3, padding=1),
}  # fmt: skip


@every_family
def test_each_direction_runs_what_it_names(family, monkeypatch):
    found = ran(monkeypatch)
    p, forward = SMALL[family.name], family.forward
    x, weight, *_ = operands_of(p, "contiguous", family)
    x, weight = leaf(x), leaf(weight)
    # In its problem a transposed convolution is a grad-input, and its own grad-input a forward.
    of_y, of_x, of_weight = Direction
    if family.transposed:
        of_y, of_x = of_x, of_y
    names = ("winograd4", "im2col_gemm", "native_channels_last")
    forward(x, weight, None, *geometry(p, family), *names, AUTO).square().sum().backward()
    assert found == list(zip(names, (of_y, of_x, of_weight), strict=True))
    del found[:]
    # A direction that is native is aten's, and a gradient that nobody wants is not computed.
    names = ("native", "im2col_gemm", "native")
    forward(x, weight.detach(), None, *geometry(p, family), *names, AUTO).sum().backward()
    assert found == [("im2col_gemm", of_x)]


@every_family
def test_weights_that_count_run_by_direct_sums(family, monkeypatch):
    """Whatever a graph names: results of such weights are compared with whole numbers."""
    found = ran(monkeypatch)
    p = SMALL[family.name]
    x, weight, *_ = operands_of(p, "contiguous", family)
    x, ones = x.mul(8).round(), torch.ones_like(weight)
    y = family.forward(x, ones, None, *geometry(p, family), "winograd4", settings=AUTO)
    assert torch.equal(y.double(), natively(p, family, x.double(), ones.double(), None))
    assert "winograd4" not in {name for name, _ in found}
    family.forward(x, weight, None, *geometry(p, family), "winograd4", settings=AUTO)
    assert found[-1][0] == "winograd4"


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


def test_plans_tell_kinds_and_output_paddings_apart():
    """Of operands and other numbers that are the same."""
    convselect.clear()
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(4, 4, 3, 3)
    transposed = FAMILIES["conv_transpose2d"].forward
    for more in (0, 1):
        got = transposed(x, weight, None, [2, 2], [1, 1], [1, 1], 1, [more] * 2, "im2col_gemm")
        want = F.conv_transpose2d(x, weight, None, 2, 1, more)
        assert_same(got, want, bound(x.dtype, "im2col_gemm"), f"output padding {more}")
    got = ops.conv2d(x, weight, None, [2, 2], [1] * 4, [1, 1], 1, "im2col_gemm")
    assert_same(got, F.conv2d(x, weight, None, 2, 1), bound(x.dtype, "im2col_gemm"), "not transposed")
    assert len(ops.plans) == 3


# ---- derivatives, batches, counts -----------------------------------------------------------------------------------

GRADIENTS = {
    "stride and bias": conv_problem(2, 2, 5, 6, 3, 3, 2, stride=(2, 1), padding=1, dtype="float64"),
    "groups, dilation": conv_problem(1, 4, 6, 5, 2, 2, 2, dilation=2, groups=2, dtype="float64"),
    "uneven padding": conv_problem(1, 2, 4, 5, 2, 2, 3, padding=(1, 0, 2, 1), dtype="float64"),
}


OTHER_GRADIENTS = [
    ("conv_transpose2d", conv_problem(1, 2, 5, 4, 3, 2, 2, stride=(2, 1), padding=1, dtype="float64")),
    ("conv3d", volume_problem(1, 2, 3, 3, 4, 2, 2, 2, 2, padding=(1, 0, 0, 1, 0, 0), dtype="float64")),
    ("conv_transpose3d", volume_problem(1, 2, 4, 2, 3, 2, 3, 1, 1, padding=(1, 0, 0), dtype="float64")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "p", "names"),
    [
        *(
            ("conv2d", p, names)
            for p in GRADIENTS.values()
            for names in (("im2col_gemm",) * 3, ("native", "im2col_gemm", "native"), ("", "", ""))
        ),
        *((*one, ("im2col_gemm", "im2col_gemm", "native")) for one in OTHER_GRADIENTS),
    ],
)
def test_gradients_of_gradients(family, p, names):
    """Each element of the Jacobians if the graph names all three directions, else random projections of them."""
    fast, family = names != ("im2col_gemm",) * 3, FAMILIES[family]
    with convselect.use("im2col_gemm"):
        (op, forward), *backward = calls(p, settings="", family=family)
        assert gradcheck(lambda *t: op(*t, *geometry(p, family), *names), forward[:3], fast_mode=fast)
        assert gradgradcheck(lambda *t: op(*t, *geometry(p, family), *names), forward[:3], fast_mode=fast)
        for op, arguments in backward:
            rest = (*arguments[2:-2], names[0], "")
            assert gradcheck(lambda a, b, op=op, rest=rest: op(a, b, *rest), arguments[:2], fast_mode=fast)
            assert gradgradcheck(lambda a, b, op=op, rest=rest: op(a, b, *rest), arguments[:2], fast_mode=fast)


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
@pytest.mark.parametrize(
    ("family", "groups"),
    [("conv2d", 1), ("conv2d", 2), ("conv_transpose2d", 2), ("conv3d", 2), ("conv_transpose3d", 1)],
)
def test_vmap(family, groups, batched):
    family = FAMILIES[family]
    conv2d, conv2d_grad_input, conv2d_grad_weight = family.forward, family.grad_input, family.grad_weight
    if family.dimensions == 3:
        p = volume_problem(2, 4, 3, 5, 4, 6, 3, 3, 2, padding=1, stride=(1, 2, 1), groups=groups)
    elif family.transposed:
        p = conv_problem(2, 4, 7, 6, 6, 3, 3, padding=1, stride=(2, 1), groups=groups)
    else:
        p = conv_problem(2, 4, 7, 6, 6, 3, 3, padding=(1, 0, 1, 1), stride=(2, 1), groups=groups)
    B, rest = 3, geometry(p, family)
    x_shape, y_shape = (p.y_shape, p.x_shape) if family.transposed else (p.x_shape, p.y_shape)
    x, weight, grad_y = torch.randn(B, *x_shape), torch.randn(B, *p.weight_shape), torch.randn(B, *y_shape)
    bias = torch.randn(B, y_shape[1])

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
        over(lambda *t: conv2d(*t, *rest), {"x": x, "weight": weight, "bias": bias}, chosen)
        over(
            lambda *t: conv2d(*t, None, *rest),
            {"x": x, "weight": weight},
            chosen if chosen[0] != "bias" else ("x",),
            2,
        )
        if batched != "bias":
            size, strides = x_shape, x[0].stride()
            given = tuple({"x": "grad_y"}.get(n, n) for n in chosen if n != "bias")
            over(
                lambda *t: conv2d_grad_input(*t, size, strides, *rest),
                {"grad_y": grad_y, "weight": weight},
                given,
                1,
            )
            size2, strides2 = p.weight_shape, weight[0].stride()
            given = tuple({"weight": "grad_y"}.get(n, n) for n in chosen if n != "bias")
            over(lambda *t: conv2d_grad_weight(*t, size2, strides2, *rest), {"x": x, "grad_y": grad_y}, given, 1)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("conv2d", n) for n in ("3x3", "1x1 stride 2", "depthwise multiplier 2", "groups 2", "patch 4x4")),
        ("conv_transpose2d", "4x4 stride 2"), ("conv_transpose2d", "groups 2"), ("conv3d", "3x3x3 groups 2"),
        ("conv3d", "3x1x1"), ("conv_transpose3d", "2x2x2 stride 2"),
    ],
)  # fmt: skip
def test_flops_are_atens(family, name):
    from torch.utils.flop_counter import FlopCounterMode

    ops.register_flop_formulas()
    family = FAMILIES[family]
    p = problems_of(family)[name]
    x, weight = (leaf(t) for t in operands_of(p, "contiguous", family)[:2])

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function().sum().backward()
        return counter.get_total_flops()

    want = flops(lambda: natively(p, family, x, weight, None))
    for names in (("im2col_gemm",) * 3, ("native",) * 3, ("native", "im2col_gemm", "native")):
        got = flops(lambda names=names: family.forward(x, weight, None, *geometry(p, family), *names, AUTO))
        assert got == want > 0
