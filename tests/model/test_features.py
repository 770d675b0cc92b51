from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convselect.base.problem import CHANNELS_LAST, STRIDED, ConvProblem, Direction, conv_problem
from convselect.model.features import FEATURE_NAMES, FEATURES_VERSION, features, kinds

EXAMPLES = (
    conv_problem(8, 64, 56, 28, 128, 3, 3, padding=1),
    conv_problem(
        2, 96, 15, 13, 96, 7, 5, stride=2, padding=(3, 3, 2, 1), groups=96, direction="backward_weight",
        dtype="bfloat16", layout=CHANNELS_LAST, weight_layout=CHANNELS_LAST, threads=4, frozen=True,
    ),
    conv_problem(
        1, 20, 9, 11, 12, 2, 3, dilation=(2, 3), groups=2, direction="backward_data", dtype="float64",
        layout=STRIDED, deterministic=True, tf32=True,
    ),
)  # fmt: skip

# Computed once and kept: a changed value means another FEATURES_VERSION and new artifacts, not a new table here.
GOLDEN = (
    (
        3, 6, 5.8074, 4.8074, 7, 1.585, 1.585, 5.8074, 4.8074, 6, 7, 0, 0, 0, 0, 0, 1.585, 1.585, 30.7846, 23.2432,
        7.5415, 7, 13.6147, 9.1699, 6, 7, 6, 7, 3, 2, 2, 5, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.152, 1, 0, 0,
        0.1251, 0, 0.1991, 0.1991, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0,
    ),
    (
        1, 6.585, 3.9069, 3.7004, 6.585, 2.8074, 2.3219, 3, 2.585, 0, 0, 6.585, 1, 1, 0, 0, 2.8074, 2, 19.2992,
        16.6101, 2.6891, 0, 5.1293, 6.585, 5, 5, 0, 0, 1, 0, 1, 0, 4, 5, 4, 0.4557, 0, 5, 0.8707, 0, 6, 0.8707,
        0.415, 7, 1.8707, 0.415, 8, 2.8707, 0, 0.1699, 0.415, 1.0589, 0.585, 1.0297, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1,
        1, 0, 0, 0, 2, 0, 0, 1,
    ),
    (
        0, 4.3219, 3.1699, 3.4594, 3.585, 1, 1.585, 2.8074, 2.3219, 3.3219, 2.585, 1, 0, 0, 1, 1.585, 0, 0, 15.6211,
        14.6073, 1.0138, 5.9069, 5.1293, 2.585, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0, 0.0931, 0.4557, 1.415, 0.0931, 0.8707,
        2.415, 0.0931, 0.8707, 3.415, 1.0931, 1.8707, 4.415, 2.0931, 2.8707, 0.2775, 0.1255, 0.5406, 0.5995, 0.5406,
        0.9854, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0,
    ),
)  # fmt: skip


def named(problem: ConvProblem) -> dict[str, float]:
    return dict(zip(FEATURE_NAMES, features(problem).tolist(), strict=True))


def test_the_features_are_frozen():
    assert FEATURES_VERSION == 3
    for problem, golden in zip(EXAMPLES, GOLDEN, strict=True):
        np.testing.assert_allclose(features(problem), golden, atol=2e-4)


@pytest.mark.parametrize(
    ("problem", "want"),
    [
        (conv_problem(1, 8, 9, 9, 8, 3, 3), "plain"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, groups=8), "plain"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, dilation=(1, 2)), "dilated"),
        (conv_problem(1, 8, 9, 9, 8, 1, 3, dilation=(2, 1)), "one-row"),  # no taps along which it would be dilated
        (conv_problem(1, 8, 9, 9, 8, 3, 1, dilation=(1, 2)), "one-row"),
        (conv_problem(1, 8, 9, 9, 8, 3, 1, dilation=(2, 1)), "dilated one-row"),
        (conv_problem(1, 8, 9, 9, 8, 3, 3, stride=(1, 2)), "strided"),
        (conv_problem(1, 3, 9, 9, 8, 3, 3, stride=2, dilation=2), "dilated strided thin"),
        (conv_problem(1, 16, 9, 9, 6, 3, 3, groups=2), "thin"),
        (conv_problem(1, 16, 9, 9, 1, 1, 1), "thin"),
    ],
)
def test_kinds(problem, want):
    for direction in Direction:
        found = kinds(problem.with_direction(direction))
        assert found == tuple(f"{direction.value} {kind}" for kind in want.split())


def test_names_are_unique_and_match_the_vector():
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES)
    vector = features(EXAMPLES[0])
    assert vector.shape == (len(FEATURE_NAMES),)
    assert vector.dtype == np.float32


def test_every_call_returns_memory_of_its_own():
    first = features(EXAMPLES[0])
    kept = first.copy()
    second = features(EXAMPLES[0])
    second[:] = 7.0
    np.testing.assert_array_equal(first, kept)


@st.composite
def problems(draw: st.DrawFn) -> ConvProblem:
    size = st.integers(1, 40)
    G = draw(st.integers(1, 6))
    pads = [draw(st.integers(0, 3)) for _ in range(4)]
    steps = [draw(st.integers(1, 3)) for _ in range(4)]
    problem = ConvProblem(
        draw(st.sampled_from(Direction)), draw(size), G * draw(st.integers(1, 9)), draw(size) + 18, draw(size) + 18,
        G * draw(st.integers(1, 9)), draw(st.integers(1, 7)), draw(st.integers(1, 7)), *steps[:2], *pads, *steps[2:], G,
    )  # fmt: skip
    assert problem.P > 0
    assert problem.Q > 0
    return problem


@given(problems())
def test_derived_features_agree_with_the_problem(problem: ConvProblem):
    got = named(problem)
    want = {
        "flops": problem.flops,
        "bytes": problem.bytes,
        "intensity": problem.flops / problem.bytes,
        "gemm_m": problem.gemm.m,
        "gemm_n": problem.gemm.n,
        "gemm_k": problem.gemm.k,
        "C/G": problem.C // problem.groups,
        "K/G": problem.K // problem.groups,
        "P": problem.P,
        "Q": problem.Q,
    }
    for name, value in want.items():
        assert got[name] == pytest.approx(math.log2(value), abs=1e-4), name
    assert got["is_depthwise"] == problem.is_depthwise
    assert got["is_pointwise"] == problem.is_pointwise
    assert got["is_patch"] == problem.is_patch
    assert got["uneven_padding"] == (not problem.symmetric_padding)
    p = problem
    for name, size in (("C", p.C), ("K/G", p.K // p.groups), ("N", p.N), ("HW", p.H * p.W), ("NPQ", p.N * p.P * p.Q)):
        assert got[f"twos_{name}"] == max(power for power in range(8) if size % 2**power == 0), name
    for side, size in zip("mnk", p.gemm[1:], strict=True):
        for tile in (16, 32, 64, 128):
            want_waste = math.log2(math.ceil(size / tile) * tile / size)
            assert got[f"waste_gemm_{side}_{tile}"] == pytest.approx(want_waste, abs=1e-5)
    rows, columns = (problem.H, problem.W) if problem.direction == Direction.BACKWARD_DATA else (problem.P, problem.Q)
    for m in range(2, 8):
        covered = math.ceil(rows / m) * m * math.ceil(columns / m) * m
        assert got[f"waste_{m}"] == pytest.approx(math.log2(covered / (rows * columns)), abs=1e-5)


@pytest.mark.parametrize("direction", list(Direction))
def test_one_hots_mark_exactly_one(direction: Direction):
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        got = named(EXAMPLES[0]._replace(direction=direction, dtype=dtype))
        assert [got[str(d)] for d in Direction] == [d == direction for d in Direction]
        assert sum(got[name] for name in ("float32", "float64", "float16", "bfloat16")) == got[dtype] == 1


@pytest.mark.parametrize("change", [{"N": 0}, {"C": 0}, {"W": -3}, {"R": 99}, {"S": 99}])
def test_problems_with_nothing_to_compute_are_refused(change: dict[str, int]):
    with pytest.raises(ValueError, match="a size is not positive in forward N="):
        features(EXAMPLES[0]._replace(**change))
