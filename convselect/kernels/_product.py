"""1x1 convolutions and linear layers on weights that are packed beforehand, in C. NHWC, float32.

    y[m, k] = activation(bias[k] + sum over c of x[m, c] w[k, c] + residual[m, k]),  m an output pixel

Frozen layers alone call it. Kernels: "product", `csrc/product.inc`, computes what `direct` computes, to the same bits,
and is subject to the same budgets. "strassen", `csrc/strassen.inc`, does so with seven products in place of eight: no
direct sum, within the same bound of relative L2 errors.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels import _library


@functools.lru_cache(maxsize=4096)
def _frozen(kernel: str, problem: ConvProblem, threads: int, isa: int) -> tuple[Any, int | None]:
    """The struct for the kernel, and the number of floats in a packed weight, None if the kernel does not apply."""
    p = problem.with_direction(Direction.FORWARD)
    if p.device != "cpu" or p.dtype != "float32" or p.layout != CHANNELS_LAST or not _library.available():
        return None, None
    conv = ctypes.byref(_library._conv(p, CHANNELS_LAST, CONTIGUOUS, threads, isa))
    return conv, _library.packed_floats(f"cs_{kernel}", conv)


def takes(problem: ConvProblem, kernel: str = "product") -> bool:
    """Whether the kernel computes this problem: 1x1, one group, no padding, any stride; float32 in channels_last.
    "strassen" needs an even number of input channels and at least 64 output channels."""
    return _frozen(kernel, problem, problem.threads, _library.isa() if _library.available() else 0)[1] is not None


def pack(weight: Tensor, problem: ConvProblem, isa_level: int | None = None, kernel: str = "product") -> Tensor:
    """The weight (K, C, 1, 1) in the order that `forward_packed` reads; it fits every problem with this weight's shape
    on this instruction set.

    Returns:
        float32, one-dimensional; up to 15 output channels longer than the weight, or of 7/4 of its size.

    Raises:
        ValueError: if the kernel does not apply, or the weight's shape, dtype or device is not the problem's.
    """
    level = _library.isa() if isa_level is None else isa_level
    _, floats = _frozen(kernel, problem, torch.get_num_threads(), level)
    return _library.packed(f"cs_{kernel}", floats, weight, problem, CHANNELS_LAST, level)


def forward_packed(
    x: Tensor,
    packed: Tensor,
    problem: ConvProblem,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    isa_level: int | None = None,
    slope: float = 0.01,
    kernel: str = "product",
) -> Tensor:
    """activation(y + bias + residual) in channels_last, with what `pack` made for the same kernel and `isa_level`.

    Args:
        x: (N, C, H, W), any strides.
        bias: float32 (K,).
        residual: shaped like y, (N, K, P, Q).
        activation: a key of `_library.ACTIVATIONS`; `slope` is leaky_relu's.

    Raises:
        FloatingPointError: if x holds an infinity or a NaN and "strassen" might spread it.
        MemoryError: if scratch memory is not available.
        ValueError: if the kernel does not apply, or a tensor does not have the problem's shape or dtype.
    """
    p, last = problem, torch.channels_last
    conv, floats = _frozen(kernel, p, torch.get_num_threads(), _library.isa() if isa_level is None else isa_level)
    shapes = ((packed, (floats,)), (x, p.x_shape), (bias, (p.K,)), (residual, p.y_shape))
    for given, shape in shapes:
        if given is not None and (given.shape != shape or given.dtype != torch.float32 or not given.is_cpu):
            raise ValueError(f"{given.dtype} {tuple(given.shape)} in place of float32 {shape} for {p}")
    x = x.resolve_neg().contiguous(memory_format=last)
    bias = None if bias is None else bias.resolve_neg().contiguous()
    residual = None if residual is None else residual.resolve_neg().contiguous(memory_format=last)
    y = torch.empty(p.y_shape, dtype=torch.float32, device="cpu", memory_format=last)
    pointers = (None if t is None else t.data_ptr() for t in (bias, residual))
    epilogue = ctypes.byref(_library.Epilogue(*pointers, _library.ACTIVATIONS[activation], slope))
    frozen = _library._function(f"cs_{kernel}_frozen", 0)
    status = frozen(conv, x.data_ptr(), packed.data_ptr(), y.data_ptr(), epilogue)
    if status == _library.NONFINITE:
        raise FloatingPointError(f"{kernel}: x is not finite")
    if status != _library.OK:
        raise MemoryError(f"{kernel}: no scratch memory for {p}")
    return y
