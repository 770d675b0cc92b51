"""Searches for parameters, compared on recorded times: random against evolution with a cost model, an equal split
against the scheduler, and the cost model on held-out programs.

    python -m benchmarks.search replay benchmarks/results/programs-cpu-x86-avx512.csv.gz --out run.json
    python -m benchmarks.search record programs.csv.gz --network resnet50 --network unet --programs 250
    python -m benchmarks.search record many.csv.gz --network layers.csv --each 16 --algorithm direct --minutes 20

`record` measures the defaults of every algorithm and programs drawn at random per problem, or per problem and
algorithm, each checked against float64 first, in turns with native. `replay` needs nothing but the file, so strategies
can be compared on any machine: a search can only measure recorded programs; any other is replaced by the nearest
recorded one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks._quality import Quality, quality
from benchmarks._recorded import Recorded, Replay, read_recorded, replayed, write_recorded
from convselect.base import timing
from convselect.choice.choose import NATIVE
from convselect.machine.environment import run_environment
from convselect.tune.cost_model import CostModel, throughput
from convselect.tune.programs import Program, Programs
from convselect.tune.scheduler import Objective
from convselect.tune.search import Search
from convselect.tune.tuning import Tuning, problems_of

app = typer.Typer(add_completion=False, no_args_is_help=True)
TOP = 30
"""k of recall@k."""


# ---- recording --------------------------------------------------------------------------------------------------


class _Each(Search):
    """`each` programs of every algorithm, each algorithm's in a batch of its own with its default: in turns with other
    algorithms a default may take 5 % more, and programs compared with it seem to gain. The first third is the same for
    every problem, so that programs can be compared between problems."""

    def __init__(self, programs: Programs, seed: int, each: int) -> None:
        super().__init__(programs, random.Random(f"{seed} {programs.problem}"))
        fixed = [programs.default(name) for name in programs.spaces if name not in programs.tunable]
        self._batches = [fixed] if fixed else []
        for name in programs.tunable:
            space, default = programs.spaces[name], programs.default(name)
            assert space is not None
            drawn: dict[Program, None] = {default: None}  # in this order
            for source, count in ((random.Random(f"{seed} {name}"), 1 + each // 3), (self.source, 1 + each)):
                for _ in range(8 * each):
                    if len(drawn) < count:
                        drawn[programs.made(name, space.sample(programs.problem, source))] = None
            self._batches.append(list(drawn))

    def propose(self, count: int) -> list[Program]:
        return self._batches.pop(0) if self._batches else []


@app.command()
def record(
    path: Path,
    network: Annotated[
        list[str] | None,
        typer.Option(help="Also lists of layers, as `convselect tune` does; default resnet50, unet."),
    ] = None,
    programs: Annotated[int, typer.Option(help="Programs drawn per problem, besides the defaults.")] = 250,
    each: Annotated[
        int, typer.Option(help="Programs drawn per problem and algorithm instead; a third are the same for all.")
    ] = 0,
    algorithm: Annotated[list[str] | None, typer.Option(help="Only native's and these algorithms' programs.")] = None,
    problems: Annotated[int | None, typer.Option(help="Maximum per network, largest by calls x operations.")] = None,
    minutes: Annotated[float, typer.Option(help="No problem is started after this time.")] = 15.0,
    rounds: Annotated[int, typer.Option(help="Timed calls of a program; the minimum counts.")] = 12,
    seed: int = 0,
) -> None:
    """Measure programs of networks' forward problems on one thread. An existing file is extended."""
    from convselect.base import settings
    from convselect.cli import tune
    from convselect.kernels.pool import BY_NAME
    from convselect.tune.runner import Live

    wanted: dict[Any, dict[str, int]] = {}
    for name in network or ["resnet50", "unet"]:
        own = tune.problems([name], None, "forward", 1)
        heaviest = sorted(own, key=lambda p: -sum(own[p].values()) * p.flops)[:problems]
        for problem in heaviest:
            # Each layer of a list is a network there; in the file all of them are the list.
            own_calls = {Path(name).stem if " " in network_ else network_: n for network_, n in own[problem].items()}
            wanted.setdefault(problem, {}).update(own_calls)
    deadline, live = timing.Deadline(60 * minutes), Live(rounds=rounds)
    found = read_recorded(path) if path.exists() else []
    for one in found:
        for network_, count in wanted.pop(one.problem, {}).items():
            one.calls[network_] = count
    revisions = {name: a.revision for name, a in BY_NAME.items()}
    about = {"environment": run_environment(), "revisions": revisions}
    # In an order in which every kind has been started when time runs out.
    prepared = problems_of(wanted.items(), settings.current())
    random.Random(seed).shuffle(prepared)
    for i, (of, calls, chosen) in enumerate(prepared):
        if deadline.passed:
            break
        if algorithm:
            of = Programs(
                of.problem, {n: s for n, s in of.spaces.items() if n in (NATIVE, chosen.algorithm, *algorithm)}
            )
        search = _Each(of, seed, each) if each else Search(of, random.Random(f"{seed} {i}"))
        one = Recorded(of.problem, dict(calls), chosen=chosen)
        for name in of.tunable:
            space = of.spaces[name]
            assert space is not None
            one.kinds |= {(name, p.name): p.kind for p in space.parameters}
        most = math.inf if each else programs
        while len(one.measured) < most and (proposed := search.propose(16)):
            for measured in live.run(of.problem, proposed, chosen):
                search.learn(measured.program, measured.time_us)
                one.measured[measured.program] = measured
        wrong = sum(m.time_us is None for m in one.measured.values())
        best = search.best
        if best is None:
            continue  # no parameters
        print(
            f"{deadline.elapsed_s:5.0f} s  {i + 1}/{len(prepared)} {of.problem}: "
            f"{len(one.measured)} programs, {wrong} wrong; {chosen}, "
            f"best {best} {search.best_us:.0f} us",
            flush=True,
        )
        found.append(one)
        if i % 10 == 9:
            write_recorded(path, found, about)
    write_recorded(path, found, about)


# ---- the cost model ---------------------------------------------------------------------------------------------


def model_quality(recorded: Sequence[Recorded], backend: str, *, by_problem: bool, seed: int = 0) -> Quality:
    """Quality on held-out programs: a quarter of each problem's, or all of a quarter of the problems."""
    source = np.random.default_rng(seed)
    model = CostModel(seed, backend)
    pairs = []
    if by_problem:
        folds = np.array_split(source.permutation(len(recorded)), min(4, len(recorded)))
        for fold in folds:
            held = {int(i) for i in fold}
            model.fit({one.problem: one.times_us for i, one in enumerate(recorded) if i not in held})
            for i in held:
                times = recorded[i].times_us
                true = throughput(np.array(list(times.values())))
                pairs.append((true, model.predict(recorded[i].problem, list(times))))
        return quality(pairs, TOP)
    learnt: dict[Any, dict[Program, float]] = {}
    asked: list[tuple[Recorded, list[Program]]] = []
    for one in recorded:
        programs = list(one.times_us)
        test = {programs[i] for i in source.permutation(len(programs))[: len(programs) // 4]}
        learnt[one.problem] = {p: us for p, us in one.times_us.items() if p not in test}
        asked.append((one, [p for p in programs if p in test]))
    model.fit(learnt)
    for one, programs in asked:
        # Normalised by the best training time, like the target.
        best = min(learnt[one.problem].values())
        true = np.array([best / one.times_us[p] for p in programs])
        pairs.append((true, model.predict(one.problem, programs)))
    return quality(pairs, TOP)


# ---- searches ---------------------------------------------------------------------------------------------------


def untuned_us(one: Recorded) -> float:
    """Time of the program that runs without tuning; native's if that was wrong."""
    times = one.times_us
    return times.get(one.chosen or Program("native"), times[Program("native")])


def curve(one: Recorded, strategy: str, trials: int, seed: int, batch: int, backend: str) -> list[float]:
    """Best time after each trial, in us. The first n are those of a search of n trials."""
    model = None if strategy == "random" else CostModel(seed, backend)
    tuning = Tuning(replayed([one]), Replay([one]), model=model, batch=batch, seed=seed, equal_split=True)
    tuning.run(trials=trials)
    return np.minimum.accumulate(list(tuning.tasks[0].search.times_us.values())).tolist()


def first_at(curve: Sequence[float], goal: float) -> int | None:
    """Number of trials after which this time is reached; None: never."""
    return next((i + 1 for i, us in enumerate(curve) if us <= goal), None)


def compare_searches(
    recorded: Sequence[Recorded], counts: Sequence[int], seeds: int, batch: int, backend: str
) -> dict[int, dict[str, float]]:
    """Random against evolution at equal trials, over all problems and seeds.

    Returns: number of trials ->
        speedup_*: geometric mean of how many times faster than untuned; of_best_*: of best recorded over found;
        better, worse: shares of runs in which evolution found something faster or slower by more than 0.5 %;
        reach, reach_mean: median and mean share of the trials after which evolution has reached random's final time, 1
        if it never does; reach_after_defaults: without the defaults, which are measured first by both.
    """
    curves: list[tuple[Recorded, list[float], list[float]]] = []
    for one in recorded:
        for seed in range(seeds):
            blind, led = (curve(one, s, max(counts), seed, batch, backend) for s in ("random", "evolution"))
            curves.append((one, blind, led))
    told = {}
    for count in counts:
        logs: dict[str, list[float]] = {}
        reach, after, faster = [], [], []
        for one, whole_blind, whole_led in curves:
            blind, led = whole_blind[:count], whole_led[:count]
            base, best, defaults = untuned_us(one), min(one.times_us.values()), len({p.algorithm for p in one.times_us})
            for name, values in (("random", blind), ("evolution", led)):
                logs.setdefault(f"speedup_{name}", []).append(math.log(base / values[-1]))
                logs.setdefault(f"of_best_{name}", []).append(math.log(best / values[-1]))
            faster.append(math.log(blind[-1] / led[-1]))
            at, needed, length = first_at(led, blind[-1]) or len(blind), first_at(blind, blind[-1]), len(blind)
            reach.append(at / length)
            if needed is not None and needed > defaults:  # otherwise a default is the best that both found
                after.append(max(at - defaults, 1) / (length - defaults))
        gains = np.array(faster)
        told[count] = {name: float(np.exp(np.mean(values))) for name, values in logs.items()} | {
            "better": float((gains > 0.005).mean()),
            "worse": float((gains < -0.005).mean()),
            "reach": float(np.median(reach)),
            "reach_mean": float(np.mean(reach)),
            "reach_after_defaults": float(np.median(after)) if after else math.nan,
            "runs": float(len(gains)),
        }
    return told


def compare_schedules(
    recorded: Sequence[Recorded], network: str, counts: Sequence[int], seeds: int, batch: int, backend: str
) -> dict[int, dict[str, float]]:
    """The scheduler against an equal split over one network's problems, both with evolution.

    Returns: number of trials per problem ->
        equal, scheduler: latency at the end over that of the best recorded programs, means over seeds; untuned: the
        same without tuning; reach: median share of the equal split's trials after which the scheduler is as good, 1
        if it never is; reach_after_first: without the first round of every problem, which both have;
        to_2_percent, to_1_percent: trials after the first rounds to come so near the best recorded latency, over those
        that the equal split takes for it; medians over the seeds in which both come that near.
    """
    own = [
        Recorded(o.problem, {network: o.calls[network]}, o.measured, o.chosen, o.kinds)
        for o in recorded
        if network in o.calls
    ]
    best = sum(o.calls[network] * min(o.times_us.values()) for o in own)
    untuned = sum(o.calls[network] * untuned_us(o) for o in own)
    runs = []
    for seed in range(seeds):
        curves: dict[str, list[tuple[int, float]]] = {}
        for name in ("equal", "scheduler"):
            points: list[tuple[int, float]] = []
            tuning = Tuning(
                replayed(own), Replay(own), model=CostModel(seed, backend), batch=batch, seed=seed,
                objective=Objective("latency"), equal_split=name == "equal",
            )  # fmt: skip
            tuning.run(
                trials=max(counts) * len(own), on_round=lambda t, points=points: points.append((t.trials, t.latency_us))
            )
            curves[name] = [(n, us) for n, us in points if math.isfinite(us)]
        runs.append(curves)
    told = {}
    for count in counts:
        trials = count * len(own)
        ends: dict[str, list[float]] = {"equal": [], "scheduler": []}
        reach, after = [], []
        near: dict[str, list[float]] = {"to_2_percent": [], "to_1_percent": []}
        for curves in runs:
            within = {name: [(n, us) for n, us in of if n <= trials] for name, of in curves.items()}
            if not all(within.values()):
                continue  # the first rounds alone take more
            for name, of in within.items():
                ends[name].append(of[-1][1] / best)
            goal, first = within["equal"][-1][1], within["equal"][0][0]
            at = next((n for n, us in within["scheduler"] if us <= goal), trials)
            reach.append(at / trials)
            after.append((at - first) / max(trials - first, 1))
            for ratios, share in zip(near.values(), (1.02, 1.01), strict=True):
                ns = [next((n for n, us in within[s] if us <= share * best), None) for s in ("equal", "scheduler")]
                if ns[0] is not None and ns[1] is not None:
                    ratios.append(max(ns[1] - first, batch) / max(ns[0] - first, batch))
        if reach:
            told[count] = {
                **{name: float(np.mean(values)) for name, values in ends.items()},
                "untuned": untuned / best,
                "problems": float(len(own)),
                "reach": float(np.median(reach)),
                "reach_after_first": float(np.median(after)),
                **{name: float(np.median(ratios)) for name, ratios in near.items() if ratios},
            }
    return told


@app.command()
def replay(
    path: Path,
    trials: Annotated[list[int] | None, typer.Option(help="Per problem; several are compared.")] = None,
    seeds: int = 5,
    batch: int = 8,
    backend: Annotated[str | None, typer.Option(help="lightgbm or sklearn.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """All comparisons on a file of recorded times."""
    recorded = read_recorded(path)
    used = CostModel(backend=backend).backend
    sizes = [len(one.times_us) for one in recorded]
    print(f"{len(recorded)} problems, {sum(sizes)} programs ({min(sizes)} to {max(sizes)} each), trees: {used}")
    told: dict[str, Any] = {"file": path.name, "problems": len(recorded), "programs": sum(sizes), "backend": used}
    for what, by_problem in (("unseen programs", False), ("unseen problems", True)):
        of = [model_quality(recorded, used, by_problem=by_problem, seed=seed) for seed in range(seeds)]
        mean = {name: float(np.mean([getattr(q, name) for q in of])) for name in Quality._fields}
        told[f"cost model, {what}"] = mean
        print(f"cost model, {what}: " + ", ".join(f"{name} {value:.3f}" for name, value in mean.items()))
    gains = [math.log(untuned_us(one) / min(one.times_us.values())) for one in recorded]
    oracle = []
    for one in recorded:
        defaults = one.programs().defaults()
        best_default = min(us for p, us in one.times_us.items() if p in defaults)
        oracle.append(math.log(best_default / min(one.times_us.values())))
    told["best recorded"] = {
        "over_untuned": math.exp(np.mean(gains)),
        "over_best_default": math.exp(np.mean(oracle)),
        "least": math.exp(min(gains)),
    }
    print("best recorded: " + ", ".join(f"{name} {value:.3f}" for name, value in told["best recorded"].items()))
    counts = sorted(trials or [32, 64, 128])

    def show(title: str, figures: dict[int, dict[str, float]]) -> None:
        told[title] = figures
        for count, values in figures.items():
            print(
                f"{title}, {count} trials per problem: " + ", ".join(f"{name} {v:.3f}" for name, v in values.items()),
                flush=True,
            )

    show("random against evolution", compare_searches(recorded, counts, seeds, batch, used))
    for network in sorted({name for one in recorded for name in one.calls}):
        show(f"schedules, {network}", compare_schedules(recorded, network, counts, seeds, batch, used))
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    app()
