"""The demonstration's results as data and as tables, and its progress bar. Needs rich."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from convselect import ConvProblem, Direction

if TYPE_CHECKING:
    from convselect.base.timing import Ratio

TUNED_BY_US = "CONVSELECT_DEMO_MALLOC"
"""Environment variable that says that the demonstration, not its user, set malloc's."""


@dataclass(frozen=True)
class ChoiceGroup:
    """Layers with the same problem and the same choice, and its speed relative to native: as predicted, and as timed
    calls have shown (by now, if the source is "trial")."""

    layers: tuple[str, ...]
    direction: str
    problem: str
    algorithm: str
    source: str
    predicted_gain: float | None
    measured_gain: float | None


@dataclass(frozen=True)
class Errors:
    """Relative L2 distance from float64, ||got - exact|| / ||exact||, of one quantity on both sides."""

    quantity: str
    native: float
    converted: float


@dataclass(frozen=True)
class Speed:
    """Interleaved times of one mode in microseconds; `ratio` is native / converted, above 1 if convselect wins."""

    mode: str
    rounds: int
    native_us: float
    converted_us: float
    ratio: Ratio
    thread_ratio: Ratio


@dataclass(frozen=True)
class ModelResult:
    name: str
    input_shape: tuple[int, ...]
    conversion: str
    note: str
    choices: tuple[ChoiceGroup, ...]
    errors: tuple[Errors, ...]
    speeds: tuple[Speed, ...]


def plain(result: ModelResult) -> dict[str, Any]:
    """A result as JSON types."""
    values = asdict(result)
    for speed, plain_speed in zip(result.speeds, values["speeds"], strict=True):
        plain_speed["ratio"] = speed.ratio._asdict()
        plain_speed["thread_ratio"] = speed.thread_ratio._asdict()
    return values


def print_environment(console: Console, env: Mapping[str, Any]) -> None:
    say = lambda text: console.print(escape(text), soft_wrap=True)  # noqa: E731
    limits = "".join(f", {name}={value}" for name, value in env["isa_limits"].items() if value)
    load = f", load {env['load_average']:.1f}" if env["load_average"] is not None else ""
    say(f"{env['device']}, {env['isa']}{limits}, {env['threads']} threads on {env['cpus']} CPUs{load}")
    say(f"torch {env['torch']}, oneDNN {env['onednn']}, Python {env['python']}, convselect {env['convselect']}")
    settings = " ".join(f"{name}={value}" for name, value in env["malloc"].items() if value)
    if not settings:
        say("malloc: as it is. Results of some MB are then unmapped and faulted in again on every call, on both sides.")
    else:
        by_us = " (set by this command, which restarted itself; --no-malloc-tuning leaves it)"
        say(f"malloc keeps freed memory on both sides: {settings}{by_us if os.environ.get(TUNED_BY_US) else ''}")


def _table(title: str, *headings: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    for heading in (*headings, *numbers):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    return table


def print_choices(console: Console, result: ModelResult) -> None:
    """Print one row per problem and choice: directions with the same choice share a row."""
    shape = "x".join(map(str, result.input_shape))
    title = f"{result.name}, input {shape}: what runs where"
    table = _table(title, "layers", "problem", "directions", "algorithm", "source", numbers=("predicted", "measured"))
    rows: dict[tuple[Any, ...], list[str]] = {}
    for group in result.choices:
        forward = ConvProblem.parse(group.problem).with_direction(Direction.FORWARD)
        key = (group.layers, forward, group.algorithm, group.source, group.predicted_gain, group.measured_gain)
        rows.setdefault(key, []).append(group.direction)
    for (layers, problem, algorithm, source, *gains), directions in rows.items():
        others = f" +{len(layers) - 1}" if len(layers) > 1 else ""
        where = "all" if len(directions) == len(Direction) else ", ".join(directions)
        numbers = ("-" if gain is None else f"{gain:.2f}" for gain in gains)
        table.add_row(escape(layers[0]) + others, problem.brief, where, algorithm, source, *numbers)
    console.print(table)
    for text in (result.conversion, result.note):
        if text:
            console.print(escape(text), soft_wrap=True)


def print_numbers(console: Console, results: Sequence[ModelResult], env: Mapping[str, Any]) -> None:
    table = _table(
        "Relative L2 error against the same model in float64", "model", "of", numbers=("nn.Conv2d", "convselect")
    )
    for result in results:
        for e in result.errors:
            table.add_row(escape(result.name), e.quantity, f"{e.native:.1e}", f"{e.converted:.1e}")
    console.print(table)
    console.print(
        "A gradient jumps where rounding moves a ReLU's input across zero or changes a pooling's winner:\n"
        "one in a million such values is 1e-3 of relative error, on either side."
    )
    numbers = ("rounds", "nn.Conv2d\nms", "convselect\nms", "ratio", "p20-p80", "thread\nratio")
    table = _table("Time in interleaved runs; ratio above 1: convselect is faster", "model", "mode", numbers=numbers)
    for result in results:
        for s in result.speeds:
            times = (f"{s.native_us / 1e3:.1f}", f"{s.converted_us / 1e3:.1f}")
            ratios = (f"{s.ratio.median:.2f}", f"{s.ratio.p20:.2f}-{s.ratio.p80:.2f}", f"{s.thread_ratio.median:.2f}")
            table.add_row(escape(result.name), s.mode, str(s.rounds), *times, *ratios)
    console.print(table)
    console.print(
        "ratio: nn.Conv2d / convselect within each round, median. thread ratio: the same in CPU time of the\n"
        "calling thread, which neighbours on the machine disturb less. Training: forward, loss and backward."
    )
    if env["load_average"] is not None and env["load_average"] > env["cpus"] / 2:
        console.print(
            f"Other work was running (load {env['load_average']:.1f} on {env['cpus']} CPUs): read these times as noise."
        )
    elif any(s.rounds < 5 for result in results for s in result.speeds):
        console.print("Fewer than 5 rounds say little; --seconds buys more.")


LINE_EVERY_S = 10.0
"""How often a long stage says so if no bar can be drawn."""


class StageBar:
    """A bar on a terminal; elsewhere a line per stage, and one every ten seconds. Redrawn only between timed stretches,
    never by a thread."""

    STAGES = ("building", "comparing with float64", "timing inference", "timing training")

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._last = ""
        self._said_at = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.progress = Progress(
            *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
        )
        self._task = self.progress.add_task("", total=len(self.STAGES) * len(names))

    def stage(self, index: int, name: str, stage: str, fraction: float) -> None:
        text = f"{name}: {stage}"
        done = len(self.STAGES) * index + self.STAGES.index(stage) + fraction
        now = self.progress.get_time()
        if not self._console.is_terminal and (text != self._last or now - self._said_at >= LINE_EVERY_S):
            share = "" if text != self._last else f", {fraction:.0%}"
            self._console.print(escape(f"{text}{share}"), soft_wrap=True)
            self._said_at = now
        self._last = text
        self.progress.update(self._task, description=escape(text), completed=done, refresh=True)
