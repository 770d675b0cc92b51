"""Where choices hold: what must be the same of processor, GPU and versions, as a fingerprint and in words."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import torch

from convselect import timing
from convselect.model import host
from convselect.store import fingerprint

_known: dict[str, tuple[str, dict[str, Any]]] = {}
descriptions: dict[str, dict[str, Any]] = {}
"""Fingerprint -> description, of all that were asked for."""


def fingerprint_of(device: str) -> str | None:
    """The fingerprint of this machine's processor, or of its current GPU; None where a GPU does not answer: then no
    choice of another process can be known to hold."""
    try:
        return environment(device)[0]
    except Exception:
        return None


def environment(device: str) -> tuple[str, dict[str, Any]]:
    """(fingerprint, description) of what must be the same for a choice to hold.

    Raises:
        RuntimeError, AssertionError: whatever torch raises where a GPU does not answer.
    """
    place = device if device == "cpu" else f"{device}:{torch.cuda.current_device() if _has_cuda() else None}"
    found = _known.get(place)
    if found is None:
        if device == "cpu":
            capability = host.cpu_capability()
            description = {
                "family": host.family_of_host(capability),
                "host_flags": host.host_flags(capability),
                "device": timing.cpu_model(),
                "torch": torch.__version__,
            }
            found = (host.fingerprint(), description)
        else:
            description = _of_gpu()
            found = (fingerprint(description), description)
        _known[place] = found
        descriptions[found[0]] = found[1]
    return found


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _of_gpu() -> dict[str, Any]:
    if not _has_cuda():
        return {"family": "no-gpu", "torch": torch.__version__}
    try:
        triton: str | None = importlib.metadata.version("triton")  # without importing it
    except importlib.metadata.PackageNotFoundError:
        triton = None
    capability = torch.cuda.get_device_capability()
    return {
        "family": host.family_of_cuda(capability),
        "host_flags": {},
        "device": torch.cuda.get_device_name(),
        "capability": list(capability),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),  # 0 where this build cannot tell
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton,
    }
