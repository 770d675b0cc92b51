"""Depthwise convolution: the C kernels of csrc/depthwise.inc, vectorised over channels.

    forward          y[n, k, p, q] = sum over r, s of w[k, r, s] * x[n, k // M, p', q'],  M = K / C,
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum over grad_y with reversed taps, one phase of the stride at a time
    backward weight  grad_w[k, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, k // M, p', q']

Libraries are many times slower for large kernels, in a weight gradient from 5x5 on; here one register tiling serves
all sizes. Source of the blocking: Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures", SC 2018. Float32 images in channels_last order are read in place if the kernel has 3, 5 or 7 columns
(csrc/depthwise_rows.inc), and so are long rows of NCHW images if the kernel has one row, as a 1-D convolution has
(csrc/depthwise_lines.inc: vectors along the row); others are copied to a slab. Frozen weights may be packed once
(`pack`). Volumes have vectors along rows and tiles of several rows (csrc/direct_volume.inc). 16-bit operands are
widened as they are copied, summed in float32 and rounded once. Without the C library, problems are rewritten so that
native computes them fast (`_depthwise_torch.py`).
"""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm, why_not_in_c, why_not_in_steps
from convselect.kernels._common import why_not_depthwise
from convselect.kernels._contract import Grade, Params
from convselect.kernels._depthwise_torch import DepthwiseByNative
from convselect.kernels._space import Parameter, Space, Values
from convselect.kernels._tuning import within

_BY_NATIVE = DepthwiseByNative()

_SLAB = Parameter("slab_kib", (16, 32, 64, 128, 256, 512))
_RUN = Parameter("run", (2, 3, 4, 5, 6, 7))
_SUMMED = Parameter("summed", (64, 128, 256, 512))  # more would cost digits
_USUAL = {"slab_kib": 128, "run": 7, "summed": 512}


LONG_ROW = 1000
"""Fewest results of a row for vectors along it, as in the C source."""


class Depthwise(CAlgorithm):
    """Parameters of the C kernels: `slab_kib`, KiB of an image that are copied at a time (absent if the image is read
    in place); `run`, outputs of a row that stay in registers; in a weight gradient `summed`, the number of products
    that a register adds up. Vectors along long rows have none.
    """

    name = "depthwise"
    revision = 3
    dimensions = frozenset({2, 3})
    kernel = "cs_depthwise"
    volume_kernel = "cs_direct_volume"
    volumes_in_ncdhw = True
    slots = ("slab_kib", "run", "summed")
    # Whether zero padding meets an infinite *weight* differs between kernels, in native too; a NaN or infinity in an
    # image stays within the window of its pixel.
    spreads_nonfinite = False

    def why_not(self, problem: ConvProblem) -> str | None:
        if not _library.available() and not problem.is_volume:
            return _BY_NATIVE.why_not(problem)
        what = "The depthwise kernel"
        return why_not_depthwise(what, problem) or why_not_in_c(what, problem) or why_not_in_steps(what, problem)

    def same_as_native(self, problem: ConvProblem) -> str | None:
        return None if _library.available() else _BY_NATIVE.same_as_native(problem)

    def error_grade(self, problem: ConvProblem) -> Grade:
        """Measured in float32 on normal data: at most 5e-7 forward and backward data, 7e-7 for weight gradients."""
        return Grade.DIRECT if _library.available() else _BY_NATIVE.error_grade(problem)

    def _without_c(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        return _BY_NATIVE.run(a, b, problem)

    def _bytes_without_c(self, problem: ConvProblem, params: Params) -> int:
        return _BY_NATIVE.workspace_bytes(problem)

    def space(self, problem: ConvProblem) -> Space | None:
        if not _library.available() or problem.is_volume or _is_line(problem):
            return None
        if problem.direction == Direction.BACKWARD_WEIGHT:
            return _space(self, (_SLAB, _SUMMED))
        in_place = problem.direction == Direction.FORWARD and packed_floats(problem) is not None
        return _space(self, (_RUN,) if in_place else (_SLAB, _RUN))


def _is_line(problem: ConvProblem) -> bool:
    """Whether csrc/depthwise_lines.inc computes this problem, which has no parameters; as `dwl_takes` there."""
    p, data = problem, problem.direction == Direction.BACKWARD_DATA
    if p.R != 1 or p.stride_w != 1 or (data and p.stride_h != 1) or p.layout == CHANNELS_LAST:
        return False
    return (p.W if data else p.Q) >= LONG_ROW


@functools.cache
def _space(algorithm: Depthwise, parameters: tuple[Parameter, ...]) -> Space:
    usual = {parameter.name: _USUAL[parameter.name] for parameter in parameters}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(algorithm, problem, usual, values)

    return Space(parameters, lambda _: usual, allowed)


# ---- frozen weights -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def packed_floats(problem: ConvProblem) -> int | None:
    """Number of floats that `pack` returns; None if no kernel takes a packed weight. One does for float32 problems in
    channels_last with one output channel per input channel, 3, 5 or 7 taps in a row and strides 1 or 2."""
    p = problem.with_direction(Direction.FORWARD)
    if p.is_volume or not p.is_depthwise or p.device != "cpu" or p.dtype != "float32" or p.layout != CHANNELS_LAST:
        return None
    if not _library.available():
        return None
    conv = _library._conv(p, CHANNELS_LAST, CONTIGUOUS, p.threads, _library.isa())
    return _library.packed_floats("cs_depthwise", ctypes.byref(conv))


def pack(weight: Tensor, problem: ConvProblem) -> Tensor:
    """The weight (C, 1, R, S) in the order in which `cs_depthwise_frozen` reads it: float32, one-dimensional.

    Raises:
        ValueError: if no kernel takes a packed weight, or the weight is not the problem's.
    """
    return _library.packed("cs_depthwise", packed_floats(problem), weight, problem, CHANNELS_LAST)


ALGORITHMS = (Depthwise(),)
