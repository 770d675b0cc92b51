"""Attention that is written out becomes one call where that computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import distance, eager, randomised
from rewriting import rewritten
from torch import nn

import convselect

_GENERATOR = torch.Generator().manual_seed(0)
BIAS, KEYS_BIAS, PER_HEAD, WINDOWS = (
    torch.randn(*s, dtype=torch.float64, generator=_GENERATOR) for s in ((3, 7, 7), (7,), (3, 1, 1), (2, 7, 7))
)


def heads(x, n=3):
    """(N, tokens, 3 n d) as q, k, v of (N, n, tokens, d)."""
    N, tokens, channels = x.shape
    return x.view(N, tokens, 3, n, channels // (3 * n)).permute(2, 0, 3, 1, 4).unbind(0)


def attend(x, bias=BIAS, scale=0.3, between=lambda s: s):
    q, k, v = heads(x)
    scores = q @ k.transpose(-2, -1) * scale
    weights = between(scores if bias is None else scores + bias).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(*x.shape[:2], -1)


def scaled_before(x):
    q, k, v = heads(x)
    return ((q * 0.3 @ k.transpose(-2, -1)).softmax(3) @ v).permute(0, 2, 1, 3).flatten(2)


def divided(x):
    q, k, v = heads(x)
    return (
        ((KEYS_BIAS + q @ k.transpose(-2, -1) / 1.7).softmax(-1) @ v)
        .transpose(1, 2)
        .contiguous()
        .view(*x.shape[:2], -1)
    )


def read_twice(x):
    q, k, v = heads(x)
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


def masked_by_an_input(x, mask):
    q, k, v = heads(x)
    return ((q @ k.transpose(-2, -1) + mask).softmax(-1) @ v).transpose(1, 2).flatten(2)


def over_queries(x):
    q, k, v = heads(x)
    return ((q @ k.transpose(-2, -1)).softmax(-2) @ v).transpose(1, 2).flatten(2)


def in_five_dimensions(x, by_function=True):
    """As Twins and NesT have it: the batch has two dimensions."""
    q, k, v = (t[None] for t in heads(x))
    attend = F.scaled_dot_product_attention if by_function else lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    return attend(q, k, v).transpose(2, 3).reshape(x.shape[0], x.shape[1], -1)


def mask_of_three_dimensions(x):
    return F.scaled_dot_product_attention(*heads(x), BIAS).transpose(1, 2).flatten(2)


def other_value_depth(x):
    """As MobileNetV4 has it, keys and values are those of one head for all, too."""
    q, k, v = heads(x)
    return F.scaled_dot_product_attention(q, k[:, :1].expand_as(k), v[:, :1, :, :3].expand(-1, 3, -1, -1))


def shifted_windows(x):
    """As Swin V2 has it: a scale per head, biases of positions, a mask per window."""
    q, k, v = heads(x)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * PER_HEAD.exp() + BIAS[None]
    scores = scores.view(-1, 2, 3, 7, 7) + WINDOWS[:, None][None]
    return (scores.view(-1, 3, 7, 7).softmax(-1) @ v).transpose(1, 2).reshape(*x.shape[:2], -1)


def turned(x):
    """As EfficientViT has it: channels come before tokens."""
    q, k, v = (t.mT for t in heads(x))
    return v @ ((q.mT @ k) * 0.3 + BIAS).softmax(-1).mT


def one_head(x):
    q, k, v = x.chunk(3, -1)
    return (q @ k.mT).softmax(-1) @ v


FUSED = {
    "five dimensions": in_five_dimensions,
    "five dimensions, written out": lambda x: in_five_dimensions(x, False),
    "mask of three dimensions": mask_of_three_dimensions,
    "other value depth": other_value_depth,
    "turned": turned,
    "one head": one_head,
    "bias": attend,
    "no bias": lambda x: attend(x, None),
    "bias of keys": lambda x: attend(x, KEYS_BIAS),
    "scaled before": scaled_before,
    "divided": divided,
    "a number": lambda x: attend(x, torch.tensor(0.5, dtype=torch.float64)),
}
KEPT = {
    "weights returned": read_twice,
    "softmax over queries": over_queries,
    "a factor of the scores and their bias": lambda x: attend(x, between=lambda s: s * 0.5),
    "rows for columns": lambda x: (h := heads(x))[2].mT @ (h[0] @ h[1].mT).softmax(-1),
    "a factor per query": lambda x: attend(x, None, BIAS[:, :, :1]),
    "an activation between": lambda x: attend(x, between=torch.relu),
    "heads not put together": lambda x: torch.matmul((h := heads(x))[0] @ h[1].mT, h[2]),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", FUSED)
def test_written_out_attention_is_one_call(name, batch):
    x = torch.randn(batch, 7, 36, dtype=torch.float64, generator=_GENERATOR)
    left, applied = rewritten(FUSED[name], x)
    assert applied["attentions"] == 1
    assert left["scaled_dot_product_attention"] == 1
    assert not {"bmm", "_softmax"} & left.keys()


def test_windows_with_masks_of_their_own():
    x = torch.randn(4, 7, 36, dtype=torch.float64, generator=_GENERATOR)
    left, applied = rewritten(shifted_windows, x)
    assert applied["attentions"] == 1
    assert not {"bmm", "_softmax"} & left.keys()


def test_numbers_and_copies_of_operands_go():
    """PyTorch multiplies q and k with the root of the scale each, and copies what is no matrix in memory."""
    x = torch.randn(2, 7, 36, dtype=torch.float64, generator=_GENERATOR)
    left, _ = rewritten(in_five_dimensions, x)
    assert left["scaled_dot_product_attention"] == 1
    assert not {"mul", "clone", "_safe_softmax"} & left.keys()


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name):
    x = torch.randn(2, 7, 36, dtype=torch.float64, generator=_GENERATOR)
    left, applied = rewritten(KEPT[name], x)
    assert "attentions" not in applied
    assert left["bmm"] == 2


def test_a_mask_that_is_an_argument_stays():
    """A row that it masks entirely is NaN; attention would make it 0."""
    x, mask = torch.randn(2, 7, 36, dtype=torch.float64, generator=_GENERATOR), torch.zeros(7, 7, dtype=torch.float64)
    assert "attentions" not in rewritten(masked_by_an_input, x, mask)[1]


def test_heads_of_many_channels_stay():
    x = torch.randn(1, 7, 3 * 3 * 300, dtype=torch.float64, generator=_GENERATOR)
    assert "attentions" not in rewritten(attend, x)[1]


class Block(nn.Module):
    """As LeViT has them: attention on the pixels of an image, its biases in a dictionary."""

    def __init__(self):
        super().__init__()
        self.conv, self.qkv, self.proj = nn.Conv2d(3, 24, 3, 2, 1), nn.Linear(24, 72), nn.Linear(24, 24)
        self.table = nn.Parameter(torch.randn(3, 9))
        self.register_buffer("places", torch.randint(0, 9, (16, 16)), persistent=False)
        self.kept = {}

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        bias = self.kept.setdefault("bias", self.table[:, self.places])
        return x + self.proj(attend(self.qkv(x), bias, 8**-0.5))


@pytest.mark.parametrize("batch", [1, 3])
def test_in_a_frozen_network(batch):
    model, x = randomised(Block()), torch.randn(batch, 3, 8, 8)
    want = eager(model, x)
    convselect.freeze(model, x)
    with torch.inference_mode():
        assert distance(model(x), want) < 2e-6
