"""The pool of all algorithms. To add one, write its file and add it to `ALL`; everything else finds it there."""

from __future__ import annotations

from convselect.kernels import (
    depthwise,
    direct,
    fft,
    grouped,
    im2col_gemm,
    native,
    native_cuda,
    native_layout,
    patches,
    reference,
    thin,
    triton,
    upcast,
    winograd,
)
from convselect.kernels._contract import Algorithm

ALL: tuple[Algorithm, ...] = (
    *native.ALGORITHMS,
    *native_layout.ALGORITHMS,
    *native_cuda.ALGORITHMS,
    *upcast.ALGORITHMS,
    *im2col_gemm.ALGORITHMS,
    *winograd.ALGORITHMS,
    *fft.ALGORITHMS,
    *depthwise.ALGORITHMS,
    *triton.depthwise.ALGORITHMS,
    *grouped.ALGORITHMS,
    *triton.grouped.ALGORITHMS,
    *direct.ALGORITHMS,
    *patches.ALGORITHMS,
    *thin.ALGORITHMS,
    *triton.large_depthwise.ALGORITHMS,
    *triton.direct.ALGORITHMS,
    *reference.ALGORITHMS,
)
BY_NAME: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in ALL}

__all__ = ["ALL", "BY_NAME"]
