"""The pool. Adding an algorithm: write its file, add it here; everything else finds it through `ALL`."""

from __future__ import annotations

if __name__ != "convselect.kernels":  # the link at the top of the repository is for readers
    raise ImportError("import this package as convselect.kernels")

from convselect.kernels import (
    depthwise,
    depthwise_triton,
    direct,
    direct_triton,
    fft,
    grouped,
    grouped_triton,
    im2col_gemm,
    large_depthwise_triton,
    native,
    native_cuda,
    native_layout,
    reference,
    upcast,
    winograd,
)
from convselect.kernels._contract import Algorithm, Grade, NotApplicable

ALL: tuple[Algorithm, ...] = (
    *native.ALGORITHMS,
    *native_layout.ALGORITHMS,
    *native_cuda.ALGORITHMS,
    *upcast.ALGORITHMS,
    *im2col_gemm.ALGORITHMS,
    *winograd.ALGORITHMS,
    *fft.ALGORITHMS,
    *depthwise.ALGORITHMS,
    *depthwise_triton.ALGORITHMS,
    *grouped.ALGORITHMS,
    *grouped_triton.ALGORITHMS,
    *direct.ALGORITHMS,
    *large_depthwise_triton.ALGORITHMS,
    *direct_triton.ALGORITHMS,
    *reference.ALGORITHMS,
)
BY_NAME: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in ALL}

__all__ = ["ALL", "BY_NAME", "Algorithm", "Grade", "NotApplicable"]
