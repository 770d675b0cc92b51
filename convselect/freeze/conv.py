"""A frozen convolution: its normalisation folded in, and the ways to run it.

Batch normalisation with fixed statistics is a scale and a shift per channel (Jacob et al., 2018, "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2):

    gamma (conv(x, w) + b - mean) / sqrt(var + eps) + beta  =  conv(x, w s) + (b - mean) s + beta,
    s = gamma / sqrt(var + eps)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.arguments import problem_of
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import is_disabled
from convselect.freeze.candidates import FORMATS, ONEDNN_ACTIVATIONS, Candidate, Form, finish, onednn_takes
from convselect.freeze.chains import ConvChain
from convselect.freeze.kernel import KERNELS
from convselect.freeze.layer import FrozenLayer, Source, copied
from convselect.kernels._contract import Grade
from convselect.kernels._native_ops import plainly_contiguous, wrong_in_channels_last


class FrozenConv(FrozenLayer):
    """activation(norm(conv(x)) + residual); x is (N, C, H, W)."""

    def __init__(self, chain: ConvChain) -> None:
        self.chain = chain
        self.conv = chain.conv
        super().__init__(chain.conv.weight.dtype, chain.activation, chain.residual)

    def sources(self) -> list[Source]:
        conv, norm = self.conv, self.chain.norm
        names: list[tuple[Any, str]] = [(conv._parameters, "weight"), (conv._parameters, "bias")]
        if norm is not None:
            names += [(norm._parameters, "weight"), (norm._parameters, "bias")]
            names += [(norm._buffers, "running_mean"), (norm._buffers, "running_var")]
        return [(owner, key) for owner, key in names if owner.get(key) is not None]

    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """Computed in float64 if there is a normalisation to fold."""
        conv, norm = self.conv, self.chain.norm
        weight = conv.weight.detach()
        bias = None if conv.bias is None else conv.bias.detach()
        if norm is None:
            return copied(weight), None if bias is None else copied(bias)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        if norm.weight is not None:
            scale = scale * norm.weight.detach().double()
        shift = -norm.running_mean.double() if bias is None else bias.double() - norm.running_mean.double()
        shift = shift * scale
        if norm.bias is not None:
            shift = shift + norm.bias.detach().double()
        folded = weight.double() * scale.view(-1, 1, 1, 1)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return folded.to(weight.dtype).contiguous(), shift.to(wide)

    def problem(self, x: Tensor) -> ConvProblem | None:
        conv = self.conv
        return problem_of(x, self.weight, (conv.stride, conv.padding, conv.dilation, conv.groups))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = self.conv
        return torch.conv2d(x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)  # type: ignore[call-overload, no-any-return]

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        problem = self.problem(x)
        if layout == CHANNELS_LAST and problem is not None and wrong_in_channels_last(problem):
            return [self._native_contiguous()]
        found = [self._native(layout)]
        if problem is None or x.dtype != self.weight.dtype or problem.dtype == "float64":
            return found
        problem = problem._replace(layout=layout, weight_layout=CONTIGUOUS)
        if residual is not None and (residual.shape != problem.y_shape or residual.dtype != x.dtype):
            return found
        plain = layout == CHANNELS_LAST and problem.is_pointwise and problem.groups == 1 and problem.dtype == "float32"
        if plain and not is_disabled("im2col_gemm", settings.disabled):
            found.append(self._gemm(problem))
        if problem.symmetric_padding and onednn_takes(problem.dtype):
            found.append(self._onednn(problem, layout))
        x_form, y_form = (
            Form.dense(shape, layout, problem.torch_dtype) for shape in (problem.x_shape, problem.y_shape)
        )
        return found + self.kernel_candidates(KERNELS, problem, settings, x_form, y_form)

    def _native(self, layout: str) -> Candidate:
        activation, bias, memory_format, key = self.activation, self.bias, FORMATS[layout], ("native", layout)
        conv = self.conv
        stride, padding, dilation, groups = conv.stride, conv.padding, conv.dilation, conv.groups

        def bind(*_: Tensor | None) -> Any:
            cell = self.packed(key, lambda: self.weight.contiguous(memory_format=memory_format))

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = x.contiguous(memory_format=memory_format)
                y = torch.conv2d(x, cell[0], bias, stride, padding, dilation, groups)  # type: ignore[call-overload]
                return finish(y, residual, activation)

            return run

        return Candidate("native", Grade.DIRECT, bind, key)

    def _native_contiguous(self) -> Candidate:
        """Native for images in channels_last that oneDNN would convolve wrongly there."""

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = self._linear(plainly_contiguous(x), self.weight, self.bias)
            return finish(y.contiguous(memory_format=torch.channels_last), residual, self.activation)

        return Candidate("native", Grade.DIRECT, lambda *_: run)

    def _gemm(self, problem: ConvProblem) -> Candidate:
        """A 1x1 convolution in NHWC order is one matrix product, (N H W, C) times (C, K)."""
        activation, bias = self.activation, self.bias
        weight = self.weight.view(problem.K, -1)
        linear = F.linear

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            x = x.contiguous(memory_format=torch.channels_last)
            y = linear(x.permute(0, 2, 3, 1), weight, bias).permute(0, 3, 1, 2)
            return finish(y, residual, activation)

        return Candidate("gemm", Grade.DIRECT, lambda *_: run)

    def _onednn(self, problem: ConvProblem, layout: str) -> Candidate:
        """oneDNN with its weight reordered once; a residual or an activation is its post-operation."""
        p, activation, bias, key = problem, self.activation, self.bias, ("onednn", problem.x_shape)
        padding, stride, dilation, groups = [p.pad_top, p.pad_left], list(p.stride), list(p.dilation), p.groups
        unary: Any = torch.ops.mkldnn._convolution_pointwise.default
        binary: Any = torch.ops.mkldnn._convolution_pointwise.binary
        attribute, scalars, algorithm = ONEDNN_ACTIVATIONS[activation]
        memory_format = FORMATS[layout]

        def pack() -> Any:
            return torch.ops.mkldnn._reorder_convolution_weight(
                self.weight, padding, stride, dilation, groups, list(p.x_shape)
            )

        def bind(*_: Tensor | None) -> Any:
            cell = self.packed(key, pack)

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = x.contiguous(memory_format=memory_format)
                if residual is None:
                    y = unary(x, cell[0], bias, padding, stride, dilation, groups, attribute, scalars, algorithm)
                elif activation in (None, "relu"):
                    residual = residual.contiguous(memory_format=memory_format)
                    y = binary(
                        x, residual, cell[0], bias, padding, stride, dilation, groups, "add", 1.0, activation, [], None
                    )
                else:  # the binary form takes no other activation
                    y = unary(x, cell[0], bias, padding, stride, dilation, groups, "none", [], "")
                    y = finish(y, residual, activation)
                return y.contiguous(memory_format=memory_format)  # type: ignore[no-any-return]

            return run

        return Candidate("onednn_packed", Grade.DIRECT, bind, key, wants_finite=activation is not None)
