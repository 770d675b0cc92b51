"""Search spaces: what is drawn is valid, beginnings of valid programs are never refused, nothing leads nowhere."""

from __future__ import annotations

import random

import pytest

from convselect.base.problem import conv_problem
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space
from convselect.kernels.pool import ALL

P = conv_problem(1, 16, 14, 14, 16, 3, 3, padding=1)
BLOCKS = (1, 2, 4, 8, 16)
SPACE = Space(
    (
        Parameter("packed", (0, 1), STRUCTURE),
        Parameter("rows", BLOCKS),
        Parameter("columns", BLOCKS),
        Parameter("ahead", (0, 1)),
    ),
    default=lambda p: {"packed": 0, "rows": 4, "columns": 4, "ahead": 0},
    allowed=lambda p, v: v.get("rows", 1) * v.get("columns", 1) <= 16 and not (v.get("packed") and v.get("rows") == 8),
    rules=(
        Rule("pack", lambda p, v: p.C >= 16, lambda p, v: [{"packed": 0}, {"packed": 1}]),
        Rule("leave as it is", lambda p, v: p.C < 16, lambda p, v: [{"packed": 0}]),
    ),
)


def test_every_program_is_valid_and_every_beginning_of_one():
    programs = list(SPACE.programs(P))
    assert len(programs) == len({tuple(p.items()) for p in programs}) == 2 * 15 + 2 * (15 - 2)
    for program in programs:
        assert SPACE.is_valid(P, program)
        for n in range(len(program)):
            assert SPACE.is_partially_valid(P, dict(list(program.items())[:n]))


def test_what_begins_validly_has_a_valid_end():
    beginnings = {tuple(list(p.items())[:n]) for p in SPACE.programs(P) for n in range(5)}
    for packed in (0, 1):
        for rows in BLOCKS:
            for columns in BLOCKS:
                values = {"packed": packed, "rows": rows, "columns": columns}
                assert SPACE.is_partially_valid(P, values) == (tuple(values.items()) in beginnings)
    with pytest.raises(ValueError, match="not the first"):
        SPACE.is_partially_valid(P, {"rows": 1})


def test_dead_ends_are_refused_at_their_beginning():
    space = Space(
        (Parameter("a", (0, 1)), Parameter("b", (0, 1))), default=lambda p: {"a": 0, "b": 0},
        allowed=lambda p, v: not (v.get("a") == 1 and "b" in v),
    )  # fmt: skip
    assert space.choices(P, {}) == [0]
    assert {tuple(space.sample(P, random.Random(i)).values()) for i in range(20)} == {(0, 0), (0, 1)}


def test_rules_decide_the_structure():
    assert SPACE.sketches(P) == [{"packed": 0}, {"packed": 1}]
    assert SPACE.sketches(P._replace(C=8)) == [{"packed": 0}]
    assert not SPACE.is_valid(P._replace(C=8), {"packed": 1, "rows": 1, "columns": 1, "ahead": 0})
    assert all(SPACE.sample(P._replace(C=8), random.Random(i))["packed"] == 0 for i in range(20))


def test_samples_reach_everything():
    drawn = {tuple(SPACE.sample(P, random.Random(i)).items()) for i in range(1500)}
    assert drawn == {tuple(p.items()) for p in SPACE.programs(P)}


@pytest.mark.parametrize("algorithm", ALL, ids=lambda a: a.name)
def test_defaults_are_valid(algorithm):
    for problem in (
        P,
        conv_problem(8, 64, 56, 56, 64, 3, 3, padding=1),
        conv_problem(1, 3, 32, 32, 32, 7, 7, stride=2),
    ):
        space = None if algorithm.why_not(problem) else algorithm.space(problem)
        if space is not None:
            assert space.is_valid(problem, space.default(problem))
