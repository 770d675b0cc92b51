"""A frozen convolution, and the ways to run it. Normalisations are in its weight and bias already: see `algebra`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.arguments import problem_of
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import is_disabled
from convselect.freeze import split, windows
from convselect.freeze.candidates import FORMATS, Candidate, Form, onednn_takes
from convselect.freeze.chains import Layer
from convselect.freeze.kernel import KERNELS, STEM
from convselect.freeze.layer import FrozenLayer, seen_as_image
from convselect.kernels._contract import Grade
from convselect.kernels._native_ops import plainly_contiguous, wrong_in_channels_last


class FrozenConv(FrozenLayer):
    """activation(conv(x) + residual); x is (N, C, H, W), of height 1 for a layer of one dimension."""

    def __init__(self, layer: Layer) -> None:
        self.stride, padding, self.dilation, self.groups = layer.geometry
        # PyTorch's own operations pad both sides alike; the rest are zeros that are put around x (as by `F.pad`).
        self._zeros = None if len(padding) == 2 else (*padding[2:], *padding[:2])
        self.padding = padding if self._zeros is None else (0, 0)
        super().__init__(layer)

    def _folded(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super()._folded()
        return seen_as_image(weight, self.layer.seen_as), bias

    def problem(self, x: Tensor) -> ConvProblem | None:
        problem = problem_of(x, self.form, (self.stride, self.padding, self.dilation, self.groups))
        if problem is None or self._zeros is None:
            return problem
        left, right, top, bottom = self._zeros
        return problem._replace(pad_top=top, pad_bottom=bottom, pad_left=left, pad_right=right)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._zeros is not None:
            x = F.pad(x, self._zeros)
        return torch.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        problem = self.problem(x)
        wrong = layout == CHANNELS_LAST and problem is not None and wrong_in_channels_last(problem)
        found = [self._native_contiguous() if wrong else self._native(layout)]
        if problem is None or x.dtype != self.form.dtype or problem.dtype == "float64":
            return found
        problem = problem._replace(layout=layout, weight_layout=CONTIGUOUS)
        if residual is not None and (residual.shape != problem.y_shape or residual.dtype != x.dtype):
            return found
        plain = layout == CHANNELS_LAST and problem.is_pointwise and problem.groups == 1 and problem.dtype == "float32"
        if plain and not is_disabled("im2col_gemm", settings.disabled):
            found.append(self._gemm(problem))
        if problem.symmetric_padding and onednn_takes(problem.dtype) and not wrong:
            found.append(self._onednn(problem, layout))
        x_form, y_form = (
            Form.dense(shape, layout, problem.torch_dtype) for shape in (problem.x_shape, problem.y_shape)
        )
        if layout == CHANNELS_LAST and x.is_contiguous():
            found += self.kernel_candidates((STEM,), problem, settings, Form.like(x), y_form)
        if problem.is_pointwise and problem.H == problem.W == 1:  # one pixel lies the same way in both layouts
            problem = problem._replace(layout=CHANNELS_LAST)
        found += self.kernel_candidates(KERNELS, problem, settings, x_form, y_form)
        for more in (split, windows):
            found += more.candidates(self, problem, settings, x_form, y_form)
        return found

    def _native(self, layout: str) -> Candidate:
        bias, memory_format, key = self.bias, FORMATS[layout], ("native", layout)
        stride, padding, dilation, groups, zeros = self.stride, self.padding, self.dilation, self.groups, self._zeros

        def bind(*_: Tensor | None) -> Any:
            cell = self.packed(key, lambda: self.weight.contiguous(memory_format=memory_format))

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = (x if zeros is None else F.pad(x, zeros)).contiguous(memory_format=memory_format)
                y = torch.conv2d(x, cell[0], bias, stride, padding, dilation, groups)  # type: ignore[call-overload]
                return self.finish(y, residual)

            return run

        return Candidate("native", Grade.DIRECT, bind, key)

    def _native_contiguous(self) -> Candidate:
        """Native for images in channels_last that oneDNN would convolve wrongly there."""

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = self._linear(plainly_contiguous(x), self.weight, self.bias)
            return self.finish(y.contiguous(memory_format=torch.channels_last), residual)

        return Candidate("native", Grade.DIRECT, lambda *_: run)

    def _gemm(self, problem: ConvProblem) -> Candidate:
        """A 1x1 convolution in NHWC order is one matrix product, (N H W, C) times (C, K)."""
        bias, linear = self.bias, F.linear

        def bind(*_: Tensor | None) -> Any:
            weight = self.weight  # itself, not a view of it: see `FrozenLayer.weight`

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = x.contiguous(memory_format=torch.channels_last)
                y = linear(x.permute(0, 2, 3, 1), weight.view(problem.K, -1), bias).permute(0, 3, 1, 2)
                return self.finish(y, residual)

            return run

        return Candidate("gemm", Grade.DIRECT, bind)

    def _onednn(self, problem: ConvProblem, layout: str) -> Candidate:
        """oneDNN with its weight reordered once; a residual or an activation is its post-operation."""
        p, activation, bias, key = problem, self.activation, self.bias, ("onednn", problem.x_shape)
        padding, stride, dilation, groups = [p.pad_top, p.pad_left], list(p.stride), list(p.dilation), p.groups
        unary: Any = torch.ops.mkldnn._convolution_pointwise.default
        binary: Any = torch.ops.mkldnn._convolution_pointwise.binary
        attribute, scalars, algorithm = self.onednn_activation
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
                    y = self.finish(y, residual)
                return y.contiguous(memory_format=memory_format)  # type: ignore[no-any-return]

            return run

        return Candidate("onednn_packed", Grade.DIRECT, bind, key, wants_finite=activation is not None)
