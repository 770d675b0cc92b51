"""A trial: native and the model's best candidates take turns on real calls until one of them is clearly best.

No clock is read here: the caller measures time, so that recorded or invented times can be replayed through exactly
these rules.

A call's algorithm comes from `turn()`, its time goes to `record(...)`. Calls are grouped into rounds in which native
and every remaining candidate have one turn each, in random order: a network repeats its layers in a fixed order, and a
fixed order of turns would always give the same layer to the same algorithm. Only times of one round are compared, as
g = ln(t_native / t_candidate). From `MIN_ROUNDS` on, with m the median of g and s its robust standard error:

    m + z s < MIN_GAIN        the candidate is out
    m - z s > MIN_GAIN        it is better than native, which then has no more turns; the best of those is taken, once
                              no rival may still beat it
    MAX_ROUNDS                the best median, if it is better than native in the sense above; otherwise native

Here z is Student's t for the number of rounds at 99 % (2.33 for many), since a deviation from five values is uncertain.

The cost of a trial is bounded at all times: the sum over all calls of (time - native's time), including the trial's own
overhead, stays below `ALLOWANCE` calls of native and `SHARE` of native's time so far. When that is spent, native runs
until it is repaid; gains of a fast candidate pay for others; a debt beyond `ABANDON` calls ends the trial. A candidate
is out after a first call beyond `COLD_DROP`, or a second beyond `WARM_DROP` times native's time.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

NATIVE = "native"

MIN_ROUNDS, MAX_ROUNDS = 5, 24
RIVAL_ROUNDS = 12
"""After this many rounds two candidates that are both better than native are not compared any further."""
MIN_GAIN = 0.02
"""Least ln(t_native / t) for which leaving native is worth it."""
Z = (3.75, 3.36, 3.14, 3.0, 2.9, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62, 2.6, 2.58, 2.57, 2.55, 2.54, 2.53, 2.52, 2.51, 2.5)
"""Student's t at 99 % for MIN_ROUNDS to MAX_ROUNDS samples."""
NOISE_FLOOR = 0.01
"""Lower bound on the assumed standard deviation of a round's g: a few rounds may agree by chance."""
COLD_DROP, WARM_DROP = 4.0, 2.5
COLD_US = 200.0
"""Extra time allowed for a first call: a library is loaded, threads start, pages are touched for the first time."""
ALLOWANCE, SHARE = 3.0, 0.01
ABANDON = 6.0
"""In calls of native: a larger debt, when a candidate has just been dropped, ends the trial instead of being repaid."""
MACHINERY_US = 8.0
"""About the cost of a turn beyond the convolution."""
OUTLIER = 3.0
"""A call that takes longer than this many times its algorithm's median was interrupted; at most this is charged."""
NATIVE_FIRST = 3
"""Calls of native before anything else: its first is cold, and candidates are first compared with the next two."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        algorithm: the one to use from now on.
        gain: its speed relative to native, the median over rounds; 1 for native.
        rounds: rounds on which the result is based.
        reason: one sentence.
        cut_short: whether the trial was ended for its cost, without a meaningful comparison.
    """

    algorithm: str
    gain: float
    rounds: int
    reason: str
    cut_short: bool = False


class Trial:
    """One problem's trial.

    Args:
        candidates: names, the most promising first; without native.
        cost_us: overhead per call of leaving native, such as that of the plan that dispatches to the algorithm.
        seed: random seed of the orders.
        machinery_us: overhead of a turn beyond the convolution.
    """

    __slots__ = (
        "_cost_us", "_excess_us", "_machinery_us", "_order", "_proven", "_random", "_rounds", "_seed", "_this_round",
        "_warm_us", "calls", "live", "outcome", "turns",
    )  # fmt: skip

    def __init__(
        self, candidates: Sequence[str], *, cost_us: float = 0.0, seed: int = 0, machinery_us: float = MACHINERY_US
    ) -> None:
        self.live = list(candidates)
        self.calls = 0
        """Calls seen, timed or not."""
        self.turns = 0
        """Calls that were an algorithm's turn."""
        self.outcome: Outcome | None = None
        self._cost_us = cost_us
        self._machinery_us = machinery_us
        self._excess_us = 0.0
        self._seed = seed
        self._random: random.Random | None = None  # seeding costs 10 us
        self._order: list[str] = [NATIVE] * NATIVE_FIRST
        self._warm_us: dict[str, list[float]] = {}
        """Algorithm -> times of its turns except the first, ascending."""
        self._proven = False
        """Whether the leader is better than native, so that only rivals are still compared."""
        self._this_round: dict[str, float] = {}
        self._rounds: list[dict[str, float]] = []
        if not self.live:
            self._settle(NATIVE, "there is nothing to compare it with")

    @property
    def native_us(self) -> float | None:
        """Median of native's warm times; None before there is one."""
        warm = self._warm_us.get(NATIVE)
        return _middle(warm) if warm else None

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @property
    def excess_us(self) -> float:
        """Time spent so far beyond what native alone would have taken; negative if the trial has saved time."""
        return self._excess_us

    def turn(self) -> str | None:
        """The algorithm that runs this call and is timed; None: native runs, untimed, to repay the trial's cost."""
        self.calls += 1
        while not self._order:
            self._next_order()
        name = self._order[-1]
        native_us = self.native_us
        if native_us is not None and self._excess_us > native_us * (ALLOWANCE + SHARE * self.calls):
            return None
        self._order.pop()
        self.turns += 1
        return name

    def is_cold(self, name: str) -> bool:
        """Whether this turn is the algorithm's first."""
        return name not in self._warm_us

    def charge(self, us: float) -> None:
        """Add time that a call took beyond what it would have taken without the trial."""
        self._excess_us += us

    def postpone(self, name: str) -> None:
        """The algorithm that `turn()` returned cannot run now; it gets a turn later."""
        if name == NATIVE or name in self.live:
            self._order.append(name)
            self.turns -= 1

    def _next_order(self) -> None:
        """Start the next round, in random order; a candidate that has not run yet has its cold call before that."""
        cold = [name for name in self.live if name not in self._warm_us]
        if cold:
            self._order = [cold[0]]
            return
        self._this_round = {}
        self._order = list(self.live) if self._proven else [NATIVE, *self.live]
        if self._random is None:
            self._random = random.Random(self._seed)
        self._random.shuffle(self._order)

    def record(self, name: str, us: float) -> None:
        """Record the time of a call."""
        if self.outcome is not None:
            return
        warm = self._warm_us.get(name)
        if warm is None:
            self._warm_us[name] = []
            self._charge(name, us)
            native_us = self.native_us
            if name != NATIVE and native_us is not None and us > COLD_DROP * native_us + COLD_US:
                self.drop(name)
            return
        insort(warm, us)
        self._charge(name, us)
        native_us = self.native_us
        assert native_us is not None or name != NATIVE
        if name != NATIVE and len(warm) == 1 and native_us is not None and us + self._cost_us > WARM_DROP * native_us:
            self.drop(name)
            return
        self._this_round[name] = us
        self._end_round()

    def _end_round(self) -> None:
        if not self._order and len(self._this_round) == len(self.live) + (not self._proven):
            self._rounds.append(self._this_round)
            self._this_round = {}
            self._judge()

    def _charge(self, name: str, us: float) -> None:
        native_us = self.native_us
        if native_us is None:
            return
        self._excess_us += self._machinery_us
        if name != NATIVE:
            warm = self._warm_us[name]
            usual = OUTLIER * _middle(warm) if len(warm) >= 3 else math.inf
            self._excess_us += min(us, usual) + self._cost_us - native_us

    def drop(self, name: str) -> None:
        """Remove a candidate: it is hopeless, or it failed."""
        if name not in self.live:
            return
        self.live.remove(name)
        self._proven = False  # it may have been the one that was proven better
        self._order = [other for other in self._order if other != name]
        self._this_round.pop(name, None)
        native_us = self.native_us
        if not self.live:
            self._settle(NATIVE, "no candidate was faster")
        elif native_us is not None and self._excess_us > ABANDON * native_us:
            self._settle(NATIVE, "the candidates were predicted much too well", cut_short=True)
        elif self._this_round:
            self._end_round()

    # ---- judging ------------------------------------------------------------------------------------------------

    def gain(self, name: str, over: str = NATIVE) -> tuple[float, float]:
        """(median, robust standard error) of ln(t_over / t_name) over the rounds that have both.

        The median of n samples with standard deviation d has standard error 1.2533 d / sqrt(n); d is 1.4826 times the
        median absolute deviation.
        """
        g = [
            math.log(self._full(over, r[over]) / self._full(name, r[name]))
            for r in self._rounds
            if over in r and name in r
        ]
        if not g:
            return 0.0, math.inf
        middle = median(g)
        deviation = max(1.4826 * median(abs(value - middle) for value in g), NOISE_FLOOR)
        return middle, 1.2533 * deviation / math.sqrt(len(g))

    def _full(self, name: str, us: float) -> float:
        return us if name == NATIVE else us + self._cost_us

    def _judge(self) -> None:
        n = len(self._rounds)
        if n < MIN_ROUNDS:
            return
        z = Z[n - MIN_ROUNDS]
        if not self._proven:
            for name in list(self.live):
                middle, error = self.gain(name)
                if middle + z * error < MIN_GAIN:
                    self.drop(name)
            if self.outcome is not None:
                return
        leader = self._leader()
        for rival in [name for name in self.live if name != leader]:
            advantage, error = self.gain(rival, over=leader)
            if advantage + z * error < MIN_GAIN:
                self.live.remove(rival)  # it may still beat native, but not the leader
        if not self._proven:
            middle, error = self.gain(leader)
            self._proven = middle - z * error > MIN_GAIN
        if self._proven and (len(self.live) == 1 or n >= RIVAL_ROUNDS):
            self._settle(leader, f"{math.exp(self.gain(leader)[0]):.2f} times native's speed in {n} rounds")
        elif n >= MAX_ROUNDS:
            self._settle(NATIVE, f"nothing was clearly faster in {n} rounds")

    def _leader(self) -> str:
        """The fastest candidate: by its gain over native, and if native is out already, by the rounds since."""
        leader = max(self.live, key=lambda name: self.gain(name)[0])
        for rival in self.live if self._proven else ():
            # A candidate that was never shown to beat native must not win by beating one that was.
            middle, error = self.gain(rival)
            if rival != leader and middle - Z[0] * error > MIN_GAIN and self.gain(rival, over=leader)[0] > 0:
                leader = rival
        return leader

    def _settle(self, name: str, reason: str, *, cut_short: bool = False) -> None:
        gain = 1.0 if name == NATIVE else math.exp(self.gain(name)[0])
        self.outcome = Outcome(name, gain, len(self._rounds), reason, cut_short)


def _middle(ascending: Sequence[float]) -> float:
    """The median; the upper one of two."""
    return ascending[len(ascending) // 2]


def replay(trial: Trial, time_us: Callable[[str], float], calls: int) -> float:
    """Total time of `calls` calls in us: first those of the trial, with its overhead and the comparison of each
    candidate's first result with native's, then those of the algorithm it settled on. `time_us(algorithm)` returns the
    time of one call."""
    total = 0.0
    for _ in range(calls):
        if trial.outcome is not None:
            name = trial.outcome.algorithm
            total += time_us(name) + (trial._cost_us if name != NATIVE else 0.0)
            continue
        turn = trial.turn()
        us = time_us(turn or NATIVE)
        total += us
        if turn is None:
            continue
        total += trial._machinery_us + (trial._cost_us if turn != NATIVE else 0.0)
        new = turn != NATIVE and trial.is_cold(turn)
        trial.record(turn, us)
        if new:
            comparison = time_us(NATIVE)
            total += comparison
            trial.charge(comparison)
    return total
