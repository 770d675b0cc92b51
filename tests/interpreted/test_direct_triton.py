"""direct_triton in Triton's interpreter: directions, layouts, shipped configurations, awkward sizes."""

from __future__ import annotations

import pytest
import torch
from checking import check
from pairs import pairwise
from problems import PROBLEMS, operands_of, random_operands

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem, layout_of
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.direct import DirectTriton, _box, _Gather, _Gradient, _padded, shipped

ALGORITHM = DirectTriton()


@pytest.fixture(autouse=True)
def _made_anew():
    """Tests change what launches are made from."""
    DirectTriton.launches.forget()
    yield
    DirectTriton.launches.forget()


# Of 31x31 the interpreter would interpret 961 taps; 9x9 takes the same way.
SHARED = {name: p for name, p in PROBLEMS.items() if ALGORITHM.why_not_shape(p) is None and name != "31x31"}
AWKWARD = SHARED | {
    "odd channels": conv_problem(1, 33, 7, 5, 21, 3, 3, padding=1),
    "channels fill blocks": conv_problem(1, 64, 5, 4, 32, 3, 3, padding=1),
    "channels over a tile": conv_problem(1, 20, 3, 4, 290, 2, 2, padding=1),
    "stride 2, dilation 2: half of the pixels have no tap": conv_problem(
        1, 16, 9, 8, 16, 3, 3, stride=2, padding=1, dilation=2
    ),
    "stride (4, 6), dilation (6, 4)": conv_problem(
        1, 8, 17, 15, 8, 3, 2, stride=(4, 6), padding=(5, 2), dilation=(6, 4)
    ),
    "stride (2, 3) leaves a rest": conv_problem(1, 12, 10, 9, 8, 3, 2, stride=(2, 3), padding=(0, 1)),
    "stride over kernel": conv_problem(1, 8, 11, 10, 8, 2, 1, stride=3),
    "windows in the padding": conv_problem(1, 8, 3, 3, 8, 2, 2, padding=4),
}


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward(name, direction):
    problem = AWKWARD[name].with_direction(direction)
    check(ALGORITHM, problem, params=_quickest(problem))


@pairwise(
    {
        "layout": ["contiguous", "channels_last", "channel_slice", "offset", "transposed"],
        "weight_layout": ["contiguous", "channels_last", "expanded"],
        "direction": list(Direction),
    }
)
def test_layouts(layout, weight_layout, direction):
    problem = conv_problem(1, 16, 6, 7, 24, 3, 3, stride=2, padding=1, direction=direction, dtype="float16")
    check(ALGORITHM, problem, layout, weight_layout, _quickest(problem))


ALL_CONFIGURATIONS = [
    pytest.param(kernel, arch, config, id=f"{kernel}-{arch}-{'-'.join(map(str, config.values()))}")
    for kernel, by_arch in launcher._configurations("direct_triton")["kernels"].items()
    for arch, configs in by_arch.items()
    for config in configs
]


@pytest.mark.parametrize(("kernel", "arch", "config"), ALL_CONFIGURATIONS)
def test_configurations(kernel, arch, config):
    dtype = kernel.rpartition("_")[2] if kernel[-1].isdigit() else "float16"
    problem = conv_problem(1, 24, 12, 11, 40, 2, 3, padding=1, dtype=dtype)
    gather = [Direction.FORWARD, Direction.BACKWARD_DATA]
    with launcher.assumed_arch(int(arch.removeprefix("sm_"))):
        for direction in gather if kernel.startswith("gather") else [Direction.BACKWARD_WEIGHT]:
            assert config in shipped(problem.with_direction(direction))
            check(ALGORITHM, problem.with_direction(direction), "channels_last", "channels_last", params=config)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_strides_beyond_32_bits_are_computed(direction, monkeypatch):
    """The path for large tensors, on a small one."""
    monkeypatch.setattr(launcher, "SPLIT_ELEMENTS", 500)
    problem = conv_problem(2, 16, 5, 7, 16, 2, 2, stride=2, padding=1, direction=direction)
    params = _quickest(problem)
    assert dict(ALGORITHM.launches(problem, params)[0].constants)["WIDE"]
    check(ALGORITHM, problem, params=params)


BOXES = {
    "images share a box": conv_problem(5, 8, 3, 3, 16, 3, 3, padding=1),
    "uneven padding, dilation": conv_problem(2, 16, 6, 7, 24, 3, 2, padding=(2, 0, 1, 3), dilation=(1, 2)),
    "channels over a block": conv_problem(1, 72, 5, 9, 136, 2, 2),
    "channels filled up": conv_problem(1, 7, 5, 4, 9, 3, 3, padding=1),
    "1xN": conv_problem(2, 8, 1, 19, 8, 1, 7, padding=(0, 3)),
    "windows in the padding": conv_problem(1, 8, 3, 3, 8, 2, 2, padding=4),
    "whole image": conv_problem(3, 8, 5, 4, 16, 5, 4),
    "1x1": conv_problem(1, 16, 1, 1, 24, 1, 1),
}


@pairwise(
    {
        "name": list(BOXES),
        "dtype": ["float16", "float32"],
        "layout": ["contiguous", "channels_last"],
        "direction": [Direction.FORWARD, Direction.BACKWARD_DATA],
    }
)
def test_descriptors(name, dtype, layout, direction):
    problem = BOXES[name]._replace(direction=direction, dtype=dtype, layout=layout)
    configs = [c for c in shipped(problem) if c["loads"] == "descriptor" and _Gather(problem, c).applies]
    check(ALGORITHM, problem, layout, layout, configs[-1])


def test_descriptors_need_unit_strides_pixels_of_16_bytes_and_a_newer_gpu():
    def offered(problem):
        return any(c["loads"] == "descriptor" for c in ALGORITHM.configs(problem))

    p = conv_problem(8, 64, 28, 28, 64, 3, 3, padding=1, dtype="float16", layout=CHANNELS_LAST, device="cuda")
    assert offered(p)
    assert not offered(p._replace(stride_h=2))
    assert not offered(p._replace(C=60))  # pixels of 120 bytes
    assert not offered(p._replace(dtype="float64"))
    with launcher.assumed_arch(80):
        assert not offered(p)


def test_boxes_of_pixels_waste_least_and_are_widest():
    assert _box(128, (128, 28, 28)) == (8, 4, 4)
    assert _box(128, (1, 64, 64)) == (1, 2, 64)
    assert _box(128, (1, 1024, 1024)) == (1, 1, 128)
    assert _box(64, (3, 7, 7)) == (1, 8, 8)


@pairwise({"direction": list(Direction), "stride": [1, 2], "splits": [2, 3]})
def test_splits(direction, stride, splits, monkeypatch):
    """Whatever the number of splits: the same sum, and the same bits in every run."""
    monkeypatch.setattr(_Gather, "_possible_splits", lambda self: [splits])
    monkeypatch.setattr(_Gradient, "_possible_turns", lambda self: [-(-self.chunks // splits)])
    problem = conv_problem(2, 24, 11, 12, 16, 3, 3, stride=stride, padding=1, direction=direction)
    config = _quickest(problem)
    found = dict(ALGORITHM.launches(problem, config)[-1].constants)["SPLITS"]
    assert found > 1
    for layout in ("contiguous", "channels_last"):
        check(ALGORITHM, problem, layout, layout, params=config)
    operands = operands_of(problem, *random_operands(problem))
    once, again = (ALGORITHM.run(*operands, problem, config) for _ in range(2))
    assert torch.equal(once, again)


def test_small_problems_are_split_and_large_ones_are_not():
    one = conv_problem(1, 512, 7, 7, 512, 3, 3, padding=1, dtype="float16", device="cuda", layout=CHANNELS_LAST)
    many = one._replace(N=1024)
    assert dict(ALGORITHM.launches(one)[0].constants)["SPLITS"] > 4
    assert dict(ALGORITHM.launches(many)[0].constants)["SPLITS"] == 1
    gradient = many.with_direction(Direction.BACKWARD_WEIGHT)._replace(C=16, K=16)
    assert dict(ALGORITHM.launches(gradient)[-1].constants)["SPLITS"] > 16


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_results_come_in_the_layout_of_aten(layout, direction):
    problem = conv_problem(1, 8, 4, 5, 12, 3, 3, padding=1, direction=direction)
    x, weight, grad_y = random_operands(problem, layout, layout)
    p = problem._replace(layout=layout, weight_layout=layout)
    assert layout_of(ALGORITHM.run(*operands_of(p, x, weight, grad_y), p)) == layout


def test_what_does_not_apply():
    dense = conv_problem(1, 8, 5, 5, 8, 3, 3)
    assert "grouped" in ALGORITHM.why_not_shape(dense._replace(groups=2))
    assert "2**31" in ALGORITHM.why_not_shape(dense._replace(N=2**27))
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        assert ALGORITHM.why_not_shape(dense._replace(dtype=dtype)) is None


def test_channels_are_padded_to_8_bytes_or_where_copied_to_16():
    assert [_padded(channels, True, 2) for channels in (1, 3, 4, 6, 20, 24, 25)] == [4, 4, 4, 8, 20, 24, 32]
    assert [_padded(channels, False, 2) for channels in (3, 4, 20, 24)] == [4, 4, 24, 24]
    assert [_padded(channels, True, 4) for channels in (1, 3, 6, 7)] == [2, 4, 6, 8]
    assert [_padded(channels, True, 8) for channels in (1, 3)] == [1, 3]


def test_workspace_counts_copies_and_partial_sums():
    p = conv_problem(64, 32, 56, 56, 64, 3, 3, padding=1, dtype="float16", device="cuda")
    nhwc = p._replace(layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST)
    with launcher.assumed_arch(80):
        assert ALGORITHM.workspace_bytes(nhwc) == 0
        assert ALGORITHM.workspace_bytes(p) == p.x_bytes + p.weight_bytes
        assert ALGORITHM.workspace_bytes(nhwc._replace(C=3)) == 64 * 56 * 56 * 4 * 2 + 64 * 9 * 4 * 2
    with launcher.assumed_arch(90):
        assert 0 < ALGORITHM.workspace_bytes(nhwc) < 1 << 20  # descriptors
    for direction in Direction:
        small = nhwc._replace(N=1, direction=direction)
        for config in shipped(small):
            last = dict(ALGORITHM.launches(small, config)[-1].constants)
            if last["SPLITS"] > 1:
                assert ALGORITHM.workspace_bytes(small) >= 4 * last["SPLITS"] * last["SIZE"]


def _quickest(problem: ConvProblem, loads: str = "pointer") -> dict[str, int]:
    """The configuration with the fewest programs: the interpreter's time."""
    configs = [c for c in ALGORITHM.configs(problem) if c.get("loads", loads) == loads]
    return min(configs, key=lambda c: ALGORITHM.launches(problem, c)[0].grid)
