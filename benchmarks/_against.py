"""One network against other runtimes: sides, errors, interleaved times, and what is kept of them."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import convselect
from benchmarks import _networks, _rivals
from benchmarks._rivals import Absent, Side
from benchmarks._tables import geometric_mean
from convselect.base import timing
from convselect.base.timing import Ratio, Timing
from convselect.choice.trial import MOST_CALLS

RIVALS = _networks.RIVALS
OURS = ("converted", "frozen")
SIDES = (*RIVALS, *OURS)
TRAINING_SIDES = ("eager", "eager channels_last", "converted", "converted channels_last")


@dataclass
class Result:
    """One network in one mode. All sides that were right have times.

    Attributes:
        mode: "inference" at batch 1, or "training" at batch `_networks.TRAINING_BATCH`.
        clock: "cpu", time of all threads of the process, or "wall".
        over_eager: side -> how many times faster than eager PyTorch in NCHW: median, p20 and p80 of the ratios within
            rounds.
        frozen_over: rival -> how many times faster the frozen network is, likewise.
        error: relative L2 distance from the network in float64; `max_error`: the largest difference, over the largest
            absolute value there.
        seconds: what was done once: "frozen", planning with the first call; "frozen again", the same in a second
            process with the first one's store; "onnx", the export; "onnxruntime", "openvino", "torch.compile", making
            those; "converted", all calls until nothing is on trial.
        spinning_us: median wall-clock time of ONNX Runtime by itself, with threads that spin between its calls.
        load_average: of the machine, before and after.
        missing: side -> why it has no times.
    """

    network: str
    mode: str
    threads: int
    isa: str
    clock: str
    rounds: int
    median_us: dict[str, float]
    p20_us: dict[str, float]
    p80_us: dict[str, float]
    wall_us: dict[str, float]
    over_eager: dict[str, Ratio]
    frozen_over: dict[str, Ratio]
    error: dict[str, float]
    max_error: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    spinning_us: float | None = None
    load_average: list[float] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def best_rival(self) -> str | None:
        """The one over which the frozen network gains least; None if the frozen network has no times."""
        return min(self.frozen_over, key=lambda name: self.frozen_over[name].median, default=None)

    @property
    def over_best(self) -> Ratio | None:
        """How many times faster the frozen network is than the best rival."""
        return None if self.best_rival is None else self.frozen_over[self.best_rival]

    @property
    def wrong(self) -> list[str]:
        """Sides of ours that computed something else, or failed."""
        return [side for side in self.missing if side.startswith(OURS)]

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Result:
        ratios = ("over_eager", "frozen_over")
        made = {name: {k: Ratio(*v) for k, v in of.items()} if name in ratios else of for name, of in values.items()}
        return Result(**made)


def clocked(
    sides: Mapping[str, Callable[[], object]], rounds: int, seconds: float, threads: int
) -> tuple[dict[str, Timing], dict[str, Timing], str]:
    """(times in the clock that decides, wall-clock times, that clock's name): CPU time of all threads of the process if
    everybody computes on one, which other programs disturb less, and wall-clock time otherwise."""
    # What spins after a call of one side (OpenMP's threads do for some milliseconds) must not slow down the next.
    warm = 1 if threads == 1 else 2
    wall = timing.interleaved(sides, rounds, clock=timing.PROCESS_CLOCK, warm=warm, deadline_s=seconds)
    if threads > 1:
        return wall, wall, "wall"
    return {name: t.on_thread_clock for name, t in wall.items()}, wall, "cpu"


def largest_error(got: Tensor, exact: Tensor) -> float:
    """The largest difference, over the largest absolute value."""
    return float((got.double() - exact).abs().max() / exact.abs().max())


def load_average() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan


# ---- sides ----------------------------------------------------------------------------------------------------------


class _Made:
    """Sides as they are made, and what making them took."""

    def __init__(self) -> None:
        self.sides: dict[str, Side] = {}
        self.missing: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def add(self, name: str, make: Callable[[], Side]) -> None:
        began = timing.Deadline(None)
        try:
            side = make()
            side()
        except Absent as reason:
            self.missing[name] = str(reason)
        except Exception as error:  # one runtime that cannot run a network must not lose the others' times
            first_line = (str(error).strip() or "no message").splitlines()[0]
            self.missing[name] = f"failed: {type(error).__name__}: {first_line}"
        else:
            self.sides[name], self.seconds[name] = side, began.elapsed_s


def _exporting(model: nn.Module, x: Tensor, seconds: dict[str, float]) -> Callable[[], bytes]:
    """The network as ONNX, when first asked for."""

    @functools.cache
    def exported() -> bytes:
        began = timing.Deadline(None)
        found = _rivals.onnx_bytes(_networks.sharing_copy(model), x)
        seconds["onnx"] = began.elapsed_s
        return found

    return exported


def _converted(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """The network as `convselect.convert(model)` makes it, after its trials."""
    ours = convselect.convert(_networks.sharing_copy(model), policy=convselect.Settings().policy)
    for _ in range(MOST_CALLS + 1):
        ours(x)
        if not convselect.summary(ours).on_trial:
            break
    return lambda: ours(x)


def _inference_sides(model: nn.Module, x: Tensor, threads: int, compile: bool) -> tuple[_Made, Callable[[], bytes]]:
    made = _Made()
    exported = _exporting(model, x, made.seconds)
    made.add("eager", lambda: lambda: model(x))
    if x.dim() == 4:  # PyTorch has no such layout for other dimensions
        last = copy.deepcopy(model).to(memory_format=torch.channels_last)
        last_x = x.contiguous(memory_format=torch.channels_last)
        made.add("eager channels_last", lambda: lambda: last(last_x))
    if compile:
        made.add("torch.compile", lambda: _networks._compiled(model, x))
    with torch.inference_mode(False), torch.no_grad():
        for name, make in (("onnxruntime", _rivals.onnxruntime_side), ("openvino", _rivals.openvino_side)):
            made.add(name, lambda make=make: make(exported(), x, threads))  # type: ignore[misc]
    made.add("converted", lambda: _converted(model, x))
    made.add("frozen", lambda: _networks._frozen(model, x))
    return made, exported


# ---- measuring ------------------------------------------------------------------------------------------------------


def inference(
    network: str, model: nn.Module, x: Tensor, *, threads: int, rounds: int, seconds: float, compile: bool = False
) -> Result:
    before = load_average()
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        made, exported = _inference_sides(model, x, threads, compile)
        results = {name: side().clone() for name, side in made.sides.items()}
        error = {name: _networks.distance([y], [exact]) for name, y in results.items()}
        max_error = {name: largest_error(y, exact) for name, y in results.items()}
        bound = max(_networks.OUTPUT_BOUND, _networks.OUTPUT_FACTOR * error["eager"])
        right = _networks._split_wrong(made.sides, error, bound, made.missing)
        found = _result(network, "inference", threads, right, rounds, seconds)
        found.error, found.max_error, found.seconds, found.missing = error, max_error, made.seconds, made.missing
        made.sides.clear()
        if threads > 1 and "onnxruntime" in right:
            right.clear()  # whose threads end
            spinning = {"alone": _rivals.onnxruntime_side(exported(), x, threads, spin=True)}
            found.spinning_us = timing.interleaved(spinning, rounds, deadline_s=seconds / 4)["alone"].median_us
    found.load_average = [before, load_average()]
    return found


def _overruns(layer: nn.Module) -> bool:
    """As `overruns_in_channels_last`, of a layer. Converted layers step around it."""
    if not isinstance(layer, nn.Conv2d) or layer.kernel_size != (1, 1):
        return False
    return layer.stride != (1, 1) and layer.in_channels // layer.groups < 16


def training(network: str, model: nn.Module, x: Tensor, *, threads: int, rounds: int, seconds: float) -> Result:
    """A whole step, forward, backward and SGD, at batch `_networks.TRAINING_BATCH`."""
    before = load_average()
    x = torch.randn((_networks.TRAINING_BATCH, *x.shape[1:]), generator=torch.Generator().manual_seed(1))
    exact = [g.clone() for g in _networks.Training(copy.deepcopy(model).double(), x.double()).gradients()]
    steps: dict[str, _networks.Training] = {}
    missing: dict[str, str] = {}
    for name in TRAINING_SIDES:
        own, own_x = copy.deepcopy(model), x
        if name == "eager channels_last" and any(map(_overruns, model.modules())):
            missing[name] = "not run: oneDNN's weight gradient of strided 1x1 layers with few channels damages the heap"
            continue
        if name.endswith("channels_last"):
            own, own_x = own.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        if name.startswith("converted"):
            convselect.convert(own, policy="auto")
        steps[name] = _networks.Training(own, own_x)
    error = {name: _networks.distance(step.gradients(), exact) for name, step in steps.items()}
    bound = max(_networks.GRADIENT_BOUND, _networks.OUTPUT_FACTOR * error["eager"])
    right = _networks._split_wrong({name: step.step for name, step in steps.items()}, error, bound, missing)
    found = _result(network, "training", threads, right, rounds, seconds)
    found.error, found.missing, found.load_average = error, missing, [before, load_average()]
    return found


def _result(
    network: str, mode: str, threads: int, sides: Mapping[str, Callable[[], object]], rounds: int, seconds: float
) -> Result:
    times, wall, clock = clocked(sides, rounds, seconds, threads)
    frozen = times.get("frozen")
    return Result(
        network, mode, threads, torch.backends.cpu.get_cpu_capability(), clock,
        rounds=min(len(t.samples_us) for t in times.values()),
        median_us={name: t.median_us for name, t in times.items()},
        p20_us={name: t.p20_us for name, t in times.items()},
        p80_us={name: t.p80_us for name, t in times.items()},
        wall_us={name: t.median_us for name, t in wall.items()},
        over_eager={name: timing.ratio(times["eager"], t) for name, t in times.items()},
        frozen_over={} if frozen is None else {
            name: timing.ratio(t, frozen) for name, t in times.items() if name in RIVALS
        },
        error={}, max_error={},
    )  # fmt: skip


# ---- summing up -----------------------------------------------------------------------------------------------------


def over(results: Iterable[Result], side: str) -> list[float]:
    """What the frozen networks gain over a rival, "best" for the best of each network."""
    found = (r.over_best if side == "best" else r.frozen_over.get(side) for r in results)
    return [ratio.median for ratio in found if ratio is not None]


def means(results: Iterable[Result]) -> dict[str, float]:
    """Side -> geometric mean of its gain over eager, over the networks that it ran."""
    gains: dict[str, list[float]] = {}
    for r in results:
        for side, ratio in r.over_eager.items():
            gains.setdefault(side, []).append(ratio.median)
    return {side: geometric_mean(values) for side, values in gains.items()}
