"""grouped_triton in Triton's interpreter: directions, layouts, shipped configurations, awkward sizes."""

from __future__ import annotations

import pytest
import torch
from checking import check
from pairs import pairwise
from problems import PROBLEMS, operands_of, random_operands

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction, conv_problem, layout_of
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.grouped import GroupedTriton, _axis_constants, _pack, shipped

ALGORITHM = GroupedTriton()


@pytest.fixture(autouse=True)
def _made_anew():
    """Tests change what launches are made from."""
    GroupedTriton.launches.forget()
    yield
    GroupedTriton.launches.forget()


AWKWARD = {name: p for name, p in PROBLEMS.items() if ALGORITHM.why_not_shape(p) is None} | {
    "odd channels, packs do not divide groups": conv_problem(1, 33, 7, 5, 22, 3, 3, padding=1, groups=11),
    "packs of four": conv_problem(1, 40, 6, 7, 40, 3, 3, padding=1, groups=10),
    "one output channel per group": conv_problem(1, 24, 6, 5, 12, 3, 3, padding=1, groups=12),
    "one group fills no tile": conv_problem(1, 80, 5, 4, 48, 3, 3, padding=1, groups=2),
    "one group over a tile": conv_problem(1, 150, 3, 4, 290, 2, 2, padding=1, groups=2),
    "far more inputs than outputs": conv_problem(1, 160, 4, 4, 6, 2, 2, groups=2),
    "far more outputs than inputs": conv_problem(1, 4, 4, 4, 280, 2, 2, groups=2),
    "uneven padding": conv_problem(2, 16, 6, 5, 8, 3, 3, padding=(2, 0, 1, 3), groups=4),
    "stride 2, dilation 2: half of the pixels have no tap": conv_problem(
        1, 16, 9, 8, 16, 3, 3, stride=2, padding=1, dilation=2, groups=4
    ),
    "stride (4, 6), dilation (6, 4)": conv_problem(
        1, 8, 17, 15, 8, 3, 2, stride=(4, 6), padding=(5, 2), dilation=(6, 4), groups=2
    ),
    "stride (2, 3) leaves a rest": conv_problem(1, 12, 10, 9, 8, 3, 2, stride=(2, 3), padding=(0, 1), groups=4),
    "stride over kernel": conv_problem(1, 8, 11, 10, 8, 2, 1, stride=3, groups=4),
    "one pixel": conv_problem(3, 8, 1, 1, 12, 3, 3, padding=1, groups=4),
    "windows in the padding": conv_problem(1, 8, 3, 3, 8, 2, 2, padding=4, groups=4),
    "1xN": conv_problem(1, 8, 3, 19, 12, 1, 7, padding=(0, 3), groups=4),
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
    problem = conv_problem(1, 16, 6, 7, 24, 3, 3, stride=2, padding=1, groups=4, direction=direction, dtype="float16")
    check(ALGORITHM, problem, layout, weight_layout, _quickest(problem))


ALL_CONFIGURATIONS = [
    pytest.param(kernel, arch, config, id=f"{kernel}-{arch}-{'-'.join(map(str, config.values()))}")
    for kernel, by_arch in launcher._configurations("grouped_triton")["kernels"].items()
    for arch, configs in by_arch.items()
    for config in configs
]


@pytest.mark.parametrize(("kernel", "arch", "config"), ALL_CONFIGURATIONS)
def test_configurations(kernel, arch, config):
    dtype = "float32" if kernel.endswith("float32") else "float16"
    problem = conv_problem(1, 36, 12, 12, 24, 3, 3, padding=1, groups=6, dtype=dtype)
    gather = [Direction.FORWARD, Direction.BACKWARD_DATA]
    with launcher.assumed_arch(int(arch.removeprefix("sm_"))):
        for direction in gather if kernel.startswith("gather") else [Direction.BACKWARD_WEIGHT]:
            assert config in shipped(problem.with_direction(direction))
            check(ALGORITHM, problem.with_direction(direction), "channels_last", params=config)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_strides_beyond_32_bits_are_computed(direction, monkeypatch):
    """The path for large tensors, on a small one."""
    monkeypatch.setattr(launcher, "SPLIT_ELEMENTS", 500)
    problem = conv_problem(2, 16, 5, 7, 16, 2, 2, stride=2, padding=1, groups=4, direction=direction)
    params = _quickest(problem)
    assert dict(ALGORITHM.launches(problem, params)[0].constants)["WIDE"]
    check(ALGORITHM, problem, params=params)


@pytest.mark.parametrize("splits", [1, 2, 38])
def test_splits(splits, monkeypatch):
    """Whatever the number of splits: the same sum, and the same bits in every run."""
    monkeypatch.setattr("convselect.kernels.triton.grouped._PROGRAMS_PER_SM", 1)
    monkeypatch.setattr("convselect.kernels.triton.grouped._multiprocessors", lambda: splits)
    problem = conv_problem(2, 8, 26, 25, 8, 2, 2, groups=2, direction=Direction.BACKWARD_WEIGHT)
    config = shipped(problem)[-1]
    found = dict(ALGORITHM.launches(problem, config)[-1].constants).get("SPLITS", 1)
    assert found == splits
    check(ALGORITHM, problem, "channels_last", params=config)
    x, _, grad_y = random_operands(problem)
    once, again = (ALGORITHM.run(x, grad_y, problem, config) for _ in range(2))
    assert torch.equal(once, again)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_results_come_in_the_layout_of_aten(layout, direction):
    problem = conv_problem(1, 8, 4, 5, 12, 3, 3, padding=1, groups=4, direction=direction)
    x, weight, grad_y = random_operands(problem, layout, layout)
    p = problem._replace(layout=layout, weight_layout=layout)
    assert layout_of(ALGORITHM.run(*operands_of(p, x, weight, grad_y), p)) == layout


def test_what_does_not_apply():
    dense = conv_problem(1, 8, 5, 5, 8, 3, 3)
    assert "not a grouped" in ALGORITHM.why_not_shape(dense)
    assert "depthwise" in ALGORITHM.why_not_shape(dense._replace(groups=8))
    assert "float64" in ALGORITHM.why_not_shape(dense._replace(groups=2, dtype="float64"))
    assert "2**31" in ALGORITHM.why_not_shape(dense._replace(groups=2, N=2**27))
    assert ALGORITHM.why_not_shape(dense._replace(groups=2)) is None
    assert ALGORITHM.why_not_shape(dense._replace(groups=2, dtype="bfloat16")) is None


def test_packs():
    assert _pack(32, 4, 4, 32, 32, 2) == 8
    assert _pack(32, 4, 8, 32, 32, 2) == 4
    assert _pack(10, 6, 6, 32, 32, 2) == 4  # five would fit, but not begin at multiples of 16 bytes
    assert _pack(10, 3, 3, 16, 16, 2) == 5
    assert _pack(3, 4, 4, 32, 32, 2) == 3
    assert _pack(8, 32, 64, 32, 32, 2) == 1


@pytest.mark.parametrize(("stride", "dilation"), [(s, d) for s in range(1, 9) for d in range(1, 9)])
def test_the_taps_of_a_phase(stride, dilation):
    step, common, inverse = _axis_constants(stride, dilation)
    for shifted in range(20):
        solutions = [tap for tap in range(30) if (tap * dilation - shifted) % stride == 0]
        assert (shifted % common == 0) == bool(solutions)
        if solutions:
            first = shifted // common * inverse % step
            assert solutions == list(range(first, 30, step))


def test_workspace_counts_copies_and_partial_sums():
    p = conv_problem(8, 32, 28, 28, 32, 3, 3, padding=1, groups=8, dtype="float16", device="cuda")
    nhwc = p._replace(layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST)
    assert ALGORITHM.workspace_bytes(nhwc) == 0
    assert ALGORITHM.workspace_bytes(p) == p.x_bytes + p.weight_bytes
    gradient = nhwc.with_direction(Direction.BACKWARD_WEIGHT)
    for config in shipped(gradient):
        last = dict(ALGORITHM.launches(gradient, config)[-1].constants)
        assert ALGORITHM.workspace_bytes(gradient) >= 4 * last["SPLITS"] * last["SIZE"]


def _quickest(problem: ConvProblem) -> dict[str, int]:
    """The configuration with the fewest programs: the interpreter's time."""
    return min(shipped(problem), key=lambda c: ALGORITHM.launches(problem, c)[0].grid[0])
