"""The measure of `benchmarks.outliers` sees a single element."""

from __future__ import annotations

import pytest
import torch

from benchmarks.outliers import largest_error
from convselect.base.problem import conv_problem
from convselect.kernels.reference import Reference


def test_the_largest_error_is_in_eps_of_its_own_sum():
    p = conv_problem(1, 1, 1, 2, 1, 1, 1)
    a, b = torch.tensor([[[[2.0, 1e20]]]]), torch.tensor([[[[-3.0]]]])
    got = Reference().run(a.double(), b.double(), p._replace(dtype="float64"))
    assert largest_error(p, got, a, b) == 0
    got[0, 0, 0, 0] += 10 * 6 * torch.finfo(torch.float32).eps
    assert largest_error(p, got, a, b) == pytest.approx(10)
