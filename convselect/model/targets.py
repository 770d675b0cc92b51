"""Training targets: losses of a network's logits z (n, c), given times t (n, c), NaN if not applicable.

    ratio         cross-entropy with p ~ t^-a. Its minimum is z = -a ln t + const: ICLR 2025 submission 13039 has a = 1
    reverse_kl    KL(softmax(z) || p) for the same p: prefers one good algorithm to a distribution over all of them
    one_hot       cross-entropy with the fastest, as for a classifier
    softmax       cross-entropy with p = softmax(-t in ms): depends on the unit, and hardly separates fast ones
    regret        expected ln(t / t_best) under softmax(z)
    pairwise      logistic loss on every pair's order, weighted by |ln(t_i / t_j)|
    log_time      squared error of z / -a against ln t, both without their mean

All take the mean over problems; algorithms that do not apply are left out. Differences of logits divided by `a` are
always used as predicted log ratios of times; that is exact only for the first two targets and the last.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convselect.model.dataset import ratio_target

Floats = npt.NDArray[np.float64]
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits, target probabilities, log times, applicable), each (n, c) -> mean loss."""

_MOST_PAIR_WEIGHT = 1.0  # ln(t_i / t_j): a factor of e is as bad as any larger one


def masked_log_softmax(logits: Tensor, applicable: Tensor) -> Tensor:
    """Log of the softmax over applicable algorithms only; 0 if not applicable, so that products vanish."""
    log_y = torch.log_softmax(logits.masked_fill(~applicable, -torch.inf), 1)
    return log_y.masked_fill(~applicable, 0.0)


def masked_cross_entropy(logits: Tensor, target: Tensor, applicable: Tensor) -> Tensor:
    """Mean of -sum_i p_i ln y_i with y the softmax over applicable algorithms only; all (n, c)."""
    return -(target * masked_log_softmax(logits, applicable)).sum(1).mean()


def _cross_entropy(logits: Tensor, p: Tensor, log_t: Tensor, applicable: Tensor) -> Tensor:
    return masked_cross_entropy(logits, p, applicable)


def _reverse_kl(logits: Tensor, p: Tensor, log_t: Tensor, applicable: Tensor) -> Tensor:
    log_y = masked_log_softmax(logits, applicable)
    log_p = torch.log(p.clamp_min(1e-30)).masked_fill(~applicable, 0.0)
    return (log_y.exp().masked_fill(~applicable, 0.0) * (log_y - log_p)).sum(1).mean()


def _regret(logits: Tensor, p: Tensor, log_t: Tensor, applicable: Tensor) -> Tensor:
    best = log_t.masked_fill(~applicable, torch.inf).amin(1, keepdim=True)
    loss = (log_t - best).masked_fill(~applicable, 0.0)
    return (masked_log_softmax(logits, applicable).exp() * loss).sum(1).mean()


def _pairwise(logits: Tensor, p: Tensor, log_t: Tensor, applicable: Tensor) -> Tensor:
    both = applicable[:, :, None] & applicable[:, None, :]
    gap = (log_t[:, None, :] - log_t[:, :, None]).masked_fill(~both, 0.0)  # > 0: i is faster than j
    ahead = logits[:, :, None] - logits[:, None, :]
    weight = gap.clamp(0.0, _MOST_PAIR_WEIGHT)
    return (weight * torch.nn.functional.softplus(-ahead)).sum((1, 2)).mean()


def _log_time(alpha: float) -> Loss:
    def loss(logits: Tensor, p: Tensor, log_t: Tensor, applicable: Tensor) -> Tensor:
        count = applicable.sum(1, keepdim=True)

        def centred(v: Tensor) -> Tensor:
            v = v.masked_fill(~applicable, 0.0)
            return (v - v.sum(1, keepdim=True) / count).masked_fill(~applicable, 0.0)

        return (centred(logits / -alpha) - centred(log_t)).square().sum(1).mean()

    return loss


TARGETS = ("ratio", "reverse_kl", "one_hot", "softmax", "regret", "pairwise", "log_time")


def probabilities(name: str, times_us: Floats, alpha: float) -> Floats:
    """The target's probabilities (n, c); those of `ratio` if the target has no probabilities of its own."""
    if name == "one_hot":
        fastest = (times_us == np.nanmin(times_us, 1, keepdims=True)).astype(np.float64)
        return np.asarray(fastest / fastest.sum(1, keepdims=True))  # equal times share
    if name == "softmax":
        scores = np.where(np.isfinite(times_us), -times_us / 1e3, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        result: Floats = weights / weights.sum(1, keepdims=True)
        return result
    return ratio_target(times_us, alpha)


def loss_of(name: str, alpha: float) -> Loss:
    """The loss of a target.

    Raises:
        ValueError: if the name is not in `TARGETS`.
    """
    losses: dict[str, Loss] = {
        "ratio": _cross_entropy, "one_hot": _cross_entropy, "softmax": _cross_entropy, "reverse_kl": _reverse_kl,
        "regret": _regret, "pairwise": _pairwise, "log_time": _log_time(alpha),
    }  # fmt: skip
    if name not in losses:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, not {name!r}")
    return losses[name]


RIDGE = 1e-3
LOWERED = 0.25
"""Share of the measured times that the estimate exceeds."""


def native_line(x: npt.NDArray[np.float32], native_us: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Weights of the features, (n_features + 1,) with the constant last, of ln(native's time in us).

    Args:
        x: raw features (n, n_features). native_us: (n,); NaN if not measured.
    """
    known = np.isfinite(native_us)
    design, target = np.asarray(x[known], np.float64), np.log(native_us[known])
    mean, scale = design.mean(0), np.maximum(design.std(0), 1e-6)
    scaled = (design - mean) / scale
    normal = scaled.T @ scaled + RIDGE * len(target) * np.eye(x.shape[1])
    weights = np.linalg.solve(normal, scaled.T @ (target - target.mean())) / scale
    constant = target.mean() - mean @ weights
    constant += np.quantile(target - design @ weights - constant, LOWERED)
    return tuple(round(float(value), 6) for value in (*weights, constant))
