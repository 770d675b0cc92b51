"""`convselect explain | bench | doctor | build`. Annotations are evaluated here, by typer."""

from typing import Annotated

import typer

from convselect.cli.console import Json, console, directions_of, print_table, refusing

_PROBLEM = (
    'Direction and fields, as printed by explain() and the log: "forward N=1 C=64 H=56 W=56 K=64 ...", or short: '
    '"1x64x56x56 64 3x3 s1 p1".'
)


def register(app: typer.Typer) -> None:
    app.command()(explain)
    app.command()(bench)
    app.command()(doctor)
    app.command()(build)


def explain(problem: Annotated[list[str], typer.Argument(help=_PROBLEM)], as_json: Json = False) -> None:
    """Why each algorithm applies to a convolution or does not, and what would be chosen."""
    from convselect import NotApplicable, explain_problem
    from convselect.doctor.bench import parse

    with refusing("explain", NotApplicable):
        found = explain_problem(parse(" ".join(problem)))
    typer.echo(found.to_json() if as_json else found.details())


def bench(
    problem: Annotated[list[str], typer.Argument(help=_PROBLEM)],
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; otherwise the problem's.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to time each direction.")] = 2.0,
    directions: Annotated[
        str | None, typer.Option(help="forward, backward_data, backward_weight: several with commas between.")
    ] = None,
    all_directions: Annotated[bool, typer.Option("--all-directions", help="All three of them.")] = False,
    as_json: Json = False,
) -> None:
    """Check every algorithm on a convolution against float64, and time those that are right in turns.

    The exit status is 1 if an algorithm was wrong or failed, 2 if the problem cannot be read.
    """
    from convselect import Direction, NotApplicable
    from convselect.doctor import bench as benches

    with refusing("bench", NotApplicable):
        parsed = benches.parse(" ".join(problem))
        wanted = list(Direction) if all_directions else directions_of(directions or "") or [parsed.direction]
        if threads is not None:
            parsed = parsed._replace(threads=threads)
        results = [benches.bench(parsed.with_direction(direction), seconds) for direction in wanted]
    if as_json:
        typer.echo(benches.to_json(results))
    else:
        for result in results:
            clock = "CPU time" if result.clock == "thread" else "wall time"
            numbers = ("error", f"us ({clock})", "p20", "p80", "samples", "x native", "predicted")
            console().print(str(result.problem), markup=False, soft_wrap=True)
            print_table({"algorithm": "left", **dict.fromkeys(numbers, "right"), "": "left"}, benches.cells(result))
    wrong = sorted({name for result in results for name in result.wrong})
    if wrong:
        typer.echo(f"convselect bench: wrong or failed: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def build() -> None:
    """Compile the part that runs cached calls outside Python, for this PyTorch: half a minute, once.

    It needs a C++ compiler (CXX names another one) and Python's headers, and lies in the user's cache. Results are the
    same without it; each converted layer then costs a call 4 us more, and one that leaves native 20 to 60 us.
    """
    from convselect.store import extension

    with refusing("build", extension.BuildError), console().status("compiling"):
        path = extension.build()
    console().print(f"{path}: used by every process that imports convselect from now on", markup=False, soft_wrap=True)


def doctor(as_json: Json = False) -> None:
    """What is installed, which kernels and which model are live, whether results are right, and what to do next.

    The exit status is 0 if all is well, 1 if something to do would make results come faster, 2 if something is broken.
    """
    from convselect.doctor import doctor as doctors

    report = doctors.examine()
    if as_json:
        typer.echo(report.to_json())
        raise typer.Exit(report.status)
    out = console()
    for title, lines in report.sections():
        out.print(title, style="bold", markup=False)
        for name, value in lines:
            out.print(f"  {name:<24} {value}", markup=False, soft_wrap=True)
    styles = {"broken": "bold red", "slower": "yellow", "note": ""}
    out.print("what to do next", style="bold")
    for advice in report.advice:
        out.print(f"  {advice.level}: {advice.text}", style=styles[advice.level], markup=False, soft_wrap=True)
    if not report.advice:
        out.print("  nothing: all is well")
    raise typer.Exit(report.status)
