"""Make all ranks of a process group use the choices of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from convselect.base import lru, settings
from convselect.base.warnings import warn_once
from convselect.kernels import _library
from convselect.kernels.pool import BY_NAME
from convselect.model import loaded
from convselect.store import process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def same_choices(group: ProcessGroup | None = None) -> None:
    """Make all ranks of a process group choose alike: rank 0 decides.

    Ranks choose differently if their machines were calibrated differently or have other artifacts or defaults; then
    their results differ in the last digits and, what matters more, their steps take different times. A choice follows
    from the problem, the settings and the model, so this sends rank 0's model and rank 0's defaults (`set_defaults`) to
    the others once, and forgets earlier choices. Timing on each rank would make choices differ again: default policies
    that time calls become "auto", and no rank reads or writes a store. After this call nothing is communicated: ranks
    may meet different problems at different times, and no rank waits for another.

    Call it on every rank of the group, after `init_process_group` and before training; settings of `use(...)` stay
    local to each rank. Ranks with other thread counts have other problems. Models for GPUs are shipped, not calibrated,
    and so are the same everywhere already. Undone by `own_choices`.

    Args:
        group: the default process group if None.

    Raises:
        RuntimeError, ValueError: if there is no process group, or this rank is not in it.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("same_choices needs a process group: call torch.distributed.init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this rank is not in the group")
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else None
    agreed = settings.defaults()
    if agreed.policy in settings.TIMING:
        agreed = settings.with_policy(agreed, "auto")
    decided: list[Any] = [(loaded.get() if rank == 0 else None, agreed)]
    dist.broadcast_object_list(decided, src=dist.get_global_rank(group, 0) if group else 0, group=group, device=device)
    predictor, defaults = decided[0]
    abilities: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(abilities, _abilities(), group=group)
    settings.set_default_settings(defaults)
    loaded.override(predictor)
    process.configure("off")
    lru.clear()
    if any(other != abilities[0] for other in abilities):
        differing = sorted({key for other in abilities for key in other if other[key] != abilities[0][key]})
        warn_once(
            "ranks differ",
            f"convselect: the ranks differ in {', '.join(differing)}; if that matters, so do their choices still.",
        )


def own_choices() -> None:
    """Let this rank choose by its own model and store again; the defaults stay as they are. No communication."""
    loaded.use_local()
    process.configure()
    lru.clear()


def _abilities() -> dict[str, Any]:
    """Properties of the rank that choices depend on besides problem, settings and model."""
    return {
        "algorithms": sorted(BY_NAME),
        "GPU": torch.cuda.is_available() and torch.cuda.get_device_capability(),
        "C kernels": _library.available() and _library.isa(),
        "number of threads": torch.get_num_threads(),
    }
