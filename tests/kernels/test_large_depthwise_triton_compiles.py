"""The banded kernels compiled for GPUs that need not be there: registers, spills, shared memory, instructions."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels decorated for the interpreter do not compile", allow_module_level=True)

from _sass import instructions, usage

from convselect.base.problem import Direction, conv_problem
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.large_depthwise import LargeDepthwiseTriton

pytestmark = pytest.mark.compile

ALGORITHM = LargeDepthwiseTriton()


def depthwise(N, C, H, R, dtype, layout="contiguous", **rest):
    p = conv_problem(N, C, H, H, C, R, R, padding=R // 2, groups=C, dtype=dtype, layout=layout, **rest)
    return p._replace(device="cuda")


REPLKNET = {
    "float16": depthwise(32, 128, 56, 31, "float16"),
    "tf32": depthwise(64, 1000, 32, 31, "float32", tf32=True),
    "tf32x3": depthwise(64, 1000, 32, 31, "float32"),
}
UNIREPLKNET = depthwise(64, 320, 14, 13, "bfloat16", "channels_last")


def kernels(problem, arch, config=None):
    with launcher.assumed_arch(arch):
        assert ALGORITHM.why_not_shape(problem) is None
        limit = launcher.shared_memory_bytes()
        launches = ALGORITHM.launches(problem, config)
    for launch in launches:
        compiled = launcher.compiled(launch, arch)
        used = usage(compiled)
        assert used.spill_bytes == 0, (launch.kernel, used)
        assert used.registers < 255, (launch.kernel, used)
        assert used.shared_bytes <= limit, (launch.kernel, used)
        yield launch, instructions(compiled)


def count(opcodes, *starts):
    return sum(n for opcode, n in opcodes.items() if opcode.startswith(starts))


def products(problem, arch, config, kernel):
    """Compiles the launch that multiplies, and asserts that it loads 16 bytes at a time and does so ahead."""
    with launcher.assumed_arch(arch):
        launch = next(launch for launch in ALGORITHM.launches(problem, config) if launch.kernel == kernel)
        limit = launcher.shared_memory_bytes()
    compiled = launcher.compiled(launch, arch)
    used, opcodes = usage(compiled), instructions(compiled)
    assert used.spill_bytes == 0, used
    assert used.registers < 255, used
    assert used.shared_bytes <= limit, used
    # Both operands of TF32 products must be turned, four bytes at a time, if the sum runs over rows.
    turned = kernel == "banded_gradient" and dict(launch.constants)["COPIES"] == 4
    assert count(opcodes, "LDGSTS.E" if turned else "LDGSTS.E.BYPASS.128") > 0
    assert count(opcodes, "LDG.") == count(opcodes, "LDG.E.128")
    assert count(opcodes, "HGMMA" if arch == 90 and rows(kernel, config) >= 64 else "HMMA") > 0
    if kernel != "banded_gradient":
        assert count(opcodes, "STG.E.128") > 0


def rows(kernel, config):
    return 32 if kernel == "correlate" else config["BM"]


def shipped(kernel):
    for arch in (80, 90):
        with launcher.assumed_arch(arch):
            for config in launcher.configurations(ALGORITHM.name, kernel):
                yield arch, config


@pytest.mark.parametrize("kind", REPLKNET)
@pytest.mark.parametrize(("arch", "config"), list(shipped("banded")), ids=str)
def test_banded(arch, config, kind):
    with launcher.assumed_arch(arch):
        if config not in ALGORITHM.configs(REPLKNET[kind]):
            pytest.skip("not offered for this type")
    products(REPLKNET[kind], arch, config, "banded")


@pytest.mark.parametrize("kind", ["float16", "tf32x3"])
@pytest.mark.parametrize(("arch", "config"), list(shipped("correlate")), ids=str)
def test_correlate(arch, config, kind):
    products(REPLKNET[kind].with_direction(Direction.BACKWARD_WEIGHT), arch, config, "correlate")


@pytest.mark.parametrize("kind", REPLKNET)
@pytest.mark.parametrize(("arch", "config"), list(shipped("banded_gradient")), ids=str)
def test_banded_gradient(arch, config, kind):
    problem = REPLKNET[kind].with_direction(Direction.BACKWARD_WEIGHT)
    with launcher.assumed_arch(arch):
        if config not in ALGORITHM.configs(problem):
            pytest.skip("not offered for this type")
    products(problem, arch, config, "banded_gradient")


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("arch", [80, 90])
def test_all_that_an_nhwc_layer_runs(arch, direction):
    seen = {}
    for launch, opcodes in kernels(UNIREPLKNET.with_direction(direction), arch):
        seen[launch.kernel] = opcodes
    if direction == Direction.BACKWARD_WEIGHT:
        assert list(seen) == ["relayout", "banded_gradient", "add_bands"]
        assert count(seen["relayout"], "LDG.E.128") > 0
        assert count(seen["relayout"], "STG.E.128") > 0
    else:
        assert list(seen) == ["relayout", "shifted_filters", "banded"]
        assert count(seen["banded"], "LDGSTS.E.BYPASS.128") > 0
