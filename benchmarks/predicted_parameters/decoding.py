"""Inference of the sequence network in numpy, without torch: encoder, attention, decoder, and constrained beam search.

The network is `sequence.SequenceNetwork`; `sequence.export` lays its weights out as they are used here: both directions
of the encoder's LSTM step together through one block-diagonal matrix, and the factor 1/2 of
sigmoid(x) = (1 + tanh(x / 2)) / 2 is in the weights, so that one tanh computes all gates of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.predicted_parameters.tokens import Floats, Ids, Sequence_

ARRAYS = (
    "embedding", "slope", "centre", "scale", "conv", "conv_bias", "encode", "encode_bias", "recur", "start",
    "start_bias", "memory_key", "state_key", "energy", "value", "decode_value", "decode_context", "decode_state",
    "decode_bias", "out", "out_bias",
)  # fmt: skip


class State(NamedTuple):
    """The decoder's state for all beams: hidden and cell, (n_beams, n_state)."""

    hidden: Floats
    cell: Floats


class Decoder:
    """A network applied to one problem: log-probabilities of each parameter's values, given the parameters before it.

    Args:
        sizes: number of values of each parameter.
        ids, numbers: the problem, from `tokens.tokens`.
    """

    def __init__(self, arrays: Mapping[str, Floats], sizes: Sequence[int], ids: Ids, numbers: Floats) -> None:
        self._a = a = arrays
        self._first = np.cumsum([0, *sizes])
        self._memory = _encoded(a, ids, numbers)
        self._keys = self._memory @ a["memory_key"]
        hidden = np.tanh(self._memory.mean(0) @ a["start"] + a["start_bias"])[None]
        self.start = State(hidden, np.zeros_like(hidden))

    def step(self, state: State, position: int, previous: Sequence[int]) -> tuple[State, Floats]:
        """The next state, and log-probabilities (n_beams, n_values) of parameter `position`. `previous` has each beam's
        value index of the parameter before (ignored for the first)."""
        a, first = self._a, self._first
        # The row after all values is the start token.
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
    """(n_fields, 2 n_encoder): outputs of both directions of the LSTM at each field."""
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
        allowed: whether a prefix can be completed to a valid program, as `Space.is_partially_valid` says. It is asked
            about the most probable prefixes first, and about no more than needed; every program found is valid. None:
            no constraint.

    Returns:
        Fewer than k if there are no more; none if no program is valid.
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
