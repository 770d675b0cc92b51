"""Overhead of choices: a cached call compared with nn.Conv2d, one prediction, and the first call of a new problem.

    python -m benchmarks.overhead

Interleaved A B A B in one process, one thread, medians with p20 and p80.
"""

from __future__ import annotations

import json

import torch
from torch import nn

import convselect
from convselect.base import lru, settings, timing
from convselect.base.problem import ConvProblem, conv_problem
from convselect.eager import cached
from convselect.eager.plan import make_plan
from convselect.machine.environment import run_environment
from convselect.model import loaded
from convselect.model.features import features

CALLS = 50
"""Calls per sample, so that a sample is hundreds of microseconds and the clock's own cost vanishes."""


def repeated(call):
    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def cached_call(*, grad: bool) -> dict[str, timing.Timing]:
    """A 1x1x8x8 convolution: converted, plain, and as PyTorch's own forward does it, which looks for no mark."""

    class Stock(nn.Conv2d):
        forward = nn.Conv2d.forward.__wrapped__  # type: ignore[attr-defined]

    stock, plain, ours = (kind(1, 1, 3, padding=1) for kind in (Stock, nn.Conv2d, nn.Conv2d))
    convselect.convert(ours, policy="auto")
    x = torch.randn(1, 1, 8, 8)
    with torch.set_grad_enabled(grad):
        return timing.interleaved(
            {
                "stock": repeated(lambda: stock(x)),
                "nn.Conv2d": repeated(lambda: plain(x)),
                "converted": repeated(lambda: ours(x)),
            },
            rounds=400,
            seed=0,
        )


def plan_cost() -> dict[str, timing.Timing]:
    """The same convolution and its training step: natively, through a plan in Python that runs the same native calls,
    and by a C kernel, whose cached calls run outside Python where `convselect build` has been run."""
    plain, planned, kernel = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))
    convselect.convert(planned, policy="native_contiguous")
    convselect.convert(kernel, policy="direct")
    x = torch.randn(1, 1, 8, 8)
    leaf = torch.randn(1, 1, 8, 8, requires_grad=True)

    def without_grad(layer):
        with torch.no_grad():
            return layer(x)

    calls = {}
    for name, layer in (("native", plain), ("plan in Python", planned), ("C kernel", kernel)):
        calls[f"forward, no grad, {name}"] = repeated(lambda layer=layer: without_grad(layer))
        calls[f"forward, grad, {name}"] = repeated(lambda layer=layer: layer(leaf))
        calls[f"forward and backward, {name}"] = repeated(lambda layer=layer: layer(leaf).sum().backward())
    return timing.interleaved(calls, rounds=100, seed=0)


def problems(count: int) -> list[ConvProblem]:
    """Different problems like those of networks."""
    return [
        conv_problem(1 + i % 3, 16 * (1 + i % 7), 7 * (1 + i % 5), 7 * (1 + i % 5), 32 + i, 3, 3, padding=1)
        for i in range(count)
    ]


def choices() -> dict[str, timing.Timing]:
    """Features alone, features and ranking, and the first call's whole detour through `_choice` and `_make_plan`."""
    predictor = loaded.get()
    assert predictor is not None, "no artifact for this machine"
    new = iter(problems(10**6))
    layer = convselect.SelectedConv2d(8, 8, 3, padding=1)
    x = torch.randn(1, 8, 16, 16)
    weight = layer.weight

    def first_call() -> None:
        lru.clear()
        make_plan(x, weight, layer.bias, ((1, 1), (1, 1), (1, 1), 1), settings.current())

    with torch.no_grad():
        return timing.interleaved(
            {
                "features": lambda: features(next(new)),
                "features + network": lambda: predictor.predict(next(new)),
                "first call of a new problem, forward": first_call,
            },
            rounds=2000,
            seed=0,
        )


def main() -> None:
    torch.set_num_threads(1)
    print(json.dumps(run_environment()))
    print(f"cached calls run {'outside' if cached.is_live() else 'in'} Python")
    for grad in (False, True):
        times = cached_call(grad=grad)
        stock = times["stock"]
        print(f"cached call, grad {'on' if grad else 'off'}: PyTorch's own {stock.median_us / CALLS:.2f} us", end="")
        for name in ("nn.Conv2d", "converted"):
            extra = sorted((b - a) / CALLS for a, b in zip(stock.samples_us, times[name].samples_us, strict=True))
            low, high = extra[len(extra) // 5], extra[len(extra) * 4 // 5]
            print(f", {name} {extra[len(extra) // 2]:+.3f} us (p20 {low:+.3f}, p80 {high:+.3f})", end="")
        print()
    for name, t in plan_cost().items():
        print(f"{name}: {t.median_us / CALLS:.1f} us")
    for name, t in choices().items():
        print(f"{name}: {t.median_us:.1f} us (p20 {t.p20_us:.1f}, p80 {t.p80_us:.1f})")


if __name__ == "__main__":
    main()
