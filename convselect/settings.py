"""Policy and budgets: what a choice may use. Per call, per context, per process, per environment variable.

`CONVSELECT_POLICY`, `CONVSELECT_PRECISION`, `CONVSELECT_WORKSPACE_BYTES` and `CONVSELECT_CACHE_ENTRIES` set the
defaults of the process. A `Settings` object is interned: equal settings are the same object, so that it can
be part of a cache key at the cost of a pointer.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

PRECISIONS = ("exact", "native", "fast")


@dataclass(frozen=True, eq=False, slots=True)
class Settings:
    """What one context allows.

    Attributes:
        policy: "auto" (memory, then model, then native), "native", or the name of an algorithm, which then runs
            or raises `NotApplicable`.
        precision: "exact" admits direct sums only, "native" a small multiple of native's rounding error
            (at most 1e-5 relative L2 in float32), "fast" at most 2e-5.
        workspace_bytes: extra memory an automatic choice may use at its peak.
    """

    policy: str
    precision: str
    workspace_bytes: int

    def __reduce__(self) -> tuple[object, ...]:
        return (_intern, (self.policy, self.precision, self.workspace_bytes))


@functools.lru_cache(maxsize=1024)
def _intern(policy: str, precision: str, workspace_bytes: int) -> Settings:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r}")
    if workspace_bytes < 0:
        raise ValueError(f"workspace_bytes must not be negative, got {workspace_bytes}")
    return Settings(policy, precision, workspace_bytes)


def _from_environment() -> Settings:
    return _intern(
        os.environ.get("CONVSELECT_POLICY", "auto"),
        os.environ.get("CONVSELECT_PRECISION", "native"),
        int(os.environ.get("CONVSELECT_WORKSPACE_BYTES", 512 * 2**20)),
    )


CACHE_ENTRIES = int(os.environ.get("CONVSELECT_CACHE_ENTRIES", 4096))
"""How many problems, and how many call signatures, are remembered per process before the least recently used go."""

_default = _from_environment()
_override: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("convselect_settings", default=None)


def current() -> Settings:
    """The settings in force here: those of the innermost `use(...)`, else the process's."""
    return _override.get() or _default


def defaults() -> Settings:
    """The process's settings: those of `set_defaults`, else of the environment."""
    return _default


@functools.lru_cache(maxsize=1024)
def with_policy(settings: Settings, policy: str) -> Settings:
    """The same budgets under another policy."""
    return _intern(policy, settings.precision, settings.workspace_bytes)


def _merged(base: Settings, changes: dict[str, object]) -> Settings:
    values = asdict(base)
    for name, value in changes.items():
        if value is not None:
            values[name] = value
    return _intern(values["policy"], values["precision"], values["workspace_bytes"])


@contextlib.contextmanager
def use(
    policy: str | None = None, *, precision: str | None = None, workspace_bytes: int | None = None
) -> Iterator[Settings]:
    """Within this context, choose by `policy` and within these budgets. Nests; local to the thread or task.

    A backward pass uses the settings under which its forward ran.

    Raises:
        ValueError: for an unknown precision or a negative workspace. An unknown policy is named at the first call.
    """
    settings = _merged(current(), {"policy": policy, "precision": precision, "workspace_bytes": workspace_bytes})
    token = _override.set(settings)
    try:
        yield settings
    finally:
        _override.reset(token)


def set_defaults(
    policy: str | None = None, *, precision: str | None = None, workspace_bytes: int | None = None
) -> Settings:
    """Change the process's defaults (all threads, outside any `use(...)`); returns them. Raises as `use` does."""
    global _default
    _default = _merged(_default, {"policy": policy, "precision": precision, "workspace_bytes": workspace_bytes})
    return _default
