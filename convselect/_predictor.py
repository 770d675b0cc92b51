"""The Reformer in use: found for this machine, loaded at the first new problem, dropped on request."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from convselect._warnings import warn_once

if TYPE_CHECKING:
    from convselect.model.inference import Predictor

IDLE_CALLS = 1000
"""So many convolutions in a row that asked for no prediction end the first pass: the model is released."""

_lock = threading.Lock()
_loaded: Predictor | None = None
_failed = False
_idle = 0


def get() -> Predictor | None:
    """The predictor for this machine, or None: then native is chosen, and one warning has said why."""
    global _idle
    _idle = 0
    if _loaded is not None or _failed:
        return _loaded
    return _load()


def path_for_host() -> Path:
    """Where this machine's artifact lies: `CONVSELECT_ARTIFACT`, else the shipped one of the machine's family."""
    from convselect.model.host import cpu_capability, family_of_host
    from convselect.model.inference import artifact_path

    override = os.environ.get("CONVSELECT_ARTIFACT")
    return Path(override) if override else artifact_path(family_of_host(cpu_capability()))


def _load() -> Predictor | None:
    global _loaded, _failed
    from convselect.model.host import host_flags
    from convselect.model.inference import ArtifactError, Predictor

    with _lock:
        if _loaded is None and not _failed:
            path = path_for_host()
            try:
                if not path.exists():
                    raise ArtifactError(f"there is no trained model for this machine ({path.stem})")
                _loaded = Predictor.load(path, host_flags=host_flags())
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
    if _idle >= IDLE_CALLS and _loaded is not None:
        unload()


def unload() -> None:
    """Release the model's memory. Choices already made stay; a new problem loads the model again. Happens by itself
    once `IDLE_CALLS` convolutions in a row needed no prediction."""
    global _loaded, _failed
    with _lock:
        _loaded, _failed = None, False


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
