"""What is said of a file of measured times, on rows whose numbers are known."""

from __future__ import annotations

import math

import pytest

from benchmarks._data_set import contents, contents_table
from convselect.base.problem import conv_problem
from convselect.measure.rows import Row

IMAGE = conv_problem(1, 8, 14, 14, 8, 3, 3, padding=1)


def row(problem, algorithm, us, repeat=0, status="ok"):
    return Row("net", problem, algorithm, 1, status, median_us=us, repeat=repeat)


def test_kinds_and_statuses_are_counted():
    line = conv_problem(8, 8, 1, 100, 8, 1, 3)
    many = IMAGE._replace(threads=2, layout="channels_last", dtype="bfloat16")
    rows = [row(p, "native", 4.0) for p in (IMAGE, line, many)]
    rows += [
        row(IMAGE, "direct", 2.0),
        row(IMAGE, "fft", 9.0, status="censored"),
        row(line, "fft", math.nan, status="wrong"),
    ]
    found = contents(rows)
    assert (found.rows, found.problems) == (6, 3)
    assert found.kinds == {
        "images, NCHW": 1, "images, NHWC": 1, "one row (1-D, transposed 1-D)": 1, "two threads": 1, "bfloat16": 1,
        "batch of 8 and more": 1, "measured twice": 0,
    }  # fmt: skip
    assert found.statuses == {"ok": 4, "censored": 1, "wrong": 1}
    assert all(map(math.isnan, found.agreement))


def test_problems_without_native_are_not_counted():
    assert contents([row(IMAGE, "direct", 2.0)]).problems == 0


def test_agreement_is_of_gains_not_of_times():
    """The second measurement is twice as slow as a whole: only what differs beyond that counts."""
    rows = [row(IMAGE, "native", 4.0), row(IMAGE, "direct", 2.0), row(IMAGE, "fft", 1.0)]
    rows += [row(IMAGE, "native", 8.0, 1), row(IMAGE, "direct", 4.0, 1), row(IMAGE, "fft", 3.0, 1)]
    found = contents(rows)
    assert found.kinds["measured twice"] == 1
    assert found.agreement[0] == pytest.approx(1.25)  # between 1.0 (direct) and 1.5 (fft)


def test_a_table_has_only_kinds_that_occur():
    text = contents_table({"here": contents([row(IMAGE, "native", 4.0)])})
    assert text.splitlines()[2] == "| problems | 1 |"
    assert "images, NCHW" in text
    assert "volumes" not in text
