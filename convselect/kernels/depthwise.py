"""Depthwise convolution: the C kernels of csrc/depthwise.inc, vectorised over channels.

    forward          y[n, k, p, q] = sum over r, s of w[k, r, s] * x[n, k // M, p', q'],  M = K / C,
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum over grad_y with reversed taps, one phase of the stride at a time
    backward weight  grad_w[k, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, k // M, p', q']

Libraries fall off a cliff where a kernel is large, in a weight gradient from 5x5 on; here one register tiling serves
all sizes. Source of the blocking: Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on SIMD
Architectures", SC 2018. Float32 images in channels_last order under kernels of 3 or 5 columns are read where they lie
(csrc/depthwise_rows.inc), others are copied to a slab; frozen weights may be packed once (`pack`). 16-bit operands are
widened as they are copied, summed in float32 and rounded once. Without the C library, problems are posed so that native
computes them fast (`_depthwise_torch.py`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from convselect.kernels import _library
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._depthwise_torch import DepthwiseByNative
from convselect.kernels._space import Parameter, Space, Values
from convselect.kernels._tuning import slots, within
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction

_BY_NATIVE = DepthwiseByNative()

# The figures of the C source.
_SLAB_KIB, _FEWEST_ROWS, _MOST_ROWS = 128, 7, 28

SLOTS = ("slab_kib", "run", "summed")
"""Parameters in the order of the slots of `cs_conv.tune`: csrc/convselect.h."""
_SLAB = Parameter("slab_kib", (16, 32, 64, 128, 256, 512))
_RUN = Parameter("run", (2, 3, 4, 5, 6, 7))
_SUMMED = Parameter("summed", (64, 128, 256, 512))  # more would cost digits
_USUAL = {"slab_kib": _SLAB_KIB, "run": 7, "summed": 512}


def _over(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _reach(backward: bool, taps: int, stride: int, pad: int, dilation: int) -> int:
    """Rows (columns) of the copied image between the first and the last that one output and its phase's meet."""
    span = dilation * (taps - 1)
    return -(-pad // stride) - -(-(pad - span) // stride) if backward else span


class Depthwise(Algorithm):
    """Parameters of the C kernels: `slab_kib`, the part of an image that is copied at a time (images in channels_last
    order that are read where they lie have none); `run`, outputs of a row that stay in registers; in a weight gradient
    `summed`, products that a register adds up.
    """

    name = "depthwise"
    revision = 3
    # Whether zero padding meets an infinite *weight* differs between kernels, native's as well; a NaN or infinity in
    # an image stays within the window of its pixel.
    spreads_nonfinite = False

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if not _library.available():
            return _BY_NATIVE.why_not(p)
        if not p.is_depthwise:
            return "not a depthwise convolution (one input channel per group)"
        if p.device != "cpu":
            return "the C kernels run on CPUs"
        if p.dtype == "float64":
            return "the C kernels sum in float32, not in float64"
        return None

    def same_as_native(self, problem: ConvProblem) -> str | None:
        return None if _library.available() else _BY_NATIVE.same_as_native(problem)

    def error_grade(self, problem: ConvProblem) -> Grade:
        """Measured in float32 on normal data: at most 5e-7 forward and backward data, 7e-7 for weight gradients."""
        return Grade.DIRECT if _library.available() else _BY_NATIVE.error_grade(problem)

    def batch_invariant(self, problem: ConvProblem) -> bool:
        return _library.available()  # each result is summed in an order that its place in the image decides

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        if not _library.available():
            return _BY_NATIVE.workspace_bytes(problem)
        p, lanes = problem, 16 if _library.isa() == _library.ISAS["avx512"] else 8
        backward, gradient = p.direction == Direction.BACKWARD_DATA, p.direction == Direction.BACKWARD_WEIGHT
        # Of the result, of the image that is copied, and how far apart outputs lie in each.
        height, width = (p.H, p.W) if backward else (p.P, p.Q)
        image_height, image_width = (p.P, p.Q) if backward else (p.H, p.W)
        phases, steps = (p.stride, (1, 1)) if backward else ((1, 1), p.stride)
        reach_h = _reach(backward, p.R, p.stride_h, p.pad_top, p.dil_h)
        reach_w = _reach(backward, p.S, p.stride_w, p.pad_left, p.dil_w)
        pitch, rows = (_over(width, phases[1]) - 1) * steps[1] + reach_w + 1, _over(height, phases[0])
        blocks = _over(p.C if backward else p.K, lanes)
        slab_floats = 256 * (params or _USUAL).get("slab_kib", _SLAB_KIB)
        fitting = (slab_floats // lanes // pitch - reach_h) // steps[0]
        band = min(rows, max(fitting, min(max(reach_h, _FEWEST_ROWS), _MOST_ROWS)))
        slab_rows = (band - 1) * steps[0] + reach_h + 1
        taps, result = p.R * p.S, band * phases[0] * width
        private = slab_rows * pitch + 2 * result + 2 * min(slab_rows, image_height) * image_width
        if gradient:
            private += 2 * taps + result
        shared = (2 + (0 if gradient else blocks * (p.K // p.C if backward else 1))) * taps
        threads = min(p.threads, blocks * (p.R if gradient else max(p.N, 1) * rows))
        copied = _library.copied_bytes(p)
        return copied + 4 * lanes * (threads * private + shared) + 8 * taps

    def space(self, problem: ConvProblem) -> Space | None:
        if not _library.available():
            return None
        if problem.direction == Direction.BACKWARD_WEIGHT:
            return _space(self, (_SLAB, _SUMMED))
        in_place = problem.direction == Direction.FORWARD and packed_floats(problem) is not None
        return _space(self, (_RUN,) if in_place else (_SLAB, _RUN))

    def _call(self, a: Tensor, b: Tensor, problem: ConvProblem, direction: Direction, params: Params) -> Tensor:
        tune = () if params is None else slots(self, problem.with_direction(direction), params, SLOTS)
        return _library.call("cs_depthwise", a, b, problem, tune=tune)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor | None:
        if not _library.available():
            return super().run_checked(a, b, problem, params, bias)
        return _library.call_checked("cs_depthwise", a, b, problem, bias=bias, tune=slots(self, problem, params, SLOTS))

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        if not _library.available():
            return _BY_NATIVE.forward(x, weight, problem)
        return self._call(x, weight, problem, Direction.FORWARD, params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        if not _library.available():
            return _BY_NATIVE.backward_data(grad_y, weight, problem)
        return self._call(grad_y, weight, problem, Direction.BACKWARD_DATA, params)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        if not _library.available():
            return _BY_NATIVE.backward_weight(x, grad_y, problem)
        return self._call(x, grad_y, problem, Direction.BACKWARD_WEIGHT, params)


@functools.cache
def _space(algorithm: Depthwise, parameters: tuple[Parameter, ...]) -> Space:
    usual = {parameter.name: _USUAL[parameter.name] for parameter in parameters}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(lambda v: algorithm.workspace_bytes(problem, v), usual, values)

    return Space(parameters, lambda _: usual, allowed)


# ---- frozen weights -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def packed_floats(problem: ConvProblem) -> int | None:
    """How many floats `pack` makes; None where no kernel takes a packed weight: it takes float32 in channels_last with
    one output channel per input channel, 3 or 5 taps in a row and strides 1 or 2."""
    p = problem.with_direction(Direction.FORWARD)
    if not p.is_depthwise or p.device != "cpu" or p.dtype != "float32" or p.layout != CHANNELS_LAST:
        return None
    if not _library.available():
        return None
    conv = _library._conv(p, CHANNELS_LAST, CONTIGUOUS, p.threads, _library.isa())
    size = _c_function("cs_depthwise_packed_bytes", 1, ctypes.c_int64)(ctypes.byref(conv))
    return None if size < 0 else int(size) // 4


def pack(weight: Tensor, problem: ConvProblem) -> Tensor:
    """The weight (C, 1, R, S) in the order in which `cs_depthwise_frozen` reads it: float32, one-dimensional.

    Raises:
        ValueError: where no kernel takes it.
    """
    floats = packed_floats(problem)
    if floats is None or weight.shape != problem.weight_shape or weight.dtype != torch.float32:
        raise ValueError(f"a weight {weight.dtype} {tuple(weight.shape)} for {problem}")
    packed = torch.empty(floats, dtype=torch.float32, device="cpu")
    conv = _library._conv(problem, CHANNELS_LAST, CONTIGUOUS, problem.threads, _library.isa())
    weight = weight.resolve_neg().contiguous()
    status = _c_function("cs_depthwise_pack", 3, ctypes.c_int32)(
        ctypes.byref(conv), weight.data_ptr(), packed.data_ptr()
    )
    assert status == _library.OK
    return packed


@functools.cache
def _c_function(name: str, pointers: int, result: Any) -> Any:
    loaded = _library.library()
    assert loaded is not None
    function = loaded[name]
    function.argtypes, function.restype = (ctypes.c_void_p,) * pointers, result
    return function


ALGORITHMS = (Depthwise(),)
