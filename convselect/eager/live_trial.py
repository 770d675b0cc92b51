"""A choice on trial: real calls decide whether the model was right (policy "verify"), and go on checking now and then
(`audit`).

Every call returns a right result; only which algorithm computes it changes from call to call until the trial ends. A
candidate's first result is compared with native's for the same operands, and native's is returned. The rules are
`trial.Trial`'s; here is what running them on real calls needs: a clock that never waits (on a GPU, events that are read
when they have passed), one timed call at a time, and no trial if the same call must give the same bits: in
checkpointed code, gradient checks, CUDA graph capture. There native runs, untimed.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.trial import MAX_ROUNDS, MIN_ROUNDS, NOISE_FLOOR, Outcome, Trial, Z
from convselect.kernels.pool import BY_NAME
from convselect.measure.rows import PLAN_COST_US
from convselect.store import process

Run = Callable[[str], "Tensor | None"]
"""Runs the call at hand by the algorithm of this name; None if it could not, and native has to."""

ERROR_BOUNDS = {"float64": 1e-11, "float32": 2e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Relative L2 distance from native's result beyond which a candidate's is a mistake: ten times the loosest grade."""
LOSS = 0.01
"""ln(t / t_native) from which an audit gives a choice up."""
_REPEATABLE = frozenset({"torch.utils.checkpoint", "torch.autograd.gradcheck"})
_wall_ns, _thread_ns = timing.SYSTEM_CLOCK
DISTURBED, DISTURBED_US = 1.5, 500.0
"""A call on several threads was interrupted if its time is this much more than what its own thread computed."""
MOST_DISTURBED = 8
"""After this many of those in a row that is how this machine is."""
_forks = 0


class LiveTrial:
    """The trial of one problem on real calls; once it is settled, the watch over its choice if audits are asked for.

    Args:
        provisional: what is chosen if no trial can be held: in graphs, in deterministic mode.
        candidates: for a trial; if empty, `provisional` is settled, and only watched.
        audit: once it is settled, one call in `audit` is timed against native; 0 for none.
        on_settled: called once with (choice, outcome, store_result), and again if an audit gives the choice up.
    """

    __slots__ = (
        "_audit",
        "_calls",
        "_disturbed",
        "_forks",
        "_gains",
        "_lock",
        "_native_us",
        "_on_settled",
        "_pending",
        "choice",
        "final",
        "problem",
        "provisional",
        "store_result",
        "trial",
    )  # fmt: skip

    def __init__(
        self,
        problem: ConvProblem,
        provisional: Choice,
        candidates: Sequence[str],
        *,
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
        self.trial = Trial(candidates, cost_us=PLAN_COST_US[problem.direction], seed=seed)
        self._audit = audit
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._forks = _forks
        self._pending: tuple[str, Any, Any, Any, Tensor | None] | None = None
        self._calls = 0
        self._disturbed = 0
        self._native_us: float | None = None
        self._gains: list[float] = []

    @property
    def current(self) -> Choice:
        """What it was settled on, or what is chosen if no trial can be held."""
        return self.choice or self.provisional

    def params_of(self, name: str) -> Mapping[str, Any] | None:
        """Parameters that an algorithm runs with here; None for its default. Tuned ones belong to what was tuned."""
        return self.provisional.params if name == self.provisional.algorithm else None

    def run(self, run: Run, device: torch.device) -> Tensor:
        """The call at hand, by whoever's turn it is."""
        if self._forks != _forks:  # another thread of the parent may have held it
            self._lock, self._forks, self._pending = threading.Lock(), _forks, None
        if not self._lock.acquire(blocking=False):
            return self._otherwise(run)  # two calls at once would time each other
        try:
            name = self._turn(device)
            if name is None:
                return self._otherwise(run)
            algorithm = BY_NAME[name]
            if algorithm.may_be_unready and not algorithm.ready(self.problem, self.params_of(name)):
                self._postpone(name)
                return self._otherwise(run)
            return self._timed(name, run, device)
        finally:
            self._lock.release()

    def _otherwise(self, run: Run) -> Tensor:
        """What runs untimed: the choice, if there is one."""
        name = NATIVE if self.choice is None else self.choice.algorithm
        result = self._tried(name, run)
        if result is None:
            result = run(NATIVE)
        assert result is not None
        return result

    # ---- whose turn it is ---------------------------------------------------------------------------------------

    def _turn(self, device: torch.device) -> str | None:
        if self._pending is not None:
            name, first, last, done, error = self._pending
            if not done.query():
                return None
            self._pending = None
            if error is None or self._is_right(name, float(error)):
                self._record(name, 1e3 * first.elapsed_time(last))
                if error is not None:
                    self.trial.charge(1e3 * last.elapsed_time(done))
        if self.choice is None:
            if _must_repeat(device):
                return None
            return self.trial.turn()
        self._calls += 1
        # Two calls in a row: native's, then the choice's.
        if self.choice.algorithm == NATIVE or not self._audit or self._calls % self._audit > 1 or _must_repeat(device):
            return None
        return NATIVE if self._calls % self._audit == 0 else self.choice.algorithm

    def _postpone(self, name: str) -> None:
        if self.choice is None:
            self.trial.postpone(name)

    # ---- timing -------------------------------------------------------------------------------------------------

    def _timed(self, name: str, run: Run, device: torch.device) -> Tensor:
        new = name != NATIVE and self.choice is None and self.trial.is_cold(name)
        native: Tensor | None = None
        if device.type == "cuda":
            events = timing.cuda_events()
            first, last = events.event(), events.event()
            first.record()
            result = self._tried(name, run)
            if result is not None:
                last.record()
                self._pending = (name, first, last, last, None)
                if new:
                    native = run(NATIVE)
                    assert native is not None
                    # Read when all has passed: nothing waits for it.
                    error = torch.empty((), pin_memory=torch.cuda.is_available())
                    error.copy_(_distance(result, native), non_blocking=True)
                    done = events.event()
                    done.record()
                    self._pending = (name, first, last, done, error)
                return result if native is None else native
        else:
            thread, wall = _thread_ns(), _wall_ns()
            result = self._tried(name, run)
            if result is not None:
                wall_us, thread_us = (_wall_ns() - wall) / 1e3, (_thread_ns() - thread) / 1e3
                us = self._undisturbed(wall_us, thread_us)
                if new:
                    native = run(NATIVE)
                    assert native is not None
                    if self._is_right(name, float(_distance(result, native))):
                        self._record(name, thread_us if us is None else us)  # of a first call little is expected
                        self.trial.charge((_wall_ns() - wall) / 1e3 - wall_us)
                    return native
                if us is None:
                    self._postpone(name)
                else:
                    self._record(name, us)
                return result
        native = run(NATIVE)
        assert native is not None
        return native

    def _undisturbed(self, wall_us: float, thread_us: float) -> float | None:
        """What a call took, without what neighbours on the machine took from it; None if that cannot be told.

        On one thread it is the time that thread computed. On several it is the time that passed, and a call is
        dismissed during which its own thread stood still: the others wait for it.
        """
        if self.problem.threads == 1:
            return thread_us
        if wall_us > DISTURBED * thread_us + DISTURBED_US and self._disturbed < MOST_DISTURBED:
            self._disturbed += 1
            return None
        self._disturbed = 0
        return wall_us

    def _is_right(self, name: str, error: float) -> bool:
        """Judge a candidate by its first result; what is wrong never runs again."""
        if not math.isfinite(error):
            self._postpone(name)  # a NaN or an infinity somewhere: nothing can be said
            return False
        if error <= ERROR_BOUNDS[self.problem.dtype]:
            return True
        warn_once(
            f"wrong:{name}",
            f"convselect: {name} is wrong on {self.problem}: its relative error is {error:.1e}. It is not used there; "
            "please report this.",
        )
        self.trial.drop(name)
        self._settle_if_done()
        return False

    def _tried(self, name: str, run: Run) -> Tensor | None:
        """The result, or None if this algorithm has none to offer; after a failure it is out of the race."""
        if name == NATIVE:
            return run(name)  # its errors are the user's
        try:
            result = run(name)
        except Exception as error:
            if is_out_of_memory(error):
                self.store_result = False
            else:
                warn_once(
                    f"failed:{name}", f"convselect: {name} failed on {self.problem} ({error!r}); native runs instead."
                )
            if self.choice is None:
                self.trial.drop(name)
                self._settle_if_done()
            return None
        if result is None:
            self._postpone(name)  # a NaN or an infinity in this call's operands says nothing about the next one's
        return result

    def _record(self, name: str, us: float) -> None:
        if self.choice is None:
            self.trial.record(name, us)
            self._settle_if_done()
        elif name == NATIVE:
            self._native_us = us
        elif self._native_us is not None:
            self._gains.append(math.log(self._native_us / (us + PLAN_COST_US[self.problem.direction])))
            self._native_us = None
            self._judge_again()

    def _settle_if_done(self) -> None:
        outcome = self.trial.outcome
        if outcome is None:
            return
        params = self.params_of(outcome.algorithm)
        self._settle(Choice(outcome.algorithm, "verify", params, outcome.gain), outcome)

    def _settle(self, choice: Choice, outcome: Outcome) -> None:
        self.choice = choice
        if not self._audit or choice.algorithm == NATIVE:
            self.final = choice
        if self._on_settled is not None:
            self._on_settled(choice, outcome, self.store_result and not outcome.cut_short)

    def _judge_again(self) -> None:
        """Back to native if the choice is clearly slower by now."""
        gains = self._gains = self._gains[-MAX_ROUNDS:]
        n = len(gains)
        if n < MIN_ROUNDS:
            return
        ordered = sorted(gains)
        middle = ordered[n // 2]
        deviation = max(1.4826 * sorted(abs(g - middle) for g in gains)[n // 2], NOISE_FLOOR)
        if middle + Z[n - MIN_ROUNDS] * 1.2533 * deviation / math.sqrt(n) < -LOSS:
            assert self.choice is not None
            reason = f"{self.choice.algorithm} was {math.exp(-middle):.2f} times slower than native in {n} audits"
            self._settle(Choice(NATIVE, "verify", None, 1.0), Outcome(NATIVE, 1.0, n, reason))


def keep(problem: ConvProblem, settings: Settings, choice: Choice, samples: int) -> None:
    """Let later processes know what was found out."""
    from convselect.store.choices import Decision

    revision = BY_NAME[choice.algorithm].revision
    process.remember(
        Decision(
            problem,
            settings.budgets,
            choice.algorithm,
            choice.params,
            choice.source,
            choice.predicted_gain,
            revision,
            samples,
        )
    )


def _distance(result: Tensor, native: Tensor) -> Tensor:
    """Relative L2 distance; 0 if both are all zeros, NaN if something is not finite."""
    with torch.no_grad():
        wide = torch.float64 if native.dtype == torch.float64 else torch.float32
        result, native = result.detach().to(wide), native.detach().to(wide)
        size = torch.linalg.vector_norm(native)
        distance: Tensor = torch.linalg.vector_norm(result - native) / size.clamp_min(torch.finfo(wide).tiny)
        return distance


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, in any of the ways in which PyTorch says it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no exception of its own; cuBLAS and cuDNN have none either.
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    )


def _must_repeat(device: torch.device) -> bool:
    """Whether the call at hand has to give the bits that another one gave, or must not be timed."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _REPEATABLE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
