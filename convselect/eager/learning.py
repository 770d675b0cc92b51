"""What trials teach about the model (`choice/learnt.py`), in this process and through the store in the next."""

from __future__ import annotations

import math
from collections.abc import Mapping

from convselect.base.lru import on_clear
from convselect.base.problem import ConvProblem
from convselect.choice.choose import Prediction
from convselect.choice.learnt import Corrected, Learnt, layer_of
from convselect.choice.trial import HOPELESS, Trial
from convselect.model import loaded
from convselect.store import lessons

_by_model: dict[str, Learnt] = {}
"""Identity of a model -> what was learnt about it."""
on_clear(_by_model.clear)


def corrected(prediction: Prediction, problem: ConvProblem) -> Corrected:
    """The prediction with what was learnt."""
    return Corrected(prediction, learnt_about(loaded.identity(problem), problem.device), problem)


def learn(problem: ConvProblem, trial: Trial, predicted: Mapping[str, float], model: str, *, keep: bool) -> None:
    """Add what a trial has measured.

    Args:
        predicted: candidate -> the model's own predicted ln(t_native / t).
        model: the identity of the model that predicted: by now another one may be in use, or none be loaded.
        keep: whether later processes may know.
    """
    found = {name: math.log(one.gain) for name, one in trial.measured().items()}
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
    found = _by_model.get(model)
    if found is None:
        found = Learnt()
        for algorithm, layer, n, mean in lessons.corrections(model, device):
            name, _, direction = algorithm.partition(" ")
            found.put(name, direction, layer, n, mean)
        _by_model[model] = found
    return found


__all__ = ["corrected", "learn", "learnt_about"]
