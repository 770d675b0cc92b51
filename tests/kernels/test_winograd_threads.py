"""Winograd in C on several threads: spans of their own, or one shared by tiles, channels and positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import operands_of, random_operands

from convselect.base.problem import Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels.winograd import Winograd

LISTED = [
    (4, conv_problem(1, 16, 40, 40, 16, 3, 3, padding=1)),  # one block of channels, many tiles
    (4, conv_problem(2, 72, 20, 22, 40, 3, 3, padding=1)),
    (4, conv_problem(1, 160, 8, 9, 96, 3, 3, padding=1)),  # few tiles
    (7, conv_problem(1, 104, 14, 14, 56, 3, 3, padding=1)),  # four tiles of many positions
    (4, conv_problem(3, 24, 56, 57, 40, 3, 3, padding=1, groups=2)),
    (3, conv_problem(1, 40, 29, 28, 48, 3, 3, stride=2, padding=1)),  # weights have fewer positions than tiles
    (4, conv_problem(1, 40, 1, 90, 24, 1, 3, padding=(0, 1))),  # one row of positions
]
THREADS = (1, 2, 3, 5, 7, 16, 40)


@pytest.mark.skipif(not _library.available(), reason="the C library is not installed")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_threads_do_not_change_a_bit(layout, nan_memory):
    """Not even of weight gradients: their sums are cut into spans that do not depend on the threads."""
    for (m, listed), direction in itertools.product(LISTED, Direction):
        p = listed._replace(direction=direction, layout=layout)
        operands = operands_of(p, *random_operands(p, layout))
        results = []
        assert Winograd(m).why_not(p) is None
        for threads in THREADS:
            torch.set_num_threads(threads)
            results.append(Winograd(m).run(*operands, p._replace(threads=threads)))
        assert all(torch.equal(results[0], other) for other in results[1:]), p
