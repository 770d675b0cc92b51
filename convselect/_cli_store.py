"""`convselect store ...`. Annotations are evaluated here, by typer."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look at stores of measured times.", no_args_is_help=True)
_FAIL = typer.Exit(2)


def _refuse(command: str, error: object) -> typer.Exit:
    typer.echo(f"convselect store {command}: {error}", err=True)
    return _FAIL


@app.command()
def show(path: Annotated[Path, typer.Argument(help="The store.")]) -> None:
    """Whose times it holds, and how many."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from convselect.store import Store, StoreError

    try:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        with Store(path) as store:
            table = Table(box=SIMPLE_HEAD)
            for name in ("device", "family", "torch", "problems", "measured twice", "times", "blocks", "drifting"):
                table.add_column(name, justify="left" if name in ("device", "family", "torch") else "right")
            for number, environment in store.environments().items():
                rows, drift = store.rows(number), store.drift(number)
                table.add_row(
                    *(str(environment.get(name, "?")) for name in ("device", "family", "torch")),
                    str(len({row.problem for row in rows})), str(len({row.problem for row in rows if row.repeat})),
                    str(len(rows)), str(len(drift)), str(sum(ratio > 1.05 for ratio in drift.values())),
                )  # fmt: skip
    except (OSError, StoreError) as error:
        raise _refuse("show", error) from error
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="The store.")],
    out: Annotated[Path, typer.Argument(help="CSV file to write; .gz compresses it.")],
    max_drift: Annotated[
        float | None,
        typer.Option(min=1, help="Leave out blocks in which the machine changed by more, say 1.05."),
    ] = None,
) -> None:
    """Measurements as CSV, with their environments beside them: what `train` and `evaluate` read anywhere."""
    from convselect import store as stores

    try:
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}")
        with stores.Store(path) as store:
            count = stores.export(store, out, max_drift=max_drift)
    except (OSError, ValueError, stores.StoreError) as error:
        raise _refuse("export", error) from error
    typer.echo(f"{count} measurements written to {out}")
