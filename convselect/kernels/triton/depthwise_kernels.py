"""Triton kernels of depthwise.py, whose docstring says what they compute and how the work is divided.

Letters are those of `ConvProblem`; M is the channel multiplier K / C. SRC_* and OUT_* are the sizes of what is read and
written: x and y forward, grad_y and grad_x with BACK.

A lane holds a tile of outputs as a tuple of values, because a Triton tensor cannot be split into columns: a value that
several outputs need would be loaded once for each of them. All column numbers are relative to a lane's first column and
known at compile time: of the SPAN columns from LO on, those whose bit is set in USED are loaded. The same holds for
rows.

WIDE: offsets need 64 bits. ACC64: sums are float64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_columns(row, first, inside, STEP: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr,
                  USED: tl.constexpr):  # fmt: skip
    """Columns `first` to `first + SPAN - 1` of a row of COLUMNS, STEP elements apart; zero outside.

    `row` points at column `first`, which may lie outside; `inside` says whether the row exists.
    """
    values = ()
    for e in tl.static_range(SPAN):
        if (USED >> e) & 1 == 1:
            here = inside & (first + e >= 0) & (first + e < COLUMNS)
            values = values + (tl.load(row + e * STEP, mask=here, other=0.0),)
        else:
            values = values + (0,)
    return values


@triton.jit
def _add_row(acc, values, taps, FROM: tl.constexpr, BACK: tl.constexpr, TQ: tl.constexpr, S: tl.constexpr,
             STRIDE: tl.constexpr, DIL: tl.constexpr, PAD: tl.constexpr, LO: tl.constexpr):  # fmt: skip
    """acc[FROM + j] += sum over s of taps[s] * the column that output j meets at s."""
    done = acc[:FROM]
    for j in tl.static_range(TQ):
        total = acc[FROM + j]
        for s in tl.static_range(S):
            if BACK:
                if (j + PAD - s * DIL) % STRIDE == 0:
                    total += values[(j + PAD - s * DIL) // STRIDE - LO].to(total.dtype) * taps[s]
            else:
                total += values[j * STRIDE + s * DIL - PAD - LO].to(total.dtype) * taps[s]
        done = done + (total,)
    return done + acc[FROM + TQ :]


@triton.jit
def gather_nhwc(
    src, weight, out,
    BACK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, SRC_C: tl.constexpr, SRC_H: tl.constexpr,
    SRC_W: tl.constexpr, OUT_C: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PT: tl.constexpr,
    PL: tl.constexpr, R_STEP: tl.constexpr, LO: tl.constexpr, SPAN: tl.constexpr, USED: tl.constexpr,
    TQ: tl.constexpr, V: tl.constexpr, CI: tl.constexpr, BH: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
    WIDE: tl.constexpr, ACC64: tl.constexpr,
):  # fmt: skip
    """Forward, or backward data with BACK, of channels-last images; `weight` is (R, S, K). V is 1 if M is not.

    A lane computes TQ neighbouring outputs of V channels. Lanes are numbered, from the fastest: CI vectors of channels,
    BH rows, the tiles of a row, other channels, other rows of all images. Axis y of the grid with BACK: rows of one
    phase of the stride, which meet the same rows of the filter.
    """
    PHASES: tl.constexpr = SH if BACK else 1
    ROWS: tl.constexpr = (OUT_H + PHASES - 1) // PHASES
    TILES: tl.constexpr = (OUT_W + TQ - 1) // TQ
    OTHERS: tl.constexpr = OUT_C // (V * CI)
    ACC: tl.constexpr = tl.float64 if ACC64 else tl.float32
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)[:, None]
    phase = tl.program_id(1)
    rest = lane // CI
    row = rest % BH
    rest = rest // BH
    tile = rest % TILES
    rest = rest // TILES
    first = (rest % OTHERS * CI + lane % CI) * V
    row += rest // OTHERS * BH
    n = row // ROWS
    i = row % ROWS
    oh = i * PHASES + phase
    in_range = (row < N * ROWS) & (oh < OUT_H)
    if WIDE:
        n = n.to(tl.int64)
    channel = first + tl.arange(0, V)[None, :]
    w = tile * (TQ // SW if BACK else TQ * SW) + LO

    acc = ()
    for _ in tl.static_range(TQ):
        acc = acc + (tl.zeros((LANES, V), dtype=ACC),)
    if UNROLL:
        for m in tl.static_range(M if BACK else 1):
            for r in tl.static_range(R):
                acc = _nhwc_row(acc, src, weight, n, i, w, r, phase, m, channel, in_range, BACK, M, K, SRC_C, SRC_H,
                                SRC_W, S, SH, SW, DH, DW, PT, PL, LO, SPAN, USED, TQ, ACC)  # fmt: skip
    else:
        begin = 0
        if BACK and SH > 1:
            begin = R
            for candidate in tl.static_range(R_STEP - 1, -1, -1):
                begin = tl.where((phase + PT - candidate * DH) % SH == 0, candidate, begin)
        for m in range(M if BACK else 1):
            for r in range(begin, R, R_STEP):
                acc = _nhwc_row(acc, src, weight, n, i, w, r, phase, m, channel, in_range, BACK, M, K, SRC_C, SRC_H,
                                SRC_W, S, SH, SW, DH, DW, PT, PL, LO, SPAN, USED, TQ, ACC)  # fmt: skip

    at = out + ((n * OUT_H + oh) * OUT_W + tile * TQ) * OUT_C + channel
    for j in tl.static_range(TQ):
        tl.store(at + j * OUT_C, acc[j].to(out.dtype.element_ty), mask=in_range & (tile * TQ + j < OUT_W))


@triton.jit
def _nhwc_row(acc, src, weight, n, i, w, r, phase, m, channel, in_range, BACK: tl.constexpr, M: tl.constexpr,
              K: tl.constexpr, SRC_C: tl.constexpr, SRC_H: tl.constexpr, SRC_W: tl.constexpr, S: tl.constexpr,
              SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PT: tl.constexpr,
              PL: tl.constexpr, LO: tl.constexpr, SPAN: tl.constexpr, USED: tl.constexpr, TQ: tl.constexpr,
              ACC: tl.constexpr):  # fmt: skip
    """Add the products with row r of the filter."""
    if BACK:
        h = i + (phase + PT - r * DH) // SH  # exact: r is of this phase
    else:
        h = i * SH + r * DH - PT
    if M == 1:
        c, k = channel, channel
    elif BACK:
        c, k = channel * M + m, channel * M + m
    else:
        c, k = channel // M, channel
    taps = ()
    for s in tl.static_range(S):
        taps = taps + (tl.load(weight + (r * S + s) * K + k).to(ACC),)
    inside = in_range & (h >= 0) & (h < SRC_H)
    at = src + ((n * SRC_H + h) * SRC_W + w) * SRC_C + c
    values = _load_columns(at, w, inside, SRC_C, SRC_W, SPAN, USED)
    return _add_row(acc, values, taps, 0, BACK, TQ, S, SW, DW, PL, LO)


@triton.jit
def _add_row_where_met(acc, values, taps, REACH: tl.constexpr, DH: tl.constexpr, R: tl.constexpr, FROM: tl.constexpr,
                       BACK: tl.constexpr, TQ: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, DIL: tl.constexpr,
                       PAD: tl.constexpr, LO: tl.constexpr):  # fmt: skip
    """`_add_row` with the row r of the filter for which r * DH is REACH, if there is one."""
    if REACH % DH == 0 and REACH >= 0 and REACH // DH < R:
        row = taps[REACH // DH * S : REACH // DH * S + S]
        acc = _add_row(acc, values, row, FROM, BACK, TQ, S, STRIDE, DIL, PAD, LO)
    return acc


@triton.jit
def gather_nchw(
    src, weight, out,
    BACK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, SRC_C: tl.constexpr, SRC_H: tl.constexpr,
    SRC_W: tl.constexpr, OUT_C: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PT: tl.constexpr,
    PL: tl.constexpr, LO_H: tl.constexpr, SPAN_H: tl.constexpr, USED_H: tl.constexpr, LO: tl.constexpr,
    SPAN: tl.constexpr, USED: tl.constexpr, TP: tl.constexpr, TQ: tl.constexpr, LANES: tl.constexpr,
    WIDE: tl.constexpr, ACC64: tl.constexpr,
):  # fmt: skip
    """Forward, or backward data with BACK, of contiguous images; `weight` is (K, R, S).

    A lane computes TP x TQ outputs; lanes are numbered along a row of tiles, then down, then through the planes.
    Every row of the source is loaded once per lane.
    """
    TILES: tl.constexpr = (OUT_W + TQ - 1) // TQ
    BANDS: tl.constexpr = (OUT_H + TP - 1) // TP
    ACC: tl.constexpr = tl.float64 if ACC64 else tl.float32
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    tile = lane % TILES
    band = lane // TILES % BANDS
    plane = lane // (TILES * BANDS)
    channel = plane % OUT_C
    in_range = plane < N * OUT_C
    n = plane // OUT_C
    if WIDE:
        plane = plane.to(tl.int64)
        n = n.to(tl.int64)
    h = band * (TP // SH if BACK else TP * SH) + LO_H
    w = tile * (TQ // SW if BACK else TQ * SW) + LO

    acc = ()
    for _ in tl.static_range(TP * TQ):
        acc = acc + (tl.zeros((LANES,), dtype=ACC),)
    for m in range(M if BACK else 1):
        if M == 1:
            c, k = channel, channel
        elif BACK:
            c, k = channel * M + m, channel * M + m
        else:
            c, k = channel // M, channel
        taps = ()
        for rs in tl.static_range(R * S):
            taps = taps + (tl.load(weight + k * (R * S) + rs, mask=in_range, other=0.0).to(ACC),)
        at = src + ((n * SRC_C + c) * SRC_H + h) * SRC_W + w
        for e in tl.static_range(SPAN_H):
            if (USED_H >> e) & 1 == 1:
                inside = in_range & (h + e >= 0) & (h + e < SRC_H)
                values = _load_columns(at + e * SRC_W, w, inside, 1, SRC_W, SPAN, USED)
                for i in tl.static_range(TP):
                    acc = _add_row_where_met(
                        acc, values, taps, i + PT - (LO_H + e) * SH if BACK else LO_H + e + PT - i * SH, DH, R, i * TQ,
                        BACK, TQ, S, SW, DW, PL, LO,
                    )  # fmt: skip

    at = out + (plane * OUT_H + band * TP) * OUT_W + tile * TQ
    for i in tl.static_range(TP):
        inside = in_range & (band * TP + i < OUT_H)
        if TQ == 2 and OUT_W % 2 == 0:
            # Store two columns at once: two stores would each write every other element of a sector.
            pair = tl.join(acc[2 * i], acc[2 * i + 1]).to(out.dtype.element_ty)
            columns = tl.arange(0, 2)[None, :]
            tl.store((at + i * OUT_W)[:, None] + columns, pair, mask=inside[:, None])
        else:
            for j in tl.static_range(TQ):
                here = inside & (tile * TQ + j < OUT_W)
                tl.store(at + i * OUT_W + j, acc[i * TQ + j].to(out.dtype.element_ty), mask=here)


@triton.jit
def _add_products(acc, values, grads, first, FROM: tl.constexpr, TQ: tl.constexpr, S: tl.constexpr,
                  STRIDE: tl.constexpr, DIL: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """acc[FROM + s] += sum over j of grads[j] * the column that output j meets at s; `first` is the column of j = 0.

    For an output outside the image the gradient is zero, but the value of x that it would meet may not be finite.
    """
    done = acc[:FROM]
    for s in tl.static_range(S):
        total = acc[FROM + s]
        for j in tl.static_range(TQ):
            value = values[j * STRIDE + s * DIL]
            if Q % TQ != 0 and j >= Q % TQ:
                value = tl.where(first + j < Q, value, 0.0)
            total += value.to(total.dtype) * grads[j]
        done = done + (total,)
    return done + acc[FROM + S :]


@triton.jit
def _only_where(values, condition, SPAN: tl.constexpr, USED: tl.constexpr):
    kept = ()
    for e in tl.static_range(SPAN):
        if (USED >> e) & 1 == 1:
            kept = kept + (tl.where(condition, values[e], 0.0).to(values[e].dtype),)
        else:
            kept = kept + (0,)
    return kept


@triton.jit
def weight_nhwc(
    x, grad_y, partial,
    N: tl.constexpr, M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PT: tl.constexpr, PL: tl.constexpr, SPAN: tl.constexpr, USED: tl.constexpr,
    TQ: tl.constexpr, BP: tl.constexpr, BX: tl.constexpr, RT: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr,
    ACC64: tl.constexpr,
):  # fmt: skip
    """Sums of grad_y * x over a part of the outputs, for RT rows of the filter and BX channels: partial is
    (parts, R * S, K). BP tiles of TQ columns at a time, one below the other, STEPS times."""
    TILES: tl.constexpr = (Q + TQ - 1) // TQ
    GROUPS: tl.constexpr = (R + RT - 1) // RT
    BLOCKS: tl.constexpr = (K + BX - 1) // BX
    ACC: tl.constexpr = tl.float64 if ACC64 else tl.float32
    pid = tl.program_id(0)
    r = pid % GROUPS * RT
    k = pid // GROUPS % BLOCKS * BX + tl.arange(0, BX)[None, :]
    part = pid // (GROUPS * BLOCKS)
    c = k // M

    acc = ()
    for _ in tl.static_range(RT * S):
        acc = acc + (tl.zeros((BP, BX), dtype=ACC),)
    for step in range(STEPS):
        index = (part * STEPS + step) * BP + tl.arange(0, BP)[:, None]
        p = index % P
        q = index // P % TILES * TQ
        n = index // (P * TILES)
        in_range = (n < N) & (k < K)
        if WIDE:
            n = n.to(tl.int64)
        grads = ()
        at = grad_y + ((n * P + p) * Q + q) * K + k
        for j in tl.static_range(TQ):
            grads = grads + (tl.load(at + j * K, mask=in_range & (q + j < Q), other=0.0).to(ACC),)
        w = q * SW - PL
        for rt in tl.static_range(RT):
            h = p * SH + (r + rt) * DH - PT
            inside = in_range & (h >= 0) & (h < H)
            values = _load_columns(x + ((n * H + h) * W + w) * C + c, w, inside, C, W, SPAN, USED)
            acc = _add_products(acc, values, grads, q, rt * S, TQ, S, SW, DW, Q)
    for rt in tl.static_range(RT):
        for s in tl.static_range(S):
            at = partial + (part * (R * S) + (r + rt) * S + s) * K + k
            total = tl.sum(acc[rt * S + s], axis=0)[None, :]
            tl.store(at, total, mask=(k < K) & (r + rt < R))


@triton.jit
def weight_nchw(
    x, grad_y, partial,
    N: tl.constexpr, M: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PT: tl.constexpr, PL: tl.constexpr, SPAN_H: tl.constexpr,
    USED_H: tl.constexpr, SPAN: tl.constexpr, USED: tl.constexpr, TP: tl.constexpr, TQ: tl.constexpr,
    LANES: tl.constexpr, RT: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr, ACC64: tl.constexpr,
):  # fmt: skip
    """Sums of grad_y * x over a part of the outputs of one channel, for RT rows of the filter: partial is
    (parts, R * S, K). A lane has TP x TQ outputs at a time."""
    TILES: tl.constexpr = (Q + TQ - 1) // TQ
    BANDS: tl.constexpr = (P + TP - 1) // TP
    GROUPS: tl.constexpr = (R + RT - 1) // RT
    ACC: tl.constexpr = tl.float64 if ACC64 else tl.float32
    pid = tl.program_id(0)
    r = pid % GROUPS * RT
    k = pid // GROUPS % K
    part = pid // (GROUPS * K)

    acc = ()
    for _ in tl.static_range(RT * S):
        acc = acc + (tl.zeros((LANES,), dtype=ACC),)
    for step in range(STEPS):
        index = (part * STEPS + step) * LANES + tl.arange(0, LANES)
        q = index % TILES * TQ
        p = index // TILES % BANDS * TP
        n = index // (TILES * BANDS)
        in_range = n < N
        if WIDE:
            n = n.to(tl.int64)
        grads = ()
        at = grad_y + ((n * K + k) * P + p) * Q + q
        for i in tl.static_range(TP):
            for j in tl.static_range(TQ):
                here = in_range & (p + i < P) & (q + j < Q)
                grads = grads + (tl.load(at + i * Q + j, mask=here, other=0.0).to(ACC),)
        w = q * SW - PL
        h = p * SH + r * DH - PT
        at = x + ((n * C + k // M) * H + h) * W + w
        for e in tl.static_range(SPAN_H):
            if (USED_H >> e) & 1 == 1:
                inside = in_range & (h + e >= 0) & (h + e < H)
                values = _load_columns(at + e * W, w, inside, 1, W, SPAN, USED)
                for i in tl.static_range(TP):
                    if (e - i * SH) % DH == 0 and e - i * SH >= 0 and (e - i * SH) // DH < RT:
                        row = grads[i * TQ : i * TQ + TQ]
                        if P % TP != 0 and i >= P % TP:
                            met = _only_where(values, p + i < P, SPAN, USED)
                            acc = _add_products(acc, met, row, q, (e - i * SH) // DH * S, TQ, S, SW, DW, Q)
                        else:
                            acc = _add_products(acc, values, row, q, (e - i * SH) // DH * S, TQ, S, SW, DW, Q)
    for rt in tl.static_range(RT):
        for s in tl.static_range(S):
            at = partial + (part * (R * S) + (r + rt) * S + s) * K + k
            tl.store(at, tl.sum(acc[rt * S + s], axis=0), mask=r + rt < R)


@triton.jit
def sum_parts(partial, out, PARTS: tl.constexpr, TAPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
              AT_ONCE: tl.constexpr, ACC64: tl.constexpr):  # fmt: skip
    """out (K, TAPS) = the sum of partial (PARTS, TAPS, K) over its parts, in a fixed order."""
    ACC: tl.constexpr = tl.float64 if ACC64 else tl.float32
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, AT_ONCE)[:, None]
    total = tl.zeros((AT_ONCE, BLOCK), dtype=ACC)
    for first in range(0, PARTS, AT_ONCE):
        inside = (first + part < PARTS) & (column < TAPS * K)[None, :]
        total += tl.load(partial + (first + part) * (TAPS * K) + column[None, :], mask=inside, other=0.0)
    at = out + column % K * TAPS + column // K
    tl.store(at, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < TAPS * K)
