"""The C kernels of volumes, at sizes that cut them into several parts: spans, rings, bands, passes, threads."""

from __future__ import annotations

import pytest
import torch
from problems import operands_of, random_operands, relative_error
from tolerances import tolerance

from convselect.base.problem import ConvProblem, Direction
from convselect.base.volumes import volume_problem
from convselect.kernels import _library, _slices
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference

pytestmark = pytest.mark.skipif(not _library.available(), reason="the C library is not installed")

# Several spans of tiles, so that the ring of slices begins anew within a volume; bands of rows; threads with something
# each. Names: what else is new.
PROBLEMS: dict[str, ConvProblem] = {
    "spans": volume_problem(1, 17, 9, 34, 45, 19, 3, 3, 3, padding=1),
    "few tiles": volume_problem(2, 40, 7, 6, 7, 33, 3, 3, 3, padding=1),
    "stride": volume_problem(2, 9, 11, 26, 23, 8, 3, 3, 3, stride=(2, 1, 1), padding=(3, 1, 1)),
    "stride 2": volume_problem(1, 12, 10, 41, 44, 10, 3, 3, 3, stride=2, padding=1),
    "groups, seven slices of taps": volume_problem(1, 6, 8, 24, 25, 8, 7, 3, 3, padding=(4, 2, 1, 1, 0, 2), groups=2),
    "gaps between taps": volume_problem(1, 4, 12, 20, 21, 6, 2, 3, 3, stride=(2, 1, 1), padding=1, dilation=(3, 1, 1)),
    "stem": volume_problem(1, 1, 6, 60, 61, 9, 3, 3, 3, padding=1),
    "depthwise": volume_problem(2, 5, 9, 70, 66, 10, 3, 5, 7, padding=(1, 2, 3), groups=5),
    "depthwise, slices": volume_problem(1, 3, 12, 13, 21, 3, 9, 7, 3, padding=(4, 3, 1), groups=3),
    "7x7x7": volume_problem(1, 5, 9, 18, 21, 6, 7, 7, 7, padding=3),
    "bands": volume_problem(1, 24, 4, 70, 50, 7, 3, 3, 2, stride=(1, 2, 1), padding=1),
}
NAMES = ("winograd2", "winograd4", "winograd6", "depthwise", "direct")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_parts_are_right_and_threads_change_no_bit(name, direction, threads, nan_memory):
    p = PROBLEMS[name]._replace(direction=direction)
    operands = operands_of(p, *random_operands(p))
    want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
    ran = 0
    for algorithm in map(BY_NAME.__getitem__, NAMES):
        if algorithm.why_not(p) is not None:
            continue
        ran += 1
        results = []
        for count in (1, 2, 3):
            threads(count)
            results.append(algorithm.run(*operands, p))
        error, bound = relative_error(results[0], want), tolerance(algorithm, p)
        assert error <= bound, f"{algorithm.name}: {error:.1e} over {bound:.1e}"
        assert torch.equal(results[0], results[1]), algorithm.name
        assert torch.equal(results[0], results[2]), algorithm.name
    assert ran >= 1


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_patches_by_some_images_at_a_time(direction, layout, monkeypatch, nan_memory):
    """Several chunks, the last one smaller; slices, rows and columns that no window meets; one channel, and several."""
    for C in (1, 5):
        p = volume_problem(2, C, 15, 13, 11, 9, 2, 2, 2, stride=2, direction=direction, layout=layout)
        monkeypatch.setattr(_slices, "CHUNK_BYTES", 3 * p.C * p.T * p.H * p.W * 4)
        operands = operands_of(p, *random_operands(p, layout))
        want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
        got = BY_NAME["patches"].run(*operands, p)
        assert relative_error(got, want) <= tolerance(BY_NAME["patches"], p)


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA], ids=str)
def test_an_image_has_the_same_bits_in_any_batch(direction):
    for p in (PROBLEMS["few tiles"], PROBLEMS["depthwise"]):
        p = p._replace(direction=direction)
        a, b = operands_of(p, *random_operands(p))
        for algorithm in map(BY_NAME.__getitem__, NAMES):
            if algorithm.why_not(p) is None:
                assert algorithm.batch_invariant(p)
                alone = torch.cat([algorithm.run(one[None], b, p._replace(N=1)) for one in a])
                assert torch.equal(algorithm.run(a, b, p), alone), algorithm.name


@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_small_volumes_with_large_weights(direction, threads, nan_memory):
    """Output channels in passes over inputs that are transformed once; gradients that are complete in one step."""
    p = volume_problem(1, 200, 2, 5, 4, 240, 3, 3, 3, padding=1, direction=direction)
    operands, winograd = operands_of(p, *random_operands(p)), BY_NAME["winograd4"]
    want = Reference().run(*(t.double() for t in operands), p._replace(dtype="float64"))
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(winograd.run(*operands, p))
    assert relative_error(results[0], want) <= tolerance(winograd, p)
    assert all(torch.equal(results[0], other) for other in results[1:])  # 2 and 4 share the channels of a step


def test_passes_with_several_steps(threads):
    """A transformed weight that is too large to be held at one time, and more spans than threads."""
    threads(1)
    p = volume_problem(2, 288, 1, 3, 4, 320, 3, 3, 3, padding=1)
    x, weight, _ = random_operands(p)
    want = Reference().run(x.double(), weight.double(), p._replace(dtype="float64"))
    got = BY_NAME["winograd4"].run(x, weight, p)
    assert relative_error(got, want) <= tolerance(BY_NAME["winograd4"], p)
    threads(4)  # two of them for each step, in passes of which the last has fewer blocks
    assert torch.equal(BY_NAME["winograd4"].run(x, weight, p), got)


def test_what_a_volume_costs_in_memory():
    """Slabs are bounded: the workspace does not grow with the volume."""
    for name in ("winograd4", "direct"):
        small, large = (
            volume_problem(1, 32, size // 2, size, size, 32, 3, 3, 3, padding=1, direction=direction)
            for size, direction in ((64, Direction.FORWARD), (256, Direction.FORWARD))
        )
        algorithm = BY_NAME[name]
        assert algorithm.workspace_bytes(large) <= 2 * algorithm.workspace_bytes(small) + large.x_bytes // 100
        assert algorithm.workspace_bytes(large) <= large.x_bytes // 4


def test_refusals_name_what_is_needed():
    p = volume_problem(1, 4, 9, 12, 12, 6, 3, 3, 3, padding=1)
    winograd, direct, depthwise = (BY_NAME[name] for name in ("winograd4", "direct", "depthwise"))
    assert "depth" in winograd.why_not(p._replace(stride_d=3))
    assert "depth" in winograd.why_not(p._replace(T=9, pad_front=4, pad_back=4))
    assert "round too much" in BY_NAME["winograd7"].why_not(p)
    assert "stride along the depth" in BY_NAME["patches"].why_not(p)
    assert winograd.why_not(p._replace(R=7, S=7)) == "Tiles of 4 need other kernels; for 7x7 there is winograd2."
    assert "depthwise" in direct.why_not(p._replace(groups=4, K=4))
    assert "depthwise" in depthwise.why_not(p)
    assert "strides" in direct.why_not(p._replace(stride_w=9, direction=Direction.BACKWARD_DATA))
    assert direct.why_not(p._replace(stride_w=9)) is None
    for algorithm in (winograd, direct):
        assert "float64" in algorithm.why_not(p._replace(dtype="float64"))
