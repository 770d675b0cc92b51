"""The study's commands. Their figures: docs/tuning.md, and benchmarks/results/parameters-*.json.

python -m benchmarks.predicted_parameters evaluate programs.csv.gz
python -m benchmarks.predicted_parameters study programs.csv.gz --live 48 --out measured.json
python -m benchmarks.predicted_parameters study --synthetic 150
python -m benchmarks.predicted_parameters train programs.csv.gz --family cpu-x86-avx512-c --measured measured.json \\
        --out benchmarks/predicted_parameters
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.predicted_parameters import study, training
from benchmarks.predicted_parameters.figures import show
from benchmarks.predicted_parameters.sequence import Recipe
from benchmarks.predicted_parameters.tokens import TARGETS
from convselect.kernels.pool import BY_NAME
from convselect.machine.environment import run_environment

app = typer.Typer(help=__doc__, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_Files = Annotated[
    list[Path],
    typer.Argument(help="Recorded programs (.csv, .csv.gz), or logs of `convselect tune` (.jsonl)."),
]
_Target = Annotated[str | None, typer.Option(help="Training target: best, near (within 2 %), or ratio of times.")]
_Steps = Annotated[int | None, typer.Option(min=1, help="Optimiser steps.")]
_Seed = Annotated[int, typer.Option(help="Random seed of splits, initial weights and draws.")]
_Folds = Annotated[int, typer.Option(min=2, help="Folds of the cross-validation by problem.")]


def _recipe(target: str | None, steps: int | None, seed: int) -> Recipe:
    if target is not None and target not in TARGETS:
        raise ValueError(f"--target must be one of {', '.join(TARGETS)}, not {target!r}")
    given: dict[str, Any] = {"target": target, "steps": steps}
    return replace(Recipe(seed=seed), **{name: value for name, value in given.items() if value is not None})


def _refuse(command: str, error: object) -> typer.Exit:
    typer.echo(f"{command}: {error}", err=True)
    return typer.Exit(2)


@app.command()
def train(
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
            help="Output of `study --live`: it decides whether an algorithm keeps its default; of several files the "
            "worst."
        ),
    ] = None,
) -> None:
    """Learn to predict algorithms' parameters from measured programs, and write a file with held-out figures."""
    try:
        live = training.worst_measured(measured or [])
        found = training.examples(files)
        card = training.train_parameters(
            found, family, out, {name: a.revision for name, a in BY_NAME.items()}, _recipe(target, steps, seed),
            folds=folds, data={"files": [path.name for path in files], "measured": live}, measured=live,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        raise _refuse("train", error) from error
    show(card.figures)
    for network in card.networks:
        for name in network.algorithms:
            said = "predicted" if network.gains(name) else "keeps its default"
            typer.echo(f"{name}: {said}; {network.figures[name]['gain']:.3f} times as fast as its default")


@app.command()
def evaluate(
    files: _Files,
    target: _Target = None,
    steps: _Steps = None,
    seed: _Seed = 0,
    folds: _Folds = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Compare predicted parameters with simpler methods on held-out problems."""
    try:
        found = training.evaluated(training.examples(files), _recipe(target, steps, seed), folds)
    except (ValueError, OSError) as error:
        raise _refuse("evaluate", error) from error
    show(found)
    if json_file is not None:
        json_file.write_text(json.dumps({"files": [path.name for path in files], "figures": found}, indent=1) + "\n")


@app.command("study")
def study_(
    files: Annotated[list[Path] | None, typer.Argument(help="Recorded programs.")] = None,
    synthetic: Annotated[int, typer.Option(help="Problems of the made-up space; 0: none.")] = 0,
    target: _Target = None,
    steps: _Steps = None,
    seed: _Seed = 0,
    live_problems: Annotated[
        int, typer.Option("--live", help="Held-out problems per network whose predictions are measured here.")
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Compare every method, also on a made-up space; measure predictions anew, and their latency."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {"environment": run_environment()}
    try:
        recipe = _recipe(target, steps, seed)
        if synthetic:
            told["made_up"] = training.evaluated(study.made_up(synthetic, seed), recipe)
            show(told["made_up"])
        if files:
            of = training.examples(files)
            told["files"] = [path.name for path in files]
            told["figures"] = training.evaluated(of, recipe)
            show(told["figures"])
            if live_problems:
                told["live"] = study.live(of, recipe, live_problems)
                print(json.dumps(told["live"], indent=1))
            told["latency_us"] = study.latency_us(of, seed)
            print(told["latency_us"])
    except (ValueError, OSError) as error:
        raise _refuse("study", error) from error
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    app()
