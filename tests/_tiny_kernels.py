"""The kernel of `tiny_triton.py`, and one that does not compile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, c, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """c (M, N) = a (M, K) @ b (K, N); one row and BLOCK columns a program."""
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        factor = tl.load(a + row * K + k).to(tl.float32)
        total += factor * tl.load(b + k * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(c + row * N + columns, total.to(c.dtype.element_ty), mask=columns < N)


@triton.jit
def broken(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), no_such_thing)  # noqa: F821
