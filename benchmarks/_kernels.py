"""Measure one problem: nn.Conv2d against the pool, and against what a converted layer chooses. Summaries of many.

The baseline is always native in NCHW. Every algorithm that may be chosen automatically under the settings in force
is compared with float64 before it is timed. A few rounds rank them; the winner, the choice and native are then timed in
further rounds, from which the ratios come, so that a lucky ranking gives no advantage.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from convselect.base import settings, timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE
from convselect.eager import resolve
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import ALL, BY_NAME
from convselect.measure.measure import ERROR_BOUNDS, operands
from convselect.model.sampling import with_layouts

LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)
RANKING_ROUNDS = 3
HOPELESS = 10
"""An algorithm that took this many times as long as the fastest while it was checked is not timed. oneDNN's
channels_last weight gradients of large kernels take seconds while others take milliseconds."""


@dataclass
class Measured:
    """Times of one problem, the problem as it is in NCHW. By layout of the operands: how many times faster than native
    in NCHW are native (`native`), the best algorithm of the pool (`best`, named in `best_name`) and the one a converted
    layer runs (`chosen`, `chosen_name`). `wrong`: algorithms that failed or whose result was a mistake, and why."""

    problem: ConvProblem
    native_us: float
    rounds: int
    native: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    best_name: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, float] = field(default_factory=dict)
    chosen_name: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)


def checked(
    algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, want: Tensor
) -> tuple[Tensor | None, str | None]:
    """An algorithm's result, and what is wrong with it compared with the float64 result `want`; None if nothing is."""
    try:
        got = algorithm.run(a, b, problem)
    except Exception as error:  # of any kind: the other algorithms are still to be measured
        return None, f"{type(error).__name__}: {error}"
    if got.shape != want.shape or got.dtype != problem.torch_dtype:
        return got, f"a result of {got.dtype} {tuple(got.shape)}"
    error = torch.linalg.vector_norm(got.double() - want) / torch.linalg.vector_norm(want)
    return got, None if error.item() <= ERROR_BOUNDS[problem.dtype] else f"a relative error of {error:.1e}"


def _call(algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, format: torch.memory_format) -> Tensor:
    # The time includes what dispatch adds: the check that a transform's result is finite, and native's strides.
    result = algorithm.run(a, b, problem)
    if algorithm.spreads_nonfinite:
        result.sum(dtype=torch.float32 if result.element_size() == 2 else None).item()
    return result.contiguous(memory_format=format)


def _samples(t: timing.Timing) -> timing.Timing:
    # With one thread, other processes disturb CPU time least; with more, only wall time covers all the work.
    return t if torch.get_num_threads() > 1 else t.on_thread_clock


def _key(layout: str, name: str) -> str:
    return f"{name}, {layout}"


def measure(
    problem: ConvProblem,
    *,
    layouts: Sequence[str] = LAYOUTS,
    rounds: int = 9,
    seconds: float = 2.0,
    algorithms: Iterable[Algorithm] = ALL,
    choose: Callable[[ConvProblem], str] | None = None,
) -> Measured:
    """Measure one problem on as many threads as torch has now.

    Args:
        problem: in NCHW; its thread count is replaced.
        layouts: layouts of the operands; native in NCHW, the baseline, is always measured.
        rounds: most rounds from which ratios are computed.
        seconds: time for the ranking and again for the rounds, but at least two of each.
        choose: problem -> name of the algorithm a converted layer runs; default: what `convselect` would choose.

    Raises:
        RuntimeError: if native itself is wrong.
    """
    budgets = settings.current()
    if choose is None:
        choose = lambda p: resolve.choice_for(p, budgets).algorithm  # noqa: E731
    problem = problem._replace(threads=torch.get_num_threads(), layout=CONTIGUOUS, weight_layout=CONTIGUOUS)
    a, b = operands(problem)
    native = BY_NAME[NATIVE]
    pool = [native, *(algorithm for algorithm in algorithms if algorithm.name != NATIVE)]
    calls: dict[str, Callable[[], object]] = {}
    first_us: dict[str, float] = {}
    wrong: dict[str, str] = {}
    chosen: dict[str, str] = {}
    with torch.no_grad():
        want = native.run(a.double(), b.double(), problem._replace(dtype="float64"))
        for layout in LAYOUTS:
            if layout not in layouts and layout != CONTIGUOUS:
                continue
            last = layout == CHANNELS_LAST
            here = with_layouts(problem, last, last)
            format = torch.channels_last if last else torch.contiguous_format
            x, y = a.contiguous(memory_format=format), b.contiguous(memory_format=format)
            for algorithm in pool:
                if algorithm is not native and (layout not in layouts or refusal(algorithm, here, budgets) is not None):
                    continue
                key, clock = _key(layout, algorithm.name), timing.Deadline(None)
                got, reason = checked(algorithm, x, y, here, want)
                first_us[key] = clock.elapsed_s * 1e6
                if reason is not None:
                    wrong[key] = reason
                    continue
                if algorithm is native and got is not None:
                    format = torch.contiguous_format if got.is_contiguous() else torch.channels_last
                calls[key] = functools.partial(_call, algorithm, x, y, here, format)
            if layout in layouts:
                chosen[layout] = choose(here)
        del want
        base_key = _key(CONTIGUOUS, NATIVE)
        if base_key in wrong:
            raise RuntimeError(f"native computes {problem} with {wrong[base_key]}")
        fastest_us = min(first_us[key] for key in calls)
        hopeful = {key: call for key, call in calls.items() if first_us[key] <= HOPELESS * fastest_us}
        seed = zlib.crc32(str(problem).encode())
        ranking = timing.interleaved(hopeful, RANKING_ROUNDS, seed=seed, deadline_s=seconds)
        ranked_us = {key: _samples(ranking[key]).median_us if key in ranking else first_us[key] for key in calls}
        best = {
            layout: min(
                (algorithm.name for algorithm in pool if _key(layout, algorithm.name) in calls),
                key=lambda name, layout=layout: ranked_us[_key(layout, name)],  # type: ignore[misc]
            )
            for layout in layouts
        }
        wanted = {base_key} | {_key(layout, NATIVE) for layout in layouts} & hopeful.keys()
        wanted |= {_key(*item) for item in (*best.items(), *chosen.items())} & calls.keys()
        times = timing.interleaved({k: calls[k] for k in sorted(wanted)}, rounds, seed=seed + 1, deadline_s=seconds)
    base = _samples(times[base_key])

    def gain(layout: str, name: str) -> float:
        key = _key(layout, name)
        if key in times:
            return timing.ratio(base, _samples(times[key])).median
        return base.median_us / first_us[key] if key in calls else math.nan

    return Measured(
        problem,
        base.median_us,
        len(base.samples_us),
        {layout: gain(layout, NATIVE) for layout in layouts},
        {layout: gain(layout, best[layout]) for layout in layouts},
        best,
        {layout: gain(layout, chosen[layout]) for layout in layouts},
        chosen,
        wrong,
    )


class Summary(NamedTuple):
    """One class, direction and layout: geometric means and 10th percentiles of how many times faster than native in
    NCHW. `names`: how often each algorithm was the best."""

    count: int
    native: float
    best: float
    best_p10: float
    chosen: float
    chosen_p10: float
    names: tuple[tuple[str, int], ...]


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean; NaN without values."""
    return math.exp(float(np.mean(np.log(values)))) if values else math.nan


def summary(measured: Sequence[Measured], layout: str) -> Summary:
    """Figures over problems measured in this layout. A wrong choice, which was never timed, makes its means NaN."""
    native, best, chosen = ([getattr(m, name)[layout] for m in measured] for name in ("native", "best", "chosen"))
    return Summary(
        len(measured),
        geometric_mean(native),
        geometric_mean(best),
        float(np.percentile(best, 10)),
        geometric_mean(chosen),
        float(np.percentile(chosen, 10)),
        tuple(Counter(m.best_name[layout] for m in measured).most_common()),
    )


def by_direction(measured: Iterable[Measured]) -> dict[Direction, list[Measured]]:
    found: dict[Direction, list[Measured]] = {}
    for m in measured:
        found.setdefault(m.problem.direction, []).append(m)
    return found
