"""Everything is timed before the first call (policy "measure"): like `torch.backends.cudnn.benchmark`, but numbers are
checked first, budgets hold, gradients take part, and the answer is remembered across processes."""

from __future__ import annotations

import torch

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.shortage import is_out_of_memory
from convselect.base.warnings import warn_once
from convselect.choice.budgets import Shortage, refusal
from convselect.choice.choose import NATIVE, Choice
from convselect.choice.outcome import Measured
from convselect.eager.keeping import keep
from convselect.kernels.pool import ALL
from convselect.measure.plan_cost import plan_cost_us

DEADLINE_S = 2.0
"""Time for one problem's timed rounds; two rounds are run in any case."""


def measured(problem: ConvProblem, settings: Settings) -> Choice | None:
    """The choice by measuring here and now; None if nothing can be measured: in deterministic mode, while a mode
    watches, on accelerators, if memory is short, or if sizes are beyond all memory.

    The operands are random ones of the same shapes and layouts. An algorithm whose result is not the float64
    reference's, within its dtype's bound, is never chosen. Takes as long as it takes: some milliseconds to a second.
    """
    if (
        problem.is_oversized
        or problem.deterministic
        or problem.device != "cpu"
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return None
    from convselect.measure.measure import measure_problem

    refused = {algorithm.name: refusal(algorithm, problem, settings) for algorithm in ALL if algorithm.name != NATIVE}
    allowed = [algorithm for algorithm in ALL if refused.get(algorithm.name) is None]
    try:
        with torch.inference_mode(mode=False), torch.autocast("cpu", enabled=False):
            rows = measure_problem("measure", problem, allowed, deadline_s=DEADLINE_S)
    except Exception as error:
        if not is_out_of_memory(error):
            warn_once("measure", f"convselect: measuring {problem} failed ({error!r}); the model chooses instead.")
        return None
    times = {row.algorithm: row.median_us for row in rows if row.status == "ok"}
    native_us = times.get(NATIVE)
    if native_us is None:
        return None
    times = {name: us + plan_cost_us(problem, native_us, (name,)) for name, us in times.items()}
    best = min(times, key=lambda name: times[name])
    memory_limited = any(isinstance(reason, Shortage) for reason in refused.values())
    rounds = next(row.rounds for row in rows if row.algorithm == best)
    gain = None if best == NATIVE else Measured(rounds, native_us / times[best])
    found = Choice(best, "measure", None, 1.0 if best == NATIVE else None, memory_limited=memory_limited, measured=gain)
    if not memory_limited:
        keep(problem, settings, found, rounds)
    return found
