"""Whole networks under the policies that choose: the cost of the first calls, and the speed-up afterwards.

    python -m benchmarks.policies
    python -m benchmarks.policies resnet18 --batch 1 --no-training --out run.json

Three sides on the same parameters: stock, converted under "auto", converted under "verify". First, stock and "verify"
take turns from their very first call on: "first calls" is the sum of verify's times over the sum of stock's, with
trials, their overhead and cold starts. Then all three are timed interleaved. Nothing is read from or written to a
store. Outputs, or every gradient, are compared with float64 at each of the first calls, so that every algorithm that a
trial runs is checked.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import convselect
from benchmarks._networks import GRADIENT_BOUND, OUTPUT_BOUND, OUTPUT_FACTOR, Training, distance, sharing_copy
from benchmarks.compile import sized
from benchmarks.models import MODELS
from convselect.base import lru, timing
from convselect.demo.demo import restart_with_tuned_malloc
from convselect.demo.tables import print_environment
from convselect.eager import resolve
from convselect.eager.live_trial import LiveTrial
from convselect.machine.environment import run_environment

NETWORKS = ("resnet18", "unet", "mobilenet_v2", "convnext_tiny")
FIRST = 100
LEAST = 0.98
"""Required speed after the trials, relative to stock."""


@dataclass
class PolicyResult:
    """One network in one mode.

    Attributes:
        first_calls: how many were compared; `first`: verify's time over stock's in those, `first_20` in the first 20.
        auto, verify: times faster than stock afterwards, as the median over rounds with 20th and 80th percentile.
        trials, settled, native: problems on trial, how many ended, how many of those at native.
        worst_error: relative L2 distance from float64 over all first calls; `stock_error` is stock's.
    """

    network: str
    mode: str
    first_calls: int
    first: float
    first_20: float
    stock_us: float
    auto: tuple[float, float, float]
    verify: tuple[float, float, float]
    rounds: int
    trials: int
    settled: int
    native: int
    worst_error: float
    stock_error: float
    wrong: bool


def once(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    start = timing.SYSTEM_CLOCK.wall_ns()
    call()
    return (timing.SYSTEM_CLOCK.wall_ns() - start) / 1e3


def measure(network: str, batch: int, *, training: bool, seconds: float, size: int | None = None) -> PolicyResult:
    model, x = sized(network, size, batch)
    lru.clear()
    exact: list[Tensor]
    sides: dict[str, Callable[[], object]] = {}
    results: dict[str, Callable[[], list[Tensor]]] = {}
    with torch.set_grad_enabled(training):
        if training:
            exact = [g.clone() for g in Training(copy.deepcopy(model).double(), x.double()).gradients()]
        else:
            exact = [copy.deepcopy(model).double()(x.double())]
        for name in ("stock", "auto", "verify"):
            own = copy.deepcopy(model) if training else sharing_copy(model)
            if name != "stock":
                convselect.convert(own, policy=name)
            if training:
                trained = Training(own, x)
                sides[name] = trained.step
                results[name] = lambda m=own: [p.grad for p in m.parameters() if p.grad is not None]
            else:
                last: list[Tensor] = []
                sides[name] = lambda m=own, last=last: last.__setitem__(slice(None), [m(x)])
                results[name] = lambda last=last: last
        stock, verify, errors, stock_error = [], [], [0.0], 0.0
        deadline = timing.Deadline(seconds)
        while len(stock) < FIRST and not (deadline.passed and len(stock) >= 20):
            stock.append(once(sides["stock"]))
            verify.append(once(sides["verify"]))
            if len(stock) == 1:
                stock_error = distance(results["stock"](), exact)
            errors.append(distance(results["verify"](), exact))
        trials = [e.found for e in resolve.choices.entries.values() if isinstance(e.found, LiveTrial)]
        for _ in range(2):
            sides["auto"]()
        times = timing.interleaved(sides, 100, deadline_s=seconds)
    ratios = {name: timing.ratio(times["stock"], times[name]) for name in ("auto", "verify")}
    settled = [trial.choice.algorithm for trial in trials if trial.choice is not None]
    worst = max(errors)
    bound = GRADIENT_BOUND if training else max(OUTPUT_BOUND, OUTPUT_FACTOR * stock_error)
    return PolicyResult(
        network=network, mode=f"{'training' if training else 'inference'} N={batch}", first_calls=len(stock),
        first=sum(verify) / sum(stock), first_20=sum(verify[:20]) / sum(stock[:20]),
        stock_us=times["stock"].median_us, auto=tuple(ratios["auto"]), verify=tuple(ratios["verify"]),
        rounds=len(times["stock"].samples_us), trials=len(trials), settled=len(settled),
        native=settled.count("native"), worst_error=worst, stock_error=stock_error, wrong=not worst <= bound,
    )  # fmt: skip


def table(results: Iterable[PolicyResult]) -> Table:
    made = Table(title="Times faster than stock", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("network", "mode"):
        made.add_column(heading, no_wrap=True)
    for heading in (
        "stock\nms", "auto\n", "verify\n", "p20..p80\n", "first 20 calls\nover stock's", "first calls\nover stock's",
        "calls\n", "trials\n", "settled\n", "at native\n", "worst error\n(stock's)",
    ):  # fmt: skip
        made.add_column(heading, justify="right", no_wrap=True)
    for r in results:
        made.add_row(
            r.network, r.mode, f"{r.stock_us / 1e3:.1f}", f"{r.auto[0]:.2f}",
            f"[{'green' if r.verify[0] >= LEAST else 'red'}]{r.verify[0]:.2f}[/]",
            f"{r.verify[1]:.2f}..{r.verify[2]:.2f}", f"{r.first_20:.2f}", f"{r.first:.2f}", str(r.first_calls),
            str(r.trials), str(r.settled), str(r.native), f"{r.worst_error:.0e} ({r.stock_error:.0e})",
        )  # fmt: skip
    return made


app = typer.Typer(add_completion=False)


@app.command()
def run(
    networks: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(MODELS)}; four by default")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="batch sizes; 1 and 8 by default")] = None,
    size: Annotated[int | None, typer.Option(help="height and width of the images; the networks' own else")] = None,
    seconds: Annotated[float, typer.Option(help="bound on each of the two timings")] = 30.0,
    threads: Annotated[int, typer.Option()] = 1,
    training_too: Annotated[bool, typer.Option("--training/--no-training")] = True,
    malloc: Annotated[bool, typer.Option("--malloc-tuning/--no-malloc-tuning")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, with the environment")] = None,
) -> None:
    """Networks under "auto" and "verify" against stock. Exit status 1 if a result was wrong."""
    names = networks or list(NETWORKS)
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"unknown network {name!r}; known are {', '.join(MODELS)}")
    if malloc:
        restart_with_tuned_malloc()
    convselect.set_store("off")
    torch.set_num_threads(threads)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 170)
    env = run_environment()
    print_environment(console, env)
    results = []
    for name in names:
        for count in batch or (1, 8):
            for training in (False, True) if training_too else (False,):
                results.append(measure(name, count, training=training, seconds=seconds, size=size))
                console.print(f"{name} {results[-1].mode}: verify {results[-1].verify[0]:.2f}")
    console.print(table(results))
    if out is not None:
        out.write_text(json.dumps({"environment": env, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    if any(r.wrong for r in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
