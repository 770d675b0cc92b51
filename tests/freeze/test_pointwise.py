"""Pointwise programs against float64, in every layout and broadcast that they take."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F
from activations import ACTIVATIONS, SLOPE

from convselect.freeze import pointwise
from convselect.freeze.pointwise import Input, Result, bind
from convselect.kernels import _library

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
EPS = 2.0**-24
INF, NAN = math.inf, math.nan
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
UNARY = {
    **{name: ((), function) for name, function in ACTIVATIONS.items() if name},
    "leaky_relu": ((SLOPE,), ACTIVATIONS["leaky_relu"]),
    "copy": ((), torch.clone), "neg": ((), torch.neg), "abs": ((), torch.abs), "square": ((), torch.square),
    "sqrt": ((), torch.sqrt), "rsqrt": ((), torch.rsqrt), "reciprocal": ((), torch.reciprocal), "exp": ((), torch.exp),
    "log": ((), torch.log), "softplus": ((), F.softplus), "mish": ((), F.mish),
    "elu": ((0.7,), lambda t: F.elu(t, 0.7)), "clamp": ((-1.5, 2.5), lambda t: t.clamp(-1.5, 2.5)),
    "pow": ((3,), lambda t: t**3),
}  # fmt: skip


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    monkeypatch.setattr(_library, "isa", lambda: request.param)
    return request.param


def run(instructions, inputs, out):
    bound = bind(instructions, inputs, out)
    assert bound is not None
    assert bound.function(*bound.arguments) == _library.OK
    return out


def empty_like(t):
    return torch.full_like(t, NAN)


def shapes(seed, count):
    """Output shapes and strides: images in both layouts, matrices, parts of larger tensors."""
    r = random.Random(seed)
    for _ in range(count):
        sizes = [r.choice((1, 2, 3)), r.randint(1, 67), r.choice((1, 7, 14, r.randint(1, 67))), r.randint(1, 67)]
        form = r.choice(("contiguous", "channels_last", "channels_last", "slice", "rows"))
        if form == "rows":
            yield torch.empty(sizes[1] * sizes[0], sizes[3] * 9)
        elif form == "slice":
            yield torch.empty(sizes[0], sizes[1] + 3, *sizes[2:])[:, 1:-2]
        else:
            formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
            yield torch.empty(sizes, memory_format=formats[form])


def broadcasts(shape, r):
    """The shape with some of its dimensions 1, and some of the first left out."""
    kept = [n if r.random() < 0.5 else 1 for n in shape]
    while kept and kept[0] == 1 and r.random() < 0.5:
        kept = kept[1:]
    return kept


def in_order_of(values, like):
    """The values laid out like a tensor of as many dimensions."""
    if values.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous():
        return values.contiguous(memory_format=torch.channels_last)
    return values.contiguous()


def test_operations_of_two_tensors(level):
    """The bits of PyTorch, whatever is broadcast."""
    r = random.Random(level)
    seen = set()
    for i, like in enumerate(shapes(level, 150)):
        name = r.choice(list(BINARY))
        full = in_order_of(torch.randn(like.shape), like)
        other = in_order_of(torch.randn(broadcasts(like.shape, r)), like)
        operands = (full, other) if r.random() < 0.5 else (other, full)
        if i % 10 == 0:
            operands = (full, in_order_of(torch.randn(like.shape), like))
        out = like.fill_(NAN)
        if bind([(name, (Input(0), Input(1)))], operands, out) is None:
            continue
        run([(name, (Input(0), Input(1)))], operands, out)
        assert torch.equal(out, BINARY[name](*operands)), (name, like.shape, like.stride(), other.shape)
        seen.add(tuple(n > 1 for n in other.shape))
    assert len(seen) > 12  # broadcasts that were taken


@pytest.mark.parametrize("name", UNARY)
def test_operations_of_one_tensor(name, level):
    """In units of 2^-24 of the result, with what rounding the operand's square or the like adds to gelu's tails."""
    numbers, function = UNARY[name]
    x = torch.cat([torch.linspace(-25, 25, 3001), torch.logspace(-44, 38, 500), -torch.logspace(-44, 38, 500)])
    x = torch.cat([x, torch.tensor([NAN, INF, -INF, 0.0, -0.0, 88.7, 89.0, -87.5, -103.0, -104.5, 1.0, 1e-40])])
    got = run([(name, (Input(0), *numbers))], [x], empty_like(x)).double()
    want = function(x.double())
    want = torch.where(want.abs() > 3.4028235e38, want * INF, want)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got == INF, want == INF)
    assert torch.equal(got == -INF, want == -INF)
    there = want.isfinite()
    grows = 2 * x.double().clamp(-25, 25) ** 2 if name == "gelu_tanh" else x.new_zeros(()).double()
    if name == "gelu":
        grows = x.double().clamp(-25, 25) ** 2 + x.double().clamp(-25, 25) ** 4 / 32
    # Below 2^-126 a factor e^x has fewer digits, or is no smaller, and x / (1 + e^-x) is 0 once e^-x has overflowed.
    tiny = 2.0 ** (-148 if name == "mish" else -126) * (1 + x.double().abs())
    allowed = (6 + grows) * EPS * want.abs() + (tiny if grows.dim() or name in ("silu", "mish") else 2.0**-148)
    off = ((got - want).abs() / allowed)[there]
    assert off.max() <= 1, (name, x[there][off.argmax()].item(), off.max().item())


def test_exponents():
    x = torch.cat([torch.linspace(-2, 2, 77), torch.tensor([0.0, INF, -INF])])
    for exponent in (-64, -3, -1, 0, 1, 2, 5, 64):
        got = run([("pow", (Input(0), exponent))], [x], empty_like(x))
        torch.testing.assert_close(got, (x.double() ** exponent).float(), rtol=70 * EPS, atol=0)
    with pytest.raises(ValueError, match="exponent"):
        bind([("pow", (Input(0), 0.5))], [x], x)


@pytest.mark.parametrize("name", ["min", "max", "clamp"])
def test_nan_is_not_lost(name, level):
    values = torch.tensor([NAN, INF, -INF, 0.0, 1.0, -1.0, 3.0])
    x, y = (t.reshape(-1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    if name == "clamp":
        got, want = run([(name, (Input(0), -INF, 2.0))], [x], empty_like(x)), x.clamp(-INF, 2.0)
    else:
        got, want = run([(name, (Input(0), Input(1)))], [x, y], empty_like(x)), BINARY[name](x, y)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def squeeze_and_excite(x, gate):
    return [("add", (Input(1), 3.0)), ("clamp", (Result(0), 0.0, 6.0)), ("div", (Result(1), 6.0)),
            ("mul", (Input(0), Result(2)))], (x, gate), x * F.hardsigmoid(gate)  # fmt: skip


def residual(x, y, scale):
    return (
        [("mul", (Input(1), Input(2))), ("add", (Input(0), Result(0))), ("relu", (Result(1),))],
        (x, y, scale),
        (F.relu(x + y * scale)),
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pixels", [(1, 1), (7, 7), (5, 67), (14, 14), (33, 35)])
def test_programs(layout, pixels, level):
    for N, C in ((1, 72), (2, 19)):
        x, y = (torch.randn(N, C, *pixels).contiguous(memory_format=layout) for _ in range(2))
        for instructions, inputs, want in (
            squeeze_and_excite(x, torch.randn(N, C, 1, 1)),
            squeeze_and_excite(x, torch.randn(N, 1, *pixels)),
            residual(x, y, torch.randn(C, 1, 1)),
        ):
            torch.testing.assert_close(run(instructions, inputs, empty_like(x)), want, rtol=4 * EPS, atol=4 * EPS)


def test_a_result_that_is_one_value_fills_the_output(level):
    out = torch.full((3, 300), NAN)
    run([("mul", (2.0, 3.0)), ("sqrt", (Result(0),))], [], out)
    assert torch.equal(out, torch.full_like(out, 6.0).sqrt())
    column = torch.randn(3, 1)
    assert torch.equal(run([("neg", (Input(0),))], [column], out), -column.expand(3, 300))
    # The same where a block has several rows, with a value each, or the same one each time.
    line, out = torch.randn(40), torch.full((60, 40), NAN)
    for column in (torch.randn(60, 1), torch.randn(60, 3)[:, 1:2]):
        assert torch.equal(run([("neg", (Input(0),))], [column], out), -column.expand(60, 40))
    assert torch.equal(run([("neg", (Input(0),))], [line], out), -line.expand(60, 40))
    assert torch.equal(run([("sub", (Input(0), Input(1)))], [column, line], out), column - line)


def test_the_output_may_be_an_input(level):
    for shape in ((2, 72, 7, 7), (3, 2000)):
        x = torch.randn(shape)
        gate = torch.randn(*shape[:2], 1, 1) if len(shape) == 4 else torch.randn(3, 1)
        want = x.neg().mul(gate) + x
        instructions = [("neg", (Input(0),)), ("mul", (Result(0), Input(1))), ("add", (Result(1), Input(0)))]
        torch.testing.assert_close(run(instructions, [x, gate], x), want, rtol=4 * EPS, atol=4 * EPS)


def test_the_output_may_be_an_input_with_other_strides_where_it_has_one_element():
    x = torch.randn(1, 6, 5, 4)
    out = x.as_strided(x.shape, (7, *x.stride()[1:]))
    want = -x
    assert torch.equal(run([("neg", (Input(0),))], [x], out), want)


def test_registers_are_used_again():
    x = torch.rand(700)
    long = [("add", (Input(0), 1.0)), *(("mul", (Result(i), 1.0 + i / 64)) for i in range(60))]
    want = x + 1
    for i in range(60):
        want = want * (1.0 + i / 64)
    assert bind(long, [x], empty_like(x)) is None  # 60 different numbers: more than 16 inputs
    long = [("add", (Input(0), 1.0)), *(("mul", (Result(i), 1.0 + i % 14 / 64)) for i in range(60))]
    want = x + 1
    for i in range(60):
        want = want * (1.0 + i % 14 / 64)
    assert torch.equal(run(long, [x], empty_like(x)), want)
    # 15 results that are all needed at the end, and one more than there are registers.
    for count, fits in ((15, True), (16, False)):
        wide = [("mul", (Input(0), Input(0))), *(("add", (Result(i), Input(0))) for i in range(count - 1))]
        wide += [("add", (Result(i if i == 0 else count + i - 1), Result(i + 1))) for i in range(count - 1)]
        bound = bind(wide, [x], empty_like(x))
        assert (bound is not None) == fits
        if fits:
            values = [x * x]
            for _ in range(count - 1):
                values.append(values[-1] + x)
            total = values[0]
            for value in values[1:]:
                total = total + value
            assert torch.equal(run(wide, [x], empty_like(x)), total)


def test_numbers_keep_their_sign():
    x = torch.ones(5)
    run(
        [("div", (Input(0), 0.0)), ("div", (Input(0), -0.0)), ("min", (Result(0), Result(1)))],
        [x],
        out := empty_like(x),
    )
    assert torch.equal(out, torch.full_like(x, -INF))


def test_any_number_of_threads_gives_the_same_bits():
    x = torch.randn(2, 50, 37, 41)
    gate, pixel = torch.randn(2, 50, 1, 1), torch.randn(2, 1, 37, 41)
    instructions = [("mul", (Input(0), Input(1))), ("gelu", (Result(0),)), ("sub", (Result(1), Input(2)))]
    for layout in (torch.contiguous_format, torch.channels_last):
        images = x.contiguous(memory_format=layout)
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(run(instructions, [images, gate, pixel], empty_like(images)))
        assert all(torch.equal(result, results[0]) for result in results)


def test_what_is_not_covered():
    x = torch.randn(2, 6, 8, 10)
    last = x.contiguous(memory_format=torch.channels_last)
    add = [("add", (Input(0), Input(1)))]
    assert bind(add, [x, last], empty_like(x)) is None  # mixed layouts
    assert bind(add, [x, x.double()], empty_like(x)) is None
    assert bind(add, [x, torch._neg_view(x)], empty_like(x)) is None
    assert bind(add, [x, torch.randn(7)], empty_like(x)) is None
    assert bind(add, [x, x], x.new_empty(x.shape[1:])) is None  # the output would have to grow
    assert bind(add, [x[:0], x[:0]], x[:0].clone()) is None
    assert bind(add, [x, x], torch.empty(1, 6, 8, 10).expand(2, 6, 8, 10)) is None  # results on top of each other
    memory = torch.randn(2000)
    assert bind(add, [memory[:960].view(2, 6, 8, 10), x], memory[1:961].view(2, 6, 8, 10)) is None
    assert bind(add, [memory[:80].view(8, 10), x], memory[40:1000].view(2, 6, 8, 10)) is None
    assert bind(add, [x] * 17, empty_like(x)) is None


def test_wrong_programs_are_refused():
    x = torch.randn(4)
    for instructions in ([], [("norm", (Input(0),))], [("add", (Input(0),))], [("neg", (Input(1),))],
                         [("neg", (Result(0),))], [("clamp", (Input(0), Input(0), 1.0))], [("neg", ("x",))],
                         [("clamp", (Input(0), NAN, 1.0))]):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            bind(instructions, [x], empty_like(x))


def test_every_operation_is_tested():
    assert {*UNARY, *BINARY} == set(pointwise.CODES)
    assert len(set(pointwise.CODES.values())) == len(pointwise.CODES)


def test_pieces_of_rows_and_rows_of_pieces(level):
    """Sizes around those at which blocks change: whole rows, a row in two, several rows in one."""
    for rows, row in itertools.product((1, 2, 5, 67), (1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2049)):
        x, column, line = torch.randn(rows, row), torch.randn(rows, 1), torch.randn(row)
        instructions = [("mul", (Input(0), Input(1))), ("add", (Result(0), Input(2)))]
        got = run(instructions, [x, column, line], empty_like(x))
        want = x.double() * column + line
        torch.testing.assert_close(got.double(), want, rtol=2 * EPS, atol=2 * EPS, msg=f"{rows} x {row}")


def test_a_single_instruction_on_channels_of_larger_images():
    """What has to be laid out beforehand has no room for the long blocks of a single instruction."""
    x, y = (torch.randn(2, 9, 32, 160).permute(0, 3, 1, 2) for _ in range(2))
    gate = torch.randn(2, 54, 1, 1)
    for a, b in ((x[:, :54], y[:, 54:108]), (x[:, 3:57], gate), (x[:, 100:154], x[:, :54])):
        out = torch.full((2, 54, 9, 32), torch.nan).contiguous(memory_format=torch.channels_last)
        bound = bind([("mul", (Input(0), Input(1)))], [a, b], out)
        assert bound is not None
        assert bound.function(*bound.arguments) == _library.OK
        assert torch.equal(out, a * b)
