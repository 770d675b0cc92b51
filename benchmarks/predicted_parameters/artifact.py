"""Trained parameter networks of one device family, as a file: `params-<family>.npz`, in this folder.

No pickles: arrays named "<network>/<array>", and one JSON text, its `ParameterCard`. A network predicts for one
signature (`tokens.Signature`). These keep their defaults: algorithms whose parameters, values or revision have changed
since, problems outside of what was measured, and algorithms whose default did as well on held-out problems.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.predicted_parameters.decoding import ARRAYS, Decoder, beam_search
from benchmarks.predicted_parameters.tokens import (
    ALGORITHM_TOKENS,
    DESCRIPTOR_VERSION,
    FIELDS,
    VOCABULARY,
    Floats,
    Sequence_,
    Signature,
    covered,
    tokens,
)
from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm
from convselect.model import artifact as model_file
from convselect.model.artifact import ArtifactError

HERE = Path(__file__).parent
FORMAT_VERSION = 1
WHAT = "parameter file"
LEAST_GAIN = 1.01
"""Required geometric mean of speedups over the default on held-out problems; two standard errors below the mean must
not be a loss."""


@dataclasses.dataclass(frozen=True)
class NetworkCard:
    """Description of one network.

    Attributes:
        names, values: parameters, in order, and the possible values of each.
        algorithms: those that share the network, in the order of their tokens.
        revisions: algorithm -> its revision when it was measured.
        covers: coverage of the training data (`tokens.coverage`).
        figures: algorithm -> its figures on held-out problems (`figures.figures`).
        k: beam width.
    """

    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    algorithms: tuple[str, ...]
    revisions: Mapping[str, int]
    covers: Mapping[str, Sequence[str | int]]
    figures: Mapping[str, Mapping[str, float]]
    k: int

    @property
    def signature(self) -> Signature:
        return Signature(self.names, self.values)

    def gains(self, algorithm: str) -> bool:
        """Whether predictions were shown to beat the algorithm's default."""
        found = self.figures.get(algorithm, {})
        return found.get("gain", 0.0) >= LEAST_GAIN and found.get("gain_low", 0.0) >= 1.0


@dataclasses.dataclass(frozen=True)
class ParameterCard:
    """Description of a file: its networks, their training data, and how well each did on held-out problems.

    Attributes:
        family: device family, as `host.family_of_host` names it.
        networks: in the order of the arrays' names.
        versions: library -> version.
        data: the training data.
        figures: algorithms that share a network -> method -> figures.
        limits: what the figures do not cover.
    """

    family: str
    networks: tuple[NetworkCard, ...]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits: str = ""
    descriptor_version: int = DESCRIPTOR_VERSION
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> ParameterCard:
        """Raises `ArtifactError` unless `text` is a card that this version understands."""
        try:
            values = json.loads(text)
            versions = values["format_version"], values["descriptor_version"]
        except (ValueError, TypeError, KeyError):
            raise ArtifactError("the parameter file's card is not readable: it is damaged") from None
        if versions != (FORMAT_VERSION, DESCRIPTOR_VERSION):
            raise ArtifactError(
                f"the parameter file has format and descriptor {versions}; this version reads "
                f"{(FORMAT_VERSION, DESCRIPTOR_VERSION)}: retrain it"
            )
        try:
            networks = []
            for one in values["networks"]:
                one["names"], one["algorithms"] = tuple(one["names"]), tuple(one["algorithms"])
                one["values"] = tuple(tuple(map(int, v)) for v in one["values"])
                network = NetworkCard(**one)
                sound = len(network.names) == len(network.values) and all(network.values) and network.k >= 1
                sound = sound and 0 < len(network.algorithms) <= ALGORITHM_TOKENS
                sound = sound and set(network.algorithms) <= set(network.revisions)
                if not sound:
                    raise TypeError
                networks.append(network)
            return cls(**{**values, "networks": tuple(networks)})
        except (TypeError, KeyError, ValueError):
            raise ArtifactError("the parameter file's card lacks a field or has one too many: it is damaged") from None


class ParameterPredictor:
    """A loaded file. Thread-safe: it keeps nothing between calls.

    Args:
        networks: one dictionary of `decoding.ARRAYS` per network of the card.

    Raises:
        ArtifactError: if the arrays do not fit the card.
    """

    def __init__(self, card: ParameterCard, networks: Sequence[Mapping[str, Floats]]) -> None:
        self.card = card
        if len(networks) != len(card.networks):
            raise ArtifactError("the parameter file lacks a network or has one too many: it is damaged")
        self._networks = [_checked(network, arrays) for network, arrays in zip(card.networks, networks, strict=True)]
        self._of: dict[str, list[int]] = {}
        for i, network in enumerate(card.networks):
            for algorithm in network.algorithms:
                self._of.setdefault(algorithm, []).append(i)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | bytes) -> ParameterPredictor:
        """Read a file, or the bytes of one.

        Raises:
            ArtifactError: if it is missing, damaged, or made for another version.
        """
        text, stored = model_file.read(source, WHAT)
        card = ParameterCard.from_json(text)
        expected = {f"{i}/{name}" for i in range(len(card.networks)) for name in ARRAYS}
        if set(stored) != expected:
            raise ArtifactError("the parameter file lacks an array or has one too many: it is damaged")
        return cls(card, [{name: stored[f"{i}/{name}"] for name in ARRAYS} for i in range(len(card.networks))])

    def params_for(self, problem: ConvProblem, algorithm: Algorithm, *, always: bool = False) -> dict[str, int] | None:
        """A valid program of the algorithm on this problem, parameter -> value; None if its default should run.

        That is so if the algorithm has no parameters, other ones than the network knows, or another revision, if the
        problem is outside of what was measured, and unless `always`, if the default did as well on held-out problems.
        """
        for i in self._of.get(algorithm.name, ()):
            card = self.card.networks[i]
            if card.revisions[algorithm.name] != algorithm.revision or not (always or card.gains(algorithm.name)):
                continue
            if not covered(problem, card.covers) or algorithm.why_not(problem) is not None:
                continue
            space, signature = algorithm.space(problem), card.signature
            if space is None or Signature.of(space) != signature:
                continue
            sizes = [len(values) for values in signature.values]
            decoder = Decoder(self._networks[i], sizes, *tokens(problem, card.algorithms.index(algorithm.name)))
            found = beam_search(decoder, sizes, card.k, _allowed(space.is_partially_valid, problem, signature))
            if found:
                params = signature.decode(found[0].sequence)
                return None if params == space.default(problem) else params
        return None


def _allowed(
    is_partially_valid: Callable[[ConvProblem, Mapping[str, int]], bool], problem: ConvProblem, signature: Signature
) -> Callable[[Sequence_], bool]:
    return lambda sequence: is_partially_valid(problem, signature.decode(sequence))


def _checked(card: NetworkCard, arrays: Mapping[str, Floats]) -> dict[str, Floats]:
    """The arrays, after checking that they fit the card and each other and are finite; read-only."""
    try:
        d, n = len(arrays["conv_bias"]), len(arrays["memory_key"]) // 2
        values = sum(map(len, card.values))
        shapes = {
            "embedding": (VOCABULARY, d), "slope": (len(FIELDS), d), "centre": (len(FIELDS),), "scale": (len(FIELDS),),
            "conv": (3 * d, d), "conv_bias": (d,), "encode": (d, 8 * n), "encode_bias": (8 * n,),
            "recur": (2 * n, 8 * n), "start": (2 * n, 2 * n), "start_bias": (2 * n,), "memory_key": (2 * n, n),
            "state_key": (2 * n, n), "energy": (n,), "value": (values + 1, d), "decode_value": (d, 8 * n),
            "decode_context": (2 * n, 8 * n), "decode_state": (2 * n, 8 * n), "decode_bias": (8 * n,),
            "out": (4 * n, values), "out_bias": (values,),
        }  # fmt: skip
        fits = n > 0 and all(arrays[name].shape == shape for name, shape in shapes.items())
    except (KeyError, TypeError, IndexError):
        fits = False
    if not fits:
        raise ArtifactError("the parameter file's arrays do not fit together: it is damaged")
    return model_file.finite(arrays, WHAT)


def parameter_path(family: str, directory: str | os.PathLike[str] = HERE) -> Path:
    """Path of a device family's parameter networks; the file may not exist."""
    return Path(directory) / f"params-{family}.npz"


def save(path: str | os.PathLike[str], card: ParameterCard, networks: Sequence[Mapping[str, Floats]]) -> None:
    """Write a file atomically, matrices in float16, and a copy of its card as readable `.json` beside it.

    Raises:
        ArtifactError: if the arrays do not fit the card, or overflow float16.
    """
    # The normalisation of the input stays exact: it is subtracted from numbers of its own size.
    stored = {
        f"{i}/{name}": array if name in ("centre", "scale") else array.astype(np.float16)
        for i, arrays in enumerate(networks)
        for name, array in arrays.items()
    }
    ParameterPredictor(
        card,
        [
            {name: stored[f"{i}/{name}"].astype(np.float32) for name in arrays if f"{i}/{name}" in stored}
            for i, arrays in enumerate(networks)
        ],
    )
    model_file.write(path, card.to_json(), stored)


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures for a card: only finite numbers, and no times, so that the same recipe gives the same file."""
    return {name: value for name, value in figures.items() if name != "us" and math.isfinite(value)}
