"""Parameters from a sequence network, in numpy: encoder, attention, decoder, and beam search within what is valid.

The network is `sequence.SequenceNetwork`, whose weights `sequence.export` lays out as they are used here: both
directions of the encoder's LSTM step together through one block-diagonal matrix, and the factor 1/2 of
sigmoid(x) = (1 + tanh(x / 2)) / 2 is in the weights, so that one tanh makes all gates of a step. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from convselect.model.parameters import Floats, Ids, Sequence_

ARRAYS = (
    "embedding", "slope", "centre", "scale", "conv", "conv_bias", "encode", "encode_bias", "recur", "start",
    "start_bias", "memory_key", "state_key", "energy", "value", "decode_value", "decode_context", "decode_state",
    "decode_bias", "out", "out_bias",
)  # fmt: skip


class State(NamedTuple):
    """Of all beams: hidden and cell (n_beams, n_state)."""

    hidden: Floats
    cell: Floats


class Decoder:
    """A network and one problem: log-probabilities of the next value, after the first few.

    Args:
        sizes: how many values each parameter has.
        ids, numbers: the problem, `parameters.tokens`.
    """

    def __init__(self, arrays: Mapping[str, Floats], sizes: Sequence[int], ids: Ids, numbers: Floats) -> None:
        self._a = a = arrays
        self._first = np.cumsum([0, *sizes])
        self._memory = _encoded(a, ids, numbers)
        self._keys = self._memory @ a["memory_key"]
        hidden = np.tanh(self._memory.mean(0) @ a["start"] + a["start_bias"])[None]
        self.start = State(hidden, np.zeros_like(hidden))

    def step(self, state: State, position: int, previous: Sequence[int]) -> tuple[State, Floats]:
        """Log-probabilities (n_beams, n_values) of parameter `position`, where beams took these places for the one
        before (ignored for the first)."""
        a, first = self._a, self._first
        # The row after all values stands for the beginning.
        rows = [first[-1]] if position == 0 else first[position - 1] + np.asarray(previous)
        query = state.hidden @ a["state_key"]
        energy = np.tanh(self._keys[None] + query[:, None]) @ a["energy"]
        energy = np.exp(energy - energy.max(1, keepdims=True))
        context = (energy / energy.sum(1, keepdims=True)) @ self._memory
        gates = a["value"][rows] @ a["decode_value"] + context @ a["decode_context"]
        gates += state.hidden @ a["decode_state"] + a["decode_bias"]
        state = State(*_lstm(gates, state.cell))
        of = slice(first[position], first[position + 1])
        logits = np.concatenate((state.hidden, context), 1) @ a["out"][:, of] + a["out_bias"][of]
        logits -= logits.max(1, keepdims=True)
        return state, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def _lstm(gates: Floats, cell: Floats) -> tuple[Floats, Floats]:
    """Gates in the order input, forget, output, candidate; the first three halved."""
    n = cell.shape[-1]
    gates = np.tanh(gates)
    open_ = gates[..., : 3 * n] * np.float32(0.5) + np.float32(0.5)
    cell = open_[..., n : 2 * n] * cell + open_[..., :n] * gates[..., 3 * n :]
    return open_[..., 2 * n :] * np.tanh(cell), cell


def _encoded(a: Mapping[str, Floats], ids: Ids, numbers: Floats) -> Floats:
    """(n_fields, 2 n_encoder): what either direction of the LSTM says at each field."""
    x = a["embedding"][ids] + ((numbers - a["centre"]) * a["scale"])[:, None] * a["slope"]
    padded = np.zeros((len(x) + 2, x.shape[1]), np.float32)
    padded[1:-1] = x
    x = np.maximum(np.concatenate((padded[:-2], padded[1:-1], padded[2:]), 1) @ a["conv"] + a["conv_bias"], 0)
    given = x @ a["encode"] + a["encode_bias"]
    length, n = len(given), given.shape[1] // 8
    # Columns of the gates alternate in blocks of n: forward, backward. Step i of the backward direction is at the
    # mirrored field.
    given = given.reshape(length, 4, 2, n)
    given = np.stack((given[:, :, 0], given[::-1, :, 1]), 2).reshape(length, 8 * n)
    hidden = cell = np.zeros(2 * n, np.float32)
    out = np.empty((length, 2 * n), np.float32)
    recur = a["recur"]
    for i in range(length):
        hidden, cell = _lstm(given[i] + hidden @ recur, cell)
        out[i, :n] = hidden[:n]
        out[length - 1 - i, n:] = hidden[n:]
    return out


class Scores(NamedTuple):
    """A complete program and its log-probability."""

    sequence: Sequence_
    log_probability: float


def beam_search(
    decoder: Decoder, sizes: Sequence[int], k: int, allowed: Callable[[Sequence_], bool] | None = None
) -> list[Scores]:
    """The k most probable programs that a beam of width k finds, best first; k = 1 is greedy decoding.

    Args:
        allowed: whether the first few places begin a valid program, as `Space.is_partially_valid` says; asked of the
            most probable beginnings first and of no more than needed. Since it admits only what has a valid end, every
            program found is valid. None: whatever the network says.

    Returns:
        Fewer than k where there are no more; none where nothing is valid.
    """
    beams: list[Scores] = [Scores((), 0.0)]
    state = decoder.start
    for position, size in enumerate(sizes):
        state, scores = decoder.step(state, position, [b.sequence[-1] for b in beams if b.sequence])
        total = (scores + np.array([[b.log_probability] for b in beams], np.float32)).ravel()
        kept: list[Scores] = []
        parents: list[int] = []
        for flat in np.argsort(-total, kind="stable").tolist():
            parent, place = divmod(flat, size)
            longer = (*beams[parent].sequence, place)
            if allowed is None or allowed(longer):
                kept.append(Scores(longer, float(total[flat])))
                parents.append(parent)
                if len(kept) == k:
                    break
        if not kept:
            return []
        beams, state = kept, State(state.hidden[parents], state.cell[parents])
    return beams
