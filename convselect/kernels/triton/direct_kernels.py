"""Triton kernels of direct.py, whose docstring explains how the work is divided.

Activations are NHWC with CHANNELS per pixel, weights are matrices of (output channel) x (tap, source channel). Sizes
are constants, so the compiler knows their divisors, and loads 16 bytes at once if possible. FLAT: a block of the inner
dimension may span taps; otherwise its tap is a scalar, and computations with it cost nearly nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _axis(
    residue, FORWARD: tl.constexpr, TAPS: tl.constexpr, STRIDE: tl.constexpr, DIL: tl.constexpr, PAD: tl.constexpr,
    STEP: tl.constexpr
):  # fmt: skip
    """(first tap, number of taps, source coordinate of the first tap at unit 0) along one axis.

    Backward, outputs congruent to `residue` meet taps with `tap * DIL = residue + PAD` modulo STRIDE: every STEP-th.
    """
    if FORWARD:
        first, taps, begin = 0, TAPS, -PAD
    elif STRIDE == 1:
        first, taps, begin = 0, TAPS, PAD
    else:
        first = TAPS
        for tap in tl.static_range(STEP):
            first = tl.where((residue + PAD - tap * DIL) % STRIDE == 0, tap, first)
        taps = (TAPS - first + STEP - 1) // STEP  # 0 if the first lies beyond the last
        begin = (residue + PAD - first * DIL) // STRIDE  # exact wherever there is a tap
    return first, taps, begin


@triton.jit
def _tile(pid, BLOCKS: tl.constexpr, TILES: tl.constexpr, PHASES: tl.constexpr, GROUP: tl.constexpr):
    """(block of pixels, tile of channels, phase) of a program. GROUP blocks of pixels run through all tiles before the
    next ones begin, so that concurrent programs share operands in L2."""
    group = pid // (GROUP * TILES * PHASES)
    within = pid % (GROUP * TILES * PHASES)
    size = tl.minimum(BLOCKS - group * GROUP, GROUP)
    phase = within // (size * TILES)
    within = within % (size * TILES)
    return group * GROUP + within % size, within // size, phase


@triton.jit
def gather(
    source, weight, out,
    FORWARD: tl.constexpr, PIXELS: tl.constexpr, UNITS_H: tl.constexpr, UNITS_W: tl.constexpr,
    SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr, CHANNELS: tl.constexpr, WEIGHT_CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_C: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_W: tl.constexpr,
    WEIGHT_OUT: tl.constexpr, WEIGHT_TAP: tl.constexpr, WEIGHT_SOURCE: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    STEP_H: tl.constexpr, STEP_W: tl.constexpr, SPLITS: tl.constexpr, OUT_SIZE: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, DOUBLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Forward: source x, out y. Backward data: source grad_y, out grad_x, one phase of the stride per program.

    A unit is an output pixel; backward, one of a phase. With SPLITS, out holds SPLITS partial sums of everything.
    """
    blocks: tl.constexpr = (PIXELS + BLOCK_M - 1) // BLOCK_M
    tiles: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (CHANNELS + BLOCK_K - 1) // BLOCK_K
    phases_h: tl.constexpr = 1 if FORWARD else STRIDE_H
    phases_w: tl.constexpr = 1 if FORWARD else STRIDE_W
    # Steps along the source for one unit and for one tap of the phase.
    unit_h: tl.constexpr = STRIDE_H if FORWARD else 1
    unit_w: tl.constexpr = STRIDE_W if FORWARD else 1
    move_h: tl.constexpr = DIL_H if FORWARD else -(STEP_H * DIL_H // STRIDE_H)
    move_w: tl.constexpr = DIL_W if FORWARD else -(STEP_W * DIL_W // STRIDE_W)
    tap_h: tl.constexpr = 1 if FORWARD else STEP_H
    tap_w: tl.constexpr = 1 if FORWARD else STEP_W
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32

    block, tile, phase = _tile(tl.program_id(0), blocks, tiles, phases_h * phases_w, GROUP)
    split = tl.program_id(1)
    residue_h, residue_w = phase // phases_w, phase % phases_w
    first_r, taps_h, begin_h = _axis(residue_h, FORWARD, R, STRIDE_H, DIL_H, PAD_TOP, STEP_H)
    first_s, taps_w, begin_w = _axis(residue_w, FORWARD, S, STRIDE_W, DIL_W, PAD_LEFT, STEP_W)

    pixel = block * BLOCK_M + tl.arange(0, BLOCK_M)
    image = pixel // (UNITS_H * UNITS_W)
    row = pixel // UNITS_W % UNITS_H
    column = pixel % UNITS_W
    exists = pixel < PIXELS
    if WIDE:
        image, row, column = image.to(tl.int64), row.to(tl.int64), column.to(tl.int64)
    h = row * unit_h + begin_h
    w = column * unit_w + begin_w
    source_pixel = ((image * SOURCE_H + h) * SOURCE_W + w) * CHANNELS

    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    channel_exists = channel < OUT_CHANNELS
    weight_row = channel * WEIGHT_OUT

    turns = (taps_h * taps_w * CHANNELS + BLOCK_K - 1) // BLOCK_K
    if SPLITS == 1:
        begin, end = 0, turns
    else:
        share = (turns + SPLITS - 1) // SPLITS
        begin = split * share
        end = tl.minimum(begin + share, turns)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=kind)
    for turn in range(begin, end):
        if FLAT:
            place = turn * BLOCK_K + tl.arange(0, BLOCK_K)
            tap = place // CHANNELS
            inner = place % CHANNELS
            i, j = tap // taps_w, tap % taps_w
            there_h = h[:, None] + (i * move_h)[None, :]
            there_w = w[:, None] + (j * move_w)[None, :]
            inside = exists[:, None] & (i < taps_h)[None, :]
            needed = (i < taps_h)[:, None] & channel_exists[None, :]
        else:
            tap = turn // steps
            inner = turn % steps * BLOCK_K + tl.arange(0, BLOCK_K)
            i, j = tap // taps_w, tap % taps_w
            there_h = (h + i * move_h)[:, None]
            there_w = (w + j * move_w)[:, None]
            inside = exists[:, None]
            needed = channel_exists[None, :]
        if WEIGHT_CHANNELS < CHANNELS:
            needed = needed & (inner < WEIGHT_CHANNELS)[:, None]
        pixels_moved = i * (move_h * SOURCE_W) + j * move_w
        if WIDE:
            pixels_moved = pixels_moved.to(tl.int64)
        moved = pixels_moved * CHANNELS + inner
        inside = inside & (there_h >= 0) & (there_h < SOURCE_H) & (there_w >= 0) & (there_w < SOURCE_W)
        a = tl.load(source + (source_pixel[:, None] + moved[None, :]), mask=inside, other=0.0)
        index = (first_r + i * tap_h) * S + first_s + j * tap_w
        b = tl.load(
            weight + ((index * WEIGHT_TAP + inner * WEIGHT_SOURCE)[:, None] + weight_row[None, :]),
            mask=needed, other=0.0,
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=kind)

    if phases_h * phases_w == 1:
        # Treat rows as one long row: then pixels of NCHW are stored together across the ends of rows.
        within = pixel % (UNITS_H * UNITS_W)
        if WIDE:
            within = within.to(tl.int64)
        out_pixel = image * OUT_STRIDE_N + within * OUT_STRIDE_W
    else:
        out_h = row * STRIDE_H + residue_h
        out_w = column * STRIDE_W + residue_w
        exists = exists & (out_h < OUT_H) & (out_w < OUT_W)
        out_pixel = image * OUT_STRIDE_N + out_h * OUT_STRIDE_H + out_w * OUT_STRIDE_W
    if WIDE:
        channel = channel.to(tl.int64)
        split = split.to(tl.int64)
    tl.store(
        out + split * OUT_SIZE + (out_pixel[:, None] + (channel * OUT_STRIDE_C)[None, :]),
        total.to(out.dtype.element_ty), mask=exists[:, None] & channel_exists[None, :],
    )  # fmt: skip


@triton.jit
def gather_descriptor(
    source, weight, out,
    N: tl.constexpr, SOURCE_H: tl.constexpr, SOURCE_W: tl.constexpr, CHANNELS: tl.constexpr,
    OUT_H: tl.constexpr, OUT_W: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    OUT_STRIDE_N: tl.constexpr, OUT_STRIDE_C: tl.constexpr, OUT_STRIDE_H: tl.constexpr, OUT_STRIDE_W: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, BEGIN_H: tl.constexpr, BEGIN_W: tl.constexpr,
    MOVE_H: tl.constexpr, MOVE_W: tl.constexpr, SPLITS: tl.constexpr, OUT_SIZE: tl.constexpr,
    WIDE: tl.constexpr, DOUBLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """As `gather`, for unit strides: output row h and tap i meet source row h + BEGIN_H + i * MOVE_H.

    A block of pixels is a box of images, rows and columns, which one instruction fetches for a tap; elements outside
    the tensor are read as zero. So no addresses are computed per pixel, and padding costs nothing.
    """
    boxes_h: tl.constexpr = (OUT_H + BLOCK_H - 1) // BLOCK_H
    boxes_w: tl.constexpr = (OUT_W + BLOCK_W - 1) // BLOCK_W
    blocks: tl.constexpr = (N + BLOCK_I - 1) // BLOCK_I * boxes_h * boxes_w
    tiles: tl.constexpr = (OUT_CHANNELS + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (CHANNELS + BLOCK_K - 1) // BLOCK_K
    turns: tl.constexpr = R * S * steps
    share: tl.constexpr = (turns + SPLITS - 1) // SPLITS
    pixels: tl.constexpr = BLOCK_I * BLOCK_H * BLOCK_W

    images = tl.make_tensor_descriptor(
        source, shape=[N, SOURCE_H, SOURCE_W, CHANNELS],
        strides=[SOURCE_H * SOURCE_W * CHANNELS, SOURCE_W * CHANNELS, CHANNELS, 1],
        block_shape=[BLOCK_I, BLOCK_H, BLOCK_W, BLOCK_K],
    )  # fmt: skip
    weights = tl.make_tensor_descriptor(
        weight, shape=[OUT_CHANNELS, R * S, CHANNELS], strides=[R * S * CHANNELS, CHANNELS, 1],
        block_shape=[BLOCK_N, 1, BLOCK_K],
    )  # fmt: skip

    block, tile, _ = _tile(tl.program_id(0), blocks, tiles, 1, GROUP)
    split = tl.program_id(1)
    image = block // (boxes_h * boxes_w) * BLOCK_I
    row = block // boxes_w % boxes_h * BLOCK_H
    column = block % boxes_w * BLOCK_W

    total = tl.zeros((pixels, BLOCK_N), dtype=tl.float32)
    begin = split * share
    for turn in range(begin, tl.minimum(begin + share, turns)):
        tap = turn // steps
        inner = turn % steps * BLOCK_K
        h = row + BEGIN_H + tap // S * MOVE_H
        w = column + BEGIN_W + tap % S * MOVE_W
        a = images.load([image, h, w, inner]).reshape(pixels, BLOCK_K)
        b = weights.load([tile * BLOCK_N, tap, inner]).reshape(BLOCK_N, BLOCK_K)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)

    place = tl.arange(0, pixels)
    n = image + place // (BLOCK_H * BLOCK_W)
    out_h = row + place // BLOCK_W % BLOCK_H
    out_w = column + place % BLOCK_W
    channel = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (n < N) & (out_h < OUT_H) & (out_w < OUT_W)
    channel_exists = channel < OUT_CHANNELS
    if WIDE:
        n, out_h, out_w = n.to(tl.int64), out_h.to(tl.int64), out_w.to(tl.int64)
        channel = channel.to(tl.int64)
        split = split.to(tl.int64)
    out_pixel = n * OUT_STRIDE_N + out_h * OUT_STRIDE_H + out_w * OUT_STRIDE_W
    tl.store(
        out + split * OUT_SIZE + (out_pixel[:, None] + (channel * OUT_STRIDE_C)[None, :]),
        total.to(out.dtype.element_ty), mask=exists[:, None] & channel_exists[None, :],
    )  # fmt: skip


@triton.jit
def weight_gradient(
    x, grad_y, out,
    PIXELS: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, CHANNELS: tl.constexpr, K: tl.constexpr, OUT_CHANNELS: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DIL_H: tl.constexpr, DIL_W: tl.constexpr, PAD_TOP: tl.constexpr, PAD_LEFT: tl.constexpr,
    OUT_STRIDE_K: tl.constexpr, OUT_STRIDE_C: tl.constexpr, OUT_STRIDE_TAP: tl.constexpr,
    OUT_SIZE: tl.constexpr, TURNS: tl.constexpr, WIDE: tl.constexpr, DOUBLE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    """Sums over TURNS * BLOCK_M pixels of (output channels) x (taps, input channels). x has CHANNELS >= C per pixel,
    grad_y OUT_CHANNELS >= K; both are NHWC."""
    tiles_j: tl.constexpr = (R * S * CHANNELS + BLOCK_J - 1) // BLOCK_J
    tiles_k: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32

    # Programs with the same pixels have consecutive numbers: they find grad_y and x in L2.
    pid = tl.program_id(0)
    tile_k = pid % tiles_k
    tile_j = pid // tiles_k % tiles_j
    split = pid // (tiles_k * tiles_j)

    k = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tile_j * BLOCK_J + tl.arange(0, BLOCK_J)
    tap = place // CHANNELS
    c = place % CHANNELS
    tap_exists = tap < R * S
    down, right = tap // S * DIL_H, tap % S * DIL_W
    pixels_moved = down * W + right
    if WIDE:
        pixels_moved = pixels_moved.to(tl.int64)
    x_column = pixels_moved * CHANNELS + c

    total = tl.zeros((BLOCK_N, BLOCK_J), dtype=kind)
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
            grad_y + (y_pixel[:, None] * OUT_CHANNELS + k[None, :]),
            # Padded channels are zero; including them keeps the mask constant over whole vectors.
            mask=exists[:, None] & (k < OUT_CHANNELS)[None, :], other=0.0,
        )  # fmt: skip
        there_h = h[:, None] + down[None, :]
        there_w = w[:, None] + right[None, :]
        inside = (there_h >= 0) & (there_h < H) & (there_w >= 0) & (there_w < W)
        a = tl.load(
            x + ((((image * H + h) * W + w) * CHANNELS)[:, None] + x_column[None, :]),
            mask=inside & exists[:, None] & tap_exists[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(g), a, total, input_precision=PRECISION, out_dtype=kind)

    if WIDE:
        split = split.to(tl.int64)
    rows = split * OUT_SIZE + k * OUT_STRIDE_K
    columns = tap * OUT_STRIDE_TAP + c * OUT_STRIDE_C
    tl.store(
        out + (rows[:, None] + columns[None, :]), total.to(out.dtype.element_ty),
        mask=(k < K)[:, None] & (tap_exists & (c < C))[None, :],
    )  # fmt: skip


@triton.jit
def sum_splits(
    partial, out, SPLITS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, DOUBLE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[i] = sum of partial[split, i] over the splits, in a fixed order."""
    kind: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    element = pid * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK_SPLITS, BLOCK), dtype=kind)
    for begin in range(0, SPLITS, BLOCK_SPLITS):
        split = begin + tl.arange(0, BLOCK_SPLITS)
        if WIDE:
            split = split.to(tl.int64)
        total += tl.load(
            partial + (split[:, None] * SIZE + element[None, :]),
            mask=(split < SPLITS)[:, None] & (element < SIZE)[None, :], other=0.0,
        )  # fmt: skip
    tl.store(out + element, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=element < SIZE)
