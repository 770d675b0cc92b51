"""`summary(model)`: which convolutions of a model are converted or frozen, and which choices were made by measuring,
which not.

Computed from the model itself at every call, so that it is right for deep copies and unpickled models as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from convselect.base.problem import IMAGE_FIELDS, ConvProblem, conv_problem, pair
from convselect.base.volumes import image_of, volume_problem
from convselect.eager import resolve
from convselect.eager.standing import TIMED, OnTrial, distrusted, gains, others, told
from convselect.freeze.forward import FrozenForward
from convselect.freeze.freeze import frozen_forwards
from convselect.freeze.parts import not_whole, parents
from convselect.layer import check_module, chooses, computes_itself, why_not_converted


@dataclass(frozen=True)
class LayerChoice:
    """A choice that this process has made, or is making.

    Attributes:
        layers: the converted layers with the problem's geometry. It is not recorded which of them met its image size.
        problem: the sizes, and the direction.
        source: "trial" (being timed), "verify" or "measure" (timed in this process), "store" (timed in an earlier one),
            "model" (predicted).
        algorithm: the one chosen; for a trial, its leader: the one that would be chosen if it ended now.
        predicted_gain: speed relative to native as predicted when it was chosen, or when its trial began; None if the
            model was not asked.
        measured_gain: the same as timed calls have shown, in a trial those so far; 1.0 for native once timing has
            settled on it; None if nothing was timed.
        spread: (p20, p80) of the measured gain; None if not known, as after one round, or for choices of the store.
        rounds: number of comparisons behind the measured gain.
        trial: how the trial stands; None if none is open.
    """

    layers: tuple[str, ...]
    problem: ConvProblem
    source: str
    algorithm: str
    predicted_gain: float | None
    measured_gain: float | None
    spread: tuple[float, float] | None = None
    rounds: int = 0
    trial: OnTrial | None = None

    def __str__(self) -> str:
        if self.trial is None:
            parts = [self.algorithm + gains(self, self.rounds)]
        else:
            parts = [f"{self.algorithm} leads after {self.trial}{gains(self)}", *others(self.trial)]
        return f"{self.problem}: {'; '.join(parts)} ({_names(self.layers)})"


@dataclass(frozen=True)
class FrozenInput:
    """How one frozen module computes inputs of one kind.

    Attributes:
        module: its name; "" is the model itself.
        input: shapes, element types and number of threads, in words.
        layout: the layout between the layers; None if the module runs unchanged, since nothing was faster.
        chosen: layer -> what runs it: "native", "onednn_packed", "gemm", "product" (both: one matrix product), an
            algorithm of the pool, or "block" for each layer of an inverted residual block that runs as one call.
        eager_us, frozen_us: medians of the module's forward before and now, in us; None if they were not measured,
            as when the store knew the layout.
        weights_bytes, intermediates_bytes: what it keeps in memory, the model's own weights not included; intermediates
            once per concurrent call.
    """

    module: str
    input: str
    layout: str | None
    chosen: dict[str, str]
    eager_us: float | None
    frozen_us: float | None
    weights_bytes: int = 0
    intermediates_bytes: int = 0


@dataclass(frozen=True)
class Summary:
    """What convselect does with a model. `str()` for people, `to_json()` for programs. "" names the model itself.

    Attributes:
        converted: layer -> its policy, for every layer that chooses; None: the current policy.
        left_alone: convolution -> a sentence with the reason, for every one that is neither converted nor frozen.
        frozen: modules whose forward is frozen. What becomes of the layers inside is known after a call.
        folded: batch normalisation -> the layer whose weight and bias it is now part of.
        merged: convolution -> the layer that it is now part of: sums of several convolutions are one, and so are some
            that follow each other.
        fused: frozen layer -> operations folded into it or run in its epilogue: "batch norm", "scale", "merged",
            "bias", "residual", and an activation. Layers are convolutions, and linear layers of up to 16 MiB.
        not_fused: name -> reason, for modules that were not frozen as a whole.
        inputs: a row per frozen module and kind of input that it has met.
        on_trial: problems of converted layers that are being timed on real calls.
        measured: problems of converted layers that were settled by timing.
        predicted: problems of converted layers that were settled by the model. No trial was held, or one was too short
            to tell.
        distrusted: algorithm -> a sentence, for those that gave a wrong result and are not used any more in this
            process.
    """

    converted: dict[str, str | None]
    left_alone: dict[str, str]
    frozen: tuple[str, ...]
    folded: dict[str, str]
    merged: dict[str, str]
    fused: dict[str, tuple[str, ...]]
    not_fused: dict[str, str]
    inputs: tuple[FrozenInput, ...]
    on_trial: tuple[LayerChoice, ...]
    measured: tuple[LayerChoice, ...]
    predicted: tuple[LayerChoice, ...]
    distrusted: dict[str, str]

    def to_json(self) -> str:
        values = asdict(self)
        for kind in ("on_trial", "measured", "predicted"):
            for row, choice in zip(values[kind], getattr(self, kind), strict=True):
                row["problem"] = str(choice.problem)
        return json.dumps(values, indent=2)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{len(self.converted)} convolutions converted, {len(self.left_alone)} left alone"
        for policy in dict.fromkeys(policy for policy in self.converted.values() if policy is not None):
            yield f"  policy {policy}: {_names(name for name, own in self.converted.items() if own == policy)}"
        yield from (f"  {_name(name)}: {why}" for name, why in self.left_alone.items())
        if self.frozen:
            norms = f"{len(self.folded)} batch normalisations folded"
            yield f"{len(self.fused)} layers frozen in {len(self.frozen)} parts, {norms}"
            for name, parts in self.fused.items():
                yield f"  {_name(name)}: {', '.join(parts) or 'nothing to fuse'}"
            yield from (f"  not fused: {_name(name)}: {why}" for name, why in self.not_fused.items())
        for row in self.inputs:
            times = "" if row.eager_us is None else f", {row.eager_us:.0f} us before, {row.frozen_us:.0f} us now"
            kept = [f"{n / 2**20:.1f} MiB" for n in (row.weights_bytes, row.intermediates_bytes)]
            memory = "" if row.layout is None else f"; keeps {kept[0]} of weights, {kept[1]} between layers"
            yield f"{_name(row.module)} for {row.input}: {row.layout or 'as it was'}{times}{memory}"
            yield from (f"  {_name(name)}: {candidate}" for name, candidate in row.chosen.items())
        yield from (f"on trial: {choice}" for choice in self.on_trial)
        yield from (f"measured: {choice}" for choice in self.measured)
        if self.predicted or self.measured or self.on_trial:
            counts = f"{len(self.measured)} choices measured, {len(self.on_trial)} on trial"
            yield f"{counts}, {len(self.predicted)} predicted only"
        yield from (f"not used any more: {why}" for why in self.distrusted.values())


def summary(model: nn.Module) -> Summary:
    """What is converted, frozen, folded and left alone in `model`, and why; what is on trial, and what was measured.

    Valid for any module: one that was never converted has all of its convolutions in `left_alone`.

    Raises:
        TypeError: `model` is not a module.
    """
    check_module(model, "summary", "summarise")
    modules = dict(model.named_modules())
    frozen = frozen_forwards(model)
    folded: dict[str, str] = {}
    fused: dict[str, tuple[str, ...]] = {}
    merged: dict[str, str] = {}
    for name, forward in frozen.items():
        for layer in forward.layers():
            own = _join(name, layer.name)
            fused[own] = tuple(dict.fromkeys((*fused.get(own, ()), *layer.fused)))
            folded.update((_join(name, norm), own) for norm in layer.norms)
            merged.update((_join(name, other), own) for other in layer.merged)
    converted: dict[str, Any] = {
        name: getattr(layer, "policy", None) for name, layer in modules.items() if chooses(layer)
    }
    reasons = {
        name: why_not_converted(module)
        for name, module in modules.items()
        if name not in converted and name not in fused and name not in merged and not _waits(name, frozen)
    }
    choices = _choices({name: modules[name] for name in converted})
    return Summary(
        converted,
        {name: "It was not converted." if why is None else why for name, why in reasons.items() if why != ""},
        tuple(name for name, forward in frozen.items() if forward.why_original is None),
        folded,
        merged,
        fused,
        _not_fused(modules, frozen),
        tuple(row for name, forward in frozen.items() for row in _inputs(name, forward)),
        tuple(one for one in choices if one.trial is not None),
        tuple(one for one in choices if one.source in TIMED),
        tuple(one for one in choices if one.source == "model"),
        dict(distrusted),
    )


def _waits(name: str, frozen: dict[str, FrozenForward]) -> bool:
    """Whether this is in a frozen module that was not called yet: nobody knows what will become of it."""
    around = (frozen.get(one) for one in (name, *parents(name)))
    return any(one is not None and one.why_original is None and not one.plans() for one in around)


def _not_fused(modules: dict[str, nn.Module], frozen: dict[str, FrozenForward]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, forward in frozen.items():
        around = dict(zip(parents(name), forward.around, strict=False))
        found.update((other, why) for other, why in around.items() if why)
        if forward.why_original is not None:
            found[name] = not_whole(forward.why_original)
    return {name: found[name] for name in modules if name in found}


def _inputs(name: str, forward: FrozenForward) -> Iterator[FrozenInput]:
    for text, plan in forward.plans():
        chosen = {_join(name, layer): candidate for layer, candidate in plan.chosen.items()}
        times, memory = (plan.eager_us, plan.frozen_us), (plan.weights_bytes, plan.laid_out_bytes)
        yield FrozenInput(name, text, plan.layout, chosen, *times, *memory)


def _choices(layers: dict[str, Any]) -> list[LayerChoice]:
    """The current choices of this process for problems of these layers."""
    by_geometry: dict[tuple[int, ...], list[tuple[str, str | None]]] = {}
    for name, layer in layers.items():
        for geometry in _geometries(layer):
            by_geometry.setdefault(geometry, []).append((name, getattr(layer, "policy", None)))
    found = []
    remembered: Any = list(resolve.choices.entries.items()) if layers else []
    for (problem, used), entry in remembered:
        own = by_geometry.get(_geometry_of(problem), ())
        names = tuple(name for name, policy in own if policy in (None, used.policy))
        if names:
            choice, trial = told(entry.found)
            count = 0 if choice.measured is None else choice.measured.rounds
            gains = (choice.predicted_gain, choice.measured_gain, choice.spread)
            found.append(LayerChoice(names, problem, choice.source, choice.algorithm, *gains, count, trial))
    return list(dict.fromkeys(found))


def _geometry_of(problem: ConvProblem) -> tuple[int, ...]:
    """C, the fields from K to groups, and those of depth but D: what a layer's problems have in common."""
    return (problem.C, *problem[5:17], *problem[IMAGE_FIELDS + 1 :])  # type: ignore[arg-type]


def _geometries(layer: Any) -> list[tuple[int, ...]]:
    """The geometries of a layer's problems: those of an image of one row in one dimension, of the convolution the other
    way round for a transposed one, and with three dimensions of the image that may stand for a volume, too."""
    pads_itself = layer.padding_mode != "zeros"
    found = _geometries_at(layer, 0 if pads_itself else layer.padding)
    if computes_itself(layer) and not pads_itself:
        found += _geometries_at(layer, 0)  # it may
    return list(dict.fromkeys(found))


def _geometries_at(layer: Any, padding: Any) -> list[tuple[int, ...]]:
    channels = [layer.in_channels, layer.out_channels]
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        channels.reverse()
    C, K = channels
    steps = {"stride": layer.stride, "padding": padding, "dilation": layer.dilation, "groups": layer.groups}
    large = 2**20  # any size: it is no part of a geometry
    if len(layer.kernel_size) == 3:
        volume = volume_problem(1, C, large, large, large, K, *layer.kernel_size, **steps)
        image = image_of(volume)
        return [_geometry_of(p) for p in (volume, image) if p is not None]
    if len(layer.kernel_size) == 1:
        steps |= {"stride": (1, *layer.stride), "dilation": (1, *layer.dilation)}
        steps["padding"] = padding if isinstance(padding, str) else (0, pair(padding)[1])
    kernel = pair(layer.kernel_size) if len(layer.kernel_size) == 2 else (1, *layer.kernel_size)
    return [_geometry_of(conv_problem(1, C, large, large, K, *kernel, **steps))]


def _join(outer: str, inner: str) -> str:
    return ".".join(part for part in (outer, inner) if part)


def _name(name: str) -> str:
    return name or "(the model itself)"


def _names(names: Any) -> str:
    return ", ".join(map(_name, names))


__all__ = ["FrozenInput", "LayerChoice", "Summary", "summary"]
