"""Policy and budgets: what a choice may use. Per call, per context, per process, per environment variable.

The process's defaults come from the environment:

    CONVSELECT_POLICY            verify (default), auto, measure, native, or the name of an algorithm
    CONVSELECT_PRECISION         exact, native, fast
    CONVSELECT_WORKSPACE         bytes ("512MiB", "2e8"), a share of free memory ("25%"), or both ("1GiB,25%")
    CONVSELECT_BATCH_INVARIANT   1: results do not depend on the batch size
    CONVSELECT_DISABLE           algorithms that may not be chosen: "winograd,fft"
    CONVSELECT_AUDIT             one call in AUDIT checks that a choice still pays; 0 for none
    CONVSELECT_CACHE_ENTRIES     problems, and call signatures, cached per process

A `Settings` object is interned: equal settings are the same object, so that a cache key can compare it by identity.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

PRECISIONS = ("exact", "native", "fast")
CHOOSING = ("auto", "verify", "measure")
"""Policies that choose; every other names an algorithm."""
TIMING = ("verify", "measure")
"""Policies that time calls."""
DEFAULT_WORKSPACE_BYTES = 512 * 2**20


@dataclass(frozen=True, eq=False, slots=True)
class Settings:
    """Policy and budgets of one context.

    Attributes:
        policy: "auto" (memory, store, model, then native), "verify" (the same, and the first real calls of a problem
            check it), "measure" (everything is timed before the first call), "native", or the name of an algorithm,
            which then runs or raises `NotApplicable`.
        precision: the rounding error that an automatic choice may have; see `use`.
        workspace_bytes: extra memory that an automatic choice may use at its peak.
        workspace_share: and at most this share of the memory that is free when the choice is made; 0 to 1.
        batch_invariant: whether results for one image must not depend on the others in its batch, to the last bit.
        disabled: names of algorithms, or their beginnings, that no automatic choice takes; sorted.
        audit: one call in `audit` of a verified choice is timed against native, to see if it still pays; 0 for none.
    """

    policy: str = "verify"
    precision: str = "native"
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    workspace_share: float = 1.0
    batch_invariant: bool = False
    disabled: tuple[str, ...] = ()
    audit: int = 0

    @property
    def chooses(self) -> bool:
        """Whether the policy chooses automatically, instead of naming an algorithm."""
        return self.policy in CHOOSING

    @property
    def budgets(self) -> str:
        """The budgets as one line of text. A choice made under other budgets is not valid under these."""
        parts = [self.precision, f"{self.workspace_bytes}B"]
        if self.workspace_share < 1:
            parts.append(f"{self.workspace_share:g}")
        if self.batch_invariant:
            parts.append("batch_invariant")
        parts += [f"-{name}" for name in self.disabled]
        return " ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (_intern, _values(self))

    def __str__(self) -> str:
        return json.dumps(dict(zip(_FIELDS, _values(self), strict=True)))


_FIELDS = tuple(field.name for field in fields(Settings))


def _values(settings: Settings) -> tuple[object, ...]:
    return tuple(getattr(settings, name) for name in _FIELDS)


def _intern(
    policy: str = "verify",
    precision: str = "native",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    workspace_share: float = 1.0,
    batch_invariant: bool = False,
    disabled: str | Iterable[str] = (),
    audit: int = 0,
) -> Settings:
    """The one object of these values. Raises ValueError, with a sentence, if one cannot be had."""
    for name, value in (("policy", policy), ("precision", precision)):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a name, not {_shown(value)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {_shown(precision)}")
    size, share = _whole("workspace_bytes", workspace_bytes), _number("workspace_share", workspace_share)
    if not 0 <= share <= 1:
        raise ValueError(f"workspace_share must be between 0 and 1, got {_shown(workspace_share)}")
    if not isinstance(batch_invariant, int) or batch_invariant not in (0, 1):
        raise ValueError(f"batch_invariant must be True or False, not {_shown(batch_invariant)}")
    # The cache distinguishes keyword from positional arguments, so always pass all of them by position.
    return _interned(
        str(policy), str(precision), size, share, bool(batch_invariant), _names(disabled), _whole("audit", audit)
    )


def _shown(value: object) -> str:
    """A value in a message: its beginning, whatever it is."""
    try:
        return f"{value!r:.60}"
    except Exception:  # thousands of digits, or lists in lists
        return f"this {type(value).__name__}"


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise ValueError(f"{name} must be a number, not {_shown(value)}")
    try:
        return float(value)
    except Exception:
        raise ValueError(f"{name} must be a number, not {_shown(value)}") from None


def _whole(name: str, value: Any) -> int:
    """A whole number that is not negative; 2e8 is one as well."""
    number = value if type(value) is int else _number(name, value)
    if not 0 <= number < 2**63 or number != int(number):
        raise ValueError(f"{name} must be a whole number, not negative and below 2**63; got {_shown(value)}")
    return int(number)


@functools.lru_cache(maxsize=1024)
def _interned(*values: Any) -> Settings:
    return Settings(*values)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Settings:
    """Inverse of `str(settings)`; fields that an older version did not write have their defaults. Raises ValueError if
    the text is not of this form."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not set(values) <= set(_FIELDS):
        raise ValueError(f"not settings: {_shown(text)}")
    return _intern(**values)


# ---- the environment --------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_workspace(text: str) -> tuple[int, float]:
    """(bytes, share of free memory) from "512MiB", "25%", or both separated by a comma.

    Raises:
        ValueError: if the text has another form.
    """
    size, share = None, None
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?(?:e[0-9]{1,2})?)\s*(%|[kmg]?i?b?)\s*", part.lower())
        if found is None or (found[2] != "%" and found[2] not in _UNITS):
            raise ValueError(f'a workspace is written "512MiB", "25%" or "512MiB,25%", not {_shown(text)}')
        if found[2] == "%":
            share = float(found[1]) / 100
        else:
            size = min(int(float(found[1]) * _UNITS[found[2]]), 2**63 - 1)
    # A share alone is the whole budget.
    return (2**63 - 1 if size is None else size), (1.0 if share is None else share)


def _names(disabled: str | Iterable[str]) -> tuple[str, ...]:
    """Names in a fixed order, so that equal sets of them are equal settings."""
    try:
        names = disabled.split(",") if isinstance(disabled, str) else list(disabled)
        return tuple(sorted({name.strip() for name in names if name.strip()}))
    except (AttributeError, TypeError):
        raise ValueError(f"disable must be names of algorithms, not {_shown(disabled)}") from None


_SWITCH = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def _switch(text: str) -> bool:
    if text.strip().lower() not in _SWITCH:
        raise ValueError("it is 1 or 0")
    return _SWITCH[text.strip().lower()]


def _count(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text.strip()):
        raise ValueError("it is a whole number")
    return int(text)


def _workspace(text: str) -> dict[str, Any]:
    return dict(zip(("workspace_bytes", "workspace_share"), parse_workspace(text), strict=True))


_VARIABLES: dict[str, Callable[[str], dict[str, Any]]] = {
    "CONVSELECT_POLICY": lambda text: {"policy": text},
    "CONVSELECT_PRECISION": lambda text: {"precision": text},
    "CONVSELECT_WORKSPACE": _workspace,
    "CONVSELECT_BATCH_INVARIANT": lambda text: {"batch_invariant": _switch(text)},
    "CONVSELECT_DISABLE": lambda text: {"disabled": _names(text)},
    "CONVSELECT_AUDIT": lambda text: {"audit": _count(text)},
}


def _from_environment() -> Settings:
    """The settings of the environment variables. Raises ValueError if one has a value that it cannot have: a request
    that was made explicitly is not replaced by something else."""
    found: dict[str, Any] = {}
    for name, read in _VARIABLES.items():
        text = os.environ.get(name, "")
        if not text.strip():
            continue
        try:
            found |= read(text)
            _intern(**found)
        except ValueError as error:
            raise ValueError(f"{name}={_shown(text)}: {error}") from None
    return _intern(**found)


def _cache_entries() -> int:
    text = os.environ.get("CONVSELECT_CACHE_ENTRIES", "").strip() or "4096"
    try:
        return _count(text)
    except ValueError as error:
        raise ValueError(f"CONVSELECT_CACHE_ENTRIES={_shown(text)}: {error}") from None


CACHE_ENTRIES = _cache_entries()
"""Most problems, and most call signatures, cached per process; then the least recently used are evicted."""

_default = _from_environment()
_override: contextvars.ContextVar[Settings | None] = contextvars.ContextVar("convselect_settings", default=None)


# ---- in force ---------------------------------------------------------------------------------------------------


def current() -> Settings:
    """The current settings: those of the innermost `use(...)`, else the process's."""
    return _override.get() or _default


def in_use() -> bool:
    """Whether a `use(...)` is in force, rather than the process's settings."""
    return _override.get() is not None


def defaults() -> Settings:
    """The process's settings: those of `set_defaults`, else of the environment variables."""
    return _default


@functools.lru_cache(maxsize=1024)
def with_policy(settings: Settings, policy: str) -> Settings:
    """The same budgets under another policy."""
    return _changed(settings, policy)


@functools.lru_cache(maxsize=1024)
def exactly(settings: Settings) -> Settings:
    """The same policy and budgets under precision "exact"."""
    return _changed(settings, precision="exact")


def _changed(
    base: Settings, policy: str | None = None, disable: str | Iterable[str] | None = None, **budgets: Any
) -> Settings:
    changes = {"policy": policy, "disabled": None if disable is None else _names(disable), **budgets}
    values: dict[str, Any] = dict(zip(_FIELDS, _values(base), strict=True))
    values |= {name: value for name, value in changes.items() if value is not None}
    return _intern(**values)


@contextlib.contextmanager
def use(
    policy: str | None = None,
    *,
    precision: str | None = None,
    workspace_bytes: int | None = None,
    workspace_share: float | None = None,
    batch_invariant: bool | None = None,
    disable: str | Iterable[str] | None = None,
    audit: int | None = None,
) -> Iterator[Settings]:
    """Within this context, choose by `policy` and within these budgets. Nests; local to the thread or task.

    Arguments that are None keep the outer value. A backward pass uses the settings under which its forward ran. Budgets
    limit automatic choices and are applied after ranking: `explain` says what each of them has ruled out. A policy that
    names an algorithm overrides them, except batch invariance, which holds for every policy.

    Args:
        policy: "auto", "verify", "measure", "native" or an algorithm's name.
        precision: relative L2 error in float32, against float64. "exact": direct sums only, no transforms, so that
            zeros, whole numbers and signs are kept (docs/exactness.md); at most 2.5e-6, and 8 times native's own error
            if that is more than 1e-6. "native" (the default): at most 3e-6, and 20 times native's if that is more than
            1e-6. "fast": at most 2e-5, and 100 times native's; large Winograd tiles, 3 to 12 % more speed in networks
            of 3x3 and 5x5 layers. Weight gradients, sums over the batch and all pixels, may have twice that. 16-bit
            results are rounded once, from sums in float32. A frozen model has large tiles where its results allow it.
        workspace_bytes, workspace_share: bounds on extra memory, in bytes and as a share of the memory that is free
            when the choice is made (within the process's control groups; on a GPU including what PyTorch's allocator
            holds unused); both hold. The share does not limit workspaces up to 16 MiB. Under `batch_invariant` it is a
            share of all memory.
        batch_invariant: y[i] and grad_x[i] of a batch are, to the last bit, what x[i:i+1] alone would give. The choice
            is that for one image, and images run one by one unless the algorithm is known to give every image the same
            bits in any batch. Costs speed. A weight gradient is a sum over the batch and stays as it is; so do calls
            that are left to PyTorch (subclasses, tracers, dispatch modes); on a GPU it takes a native convolution that
            is deterministic. A frozen model runs as it was before.
        disable: algorithms that may not be chosen, as "winograd,fft" or a list: names, or their parts before a number
            or before another word ("winograd": all of winograd2 to winograd7; "fft": fft and fft_tiled). Replaces the
            outer setting; () allows all. Native cannot be disabled.
        audit: time one call in `audit` of a verified choice against native; 0 for never.

    Raises:
        ValueError: if a value is outside its range. An unknown policy raises at the first call; the first choice warns
            about an unknown name in `disable`.
    """
    settings = _changed(
        current(),
        policy,
        precision=precision,
        workspace_bytes=workspace_bytes,
        workspace_share=workspace_share,
        batch_invariant=batch_invariant,
        disable=disable,
        audit=audit,
    )
    token = _override.set(settings)
    try:
        yield settings
    finally:
        _override.reset(token)


def set_defaults(policy: str | None = None, **budgets: Any) -> Settings:
    """Change the process's defaults (all threads, outside any `use(...)`); returns them. Arguments and errors are those
    of `use`."""
    global _default
    _default = _changed(_default, policy, **budgets)
    return _default


def set_default_settings(settings: Settings) -> None:
    """Replace all of the process's defaults by these."""
    global _default
    _default = settings
