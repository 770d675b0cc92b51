"""What depthwise_triton compiles to, for GPUs that need not be there, on layers of published networks."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this run", allow_module_level=True)

import _sass

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.kernels.pool import BY_NAME
from convselect.kernels.triton import launch as launcher

pytestmark = pytest.mark.compile

ALGORITHM = BY_NAME["depthwise_triton"]
FORWARD, DATA, WEIGHT = Direction


def layer(N: int, C: int, size: int, taps: int, stride: int, dtype: str, layout: str, direction: Direction):
    return conv_problem(
        N, C, size, size, C, taps, taps, stride=stride, padding=taps // 2, groups=C, dtype=dtype, layout=layout,
        direction=direction, device="cuda",
    )  # fmt: skip


# Kernel -> a layer that every configuration of it is compiled for.
LAYERS = {
    "gather_nhwc": layer(128, 32, 112, 3, 1, "bfloat16", CHANNELS_LAST, FORWARD),  # MobileNetV2
    "gather_nchw": layer(64, 72, 56, 3, 2, "float32", CONTIGUOUS, FORWARD),  # MobileNetV3
    "weight_nhwc": layer(128, 32, 112, 3, 1, "bfloat16", CHANNELS_LAST, WEIGHT),
    "weight_nchw": layer(64, 72, 56, 3, 2, "float32", CONTIGUOUS, WEIGHT),
}
# The first configuration that `configs` gives.
CHOSEN = {
    "ConvNeXt": layer(64, 96, 56, 7, 1, "bfloat16", CHANNELS_LAST, FORWARD),
    "ConvNeXt, weight": layer(64, 96, 56, 7, 1, "bfloat16", CHANNELS_LAST, WEIGHT),
    "ConvNeXt, contiguous": layer(32, 96, 56, 7, 1, "float32", CONTIGUOUS, FORWARD),
    "ConvNeXt, contiguous, weight": layer(32, 96, 56, 7, 1, "float16", CONTIGUOUS, WEIGHT),
    "EfficientNet, data": layer(128, 144, 56, 5, 2, "float16", CHANNELS_LAST, DATA),
    "EfficientNet, 24 channels": layer(32, 24, 28, 3, 1, "float32", CHANNELS_LAST, DATA),
    "11x11": layer(8, 64, 56, 11, 1, "float16", CHANNELS_LAST, FORWARD),
}


def shipped() -> list[tuple[str, int, int]]:
    found = []
    for arch in (80, 90):
        with launcher.assumed_arch(arch):
            found += [(k, arch, i) for k in LAYERS for i in range(len(launcher.configurations(ALGORITHM.name, k)))]
    return found


def look(problem: ConvProblem, arch: int, params=None):
    """(usage, instructions) of the kernel that does the work."""
    with launcher.assumed_arch(arch):
        launch = ALGORITHM.launches(problem, params)[0]
        code = launcher.compiled(launch, arch)
        usage, instructions = _sass.usage(code), _sass.instructions(code)
        assert usage.spill_bytes == 0
        assert usage.registers < 255
        assert usage.shared_bytes <= launcher.shared_memory_bytes()
    if problem.layout == CHANNELS_LAST:
        loads = {name for name in instructions if name.startswith("LDG")}
        assert loads <= {"LDG.E.128", "LDG.E.64"}, loads
    assert instructions["FFMA"] > 0
    return usage, instructions


@pytest.mark.parametrize(("kernel", "arch", "index"), shipped())
def test_every_configuration_keeps_its_sums_in_registers(kernel, arch, index):
    with launcher.assumed_arch(arch):
        params = launcher.configurations(ALGORITHM.name, kernel)[index]
    _, instructions = look(LAYERS[kernel], arch, params)
    if params.get("vector_bytes") == 16:
        assert instructions["LDG.E.128"] > 0
        assert instructions["LDG.E.64"] == 0


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen(name):
    _, instructions = look(CHOSEN[name], 90)
    if name == "ConvNeXt":
        # A tile of a row of seven taps: most of what is issued multiplies.
        assert instructions["FFMA"] > 0.45 * sum(instructions.values())


def test_the_sum_over_parts():
    launch = ALGORITHM.launches(LAYERS["weight_nhwc"])[1]
    for arch in (80, 90):
        assert _sass.usage(launcher.compiled(launch, arch)).spill_bytes == 0


@pytest.mark.parametrize("problem", [*LAYERS.values(), *CHOSEN.values()], ids=str)
def test_grids_fill_a_gpu_and_sums_stay_small(problem):
    for params in ALGORITHM.configs(problem):
        launches = ALGORITHM.launches(problem, params)
        assert launches[0].grid[0] >= 132
        if problem.direction == WEIGHT:
            parts = dict(launches[1].constants)["PARTS"]
            assert 4 * parts * problem.K * problem.R * problem.S <= 16 << 20
            assert launches[0].grid[0] <= 64 * 132
