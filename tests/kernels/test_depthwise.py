"""Depthwise convolution by the C kernels, and by rearranged native calls if they are missing, against float64."""

from __future__ import annotations

import pytest
import torch
from _memory import peak_extra_bytes
from activations import ACTIVATIONS, SLOPE
from pairs import pairwise
from problems import arranged, operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, STRIDED, ConvProblem, Direction, conv_problem
from convselect.kernels import _depthwise_torch, _library, depthwise
from convselect.kernels.reference import Reference

ALGORITHM = depthwise.ALGORITHMS[0]
BY_NATIVE = _depthwise_torch.DepthwiseByNative()
ISA_LEVELS = range(_library.library().cs_best_isa() + 1) if _library.available() else ()
needs_library = pytest.mark.skipif(not _library.available(), reason="there is no C library")
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=str)

AWKWARD = {
    "31x31": conv_problem(1, 8, 33, 40, 8, 31, 31, padding=15, groups=8),
    "13x13, three images": conv_problem(3, 20, 20, 21, 20, 13, 13, padding=6, groups=20),
    "3x3": conv_problem(3, 4, 9, 11, 4, 3, 3, padding=1, groups=4),
    "no padding": conv_problem(2, 5, 20, 19, 5, 11, 11, groups=5),
    "padding over kernel": conv_problem(1, 2, 8, 8, 2, 3, 3, padding=12, groups=2),
    "uneven padding": conv_problem(3, 4, 40, 33, 4, 5, 3, padding=(0, 9, 7, 1), groups=4),
    "multiplier 2, kernel over image": conv_problem(2, 2, 5, 6, 4, 9, 7, padding=6, groups=2),
    "multiplier 3": conv_problem(3, 4, 20, 30, 12, 7, 7, padding=3, groups=4),
    "multiplier 3, dilated": conv_problem(2, 2, 40, 41, 6, 3, 5, padding=(3, 1, 2, 9), dilation=(3, 2), groups=2),
    "strided, a rest": conv_problem(2, 3, 60, 58, 3, 11, 5, padding=5, stride=(2, 3), groups=3),
    "strided and dilated": conv_problem(2, 2, 50, 51, 4, 3, 5, padding=5, dilation=(3, 2), stride=(3, 2), groups=2),
    "one pixel": conv_problem(3, 3, 1, 1, 3, 3, 3, padding=1, groups=3),
    "one row": conv_problem(1, 2, 1, 128, 2, 7, 7, padding=3, groups=2),
    "bands": conv_problem(2, 2, 131, 70, 4, 13, 9, padding=(6, 5, 4, 4), groups=2),
    "bands, padding over kernel": conv_problem(1, 2, 80, 90, 2, 3, 3, padding=9, groups=2),
    "bands, strided and dilated": conv_problem(1, 2, 230, 211, 2, 5, 3, padding=4, stride=2, dilation=2, groups=2),
    "bands, nothing padded": conv_problem(1, 2, 100, 101, 2, 5, 3, groups=2),
    "long row": conv_problem(2, 3, 1, 1150, 3, 1, 31, padding=(0, 15), groups=3),
    "long rows, multiplier 2, dilated": conv_problem(
        2, 2, 2, 2300, 4, 1, 4, padding=(1, 0, 70, 3), dilation=(1, 20), groups=2
    ),
}


IMPLEMENTATION = {"algorithm": {"chosen": ALGORITHM, "by native": BY_NATIVE}}
DIRECTION, LAYOUT = {"direction": list(Direction)}, {"layout": ["contiguous", "channels_last"]}
IMPLEMENTATIONS = pairwise(IMPLEMENTATION)


def check(problem: ConvProblem, layout: str = "contiguous", algorithm=ALGORITHM) -> bool:
    seen = {"contiguous": CONTIGUOUS, "channels_last": CHANNELS_LAST, "offset": CONTIGUOUS}
    problem = problem._replace(layout=seen.get(layout, STRIDED))
    if algorithm.why_not(problem) is not None:
        return False
    operands = operands_of(problem, *random_operands(problem, layout, layout))
    before = [t.clone() for t in operands]
    want = Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))
    got = algorithm.run(*operands, problem)
    assert got.shape == problem.result_shape
    assert got.dtype == problem.torch_dtype
    assert relative_error(got, want) <= tolerance(algorithm, problem)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))
    return True


@pairwise(IMPLEMENTATION | DIRECTION | {"dtype": ["float32", "float16", "bfloat16"]} | LAYOUT)
def test_awkward_problems(algorithm, direction, dtype, layout, nan_memory):
    ran = {
        name for name, p in AWKWARD.items() if check(p._replace(direction=direction, dtype=dtype), layout, algorithm)
    }
    native_declines = direction == Direction.BACKWARD_DATA and (algorithm is BY_NATIVE or not _library.available())
    strided = {name for name, p in AWKWARD.items() if p.stride != (1, 1)}
    assert ran == (set(AWKWARD) - strided if native_declines else set(AWKWARD))


@IMPLEMENTATIONS
@DIRECTIONS
@pytest.mark.parametrize("layout", ["expanded", "channel_slice", "offset", "transposed"])
def test_any_strides(algorithm, direction, layout):
    for name in ("31x31", "multiplier 3", "uneven padding", "bands"):
        check(AWKWARD[name]._replace(direction=direction), layout, algorithm)


def test_bands_are_met():
    assert _depthwise_torch._band_rows(AWKWARD["bands"]) < AWKWARD["bands"].P
    assert _depthwise_torch._band_rows(AWKWARD["31x31"]) == 33
    for height in (57, 58, 59, 116, 117, 118):
        problem = conv_problem(1, 2, height, 70, 2, 3, 3, padding=1, groups=2, direction=Direction.BACKWARD_WEIGHT)
        assert _depthwise_torch._band_rows(problem) <= 58
        assert check(problem, algorithm=BY_NATIVE)


# Problems for which the C kernels take another path: full and partial blocks of channels for every vector width,
# runs of 7 outputs and less, phases without taps or without outputs, bands of rows, strides and dilations that share a
# factor.
BRANCHES = {
    "40 channels, 7x7 image": conv_problem(2, 40, 7, 7, 40, 3, 3, padding=1, groups=40),
    "33 channels, 7x7 kernel": conv_problem(1, 33, 14, 15, 33, 7, 7, padding=3, groups=33),
    "5x5, stride 2": conv_problem(2, 24, 14, 13, 24, 5, 5, padding=2, stride=2, groups=24),
    "7x7 kernel, stride 2": conv_problem(1, 19, 13, 20, 19, 7, 7, padding=3, stride=2, groups=19),
    "7x7 kernel, 7x7 image": conv_problem(2, 48, 7, 7, 48, 7, 7, padding=3, groups=48),
    "5x5 kernel, 4x4 image": conv_problem(1, 21, 4, 4, 21, 5, 5, padding=2, groups=21),
    "5x5, only padding at an end": conv_problem(1, 17, 5, 9, 17, 5, 5, padding=(2, 2, 7, 8), groups=17),
    "narrow image": conv_problem(2, 17, 9, 3, 17, 3, 3, padding=1, groups=17),
    "stride over kernel": conv_problem(2, 9, 15, 17, 9, 3, 1, padding=1, stride=(4, 5), groups=9),
    "stride over image": conv_problem(2, 20, 2, 34, 20, 3, 14, padding=(3, 10, 3, 12), stride=(3, 5), dilation=(1, 2),
                                      groups=20),
    "stride and dilation 2": conv_problem(1, 8, 30, 31, 8, 5, 3, padding=3, stride=2, dilation=2, groups=8),
    "stride 4, dilation 6": conv_problem(1, 5, 40, 41, 5, 3, 5, padding=7, stride=4, dilation=6, groups=5),
    "large image": conv_problem(1, 18, 130, 70, 18, 3, 3, padding=1, groups=18),
    "large image, stride 2": conv_problem(1, 18, 131, 90, 18, 3, 3, padding=1, stride=2, groups=18),
    "multiplier 3, stride 2": conv_problem(2, 6, 13, 14, 18, 3, 3, padding=1, stride=2, groups=6),
    # Vectors along the row: pairs and fours of taps that share a vector, a rest of taps and of outputs, all read in
    # place, nothing but padding on one side, rows that are skipped.
    "long row, one-sided padding": conv_problem(1, 2, 1, 2070, 2, 1, 70, padding=(0, 0, 69, 0), groups=2),
    "long row, no padding": conv_problem(1, 2, 1, 1100, 2, 1, 45, groups=2),
    "long row, most of it padding": conv_problem(2, 2, 1, 40, 2, 1, 3, padding=(0, 0, 3, 2500), groups=2),
    "long rows, skipped": conv_problem(1, 2, 4, 1203, 2, 1, 17, padding=(1, 3, 8, 8), stride=(2, 1), groups=2),
}  # fmt: skip


@needs_library
@pairwise(DIRECTION | LAYOUT | {"dtype": ["float32", "bfloat16"], "isa": ISA_LEVELS})
def test_every_instruction_set(direction, layout, dtype, isa, nan_memory):
    for name, problem in {**AWKWARD, **BRANCHES}.items():
        p = problem._replace(direction=direction, dtype=dtype, layout=layout)
        operands = operands_of(p, *random_operands(p, layout))
        want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
        got = _library.call("cs_depthwise", *operands, p, isa_level=isa)
        assert relative_error(got, want) <= tolerance(ALGORITHM, p), name


@needs_library
@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_images_that_are_read_in_place(isa, nan_memory):
    """Float32 images in channels_last: the kernels that frozen layers run."""
    seen = 0
    for name, problem in {**AWKWARD, **BRANCHES}.items():
        p = problem._replace(layout=CHANNELS_LAST)
        seen += depthwise.packed_floats(p) is not None
        operands = operands_of(p, *random_operands(p, "channels_last"))
        want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
        got = _library.call("cs_depthwise", *operands, p, isa_level=isa)
        assert relative_error(got, want) <= tolerance(ALGORITHM, p), name
    assert seen >= 10


@needs_library
@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_weight_gradient_of_mixed_layouts(isa):
    p = BRANCHES["5x5, stride 2"]._replace(direction=Direction.BACKWARD_WEIGHT)
    x, _, grad_y = random_operands(p)
    want = Reference().run(x.double(), grad_y.double(), p._replace(dtype="float64"))
    for a, b in ((CONTIGUOUS, CHANNELS_LAST), (CHANNELS_LAST, CONTIGUOUS)):
        got = _library.call("cs_depthwise", arranged(x, a), arranged(grad_y, b), p._replace(layout=a), isa_level=isa)
        assert relative_error(got, want) <= tolerance(ALGORITHM, p)


@needs_library
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_epilogue(layout, dtype):
    for name in ("40 channels, 7x7 image", "large image, stride 2", "multiplier 3, stride 2", "long row, no padding"):
        p = BRANCHES[name]._replace(dtype=dtype, layout=layout)
        x, weight, like_y = random_operands(p, layout)
        bias = torch.randn(p.K)
        y = Reference().forward(x.double(), weight.double(), p._replace(dtype="float64"))
        y += bias.double().view(1, -1, 1, 1) + like_y.double()
        for activation, function in ACTIVATIONS.items():
            options = {"bias": bias, "residual": like_y, "activation": activation, "slope": SLOPE}
            got, want = _library.call("cs_depthwise", x, weight, p, **options), function(y)
            assert relative_error(got, want) <= tolerance(ALGORITHM, p), (name, activation)


@needs_library
@pytest.mark.parametrize("isa", ISA_LEVELS)
def test_epilogue_of_images_that_are_read_in_place(isa, nan_memory):
    """Runs within and across the borders, kernels of three rows and of others, whole blocks of channels and a rest."""
    for channels, size, kernel, stride in ((37, 17, 3, 1), (32, 9, 3, 2), (19, 8, 5, 1), (16, 1, 3, 1)):
        p = conv_problem(
            2, channels, size, size + 3, channels, kernel, kernel, stride=stride, padding=kernel // 2, groups=channels,
            layout=CHANNELS_LAST,
        )  # fmt: skip
        assert depthwise.packed_floats(p) is not None
        x, weight, residual = random_operands(p, "channels_last")
        bias = torch.randn(p.K)
        y = Reference().forward(x.double(), weight.double(), p._replace(dtype="float64")) + bias.double().view(-1, 1, 1)
        for activation, function in ACTIVATIONS.items():
            for added, want in ((None, function(y)), (residual, function(y + residual.double()))):
                options = {"bias": bias, "residual": added, "activation": activation, "slope": SLOPE}
                got = _library.call("cs_depthwise", x, weight, p, isa_level=isa, **options)
                assert relative_error(got, want) <= tolerance(ALGORITHM, p), (p, activation)


@needs_library
@DIRECTIONS
def test_any_number_of_threads_gives_the_same_bits(direction):
    """Bands and parts of kernels depend on the number of threads asked for; sums do not."""
    for name, problem in {**AWKWARD, **BRANCHES}.items():
        p = problem._replace(direction=direction)
        operands = operands_of(p, *random_operands(p))
        torch.set_num_threads(1)
        want = _library.call("cs_depthwise", *operands, p)
        for threads in (2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(_library.call("cs_depthwise", *operands, p), want), (name, threads)


@needs_library
@DIRECTIONS
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_scratch_memory_is_what_workspace_says(direction, layout):
    """The calling thread's share, in the blocks it is allocated in; a bound of many times that would be no use."""
    lib, large = _library.library(), 2 << 20
    for name, problem in {**AWKWARD, **BRANCHES, **MEMORY}.items():
        for dtype in ("float32", "bfloat16"):
            p = problem._replace(direction=direction, dtype=dtype, layout=layout)
            operands = operands_of(p, *random_operands(p, layout))
            lib.cs_free_scratch()
            ALGORITHM.run(*operands, p)
            held = lib.cs_scratch_bytes()
            assert held <= ALGORITHM.workspace_bytes(p) + 2 * large, name
            if held < large:  # whole pages, or a quarter megabyte at most
                assert held <= ALGORITHM.workspace_bytes(p) + 2 * 4096, name
    lib.cs_free_scratch()


def test_weight_gradient_error_stays_low_on_large_images():
    """One float32 sum over 224 x 224 products measures 3.9e-6; in bands of 4096 it stays near 1e-6."""
    problem = conv_problem(1, 4, 224, 224, 4, 7, 7, padding=3, groups=4, direction=Direction.BACKWARD_WEIGHT)
    operands = operands_of(problem, *random_operands(problem))
    want = Reference().run(*(t.double() for t in operands), problem._replace(dtype="float64"))
    assert relative_error(ALGORITHM.run(*operands, problem), want) < 2e-6


MEMORY = {
    **AWKWARD,
    "ConvNeXt": conv_problem(1, 96, 56, 56, 96, 7, 7, padding=3, groups=96),
    "RepLKNet": conv_problem(1, 64, 56, 56, 64, 31, 31, padding=15, groups=64),
    "batch": conv_problem(8, 48, 14, 14, 48, 7, 7, padding=3, groups=48),
    "large image": conv_problem(1, 16, 224, 224, 16, 9, 9, padding=4, groups=16),
}


@pairwise(IMPLEMENTATION | DIRECTION | {"dtype": ["float32", "bfloat16"]} | LAYOUT)
def test_workspace_bound(algorithm, direction, dtype, layout):
    measured = 0
    for name, problem in MEMORY.items():
        how = CHANNELS_LAST if layout == "channels_last" else CONTIGUOUS
        problem = problem._replace(direction=direction, dtype=dtype, layout=how)
        if algorithm.why_not(problem) is not None:
            continue
        operands = operands_of(problem, *random_operands(problem, layout))
        peak = peak_extra_bytes(lambda o=operands, p=problem: algorithm.run(*o, p))
        bound = algorithm.workspace_bytes(problem)
        assert peak <= bound, name
        # oneDNN copies everything or nothing, by shape; a bound of many copies would keep it from being used.
        in_float32 = 4 * (problem.x_bytes + problem.y_bytes + problem.weight_bytes) // problem.element_bytes
        if problem.C >= 16:
            assert bound <= 5 * max(peak, in_float32), name
        measured += 1
    assert measured >= 5


@DIRECTIONS
@pytest.mark.parametrize("name", ["31x31", "multiplier 3, dilated", "bands", "bands, strided and dilated", "long row"])
@IMPLEMENTATIONS
def test_nonfinite_pixels_stay_in_their_window(algorithm, name, direction):
    problem = AWKWARD[name]._replace(direction=direction)
    if algorithm.why_not(problem) is not None:
        assert problem.stride != (1, 1)
        return
    a, b = operands_of(problem, *random_operands(problem))
    images = [a] if direction != Direction.BACKWARD_WEIGHT else [a, b]
    for image in images:
        for row, column in ((0, 3), (image.shape[2] // 2, 3), (-1, -1)):
            kept = image[0, 1, row, column].clone()
            image[0, 1, row, column] = float("nan")
            got, want = algorithm.run(a, b, problem), Reference().run(a.double(), b.double(), problem)
            assert torch.equal(got.isnan() | want.isnan(), want.isnan())
            assert got.isnan().any() == want.isnan().any()  # stride 2 skips pixels
            image[0, 1, row, column] = kept


@IMPLEMENTATIONS
def test_why_not(algorithm):
    base = conv_problem(1, 8, 30, 30, 8, 13, 13, padding=6, groups=8)
    assert algorithm.why_not(base) is None
    assert "depthwise" in algorithm.why_not(base._replace(groups=4))
    assert "float64" in algorithm.why_not(base._replace(dtype="float64"))
    assert "CPU" in algorithm.why_not(base._replace(device="cuda"))
    strided = base._replace(stride_h=2)
    assert algorithm.why_not(strided) is None
    strided_gradient = algorithm.why_not(strided._replace(direction=Direction.BACKWARD_DATA))
    same_call = conv_problem(1, 8, 30, 30, 8, 7, 7, padding=3, groups=8)
    assert algorithm.why_not(same_call) is None
    if algorithm is ALGORITHM and _library.available():
        assert strided_gradient is None
        assert algorithm.same_as_native(same_call) is None
    else:
        assert "stride 1" in strided_gradient
        assert "native" in algorithm.same_as_native(same_call)
    for other in (base, same_call._replace(dtype="bfloat16"), same_call._replace(direction=Direction.BACKWARD_WEIGHT)):
        assert algorithm.same_as_native(other) is None


@IMPLEMENTATIONS
@DIRECTIONS
def test_empty_batch(algorithm, direction):
    problem = conv_problem(0, 4, 12, 12, 4, 3, 3, padding=1, groups=4, direction=direction)
    x, weight, grad_y = torch.empty(problem.x_shape), torch.ones(problem.weight_shape), torch.empty(problem.y_shape)
    got = algorithm.run(*operands_of(problem, x, weight, grad_y), problem)
    assert got.shape == problem.result_shape
    assert not got.any()
