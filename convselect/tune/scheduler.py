"""Which problem of a network is searched next: the one whose next round is expected to gain most.

A network's latency is the sum over its problems of calls times time. Objectives, after Ansor's f1 to f4:

    latency      f1   the sum over all networks
    target       f2   the same, but a latency below the network's target counts as the target: nothing to gain there
    speedup      f3   minus the geometric mean of the networks' speed-ups
    early-stop   f4   f1, without the problems that have not become faster for some rounds

How much a problem's time g will fall in its next round is estimated from three things: how much it fell in the last
rounds; that it might go on falling like 1 / rounds; and that it might come near the speed, in operations per second,
that a similar problem has reached. The last two are optimistic, so that a few unlucky rounds do not end the search of
a problem. First each problem gets one round; then the problem with the largest expected gain of the objective is next,
now and then a random one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convselect.base.problem import ConvProblem
from convselect.measure.rows import kernel_class
from convselect.tune.search import Search

OBJECTIVES = ("latency", "target", "speedup", "early-stop")
ALPHA, BETA, EPSILON = 0.2, 2.0, 0.05
"""Weight of the recent gain against the optimistic estimate; a problem's time is hoped to fall to this many times the
time at a similar problem's speed; how often a random problem is next."""
WINDOW, PATIENCE, LEAST_GAIN = 3, 5, 0.005
"""Rounds over which the recent gain is taken; a problem rests after PATIENCE rounds with less gain than LEAST_GAIN."""


@dataclass
class Task:
    """One problem of one or more networks, with its search.

    Attributes:
        calls: network -> how often it computes this problem.
        default_us: time of the program that runs without tuning; infinite until it is measured.
        history: best time after each round, in us.
        trials: programs measured.
    """

    search: Search
    calls: Mapping[str, int]
    default_us: float = math.inf
    history: list[float] = field(default_factory=list)
    trials: int = 0
    exhausted: bool = False

    @property
    def problem(self) -> ConvProblem:
        return self.search.problem

    @property
    def best_us(self) -> float:
        """The shortest time known, including the default's."""
        return min(self.search.best_us, self.default_us)

    def stalled(self, patience: int = PATIENCE) -> bool:
        """Whether the last rounds gained next to nothing."""
        if len(self.history) <= patience:
            return False
        return self.history[-1] > self.history[-1 - patience] * (1 - LEAST_GAIN)


@dataclass(frozen=True)
class Objective:
    """The function of every task's time that is to be minimised.

    Attributes:
        kind: one of `OBJECTIVES`.
        targets_us: network -> latency that is good enough; for "target".

    Raises:
        ValueError: if the kind is unknown.
    """

    kind: str = "latency"
    targets_us: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, not {self.kind!r}")

    def __call__(self, tasks: Sequence[Task], times_us: Sequence[float]) -> float:
        """Its value if these were the tasks' times: in us; for "speedup" a number below 0."""
        now = latencies(tasks, times_us)
        if self.kind == "target":
            return sum(max(us, self.targets_us.get(network, 0.0)) for network, us in now.items())
        if self.kind == "speedup":
            before = latencies(tasks, [task.default_us for task in tasks])
            return -math.exp(sum(math.log(before[n] / now[n]) for n in now) / len(now))
        return sum(now.values())


def latencies(tasks: Sequence[Task], times_us: Sequence[float]) -> dict[str, float]:
    """Network -> sum of calls times time, in us."""
    sums: dict[str, float] = {}
    for task, us in zip(tasks, times_us, strict=True):
        for network, calls in task.calls.items():
            sums[network] = sums.get(network, 0.0) + calls * us
    return sums


class EqualSplit:
    """Every problem in turn, for comparison and for networks of one problem."""

    def __init__(self, tasks: Sequence[Task], *, patience: int | None = None) -> None:
        self.tasks = tasks
        self._patience = patience

    def next(self) -> int | None:
        """The index of the next task; None if all tasks are exhausted or stalled."""
        open_ = self._open()
        return min(open_, key=lambda i: len(self.tasks[i].history)) if open_ else None

    def expected_gain(self) -> float:
        """NaN: unknown."""
        return math.nan

    def _open(self) -> list[int]:
        return [
            i
            for i, task in enumerate(self.tasks)
            if not task.exhausted and not (self._patience is not None and task.stalled(self._patience))
        ]


class Scheduler(EqualSplit):
    """Picks the problem whose next round is expected to gain most.

    Args:
        patience: rounds without a gain after which a problem rests; None: never, but under "early-stop" `PATIENCE`.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        objective: Objective | None = None,
        source: random.Random | None = None,
        *,
        alpha: float = ALPHA,
        beta: float = BETA,
        epsilon: float = EPSILON,
        patience: int | None = None,
    ) -> None:
        self.objective = objective or Objective()
        if self.objective.kind == "early-stop" and patience is None:
            patience = PATIENCE
        super().__init__(tasks, patience=patience)
        self._source = source or random.Random(0)
        self._alpha, self._beta, self._epsilon = alpha, beta, epsilon
        self._classes = [kernel_class(task.problem) for task in tasks]

    def next(self) -> int | None:
        open_ = self._open()
        fresh = [i for i in open_ if not self.tasks[i].history]
        if fresh or not open_:
            return fresh[0] if fresh else None
        gains = {i: self.gain(i) for i in open_}
        if self.objective.kind == "target" and max(gains.values()) <= 0:
            return None  # every network has reached its target
        if self._source.random() < self._epsilon:
            return self._source.choice(open_)
        return max(gains, key=gains.__getitem__)

    def expected_gain(self) -> float:
        """By how much the objective is hoped to fall if every problem has one more round; NaN in the first rounds."""
        if any(not task.history for task in self.tasks):
            return math.nan
        return sum(self.gain(i) for i in self._open())

    def gain(self, i: int) -> float:
        """By how much the objective is expected to fall in a round of this task."""
        times = [task.best_us for task in self.tasks]
        before = self.objective(self.tasks, times)
        times[i] = max(times[i] - self.fall(i), 1e-3)
        return before - self.objective(self.tasks, times)

    def fall(self, i: int) -> float:
        """By how many us a task's time is expected to fall in its next round."""
        task = self.tasks[i]
        g, rounds = task.best_us, len(task.history)
        back = min(WINDOW, rounds - 1)
        recent = (task.history[-1 - back] - task.history[-1]) / back if back else 0.0
        hoped = g / rounds
        flops = task.problem.flops
        alike = [
            other.problem.flops / other.best_us
            for k, other in enumerate(self.tasks)
            if k != i and self._classes[k] == self._classes[i] and math.isfinite(other.best_us)
        ]
        if alike:
            # However many rounds it had, it should reach half the speed of a similar problem.
            hoped = max(hoped, g - self._beta * flops / max(alike))
        return self._alpha * recent + (1 - self._alpha) * hoped
