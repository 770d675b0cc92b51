"""One middling problem of each class, natively and by every algorithm that may be chosen for it, under
pytest-benchmark: `make bench`. `python -m benchmarks.run` has the ratios, from interleaved runs."""

from __future__ import annotations

import pytest
import torch

from benchmarks._classes import CLASSES, drawn, read_problems
from benchmarks._kernels import checked
from convselect.base import settings
from convselect.base.problem import Direction
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure.measure import operands

PROBLEMS = {c.name: drawn(c, read_problems(), 1, "float32")[0] for c in CLASSES}
CASES = [
    pytest.param(problem.with_direction(direction), algorithm, id=f"{name}-{direction}-{algorithm.name}")
    for name, problem in PROBLEMS.items()
    for direction in Direction
    for algorithm in ALL
    if algorithm.name == NATIVE or refusal(algorithm, problem.with_direction(direction), settings.current()) is None
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("problem", "algorithm"), CASES)
def test_kernel(benchmark, problem, algorithm):
    a, b = operands(problem)
    benchmark.group = str(problem)
    with torch.no_grad():
        want = BY_NAME[NATIVE].run(a.double(), b.double(), problem._replace(dtype="float64"))
        _, reason = checked(algorithm, a, b, problem, want)
        assert reason is None
        benchmark.pedantic(algorithm.run, (a, b, problem), rounds=5, warmup_rounds=1)
