"""The kernel for gradients of patches and stems: every instruction set, layouts that differ, chunks, rests, threads."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import pytest
import torch
from pairs import pairs, pairwise
from problems import PROBLEMS, operands_of, random_operands, relative_error
from tolerances import tolerance
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction, conv_problem, layout_of
from convselect.kernels import _library
from convselect.kernels.direct import Direct
from convselect.kernels.patches import FEW_CHANNELS, Patches
from convselect.kernels.reference import Reference

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

PATCHES, REFERENCE = Patches(), Reference()
LEVELS = range(_library.library().cs_best_isa() + 1)  # type: ignore[union-attr]
LAYOUTS = ("contiguous", "channels_last")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
GRADIENTS = (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT)
every_level = pytest.mark.parametrize("level", LEVELS)
every_direction = pytest.mark.parametrize("direction", list(Direction), ids=str)

# Of sizes at which chunks, panels and blocks come in more than one and end in a rest.
LARGER = {
    "4x4, several chunks": conv_problem(3, 3, 60, 64, 96, 4, 4, stride=4),
    "2x2, odd channels": conv_problem(2, 21, 30, 28, 37, 2, 2, stride=2),
    "2x2, a rest below and beside": conv_problem(3, 10, 21, 19, 24, 2, 2, stride=2),
    "a line and a column left": conv_problem(2, 3, 17, 21, 32, 4, 5, stride=(4, 5)),
    "rows a power of two apart": conv_problem(2, 6, 12, 12, 512, 3, 3, stride=3),
    "one patch": conv_problem(5, 7, 6, 4, 11, 6, 4, stride=(6, 4)),
    "16x16": conv_problem(2, 3, 64, 48, 130, 16, 16, stride=16),
    "several images in a chunk": conv_problem(9, 20, 8, 8, 48, 2, 2, stride=2),
    "long lines": conv_problem(1, 2, 4, 2600, 32, 2, 2, stride=2),
    "stem 7x7": conv_problem(2, 3, 40, 46, 32, 7, 7, stride=2, padding=3),
    "stem 3x3": conv_problem(2, 3, 37, 30, 24, 3, 3, stride=2, padding=1),
    "stem, one channel": conv_problem(2, 1, 20, 21, 17, 3, 3, padding=1),
    "stem, uneven": conv_problem(2, 4, 19, 23, 40, 5, 3, stride=(3, 2), padding=(3, 0, 1, 4)),
    "stem without padding": conv_problem(2, 3, 21, 24, 16, 3, 3, stride=2),
    "stem, wide padding": conv_problem(1, 2, 3, 2, 9, 3, 3, padding=(5, 4, 6, 7)),
}
LISTED = {name: p for name, p in {**PROBLEMS, **LARGER}.items() if PATCHES.why_not(p) is None}


def prepared(problem: ConvProblem, layout: str, weight_layout: str) -> tuple[ConvProblem, Tensor, Tensor]:
    a, b = operands_of(problem, *random_operands(problem, layout, weight_layout))
    weight_format = layout_of(b) if problem.direction != Direction.BACKWARD_WEIGHT else "contiguous"
    return problem._replace(layout=layout_of(a), weight_layout=weight_format), a, b


def exact(problem: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    return REFERENCE.run(a.double(), b.double(), problem._replace(dtype="float64"))


def test_the_problems_are_what_they_are_for():
    assert set(LARGER) <= set(LISTED)
    assert {"patch 4x4", "patch with a rest", "stem 7x7 stride 2"} <= set(LISTED)
    # Otherwise the kernel would be compared with nothing that is its own.
    assert (
        sum(PATCHES.same_as_native(p._replace(direction=Direction.BACKWARD_DATA)) is None for p in LISTED.values()) > 8
    )


@every_direction
def test_every_instruction_set_agrees_with_the_reference(direction, nan_memory):
    """`nan_memory`: also that all of the result is written, the pixels that no window covers included."""
    weight_layouts = LAYOUTS[: 1 if direction == Direction.BACKWARD_WEIGHT else 2]
    for (name, listed), layout, weight_layout in pairs(list(LISTED.items()), LAYOUTS, weight_layouts):
        p, a, b = prepared(listed._replace(direction=direction), layout, weight_layout)
        want = exact(p, a, b)
        for level in LEVELS:
            error = relative_error(_library.call("cs_patches", a, b, p, isa_level=level), want)
            assert error <= tolerance(PATCHES, p), f"{name} {layout} {weight_layout}, {level}: {error:.1e}"


@pairwise({"level": LEVELS, "x_layout": LAYOUTS, "y_layout": LAYOUTS, "name": list(LARGER)})
def test_operands_of_a_weight_gradient_may_differ_in_layout(level, x_layout, y_layout, name, nan_memory):
    p = LARGER[name]._replace(direction=Direction.BACKWARD_WEIGHT)
    x, _, grad_y = random_operands(p)
    x, grad_y = (t.contiguous(memory_format=FORMATS[f]) for t, f in ((x, x_layout), (grad_y, y_layout)))
    got = _library.call("cs_patches", x, grad_y, p._replace(layout=x_layout), isa_level=level)
    assert relative_error(got, exact(p, x, grad_y)) <= tolerance(PATCHES, p)


def shared_out() -> str:
    """A digest of what threads compute together, on each problem, direction and layout."""
    digest = hashlib.sha256()
    torch.set_num_threads(3)
    for listed, direction, layout in itertools.product(LARGER.values(), GRADIENTS, LAYOUTS):
        p, a, b = prepared(listed._replace(direction=direction, threads=3), layout, "contiguous")
        digest.update(PATCHES.run(a, b, p).contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("direction", GRADIENTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_do_not_change_a_bit(direction, layout):
    for listed in LARGER.values():
        p, a, b = prepared(listed._replace(direction=direction), layout, "contiguous")
        results = []
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(PATCHES.run(a, b, p._replace(threads=threads)))
        assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_same_bits_from_however_many_threads_are_delivered():
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import test_patches; print(test_patches.shared_out())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert out.returncode == 0, out.stderr[-500:]
    assert out.stdout.strip() == shared_out()


@every_level
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_not_finite_stays_where_a_direct_sum_has_it(level, layout):
    """A NaN of grad_y in its own window; one of x in the taps that meet it, and never by way of padding or a rest."""
    p, grad_y, weight = prepared(
        LARGER["4x4, several chunks"]._replace(direction=Direction.BACKWARD_DATA), layout, layout
    )
    grad_y[1, 3, 4, 5] = float("nan")
    got = _library.call("cs_patches", grad_y, weight, p, isa_level=level).isfinite()
    want = torch.ones_like(got)
    want[1, :, 16:20, 20:24] = False
    assert torch.equal(got, want)
    for name in ("stem 3x3", "stem, uneven", "stem without padding", "2x2, a rest below and beside"):
        p, x, grad_y = prepared(LARGER[name]._replace(direction=Direction.BACKWARD_WEIGHT), layout, "contiguous")
        x[0, 0, -1, -1] = float("inf")
        x[1, 0, 4, 6] = float("nan")
        got = _library.call("cs_patches", x, grad_y, p, isa_level=level)
        assert torch.equal(got.isnan(), exact(p, x, grad_y).isnan()), name


@pytest.mark.slow
@every_level
@pytest.mark.parametrize("direction", GRADIENTS, ids=str)
def test_scratch_is_within_the_stated_workspace(level, direction):
    library = _library.library()
    big = {
        "stem": conv_problem(1, 3, 224, 224, 64, 7, 7, stride=2, padding=3),
        "16x16": conv_problem(1, 3, 64, 64, 4096, 16, 16, stride=16),
    }
    for listed, layout in itertools.product({**LARGER, **big}.values(), LAYOUTS):
        p, a, b = prepared(listed._replace(direction=direction), layout, "contiguous")
        library.cs_free_scratch()
        _library.call("cs_patches", a, b, p, isa_level=level)
        # Two blocks, each rounded up to 2 MiB. A wider instruction set takes no less.
        assert library.cs_scratch_bytes() <= PATCHES.workspace_bytes(p) + 2 * 2**21, f"{p} {layout}"
    library.cs_free_scratch()


def test_forward_and_the_grad_input_of_stems_are_those_of_direct():
    for name, direction in (("16x16", Direction.FORWARD), ("stem 7x7", Direction.BACKWARD_DATA)):
        p, a, b = prepared(LARGER[name]._replace(direction=direction), "contiguous", "contiguous")
        assert PATCHES.same_as_native(p) is not None
        assert torch.equal(PATCHES.run(a, b, p), Direct().run(a, b, p))


def test_why_not():
    stem, patch = LARGER["stem 3x3"], LARGER["2x2, odd channels"]
    assert PATCHES.why_not(stem) is None
    assert PATCHES.why_not(patch) is None
    assert "one group" in PATCHES.why_not(conv_problem(1, 4, 8, 8, 8, 2, 2, stride=2, groups=2))
    assert "dilation" in PATCHES.why_not(conv_problem(1, 3, 9, 9, 8, 3, 3, dilation=2))
    assert "tap" in PATCHES.why_not(conv_problem(1, 3, 8, 8, 8, 1, 1))
    assert "kernel = stride" in PATCHES.why_not(conv_problem(1, FEW_CHANNELS + 1, 8, 8, 8, 3, 3, padding=1))
    assert "kernel = stride" in PATCHES.why_not(conv_problem(1, 8, 8, 8, 8, 2, 2, stride=2, padding=1))
    for dtype in ("float64", "bfloat16"):
        assert dtype in PATCHES.why_not(stem._replace(dtype=dtype))
    assert "cuda" in PATCHES.why_not(stem._replace(device="cuda"))
