"""Training data of the sequence network: problems as sequences of tokens, programs as sequences of values.

A problem is the sequence of its fields, after "seq2seq for tuning parameters" (arXiv 2404.10162); there each field is
one-hot. Here a token is (field, value) for small counts and names and (field, rounded log2) for sizes, and each carries
the exact logarithm as a number beside it, so that two sizes in one bin differ and an unseen bin still carries
information. Besides the fields of `ConvProblem` there are derived sizes, in the units in which caches are measured.

Algorithms whose parameters have the same names and values share a network; the algorithm is a token itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ELEMENT_BYTES, STRIDED, ConvProblem, Direction
from convselect.kernels._space import Space, Values

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Sequence_ = tuple[int, ...]
"""A program: for each parameter, in the space's order, the index of its value among its possible values."""

DESCRIPTOR_VERSION = 1
_NAMES: dict[str, tuple[str, ...]] = {
    "direction": tuple(map(str, Direction)),
    "dtype": tuple(ELEMENT_BYTES),
    "layout": (CONTIGUOUS, CHANNELS_LAST, STRIDED),
    "weight_layout": (CONTIGUOUS, CHANNELS_LAST, STRIDED),
}
_COUNTS = ("R", "S", "stride_h", "stride_w", "pad_top", "pad_bottom", "pad_left", "pad_right", "dil_h", "dil_w")
_SIZES = ("threads", "groups", "N", "C", "H", "W", "K")
_DERIVED = ("pixels", "taps", "x_bytes", "weight_bytes", "y_bytes")
FIELDS = ("algorithm", *_NAMES, *_COUNTS, *_SIZES, *_DERIVED)
"""In the order in which the encoder reads them; its convolution mixes neighbouring fields."""
COUNT_TOKENS, SIZE_TOKENS, ALGORITHM_TOKENS = 12, 40, 16
FIELD_TOKENS = [
    ALGORITHM_TOKENS if name == "algorithm"
    else len(_NAMES[name]) if name in _NAMES
    else COUNT_TOKENS if name in _COUNTS
    else SIZE_TOKENS
    for name in FIELDS
]  # fmt: skip
"""Number of tokens of each field."""
_FIRST = np.cumsum([0, *FIELD_TOKENS])
VOCABULARY = int(_FIRST[-1])
"""Number of tokens of all fields together."""


def tokens(problem: ConvProblem, algorithm: int) -> tuple[Ids, Floats]:
    """One token id per field, (n_fields,), and the fields' log2 (n_fields,), 0 for names.

    Args:
        algorithm: index of the algorithm among those that share the network.

    Raises:
        ValueError: if there is nothing to compute, or the index is not below `ALGORITHM_TOKENS`.
    """
    p = problem
    if not 0 <= algorithm < ALGORITHM_TOKENS:
        raise ValueError(f"no more than {ALGORITHM_TOKENS} algorithms share a network")
    if min(p.N, p.C, p.H, p.W, p.K, p.R, p.S, p.P, p.Q) < 1:
        raise ValueError(f"there is nothing to compute in {p}")
    ids, numbers = [algorithm], [0.0]
    for name, known in _NAMES.items():
        ids.append(known.index(str(getattr(p, name))))
        numbers.append(0.0)
    for name in _COUNTS:
        count = getattr(p, name)
        ids.append(min(max(count, 0), COUNT_TOKENS - 1))
        numbers.append(math.log2(1 + max(count, 0)))
    derived = (p.N * p.P * p.Q, p.C // p.groups * p.R * p.S, p.x_bytes, p.weight_bytes, p.y_bytes)
    for size in (*(getattr(p, name) for name in _SIZES), *derived):
        log = math.log2(size)
        ids.append(min(round(log), SIZE_TOKENS - 1))
        numbers.append(log)
    return np.array(ids) + _FIRST[:-1], np.array(numbers, np.float32)


class Signature(NamedTuple):
    """Parameters of an algorithm and their possible values. A network understands programs of one signature only.

    Attributes:
        names: parameter names, in the order in which they are decided.
        values: possible values of each parameter, ascending.
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, space: Space) -> Signature:
        return cls(space.names, tuple(parameter.values for parameter in space.parameters))

    def encode(self, values: Values) -> Sequence_:
        """Raises ValueError if it is not a complete program of these values."""
        if set(values) != set(self.names):
            raise ValueError(f"{dict(values)} does not decide exactly {self.names}")
        return tuple(known.index(values[name]) for name, known in zip(self.names, self.values, strict=True))

    def decode(self, sequence: Sequence[int]) -> dict[str, int]:
        """Parameter -> value, for the first `len(sequence)` parameters."""
        return {name: known[i] for name, known, i in zip(self.names, self.values, sequence, strict=False)}


@dataclass(frozen=True)
class Example:
    """The measured programs of one algorithm on one problem.

    Attributes:
        times_us: program -> us; not every program was measured.
        default: the algorithm's default program; it was measured.
    """

    problem: ConvProblem
    algorithm: str
    space: Space
    times_us: Mapping[Sequence_, float]
    default: Sequence_

    @property
    def signature(self) -> Signature:
        return Signature.of(self.space)

    @property
    def best(self) -> Sequence_:
        return min(self.times_us, key=self.times_us.__getitem__)

    @property
    def best_us(self) -> float:
        return min(self.times_us.values())

    def is_valid(self, sequence: Sequence_) -> bool:
        return self.space.is_valid(self.problem, self.signature.decode(sequence))

    def time_us(self, sequence: Sequence_) -> float:
        """Time of a program; if it was not measured, that of the nearest measured one, in steps of values."""
        found = self.times_us.get(sequence)
        if found is not None:
            return found
        near = min(self.times_us, key=lambda other: sum(abs(a - b) for a, b in zip(sequence, other, strict=True)))
        return self.times_us[near]


def example(
    problem: ConvProblem, algorithm: str, space: Space, times_us: Iterable[tuple[Values, float]]
) -> Example | None:
    """An example of the programs that are valid in this space; None without the default or without other programs."""
    signature, found = Signature.of(space), {}
    for values, time_us in times_us:
        if space.is_valid(problem, values):
            found[signature.encode(values)] = time_us
    default = signature.encode(space.default(problem))
    if default not in found or len(found) < 2:
        return None
    return Example(problem, algorithm, space, found, default)


def grouped(examples: Iterable[Example]) -> dict[Signature, list[Example]]:
    """Examples by signature: those of one signature share a network."""
    found: dict[Signature, list[Example]] = {}
    for one in examples:
        found.setdefault(one.signature, []).append(one)
    return found


# ---- targets ----------------------------------------------------------------------------------------------------

TARGETS = ("best", "near", "ratio")
NEAR = 1.02
"""A single measurement cannot distinguish times within this factor."""
RATIO_EXPONENT = 40.0
_LEAST_WEIGHT = 0.02


def target(one: Example, kind: str) -> dict[Sequence_, float]:
    """Target probability of each program; they sum to 1.

    Args:
        kind: "best": the best measured program alone. "near": those within 2 % of it, in proportion to their speed.
            "ratio": p ~ t**-40, under which a program 2 % slower than the best has half of its probability.

    Raises:
        ValueError: for any other kind.
    """
    best = one.best_us
    if kind == "best":
        weights = {one.best: 1.0}
    elif kind == "near":
        weights = {s: best / t for s, t in one.times_us.items() if t <= NEAR * best}
    elif kind == "ratio":
        weights = {s: (best / t) ** RATIO_EXPONENT for s, t in one.times_us.items()}
        weights = {s: w for s, w in weights.items() if w >= _LEAST_WEIGHT}
    else:
        raise ValueError(f"a target is one of {', '.join(TARGETS)}, not {kind!r}")
    total = sum(weights.values())
    return {s: w / total for s, w in weights.items()}


# ---- coverage ---------------------------------------------------------------------------------------------------


def coverage(problems: Iterable[ConvProblem]) -> dict[str, list[str | int]]:
    """Every value that occurs for fields with names and counts; the smallest and largest for sizes."""
    problems = list(problems)
    found: dict[str, list[str | int]] = {}
    for name in (*_NAMES, *_COUNTS, "threads", "groups", "device"):
        found[name] = sorted({v if isinstance(v := getattr(p, name), int) else str(v) for p in problems})
    for name in ("N", "C", "H", "W", "K"):
        sizes = [getattr(p, name) for p in problems]
        found[name] = [min(sizes), max(sizes)]
    return found


def covered(problem: ConvProblem, by: Mapping[str, Sequence[str | int]]) -> bool:
    """Whether a problem lies within `coverage` of the training data. Beyond it a network would extrapolate, and the
    default is the better guess."""
    for name, values in by.items():
        value = getattr(problem, name)
        if name in ("N", "C", "H", "W", "K"):
            if not values[0] <= value <= values[1]:  # type: ignore[operator]
                return False
        elif (value if isinstance(value, int) else str(value)) not in values:
            return False
    return True
