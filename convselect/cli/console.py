"""Shared parts of the commands: options, tables, progress, and the handling of errors. Imports rich only to draw
something."""

import contextlib
import csv
import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from convselect import Direction

WIDTH = 160
"""Columns when the output is no terminal: a pipe has no width, and rich would assume 80 and break the tables."""

LINE_EVERY_S = 10.0
"""How often a command that takes long says so when it cannot draw a bar."""

InputShape = Annotated[str | None, typer.Option("--input", help="The network's input, N,C,H,W.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
MallocTuning = Annotated[
    bool,
    typer.Option(
        "--malloc-tuning/--no-malloc-tuning", help="Restart once with malloc told to keep freed memory, for all sides."
    ),
]


def refuse(command: str, error: object) -> typer.Exit:
    """An exception to raise, after printing in one line why the command cannot do this; exit status 2."""
    typer.echo(f"convselect {command}: {sentence(error)}", err=True)
    return typer.Exit(2)


def sentence(error: object) -> str:
    """What to tell the user about an exception: errors of the system without their numbers."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename}"
    if isinstance(error, IsADirectoryError):
        return f"{error.filename} is a folder, not a file"
    return f"{error.filename}: {error.strerror}"


@contextlib.contextmanager
def refusing(command: str, *errors: type[Exception], files: bool = True) -> Iterator[None]:
    """Within this context these errors, and with `files` those about values, files and stores, end the command with one
    line for the user."""
    if files:
        from convselect.store.store import StoreError

        errors = (*errors, ValueError, OSError, StoreError, sqlite3.Error, csv.Error)
    try:
        yield
    except BrokenPipeError:  # whoever read the output has read enough
        raise
    except errors as error:
        raise refuse(command, error) from error


def check_writable(path: Path | None, option: str) -> None:
    """To be called before the work whose result goes to this file.

    Raises:
        ValueError: if it cannot be written, with the option that named it.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option}: there is no directory {folder}")
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder, not a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: {path} may not be written")


def directions_of(text: str) -> "list[Direction]":
    """The directions in a text with commas between them.

    Raises:
        ValueError: if there is one of another name.
    """
    from convselect import Direction

    known = [direction.value for direction in Direction]
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"a direction is one of {', '.join(known)}, not {name!r}")
    return [Direction(name) for name in names]


def own_store() -> Path:
    """The path of the user's own store.

    Raises:
        FileNotFoundError: if there is none yet, with how one is made; OSError: if it is switched off.
    """
    from convselect.store.process import user_path

    path = user_path()
    if not path.exists():
        raise FileNotFoundError(
            f"there is no store yet: {path} is made as soon as a converted model has timed a convolution, by "
            "`convselect tune`, or by `convselect store import`"
        )
    return path


def console(*, stderr: bool = False) -> "Console":
    """Standard output, or standard error, as rich sees it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(highlight=False, stderr=stderr, width=None if stream is not None and stream.isatty() else WIDTH)


def say_json(values: object) -> None:
    typer.echo(json.dumps(values, indent=1))


def print_table(
    columns: Mapping[str, str], rows: Iterable[Iterable[object]], title: str | None = None, *, no_wrap: bool = False
) -> None:
    """Print a table; `columns` are headings and their sides, "left" or "right"."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name, side in columns.items():
        table.add_column(name, justify="left" if side == "left" else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*map(str, row))
    console().print(table)


def say_counts(told: Mapping[str, Any], name: str) -> None:
    """Print one line: the name, and all the numbers."""
    counts = (f"{value} {key.replace('_', ' ')}" for key, value in told.items() if isinstance(value, int))
    typer.echo(f"{name}: {', '.join(counts)}")


# ---- progress -----------------------------------------------------------------------------------------------------


def progress(*columns: "ProgressColumn", auto_refresh: bool = True) -> "Progress":
    """rich's progress bar on standard error. If that is no terminal that can draw, a plain line instead: when a stage
    begins (an update with completed=0), and after that with the first update of every ten seconds. Lines are never
    written by a thread, since most commands measure.

    Args:
        auto_refresh: False: the bar is not drawn by a thread either, but only by updates with `refresh=True`.
    """
    from rich.progress import Progress

    class Lines(Progress):
        said_at: float | None = None

        def update(self, task_id: Any, **values: Any) -> None:
            super().update(task_id, **values)
            now = self.get_time()
            if self.said_at is None or values.get("completed") == 0 or now - self.said_at >= LINE_EVERY_S:
                self.said_at = now
                _say_line(self, task_id)

    out = console(stderr=True)
    if out.is_terminal and not out.is_dumb_terminal:
        return Progress(*columns, console=out, transient=True, auto_refresh=auto_refresh)
    return Lines(*columns, console=out, disable=True)


def _say_line(bar: "Progress", task_id: Any) -> None:
    """The columns of a bar that are text, as a plain line."""
    from rich.text import Text

    (task,) = (task for task in bar.tasks if task.id == task_id)
    parts = [column(task) for column in bar.columns if not isinstance(column, str)]
    line = " ".join(part.plain.strip() for part in parts if isinstance(part, Text) and part.plain.strip())
    if line:
        bar.console.print(line, markup=False, soft_wrap=True)


@contextlib.contextmanager
def at_work(what: str) -> Iterator[None]:
    """For a command that measures nothing and does not say how far it is: the time it has taken so far, drawn on
    standard error, or as a plain line every ten seconds if that is no terminal."""
    from rich.progress import TextColumn, TimeElapsedColumn

    with progress(TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
        task = bar.add_task(what, total=None)
        ended = threading.Event()

        def say() -> None:
            while not ended.wait(LINE_EVERY_S):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    _say_line(bar, task)

        thread = threading.Thread(target=say, daemon=True)
        if bar.disable:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if bar.disable:
                thread.join()
