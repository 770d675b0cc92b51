"""Where choices hold: what must be the same of processor, GPU and versions, as a fingerprint and in words."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from convselect._version import __version__
from convselect.machine import host

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""What decides whether glibc gives a large result's pages back after every call and faults them in at the next."""

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

_known: dict[str, tuple[str, dict[str, Any]]] = {}
descriptions: dict[str, dict[str, Any]] = {}
"""Fingerprint -> description, of all that were asked for."""


def fingerprint_of(device: str) -> str | None:
    """The fingerprint of this machine's processor, or of its current GPU; None where a GPU does not answer: then no
    choice of another process can be known to hold."""
    try:
        return choice_environment(device)[0]
    except Exception:
        return None


def choice_environment(device: str) -> tuple[str, dict[str, Any]]:
    """(fingerprint, description) of what must be the same for a choice to hold.

    Raises:
        RuntimeError, AssertionError: whatever torch raises where a GPU does not answer.
    """
    place = device if device == "cpu" else f"{device}:{torch.cuda.current_device() if _has_cuda() else None}"
    found = _known.get(place)
    if found is None:
        description = _of_cpu() if device == "cpu" else _of_gpu()
        found = (fingerprint(description), description)
        _known[place] = found
        descriptions[found[0]] = found[1]
    return found


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _of_cpu() -> dict[str, Any]:
    capability = host.cpu_capability()
    return {
        "family": host.family_of_host(capability),
        "host_flags": host.host_flags(capability),
        "device": cpu_model(),
        "torch": torch.__version__,
    }


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


# What differs from run to run without making times incomparable.
_PASSING = ("load_average", "threads", "cpus")


def fingerprint(environment: Mapping[str, Any]) -> str:
    """Of what must be equal for times to be compared: all of a description but load and thread count (a problem has its
    own)."""
    kept = {key: value for key, value in environment.items() if key not in _PASSING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def cpu_fingerprint() -> str:
    """Of this machine, as far as it changes which algorithm is fastest: processor, instruction set, torch. What is
    measured here holds where this is the same, exactly."""
    return fingerprint(_of_cpu())


def user_cache() -> Path:
    """Where this user's files of convselect lie: `CONVSELECT_CACHE`, else a folder of the platform's cache directory
    (on Linux below `XDG_CACHE_HOME` or ~/.cache).

    Raises:
        OSError: where this user has no home.
    """
    if own := os.environ.get("CONVSELECT_CACHE"):
        return Path(own)
    import platformdirs

    try:
        found = Path(platformdirs.user_cache_dir("convselect", appauthor=False))
    except RuntimeError as error:
        raise OSError(f"this user has no home directory to keep a cache in: {error}") from error
    if not found.is_absolute():  # earlier versions leave a "~" that nobody could expand
        raise OSError("this user has no home directory to keep a cache in")
    return found


def run_environment() -> dict[str, object]:
    """Where a measurement was made: everything known to change its result. Values are JSON's types."""
    return {
        "device": cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch": torch.__version__,
        "onednn": _onednn_version(),
        "python": platform.python_version(),
        "convselect": __version__,
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "malloc": {name: os.environ.get(name) for name in MALLOC_VARIABLES},
        "isa_limits": {name: os.environ.get(name) for name in ISA_VARIABLES},
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    """The processor as /proc/cpuinfo names it, with family and model."""
    try:
        fields = dict(
            re.split(r"\s*:\s*", line, maxsplit=1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        )
    except OSError:
        fields = {}
    # Hypervisors shorten the name ("AMD EPYC"); family and model still tell generations apart.
    name = fields.get("model name", "").strip() or platform.processor() or platform.machine()
    if "cpu family" in fields and "model" in fields:
        name += f" (family {fields['cpu family'].strip()} model {fields['model'].strip()})"
    return name


def _onednn_version() -> str | None:
    """oneDNN's version from PyTorch's build summary, which says "Intel(R) MKL-DNN v3.7.1 (Git Hash ...)"."""
    if not torch.backends.mkldnn.is_available():
        return None
    found = re.search(r"(?:MKL-DNN|oneDNN) v?([\d.]+\d)", torch.__config__.show())
    return found.group(1) if found else "unknown"
