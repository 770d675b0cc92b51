from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from problems import PROBLEMS, VOLUMES, random_operands

from convselect.base.problem import (
    ConvProblem,
    Direction,
    canonical_strides,
    conv_problem,
    layout_of,
    padding_sides,
    triple,
)
from convselect.base.volumes import volume_problem


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


@pytest.mark.parametrize("problem", VOLUMES.values(), ids=VOLUMES.keys())
def test_derived_sizes_of_volumes_are_those_of_pytorch(problem):
    p = problem
    x, weight, grad_y = random_operands(p)
    assert x.dim() == 5
    padded = F.pad(x, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom, p.pad_front, p.pad_back))
    y = F.conv3d(padded, weight, None, (p.stride_d, *p.stride), 0, (p.dil_d, *p.dilation), p.groups)
    assert y.shape == p.y_shape == grad_y.shape
    assert y.shape[2] == p.O
    assert (p.x_bytes, p.weight_bytes, p.y_bytes) == (x.nbytes, weight.nbytes, y.nbytes)
    assert p.flops == 2 * y.numel() * weight[0].numel()
    assert p.is_possible
    assert not p.is_oversized
    assert [p.with_direction(d).result_shape for d in Direction] == [y.shape, x.shape, weight.shape]


@pytest.mark.parametrize("direction", Direction)
def test_gemm_shape_holds_all_the_work_and_the_result(direction):
    for problem in (*PROBLEMS.values(), *VOLUMES.values()):
        p = problem.with_direction(direction)
        gemm = p.gemm
        assert 2 * gemm.batch * gemm.m * gemm.n * gemm.k == p.flops
        result = gemm.batch * gemm.m * gemm.n
        if direction == Direction.BACKWARD_DATA:  # the product is scattered onto the image
            assert result == p.N * p.O * p.P * p.Q * p.C * p.T * p.R * p.S
        else:
            assert result == math.prod(p.result_shape)


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
volumes = st.builds(
    ConvProblem._replace,
    problems,
    D=st.integers(1, 9),
    T=st.integers(1, 5),
    stride_d=st.integers(1, 3),
    pad_front=st.integers(0, 2),
    pad_back=st.integers(0, 2),
    dil_d=st.integers(1, 3),
)
possible = (problems | volumes).filter(lambda problem: problem.why_impossible() is None)


@given(possible | problems.map(lambda problem: problem._replace(groups=1, dil_h=1, dil_w=1, R=1, S=1)))
def test_a_printed_problem_reads_back_and_pickles(problem):
    assert ConvProblem.parse(str(problem)) == problem
    assert pickle.loads(pickle.dumps(problem)) == problem


@given(possible)
def test_what_is_derived_at_once_is_what_each_property_says(problem):
    volume = problem._replace(D=3, T=2, pad_back=1)
    for one in (problem, volume):
        together, apart = one._replace(), one._replace()
        together.derive()
        assert len(vars(together)) > 15
        for name, value in vars(together).items():
            assert value == getattr(apart, name), name


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


@pytest.mark.parametrize(
    "change", [dict(D=0), dict(T=0), dict(pad_front=-1), dict(stride_d=0), dict(dil_d=0), dict(T=5), dict(D="1")]
)
def test_what_no_convolution_of_volumes_has(change):
    p = volume_problem(1, 8, 3, 9, 9, 6, 3, 3, 3, padding=(0, 1, 1))
    assert p.why_impossible() is None
    assert p._replace(**change).why_impossible() is not None


def test_an_image_has_the_key_and_the_text_that_it_always_had():
    """Stores hold texts, and plans are found by hash and equality."""
    p = conv_problem(2, 8, 9, 9, 6, 3, 3, padding=1, groups=2, direction="backward_data", layout="channels_last")
    assert str(p) == (
        "backward_data N=2 C=8 H=9 W=9 K=6 R=3 S=3 pad_top=1 pad_bottom=1 pad_left=1 pad_right=1 groups=2 "
        "layout=channels_last"
    )
    assert not p.is_volume
    assert p.O == 1
    assert ConvProblem._fields[-7:] == ("frozen", "D", "T", "stride_d", "pad_front", "pad_back", "dil_d")
    assert volume_problem(2, 8, 1, 9, 9, 6, 1, 3, 3, padding=(0, 1, 1)) == (
        conv_problem(2, 8, 9, 9, 6, 3, 3, padding=1)
    )
    assert volume_problem(2, 8, 1, 9, 9, 6, 1, 3, 3, stride=(2, 1, 1)).is_volume  # aten goes by it
    assert volume_problem(2, 8, 1, 9, 9, 6, 1, 3, 3, dilation=(2, 1, 1)).is_volume


def test_a_volume_in_a_few_characters():
    p = volume_problem(1, 32, 16, 64, 64, 64, 3, 3, 3, padding=1, stride=2)
    assert p.brief == "1x32x16x64x64 -> 64, 3x3x3 s2 p1"
    assert p._replace(pad_back=0, stride_d=1, dil_d=2).brief == (
        "1x32x16x64x64 -> 64, 3x3x3 s(1,2,2) p(1,0,1,1,1,1) d(2,1,1)"
    )
    flat = conv_problem(1, 64, 56, 56, 64, 3, 3, stride=(1, 2), padding=(1, 0, 1, 1), dtype="bfloat16")
    assert flat.brief == "1x64x56x56 -> 64, 3x3 s(1,2) p(1,0,1,1) bfloat16"


def test_sides_of_volumes():
    assert triple(2) == triple((2,)) == (2, 2, 2)
    with pytest.raises(ValueError, match="unpack"):
        triple((1, 2))
    assert padding_sides("valid", (3, 3, 3), (1, 1, 1)) == (0,) * 6
    assert padding_sides("same", (4, 3, 2), (1, 2, 3)) == (1, 2, 2, 2, 1, 2)
    assert padding_sides((1, 2, 3), (3, 3, 3), (1, 1, 1)) == (1, 1, 2, 2, 3, 3)
    assert padding_sides((1, 2, 3, 4, 5, 6), (3, 3, 3), (1, 1, 1)) == (1, 2, 3, 4, 5, 6)


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
    assert volume_problem(1, 8, 4, 4, 4, 8, 1, 1, 1).is_pointwise
    assert not volume_problem(1, 8, 4, 4, 4, 8, 3, 1, 1).is_pointwise
    assert not volume_problem(1, 8, 4, 4, 4, 8, 1, 1, 1, stride=(2, 1, 1)).is_pointwise
    assert volume_problem(1, 3, 8, 8, 8, 8, 2, 4, 4, stride=(2, 4, 4)).is_patch
    assert not volume_problem(1, 3, 8, 8, 8, 8, 3, 4, 4, stride=(2, 4, 4)).is_patch
    assert not volume_problem(1, 3, 8, 8, 8, 8, 2, 4, 4, stride=(2, 4, 4), padding=(2, 0, 0)).is_patch


def test_layouts_and_their_strides():
    for shape in ((2, 3, 4, 5), (1, 1, 4, 5), (2, 3, 1, 1), (0, 3, 4, 5), (2, 3, 0, 5)):
        for layout, memory_format in (
            ("contiguous", torch.contiguous_format),
            ("channels_last", torch.channels_last),
        ):
            fresh = torch.empty(shape, memory_format=memory_format)
            assert canonical_strides(shape, layout) == fresh.stride()
    for shape in ((2, 3, 6, 4, 5), (1, 1, 6, 4, 5), (2, 3, 1, 1, 1), (0, 3, 6, 4, 5), (2, 3, 6, 0, 5)):
        for layout, memory_format in (
            ("contiguous", torch.contiguous_format),
            ("channels_last", torch.channels_last_3d),
        ):
            assert canonical_strides(shape, layout) == torch.empty(shape, memory_format=memory_format).stride()
    assert layout_of(torch.empty(2, 3, 6, 4, 5, memory_format=torch.channels_last_3d)) == "channels_last"
    assert layout_of(torch.empty(2, 3, 6, 4, 5)[..., ::2]) == "strided"
    assert layout_of(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)) == "channels_last"
    assert layout_of(torch.empty(2, 3, 4, 5)[:, ::2]) == "strided"
