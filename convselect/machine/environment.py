"""The environment of measurements and choices: processor or GPU and versions, as a description and a fingerprint."""

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

from convselect.base.version import __version__
from convselect.machine import host

MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables that decide whether glibc returns a large result's pages after every call and faults them in at the next.
"""

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")

_VARYING = ("load_average", "threads", "cpus")
"""Fields that differ from run to run but leave times comparable; a problem has its own thread count."""

_known: dict[str, tuple[str, dict[str, Any]]] = {}
"""Device -> (fingerprint, description)."""
descriptions: dict[str, dict[str, Any]] = {}
"""Fingerprint -> description, for all environments that `choice_environment` returned."""


def fingerprint(description: Mapping[str, Any]) -> str:
    """16 hex digits of the SHA-256 over the parts of a description that must be equal for times to be compared."""
    kept = {key: value for key, value in description.items() if key not in _VARYING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def cpu_fingerprint() -> str:
    """The fingerprint of this machine's processor, instruction set and torch. Measurements made here are valid on
    machines with exactly the same fingerprint."""
    return fingerprint(_cpu())


def fingerprint_of(device: str) -> str | None:
    """The fingerprint of this machine's processor, or of its current GPU; None if a GPU does not answer: then choices
    of other processes cannot be used."""
    try:
        return choice_environment(device)[0]
    except Exception:
        return None


def choice_environment(device: str) -> tuple[str, dict[str, Any]]:
    """(fingerprint, description) of everything that must be equal for a choice to be valid.

    Args:
        device: "cpu", or "cuda" for the current GPU.

    Raises:
        RuntimeError, AssertionError: torch's error if a GPU does not answer.
    """
    place = device if device == "cpu" else f"{device}:{torch.cuda.current_device() if _has_cuda() else None}"
    found = _known.get(place)
    if found is None:
        description = _cpu() if device == "cpu" else _gpu()
        found = _known[place] = (fingerprint(description), description)
        descriptions[found[0]] = description
    return found


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _cpu() -> dict[str, Any]:
    capability = host.cpu_capability()
    return {
        "family": host.family_of_host(capability),
        "host_flags": host.host_flags(capability),
        "device": cpu_model(),
        "torch": torch.__version__,
    }


def _gpu() -> dict[str, Any]:
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
        "driver": getattr(torch._C, "_cuda_getDriverVersion", int)(),  # 0 if this build cannot tell
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "triton": triton,
    }


def run_environment() -> dict[str, object]:
    """The environment of a measurement: everything known to change its result. Values have JSON types."""
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
    """The processor's name in /proc/cpuinfo, with family and model."""
    try:
        fields = dict(
            re.split(r"\s*:\s*", line, maxsplit=1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        )
    except OSError:
        fields = {}
    # Hypervisors shorten the name ("AMD EPYC"); family and model still identify the generation.
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


def user_cache() -> Path:
    """The directory of this user's files: `CONVSELECT_CACHE`, by default a folder of the platform's cache directory (on
    Linux below `XDG_CACHE_HOME` or ~/.cache).

    Raises:
        OSError: if this user has no home.
    """
    if own := os.environ.get("CONVSELECT_CACHE"):
        return Path(own)
    import platformdirs

    try:
        found = Path(platformdirs.user_cache_dir("convselect", appauthor=False))
    except RuntimeError as error:
        raise OSError(f"this user has no home directory to keep a cache in: {error}") from error
    if not found.is_absolute():  # earlier versions of platformdirs leave a "~" that could not be expanded
        raise OSError("this user has no home directory to keep a cache in")
    return found
