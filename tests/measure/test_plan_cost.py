"""What leaving native costs in a program."""

from __future__ import annotations

from convselect.base.problem import Direction, conv_problem
from convselect.measure import plan_cost
from convselect.measure.plan_cost import fixed_cost_us, is_free, plan_cost_us, step_cost_us
from convselect.measure.rows import NATIVE


def test_leaving_native_costs_nothing_outside_python(monkeypatch):
    problem = conv_problem(1, 8, 9, 9, 8, 3, 3)
    monkeypatch.setattr(plan_cost, "outside_python", True)
    assert plan_cost_us(problem, 400.0, ("direct", "winograd4")) == step_cost_us(400.0, ["direct"]) == 0.0
    assert fixed_cost_us(problem, "direct") == 0.0
    # What PyTorch's operations compute has a plan in Python in any case, and so has a mixture.
    assert plan_cost_us(problem, 400.0, ("direct", "upcast")) == 25.0
    assert not is_free("upcast")
    assert is_free(NATIVE)
    assert step_cost_us(400.0, ["upcast"]) == 160.0


def test_leaving_native_costs_more_in_programs_with_large_convolutions(monkeypatch):
    monkeypatch.setattr(plan_cost, "outside_python", False)
    direct = ("direct",)
    problem = conv_problem(1, 8, 9, 9, 8, 3, 3)
    backward = problem.with_direction(Direction.BACKWARD_DATA)
    assert [plan_cost_us(problem, us, direct) for us in (0.0, 400.0, 2000.0, 1e6)] == [25.0, 25.0, 110.0, 150.0]
    assert plan_cost_us(backward, 400.0, direct) == 60.0
    assert plan_cost_us(problem._replace(device="cuda"), 2000.0, direct) < 10
