"""Whether an algorithm may be chosen automatically: does it apply, and do the budgets in force admit it?"""

from __future__ import annotations

import difflib
import functools

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.base.warnings import warn_once
from convselect.kernels._contract import GRADE_OF_PRECISION, MOST_ERROR, Algorithm, Grade
from convselect.machine import memory

NATIVE = "native"
ASKED_FROM_BYTES = 16 * 2**20
"""Workspaces up to this size are always allowed; only for larger ones the free memory is looked up (50 us)."""
LEAST_FLOPS = 1e5
"""From here on transforms are chosen: error has a price. Below, they would be the fastest in 7 % (AVX-512) to 12 %
(AVX2) of measured problems, and gain 0.6 to 1 % over the best direct sum on average."""
OVERSIZED = "Sizes, strides and paddings from 2**31 on, and images that no memory holds, are left to PyTorch."

distrusted: dict[str, str] = {}
"""Algorithms that gave a wrong result in this process -> a sentence about it. They are never chosen again."""


class Shortage(str):
    """A refusal because too little memory is free. That is usually temporary."""

    __slots__ = ()


def refusal(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> str | None:
    """Why this algorithm may not be chosen automatically here: not applicable, disabled, not deterministic, too
    imprecise (a transform for a tiny problem), too much memory. A `Shortage` if only the memory that is free just now
    is too little."""
    if not algorithm.automatic:
        return f"{algorithm.name} runs only when asked for by name."
    if algorithm.name in distrusted:
        return distrusted[algorithm.name]
    reason = algorithm.why_not(problem) or algorithm.same_as_native(problem)
    if reason is None and not algorithm.direct_sums and problem.flops < LEAST_FLOPS:
        return f"{algorithm.name} is a transform, whose rounding errors so small a convolution is not worth."
    return over_budget(algorithm, problem, settings) if reason is None else reason


def over_budget(
    algorithm: Algorithm, problem: ConvProblem, settings: Settings, least: Grade = Grade.DIRECT
) -> str | None:
    """One sentence about the budget that does not admit an applicable algorithm; None if all admit it. Native is always
    admitted.

    Args:
        least: up to this grade errors are within the budget whatever the precision, unless it is "exact": the caller
            compares what comes of them.
    """
    name = algorithm.name
    if name == NATIVE:
        return None
    if problem.is_oversized:
        return OVERSIZED
    if settings.disabled and is_disabled(name, settings.disabled):
        return f"{name} is disabled (CONVSELECT_DISABLE or use(disable=...))."
    if problem.deterministic and not algorithm.deterministic(problem):
        return f"{name} may give other bits in every run; deterministic results are asked for."
    if settings.batch_invariant and problem.device != "cpu" and algorithm.may_be_unready:
        return f"{name} may not be ready at once, so that native would run at first; batch invariance rules that out."
    if settings.precision == "exact" and not algorithm.direct_sums:
        return (
            f"{name} is a transform, whose results are not sums of their own products; precision 'exact' needs those."
        )
    grade, most = algorithm.error_grade(problem), GRADE_OF_PRECISION[settings.precision]
    if grade > (most if settings.precision == "exact" else max(most, least)):
        allowed = f"precision {settings.precision!r} allows {MOST_ERROR[most]:.0e}"
        return f"{name} may be off by {MOST_ERROR[grade]:.0e} of the result; {allowed}."
    needed = algorithm.workspace_bytes(problem)
    if needed > settings.workspace_bytes:
        return f"{name} needs {_mib(needed)} of workspace; {_mib(settings.workspace_bytes)} are allowed."
    return _shortage(name, needed, problem.device, settings) if needed > ASKED_FROM_BYTES else None


def _shortage(name: str, needed: int, device: str, settings: Settings) -> str | None:
    share = settings.workspace_share
    if settings.batch_invariant:
        # Free memory differs from call to call, and so would choices; total memory does not.
        total = memory.total_bytes(device)
        if total is None or needed <= share * total:
            return None
        return f"{name} needs {_mib(needed)} of workspace; {share:.0%} of all {_mib(total)} are allowed."
    free = memory.free_bytes(device)
    if free is None or needed <= share * free:
        return None
    return Shortage(
        f"{name} needs {_mib(needed)} of workspace; {share:.0%} of the {_mib(free)} that are free are allowed."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


@functools.lru_cache(maxsize=1024)
def is_disabled(name: str, disabled: tuple[str, ...]) -> bool:
    """Whether an algorithm is switched off: by its name, or by the part of it before a number or before another word
    ("winograd": all of winograd2 to winograd7; "fft": fft and fft_tiled). Native never is."""
    return name != NATIVE and any(
        name == start or (name.startswith(start) and (name[len(start)] == "_" or name[len(start)].isdigit()))
        for start in disabled
    )


@functools.lru_cache(maxsize=256)
def check_disabled(disabled: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Warn once about disabled names that are no algorithms, with the most similar names."""
    wrong = []
    families = {name.rstrip("0123456789") for name in names}
    for start in disabled:
        if start == NATIVE:
            wrong.append("native cannot be disabled")
        elif not any(is_disabled(name, (start,)) for name in names):
            near = difflib.get_close_matches(start, sorted({*names, *families} - {NATIVE}), 3, 0.5)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            wrong.append(f"there is no algorithm {start!r}{hint}")
    if wrong:
        warn_once(
            f"disable:{','.join(disabled)}",
            f"convselect: of what CONVSELECT_DISABLE or disable= names: {'; '.join(wrong)}.",
        )
