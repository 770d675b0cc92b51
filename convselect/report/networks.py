"""A network -> what runs in each of its convolutions, what else could, and what that gains, per layer and in all."""

from __future__ import annotations

import copy
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convselect import settings, timing
from convselect.choice.choose import NATIVE, PLAN_COST_US, Choice
from convselect.convert import convert, revert
from convselect.doctor.bench import Result, bench
from convselect.eager import dispatch
from convselect.eager.execution import eager_choice
from convselect.eager.live_trial import OnTrial
from convselect.explain import explain_problem
from convselect.kernels.pool import BY_NAME
from convselect.layer import SelectedConv2d
from convselect.machine.environment import run_environment
from convselect.measure.rows import Row
from convselect.model import loaded
from convselect.problem import ConvProblem, Direction
from convselect.report.end_to_end import EndToEnd, Spread, end_to_end, infer, step
from convselect.report.stored import Times, stored_times
from convselect.store import process
from convselect.summary import summary

END_TO_END_SHARE = 0.4
"""Of the time given; the rest goes to the layers."""

NOISE = 1.05
"""Times nearer to each other than this are not told apart."""

MEASURED, STORED, PREDICTED = "measured", "stored", "predicted"
"""Where a time or gain comes from: timed for this report, an earlier measurement, or the model."""


@dataclass(frozen=True)
class Candidate:
    """One algorithm that could compute a problem.

    Attributes:
        time_us: per call; None where nobody knows it.
        gain: times native's speed.
        kind: where these come from: `MEASURED`, `STORED`, `PREDICTED`, or "" where there are none.
        error: relative L2 error against float64, where it was measured for this report.
        why_not: why it was not taken; "" for the choice itself.
    """

    algorithm: str
    chosen: bool
    time_us: Spread | None
    gain: float | None
    kind: str
    error: float | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Layer:
    """One distinct problem of a network.

    Attributes:
        names: of the layers that pose it.
        calls: how often a forward pass, or its backward pass, computes it.
        algorithm, source, params: what is chosen, where that comes from, and its parameters where they are not the
            defaults. A choice of the store names who found it out: "store (tune)".
        native_us, chosen_us: per call; None where not known.
        gain: times native's speed; `kind` says where it, and the times, come from.
        candidates: what applies, the fastest first.
        left_out: reason -> names of the algorithms that do not apply or may not be taken, and nobody timed.
    """

    names: tuple[str, ...]
    problem: ConvProblem
    calls: int
    algorithm: str
    source: str
    params: Mapping[str, Any] | None
    native_us: float | None
    chosen_us: float | None
    gain: float | None
    kind: str
    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def direction(self) -> str:
        return str(self.problem.direction)

    @property
    def all_native_us(self) -> float | None:
        """Of all its calls."""
        return None if self.native_us is None else self.calls * self.native_us

    @property
    def all_chosen_us(self) -> float | None:
        return None if self.chosen_us is None else self.calls * self.chosen_us

    @property
    def faster(self) -> Candidate | None:
        """The fastest candidate as timed, where it beats the choice by more than noise and, instead of native, by more
        than running through a plan costs. Times of other days are not compared."""
        if self.chosen_us is None:
            return None
        timed = {c.algorithm: us for c in self.candidates if c.kind == self.kind and (us := _known_us(c)) is not None}
        best = min(timed, key=lambda name: timed[name])
        cost_us = PLAN_COST_US[self.problem.direction] if self.algorithm == NATIVE else 0.0
        if (timed[best] + cost_us) * NOISE > self.chosen_us:
            return None
        return next(c for c in self.candidates if c.algorithm == best)


@dataclass(frozen=True)
class NetworkReport:
    """All about one network; `page.render` makes a page of it.

    Attributes:
        policy: under which the choices were made.
        left_alone: convolutions that were not converted -> why.
        note: what has to be said of all choices; "" where nothing has.
        made: when, UTC.
    """

    name: str
    input_shape: tuple[int, ...]
    dtype: str
    training: bool
    policy: str
    layers: tuple[Layer, ...]
    end_to_end: tuple[EndToEnd, ...]
    left_alone: Mapping[str, str]
    environment: Mapping[str, Any]
    settings: str
    note: str = ""
    made: str = ""


Posed = dict[tuple[ConvProblem, str | None], dict[str, int]]
"""(problem, the layer's own policy) -> layer -> calls, in the order of the calls."""


def of_model(
    name: str,
    model: nn.Module,
    x: Tensor,
    *,
    training: bool = False,
    measure: bool = False,
    timed: bool = True,
    verify: bool = False,
    seconds: float = 30.0,
    times: str | Path | None = None,
    on_stage: Callable[[str, float], object] = lambda stage, fraction: None,
) -> NetworkReport:
    """Convert a copy of a model, and find out what its convolutions choose and what that gains.

    Args:
        x: what the model is called with, (N, C, H, W).
        training: look at both gradients as well, and time a training step.
        measure: time every algorithm that applies; else native and the choice of each layer only.
        timed: whether anything is timed at all.
        verify: let trials on real calls settle the choices first, as they do in normal use. What they find is kept in
            the store. Otherwise choices are the store's and the model's.
        seconds: about how long the timing takes in all; every call is timed twice at least. Trials come on top, up to
            as long again.
        times: a store or CSV file of times measured on this machine, to be used where nothing is timed; by default
            what the user's own store holds.
        on_stage: told what is being done, and which part of it is done, 0 to 1.

    Raises:
        ValueError: where `times` are of another machine, or hold nothing; StoreError, OSError: where they cannot be
            read. Whatever the model itself raises.
        NotApplicable: a policy in force names an algorithm that cannot do one of the layers.
    """
    stored = stored_times(times)
    native = revert(copy.deepcopy(model).eval())
    converted = copy.deepcopy(model).eval()  # of the model as it is: layers that choose already keep their policies
    left_alone = summary(convert(converted)).left_alone
    policy = _policy(verify)
    with settings.use(policy):
        on_stage("looking for convolutions", 0.0)
        posed = _posed(converted, x, training)
        if verify:
            _settle(converted, x, training, list(posed), seconds, on_stage)
        layers = []
        share_s = seconds * (1 - END_TO_END_SHARE) / max(1, len(posed))
        for i, ((problem, own), calls) in enumerate(posed.items()):
            on_stage("layers", i / len(posed))
            layers.append(_layer(problem, own, calls, stored, share_s if timed else None, measure))
        ends: list[EndToEnd] = []
        if timed and layers:
            posing = {
                "inference": [one for one in layers if one.problem.direction == Direction.FORWARD],
                "training step": layers,
            }
            modes = list(posing) if training and len(layers) > len(posing["inference"]) else ["inference"]
            sums = {
                mode: (total([one.all_native_us for one in of]), total([one.all_chosen_us for one in of]))
                for mode, of in posing.items()
                if mode in modes
            }
            ends = end_to_end(native, converted, x, sums, seconds * END_TO_END_SHARE, on_stage)
        current = settings.current()
        silent = current.chooses and layers and not any(loaded.get_for(layer.problem) for layer in layers)
    note = "No trained model is in use on this machine: automatic choices are native." if silent else ""
    return NetworkReport(
        name, tuple(x.shape), str(x.dtype).removeprefix("torch."), training, current.policy, tuple(layers),
        tuple(ends), left_alone, run_environment(), str(current), note, _now(),
    )  # fmt: skip


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _policy(verify: bool) -> str | None:
    """Trials on real calls would go on for part of the timing, so without `verify` choices are those made unchecked."""
    if verify:
        return "verify"
    return "auto" if settings.current().policy in settings.TIMING else None


# ---- what there is ----------------------------------------------------------------------------------------------


def _posed(model: nn.Module, x: Tensor, training: bool) -> Posed:
    found: Posed = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(layer, SelectedConv2d):
                for problem in dispatch.problems_of(layer, args[0]):
                    calls = found.setdefault((problem, layer.policy), {})
                    calls[name] = calls.get(name, 0) + 1

        return record

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, SelectedConv2d)
    ]
    try:
        with torch.set_grad_enabled(training), settings.use("native"):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    order = list(Direction)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0].direction)))


def _settle(
    model: nn.Module,
    x: Tensor,
    training: bool,
    posed: Sequence[tuple[ConvProblem, str | None]],
    seconds: float,
    on_stage: Callable[[str, float], object],
) -> None:
    """Real calls until no trial is open, or the time is up."""
    deadline = timing.Deadline(seconds)
    while not deadline.passed:
        on_stage("trials on real calls", min(1.0, deadline.elapsed_s / seconds))
        if training:
            step(model, x)
        else:
            infer(model, x)
        if not any(_on_trial(problem, own) for problem, own in posed):
            break


def _on_trial(problem: ConvProblem, policy: str | None) -> bool:
    """Whether calls are still being timed to settle this choice."""
    with settings.use(policy):
        current = settings.current()
        if current.policy != "verify":
            return False
        found = eager_choice(problem, current)
        return isinstance(found, OnTrial) and found.choice is None


# ---- one layer --------------------------------------------------------------------------------------------------


def _layer(
    problem: ConvProblem,
    policy: str | None,
    calls: Mapping[str, int],
    stored: Times,
    seconds: float | None,
    measure: bool,
) -> Layer:
    with settings.use(policy):
        (row,) = explain_problem(problem)
        current = settings.current()
        choice = dispatch.choice_for(problem, current)
        result = None
        if seconds is not None:
            result = bench(problem, seconds, only=None if measure else {choice.algorithm})
        source = choice.source
        if source == "store":
            decision = process.look_up(problem, current.budgets)
            source = f"store ({decision.source})" if decision is not None else source
        elif _on_trial(problem, None):
            source = f"{source} (on trial)"
        predictor = loaded.get_for(problem) if current.chooses else None
        prediction = None if predictor is None else predictor.predict(problem)
    gains: dict[str, float] = {}
    if prediction is not None:
        gains = {name: math.exp(prediction.log_gain(name)) for name in prediction.ranked if name in BY_NAME}
    found = _candidates(problem, choice, row.why_not, result, stored.get(problem, {}), gains)
    shown = {candidate.algorithm for candidate in found}
    left_out: dict[str, tuple[str, ...]] = {}
    for name, reason in row.why_not.items():
        if name not in shown:
            left_out[reason] = (*left_out.get(reason, ()), name)
    taken = next(c for c in found if c.chosen)
    native = next(c for c in found if c.algorithm == NATIVE)
    return Layer(
        tuple(calls), problem, sum(calls.values()), choice.algorithm, source, choice.params, _known_us(native),
        _known_us(taken), taken.gain, taken.kind, tuple(found), left_out,
    )  # fmt: skip


def _known_us(candidate: Candidate) -> float | None:
    return None if candidate.time_us is None or candidate.kind == PREDICTED else candidate.time_us.median


def _candidates(
    problem: ConvProblem,
    choice: Choice,
    why_not: Mapping[str, str],
    result: Result | None,
    stored: Mapping[str, Row],
    predicted: Mapping[str, float],
) -> list[Candidate]:
    """What applies: as timed now, else as stored, else as predicted. Stored times are of default parameters."""
    timed = {row.algorithm: row for row in result.rows} if result is not None else {}
    now, before = timed.get(NATIVE), stored.get(NATIVE)
    native_us = now.median_us if now is not None else before.median_us if before is not None else None
    found = []
    for name in BY_NAME:
        taken, reason = name == choice.algorithm, why_not.get(name, "")
        row, kept = timed.get(name), stored.get(name)
        if row is not None and row.verdict != "ok":
            found.append(Candidate(name, taken, None, None, "", row.error, f"wrong or failed here: {row.verdict}"))
        elif row is not None and row.median_us is not None:
            time = Spread(row.median_us, row.p20_us, row.p80_us)
            found.append(Candidate(name, taken, time, row.times_native, MEASURED, row.error, reason))
        elif kept is not None and not (taken and choice.params):
            gain = None if before is None else before.median_us / kept.median_us
            time = Spread(kept.median_us, kept.p20_us, kept.p80_us)
            found.append(Candidate(name, taken, time, gain, STORED, None, reason))
        elif taken:
            kind = PREDICTED if choice.source == "model" else STORED
            gain = 1.0 if name == NATIVE else choice.predicted_gain
            found.append(Candidate(name, taken, None, gain, kind if gain is not None else "", None, reason))
        elif name == NATIVE:
            found.append(Candidate(name, taken, None, 1.0, PREDICTED, None, reason))
        elif name in predicted and _could(name, problem):
            time_us = None if native_us is None else Spread(native_us / predicted[name])
            found.append(Candidate(name, taken, time_us, predicted[name], PREDICTED, None, reason))
    return sorted(found, key=lambda c: -(c.gain if c.gain is not None else -1.0))


def _could(name: str, problem: ConvProblem) -> bool:
    algorithm = BY_NAME[name]
    return algorithm.automatic and algorithm.why_not(problem) is None and algorithm.same_as_native(problem) is None


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None where one is missing."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None
