"""The Reformer in use: found for this machine, loaded at the first new problem, released when idle or on request."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from convselect.base.warnings import warn_once

if TYPE_CHECKING:
    from convselect.base.problem import ConvProblem
    from convselect.model.artifact import Calibration
    from convselect.model.inference import Predictor

IDLE_CALLS = 1000
"""The model is released after this many convolutions in a row that needed no prediction."""


class _Idle:
    """`left` is how many more convolutions may run without a prediction before the model is released. Callers count
    down themselves, to save a function call: `idle.left -= 1`, and `release_idle()` once it is negative. Two threads
    may lose a count between them, which does no harm."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = IDLE_CALLS - 1


idle = _Idle()

_lock = threading.Lock()
_loaded: Predictor | None = None
_of_gpu: dict[str, Predictor | None] = {}
"""Family -> its model; None if there is none."""
_failed = False
_override: bytes | None = None  # another rank's model, pickled: `unload` releases it like any other


def get() -> Predictor | None:
    """The predictor for this machine, or the one set by `override`. None if there is none: then native is chosen, and a
    warning was given once."""
    idle.left = IDLE_CALLS - 1
    if _loaded is not None or _failed:
        return _loaded
    return _load()


def get_for(problem: ConvProblem) -> Predictor | None:
    """The predictor for this problem's kind of device; None on a GPU without a model. Native is then chosen without a
    warning, since not every GPU has a model."""
    if problem.device == "cpu":
        return get()
    idle.left = IDLE_CALLS - 1
    family = _gpu_family()
    if family is None:
        return None
    if family not in _of_gpu:
        _load_of_gpu(family)
    return _of_gpu.get(family)


def identity(problem: ConvProblem) -> str:
    """A text that names the model for this problem, calibration included; "" if there is none. It is another one in
    float64 and for volumes: what trials teach of gains that are derived must not correct those that were trained."""
    predictor = get_for(problem)
    of = "" if predictor is None else str(getattr(predictor, "identity", ""))
    if of and problem.is_volume:
        model = getattr(predictor, "of_volumes", None)
        return f"{of} volumes" if model is None else f"{of} {model.identity}"
    return f"{of} float64" if of and problem.dtype == "float64" else of


def _gpu_family() -> str | None:
    import torch

    from convselect.machine.host import family_of_cuda

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return family_of_cuda(torch.cuda.get_device_capability())


def _load_of_gpu(family: str) -> None:
    from convselect.model.inference import Predictor, artifact_path

    path = artifact_path(family)
    with _lock:
        if family in _of_gpu:
            return
        _of_gpu[family] = None
        if path.exists():
            try:
                _of_gpu[family] = Predictor.load(path, host_flags={})
            except Exception as error:  # a call does not fail because of a file
                warn_once("artifact of a GPU", f"convselect: {error}; on this GPU every automatic choice is native.")


def path_for_host() -> Path:
    """Path of this machine's artifact: `CONVSELECT_ARTIFACT`, else the shipped one of its family. It may not exist."""
    from convselect.machine.host import cpu_capability, family_of_host
    from convselect.model.inference import artifact_path

    named = os.environ.get("CONVSELECT_ARTIFACT")
    return Path(named) if named else artifact_path(family_of_host(cpu_capability()))


def nearest_artifact() -> Path:
    """This machine's artifact, or the shipped one most like it: with or without C kernels as here, then of the same
    kind of processor, then by name. Artifacts of other CPU families need calibration before they are used.

    Raises:
        ArtifactError: if nothing is shipped at all.
    """
    from convselect.model.artifact import ArtifactError
    from convselect.model.inference import ARTIFACTS

    own = path_for_host()
    if "CONVSELECT_ARTIFACT" in os.environ or own.exists():
        return own
    shipped = sorted(ARTIFACTS.glob("cpu-*.npz"))
    if not shipped:
        raise ArtifactError("there is no trained model to calibrate")

    def likeness(path: Path) -> tuple[bool, int]:
        ours, theirs = own.stem.split("-"), path.stem.split("-")
        return ours[-1:] == theirs[-1:], sum(a == b for a, b in zip(ours, theirs, strict=False))

    return max(shipped, key=likeness)


def calibration_path() -> Path:
    """Path of this machine's calibration: `CONVSELECT_CALIBRATION`, else in the user's cache. It may not exist.

    Raises:
        OSError: if this user has no home directory.
    """
    from convselect.machine.environment import cpu_fingerprint, user_cache

    named = os.environ.get("CONVSELECT_CALIBRATION")
    return Path(named) if named else user_cache() / f"calibration-{cpu_fingerprint()}.json"


def _find() -> Predictor:
    """This machine's artifact, corrected if it was calibrated; another CPU family's only if it was calibrated.

    Raises:
        ArtifactError, OSError: if there is none, or it is damaged.
    """
    from convselect.machine.environment import cpu_fingerprint
    from convselect.machine.host import host_flags
    from convselect.model.artifact import ArtifactError
    from convselect.model.inference import Predictor

    own, flags = path_for_host(), host_flags()
    calibration = _calibration()
    if calibration is not None and calibration.fingerprint != cpu_fingerprint():
        calibration = None  # for another machine, after a cache was moved, or for another version of torch
    if not own.exists() and (calibration is None or "CONVSELECT_ARTIFACT" in os.environ):
        raise ArtifactError(
            f"there is no trained model for this machine ({own.stem}); `convselect calibrate` fits the nearest to it"
        )
    path = own if own.exists() else nearest_artifact()
    predictor = Predictor.load(path, host_flags=flags)
    if calibration is not None and calibration.artifact == path.stem and calibration.digest == digest(path):
        return predictor.corrected(calibration.bias, flags)
    if path != own:
        raise ArtifactError("the calibration is of an earlier model; run `convselect calibrate` again")
    return predictor


def _calibration() -> Calibration | None:
    """The calibration as it was written, whichever machine and model it is of; None if there is none, or if others can
    write the one in the cache (with a warning).

    Raises:
        ArtifactError, OSError: if it cannot be read, or is damaged.
    """
    written = calibration_path()
    if not os.path.lexists(written):
        return None
    from convselect.machine.ownership import examined

    try:
        path = examined(written, named="CONVSELECT_CALIBRATION" in os.environ)
    except PermissionError as error:
        warn_once("calibration", f"convselect: the calibration is left out: {error}")
        return None
    return read_calibration(path)


def read_calibration(path: Path) -> Calibration:
    """A file's calibration.

    Raises:
        ArtifactError, OSError: if it cannot be read, or is damaged.
    """
    from convselect.model.artifact import Calibration, read_bytes

    return Calibration.from_json(read_bytes(path))


def digest(path: Path) -> str:
    """16 hexadecimal digits of the SHA-256 of a model file: a calibration is valid for exactly one file."""
    import hashlib

    from convselect.model.artifact import read_bytes

    return hashlib.sha256(read_bytes(path)).hexdigest()[:16]


def _load() -> Predictor | None:
    global _loaded, _failed
    with _lock:
        if _override is not None:
            _loaded = pickle.loads(_override)
            _failed = _loaded is None
        elif _loaded is None and not _failed:
            try:
                _loaded = _find()
            except Exception as error:  # a call does not fail because of a file, or because msgspec is not there
                _failed = True
                warn_once("artifact", f"convselect: {error}; every automatic choice is native from now on.")
    return _loaded


def release_idle() -> None:
    """Called at the `IDLE_CALLS`th convolution in a row without a prediction: unloads the model if one is loaded."""
    idle.left = IDLE_CALLS - 1
    if _loaded is not None or _of_gpu:
        unload()


def unload() -> None:
    """Release the model's memory. Choices already made stay; a new problem loads the model again. Happens automatically
    after `IDLE_CALLS` convolutions in a row that needed no prediction."""
    global _loaded, _failed
    with _lock:
        _loaded, _failed = None, False
        _of_gpu.clear()


def override(predictor: Predictor | None) -> None:
    """Choose by this predictor from now on, even if it was made for another machine; None: always native. Undone by
    `use_local`."""
    global _override
    _override = pickle.dumps(predictor)
    unload()


def use_local() -> None:
    """Choose by this machine's own model again."""
    global _override
    _override = None
    unload()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
