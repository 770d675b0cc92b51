"""Times of every applicable algorithm on one problem of a GPU, as the rows that the collector writes.

As in `convselect.measure.measure` on a CPU, each result is first compared with float64, wrong algorithms are recorded
and never timed, and those far behind after the first rounds are dropped. The clock is the GPU's (`_gpu_clock`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks._gpu_clock import on_device
from benchmarks._gpu_device import Device, precision_of, reference, relative_error, rotating
from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import ALL, BY_NAME
from convselect.kernels.triton.launch import Launch, TritonAlgorithm, interpreting
from convselect.measure.rows import NATIVE, Row

ERROR_BOUNDS = {"float64": 1e-11, "float32": 2e-4, "tf32": 5e-3, "float16": 5e-3, "bfloat16": 3e-2}
"""Relative L2 error beyond which a result is wrong, as in the collector; TF32 rounds operands to 11 bits."""
WORKSPACE_BYTES = 8 << 30
WARM_ROUNDS, ROUNDS = 2, 13
SAMPLE_US = 200.0
MOST_CALLS = 12
DROP_FACTOR = 4.0
NEEDS_NO_TIME = frozenset({"reference", "upcast"})


def pool_for(problem: ConvProblem, algorithms: Iterable[Algorithm] = ALL) -> list[Algorithm]:
    """Algorithms to measure, native first, as in the collector."""
    found = [
        a
        for a in algorithms
        if a.automatic
        and a.name not in NEEDS_NO_TIME
        and a.why_not(problem) is None
        and a.same_as_native(problem) is None
        and (a.name == NATIVE or a.workspace_bytes(problem) <= WORKSPACE_BYTES)
    ]
    return sorted(found, key=lambda a: a.name != NATIVE)


def measure(
    model: str,
    problem: ConvProblem,
    device: Device,
    *,
    algorithms: Sequence[Algorithm] = ALL,
    compiled: frozenset[Launch] | set[Launch] | None = None,
    seconds: float = 0.5,
) -> list[Row]:
    """One row per applicable algorithm.

    Args:
        compiled: measure only Triton algorithms all of whose launches are in it; None: all.
        seconds: bound on the timed rounds after the first two.
    """
    native = BY_NAME[NATIVE]
    pool = [a for a in pool_for(problem, algorithms) if _is_compiled(a, problem, compiled)]
    pairs = rotating(problem, device)
    with torch.no_grad(), precision_of(problem):
        want = reference(*pairs[0], problem, native.run)
        format = _format(native.run(*pairs[0], problem))
        status = {a.name: _check(a, pairs[0], problem, want, device) for a in pool}
        del want
        right = {a.name: _call(a, pairs, problem, format) for a in pool if status[a.name] == "ok"}
        samples = _timed(right, zlib.crc32(str(problem).encode()), seconds, status, device)
    rows = []
    for a in pool:
        row = Row(model, problem, a.name, a.revision, status[a.name], "event")
        if us := samples.get(a.name):
            median, p20, p80 = (float(np.percentile(us, percent)) for percent in (50, 20, 80))
            row = row._replace(min_us=min(us), median_us=median, p20_us=p20, p80_us=p80, wall_us=median, rounds=len(us))
        rows.append(row)
    return rows


def _is_compiled(algorithm: Algorithm, problem: ConvProblem, compiled: Any) -> bool:
    if compiled is None or not isinstance(algorithm, TritonAlgorithm) or interpreting():
        return True
    try:
        return all(launch in compiled for launch in algorithm.launches(problem))
    except Exception:
        return True  # the check will fail and be recorded


def _format(t: Tensor) -> torch.memory_format:
    return torch.contiguous_format if t.is_contiguous() else torch.channels_last


def _call(
    algorithm: Algorithm, pairs: list[tuple[Tensor, Tensor]], problem: ConvProblem, format: torch.memory_format
) -> Callable[[int], Tensor]:
    def call(number: int) -> Tensor:
        # The time includes restoring the strides of native's result.
        return algorithm.run(*pairs[number % len(pairs)], problem).contiguous(memory_format=format)

    return call


def _check(
    algorithm: Algorithm, pair: tuple[Tensor, Tensor], problem: ConvProblem, want: Tensor, device: Device
) -> str:
    try:
        got = algorithm.run(*pair, problem)
        if got.shape != want.shape or got.dtype != problem.torch_dtype:
            return "wrong"
        error = relative_error(got, want)
    except Exception as raised:  # of any kind: the others are still to be measured
        print(f"{algorithm.name} failed on {problem}: {type(raised).__name__}: {raised}"[:400])
        device.assert_alive()
        return "failed"
    kind = "tf32" if problem.tf32 and problem.dtype == "float32" else problem.dtype
    return "ok" if error <= ERROR_BOUNDS[kind] else "wrong"


def _timed(
    calls: Mapping[str, Callable[[int], object]], seed: int, seconds: float, status: dict[str, str], device: Device
) -> dict[str, tuple[float, ...]]:
    """name -> samples in us; algorithms dropped after the first rounds become "censored" in `status`."""
    if not calls:
        return {}
    time = functools.partial(on_device, events=device.events, clock=device.clock)
    first = time(calls, WARM_ROUNDS, seed=seed)
    best = {name: t.min_us for name, t in first.items()}
    fastest = min(best.values())
    kept = {name: call for name, call in calls.items() if name == NATIVE or best[name] <= DROP_FACTOR * fastest}
    samples = {name: first[name].samples_us for name in calls}
    for name in calls.keys() - kept.keys():
        status[name] = "censored"
    # Several calls per sample if one is short; the first rounds, of one call each, are then not counted.
    several = {name: max(1, min(MOST_CALLS, int(SAMPLE_US / best[name]))) for name in kept}
    rest = time(kept, ROUNDS, seed=seed + 1, calls=several, deadline_s=seconds)
    return samples | {name: t.samples_us for name, t in rest.items()}
