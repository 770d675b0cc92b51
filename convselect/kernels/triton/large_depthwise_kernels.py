"""Triton kernels of `large_depthwise.py`, whose docstring explains the formulas and the letters."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relayout(
    source,
    target,
    U: tl.constexpr,
    V: tl.constexpr,
    V_TARGET: tl.constexpr,
    A: tl.constexpr,
    FROM_U: tl.constexpr,
    FROM_V: tl.constexpr,
    FROM_A: tl.constexpr,
    FROM_B: tl.constexpr,
    TO_U: tl.constexpr,
    TO_V: tl.constexpr,
    TO_A: tl.constexpr,
    TO_B: tl.constexpr,
    BU: tl.constexpr,
    BV: tl.constexpr,
    WIDE: tl.constexpr,
):
    """target[b, a, u, v] = source[b, a, u, v] with any strides; zero for V <= v < V_TARGET.

    A program moves BU x BV elements of two axes: the contiguous one of the source and that of the target.
    """
    tiles_u: tl.constexpr = (U + BU - 1) // BU
    tiles_v: tl.constexpr = (V_TARGET + BV - 1) // BV
    pid = tl.program_id(0)
    u = pid // tiles_v % tiles_u * BU + tl.arange(0, BU)
    v = pid % tiles_v * BV + tl.arange(0, BV)
    rest = pid // (tiles_v * tiles_u)
    a = rest % A
    b = rest // A
    if WIDE:
        u = u.to(tl.int64)
        v = v.to(tl.int64)
        a = a.to(tl.int64)
        b = b.to(tl.int64)
    inside = (u < U)[:, None]
    read = source + (a * FROM_A + b * FROM_B) + u[:, None] * FROM_U + v[None, :] * FROM_V
    value = tl.load(read, mask=inside & (v < V)[None, :], other=0)
    write = target + (a * TO_A + b * TO_B) + u[:, None] * TO_U + v[None, :] * TO_V
    tl.store(write, value, mask=inside & (v < V_TARGET)[None, :])


@triton.jit
def shifted_filters(
    weight,
    table,
    R: tl.constexpr,
    S: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    ZEROS: tl.constexpr,
    FLIP: tl.constexpr,
    STEP_R: tl.constexpr,
    STEP_S: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """table[c, a, row, v] = w[c, row - FIRST_ROW, v + a - ZEROS], zero outside the filter."""
    size: tl.constexpr = COPIES * ROWS * LENGTH
    tiles: tl.constexpr = (size + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    c = pid // tiles
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    r = at // LENGTH % ROWS - FIRST_ROW
    s = at % LENGTH + at // (LENGTH * ROWS) - ZEROS
    inside = (r >= 0) & (r < R) & (s >= 0) & (s < S) & (at < size)
    if FLIP:
        r = R - 1 - r
        s = S - 1 - s
    if WIDE:
        c = c.to(tl.int64)
    value = tl.load(weight + c * (R * S) + r * STEP_R + s * STEP_S, mask=inside, other=0)
    tl.store(table + c * size + at, value, mask=at < size)


@triton.jit
def banded(
    x,
    table,
    y,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    PAD_TOP: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    ZEROS: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """y (N, C, P, Q) from x (N, C, H, WIDTH): BM patches of BP x BQ results of one channel, by one product with a
    Toeplitz matrix that is read from `table`, 16 bytes at a time."""
    groups: tl.constexpr = (P + BP - 1) // BP
    tiles_q: tl.constexpr = (Q + BQ - 1) // BQ
    tiles_m: tl.constexpr = (N * groups + BM - 1) // BM
    window: tl.constexpr = BP + R - 1

    pid = tl.program_id(0)
    c = pid // (tiles_q * tiles_m)
    first = pid // tiles_q % tiles_m * BM
    q0 = pid % tiles_q * BQ

    # Images are numbered fastest, so that a tile's patches lie in few rows and most rows of padding can be skipped.
    m = first + tl.arange(0, BM)
    n = m % N
    group = m // N
    # Patches after the last one are placed below the image, so they read zeros.
    top = tl.where(m < N * groups, group * BP - PAD_TOP, H)
    highest = first // N * BP - PAD_TOP
    lowest = tl.minimum((first + BM - 1) // N, groups - 1) * BP - PAD_TOP
    from_row = tl.minimum(tl.maximum(-lowest, 0), window)
    to_row = tl.minimum(tl.maximum(H - highest, 0), window)

    # The window of columns begins at a multiple of 16 bytes, inside the image.
    c0 = tl.maximum(q0 - PAD_LEFT, 0) // COPIES * COPIES
    channel = c
    if WIDE:
        n = n.to(tl.int64)
        channel = c.to(tl.int64)
    x_row = (n * C + channel) * (H * WIDTH) + (group * BP - PAD_TOP) * WIDTH + c0

    o = tl.arange(0, BP * BQ)
    pp = o // BQ
    j = o % BQ
    start = ZEROS + c0 - q0 + PAD_LEFT - j
    table += channel * (COPIES * ROWS * LENGTH)
    t_row = start % COPIES * (ROWS * LENGTH) + (BP - 1 - pp) * LENGTH + start // COPIES * COPIES

    total = tl.zeros((BM, BP * BQ), tl.float32)
    for k0 in range(from_row * COLUMNS // BK * BK, to_row * COLUMNS, BK):
        k = k0 + tl.arange(0, BK)
        row = k // COLUMNS
        i = k % COLUMNS
        h = top[:, None] + row[None, :]
        inside = (h >= 0) & (h < H) & (c0 + i < WIDTH)[None, :]
        a = tl.load(x + (x_row[:, None] + (row * WIDTH + i)[None, :]), mask=inside, other=0)
        t = tl.load(table + (t_row[:, None] + (row * LENGTH + i)[None, :]))
        total = tl.dot(a, tl.trans(t), total, input_precision=PRECISION)

    p = group[:, None] * BP + pp[None, :]
    write = y + ((n * C + channel)[:, None] * (P * Q) + p * Q + (q0 + j)[None, :])
    keep = (m < N * groups)[:, None] & (p < P) & (q0 + j < Q)[None, :]
    tl.store(write, total.to(y.dtype.element_ty), mask=keep)


@triton.jit
def correlate(
    x,
    grad_y,
    partial,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    PAD_TOP: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    X_LENGTH: tl.constexpr,
    Y_LENGTH: tl.constexpr,
    PARTS_Q: tl.constexpr,
    PARTS_K: tl.constexpr,
    PER_Q: tl.constexpr,
    PER_K: tl.constexpr,
    RB: tl.constexpr,
    SB: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """partial[c, part, r, s] = sum over the part's q and (h, n) of grad_y[c, q, h - r + PAD_TOP, n] *
    x[c, q + s - PAD_LEFT, h, n], from x (C, W, H * N) and grad_y (C, Q, P * N) with padded rows."""
    pid = tl.program_id(0)
    part_k = pid % PARTS_K
    part_q = pid // PARTS_K % PARTS_Q
    c = pid // (PARTS_K * PARTS_Q)
    channel = c
    if WIDE:
        channel = c.to(tl.int64)
    x += channel * (W * X_LENGTH)
    grad_y += channel * (Q * Y_LENGTH)

    r = tl.arange(0, RB)
    s = tl.arange(0, SB)
    back = (PAD_TOP - r) * N
    first_q = part_q * PER_Q
    count = tl.minimum(Q - first_q, PER_Q) * PER_K
    total = tl.zeros((RB, SB), tl.float32)
    for step in range(count):
        q = first_q + step // PER_K
        k = (part_k * PER_K + step % PER_K) * BK + tl.arange(0, BK)
        w = q - PAD_LEFT + s
        inside = ((w >= 0) & (w < W) & (s < S))[:, None] & (k < H * N)[None, :]
        a = tl.load(x + (w[:, None] * X_LENGTH + k[None, :]), mask=inside, other=0)
        at = back[:, None] + k[None, :]
        # If either is outside its image, both values are still numbers and one of them is zero.
        inside = (at >= 0) & (at < P * N) & (r < R)[:, None]
        g = tl.load(grad_y + (q * Y_LENGTH + at), mask=inside, other=0)
        total = tl.dot(g, tl.trans(a), total, input_precision=PRECISION)

    part = part_q * PARTS_K + part_k
    write = partial + (channel * (PARTS_Q * PARTS_K) + part) * (RB * SB) + r[:, None] * SB + s[None, :]
    tl.store(write, total)


@triton.jit
def add_parts(
    partial,
    grad_weight,
    R: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    RB: tl.constexpr,
    SB: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """grad_weight[c, r, s] = sum over parts of partial[c, part, r, s], in their order."""
    tiles: tl.constexpr = (R * S + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    c = pid // tiles
    at = pid % tiles * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        c = c.to(tl.int64)
    read = partial + c * (PARTS * RB * SB) + at // S * SB + at % S
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(read + part * (RB * SB), mask=at < R * S, other=0)
    tl.store(grad_weight + c * (R * S) + at, total.to(grad_weight.dtype.element_ty), mask=at < R * S)


@triton.jit
def banded_gradient(
    x,
    grad_y,
    partial,
    N: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    Y_WIDTH: tl.constexpr,
    Q: tl.constexpr,
    R: tl.constexpr,
    PAD_TOP: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    COPIES: tl.constexpr,
    PARTS: tl.constexpr,
    HB: tl.constexpr,
    CB: tl.constexpr,
    SB: tl.constexpr,
    BP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):
    """partial[c, tile, h, pp, s] = sum over the patches of a tile of columns and a part of the images, and over j, of
    x[patch, h, s + j - d] * grad_y[patch, pp, j]: the gradient of the Toeplitz matrix, summed along its diagonals."""
    groups: tl.constexpr = (P + BP - 1) // BP
    tiles_q: tl.constexpr = (Q + BQ - 1) // BQ
    window: tl.constexpr = BP + R - 1
    tiles_h: tl.constexpr = (window + HB - 1) // HB
    pid = tl.program_id(0)
    part = pid % PARTS
    h0 = pid // PARTS % tiles_h * HB
    tile_q = pid // (PARTS * tiles_h) % tiles_q
    channel = pid // (PARTS * tiles_h * tiles_q)
    q0 = tile_q * BQ
    c0 = tl.maximum(q0 - PAD_LEFT, 0) // COPIES * COPIES
    d = c0 - q0 + PAD_LEFT
    if WIDE:
        channel = channel.to(tl.int64)
    m = tl.arange(0, HB * CB)
    hh = h0 + m // CB
    i = m % CB
    o = tl.arange(0, BP * BQ)
    pp = o // BQ
    j = o % BQ
    # Groups of rows whose window meets the image; one too many is harmless.
    low = tl.maximum(PAD_TOP - (h0 + HB - 1) + BP - 1, 0) // BP
    high = tl.minimum(tl.maximum(H - 1 + PAD_TOP - h0, -BP) // BP + 1, groups)
    steps = tl.cdiv(tl.maximum(high - low, 0) * N, BK)
    per = tl.cdiv(steps, PARTS)
    total = tl.zeros((HB * CB, BP * BQ), tl.float32)
    x += channel * (H * WIDTH) - PAD_TOP * WIDTH + c0
    grad_y += channel * (P * Y_WIDTH) + q0
    for step in range(part * per, tl.minimum(part * per + per, steps)):
        k = low * N + step * BK + tl.arange(0, BK)
        n = k % N
        p = k // N * BP
        if WIDE:
            n = n.to(tl.int64)
        h = p[:, None] - PAD_TOP + hh[None, :]
        inside = (h >= 0) & (h < H) & (c0 + i < WIDTH)[None, :]
        read = x + ((n * (C * H * WIDTH) + p * WIDTH)[:, None] + (hh * WIDTH + i)[None, :])
        a = tl.load(read, mask=inside, other=0)
        inside = (p[:, None] + pp[None, :] < P) & (q0 + j < Y_WIDTH)[None, :]
        read = grad_y + ((n * (C * P * Y_WIDTH) + p * Y_WIDTH)[:, None] + (pp * Y_WIDTH + j)[None, :])
        g = tl.load(read, mask=inside, other=0)
        total = tl.dot(tl.trans(a), g, total, input_precision=PRECISION)
    # Move element (s + j - d, j) to (s, j); elements outside the window are outside the image.
    e = tl.arange(0, HB * SB)
    at = (e % SB)[:, None] + j[None, :] - d
    valid = (at >= 0) & (at < CB)
    at = tl.minimum(tl.maximum(at, 0), CB - 1) + (e // SB * CB)[:, None]
    skewed = tl.where(valid, tl.gather(total, at, 0), 0.0)
    sums = tl.sum(tl.reshape(skewed, (HB * SB, BP, BQ)), 2)
    block = (channel * tiles_q + tile_q) * PARTS + part
    row = h0 + e // SB
    b = tl.arange(0, BP)
    write = partial + block * (tiles_h * HB * BP * SB) + (row[:, None] * BP + b[None, :]) * SB + (e % SB)[:, None]
    tl.store(write, sums)


@triton.jit
def add_bands(
    partial,
    grad_weight,
    R: tl.constexpr,
    S: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BP: tl.constexpr,
    SB: tl.constexpr,
    STEP_R: tl.constexpr,
    STEP_S: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """grad_weight[c, r, s] = sum over tiles and pp of partial[c, tile, r + pp, pp, s], in their order."""
    blocks: tl.constexpr = (R * S + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    c = pid // blocks
    at = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        c = c.to(tl.int64)
    r = at // S
    s = at % S
    read = partial + c * (TILES * ROWS * BP * SB) + r * (BP * SB) + s
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(TILES * BP):
        # From pp to pp + 1 the row moves on by one as well.
        step = part // BP * (ROWS * BP * SB) + part % BP * (BP * SB + SB)
        total += tl.load(read + step, mask=at < R * S, other=0)
    write = grad_weight + c * (R * S) + r * STEP_R + s * STEP_S
    tl.store(write, total.to(grad_weight.dtype.element_ty), mask=at < R * S)
