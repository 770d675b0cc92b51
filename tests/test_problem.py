from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import PROBLEMS, random_operands

from convselect.base.problem import (
    ConvProblem,
    Direction,
    canonical_strides,
    conv_problem,
    layout_of,
    padding_sides,
)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_derived_sizes_are_those_of_pytorch(problem):
    p = problem
    x, weight, _ = random_operands(p)
    padded = F.pad(x, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom))
    y = F.conv2d(padded, weight, None, p.stride, 0, p.dilation, p.groups)
    assert y.shape == p.y_shape
    assert p.x_bytes == x.nbytes
    assert p.weight_bytes == weight.nbytes
    assert p.y_bytes == y.nbytes
    assert p.bytes == x.nbytes + weight.nbytes + y.nbytes


@pytest.mark.parametrize("direction", Direction)
def test_gemm_shape_holds_all_the_work_and_the_result(direction):
    for problem in PROBLEMS.values():
        p = problem.with_direction(direction)
        gemm = p.gemm
        assert 2 * gemm.batch * gemm.m * gemm.n * gemm.k == p.flops
        result = gemm.batch * gemm.m * gemm.n
        if direction == Direction.BACKWARD_DATA:  # the product is scattered onto the image
            assert result == p.N * p.P * p.Q * p.C * p.R * p.S
        else:
            N, A, B, D = p.result_shape
            assert result == N * A * B * D


def test_a_direct_count_of_multiplications():
    p = conv_problem(2, 6, 5, 7, 4, 3, 2, stride=2, padding=1, groups=2)
    count = sum(3 * 3 * 2 for _ in range(p.N * p.K * p.P * p.Q))
    assert p.flops == 2 * count


def test_equal_problems_are_one_key_and_any_field_makes_another():
    p = conv_problem(1, 8, 9, 9, 6, 3, 3, padding=1)
    assert hash(p) == hash(conv_problem(1, 8, 9, 9, 6, 3, 3, padding=(1, 1)))
    other = dict(direction=Direction.BACKWARD_DATA, dtype="float64", layout="channels_last", weight_layout="strided",
                 device="cuda", deterministic=True, tf32=True, frozen=True)  # fmt: skip
    for name in ConvProblem._fields:
        changed = p._replace(**{name: other.get(name, getattr(p, name) if name in other else 17)})
        assert changed != p
    with pytest.raises(AttributeError):
        p.N = 3  # type: ignore[misc]


problems = st.builds(
    conv_problem,
    *(st.integers(1, 99) for _ in range(7)),
    direction=st.sampled_from(list(Direction)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.tuples(*(st.integers(0, 5) for _ in range(4))),
    dilation=st.integers(1, 3),
    groups=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    threads=st.integers(1, 64),
    frozen=st.booleans(),
)
possible = problems.filter(lambda problem: problem.why_impossible() is None)


@given(possible | problems.map(lambda problem: problem._replace(groups=1, dil_h=1, dil_w=1, R=1, S=1)))
def test_a_printed_problem_reads_back_and_pickles(problem):
    assert ConvProblem.parse(str(problem)) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_parse_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown field 'Z'"):
        ConvProblem.parse("forward N=1 Z=3")
    with pytest.raises(ValueError, match="sideways"):
        ConvProblem.parse("sideways N=1")
    with pytest.raises(ValueError, match="repeated field 'N'"):
        ConvProblem.parse("forward N=1 N=3")
    with pytest.raises(ValueError, match="C, H, W, K, R, S missing"):
        ConvProblem.parse("forward N=1")


@pytest.mark.parametrize(
    "change",
    [
        dict(N=0), dict(C=-1), dict(pad_top=-1), dict(stride_h=0), dict(groups=5), dict(R=99), dict(threads=0),
        dict(N=True), dict(N=1.0), dict(N="1"), dict(N=2**70), dict(dtype="int8"), dict(layout="nchw"), dict(device="")
        , dict(frozen=1), dict(direction="forward"),
    ],
)  # fmt: skip
def test_what_no_convolution_has_is_no_problem(change):
    p = conv_problem(1, 8, 9, 9, 6, 3, 3, padding=1, groups=2)
    assert p.why_impossible() is None
    assert ConvProblem.parse(str(p)) == p
    assert p._replace(**change).why_impossible() is not None
    with pytest.raises(ValueError, match="problem"):
        ConvProblem.parse(str(p).replace("N=1", "N=0"))


def test_padding_sides():
    assert padding_sides("valid", (3, 3), (1, 1)) == (0, 0, 0, 0)
    assert padding_sides("same", (4, 2), (1, 3)) == (1, 2, 1, 2)
    assert padding_sides((2, 1), (3, 3), (1, 1)) == (2, 2, 1, 1)
    assert padding_sides((1, 2, 3, 4), (3, 3), (1, 1)) == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="sometimes"):
        padding_sides("sometimes", (3, 3), (1, 1))


def test_kinds():
    assert conv_problem(1, 8, 4, 4, 8, 1, 1).is_pointwise
    assert not conv_problem(1, 8, 4, 4, 8, 1, 1, stride=2).is_pointwise
    assert conv_problem(1, 3, 8, 8, 8, 4, 4, stride=4).is_patch
    assert conv_problem(1, 8, 8, 8, 16, 3, 3, groups=8).is_depthwise
    assert not conv_problem(1, 1, 8, 8, 16, 3, 3).is_depthwise


def test_layouts_and_their_strides():
    for shape in ((2, 3, 4, 5), (1, 1, 4, 5), (2, 3, 1, 1), (0, 3, 4, 5), (2, 3, 0, 5)):
        for layout, memory_format in (
            ("contiguous", torch.contiguous_format),
            ("channels_last", torch.channels_last),
        ):
            fresh = torch.empty(shape, memory_format=memory_format)
            assert canonical_strides(shape, layout) == fresh.stride()
    assert layout_of(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)) == "channels_last"
    assert layout_of(torch.empty(2, 3, 4, 5)[:, ::2]) == "strided"
