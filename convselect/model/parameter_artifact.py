"""Trained parameter networks of one device family, as a file: `params-<family>.npz`, beside the artifacts that choose
algorithms.

No pickles: arrays named "<network>/<array>", and one JSON text, its `ParameterCard`. A network speaks for one
signature (`parameters.Signature`). It says nothing of an algorithm whose parameters, their values or whose revision
have changed since, of a problem outside of what was measured, and of an algorithm whose default did as well on
held-out problems: those keep their defaults.
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

from convselect.kernels._contract import Algorithm
from convselect.model import _archive
from convselect.model.decoding import ARRAYS, Decoder, beam_search
from convselect.model.inference import ARTIFACTS, ArtifactError
from convselect.model.parameters import (
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
from convselect.problem import ConvProblem

FORMAT_VERSION = 1
WHAT = "parameter file"
LEAST_GAIN = 1.01
"""Over the default, on held-out problems, in geometric mean; and two standard errors below it may be no loss."""


@dataclasses.dataclass(frozen=True)
class NetworkCard:
    """One network.

    Attributes:
        names, values: the parameters it decides, in order, and what each may be.
        algorithms: those that share it, in the order of their tokens.
        revisions: algorithm -> its revision when it was measured.
        covers: what it was trained on (`parameters.coverage`).
        figures: algorithm -> its own on held-out problems (`parameter_figures.figures`).
        k: width of the beam.
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
        """Whether it was shown to do better than the default."""
        found = self.figures.get(algorithm, {})
        return found.get("gain", 0.0) >= LEAST_GAIN and found.get("gain_low", 0.0) >= 1.0


@dataclasses.dataclass(frozen=True)
class ParameterCard:
    """What a file of networks is, what it was measured on, and how well each did on problems it had not seen.

    Attributes:
        family: the kind of machine, as `host.family_of_host` names it.
        networks: in the order of the arrays' names.
        versions, data, figures, limits: of libraries; of what it was trained on; of every method compared, by the
            algorithms that share a network; what they do not cover.
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
                f"{(FORMAT_VERSION, DESCRIPTOR_VERSION)}: retrain it with `convselect train-params`"
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
    """A loaded file. Safe to call from any thread: nothing is kept between calls.

    Args:
        networks: one dictionary of `decoding.ARRAYS` per network of the card.

    Raises:
        ArtifactError: where arrays do not fit the card.
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
            ArtifactError: where it is missing, damaged, or made for another version.
        """
        text, stored = _archive.read(source, WHAT)
        card = ParameterCard.from_json(text)
        expected = {f"{i}/{name}" for i in range(len(card.networks)) for name in ARRAYS}
        if set(stored) != expected:
            raise ArtifactError("the parameter file lacks an array or has one too many: it is damaged")
        return cls(card, [{name: stored[f"{i}/{name}"] for name in ARRAYS} for i in range(len(card.networks))])

    def params_for(self, problem: ConvProblem, algorithm: Algorithm, *, always: bool = False) -> dict[str, int] | None:
        """A valid program of the algorithm on this problem, parameter -> value; None where its default should run: it
        has no parameters, others than the network knows, another revision, the problem is outside of what was measured,
        or the default did as well on held-out problems (`always` leaves this last one out).
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
    return _archive.finite(arrays, WHAT)


def parameter_path(family: str, directory: str | os.PathLike[str] = ARTIFACTS) -> Path:
    """Where the parameter networks of a device family lie; the file may not exist."""
    return Path(directory) / f"params-{family}.npz"


def save(path: str | os.PathLike[str], card: ParameterCard, networks: Sequence[Mapping[str, Floats]]) -> None:
    """Write a file, and its card once more as readable `.json` beside it. Matrices are stored in float16. It appears
    whole or not at all.

    Raises:
        ArtifactError: where the arrays do not fit the card, or overflow float16.
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
    _archive.write(path, card.to_json(), stored)


def finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures as a card has them: only numbers, and no times, so that one recipe makes one file."""
    return {name: value for name, value in figures.items() if name != "us" and math.isfinite(value)}
