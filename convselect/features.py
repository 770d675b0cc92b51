"""`features(problem)`: the numbers a model sees. The one source for training and for run time.

Log2 of every size, and of the work, traffic and matrix shape that follow from them, because time is a product of
powers of sizes to first order and a network sees sums best; flags for what makes an algorithm's fast path available.
Source of the set: the inputs of the Reformer (ICLR 2025 submission 13039) and of MIOpen's TunaNet, in log2
instead of raw sizes, plus derived quantities.

The set is frozen: an artifact trained on one version refuses another (`FEATURES_VERSION`).
"""

from __future__ import annotations

from array import array
from math import log2

import numpy as np
import numpy.typing as npt

from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction

FEATURES_VERSION = 2
"""Goes up with every change to `FEATURE_NAMES` or to what a feature means; artifacts are then retrained."""

FEATURE_NAMES: tuple[str, ...] = (
    # log2 of sizes
    *("N", "C", "H", "W", "K", "R", "S", "P", "Q", "C/G", "K/G", "G"),
    # log2 of steps; log2(1 + both sides' padding)
    *("stride_h", "stride_w", "dil_h", "dil_w", "pad_h", "pad_w"),
    # log2 of the work, the compulsory traffic, their ratio, and the matrix product per group
    *("flops", "bytes", "intensity", "gemm_m", "gemm_n", "gemm_k"),
    # 1 where divisible
    *("C%8", "C%16", "K%8", "K%16", "Q%8", "Q%16"),
    # log2 of computed over useful results when the result's image is cut into m x m tiles
    *("waste_2", "waste_3", "waste_4", "waste_5", "waste_6", "waste_7"),
    *("forward", "backward_data", "backward_weight"),
    *("float32", "float64", "float16", "bfloat16"),
    *("contiguous", "channels_last", "weight_channels_last"),
    *("uneven_padding", "is_depthwise", "is_pointwise", "is_patch", "is_3x3_stride1"),
    *("threads", "deterministic", "tf32", "frozen"),
)

_FORWARD, _BACKWARD_DATA = Direction.FORWARD, Direction.BACKWARD_DATA


def features(problem: ConvProblem) -> npt.NDArray[np.float32]:
    """The feature vector of `problem`, shape (len(FEATURE_NAMES),), float32, fresh and writable.

    Raises:
        ValueError: where a size is not positive (an empty batch, a kernel larger than the image): nothing to predict.
    """
    (direction, N, C, H, W, K, R, S, stride_h, stride_w, pad_top, pad_bottom, pad_left, pad_right,
     dil_h, dil_w, G, dtype, layout, weight_layout, _, threads, deterministic, tf32, frozen) = problem  # fmt: skip
    P, Q = problem.P, problem.Q
    if min(N, C, H, W, K, P, Q) < 1:
        raise ValueError(f"nothing to predict: a size is not positive in {problem}")
    pad_h, pad_w = pad_top + pad_bottom, pad_left + pad_right
    forward, backward_data = direction == _FORWARD, direction == _BACKWARD_DATA
    unit_stride = stride_h == stride_w == 1

    # Products of sizes are sums of logarithms: nine logarithms serve the dozen quantities below.
    log_N, log_C, log_K, log_G, log_R, log_S = log2(N), log2(C), log2(K), log2(G), log2(R), log2(S)
    log_P, log_Q = log2(P), log2(Q)
    log_c, log_k = log_C - log_G, log_K - log_G  # channels per group
    taps, spatial = log_c + log_R + log_S, log_N + log_P + log_Q
    flops = 1.0 + log_K + spatial + taps
    traffic = log2(problem.bytes)
    if forward:
        gemm_m, gemm_n, gemm_k = log_k, spatial, taps
    elif backward_data:
        gemm_m, gemm_n, gemm_k = taps, spatial, log_k
    else:
        gemm_m, gemm_n, gemm_k = log_k, taps, spatial

    # What a Winograd algorithm tiles: the image it computes, or, for the weight gradient, grad_y.
    rows, columns = (H, W) if backward_data else (P, Q)
    area = rows * columns
    values = (
        log_N, log_C, log2(H), log2(W), log_K, log_R, log_S, log_P, log_Q, log_c, log_k, log_G,
        log2(stride_h), log2(stride_w), log2(dil_h), log2(dil_w), log2(1 + pad_h), log2(1 + pad_w),
        flops, traffic, flops - traffic, gemm_m, gemm_n, gemm_k,
        C % 8 == 0, C % 16 == 0, K % 8 == 0, K % 16 == 0, Q % 8 == 0, Q % 16 == 0,
        log2((-rows // 2) * (-columns // 2) * 4 / area),
        log2((-rows // 3) * (-columns // 3) * 9 / area),
        log2((-rows // 4) * (-columns // 4) * 16 / area),
        log2((-rows // 5) * (-columns // 5) * 25 / area),
        log2((-rows // 6) * (-columns // 6) * 36 / area),
        log2((-rows // 7) * (-columns // 7) * 49 / area),
        forward, backward_data, not (forward or backward_data),
        dtype == "float32", dtype == "float64", dtype == "float16", dtype == "bfloat16",
        layout == CONTIGUOUS, layout == CHANNELS_LAST, weight_layout == CHANNELS_LAST,
        pad_top != pad_bottom or pad_left != pad_right,
        G == C and G > 1,
        R == S == 1 and unit_stride and not (pad_h or pad_w),
        stride_h == R and stride_w == S and dil_h == dil_w == 1 and not (pad_h or pad_w),
        R == S == 3 and unit_stride and dil_h == dil_w == 1,
        log2(threads), deterministic, tf32, frozen,
    )  # fmt: skip
    # `array` converts a tuple of numbers several times faster than numpy does.
    return np.frombuffer(array("f", values), dtype=np.float32)
