"""A sequence-to-sequence network from a problem to the parameters of an algorithm, and its training.

After arXiv 2404.10162: tokens of the problem pass a 1-D convolution and a bidirectional LSTM; an LSTM decodes one
parameter after the other, with additive attention (Bahdanau et al., arXiv 1409.0473) over the encoder's outputs. The
paper calls its decoder bidirectional as well. A decoder that is given its own earlier outputs cannot read later ones,
so this one runs in one direction, and the encoder in both. The loss is cross-entropy; the target is the best program
measured or a distribution over near-equal ones (`tokens.target`), since near ties make "the best" a matter of noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.predicted_parameters.tokens import (
    FIELD_TOKENS,
    FIELDS,
    VOCABULARY,
    Example,
    Floats,
    Signature,
    target,
    tokens,
)


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a network and its training.

    Attributes:
        width: size of embeddings and channels of the convolution.
        encoder: hidden size of the encoder's LSTM per direction; the decoder's is twice that.
        target: one of `tokens.TARGETS`.
        token_dropout: share of tokens withheld in training, so that only their numbers remain: with few problems,
            tokens would be learnt by heart.
        programs: programs drawn from each example's target in each step.
        jitter: standard deviation of noise added to the logarithms of sizes in training.
        seed: random seed.
    """

    width: int = 24
    encoder: int = 24
    target: str = "ratio"
    programs: int = 6
    steps: int = 300
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    dropout: float = 0.15
    token_dropout: float = 0.5
    jitter: float = 0.15
    seed: int = 0


class SequenceNetwork(nn.Module):
    """Log-probabilities of programs. `centre`, `scale` (n_fields,) normalise the numbers beside the tokens."""

    centre: Tensor
    scale: Tensor

    def __init__(self, signature: Signature, recipe: Recipe, centre: Floats, scale: Floats) -> None:
        super().__init__()
        self.sizes = [len(values) for values in signature.values]
        self.first = np.cumsum([0, *self.sizes]).tolist()
        self.recipe = recipe
        d, h = recipe.width, recipe.encoder
        self.embedding = nn.Embedding(VOCABULARY, d)
        nn.init.zeros_(self.embedding.weight)  # a token that never occurs contributes nothing
        self.slope = nn.Parameter(torch.randn(len(FIELDS), d) / d**0.5)
        self.place = nn.Parameter(torch.randn(len(FIELDS), d) / d**0.5)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.encoder = nn.LSTM(d, h, bidirectional=True, batch_first=True)
        self.start = nn.Linear(2 * h, 2 * h)
        self.memory_key = nn.Linear(2 * h, h, bias=False)
        self.state_key = nn.Linear(2 * h, h, bias=False)
        self.energy = nn.Linear(h, 1, bias=False)
        self.value = nn.Embedding(self.first[-1] + 1, d)
        self.decoder = nn.LSTMCell(d + 2 * h, 2 * h)
        self.out = nn.Linear(4 * h, self.first[-1])
        self.register_buffer("centre", torch.from_numpy(centre))
        self.register_buffer("scale", torch.from_numpy(scale))

    def encode(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """(n, n_fields) token ids and numbers -> (n, n_fields, 2 n_encoder)."""
        z = (numbers - self.centre) * self.scale
        embedded = self.embedding(ids)
        if self.training:
            z = z + torch.randn_like(z) * self.recipe.jitter * self.scale
            embedded = embedded * (torch.rand((*embedded.shape[:2], 1)) >= self.recipe.token_dropout)
        x = embedded + self.place + z[..., None] * self.slope
        x = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        memory: Tensor = self.encoder(F.dropout(x, self.recipe.dropout, self.training))[0]
        return F.dropout(memory, self.recipe.dropout, self.training)

    def forward(self, ids: Tensor, numbers: Tensor, of: Tensor, programs: Tensor) -> Tensor:
        """Log-probability (n_programs, n_parameters) of each value of programs (n_programs, n_parameters), given those
        before it; `of` (n_programs,) is the row of ids and numbers of each program's problem."""
        memory = self.encode(ids, numbers)
        keys, start = self.memory_key(memory)[of], torch.tanh(self.start(memory.mean(1)))[of]
        memory, hidden, cell = memory[of], start, torch.zeros_like(start)
        found = []
        previous = torch.full((len(of),), self.first[-1])
        for i, size in enumerate(self.sizes):
            energy = self.energy(torch.tanh(keys + self.state_key(hidden)[:, None]))
            context = (energy.softmax(1) * memory).sum(1)
            hidden, cell = self.decoder(torch.cat((self.value(previous), context), 1), (hidden, cell))
            both = F.dropout(torch.cat((hidden, context), 1), self.recipe.dropout, self.training)
            logits = self.out(both)[:, self.first[i] : self.first[i] + size]
            found.append(logits.log_softmax(1).gather(1, programs[:, i : i + 1]))
            previous = programs[:, i] + self.first[i]
        return torch.cat(found, 1)


def _problems(examples: Sequence[Example], algorithms: Sequence[str]) -> tuple[Tensor, Tensor]:
    pairs = [tokens(one.problem, algorithms.index(one.algorithm)) for one in examples]
    return torch.from_numpy(np.stack([ids for ids, _ in pairs])), torch.from_numpy(np.stack([z for _, z in pairs]))


def train(examples: Sequence[Example], algorithms: Sequence[str], recipe: Recipe) -> SequenceNetwork:
    """Fit a network to examples of one signature. The same seed gives the same network.

    Args:
        algorithms: those that share the network; the index of an example's algorithm is its token.

    Raises:
        ValueError: if there are no examples, or examples of several signatures.
    """
    if len({one.signature for one in examples}) != 1:
        raise ValueError("a network is trained on examples of one signature")
    ids, numbers = _problems(examples, algorithms)
    centre, spread = numbers.mean(0).numpy(), numbers.std(0, unbiased=False).numpy()
    scale = np.where(spread > 1e-3, 1 / np.maximum(spread, 1e-3), 0).astype(np.float32)
    targets = [target(one, recipe.target) for one in examples]
    programs = torch.tensor([sequence for of in targets for sequence in of])
    firsts = np.cumsum([0, *map(len, targets)]).tolist()
    weights = torch.zeros(len(examples), max(map(len, targets)))
    for i, of in enumerate(targets):
        weights[i, : len(of)] = torch.tensor(list(of.values()))
    # Drawn again in every step, by weight: hundreds of programs may be nearly equal, and in time all are seen.
    drawn = min(recipe.programs, weights.shape[1])
    owner = torch.arange(len(examples)).repeat_interleave(drawn)
    offset = torch.tensor(firsts[:-1]).repeat_interleave(drawn)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        network = SequenceNetwork(examples[0].signature, recipe, centre, scale).train()
        optimiser = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.learning_rate, total_steps=recipe.steps)
        for _ in range(recipe.steps):
            chosen = programs[offset + torch.multinomial(weights, drawn, replacement=True).flatten()]
            loss = -network(ids, numbers, owner, chosen).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return network.eval()


# ---- export -----------------------------------------------------------------------------------------------------


def _gates(t: Tensor | None, n: int) -> Tensor:
    """Rows of an LSTM's four gates in the order input, forget, output, candidate (torch has candidate before output);
    those of sigmoids halved."""
    assert t is not None
    i, f, g, o = t.detach().split(n)
    return torch.cat((i / 2, f / 2, o / 2, g))


def export(network: SequenceNetwork) -> dict[str, Floats]:
    """The weights as `decoding.Decoder` reads them: name (one of `decoding.ARRAYS`) -> float32 array."""
    e, n = network.encoder, network.recipe.encoder
    # Both directions' gates alternate, and their recurrent matrices are the blocks of one.
    given, bias, recur = [], [], []
    for suffix in ("l0", "l0_reverse"):
        given.append(_gates(getattr(e, f"weight_ih_{suffix}"), n).view(4, n, -1))
        bias.append(
            (_gates(getattr(e, f"bias_ih_{suffix}"), n) + _gates(getattr(e, f"bias_hh_{suffix}"), n)).view(4, n)
        )
        recur.append(_gates(getattr(e, f"weight_hh_{suffix}"), n).view(4, n, n))
    blocks = torch.zeros(4, 2, n, 2, n)
    for side in (0, 1):
        blocks[:, side, :, side] = recur[side]
    cell, d = network.decoder, network.recipe.width
    decode = _gates(cell.weight_ih, 2 * n)
    # A field's position is folded into its tokens.
    embedding = network.embedding.weight + network.place.repeat_interleave(torch.tensor(FIELD_TOKENS), 0)
    arrays: dict[str, Any] = {
        "embedding": embedding,
        "slope": network.slope,
        "centre": network.centre,
        "scale": network.scale,
        "conv": network.conv.weight.permute(2, 1, 0).reshape(3 * d, d),
        "conv_bias": network.conv.bias,
        "encode": torch.stack(given, 1).reshape(8 * n, -1).T,
        "encode_bias": torch.stack(bias, 1).reshape(8 * n),
        "recur": blocks.reshape(8 * n, 2 * n).T,
        "start": network.start.weight.T,
        "start_bias": network.start.bias,
        "memory_key": network.memory_key.weight.T,
        "state_key": network.state_key.weight.T,
        "energy": network.energy.weight[0],
        "value": network.value.weight,
        "decode_value": decode[:, :d].T,
        "decode_context": decode[:, d:].T,
        "decode_state": _gates(cell.weight_hh, 2 * n).T,
        "decode_bias": _gates(cell.bias_ih, 2 * n) + _gates(cell.bias_hh, 2 * n),
        "out": network.out.weight.T,
        "out_bias": network.out.bias,
    }
    return {name: np.ascontiguousarray(t.detach().numpy(), np.float32) for name, t in arrays.items()}
