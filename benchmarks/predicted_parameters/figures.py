"""How good predicted parameters are on held-out problems, compared with simpler methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.predicted_parameters.decoding import Decoder, beam_search
from benchmarks.predicted_parameters.sequence import Recipe, export, train
from benchmarks.predicted_parameters.tokens import (
    NEAR,
    TARGETS,
    Example,
    Floats,
    Sequence_,
    Signature,
    target,
    tokens,
)
from convselect.base import timing
from convselect.base.problem import ConvProblem

WIDTHS = (1, 4, 10)
"""Beam widths that are compared."""
COLUMNS = ("tokens", "perfect", "near", "valid", "fraction", "p10", "gain", "slower", "us")
Method = Callable[[Example], "Sequence_ | None"]


@dataclass(frozen=True)
class Judged:
    """One method's prediction for one example.

    Attributes:
        sequence: None if the method found nothing.
        recorded: whether the prediction itself was measured; if not, the nearest measured program's time is used.
        fraction: time of the best measured program over that of the prediction; the default's if that is invalid.
        default: the default's fraction.
        right: for each parameter, whether its value is that of the best program.
        us: CPU time of this thread that the prediction took.
    """

    of: Example
    sequence: Sequence_ | None
    valid: bool
    recorded: bool
    fraction: float
    default: float
    right: tuple[bool, ...]
    us: float


def judge(method: Method, one: Example) -> Judged:
    thread_ns = timing.SYSTEM_CLOCK.thread_ns
    begun = thread_ns()
    sequence = method(one)
    us = (thread_ns() - begun) / 1e3
    default, best = one.best_us / one.times_us[one.default], one.best
    if sequence is None:
        return Judged(one, None, False, False, default, default, (False,) * len(best), us)
    valid = one.is_valid(sequence)
    fraction = one.best_us / one.time_us(sequence) if valid else default
    right = tuple(a == b for a, b in zip(sequence, best, strict=True))
    return Judged(one, sequence, valid, sequence in one.times_us, fraction, default, right, us)


def figures(judged: Sequence[Judged]) -> dict[str, float]:
    """Figures of one method over several examples.

    Returns:
        tokens, perfect: share of parameters, and of whole programs, that equal the best measured program's.
        near: share of programs within 2 % of the best.
        valid, recorded: shares of predictions.
        fraction, p10, least: mean, 10th percentile and minimum of `Judged.fraction`.
        default: mean of the default's fraction.
        gain, gain_low: geometric mean of the default's time over the prediction's, and two standard errors over
            problems below it (several algorithms on one problem are not independent).
        slower: share of predictions more than 2 % slower than the default.
        us: median time of a prediction.
    """
    fractions = np.array([j.fraction for j in judged])
    defaults = np.array([j.default for j in judged])
    logs: dict[ConvProblem, list[float]] = {}
    for j in judged:
        logs.setdefault(j.of.problem, []).append(math.log(j.fraction / j.default))
    means = np.array([np.mean(v) for v in logs.values()])
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.inf
    found = {
        "examples": len(judged),
        "problems": len(logs),
        "tokens": np.mean([np.mean(j.right) for j in judged]),
        "perfect": np.mean([all(j.right) for j in judged]),
        "near": np.mean(fractions >= 1 / NEAR),
        "valid": np.mean([j.valid for j in judged]),
        "recorded": np.mean([j.recorded for j in judged]),
        "fraction": fractions.mean(),
        "p10": np.percentile(fractions, 10),
        "least": fractions.min(),
        "default": defaults.mean(),
        "gain": math.exp(means.mean()),
        "gain_low": math.exp(means.mean() - 2 * error),
        "slower": np.mean(fractions < defaults / NEAR),
        "us": np.median([j.us for j in judged]),
    }
    return {name: round(float(value), 4) for name, value in found.items()}


# ---- methods ----------------------------------------------------------------------------------------------------


class Predicted:
    """A trained network as a method.

    Args:
        constrained: prune the beam by `Space.is_partially_valid`.
    """

    def __init__(
        self, arrays: dict[str, Floats], algorithms: Sequence[str], signature: Signature, k: int, constrained: bool
    ) -> None:
        self._arrays, self._algorithms, self._signature = arrays, algorithms, signature
        self._k, self._constrained = k, constrained

    def __call__(self, one: Example) -> Sequence_ | None:
        sizes = [len(values) for values in self._signature.values]
        decoder = Decoder(self._arrays, sizes, *tokens(one.problem, self._algorithms.index(one.algorithm)))

        def allowed(sequence: Sequence_) -> bool:
            return one.space.is_partially_valid(one.problem, self._signature.decode(sequence))

        found = beam_search(decoder, sizes, self._k, allowed if self._constrained else None)
        return found[0].sequence if found else None


def _inputs(examples: Sequence[Example], algorithms: Sequence[str]) -> Tensor:
    """(n, n_fields + n_algorithms): logarithms of sizes, and the algorithm, one-hot."""
    rows = []
    for one in examples:
        place = algorithms.index(one.algorithm)
        names = np.zeros(len(algorithms), np.float32)
        names[place] = 1
        rows.append(np.concatenate((tokens(one.problem, place)[1], names)))
    return torch.from_numpy(np.stack(rows))


def per_token(examples: Sequence[Example], algorithms: Sequence[str], recipe: Recipe) -> Method:
    """Each parameter by a classifier that ignores the others: one hidden layer, the same target."""
    x, sizes = _inputs(examples, algorithms), [len(values) for values in examples[0].signature.values]
    marginals = [torch.zeros(len(examples), size) for size in sizes]
    for i, one in enumerate(examples):
        for sequence, weight in target(one, recipe.target).items():
            for marginal, place in zip(marginals, sequence, strict=True):
                marginal[i, place] += weight
    mean, spread = x.mean(0), x.std(0).clamp_min(1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = nn.Sequential(nn.Linear(x.shape[1], 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, sum(sizes)))
        optimiser = torch.optim.AdamW(network.parameters(), 5e-3, weight_decay=recipe.weight_decay)
        for _ in range(recipe.steps):
            out = network((x - mean) / spread).split(sizes, 1)
            loss = sum((F.cross_entropy(o, m) for o, m in zip(out, marginals, strict=True)), torch.zeros(()))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        network.eval()

    @torch.no_grad()
    def method(one: Example) -> Sequence_:
        out = network((_inputs([one], algorithms) - mean) / spread)[0].split(sizes)
        return tuple(int(o.argmax()) for o in out)

    return method


def neighbour(examples: Sequence[Example]) -> Method:
    """The valid best program of the same algorithm on the nearest problem, by logarithms of sizes."""

    def method(one: Example) -> Sequence_ | None:
        here = tokens(one.problem, 0)[1]
        own = [e for e in examples if e.algorithm == one.algorithm]
        for other in sorted(own, key=lambda e: float(np.square(tokens(e.problem, 0)[1] - here).sum())):
            if one.is_valid(other.best):
                return other.best
        return None

    return method


def best_fixed(examples: Sequence[Example]) -> Method:
    """The one program that is best over all problems of an algorithm, among those measured on at least half of them;
    the next best if it is invalid. A better default, without a model."""

    @functools.cache
    def ranked(algorithm: str) -> list[Sequence_]:
        own = [e for e in examples if e.algorithm == algorithm]
        logs: dict[Sequence_, list[float]] = {}
        for e in own:
            for sequence, time_us in e.times_us.items():
                logs.setdefault(sequence, []).append(math.log(time_us / e.best_us))
        often = [s for s, v in logs.items() if 2 * len(v) >= len(own)]
        return sorted(often, key=lambda s: float(np.mean(logs[s])))

    def method(one: Example) -> Sequence_ | None:
        return next((s for s in ranked(one.algorithm) if one.is_valid(s)), None)

    return method


# ---- held-out problems ------------------------------------------------------------------------------------------


def folds_of(examples: Sequence[Example], n: int, seed: int) -> list[int]:
    """The fold of each example; all algorithms of a problem are in one fold.

    Raises:
        ValueError: if there are fewer problems than folds.
    """
    problems = list(dict.fromkeys(one.problem for one in examples))
    if len(problems) < n:
        raise ValueError(f"{len(problems)} problems are too few for {n} folds")
    order = np.random.default_rng(seed).permutation(len(problems))
    fold = {problems[i]: place % n for place, i in enumerate(order)}
    return [fold[one.problem] for one in examples]


def held_out(
    examples: Sequence[Example],
    recipe: Recipe,
    *,
    folds: int = 5,
    targets: Sequence[str] = (),
    baselines: bool = True,
    widths: Sequence[int] = WIDTHS,
) -> dict[str, list[Judged]]:
    """Cross-validate by problem, on examples of one signature: method -> its predictions, in the examples' order.

    Networks are named "k=4" with the recipe's target, "k=4, best" with another one of `targets`, and
    "unconstrained k=4" without pruning.
    """
    fold_of = folds_of(examples, folds, recipe.seed)
    signature, algorithms = examples[0].signature, sorted({one.algorithm for one in examples})
    found: dict[str, dict[int, Judged]] = {}
    for fold in range(folds):
        known = [one for one, f in zip(examples, fold_of, strict=True) if f != fold]
        methods: dict[str, Method] = {}
        for kind in dict.fromkeys((recipe.target, *targets)):
            arrays = export(train(known, algorithms, replace(recipe, target=kind)))
            suffix = "" if kind == recipe.target else f", {kind}"
            for k in widths:
                methods[f"k={k}{suffix}"] = Predicted(arrays, algorithms, signature, k, True)
                if not suffix and baselines:
                    methods[f"unconstrained k={k}"] = Predicted(arrays, algorithms, signature, k, False)
        if baselines:
            methods["per token"] = per_token(known, algorithms, recipe)
            methods["neighbour"] = neighbour(known)
            methods["best fixed"] = best_fixed(known)
            methods["default"] = lambda one: one.default
        for i, one in enumerate(examples):
            if fold_of[i] == fold:
                for name, method in methods.items():
                    found.setdefault(name, {})[i] = judge(method, one)
    return {name: [by[i] for i in range(len(examples))] for name, by in found.items()}


def compared(examples: Sequence[Example], recipe: Recipe, folds: int = 5) -> dict[str, dict[str, float]]:
    """Method -> `figures` on held-out problems, for every method and target."""
    judged = held_out(examples, recipe, folds=folds, targets=TARGETS)
    return {name: figures(of) for name, of in judged.items()}


def show(told: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print tables of algorithms -> method -> figures."""
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
        for name, of in methods.items():
            table.add_row(name, *(f"{of[c]:.0f}" if c == "us" else f"{of.get(c, math.nan):.3f}" for c in columns))
        console.print(table)
