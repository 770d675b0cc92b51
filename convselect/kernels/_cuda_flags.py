"""PyTorch's process-wide cuDNN and cuBLAS switches: read, and set for the length of a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from convselect.base.problem import ConvProblem

# Flags belong to the process, not to a thread. Code that changes one holds this lock until it is restored, so that two
# calls from here never restore each other's values. PyTorch's own calls on other threads may run under the value in
# between, which changes how fast they are and not what they compute.
_lock = threading.RLock()


@contextlib.contextmanager
def held(read: Callable[[], bool], write: Callable[[bool], object], value: bool) -> Iterator[None]:
    """Within this context the flag has this value; afterwards its old one is restored. Other threads that change the
    flag through this function wait meanwhile."""
    with _lock:
        before = read()
        if before == value:
            yield
            return
        write(value)
        try:
            yield
        finally:
            write(before)


def benchmark(value: bool) -> contextlib.AbstractContextManager[None]:
    """Within this context cuDNN searches for its fastest engine by timing, or does not."""
    return held(torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark, value)


def cudnn_enabled(value: bool) -> contextlib.AbstractContextManager[None]:
    """Within this context PyTorch uses cuDNN, or does not."""
    return held(torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled, value)


def deterministic() -> bool:
    """cuDNN's own `deterministic` switch, without PyTorch's general one for deterministic algorithms."""
    return bool(torch._C._get_cudnn_deterministic())


def state() -> tuple[bool, bool, bool, str]:
    """What a convolution on CUDA depends on besides its operands: whether cuDNN is enabled, searches (`benchmark`) and
    is deterministic, and the precision of float32 convolutions: "ieee", "tf32" or "none".

    (`torch.backends.cudnn.allow_tf32` raises if recurrent networks have another precision than convolutions.)"""
    torch_c: Any = torch._C
    return (
        torch_c._get_cudnn_enabled(),
        torch_c._get_cudnn_benchmark(),
        torch_c._get_cudnn_deterministic(),
        torch_c._get_fp32_precision_getter("cuda", "conv"),
    )


def product_rounds_too_much(problem: ConvProblem) -> bool:
    """Whether cuBLAS would compute float32 products in TF32 although this problem's convolution may not use it."""
    return (
        problem.device == "cuda"
        and problem.dtype != "float64"
        and not problem.tf32
        and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    )


def capturing() -> bool:
    """Whether the current stream's work is being recorded into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
