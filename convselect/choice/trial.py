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
from collections.abc import Callable, Mapping, Sequence

from convselect.choice.outcome import Measured, OnTrial, Outcome, Prior
from convselect.choice.rounds import NATIVE, Rounds

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
UNUSABLE = 2
"""A candidate is out after this many results that could not be used: an infinity or a NaN was in them."""
SPOILT = 2
"""After unusable results of this many candidates the trial is over: the operands spoil them, not an algorithm."""
_MASK = (1 << 64) - 1
HOPELESS = -0.7
"""Taken for the ln(t_native / t) of a candidate that was out after its first call."""


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
        "_order", "_plan_us", "_proven", "_seed", "_spent_us", "_spoilt", "_timed", "_unusable", "beyond_us", "calls",
        "excess_us", "live", "outcome", "priors", "seen", "turns",
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
        self.seen = Rounds(self.priors, cost_us)
        self.excess_us = 0.0
        """Time spent so far beyond what native alone would have taken; negative if the trial has saved time; 0 before
        native's time is known."""
        self.beyond_us = 0.0
        """The most that this was above what a trial may cost: a first call is over before it can be too long."""
        self._plan_us = min(plan_us, MOST_PLAN_US)
        self._spent_us = 0.0
        self._timed = 0
        self._seed = (2 * seed + 1) & _MASK
        self._order: list[str] = [NATIVE] if favourite is None else [NATIVE, favourite]
        self._unusable: dict[str, int] = {}
        self._spoilt: set[str] = set()
        """Results of all candidates that could not be used. They say nothing about other values: what is decided for
        want of candidates then is `cut_short`."""
        self._proven = False
        """Whether the leader is better than native, so that only rivals are still compared."""
        if not self.live:
            self._settle(NATIVE, "there is nothing to compare it with")

    @property
    def favourite_is_next(self) -> bool:
        """Whether the very first call is still to come, and a candidate's."""
        return not self.seen.cold_us and bool(self._order) and self._order[-1] != NATIVE

    @property
    def native_us(self) -> float | None:
        """Median of native's warm times, or its first time; None before there is one."""
        return self.seen.native_us

    @property
    def cost_us(self) -> float:
        """Overhead per call of leaving native."""
        return self.seen.cost_us

    @property
    def rounds(self) -> int:
        return len(self.seen.done)

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
        self.calls += 1
        if self.calls > MOST_CALLS and self.outcome is None:
            self._end(f"{MOST_CALLS} calls")
        if self.outcome is not None:
            return None
        if not self._order:
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
        return name not in self.seen.cold_us

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
        if name in self.seen.cold_us:
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
        cold = [name for name in (NATIVE, *self.live) if name not in self.seen.cold_us]
        if cold:
            self._order = [min(cold, key=lambda name: self._unusable.get(name, 0)) if len(cold) > 1 else cold[0]]
            return
        self.seen.this = {}
        order = self._order = list(self.live) if self._proven else [NATIVE, *self.live]
        for last in range(len(order) - 1, 0, -1):
            # A linear congruential generator: what `random` has costs more than the rest of a turn.
            self._seed = (self._seed * 6364136223846793005 + 1442695040888963407) & _MASK
            other = (self._seed >> 33) % (last + 1)
            order[last], order[other] = order[other], order[last]

    def record(self, name: str, us: float, overhead_us: float = 0.0) -> None:
        """Record the time of a call, and what the turn cost beyond it."""
        if self.outcome is not None:
            return
        seen = self.seen
        self._spent_us += seen.usual_us(name, us) + overhead_us + seen.cost_us
        self._timed += 1
        if seen.add(name, us):
            if name == NATIVE:
                self._end_if_too_expensive(expected_us=self._least_us())
            self._drop_if_cold_and_hopeless()
        else:
            native_us = seen.native_us
            first = name != NATIVE and len(seen.warm_us[name]) == 1
            if first and native_us is not None and us + seen.cost_us > WARM_DROP * native_us:
                self.drop(name)
            else:
                self._end_round()
        self._end_if_too_expensive()

    def _drop_if_cold_and_hopeless(self) -> None:
        native_us, cold_us, warm_us = self.seen.native_us, self.seen.cold_us, self.seen.warm_us
        if native_us is None:
            return
        for name in list(self.live):
            if cold_us.get(name, 0.0) > COLD_DROP * native_us + COLD_US and not warm_us[name]:
                self.drop(name)

    def _end_round(self) -> None:
        """Judge, if everybody who is still in the race has had a turn."""
        if self.outcome is None and not self._order:
            due = self.live if self._proven else [NATIVE, *self.live]
            if self.seen.end(due):
                self._judge()

    def _least_us(self) -> float:
        """What it costs at least to compare one candidate with native."""
        check_us = 0.0 if self.live and self.live[0] in self.seen.cold_us else CHECK_US
        return (2 * MIN_ROUNDS + (check_us > 0.0)) * MACHINERY_US + check_us

    def _end_if_too_expensive(self, expected_us: float = 0.0) -> None:
        native_us = self.seen.native_us
        if native_us is None:
            return
        self.excess_us = self._spent_us - self._timed * native_us
        allowed_us = ALLOWANCE_CALLS * native_us + ALLOWANCE_US
        self.beyond_us = max(self.beyond_us, self.excess_us - allowed_us)
        if self._plan_us + self.excess_us + expected_us > allowed_us and self.outcome is None:
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
        elif self.seen.this:
            self._end_round()

    # ---- judging ------------------------------------------------------------------------------------------------

    def gain(self, name: str, over: str = NATIVE) -> tuple[float, float]:
        """(median, robust standard error) of ln(t_over / t_name): `Rounds.gain`."""
        return self.seen.gain(name, over)

    def belief(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) of its ln(t_native / t): `Rounds.belief`."""
        return self.seen.belief(name)

    def measured(self) -> dict[str, Measured]:
        """What was measured of each candidate so far: `Rounds.measured`."""
        return self.seen.measured()

    def _judge(self) -> None:
        n = len(self.seen.done)
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
        seen = self.seen
        ran = seen.cold_us.keys() - {NATIVE}
        native_us = seen.native_us or math.inf
        known = {
            name: self.belief(name)
            for name in self.live
            if not ran or seen.gains(name) or seen.cold_us.get(name, math.inf) <= native_us
        }
        sure = {name: mean - sd for name, (mean, sd) in known.items()}
        best = max(sure, key=sure.__getitem__, default=None)
        return best if best is not None and sure[best] > MIN_GAIN else None

    def _end(self, why: str) -> None:
        """The trial is over without a clear winner: what is known decides."""
        best = self._leader() if self._proven else self._best()
        if best is not None and self._spoilt and not self.seen.gains(best):
            best = None  # the model knows of algorithms, and not of values that spoil their results
        compared = self.rounds if best is None else len(self.seen.gains(best))
        word = "the best so far" if compared >= MIN_ROUNDS else "the model decides"
        if best is None:
            word = "nothing was clearly faster"
        short = compared < MIN_ROUNDS or (best is None and bool(self._spoilt))
        self._settle(best or NATIVE, f"{word} after {why}", cut_short=short)

    def _settle(self, name: str, reason: str, *, cut_short: bool = False) -> None:
        measured = self.measured()
        gain = 1.0 if name == NATIVE else measured[name].gain if name in measured else None
        self.outcome = Outcome(name, gain, self.rounds, reason, cut_short, measured)

    def hopeless(self) -> list[str]:
        """Candidates that were out after their first call: they count as `HOPELESS`."""
        out = [name for name in self.priors if name not in self.live and not self._unusable.get(name)]
        return [name for name in out if name in self.seen.cold_us and not self.seen.warm_us[name]]
