"""bench: problems as people write them, numbers that are times, and a wrong algorithm that does not pass."""

from __future__ import annotations

import json

import pytest
import torch
from fake_model import use_fake
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from convselect.base import lru, settings
from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.choice.choose import Choice
from convselect.doctor import bench
from convselect.eager import resolve
from convselect.kernels._contract import NotApplicable
from convselect.kernels.pool import BY_NAME

SMALL = conv_problem(1, 8, 12, 12, 8, 3, 3, padding=1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1x64x56x56 64 3x3 p1 s1", conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1)),
        ("backward_data 2x8x9x7 -> 16, 3x5 s(2,1) p(1, 1, 2, 2) d2 g4 bfloat16 channels_last t2",
         conv_problem(2, 8, 9, 7, 16, 3, 5, stride=(2, 1), padding=(1, 1, 2, 2), dilation=2, groups=4,
                      direction="backward_data", dtype="bfloat16", layout="channels_last", threads=2)),
        (str(SMALL), SMALL),
    ],
)  # fmt: skip
def test_problems_are_read(text, problem):
    assert bench.parse(text) == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no problem"),
        ("1x64x56 64 3x3", "they are written"),
        ("1x64x56x56 64", "they are written"),
        ("1x64x56x56 64 3x3 p(1,2,3)", "3 numbers"),
        ("1x64x56x56 64 3x3 g(1,2)", "2 numbers"),
        ("1x64x56x56 64 3x3 int8", "'int8' is not understood"),
        ("1x3x56x56 64 3x3 g2", "multiples of groups"),
        ("forward N=1", "missing"),
    ],
)
def test_what_is_no_problem_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        bench.parse(text)


PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 2, *[st.integers(12, 20)] * 2, st.integers(1, 4), *[st.integers(1, 4)] * 2),
    stride=PAIRS,
    dilation=PAIRS,
    padding=st.tuples(*[st.integers(0, 3)] * 4),
    groups=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    layout=st.sampled_from(["contiguous", "channels_last"]),
)
@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
def test_what_explain_prints_is_read_back(sizes, stride, dilation, padding, groups, dtype, layout):
    N, C, H, W, K, R, S = sizes
    problem = conv_problem(
        N, C * groups, H, W, K * groups, R, S, stride=stride, dilation=dilation, padding=padding, groups=groups,
        dtype=dtype, layout=layout,
    )  # fmt: skip
    assert bench.parse(problem.brief) == problem


@pytest.mark.parametrize("direction", Direction)
def test_every_algorithm_that_applies_is_checked_and_timed(monkeypatch, direction):
    use_fake(monkeypatch, "winograd4", gain=3.0)
    found = bench.bench(SMALL.with_direction(direction), seconds=0.05)
    rows = {row.algorithm: row for row in found.rows}
    assert set(rows) | set(found.not_applicable) == set(BY_NAME)
    assert not set(rows) & set(found.not_applicable)
    assert found.wrong == []
    for row in found.rows:
        assert 0 <= row.error < 1e-4
        assert 0 < row.p20_us <= row.median_us <= row.p80_us
        assert row.samples >= 2
    assert [row.median_us for row in found.rows] == sorted(row.median_us for row in found.rows)
    assert rows["native"].times_native == 1.0
    assert rows["winograd4"].predicted == pytest.approx(3.0)
    assert [row.algorithm for row in found.rows if row.chosen] == ["winograd4"] == [found.choice]
    assert json.loads(bench.to_json([found]))["problems"][0]["rows"][0]["algorithm"] == found.rows[0].algorithm


def test_a_wrong_algorithm_is_found_and_not_timed(monkeypatch):
    right = BY_NAME["im2col_gemm"].forward
    monkeypatch.setattr(BY_NAME["im2col_gemm"], "forward", lambda *arguments: right(*arguments) * 1.001)
    monkeypatch.setattr(BY_NAME["winograd2"], "run", lambda *arguments: right(*arguments)[:, :1])
    monkeypatch.setattr(BY_NAME["fft"], "forward", lambda *arguments: right(*arguments) * torch.nan)
    monkeypatch.setattr(BY_NAME["winograd4"], "run", lambda *arguments: 1 / 0)
    found = bench.bench(SMALL, seconds=0.01)
    assert set(found.wrong) == {"im2col_gemm", "winograd2", "fft", "winograd4"}
    rows = {row.algorithm: row for row in found.rows}
    assert rows["im2col_gemm"].error == pytest.approx(1e-3, rel=0.1)
    assert "ZeroDivisionError" in rows["winograd4"].verdict
    assert all(rows[name].median_us is None for name in found.wrong)
    assert ("im2col_gemm", "WRONG") in [(cells[0], cells[-1]) for cells in bench.cells(found)]


def test_budgets_are_those_in_force(monkeypatch):
    use_fake(monkeypatch, "winograd6")
    with settings.use(precision="exact", workspace_bytes=0):
        found = bench.bench(SMALL, seconds=0.01)
        assert found.choice == "native"
    assert "workspace" in found.not_applicable["im2col_gemm"]
    lru.clear()
    with settings.use(precision="exact"):
        rows = {row.algorithm: row for row in bench.bench(SMALL, seconds=0.01).rows}
    assert "precision" in rows["winograd6"].refused
    assert rows["native"].refused is None
    with settings.use("upcast"), pytest.raises(NotApplicable):
        bench.bench(SMALL, seconds=0.01)


def test_threads_are_the_problems_and_restored():
    seen = []
    native = BY_NAME["native"]
    before = torch.get_num_threads()
    original = native.run

    def spy(*arguments):
        seen.append(torch.get_num_threads())
        return original(*arguments)

    native.run = spy
    try:
        found = bench.bench(SMALL._replace(threads=2), seconds=0.01)
    finally:
        del native.run
    assert set(seen) == {2}
    assert torch.get_num_threads() == before
    assert found.clock == "wall"
    assert isinstance(found.problem, ConvProblem)


def test_no_gpu_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no device 'cuda'"):
        bench.bench(SMALL._replace(device="cuda"))


def test_a_tuned_choice_runs_as_tuned(monkeypatch):
    tuned = {"tile": 1}
    monkeypatch.setattr(resolve, "choice_for", lambda problem, used: Choice("winograd4", "store", tuned, 2.0))
    given = {}
    for name in ("winograd4", "winograd2"):
        algorithm = BY_NAME[name]

        def run(a, b, problem, params=None, bias=None, name=name):
            given.setdefault(name, []).append(params)
            return BY_NAME["native"].run(a, b, problem)

        monkeypatch.setattr(algorithm, "run", run)
        monkeypatch.setattr(algorithm, "run_checked", run)
    bench.bench(SMALL, 0.01)
    assert given["winograd4"] == [tuned] * len(given["winograd4"])
    assert given["winograd2"] == [None] * len(given["winograd2"])


def test_only_some_are_timed(monkeypatch):
    use_fake(monkeypatch, "winograd4")
    result = bench.bench(SMALL, 0.01, only={"winograd4", "depthwise"})
    assert {row.algorithm for row in result.rows} == {"native", "winograd4"}  # the other does not apply
