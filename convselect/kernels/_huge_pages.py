"""Large results in huge pages. Linux gives them to whoever asks, if
/sys/kernel/mm/transparent_hugepage/enabled says "madvise" or "always"; NumPy asks for its arrays."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from torch import Tensor

LARGE_BYTES = 32 << 20
"""Results from this size on have fresh pages in every call: glibc maps such blocks anew, whatever was freed before."""
HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


@functools.cache
def _madvise() -> Any:
    """The system call on bare addresses; None except on Linux."""
    try:
        function = ctypes.CDLL(None)["madvise"] if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None
    if function is not None:
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def use_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages under a dense tensor that has not been written to: to touch the first byte of every small page
    can take as long as to compute what is stored there."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if end > start and (madvise := _madvise()) is not None:
        madvise(start, end - start, MADV_HUGEPAGE)  # if it fails the pages are small ones
