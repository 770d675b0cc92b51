"""`convselect report`. Annotations are evaluated here, by typer."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convselect.cli.console import InputShape, MallocTuning, check_writable, own_store, progress, refusing

if TYPE_CHECKING:
    from convselect.demo.demo import Subject
    from convselect.report import DataReport, NetworkReport

DATA_SUFFIXES = (".sqlite", ".csv", ".csv.gz")


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    target: Annotated[
        str,
        typer.Argument(
            help="A built-in network; your own, module:function, with --input; or measured times: a store (.sqlite), "
            'a CSV file of times (.csv, .csv.gz), "store" for your own store.'
        ),
    ],
    input_shape: InputShape = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    training: Annotated[bool, typer.Option("--training", help="Both gradients as well, and a training step.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time all algorithms, not only native and what is chosen.")
    ] = False,
    timed: Annotated[bool, typer.Option("--timing/--no-timing", help="Whether to time anything at all.")] = True,
    verify: Annotated[
        bool, typer.Option("--verify", help="First let trials on real calls settle the choices, and keep them.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time budget for all timing together.")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; PyTorch's default otherwise.")] = None,
    times: Annotated[
        Path | None, typer.Option(help="Times measured on this machine, used for what is not timed now.")
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option(help="The model file to judge on measured times; default: the one shipped.")
    ] = None,
    malloc_tuning: MallocTuning = True,
) -> None:
    """Write one HTML page about a network, what is chosen in it and what that gains, or about measured times."""
    import torch

    from convselect import NotApplicable
    from convselect.demo import demo
    from convselect.report import render

    before = torch.get_num_threads()
    try:
        with refusing("report", demo.DemoError, NotApplicable):
            check_writable(out, "--out")
            found: DataReport | NetworkReport
            if target == "store" or target.endswith(DATA_SUFFIXES):
                found = _of_data(target, artifact)
            else:
                subject = _subject(target, input_shape)
                if malloc_tuning and timed:
                    demo.restart_with_tuned_malloc()
                if threads is not None:
                    torch.set_num_threads(threads)
                found = _of_model(subject, training, measure, timed, verify, seconds, times)
            out.write_text(render(found), encoding="utf-8")
    finally:
        torch.set_num_threads(before)
    typer.echo(f"wrote {out}")


def _of_data(target: str, artifact: Path | None) -> "DataReport":
    from convselect.report import of_data

    return of_data(own_store() if target == "store" else target, artifact)


def _subject(target: str, input_shape: str | None) -> "Subject":
    from convselect.demo import demo
    from convselect.demo.architectures import ARCHITECTURES

    if target not in ARCHITECTURES and ":" not in target:
        raise ValueError(
            f"{target!r} is neither a built-in network ({', '.join(ARCHITECTURES)}), nor module:function, nor a file "
            f"of times ({', '.join(DATA_SUFFIXES)})"
        )
    return demo.subject_of(target, input_shape)


def _of_model(
    subject: "Subject", training: bool, measure: bool, timed: bool, verify: bool, seconds: float, times: Path | None
) -> "NetworkReport":
    import torch
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from convselect.demo import demo
    from convselect.report import of_model

    with demo.blaming(subject, "forward"), torch.inference_mode():
        subject.model.eval()(subject.x)
    with progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
    ) as bar:
        task = bar.add_task("", total=1.0)
        return of_model(
            subject.name, subject.model, subject.x, training=training, measure=measure, timed=timed, verify=verify,
            seconds=seconds, times=times,
            on_stage=lambda stage, done: bar.update(task, description=stage, completed=done),
        )  # fmt: skip
