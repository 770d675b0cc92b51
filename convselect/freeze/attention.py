"""Scaled dot-product attention by the C library (`csrc/attention.inc`)."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from convselect.freeze.bound import Bound, Call, bound
from convselect.freeze.pointwise import is_plain, shares_memory
from convselect.kernels import _library

_DEEPEST = 256  # channels of a head: AT_BLOCK of the C source


class _Attention(Call):
    """`cs_attention` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "queries", "keys", "depth", "value_depth")),
        ("strides", ctypes.c_int64 * 20), ("scale", ctypes.c_float), ("reserved", ctypes.c_float),
    )  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, scale: float | None = None
) -> Bound | None:
    """out = softmax(scale q k^T + mask) v, as `scaled_dot_product_attention` without dropout computes it.

    Args:
        q, k, v: (N, heads, queries, depth), (N, heads, keys, depth), (N, heads, keys, value depth), of any strides and
            at most 256 channels.
        mask: float32, broadcast against (N, heads, queries, keys). The result of a query whose keys are all masked by
            -infinity is 0, as it is in PyTorch's kernel for CPUs.
        out: (N, heads, queries, value depth), of any strides; it shares no memory with the others.
        scale: 1 / sqrt(depth) if None.
    """
    given = [t for t in (q, k, v, mask, out) if t is not None]
    if not _library.available() or not all(map(is_plain, given)) or any(t.dim() != 4 for t in (q, k, v, out)):
        return None
    N, heads, queries, depth = q.shape
    keys, value_depth = v.shape[2:]
    shapes = [(N, heads, keys, depth), (N, heads, keys, value_depth), (N, heads, queries, value_depth)]
    if [tuple(t.shape) for t in (k, v, out)] != shapes or 0 in (q.numel(), v.numel()):
        return None
    if max(depth, value_depth) > _DEEPEST or any(shares_memory(t, out) for t in given[:-1]):
        return None
    steps = [0] * 4
    if mask is not None:
        try:
            steps = list(mask.expand(N, heads, queries, keys).stride())
        except RuntimeError:
            return None
        if keys == 1:
            steps[3] = 0
        if steps[3] not in (0, 1):
            return None
    strides = [step for t in (q, k, v, out) for step in t.stride()] + steps
    call = _Attention(
        _library.isa(), torch.get_num_threads(), N, heads, queries, keys, depth, value_depth,
        (ctypes.c_int64 * 20)(*strides), 1 / math.sqrt(depth) if scale is None else scale,
    )  # fmt: skip
    pointers = (ctypes.c_void_p * 4)(*(None if t is None else t.data_ptr() for t in (q, k, v, mask)))
    return bound("cs_attend", call, pointers, out, given)
