"""`explain(layer_or_model, input)` and `explain_problem(problem)`: the choice for each convolution, with reasons."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from convselect.aten.arguments import wants_direct_sums
from convselect.aten.layers import Noting, problems_of
from convselect.base import settings
from convselect.base.problem import ConvProblem
from convselect.base.settings import TIMING, Settings
from convselect.choice.choose import TIMED, Prediction
from convselect.choice.outcome import OnTrial
from convselect.choice.reasons import reasons, times, with_spread
from convselect.eager import learning, resolve
from convselect.eager.live_trial import LiveTrial
from convselect.eager.standing import told
from convselect.kernels.pool import BY_NAME
from convselect.layer import computes_itself, unmarked
from convselect.model import loaded


@dataclass(frozen=True)
class Row:
    """One problem and the choice for it.

    Attributes:
        layer: the layer's name in the model, "" for a problem on its own.
        algorithm: the one chosen. While the first calls are being timed it is the leader, which would be chosen if the
            trial ended now: native if nothing is ahead of it. The calls themselves are run by all of them in turns.
        source: source of the choice: "forced", "memory", "store", "model", "verify" or "measure" (timed in this
            process), "trial" (being timed), "small" (native: nothing can gain), "fallback" (native, since there is no
            reason for another).
        probability: the model's probability for the algorithm, among those that apply; None if it was not asked.
        predicted_gain: the algorithm's speed relative to native as predicted: when it was chosen, before any call was
            timed; for a choice of the store as the model says now. 1.0 for native; None without a prediction.
        measured_gain: the same as timed calls have shown, in a trial those so far; 1.0 for native once timing has
            settled on it; None if nothing was timed.
        spread: (p20, p80) of the measured gain; None if not known, as after one round, or for choices of the store.
        rounds: number of comparisons behind the measured gain.
        trial: how the trial stands; None if none is open.
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
    predicted_gain: float | None
    measured_gain: float | None = None
    spread: tuple[float, float] | None = None
    rounds: int = 0
    trial: OnTrial | None = None
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
        """Direction -> what its rows have in common:

            algorithms       name -> number of rows, most frequent first
            on_trial         number of rows whose trial is open
            predicted        speed relative to native as predicted, over the rows that have a prediction
            predicted_share  the share of the direction's operations that these rows have
            measured         the same as measured, over the rows that timing has settled; open trials do not count
            measured_share   their share

        Gains are weighted by FLOPs, since native's times are not known without timing. A row without a gain counts for
        neither side: it would make an unmeasured network look as fast as native. None if no row has a gain.
        """
        found: dict[str, dict[str, Any]] = {}
        for direction in dict.fromkeys(row.direction for row in self.rows):
            rows = [row for row in self.rows if row.direction == direction]
            predicted, predicted_share = _overall(rows, [row.predicted_gain for row in rows])
            settled = [row.measured_gain if row.trial is None else None for row in rows]
            measured, measured_share = _overall(rows, settled)
            found[direction] = {
                "algorithms": dict(Counter(row.algorithm for row in rows).most_common()),
                "on_trial": sum(row.trial is not None for row in rows),
                "predicted": predicted,
                "predicted_share": predicted_share,
                "measured": measured,
                "measured_share": measured_share,
            }
        return found

    def _summary_lines(self) -> list[str]:
        lines = []
        for direction, said in self.summary().items():
            names = ", ".join(f"{count} {name}" for name, count in said["algorithms"].items())
            parts, gains = [f"{direction}: {names}"], []
            for kind in ("predicted", "measured"):
                if said[kind] is not None:
                    share = said[f"{kind}_share"]
                    of = "" if share > 0.995 else f" (over {share:.0%} of them)"
                    gains.append(f"{kind} {times(said[kind])}{of}")
            if gains:
                parts.append(f"by operations {', '.join(gains)}")
            if said["on_trial"]:
                parts.append(f"{said['on_trial']} on trial")
            lines.append("; ".join(parts))
        return lines

    def __str__(self) -> str:
        header = ("layer", "direction", "problem", "algorithm", "source", "p", "predicted", "measured")
        cells = [
            (
                r.layer, r.direction, r.problem.brief, r.algorithm if r.trial is None else f"{r.algorithm} leads",
                r.source if r.trial is None else f"trial: {r.trial}", _number(r.probability), times(r.predicted_gain),
                with_spread(r.measured_gain, r.spread),
            )
            for r in self.rows
        ]  # fmt: skip
        lines = [_table(header, cells)]
        if len(self.rows) > 1:
            lines += self._summary_lines()
        return "\n".join([*lines, self.note] if self.note else lines)

    def details(self) -> str:
        """The table, and per row why each other algorithm was not chosen."""
        lines = [str(self)]
        for row in self.rows:
            params = "".join(f" {name}={value}" for name, value in (row.params or {}).items())
            says = f"takes {row.algorithm}{params}" if row.trial is None else _of_trial(row.trial)
            lines.append(f"\n{row.layer or 'problem'} {row.problem}\n  {says}")
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
        target: a layer or a model; plain layers are explained as if they were converted. A transposed convolution
            computes the grad-input of the convolution the other way round, and its rows say so.
        inputs, kwargs: arguments of the call.

    Returns:
        A row per layer and shape for the forward direction, and for each gradient that training would need under the
        current grad mode.

    The module's buffers (batch-norm statistics) and its training mode are left as they were. The call is no part of a
    trial: it is neither timed nor counted.
    """
    rows: list[Row] = []
    seen: set[Any] = set()
    direct: dict[str, None] = {}

    def record(name: str, layer: Any, weight: Tensor, problems: list[ConvProblem]) -> None:
        policy = getattr(layer, "policy", None)
        current = settings.current()
        used = current if policy is None else settings.with_policy(current, policy)
        wanted = torch.is_grad_enabled() and weight.requires_grad
        if used.chooses and used.precision != "exact" and not wanted and wants_direct_sums(weight):
            used = settings.exactly(used)
            direct[name] = None
        for problem in problems:
            if (name, problem) not in seen:
                seen.add((name, problem))
                rows.append(_row(name, problem, used))

    with _buffers_kept(target), recording(dict(target.named_modules()), record):
        target(*inputs, **kwargs)
    predictors = [loaded.get_for(row.problem) for row in rows] if rows else [loaded.get()]
    silent = settings.current().chooses and not any(predictors)
    notes = ["No trained model is in use on this machine: automatic choices are native."] if silent else []
    if direct:
        names = "" if list(direct) == [""] else f" in {', '.join(direct)}"
        notes.append(
            f"Direct sums only{names}: the weight has no negative value, whole numbers, or one value per filter."
        )
    return Explanation(tuple(rows), " ".join(notes))


@contextmanager
def recording(
    modules: dict[str, nn.Module], record: Callable[[str, Any, Tensor, list[ConvProblem]], None]
) -> Iterator[None]:
    """Inside, `record(name, layer, weight, problems)` is called for every call of the convolutions among these modules:
    what PyTorch's own layers compute follows from their attributes; others are watched, without their marks."""
    handles: list[Any] = []
    watched: list[nn.Module] = []

    def watch(name: str, layer: nn.Module) -> None:
        def enter(layer: nn.Module, args: Any) -> None:
            Noting(lambda weight, problems: record(name, layer, weight, problems)).__enter__()

        def leave(layer: nn.Module, args: Any, y: Any) -> None:
            torch._C._pop_torch_function_stack()  # type: ignore[attr-defined]

        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))
        watched.append(layer)

    def look_at(name: str, layer: Any) -> None:
        def look(layer: Any, args: Any, kwargs: Any) -> None:
            if args:
                record(name, layer, layer.weight, problems_of(layer, *args, **kwargs))

        handles.append(layer.register_forward_pre_hook(look, with_kwargs=True))

    for name, module in modules.items():
        if isinstance(module, nn.modules.conv._ConvNd):
            (watch if computes_itself(module) else look_at)(name, module)
    try:
        with unmarked(watched):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _buffers_kept(target: nn.Module) -> Iterator[None]:
    buffers = {name: b.detach().clone() for name, b in target.named_buffers() if b is not None}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in target.named_buffers():
                buffer.copy_(buffers[name])


def _row(layer: str, problem: ConvProblem, used: Settings) -> Row:
    found = resolve.found_for(problem, used)
    choice, trial = told(found)
    held = found.trial if isinstance(found, LiveTrial) else None
    tried = held is not None and bool(held.priors) and trial is None
    prediction = _prediction(problem, used, timed=tried or choice.source in TIMED)
    probability, predicted = None, dict[str, float]()
    if prediction is not None:
        known = [BY_NAME[name] for name in prediction.ranked if name in BY_NAME]
        applicable = [a for a in known if a.why_not(problem) is None]
        predicted = {
            a.name: math.exp(prediction.log_gain(a.name))
            for a in applicable
            if a.automatic and a.same_as_native(problem) is None
        }
        if trial is not None or choice.source == "model":
            # The model spreads its probability over every name it knows; leave out names that cannot run here.
            probability = prediction.probability(choice.algorithm)
            probability /= sum(prediction.probability(a.name) for a in applicable)
    if held is not None:
        predicted |= {name: math.exp(prior.mean) for name, prior in held.priors.items()}
    predicted_gain = choice.predicted_gain
    if predicted_gain is None and choice.source != "forced":
        predicted_gain = predicted.get(choice.algorithm)
    return Row(
        layer,
        str(problem.direction),
        problem,
        choice.algorithm,
        choice.source,
        probability,
        predicted_gain,
        choice.measured_gain,
        choice.spread,
        0 if choice.measured is None else choice.measured.rounds,
        trial,
        reasons(problem, choice, used, prediction, held),
        None if choice.params is None else dict(choice.params),
        predicted,
    )


def _prediction(problem: ConvProblem, used: Settings, *, timed: bool) -> Prediction | None:
    """What the model says of this problem, with what trials have taught if the choice was made by that. If the problem
    itself was timed that would be its own result: then the model alone."""
    predictor = loaded.get_for(problem) if used.chooses and not problem.is_oversized else None
    prediction = None if predictor is None else predictor.predict(problem)
    if prediction is None or timed or used.policy not in TIMING or problem.deterministic or used.batch_invariant:
        return prediction
    return learning.corrected(prediction, problem)


def _overall(rows: Sequence[Row], gains: Sequence[float | None]) -> tuple[float | None, float]:
    """(the gain over the rows that have one, weighted by FLOPs; their share of the FLOPs)."""
    known = [(row.problem.flops, gain) for row, gain in zip(rows, gains, strict=True) if gain is not None]
    native, all_flops = sum(flops for flops, _ in known), sum(row.problem.flops for row in rows)
    if native == 0:
        return None, 0.0
    return native / sum(flops / gain for flops, gain in known), native / all_flops


def _of_trial(trial: OnTrial) -> str:
    waiting = "; native runs, untimed, until the process has time for it" if trial.waiting else ""
    return f"is on trial: {trial.leader} leads after {trial}{waiting}"


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


__all__ = ["Explanation", "Row", "explain", "explain_problem", "recording"]
