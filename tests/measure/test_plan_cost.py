"""What leaving native costs in a program."""

from __future__ import annotations

from convselect.base.problem import Direction, conv_problem
from convselect.measure.rows import plan_cost_us


def test_leaving_native_costs_more_in_programs_with_large_convolutions():
    problem = conv_problem(1, 8, 9, 9, 8, 3, 3)
    backward = problem.with_direction(Direction.BACKWARD_DATA)
    assert [plan_cost_us(problem, us) for us in (0.0, 400.0, 2000.0, 1e6)] == [25.0, 25.0, 110.0, 150.0]
    assert plan_cost_us(backward, 400.0) == 60.0
    assert plan_cost_us(problem._replace(device="cuda"), 2000.0) < 10
