"""Everything is timed before the first call (policy "measure"): like `torch.backends.cudnn.benchmark`, but numbers are
checked first, budgets hold, gradients take part, and the answer is remembered across processes."""

from __future__ import annotations

import torch

from convselect import _remembered
from convselect._verify import is_out_of_memory, keep
from convselect._warnings import warn_once
from convselect.choose import NATIVE, PLAN_COST_US, Choice, refusal
from convselect.kernels import ALL, BY_NAME
from convselect.problem import ConvProblem
from convselect.settings import Settings

DEADLINE_S = 2.0
"""Of one problem's timed rounds; two rounds are run in any case."""


def measured(problem: ConvProblem, settings: Settings) -> Choice | None:
    """What was measured here and now, or by an earlier process; None where nothing can be measured: in deterministic
    mode, while a graph is captured or a mode watches, on accelerators, or where memory is short.

    The operands are random ones of the same shapes and layouts. An algorithm whose result is not the float64
    reference's, within its dtype's bound, is never chosen. Takes as long as it takes: some milliseconds to a second.
    """
    if problem.deterministic or problem.device != "cpu" or torch._C._len_torch_dispatch_stack() > 0:
        return None
    decision = _remembered.look_up(problem, settings.budgets)
    if decision is not None and decision.source == "measure":
        known = BY_NAME.get(decision.algorithm)
        if known is not None and known.revision == decision.revision and refusal(known, problem, settings) is None:
            return Choice(decision.algorithm, "store", decision.params, decision.gain)
    from convselect.model.measure import measure_problem

    allowed = [
        algorithm for algorithm in ALL if algorithm.name == NATIVE or refusal(algorithm, problem, settings) is None
    ]
    try:
        with torch.inference_mode(mode=False), torch.autocast("cpu", enabled=False):
            rows = measure_problem("measure", problem, allowed, deadline_s=DEADLINE_S)
    except Exception as error:
        if not is_out_of_memory(error):
            warn_once("measure", f"convselect: measuring {problem} failed ({error!r}); the model chooses instead.")
        return None
    cost = PLAN_COST_US[problem.direction]
    times = {
        row.algorithm: row.median_us + (cost if row.algorithm != NATIVE else 0.0) for row in rows if row.status == "ok"
    }
    native_us = times.get(NATIVE)
    if native_us is None:
        return None
    best = min(times, key=lambda name: times[name])
    found = Choice(best, "measure", None, native_us / times[best])
    rounds = next(row.rounds for row in rows if row.algorithm == best)
    keep(problem, settings, found, rounds)
    return found
