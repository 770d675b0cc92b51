"""A network before and after conversion: how far apart the results are, and how long both take. For demo and report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from convselect.base import timing

MAX_ROUNDS = 200


class Times(NamedTuple):
    """Both sides' times, in the same rounds."""

    native: timing.Timing
    converted: timing.Timing

    @property
    def gain(self) -> timing.Ratio:
        """The native side's time over the converted one's, by round."""
        return timing.ratio(*self)

    @property
    def on_thread_clock(self) -> Times:
        return Times(self.native.on_thread_clock, self.converted.on_thread_clock)


def tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in what a model returned: a tensor, or containers of them."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [t for part in output for t in tensors(part)] if isinstance(output, list | tuple) else []


def infer(model: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        return model(x)


def train_but_dropout(model: nn.Module) -> None:
    """Training mode for all but dropout, whose masks would differ between the sides."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()


def distance(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """Relative L2 distance of two lists of tensors, each taken as one vector; 0 / 0 counts as 0."""
    off = norm = 0.0
    for a, b in zip(got, want, strict=True):
        off += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    return math.sqrt(off / norm) if norm else (math.inf if off else 0.0)


def time_both(
    run: Callable[[nn.Module], object],
    native: nn.Module,
    converted: nn.Module,
    seconds: float,
    device: torch.device,
    on_fraction: Callable[[float], object],
) -> Times:
    """Time `run` on both sides in turns for about `seconds`; `on_fraction` is told how much is done, 0 to 1."""
    deadline = timing.Deadline(seconds)
    found = timing.interleaved(
        {"native": lambda: run(native), "converted": lambda: run(converted)},
        MAX_ROUNDS,
        deadline_s=seconds,
        synchronise=None if device.type == "cpu" else torch.accelerator.synchronize,
        on_round=lambda done: on_fraction(max(done / MAX_ROUNDS, min(1.0, deadline.elapsed_s / seconds))),
    )
    return Times(**found)
