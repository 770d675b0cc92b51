"""How soon an algorithm that goes wrong is caught, and what looking costs.

    python -m benchmarks.checks                 # about five minutes
    python -m benchmarks.checks --repeats 3

A layer is called a hundred times; from then on its algorithm is wrong by 1 % in one row of every image, one tile of 4 x
4 pixels of one image, or one image of the batch. Printed are the calls until `eager/checks.py` notices, which looks at
random calls and places, and the share of a correct run's time that its checks take. Under "measure", so that every run
settles on the same algorithm.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import convselect
from convselect.base import timing
from convselect.choice.budgets import distrusted
from convselect.choice.choose import NATIVE
from convselect.demo.tables import print_environment
from convselect.eager import checks, resolve
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import run_environment

SETTLED = 100
MOST_CALLS = 20_000
# Name -> (channels in, channels out, kernel, groups, input).
LAYERS = {
    "3x3 64, 56x56": (64, 64, 3, 1, (1, 64, 56, 56)),
    "3x3 64, 28x28, batch 8": (64, 64, 3, 1, (8, 64, 28, 28)),
    "depthwise 7x7 96, 56x56": (96, 96, 7, 96, (1, 96, 56, 56)),
}


def spoil_row(y: Tensor) -> None:
    y[:, :, y.shape[2] // 2] *= 1.01


def spoil_tile(y: Tensor) -> None:
    y[0, :, :4, :4] *= 1.01


def spoil_image(y: Tensor) -> None:
    y[-1] *= 1.01


FAULTS: dict[str, Callable[[Tensor], None]] = {"row": spoil_row, "tile": spoil_tile, "image": spoil_image}


def settled(name: str) -> tuple[Callable[[], Tensor], str]:
    """(a call of the layer, the algorithm that it has settled on), with nothing known before."""
    channels, out, kernel, groups, shape = LAYERS[name]
    convselect.clear()
    layer = convselect.SelectedConv2d(channels, out, kernel, padding=kernel // 2, groups=groups, policy="measure")
    x = torch.randn(shape)

    def call() -> Tensor:
        y: Tensor = layer(x)
        return y

    for _ in range(SETTLED):
        call()
    (entry,) = resolve.choices.entries.values()
    return call, entry.found.algorithm


def calls_until_caught(name: str, spoil: Callable[[Tensor], None]) -> float:
    """Calls from the first wrong one on; infinite if none was caught in `MOST_CALLS`, NaN if the layer runs native."""
    call, used = settled(name)
    if used == NATIVE:
        return math.nan
    algorithm = BY_NAME[used]
    right = algorithm.run_checked

    def wrong(*arguments: object, **options: object) -> Tensor | None:
        y = right(*arguments, **options)  # type: ignore[arg-type]
        if y is not None:
            spoil(y)
        return y

    algorithm.run_checked = wrong  # type: ignore[method-assign]
    try:
        for calls in range(1, MOST_CALLS + 1):
            call()
            if used in distrusted:
                return float(calls)
    finally:
        del algorithm.run_checked
    return math.inf


def share_of_time(name: str, calls: int = 3000) -> float:
    """Share of a correct run's time, this thread's own, that checks take."""
    call, _ = settled(name)
    spent, add = 0.0, checks._Due.add

    def counted(due: checks._Due, call_us: float, check_us: float) -> None:
        nonlocal spent
        spent += check_us
        add(due, call_us, check_us)

    checks._Due.add = counted  # type: ignore[method-assign]
    try:
        began_ns = time.thread_time_ns()
        for _ in range(calls):
            call()
        return spent / ((time.thread_time_ns() - began_ns) / 1e3)
    finally:
        checks._Due.add = add  # type: ignore[method-assign]


def main(repeats: Annotated[int, typer.Option(min=1, help="runs per layer and fault")] = 15) -> None:
    """How soon a wrong algorithm is caught."""
    torch.set_num_threads(1)
    convselect.set_store("off")
    warnings.simplefilter("ignore", convselect.ConvselectWarning)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    print_environment(console, run_environment())
    table = Table(title="Calls until a wrong result is caught: median (largest)", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("layer", "algorithm", *FAULTS, "share of time"):
        table.add_column(heading, no_wrap=True)
    began = timing.Deadline(None)
    with torch.no_grad():
        for name in LAYERS:
            found = []
            for spoil in FAULTS.values():
                calls = sorted(calls_until_caught(name, spoil) for _ in range(repeats))
                found.append(f"{calls[len(calls) // 2]:.0f} ({calls[-1]:.0f})")
            _, used = settled(name)
            table.add_row(name, used, *found, f"{100 * share_of_time(name):.2f} %")
    console.print(table)
    console.print(f"{repeats} runs each, {began.elapsed_s:.0f} s")


if __name__ == "__main__":
    typer.run(main)
