"""Winograd in C on several threads: spans of their own, or blocks of channels and parts of the tiles of one."""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import operands_of, random_operands

from convselect.base.problem import Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels.winograd import Winograd

WINOGRAD = Winograd(4)
LISTED = [
    conv_problem(1, 16, 40, 40, 16, 3, 3, padding=1),  # one block of channels, many tiles
    conv_problem(2, 72, 20, 22, 40, 3, 3, padding=1),
    conv_problem(1, 160, 8, 9, 96, 3, 3, padding=1),  # few tiles
    conv_problem(3, 24, 56, 57, 40, 3, 3, padding=1, groups=2),
]


@pytest.mark.skipif(not _library.available(), reason="the C library is not installed")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_threads_do_not_change_a_bit(layout, nan_memory):
    """Not even of weight gradients: their sums are cut into spans that do not depend on the threads."""
    for listed, direction in itertools.product(LISTED, Direction):
        p = listed._replace(direction=direction, layout=layout)
        operands = operands_of(p, *random_operands(p, layout))
        results = []
        for threads in (1, 2, 3, 16, 40):
            torch.set_num_threads(threads)
            results.append(WINOGRAD.run(*operands, p._replace(threads=threads)))
        assert all(torch.equal(results[0], other) for other in results[1:]), p
