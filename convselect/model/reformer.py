"""The Reformer: three Γ-blocks over a z-scored feature vector and a linear head over algorithm names. Training only.

Γ-block (ICLR 2025 submission 13039, eq. 1):   x -> A1 x + b1 + A3 T(x) + b3

with T = linear, normalisation, ReLU, dropout. Equation (1) stops at the sum; figure 3 and the network that MIOpen
ships (TunaNet for gfx908) put a ReLU after it, and so do we. The longest path through a block has two linear
layers, against four in a transformer block of the same purpose, which makes it fast.

The paper states 80,978 parameters. 24 inputs, the widths of `PAPER_WIDTHS`, 18 outputs and an affine normalisation
of each hidden and each output vector give exactly that; without the normalisations 79,762, MIOpen's file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

PAPER_PARAMETERS = 80_978
PAPER_WIDTHS = ((64, 128), (256, 64), (64, 32))
DEFAULT_WIDTHS = ((64, 128), (200, 64), (64, 32))
"""We have three times the paper's inputs; 200 instead of 256 hidden units keep the total below."""
VOLUME_WIDTHS = ((48, 64), (96, 48), (48, 32))
"""For volumes, of which there are a sixth of the measured problems."""

NORMS = ("batch", "layer", "none")


def _norm(kind: str, width: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm1d(width)
    return nn.LayerNorm(width) if kind == "layer" else nn.Identity()


class GammaBlock(nn.Module):
    """relu(norm(A1 x + b1 + A3 dropout(relu(norm(A2 x + b2))) + b3)), (batch, d_in) -> (batch, d_out).

    Raises:
        ValueError: for a `norm` other than "batch", "layer" and "none".
    """

    def __init__(self, d_in: int, d_hidden: int, d_out: int, norm: str = "batch", dropout: float = 0.0) -> None:
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {norm!r}")
        super().__init__()
        self.direct = nn.Linear(d_in, d_out)  # A1, b1
        self.hidden = nn.Linear(d_in, d_hidden)  # A2, b2: the linear layer of T
        self.hidden_norm = _norm(norm, d_hidden)
        self.dropout = nn.Dropout(dropout)
        self.back = nn.Linear(d_hidden, d_out)  # A3, b3
        self.out_norm = _norm(norm, d_out)

    def forward(self, x: Tensor) -> Tensor:
        t = self.dropout(torch.relu(self.hidden_norm(self.hidden(x))))
        return torch.relu(self.out_norm(self.direct(x) + self.back(t)))


class Reformer(nn.Module):
    """(batch, n_features) raw features -> (batch, n_classes) logits.

    Differences of logits, divided by the exponent of the training target, are predicted log ratios of times.
    The z-score is part of the network (buffers, set by `fit_input`), so that it is stored with it.
    """

    mean: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(
        self,
        n_features: int,
        n_classes: int,
        widths: Sequence[tuple[int, int]] = DEFAULT_WIDTHS,
        *,
        norm: str = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("scale", torch.ones(n_features))
        self.register_buffer("low", torch.full((n_features,), -torch.inf))
        self.register_buffer("high", torch.full((n_features,), torch.inf))
        blocks, d_in = [], n_features
        for d_hidden, d_out in widths:
            blocks.append(GammaBlock(d_in, d_hidden, d_out, norm, dropout))
            d_in = d_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(d_in, n_classes)

    def fit_input(self, x: Tensor) -> None:
        """Take mean, deviation and range of the features from the training set, x (n, n_features).

        A feature that never varied gets scale 0: its weights are untrained and must have no effect if, for example, the
        thread count differs at run time. Others are clipped to their measured range: networks extrapolate badly.
        """
        deviation, mean = torch.std_mean(x, 0, correction=0)
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(deviation > 1e-6, 1.0 / deviation.clamp_min(1e-6), torch.zeros_like(deviation)))
        self.low.copy_(x.amin(0))
        self.high.copy_(x.amax(0))

    def ignore(self, features: Sequence[int]) -> None:
        """Ignore these features from now on, as if they had never varied."""
        self.scale[list(features)] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        z = (torch.minimum(torch.maximum(x, self.low), self.high) - self.mean) * self.scale
        logits: Tensor = self.head(self.blocks(z))
        return logits

    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def paper(norm: str = "batch") -> Reformer:
    """The paper's network: 24 inputs, 18 outputs, 80,978 parameters (79,762 with norm="none")."""
    return Reformer(24, 18, PAPER_WIDTHS, norm=norm)


def fold(model: Reformer) -> dict[str, npt.NDArray[np.float32]]:
    """The arrays that `inference.Predictor` runs: normalisations folded in, [A1 | b1 + b3 | A3] stacked, biases inside.

    Per block `i`: `hidden_i` (d_hidden, d_in + 1) and `out_i` (d_out, d_in + 1 + d_hidden), to be applied to
    (x, 1) and (x, 1, t); then `head` (n_classes, d + 1) and the z-score's `mean`, `scale`, `low`, `high`.
    All float32; folding is done in float64.

    Raises:
        ValueError: if the model has layer normalisation, which depends on its input and cannot be folded.
    """
    inputs = {"mean": model.mean, "scale": model.scale, "low": model.low, "high": model.high}
    arrays = {name: buffer.float().numpy(force=True).copy() for name, buffer in inputs.items()}
    for i, block in enumerate(model.blocks):
        assert isinstance(block, GammaBlock)
        gain, shift = _affine(block.hidden_norm)
        hidden = gain * block.hidden.weight.detach().double()
        hidden_bias = gain[:, 0] * block.hidden.bias.detach().double() + shift
        arrays[f"hidden_{i}"] = _stacked(hidden, hidden_bias)
        gain, shift = _affine(block.out_norm)
        bias = gain[:, 0] * (block.direct.bias + block.back.bias).detach().double() + shift
        direct, back = (gain * layer.weight.detach().double() for layer in (block.direct, block.back))
        arrays[f"out_{i}"] = _stacked(direct, bias, back)
    arrays["head"] = _stacked(model.head.weight.detach(), model.head.bias.detach())
    return arrays


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(gain (d, 1), shift (d,)) in float64 of a normalisation in evaluation mode: y = gain x + shift."""
    if isinstance(norm, nn.Identity):
        return torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if not isinstance(norm, nn.BatchNorm1d):
        raise ValueError(f"{type(norm).__name__} depends on its input and cannot be folded; train with batch norm")
    assert norm.running_mean is not None
    assert norm.running_var is not None
    gain = norm.weight.detach().double() / torch.sqrt(norm.running_var.double() + norm.eps)
    return gain[:, None], norm.bias.detach().double() - gain * norm.running_mean.double()


def _stacked(*parts: Tensor) -> npt.NDArray[np.float32]:
    columns = [part if part.dim() == 2 else part[:, None] for part in parts]
    return torch.cat(columns, 1).float().numpy(force=True)
