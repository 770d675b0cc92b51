"""Rows appended to a CSV file."""

from __future__ import annotations

from pathlib import Path

from benchmarks._rows import append_rows
from convselect.base.problem import conv_problem
from convselect.measure.rows import Row, read_rows

PROBLEM = conv_problem(1, 4, 8, 8, 4, 3, 3, padding=1)


def test_rows_are_appended_under_one_header(tmp_path: Path):
    path, row = tmp_path / "t.csv", Row("m", PROBLEM, "native", 1, "ok", "thread", 1, 1, 1, 1, 1, 9)
    append_rows(path, [row, row._replace(algorithm="fft")])
    append_rows(path, [row._replace(model="n")])
    assert [(r.model, r.algorithm) for r in read_rows(path)] == [("m", "native"), ("m", "fft"), ("n", "native")]
    assert path.read_text().count("kernel_class") == 1


def test_an_unfinished_line_is_ignored_and_then_replaced(tmp_path: Path):
    path, row = tmp_path / "t.csv", Row("m", PROBLEM, "native", 1, "ok", "thread", 1, 1, 1, 1, 1, 9)
    append_rows(path, [row, row])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert read_rows(path) == [row]
    append_rows(path, [row])
    assert path.read_bytes() == whole
    path.write_bytes(whole[:10])  # not even the header
    append_rows(path, [row, row])
    assert path.read_bytes() == whole


def test_unfinished_lines_longer_than_one_read_are_removed(tmp_path: Path):
    path, row = tmp_path / "t.csv", Row("m", PROBLEM, "native", 1, "ok", "thread", 1, 1, 1, 1, 1, 9)
    append_rows(path, [row])
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 10_000)
    append_rows(path, [row])
    assert read_rows(path) == [row, row]
