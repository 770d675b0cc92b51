from __future__ import annotations

import itertools

import pytest
from pairs import pairs, pairwise


@pytest.mark.parametrize("sizes", [(2, 3), (9, 3, 16, 2), (3, 3, 3, 3), (1, 5, 2), (2,) * 6, (4, 1, 1)])
def test_any_two_values_meet_in_few_rows(sizes):
    axes = [[f"{axis}{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    rows = pairs(*axes)
    for (i, a), (k, b) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[k]) for row in rows} == set(itertools.product(a, b))
    first, second = sorted(sizes)[:-3:-1]
    assert first * second <= len(rows) <= 2 * first * second
    assert {row[i] for row in rows for i in range(len(axes))} == {value for axis in axes for value in axis}
    assert rows == pairs(*axes)
    assert len(set(rows)) == len(rows)


def test_one_axis_or_an_empty_one():
    assert pairs("abc") == [("a",), ("b",), ("c",)]
    assert pairs("abc", "", "d") == []


def test_parameters_of_a_test():
    mark = pairwise({"a,b": {"x": (1, 2), "y": (3, 4)}, "c": [None, 5]}, indirect=["a"])
    names, rows = mark.args
    assert names == ["a", "b", "c"]
    assert {(row.id, row.values) for row in rows} == {
        ("x-None", (1, 2, None)), ("x-5", (1, 2, 5)), ("y-None", (3, 4, None)), ("y-5", (3, 4, 5))
    }  # fmt: skip
    assert mark.kwargs == {"indirect": ["a"]}
