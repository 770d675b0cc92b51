"""A global average pool of NHWC images in one small loop.

PyTorch's takes ten times as long between other layers, with nothing of it in the caches, as measured alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from convselect.kernels import _library


def mean_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A forward for an `nn.AdaptiveAvgPool2d` to one pixel; None for any other module.

    It computes (N, C, H, W) float32 in channels_last order itself, and calls the module's forward for anything else.
    """
    loaded = _library.library()
    if loaded is None or type(module) is not nn.AdaptiveAvgPool2d or module.output_size not in (1, (1, 1)):
        return None
    function, forward = loaded["cs_mean"], module.forward
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (pointer, size, size, size, pointer), None

    def mean(x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.dim() != 4 or not x.is_cpu:
            return forward(x)
        N, C, H, W = x.shape
        if x.stride() != (H * W * C, 1, W * C, C) or x.numel() == 0:
            return forward(x)
        y = torch.empty_strided((N, C, 1, 1), (C, 1, C, C), dtype=torch.float32, device="cpu")
        function(x.data_ptr(), N, H * W, C, y.data_ptr())
        return y

    return mean
