"""What finishes a frozen layer's result if no kernel does, and what oneDNN calls it."""

from __future__ import annotations

import pytest
import torch
from activations import ACTIVATIONS, SLOPE

from convselect.freeze.candidates import ONEDNN_ACTIVATIONS, Candidate, agreeing, finish, onednn_takes
from convselect.kernels import _library
from convselect.kernels._contract import Grade


def test_every_activation_is_known():
    assert set(_library.ACTIVATIONS) == set(ACTIVATIONS) == {*ONEDNN_ACTIVATIONS, "leaky_relu"}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_finish(activation):
    y, residual = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    want = ACTIVATIONS[activation](y + residual)
    torch.testing.assert_close(finish(y, residual, activation, SLOPE), want)


def test_an_unknown_activation_is_refused():
    with pytest.raises(KeyError):
        finish(torch.zeros(1), None, "softmax")


@pytest.mark.skipif(not onednn_takes("float32"), reason="no oneDNN")
@pytest.mark.parametrize("activation", ONEDNN_ACTIVATIONS)
def test_onednn(activation):
    x, weight = 3 * torch.randn(5, 8), torch.randn(6, 8)
    got = torch.ops.mkldnn._linear_pointwise(x, weight, None, *ONEDNN_ACTIVATIONS[activation])
    torch.testing.assert_close(got, ACTIVATIONS[activation](x @ weight.T), rtol=1e-5, atol=1e-5)


def test_where_products_cancel_their_size_decides():
    """Two sums of 1,000 products that nearly cancel differ by much more than a unit of their result."""
    want = torch.full((4,), 1e-3)
    x = torch.zeros(1)

    def found(off, spread):
        candidate = Candidate("other", Grade.DIRECT, lambda *_: lambda x, residual: want + off)
        return bool(agreeing([candidate], x, None, want, lambda: spread))

    assert found(1e-9, 0.0)
    assert not found(2e-8, 0.0)
    assert found(2e-8, 1.0)
    assert not found(1e-5, 1.0)
    assert not found(float("nan"), 1e30)
