"""A call of the C library, with everything it needs."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from convselect.kernels import _library


class Bound(NamedTuple):
    """A call `function(*arguments)` of the C library, and the objects whose memory its arguments point to."""

    function: Any
    arguments: tuple[Any, ...]
    owners: Any


class Call(ctypes.Structure):
    """What the structures of all steps between convolutions start with (`CS_STEP_KERNELS` of csrc/kernels.h)."""

    _fields_: ClassVar[Any] = (("isa", ctypes.c_int32), ("threads", ctypes.c_int32))


def bound(name: str, call: Call, inputs: Any, out: Tensor, *others: Any) -> Bound:
    """`name(call, inputs, out)`.

    Args:
        inputs: a tensor, or an array of addresses.
        others: what else these point to.
    """
    loaded = _library.library()
    assert loaded is not None
    function = loaded[name]
    function.argtypes, function.restype = (ctypes.c_void_p,) * 3, ctypes.c_int32
    read = inputs.data_ptr() if isinstance(inputs, Tensor) else ctypes.addressof(inputs)
    return Bound(function, (ctypes.addressof(call), read, out.data_ptr()), (call, inputs, out, others))
