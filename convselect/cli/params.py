"""`convselect train-params` and `convselect evaluate-params`. Annotations are evaluated here, by typer."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from convselect.model.parameters import Example
    from convselect.model.sequence import Recipe

_Files = Annotated[
    list[Path],
    typer.Argument(help="Recorded programs (.csv, .csv.gz), or what `convselect tune` measured here (.jsonl)."),
]
_Target = Annotated[str | None, typer.Option(help="What is learnt: best, near (within 2 %), or ratio of times.")]
_Steps = Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")]
_Seed = Annotated[int, typer.Option(help="Of splits, initial weights and draws.")]
_Folds = Annotated[int, typer.Option(min=2, help="Of the cross-validation by problem.")]

COLUMNS = ("tokens", "perfect", "near", "valid", "fraction", "p10", "gain", "slower", "us")


def register(app: typer.Typer) -> None:
    app.command("train-params")(train_params)
    app.command("evaluate-params")(evaluate_params)


def _refuse(command: str, error: object) -> typer.Exit:
    typer.echo(f"convselect {command}: {error}", err=True)
    return typer.Exit(2)


def train_params(
    files: _Files,
    family: Annotated[str, typer.Option(help='Device family, for example "cpu-x86-avx512-c".')],
    out: Annotated[Path, typer.Option(help="Folder for params-<family>.npz and .json.")],
    target: _Target = None,
    steps: _Steps = None,
    seed: _Seed = 0,
    folds: _Folds = 5,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            help="What `benchmarks.parameters --live` wrote: it decides whether an algorithm keeps its default; of "
            "several files the worst."
        ),
    ] = None,
) -> None:
    """Learn to predict algorithms' parameters from measured programs, and write them with their held-out figures.

    Used automatically from the package's own folder, or where CONVSELECT_PARAMS points.
    """
    from convselect.kernels.pool import BY_NAME
    from convselect.model.parameter_training import train_parameters

    try:
        live = _live(measured or [])
        found = examples(files)
        card = train_parameters(
            found, family, out, {name: a.revision for name, a in BY_NAME.items()}, _recipe(target, steps, seed),
            folds=folds, data={"files": [path.name for path in files], "measured": live}, measured=live,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise _refuse("train-params", error) from error
    _print(card.figures)
    for network in card.networks:
        for name in network.algorithms:
            said = "predicted" if network.gains(name) else "keeps its default"
            typer.echo(f"{name}: {said}; {network.figures[name]['gain']:.3f} times as fast as its default")


def _live(paths: list[Path]) -> dict[str, dict[str, float]]:
    """Algorithm -> the worst that was measured of its predictions.

    Raises:
        ValueError, OSError: where a file has nothing of the kind, or cannot be read.
    """
    worst: dict[str, dict[str, float]] = {}
    for path in paths:
        try:
            for name, of in json.loads(path.read_text())["live"].items():
                known = worst.setdefault(name, {"gain": math.inf, "gain_low": math.inf, "of_tuned": math.inf})
                for key in known:
                    known[key] = min(known[key], float(of[key]))
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ValueError(f"{path} has no predictions that were measured") from None
    return worst


def evaluate_params(
    files: _Files,
    target: _Target = None,
    steps: _Steps = None,
    seed: _Seed = 0,
    folds: _Folds = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """How good predicted parameters are on problems that were not learnt from, beside simpler methods."""
    from convselect.model.parameter_training import evaluated

    try:
        found = evaluated(examples(files), _recipe(target, steps, seed), folds)
    except (ValueError, OSError) as error:
        raise _refuse("evaluate-params", error) from error
    _print(found)
    if json_file is not None:
        json_file.write_text(json.dumps({"files": [path.name for path in files], "figures": found}, indent=1) + "\n")


def _recipe(target: str | None, steps: int | None, seed: int) -> "Recipe":
    from convselect.model.parameters import TARGETS
    from convselect.model.sequence import Recipe

    if target is not None and target not in TARGETS:
        raise ValueError(f"--target must be one of {', '.join(TARGETS)}, not {target!r}")
    given: dict[str, Any] = {"target": target, "steps": steps}
    return replace(Recipe(seed=seed), **{name: value for name, value in given.items() if value is not None})


def examples(files: list[Path]) -> "list[Example]":
    """Every problem and algorithm with parameters of which these files have times; algorithms as they are today.

    Raises:
        ValueError, OSError: where a file cannot be read, or holds something else.
    """
    from convselect.kernels.pool import BY_NAME
    from convselect.model.parameters import example
    from convselect.problem import ConvProblem
    from convselect.tune.programs import Program

    times: dict[ConvProblem, dict[Program, float]] = {}
    for path in files:
        for problem, of in _times(path):
            times.setdefault(problem, {}).update(of)
    found = []
    for problem, of in times.items():
        for name in dict.fromkeys(program.algorithm for program in of):
            algorithm = BY_NAME.get(name)
            if algorithm is None or algorithm.why_not(problem) is not None:
                continue
            space = algorithm.space(problem)
            if space is not None:
                own = [(program.values, time_us) for program, time_us in of.items() if program.algorithm == name]
                one = example(problem, name, space, own)
                if one is not None:
                    found.append(one)
    return found


def _times(path: Path) -> "list[tuple[Any, dict[Any, float]]]":
    from convselect.kernels.pool import BY_NAME
    from convselect.tune import records

    revisions = {name: a.revision for name, a in BY_NAME.items()}
    if path.suffix == ".jsonl":
        if not path.exists():
            raise OSError(f"there is no {path}")
        from convselect.machine import environment

        fingerprint = environment.fingerprint_of("cpu") or ""
        measured = records.Log(path, fingerprint, revisions).read()
        return [
            (problem, {p: m.time_us for p, m in of.items() if m.time_us is not None})
            for problem, of in measured.items()
        ]
    beside = records.beside(path)
    then = json.loads(beside.read_text()).get("revisions", {}) if beside.exists() else {}
    # Of an algorithm that has changed since, times no longer speak.
    changed = {name for name, revision in then.items() if revisions.get(name) != revision}
    return [
        (one.problem, {p: t for p, t in one.times_us.items() if p.algorithm not in changed})
        for one in records.read_recorded(path)
    ]


def _print(told: "Any") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if Console().is_terminal else 150)
    for algorithms, methods in told.items():
        first = next(iter(methods.values()))
        table = Table(
            box=SIMPLE_HEAD,
            title=f"{algorithms}: {first['problems']:.0f} problems, held out; default {first['default']:.3f} of best",
        )
        columns = [c for c in COLUMNS if c != "us" or c in first]
        for name in ("method", *columns):
            table.add_column(name, justify="left" if name == "method" else "right")
        for name, figures in methods.items():
            table.add_row(
                name, *(f"{figures[c]:.0f}" if c == "us" else f"{figures.get(c, math.nan):.3f}" for c in columns)
            )
        console.print(table)
