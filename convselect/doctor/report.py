"""What the doctor reports: findings and advice, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEVELS = ("note", "slower", "broken")
"""Levels of advice; the index is the exit status."""


@dataclass(frozen=True)
class Advice:
    """Something to know or to do.

    Attributes:
        level: "broken", "slower" (right, but slower than it could be) or "note".
        text: a sentence, and what to do if there is something to do.
    """

    level: str
    text: str


@dataclass(frozen=True)
class Report:
    """What was found. `str()` is for reading, `to_json()` for programs.

    Attributes:
        versions: what is installed; None if it is not.
        machine: processor, instruction sets, threads, load, other busy processes.
        library: the C kernels: loaded or why not, and the instruction set they are called for.
        algorithms: name -> revision, live, why_not (None if it is live).
        model: artifact, whether it is usable, why this one, its figures, what has moved since it was trained.
        calibration: path, in_use, why_not.
        variables: the CONVSELECT_* variables that are set and understood.
        store: as `process.status` describes it.
        self_test: checked, wrong (algorithm and direction -> what happened), worst_error (element type -> relative L2),
            seconds.
        advice: most useful first.
    """

    versions: dict[str, Any]
    machine: dict[str, Any]
    library: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    model: dict[str, Any]
    calibration: dict[str, Any]
    variables: dict[str, str]
    store: dict[str, Any]
    self_test: dict[str, Any]
    advice: tuple[Advice, ...] = field(default=())

    @property
    def status(self) -> int:
        """0: healthy; 1: something to do about speed; 2: something is broken."""
        return max((LEVELS.index(advice.level) for advice in self.advice), default=0)

    def to_json(self) -> str:
        return json.dumps({"status": self.status, **asdict(self)}, indent=1, default=str)

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(title, (name, value) pairs), all as text."""
        live = [f"{name} (r{found['revision']})" for name, found in self.algorithms.items() if found["live"]]
        idle = [(name, str(found["why_not"])) for name, found in self.algorithms.items() if not found["live"]]
        parts: list[tuple[str, list[tuple[str, str]]]] = [
            (title, [(name, _text(value)) for name, value in found.items()])
            for title, found in (
                ("installed", self.versions), ("machine", self.machine), ("C kernels", self.library),
                ("model", self.model), ("calibration", self.calibration), ("environment", self.variables),
                ("store", self.store), ("self-test", self.self_test),
            )
        ]  # fmt: skip
        parts.insert(3, ("algorithms", [("live", ", ".join(live)), *idle]))
        return parts

    def __str__(self) -> str:
        lines = []
        for title, pairs in self.sections():
            lines += [title, *(f"  {name:<24} {value}" for name, value in pairs)]
        lines += ["what to do next", *(f"  {advice.level}: {advice.text}" for advice in self.advice)]
        return "\n".join(lines if self.advice else [*lines, "  nothing: all is well"])


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return f"{value:.3g}"
    if value is None or value == "":
        return "none"
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
