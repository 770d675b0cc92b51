"""A frozen convolution of volumes, and the ways to run it.

What is a convolution of images on views (`Layer.seen_as`) is `conv`'s. The rest runs by the kernels of volumes, which
finish y with bias, residual and activation as those of images do, or, in NDHWC, slice by slice by those of images
(`slices`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.volumes import volume_of
from convselect.base.problem import CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.freeze import slices
from convselect.freeze.candidates import Candidate, Form, onednn_takes
from convselect.freeze.chains import Layer
from convselect.freeze.kernel import Kernel
from convselect.freeze.layer import FrozenLayer
from convselect.kernels._common import format_of
from convselect.kernels._contract import Grade


def _in_ncdhw(problem: ConvProblem) -> bool:
    return problem.layout == CONTIGUOUS


KERNELS = (
    *(Kernel(f"winograd{m}", "cs_winograd_volume", (m,)) for m in (2, 3, 4, 5, 6, 7)),
    *(Kernel(name, "cs_direct_volume", takes=_in_ncdhw) for name in ("depthwise", "direct")),
)
"""They read the weight as it is: see DESIGN.md."""


class FrozenVolume(FrozenLayer):
    """activation(conv(x) + residual); x is (N, C, D, H, W)."""

    def __init__(self, layer: Layer) -> None:
        self.stride, padding, self.dilation, self.groups = layer.geometry
        # PyTorch's own operations pad both sides alike; the rest are zeros that are put around x (as by `F.pad`).
        self._zeros = None if len(padding) == 3 else (*padding[4:], *padding[2:4], *padding[:2])
        self.padding = padding if self._zeros is None else (0, 0, 0)
        super().__init__(layer)

    def problem(self, x: Tensor) -> ConvProblem | None:
        problem = volume_of(x, self.form, (self.stride, self.padding, self.dilation, self.groups))
        if problem is None or self._zeros is None:
            return problem
        left, right, top, bottom, front, back = self._zeros
        return problem._replace(
            pad_front=front, pad_back=back, pad_top=top, pad_bottom=bottom, pad_left=left, pad_right=right
        )

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()  # oneDNN convolves some images wrongly in channels_last, and nobody looked at volumes
        if self._zeros is not None:
            x = F.pad(x, self._zeros)
        return torch.conv3d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        found, problem = [self._native(layout)], self.problem(x)
        if problem is None or x.dtype != self.form.dtype or problem.dtype == "float64":
            return found
        problem = problem._replace(layout=layout, weight_layout=CONTIGUOUS)
        if residual is not None and (residual.shape != problem.y_shape or residual.dtype != x.dtype):
            return found
        if problem.symmetric_padding and onednn_takes(problem.dtype):
            found.append(self._onednn(problem, layout))
        shapes = problem.x_shape, problem.y_shape
        x_form, y_form = (Form.dense(shape, layout, problem.torch_dtype) for shape in shapes)
        found += self.kernel_candidates(KERNELS, problem, settings, x_form, y_form)
        return found + slices.candidates(self, problem, settings, x_form, y_form)

    def _native(self, layout: str) -> Candidate:
        memory_format = format_of(layout, 5)

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = self._linear(x, self.weight, self.bias)
            return self.finish(y.contiguous(memory_format=memory_format), residual)

        return Candidate("native", Grade.DIRECT, lambda *_: run)

    def _onednn(self, problem: ConvProblem, layout: str) -> Candidate:
        """oneDNN with its weight reordered once; an activation is its post-operation."""
        p, bias, key = problem, self.bias, ("onednn", problem.x_shape)
        padding, stride, dilation = [p.pad_front, p.pad_top, p.pad_left], list(self.stride), list(self.dilation)
        operation: Any = torch.ops.mkldnn._convolution_pointwise.default
        memory_format = format_of(layout, 5)

        def pack() -> Any:
            return torch.ops.mkldnn._reorder_convolution_weight(
                self.weight, padding, stride, dilation, p.groups, list(p.x_shape)
            )

        def bind(*_: Tensor | None) -> Any:
            cell = self.packed(key, pack)

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = x.contiguous(memory_format=memory_format)
                after = self.onednn_activation if residual is None else ("none", [], "")
                y = operation(x, cell[0], bias, padding, stride, dilation, p.groups, *after)
                y = y.contiguous(memory_format=memory_format)
                return y if residual is None else self.finish(y, residual)

            return run

        return Candidate("onednn_packed", Grade.DIRECT, bind, key, wants_finite=self.activation is not None)
