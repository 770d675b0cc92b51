"""`explain(layer_or_model, input)` and `explain_problem(problem)`: the choice for each convolution, with reasons."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from convselect.aten.arguments import problems_of
from convselect.base import settings
from convselect.base.problem import ConvProblem
from convselect.base.settings import Settings
from convselect.choice.reasons import reasons, times
from convselect.eager import resolve
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded


@dataclass(frozen=True)
class Row:
    """One problem and the choice for it.

    Attributes:
        layer: the layer's name in the model, "" for a problem on its own.
        source: source of the choice: "forced", "memory", "store", "model", "verify" or "measure" (timed in this
            process), "trial" (being timed), "small" (native, since nothing can gain), "fallback"
            (native, since there is no reason for another).
        probability, gain: the model's probability for the algorithm, among those that apply, and predicted speed
            relative to native; None if the model was not asked.
        why_not: for every other algorithm, one sentence.
        params: tuned parameters of the algorithm; None for its default.
        predicted: predicted speed relative to native, for every algorithm that may be chosen automatically here.
    """

    layer: str
    direction: str
    problem: ConvProblem
    algorithm: str
    source: str
    probability: float | None
    gain: float | None
    why_not: dict[str, str] = field(default_factory=dict)
    params: dict[str, int] | None = None
    predicted: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Explanation:
    """A table of choices: `str()` for people, `to_json()` for programs. `details()` adds every reason."""

    rows: tuple[Row, ...]
    note: str = ""

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_json(self) -> str:
        rows = [{**asdict(row), "problem": str(row.problem)} for row in self.rows]
        return json.dumps({"rows": rows, "summary": self.summary(), "note": self.note}, indent=2)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Direction -> {"algorithms": name -> number of rows, most frequent first, "gain": times native's speed}.

        The gain is over all rows of the direction, weighted by FLOPs: native's times are not known without timing. None
        if no row has a gain.
        """
        found: dict[str, dict[str, Any]] = {}
        for direction in dict.fromkeys(row.direction for row in self.rows):
            rows = [row for row in self.rows if row.direction == direction]
            native = sum(row.problem.flops for row in rows)
            chosen = sum(row.problem.flops / (row.gain or 1.0) for row in rows)
            known = native > 0 and any(row.gain is not None for row in rows)
            found[direction] = {
                "algorithms": dict(Counter(row.algorithm for row in rows).most_common()),
                "gain": native / chosen if known else None,
            }
        return found

    def _summary_lines(self) -> list[str]:
        lines = []
        for direction, said in self.summary().items():
            names = ", ".join(f"{count} {name}" for name, count in said["algorithms"].items())
            gain = f"; expected gain {times(said['gain'])}, by operations" if said["gain"] is not None else ""
            lines.append(f"{direction}: {names}{gain}")
        return lines

    def __str__(self) -> str:
        header = ("layer", "direction", "problem", "algorithm", "source", "p", "gain")
        cells = [
            (r.layer, r.direction, r.problem.brief, r.algorithm, r.source, _number(r.probability), times(r.gain))
            for r in self.rows
        ]
        lines = [_table(header, cells)]
        if len(self.rows) > 1:
            lines += self._summary_lines()
        return "\n".join([*lines, self.note] if self.note else lines)

    def details(self) -> str:
        """The table, and per row why each other algorithm was not chosen."""
        lines = [str(self)]
        for row in self.rows:
            params = "".join(f" {name}={value}" for name, value in (row.params or {}).items())
            lines.append(f"\n{row.layer or 'problem'} {row.problem}\n  takes {row.algorithm}{params}")
            lines += [f"  not {name}: {reason}" for name, reason in row.why_not.items()]
        return "\n".join(lines)


def explain_problem(problem: ConvProblem, *, layer: str = "", policy: str | None = None) -> Explanation:
    """The choice for one problem, and why each other algorithm was not chosen.

    Raises:
        NotApplicable: if the algorithm named by the policy cannot do this problem.
        ValueError: if the policy names no algorithm.
    """
    current = settings.current()
    return Explanation((_row(layer, problem, current if policy is None else settings.with_policy(current, policy)),))


def explain(target: nn.Module, *inputs: Any, **kwargs: Any) -> Explanation:
    """Run `target(*inputs)` once, forward only, and say what every convolution in it chooses, per direction.

    Args:
        target: a layer or a model; plain `nn.Conv2d` layers are explained as if they were converted.
        inputs, kwargs: arguments of the call.

    Returns:
        A row per layer and shape for the forward direction, and for each gradient that training would need under the
        current grad mode.

    The module's buffers (batch-norm statistics) and its training mode are left as they were.
    """
    rows: list[Row] = []
    seen: set[Any] = set()

    def record(name: str, layer: nn.Conv2d, x: Tensor) -> None:
        policy = getattr(layer, "policy", None)
        current = settings.current()
        used = current if policy is None else settings.with_policy(current, policy)
        for problem in problems_of(layer, x):
            if (name, problem) not in seen:
                seen.add((name, problem))
                rows.append(_row(name, problem, used))

    with _recording(target, record):
        target(*inputs, **kwargs)
    predictors = [loaded.get_for(row.problem) for row in rows] if rows else [loaded.get()]
    silent = settings.current().chooses and not any(predictors)
    note = "No trained model is in use on this machine: automatic choices are native." if silent else ""
    return Explanation(tuple(rows), note)


@contextmanager
def _recording(target: nn.Module, record: Any) -> Iterator[None]:
    """Hooks on every convolution; buffers restored afterwards."""
    buffers = {name: b.detach().clone() for name, b in target.named_buffers() if b is not None}
    handles = []
    for name, module in target.named_modules():
        if isinstance(module, nn.Conv2d):
            handles.append(
                module.register_forward_pre_hook(lambda m, args, name=name: record(name, m, args[0]) if args else None)
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, buffer in target.named_buffers():
                buffer.copy_(buffers[name])


def _row(layer: str, problem: ConvProblem, used: Settings) -> Row:
    choice = resolve.choice_for(problem, used)
    predictor = loaded.get_for(problem) if used.chooses else None
    prediction = predictor.predict(problem) if predictor is not None else None
    probability, predicted = choice.probability, dict[str, float]()
    if prediction is not None:
        known = [BY_NAME[name] for name in prediction.ranked if name in BY_NAME]
        applicable = [a for a in known if a.why_not(problem) is None]
        predicted = {
            a.name: math.exp(prediction.log_gain(a.name))
            for a in applicable
            if a.automatic and a.same_as_native(problem) is None
        }
        if probability is not None:
            # The model spreads its probability over every name it knows; leave out names that cannot run here.
            probability /= sum(prediction.probability(a.name) for a in applicable)
    return Row(
        layer,
        str(problem.direction),
        problem,
        choice.algorithm,
        choice.source,
        probability,
        choice.gain,
        reasons(problem, choice, used, prediction),
        None if choice.params is None else dict(choice.params),
        predicted,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(header: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> str:
    """The table, drawn by rich if it is installed, else in plain columns, since rich is not a dependency."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in [header, *cells])
    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in cells:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(table)
    return out.getvalue().rstrip()


__all__ = ["Explanation", "Row", "explain", "explain_problem"]
