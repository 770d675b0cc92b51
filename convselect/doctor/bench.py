"""`bench(problem)`: every algorithm that applies to one problem, checked against float64 and timed in turns, beside
what the model predicted and what would be chosen.

Unlike the collector (`model.measure`) it runs what dispatch runs: bias-free, with the check for NaN and infinity and
with aten's strides restored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from convselect.base import settings, timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, TORCH_DTYPES, ConvProblem, Direction, conv_problem
from convselect.choice.budgets import refusal
from convselect.choice.choose import NATIVE
from convselect.choice.reasons import times
from convselect.eager import resolve
from convselect.kernels._contract import Algorithm, NotApplicable, Params
from convselect.kernels.pool import ALL, BY_NAME
from convselect.machine.environment import run_environment
from convselect.machine.memory import total_bytes
from convselect.measure import measure
from convselect.model import loaded

LARGEST_SIZE = 2**31 - 1
"""Of a problem that was typed. Beyond it, rules that search for tile sizes would not end."""
WARM_ROUNDS, ROUNDS = 2, 1000
HOPELESS = 4.0
"""An algorithm this many times slower than the fastest in the first rounds is timed no further."""


# ---- reading problems -------------------------------------------------------------------------------------------


def parse(text: str) -> ConvProblem:
    """A problem as `str(problem)` writes it, or in the short form that `explain` prints and people write:
    "[direction] 1x64x56x56 -> 64, 3x3 s1 p1 d1 g1 bfloat16 channels_last t2"; strides, paddings and dilations may be
    pairs, "s(2,1)", paddings four numbers (top, bottom, left, right); t is the number of threads.

    Raises:
        ValueError: for anything else, or sizes that no tensors can have.
    """
    if not text.strip():
        raise ValueError("there is no problem")
    try:
        problem = _parse_short(text) if "=" not in text else ConvProblem.parse(text)
    except TypeError as error:  # fields are missing
        raise ValueError(str(error)) from None
    check(problem)
    return problem


def _parse_short(text: str) -> ConvProblem:
    # "p(1, 1)" is one word; what stands between the numbers of a shape is not.
    words = re.sub(r"\(([^)]*)\)", lambda found: "(" + found[1].replace(" ", "") + ")", text).replace("->", " ")
    head, *rest = words.split()
    direction = Direction.FORWARD
    if head in {d.value for d in Direction}:
        direction = Direction(head)
    else:
        rest = [head, *rest]
    form = '"1x64x56x56 64 3x3 s1 p1", or "forward N=1 C=64 H=56 W=56 K=64 R=3 S=3 ..."'
    x = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", rest[0]) if rest else None
    k = re.fullmatch(r"(\d+),?", rest[1]) if len(rest) > 1 else None
    kernel = re.fullmatch(r"(\d+)x(\d+)", rest[2]) if len(rest) > 2 else None
    if x is None or k is None or kernel is None:
        raise ValueError(f"{text!r} is no problem: they are written {form}")
    named = {"s": "stride", "p": "padding", "d": "dilation", "g": "groups", "t": "threads"}
    values: dict[str, Any] = {}
    for word in rest[3:]:
        found = re.fullmatch(r"([spdgt])(?:(\d+)|\((\d+(?:,\d+)*)\))", word)
        if found is not None:
            numbers = [int(n) for n in (found[2] or found[3]).split(",")]
            most = {"s": 2, "d": 2, "p": 4}.get(found[1], 1)
            if len(numbers) not in {1, 2, most} - ({2} if most == 1 else set()):
                raise ValueError(f"{word!r} has {len(numbers)} numbers")
            values[named[found[1]]] = numbers[0] if len(numbers) == 1 else tuple(numbers)
        elif word in TORCH_DTYPES:
            values["dtype"] = word
        elif word in (CONTIGUOUS, CHANNELS_LAST):
            values["layout"] = word
        else:
            raise ValueError(f"{word!r} is not understood; problems are written {form}")
    n, c, h, w = map(int, x.groups())
    r, s = map(int, kernel.groups())
    return conv_problem(n, c, h, w, int(k[1]), r, s, direction=direction, **values)


def check(problem: ConvProblem) -> None:
    """Check a problem that was typed: its sizes may be impossible.

    Raises:
        ValueError: with what is wrong with it.
    """
    p = problem
    pads = p.padding
    axes = (p.H + pads[0] + pads[1], p.W + pads[2] + pads[3], *p.kernel_extent)
    if max(*axes, p.N, p.C, p.K) > LARGEST_SIZE:
        raise ValueError(f"no size may be larger than {LARGEST_SIZE}, an image with its padding included")
    if p.threads >= 2**31:
        raise ValueError(f"{p.threads} threads are too many")
    if (why := p.why_impossible()) is not None:
        raise ValueError(why)
    if p.is_oversized:
        raise ValueError("sizes, strides and paddings must be below 2**31, and images no larger than memory can be")


# ---- results ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One algorithm on one problem.

    Attributes:
        error: relative L2 error against float64; None if it failed.
        verdict: "ok", "wrong" (the error is a mistake's, or shape or dtype are wrong: not timed), or what it raised.
        refused: why it may not be chosen under the settings in force although it applies; None if it may.
        median_us, p20_us, p80_us: percentiles of the time per call, in microseconds; None if it was not timed.
        samples: timed calls.
        times_native: native's time over its own, the median of the ratios by round.
        predicted: times native, as the model expects; None if it says nothing.
        chosen: whether the settings in force choose it.
    """

    algorithm: str
    error: float | None
    verdict: str
    refused: str | None = None
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    times_native: float | None = None
    predicted: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Result:
    """One problem's rows, fastest first.

    Attributes:
        clock: "thread" (CPU time of the calling thread: neighbours on the machine disturb it least) or "wall".
        choice, source: what would be chosen, and the source of that choice.
        not_applicable: name -> why it cannot do this problem.
    """

    problem: ConvProblem
    clock: str
    choice: str
    source: str
    rows: tuple[Row, ...]
    not_applicable: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Names of algorithms that were wrong or failed."""
        return [row.algorithm for row in self.rows if row.verdict != "ok"]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "problem": str(self.problem), "wrong": self.wrong}


def to_json(results: Sequence[Result]) -> str:
    """All results, with the machine and the settings they were made under."""
    told = {
        "environment": run_environment(),
        "settings": json.loads(str(settings.current())),
        "problems": [result.to_dict() for result in results],
    }
    return json.dumps(told, indent=1)


# ---- measuring --------------------------------------------------------------------------------------------------


def bench(problem: ConvProblem, seconds: float = 2.0, *, only: Collection[str] | None = None) -> Result:
    """Check and time every algorithm that applies, on `problem.threads` threads. What would be chosen runs with the
    parameters it would have, the others with their defaults.

    Args:
        seconds: about how long the timing takes; checking, and two rounds at least, come on top.
        only: time only these and native, as far as they apply.

    Raises:
        ValueError: a policy in force that names no algorithm, a GPU's problem on a machine without one, or one whose
            operands do not fit into the machine's memory.
        NotApplicable: a policy in force names an algorithm that cannot do this problem.
    """
    if problem.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"there is no device {problem.device!r} here")
    p, total = problem, total_bytes("cpu")
    needed = (p.x_bytes + p.weight_bytes + p.y_bytes) // p.element_bytes * (p.element_bytes + 8)  # and in float64
    if total is not None and needed > total:
        raise ValueError(f"{needed / 2**30:.0f} GiB of operands are more than the memory of {total / 2**30:.0f} GiB")
    used = settings.current()
    choice = resolve.choice_for(problem, used)
    predictor = loaded.get_for(problem)
    prediction = None if predictor is None else predictor.predict(problem)
    a, b = (t.to(problem.device) for t in measure.operands(problem))
    left_out, pool = _pool(problem, used.workspace_bytes)
    if only is not None:
        pool = [algorithm for algorithm in pool if algorithm.name == NATIVE or algorithm.name in only]
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, Row] = {}
    with torch.no_grad(), _threads(problem):
        native = BY_NAME[NATIVE]
        want = native.run(a.double(), b.double(), problem._replace(dtype="float64", tf32=False))
        plain = native.run(a, b, problem).is_contiguous()
        for algorithm in pool:
            name = algorithm.name
            params = choice.params if name == choice.algorithm else None
            row = _checked(algorithm, a, b, problem, want, params)
            if row.verdict == "ok":
                calls[name] = _call(algorithm, a, b, problem, plain, params)
            gain = None
            if prediction is not None and name in prediction.ranked:
                gain = math.exp(prediction.log_gain(name))
            refused = None if name == choice.algorithm else refusal(algorithm, problem, used)
            found[name] = replace(row, predicted=gain, refused=refused, chosen=name == choice.algorithm)
        del want
        clock = "thread" if problem.threads == 1 and problem.device == "cpu" else "wall"
        timed = _timed(calls, seconds, clock, problem.device)
    rows = [_with_times(row, timed, name) for name, row in found.items()]
    rows.sort(key=lambda row: math.inf if row.median_us is None else row.median_us)
    return Result(problem, clock, choice.algorithm, choice.source, tuple(rows), left_out)


def _pool(problem: ConvProblem, workspace_bytes: int) -> tuple[dict[str, str], list[Algorithm]]:
    """(name -> why not, the algorithms that apply). Those over the precision budget are timed all the same; those over
    the memory budget are not, since they might use up all memory."""
    left_out: dict[str, str] = {}
    pool: list[Algorithm] = []
    for algorithm in ALL:
        reason = algorithm.why_not(problem) or algorithm.same_as_native(problem)
        if reason is None and not algorithm.automatic:
            reason = f"{algorithm.name} runs only when asked for by name."
        if reason is None and algorithm.name != NATIVE and algorithm.workspace_bytes(problem) > workspace_bytes:
            needed, allowed = algorithm.workspace_bytes(problem) / 2**20, workspace_bytes / 2**20
            reason = f"{algorithm.name} needs {needed:.0f} MiB of workspace; {allowed:.0f} MiB are allowed."
        if reason is None:
            pool.append(algorithm)
        else:
            left_out[algorithm.name] = reason
    return left_out, pool


@contextmanager
def _threads(problem: ConvProblem) -> Iterator[None]:
    with measure.threads(problem.threads):
        if problem.device == "cpu":
            yield
            return
        now = torch.backends.cudnn
        with now.flags(now.enabled, now.benchmark, now.benchmark_limit, now.deterministic, allow_tf32=problem.tf32):
            yield


def _checked(algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, want: Tensor, params: Params) -> Row:
    try:
        got = algorithm.run(a, b, problem, params)
    except Exception as raised:
        return Row(algorithm.name, None, f"{type(raised).__name__}: {raised}")
    if got.shape != want.shape or got.dtype != problem.torch_dtype:
        return Row(algorithm.name, None, "wrong")
    distance, size = torch.linalg.vector_norm(got.double() - want).item(), torch.linalg.vector_norm(want).item()
    error = distance / size if size else (0.0 if distance == 0 else math.inf)
    if not math.isfinite(error):
        return Row(algorithm.name, None, "wrong")
    bound = measure.ERROR_BOUNDS["float16" if problem.tf32 and problem.dtype == "float32" else problem.dtype]
    return Row(algorithm.name, error, "ok" if error <= bound else "wrong")


def _call(
    algorithm: Algorithm, a: Tensor, b: Tensor, problem: ConvProblem, plain: bool, params: Params
) -> Callable[[], object]:
    format = torch.contiguous_format if plain else torch.channels_last

    def call() -> object:
        result = algorithm.run_checked(a, b, problem, params)
        return None if result is None else result.contiguous(memory_format=format)

    return call


def _timed(
    calls: dict[str, Callable[[], object]], seconds: float, clock: str, device: str
) -> dict[str, tuple[timing.Timing, timing.Timing]]:
    """name -> its timing and native's in the same rounds."""
    if not calls:
        return {}
    wait = None if device == "cpu" else torch.cuda.synchronize

    def on_clock(t: timing.Timing) -> timing.Timing:
        return t.on_thread_clock if clock == "thread" else t

    deadline = timing.Deadline(seconds)
    first = {n: on_clock(t) for n, t in timing.interleaved(calls, WARM_ROUNDS, synchronise=wait).items()}
    fastest = min(t.min_us for t in first.values())
    kept = {name: call for name, call in calls.items() if name == NATIVE or first[name].min_us <= HOPELESS * fastest}
    rest = timing.interleaved(kept, ROUNDS, seed=1, deadline_s=deadline.remaining_s or 1e-9, synchronise=wait)
    final = {**first, **{name: on_clock(t) for name, t in rest.items()}}
    return {name: (t, first[NATIVE] if name not in rest else final[NATIVE]) for name, t in final.items()}


def _with_times(row: Row, timed: dict[str, tuple[timing.Timing, timing.Timing]], name: str) -> Row:
    if name not in timed:
        return row
    own, native = timed[name]
    return replace(
        row,
        median_us=own.median_us,
        p20_us=own.p20_us,
        p80_us=own.p80_us,
        samples=len(own.samples_us),
        times_native=timing.ratio(native, own).median,
    )


def cells(result: Result) -> list[tuple[str, ...]]:
    """The rows as text: algorithm, error, us, p20, p80, samples, times native, predicted, note."""
    lines = []
    for row in result.rows:
        note = "chosen, " + result.source if row.chosen else ""
        if row.verdict != "ok":
            note = row.verdict.upper() if row.verdict == "wrong" else row.verdict
        elif row.refused:
            note = row.refused
        numbers = ["" if v is None else f"{v:.1f}" for v in (row.median_us, row.p20_us, row.p80_us)]
        error = "" if row.error is None else f"{row.error:.1e}"
        lines.append(
            (row.algorithm, error, *numbers, str(row.samples), times(row.times_native), times(row.predicted), note)
        )
    return lines


__all__ = ["NotApplicable", "Result", "Row", "bench", "cells", "check", "parse", "to_json"]
