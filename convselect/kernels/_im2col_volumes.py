"""The matrix products of `im2col_gemm` for volumes (NCDHW), unfolded a few output rows at a time.

forward          y[n] (K, O P Q)  =  weight (K, C T R S) @ columns (C T R S, O P Q)
backward_data    a forward convolution of grad_y by the mirrored weight where strides are 1, else weight^T @ grad_y,
                 folded slice by slice and added to the slices that its depth taps meet
backward_weight  grad_weight  =  grad_y @ columns^T, summed over images and chunks
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction

Chunk = tuple[int, int, int, int, int, int]


def _per_row(p: ConvProblem) -> int:
    """Numbers in the columns of one row of results."""
    return p.C * p.T * p.R * p.S * p.Q


def _rows(p: ConvProblem, budget: int) -> int:
    """Rows of results, of all slices, that are unfolded at a time."""
    return min(p.O * p.P, max(1, budget // _per_row(p)))


def _chunks(p: ConvProblem, budget: int) -> Iterator[tuple[slice, slice]]:
    """(slices, rows) of results whose columns fit `budget` numbers: whole slices, or rows of one."""
    rows = _rows(p, budget)
    if rows >= p.P:
        step = rows // p.P
        for o in range(0, p.O, step):
            yield slice(o, min(o + step, p.O)), slice(0, p.P)
        return
    for o in range(p.O):
        for r in range(0, p.P, rows):
            yield slice(o, o + 1), slice(r, min(r + rows, p.P))


def _padded(x: Tensor, p: ConvProblem) -> Tensor:
    sides = (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom, p.pad_front, p.pad_back)
    return F.pad(x, sides).contiguous() if any(sides) else x.contiguous()


def _windows(padded: Tensor, p: ConvProblem) -> Tensor:
    """Every window, as a view (N, G, C/G, T, R, S, O, P, Q) that overlaps itself."""
    sN, sC, sD, sH, sW = padded.stride()
    size = (p.N, p.groups, p.C // p.groups, p.T, p.R, p.S, p.O, p.P, p.Q)
    taps = (p.dil_d * sD, p.dil_h * sH, p.dil_w * sW)
    return padded.as_strided(
        size, (sN, p.C // p.groups * sC, sC, *taps, p.stride_d * sD, p.stride_h * sH, p.stride_w * sW)
    )


def _columns(x: Tensor, p: ConvProblem, budget: int) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """(image, slices, rows, their columns (G, C/G T R S, pixels)), chunk by chunk."""
    if p.is_pointwise:
        for n, image in enumerate(x.contiguous().view(p.N, p.groups, p.C // p.groups, -1)):
            yield n, slice(0, p.O), slice(0, p.P), image
        return
    windows = _windows(_padded(x, p), p)
    for n in range(p.N):
        for slices, rows in _chunks(p, budget):
            yield n, slices, rows, windows[n, ..., slices, rows, :].reshape(p.groups, _taps(p), -1)


def _taps(p: ConvProblem) -> int:
    return p.C // p.groups * p.T * p.R * p.S


def _pixels(t: Tensor, n: int, slices: slice, rows: slice) -> Tensor:
    """t (N, G, K/G, O, P, Q) -> (G, K/G, pixels) of one chunk: a view, as whole slices and rows of one slice are."""
    return t[n, :, :, slices, rows].flatten(2)


def forward(x: Tensor, weight: Tensor, p: ConvProblem, budget: int) -> Tensor:
    """y (N, K, O, P, Q), contiguous.

    Args:
        budget: most numbers in the columns of one chunk, if one row of results has fewer.
    """
    G = p.groups
    w = weight.reshape(G, p.K // G, -1)
    y = torch.empty(p.y_shape, dtype=x.dtype)
    whole = y.view(p.N, G, p.K // G, p.O, p.P, p.Q)
    for n, slices, rows, columns in _columns(x, p, budget):
        target = _pixels(whole, n, slices, rows)
        if G == 1:
            torch.mm(w[0], columns[0], out=target[0])
        else:
            target.copy_(torch.bmm(w, columns))
        del columns  # before the next chunk is made, so that there is only one
    return y


def backward_weight(x: Tensor, grad_y: Tensor, p: ConvProblem, budget: int) -> Tensor:
    """grad_weight (K, C/G, T, R, S)."""
    G = p.groups
    g = grad_y.contiguous().view(p.N, G, p.K // G, p.O, p.P, p.Q)
    total = torch.zeros(G, p.K // G, _taps(p), dtype=x.dtype)
    for n, slices, rows, columns in _columns(x, p, budget):
        total.baddbmm_(_pixels(g, n, slices, rows), columns.mT)
        del columns
    return total.view(p.weight_shape)


def mirrored(p: ConvProblem) -> ConvProblem | None:
    """The forward problem that is this one's grad-input, of grad_y by the mirrored weight; None if there is none: at a
    stride, or with more padding than the kernel reaches."""
    if not p.stride_d == p.stride_h == p.stride_w == 1:
        return None
    height, width = p.kernel_extent
    # Behind, the image may have ended before its last window did not fit: what is missing is padding there.
    sides: dict[str, Any] = {
        "pad_front": p.depth_extent - 1 - p.pad_front, "pad_back": p.depth_extent - 1 - p.pad_back,
        "pad_top": height - 1 - p.pad_top, "pad_bottom": height - 1 - p.pad_bottom,
        "pad_left": width - 1 - p.pad_left, "pad_right": width - 1 - p.pad_right,
    }  # fmt: skip
    if min(sides.values()) < 0:
        return None
    return p._replace(direction=Direction.FORWARD, C=p.K, K=p.C, D=p.O, H=p.P, W=p.Q, **sides)


def backward_data(grad_y: Tensor, weight: Tensor, p: ConvProblem, budget: int) -> Tensor:
    """grad_x (N, C, D, H, W), contiguous."""
    G = p.groups
    back = mirrored(p)
    if back is not None:
        w = weight.reshape(G, p.K // G, p.C // G, p.T, p.R, p.S).transpose(1, 2).flip(3, 4, 5)
        return forward(grad_y, w.reshape(p.C, p.K // G, p.T, p.R, p.S), back, budget)
    size = (p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right)
    part = fold_channels(p, budget)
    w = weight.reshape(G, p.K // G, p.C // G, -1)
    g = grad_y.contiguous().view(p.N, G, p.K // G, p.O, p.P * p.Q)
    grad = torch.zeros(p.N, G, p.C // G, p.D, p.H, p.W, dtype=grad_y.dtype)
    for group in range(G):
        for c in range(0, p.C // G, part):
            of_part = w[group, :, c : c + part].flatten(1).mT  # (c T R S, K/G)
            for n in range(p.N):
                target = grad[n, group, c : c + part]
                for o in range(p.O):
                    columns = (of_part @ g[n, group, :, o]).view(1, -1, p.P * p.Q)
                    folded = F.fold(columns, size, (p.R, p.S), p.dilation, 0, p.stride)
                    folded = folded[..., p.pad_top : p.pad_top + p.H, p.pad_left : p.pad_left + p.W]
                    folded = folded.reshape(-1, p.T, p.H, p.W)
                    for t in range(p.T):
                        d = o * p.stride_d + t * p.dil_d - p.pad_front
                        if 0 <= d < p.D:
                            target[:, d] += folded[:, t]
    return grad.view(p.x_shape)


def fold_channels(p: ConvProblem, budget: int) -> int:
    """Input channels of a group whose columns of one slice fit the budget."""
    return min(p.C // p.groups, max(1, budget // (p.T * p.R * p.S * p.P * p.Q)))


def workspace(p: ConvProblem, budget: int) -> int:
    """Upper bound on the numbers that a call holds at once, besides copies of operands."""
    if p.direction == Direction.BACKWARD_DATA:
        back = mirrored(p)
        if back is not None:
            weight = p.K * _taps(p)
            return 2 * weight + workspace(back, budget)
        per_channel = p.T * (p.R * p.S * p.P * p.Q + 2 * (p.H + p.pad_top + p.pad_bottom) * _width(p))
        return 2 * fold_channels(p, budget) * per_channel
    padded = p.N * p.C * (p.D + p.pad_front + p.pad_back) * (p.H + p.pad_top + p.pad_bottom) * _width(p)
    pixels = _rows(p, budget) * p.Q
    return 2 * padded + (0 if p.is_pointwise else _per_row(p) * _rows(p, budget)) + p.K * pixels + 2 * p.K * _taps(p)


def _width(p: ConvProblem) -> int:
    return p.W + p.pad_left + p.pad_right
