"""The state of a process's store, for the doctor and for users."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convselect.store.process import _Process


def described(process: _Process) -> dict[str, Any]:
    """What `process.status` returns."""
    told: dict[str, Any] = dict.fromkeys(("path", "journal", "rows", "bytes"))
    told |= {"enabled": False, "exists": False, "healthy": False}
    with contextlib.suppress(OSError):
        told["path"] = None if process.off else str(process.path)
    store = process.opened()
    if store is not None:
        try:
            choices, measurements = store.counts()
            told |= {
                "exists": True,
                "journal": store.journal,
                "rows": choices + measurements,
                "choices": choices,
                "measurements": measurements,
                **dict(zip(("self_tests", "corrections"), store.learnt_counts(), strict=True)),
                "bytes": store.used_bytes,
                "healthy": not store.problems(),
            }
        except Exception as error:
            process.failed(error)
    elif process.why_off is None:
        told["healthy"] = not process.resting  # there is no file yet
    system = process.opened_system()
    told |= {
        "enabled": process.why_off is None,
        "why_off": process.why_off,
        "waiting": len(process.waiting),
        "system_store": None if system is None else str(system.path),
    }
    return told
