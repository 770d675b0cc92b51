"""Training the three classifiers: a search for settings, and the runs that are reported."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.case_studies._classifiers import KINDS, Classifier, Setting, TransformerTokens
from benchmarks.case_studies._corpora import Encoded
from convselect.base import timing

BATCH = 32
PAPER_LENGTH = 200
GRID: dict[str, tuple[Any, ...]] = dict(
    pooling=("masked mean", "mean", "max"),
    norm=("none", "layer", "batch"),
    residual=(False, True),
    dropout=(0.1, 0.5),
    block_dropout=(0.0,),
    word_dropout=(0.0, 0.2, 0.4),
    positions=(True, False),
    embedding_std=(0.03, 0.3, 1.0),
    lr=(1e-3, 3e-3, 1e-2),
)
VARIANTS: tuple[dict[str, Any], ...] = (dict(width=64), dict(block_dropout=0.1))
"""Tried on the best setting of each kind, one at a time, to see whether it would matter; not chosen from, since the
blocks are compared at one width, and random numbers for every element cost more time than the Γ-block's products."""
OF_GAMMA = ("norm", "residual")
FIRST = Setting(pooling="mean", block_dropout=0.1)
"""As the paper seems to have it: averaged over everything, small initial embeddings, Adam at its default rate."""
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t for a 95 % interval, by degrees of freedom."""


class Trainer:
    """Trains one classifier. Keeps the weights of the epoch that was best on the validation set."""

    def __init__(self, kind: str, setting: Setting, corpus: Encoded, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind, self.setting, self.corpus = kind, setting, corpus
        self.model = Classifier(kind, setting, corpus.n_words, len(corpus.classes), corpus.length)
        # The fused kernel, so that the optimiser, which all three share, weighs as little as it can.
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=setting.lr, fused=True)
        self.order = torch.Generator().manual_seed(seed)
        self.validation: list[float] = []
        self._best_state = copy.deepcopy(self.model.state_dict())

    def epoch(self) -> None:
        data = self.corpus.splits["train"]
        self.model.train()
        for rows in torch.randperm(len(data.labels), generator=self.order).split(BATCH):
            self.step(data.tokens[rows], data.labels[rows])

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(tokens), labels).backward()
        self.optimiser.step()

    def correct(self, split: str) -> Tensor:
        """(n,) float64, 1 if the present weights are right."""
        data = self.corpus.splits[split]
        self.model.eval()
        # PyTorch's fast path for encoder layers is the slower one for padded batches.
        with torch.inference_mode(), fast_path(False):
            answers = torch.cat([self.model(tokens).argmax(1) for tokens in data.tokens.split(64)])
        return (answers == data.labels).double()

    def validate(self) -> float:
        self.validation.append(float(self.correct("validation").mean()))
        if self.validation[-1] > max(self.validation[:-1], default=-1.0):
            self._best_state = copy.deepcopy(self.model.state_dict())
        return self.validation[-1]

    @property
    def best_epoch(self) -> int:
        """Counted from 1; the first of equals."""
        return 1 + int(np.argmax(self.validation))

    def take_best(self) -> None:
        self.model.load_state_dict(self._best_state)


class fast_path:
    """PyTorch's fused inference of encoder layers on or off, within a block."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(self.on)

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self.before)


# ---- the search -----------------------------------------------------------------------------------------------------


def settings_for(kind: str, count: int, *, seed: int = 0) -> list[Setting]:
    """`FIRST`, then `count - 1` drawn from the grid, all different for this kind; `count` only sets the list's length.

    The kinds get the same draws, except for settings that only the Γ-block has.
    """
    source = random.Random(seed)
    found = [FIRST]
    seen = {_meaning(kind, FIRST)}
    while len(found) < count:
        setting = Setting(**{name: source.choice(values) for name, values in GRID.items()})
        if _meaning(kind, setting) not in seen:
            seen.add(_meaning(kind, setting))
            found.append(setting)
    return found[:count]


def around(setting: Setting) -> list[Setting]:
    """The other combinations of what only the Γ-block has: the random draws say little about them."""
    combinations = itertools.product(GRID["norm"], GRID["residual"])
    found = [dataclasses.replace(setting, norm=norm, residual=residual) for norm, residual in combinations]
    return [other for other in found if other != setting]


def _meaning(kind: str, setting: Setting) -> tuple[tuple[str, Any], ...]:
    blind = () if kind == "gamma" else OF_GAMMA + (("block_dropout",) if kind == "bag" else ())
    return tuple((name, value) for name, value in setting.to_json().items() if name not in blind)


def try_setting(kind: str, setting: Setting, corpus: Encoded, *, epochs: int, patience: int = 3) -> dict[str, Any]:
    """Train until the validation accuracy has not risen for `patience` epochs. The test set is not looked at."""
    trainer = Trainer(kind, setting, corpus, seed=0)
    for _ in range(epochs):
        trainer.epoch()
        trainer.validate()
        if len(trainer.validation) - trainer.best_epoch >= patience:
            break
    return dict(
        corpus=corpus.name, kind=kind, setting=setting.to_json(), best_epoch=trainer.best_epoch,
        accuracy=max(trainer.validation), validation=trainer.validation,
    )  # fmt: skip


def search(
    corpora: Iterable[Encoded],
    kinds: Iterable[str],
    count: int,
    done: list[dict[str, Any]],
    *,
    epochs: int = 12,
    deadline_s: float | None = None,
) -> Iterator[dict[str, Any]]:
    """What `done` doesn't have yet, trial by trial, setting by setting through the kinds."""
    deadline = timing.Deadline(deadline_s)
    known = {(d["corpus"], d["kind"], _meaning(d["kind"], Setting(**d["setting"]))) for d in done}
    trials, kinds = list(done), list(kinds)
    for corpus in corpora:
        lists = [[(kind, setting) for setting in settings_for(kind, count)] for kind in kinds]
        for kind, setting in itertools.chain.from_iterable(zip(*lists, strict=True)):
            if (corpus.name, kind, _meaning(kind, setting)) in known:
                continue
            if deadline.passed:
                return
            trials.append(try_setting(kind, setting, corpus, epochs=epochs))
            yield trials[-1]
        for setting in around(chosen(trials, corpus.name, "gamma")[0]) if "gamma" in kinds else ():
            if (corpus.name, "gamma", _meaning("gamma", setting)) in known:
                continue
            if deadline.passed:
                return
            trials.append(try_setting("gamma", setting, corpus, epochs=epochs))
            yield trials[-1]
        for kind, variant in itertools.product(kinds, VARIANTS):
            setting = dataclasses.replace(chosen(trials, corpus.name, kind)[0], **variant)
            if (corpus.name, kind, _meaning(kind, setting)) in known:
                continue
            if deadline.passed:
                return
            if kind != "bag" or "block_dropout" not in variant:
                yield {**try_setting(kind, setting, corpus, epochs=epochs), "variant": variant}


def chosen(trials: Iterable[Mapping[str, Any]], corpus: str, kind: str) -> tuple[Setting, int]:
    """The setting of the best validation accuracy, the first of equals, and its best epoch; no variant.

    Raises:
        ValueError: if there is no trial of that kind.
    """
    fitting = [t for t in trials if (t["corpus"], t["kind"]) == (corpus, kind) and "variant" not in t]
    if not fitting:
        raise ValueError(f"no trial of {kind} on {corpus}")
    best = max(fitting, key=lambda t: t["accuracy"])
    return Setting(**best["setting"]), best["best_epoch"]


# ---- what is reported -----------------------------------------------------------------------------------------------


@dataclass
class Runs:
    """All seeds of one corpus. Timings are one sample per epoch, the kinds taking turns epoch by epoch."""

    trainers: dict[str, list[Trainer]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    epochs: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    correct: dict[str, list[Tensor]] = field(default_factory=lambda: {kind: [] for kind in KINDS})


def train_interleaved(corpus: Encoded, settings: Mapping[str, Setting], seeds: Iterable[int], epochs: int) -> Runs:
    """Train all kinds side by side; each is tested once, with the weights of its best epoch on the validation set."""
    runs = Runs()
    for seed in seeds:
        trainers = {kind: Trainer(kind, settings[kind], corpus, seed) for kind in KINDS}
        times = timing.interleaved(
            {kind: _skipping_first(trainer.epoch, warm_up(trainer)) for kind, trainer in trainers.items()},
            epochs,
            seed=seed,
            on_round=lambda _, trainers=trainers: [trainer.validate() for trainer in trainers.values()],
        )
        for kind, trainer in trainers.items():
            trainer.take_best()
            runs.trainers[kind].append(trainer)
            runs.epochs[kind] += times[kind].samples_us
            runs.correct[kind].append(trainer.correct("test"))
    return runs


def warm_up(trainer: Trainer) -> Callable[[], None]:
    """A few steps of a copy that is thrown away: the untimed call, which must not be an epoch of the training."""

    def steps() -> None:
        other = Trainer(trainer.kind, trainer.setting, trainer.corpus, seed=0)
        data = trainer.corpus.splits["train"]
        with torch.random.fork_rng():
            for _ in range(3):
                other.step(data.tokens[:BATCH], data.labels[:BATCH])

    return steps


def _skipping_first(function: Callable[[], object], first: Callable[[], object]) -> Callable[[], object]:
    calls = itertools.count()
    return lambda: first() if next(calls) == 0 else function()


def accuracy(correct: list[Tensor]) -> dict[str, Any]:
    """Mean over the seeds in per cent, with two 95 % intervals: Student's over the seeds, which says how much chance
    of training there is in it, and Wilson's for a test set of that size."""
    each = [float(c.mean()) for c in correct]
    mean, n, count = float(np.mean(each)), len(correct[0]), len(each)
    seeds = None
    if count - 1 in T_975:
        seeds = T_975[count - 1] * float(np.std(each, ddof=1)) / count**0.5
    z = 1.96
    centre, half = mean + z * z / (2 * n), z * (mean * (1 - mean) / n + z * z / (4 * n * n)) ** 0.5
    test_set = [(centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)]
    return dict(
        each=_percent(each), mean=_percent(mean), over_seeds=None if seeds is None else _percent(seeds),
        over_test_set=_percent(test_set),
    )  # fmt: skip


def difference(a: list[Tensor], b: list[Tensor], groups: Tensor) -> dict[str, Any]:
    """Accuracy of `a` less that of `b` in points, paired by test document, and half of its 95 % interval over
    documents like these; documents of one group (the reviews of a movie) are not independent, and count together."""
    each = torch.stack(a).mean(0) - torch.stack(b).mean(0)
    mean = float(each.mean())
    sums = torch.zeros(int(groups.max()) + 1, dtype=each.dtype).index_add_(0, groups, each - mean)
    return dict(points=_percent(mean), half_interval=_percent(1.96 * float(sums.square().sum()) ** 0.5 / len(each)))


def _percent(value: Any) -> Any:
    return [_percent(v) for v in value] if isinstance(value, list) else round(100 * value, 2)


def spread(samples: Iterable[float] | timing.Timing, scale: float = 1.0) -> dict[str, float]:
    t = samples if isinstance(samples, timing.Timing) else timing.Timing(tuple(samples))
    return dict(median=t.median_us * scale, p20=t.p20_us * scale, p80=t.p80_us * scale)


def training_times(
    corpus: Encoded, settings: Mapping[str, Setting], *, length: int, rounds: int, deadline_s: float = 30.0
) -> dict[str, timing.Timing]:
    """Time of a step on 32 texts cut or padded to `length`, the kinds and the stock encoder layer taking turns."""
    data = corpus.splits["train"]
    short = data.tokens[:, :length]
    tokens = nn.functional.pad(short, (0, length - short.shape[1]))
    longer = corpus._replace(splits={**corpus.splits, "train": data._replace(tokens=tokens)})
    trainers = {kind: Trainer(kind, settings[kind], longer, seed=0) for kind in KINDS}
    stock = Trainer("transformer", settings["transformer"], longer, seed=0)
    dropout = 0.1 if settings["transformer"].block_dropout == 0 else settings["transformer"].block_dropout
    with_dropout = Setting(**{**settings["transformer"].to_json(), "block_dropout": dropout})
    stock.model.block = TransformerTokens(with_dropout, attention_dropout=True)
    stock.optimiser = torch.optim.Adam(stock.model.parameters(), lr=settings["transformer"].lr, fused=True)
    trainers["transformer, attention dropout"] = stock
    batches = list(zip(tokens.split(BATCH), data.labels.split(BATCH), strict=True))[: max(1, rounds)]
    sides = {}
    for name, trainer in trainers.items():
        turn = itertools.cycle(batches)
        trainer.model.train()
        sides[name] = lambda t=trainer, turn=turn: t.step(*next(turn))
    return timing.interleaved(sides, rounds, deadline_s=deadline_s)


def inference_times(
    trainers: Mapping[str, Trainer], batch: int, *, rounds: int, deadline_s: float = 30.0
) -> tuple[dict[str, timing.Timing], int]:
    """Times of the kinds, in turns, and the number of calls that each sample takes, with `batch` test texts per call.

    The transformer block is there with and without PyTorch's fast path.
    """
    tokens = next(iter(trainers.values())).corpus.splits["test"].tokens
    batches = tokens[: max(BATCH, batch)].split(batch)
    sides: dict[str, Callable[[], object]] = {}
    for kind, trainer in trainers.items():
        trainer.model.eval()
        sides[kind] = functools.partial(_infer, trainer.model, batches, False)
        if kind == "transformer":
            sides["transformer, fast path"] = functools.partial(_infer, trainer.model, batches, True)
    return timing.interleaved(sides, rounds, deadline_s=deadline_s), len(batches)


def _infer(model: nn.Module, batches: Iterable[Tensor], fast: bool) -> None:
    with torch.inference_mode(), fast_path(fast):
        for tokens in batches:
            model(tokens)
