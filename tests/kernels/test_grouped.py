"""Grouped convolution with few channels per group, against float64, for every instruction set of this machine."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import subprocess
import sys

import pytest
import torch
from _memory import peak_extra_bytes
from activations import ACTIVATIONS, SLOPE
from pairs import pairwise
from problems import operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, STRIDED, ConvProblem, Direction, conv_problem
from convselect.freeze.kernel import GROUPED, GROUPED_PACKED, packed_form
from convselect.kernels import _library, grouped
from convselect.kernels._contract import Grade
from convselect.kernels.native import Native
from convselect.kernels.reference import Reference

ALGORITHM = grouped.ALGORITHMS[0]
ISA_LEVELS = range(_library.library().cs_best_isa() + 1) if _library.available() else ()
pytestmark = pytest.mark.skipif(not _library.available(), reason="the C kernels are not built")
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)
ISAS = pytest.mark.parametrize("isa_level", ISA_LEVELS)

AWKWARD = {
    "4 channels": conv_problem(2, 32, 14, 15, 32, 3, 3, padding=1, groups=8),
    "4 channels, a rest of groups": conv_problem(2, 28, 9, 31, 28, 3, 3, padding=1, groups=7),
    "4 channels, stride 2": conv_problem(2, 24, 17, 30, 24, 3, 3, stride=2, padding=1, groups=6),
    "8 channels, small image": conv_problem(3, 24, 7, 7, 24, 3, 3, padding=1, groups=3),
    "8 channels, 5x5": conv_problem(2, 40, 12, 11, 40, 5, 5, padding=2, groups=5),
    "8 channels, 5x5, stride 2": conv_problem(1, 24, 13, 16, 24, 5, 5, stride=2, padding=2, groups=3),
    "16 channels": conv_problem(1, 48, 10, 9, 48, 3, 3, padding=1, groups=3),
    "24 channels, stride (2, 1)": conv_problem(1, 48, 11, 10, 48, 3, 3, stride=(2, 1), padding=1, groups=2),
    "64 channels": conv_problem(1, 128, 6, 5, 128, 3, 3, padding=1, groups=2),
    "more out than in": conv_problem(2, 15, 8, 9, 60, 3, 3, padding=1, groups=5),
    "more in than out": conv_problem(2, 60, 8, 9, 15, 3, 3, padding=1, groups=5),
    "one output channel": conv_problem(2, 36, 8, 9, 4, 3, 3, padding=1, groups=4),
    "odd numbers": conv_problem(3, 35, 6, 19, 65, 2, 4, padding=(2, 0, 1, 3), groups=5),
    "2 channels": conv_problem(2, 22, 9, 8, 22, 3, 3, padding=1, groups=11),
    "1x1": conv_problem(2, 32, 9, 8, 48, 1, 1, groups=4),
    "1x1, stride 2": conv_problem(2, 32, 9, 8, 32, 1, 1, stride=2, groups=8),
    "stride over kernel": conv_problem(2, 16, 11, 13, 16, 2, 2, stride=3, padding=1, groups=4),
    "stride 2, dilation 2": conv_problem(1, 16, 13, 17, 16, 3, 3, stride=2, padding=2, dilation=2, groups=4),
    "stride (3, 2), dilation (2, 3)": conv_problem(
        1, 16, 19, 18, 16, 3, 3, stride=(3, 2), padding=4, dilation=(2, 3), groups=4
    ),
    "dilation 2": conv_problem(1, 32, 12, 13, 32, 3, 3, padding=2, dilation=2, groups=4),
    "padding over kernel": conv_problem(2, 16, 5, 6, 16, 3, 3, padding=9, groups=4),
    "padding over kernel, stride 2": conv_problem(2, 16, 5, 6, 16, 3, 3, stride=2, padding=(8, 5, 3, 9), groups=4),
    "kernel over image": conv_problem(2, 8, 4, 3, 8, 7, 7, padding=4, groups=2),
    "one pixel": conv_problem(3, 8, 1, 1, 12, 3, 3, padding=1, groups=2),
    "one row": conv_problem(2, 8, 1, 70, 8, 3, 3, padding=1, groups=2),
    "one column": conv_problem(2, 8, 70, 1, 8, 3, 3, padding=1, groups=2),
}


def run(problem: ConvProblem, operands, isa_level: int | None = None, **epilogue) -> torch.Tensor:
    return _library.call("cs_grouped", *operands, problem, isa_level=isa_level, **epilogue)


def call(conv, operands, out: torch.Tensor) -> int:
    """The C function itself."""
    pointers = (t.data_ptr() for t in (*operands, out))
    return _library._function("cs_grouped", 0)(ctypes.byref(conv), *pointers, None)


def prepared(problem: ConvProblem, layout: str = "contiguous", weight_layout: str = "contiguous"):
    seen = {"contiguous": CONTIGUOUS, "channels_last": CHANNELS_LAST, "offset": CONTIGUOUS}
    problem = problem._replace(layout=seen.get(layout, STRIDED), weight_layout=seen.get(weight_layout, STRIDED))
    assert ALGORITHM.why_not(problem) is None
    return problem, operands_of(problem, *random_operands(problem, layout, weight_layout))


def expected(problem: ConvProblem, operands) -> torch.Tensor:
    return Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))


@pairwise(
    {
        "isa_level": ISA_LEVELS,
        "direction": list(Direction),
        "dtype": ["float32", "float16", "bfloat16"],
        "layout": ["contiguous", "channels_last"],
        "weight_layout": ["contiguous", "channels_last"],
    }
)
def test_awkward_problems(isa_level, direction, dtype, layout, weight_layout, nan_memory):
    for name, problem in AWKWARD.items():
        problem, operands = prepared(problem._replace(direction=direction, dtype=dtype), layout, weight_layout)
        before = [t.clone() for t in operands]
        got = run(problem, operands, isa_level)
        assert got.shape == problem.result_shape
        assert got.dtype == problem.torch_dtype
        assert relative_error(got, expected(problem, operands)) <= tolerance(ALGORITHM, problem), name
        assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True)), name


@DIRECTIONS
@pytest.mark.parametrize("layout", ["expanded", "channel_slice", "offset", "transposed"])
def test_any_strides(direction, layout):
    for name in ("4 channels", "odd numbers", "stride over kernel"):
        problem, operands = prepared(AWKWARD[name]._replace(direction=direction), layout, layout)
        got = ALGORITHM.run(*operands, problem)
        assert relative_error(got, expected(problem, operands)) <= tolerance(ALGORITHM, problem)


@ISAS
def test_weight_gradient_in_channels_last(isa_level):
    """The kernel writes a weight in whichever order it is asked for; `call` only ever asks for one."""
    problem, operands = prepared(AWKWARD["odd numbers"]._replace(direction=Direction.BACKWARD_WEIGHT))
    out = torch.empty(problem.weight_shape, memory_format=torch.channels_last)
    conv = _library._conv(problem, CONTIGUOUS, CONTIGUOUS, 1, isa_level)
    conv.weight_layout = _library.LAYOUTS[CHANNELS_LAST]
    assert call(conv, operands, out) == _library.OK
    assert torch.equal(out, run(problem, operands, isa_level))


@ISAS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_epilogue(isa_level, dtype, layout):
    for name in ("4 channels, a rest of groups", "24 channels, stride (2, 1)", "8 channels, small image"):
        problem, operands = prepared(AWKWARD[name]._replace(dtype=dtype), layout)
        bias = torch.randn(problem.K)
        residual = torch.randn(problem.y_shape).to(problem.torch_dtype)
        plain = expected(problem, operands)
        for activation, added in itertools.product(ACTIVATIONS, (None, residual)):
            want = plain + bias.double().view(1, -1, 1, 1) + (0 if added is None else added.double())
            options = {"bias": bias, "residual": added, "activation": activation, "slope": SLOPE}
            got = run(problem, operands, isa_level, **options)
            assert relative_error(got, ACTIVATIONS[activation](want)) <= tolerance(ALGORITHM, problem)


@DIRECTIONS
@ISAS
def test_long_sums_stay_as_exact_as_native(direction, isa_level):
    for problem in (
        conv_problem(4, 16, 112, 112, 16, 3, 3, padding=1, groups=4),
        conv_problem(1, 128, 20, 20, 128, 9, 9, padding=4, groups=2),
    ):
        problem, operands = prepared(problem._replace(direction=direction))
        want = expected(problem, operands)
        native = relative_error(Native().run(*operands, problem), want)
        assert ALGORITHM.error_grade(problem) == Grade.DIRECT
        assert relative_error(run(problem, operands, isa_level), want) <= max(2 * native, 1e-6)


@DIRECTIONS
@ISAS
def test_nonfinite_pixels_stay_in_their_window(direction, isa_level):
    for name in ("4 channels, a rest of groups", "8 channels, small image", "24 channels, stride (2, 1)",
                 "4 channels, stride 2", "8 channels, 5x5", "stride 2, dilation 2"):  # fmt: skip
        problem, (a, b) = prepared(AWKWARD[name]._replace(direction=direction))
        for image in [a] if direction != Direction.BACKWARD_WEIGHT else [a, b]:
            for row, column in itertools.product((0, image.shape[2] // 2, image.shape[2] - 1), (0, 3, -1)):
                kept = image[0, 5, row, column].clone()
                image[0, 5, row, column] = float("nan")
                got, want = run(problem, (a, b), isa_level), Native().run(a, b, problem)
                # Native's own weight gradient multiplies padding with grad_y in some of its kernels.
                assert torch.equal(got.isnan() | want.isnan(), want.isnan()), name
                assert got.isnan().any() or not want.isnan().any(), name
                image[0, 5, row, column] = kept


# ---- frozen weights -------------------------------------------------------------------------------------------------

# Every kind of register tile of every instruction set: 1 to 8 vectors, whole and half ones, lanes to spare, two groups
# at a time and one left over; tiles that meet one, several or only columns of padding; pixels copied together and not.
FROZEN = {
    **AWKWARD,
    "24 channels": conv_problem(2, 72, 14, 15, 72, 3, 3, padding=1, groups=3),
    "24 channels, stride 2": conv_problem(1, 48, 15, 14, 48, 3, 3, stride=2, padding=1, groups=2),
    "32 channels, 7x7": conv_problem(1, 64, 7, 7, 64, 3, 3, padding=1, groups=2),
    "40 channels": conv_problem(1, 80, 5, 13, 80, 3, 3, padding=1, groups=2),
    "48 channels": conv_problem(1, 96, 6, 9, 96, 3, 3, padding=1, groups=2),
    "56 channels": conv_problem(1, 112, 4, 8, 112, 3, 3, padding=1, groups=2),
    "11 channels out": conv_problem(2, 10, 6, 9, 22, 3, 3, padding=1, groups=2),
    "27 channels out": conv_problem(1, 14, 6, 9, 54, 3, 3, padding=1, groups=2),
    "43 channels out": conv_problem(1, 6, 5, 6, 86, 3, 3, padding=1, groups=2),
    "61 channels out": conv_problem(1, 10, 5, 6, 122, 3, 3, padding=1, groups=2),
    "16 channels, 5 groups": conv_problem(1, 80, 7, 9, 80, 3, 3, padding=1, groups=5),
    "8 channels, 5 groups, stride 2": conv_problem(2, 40, 9, 14, 40, 3, 3, stride=2, padding=1, groups=5),
    "pixels 4 KiB apart": conv_problem(1, 1024, 5, 6, 1024, 3, 3, padding=1, groups=32),
    "pixels 1 KiB apart": conv_problem(1, 256, 6, 7, 256, 3, 3, stride=2, padding=1, groups=32),
    "padding on the right only": conv_problem(1, 48, 6, 9, 48, 3, 3, padding=(0, 1, 0, 4), groups=2),
    "bands": conv_problem(1, 48, 120, 60, 48, 3, 3, stride=2, padding=1, groups=2),
}


def frozen(problem: ConvProblem, operands, isa_level: int, threads: int = 1, **epilogue) -> torch.Tensor | None:
    """The result by `cs_grouped_frozen`; None if it does not take the problem."""
    conv = _library._conv(problem, problem.layout, CONTIGUOUS, threads, isa_level)
    size = _library._function("cs_grouped_packed_bytes", 0, 0, ctypes.c_int64)(ctypes.byref(conv))
    if size < 0:
        return None
    x, weight = operands
    packed = torch.full((size // 4,), float("nan"))
    weight = weight.contiguous()
    assert _library._function("cs_grouped_pack", 0, 2)(ctypes.byref(conv), weight.data_ptr(), packed.data_ptr()) == 0
    out = torch.full(problem.y_shape, float("nan")).contiguous(memory_format=_library._FORMATS[problem.layout])
    bias, residual, activation = (epilogue.get(name) for name in ("bias", "residual", "activation"))
    structure = _library.Epilogue(
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        _library.ACTIVATIONS[activation],
        0,
    )
    function = _library._function("cs_grouped_frozen", 0)
    pointers = (x.data_ptr(), packed.data_ptr(), out.data_ptr(), ctypes.byref(structure) if epilogue else None)
    assert function(ctypes.byref(conv), *pointers) == _library.OK
    return out


LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])


@ISAS
@LAYOUTS
def test_a_packed_weight_gives_the_same_convolution(isa_level, layout):
    ran = set()
    for name, problem in FROZEN.items():
        problem, operands = prepared(problem, layout)
        want = expected(problem, operands)
        got = frozen(problem, operands, isa_level)
        if got is None:
            continue
        assert relative_error(got, want) <= tolerance(ALGORITHM, problem), name
        for threads in (2, 7):
            assert torch.equal(frozen(problem, operands, isa_level, threads), got), name
        ran.add(name)
    assert ran >= {name for name, p in FROZEN.items() if p.K // p.groups >= 8 and p.groups < p.C}


@ISAS
@LAYOUTS
def test_epilogue_with_a_packed_weight(isa_level, layout):
    for name in ("24 channels, stride 2", "27 channels out", "16 channels, 5 groups", "32 channels, 7x7"):
        problem, operands = prepared(FROZEN[name], layout)
        bias = torch.randn(problem.K)
        residual = torch.randn(problem.y_shape).contiguous(memory_format=_library._FORMATS[problem.layout])
        plain = expected(problem, operands)
        for activation, added in itertools.product((None, "relu", "relu6", "silu"), (None, residual)):
            want = plain + bias.double().view(1, -1, 1, 1) + (0 if added is None else added.double())
            want = want if activation is None else getattr(torch.nn.functional, activation)(want)
            got = frozen(problem, operands, isa_level, bias=bias, residual=added, activation=activation)
            assert relative_error(got, want) <= tolerance(ALGORITHM, problem), (name, activation)


@ISAS
@LAYOUTS
def test_nonfinite_pixels_stay_in_their_window_with_a_packed_weight(isa_level, layout):
    for name in ("24 channels, stride 2", "16 channels, 5 groups", "32 channels, 7x7", "61 channels out"):
        problem, (x, weight) = prepared(FROZEN[name], layout)
        for row, column in itertools.product((0, x.shape[2] // 2, x.shape[2] - 1), (0, 3, -1)):
            kept = x[0, 5, row, column].clone()
            x[0, 5, row, column] = float("nan")
            got, want = frozen(problem, (x, weight), isa_level), expected(problem, (x, weight))
            assert torch.equal(got.isnan(), want.isnan()), name
            x[0, 5, row, column] = kept


def test_pack_and_its_refusals():
    problem, (_, weight) = prepared(FROZEN["24 channels"])
    assert grouped.pack(weight, problem).shape == (grouped.packed_floats(problem),)
    for other in (weight[:-1], weight.double()):
        with pytest.raises(ValueError, match="a weight"):
            grouped.pack(other, problem)
    for other in (
        problem._replace(groups=1), problem._replace(groups=72), problem._replace(dtype="bfloat16"),
        problem._replace(device="cuda"), problem._replace(layout=STRIDED), AWKWARD["one output channel"],
    ):  # fmt: skip
        assert grouped.packed_floats(other) is None
        with pytest.raises(ValueError, match="a weight"):
            grouped.pack(torch.empty(other.weight_shape), other)


def test_a_frozen_layer_uses_the_packed_weight():
    problem = FROZEN["24 channels"]
    assert packed_form(GROUPED, problem) is GROUPED_PACKED
    assert packed_form(GROUPED, problem._replace(dtype="bfloat16")) is GROUPED
    assert packed_form(GROUPED, FROZEN["8 channels, small image"]) is GROUPED


SHARED_OUT = (
    conv_problem(1, 64, 30, 28, 64, 3, 3, padding=1, groups=16, threads=3),
    conv_problem(3, 16, 40, 40, 16, 3, 3, stride=2, padding=1, groups=2, threads=3),
)


def shared_out() -> str:
    """A digest of results that are asked of three threads."""
    digest = hashlib.sha256()
    for problem, direction in itertools.product(SHARED_OUT, Direction):
        problem, operands = prepared(problem._replace(direction=direction))
        out = torch.empty(problem.result_shape)
        assert call(_library._conv(problem, CONTIGUOUS, CONTIGUOUS, 3, _library.isa()), operands, out) == _library.OK
        assert relative_error(out, expected(problem, operands)) <= tolerance(ALGORITHM, problem)
        digest.update(out.numpy().tobytes())
    return digest.hexdigest()


def test_the_same_bits_from_however_many_threads_are_delivered():
    digests = {shared_out()}  # by as many as are asked for
    for limit in ("1", "2"):
        environment = {**os.environ, "OMP_THREAD_LIMIT": limit, "PYTHONPATH": os.pathsep.join(sys.path)}
        code = "import test_grouped; print(test_grouped.shared_out())"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert out.returncode == 0, out.stderr[-500:]
        digests.add(out.stdout.strip())
    assert len(digests) == 1


MEMORY = {
    **AWKWARD,
    "ResNeXt": conv_problem(1, 128, 56, 56, 128, 3, 3, padding=1, groups=32),
    "ResNeXt, stride 2": conv_problem(2, 256, 56, 56, 256, 3, 3, stride=2, padding=1, groups=32),
    "ResNeXt, small": conv_problem(2, 1024, 7, 7, 1024, 3, 3, padding=1, groups=32),
    "wide image": conv_problem(1, 16, 8, 600, 16, 3, 3, padding=1, groups=2),
    "31x31": conv_problem(1, 32, 40, 40, 32, 31, 31, padding=15, groups=2),
}


@pytest.mark.slow
@pairwise(
    {
        "direction": list(Direction),
        "dtype": ["float32", "bfloat16"],
        "layout": ["contiguous", "channels_last", "transposed"],
    }
)
def test_workspace_counts_the_library_too(direction, dtype, layout, monkeypatch):
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for name, problem in MEMORY.items():
            problem = problem._replace(direction=direction, dtype=dtype, threads=threads)
            problem, operands = prepared(problem, layout, layout)
            if direction == Direction.BACKWARD_WEIGHT:  # its problem does not tell the layout of grad_y
                operands = (operands[0], operands[1].contiguous())
            copies = peak_extra_bytes(lambda o=operands, p=problem: ALGORITHM.run(*o, p))
            for isa_level in ISA_LEVELS:
                monkeypatch.setattr(_library, "isa", lambda level=isa_level: level)
                bound = ALGORITHM.workspace_bytes(problem)
                _library.library().cs_free_scratch()
                run(problem, operands, isa_level)
                # The caller's own thread: what all share, and one worker's.
                assert copies + _library.library().cs_scratch_bytes() <= bound, name


def test_why_not(monkeypatch):
    base = AWKWARD["4 channels"]
    assert ALGORITHM.why_not(base) is None
    assert "grouped" in ALGORITHM.why_not(base._replace(groups=1))
    assert "depthwise" in ALGORITHM.why_not(base._replace(groups=32))
    assert "64 channels" in ALGORITHM.why_not(base._replace(C=192, K=192, groups=2))
    assert "64 channels" in ALGORITHM.why_not(base._replace(K=8 * 65))
    assert "float32" in ALGORITHM.why_not(base._replace(dtype="float64"))
    assert "CPU" in ALGORITHM.why_not(base._replace(device="cuda"))
    monkeypatch.setattr(_library, "available", lambda: False)
    assert "without" in ALGORITHM.why_not(base)


def test_empty_batch():
    problem = AWKWARD["4 channels"]._replace(N=0, direction=Direction.BACKWARD_WEIGHT)
    got = ALGORITHM.run(torch.empty(problem.x_shape), torch.empty(problem.y_shape), problem)
    assert got.shape == problem.weight_shape
    assert not got.any()
