"""`convselect tune`. Annotations are evaluated here, by typer."""

import contextlib
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convselect.cli.console import console, directions_of, progress, refuse

if TYPE_CHECKING:
    from rich.console import Console

    from convselect.base.problem import ConvProblem
    from convselect.base.settings import Settings
    from convselect.tune.records import Log
    from convselect.tune.tuning import Outcome, Tuning

TRIALS = 64
"""Programs per problem if no budget is given."""


def register(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="What to tune for: a built-in network (resnet50), your own (module:function, with --input), a problem "
            '("1x64x56x56 64 3x3 p1"), or a CSV file of layers; several are allowed.'
        ),
    ],
    input_shape: Annotated[str | None, typer.Option("--input", help="The network's input, N,C,H,W.")] = None,
    directions: Annotated[
        str, typer.Option(help="Of forward, backward_data, backward_weight, several with commas between.")
    ] = "forward",
    trials: Annotated[
        int | None, typer.Option(min=1, help=f"Programs to measure; {TRIALS} per problem where no budget is given.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="How long to search.")] = None,
    objective: Annotated[
        str, typer.Option(help="latency, target (with --target), speedup, or early-stop.")
    ] = "latency",
    target_ms: Annotated[
        float | None, typer.Option("--target", help="Of each network's convolutions together, in ms: fast enough.")
    ] = None,
    patience: Annotated[
        int, typer.Option(min=1, help="Rounds of 16 programs without a gain after which a problem is left alone.")
    ] = 8,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; PyTorch's default otherwise.")] = None,
    strategy: Annotated[str, typer.Option(help="evolution, with a cost model, or random.")] = "evolution",
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from what earlier searches here measured.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Search for the fastest algorithm and parameters of each convolution, by measuring here, and keep them in the
    store: the next run uses them.

    Every program is checked against float64 before it is timed. Ctrl-C ends the search and keeps what was found.
    """
    import torch

    from convselect.base import settings
    from convselect.demo import demo
    from convselect.tune import cost_model, scheduler, tuning
    from convselect.tune.runner import Live

    count = threads or torch.get_num_threads()
    used = settings.current()
    try:
        if strategy not in tuning.STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(tuning.STRATEGIES)}, not {strategy!r}")
        if (objective == "target") != (target_ms is not None):
            raise ValueError("--objective target and --target belong together")
        found = problems(targets, input_shape, directions, count)
        networks = {network for calls in found.values() for network in calls}
        goal = scheduler.Objective(objective, dict.fromkeys(networks, (target_ms or 0.0) * 1e3))
        model = None if strategy == "random" else cost_model.CostModel(seed)
        prepared = tuning.problems_of(found.items(), used)
    except (demo.DemoError, ValueError, OSError, cost_model.Missing) as error:
        raise refuse("tune", error) from error
    log = _log()
    search = tuning.Tuning(
        prepared, Live(), model=model, objective=goal, patience=patience, seed=seed, log=log, resume=resume
    )
    if trials is None and minutes is None:
        trials = TRIALS * len(found)
    # Nothing but JSON may be printed.
    out = console(stderr=as_json)
    interrupted = _searched(search, trials, minutes, out)
    outcomes, stopped = _confirmed(search, used)
    interrupted = interrupted or stopped
    told = tuning.record(search, outcomes, interrupted)
    if as_json:
        typer.echo(json.dumps(told, indent=1))
    else:
        _print(search, outcomes, told, out)
    if search.wrong:
        names = sorted({program.algorithm for _, program, _ in search.wrong})
        typer.echo(f"convselect tune: wrong or failed, and left out: {', '.join(names)}", err=True)
    if interrupted:
        raise typer.Exit(130)


def problems(
    targets: list[str], input_shape: str | None, directions: str, threads: int
) -> "dict[ConvProblem, dict[str, int]]":
    """Distinct problems -> network -> how often it computes them. Each layer of a list counts as a separate network.

    Raises:
        DemoError, ValueError, OSError: if a target, a shape or a direction cannot be read.
    """
    from convselect import Direction
    from convselect.demo import demo
    from convselect.demo.architectures import ARCHITECTURES
    from convselect.doctor import bench
    from convselect.model import sampling

    wanted = directions_of(directions)
    training = wanted != [Direction.FORWARD]
    found: dict[ConvProblem, dict[str, int]] = {}
    for target in targets:
        own: Counter[ConvProblem] = Counter()
        if target in ARCHITECTURES or (":" in target and " " not in target and not target.endswith(".csv")):
            subject = demo.subject_of(target, input_shape)
            with demo.blaming(subject, "looking for its convolutions"):
                own.update(sampling.recorded(subject.model, subject.x, training=training))
        elif target.endswith(".csv"):
            for problem in dict.fromkeys(problem for _, problem in sampling.read_layers(target)):
                for direction in wanted:
                    one = problem._replace(direction=direction, threads=threads)
                    found.setdefault(one, {})[str(one)] = 1
        elif len(target.split()) < 2:
            raise demo.DemoError(
                f"{target!r} is neither a built-in network ({', '.join(ARCHITECTURES)}), nor module:function, nor a "
                'CSV file of layers, nor a problem like "1x64x56x56 64 3x3 p1"'
            )
        else:
            own.update(bench.parse(target)._replace(direction=direction) for direction in wanted)
        for problem, calls in own.items():
            if problem.direction in wanted and problem.device == "cpu":
                found.setdefault(problem._replace(threads=threads), {})[target] = calls
    if not found:
        raise demo.DemoError("there is no 2-D convolution to tune on the CPU")
    return found


def _log() -> "Log | None":
    from convselect.tune import tuning

    try:
        return tuning.user_log()
    except OSError as error:
        typer.echo(f"convselect tune: nothing will be kept: {error}", err=True)
        return None


def _searched(search: "Tuning", trials: int | None, minutes: float | None, out: "Console") -> bool:
    """Run the search; returns whether the user interrupted it."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )  # fmt: skip
    if search.resumed:
        out.print(f"{search.resumed} programs were measured by earlier searches")
    with progress(*columns) as bar:
        task = bar.add_task(f"{len(search.tasks)} problems", total=trials, state="")

        def show(now: "Tuning") -> None:
            bar.update(task, completed=now.trials, state=state(now))

        bar.update(task, completed=0, state="first times")
        try:
            search.run(trials=trials, seconds=None if minutes is None else 60 * minutes, on_round=show)
        except KeyboardInterrupt:
            return True
    return False


def state(search: "Tuning") -> str:
    """The state of a search in one line: latency now and without tuning, and the expected gain of one more round for
    each problem."""
    now, before = search.latency_us, search.default_latency_us
    if not math.isfinite(now):
        return "first times"
    text = f"{before / 1e3:.2f} ms -> {now / 1e3:.2f} ms"
    gain = search.scheduler.expected_gain()
    return text if math.isnan(gain) else f"{text}, at most {max(gain, 0) / max(now, 1e-9):.0%} hoped for"


def _confirmed(search: "Tuning", used: "Settings") -> "tuple[list[Outcome], bool]":
    """The final comparison of every problem, and whether the user interrupted it; each result is stored at once."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from convselect.tune import tuning

    found: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with progress(*columns) as bar, contextlib.suppress(KeyboardInterrupt):
        task_id = bar.add_task("comparing with what runs now", total=len(search.tasks))
        for i in range(len(search.tasks)):
            bar.update(task_id, completed=i)
            verdict = search.confirm(i)
            if verdict is None:
                continue
            task = search.tasks[i]
            outcome = tuning.Outcome(task.problem, task.calls, search.default(i), verdict, task.trials)
            found.append(outcome)
            tuning.keep([outcome], used)
        return found, False
    return found, True


def _print(search: "Tuning", outcomes: "list[Outcome]", told: dict[str, Any], out: "Console") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("problem", "calls", "ran", "runs now", "x faster", "x native"):
        table.add_column(name, justify="right" if name in ("calls", "x faster", "x native") else "left")
    for one in outcomes:
        gain = "" if one.verdict.gain is None else f"{one.verdict.gain:.2f}"
        table.add_row(
            one.problem.brief, str(sum(one.calls.values())), one.default.algorithm, str(one.verdict.program),
            f"{one.verdict.speedup:.2f}", gain,
        )  # fmt: skip
    out.print(table)
    mean = told["geometric_mean"]
    if mean is not None:
        out.print(f"{search.trials} programs measured; geometric mean {mean:.2f} times as fast as without tuning")
    if told["interrupted"]:
        out.print("interrupted: what was found is kept, and the same command goes on from here")
