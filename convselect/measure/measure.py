"""Measure every algorithm of the pool on one problem, as rows for training and the store.

Every applicable automatic algorithm within the workspace budget is checked against float64 first (a wrong one is
recorded and never timed), then timed in interleaved rounds. Those more than 2.5 times slower than the fastest after two
warm rounds are dropped; native never is. With one thread the label is CPU time of the calling thread, which other
processes on the machine disturb least; with more it is wall time.
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from convselect.base import settings, timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels._common import format_of
from convselect.kernels._contract import Algorithm, Params
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure.rows import NATIVE, Row

ERROR_BOUNDS = {"float64": 1e-11, "float32": 2e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Relative L2 error beyond which a result is wrong, for any error grade: about ten times the loosest grade."""

_WARM_ROUNDS, _ROUNDS, _SLOW_ROUNDS = 2, 9, 7
_SLOW_US = 5_000.0
_DROP_FACTOR = 2.5


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Within this context torch computes on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def operands(problem: ConvProblem) -> tuple[Tensor, Tensor]:
    """Random operands of `Algorithm.run` in the problem's shapes, dtype and layouts; the same for the same problem."""
    generator = torch.Generator().manual_seed(zlib.crc32(str(problem).encode()))
    p = problem

    def random(shape: tuple[int, ...], layout: str, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(p.torch_dtype).contiguous(memory_format=format_of(layout, len(shape)))

    weight_scale = ((p.C // p.groups) * p.T * p.R * p.S) ** -0.5
    if p.direction == Direction.FORWARD:
        return random(p.x_shape, p.layout), random(p.weight_shape, p.weight_layout, weight_scale)
    if p.direction == Direction.BACKWARD_DATA:
        return random(p.y_shape, p.layout), random(p.weight_shape, p.weight_layout, weight_scale)
    return random(p.x_shape, p.layout), random(p.y_shape, p.layout)


def measure_problem(
    model: str,
    problem: ConvProblem,
    algorithms: Iterable[Algorithm] = ALL,
    *,
    workspace_bytes: int | None = None,
    deadline_s: float = 6.0,
    repeat: int = 0,
) -> list[Row]:
    """One row per applicable automatic algorithm (native always), checked first, then timed on `problem.threads`.

    Args:
        model: name of the network, for the rows.
        workspace_bytes: budget per algorithm; default: that of the current settings.
        deadline_s: bound on the timed rounds after the first two, which are always run.
        repeat: number of this measurement of the problem; each has its own random orders, the operands are the same.
    """
    if workspace_bytes is None:
        workspace_bytes = settings.current().workspace_bytes
    a, b = operands(problem)
    pool = [
        algorithm
        for algorithm in algorithms
        if algorithm.automatic
        and algorithm.why_not(problem) is None
        and algorithm.same_as_native(problem) is None
        and (algorithm.name == NATIVE or algorithm.workspace_bytes(problem) <= workspace_bytes)
    ]
    native = BY_NAME[NATIVE]
    with torch.no_grad(), threads(problem.threads):
        want = native.run(a.double(), b.double(), problem._replace(dtype="float64"))
        result_format = _format(native.run(a, b, problem))
        status = {algorithm.name: check(algorithm, a, b, problem, want) for algorithm in pool}
        del want
        calls: dict[str, Callable[[], object]] = {
            algorithm.name: _call(algorithm, a, b, problem, result_format)
            for algorithm in pool
            if status[algorithm.name] == "ok"
        }
        samples = _timed(
            calls, zlib.crc32(f"{problem} {repeat}".encode()), deadline_s, status, wall=problem.threads > 1
        )
    rows = []
    for algorithm in pool:
        row = Row(model, problem, algorithm.name, algorithm.revision, status[algorithm.name], repeat=repeat)
        if algorithm.name in samples:
            wall = samples[algorithm.name]
            clock, t = ("wall", wall) if problem.threads > 1 else ("thread", wall.on_thread_clock)
            row = row._replace(clock=clock, min_us=t.min_us, median_us=t.median_us, p20_us=t.p20_us, p80_us=t.p80_us)
            row = row._replace(wall_us=wall.median_us, rounds=len(wall.samples_us))
        rows.append(row)
    return rows


def _format(tensor: Tensor) -> torch.memory_format:
    return format_of(CONTIGUOUS if tensor.is_contiguous() else CHANNELS_LAST, tensor.dim())


def _call(
    algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, format: torch.memory_format
) -> Callable[[], Tensor]:
    # The time includes what dispatch adds: restoring the strides of native's result, and checking that a transform's
    # result is finite.
    def call() -> Tensor:
        result = algorithm.run(a, b, problem)
        if algorithm.spreads_nonfinite:
            result.sum(dtype=torch.float32 if result.element_size() == 2 else None).item()
        return result.contiguous(memory_format=format)

    return call


def check(algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, want: Tensor, params: Params = None) -> str:
    """ "ok", "wrong" (shape, dtype, or further from the float64 result `want` than `ERROR_BOUNDS`), or "failed": it
    raised; the exception is printed on standard error."""
    try:
        got = algorithm.run(a, b, problem, params)
    except Exception as raised:  # no exception may end the collection, or go unnoticed
        print(f"{algorithm.name} failed on {problem}: {type(raised).__name__}: {raised}", file=sys.stderr)
        return "failed"
    return "ok" if compared(got, want, problem)[1] is None else "wrong"


def compared(got: Tensor, want: Tensor, problem: ConvProblem, *, each: bool = False) -> tuple[float, str | None]:
    """(relative L2 error, what is wrong): shape, dtype, or further from the float64 result `want` than `ERROR_BOUNDS`.

    Args:
        each: whether no single value may be off by more than the bound times the largest, either: in the L2 norm of a
            16-bit result, one value among some thousands does not show.
    """
    if got.shape != want.shape or got.dtype != problem.torch_dtype:
        return 0.0, f"shape {tuple(got.shape)} and {got.dtype}; {tuple(want.shape)} was expected"
    difference, bound = got.double() - want, ERROR_BOUNDS[problem.dtype]
    distance, size = torch.linalg.vector_norm(difference).item(), torch.linalg.vector_norm(want).item()
    error = distance / size if size else distance
    # NaN is wrong; and if every window lies in the padding, only zeros are right.
    if not distance <= bound * size:
        return error, f"relative error {error:.1e}, more than {bound:.0e}"
    if each and difference.numel() and not difference.abs().max() <= bound * want.abs().max():
        return error, f"a value that is off by {difference.abs().max().item():.1e}"
    return error, None


def _timed(
    calls: Mapping[str, Callable[[], object]], seed: int, deadline_s: float, status: dict[str, str], *, wall: bool
) -> dict[str, timing.Timing]:
    """Name -> its samples; algorithms dropped after the warm rounds become "censored" in `status`."""
    if not calls:
        return {}
    deadline = timing.Deadline(deadline_s)
    samples = timing.interleaved(calls, _WARM_ROUNDS, seed=seed)
    best = {name: (t if wall else t.on_thread_clock).min_us for name, t in samples.items()}
    fastest = min(best.values())
    kept = {name: call for name, call in calls.items() if name == NATIVE or best[name] <= _DROP_FACTOR * fastest}
    for name in calls.keys() - kept.keys():
        status[name] = "censored"
    rounds = (_SLOW_ROUNDS if fastest > _SLOW_US else _ROUNDS) - _WARM_ROUNDS
    # If only native is left, more rounds would not change the winner.
    if len(kept) > 1 and not deadline.passed:
        rest = timing.interleaved(kept, rounds, seed=seed + 1, deadline_s=deadline.remaining_s)
        for name, t in rest.items():
            warm = samples[name]
            samples[name] = timing.Timing(warm.samples_us + t.samples_us, warm.thread_us + t.thread_us)
    return samples
