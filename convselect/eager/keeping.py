"""What timing has found out, kept for later processes."""

from __future__ import annotations

from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.choice.choose import Choice
from convselect.kernels.pool import BY_NAME
from convselect.store import process
from convselect.store.decision import Decision


def keep(problem: ConvProblem, settings: Settings, choice: Choice, samples: int) -> None:
    """Let later processes know what was found out."""
    revision = BY_NAME[choice.algorithm].revision
    process.remember(
        Decision(
            problem,
            settings.budgets,
            choice.algorithm,
            choice.params,
            choice.source,
            choice.measured_gain,
            revision,
            samples,
        )
    )
