"""A choice as the store keeps it. By itself, so that a process that only remembers choices does not import sqlite3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from convselect.base.problem import ConvProblem


class Decision(NamedTuple):
    """The choice for one problem under one set of budgets.

    Attributes:
        budgets: limits of the choice (precision, workspace, ..), as a text that is only compared.
        params: the algorithm's parameters, of JSON types; None for its defaults.
        source: how the choice was made: "verify", "measure", "import", ..
        gain: speed relative to native; None if it was not measured.
        revision: the algorithm's revision, so that an upgraded one is measured again.
        samples: number of timed calls behind the choice.
    """

    problem: ConvProblem
    budgets: str
    algorithm: str
    params: Mapping[str, Any] | None = None
    source: str = "verify"
    gain: float | None = None
    revision: int = 1
    samples: int = 0
