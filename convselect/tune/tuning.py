"""The tuning loop: the scheduler picks a problem, its search proposes programs, the runner measures them, the cost
model learns. In the end the best programs are compared again, and the winner is written to the store, where the user's
next run finds it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE, choose
from convselect.kernels.pool import BY_NAME
from convselect.machine import environment
from convselect.model import loaded
from convselect.store import process
from convselect.store.decision import Decision
from convselect.tune.cost_model import CostModel
from convselect.tune.programs import Program, Programs
from convselect.tune.records import Log, Measured
from convselect.tune.runner import Runner, Verdict, params_of
from convselect.tune.scheduler import EqualSplit, Objective, Scheduler, Task, latencies
from convselect.tune.search import Evolution, Search

BATCH = 16
"""Programs per round."""
FINALISTS = 5
"""Programs per problem that are compared with the default in the end."""

STRATEGIES = ("evolution", "random")


class Tuning:
    """A search over several problems.

    Args:
        problems: per problem its programs, network -> calls, and the default: the program that runs without tuning.
        model: the cost model; None for random search.
        equal_split: search every problem in turn instead of the one with the largest expected gain.
        log: keeps the measurements. Those of earlier searches in it are used unless `resume` is False.
    """

    def __init__(
        self,
        problems: Sequence[tuple[Programs, Mapping[str, int], Program]],
        runner: Runner,
        *,
        model: CostModel | None = None,
        objective: Objective | None = None,
        equal_split: bool = False,
        patience: int | None = None,
        batch: int = BATCH,
        seed: int = 0,
        log: Log | None = None,
        resume: bool = True,
    ) -> None:
        self.runner, self.model, self.batch = runner, model, batch
        self._log = log
        self._defaults = [default for _, _, default in problems]
        self.tasks: list[Task] = []
        for i, (programs, calls, _) in enumerate(problems):
            source = random.Random(f"{seed} {i}")
            search = Search(programs, source) if model is None else Evolution(programs, source, model)
            self.tasks.append(Task(search, calls))
        objective = objective or Objective()
        self.scheduler = (
            EqualSplit(self.tasks, patience=patience)
            if equal_split
            else Scheduler(self.tasks, objective, random.Random(f"{seed} scheduler"), patience=patience)
        )
        self.trials = 0
        self.resumed = 0
        self.wrong: list[tuple[ConvProblem, Program, str]] = []
        if log is not None and resume:
            self._resume(log)

    def _resume(self, log: Log) -> None:
        before = log.read()
        for i, task in enumerate(self.tasks):
            known = [m for p, m in before.get(task.problem, {}).items() if task.search.programs.is_valid(p)]
            if known:
                self._learn(i, known)
                self.resumed += len(known)

    def default(self, i: int) -> Program:
        """The program that runs without tuning."""
        return self._defaults[i]

    @property
    def latency_us(self) -> float:
        """Sum over all networks of calls times the best time known; infinite until every problem was measured once."""
        return sum(latencies(self.tasks, [task.best_us for task in self.tasks]).values())

    @property
    def default_latency_us(self) -> float:
        """The same without tuning."""
        return sum(latencies(self.tasks, [task.default_us for task in self.tasks]).values())

    def step(self, most: int | None = None) -> int:
        """Run one round of one problem. Returns the number of programs measured, 0 if nothing is left to do.

        Args:
            most: the most programs to measure; the defaults of a problem are measured together even if they are more.
        """
        while (i := self.scheduler.next()) is not None:
            task = self.tasks[i]
            if self.model is not None and task.history:
                self.model.fit({t.problem: t.search.times_us for t in self.tasks})
            proposed = task.search.propose(self.batch if most is None else min(self.batch, most))
            if not proposed:
                task.exhausted = True
                continue
            measured = self.runner.run(task.problem, proposed, self._defaults[i])
            self._write(task.problem, measured)
            self.wrong += [(task.problem, m.program, m.status) for m in measured if m.status != "ok"]
            self._learn(i, measured)
            task.trials += len(measured)
            self.trials += len(measured)
            return len(measured)
        return 0

    def _write(self, problem: ConvProblem, measured: list[Measured]) -> None:
        try:
            if self._log is not None:
                self._log.add(problem, measured)
        except OSError as error:  # a full disk, for example, ends the log and not the search
            self._log = None
            warn_once("tune:log", f"convselect: what is measured from now on is not kept for later searches: {error}")

    def _learn(self, i: int, measured: Iterable[Measured]) -> None:
        task = self.tasks[i]
        for one in measured:
            task.search.learn(one.program, one.time_us)
            if one.program == self._defaults[i] and one.time_us is not None:
                task.default_us = one.time_us
        if not math.isfinite(task.default_us):
            # The default was wrong or failed, so native runs instead.
            task.default_us = task.search.times_us.get(Program(NATIVE), math.inf)
        task.history.append(task.best_us)

    def run(
        self,
        *,
        trials: int | None = None,
        seconds: float | None = None,
        on_round: Callable[[Tuning], object] | None = None,
    ) -> None:
        """Search until the budget is spent, or nothing is left to do. The first round of every problem always runs:
        the other results are compared with its defaults."""
        deadline = timing.Deadline(seconds)
        while True:
            begun = all(task.history for task in self.tasks)
            left = None if trials is None else trials - self.trials
            if begun and (deadline.passed or (left is not None and left <= 0)):
                return
            if not self.step(None if left is None else max(left, 1)):
                return
            if on_round is not None:
                on_round(self)

    def confirm(self, i: int) -> Verdict | None:
        """Compare the best programs again and return the one to use; None if nothing was measured."""
        task = self.tasks[i]
        ranked = sorted(task.search.times_us, key=task.search.times_us.__getitem__)
        if not ranked:
            return None
        return self.runner.confirm(task.problem, ranked[:FINALISTS], self._defaults[i])


@dataclass(frozen=True)
class Outcome:
    """The result for one problem.

    Attributes:
        default: the program that runs without tuning; `verdict.speedup` is its time over that of the new one.
        trials: programs measured for this problem in this search.
    """

    problem: ConvProblem
    calls: Mapping[str, int]
    default: Program
    verdict: Verdict
    trials: int


def problems_of(
    problems: Iterable[tuple[ConvProblem, Mapping[str, int]]], settings: Settings
) -> list[tuple[Programs, Mapping[str, int], Program]]:
    """Each problem with its programs and its default: the algorithm that the model chooses, at default parameters.
    Volumes are left out: nothing is known about their programs."""
    found = []
    for problem, calls in problems:
        if problem.is_volume:
            continue
        programs = Programs.of(problem, settings)
        name = choose(problem, BY_NAME, settings, predictor=loaded.get_for(problem)).algorithm
        found.append((programs, calls, programs.default(name if name in programs.spaces else NATIVE)))
    return found


def keep(outcomes: Iterable[Outcome], settings: Settings) -> None:
    """Write decisions into the user's store, so that the next run finds them."""
    for one in outcomes:
        program, verdict = one.verdict.program, one.verdict
        decision = Decision(
            one.problem, settings.budgets, program.algorithm, params_of(one.problem, program), "tune", verdict.gain,
            BY_NAME[program.algorithm].revision, verdict.rounds,
        )  # fmt: skip
        process.remember(decision)
    process.flush()


def user_log() -> Log:
    """The log beside the user's store.

    Raises:
        OSError: if the store is switched off, or this user has no home.
    """
    return log_beside(process.user_path())


def log_beside(store: Path) -> Log:
    mark = environment.fingerprint_of("cpu") or "unknown"
    return Log(store.with_name(store.stem + ".programs.jsonl"), mark, {n: a.revision for n, a in BY_NAME.items()})


def record(search: Tuning, outcomes: Sequence[Outcome], interrupted: bool) -> dict[str, Any]:
    """The results of a search and the environment, as JSON types."""
    speedups = [one.verdict.speedup for one in outcomes]
    return {
        "environment": environment.run_environment(),
        "trials": search.trials,
        "resumed": search.resumed,
        "interrupted": interrupted,
        "problems": [
            {
                "problem": str(one.problem), "calls": dict(one.calls), "default": str(one.default),
                "program": str(one.verdict.program), "speedup": one.verdict.speedup, "times_native": one.verdict.gain,
                "rounds": one.verdict.rounds, "trials": one.trials,
            }
            for one in outcomes
        ],
        "geometric_mean": math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else None,
        "wrong": [f"{program} {status} on {problem}" for problem, program, status in search.wrong],
    }  # fmt: skip
