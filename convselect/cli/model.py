"""The commands that make and judge a model. Annotations are evaluated here, by typer."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from convselect.model.sampling import Layer

_FAIL = typer.Exit(2)


def register(app: typer.Typer) -> None:
    app.command()(collect)
    app.command()(train)
    app.command()(evaluate)
    app.command()(calibrate)


def _refuse(command: str, error: object) -> typer.Exit:
    typer.echo(f"convselect {command}: {error}", err=True)
    return _FAIL


# ---- collect ----------------------------------------------------------------------------------------------------


def collect(
    out: Annotated[Path, typer.Option("--out", help="The store, an SQLite file; gone on with where it exists.")],
    lists: Annotated[
        list[Path] | None, typer.Argument(help="CSV files of layers: model, N, C, H, W, K, R, S, stride_h, ...")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Your model: module:function, called without arguments. Its own calls are measured."),
    ] = None,
    input_shape: Annotated[str | None, typer.Option("--input", help="Its input, N,C,H,W.")] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Of the model's calls, only the forward ones.")
    ] = False,
    random: Annotated[float, typer.Option(min=0, max=1, help="Share of log-uniform problems beside a list.")] = 0.3,
    perturb: Annotated[
        float, typer.Option(min=0, max=1, help="Share of a list's problems at another resolution and width.")
    ] = 0.5,
    count: Annotated[int, typer.Option(min=1, help="Problems to draw from lists.")] = 4000,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this long.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Threads; may be repeated. Default: 1.")] = None,
    dtypes: Annotated[list[str] | None, typer.Option("--dtype", help="Element types; the first gets 85 %.")] = None,
    repeat: Annotated[float, typer.Option(min=0, max=1, help="Share measured twice, to know the label noise.")] = 0.07,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Local Dask worker processes instead of this one.")] = 0,
    scheduler: Annotated[str | None, typer.Option(help="A running Dask scheduler, tcp://host:port.")] = None,
    malloc_tuning: Annotated[
        bool, typer.Option("--malloc-tuning/--no-malloc-tuning", help="Restart once with malloc keeping freed memory.")
    ] = True,
) -> None:
    """Measure every algorithm on layers of networks, or on your model's own calls, into a store.

    Each result is checked against float64 before it is timed. Can be interrupted and started again: what the store has
    is skipped.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from convselect import timing
    from convselect.demo import demo
    from convselect.model import collect as collection
    from convselect.problem import ConvProblem
    from convselect.store.store import Store, StoreError

    if malloc_tuning:
        demo.restart_with_tuned_malloc()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    try:
        items, total = _problems(
            lists or [], model, input_shape, inference, random, perturb, count, threads or [1], dtypes, seed
        )
        timing.assert_trustworthy()
        with Store(out) as store, _runner(workers, scheduler) as (runner, description):
            bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TimeRemainingColumn(), console=console, disable=not console.is_terminal,
            )  # fmt: skip
            with bar:
                task = bar.add_task("measuring", total=total)

                def show(problem: ConvProblem, _: bool) -> None:
                    bar.update(task, advance=1, description=f"{problem.direction} {problem.R}x{problem.S}")

                report = collection.collect(
                    items, store, runner=runner, description=description, minutes=minutes, repeat_share=repeat,
                    on_problem=show,
                )  # fmt: skip
    except (demo.DemoError, ValueError, OSError, StoreError, AssertionError) as error:
        raise _refuse("collect", error) from error
    console.print(
        f"{report.measured} problems measured into {out}, {report.repeated} of them twice; "
        f"{report.skipped} were there already"
    )
    if report.drifting:
        console.print(
            f"{len(report.drifting)} of {len(report.drift)} blocks drifted by more than {collection.DRIFT - 1:.0%}: "
            "the machine was busy, or its clock changed"
        )
    for kind in ("wrong", "failed"):
        for name, problem in getattr(report, kind):
            console.print(f"{kind}: {name} on {problem}")
    if report.interrupted:
        console.print("interrupted; the same command goes on from here")


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
) -> "tuple[list[Layer], int]":
    import itertools

    from convselect.demo import demo
    from convselect.machine import host
    from convselect.measure.measure import ERROR_BOUNDS
    from convselect.model import sampling

    if (model is None) != (input_shape is None):
        raise demo.DemoError("--model and --input N,C,H,W go together")
    if model is None and not lists:
        raise demo.DemoError("give CSV files of layers, or --model and --input")
    for dtype in dtypes or []:
        if dtype not in ERROR_BOUNDS:
            raise demo.DemoError(f"--dtype must be one of {', '.join(ERROR_BOUNDS)}, not {dtype!r}")
    items: list[Layer] = []
    if model is not None and input_shape is not None:
        name, module, x = demo.load_user_model(model, demo.parse_shape(input_shape))
        found = sampling.recorded(module, x, training=not inference)
        if not found:
            raise demo.DemoError(f"{model} computes no 2-D convolution")
        items += [(name, p._replace(threads=t)) for p in dict.fromkeys(found) for t in threads]
    if lists:
        layers = list(itertools.chain.from_iterable(map(sampling.read_layers, lists)))
        wanted = tuple(dtypes or ("float32", "bfloat16", "float16"))
        fill = round(count * random)
        for t in threads:
            of_networks = sampling.draw(
                layers, count - fill, seed=seed, threads=t, flags=host.host_flags(), perturb=perturb, dtypes=wanted
            )
            of_chance = sampling.draw(
                sampling.random_layers(fill, seed), fill, seed=seed, threads=t, flags=host.host_flags(), dtypes=wanted
            )
            items += sampling.mixed(of_networks, of_chance, share=random, seed=seed)
    return items, len(items)


class _runner:
    """A context: (where problems are measured, the description of those machines); None, None stand for here."""

    def __init__(self, workers: int, scheduler: str | None) -> None:
        if workers and scheduler:
            raise ValueError("--workers starts its own scheduler; give one of --workers and --scheduler")
        self.workers, self.scheduler = workers, scheduler
        self._open: list = []

    def __enter__(self):  # type: ignore[no-untyped-def]
        if not self.workers and self.scheduler is None:
            return None, None
        try:
            import dask
            from distributed import Client, LocalCluster
        except ModuleNotFoundError:
            raise ValueError("--workers and --scheduler need: pip install 'convselect[workers]'") from None
        from convselect.model.collect import on_dask

        if self.workers:
            # One thread per worker: what it measures runs on that thread, with torch's own beside it.
            # Dask would give its workers malloc settings of its own, and times would be of another environment.
            with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
                cluster = LocalCluster(
                    n_workers=self.workers, threads_per_worker=1, processes=True, dashboard_address=None
                )
            self._open.append(cluster)
            client = Client(cluster)
        else:
            client = Client(self.scheduler)
        self._open.append(client)
        try:
            return on_dask(client)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.pop().close()


# ---- train ------------------------------------------------------------------------------------------------------


def train(
    times: Annotated[list[Path], typer.Argument(help="Stores, our CSV files of times, or wide CSV (<name>_ms).")],
    family: Annotated[str, typer.Option(help='Device family, for example "cpu-x86-avx2-c".')],
    out: Annotated[Path, typer.Option(help="Folder for <family>.npz and <family>.json.")],
    target: Annotated[str | None, typer.Option(help="Training target: ratio, one_hot, softmax, ...")] = None,
    alpha: Annotated[float | None, typer.Option(min=0.1, help="Exponent of the target; 1 is the paper's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Problems per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest; one cycle.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Of AdamW.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="In the blocks' transformed path.")] = None,
    average: Annotated[float | None, typer.Option(min=0, max=1, help="Decay of the running mean of weights.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help='Features not to look at, by the beginning of their names; may be repeated, "" for none.'),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights and batches.")] = None,
    split: Annotated[str, typer.Option(help="What is held out: family, random, class, batch, problem.")] = "family",
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="The held-out figures as JSON.")] = False,
) -> None:
    """Cross-validate, fit on everything, and write the artifact with its card."""
    from convselect.model.train import Recipe, report
    from convselect.model.train import train as fit
    from convselect.store.store import StoreError

    given = dict(
        target=target, alpha=alpha, steps=steps, batch=batch, learning_rate=learning_rate, weight_decay=weight_decay,
        dropout=dropout, average=average, ignored=_ignored(ignore), seed=seed,
    )  # fmt: skip
    recipe = Recipe(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    try:
        card = fit(times, family, out, recipe, n_folds=folds, how=split)
    except (ValueError, OSError, StoreError) as error:
        raise _refuse("train", error) from error
    if as_json:
        typer.echo(json.dumps(card.figures, indent=1))
        return
    held_out = card.figures["held_out"]
    _print_table(
        f"{family}: {card.data['problems']} problems, held out {held_out['split']}, margin {card.margin:g}",
        report(card),
    )


def _ignored(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(name for name in names if name)


# ---- evaluate ---------------------------------------------------------------------------------------------------


def evaluate(
    times: Annotated[list[Path], typer.Argument(help="Stores, our CSV files of times, or wide CSV (<name>_ms).")],
    artifact: Annotated[Path | None, typer.Option(help="A model file, judged on all of the data as it is.")] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help="What to train and judge on held-out problems: reformer, gbdt, lambdarank, mlp, resnet18, neighbour, "
            "native, best_single, always:<algorithm>; may be repeated. Default: reformer."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="What is held out: family, random, class, batch, problem.")] = "family",
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 5,
    one_fold: Annotated[bool, typer.Option("--one-fold", help="Hold out the first fold only: quicker.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps of the Reformer.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Problems per step of the Reformer.")] = None,
    alpha: Annotated[float | None, typer.Option(min=0.1, help="Exponent of its target.")] = None,
    dropout: Annotated[float | None, typer.Option(min=0, max=0.9, help="In its blocks.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help='Features it does not look at; may be repeated, "" for none.')
    ] = None,
    seed: Annotated[int, typer.Option(help="Of splits, initial weights and batches.")] = 0,
    learning_curve: Annotated[bool, typer.Option("--learning-curve", help="Also train on parts of the data.")] = False,
    figures: Annotated[Path | None, typer.Option(help="Folder for figures of the last one judged.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """How good choices are: fraction of the oracle, speed-up over native, harm, by direction and class."""
    from dataclasses import replace

    from convselect.model import judging
    from convselect.model.inference import ArtifactError
    from convselect.model.selectors import Missing
    from convselect.model.train import Recipe
    from convselect.store.store import StoreError

    given = dict(steps=steps, batch=batch, alpha=alpha, dropout=dropout, ignored=_ignored(ignore))
    recipe = replace(Recipe(seed=seed), **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    try:
        result = judging.judge_all(
            times, artifact, selector or ([] if artifact else ["reformer"]), split, folds, one_fold, recipe,
            learning_curve=learning_curve, figures=figures,
        )  # fmt: skip
    except (ValueError, OSError, StoreError, ArtifactError, Missing, ModuleNotFoundError) as error:
        raise _refuse("evaluate", error) from error
    _print_table(f"{result['problems']} problems, {result['split']}", result["lines"])
    if result["trained_on"]:
        typer.echo(f"the model was trained on {', '.join(result['trained_on'])}: on problems it knows, figures flatter")
    if result["noise"] is not None:
        noise = result["noise"]
        typer.echo(
            f"label noise: of {noise['problems']} problems measured twice the winner changed in "
            f"{noise['winner_changes_share']:.1%}; a perfect reader of the first measurement reaches "
            f"{noise['fraction_of_oracle_mean']:.4f} of the second one's oracle"
        )
    for name, judged in result["judged"].items():
        for algorithm, found in judged.get("r_squared", {}).items():
            typer.echo(
                f"{name}, runtime of {algorithm}: R² {found['r2_log']:.3f} of log time, {found['r2_linear']:.3f} of "
                f"time, median error {found['median_relative_error']:.0%}"
            )
    for path in result["written"]:
        typer.echo(f"wrote {path}")
    if json_file is not None:
        kept = {key: value for key, value in result.items() if key not in ("lines", "written")}
        json_file.write_text(json.dumps(kept, indent=1) + "\n")


# ---- calibrate --------------------------------------------------------------------------------------------------


def calibrate(
    seconds: Annotated[float, typer.Option(min=1, help="Time to spend.")] = 30.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads that the problems run on.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be corrected.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the correction as JSON.")] = False,
    malloc_tuning: Annotated[
        bool, typer.Option("--malloc-tuning/--no-malloc-tuning", help="Restart once with malloc keeping freed memory.")
    ] = True,
) -> None:
    """Fit the nearest shipped model to this machine: time a few dozen problems, keep a correction per algorithm."""
    from rich.console import Console
    from rich.progress import Progress

    from convselect import timing
    from convselect.demo import demo
    from convselect.model import calibrate as calibration
    from convselect.model.inference import ArtifactError

    if malloc_tuning:
        demo.restart_with_tuned_malloc()
    # What JSON is read by need not wade through a bar.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150, stderr=as_json)
    try:
        timing.assert_trustworthy()
        with Progress(console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("timing", total=len(calibration.problems()))
            report = calibration.calibrate(
                seconds, threads, write=not dry_run, on_problem=lambda done, _: bar.update(task, completed=done)
            )
    except (ArtifactError, OSError, AssertionError) as error:
        raise _refuse("calibrate", error) from error
    if as_json:
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(report), indent=1, default=str))
        return
    console.print(f"{report.problems} problems timed; {report.artifact} corrected by")
    for name, bias in report.bias.items():
        console.print(f"  {name:20} {bias:+.2f} in ln(t_native / t), from {report.times[name]} times")
    console.print(f"kept in {report.path}" if report.path else "nothing was kept")


def _print_table(title: str, lines: list[list[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from convselect.model.evaluate import SUMMARY_HEADER

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for i, name in enumerate(SUMMARY_HEADER):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table)
