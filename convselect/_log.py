"""A line for every choice."""

from __future__ import annotations

from convselect.choose import Choice
from convselect.problem import ConvProblem
from convselect.settings import Settings


def chosen(problem: ConvProblem, choice: Choice, settings: Settings) -> None:
    """A choice was made."""


def settled(problem: ConvProblem, algorithm: str, gain: float, samples: int, reason: str) -> None:
    """A trial ended."""
