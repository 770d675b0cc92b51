"""A choice on trial: real calls decide whether the model was right (policy "verify"), and go on checking now and then
(`audit`).

Every call returns a right result; only which algorithm computes it changes from call to call until the trial ends. A
candidate's first result is checked at random places against sums in float64 (on a GPU against native's, which is
returned). The rules are `trial.Trial`'s; here is what running them on real calls needs: one clock for everything that a
decision weighs, which never waits (on a GPU, events that are read when they have passed), one timed call at a time, and
no trial if the same call must give the same bits: in checkpointed code, gradient checks, CUDA graph capture. There
native runs, untimed.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from convselect.base import timing
from convselect.base.lru import on_clear
from convselect.base.problem import ConvProblem
from convselect.base.shortage import is_out_of_memory
from convselect.base.warnings import warn_once
from convselect.choice.account import Account
from convselect.choice.audit import Audits
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.outcome import OnTrial, Outcome, Prior
from convselect.choice.trial import Trial
from convselect.eager import first_results
from convselect.eager.repeatable import must_repeat
from convselect.kernels import _library
from convselect.kernels.pool import BY_NAME
from convselect.measure.plan_cost import plan_cost_us

Run = Callable[[str], "Tensor | None"]
"""Runs the call at hand by the algorithm of this name; None if it could not, and native has to."""

Check = Callable[[str, Tensor, int], bool]
"""Whether (algorithm, its result for the call at hand) is right at this many random places."""

_wall_ns, _thread_ns = timing.SYSTEM_CLOCK
DISTURBED, DISTURBED_US = 1.5, 500.0
"""A call on several threads was interrupted if its time is this much more than what its own thread computed."""
MOST_DISTURBED = 8
"""After this many of those in a row that is how this machine is."""
FIRST_PLACES = 24
"""Outputs of a candidate's first result that are checked."""
UNSEEN_US = 15.0
"""What a turn costs before and after what is timed of it: a call that goes through Python."""
OWN_FRAMES = 5
"""From `_turn` up: `run`, `execute._on_trial`, `execute`, and the plan's."""
WAIT_CALLS = 16
"""Calls of native after which a trial that may not begin yet asks again."""
account = Account()
on_clear(account.clear)
_forks = 0


class LiveTrial:
    """The trial of one problem on real calls; once it is settled, the watch over its choice if audits are asked for.

    Args:
        provisional: what is chosen if no trial can be held: in graphs, in deterministic mode.
        candidates: what is predicted of them, the most promising first; if empty, `provisional` is settled, and only
            watched.
        favourite: the candidate that runs from the very first call on; None if native has the first.
        plan_us: what it took to come to this trial.
        audit: once it is settled, one call in `audit` is timed against native; 0 for none.
        on_settled: called once with (choice, outcome, store_result), and again if an audit gives the choice up.
    """

    __slots__ = (
        "_audit",
        "_audits",
        "_begun",
        "_calls",
        "_disturbed",
        "_forks",
        "_lock",
        "_now_ns",
        "_on_settled",
        "_pending",
        "choice",
        "final",
        "problem",
        "provisional",
        "store_result",
        "trial",
        "waits",
    )  # fmt: skip

    def __init__(
        self,
        problem: ConvProblem,
        provisional: Choice,
        candidates: Mapping[str, Prior] | Sequence[str],
        *,
        favourite: str | None = None,
        plan_us: float = 0.0,
        audit: int = 0,
        on_settled: Callable[[Choice, Outcome, bool], None] | None = None,
    ) -> None:
        self.problem = problem
        self.provisional = provisional
        self.choice: Choice | None = None if candidates else provisional
        """What was settled on."""
        self.final: Choice | None = None
        """The same, once nothing will change it any more: whoever holds this object may hold that instead."""
        self.store_result = True
        """False if a candidate was left out for a temporary reason."""
        # From the sizes alone: Python hashes texts differently in every process.
        seed = hash(problem[1:17])
        cost_us = partial(plan_cost_us, problem, names=tuple(candidates))
        self.trial = Trial(candidates, favourite=favourite, cost_us=cost_us, plan_us=plan_us, seed=seed)
        self.waits = 0
        """Calls of native before the trial goes on. They have been counted as its calls already."""
        # The one clock of this decision. On one thread, time of that thread, which neighbours on the machine disturb
        # least; on several, time that passes.
        self._now_ns = _thread_ns if problem.threads == 1 else _wall_ns
        self._audit = audit
        self._begun = False
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._forks = _forks
        self._pending: tuple[str, Any, Any, Any, Tensor | None] | None = None
        self._calls = 0
        self._disturbed = 0
        self._audits = Audits() if audit else None

    @property
    def current(self) -> Choice:
        """What it was settled on, or what is chosen if no trial can be held."""
        return self.choice or self.provisional

    @property
    def on_trial(self) -> OnTrial | None:
        """How the trial stands; None once it is settled. Asking changes nothing."""
        if self.choice is not None:
            return None
        stands = self.trial.state()
        if not self._must_ask() or self._allowed():
            return stands
        return replace(stands, waiting=True, leader=NATIVE)  # if no trial may begin to the end, native runs

    def params_of(self, name: str) -> Mapping[str, Any] | None:
        """Parameters that an algorithm runs with here; None for its default. Tuned ones belong to what was tuned."""
        return self.provisional.params if name == self.provisional.algorithm else None

    def run(self, run: Run, device: torch.device, is_right: Check) -> Tensor:
        """The call at hand, by whoever's turn it is."""
        if self.waits > 0:
            self.waits -= 1
            return self._otherwise(run)
        if self._forks != _forks:  # another thread of the parent may have held it
            self._lock, self._forks, self._pending = threading.Lock(), _forks, None
        if not self._lock.acquire(blocking=False):
            return self._otherwise(run)  # two calls at once would time each other
        try:
            begun_ns, trial = self._now_ns(), self.trial
            before_us, native_us = trial.excess_us, trial.native_us
            name = self._turn(device)
            if name is None:
                return self._otherwise(run)
            algorithm = BY_NAME[name]
            if algorithm.may_be_unready and not algorithm.ready(self.problem, self.params_of(name)):
                self._postpone(name)
                return self._otherwise(run)
            try:
                if device.type == "cuda":
                    return self._timed_on_gpu(name, run)
                return self._timed(name, run, is_right, begun_ns)
            finally:
                account.excess_us += trial.excess_us - before_us
                if native_us is None and trial.native_us is not None:
                    account.begun(trial.native_us, timing.computed_us())
                if trial.beyond_us > 0 and trial.native_us is not None:
                    account.lost(trial.beyond_us, trial.native_us)
        finally:
            self._lock.release()

    def _otherwise(self, run: Run) -> Tensor:
        """What runs untimed: the choice, if there is one."""
        name = NATIVE if self.choice is None else self.choice.algorithm
        algorithm = BY_NAME[name]
        ready = not algorithm.may_be_unready or algorithm.ready(self.problem, self.params_of(name))
        result = self._tried(name, run) if ready else None
        if result is None:
            result = run(NATIVE)
        assert result is not None
        return result

    # ---- whose turn it is ---------------------------------------------------------------------------------------

    def _turn(self, device: torch.device) -> str | None:
        if self._pending is not None:
            timed, first, last, done, error = self._pending
            if not done.query():
                return None
            self._pending = None
            if error is None or self._is_right(timed, float(error)):
                self._record(timed, 1e3 * first.elapsed_time(last))
                if error is not None:
                    self.trial.charge(1e3 * last.elapsed_time(done))
        if self.choice is None:
            if must_repeat(device, OWN_FRAMES):
                return None
            if not self._begun and not self._may_begin():
                self.waits = WAIT_CALLS
                self.trial.refuse(WAIT_CALLS + 1)
                self._settle_if_done()
                return None
            name = self.trial.turn()
            if name is None:
                self._settle_if_done()
            return name
        self._calls += 1
        # Two calls in a row: native's, then the choice's.
        if self.choice.algorithm == NATIVE or not self._audit or self._calls % self._audit > 1:
            return None
        if must_repeat(device, OWN_FRAMES):
            return None
        return NATIVE if self._calls % self._audit == 0 else self.choice.algorithm

    def _postpone(self, name: str) -> None:
        if self.choice is None:
            self.trial.postpone(name)

    def _may_begin(self) -> bool:
        """Whether the process has time left for this trial. Native's first turn costs nothing; a favourite's may."""
        if not self._must_ask():
            return True
        if not self._allowed():
            return False
        self._begun = self.trial.native_us is not None
        return True

    def _must_ask(self) -> bool:
        return not self._begun and (self.trial.native_us is not None or self.trial.favourite_is_next)

    def _allowed(self) -> bool:
        return account.allows(timing.computed_us(), self.problem.threads)

    # ---- timing -------------------------------------------------------------------------------------------------

    def _timed(self, name: str, run: Run, is_right: Check, begun_ns: int) -> Tensor:
        """The result of this turn; what it took goes to the trial, and everything around it since `begun_ns`."""
        now_ns, trial = self._now_ns, self.trial
        on_trial = self.choice is None
        new = on_trial and name != NATIVE and trial.is_cold(name)
        several = self.problem.threads > 1
        thread_ns = _thread_ns() if several else 0
        start_ns = now_ns()
        result = self._tried(name, run)
        end_ns = now_ns()
        us = (end_ns - start_ns) / 1e3
        undisturbed = self._undisturbed(us, (_thread_ns() - thread_ns) / 1e3) if several and result is not None else us
        if result is None:
            # An infinity or a NaN in the operands, or a failure: native computes the call, and this was in vain.
            if on_trial:
                trial.unusable(name, (end_ns - begun_ns) / 1e3)
                self._settle_if_done()
            result = run(NATIVE)
            assert result is not None
            return result
        before_us = (start_ns - begun_ns) / 1e3
        if new:
            right = is_right(name, result, FIRST_PLACES)
            before_us += (now_ns() - end_ns) / 1e3
            if not right:
                del result
                trial.fail(name)
                trial.charge(us + before_us)
                self._settle_if_done()
                result = run(NATIVE)
                assert result is not None
                return result
        overhead_us = before_us + UNSEEN_US
        if undisturbed is None and not new:
            self._postpone(name)
            trial.charge(overhead_us)
            self._settle_if_done()
        else:
            self._record(name, us if undisturbed is None else undisturbed, overhead_us)
        return result

    def _timed_on_gpu(self, name: str, run: Run) -> Tensor:
        new = name != NATIVE and self.choice is None and self.trial.is_cold(name)
        events = timing.cuda_events()
        first, last = events.event(), events.event()
        first.record()
        result = self._tried(name, run)
        if result is None:
            self._postpone(name)
        else:
            last.record()
            self._pending = (name, first, last, last, None)
            if not new:
                return result
        native = run(NATIVE)
        assert native is not None
        if result is not None:
            # Read when all has passed: nothing waits for it.
            error = torch.empty((), pin_memory=torch.cuda.is_available())
            error.copy_(first_results.distance(result, native), non_blocking=True)
            done = events.event()
            done.record()
            self._pending = (name, first, last, done, error)
        return native

    def _undisturbed(self, us: float, thread_us: float) -> float | None:
        """What a call took, without what neighbours on the machine took from it; None if that cannot be told: on
        several threads, if its own thread stood still meanwhile, since the others wait for it."""
        if us > DISTURBED * thread_us + DISTURBED_US:
            self._disturbed += 1
            return us if self._disturbed > MOST_DISTURBED else None
        self._disturbed = 0
        return us

    def _is_right(self, name: str, error: float) -> bool:
        """Judge a candidate by its first result; what is wrong never runs again."""
        if not math.isfinite(error):
            self._postpone(name)  # a NaN or an infinity somewhere: nothing can be said
            return False
        if first_results.is_near(name, error, self.problem):
            return True
        self.trial.drop(name)
        self._settle_if_done()
        return False

    def _tried(self, name: str, run: Run) -> Tensor | None:
        """The result, or None if this algorithm has none to offer; after a failure it is out of the race."""
        if name == NATIVE:
            return run(name)  # its errors are the user's
        result = None
        try:
            result = run(name)
        except Exception as error:
            if is_out_of_memory(error):
                self.store_result = False
                _library.give_back()
            else:
                warn_once(
                    f"failed:{name}", f"convselect: {name} failed on {self.problem} ({error!r}); native runs instead."
                )
            if self.choice is None:
                self.trial.fail(name)
                self._settle_if_done()
        return result

    def _record(self, name: str, us: float, overhead_us: float = 0.0) -> None:
        if self.choice is None:
            self.trial.record(name, us, overhead_us)
            if self.trial.outcome is not None:
                self._settle_if_done()
        elif (audits := self._audits) is None:
            pass
        elif name == NATIVE:
            audits.native(us)
        elif audits.native_us is not None:
            slower = audits.chosen(us + plan_cost_us(self.problem, audits.native_us, (name,)))
            if slower is not None:
                self.leave_to_native(f"{name} {slower}")

    def _settle_if_done(self) -> None:
        outcome = self.trial.outcome
        if outcome is None or self.choice is not None:
            return
        self.waits = 0
        name, prior = outcome.algorithm, self.trial.priors.get(outcome.algorithm)
        self._settle(
            Choice(
                name,
                "model" if outcome.cut_short else "verify",
                self.params_of(name),
                1.0 if prior is None else math.exp(prior.mean),
                measured=outcome.measured.get(name),
            ),
            outcome,
        )

    def _settle(self, choice: Choice, outcome: Outcome) -> None:
        self.choice = choice
        if not self._audit or choice.algorithm == NATIVE:
            self.final = choice
        if self._on_settled is not None:
            self._on_settled(choice, outcome, self.store_result and not outcome.cut_short)

    @property
    def saved_us(self) -> float:
        """What the choice saves of native's time in a call, in us, as measured, else as predicted. What leaving native
        costs is not taken off."""
        native_us, gain = self.trial.native_us, self.current.gain
        if native_us is None or not gain:
            return 0.0
        cost_us = plan_cost_us(self.problem, native_us, (self.current.algorithm,))
        return native_us * (1 - 1 / gain) + cost_us

    def leave_to_native(self, reason: str) -> None:
        """Settle on native after all."""
        self._settle(Choice(NATIVE, "verify", None, 1.0), Outcome(NATIVE, 1.0, self.trial.rounds, reason, False, {}))


def _count_fork() -> None:
    global _forks
    _forks += 1
    account.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
