"""What the compiler makes of direct_triton's shipped configurations, on GPUs that need not be there."""

from __future__ import annotations

import contextvars

import pytest
from _sass import instructions, usage

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.direct import DirectTriton, shipped

pytestmark = pytest.mark.compile

if launcher.interpreting() or not launcher.installed():
    pytest.skip("needs Triton's compiler", allow_module_level=True)

ALGORITHM = DirectTriton()
NHWC = dict(layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST, device="cuda")
# ResNet-50's 3x3 at 28 pixels and its stem; YOLO's downsampling; a U-Net in float32 and NCHW, a smaller one in float64;
# Stable Diffusion's U-Net in training.
DENSE = conv_problem(128, 128, 28, 28, 128, 3, 3, padding=1, dtype="bfloat16", **NHWC)
STEM = conv_problem(128, 3, 224, 224, 64, 7, 7, stride=2, padding=3, dtype="bfloat16", **NHWC)
DOWN = conv_problem(32, 64, 320, 320, 128, 3, 3, stride=2, padding=1, dtype="float16", **NHWC)
SINGLE = conv_problem(4, 64, 256, 256, 64, 3, 3, padding=1, device="cuda")
DOUBLE = conv_problem(16, 64, 64, 64, 64, 3, 3, padding=1, dtype="float64", device="cuda")
TRAINING = conv_problem(4, 640, 32, 32, 640, 3, 3, padding=1, dtype="bfloat16", **NHWC)
F, D, W = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT


def cases(name: str, problem: ConvProblem, direction: Direction, archs: tuple[int, ...] = (80, 90), best: int = 99):
    """The problem with each shipped configuration, or with those that are the best guesses for it."""
    found = []
    for arch in archs:
        with launcher.assumed_arch(arch):
            p = problem.with_direction(direction)
            for config in shipped(p) if best == 99 else ALGORITHM.configs(p)[:best]:
                values = "-".join(map(str, config.values()))
                found.append(pytest.param(p, config, arch, id=f"{name}-{direction}-sm_{arch}-{values}"))
    return found


CASES = [
    *cases("dense", DENSE, F),
    *cases("float32", SINGLE, F),
    *cases("tf32", SINGLE._replace(tf32=True), F, (90,)),
    *cases("double", DOUBLE, F, (90,)),
    *cases("training", TRAINING, W),
    *cases("float32", SINGLE, W),
    *cases("double", DOUBLE, W, (90,)),
    *cases("stem", STEM, F, (80, 90), best=2),
    *cases("down", DOWN, D, (80, 90), best=2),
    *cases("dense", DENSE, D, (90,), best=1),
    *cases("float32", SINGLE, D, (90,), best=1),
    *cases("split", DENSE._replace(N=1), F, (90,), best=1),
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
    assert used.shared_bytes <= limit
    found = instructions(compiled)
    tensor_cores = "DMMA" if problem.dtype == "float64" else ("HGMMA", "HMMA")
    assert any(name.startswith(tensor_cores) for name in found), found
    if config.get("loads") == "descriptor":
        assert found["UTMALDG.4D"] > 0
        assert found["UTMALDG.3D"] > 0
        return
    # Operands come 16 bytes at a time, past registers; those of a stem, whose pixels have 8 bytes, 8.
    width = ".64" if problem.C < 8 else ".128"
    assert any(name.startswith(("LDG", "LDGSTS")) and width in name for name in found), found
    assert not any(name.startswith(("LDG", "LDGSTS")) and name.endswith((".U16", ".S16")) for name in found), found


def test_nchw_results_are_stored_16_bytes_at_a_time():
    launch = ALGORITHM.launches(DENSE._replace(layout="contiguous", weight_layout="contiguous"))[0]
    assert instructions(launcher.compiled(launch, 90))["STG.E.128"] > 0


def test_sums_of_splits():
    launch = ALGORITHM.launches(TRAINING.with_direction(W)._replace(C=64, K=64))[-1]
    assert launch.kernel == "sum_splits"
    compiled = launcher.compiled(launch, 90)
    assert usage(compiled).spill_bytes == 0
    assert instructions(compiled)["LDG.E.128"] > 0


def test_an_allocator_of_the_user_stays(monkeypatch):
    import triton
    from triton.runtime import _allocation

    def mine(size, alignment, stream):
        raise AssertionError

    def check():
        triton.set_allocator(mine)
        handle(0, ())
        assert _allocation._allocator.get() is mine

    seen = []
    monkeypatch.setattr(launcher._Handle, "_call", lambda *_: seen.append(_allocation._allocator.get()))
    handle = object.__new__(launcher._Handle)
    handle._launch = launcher.Launch("", "", (1, 1, 1), (), (), scratch=True)
    contextvars.copy_context().run(check)
    assert seen == [launcher._allocate]


def test_only_descriptors_need_scratch():
    for config in ALGORITHM.configs(DENSE):
        launch = ALGORITHM.launches(DENSE, config)[0]
        assert launch.scratch == (config["loads"] == "descriptor")
    launch = next(one for c in ALGORITHM.configs(DENSE) if (one := ALGORITHM.launches(DENSE, c)[0]).scratch)
    assert 0 < launcher.compiled(launch, 90).metadata.global_scratch_size <= 256
