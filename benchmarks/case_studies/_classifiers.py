"""Three classifiers over the same embedding, and a counter of what their blocks compute.

embedding (+ positions) -> block -> pooling over the text -> linear. The block is a Γ-block, a transformer block, or
none at all: the control, a bag of embeddings. ICLR 2025 submission 13039 compares the first two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.case_studies._corpora import PAD, UNKNOWN
from convselect.model.reformer import GammaBlock

KINDS = ("bag", "gamma", "transformer")
LABELS = {"bag": "bag of embeddings", "gamma": "Γ-block", "transformer": "transformer block"}
POOLINGS = ("mean", "masked mean", "max")
HEADS = 2


@dataclass(frozen=True)
class Setting:
    """How a classifier is built and trained. `norm` and `residual` are the Γ-block's, and unused elsewhere.

    Attributes:
        pooling: "mean" over all positions, padding included, which attention then sees as well; "masked mean" and
            "max" are over the text alone.
        norm: of the hidden and the output vector, "none", "layer" or "batch".
        residual: whether the block's input is added to its output.
        width: of the embedding and of what the block gives.
        dropout: before the last layer.
        block_dropout: within the Γ-block, after both parts of the transformer block. Attention weights have none.
        word_dropout: share of the words that is unknown in training, another one every time.
        positions: whether a learned vector per position is added to the embedding.
        embedding_std: of the initial embeddings. PyTorch's own is 1; Keras's is 0.03.
        lr: of Adam.
    """

    pooling: str = "masked mean"
    norm: str = "layer"
    residual: bool = False
    width: int = 32
    dropout: float = 0.1
    block_dropout: float = 0.1
    word_dropout: float = 0.0
    positions: bool = True
    embedding_std: float = 0.03
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, not {self.pooling!r}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class GammaTokens(nn.Module):
    """The project's Γ-block, applied to every position: x (n, length, width) -> the same. Positions never meet."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        hidden = gamma_hidden_width(setting)
        self.block = GammaBlock(setting.width, hidden, setting.width, setting.norm, setting.block_dropout)
        self.residual = setting.residual

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        y: Tensor = self.block(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x + y if self.residual else y


class TransformerTokens(nn.Module):
    """PyTorch's encoder layer, x (n, length, width) -> the same, in the variant of the Keras example that the paper
    seems to start from: two heads, a feed-forward part as wide as the embedding, dropout after either part and none
    on the attention weights, so that PyTorch can use its fused attention. `attention_dropout` leaves the layer as
    PyTorch has it, with dropout there and inside the feed-forward part."""

    def __init__(self, setting: Setting, *, attention_dropout: bool = False) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            setting.width, HEADS, dim_feedforward=setting.width, dropout=setting.block_dropout, batch_first=True
        )
        if not attention_dropout:
            self.layer.self_attn.dropout = 0.0
            self.layer.dropout.p = 0.0

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        y: Tensor = self.layer(x, src_key_padding_mask=padding)
        return y


class Nothing(nn.Module):
    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        return x


def block_of(kind: str, setting: Setting) -> nn.Module:
    """
    Raises:
        ValueError: for a `kind` that isn't one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return {"bag": lambda _: Nothing(), "gamma": GammaTokens, "transformer": TransformerTokens}[kind](setting)


def n_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def gamma_hidden_width(setting: Setting) -> int:
    """The multiple of 8 at which the Γ-block has as many parameters as the transformer block, as near as may be."""
    wanted = n_parameters(TransformerTokens(setting))
    one, two = (n_parameters(GammaBlock(setting.width, h, setting.width, setting.norm)) for h in (1, 2))
    return max(8, 8 * round((wanted - 2 * one + two) / (two - one) / 8))


class Classifier(nn.Module):
    """tokens (n, length) int64 -> logits (n, n_classes)."""

    def __init__(self, kind: str, setting: Setting, n_words: int, n_classes: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_words, setting.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=setting.embedding_std)
        with torch.no_grad():
            self.embedding.weight[PAD].zero_()
        self.positions = None
        if setting.positions:
            self.positions = nn.Parameter(torch.randn(length, setting.width) * setting.embedding_std)
        self.block = block_of(kind, setting)
        self.pooling = setting.pooling
        self.word_dropout = setting.word_dropout
        self.dropout = nn.Dropout(setting.dropout)
        self.head = nn.Linear(setting.width, n_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = None if self.pooling == "mean" else tokens == PAD
        if self.training and self.word_dropout:
            unknown = torch.rand(tokens.shape) < self.word_dropout
            tokens = torch.where(unknown & (tokens != PAD), UNKNOWN, tokens)
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions
        logits: Tensor = self.head(self.dropout(self._pooled(self.block(x, padding), padding)))
        return logits

    def _pooled(self, y: Tensor, padding: Tensor | None) -> Tensor:
        if padding is None:
            return y.mean(1)
        if self.pooling == "max":
            return y.masked_fill(padding[..., None], -torch.inf).amax(1)
        text = (~padding).to(y.dtype)[:, None]  # (n, 1, length)
        # Sum and mask in one product, without a masked copy of y.
        return torch.bmm(text, y)[:, 0] / text.sum(2)


# ---- counting -------------------------------------------------------------------------------------------------------

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ELEMENT_WISE = (
    "add", "add_", "mul", "div", "relu", "threshold_backward", "native_dropout", "native_dropout_backward",
    "_softmax", "_safe_softmax", "_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward",
    "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "where", "eq", "masked_fill",
)  # fmt: skip
VIEWS = (
    "view", "_unsafe_view", "t", "transpose", "permute", "select", "unsqueeze", "squeeze", "expand", "detach", "alias",
    "as_strided", "slice", "split", "unbind",
)  # fmt: skip


class OperationCounter(TorchDispatchMode):
    """Counts what reaches PyTorch's dispatcher: matrix products, operations over elements or rows, and the rest.

    Normalisation, softmax and dropout count as one element-wise operation each (dropout as the product with its mask).
    Views count as nothing, and neither do integers: batch normalisation counts its batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        on_numbers = not isinstance(result, Tensor) or result.is_floating_point()
        if name not in VIEWS and on_numbers:
            self.counts[name] += 1
        return result

    @property
    def products(self) -> int:
        return sum(self.counts[name] for name in PRODUCTS)

    @property
    def element_wise(self) -> int:
        return sum(self.counts[name] for name in ELEMENT_WISE)

    @property
    def others(self) -> dict[str, int]:
        """Copies, sums over a batch for gradients of biases, and the like."""
        return {n: c for n, c in sorted(self.counts.items()) if n not in PRODUCTS + ELEMENT_WISE}


def operations(kind: str, setting: Setting, *, n: int = 4, length: int = 16) -> dict[str, Any]:
    """What a block computes forward in training, and in forward and backward together.

    Attention is counted as its definition has it, two products and a softmax, not as the one fused kernel that it is
    when it runs. The three projections of attention are one product, since PyTorch stacks their weights;
    `unstacked_products` counts them as three, and `without_feed_forward` is that less the two of the feed-forward
    part: the six of the paper.
    """
    block = block_of(kind, setting).train()
    x = torch.randn(n, length, setting.width, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), OperationCounter() as forward:
        y = block(x, None)
    with sdpa_kernel(SDPBackend.MATH), OperationCounter() as both:
        block(x, None).sum().backward()
    del y
    stacked = 2 if kind == "transformer" else 0
    return dict(
        products=forward.products, element_wise=forward.element_wise,
        unstacked_products=forward.products + stacked,
        without_feed_forward=forward.products + stacked - (2 if kind == "transformer" else 0),
        forward=dict(sorted(forward.counts.items())), others=forward.others,
        forward_and_backward=dict(products=both.products, element_wise=both.element_wise, others=both.others),
    )  # fmt: skip
