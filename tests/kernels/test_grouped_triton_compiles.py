"""What the compiler makes of grouped_triton's shipped configurations, on GPUs that need not be there."""

from __future__ import annotations

import pytest
from _sass import instructions, usage

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.grouped import GroupedTriton, shipped

pytestmark = pytest.mark.compile

if launcher.interpreting() or not launcher.installed():
    pytest.skip("needs Triton's compiler", allow_module_level=True)

ALGORITHM = GroupedTriton()
NHWC = dict(layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST, device="cuda")
# The first stage of ResNeXt-50 32x4d and the third of ResNeXt-101 32x8d; RegNet's odd 232 channels per group; stride 2.
FOUR = conv_problem(128, 128, 56, 56, 128, 3, 3, padding=1, groups=32, dtype="float16", **NHWC)
THIRTY_TWO = conv_problem(64, 1024, 14, 14, 1024, 3, 3, padding=1, groups=32, dtype="bfloat16", **NHWC)
WIDE = conv_problem(32, 696, 28, 28, 696, 3, 3, padding=1, groups=3, dtype="bfloat16", **NHWC)
STRIDED = conv_problem(32, 224, 112, 112, 224, 3, 3, stride=2, padding=1, groups=2, **NHWC)


def cases(direction: Direction, problems: list[ConvProblem]) -> list:
    """Each configuration with the problem, of these, that it is the best guess for."""
    found = []
    for arch in (80, 90):
        with launcher.assumed_arch(arch):
            offered = [(p, ALGORITHM.configs(p)) for p in (q.with_direction(direction) for q in problems)]
            for config in shipped(offered[0][0]):
                p = min(offered, key=lambda o: o[1].index(config) if config in o[1] else len(o[1]))[0]
                name = "-".join(map(str, config.values()))
                found.append(pytest.param(p, config, arch, id=f"{direction}-{p.dtype}-sm_{arch}-{name}"))
    return found


CASES = [
    *cases(Direction.FORWARD, [FOUR, THIRTY_TWO, WIDE]),
    *cases(Direction.BACKWARD_DATA, [FOUR._replace(dtype="float32"), STRIDED]),
    *cases(Direction.BACKWARD_WEIGHT, [FOUR, THIRTY_TWO, WIDE]),
    *cases(Direction.BACKWARD_WEIGHT, [FOUR._replace(dtype="float32"), STRIDED]),
]


@pytest.mark.parametrize(("problem", "config", "arch"), CASES)
def test_configuration(problem, config, arch):
    with launcher.assumed_arch(arch):
        launch = ALGORITHM.launches(problem, config)[0]
        limit = launcher.shared_memory_bytes()
    compiled = launcher.compiled(launch, arch)
    used = usage(compiled)
    assert used.registers < 255
    assert used.spill_bytes == 0
    assert compiled.metadata.shared <= limit
    found = instructions(compiled)
    assert any(name.startswith(("HMMA", "HGMMA")) for name in found), found
    # Activations come 16 bytes at a time; cp.async goes past L1 only for these.
    wide = [name for name in found if name.startswith(("LDG", "LDGSTS")) and ".128" in name]
    assert wide, found
    assert not any(name.startswith(("LDG", "LDGSTS")) and name.endswith((".U16", ".S16")) for name in found), found


def test_nchw_results_are_stored_16_bytes_at_a_time():
    launch = ALGORITHM.launches(FOUR._replace(layout="contiguous", weight_layout="contiguous"))[0]
    assert instructions(launcher.compiled(launch, 90))["STG.E.128"] > 0


@pytest.mark.parametrize("layout", ["contiguous", CHANNELS_LAST])
def test_sums_of_splits(layout):
    problem = FOUR._replace(direction=Direction.BACKWARD_WEIGHT, layout=layout, weight_layout=layout)
    launch = ALGORITHM.launches(problem)[-1]
    assert launch.kernel == "sum_splits"
    compiled = launcher.compiled(launch, 90)
    assert usage(compiled).spill_bytes == 0
    assert instructions(compiled)["LDG.E.128"] > 0
