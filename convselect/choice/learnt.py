"""What trials on real calls have taught about the model: a correction of its predicted gains, per algorithm and layer.

A residual is (measured - predicted) ln(t_native / t) of one algorithm on one problem. Problems of one *layer* differ in
N, H and W only. Residuals are taken to be sums of three normal deviations, of the algorithm in its direction, of the
layer, and of the size:

    r = b_algorithm + b_layer + e,    sd of the three: ALGORITHM_SD, LAYER_SD, SIZE_SD

(a linear mixed model with known variances; Gelman and Hill, Data Analysis Using Regression and Multilevel Models, 2007,
chapter 12). With n residuals of mean r in this layer, w = 1 / (LAYER_SD^2 + SIZE_SD^2 / n) of each layer, and
k = LAYER_SD^2 w of this one:

    b_algorithm:   v = 1 / (1 / ALGORITHM_SD^2 + sum of w),    b = v (sum of w r)
    correction:    (1 - k) b + k r                             of a layer without residuals (k = 0): b
    its variance:  (1 - k)^2 v + (1 - k) LAYER_SD^2;           for another size, SIZE_SD^2 is added

The deviations were measured with models that had not seen the networks they were judged on (17,333 predictions above
-0.3 on AVX2 and AVX-512, robust estimates): 0.25 to 0.3 between algorithms, 0.3 between layers, 0.2 within one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from convselect.base.problem import IMAGE_FIELDS, ConvProblem
from convselect.choice.choose import NATIVE, Prediction

ALGORITHM_SD, LAYER_SD, SIZE_SD = 0.25, 0.3, 0.2
MOST_RESIDUAL = 1.5
"""Residuals are limited to this: one mistaken measurement must not decide about a layer for ever."""
MOST_LAYERS = 4096
"""Layers kept per algorithm; then the oldest are forgotten."""


class Estimate(NamedTuple):
    """Correction of a predicted log gain.

    Attributes:
        shift: to be added to the prediction.
        sd: standard deviation of the corrected prediction for one problem.
        of_layer: number of problems of this layer behind it.
        of_algorithm: number of layers of this algorithm behind it.
    """

    shift: float
    sd: float
    of_layer: float
    of_algorithm: int


class _Algorithm:
    """Number and mean of the residuals by layer, and the sums over layers that b_algorithm needs."""

    __slots__ = ("layers", "weight", "weighted")

    def __init__(self) -> None:
        self.layers: dict[Hashable, tuple[float, float]] = {}
        self.weight = 0.0
        self.weighted = 0.0

    def put(self, layer: Hashable, n: float, mean: float) -> None:
        self.forget(layer)
        self.layers[layer] = (n, mean)
        w = _weight(n)
        self.weight += w
        self.weighted += w * mean
        if len(self.layers) > MOST_LAYERS:
            self.forget(next(iter(self.layers)))

    def forget(self, layer: Hashable) -> None:
        n, mean = self.layers.pop(layer, (0.0, 0.0))
        if n:
            self.weight -= _weight(n)
            self.weighted -= _weight(n) * mean


class Learnt:
    """Residuals of one model, and the corrections that follow from them. Directions and layers are any keys."""

    def __init__(self) -> None:
        self._by_direction: dict[Hashable, dict[str, _Algorithm]] = {}

    def __len__(self) -> int:
        """Number of layers, over all algorithms and directions."""
        return sum(len(one.layers) for group in self._by_direction.values() for one in group.values())

    def put(self, algorithm: str, direction: Hashable, layer: Hashable, n: float, mean: float) -> None:
        """Set the number and the mean of a layer's residuals."""
        if n > 0:
            self._entry(algorithm, direction).put(layer, n, mean)

    def add(self, algorithm: str, direction: Hashable, layer: Hashable, residual: float) -> tuple[float, float]:
        """Add the residual of one problem; returns the number and the mean of the layer's residuals so far."""
        residual = min(max(residual, -MOST_RESIDUAL), MOST_RESIDUAL)
        entry = self._entry(algorithm, direction)
        n, mean = entry.layers.get(layer, (0.0, 0.0))
        n, mean = n + 1, mean + (residual - mean) / (n + 1)
        entry.put(layer, n, mean)
        return n, mean

    def _entry(self, algorithm: str, direction: Hashable) -> _Algorithm:
        return self._by_direction.setdefault(direction, {}).setdefault(algorithm, _Algorithm())

    def known(self, direction: Hashable) -> Collection[str]:
        """Algorithms with residuals in this direction."""
        return self._by_direction.get(direction, ())

    def estimate(self, algorithm: str, direction: Hashable, layer: Hashable) -> Estimate:
        """The correction for another problem of this layer."""
        entry = self._by_direction.get(direction, {}).get(algorithm)
        if entry is None:
            return NOTHING
        v = 1 / (1 / ALGORITHM_SD**2 + entry.weight)
        b = v * entry.weighted
        n, mean = entry.layers.get(layer, (0.0, 0.0))
        k = LAYER_SD**2 * _weight(n) if n else 0.0
        variance = (1 - k) ** 2 * v + (1 - k) * LAYER_SD**2 + SIZE_SD**2
        return Estimate((1 - k) * b + k * mean, variance**0.5, n, len(entry.layers))


def _weight(n: float) -> float:
    return 1 / (LAYER_SD**2 + SIZE_SD**2 / n)


NOTHING = Estimate(0.0, (ALGORITHM_SD**2 + LAYER_SD**2 + SIZE_SD**2) ** 0.5, 0.0, 0)


NEAR = -0.8
"""Algorithms that are predicted to be worse than this, in ln(t_native / t), are not worth a correction."""


def layer_of(problem: ConvProblem) -> str:
    """What problems of one layer have in common, as a text that is only compared: all but N, D, H and W."""
    p = problem._replace(N=0, D=0, H=0, W=0) if problem.is_volume else problem._replace(N=0, H=0, W=0)[:IMAGE_FIELDS]
    return " ".join(map(str, p))


class Corrected:
    """A prediction with what was learnt since; itself a `Prediction`."""

    __slots__ = ("_estimates", "_gains", "_raw", "margin_of", "ranked")

    def __init__(self, raw: Prediction, learnt: Learnt, problem: ConvProblem) -> None:
        self._raw = raw
        self.margin_of = raw.margin_of
        self.ranked = raw.ranked
        self._estimates: dict[str, Estimate] = {}
        self._gains: dict[str, float] = {}
        known = learnt.known(problem.direction)
        if not known:
            return
        layer, gains, far, last = layer_of(problem), self._gains, -math.inf, 0
        for name in raw.ranked:
            gain = raw.log_gain(name)
            if gain <= NEAR:
                far = gain
                break
            if name in known:
                estimate = self._estimates[name] = learnt.estimate(name, problem.direction, layer)
                gain += estimate.shift
            gains[name] = gain
            last += 1
        rest = raw.ranked[last:]
        if gains and min(gains.values()) < far:
            gains |= {name: raw.log_gain(name) for name in rest}
            rest = ()
        self.ranked = [*sorted(gains, key=gains.__getitem__, reverse=True), *rest]

    def log_gain(self, name: str) -> float:
        """Corrected ln(t_native / t_name)."""
        found = self._gains.get(name)
        return self._raw.log_gain(name) if found is None else found

    def raw_log_gain(self, name: str) -> float:
        """The model's own prediction."""
        return self._raw.log_gain(name)

    def estimate(self, name: str) -> Estimate:
        return self._estimates.get(name, NOTHING)

    def probability(self, name: str) -> float:
        return self._raw.probability(name)


def is_settled(candidates: Sequence[str], prediction: Corrected, least: float) -> str | None:
    """Who needs no trial: the first candidate if its gain is above `least` with 95 % probability and its layer or at
    least `KNOWN_LAYERS` layers were measured; native if this layer's trials have found none of them faster; None if
    nobody can tell."""
    first = prediction.estimate(candidates[0])
    mean = prediction.log_gain(candidates[0])
    if (first.of_layer or first.of_algorithm >= KNOWN_LAYERS) and mean - 1.645 * first.sd > least:
        return candidates[0]
    for name in candidates:
        estimate = prediction.estimate(name)
        doubt = 0.5 * estimate.sd if estimate.of_layer < 2 else 0.0
        if not estimate.of_layer or prediction.log_gain(name) + doubt > least:
            return None
    return NATIVE


KNOWN_LAYERS = 8
