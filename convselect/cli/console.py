"""Shared parts of the commands: options, tables, and the handling of errors. Imports rich only to draw something."""

import contextlib
import json
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 160
"""Columns when the output is no terminal: a pipe has no width, and rich would assume 80 and break the tables."""

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
    typer.echo(f"convselect {command}: {error}", err=True)
    return typer.Exit(2)


@contextlib.contextmanager
def refusing(command: str, *errors: type[Exception], files: bool = True) -> Iterator[None]:
    """Within this context these errors, and with `files` those about values, files and stores, end the command with one
    line for the user."""
    if files:
        from convselect.store.store import StoreError

        errors = (*errors, ValueError, OSError, StoreError, sqlite3.Error)
    try:
        yield
    except errors as error:
        raise refuse(command, error) from error


def console(*, stderr: bool = False) -> "Console":
    """Standard output, or standard error, as rich sees it."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(highlight=False, stderr=stderr, width=None if stream.isatty() else WIDTH)


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
