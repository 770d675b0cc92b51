"""Measure programs on this machine; each is checked against float64 before it is timed.

The programs of a batch are timed in turns with native and with the default (what runs without tuning). Those two are
in every batch: their times say how much slower or faster the machine is than in the first batch, and the times of
later batches are scaled by that.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.choice.choose import NATIVE
from convselect.kernels._contract import Algorithm
from convselect.kernels.pool import BY_NAME
from convselect.measure import measure
from convselect.measure.plan_cost import fixed_cost_us
from convselect.tune.programs import Program
from convselect.tune.records import Measured

WARM_ROUNDS, ROUNDS = 2, 7
HOPELESS = 1.4
"""A program that takes more than this many times the fastest program's time in the first rounds is dropped."""
CONFIRM_ROUNDS, CONFIRM_S = 60, 2.0
"""Most rounds, and about how many seconds, of the final comparison with the default."""
LEAST = 1.01
"""A program has to be this many times as fast as the default to replace it .."""
LEAST_P20 = 1.0
""".. and not slower in more than a fifth of the rounds."""


class Verdict(NamedTuple):
    """The result of the final comparison.

    Attributes:
        gain: native's time over the program's; None if it is not known.
        speedup: the default's time over the program's; 1.0 for the default itself.
        rounds: rounds of timing behind these numbers.
    """

    program: Program
    gain: float | None
    speedup: float
    rounds: int


class Runner(Protocol):
    """Measures programs."""

    def run(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> list[Measured]:
        """One measurement per program, in their order."""
        ...

    def confirm(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> Verdict:
        """The program to use: one of these, or the default."""
        ...


class Live:
    """Measures on this machine, on `problem.threads` threads of the CPU.

    With one thread times are CPU time of the calling thread, which other processes on the machine disturb least; with
    more threads they are wall time.
    """

    def __init__(self, algorithms: Mapping[str, Algorithm] = BY_NAME, rounds: int = ROUNDS) -> None:
        self._algorithms, self._rounds = algorithms, rounds
        self._at: ConvProblem | None = None
        self._a = self._b = self._want = torch.empty(0)
        self._plain = True
        self._first: dict[ConvProblem, dict[Program, float]] = {}
        self._batches = 0

    def run(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> list[Measured]:
        with torch.no_grad(), measure.threads(problem.threads):
            self._prepare(problem)
            status = {program: self._check(problem, program) for program in programs}
            right = [program for program in programs if status[program] == "ok"]
            times = self._timed(problem, right, default) if right else {}
        return [Measured(program, status[program], times.get(program)) for program in programs]

    def confirm(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> Verdict:
        """The fastest of these and the default in many rounds, each checked again. The default stays unless another
        program is `LEAST` times as fast. All but native are charged the dispatch overhead per call of leaving native.
        """
        native = Program(NATIVE)
        found = self.compare(problem, (default, native, *programs), CONFIRM_ROUNDS, CONFIRM_S)
        on_clock = {program: _with_cost(t, problem, program) for program, t in found.items()}
        base = default if default in on_clock else native
        ratios = {program: timing.ratio(on_clock[base], t) for program, t in on_clock.items()}
        better = [p for p, r in ratios.items() if r.median >= LEAST and r.p20 >= LEAST_P20 and p != base]
        chosen = max(better, key=lambda p: ratios[p].median, default=base)
        gain = timing.ratio(on_clock[native], on_clock[chosen]).median if native in on_clock else None
        return Verdict(chosen, gain, ratios[chosen].median, len(on_clock[chosen].samples_us))

    def compare(
        self, problem: ConvProblem, programs: Sequence[Program], rounds: int, deadline_s: float
    ) -> dict[Program, timing.Timing]:
        """Times of the programs whose results agree with float64, timed in turns; without the cost of dispatch."""
        with torch.no_grad(), measure.threads(problem.threads):
            self._prepare(problem)
            right = [p for p in dict.fromkeys(programs) if self._check(problem, p) == "ok"]
            calls = {str(program): self._call(problem, program) for program in right}
            found = timing.interleaved(calls, rounds, seed=1, deadline_s=deadline_s)
        return {program: self._on_clock(problem, found[str(program)]) for program in right}

    # ---- parts --------------------------------------------------------------------------------------------------

    def _prepare(self, problem: ConvProblem) -> None:
        """Make the operands, the result in float64, and native's memory format; kept for one problem at a time."""
        if self._at == problem:
            return
        self._a, self._b = measure.operands(problem)
        native = self._algorithms[NATIVE]
        self._want = native.run(self._a.double(), self._b.double(), problem._replace(dtype="float64"))
        self._plain = native.run(self._a, self._b, problem).is_contiguous()
        self._at = problem

    def _check(self, problem: ConvProblem, program: Program) -> str:
        algorithm = self._algorithms[program.algorithm]
        params = params_of(problem, program, self._algorithms)
        return measure.check(algorithm, self._a, self._b, problem, self._want, params)

    def _call(self, problem: ConvProblem, program: Program) -> Callable[[], Tensor | None]:
        algorithm, params = self._algorithms[program.algorithm], params_of(problem, program, self._algorithms)
        a, b = self._a, self._b
        format = torch.contiguous_format if self._plain else torch.channels_last

        # Includes what dispatch adds: the check for infinities, and copying into the strides of native's result.
        def call() -> Tensor | None:
            result = algorithm.run_checked(a, b, problem, params)
            return None if result is None else result.contiguous(memory_format=format)

        return call

    @staticmethod
    def _on_clock(problem: ConvProblem, t: timing.Timing) -> timing.Timing:
        return t.on_thread_clock if problem.threads == 1 else t

    def _timed(self, problem: ConvProblem, programs: Sequence[Program], default: Program) -> dict[Program, float]:
        anchors = [p for p in dict.fromkeys((Program(NATIVE), default)) if p in programs or self._anchors(problem, p)]
        self._batches += 1
        seed = zlib.crc32(f"{problem} {self._batches}".encode())
        calls = {str(program): self._call(problem, program) for program in dict.fromkeys((*anchors, *programs))}
        first = timing.interleaved(calls, WARM_ROUNDS, seed=seed)
        best = {name: self._on_clock(problem, t).min_us for name, t in first.items()}
        kept_below = HOPELESS * min(best.values())
        kept = {n: call for n, call in calls.items() if best[n] <= kept_below or Program.parse(n) in anchors}
        rest = timing.interleaved(kept, self._rounds - WARM_ROUNDS, seed=seed + 1)
        for name, t in rest.items():
            best[name] = min(best[name], self._on_clock(problem, t).min_us)
        known = self._first.setdefault(problem, {})
        drift = [known.setdefault(anchor, best[str(anchor)]) / best[str(anchor)] for anchor in anchors]
        scale = math.exp(sum(map(math.log, drift)) / len(drift)) if drift else 1.0
        return {program: best[str(program)] * scale for program in programs}

    def _anchors(self, problem: ConvProblem, program: Program) -> bool:
        return problem in self._first or self._check(problem, program) == "ok"


def params_of(
    problem: ConvProblem, program: Program, algorithms: Mapping[str, Algorithm] = BY_NAME
) -> dict[str, int] | None:
    """The parameters to store with a choice of this program; None for the algorithm's defaults, which need none."""
    space = algorithms[program.algorithm].space(problem) if program.params else None
    values = program.values
    return None if space is None or values == space.default(problem) else values


def _with_cost(t: timing.Timing, problem: ConvProblem, program: Program) -> timing.Timing:
    cost_us = fixed_cost_us(problem, program.algorithm)
    return timing.Timing(tuple(us + cost_us for us in t.samples_us))
