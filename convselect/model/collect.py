"""Collect measured times into a store, within a time budget, so that it can be interrupted and gone on with.

A collection is divided into blocks of problems between two timings of a *sentinel*, a fixed native convolution: where
that moved, the machine was not the same before and after, and whoever reads the store can leave the block out. At the
end some of the problems are measured a second time, independently: how often the winner changes is how far any label
can be trusted.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from convselect import timing
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine import host
from convselect.machine.environment import run_environment
from convselect.measure.measure import measure_problem, operands, threads
from convselect.measure.rows import NATIVE, Row
from convselect.problem import ConvProblem, conv_problem
from convselect.store.store import Store, pool_fingerprint

BLOCK = 50
"""Problems between two sentinels."""
DRIFT = 1.05
"""A block across which the sentinel's time moves by more than this ratio counts as drifting."""
REPEAT_SHARE = 0.07
"""Of the problems, measured twice."""
SENTINEL = conv_problem(1, 64, 28, 28, 64, 3, 3, padding=1)

Item = tuple[str, ConvProblem]


@dataclass
class Report:
    """What a collection did.

    Attributes:
        measured, repeated: problems measured now for the first and the second time.
        skipped: problems that the store had already.
        wrong, failed: (algorithm, problem) whose result was not right, or that raised.
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
    """The description under which this process's measurements are stored: what makes times comparable, and what helps
    to understand them."""
    capability = host.cpu_capability()
    return {
        **run_environment(),
        "family": host.family_of_host(capability),
        "host_flags": host.host_flags(capability),
    }


def in_this_process(algorithms: Sequence[Algorithm] = ALL) -> Runner:
    """One problem after the other, here."""

    def run(items: Iterable[tuple[str, ConvProblem, int]]) -> Iterator[list[Row]]:
        for model, problem, repeat in items:
            yield measure_problem(model, problem, algorithms, repeat=repeat)

    return run


def sentinel_us() -> float:
    """The sentinel's time on one thread: the least of 15 samples, which a neighbour's burst does not reach."""
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
        problems: (model, problem); their `threads` say on how many they are measured.
        runner: where they run; default: in this process.
        description: of the environment; default: this process's. With a runner elsewhere, that of its machines.
        minutes: stop after the problem during which so many have passed; part of them is kept for the second
            measurements. None: when the problems end.
        repeat_share: of the problems measured now, so many are measured a second time.
        device: the kind of device that the problems are for; algorithms of others are no part of the pool.
        on_problem: called after each with the problem and whether it was measured now.

    Ctrl-C ends it early, with `interrupted` set in the report; a killed process leaves whole problems behind.
    """
    runner = runner or in_this_process(algorithms)
    number = store.environment(description if description is not None else environment())
    pool = pool_fingerprint({a.name: a.revision for a in algorithms if a.automatic and device in a.devices})
    done = store.measured(number, pool)
    report = Report()
    whole = timing.Deadline(None if minutes is None else 60 * minutes, clock=clock)
    first = timing.Deadline(None if minutes is None else 60 * minutes / (1 + repeat_share), clock=clock)
    measured: list[Item] = []

    def fresh(deadline: timing.Deadline) -> Iterator[tuple[str, ConvProblem, int]]:
        for model, problem in problems:
            if deadline.passed:
                return
            if problem in done:
                report.skipped += 1
                if on_problem is not None:
                    on_problem(problem, False)
                continue
            done.add(problem)
            yield model, problem, 0

    def again(deadline: timing.Deadline) -> Iterator[tuple[str, ConvProblem, int]]:
        count = round(repeat_share * len(measured))
        for index in np.random.default_rng(0).permutation(len(measured))[:count]:
            if deadline.passed:
                return
            yield (*measured[index], 1)

    block = store.next_block(number)
    try:
        for source, deadline in ((fresh, first), (again, whole)):
            results = runner(source(deadline))
            before, in_block = None, 0
            for rows in results:
                if before is None:
                    before = sentinel()
                _note(report, rows)
                store.add(number, rows, pool=pool, block=block)
                problem = rows[0].problem
                if rows[0].repeat:
                    report.repeated += 1
                else:
                    report.measured += 1
                    measured.append((rows[0].model, problem))
                in_block += 1
                if on_problem is not None:
                    on_problem(problem, True)
                if in_block == block_size:
                    after = sentinel()
                    _close_block(store, report, number, block, before, after)
                    block, before, in_block = block + 1, after, 0
            if before is not None and in_block:
                _close_block(store, report, number, block, before, sentinel())
                block += 1
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _close_block(store: Store, report: Report, number: int, block: int, before: float, after: float) -> None:
    store.add_sentinel(number, block, before, after)
    report.drift[block] = max(before / after, after / before)


def _note(report: Report, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.status in ("wrong", "failed"):
            getattr(report, row.status).append((row.algorithm, row.problem))


# ---- on other processes and machines ----------------------------------------------------------------------------


def measure_task(model: str, problem: ConvProblem, repeat: int) -> list[Row]:
    """What a Dask worker runs: one problem, while no other worker of the same machine measures."""
    from distributed import Lock

    # Two measurements at a time on one device would time each other. The scheduler's lock is per host, since that is
    # what workers share: they may be many per machine, and machines may be many.
    with Lock(f"convselect {socket.gethostname()}"):
        return measure_problem(model, problem, repeat=repeat)


def worker_environment() -> dict[str, Any]:
    """A worker's description of itself, for comparing it with the others."""
    return environment()


def on_dask(client: Any, ahead: int = 4) -> tuple[Runner, dict[str, Any]]:
    """(a runner on the workers of a `distributed.Client`, the environment they share).

    Args:
        ahead: tasks per worker that are handed out before their results are asked for.

    Raises:
        ValueError: where there are no workers, or they are different machines, whose times must not be mixed.
    """
    from distributed import as_completed

    from convselect.machine.environment import fingerprint

    client.wait_for_workers(1)
    found = list(client.run(worker_environment).values())
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
                # `pure=False`: a second measurement of the same problem is no cached result.
                pending.add(client.submit(measure_task, *item, pure=False, retries=1))
            return item is not None

        for _ in range(ahead * len(found)):
            if not hand_out():
                break
        for future in pending:
            yield future.result()
            hand_out()

    return run, found[0]
