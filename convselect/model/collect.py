"""Collect measured times into a store, within a time budget, so that it can be interrupted and continued.

A collection is divided into blocks of problems between two timings of a *sentinel*, a fixed native convolution: if
its time changed, so did the machine, and readers of the store can leave the block out. At the end some of the problems
are measured a second time, independently: how often the winner changes says how reliable the labels are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from convselect.base import timing
from convselect.base.problem import ConvProblem, conv_problem
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine import host
from convselect.machine.environment import run_environment
from convselect.measure.measure import measure_problem, operands, threads
from convselect.measure.rows import NATIVE, Row
from convselect.store.store import Store, pool_fingerprint

BLOCK = 50
"""Problems between two sentinels."""
DRIFT = 1.05
"""A block across which the sentinel's time moves by more than this ratio counts as drifting."""
REPEAT_SHARE = 0.07
"""Share of the problems that is measured twice."""
SENTINEL = conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)

Item = tuple[str, ConvProblem]


@dataclass
class Report:
    """The result of a collection.

    Attributes:
        measured, repeated: numbers of problems measured now for the first and the second time.
        skipped: number of problems that the store had already.
        wrong, failed: (algorithm, problem) with a wrong result, or that raised.
        drift: block -> ratio by which the sentinel moved across it.
        interrupted: whether the user ended it.
    """

    measured: int = 0
    repeated: int = 0
    skipped: int = 0
    wrong: list[tuple[str, ConvProblem]] = field(default_factory=list)
    failed: list[tuple[str, ConvProblem]] = field(default_factory=list)
    drift: dict[int, float] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def drifting(self) -> list[int]:
        return [block for block, ratio in self.drift.items() if ratio > DRIFT]


class Runner(Protocol):
    """Measures problems somewhere; results come in any order. Closed by closing the iterator."""

    def __call__(self, items: Iterable[tuple[str, ConvProblem, int]]) -> Iterator[list[Row]]: ...


def environment() -> dict[str, Any]:
    """The description under which this process's measurements are stored: everything that must be equal for times to be
    compared, and facts that help to understand them."""
    capability = host.cpu_capability()
    return {
        **run_environment(),
        "family": host.family_of_host(capability),
        "host_flags": host.host_flags(capability),
    }


def in_this_process(algorithms: Sequence[Algorithm] = ALL) -> Runner:
    """Measures one problem after the other, in this process."""

    def run(items: Iterable[tuple[str, ConvProblem, int]]) -> Iterator[list[Row]]:
        for model, problem, repeat in items:
            yield measure_problem(model, problem, algorithms, repeat=repeat)

    return run


def sentinel_us() -> float:
    """The sentinel's time on one thread: the least of 15 samples, since short bursts of other processes miss some."""
    a, b = operands(SENTINEL)
    with torch.no_grad(), threads(1):
        run = timing.interleaved({NATIVE: lambda: BY_NAME[NATIVE].run(a, b, SENTINEL)}, 15)
    return min(run[NATIVE].thread_us)


def collect(
    problems: Iterable[Item],
    store: Store,
    *,
    runner: Runner | None = None,
    description: Mapping[str, Any] | None = None,
    algorithms: Sequence[Algorithm] = ALL,
    minutes: float | None = None,
    repeat_share: float = REPEAT_SHARE,
    block_size: int = BLOCK,
    device: str = "cpu",
    sentinel: Callable[[], float] = sentinel_us,
    clock: timing.Clock = timing.SYSTEM_CLOCK,
    on_problem: Callable[[ConvProblem, bool], object] | None = None,
) -> Report:
    """Measure problems into the store; those it has, in this environment and for this pool, are skipped.

    Args:
        problems: (model, problem); each is measured on `problem.threads` threads.
        runner: measures the problems; default: in this process.
        description: the environment; default: this process's. With a runner on other machines, theirs.
        minutes: stop after the problem during which this time runs out; part of it is reserved for the second
            measurements. None: measure all problems.
        repeat_share: share of the problems measured now that is measured a second time.
        block_size: problems between two sentinels.
        device: the kind of device that the problems are for; algorithms for others are not part of the pool.
        on_problem: called after each with the problem and whether it was measured now.

    Ctrl-C ends it early, with `interrupted` set in the report; if the process is killed the store has only complete
    problems.
    """
    environment_number = store.environment(description if description is not None else environment())
    pool = pool_fingerprint({a.name: a.revision for a in algorithms if a.automatic and device in a.devices})
    collection = _Collection(store, environment_number, pool, sentinel, block_size, on_problem or (lambda *_: None))
    run = runner or in_this_process(algorithms)
    seconds = None if minutes is None else 60 * minutes
    whole = timing.Deadline(seconds, clock=clock)
    first = timing.Deadline(None if seconds is None else seconds / (1 + repeat_share), clock=clock)
    try:
        collection.measure(run(collection.new(problems, first)))
        collection.measure(run(collection.again(repeat_share, whole)))
    except KeyboardInterrupt:
        collection.report.interrupted = True
    return collection.report


class _Collection:
    """The state of one collection: what was measured, and the open block."""

    def __init__(
        self,
        store: Store,
        environment: int,
        pool: str,
        sentinel: Callable[[], float],
        block_size: int,
        on_problem: Callable[[ConvProblem, bool], object],
    ) -> None:
        self.report = Report()
        self._store, self._environment, self._pool = store, environment, pool
        self._sentinel, self._block_size, self._on_problem = sentinel, block_size, on_problem
        self._known = store.measured(environment, pool)
        self._measured: list[Item] = []
        self._block = store.next_block(environment)

    def new(self, problems: Iterable[Item], deadline: timing.Deadline) -> Iterator[tuple[str, ConvProblem, int]]:
        """The problems that the store does not have, until the time is up."""
        for model, problem in problems:
            if deadline.passed:
                return
            if problem in self._known:
                self.report.skipped += 1
                self._on_problem(problem, False)
            else:
                self._known.add(problem)
                yield model, problem, 0

    def again(self, share: float, deadline: timing.Deadline) -> Iterator[tuple[str, ConvProblem, int]]:
        """A share of the problems measured now, until the time is up."""
        order = np.random.default_rng(0).permutation(len(self._measured))
        for index in order[: round(share * len(order))]:
            if deadline.passed:
                return
            yield (*self._measured[index], 1)

    def measure(self, results: Iterator[list[Row]]) -> None:
        """Store results, in blocks between two sentinels; a sentinel between two blocks serves both."""
        before, in_block = None, 0
        for rows in results:
            if before is None:
                before = self._sentinel()
            self._keep(rows)
            in_block += 1
            if in_block == self._block_size:
                before, in_block = self._close_block(before), 0
        if before is not None and in_block:
            self._close_block(before)

    def _keep(self, rows: Sequence[Row]) -> None:
        model, problem, repeat = rows[0].model, rows[0].problem, rows[0].repeat
        for row in rows:
            if row.status in ("wrong", "failed"):
                getattr(self.report, row.status).append((row.algorithm, problem))
        self._store.add(self._environment, rows, pool=self._pool, block=self._block)
        if repeat:
            self.report.repeated += 1
        else:
            self.report.measured += 1
            self._measured.append((model, problem))
        self._on_problem(problem, True)

    def _close_block(self, before: float) -> float:
        """Returns the sentinel's time, us, after the block."""
        after = self._sentinel()
        self._store.add_sentinel(self._environment, self._block, before, after)
        self.report.drift[self._block] = max(before / after, after / before)
        self._block += 1
        return after


# ---- on other processes and machines ----------------------------------------------------------------------------


def measure_task(model: str, problem: ConvProblem, repeat: int) -> list[Row]:
    """The task of a Dask worker: one problem, while no other worker of the same machine measures."""
    from distributed import Lock

    # Two measurements at a time on one device would disturb each other. The scheduler has a lock per host, since
    # workers share hosts: there may be many workers per machine, and many machines.
    with Lock(f"convselect {socket.gethostname()}"):
        return measure_problem(model, problem, repeat=repeat)


def trusted_environment() -> dict[str, Any]:
    """The description of this process, after a check of its clocks.

    Raises:
        AssertionError: if they cannot be trusted.
    """
    timing.assert_trustworthy()
    return environment()


def on_dask(client: Any, ahead: int = 4) -> tuple[Runner, dict[str, Any]]:
    """(a runner on the workers of a `distributed.Client`, the environment they share).

    Args:
        ahead: tasks per worker that are handed out before their results are asked for.

    Raises:
        ValueError: if there are no workers, or they are different machines, whose times must not be mixed.
    """
    from distributed import as_completed

    from convselect.machine.environment import fingerprint

    client.wait_for_workers(1)
    found = list(client.run(trusted_environment).values())
    if not found:
        raise ValueError("the cluster has no workers")
    if len({fingerprint(one) for one in found}) > 1:
        raise ValueError("the workers are different machines, or differently set up; their times cannot be mixed")

    def run(items: Iterable[tuple[str, ConvProblem, int]]) -> Iterator[list[Row]]:
        waiting = iter(items)
        pending = as_completed()

        def hand_out() -> bool:
            item = next(waiting, None)
            if item is not None:
                # `pure=False`: a second measurement of the same problem must not return a cached result.
                pending.add(client.submit(measure_task, *item, pure=False, retries=1))
            return item is not None

        for _ in range(ahead * len(found)):
            if not hand_out():
                break
        for future in pending:
            yield future.result()
            hand_out()

    return run, found[0]
