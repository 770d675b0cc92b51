"""A network -> the choice and the candidates of each of its convolutions, with gains per layer and in total."""

from __future__ import annotations

import copy
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from convselect.base import settings, timing
from convselect.convert import convert, revert
from convselect.doctor.bench import bench
from convselect.doctor.compare import infer
from convselect.eager.live_trial import LiveTrial
from convselect.eager.resolve import eager_choice
from convselect.explain import explain_problem, recording
from convselect.machine.environment import run_environment
from convselect.measure.plan_cost import fixed_cost_us
from convselect.measure.rows import NATIVE
from convselect.model import loaded
from convselect.report.end_to_end import EndToEnd, Spread, end_to_end, step
from convselect.store import process
from convselect.store.times import Times, times_here
from convselect.summary import summary

if TYPE_CHECKING:
    from convselect.base.problem import ConvProblem
    from convselect.doctor.bench import Row as Timed
    from convselect.explain import Row as Explained
    from convselect.measure.rows import Row as Stored

DIRECTIONS = {"forward": "forward", "backward_data": "grad input", "backward_weight": "grad weight"}
"""Directions in the order of the page, and how it names them."""

END_TO_END_SHARE = 0.4
"""Share of the time given; the rest goes to the layers."""

NOISE = 1.05
"""Times whose ratio is smaller than this count as equal."""

MEASURED, STORED, PREDICTED = "measured", "stored", "predicted"
"""Sources of a time or gain: timed for this report, an earlier measurement (a trial's among them), or the model."""


@dataclass(frozen=True)
class Candidate:
    """One algorithm that could compute a problem.

    Attributes:
        time_us: per call; None if unknown.
        gain: times native's speed.
        kind: their source: `MEASURED`, `STORED`, `PREDICTED`, or "" if there are none.
        predicted: times native's speed as predicted, whatever was measured; None without a prediction.
        spread: (p20, p80) of a trial's gain; None for gains of other sources.
        error: relative L2 error against float64, if it was measured for this report.
        why_not: why it was not taken; "" for the choice itself.
    """

    algorithm: str
    chosen: bool
    time_us: Spread | None
    gain: float | None
    kind: str
    error: float | None = None
    why_not: str = ""
    predicted: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True)
class Layer:
    """One distinct problem of a network.

    Attributes:
        names: the layers that have this problem.
        calls: how often a forward pass, or its backward pass, computes it.
        algorithm, source, params: what is chosen, the source of the choice, and its parameters if they are not the
            defaults. A choice from the store says how it was found: "store (tune)". While its trial is open, the
            algorithm is the trial's leader: "trial: 2 rounds, 9 of 60 calls".
        native_us, chosen_us: per call; None if unknown.
        gain: times native's speed; `kind` says the source of it and of the times.
        predicted, spread: as a `Candidate` has them.
        candidates: what applies, the fastest first.
        left_out: reason -> names of the algorithms that do not apply or may not be taken, and were not timed.
        in_inference: whether a forward pass computes it: of a transposed convolution, that is a grad-input problem.
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
    predicted: float | None = None
    spread: tuple[float, float] | None = None
    in_inference: bool = True

    @property
    def direction(self) -> str:
        return str(self.problem.direction)

    @property
    def all_native_us(self) -> float | None:
        """Native's time for all its calls."""
        return None if self.native_us is None else self.calls * self.native_us

    @property
    def all_chosen_us(self) -> float | None:
        return None if self.chosen_us is None else self.calls * self.chosen_us

    @property
    def faster(self) -> Candidate | None:
        """The fastest candidate as timed, if it beats the choice by more than noise and, if the choice is native, by
        more than the cost of running through a plan. Measured times are not compared with stored ones."""
        if self.chosen_us is None:
            return None
        timed = {c.algorithm: us for c in self.candidates if c.kind == self.kind and (us := _known_us(c)) is not None}
        best = min(timed, key=lambda name: timed[name])
        cost_us = fixed_cost_us(self.problem, best) if self.algorithm == NATIVE else 0.0
        if (timed[best] + cost_us) * NOISE > self.chosen_us:
            return None
        return next(c for c in self.candidates if c.algorithm == best)


@dataclass(frozen=True)
class NetworkReport:
    """All about one network; `page.render` makes a page of it.

    Attributes:
        policy: under which the choices were made.
        left_alone: convolutions that were not converted -> why.
        note: what applies to all choices, or "".
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


Posed = dict[tuple["ConvProblem", str | None, bool], dict[str, int]]
"""(problem, the layer's own policy, whether a forward pass computes it) -> layer -> calls, in the order of calls."""


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
    """Convert a copy of a model, and find out what its convolutions choose and how much faster that is.

    Args:
        x: what the model is called with, (N, C, H, W).
        training: look at both gradients as well, and time a training step.
        measure: time every algorithm that applies; else native and the choice of each layer only.
        timed: whether anything is timed at all.
        verify: let trials on real calls settle the choices first, as they do in normal use. What they find is kept in
            the store. Otherwise choices are the store's and the model's.
        seconds: about how long the timing takes in all; every call is timed twice at least. Trials take extra time, at
            most the same again.
        times: a store or CSV file of times measured on this machine, used for what is not timed now; by default
            what the user's own store holds.
        on_stage: called with the current stage and the fraction of it that is done, 0 to 1.

    Raises:
        ValueError: if `times` are of another machine, or hold nothing; StoreError, OSError: if they cannot be
            read. Also any error of the model itself.
        NotApplicable: if the current policy names an algorithm that cannot do one of the layers.
    """
    stored = times_here(times)
    native = revert(copy.deepcopy(model).eval())
    converted = copy.deepcopy(model).eval()  # of the unreverted model: layers that choose already keep their policies
    left_alone = summary(convert(converted)).left_alone
    with settings.use(_policy(verify)):
        on_stage("looking for convolutions", 0.0)
        posed = _posed(converted, x, training)
        if verify:
            _settle(converted, x, training, list(posed), seconds, on_stage)
        layers = []
        share_s = seconds * (1 - END_TO_END_SHARE) / max(1, len(posed))
        for i, ((problem, own, in_inference), calls) in enumerate(posed.items()):
            on_stage("layers", i / len(posed))
            layer = _layer(problem, own, calls, stored, share_s if timed else None, measure)
            layers.append(replace(layer, in_inference=in_inference))
        ends: list[EndToEnd] = []
        if timed and layers:
            ends = end_to_end(native, converted, x, _sums(layers, training), seconds * END_TO_END_SHARE, on_stage)
        current = settings.current()
        silent = current.chooses and layers and not any(loaded.get_for(layer.problem) for layer in layers)
    note = "No trained model is in use on this machine: automatic choices are native." if silent else ""
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return NetworkReport(
        name, tuple(x.shape), str(x.dtype).removeprefix("torch."), training, current.policy, tuple(layers),
        tuple(ends), left_alone, run_environment(), str(current), note, made,
    )  # fmt: skip


def _policy(verify: bool) -> str | None:
    """The policy to use. Trials on real calls would run during the timing, so without `verify` it makes no trials."""
    if verify:
        return "verify"
    return "auto" if settings.current().policy in settings.TIMING else None


def _sums(layers: Sequence[Layer], training: bool) -> dict[str, tuple[float | None, float | None]]:
    """Mode -> (native, chosen): the times of its convolutions in us, added up."""
    forward = [one for one in layers if one.in_inference]
    modes: dict[str, Sequence[Layer]] = {"inference": forward}
    if training and len(layers) > len(forward):
        modes["training step"] = layers
    return {
        mode: (total([one.all_native_us for one in of]), total([one.all_chosen_us for one in of]))
        for mode, of in modes.items()
    }


# ---- what there is ----------------------------------------------------------------------------------------------


def _posed(model: nn.Module, x: Tensor, training: bool) -> Posed:
    found: Posed = {}

    def record(name: str, layer: Any, weight: Tensor, problems: list[ConvProblem]) -> None:
        for i, problem in enumerate(problems):
            calls = found.setdefault((problem, layer.policy, i == 0), {})
            calls[name] = calls.get(name, 0) + 1

    layers = {name: model.get_submodule(name) for name in summary(model).converted}
    with torch.set_grad_enabled(training), settings.use("native"), recording(layers, record):
        model(x)
    order = list(DIRECTIONS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0][0].direction)))


def _settle(
    model: nn.Module,
    x: Tensor,
    training: bool,
    posed: Sequence[tuple[ConvProblem, str | None, bool]],
    seconds: float,
    on_stage: Callable[[str, float], object],
) -> None:
    """Make real calls until no trial is open, or the time is up."""
    deadline = timing.Deadline(seconds)
    while not deadline.passed:
        on_stage("trials on real calls", min(1.0, deadline.elapsed_s / seconds))
        if training:
            step(model, x)
        else:
            infer(model, x)
        if not any(_on_trial(problem, own) for problem, own, _ in posed):
            break


def _on_trial(problem: ConvProblem, policy: str | None) -> bool:
    """Whether calls are still being timed to settle this choice."""
    with settings.use(policy):
        current = settings.current()
        if current.policy != "verify":
            return False
        found = eager_choice(problem, current)
        return isinstance(found, LiveTrial) and found.choice is None


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
        timed: dict[str, Timed] = {}
        if seconds is not None:
            found = bench(problem, seconds, only=None if measure else {row.algorithm})
            timed = {one.algorithm: one for one in found.rows}
        source = row.source
        if source == "store":
            decision = process.look_up(problem, settings.current().budgets)
            source = f"store ({decision.source})" if decision is not None else source
        elif row.trial is not None:
            source = f"trial: {row.trial}"
    candidates = _candidates(row, timed, stored.get(problem, {}))
    shown = {candidate.algorithm for candidate in candidates}
    left_out: dict[str, tuple[str, ...]] = {}
    for name, reason in row.why_not.items():
        if name not in shown:
            left_out[reason] = (*left_out.get(reason, ()), name)
    taken = next(c for c in candidates if c.chosen)
    native = next(c for c in candidates if c.algorithm == NATIVE)
    return Layer(
        tuple(calls), problem, sum(calls.values()), row.algorithm, source, row.params, _known_us(native),
        _known_us(taken), taken.gain, taken.kind, tuple(candidates), left_out, taken.predicted, taken.spread,
    )  # fmt: skip


def _known_us(candidate: Candidate) -> float | None:
    return None if candidate.time_us is None or candidate.kind == PREDICTED else candidate.time_us.median


def _candidates(row: Explained, timed: Mapping[str, Timed], stored: Mapping[str, Stored]) -> list[Candidate]:
    """The algorithms that apply, the fastest first: as timed now, else as stored, else as predicted."""
    native_us = next((side[NATIVE].median_us for side in (timed, stored) if NATIVE in side), None)
    found = []
    for name in (row.algorithm, *row.why_not):
        candidate = None
        if name in timed:
            candidate = _as_timed(timed[name])
        # Stored times are of default parameters.
        if candidate is None and name in stored and not (name == row.algorithm and row.params):
            candidate = _as_stored(stored[name], stored.get(NATIVE))
        if candidate is None:
            candidate = _as_predicted(name, row, native_us)
        if candidate is not None:
            why_not = candidate.why_not or row.why_not.get(name, "")
            predicted = row.predicted_gain if name == row.algorithm else row.predicted.get(name)
            found.append(replace(candidate, chosen=name == row.algorithm, why_not=why_not, predicted=predicted))
    return sorted(found, key=lambda c: -(c.gain if c.gain is not None else -1.0))


def _as_timed(row: Timed) -> Candidate | None:
    """None if it was right but not timed."""
    if row.verdict != "ok":
        why_not = f"wrong or failed here: {row.verdict}"
        return Candidate(row.algorithm, False, None, None, "", row.error, why_not)
    if row.median_us is None:
        return None
    time = Spread(row.median_us, row.p20_us, row.p80_us)
    return Candidate(row.algorithm, False, time, row.times_native, MEASURED, row.error)


def _as_stored(row: Stored, native: Stored | None) -> Candidate:
    gain = None if native is None else native.median_us / row.median_us
    return Candidate(row.algorithm, False, Spread(row.median_us, row.p20_us, row.p80_us), gain, STORED)


def _as_predicted(name: str, row: Explained, native_us: float | None) -> Candidate | None:
    """The choice, native, and what the model expects of others; None if nothing is known."""
    if name == row.algorithm:
        if row.measured_gain is not None:
            return Candidate(name, True, None, row.measured_gain, STORED, spread=row.spread)
        gain = 1.0 if name == NATIVE else row.predicted_gain
        return Candidate(name, True, None, gain, "" if gain is None else PREDICTED)
    if name == NATIVE:
        return Candidate(name, False, None, 1.0, PREDICTED)
    if name not in row.predicted:
        return None
    gain = row.predicted[name]
    return Candidate(name, False, None if native_us is None else Spread(native_us / gain), gain, PREDICTED)


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None if one is missing."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None
