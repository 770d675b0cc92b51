"""What trials teach about the model (`choice/learnt.py`), in this process and through the store in the next."""

from __future__ import annotations

import math
from collections.abc import Mapping

from convselect.base.lru import on_clear
from convselect.base.problem import ConvProblem
from convselect.choice.choose import Prediction
from convselect.choice.learnt import Corrected, Learnt, layer_of
from convselect.choice.outcome import Measured
from convselect.choice.trial import HOPELESS, Trial
from convselect.model import loaded
from convselect.store import lessons

_by_model: dict[tuple[str, str], Learnt] = {}
"""(identity of a model, device) -> what was learnt about it."""


def corrected(prediction: Prediction, problem: ConvProblem) -> Prediction:
    """The prediction with what was learnt: a `Corrected`, or the same if nothing was learnt in this direction."""
    learnt = learnt_about(loaded.identity(problem), problem.device)
    return Corrected(prediction, learnt, problem) if learnt.known(problem.direction) else prediction


def learn(
    problem: ConvProblem,
    trial: Trial,
    measured: Mapping[str, Measured],
    predicted: Mapping[str, float],
    model: str,
    *,
    keep: bool,
) -> None:
    """Add what a trial has measured.

    Args:
        measured: the outcome's.
        predicted: candidate -> the model's own predicted ln(t_native / t).
        model: the identity of the model that predicted: by now another one may be in use, or none be loaded.
        keep: whether later processes may know.
    """
    found = {name: math.log(one.gain) for name, one in measured.items()}
    found |= dict.fromkeys(trial.hopeless(), HOPELESS)
    learnt, layer = learnt_about(model, problem.device), layer_of(problem)
    for name, gain in found.items():
        if name not in predicted:
            continue
        n, mean = learnt.add(name, str(problem.direction), layer, gain - predicted[name])
        if keep:
            key = f"{name} {problem.direction}"
            lessons.remember_correction(model, key, layer, n, mean, problem.device)


def learnt_about(model: str, device: str) -> Learnt:
    """What is known of the model with this identity, read from the store at first."""
    found = _by_model.get((model, device))
    return _read(model, device) if found is None else found


def _read(model: str, device: str) -> Learnt:
    found = Learnt()
    for algorithm, layer, n, mean in lessons.corrections(model, device):
        name, _, direction = algorithm.partition(" ")
        found.put(name, direction, layer, n, mean)
    _by_model[model, device] = found
    return found


def _read_again() -> None:
    """Forget what is not in the store: here, and not at the next call."""
    for model, device in list(_by_model):
        _read(model, device)


on_clear(_read_again)


__all__ = ["corrected", "learn", "learnt_about"]
