"""A frozen linear layer, for networks whose 1x1 convolutions are linear layers (ConvNeXt): bias, residual and
activation are in its epilogue."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, DTYPE_NAMES, ConvProblem, Direction
from convselect.base.settings import Settings
from convselect.freeze.candidates import Candidate, Form, onednn_takes
from convselect.freeze.kernel import DIRECT, PRODUCT, STRASSEN
from convselect.freeze.layer import FrozenLayer
from convselect.kernels._contract import Grade


class FrozenLinear(FrozenLayer):
    """activation(linear(x) + residual); x is (..., C)."""

    def problem(self, x: Tensor) -> ConvProblem | None:
        """A 1x1 convolution of one image that is one pixel wide; each pixel is a row of x."""
        K, C = self.form.shape
        if x.dim() < 2 or x.shape[-1] != C or x.dtype not in DTYPE_NAMES or x.dtype != self.form.dtype:
            return None
        rows = math.prod(x.shape[:-1])
        return ConvProblem(
            Direction.FORWARD, 1, C, rows, 1, K, 1, 1, dtype=DTYPE_NAMES[x.dtype], layout=CHANNELS_LAST,
            threads=torch.get_num_threads(),
        )  # fmt: skip

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        found = [Candidate("native", Grade.DIRECT, lambda *_: self.native)]
        problem = self.problem(x)
        y_shape = torch.Size((*x.shape[:-1], len(self.form)))
        if problem is None or problem.dtype == "float64" or problem.H == 0:
            return found
        if residual is not None and (residual.shape != y_shape or residual.dtype != x.dtype):
            return found
        if onednn_takes(problem.dtype):
            found.append(self._onednn(problem))
        x_form, y_form = (
            Form(shape, torch.empty(shape, device="meta").stride(), x.dtype, torch.contiguous_format)
            for shape in (x.shape, y_shape)
        )
        return found + self.kernel_candidates((PRODUCT, STRASSEN, DIRECT), problem, settings, x_form, y_form)

    def _onednn(self, problem: ConvProblem) -> Candidate:
        """oneDNN with its weight reordered once; a residual or an activation is its post-operation."""
        activation, bias, key, rows = self.activation, self.bias, ("onednn", problem.H), problem.H
        unary: Any = torch.ops.mkldnn._linear_pointwise.default
        binary: Any = torch.ops.mkldnn._linear_pointwise.binary
        attribute, scalars, algorithm = self.onednn_activation

        def bind(*_: Tensor | None) -> Any:
            cell = self.packed(key, lambda: torch.ops.mkldnn._reorder_linear_weight(self.weight, rows))

            def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                x = x.contiguous()
                if residual is None:
                    return unary(x, cell[0], bias, attribute, scalars, algorithm)  # type: ignore[no-any-return]
                return self.finish(binary(x, residual.contiguous(), cell[0], bias, "add"), None)

            return run

        return Candidate("onednn_packed", Grade.DIRECT, bind, key, wants_finite=activation is not None)
