"""Whether an error says that memory ran out."""

from __future__ import annotations

import torch

# The allocator of the CPU has no exception of its own; cuBLAS and cuDNN have none either. oneDNN says only that a
# primitive could not be created when its buffers cannot be allocated.
_SIGNS = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "could not create a primitive")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory ran out, in any of the ways in which PyTorch says it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
