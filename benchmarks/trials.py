"""What the default policy costs and gains on real calls, from the first call on.

    python -m benchmarks.trials LIST                          # all parts, one thread, about ten minutes
    python -m benchmarks.trials LIST --busy half --output run.json
    python -m benchmarks.trials LIST --only 1,3,5 --threads 2
    python -m benchmarks.trials --quick                       # a few problems of each, in a minute

LIST is a CSV file of layers; `benchmarks/problems.csv` by default. Parts:

     1  calls until a trial is settled
     2  cost of a call of an open trial that is not timed, over a settled native one
     3  time of the first 45 and 100 calls over native's, plan and prediction included
     4  the settled choice against native
     5  a stack of 19 convolutions, each input of another size
     6  a fresh process that runs three networks once
     7  a model that nominates the slowest algorithms
     8  total time over native's, over all calls of part 3
     9  inputs with a NaN, an infinity, or values of 1e30
    10  share of problems that need a trial, as the program runs

Default and stock run in one process, call by call in random order (5 and 6: in processes of their own, in turns). On
one thread the clock is the calling thread's CPU time, for both sides, otherwise wall time. The process is bound to as
many cores as threads; `--busy` puts spinning processes on the same cores. It restarts itself with malloc set to keep
freed memory, for both sides alike. No store is used, except in part 6. In parts 1 to 4, 8 and 9 every problem starts
with nothing known (`convselect.clear()`); in 5, 7 and 10 the process goes on with what it has learnt. Stock means
nn.Conv2d; in parts 2 and 4, the policy "native", so that a choice is compared without the microsecond of looking it up.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

import convselect
from benchmarks import _trials_networks as networks
from benchmarks import _trials_parts as parts
from benchmarks._classes import PROBLEMS, read_problems
from benchmarks._trials_layers import POLICY
from benchmarks._trials_machine import Figure, neighbours, pin, restart
from convselect.base.timing import Deadline
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment

GROUPS = {
    "first calls": (1, 3, 4, 8), "untimed calls": (2,), "unseen sizes": (5,), "fresh processes": (6,),
    "lying model": (7,), "spoilt inputs": (9,), "share on trial": (10,),
}  # fmt: skip
"""What is run together -> the parts it gives figures of."""
PARTS = tuple(sorted(part for group in GROUPS.values() for part in group))


class Busy(str, Enum):
    none = "none"
    half = "half"
    fifth = "fifth"


class Isa(str, Enum):
    avx2 = "avx2"


def read_parts(text: str) -> tuple[int, ...]:
    """Parts from "1,3,5"; all of them from "".

    Raises:
        typer.BadParameter: for anything else.
    """
    try:
        found = tuple(int(part) for part in text.split(",")) if text else PARTS
    except ValueError:
        found = (0,)
    if not set(found) <= set(PARTS):
        raise typer.BadParameter(f"--only takes numbers of parts, 1 to {PARTS[-1]}, such as 1,3,5")
    return found


def table(figures: Iterable[Figure]) -> Table:
    made = Table(title="The default policy from the first call on", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("part", "figure", "value", "target", "met", "n"):
        left = heading in ("figure", "met")
        made.add_column(heading, justify="left" if left else "right", no_wrap=True)
    last = 0
    for f in figures:
        met = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[f.met]
        part, last = "" if f.part == last else str(f.part), f.part
        target = "" if f.target is None else f"<= {f.target:g}"
        made.add_row(part, f.name, _number(f), target, met, str(f.count))
    return made


def _number(figure: Figure) -> str:
    if math.isnan(figure.value):
        return "-"
    if figure.unit == "calls":
        return f"{figure.value:.0f}"
    return f"{figure.value:.1f} %" if figure.unit == "%" else f"{figure.value:.3f} {figure.unit}".rstrip()


def as_json(figure: Figure) -> dict[str, Any]:
    value = None if math.isnan(figure.value) else figure.value
    return {
        "part": figure.part, "name": figure.name, "value": value, "unit": figure.unit, "target": figure.target,
        "met": figure.met, "count": figure.count,
    }  # fmt: skip


def measure(
    path: Path,
    wanted: Sequence[int],
    counts: parts.Counts,
    *,
    threads: int,
    most_flops: float,
    backward: float,
    seed: int,
    quick: bool,
    progress: Progress,
) -> tuple[list[Figure], dict[str, Any]]:
    """(figures of the parts that are wanted, group -> its rows)."""
    layers = read_problems(path)
    run: dict[str, Callable[[parts.OnStep], tuple[list[Figure], Any]]] = {
        "first calls": lambda step: parts.drawn_layers(layers, counts.problems, most_flops, backward, seed, step),
        "untimed calls": lambda _: parts.untimed_calls(path, counts, threads),
        "unseen sizes": lambda step: networks.unseen_sizes(POLICY, threads, counts.sizes, seed, step),
        "fresh processes": lambda step: networks.fresh_processes(POLICY, threads, counts.repeats, folder, quick, step),
        "lying model": lambda step: parts.lying_model(layers, counts.lies, most_flops, seed, step),
        "spoilt inputs": lambda step: parts.spoilt_inputs(layers, counts.spoilt, most_flops, seed, step),
        "share on trial": lambda step: parts.share_on_trial(counts.layers, counts.layer_sizes, seed, step),
    }
    chosen = [group for group in run if not set(GROUPS[group]).isdisjoint(wanted)]
    bars: dict[str, TaskID] = {group: progress.add_task(group, start=False, total=1.0) for group in chosen}
    figures, rows = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        parts.warm_up()
        gc.collect()
        gc.freeze()  # what exists by now is never looked through again
        for group in chosen:
            bar = bars[group]
            progress.start_task(bar)
            found, rows[group] = run[group](partial(_advance, progress, bar))
            _advance(progress, bar, 1.0)
            figures += [f for f in found if f.part in wanted]
    return sorted(figures, key=lambda f: f.part), rows


def _advance(progress: Progress, bar: TaskID, share: float) -> None:
    progress.update(bar, completed=share)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    layers: Annotated[Path, typer.Argument(help="CSV file of layers", exists=True, dir_okay=False)] = PROBLEMS,
    only: Annotated[str, typer.Option(help="parts to run, such as 1,3,5; all by default")] = "",
    busy: Annotated[Busy, typer.Option(help="what spinning processes leave of each core")] = Busy.none,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    core: Annotated[int | None, typer.Option(help="the (first) core to run on; the last ones by default")] = None,
    isa: Annotated[Isa | None, typer.Option(help="do as if the processor had no more than this")] = None,
    count: Annotated[int | None, typer.Option(help="problems of parts 1, 3, 4 and 8; 126 by default")] = None,
    backward: Annotated[float, typer.Option(min=0, max=1, help="share of these with a backward pass")] = 0.25,
    most_flops: Annotated[float, typer.Option(help="most operations of a problem")] = 4e8,
    seed: Annotated[int, typer.Option()] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a few problems of each; the figures mean little")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write, with the environment")] = None,
) -> None:
    """The default policy against stock, from the first call on."""
    wanted = read_parts(only)
    cores = pin(threads, core)
    if busy is not Busy.none and not cores:
        raise typer.BadParameter("--busy needs a system on which processes can be bound to a core")
    restart(None if isa is None else isa.value)
    torch.set_num_threads(threads)
    convselect.set_store("off")
    counts = parts.QUICK if quick else parts.Counts()
    counts = counts if count is None else counts._replace(problems=count)
    most_flops = min(most_flops, 2e7) if quick else most_flops
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    environment, began = run_environment(), Deadline(None)
    print_environment(console, environment)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with neighbours(busy.value, cores), Progress(*columns, console=Console(stderr=True)) as progress:
        figures, rows = measure(
            layers, wanted, counts, threads=threads, most_flops=most_flops, backward=backward, seed=seed, quick=quick,
            progress=progress,
        )  # fmt: skip
    console.print(table(figures))
    if output is not None:
        about = {
            "policy": POLICY, "layers": layers.name, "busy": busy.value, "threads": threads, "cores": cores,
            "counts": counts._asdict(), "backward": backward, "most_flops": most_flops, "seed": seed, "quick": quick,
            "seconds": began.elapsed_s,
        }  # fmt: skip
        result = {
            "environment": environment, "options": about, "figures": [as_json(f) for f in figures], "rows": rows
        }  # fmt: skip
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app()
