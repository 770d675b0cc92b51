"""Figures of the cost model."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks._quality import pairwise_accuracy, quality, recall_at


def test_figures():
    true = np.array([1.0, 0.5, 0.25, 0.5])
    assert pairwise_accuracy(true, true) == 1
    assert pairwise_accuracy(true, -true) == 0
    assert pairwise_accuracy(true, np.ones(4)) == 0.5
    assert pairwise_accuracy(true, np.array([0.4, 0.5, 0.25, 0.1])) == pytest.approx(3 / 5)
    assert pairwise_accuracy(np.ones(3), true[:3]) == 1
    assert recall_at(true, true, 2) == 1
    assert recall_at(true, np.array([0.1, 0.2, 0.9, 0.8]), 1) == 0
    assert recall_at(true, np.array([0.9, 0.2, 0.8, 0.1]), 2) == 0.5
    assert recall_at(true, true, 100) == 1
    assert pairwise_accuracy(np.array([1.0, 0.99, 0.5]), np.array([0.5, 0.6, 0.1]), 0.02) == 1
    told = quality([(true, true), (true, np.full(4, true.mean()))])
    assert told.pairwise == 0.75
    assert told.r2 == pytest.approx(0.5)
    assert told.rmse == pytest.approx((true.var() / 2) ** 0.5)
