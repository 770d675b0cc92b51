"""Parameters of an automatically chosen algorithm where nobody tuned the problem: predicted, once per problem.

The networks are released with the Reformer (`convselect.unload`, or by themselves once nothing new is met); what they
have said stays.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convselect._warnings import warn_once
from convselect.problem import ConvProblem
from convselect.settings import CACHE_ENTRIES

if TYPE_CHECKING:
    from convselect.kernels import Algorithm
    from convselect.model.parameter_artifact import ParameterPredictor

_lock = threading.Lock()
_loaded: ParameterPredictor | None = None
_none = False  # looked for, and there is none


def params_for(problem: ConvProblem, algorithm: Algorithm) -> Mapping[str, int] | None:
    """A valid program of the algorithm on this problem, or None: its default. Remembered; never raises.

    None for everything where `CONVSELECT_PARAMS` is `off`, or there is no file of this machine's family; a file that is
    damaged is one warning.
    """
    if _none or problem.device != "cpu":
        return None
    return _predicted(problem, algorithm)


@functools.lru_cache(maxsize=CACHE_ENTRIES)
def _predicted(problem: ConvProblem, algorithm: Algorithm) -> Mapping[str, int] | None:
    predictor = _predictor()
    if predictor is None:
        return None
    try:
        return predictor.params_for(problem, algorithm)
    except Exception as error:
        # A prediction is never worth an exception in the user's model.
        warn_once("parameters", f"convselect: no parameters of {algorithm.name} for {problem} ({error!r})")
        return None


def path_for_host() -> Path | None:
    """`CONVSELECT_PARAMS`, else the shipped file of this machine's family, which may not exist; None: `off`."""
    override = os.environ.get("CONVSELECT_PARAMS")
    if override == "off":
        return None
    if override:
        return Path(override)
    from convselect.model.host import cpu_capability, family_of_host
    from convselect.model.parameter_artifact import parameter_path

    return parameter_path(family_of_host(cpu_capability()))


def _predictor() -> ParameterPredictor | None:
    global _loaded, _none
    with _lock:
        if _loaded is None and not _none:
            _loaded = _load()
            _none = _loaded is None
        return _loaded


def _load() -> ParameterPredictor | None:
    from convselect.model.inference import ArtifactError

    path = path_for_host()
    if path is None or not (path.exists() or "CONVSELECT_PARAMS" in os.environ):
        return None
    from convselect.model.parameter_artifact import ParameterPredictor

    try:
        return ParameterPredictor.load(path)
    except (ArtifactError, OSError) as error:
        warn_once("parameters", f"convselect: {error}; algorithms run with their default parameters.")
        return None


def digest() -> str | None:
    """Of the file in use; None where there is none. Ranks that differ in it differ in their last digits."""
    path = path_for_host()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.exists() else None


def unload() -> None:
    """Release the networks. What they have said stays."""
    global _loaded
    _loaded = None


def forget() -> None:
    """Look for the file again, and predict anew."""
    global _loaded, _none
    _loaded, _none = None, False
    _predicted.cache_clear()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
