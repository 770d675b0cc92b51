"""What one large value does to results that do not see it: the largest error, in eps of the sum of |a||b| over the
products of that result (docs/budgets.md, "Each result by itself").

    python -m benchmarks.outliers

A layer of 64 channels, 56x56, 3x3, in all three directions; one element of the streamed operand is replaced. "native"
is printed where a transform leaves the call to it.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction, conv_problem
from convselect.demo.tables import print_environment
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference
from convselect.machine.environment import run_environment

NAMES = ("native", "winograd2", "winograd4", "winograd6", "winograd7", "fft", "fft_tiled")
VALUES = (0.0, 1e2, 1e3, 1e4, 1e6, 1e10, 1e30)


def largest_error(problem: ConvProblem, got: Tensor, a: Tensor, b: Tensor) -> float:
    """In float32's eps of each result's own sum."""
    exact = problem._replace(dtype="float64")
    want = Reference().run(a.double(), b.double(), exact)
    size = Reference().run(a.double().abs(), b.double().abs(), exact)
    return float(((got.double() - want).abs() / (torch.finfo(torch.float32).eps * size)).max())


def main() -> None:
    console = Console()
    print_environment(console, run_environment())
    torch.manual_seed(0)
    for direction in Direction:
        p = conv_problem(1, 64, 56, 56, 64, 3, 3, padding=1).with_direction(direction)
        shapes = {
            Direction.FORWARD: (p.x_shape, p.weight_shape),
            Direction.BACKWARD_DATA: (p.y_shape, p.weight_shape),
            Direction.BACKWARD_WEIGHT: (p.x_shape, p.y_shape),
        }[direction]
        table = Table("value", *NAMES, title=str(direction))
        for value in VALUES:
            a, b = (torch.randn(shape) for shape in shapes)
            if value:
                a[0, 0, 28, 28] = value
            found = [BY_NAME[name].run_checked(a, b, p) for name in NAMES]
            cells = ["native" if got is None else f"{largest_error(p, got, a, b):.3g}" for got in found]
            table.add_row(f"{value:.0e}" if value else "none", *cells)
        console.print(table)


if __name__ == "__main__":
    main()
