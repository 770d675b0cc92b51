"""Compare a whole network, plain and converted: distances from float64, and times."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convselect.doctor.compare import Times, infer, tensors, time_both, train_but_dropout
from convselect.doctor.compare import distance as relative_distance

DISTURBED = 1.2
"""If wall time exceeds this many times the CPU time of the only thread, the machine was busy with other work."""


class Spread(NamedTuple):
    """Median, 20th and 80th percentile; the last two are None if only one number is known. Times in us."""

    median: float
    p20: float | None = None
    p80: float | None = None


class Sides(NamedTuple):
    """Both sides' times in us; `gain` is the plain one's over the converted one's, by round."""

    native: Spread
    converted: Spread
    gain: Spread


@dataclass(frozen=True)
class EndToEnd:
    """The whole network, plain and converted, timed in turns in one process.

    Attributes:
        mode: "inference" or "training step" (forward, backward; no optimiser).
        wall, cpu: wall time, and, with one thread on the CPU, CPU time of the calling thread, which other processes on
            the machine disturb least; else None.
        native_error, converted_error: relative L2 distance of the result (training: of all gradients) from the same
            model's in float64, computed before the timing; None if it does not run in float64.
        distance: the same between both sides.
        layers_native_us, layers_chosen_us: the convolutions of this mode, each timed on its own, added up; None if
            one of them has no time.
    """

    mode: str
    rounds: int
    wall: Sides
    cpu: Sides | None
    distance: float
    native_error: float | None
    converted_error: float | None
    layers_native_us: float | None
    layers_chosen_us: float | None

    @property
    def like_layers(self) -> Sides:
        """Times on the clock by which layers are timed."""
        return self.wall if self.cpu is None else self.cpu

    @property
    def disturbed(self) -> bool:
        """Whether other work used the processor for a large part of the time, on one side at least."""
        return self.cpu is not None and any(
            passed.median > DISTURBED * computed.median
            for passed, computed in zip(self.wall[:2], self.cpu[:2], strict=True)
        )

    @property
    def headline(self) -> tuple[Sides, str]:
        """The most reliable times, and their name: wall time, unless other work used the processor."""
        return (self.cpu, "CPU time") if self.disturbed and self.cpu is not None else (self.wall, "wall time")


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Forward, mean of squares, backward into fresh gradients, which are returned."""
    model.zero_grad(set_to_none=True)
    # Squares: the gradient of a plain sum is one expanded value, a layout that no real loss has.
    losses = [t.float().square().mean() for t in tensors(model(x)) if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def end_to_end(
    native: nn.Module,
    converted: nn.Module,
    x: Tensor,
    layers_us: Mapping[str, tuple[float | None, float | None]],
    seconds: float,
    on_stage: Callable[[str, float], object],
) -> list[EndToEnd]:
    """Compare both models' results with each other and with float64, then time them in turns.

    Args:
        native, converted: in evaluation mode; they may be left in training mode.
        layers_us: mode -> the convolutions' times on both sides; its keys are the modes to compare.
        seconds: time for the timing of all modes.
    """
    share = seconds / (2 * len(layers_us) - 1)  # a training step takes about twice as long again as inference
    found = []
    for mode, sums in layers_us.items():
        run: Callable[[nn.Module, Tensor], Any] = infer
        if mode != "inference":
            run = step
            train_but_dropout(native)
            train_but_dropout(converted)
        on_stage(f"comparing with float64, {mode}", 0.0)
        plain, ours, exact = tensors(run(native, x)), tensors(run(converted, x)), _exact(native, x, run)
        distance = relative_distance(ours, plain)
        native_error, converted_error = (None if exact is None else relative_distance(t, exact) for t in (plain, ours))
        del plain, ours, exact

        seconds_here = share if run is infer else seconds - share
        times = time_both(
            functools.partial(_on, run, x), native, converted, seconds_here, x.device,
            functools.partial(on_stage, f"end to end, {mode}"),
        )  # fmt: skip
        rounds, wall = len(times.native.samples_us), _sides(times)
        cpu = None
        if x.device.type == "cpu" and torch.get_num_threads() == 1:
            cpu = _sides(times.on_thread_clock)
        found.append(EndToEnd(mode, rounds, wall, cpu, distance, native_error, converted_error, *sums))
    return found


def _exact(native: nn.Module, x: Tensor, run: Callable[[nn.Module, Tensor], Any]) -> list[Tensor] | None:
    """The same in float64; None if the model does not run in float64."""
    try:
        return tensors(run(copy.deepcopy(native).double(), x.double()))
    except Exception:
        return None


def _on(run: Callable[[nn.Module, Tensor], Any], x: Tensor, model: nn.Module) -> object:
    return run(model, x)


def _sides(times: Times) -> Sides:
    native, converted = (Spread(one.median_us, one.p20_us, one.p80_us) for one in times)
    return Sides(native, converted, Spread(*times.gain))
