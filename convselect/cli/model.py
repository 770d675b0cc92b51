"""The commands that make and judge a model. Annotations are evaluated here, by typer."""

import contextlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from convselect.cli.console import (
    InputShape,
    Json,
    MallocTuning,
    at_work,
    check_writable,
    console,
    print_table,
    progress,
    refusing,
    say_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from convselect.base.problem import ConvProblem
    from convselect.model.collect import Report, Runner
    from convselect.model.sampling import Layer

_Times = Annotated[list[Path], typer.Argument(help="Stores, our CSV files of times, or wide CSV (<name>_ms).")]
_Split = Annotated[str, typer.Option(help="What is held out: family, random, class, batch, problem.")]


def register(app: typer.Typer) -> None:
    app.command()(collect)
    app.command()(train)
    app.command()(evaluate)
    app.command()(calibrate)


# ---- collect ----------------------------------------------------------------------------------------------------


def collect(
    out: Annotated[Path, typer.Option("--out", help="The store, an SQLite file; continued if it exists.")],
    lists: Annotated[
        list[Path] | None, typer.Argument(help="CSV files of layers: model, N, C, H, W, K, R, S, stride_h, ...")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Your model: module:function, called without arguments. Its own calls are measured."),
    ] = None,
    input_shape: InputShape = None,
    inference: Annotated[bool, typer.Option("--inference", help="Only the forward ones of the model's calls.")] = False,
    random: Annotated[float, typer.Option(min=0, max=1, help="Share of log-uniform problems beside a list.")] = 0.3,
    perturb: Annotated[
        float, typer.Option(min=0, max=1, help="Share of a list's problems at another resolution and width.")
    ] = 0.5,
    count: Annotated[int, typer.Option(min=1, help="Problems to draw from lists.")] = 4000,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this long.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Threads; may be repeated. Default: 1.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option("--dtype", help="Element types; the first gets 85 %.")] = None,
    repeat: Annotated[float, typer.Option(min=0, max=1, help="Share measured twice, to know the label noise.")] = 0.07,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Local Dask worker processes instead of this one.")] = 0,
    scheduler: Annotated[str | None, typer.Option(help="A running Dask scheduler, tcp://host:port.")] = None,
    malloc_tuning: MallocTuning = True,
) -> None:
    """Measure every algorithm on layers of networks, or on your model's own calls, into a store.

    Each result is checked against float64 before it is timed. Can be interrupted and started again: the
    problems that the store has are skipped.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from convselect.demo import demo
    from convselect.model import collect as collection
    from convselect.store.store import Store

    if malloc_tuning:
        demo.restart_with_tuned_malloc()
    with refusing("collect", demo.DemoError, AssertionError):
        items = _problems(
            lists or [], model, input_shape, inference, random, perturb, count, threads or [1], dtypes, seed
        )
        bar = progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with _runner(workers, scheduler) as (runner, description), Store(out) as store, bar:
            task = bar.add_task("measuring", total=len(items))
            bar.update(task, completed=0)

            def show(problem: "ConvProblem", _: bool) -> None:
                bar.update(task, advance=1, description=f"{problem.direction} {problem.R}x{problem.S}")

            report = collection.collect(
                items, store, runner=runner, description=description, minutes=minutes, repeat_share=repeat,
                on_problem=show,
            )  # fmt: skip
    _say_collected(report, out, collection.DRIFT)
    if report.interrupted:
        raise typer.Exit(130)


def _say_collected(report: "Report", out: Path, drift: float) -> None:
    say = console().print
    say(
        f"{report.measured} problems measured into {out}, {report.repeated} of them twice; "
        f"{report.skipped} were there already"
    )
    if report.drifting:
        say(
            f"{len(report.drifting)} of {len(report.drift)} blocks drifted by more than {drift - 1:.0%}: "
            "the machine was busy, or its clock changed"
        )
    for kind in ("wrong", "failed"):
        for name, problem in getattr(report, kind):
            say(f"{kind}: {name} on {problem}")
    if report.interrupted:
        say("interrupted; the same command continues from here")


def _problems(
    lists: list[Path],
    model: str | None,
    input_shape: str | None,
    inference: bool,
    random: float,
    perturb: float,
    count: int,
    threads: list[int],
    dtypes: list[str] | None,
    seed: int,
) -> "list[Layer]":
    from convselect.demo import demo
    from convselect.model import sampling

    if (model is None) != (input_shape is None):
        raise ValueError("--model and --input N,C,H,W go together")
    if model is None and not lists:
        raise ValueError("give CSV files of layers, or --model and --input")
    items: list[Layer] = []
    if model is not None and input_shape is not None:
        subject = demo.load_user_model(model, demo.parse_shape(input_shape))
        with demo.blaming(subject, "looking for its convolutions"):
            found = sampling.recorded(subject.model, subject.x, training=not inference)
        if not found:
            raise ValueError(f"{model} computes no 2-D convolution")
        items += [(subject.name, p._replace(threads=t)) for p in dict.fromkeys(found) for t in threads]
    if lists:
        items += sampling.from_lists(
            lists, count, random=random, perturb=perturb, threads=threads, dtypes=dtypes or sampling.DTYPES, seed=seed
        )
    return items


@contextlib.contextmanager
def _runner(workers: int, scheduler: str | None) -> "Iterator[tuple[Runner | None, dict[str, Any]]]":
    """(the runner that measures problems, the description of its machines); the runner is None for this process."""
    from convselect.model import collect as collection

    if workers and scheduler:
        raise ValueError("--workers starts its own scheduler; give one of --workers and --scheduler")
    if not workers and scheduler is None:
        yield None, collection.trusted_environment()
        return
    try:
        import dask
        from distributed import Client, LocalCluster
    except ModuleNotFoundError:
        raise ValueError("--workers and --scheduler need: pip install 'convselect[workers]'") from None
    with contextlib.ExitStack() as stack:
        if workers:
            # One thread per worker: it runs the measured code, with torch's own threads beside it. Dask would set
            # its own malloc variables for workers, which would be another environment.
            with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
                cluster = LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
            stack.enter_context(cluster)
        yield collection.on_dask(stack.enter_context(Client(cluster if workers else scheduler)))


# ---- train ------------------------------------------------------------------------------------------------------


def train(
    times: _Times,
    family: Annotated[str, typer.Option(help='Device family, for example "cpu-x86-avx2-c".')],
    out: Annotated[Path, typer.Option(help="Folder for <family>.npz and <family>.json.")],
    target: Annotated[str | None, typer.Option(help="Training target: ratio, one_hot, softmax, ...")] = None,
    alpha: Annotated[float | None, typer.Option(min=0.1, help="Exponent of the target; 1 is the paper's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Problems per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest; one cycle.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Weight decay of AdamW.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="In the blocks' transformed path.")] = None,
    average: Annotated[float | None, typer.Option(min=0, max=1, help="Decay of the running mean of weights.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help='Features not to look at, by the beginning of their names; may be repeated, "" for none.'),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    split: _Split = "family",
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 5,
    in_networks: Annotated[
        list[Path] | None,
        typer.Option(help="Times of calls within networks, for margins by kind; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The held-out figures as JSON.")] = False,
) -> None:
    """Cross-validate, fit on everything, and write the artifact with its card."""
    from convselect.model.train import Recipe, report
    from convselect.model.train import train as fit

    recipe = _changed(
        Recipe(), target=target, alpha=alpha, steps=steps, batch=batch, learning_rate=learning_rate,
        weight_decay=weight_decay, dropout=dropout, average=average, ignored=_ignored(ignore), seed=seed,
    )  # fmt: skip
    with refusing("train"), at_work("training"):
        if out.exists() and not (out.is_dir() and os.access(out, os.W_OK)):
            raise ValueError(f"--out: {out} is no folder that may be written to")
        card = fit(times, family, out, recipe, n_folds=folds, how=split, in_networks=in_networks or [])
    if as_json:
        say_json(card.figures)
        return
    held_out = card.figures["held_out"]
    _print_figures(
        f"{family}: {card.data['problems']} problems, held out {held_out['split']}, margin {card.margin:g}",
        report(card),
    )


def _ignored(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(name for name in names if name)


def _changed(recipe: Any, **values: Any) -> Any:
    """The recipe with those values that were given."""
    return replace(recipe, **{name: value for name, value in values.items() if value is not None})


# ---- evaluate ---------------------------------------------------------------------------------------------------


def evaluate(
    times: _Times,
    artifact: Annotated[Path | None, typer.Option(help="A model file, judged on all of the data as it is.")] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help="What to train and judge on held-out problems: reformer, gbdt, lambdarank, mlp, resnet18, neighbour, "
            "native, best_single, always:<algorithm>; may be repeated. Default: reformer."
        ),
    ] = None,
    split: _Split = "family",
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 5,
    one_fold: Annotated[bool, typer.Option("--one-fold", help="Hold out the first fold only: quicker.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of the Reformer.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Problems per step of the Reformer.")] = None,
    alpha: Annotated[float | None, typer.Option(min=0.1, help="Exponent of its target.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="In its blocks.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help='Features it does not look at; may be repeated, "" for none.')
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    learning_curve: Annotated[
        bool, typer.Option("--learning-curve", help="Also train on an eighth, a quarter, half of the networks.")
    ] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder for figures of the last one judged.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """How good choices are: fraction of the oracle, speed-up over native, harm, by direction and class."""
    from convselect.model import judging
    from convselect.model.selectors import Missing
    from convselect.model.train import Recipe

    recipe = _changed(
        Recipe(seed=seed), steps=steps, batch=batch, alpha=alpha, dropout=dropout, ignored=_ignored(ignore)
    )
    with refusing("evaluate", Missing, ModuleNotFoundError), at_work("evaluating"):
        check_writable(json_file, "--json")
        result = judging.judge_all(
            times, artifact, selector or ([] if artifact else ["reformer"]), split, folds, one_fold, recipe,
            learning_curve=learning_curve, figures=figures,
        )  # fmt: skip
    _say_judged(result)
    if json_file is not None:
        kept = {key: value for key, value in result.items() if key not in ("lines", "written")}
        with refusing("evaluate"):
            json_file.write_text(json.dumps(kept, indent=1) + "\n")


def _say_judged(result: dict[str, Any]) -> None:
    _print_figures(f"{result['problems']} problems, {result['split']}", result["lines"])
    if result["trained_on"]:
        typer.echo(f"the model was trained on {', '.join(result['trained_on'])}: on problems it knows, figures flatter")
    if result["noise"] is not None:
        noise = result["noise"]
        typer.echo(
            f"label noise: of {noise['problems']} problems measured twice the winner changed in "
            f"{noise['winner_changes_share']:.1%}; a perfect reader of the first measurement reaches "
            f"{noise['fraction_of_oracle_mean']:.4f} of the second one's oracle, "
            f"{noise['fraction_of_oracle_p10']:.3f} at the 10th percentile"
        )
    for problems, of in (result["learning_curve"] or {}).items():
        native = (
            f", {of['slower_than_native_share']:.1%} slower than native" if "slower_than_native_share" in of else ""
        )
        typer.echo(
            f"trained on {problems} problems, without a margin: {of['fraction_of_oracle_mean']:.4f} of oracle, "
            f"{of['fraction_of_oracle_p10']:.3f} at the 10th percentile{native}"
        )
    for name, judged in result["judged"].items():
        for algorithm, found in judged.get("r_squared", {}).items():
            typer.echo(
                f"{name}, runtime of {algorithm}: R² {found['r2_log']:.3f} of log time, {found['r2_linear']:.3f} of "
                f"time, median error {found['median_relative_error']:.0%}"
            )
    for path in result["written"]:
        typer.echo(f"wrote {path}")


# ---- calibrate --------------------------------------------------------------------------------------------------


def calibrate(
    seconds: Annotated[float, typer.Option(min=1, help="Time to spend.")] = 30.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads that the problems run on.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be corrected.")] = False,
    as_json: Json = False,
    malloc_tuning: MallocTuning = True,
) -> None:
    """Fit the nearest shipped model to this machine: time a few dozen problems, keep a correction per algorithm."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    from convselect.demo import demo
    from convselect.model import calibrate as calibration

    if malloc_tuning:
        demo.restart_with_tuned_malloc()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with refusing("calibrate", AssertionError), progress(*columns) as bar:
        task = bar.add_task("timing", total=len(calibration.problems()))
        bar.update(task, completed=0)
        report = calibration.calibrate(
            seconds, threads, write=not dry_run, on_problem=lambda done, _: bar.update(task, completed=done)
        )
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=1, default=str))
        return
    out = console()
    out.print(f"{report.problems} problems timed; {report.artifact} corrected by")
    for name, bias in report.bias.items():
        out.print(f"  {name:20} {bias:+.2f} in ln(t_native / t), from {report.times[name]} times")
    out.print(f"kept in {report.path}" if report.path else "nothing was kept")


def _print_figures(title: str, lines: list[list[str]]) -> None:
    from convselect.model.evaluate import SUMMARY_HEADER

    first, *others = SUMMARY_HEADER
    print_table({first: "left", **dict.fromkeys(others, "right")}, lines, title, no_wrap=True)
