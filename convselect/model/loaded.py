"""The Reformer in use: found for this machine, loaded at the first new problem, dropped on request."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from convselect.warnings import warn_once

if TYPE_CHECKING:
    from convselect.model.inference import Predictor
    from convselect.problem import ConvProblem

IDLE_CALLS = 1000
"""So many convolutions in a row that asked for no prediction end the first pass: the model is released."""

_lock = threading.Lock()
_loaded: Predictor | None = None
_of_gpu: dict[str, Predictor | None] = {}
"""Family -> its model; None where there is none."""
_failed = False
_idle = 0
_given: bytes | None = None  # another rank's model, pickled: `unload` releases it like any other


def get() -> Predictor | None:
    """The predictor for this machine, or the one that was given, or None: then native is chosen, and one warning has
    said why."""
    global _idle
    _idle = 0
    if _loaded is not None or _failed:
        return _loaded
    return _load()


def get_for(problem: ConvProblem) -> Predictor | None:
    """The predictor for this problem's kind of device. A GPU without a model is native, and that is no reason to warn:
    none is promised for it."""
    global _idle
    if problem.device == "cpu":
        return get()
    _idle = 0
    family = _gpu_family()
    if family is None:
        return None
    if family not in _of_gpu:
        _load_of_gpu(family)
    return _of_gpu.get(family)


def _gpu_family() -> str | None:
    import torch

    from convselect.machine.host import family_of_cuda

    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return family_of_cuda(torch.cuda.get_device_capability())


def _load_of_gpu(family: str) -> None:
    from convselect.model.inference import ArtifactError, Predictor, artifact_path

    path = artifact_path(family)
    with _lock:
        if family in _of_gpu:
            return
        _of_gpu[family] = None
        if path.exists():
            try:
                _of_gpu[family] = Predictor.load(path, host_flags={})
            except (ArtifactError, OSError) as error:
                warn_once("artifact of a GPU", f"convselect: {error}; on this GPU every automatic choice is native.")


def path_for_host() -> Path:
    """Where this machine's artifact lies: `CONVSELECT_ARTIFACT`, else the shipped one of the machine's family."""
    from convselect.machine.host import cpu_capability, family_of_host
    from convselect.model.inference import artifact_path

    override = os.environ.get("CONVSELECT_ARTIFACT")
    return Path(override) if override else artifact_path(family_of_host(cpu_capability()))


def nearest_artifact() -> Path:
    """This machine's artifact, or the shipped one most like it: with or without C kernels as here, then of the same
    kind of processor, then by name. A stranger's is to be calibrated before it says anything.

    Raises:
        ArtifactError: where nothing is shipped at all.
    """
    from convselect.model.inference import ARTIFACTS, ArtifactError

    own = path_for_host()
    if own.exists() or "CONVSELECT_ARTIFACT" in os.environ:
        return own
    shipped = sorted(ARTIFACTS.glob("cpu-*.npz"))
    if not shipped:
        raise ArtifactError("there is no trained model to calibrate")

    def likeness(path: Path) -> tuple[bool, int]:
        ours, theirs = own.stem.split("-"), path.stem.split("-")
        return ours[-1:] == theirs[-1:], sum(a == b for a, b in zip(ours, theirs, strict=False))

    return max(shipped, key=likeness)


def calibration_path() -> Path:
    """Where this machine's calibration lies: `CONVSELECT_CALIBRATION`, else in the user's cache. It may not exist."""
    from convselect.machine.environment import cpu_fingerprint, user_cache

    override = os.environ.get("CONVSELECT_CALIBRATION")
    return Path(override) if override else user_cache() / f"calibration-{cpu_fingerprint()}.json"


def _find() -> Predictor:
    """This machine's artifact, corrected where it was calibrated; a stranger's only if it was.

    Raises:
        ArtifactError, OSError: where there is none, or what there is is damaged.
    """
    from convselect.machine.environment import cpu_fingerprint
    from convselect.machine.host import host_flags
    from convselect.model.inference import ArtifactError, Calibration, Predictor

    own, flags = path_for_host(), host_flags()
    written = calibration_path()
    calibration = Calibration.from_json(written.read_text()) if written.exists() else None
    if calibration is not None and calibration.fingerprint != cpu_fingerprint():
        calibration = None  # of another machine: a cache that moved, or another version of torch
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


def digest(path: Path) -> str:
    """Of an artifact's bytes: a calibration is of one model, and of no later one."""
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _load() -> Predictor | None:
    global _loaded, _failed
    from convselect.model.inference import ArtifactError

    with _lock:
        if _given is not None:
            _loaded = pickle.loads(_given)
            _failed = _loaded is None
        elif _loaded is None and not _failed:
            try:
                _loaded = _find()
            except (ArtifactError, OSError) as error:
                _failed = True
                warn_once("artifact", f"convselect: {error}; every automatic choice is native from now on.")
    return _loaded


def tick() -> None:
    """Count a convolution that runs a chosen algorithm; unloads the model at the `IDLE_CALLS`th without a prediction.

    Two threads may lose a count between them, which is of no consequence.
    """
    global _idle
    _idle += 1
    if _idle >= IDLE_CALLS and (_loaded is not None or _of_gpu):
        unload()


def unload() -> None:
    """Release the model's memory. Choices already made stay; a new problem loads the model again. Happens by itself
    once `IDLE_CALLS` convolutions in a row needed no prediction."""
    global _loaded, _failed
    with _lock:
        _loaded, _failed = None, False
        _of_gpu.clear()


def give(predictor: Predictor | None) -> None:
    """Choose by this one from now on, whatever machine it was made for; None: always native. `own` takes it back."""
    global _given
    _given = pickle.dumps(predictor)
    unload()


def own() -> None:
    """Back to this machine's own model."""
    global _given
    _given = None
    unload()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
