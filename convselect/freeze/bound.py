"""A call of the C library, with everything it needs."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bound(NamedTuple):
    """A call `function(*arguments)` of the C library, and the objects whose memory its arguments point to."""

    function: Any
    arguments: tuple[Any, ...]
    owners: Any
