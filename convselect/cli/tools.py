"""`convselect explain | bench | doctor`. Annotations are evaluated here, by typer."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

_PROBLEM = (
    'Direction and fields, as printed by explain() and the log: "forward N=1 C=64 H=56 W=56 K=64 ...", or short: '
    '"1x64x56x56 64 3x3 s1 p1".'
)
_JSON = "Print JSON instead."


def register(app: typer.Typer) -> None:
    app.command()(explain)
    app.command()(bench)
    app.command()(doctor)


def _refuse(command: str, error: object) -> typer.Exit:
    typer.echo(f"convselect {command}: {error}", err=True)
    return typer.Exit(2)


def _console() -> "Console":
    from rich.console import Console

    # A pipe has no width; rich would assume 80 columns and break the tables.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def explain(
    problem: Annotated[list[str], typer.Argument(help=_PROBLEM)],
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Why each algorithm applies to a convolution or does not, and what would be chosen."""
    import convselect
    from convselect.doctor.bench import parse

    try:
        found = convselect.explain_problem(parse(" ".join(problem)))
    except (ValueError, convselect.NotApplicable) as error:
        raise _refuse("explain", error) from error
    typer.echo(found.to_json() if as_json else found.details())


def bench(
    problem: Annotated[list[str], typer.Argument(help=_PROBLEM)],
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; otherwise the problem's.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to time each direction.")] = 2.0,
    directions: Annotated[
        str | None, typer.Option(help="forward, backward_data, backward_weight: several with commas between.")
    ] = None,
    all_directions: Annotated[bool, typer.Option("--all-directions", help="All three of them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False,
) -> None:
    """Check every algorithm on a convolution against float64, and time those that are right in turns.

    The exit status is 1 where an algorithm was wrong or failed, 2 where the problem cannot be read.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    import convselect
    from convselect.doctor import bench as benches
    from convselect.problem import Direction

    try:
        parsed = benches.parse(" ".join(problem))
        names = [d.value for d in Direction] if all_directions else [n.strip() for n in (directions or "").split(",")]
        wanted = [Direction(name) for name in names if name] or [parsed.direction]
        if threads is not None:
            parsed = parsed._replace(threads=threads)
        results = [benches.bench(parsed.with_direction(direction), seconds) for direction in wanted]
    except (ValueError, convselect.NotApplicable) as error:
        raise _refuse("bench", error) from error
    if as_json:
        typer.echo(benches.to_json(results))
    else:
        console = _console()
        for result in results:
            clock = "CPU time" if result.clock == "thread" else "wall time"
            header = ("algorithm", "error", f"us ({clock})", "p20", "p80", "samples", "x native", "predicted", "")
            table = Table(box=SIMPLE_HEAD)
            for i, name in enumerate(header):
                table.add_column(name, justify="left" if i in (0, len(header) - 1) else "right")
            for cells in benches.cells(result):
                table.add_row(*cells)
            console.print(str(result.problem), markup=False, soft_wrap=True)
            console.print(table)
    wrong = sorted({name for result in results for name in result.wrong})
    if wrong:
        typer.echo(f"convselect bench: wrong or failed: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def doctor(as_json: Annotated[bool, typer.Option("--json", help=_JSON)] = False) -> None:
    """What is installed, which kernels and which model are live, whether results are right, and what to do next.

    The exit status is 0 where all is well, 1 where something to do would make results come faster, 2 where something is
    broken.
    """
    from convselect.doctor import doctor as doctors

    report = doctors.examine()
    if as_json:
        typer.echo(report.to_json())
    else:
        console = _console()
        for title, lines in report.sections():
            console.print(title, style="bold", markup=False)
            for name, value in lines:
                console.print(f"  {name:<24} {value}", markup=False, soft_wrap=True)
        styles = {"broken": "bold red", "slower": "yellow", "note": ""}
        console.print("what to do next", style="bold")
        for advice in report.advice:
            console.print(f"  {advice.level}: {advice.text}", style=styles[advice.level], markup=False, soft_wrap=True)
        if not report.advice:
            console.print("  nothing: all is well")
    raise typer.Exit(report.status)
