"""Attention by the C library against its formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from convselect.freeze.attention import attention
from convselect.kernels import _library

if not _library.available():
    pytest.skip("the C library is not installed", allow_module_level=True)

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True, params=range(_library.library().cs_best_isa() + 1))  # type: ignore[union-attr]
def level(request, monkeypatch):
    monkeypatch.setattr(_library, "isa", lambda: request.param)


def ours(q, k, v, mask=None, scale=None, out=None):
    N, heads, queries, _ = q.shape
    out = torch.full((N, queries, heads, v.shape[-1]), NAN).transpose(1, 2) if out is None else out
    bound = attention(q, k, v, mask, out, scale)
    assert bound is not None
    assert bound.function(*bound.arguments) == _library.OK
    return out


def want(q, k, v, mask=None, scale=None):
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores + (0 if mask is None else mask.double())).softmax(-1) @ v.double()


def heads(N, H, L, D):
    return torch.randn(N, H, L, D)


def parts(N, H, L, D):
    """q, k and v as they lie in one result in NHWC, and in NCHW."""
    yield [part.transpose(1, 2) for part in torch.randn(N, L, H, 3, D).unbind(3)]
    yield [part.transpose(-1, -2) for part in torch.randn(N, H, 3, D, L).unbind(2)]
    yield [heads(N, H, L, D) for _ in range(3)]
    yield [torch.randn(N, H, L, 2 * D)[..., ::2] for _ in range(3)]


@pytest.mark.parametrize("size", [(1, 2, 196, 32), (2, 3, 49, 32), (1, 1, 1, 1), (1, 2, 17, 5), (1, 1, 33, 256)])
def test_as_operands_lie(size):
    for q, k, v in parts(*size):
        torch.testing.assert_close(ours(q, k, v).double(), want(q, k, v), rtol=2e-6, atol=2e-6)
        out = torch.full((size[0], size[1], size[3], size[2]), NAN).transpose(-1, -2)  # channels apart
        assert torch.equal(ours(q, k, v, out=out), ours(q, k, v))


def test_keys_in_several_blocks():
    q, k, v = heads(1, 2, 9, 24) * 3, heads(1, 2, 700, 24), heads(1, 2, 700, 40)
    k[:, :, 600:] *= 3  # the largest come late: what was summed before is scaled
    mask = torch.randn(1, 1, 9, 700)
    mask[..., :300] = -INF  # a whole block, in which no key counts
    for m in (None, mask):
        torch.testing.assert_close(ours(q, k, v, m).double(), want(q, k, v, m), rtol=4e-6, atol=4e-6)


def test_masks_and_scale():
    q, k, v = heads(2, 3, 14, 8), heads(2, 3, 21, 8), heads(2, 3, 21, 8)
    masks = [torch.randn(shape) for shape in ((14, 21), (2, 3, 14, 21), (1, 3, 14, 21), (2, 1, 1, 21), (14, 1), (1, 1))]
    masks.append(torch.randn(2, 3, 14, 25)[..., 2:23])
    for mask in masks:
        torch.testing.assert_close(ours(q, k, v, mask).double(), want(q, k, v, mask), rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(ours(q, k, v, None, 0.7).double(), want(q, k, v, None, 0.7), rtol=4e-6, atol=4e-6)


def test_masked_rows_and_values_that_are_not_finite():
    q, k, v = heads(1, 1, 9, 8), heads(1, 1, 9, 8), heads(1, 1, 9, 8)
    mask = torch.zeros(9, 9)
    mask[2], mask[3, 4] = -INF, -INF
    torch.testing.assert_close(ours(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert (ours(q, k, v, mask)[0, 0, 2] == 0).all()
    for operand in range(3):
        for value in (NAN, INF):
            operands = [t.clone() for t in (q, k, v)]
            operands[operand][0, 0, 5, 1] = value
            got, expected = ours(*operands), want(*operands)
            assert torch.equal(got.isfinite(), expected.isfinite())
            torch.testing.assert_close(got.double(), expected, rtol=4e-6, atol=4e-6, equal_nan=True)


def test_any_number_of_threads_gives_the_same_bits():
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        results.append(ours(heads(1, 2, 190, 32), heads(1, 2, 300, 32), heads(1, 2, 300, 32)))
    assert all(torch.equal(result, results[0]) for result in results)
    assert not results[0].isnan().any()


def test_what_is_not_covered():
    q, out = heads(1, 2, 6, 8), torch.empty(1, 2, 6, 8)
    assert attention(q, q, q, None, out) is not None
    assert attention(q, q[:, :1], q, None, out) is None
    assert attention(q[0], q[0], q[0], None, out[0]) is None
    assert attention(q.double(), q, q, None, out) is None
    assert attention(q, q, q, None, q) is None  # in place
    assert attention(q, q, q, torch.zeros(5, 6), out) is None
    assert attention(q, q, q, torch.zeros(6, 12)[:, ::2], out) is None
    assert attention(q, q, q, torch.zeros(6, 6, dtype=torch.bool), out) is None
    deep = torch.randn(1, 1, 2, 257)
    assert attention(deep, deep, deep, None, torch.empty_like(deep)) is None
