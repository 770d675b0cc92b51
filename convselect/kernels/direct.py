"""Direct convolution in C, as an implicit matrix product on packed weights: `csrc/direct.inc`.

    y[n, k, p, q] = sum over r, s, c of x[n, c, p stride_h + r dil_h - pad_top, q stride_w + s dil_w - pad_left]
                                        w[k, c, r, s]

A register tile of output pixels times output channels takes the whole sum. Of kernels of more than one tap, the inputs
of some rows at a time are copied to a slab in channels_last order with the padding's zeros, in which what a pixel meets
at a tap is a run at a fixed distance from it; x and y may then have different layouts. 1x1 convolutions read their
inputs in place, in NHWC through a table of pointers (Dukhan 2019, "The indirect convolution algorithm", arXiv
1907.02129). The data gradient is the same convolution with channels exchanged, in stride_h * stride_w classes of taps;
the weight gradient is the matrix product over pixels. Sums are kept in float32 for 16-bit types and rounded once.

Volumes are `csrc/direct_volume.inc`: vectors along the rows of the image, which suits few channels (stems), any stride
and dilation. With many channels it is slower than native: a register tile is 4 output channels by the vectors of one
row, of which 32 columns have 2, so that loads and broadcasts are as many as multiplications; and of many channels only
a band of one row fits the cache, so that each input row is copied R times.

For frozen weights, `pack` reorders a weight once and `forward_packed` uses it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels import _library
from convselect.kernels._c_algorithm import CAlgorithm, why_not_in_c, why_not_in_steps
from convselect.kernels._common import memory_format
from convselect.kernels._contract import Grade
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels._tuning import within

FEW_CHANNELS = 16
"""Fewest input or output channels per group: with fewer, most of a register tile would be empty."""


def _layout(problem: ConvProblem) -> str:
    return CHANNELS_LAST if problem.layout == CHANNELS_LAST else CONTIGUOUS


# ---- frozen weights -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _frozen(problem: ConvProblem, threads: int, isa: int, y_layout: str | None = None) -> tuple[Any, int]:
    """The struct for the kernel, with y in the problem's layout or in `y_layout`, and the number of floats in a packed
    weight."""
    conv = _library._conv(problem.with_direction(Direction.FORWARD), _layout(problem), CONTIGUOUS, threads, isa)
    if y_layout is not None:
        conv.y_layout = _library.LAYOUTS[y_layout]
    pointer = ctypes.byref(conv)
    return pointer, _library._function("cs_direct_packed_bytes", 0, 0, ctypes.c_int64)(pointer) // 4


def pack(weight: Tensor, problem: ConvProblem, isa_level: int | None = None) -> Tensor:
    """The weight (K, C / groups, R, S) in the order that `forward_packed` reads.

    It fits every problem with this weight's shape, `problem`'s groups and dtype, and for 1x1 its layout, on this
    instruction set.

    Returns:
        float32, one-dimensional; up to 15 output channels per group longer than the weight (not for 1x1 in contiguous).

    Raises:
        MemoryError: if scratch memory is not available.
        ValueError: if the weight's shape, dtype or device is not the problem's.
    """
    if weight.shape != problem.weight_shape or weight.dtype != problem.torch_dtype or not weight.is_cpu:
        raise ValueError(f"a weight {weight.dtype} {tuple(weight.shape)} for {problem}")
    conv, floats = _frozen(problem, torch.get_num_threads(), _library.isa() if isa_level is None else isa_level)
    packed = torch.empty(floats, dtype=torch.float32, device="cpu")
    weight = weight.resolve_neg().contiguous()
    if _library._function("cs_direct_pack", 0, 2)(conv, weight.data_ptr(), packed.data_ptr()) != _library.OK:
        raise MemoryError(f"direct: no scratch memory to pack the weight of {problem}")
    return packed


def reads_other_layouts(problem: ConvProblem) -> bool:
    """Whether the kernel for packed weights takes x in one layout and makes y in the other."""
    return problem.dtype == "float32" and problem.R * problem.S > 1


def forward_packed(
    x: Tensor,
    packed: Tensor,
    problem: ConvProblem,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    isa_level: int | None = None,
    slope: float = 0.01,
    y_layout: str | None = None,
) -> Tensor:
    """activation(y + bias + residual), with a weight from `pack` at the same `isa_level`.

    Args:
        x: (N, C, H, W), any strides.
        bias: float32 (K,).
        residual: shaped like y, (N, K, P, Q).
        activation: a key of `_library.ACTIVATIONS`.
        slope: of "leaky_relu" below 0.
        y_layout: layout of the result, "contiguous" or "channels_last"; None: the problem's, in which x is read.

    Raises:
        MemoryError: if scratch memory is not available.
        ValueError: if a tensor does not have the problem's shape, dtype or device; or if `y_layout` is another layout
            than the problem's and the kernel is 1x1.
    """
    p, form = problem, memory_format(problem)
    level = _library.isa() if isa_level is None else isa_level
    conv, floats = _frozen(p, torch.get_num_threads(), level, y_layout)
    if packed.shape != (floats,) or packed.dtype != torch.float32 or not packed.is_cpu:
        raise ValueError(f"a packed weight {packed.dtype} {tuple(packed.shape)} for {p}: {floats} floats are needed")
    if x.shape != p.x_shape or x.dtype != p.torch_dtype or not x.is_cpu:
        raise ValueError(f"x {x.dtype} {tuple(x.shape)} for {p}")
    x = x.resolve_neg().contiguous(memory_format=form)
    y_form = form if y_layout is None else _library._FORMATS[y_layout]
    if y_form != form and p.R * p.S == 1:
        raise ValueError(f"y in {y_layout} for {p}: a 1x1 kernel has the layout of x")
    y = torch.empty(p.y_shape, dtype=x.dtype, device="cpu", memory_format=y_form)
    epilogue = None
    if bias is not None or residual is not None or activation is not None:
        if bias is not None:
            if bias.shape != (p.K,) or bias.dtype != torch.float32 or not bias.is_cpu:
                raise ValueError(f"a bias {bias.dtype} {tuple(bias.shape)} for {p}")
            bias = bias.resolve_neg().contiguous()
        if residual is not None:
            if residual.shape != y.shape or residual.dtype != y.dtype or not residual.is_cpu:
                raise ValueError(f"a residual {residual.dtype} {tuple(residual.shape)} for {p}")
            residual = residual.resolve_neg().contiguous(memory_format=y_form)
        pointers = (None if t is None else t.data_ptr() for t in (bias, residual))
        epilogue = ctypes.byref(_library.Epilogue(*pointers, _library.ACTIVATIONS[activation], slope))
    frozen = _library._function("cs_direct_frozen", 0)
    if frozen(conv, x.data_ptr(), packed.data_ptr(), y.data_ptr(), epilogue) != _library.OK:
        raise MemoryError(f"direct: no scratch memory for {p}")
    return y


# ---- the algorithm --------------------------------------------------------------------------------------------------


TILE_ROWS = {"avx512": (7, 8, 10, 12, 14), "avx2": (3, 4, 5, 6), "base": (3, 4, 5, 6)}
_ORDER = Parameter("order", (0, 1, 2), STRUCTURE)


class Direct(CAlgorithm):
    """Parameters: `tile_rows`, the most rows of a register tile. Forward and data gradient: `order`, whether the outer
    loop goes over pixels (1) or output channels (2); `panels_kib`, KiB of weights (NHWC) or, for 1x1, gathered inputs
    (NCHW) that are held at a time; `rows_kib` (NHWC), KiB of inputs that a run of rows reads; `group` (NCHW, 1x1 only),
    panels of pixels gathered at a time. Weight gradient: `pixels`, pixels summed at a time. 0: the kernel decides.
    """

    name = "direct"
    dimensions = frozenset({2, 3})
    kernel = "cs_direct"
    volume_kernel = "cs_direct_volume"
    volumes_in_ncdhw = True
    slots = ("order", "tile_rows", "rows_kib", "panels_kib", "group", "pixels")

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.is_volume:
            if problem.is_depthwise:
                return "The direct kernel leaves depthwise convolutions of volumes to the depthwise one."
            what = "The direct kernel"
            return why_not_in_c(what, problem) or why_not_in_steps(what, problem)
        fewest = min(problem.C, problem.K) // problem.groups
        if problem.groups > 1 and fewest < FEW_CHANNELS:
            return f"The direct kernel needs {FEW_CHANNELS} channels per group; this convolution has {fewest}."
        return why_not_in_c("The direct kernel", problem)

    def space(self, problem: ConvProblem) -> Space | None:
        if problem.is_volume:
            return None
        gradient = problem.direction == Direction.BACKWARD_WEIGHT
        return _space(self, gradient, problem.layout == CHANNELS_LAST, _library.isa())

    def error_grade(self, problem: ConvProblem) -> Grade:
        """Measured in float32 on normal data: 2e-7 to 9e-7 up to 512 * 9 terms; weight gradients below 4e-7."""
        return Grade.DIRECT


@functools.cache
def _space(algorithm: Direct, gradient: bool, last: bool, isa: int) -> Space:
    rows = TILE_ROWS[next(name for name, level in _library.ISAS.items() if level == isa)]
    tile_rows, panels = Parameter("tile_rows", rows), Parameter("panels_kib", (64, 128, 256, 512, 1024))
    usual: Values
    if gradient:
        parameters: tuple[Parameter, ...] = (tile_rows, Parameter("pixels", (0, 64, 128, 256, 512, 1024)))
        usual = {"tile_rows": rows[-1], "pixels": 0}
    elif last:
        parameters = (_ORDER, tile_rows, Parameter("rows_kib", (48, 96, 192, 384, 768)), panels)
        usual = {"order": 0, "tile_rows": rows[-1], "rows_kib": 192, "panels_kib": 256}
    else:
        parameters = (_ORDER, tile_rows, panels, Parameter("group", (1, 2, 4, 8, 16)))
        usual = {"order": 0, "tile_rows": rows[-1], "panels_kib": 256, "group": 16}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(algorithm, problem, usual, values)

    rules = (
        Rule("over pixels or over channels", lambda p, _: not gradient, lambda *_: [{"order": o} for o in (0, 1, 2)]),
    )
    return Space(parameters, lambda _: usual, allowed, () if gradient else rules)


ALGORITHMS = (Direct(),)
