"""Triton kernels of grouped.py, whose docstring explains how the work is divided.

Offsets into NHWC activations are `((n * height + h) * width + w) * channels + c`. Channel counts are constants, so the
compiler knows their divisors, and loads 16 bytes at once if possible.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _axis(
    residue, FORWARD: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, DIL: tl.constexpr, PAD: tl.constexpr,
    STEP: tl.constexpr, COMMON: tl.constexpr, INVERSE: tl.constexpr
):  # fmt: skip
    """(first tap, number of taps, source coordinate of the first tap at unit 0) along one axis.

    Backward, outputs congruent to `residue` meet taps with `tap * DIL = residue + PAD` modulo STRIDE: every STEP-th.
    INVERSE is that of DIL / COMMON modulo STEP, COMMON the common divisor of DIL and STRIDE.
    """
    if FORWARD:
        first, taps, begin = 0, TAPS, -PAD
    elif STRIDE == 1:
        first, taps, begin = 0, TAPS, PAD
    else:
        shifted = residue + PAD
        first = tl.where(shifted % COMMON == 0, (shifted // COMMON * INVERSE) % STEP, TAPS)
        taps = (TAPS - first + STEP - 1) // STEP
        begin = (shifted - first * DIL) // STRIDE  # exact wherever there is a tap
    return first, taps, begin


@triton.jit
def gather(
    source, weight, out,
    FORWARD: tl.constexpr, SOURCE_LAST: tl.constexpr,
    PIXELS: tl.constexpr, UNITS_H: tl.constexpr, UNITS_W: tl.constexpr,
    SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_C: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_W: tl.constexpr,
    GROUPS: tl.constexpr, PACK: tl.constexpr, SOURCE_GROUP: tl.constexpr, OUT_GROUP: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    STEP_H: tl.constexpr, COMMON_H: tl.constexpr, INVERSE_H: tl.constexpr,
    STEP_W: tl.constexpr, COMMON_W: tl.constexpr, INVERSE_W: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Forward: source x, out y. Backward data: source grad_y, out grad_x, one phase of the stride per program.

    source is NHWC, out of any strides, weight (K, R, S, C/groups), or backward with SOURCE_LAST (C, R, S, K/groups).
    A unit is an output pixel; backward, one of a phase.
    """
    packed_source: tl.constexpr = PACK * SOURCE_GROUP
    packed_out: tl.constexpr = PACK * OUT_GROUP
    source_channels: tl.constexpr = GROUPS * SOURCE_GROUP
    tiles: tl.constexpr = (packed_out + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (packed_source + BLOCK_K - 1) // BLOCK_K
    packs: tl.constexpr = (GROUPS + PACK - 1) // PACK
    phases_h: tl.constexpr = 1 if FORWARD else STRIDE_H
    phases_w: tl.constexpr = 1 if FORWARD else STRIDE_W
    # Steps along the source for one unit and for one tap of the phase.
    unit_h: tl.constexpr = STRIDE_H if FORWARD else 1
    unit_w: tl.constexpr = STRIDE_W if FORWARD else 1
    move_h: tl.constexpr = DIL_H if FORWARD else -(STEP_H * DIL_H // STRIDE_H)
    move_w: tl.constexpr = DIL_W if FORWARD else -(STEP_W * DIL_W // STRIDE_W)
    tap_h: tl.constexpr = 1 if FORWARD else STEP_H
    tap_w: tl.constexpr = 1 if FORWARD else STEP_W
    # Steps in the weight for one channel of the source and for one of the output.
    weight_group: tl.constexpr = SOURCE_GROUP * OUT_GROUP * R * S
    weight_tap: tl.constexpr = SOURCE_GROUP if SOURCE_LAST else OUT_GROUP
    weight_source: tl.constexpr = 1 if SOURCE_LAST else R * S * OUT_GROUP
    weight_out: tl.constexpr = R * S * SOURCE_GROUP if SOURCE_LAST else 1

    # Consecutive programs share pixels: first the channels of the same pixels, then the phases, then other pixels.
    pid = tl.program_id(0)
    tile = pid % tiles
    pack = pid // tiles % packs
    phase = pid // (tiles * packs) % (phases_h * phases_w)
    block = pid // (tiles * packs * phases_h * phases_w)
    residue_h, residue_w = phase // phases_w, phase % phases_w
    first_r, taps_h, begin_h = _axis(
        residue_h, FORWARD, R, STRIDE_H, DIL_H, PAD_TOP, STEP_H, COMMON_H, INVERSE_H
    )  # fmt: skip
    first_s, taps_w, begin_w = _axis(
        residue_w, FORWARD, S, STRIDE_W, DIL_W, PAD_LEFT, STEP_W, COMMON_W, INVERSE_W
    )  # fmt: skip

    pixel = block * BLOCK_M + tl.arange(0, BLOCK_M)
    image = pixel // (UNITS_H * UNITS_W)
    row = pixel // UNITS_W % UNITS_H
    column = pixel % UNITS_W
    exists = pixel < PIXELS
    if WIDE:
        image, row, column = image.to(tl.int64), row.to(tl.int64), column.to(tl.int64)
    h = row * unit_h + begin_h
    w = column * unit_w + begin_w
    source_pixel = ((image * SOURCE_H + h) * SOURCE_W + w) * source_channels

    ours = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # output channels, counted within the pack
    theirs = tl.arange(0, BLOCK_K)
    out_group = ours // OUT_GROUP
    out_exists = (ours < packed_out) & (pack * packed_out + ours < GROUPS * OUT_GROUP)
    out_weight = (pack * PACK + out_group) * weight_group + ours % OUT_GROUP * weight_out

    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for turn in range(taps_h * taps_w * steps):
        tap = turn // steps
        i, j = tap // taps_w, tap % taps_w
        inner = turn % steps * BLOCK_K + theirs
        inner_exists = (inner < packed_source) & (pack * packed_source + inner < source_channels)
        there_h, there_w = h + i * move_h, w + j * move_w
        inside = exists & (there_h >= 0) & (there_h < SOURCE_H) & (there_w >= 0) & (there_w < SOURCE_W)
        offset = (i * (move_h * SOURCE_W) + j * move_w) * source_channels + pack * packed_source
        a = tl.load(
            source + (source_pixel[:, None] + (offset + inner)[None, :]),
            mask=inside[:, None] & inner_exists[None, :], other=0.0,
        )  # fmt: skip
        index = (first_r + i * tap_h) * S + first_s + j * tap_w
        # Outside its group an output channel has no weight: the tile is block-diagonal.
        related = (inner // SOURCE_GROUP)[:, None] == out_group[None, :]
        b = tl.load(
            weight + ((inner % SOURCE_GROUP * weight_source)[:, None] + (index * weight_tap + out_weight)[None, :]),
            mask=related & inner_exists[:, None] & out_exists[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)

    out_h, out_w = row, column
    if not FORWARD:
        out_h = row * STRIDE_H + residue_h
        out_w = column * STRIDE_W + residue_w
        exists = exists & (out_h < OUT_H) & (out_w < OUT_W)
    out_pixel = image * OUT_STRIDE_N + out_h * OUT_STRIDE_H + out_w * OUT_STRIDE_W
    out_channel = pack * packed_out + ours
    if WIDE:
        out_channel = out_channel.to(tl.int64)
    out_channel = out_channel * OUT_STRIDE_C
    tl.store(
        out + (out_pixel[:, None] + out_channel[None, :]), total.to(out.dtype.element_ty),
        mask=exists[:, None] & out_exists[None, :],
    )  # fmt: skip


@triton.jit
def weight_gradient(
    x, grad_y, out,
    PIXELS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    GROUPS: tl.constexpr, PACK: tl.constexpr, C_GROUP: tl.constexpr, K_GROUP: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    OUT_STRIDE_SPLIT: tl.constexpr, OUT_STRIDE_K: tl.constexpr, OUT_STRIDE_C: tl.constexpr,
    OUT_STRIDE_TAP: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Sums over TURNS * BLOCK_M pixels of (output channels of a pack) x (taps and input channels of that pack); of each
    tap the blocks on the diagonal are stored. x and grad_y are NHWC."""
    packed_c: tl.constexpr = PACK * C_GROUP
    packed_k: tl.constexpr = PACK * K_GROUP
    channels: tl.constexpr = GROUPS * C_GROUP
    out_channels: tl.constexpr = GROUPS * K_GROUP
    tiles_j: tl.constexpr = (R * S * packed_c + BLOCK_J - 1) // BLOCK_J
    tiles_n: tl.constexpr = (packed_k + BLOCK_N - 1) // BLOCK_N
    packs: tl.constexpr = (GROUPS + PACK - 1) // PACK

    pid = tl.program_id(0)
    tile_j = pid % tiles_j
    tile_n = pid // tiles_j % tiles_n
    pack = pid // (tiles_j * tiles_n) % packs
    split = pid // (tiles_j * tiles_n * packs)

    k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k_exists = (k < packed_k) & (pack * packed_k + k < out_channels)
    place = tile_j * BLOCK_J + tl.arange(0, BLOCK_J)
    tap = place // packed_c
    c = place % packed_c
    c_exists = (tap < R * S) & (pack * packed_c + c < channels)
    down, right = tap // S * DIL_H, tap % S * DIL_W
    x_column = (down * W + right) * channels + (pack * packed_c + c)

    total = tl.zeros((BLOCK_N, BLOCK_J), dtype=tl.float32)
    for turn in range(TURNS):
        pixel = (split * TURNS + turn) * BLOCK_M + tl.arange(0, BLOCK_M)
        exists = pixel < PIXELS
        image = pixel // (P * Q)
        h = pixel // Q % P * STRIDE_H - PAD_TOP
        w = pixel % Q * STRIDE_W - PAD_LEFT
        y_pixel = pixel
        if WIDE:
            image = image.to(tl.int64)
            y_pixel = pixel.to(tl.int64)
        g = tl.load(
            grad_y + (y_pixel[:, None] * out_channels + (pack * packed_k + k)[None, :]),
            mask=exists[:, None] & k_exists[None, :], other=0.0,
        )  # fmt: skip
        there_h = h[:, None] + down[None, :]
        there_w = w[:, None] + right[None, :]
        inside = (there_h >= 0) & (there_h < H) & (there_w >= 0) & (there_w < W)
        a = tl.load(
            x + ((((image * H + h) * W + w) * channels)[:, None] + x_column[None, :]),
            mask=inside & exists[:, None] & c_exists[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(g), a, total, input_precision=PRECISION)

    related = (k // K_GROUP)[:, None] == (c // C_GROUP)[None, :]
    rows = split * OUT_STRIDE_SPLIT + (pack * packed_k + k) * OUT_STRIDE_K
    columns = tap * OUT_STRIDE_TAP + c % C_GROUP * OUT_STRIDE_C
    tl.store(
        out + (rows[:, None] + columns[None, :]), total.to(out.dtype.element_ty),
        mask=related & k_exists[:, None] & c_exists[None, :],
    )  # fmt: skip


@triton.jit
def sum_splits(
    partial, out,
    SPLITS: tl.constexpr, SIZE: tl.constexpr, C_GROUP: tl.constexpr, TAPS: tl.constexpr,
    OUT_STRIDE_K: tl.constexpr, OUT_STRIDE_C: tl.constexpr, OUT_STRIDE_TAP: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[k, c, tap] = sum of partial[split, k, tap, c] over the splits, in a fixed order."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_SPLITS, BLOCK), dtype=tl.float32)
    for begin in range(0, SPLITS, BLOCK_SPLITS):
        split = begin + tl.arange(0, BLOCK_SPLITS)
        total += tl.load(
            partial + (split[:, None] * SIZE + element[None, :]),
            mask=(split < SPLITS)[:, None] & (element < SIZE)[None, :], other=0.0,
        )  # fmt: skip
    k = element // (TAPS * C_GROUP)
    tap = element // C_GROUP % TAPS
    c = element % C_GROUP
    tl.store(
        out + k * OUT_STRIDE_K + c * OUT_STRIDE_C + tap * OUT_STRIDE_TAP,
        tl.sum(total, axis=0).to(out.dtype.element_ty), mask=element < SIZE,
    )  # fmt: skip
