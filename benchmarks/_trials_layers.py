"""Single layers for `benchmarks.trials`: drawn from a list, called from the first call on, compared when settled."""

from __future__ import annotations

import gc
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

import convselect
from benchmarks._networks import sharing_copy
from benchmarks._trials_machine import clock, once
from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.measure.rows import kernel_class

POLICY = convselect.Settings().policy
"""The default policy, whatever the environment says."""
FIRST = 100
MOST_CALLS = 400
"""A trial that is open for longer counts as not settled."""
PATIENCE_S = 6.0
"""Wall-clock time after which a problem that has had its first 100 calls is not waited for."""
ALLOWED_CALLS, ALLOWED_US = 6.0, 300.0
"""The bound on a trial's cost: calls of native, and microseconds."""
LEAST_SPEED = 0.98
_SAMPLE_US = 300.0


class Layer:
    """One layer with its input, as stock, under the default policy, and natively through convselect.

    Args:
        problem: its sizes, as a forward problem.
        backward: whether a call is a forward and a backward pass.
        spoil: changes the input in place.
    """

    def __init__(
        self,
        problem: ConvProblem,
        *,
        backward: bool = False,
        bias: bool = True,
        spoil: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        self.problem, self.backward = problem, backward
        p = problem
        torch.manual_seed(0)
        stock = nn.Conv2d(
            p.C, p.K, (p.R, p.S), p.stride, (p.pad_top, p.pad_left), p.dilation, p.groups, bias=bias
        )  # fmt: skip
        self.layers: dict[str, nn.Module] = {"stock": stock}
        for name, policy in (("default", POLICY), ("native", "native")):
            self.layers[name] = convselect.convert(sharing_copy(stock), policy=policy)
        self.x = torch.randn(p.x_shape)
        if spoil is not None:
            spoil(self.x)
        if backward:
            self.x.requires_grad_()
            self.grad_y = torch.randn(p.y_shape)

    @property
    def directions(self) -> int:
        return 3 if self.backward else 1

    def call(self, side: str) -> Callable[[], object]:
        layer, x = self.layers[side], self.x
        if not self.backward:
            return lambda: layer(x)
        parameters = (x, *layer.parameters())
        grad_y = self.grad_y
        return lambda: torch.autograd.grad(layer(x), parameters, grad_y)

    def on_trial(self) -> bool:
        """Whether a choice for this layer's sizes, in any direction, is still being looked for on real calls."""
        return is_on_trial(self.layers["default"], self.problem)


def is_on_trial(layer: nn.Module, problem: ConvProblem) -> bool:
    """Whether a trial is open for this layer and a problem's N, H and W."""
    sizes = (problem.N, problem.H, problem.W)
    return any(sizes == (c.problem.N, c.problem.H, c.problem.W) for c in convselect.summary(layer).on_trial)


def forget() -> None:
    """Make the next problem the first that this process sees, as far as choices go."""
    convselect.clear()


@contextmanager
def undisturbed(grad: bool) -> Iterator[None]:
    """Without garbage collections, which would hit one side or the other at random."""
    gc.collect()
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            yield
    finally:
        gc.enable()


# ---- which layers ---------------------------------------------------------------------------------------------------


def draw(layers: Sequence[ConvProblem], count: int, most_flops: float, seed: int) -> list[ConvProblem]:
    """`count` different problems: as many of each kernel class, three in five at batch 1, the others at 2 and 8."""
    source = random.Random(seed)
    classes: dict[str, list[ConvProblem]] = defaultdict(list)
    for problem in dict.fromkeys(layers):
        if problem.flops <= most_flops:
            classes[kernel_class(problem)].append(problem)
    for members in classes.values():
        source.shuffle(members)
    drawn: list[ConvProblem] = []
    while len(drawn) < count and any(classes.values()):
        for _, members in sorted(classes.items()):
            if members and len(drawn) < count:
                problem = members.pop()
                larger = problem._replace(N=source.choice((1, 1, 1, 2, 8)))
                drawn.append(larger if larger.flops <= most_flops else problem)
    source.shuffle(drawn)
    return drawn


# ---- the first calls ------------------------------------------------------------------------------------------------


@dataclass
class First:
    """The first calls of one problem, stock's and the default's in turns.

    Attributes:
        default_us, native_us: times of the first `FIRST` calls; of stock's, one before them is not counted.
        calls: how many calls the default had.
        opened: the last of them after which a trial was open; 0 if there was no trial.
        speed: native's time over the default's once settled, median, p20 and p80; every time that it was measured.
    """

    problem: ConvProblem
    directions: int
    default_us: list[float] = field(default_factory=list)
    native_us: list[float] = field(default_factory=list)
    calls: int = 0
    opened: int = 0
    speed: list[timing.Ratio] = field(default_factory=list)

    @property
    def tried(self) -> bool:
        return self.opened > 0

    @property
    def settled(self) -> int | None:
        """Calls until it was settled; None if it was open to the end."""
        return None if self.opened == self.calls else self.opened + 1

    def ratio(self, calls: int, after: int = 0) -> float:
        return sum(self.default_us[after:calls]) / sum(self.native_us[after:calls])

    @property
    def excess(self) -> float:
        """Time of the first calls beyond native's, in units of what a trial may cost."""
        excess_us = sum(self.default_us) - sum(self.native_us)
        native_us = sorted(self.native_us)[len(self.native_us) // 2]
        return excess_us / (ALLOWED_CALLS * native_us + self.directions * ALLOWED_US)

    @property
    def settled_speed(self) -> float | None:
        """The middle one of the speeds measured: a slow one counts only if it was slow every time."""
        if not self.speed:
            return None
        found = sorted(ratio.median for ratio in self.speed)
        return found[-1] if found[-1] >= LEAST_SPEED else found[len(found) // 2]


def first_calls(layer: Layer, source: random.Random, *, most: int = MOST_CALLS) -> First:
    """The first `FIRST` calls beside stock's, in random order, then calls until nothing is on trial any more.

    Stock is called once before: then oneDNN makes its own kernel, which both sides need and neither is charged for.
    """
    found, now = First(layer.problem, layer.directions), clock()
    default, stock = layer.call("default"), layer.call("stock")
    deadline = timing.Deadline(PATIENCE_S)
    with undisturbed(layer.backward):
        stock()
        while found.calls < FIRST or (found.opened == found.calls < most and not deadline.passed):
            both = found.calls < FIRST
            stock_first = both and source.random() < 0.5
            if stock_first:
                found.native_us.append(once(stock, now))
            us = once(default, now)
            found.calls += 1
            if both:
                found.default_us.append(us)
                if not stock_first:
                    found.native_us.append(once(stock, now))
            if layer.on_trial():
                found.opened = found.calls
    return found


def compare(layer: Layer, seed: int, *, rounds: int = 15, seconds: float = 0.4) -> timing.Ratio:
    """Native's time over the default's, both through convselect, in interleaved rounds."""
    now = clock()
    with undisturbed(layer.backward):
        calls = {side: layer.call(side) for side in ("native", "default")}
        us = min(once(calls["native"], now) for _ in range(3))
        times = max(1, math.ceil(_SAMPLE_US / max(us, 1.0)))

        def repeated(call: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                for _ in range(times):
                    call()

            return run

        sides = {side: repeated(call) for side, call in calls.items()}
        timed = timing.interleaved(sides, rounds, seed=seed, deadline_s=seconds)
    on_thread = now is timing.SYSTEM_CLOCK.thread_ns
    native, default = (timed[side].on_thread_clock if on_thread else timed[side] for side in ("native", "default"))
    return timing.ratio(native, default)


def compare_settled(layer: Layer, found: First, least: float = LEAST_SPEED) -> None:
    """Fill in `found.speed`. What looks slow is measured twice more, in other orders and for longer."""
    found.speed.append(compare(layer, 0))
    if found.speed[0].median < least:
        found.speed += [compare(layer, seed, rounds=31, seconds=1.0) for seed in (1, 2)]


def running_total(found: Sequence[First], after: int = 2000) -> tuple[float, float, int]:
    """(the largest, the last, calls) of the default's total time over native's, over calls in the order in which they
    were made, once `after` calls were seen; the last one only if there are fewer."""
    default = native = 0.0
    calls, largest = 0, 0.0
    for one in found:
        for a, b in zip(one.default_us, one.native_us, strict=True):
            default, native, calls = default + a, native + b, calls + 1
            if calls >= after:
                largest = max(largest, default / native)
    last = default / native if native else math.nan
    return (largest or last), last, calls
