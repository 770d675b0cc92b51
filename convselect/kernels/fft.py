"""Convolution by the discrete Fourier transform: the whole padded image at once (`fft`), or in overlapping tiles
(`fft_tiled`).

With X, W, Y the two-dimensional transforms of the zero-padded image, kernel and output, * the complex conjugate, and
all products per frequency (sums over c, k, or images and tiles are matrix products, one per frequency):

    forward          Y[n, k] = sum over c of X[n, c] W*[k, c]
    backward data    X[n, c] = sum over k of Y[n, k] W[k, c]
    backward weight  W[k, c] = sum over n of X[n, c] Y*[n, k]

The cost per pixel does not grow with the kernel's size, so this suits large kernels. Sources: the correlation theorem;
Mathieu, Henaff, LeCun, "Fast Training of Convolutional Networks through FFTs" (2013), section 2; overlap-save tiling as
in Oppenheim and Schafer, "Discrete-Time Signal Processing", section 8.7.3.

Whole image: a circular transform of length L is exact along an axis as soon as L >= size + max(pad_lo, pad_hi), outputs
and kernel extent: reads beyond one edge may wrap around into the other edge's zeros. Tiles: each yields
L - extent + 1 results. The two axes are independent: a one-row image is never padded to a square.

`csrc/fft.inc` computes the tiles of `fft_tiled`, vectorised over channels, for kernels of one row in tiles of one row
(`csrc/fft_rows.inc`); everything else, and all of it without the C library, is PyTorch operations
(`_fft_torch.py`). Transform lengths have no prime factor above 7. The C kernel computes a dilated convolution as one
without dilation on each phase of the image (every dil-th pixel of every dil-th row); PyTorch's operations transform
dilated kernels with their zeros in. 16-bit operands are transformed in float32 and the result is rounded once.
"""

from __future__ import annotations

import functools

from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm
from convselect.kernels._common import strides
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._cuda_flags import product_rounds_too_much
from convselect.kernels._fft_plan import (
    MAX_TILED_EXTENT,
    kernel_tile_side,
    kernel_tiles,
    plan_of,
    sides,
    tile_side,
)
from convselect.kernels._fft_torch import Engine
from convselect.kernels._space import Parameter, Space, Values
from convselect.kernels._tuning import within


class Fft(Algorithm):
    """The whole padded image in one transform."""

    name = "fft"
    devices = frozenset({"cpu", "cuda"})
    spreads_nonfinite = True
    direct_sums = False
    may_be_unready = True

    def ready(self, problem: ConvProblem, params: Params = None) -> bool:
        return not product_rounds_too_much(problem)

    def _tile(self, problem: ConvProblem, params: Params) -> int | None:
        return None

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.stride_h != 1 or p.stride_w != 1:
            return f"A Fourier transform needs stride 1; this convolution has {strides(p)}."
        if p.R == 1 and p.S == 1:
            return "A Fourier transform needs a kernel of several taps; a 1x1 kernel gains nothing from it."
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p, plan = problem, plan_of(problem, self._tile(problem, params))
        plane = plan.bins * plan.complex_bytes
        inner, outer = plan.groups * plan.inner_chunk, plan.groups * plan.outer_chunk
        kernels = inner * plan.outer_chunk
        # Spectra: streamed operand, result (or grad_y, and the product before its sum over units), weight.
        copies = 2 if p.direction == Direction.BACKWARD_WEIGHT and plan.elementwise else 1
        total = ((inner + copies * outer) * plan.units + copies * kernels) * plane
        # The padded images, and the weight gathered, cast, and dilated with zeros.
        total += max(inner, outer) * plan.rows.span * plan.cols.span * plan.images * p.element_bytes
        extent_h, extent_w = p.kernel_extent
        total += kernels * (3 * p.R * p.S + extent_h * extent_w) * plan.complex_bytes // 2
        if plan.pruned:  # intermediate transforms, as real planes and complex
            total += 2 * kernels * (plan.cols.length // 2 + 1) * p.R * plan.complex_bytes
        # Copies of a piece: gathered, cast, padded, transformed; or gathered, transformed twice, cropped, reordered.
        transforms = min(max(inner, outer) * plan.units, max(plan.piece, plan.units))
        return total + 6 * max(transforms, min(kernels, plan.piece)) * plane

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT if problem.element_bytes == 2 else Grade.NEAR

    def _compute(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        plan = plan_of(problem, self._tile(problem, params))
        if problem.direction != Direction.BACKWARD_WEIGHT:
            return Engine(problem, plan).image_result(a, b)
        return Engine(problem, plan).weight_result(a, b) if problem.N else a.new_zeros(problem.weight_shape)

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._compute(x, weight, problem.with_direction(Direction.FORWARD), params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._compute(grad_y, weight, problem.with_direction(Direction.BACKWARD_DATA), params)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._compute(x, grad_y, problem.with_direction(Direction.BACKWARD_WEIGHT), params)


_PASSING = Parameter("passing_kib", (256, 512, 1024, 2048, 4096))


class FftTiled(CAlgorithm, Fft):
    """Overlapping tiles. An axis that is no longer than a tile is transformed whole.

    Parameters: `tile`, the tile's side; in the C kernel `passing_kib`, KiB of spectra of the operand that is not kept.
    If only `tile` is given it may be any even number of at least the kernel's extent; others raise a ValueError.
    """

    name = "fft_tiled"
    revision = 2
    kernel = "cs_fft"
    slots = ("passing_kib",)

    def _tile(self, problem: ConvProblem, params: Params) -> int:
        if params is None or "tile" not in params:
            return tile_side(problem)
        tile = int(params["tile"])
        if tile % 2 or tile < max(problem.kernel_extent):
            raise ValueError(f"tile {tile} must be even and hold the kernel's extent {problem.kernel_extent}")
        return tile

    def _in_c(self, problem: ConvProblem, params: Params = None) -> tuple[int, ...] | None:
        """The side of the C kernel's tiles, or their length if the kernel has one row; None if PyTorch's operations
        compute: in float64, for kernels of one column and few channels per group, which leave most of a tile or a
        vector empty, and for kernels that fill half of the largest tile."""
        p = problem
        if p.dtype == "float64" or p.device != "cpu" or p.N == 0 or not _library.available():
            return None
        if p.S == 1 or max(p.C, p.K) // p.groups < 4:
            return None
        if params is None or "tile" not in params:
            tile = kernel_tile_side(p)
        else:
            tile = int(params["tile"])
        return (tile,) if tile in kernel_tiles(p) else None

    def why_not(self, problem: ConvProblem) -> str | None:
        extent = max(problem.kernel_extent)
        if extent > MAX_TILED_EXTENT and self._in_c(problem) is None:
            return f"Tiles need a kernel of at most {MAX_TILED_EXTENT} elements; this one spans {extent}: use fft."
        return super().why_not(problem)

    def batch_invariant(self, problem: ConvProblem) -> bool:
        return False

    def _without_c(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        return self._compute(a, b, problem, params)

    def _bytes_without_c(self, problem: ConvProblem, params: Params) -> int:
        return Fft.workspace_bytes(self, problem, params)

    def space(self, problem: ConvProblem) -> Space | None:
        if self.why_not(problem) is not None:
            return None
        leading_ints = self._in_c(problem)
        in_c, usual = leading_ints is not None, tile_side(problem) if leading_ints is None else leading_ints[0]
        tiles = sides(problem, in_c)
        if not in_c:
            # Leave out tiles that the C kernel would compute if asked for: that is another method than the default.
            tiles = tuple(tile for tile in tiles if self._in_c(problem, {"tile": tile}) is None)
        return _space(self, tiles, usual, in_c) if usual in tiles and (in_c or len(tiles) > 1) else None

    def _tune(self, problem: ConvProblem, params: Params) -> tuple[int, ...]:
        return () if params is None or params.keys() == {"tile"} else super()._tune(problem, params)


@functools.lru_cache(maxsize=64)
def _space(algorithm: FftTiled, tiles: tuple[int, ...], usual_tile: int, in_c: bool) -> Space:
    parameters: tuple[Parameter, ...] = (Parameter("tile", tiles),)
    usual: Values = {"tile": usual_tile}
    if in_c:
        parameters, usual = (*parameters, _PASSING), {**usual, "passing_kib": 1024}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(algorithm, problem, usual, values)

    return Space(parameters, lambda _: usual, allowed)


ALGORITHMS = (Fft(), FftTiled())
