"""Speed-ups over nn.Conv2d by class of convolution and direction; or, with `--models`, of whole networks.

    python -m benchmarks.run                          # a few problems a class, some minutes
    python -m benchmarks.run --count 60 --out run.json
    python -m benchmarks.run --models --compile

The baseline is PyTorch's own convolution on NCHW operands. "best" is the fastest automatic algorithm of the pool under
the current precision and workspace budgets, as a perfect choice would run it; "chosen" is the algorithm that a
converted layer runs, through the trained artifact (`benchmarks.overhead` measures its few microseconds per call). The
artifact was trained on shapes of the same networks; its held-out figures are for networks it has not seen. On one
thread the clock is that thread's CPU time, otherwise wall time. Results are compared with float64 before anything is
timed. The process restarts itself once with malloc set to keep freed memory, for both sides alike.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import _classes, _kernels
from benchmarks._classes import CLASSES, KernelClass
from benchmarks._kernels import Measured, Summary
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.cli.console import progress
from convselect.demo.demo import restart_with_tuned_malloc
from convselect.demo.tables import print_environment
from convselect.machine.environment import run_environment
from convselect.measure.measure import ERROR_BOUNDS

DIRECTION_NAMES = {
    Direction.FORWARD: "forward",
    Direction.BACKWARD_DATA: "grad-input",
    Direction.BACKWARD_WEIGHT: "grad-weight",
}
LAYOUT_NAMES = {CONTIGUOUS: "NCHW", CHANNELS_LAST: "channels_last"}


def plan(
    problems: Sequence[ConvProblem],
    classes: Sequence[KernelClass],
    directions: Sequence[Direction],
    count: int,
    dtype: str,
) -> dict[str, list[ConvProblem]]:
    """Class name -> the problems to measure, all directions; one problem may stand in several classes."""
    return {
        kernel_class.name: [
            problem.with_direction(direction)
            for direction in directions
            for problem in _classes.drawn(kernel_class, problems, count, dtype)
        ]
        for kernel_class in classes
    }


def rows(
    planned: Mapping[str, Sequence[ConvProblem]], measured: Mapping[ConvProblem, Measured], layouts: Sequence[str]
) -> list[tuple[KernelClass, Direction, float | None, dict[str, Summary]]]:
    """(class, direction, target, layout -> summary) of every class and direction that has problems."""
    found = []
    for name, problems in planned.items():
        kernel_class = _classes.BY_NAME[name]
        for direction, group in _kernels.by_direction(measured[p] for p in problems).items():
            summaries = {layout: _kernels.summary(group, layout) for layout in layouts}
            found.append((kernel_class, direction, kernel_class.targets.get(direction), summaries))
    return found


def as_json(row: tuple[KernelClass, Direction, float | None, dict[str, Summary]]) -> dict[str, Any]:
    kernel_class, direction, target, summaries = row
    plain = {layout: {**s._asdict(), "names": dict(s.names)} for layout, s in summaries.items()}
    return {"class": kernel_class.name, "direction": str(direction), "target": target, "layouts": plain}


def record(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured), "problem": str(measured.problem)}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "wrong" if math.isnan(value) else f"{value:.2f}" if value < 9.95 else f"{value:.1f}"


def _against(value: float, target: float | None) -> str:
    """A number in green if it reaches its target, in red if not."""
    text = _number(value)
    return text if target is None else f"[{'green' if value >= target else 'red'}]{text}[/]"


def tables(found: Iterable[tuple[KernelClass, Direction, float | None, dict[str, Summary]]]) -> list[Table]:
    """One table per layout of the operands."""
    of_layout: dict[str, Table] = {}
    last = ""
    for kernel_class, direction, target, summaries in found:
        name = kernel_class.name if kernel_class.name != last else ""
        last = kernel_class.name
        for layout, s in summaries.items():
            if layout not in of_layout:
                where = LAYOUT_NAMES[layout]
                table = Table(
                    title=f"{where} operands: times faster than nn.Conv2d in NCHW",
                    title_justify="left",
                    box=SIMPLE_HEAD,
                )
                table.add_column("class")
                table.add_column("direction")
                for heading in ("n", "target", "best", "p10", "chosen", "p10", "native"):
                    table.add_column(heading, justify="right")
                table.add_column("best algorithms")
                of_layout[layout] = table
            names = ", ".join(f"{name} {count}" for name, count in s.names[:3])
            of_layout[layout].add_row(
                name, DIRECTION_NAMES[direction], str(s.count), _number(target), _against(s.best, target),
                _number(s.best_p10), _against(s.chosen, target), _number(s.chosen_p10), _number(s.native),
                names + (", ..." if len(s.names) > 3 else ""),
            )  # fmt: skip
    return list(of_layout.values())


def run_kernels(options: argparse.Namespace, console: Console) -> tuple[dict[str, Any], bool]:
    """(what to write as JSON, whether every result was right)."""
    classes = [c for c in CLASSES if c.name in options.classes]
    directions = [Direction(d) for d in options.directions]
    layouts = [CONTIGUOUS, CHANNELS_LAST] if options.layout == "both" else [options.layout]
    planned = plan(_classes.read_problems(options.layers), classes, directions, options.count, options.dtype)
    measured: dict[ConvProblem, Measured] = {}
    todo = list(dict.fromkeys(p for problems in planned.values() for p in problems))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Redrawn between problems only: a thread that draws would be timed as well.
    with progress(*columns, auto_refresh=False) as bar:
        task = bar.add_task("measuring", total=len(todo))
        for problem in todo:
            bar.update(task, refresh=True)
            measured[problem] = _kernels.measure(
                problem, layouts=layouts, rounds=options.rounds, seconds=options.seconds
            )
            bar.advance(task)
    found = rows(planned, measured, layouts)
    for table in tables(found):
        console.print(table)
    console.print(
        "best: fastest algorithm of the pool within the budgets; chosen: what a converted layer runs; native:\n"
        "nn.Conv2d on these operands. Geometric means and 10th percentiles (p10) over n problems."
    )
    wrong = {str(m.problem): m.wrong for m in measured.values() if m.wrong}
    for name, reasons in wrong.items():
        console.print(f"[red]wrong[/] {escape(name)}: {escape(str(reasons))}", soft_wrap=True)
    result = {"rows": [as_json(row) for row in found], "problems": [record(m) for m in measured.values()]}
    return result, not wrong


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="benchmarks.run", description="nn.Conv2d against convselect.")
    made.add_argument("--models", nargs="*", metavar="NAME", help="whole networks instead; all of them by default")
    made.add_argument("--compile", action="store_true", help="with --models: torch.compile too, a minute each")
    made.add_argument("--no-training", action="store_true", help="with --models: inference only")
    names = [c.name for c in CLASSES]
    meanings = "; ".join(f"{c.name}: {c.title}" for c in CLASSES)
    made.add_argument("--classes", nargs="+", default=names, choices=names, metavar="CLASS", help=meanings)
    made.add_argument(
        "--layers", default=_classes.PROBLEMS, help="CSV file of layers; default: the list that comes along"
    )
    made.add_argument(
        "--directions", nargs="+", default=[str(d) for d in Direction], choices=[str(d) for d in Direction]
    )
    made.add_argument("--layout", default="both", choices=["both", CONTIGUOUS, CHANNELS_LAST], help="of our operands")
    made.add_argument("--dtype", default="float32", choices=list(ERROR_BOUNDS), help="of all classes but 16-bit")
    made.add_argument("--count", type=int, default=6, help="problems per class and direction")
    made.add_argument("--rounds", type=int, default=9, help="maximum number of samples of each time")
    made.add_argument("--seconds", type=float, help="bound on each problem's timing (1.5) or each network's (20)")
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--out", help="JSON file to write, with the environment")
    made.add_argument("--no-malloc-tuning", action="store_true", help="leave malloc as it is")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a result was wrong."""
    options = parser().parse_args(argv)
    if not options.no_malloc_tuning:
        restart_with_tuned_malloc()
    torch.set_num_threads(options.threads)
    # Into a pipe rich would squeeze the table into 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 130)
    env = run_environment()
    print_environment(console, env)
    if options.models is not None:
        from benchmarks import _networks

        options.seconds = options.seconds or 20.0
        result, right = _networks.run_models(options, console)
    else:
        options.seconds = options.seconds or 1.5
        result, right = run_kernels(options, console)
    if options.out:
        arguments = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
        arguments["out"] = Path(options.out).name
        Path(options.out).write_text(
            json.dumps({"environment": env, "arguments": arguments, **result}, indent=1) + "\n"
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
