from __future__ import annotations

import math

import pytest
import torch
from clocks import NATIVE, TINY, Like, raises

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem, layout_of
from convselect.measure import measure
from convselect.model import sampling


def one_nan(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y.view(-1)[-1] = math.nan
    return y


# ---- checking before timing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", TINY, ids=str)
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda y: y * 1.1, "wrong"),
        (one_nan, "wrong"),
        (lambda y: y[:1], "wrong"),
        (lambda y: y.double(), "wrong"),
        (raises, "failed"),
    ],
    ids=["10 % off", "one NaN", "shape", "dtype", "raises"],
)
def test_a_wrong_algorithm_is_recorded_and_never_timed(problem: ConvProblem, change, status: str):
    bad = Like("bad", change)
    rows = {row.algorithm: row for row in measure.measure_problem("m", problem, [NATIVE, bad])}
    assert rows["bad"].status == status
    assert bad.calls == 1
    assert math.isnan(rows["bad"].min_us)
    assert rows["bad"].rounds == 0
    assert rows["native"].status == "ok"
    assert rows["native"].min_us > 0


def test_where_every_window_lies_in_the_padding_zeros_are_right():
    p = conv_problem(1, 4, 1, 3, 4, 1, 2, padding=(0, 1), dilation=(1, 4))
    rows = measure.measure_problem("m", p, [NATIVE, Like("zero", lambda y: y), Like("bad", lambda y: y + 1e-9)])
    assert [row.status for row in rows] == ["ok", "ok", "wrong"]


def test_one_wrong_element_among_thousands_is_wrong():
    def nudge(y):
        y = y.clone()
        y.view(-1)[5] += 0.5
        return y

    problem = conv_problem(2, 8, 28, 28, 16, 3, 3, padding=1)
    assert measure.measure_problem("m", problem, [NATIVE, Like("bad", nudge)])[1].status == "wrong"


def test_what_is_excluded_is_never_run():
    others = [
        Like("forced only", automatic=False),
        Like("refuses", refusal="it does not like squares"),
        Like("hungry", needs=1001),
    ]
    frugal = Like("frugal", needs=1000)
    rows = measure.measure_problem("m", TINY[0], [NATIVE, *others, frugal], workspace_bytes=1000)
    assert [row.algorithm for row in rows] == ["native", "frugal"]  # native whatever it needs
    assert [algorithm.calls for algorithm in others] == [0, 0, 0]


# ---- timing -----------------------------------------------------------------------------------------------------


def test_times_are_ordered_and_rounds_are_complete():
    for row in measure.measure_problem("m", TINY[0], [NATIVE, Like("same")]):
        assert row.status == "ok"
        assert row.clock == "thread"
        assert 0 < row.min_us <= row.p20_us <= row.median_us <= row.p80_us
        assert row.wall_us > 0
        assert row.rounds == 9


def test_more_threads_are_used_and_judged_by_wall_time():
    seen = []

    def look(y):
        seen.append(torch.get_num_threads())
        return y

    before = torch.get_num_threads()
    for count, clock in ((1, "thread"), (2, "wall")):
        rows = measure.measure_problem("m", TINY[0]._replace(threads=count), [NATIVE, Like("same", look)])
        assert {row.clock for row in rows} == {clock}
        assert set(seen) == {count}
        seen.clear()
    assert torch.get_num_threads() == before


def test_the_hopeless_are_dropped_after_the_warm_rounds_and_native_never():
    problem = conv_problem(1, 16, 28, 28, 16, 3, 3, padding=1)

    def slowly(y):
        for _ in range(20):
            NATIVE.run(*measure.operands(problem), problem)
        return y

    pool = [NATIVE, Like("slow", slowly), Like("same")]
    rows = {row.algorithm: row for row in measure.measure_problem("m", problem, pool)}
    assert (rows["slow"].status, rows["slow"].rounds) == ("censored", 2)
    assert rows["slow"].min_us > 2.5 * rows["native"].min_us
    assert [(rows[name].status, rows[name].rounds) for name in ("native", "same")] == [("ok", 9)] * 2

    zero = torch.zeros(problem.y_shape)
    calls = {"native": lambda: slowly(zero), "quick": lambda: zero}
    status = dict.fromkeys(calls, "ok")
    with measure.threads(1):
        samples = measure._timed(calls, 0, 60.0, status, wall=False)
    assert status["native"] == "ok"
    assert len(samples["native"].samples_us) == len(samples["quick"].samples_us) == 9


def test_restoring_natives_strides_is_part_of_the_time():
    problem = conv_problem(2, 8, 6, 6, 4, 3, 3)
    a, b = measure.operands(problem)
    native_format = measure._format(NATIVE.run(a, b, problem))
    other = Like("other strides", lambda y: y.contiguous(memory_format=torch.channels_last))
    assert not other.run(a, b, problem).is_contiguous()
    restored = measure._call(other, a, b, problem, native_format)()
    assert restored.stride() == NATIVE.run(a, b, problem).stride()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("layout", [CONTIGUOUS, CHANNELS_LAST])
def test_operands_are_what_the_problem_says(direction: Direction, layout: str):
    problem = conv_problem(2, 6, 9, 8, 4, 3, 2, direction=direction, groups=2, dtype="float16")
    problem = sampling.with_layouts(problem, layout == CHANNELS_LAST, layout == CHANNELS_LAST)
    a, b = measure.operands(problem)
    shapes = {
        Direction.FORWARD: (problem.x_shape, problem.weight_shape),
        Direction.BACKWARD_DATA: (problem.y_shape, problem.weight_shape),
        Direction.BACKWARD_WEIGHT: (problem.x_shape, problem.y_shape),
    }
    assert (a.shape, b.shape) == shapes[direction]
    assert a.dtype == b.dtype == torch.float16
    assert layout_of(a) == problem.layout == layout
    if direction != Direction.BACKWARD_WEIGHT:
        assert layout_of(b) == problem.weight_layout == layout
    assert all(torch.equal(t, u) for t, u in zip(measure.operands(problem), (a, b), strict=True))
