"""What goes into a trial and what comes out of it (`trial.py`): predictions, gains, how it stands, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
