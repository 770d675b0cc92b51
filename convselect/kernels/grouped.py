"""Grouped convolution with few channels per group: C kernels vectorised over output channels (csrc/grouped.inc).

    forward          y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] * x[n, group(k) * C/G + c, p', q'],
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum with input and output exchanged, one phase of the stride at a time
    backward weight  grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, group(k) * C/G + c, p', q']

Libraries compute a group as a small matrix product, which leaves most of a vector empty if a group has 4 or 8
channels. Here neighbouring groups share a vector of output channels, and a permutation brings each group's input value
under its lanes. Source of the blocking: Georganas et al., "Anatomy of High-Performance Deep Learning Convolutions on
SIMD Architectures", SC 2018. 16-bit operands are widened as they are packed, summed in float32 and rounded once.

With a weight packed once (`pack`, for frozen layers; csrc/grouped_frozen.inc) a register tile takes all output channels
of a group of 8 or more, straight from the image.
"""

from __future__ import annotations

import ctypes
import functools

from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm, why_not_in_c
from convselect.kernels._contract import Grade
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels._tuning import within

MOST_CHANNELS = 64
"""Most input or output channels per group, as in the C source."""

_BAND, _SLAB = Parameter("band", (32, 64, 128, 256, 512)), Parameter("slab_kib", (4, 8, 16, 32, 64))
_SINGLE = Parameter("single", (0, 1), STRUCTURE)


class Grouped(CAlgorithm):
    """Parameters. Forward and data gradient: `single`, whether the taps of a row are taken one at a time (1), although
    neighbours could share what they read; `band`, results that are stored at a time; `tile`, the most columns of a
    register tile. Weight gradient: `slab_kib`, KiB of gradients that are held at a time.
    """

    name = "grouped"
    kernel = "cs_grouped"
    slots = ("band", "tile", "single", "slab_kib")

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.groups == 1:
            return "The grouped kernel needs a grouped convolution; this one has one group."
        if p.is_depthwise:
            return "The grouped kernel needs several input channels per group; this convolution is depthwise."
        most = max(p.C, p.K) // p.groups
        if most > MOST_CHANNELS:
            return f"The grouped kernel needs at most {MOST_CHANNELS} channels per group; this convolution has {most}."
        return why_not_in_c("The grouped kernel", p)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def space(self, problem: ConvProblem) -> Space:
        return _space(self, problem.direction == Direction.BACKWARD_WEIGHT, _library.isa())


def _shares_taps(p: ConvProblem) -> bool:
    """Whether there are kernels that take several taps of a row at a time."""
    forward = p.direction == Direction.FORWARD
    return p.S in (2, 3, 5) and p.dil_w == 1 and p.stride_w <= (2 if forward else 1)


@functools.cache
def _space(algorithm: Grouped, gradient: bool, isa: int) -> Space:
    tiles = (4, 7, 8, 14) if isa == _library.ISAS["avx512"] else (4, 7, 8)
    parameters: tuple[Parameter, ...] = (_SINGLE, _BAND, Parameter("tile", tiles))
    usual: Values = {"single": 0, "band": 128, "tile": tiles[-1]}
    if gradient:
        parameters, usual = (_SLAB,), {"slab_kib": 16}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(algorithm, problem, usual, values)

    rules = (
        Rule(
            "neighbouring taps together or apart",
            lambda p, _: _shares_taps(p),
            lambda *_: [{"single": 0}, {"single": 1}],
        ),
        Rule("nothing to share", lambda p, _: not _shares_taps(p), lambda *_: [{"single": 0}]),
    )
    return Space(parameters, lambda _: usual, allowed, () if gradient else rules)


# ---- frozen weights -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def packed_floats(problem: ConvProblem) -> int | None:
    """Number of floats that `pack` returns; None if no kernel takes a packed weight, or would gain by it. One does for
    float32 problems in a dense layout with several input and more than 8 output channels per group."""
    p = problem.with_direction(Direction.FORWARD)
    if p.is_depthwise or p.device != "cpu" or p.dtype != "float32" or p.layout not in _library.LAYOUTS:
        return None
    if not _library.available():
        return None
    # For smaller groups `cs_grouped` is faster, in whose tiles groups share a vector, or taps of one row a pixel. With
    # 8 lanes and a stride there is nothing to share, and packing pays.
    alone = _library.isa() == _library.ISAS["avx2"] and p.layout == CHANNELS_LAST and p.stride_w > 1
    if p.K // p.groups <= 8 and not alone:
        return None
    conv = _library._conv(p, p.layout, CONTIGUOUS, p.threads, _library.isa())
    return _library.packed_floats("cs_grouped", ctypes.byref(conv))


def pack(weight: Tensor, problem: ConvProblem) -> Tensor:
    """The weight (K, C / groups, R, S) in the order in which `cs_grouped_frozen` reads it: float32, one-dimensional.

    Raises:
        ValueError: if no kernel takes a packed weight, or the weight is not the problem's.
    """
    return _library.packed("cs_grouped", packed_floats(problem), weight, problem, problem.layout)


ALGORITHMS = (Grouped(),)
