"""Grouped convolution with few channels per group: C kernels vectorised over output channels (csrc/grouped.inc).

    forward          y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] * x[n, group(k) * C/G + c, p', q'],
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum with input and output exchanged, one phase of the stride at a time
    backward weight  grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, group(k) * C/G + c, p', q']

Libraries compute a group as a small matrix product, which leaves most of a vector empty where a group has 4 or 8
channels. Here neighbouring groups share a vector of output channels, and a permutation brings each group's input value
under its lanes. Source of the blocking: Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on
SIMD Architectures", SC 2018. 16-bit operands are widened as they are packed, summed in float32 and rounded once.
"""

from __future__ import annotations

import functools

from torch import Tensor

from convselect.kernels import _library
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels._tuning import slots, within
from convselect.problem import ConvProblem, Direction

MOST_CHANNELS = 64
"""Input or output channels per group, as in the C source."""

# The figures of the C source for its widest vector; narrower ones take less.
_LANES, _TILE, _BAND_PIXELS, _BAND_ROWS, _SLAB_KIB = 16, 14, 128, 64, 16

SLOTS = ("band", "tile", "single", "slab_kib")
"""Parameters in the order of the slots of `cs_conv.tune`: csrc/convselect.h."""
_BAND, _SLAB = Parameter("band", (32, 64, 128, 256, 512)), Parameter("slab_kib", (4, 8, 16, 32, 64))
_SINGLE = Parameter("single", (0, 1), STRUCTURE)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _held(bytes_: int) -> int:
    """What the C library allocates for a block of so many bytes: whole pages, large ones for large blocks."""
    large = 2 << 20
    return _up(bytes_, large if bytes_ >= large // 8 else 4096)


class Grouped(Algorithm):
    """Parameters. Forward and data gradient: `single`, whether the taps of a row are taken one at a time (1), although
    neighbours could share what they read; `band`, results that are stored at a time; `tile`, columns of a register tile
    at most. Weight gradient: `slab_kib`, gradients that are held at a time.
    """

    name = "grouped"

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.groups == 1:
            return "not a grouped convolution"
        if p.is_depthwise:
            return "depthwise: with one input channel per group there is nothing to sum over"
        if max(p.C // p.groups, p.K // p.groups) > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels per group"
        if p.device != "cpu":
            return "the C kernels run on CPUs"
        if p.dtype == "float64":
            return "the C kernels sum in float32"
        if not _library.available():
            return "needs the C kernels, which this installation was built without"
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def batch_invariant(self, problem: ConvProblem) -> bool:
        return True  # each result is summed in an order that its place in the image decides

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = problem
        if p.direction == Direction.BACKWARD_WEIGHT:
            private, shared = self._gradient_scratch(p, (params or {}).get("slab_kib", _SLAB_KIB))
        else:
            private, shared = (
                self._image_scratch(p, (params or {}).get("band", _BAND_PIXELS)),
                128 * (p.stride_h + p.stride_w),
            )
        return _library.copied_bytes(p) + p.threads * _held(private) + _held(shared)

    def _image_scratch(self, p: ConvProblem, band_pixels: int) -> int:
        """Bytes per thread of forward and backward data: repacked weights, ring of rows, band of results."""
        taps, extent_h, extent_w = p.R * p.S, *p.kernel_extent
        c_group, k_group = p.C // p.groups, p.K // p.groups
        if p.direction == Direction.FORWARD:
            inputs, outputs, height, width, rows, q, step = c_group, k_group, p.H, p.W, p.P, p.Q, 1
            columns = p.pad_left + 1 + (p.Q + _TILE) * p.stride_w + extent_w
        else:
            inputs, outputs, height, width, rows, q, step = k_group, c_group, p.P, p.Q, p.H, p.W, p.stride_w
            columns = p.W // p.stride_w + _TILE + (p.pad_left + extent_w) // p.stride_w + 6
        band = min(rows, max(1, band_pixels // q))
        if p.direction == Direction.FORWARD:
            ring = min(height, (band - 1) * p.stride_h + extent_h)
        else:
            ring = min(height, (band + extent_h - 2) // p.stride_h + 2)
        packed = _up(outputs, _LANES) * inputs * taps
        wide = 0 if p.dtype == "float32" else max(width * inputs, max(_LANES, inputs) * outputs * taps)
        pixels = 2 * band * q + _TILE * step
        floats = packed + wide + ring * columns * max(_LANES, inputs) + pixels * _LANES
        return 4 * floats + 8 * ring + 16 * p.R + 8 * 64

    def _gradient_scratch(self, p: ConvProblem, slab_kib: int) -> tuple[int, int]:
        """Bytes per thread, and in common, of the weight gradient: ring of x, band of grad_y, sums."""
        c_group, k_group, extent_h = p.C // p.groups, p.K // p.groups, p.kernel_extent[0]
        lanes = _up(k_group, _LANES)
        slab_floats = 256 * slab_kib
        band = min(p.P, _BAND_ROWS, max(1, slab_floats // (8 * p.Q)))
        ring = min(p.H, (band - 1) * p.stride_h + extent_h)
        vector = _up(c_group, 4) * p.R * p.S
        row = p.W * max(_LANES, _up(c_group, 4))
        floats = ring * row + max(slab_floats, p.Q * lanes) + vector * (lanes + _LANES) + p.W * c_group
        parts = 4 * p.threads * vector * lanes + vector * _LANES if p.threads > 1 else 0
        return 4 * floats + 8 * ring + 8 * 64, 4 * parts

    def space(self, problem: ConvProblem) -> Space:
        return _space(self, problem.direction == Direction.BACKWARD_WEIGHT, _library.isa())

    def _call(self, a: Tensor, b: Tensor, problem: ConvProblem, direction: Direction, params: Params) -> Tensor:
        tune = () if params is None else slots(self, problem.with_direction(direction), params, SLOTS)
        return _library.call("cs_grouped", a, b, problem, tune=tune)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor | None:
        return _library.call_checked("cs_grouped", a, b, problem, bias=bias, tune=slots(self, problem, params, SLOTS))

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._call(x, weight, problem, Direction.FORWARD, params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._call(grad_y, weight, problem, Direction.BACKWARD_DATA, params)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._call(x, grad_y, problem, Direction.BACKWARD_WEIGHT, params)


def _shares_taps(p: ConvProblem) -> bool:
    """Whether there are kernels that take several taps of a row at a time."""
    forward = p.direction == Direction.FORWARD
    return p.S in (2, 3, 5) and p.dil_w == 1 and p.stride_w <= (2 if forward else 1)


@functools.cache
def _space(algorithm: Grouped, gradient: bool, isa: int) -> Space:
    tiles = (4, 7, 8, 14) if isa == _library.ISAS["avx512"] else (4, 7, 8)
    parameters: tuple[Parameter, ...] = (_SINGLE, _BAND, Parameter("tile", tiles))
    usual: Values = {"single": 0, "band": _BAND_PIXELS, "tile": tiles[-1]}
    if gradient:
        parameters, usual = (_SLAB,), {"slab_kib": _SLAB_KIB}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(lambda v: algorithm.workspace_bytes(problem, v), usual, values)

    rules = (
        Rule(
            "neighbouring taps together or apart",
            lambda p, _: _shares_taps(p),
            lambda *_: [{"single": 0}, {"single": 1}],
        ),
        Rule("nothing to share", lambda p, _: not _shares_taps(p), lambda *_: [{"single": 0}]),
    )
    return Space(parameters, lambda _: usual, allowed, () if gradient else rules)


ALGORITHMS = (Grouped(),)
