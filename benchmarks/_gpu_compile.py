"""Compile many launches in parallel, in processes that see no GPU. The measuring process finds the results in Triton's
cache on disk."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.kernels.pool import ALL
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import Launch, TritonAlgorithm

ATTEMPTS = 3
"""Number of process pools to try: a launch that crashes the compiler ends its pool."""


def algorithms() -> list[TritonAlgorithm]:
    return [a for a in ALL if isinstance(a, TritonAlgorithm)]


def launches_of(problems: Iterable[ConvProblem], pool: Iterable[TritonAlgorithm]) -> Iterator[Launch]:
    """Launches of every applicable algorithm with its first configuration. Those that cannot be made are skipped: the
    measurement reports them."""
    pool = list(pool)
    for problem in problems:
        for algorithm in pool:
            if algorithm.why_not_shape(problem) is None:
                try:
                    yield from algorithm.launches(problem)
                except Exception:
                    continue


def _in_worker() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import triton  # noqa: F401  the first task would wait for it


def _compile(launch: Launch, arch: int) -> str | None:
    try:
        launcher.compiled(launch, arch)
    except Exception as error:  # any error of the compiler
        return f"{type(error).__name__}: {error}"
    return None


def compile_all(
    launches: Iterable[Launch],
    arch: int,
    deadline: timing.Deadline,
    *,
    workers: int | None = None,
    on_done: Callable[[int], object] | None = None,
) -> tuple[set[Launch], dict[Launch, str]]:
    """(compiled launches, failed launch -> reason). Launches left when the time is up are in neither."""
    left = list(dict.fromkeys(launches))
    done: set[Launch] = set()
    failed: dict[Launch, str] = {}
    for _ in range(ATTEMPTS):
        if not left or deadline.passed:
            break
        crashed = _compile_some(left, arch, deadline, workers, done, failed, on_done)
        left = [launch for launch in left if launch not in done and launch not in failed]
        if not crashed:
            return done, failed
    else:
        failed |= dict.fromkeys(left, "the compiler ended its process, on this launch or another")
    return done, failed


def _compile_some(
    todo: list[Launch],
    arch: int,
    deadline: timing.Deadline,
    workers: int | None,
    done: set[Launch],
    failed: dict[Launch, str],
    on_done: Callable[[int], object] | None,
) -> bool:
    """Compile into `done` and `failed`. Returns whether a process died, which ends the work of all others too."""
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers or len(os.sched_getaffinity(0)), len(todo)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_in_worker,
    )
    crashed = False
    try:
        futures = {pool.submit(_compile, launch, arch): launch for launch in todo}
        for future in concurrent.futures.as_completed(futures, timeout=max(0.1, deadline.remaining_s)):
            try:
                reason = future.result()
            except concurrent.futures.BrokenExecutor:
                crashed = True
                continue  # the results of others that had finished count
            if reason is None:
                done.add(futures[future])
            else:
                failed[futures[future]] = reason
            if on_done is not None:
                on_done(len(done) + len(failed))
    except concurrent.futures.BrokenExecutor:
        return True
    except concurrent.futures.TimeoutError:
        pass
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return crashed
