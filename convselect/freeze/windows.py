"""Convolutions of one row as a matrix product on the image where it lies, by Strassen's algorithm.

In NHWC what a filter reads of one row is a run of S * C floats, and the run of the next result starts stride * C floats
behind it. So a convolution without padding and dilation is the product of overlapping rows with the weight, and the
kernel for 1x1 convolutions by Strassen's algorithm computes it, on rows that are closer together than they are long.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.freeze.candidates import Candidate, Form, Run, admitted
from convselect.freeze.kernel import STRASSEN, KernelCall
from convselect.freeze.layer import FrozenLayer
from convselect.kernels import _library
from convselect.kernels._contract import Grade
from convselect.kernels.pool import BY_NAME


def candidates(layer: FrozenLayer, problem: ConvProblem, settings: Settings, x: Form, y: Form) -> list[Candidate]:
    """The product that computes this layer; none if it is no such convolution.

    Args:
        x, y: the forms of its operands.
    """
    p = problem
    fits = (p.N, p.R, p.H, p.groups, p.dil_w) == (1, 1, 1, 1, 1) and p.S > 1 and not any(p.padding)
    if not fits or p.layout != CHANNELS_LAST or p.dtype != "float32" or not _library.available():
        return []
    product = p._replace(C=p.S * p.C, W=p.Q, S=1, stride_w=1)
    takes, pack = STRASSEN.takes, STRASSEN.pack
    assert takes is not None
    assert pack is not None
    if not takes(product) or not admitted(BY_NAME[STRASSEN.algorithm], product, settings):
        return []
    if settings.precision == "exact":
        return []
    key = STRASSEN.pack_key(product)

    def packed() -> Tensor:
        return pack(layer.weight.permute(0, 2, 3, 1).reshape(product.weight_shape), product)

    function = _library._function(STRASSEN.name, 0)
    structure = _library._conv(product, CHANNELS_LAST, CONTIGUOUS, p.threads, _library.isa())
    structure.x_pitch = p.stride_w * p.C

    def bind(x_memory: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
        weight = layer.packed(key, packed, in_place=True)[0]
        call = KernelCall(
            function, structure, (), (ctypes.c_void_p(weight.data_ptr()),), weight, layer, layer.native, x, y
        )
        return call.bind(x_memory, residual, out)

    return [Candidate("strassen_windows", Grade.CLOSE, bind, key, True)]
