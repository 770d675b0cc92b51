"""The times of a trial's turns, and what they say of each candidate's gain over native."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence

from convselect.choice.outcome import Measured, Prior

NATIVE = "native"
OUTLIER = 3.0
"""A call that takes longer than this many times its algorithm's median was interrupted; at most this is charged."""
NOISE_SD, NOISE_ROUNDS = 0.05, 4
NOISE_LEAST = 0.02
"""Lower bound of the deviation of one round's g."""
MISTAKEN = 2.0
"""A prediction that is this many standard deviations from what was seen has half its weight; farther away, less."""


class Rounds:
    """Times by algorithm, and by round.

    Args:
        priors: candidate -> its prediction.
        cost_us: overhead per call of leaving native, by native's time in us. None: nothing.
    """

    __slots__ = ("_cost_of", "cold_us", "cost_us", "done", "native_us", "priors", "this", "warm_us")

    def __init__(self, priors: Mapping[str, Prior], cost_us: Callable[[float], float] | None) -> None:
        self.priors = priors
        self.native_us: float | None = None
        """Median of native's warm times, or its first time; None before there is one."""
        self._cost_of = cost_us
        self.cost_us = 0.0 if cost_us is None else cost_us(0.0)
        self.cold_us: dict[str, float] = {}
        """Algorithm -> time of its first turn."""
        self.warm_us: dict[str, list[float]] = {}
        """Algorithm -> times of its turns except the first, ascending."""
        self.this: dict[str, float] = {}
        """The round that is in progress."""
        self.done: list[dict[str, float]] = []

    def add(self, name: str, us: float) -> bool:
        """A turn took this long; whether it was the algorithm's first."""
        cold = name not in self.cold_us
        if cold:
            self.cold_us[name] = us
            self.warm_us[name] = []
        else:
            insort(self.warm_us[name], us)
            self.this[name] = us
        if name == NATIVE:
            self.native_us = us if cold else middle_of(self.warm_us[name])
            if self._cost_of is not None:
                self.cost_us = self._cost_of(self.native_us)
        return cold

    def usual_us(self, name: str, us: float) -> float:
        """`us`, or the most that a turn counts as, if it was interrupted."""
        warm = self.warm_us.get(name, ())
        return min(us, OUTLIER * middle_of(warm)) if len(warm) >= 3 else us

    def end(self, due: Iterable[str]) -> bool:
        """The round is over, if everybody who is due has had a turn. Times of who has been dropped since stay."""
        if not all(name in self.this for name in due):
            return False
        self.done.append(self.this)
        self.this = {}
        return True

    def full_us(self, name: str, us: float) -> float:
        """With what leaving native costs."""
        return us if name == NATIVE else us + self.cost_us

    def gains(self, name: str, over: str = NATIVE) -> list[float]:
        """ln(t_over / t_name) of the rounds that have both, ascending."""
        more_over, more = (0.0 if one == NATIVE else self.cost_us for one in (over, name))
        both = [(r[over], r[name]) for r in self.done if over in r and name in r]
        return sorted([math.log((over_us + more_over) / (us + more)) for over_us, us in both])

    def gain(self, name: str, over: str = NATIVE) -> tuple[float, float]:
        """(median, robust standard error) of ln(t_over / t_name) over the rounds that have both.

        The median of n samples with standard deviation d has standard error 1.2533 d / sqrt(n); what the samples show
        of d is 1.4826 times the median absolute deviation.
        """
        g = self.gains(name, over)
        if not g:
            return 0.0, math.inf
        middle, n = _median(g), len(g)
        shown = 1.4826 * _median(sorted([abs(value - middle) for value in g]))
        variance = (NOISE_ROUNDS * NOISE_SD**2 + n * shown**2) / (NOISE_ROUNDS + n)
        return middle, 1.2533 * max(math.sqrt(variance), NOISE_LEAST) / math.sqrt(n)

    def belief(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) of its ln(t_native / t), by the prediction and all rounds."""
        prior = self.priors[name]
        mean, error = self.gain(name)
        if error == math.inf:
            return prior
        distance = (mean - prior.mean) / math.sqrt(prior.sd**2 + error**2)
        prior_weight, weight = 1 / prior.sd**2 / (1 + (distance / MISTAKEN) ** 4), 1 / error**2
        total = prior_weight + weight
        return (prior_weight * prior.mean + weight * mean) / total, total**-0.5

    def measured(self) -> dict[str, Measured]:
        """What was measured of each candidate so far, in the order of the priors."""
        found = {}
        for name in self.priors:
            g, warm = self.gains(name), self.warm_us.get(name)
            if g:
                p20, p80 = (math.exp(g[int(share * (len(g) - 1) + 0.5)]) for share in (0.2, 0.8))
                found[name] = Measured(len(g), math.exp(_median(g)), p20, p80)
            elif warm and self.native_us is not None:
                one = self.native_us / self.full_us(name, warm[0])
                found[name] = Measured(1, one, one, one)
        return found


def middle_of(ascending: Sequence[float]) -> float:
    """The median; the upper one of two."""
    return ascending[len(ascending) // 2]


def _median(ascending: Sequence[float]) -> float:
    """`statistics.median`, of sorted values."""
    half, odd = divmod(len(ascending), 2)
    return ascending[half] if odd else (ascending[half - 1] + ascending[half]) / 2
