"""Measures the peak of extra memory that a call takes on the CPU, from the events of torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_extra_bytes(fn: Callable[[], Tensor]) -> int:
    """Most bytes that torch's CPU allocator held at once on behalf of `fn()`, less the storage of the result.

    Counts what was allocated since the call began, so operands are not in it. What libraries allocate behind torch's
    back (BLAS scratch) is not seen. A result that is a view of a larger storage counts only with its own elements:
    the rest of that storage is extra. `fn` runs once: call it before if a first call's caches shall not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = fn()
    events = record.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):  # stable: equal times keep their order of recording
        held += change
        peak = max(peak, held)
    return peak - result.numel() * result.element_size()
