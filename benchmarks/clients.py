"""Speech, audio and image networks of 1-D and transposed convolutions: stock, converted, frozen, and other runtimes.

    python -m benchmarks.clients                              # all, one thread: about ten minutes
    python -m benchmarks.clients --networks hifigan tcn
    python -m benchmarks.clients --out run.json --resume      # options of benchmarks.timm_networks

What is measured, and how, is that of `benchmarks.timm_networks`: batch 1, float32, errors against float64 before any
time, sides interleaved, one process per network. Those from `transformers` are built from their configuration, smaller
than the published ones in depth and with random weights; the others are written out here. Whisper and Conformer are
mostly matrix products; they show whether the layers around convolutions are frozen as well.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timm_networks
from benchmarks.models import calibrate_batch_norm, he_initialise
from benchmarks.models import unet as image_unet

_SECOND = 16_000  # samples

Built = tuple[nn.Module, Tensor]


class Only(nn.Module):
    """One part of a model and of its result, a tensor."""

    def __init__(self, module: nn.Module, result: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.module, self.result = module, result

    def forward(self, x: Tensor) -> Tensor:
        return self.result(self.module(x))


def _hidden(found: Any) -> Tensor:
    return found.last_hidden_state  # type: ignore[no-any-return]


def _itself(found: Any) -> Tensor:
    return found  # type: ignore[no-any-return]


def _input(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ---- speech, from transformers --------------------------------------------------------------------------------------


def whisper_encoder() -> Built:
    """The encoder of Whisper tiny (Radford et al. 2022, arXiv 2212.04356), on a fifth of its 30 s."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, max_source_positions=300
    )
    return Only(WhisperEncoder(config), _hidden), _input(1, 80, 600)


def _wav2vec2_config(**options: Any) -> Any:
    from transformers import Wav2Vec2Config

    return Wav2Vec2Config(hidden_size=768, num_hidden_layers=4, num_attention_heads=12, **options)


def wav2vec2_features() -> Built:
    """The feature encoder of wav2vec 2.0 base (Baevski et al. 2020, arXiv 2006.11477): seven convolutions of a second
    of sound, the first with a group normalisation."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2FeatureEncoder

    return Only(Wav2Vec2FeatureEncoder(_wav2vec2_config()), _itself), _input(1, _SECOND)


def wav2vec2_large_features() -> Built:
    """The same of wav2vec 2.0 large, with a layer normalisation after every convolution."""
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2FeatureEncoder

    config = _wav2vec2_config(feat_extract_norm="layer", conv_bias=True)
    return Only(Wav2Vec2FeatureEncoder(config), _itself), _input(1, _SECOND)


def wav2vec2() -> Built:
    """wav2vec 2.0 base with four of its twelve layers."""
    from transformers import Wav2Vec2Model

    return Only(Wav2Vec2Model(_wav2vec2_config()), _hidden), _input(1, _SECOND)


def conformer() -> Built:
    """wav2vec 2.0 with four Conformer layers (Gulati et al. 2020, arXiv 2005.08100)."""
    from transformers import Wav2Vec2ConformerConfig, Wav2Vec2ConformerModel

    config = Wav2Vec2ConformerConfig(
        hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536,
        position_embeddings_type="relative",
    )  # fmt: skip
    return Only(Wav2Vec2ConformerModel(config), _hidden), _input(1, _SECOND)


def hifigan() -> Built:
    """The generator of HiFi-GAN V1 (Kong et al. 2020, arXiv 2010.05646), 32 frames of 80 mel bands."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(
        upsample_initial_channel=512, upsample_rates=[8, 8, 2, 2], upsample_kernel_sizes=[16, 16, 4, 4]
    )
    return Only(SpeechT5HifiGan(config), _itself), _input(32, 80)


def _encodec() -> Any:
    from transformers import EncodecConfig, EncodecModel

    return EncodecModel(EncodecConfig())


def encodec_encoder() -> Built:
    """The encoder of EnCodec at 24 kHz (Défossez et al. 2022, arXiv 2210.13438): causal, with an LSTM."""
    return Only(_encodec().encoder, _itself), _input(1, 1, _SECOND)


def encodec_decoder() -> Built:
    return Only(_encodec().decoder, _itself), _input(1, 128, 50)


# ---- written out ----------------------------------------------------------------------------------------------------


class _TemporalBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.cut = (kernel - 1) * dilation
        steps = {"padding": self.cut, "dilation": dilation}
        self.first, self.second = nn.Conv1d(c_in, c_out, kernel, **steps), nn.Conv1d(c_out, c_out, kernel, **steps)
        self.norms = nn.ModuleList(nn.BatchNorm1d(c_out) for _ in range(2))
        self.skip = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)[..., : -self.cut]))
        y = F.relu(self.norms[1](self.second(y)[..., : -self.cut]))
        return F.relu(y + self.skip(x))


def tcn() -> Built:
    """A temporal convolutional network (Bai et al. 2018, arXiv 1803.01271) of eight levels."""
    widths = [64, *([128] * 8)]
    pairs = itertools.pairwise(widths)
    blocks = [_TemporalBlock(c_in, c_out, 5, 2**i) for i, (c_in, c_out) in enumerate(pairs)]
    return _calibrated(nn.Sequential(*blocks, nn.Conv1d(128, 10, 1)), _input(1, 64, 1500))


def dcgan() -> Built:
    """The generator of DCGAN (Radford et al. 2015, arXiv 1511.06434), 64x64."""
    widths = (100, 512, 256, 128, 64, 3)
    model = nn.Sequential()
    for i, (c_in, c_out) in enumerate(itertools.pairwise(widths)):
        steps = (1, 0) if i == 0 else (2, 1)
        model.append(nn.ConvTranspose2d(c_in, c_out, 4, *steps, bias=i == 4))
        model.extend([nn.BatchNorm2d(c_out), nn.ReLU()] if i < 4 else [nn.Tanh()])
    return _calibrated(model, _input(4, 100, 1, 1))


def unet() -> Built:
    """U-Net with a transposed decoder (Ronneberger et al. 2015, arXiv 1505.04597), of width 32, 256x256."""
    return _calibrated(image_unet(32, upsampling="transposed"), _input(1, 3, 256, 256))


def _calibrated(model: nn.Module, x: Tensor) -> Built:
    calibrate_batch_norm(he_initialise(model), x)
    return model.eval(), x[:1].clone()


NETWORKS: dict[str, Callable[[], Built]] = {
    made.__name__: made
    for made in (
        whisper_encoder, wav2vec2_features, wav2vec2_large_features, wav2vec2, conformer, hifigan, encodec_encoder,
        encodec_decoder, tcn, dcgan, unet,
    )
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: that of `benchmarks.timm_networks`."""
    parser = argparse.ArgumentParser(prog="benchmarks.clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), metavar="NAME")
    options, others = parser.parse_known_args(argv)
    return timm_networks.main(["--models", *(f"benchmarks.clients:{name}" for name in options.networks), *others])


if __name__ == "__main__":
    sys.exit(main())
