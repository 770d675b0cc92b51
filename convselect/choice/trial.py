"""A trial: native and the model's best candidates take turns on real calls until one of them is clearly best, or until
`MOST_CALLS` calls have been seen.

No clock is read here: the caller measures time, so that recorded or invented times can be replayed through exactly
these rules.

A call's algorithm comes from `turn()`, its time goes to `record(...)`. Every algorithm has a cold call first: a
favourite before native, the others after it. Then calls are grouped into rounds in which native and every remaining
candidate have one turn each, in random order: a network repeats its layers in a fixed order, and a fixed order of turns
would always give the same layer to the same algorithm. Only times of one round are compared, as
g = ln(t_native / t_candidate).

What is known of a candidate after n rounds is the mean and deviation of a normal distribution: the prediction (mean p,
deviation q), and the rounds (their median m, its robust standard error s), weighted by their precisions,

    mean = (p / q^2 + m / s^2) / (1 / q^2 + 1 / s^2),    sd = (1 / q^2 + 1 / s^2)^(-1/2)

A prediction that contradicts what was measured loses its weight (`MISTAKEN`). The standard deviation of one round's g
is taken to be between what the rounds show and `NOISE_SD`, which counts like `NOISE_ROUNDS` rounds: three rounds may
agree by chance. From `MIN_ROUNDS` on, and one round earlier for what is clear by `EARLY_GAIN` more:

    mean + Z_OUT sd < MIN_GAIN    the candidate is out
    mean - Z_IN sd > MIN_GAIN     it is better than native, which then has no more turns; the best of those is taken,
                                  once no rival may still beat it
    the end of the trial          the best mean - sd if that is above MIN_GAIN; otherwise native

The first of these allows for more with every round (`PATIENCE`): what is hardly faster is not worth many calls.

A trial ends after `MOST_CALLS` calls, after `MAX_ROUNDS` rounds, and as soon as it has cost more than `ALLOWANCE_CALLS`
calls of native and `ALLOWANCE_US`, everything included: the prediction and the plan before it, slower algorithms, the
checks of their results, its own overhead. A fast candidate's gains pay for others. If `MIN_ROUNDS` rounds with one
candidate cannot be had for that, there is no trial once native's time is known, and the model decides. A candidate is
out after a first call beyond `COLD_DROP`, or a second beyond `WARM_DROP` times native's time.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

NATIVE = "native"

MOST_CALLS = 60
"""A trial is over after this many calls of its problem, timed or not."""
MIN_ROUNDS, MAX_ROUNDS = 3, 16
EARLY_ROUNDS, EARLY_GAIN = 2, 0.1
"""After so few rounds already, what is clear by this much more is decided."""
RIVAL_ROUNDS = 6
"""After this many rounds two candidates that are both better than native are not compared any further."""
MIN_GAIN = 0.02
"""Least ln(t_native / t) for which leaving native is worth it."""
Z_IN, Z_OUT = 2.5, 1.7
PATIENCE = 0.003
"""Added to `MIN_GAIN` for each round in deciding who is out: candidates as fast as native would stay to the end."""
NOISE_SD, NOISE_ROUNDS = 0.05, 4
NOISE_LEAST = 0.02
"""Lower bound of the deviation of one round's g."""
COLD_DROP, WARM_DROP = 4.0, 2.5
COLD_US = 200.0
"""Extra time allowed for a first call: a library is loaded, threads start, pages are touched for the first time."""
ALLOWANCE_CALLS, ALLOWANCE_US = 3.5, 300.0
MACHINERY_US = 25.0
"""About the cost of a turn beyond the convolution: this is expected of turns to come."""
CHECK_US = 80.0
"""About the cost of checking a candidate's first result, likewise."""
MOST_PLAN_US = 1500.0
"""What came before the trial counts up to this: more than that was for all problems, as loading a library is."""
OUTLIER = 3.0
"""A call that takes longer than this many times its algorithm's median was interrupted; at most this is charged."""
UNUSABLE = 2
"""A candidate is out after this many results that could not be used: an infinity or a NaN was in them."""
SPOILT = 2
"""After unusable results of this many candidates the trial is over: the operands spoil them, not an algorithm."""
MISTAKEN = 2.0
"""A prediction that is this many standard deviations from what was seen has half its weight; farther away, less."""
HOPELESS = -0.7
"""Taken for the ln(t_native / t) of a candidate that was out after its first call."""


class Prior(NamedTuple):
    """What is known of a candidate before its trial: mean and standard deviation of ln(t_native / t), where t includes
    the cost of leaving native."""

    mean: float = 0.0
    sd: float = 0.3


class Measured(NamedTuple):
    """What a trial has found out about one candidate.

    Attributes:
        rounds: in which it was compared with native.
        gain: median of t_native / t over these rounds.
        p20, p80: percentiles of the same; None if they are not known any more, in a later process.
    """

    rounds: int
    gain: float
    p20: float | None = None
    p80: float | None = None

    @property
    def spread(self) -> tuple[float, float] | None:
        """(p20, p80); None if they are not known, as after a single round."""
        return None if self.rounds < 2 or self.p20 is None or self.p80 is None else (self.p20, self.p80)


@dataclass(frozen=True)
class Outcome:
    """The result of a trial.

    Attributes:
        algorithm: the one to use from now on.
        gain: its speed relative to native, the median over rounds; 1 for native; None if it was not compared.
        rounds: rounds on which the result is based.
        reason: one sentence.
        cut_short: whether the trial was ended for its cost or length, without a meaningful comparison.
        measured: candidate -> what was measured, for all that were compared.
    """

    algorithm: str
    gain: float | None
    rounds: int
    reason: str
    cut_short: bool
    measured: Mapping[str, Measured]


@dataclass(frozen=True)
class OnTrial:
    """A trial that is in progress.

    Attributes:
        rounds: complete rounds of turns.
        calls: of the problem, so far. While the trial waits, some are counted before they are made.
        most_calls: after so many calls the trial ends at the latest.
        leader: who would run if it ended now; native if no candidate would.
        candidates: candidate -> its speed relative to native as measured so far; None if nothing was measured.
        predicted: candidate -> its predicted speed relative to native.
        out: candidates that have no more turns.
        waiting: whether only native runs, untimed, until the process has time for another trial.
    """

    rounds: int
    calls: int
    most_calls: int
    leader: str
    candidates: Mapping[str, float | None] = field(hash=False)
    predicted: Mapping[str, float] = field(hash=False)
    out: tuple[str, ...] = ()
    waiting: bool = False

    def __str__(self) -> str:
        waiting = ", waiting" if self.waiting else ""
        return f"{self.rounds} round{'s' * (self.rounds != 1)}, {self.calls} of {self.most_calls} calls{waiting}"


class Trial:
    """One problem's trial.

    Args:
        priors: the candidates, the most promising first, without native; or their names, of which nothing is known.
        favourite: the candidate that has the very first call; None if that is native's.
        cost_us: overhead per call of leaving native, by native's time in us: that of the plan that dispatches to the
            algorithm. None: nothing.
        plan_us: what it took to come to this trial, of which its allowance pays as well.
        seed: random seed of the orders.
    """

    __slots__ = (
        "_cold_us", "_cost_of", "_cost_us", "_order", "_plan_us", "_proven", "_random", "_rounds", "_seed", "_spent_us",
        "_spoilt", "_this_round", "_timed", "_unusable", "_warm_us", "calls", "excess_us", "live", "native_us",
        "outcome", "priors", "turns",
    )  # fmt: skip

    def __init__(
        self,
        priors: Mapping[str, Prior] | Sequence[str],
        *,
        favourite: str | None = None,
        cost_us: Callable[[float], float] | None = None,
        plan_us: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.priors = dict(priors) if isinstance(priors, Mapping) else {name: Prior() for name in priors}
        self.live = list(self.priors)
        self.calls = 0
        """Calls seen, timed or not."""
        self.turns = 0
        """Calls that were an algorithm's turn."""
        self.outcome: Outcome | None = None
        self.native_us: float | None = None
        """Median of native's warm times, or its first time; None before there is one."""
        self.excess_us = 0.0
        """Time spent so far beyond what native alone would have taken; negative if the trial has saved time; 0 before
        native's time is known."""
        self._cost_of = cost_us
        self._cost_us = 0.0 if cost_us is None else cost_us(0.0)
        self._plan_us = min(plan_us, MOST_PLAN_US)
        self._spent_us = 0.0
        self._timed = 0
        self._seed = seed
        self._random: random.Random | None = None  # seeding costs 10 us
        self._order: list[str] = [NATIVE] if favourite is None else [NATIVE, favourite]
        self._cold_us: dict[str, float] = {}
        """Algorithm -> time of its first turn."""
        self._warm_us: dict[str, list[float]] = {}
        """Algorithm -> times of its turns except the first, ascending."""
        self._unusable: dict[str, int] = {}
        self._spoilt: set[str] = set()
        """Results of all candidates that could not be used. They say nothing about other values: what is decided for
        want of candidates then is `cut_short`."""
        self._proven = False
        """Whether the leader is better than native, so that only rivals are still compared."""
        self._this_round: dict[str, float] = {}
        self._rounds: list[dict[str, float]] = []
        if not self.live:
            self._settle(NATIVE, "there is nothing to compare it with")

    @property
    def favourite_is_next(self) -> bool:
        """Whether the very first call is still to come, and a candidate's."""
        return not self._cold_us and bool(self._order) and self._order[-1] != NATIVE

    @property
    def rounds(self) -> int:
        return len(self._rounds)

    @property
    def leader(self) -> str:
        """Who would win if the trial ended now."""
        return (self._leader() if self._proven and self.live else self._best()) or NATIVE

    def state(self) -> OnTrial:
        """What is known by now, for people; changes nothing."""
        measured = self.measured()
        return OnTrial(
            self.rounds,
            self.calls,
            MOST_CALLS,
            self.leader,
            {name: measured[name].gain if name in measured else None for name in self.priors},
            {name: math.exp(prior.mean) for name, prior in self.priors.items()},
            tuple(name for name in self.priors if name not in self.live),
        )

    def turn(self) -> str | None:
        """The algorithm that runs this call and is timed; None if the trial is over."""
        self.wait(1)
        if self.outcome is not None:
            return None
        while not self._order:
            self._next_order()
        self.turns += 1
        return self._order.pop()

    def wait(self, calls: int) -> None:
        """Calls of the problem that are nobody's turn: native's, untimed."""
        self.calls += calls
        if self.outcome is None and self.calls > MOST_CALLS:
            self._end(f"{MOST_CALLS} calls")

    def refuse(self, calls: int) -> None:
        """As `wait`, because no trial may begin now. If it ends so, native runs: other trials have cost too much, so
        the model's word is worth nothing."""
        if self.outcome is None and self.calls + calls > MOST_CALLS:
            self._settle(NATIVE, f"no trial could begin in {MOST_CALLS} calls", cut_short=True)
        self.wait(calls)

    def is_cold(self, name: str) -> bool:
        """Whether this turn is the algorithm's first."""
        return name not in self._cold_us

    def charge(self, us: float) -> None:
        """Add time that a call took beyond what it would have taken without the trial."""
        self._spent_us += us
        self._end_if_too_expensive()

    def postpone(self, name: str) -> None:
        """The algorithm that `turn()` returned could not be timed now; it gets a turn later."""
        if self.outcome is None and (name == NATIVE or name in self.live):
            self._order.insert(0, name)
            self.turns -= 1

    def unusable(self, name: str, extra_us: float) -> None:
        """Its result held an infinity or a NaN, and native computed the call again: `extra_us` in vain."""
        if name in self._cold_us:
            self.postpone(name)
        else:
            self.turns -= 1  # others have their first call before it
        self._unusable[name] = self._unusable.get(name, 0) + 1
        self._spoilt.add(name)
        if self.outcome is None and len(self._spoilt) >= SPOILT:
            self._settle(NATIVE, "the values were not finite, or huge", cut_short=True)
        elif self._unusable[name] >= UNUSABLE:
            self.drop(name)
        self.charge(extra_us)

    def fail(self, name: str) -> None:
        """Remove a candidate that raised an error or was wrong. Of its speed this says nothing."""
        self._unusable[name] = UNUSABLE
        self.drop(name)

    def _next_order(self) -> None:
        """Start the next round, in random order; a candidate that has not run yet has its cold call before that."""
        cold = [name for name in (NATIVE, *self.live) if name not in self._cold_us]
        if cold:
            self._order = [min(cold, key=lambda name: self._unusable.get(name, 0))]
            return
        self._this_round = {}
        self._order = list(self.live) if self._proven else [NATIVE, *self.live]
        if self._random is None:
            self._random = random.Random(self._seed)
        self._random.shuffle(self._order)

    def record(self, name: str, us: float, overhead_us: float = 0.0) -> None:
        """Record the time of a call, and what the turn cost beyond it."""
        if self.outcome is not None:
            return
        warm = self._warm_us.get(name, [])
        usual = OUTLIER * _middle(warm) if len(warm) >= 3 else math.inf
        self._spent_us += min(us, usual) + overhead_us + self._cost_us
        self._timed += 1
        if name not in self._cold_us:
            self._cold_us[name] = us
            self._warm_us[name] = []
            if name == NATIVE:
                self._native_takes(us)
                self._end_if_too_expensive(expected_us=self._least_us())
            self._drop_if_cold_and_hopeless()
        else:
            insort(warm, us)
            if name == NATIVE:
                self._native_takes(_middle(warm))
            native_us = self.native_us
            hopeless = native_us is not None and us + self._cost_us > WARM_DROP * native_us
            self._this_round[name] = us
            if name != NATIVE and len(warm) == 1 and hopeless:
                self.drop(name)
            else:
                self._end_round()
        self._end_if_too_expensive()

    def _native_takes(self, us: float) -> None:
        self.native_us = us
        if self._cost_of is not None:
            self._cost_us = self._cost_of(us)

    def _drop_if_cold_and_hopeless(self) -> None:
        native_us = self.native_us
        if native_us is None:
            return
        for name in list(self.live):
            if self._cold_us.get(name, 0.0) > COLD_DROP * native_us + COLD_US and not self._warm_us[name]:
                self.drop(name)

    def _end_round(self) -> None:
        """Judge, if everybody who is still in the race has had a turn. Times of who has been dropped since stay."""
        due = self.live if self._proven else [NATIVE, *self.live]
        if self.outcome is None and not self._order and all(name in self._this_round for name in due):
            self._rounds.append(self._this_round)
            self._this_round = {}
            self._judge()

    def _least_us(self) -> float:
        """What it costs at least to compare one candidate with native."""
        check_us = 0.0 if self.live and self.live[0] in self._cold_us else CHECK_US
        return (2 * MIN_ROUNDS + (check_us > 0.0)) * MACHINERY_US + check_us

    def _end_if_too_expensive(self, expected_us: float = 0.0) -> None:
        native_us = self.native_us
        if native_us is None:
            return
        self.excess_us = self._spent_us - self._timed * native_us
        cost_us = self._plan_us + self.excess_us + expected_us
        if cost_us > ALLOWANCE_CALLS * native_us + ALLOWANCE_US and self.outcome is None:
            self._end("its cost")

    def drop(self, name: str) -> None:
        """Remove a candidate that has no chance."""
        if name not in self.live or self.outcome is not None:
            return
        self.live.remove(name)
        self._proven = False  # it may have been the one that was proven better
        self._order = [other for other in self._order if other != name]
        if not self.live:
            self._settle(NATIVE, "no candidate was faster", cut_short=bool(self._spoilt))
        elif self._this_round:
            self._end_round()

    # ---- judging ------------------------------------------------------------------------------------------------

    def gain(self, name: str, over: str = NATIVE) -> tuple[float, float]:
        """(median, robust standard error) of ln(t_over / t_name) over the rounds that have both.

        The median of n samples with standard deviation d has standard error 1.2533 d / sqrt(n); what the samples show
        of d is 1.4826 times the median absolute deviation.
        """
        g = self._gains(name, over)
        if not g:
            return 0.0, math.inf
        middle, n = median(g), len(g)
        shown = 1.4826 * median(abs(value - middle) for value in g)
        variance = (NOISE_ROUNDS * NOISE_SD**2 + n * shown**2) / (NOISE_ROUNDS + n)
        return middle, 1.2533 * max(math.sqrt(variance), NOISE_LEAST) / math.sqrt(n)

    def _gains(self, name: str, over: str = NATIVE) -> list[float]:
        full = self._full
        return [math.log(full(over, r[over]) / full(name, r[name])) for r in self._rounds if over in r and name in r]

    def _full(self, name: str, us: float) -> float:
        return us if name == NATIVE else us + self._cost_us

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
            g = sorted(self._gains(name))
            native_us = self.native_us
            if g:
                p20, p80 = (math.exp(g[int(share * (len(g) - 1) + 0.5)]) for share in (0.2, 0.8))
                found[name] = Measured(len(g), math.exp(median(g)), p20, p80)
            elif name in self._warm_us and self._warm_us[name] and native_us is not None:
                one = native_us / self._full(name, self._warm_us[name][0])
                found[name] = Measured(1, one, one, one)
        return found

    def _judge(self) -> None:
        n = len(self._rounds)
        if n < EARLY_ROUNDS:
            return
        clear = EARLY_GAIN if n < MIN_ROUNDS else 0.0
        beliefs = {name: self.belief(name) for name in self.live}
        if not self._proven:
            for name, (mean, sd) in beliefs.items():
                if mean + Z_OUT * sd < MIN_GAIN + n * PATIENCE - clear:
                    self.drop(name)
            if self.outcome is not None:
                return
        leader = self._leader(beliefs)
        for rival in [name for name in self.live if name != leader]:
            advantage, error = self.gain(rival, over=leader)
            if advantage + Z_OUT * error < MIN_GAIN:
                self.live.remove(rival)  # it may still beat native, but not the leader
        if not self._proven:
            mean, sd = beliefs[leader]
            self._proven = mean - Z_IN * sd > MIN_GAIN + clear
        if self._proven and (len(self.live) == 1 or n >= RIVAL_ROUNDS):
            self._settle(leader, f"{math.exp(self.gain(leader)[0]):.2f} times native's speed in {n} rounds")
        elif n >= MAX_ROUNDS:
            self._end(f"{n} rounds")

    def _leader(self, beliefs: Mapping[str, tuple[float, float]] | None = None) -> str:
        """The fastest candidate: by its gain over native, and if native is out already, by the rounds since."""
        if len(self.live) == 1:
            return self.live[0]
        beliefs = beliefs or {name: self.belief(name) for name in self.live}
        leader = max(self.live, key=lambda name: beliefs[name][0])
        for rival in self.live if self._proven else ():
            # A candidate that was never shown to beat native must not win by beating one that was.
            mean, sd = beliefs[rival]
            if rival != leader and mean - Z_IN * sd > MIN_GAIN and self.gain(rival, over=leader)[0] > 0:
                leader = rival
        return leader

    def _best(self) -> str | None:
        """The candidate with the best mean - sd, if that is above `MIN_GAIN`. Once one of them has run, the model's
        word counts only for those that were not slower than native in their first calls."""
        ran = self._cold_us.keys() - {NATIVE}
        native_us = self.native_us or math.inf
        known = {
            name: self.belief(name)
            for name in self.live
            if not ran or self._gains(name) or self._cold_us.get(name, math.inf) <= native_us
        }
        sure = {name: mean - sd for name, (mean, sd) in known.items()}
        best = max(sure, key=sure.__getitem__, default=None)
        return best if best is not None and sure[best] > MIN_GAIN else None

    def _end(self, why: str) -> None:
        """The trial is over without a clear winner: what is known decides."""
        best = self._leader() if self._proven else self._best()
        compared = len(self._gains(best)) if best is not None else len(self._rounds)
        word = "the best so far" if compared >= MIN_ROUNDS else "the model decides"
        if best is None:
            word = "nothing was clearly faster"
        self._settle(best or NATIVE, f"{word} after {why}", cut_short=compared < MIN_ROUNDS)

    def _settle(self, name: str, reason: str, *, cut_short: bool = False) -> None:
        measured = self.measured()
        gain = 1.0 if name == NATIVE else measured[name].gain if name in measured else None
        self.outcome = Outcome(name, gain, len(self._rounds), reason, cut_short, measured)

    def hopeless(self) -> list[str]:
        """Candidates that were out after their first call: they count as `HOPELESS`."""
        out = [name for name in self.priors if name not in self.live and not self._unusable.get(name)]
        return [name for name in out if name in self._cold_us and not self._warm_us[name]]


def _middle(ascending: Sequence[float]) -> float:
    """The median; the upper one of two."""
    return ascending[len(ascending) // 2]


def replay(trial: Trial, time_us: Callable[[str], float], calls: int) -> float:
    """Total time of `calls` calls in us: first those of the trial, with its overhead and the check of each candidate's
    first result, then those of the algorithm it settled on. `time_us(algorithm)` returns the time of one call."""
    total = 0.0
    for _ in range(calls):
        name = None if trial.outcome is not None else trial.turn()
        if name is None:
            assert trial.outcome is not None
            used = trial.outcome.algorithm
            total += time_us(used) + (trial._cost_us if used != NATIVE else 0.0)
            continue
        us = time_us(name)
        overhead_us = MACHINERY_US + (CHECK_US if name != NATIVE and trial.is_cold(name) else 0.0)
        total += us + overhead_us + trial._cost_us
        trial.record(name, us, overhead_us)
    return total
