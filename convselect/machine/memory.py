"""Free and total memory of a device, for workspaces given as a share of it."""

from __future__ import annotations

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Files of the two versions of the interface: (limit, bytes in use, field of memory.stat for cached files in them).
_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes(device: str) -> int | None:
    """Bytes that can be allocated on this kind of device now; None if that is not known.

    On the CPU, the system's available memory, within the limits of the process's control groups. On "cuda", the free
    memory of the current device, plus what PyTorch's caching allocator holds unused.

    Args:
        device: "cpu" or "cuda".
    """
    try:
        if device == "cuda":
            if not torch.cuda.is_available():
                return None  # the problem is for another machine
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            return int(torch.cuda.mem_get_info()[0]) + cached
        import psutil  # takes 10 ms, and most choices never need it

        return min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _cgroup_limits())])
    except (ImportError, OSError, RuntimeError):
        return None


def total_bytes(device: str) -> int | None:
    """All bytes of this kind of device, in use or not; None if that is not known."""
    try:
        if device == "cuda":
            return int(torch.cuda.mem_get_info()[1])
        import psutil

        return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits())])
    except (ImportError, OSError, RuntimeError):
        return None


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every control group above this process that has a limit."""
    return [
        found for folder in _cgroup_folders() for names in _VERSIONS if (found := _limit_of(folder, *names)) is not None
    ]


def _cgroup_folders() -> list[Path]:
    """The process's own group and those above it, as far as they are visible in this mount."""
    folders: list[Path] = []
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP / "memory" if controllers else _CGROUP
        own = root / path.strip("/")
        folders += [own, *(above for above in own.parents if above == root or root in above.parents)]
    return folders


def _limit_of(folder: Path, limit_name: str, used_name: str, cached_name: str) -> tuple[int, int] | None:
    try:
        limit = int((folder / limit_name).read_text())  # "max" (no limit) raises ValueError
        used = int((folder / used_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit, max(0, used - int(statistics.get(cached_name, 0)))
    except (OSError, ValueError):
        return None
