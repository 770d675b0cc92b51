"""`features(problem)`: a model's input vector, the same code for training and at run time.

Log2 of every size, and of the work, traffic and matrix shape that follow from them: to first order time is a product
of powers of sizes, and networks represent sums best. Flags say whether an algorithm's fast path is available.
Source of the set: the inputs of the Reformer (ICLR 2025 submission 13039) and of MIOpen's TunaNet, in log2
instead of raw sizes, plus derived quantities.

The set is frozen: an artifact trained on one version refuses another (`FEATURES_VERSION`).
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping
from math import log2

import numpy as np
import numpy.typing as npt

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, kernel_class

FEATURES_VERSION = 3
"""Raise it with every change to `FEATURE_NAMES` or to the meaning of a feature, and retrain the artifacts."""

FEATURE_NAMES: tuple[str, ...] = (
    # log2 of sizes
    *("N", "C", "H", "W", "K", "R", "S", "P", "Q", "C/G", "K/G", "G"),
    # log2 of steps; log2(1 + both sides' padding)
    *("stride_h", "stride_w", "dil_h", "dil_w", "pad_h", "pad_w"),
    # log2 of the work, the compulsory traffic, their ratio, and the matrix product per group
    *("flops", "bytes", "intensity", "gemm_m", "gemm_n", "gemm_k"),
    # the exponent of the largest power of two that divides, up to 7: vectors, alignment, tiles without a remainder
    *(f"twos_{size}" for size in ("C", "K", "C/G", "K/G", "N", "W", "Q", "HW", "PQ", "NPQ")),
    # log2 of computed over useful results when the matrix product is cut into tiles of this size
    *(f"waste_gemm_{side}_{tile}" for tile in (16, 32, 64, 128) for side in "mnk"),
    *("waste_gemm_m_256", "waste_gemm_n_256"),
    # log2 of computed over useful results when the result's image is cut into m x m tiles
    *("waste_2", "waste_3", "waste_4", "waste_5", "waste_6", "waste_7"),
    *("forward", "backward_data", "backward_weight"),
    *("float32", "float64", "float16", "bfloat16"),
    *("contiguous", "channels_last", "weight_channels_last"),
    *("uneven_padding", "is_depthwise", "is_pointwise", "is_patch", "is_3x3_stride1"),
    *("threads", "deterministic", "tf32", "frozen"),
)

VOLUME_FEATURE_NAMES: tuple[str, ...] = (
    *FEATURE_NAMES,
    # log2 of what the depth adds: sizes, step, dilation, 1 + both sides' padding; of the weight's taps per channel
    *("D", "T", "O", "stride_d", "dil_d", "pad_d", "taps"),
    # log2 of computed over useful results when rows and columns of each phase of a dilated kernel are cut into tiles
    *("waste_phases_2", "waste_phases_4", "waste_phases_6"),
    # log2 of computed over useful channels in vectors of 16 in and out, and of results in a row
    *("waste_C/G_16", "waste_K/G_16", "waste_Q_16"),
    *("is_thin", "is_dilated", "is_strided", "is_3x3x3"),
)
"""The features of an image, of which those of work, traffic and the matrix product count the depth, and more."""

THIN_CHANNELS = 4
"""Per group; with fewer inputs or outputs most of a vector is empty."""

_NO_STEPS = [1, 0, 0, 1]
_FORWARD, _BACKWARD_DATA = Direction.FORWARD, Direction.BACKWARD_DATA


def features(problem: ConvProblem) -> npt.NDArray[np.float32]:
    """The feature vector of `problem`, shape (len(FEATURE_NAMES),), float32, fresh and writable.

    Raises:
        ValueError: if a size is not positive (an empty batch, a kernel larger than the image), or it is a volume's.
    """
    (direction, N, C, H, W, K, R, S, stride_h, stride_w, pad_top, pad_bottom, pad_left, pad_right,
     dil_h, dil_w, G, dtype, layout, weight_layout, _, threads, deterministic, tf32, frozen,
     D, T, *depth_steps) = problem  # fmt: skip
    P, Q = problem.P, problem.Q
    if D != 1 or T != 1 or depth_steps != _NO_STEPS:
        raise ValueError(f"these are features of images; {problem} has a depth")
    if min(N, C, H, W, K, P, Q) < 1:
        raise ValueError(f"nothing to predict: a size is not positive in {problem}")
    pad_h, pad_w = pad_top + pad_bottom, pad_left + pad_right
    forward, backward_data = direction == _FORWARD, direction == _BACKWARD_DATA

    # Products of sizes are sums of logarithms: nine logarithms serve the dozen quantities below.
    log_N, log_C, log_K, log_G, log_R, log_S = log2(N), log2(C), log2(K), log2(G), log2(R), log2(S)
    log_P, log_Q = log2(P), log2(Q)
    log_c, log_k = log_C - log_G, log_K - log_G  # channels per group
    taps, spatial = log_c + log_R + log_S, log_N + log_P + log_Q
    flops = 1.0 + log_K + spatial + taps
    traffic = log2(problem.bytes)
    # The sides of the matrix product, as `ConvProblem.gemm` (which costs more): their logarithms, and the last indices.
    npq, depth_c, depth_k = N * P * Q, C // G, K // G
    filter_size = depth_c * R * S
    if forward:
        gemm_m, gemm_n, gemm_k = log_k, spatial, taps
        m, n, k = depth_k - 1, npq - 1, filter_size - 1
    elif backward_data:
        gemm_m, gemm_n, gemm_k = taps, spatial, log_k
        m, n, k = filter_size - 1, npq - 1, depth_k - 1
    else:
        gemm_m, gemm_n, gemm_k = log_k, taps, spatial
        m, n, k = depth_k - 1, filter_size - 1, npq - 1

    # The image that a Winograd algorithm tiles: its result, or, for the weight gradient, grad_y.
    rows, columns = (H, W) if backward_data else (P, Q)
    area = rows * columns
    # With the bit 2^7 set the lowest set bit is at most that.
    C_, K_, c_, k_, N_, W_, Q_ = C | 128, K | 128, depth_c | 128, depth_k | 128, N | 128, W | 128, Q | 128
    hw_, pq_, npq_ = H * W | 128, P * Q | 128, npq | 128
    values = (
        log_N, log_C, log2(H), log2(W), log_K, log_R, log_S, log_P, log_Q, log_c, log_k, log_G,
        log2(stride_h), log2(stride_w), log2(dil_h), log2(dil_w), log2(1 + pad_h), log2(1 + pad_w),
        flops, traffic, flops - traffic, gemm_m, gemm_n, gemm_k,
        (C_ & -C_).bit_length() - 1, (K_ & -K_).bit_length() - 1, (c_ & -c_).bit_length() - 1,
        (k_ & -k_).bit_length() - 1, (N_ & -N_).bit_length() - 1, (W_ & -W_).bit_length() - 1,
        (Q_ & -Q_).bit_length() - 1, (hw_ & -hw_).bit_length() - 1, (pq_ & -pq_).bit_length() - 1,
        (npq_ & -npq_).bit_length() - 1,
        log2((m >> 4) + 1) + 4 - gemm_m, log2((n >> 4) + 1) + 4 - gemm_n, log2((k >> 4) + 1) + 4 - gemm_k,
        log2((m >> 5) + 1) + 5 - gemm_m, log2((n >> 5) + 1) + 5 - gemm_n, log2((k >> 5) + 1) + 5 - gemm_k,
        log2((m >> 6) + 1) + 6 - gemm_m, log2((n >> 6) + 1) + 6 - gemm_n, log2((k >> 6) + 1) + 6 - gemm_k,
        log2((m >> 7) + 1) + 7 - gemm_m, log2((n >> 7) + 1) + 7 - gemm_n, log2((k >> 7) + 1) + 7 - gemm_k,
        log2((m >> 8) + 1) + 8 - gemm_m, log2((n >> 8) + 1) + 8 - gemm_n,
        log2((-rows // 2) * (-columns // 2) * 4 / area),
        log2((-rows // 3) * (-columns // 3) * 9 / area),
        log2((-rows // 4) * (-columns // 4) * 16 / area),
        log2((-rows // 5) * (-columns // 5) * 25 / area),
        log2((-rows // 6) * (-columns // 6) * 36 / area),
        log2((-rows // 7) * (-columns // 7) * 49 / area),
        forward, backward_data, not (forward or backward_data),
        dtype == "float32", dtype == "float64", dtype == "float16", dtype == "bfloat16",
        layout == CONTIGUOUS, layout == CHANNELS_LAST, weight_layout == CHANNELS_LAST,
        not problem.symmetric_padding, problem.is_depthwise, problem.is_pointwise, problem.is_patch,
        R == S == 3 and stride_h == stride_w == dil_h == dil_w == 1,
        log2(threads), deterministic, tf32, frozen,
    )  # fmt: skip
    # `array` converts a tuple of numbers several times faster than numpy does.
    return np.frombuffer(array("f", values), dtype=np.float32)


_OF_DEPTH: dict[str, object] = {"D": 1, "T": 1, "stride_d": 1, "pad_front": 0, "pad_back": 0, "dil_d": 1}


def volume_features(problem: ConvProblem) -> npt.NDArray[np.float32]:
    """The feature vector of a volume, shape (len(VOLUME_FEATURE_NAMES),), float32, fresh and writable.

    Raises:
        ValueError: if a size is not positive.
    """
    p = problem
    slices, T = p.O, p.T
    if min(p.D, T, slices) < 1:
        raise ValueError(f"nothing to predict: a size is not positive in {problem}")
    x = np.empty(len(VOLUME_FEATURE_NAMES), np.float32)
    x[: len(FEATURE_NAMES)] = features(p._replace(**_OF_DEPTH))  # type: ignore[arg-type]
    log_T, log_O = log2(T), log2(slices)
    flops, traffic = float(x[_AT["flops"]]) + log_T + log_O, log2(p.bytes)
    x[_AT["flops"]], x[_AT["bytes"]], x[_AT["intensity"]] = flops, traffic, flops - traffic
    taps, spatial = ("gemm_m", "gemm_n") if p.direction == _BACKWARD_DATA else ("gemm_k", "gemm_n")
    if p.direction == Direction.BACKWARD_WEIGHT:
        taps, spatial = "gemm_n", "gemm_k"
    x[_AT[taps]] += log_T
    x[_AT[spatial]] += log_O
    x[_AT["is_pointwise"]], x[_AT["is_patch"]] = p.is_pointwise, p.is_patch
    rows, columns = (p.H, p.W) if p.direction == _BACKWARD_DATA else (p.P, p.Q)
    area = rows * columns
    tiles = [_in_tiles(rows, m, p.dil_h) * _in_tiles(columns, m, p.dil_w) / area for m in (2, 4, 6)]
    c, k = p.C // p.groups, p.K // p.groups
    dilated = (p.dil_d > 1 and T > 1) or (p.dil_h > 1 and p.R > 1) or (p.dil_w > 1 and p.S > 1)
    x[len(FEATURE_NAMES) :] = (
        log2(p.D), log_T, log_O, log2(p.stride_d), log2(p.dil_d), log2(1 + p.pad_front + p.pad_back),
        log2(T * p.R * p.S),
        *map(log2, tiles),
        log2(-(-c // 16) * 16 / c), log2(-(-k // 16) * 16 / k), log2(-(-columns // 16) * 16 / columns),
        min(c, k) <= THIN_CHANNELS, dilated, max(p.stride_d, p.stride_h, p.stride_w) > 1, T == p.R == p.S == 3,
    )  # fmt: skip
    return x


_AT = {name: i for i, name in enumerate(FEATURE_NAMES)}


def _in_tiles(size: int, m: int, dilation: int) -> int:
    """Results of whole tiles of m on the phases of a dilated kernel, of which there are `size`."""
    return -(-size // (m * dilation)) * m * dilation


def features_of(problem: ConvProblem) -> npt.NDArray[np.float32]:
    """The vector of an image's or of a volume's features."""
    return volume_features(problem) if problem.is_volume else features(problem)


def names_of(problem: ConvProblem) -> tuple[str, ...]:
    """The names of `features_of`."""
    return VOLUME_FEATURE_NAMES if problem.is_volume else FEATURE_NAMES


def kinds(problem: ConvProblem) -> tuple[str, ...]:
    """The kinds of problems, such as "forward dilated", that not every algorithm takes: a text for each that this
    problem belongs to (dilated, strided, thin, one-row), or "forward plain". What was measured of an algorithm on one
    kind says nothing about others (`inference.has_times`); artifacts name them, so they are never renamed."""
    p = problem
    dilated = (p.dil_h > 1 and p.R > 1) or (p.dil_w > 1 and p.S > 1) or (p.dil_d > 1 and p.T > 1)
    strided = p.stride_h > 1 or p.stride_w > 1 or p.stride_d > 1
    thin = min(p.C, p.K) < THIN_CHANNELS * p.groups and not p.is_depthwise
    return _kinds(p.direction, dilated, strided, thin, (p.R == 1) != (p.S == 1))


@functools.cache
def _kinds(direction: Direction, *are: bool) -> tuple[str, ...]:
    found = [kind for kind, is_one in zip(("dilated", "strided", "thin", "one-row"), are, strict=True) if is_one]
    return tuple(f"{direction} {kind}" for kind in found or ["plain"])


ELSEWHERE = "elsewhere"


def margin_kind(problem: ConvProblem) -> str:
    """The kind of problems, such as "forward contiguous 1x1", under which an artifact has margins (`model/margins.py`).
    `ELSEWHERE`: nothing like it was measured in networks, such as other types than float32, or several threads.
    Artifacts name kinds, so they are never renamed."""
    if problem.dtype != "float32" or problem.threads != 1:
        return ELSEWHERE
    return f"{problem.direction} {problem.layout} {kernel_class(problem)}"


def margins_for(problem: ConvProblem, margins: Mapping[str, Mapping[str, float]]) -> Mapping[str, float] | None:
    """Of margins by kind those of a problem, by algorithm; None if there are none."""
    return margins.get(margin_kind(problem)) or margins.get(ELSEWHERE)
