"""Parameters of an automatically chosen algorithm where nobody tuned the problem: predicted, once per problem."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from convselect._warnings import warn_once
from convselect.problem import ConvProblem
from convselect.settings import CACHE_ENTRIES

if TYPE_CHECKING:
    from convselect.kernels import Algorithm
    from convselect.model.parameter_artifact import ParameterPredictor


def params_for(problem: ConvProblem, algorithm: Algorithm) -> Mapping[str, int] | None:
    """A valid program of the algorithm on this problem, or None: its default. Remembered; never raises.

    None for everything where `CONVSELECT_PARAMS` is `off`, or there is no file of this machine's family; a file that is
    damaged is one warning.
    """
    predictor = _predictor()
    if predictor is None:
        return None
    return _predicted(predictor, problem, algorithm)


@functools.lru_cache(maxsize=CACHE_ENTRIES)
def _predicted(predictor: ParameterPredictor, problem: ConvProblem, algorithm: Algorithm) -> Mapping[str, int] | None:
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


@functools.cache
def _predictor() -> ParameterPredictor | None:
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


def forget() -> None:
    """Look for the file again, and predict anew."""
    _predictor.cache_clear()
    _predicted.cache_clear()
