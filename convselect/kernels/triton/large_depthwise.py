"""Depthwise convolution with large filters on tensor cores: a product with a band of the filter's rows.

    forward          y[n, c, p, q] = sum over r, s of w[c, r, s] * x[n, c, p + r - pad_top, q + s - pad_left]
    backward data    the same with the filter turned by 180 degrees, and R - 1 - pad_top, S - 1 - pad_left as padding
    backward weight  grad_w[c, r, s] = sum over n, p, q of grad_y[n, c, p, q] * x[n, c, p + r - pad_top, ...]

Depthwise convolution has no sum over channels from which to make a matrix product. But BP x BQ neighbouring results are
a linear function of the window of pixels they see, the same function for every patch of every image:

    Y[patch, (p, q)] = X[patch, (h, i)] @ T[(h, i), (p, q)],   T = w[h - p, i - q] inside the filter, else 0

X is read in place, a segment of an image's row per patch and h; T is the block Toeplitz matrix of the filter. Ding et
al., "Scaling Up Your Kernels to 31x31", CVPR 2022, whose kernel is an implicit GEMM, showed that a matrix product pays
for such filters. Triton cannot read shared memory at an offset, so here:

- T is read from 16 / element_bytes copies of the filter, each shifted by one element and framed by zeros. An element
  (i, q) of T depends on i - q alone, so any 16 bytes of T along i are aligned to 16 bytes in one of the copies, and can
  be loaded at once. The copies take some tens of kilobytes per channel and stay in the L2 cache.
- The window begins at a multiple of 16 bytes and never leaves the image. If a width is not divisible by 16 bytes, or
  the layout is NHWC, the image is first copied to rows that are.
- Patches are ordered with images fastest, so a tile of them spans few rows, and filter rows that meet only padding are
  skipped: with 27x27 on 14x14 pixels that is more than half of the products, columns included.
- Filters at least twice as tall as wide are computed transposed: the band costs least along the longer side.

The weight gradient is that of T, summed along its diagonals:

    D[(h, i), (p, q)] = X[patch, (h, i)]^T @ grad_Y[patch, (p, q)],   grad_w[r, s] = sum of D over h - p = r, i - q = s

A program holds a tile of D for its share of the patches, brings every diagonal to one row by shuffles, adds along q and
stores the result, BP numbers per tap and tile; a second kernel adds those up in a fixed order. For windows wider than a
tile there is another form: with images innermost, (C, W, H * N), shifts by r and by s are both whole rows, and grad_w
is the sum over q of [r, (h, n)] @ [(h, n), s], without a band but in small tiles.

Expected, by arithmetic and not measured: 40 to 60 % of the products are useful for 31x31 on 56x56 pixels, and a tile of
128 x 128 results needs 32 KB of operands per 64 terms of its sums. So the L2 cache is the bottleneck, at a quarter to a
half of the tensor cores' peak: 0.06 to 0.13 ms for 24.7 GFLOP (32 images, 128 channels) on an H100, compared with at
least 0.41 ms without tensor cores. The weight gradient is expected to take a third more; its other form, which needs
8 KB per 32 x 32 x 64 products, twice that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction
from convselect.kernels._common import why_not_depthwise
from convselect.kernels._contract import Grade, Params
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.large_depthwise_plan import NAME, RESULT, Step, planned, ranked
from convselect.kernels.triton.launch import SPLIT_ELEMENTS, Launch, TritonAlgorithm

SMALLEST, LARGEST = 7, 64
"""Bounds of the filter's longer side. Smaller filters are memory-bound without tensor cores; FFT suits larger ones."""


_WHAT = "The banded product"


class LargeDepthwiseTriton(TritonAlgorithm):
    name = NAME
    spreads_nonfinite = True  # through the zeros of T

    def why_not_shape(self, problem: ConvProblem) -> str | None:
        p = problem
        if (reason := why_not_depthwise(_WHAT, p)) is not None:
            return reason
        if p.K != p.C:
            return f"{_WHAT} needs one output channel per input channel; this convolution has {p.K // p.C}."
        if p.stride != (1, 1) or p.dilation != (1, 1):
            return f"{_WHAT} needs stride 1 and dilation 1; this one has {p.stride} and {p.dilation}."
        if not SMALLEST <= max(p.R, p.S) <= LARGEST:
            return f"{_WHAT} needs a filter with a longer side of {SMALLEST} to {LARGEST}; this one is {p.R}x{p.S}."
        if p.dtype == "float64":
            return f"{_WHAT} computes on tensor cores, which sum in float32; this problem is in float64."
        if p.N * max(p.H, p.P) * (max(p.W, p.Q) + 64) >= SPLIT_ELEMENTS:
            return f"{_WHAT} needs fewer than 2**31 pixels in one channel of all images; there are more."
        if not ranked(p, launcher.architecture()):
            return f"{_WHAT} needs shared memory; none of its configurations fits this GPU's."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        return [dict(config) for config in ranked(problem, launcher.architecture())]

    def _steps(self, problem: ConvProblem, params: Params) -> tuple[Step, ...]:
        config = tuple(params.items()) if params else ranked(problem, launcher.architecture())[0]
        return planned(problem, config)

    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        return tuple(step.launch for step in self._steps(problem, params))

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        """Memory of the configuration that needs most, as if every operand were strided or misaligned and had to be
        copied."""
        p = problem
        if p.direction == Direction.FORWARD:
            operands = p.x_bytes + p.weight_bytes
        elif p.direction == Direction.BACKWARD_DATA:
            operands = p.y_bytes + p.weight_bytes
        else:
            operands = p.x_bytes + p.y_bytes
        block = 512  # the allocator rounds sizes up to this
        made = max(
            sum(block + math.prod(step.shape) * step.dtype.itemsize for step in self._steps(p, config) if step.shape)
            for config in self.configs(p)
        )
        return operands + 3 * block + made

    def _operand(self, t: Tensor, problem: ConvProblem) -> Tensor:
        last = problem.layout == CHANNELS_LAST
        return launcher.aligned(t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))

    def _result(self, like: Tensor, problem: ConvProblem) -> Tensor:
        last = problem.layout == CHANNELS_LAST and problem.direction != Direction.BACKWARD_WEIGHT
        return torch.empty(
            problem.result_shape,
            dtype=like.dtype,
            device=like.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )

    def _run(self, problem: ConvProblem, params: Params, **tensors: Tensor) -> Tensor:
        like = next(iter(tensors.values()))
        for step in self._steps(problem, params):
            if step.writes == RESULT:
                out = self._result(like, problem)
            else:
                out = torch.empty(step.shape, dtype=step.dtype, device=like.device)
            launcher.run(step.launch, *(tensors[name] for name in step.reads), out)
            tensors[step.writes] = out
        return tensors[RESULT]

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        weight = launcher.aligned(weight.contiguous())
        return self._run(problem, params, x=self._operand(x, problem), weight=weight)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self.forward(grad_y, weight, problem, params)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._run(problem, params, x=self._operand(x, problem), y=self._operand(grad_y, problem))


ALGORITHMS = (LargeDepthwiseTriton(),)
