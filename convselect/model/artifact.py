"""Model files: a card (JSON text) and arrays as `.npz` without pickles, for artifacts and parameter networks; what an
artifact's card says, corrections of it for one machine, and the checks of all that is read."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from convselect.model.features import FEATURE_NAMES, FEATURES_VERSION, VOLUME_FEATURE_NAMES

Array = npt.NDArray[np.float32]
FORMAT_VERSION = 1
WHAT = "model file"
NATIVE = "native"

MOST_LOG_GAIN = 50.0
"""A model that predicts a ratio of times of more than e to this says nothing."""

MOST_BYTES = 64 * 2**20
"""Largest file that is read, and most that it may unpack to. The largest shipped one has 170,000."""


class ArtifactError(ValueError):
    """A model file is missing, damaged, or made for another version; the message says which, in one sentence."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file, as large as it is when it is opened: a pipe or a device of that name is not waited for.

    Raises:
        OSError: if it cannot be read, is no regular file (a pipe, a device, a folder), or has more than `MOST_BYTES`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        if found.st_size > MOST_BYTES:
            raise OSError(f"{os.fspath(path)} has {found.st_size} bytes, more than {MOST_BYTES}")
        parts: list[bytes] = []
        while (left := found.st_size - sum(len(part) for part in parts)) > 0 and (part := os.read(number, left)):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(number)


def read(source: str | os.PathLike[str] | bytes, what: str) -> tuple[str, dict[str, Array]]:
    """The card's text, and the arrays as float32.

    Args:
        source: a path, or the bytes of a file.
        what: what the file should be, for messages.

    Raises:
        ArtifactError: if it is missing or damaged, or holds anything but a card and floating-point arrays.
    """
    try:
        # Read first: numpy leaves a damaged file open.
        data = source if isinstance(source, bytes) else read_bytes(source)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            if sum(one.file_size for one in archive.zip.infolist()) > MOST_BYTES:
                raise ArtifactError(f"the {what} unpacks to more than {MOST_BYTES} bytes")
            if "card" not in archive.files:
                raise ArtifactError(f"this is not a convselect {what}: it has no card")
            text = str(archive["card"])
            stored = {name: archive[name] for name in archive.files if name != "card"}
    except FileNotFoundError:
        raise ArtifactError(f"there is no {what} {source!r:.300}") from None
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(f"the {what} is damaged or not a {what}: {error!s:.300}") from None
    except Exception as error:  # parsers of damaged bytes raise anything: zlib.error, TokenError, MemoryError, ...
        raise ArtifactError(f"the {what} is damaged or not a {what} ({type(error).__name__})") from None
    if any(array.dtype not in (np.float16, np.float32) for array in stored.values()):
        raise ArtifactError(f"the {what} holds arrays that are not floating point: it is damaged")
    return text, {name: np.ascontiguousarray(array, np.float32) for name, array in stored.items()}


def finite(arrays: Mapping[str, Array], what: str) -> dict[str, Array]:
    """The same arrays, read-only.

    Raises:
        ArtifactError: if one holds an infinity or a NaN.
    """
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ArtifactError(f"the {what} holds values that are not finite: it is damaged")
    views = {name: array.view() for name, array in arrays.items()}
    for array in views.values():
        array.setflags(write=False)
    return views


def write(path: str | os.PathLike[str], card: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file, and a copy of its card as readable `.json` beside it. Same input, same bytes; each file appears
    complete or not at all.

    Raises:
        OSError: if a file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, card=np.array(card), **arrays)  # type: ignore[arg-type]
    for target, content in ((path, buffer.getvalue()), (path.with_suffix(".json"), card.encode() + b"\n")):
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        os.replace(partial, target)


# ---- cards ----------------------------------------------------------------------------------------------------------

# What a card and a calibration may hold: msgspec compares them with these types.
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Names = Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=1000)]
_Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Positive = Annotated[float, Meta(ge=1e-3, le=1e3)]
_Margin = Annotated[float, Meta(ge=0, le=MOST_LOG_GAIN)]
_Margins = Mapping[_Name, _Margin]


@dataclasses.dataclass(frozen=True)
class Card:
    """Describes an artifact, the machine of its measurements, and its results on held-out networks.

    Attributes:
        family: the kind of machine, as `host.family_of_host` names it.
        algorithm_names: one per logit; names, never positions in the pool.
        alpha: exponent of the training target, p ~ t**-alpha; logit differences / alpha are log ratios of times.
        margin: predicted ln(t_native / t) up to which native should be kept.
        margins: kind of problems (`features.margin_kind`) -> algorithm -> the margin that takes the place of `margin`
            there (`model/margins.py`).
        dtypes: element types with enough measured problems.
        device: device kind of the measured problems.
        tf32: whether float32 problems computed in TF32 were measured.
        host_flags: the processor features of `SIXTEEN_BIT_FLAGS` on the measuring machine.
        threads: thread counts measured.
        revisions: algorithm name -> `Algorithm.revision` that was measured.
        timed: algorithm name -> the kinds of problems (`features.kinds`) of which it had times; None: older than this
            field, and `inference.UNTIMED` holds.
        versions, data, figures, limits: library versions, description of the data set, held-out results, and a text
            on what those do not cover.
        sharpness: factor on predicted log gains before the softmax that gives each algorithm's probability of being
            the fastest, fitted on held-out problems; None: that of the training target, `alpha`.
        native_line: `targets.native_line`, if the times of C kernels have no cost of a plan; else empty.
    """

    family: _Name
    algorithm_names: _Names
    alpha: _Positive
    margin: _Margin
    dtypes: tuple[_Name, ...]
    device: _Name = "cpu"
    host_flags: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    threads: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**20)], ...], Meta(min_length=1)] = (1,)
    revisions: Mapping[str, _Whole] = dataclasses.field(default_factory=dict)
    timed: Mapping[str, tuple[_Name, ...]] | None = None
    margins: Mapping[_Name, _Margins] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits: str = ""
    sharpness: _Positive | None = None
    native_line: tuple[float, ...] = ()
    tf32: bool = False
    feature_names: tuple[str, ...] = FEATURE_NAMES
    features_version: _Whole = FEATURES_VERSION
    format_version: _Whole = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Card:
        """Raises `ArtifactError` unless `text` is a card that this version understands."""
        try:
            values = msgspec.json.decode(text)
            version = values["format_version"]
        except (ValueError, TypeError, KeyError, RecursionError):  # not JSON, no object, no version, nested too deeply
            raise ArtifactError("the model file's card is not readable: it is damaged or not a model file") from None
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"the model file has format {version!r:.60}; this version reads format {FORMAT_VERSION}"
            )
        if more := values.keys() - {field.name for field in dataclasses.fields(cls)}:
            raise ArtifactError(f"the model file's card has a field too many, {min(more)!r:.60}: it is damaged")
        try:
            card = msgspec.convert(values, cls)
        except ValueError as error:
            raise ArtifactError(f"the model file's card is damaged: {error}") from None
        if card.features_version != FEATURES_VERSION or card.feature_names not in (FEATURE_NAMES, VOLUME_FEATURE_NAMES):
            raise ArtifactError(
                f"the model file was trained on features of version {card.features_version}, this is version "
                f"{FEATURES_VERSION}; retrain it with `convselect train`"
            )
        # Artifacts for algorithms of other projects are for comparison only, and have a device that no problem has.
        ours = card.device in ("cpu", "cuda")
        if (ours and NATIVE not in card.algorithm_names) or len(set(card.algorithm_names)) != len(card.algorithm_names):
            raise ArtifactError("the model file's algorithm names are not unique or lack 'native'")
        return card


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Corrections of one artifact for one machine.

    Attributes:
        fingerprint: `cpu_fingerprint` of the machine.
        artifact, digest: name of the model file's family, and digest of its bytes.
        bias: algorithm -> what to add to its predicted ln(t_native / t).
        problems: number of problems timed.
    """

    fingerprint: str
    artifact: str
    digest: str
    bias: Mapping[str, Annotated[float, Meta(ge=-MOST_LOG_GAIN / 2, le=MOST_LOG_GAIN / 2)]]
    problems: _Whole

    @classmethod
    def from_json(cls, text: str | bytes) -> Calibration:
        """Raises `ArtifactError` unless `text` is a calibration that this version understands."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(
                f"the calibration is damaged or of another version ({error!s:.200}); run `convselect calibrate` again"
            ) from None


def checked(card: Card, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays, read-only, after checks that they fit each other and the card, and are finite."""
    n_blocks = sum(name.startswith("hidden_") for name in arrays)
    expected = {"mean", "scale", "low", "high", "head"}
    expected |= {f"{part}_{i}" for part in ("hidden", "out") for i in range(n_blocks)}
    if set(arrays) != expected or n_blocks == 0:
        raise ArtifactError("the model file lacks a matrix or has one too many: it is damaged")
    d = len(card.feature_names)
    fits = all(arrays[name].shape == (d,) for name in ("mean", "scale", "low", "high"))
    for i in range(n_blocks):
        hidden, out = arrays[f"hidden_{i}"], arrays[f"out_{i}"]
        fits = fits and hidden.ndim == out.ndim == 2 and hidden.shape[1] == d + 1
        fits = fits and out.shape[1] == d + 1 + hidden.shape[0]
        d = len(out) if out.ndim else -1
    fits = fits and arrays["head"].shape == (len(card.algorithm_names), d + 1)
    if not fits:
        raise ArtifactError("the model file's matrices do not fit together: it is damaged")
    found = finite(arrays, WHAT)
    if not _most(found, n_blocks) < MOST_VALUE:
        raise ArtifactError("the model file's numbers are too large to compute with: it is damaged")
    return found


MOST_VALUE = 1e30
"""Largest value that may occur while a prediction is computed in float32: no infinities, and so no NaN."""


def _most(a: Mapping[str, Array], n_blocks: int) -> float:
    """The largest absolute value that any input can lead to, at most."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = {name: np.abs(array.astype(np.float64)) for name, array in a.items()}
        x = (np.maximum(wide["low"], wide["high"]) + wide["mean"]) * np.maximum(wide["scale"], 1)
        most = [float(x.max())]
        for i in range(n_blocks):
            t = wide[f"hidden_{i}"] @ np.append(x, 1)
            x = wide[f"out_{i}"] @ np.concatenate([x, [1], t])
            most += [float(values.max(initial=0)) for values in (t, x)]
        most.append(float((wide["head"] @ np.append(x, 1)).max(initial=0)))
    return math.inf if any(math.isnan(one) for one in most) else max(most)


def save(path: str | os.PathLike[str], card: Card, arrays: Mapping[str, Array], *, half: bool = True) -> None:
    """Write an artifact, and a copy of its card as readable `.json` beside it. Same input, same bytes.

    `half` stores the matrices (not the normalisation of the input) in float16. The file appears complete or not at all.

    Raises:
        ArtifactError: if the arrays do not fit the card, or overflow float16.
    """
    stored = {name: a.astype(np.float16) if half and a.ndim == 2 else a for name, a in arrays.items()}
    checked(card, {name: a.astype(np.float32) for name, a in stored.items()})
    write(path, card.to_json(), stored)
