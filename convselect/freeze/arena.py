"""One block of memory for values that are not all alive at a time."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

_LINE = 64

T = TypeVar("T")


class Wanted(NamedTuple):
    """Memory for a value, from the step `first` to the step `last`, both included."""

    n_bytes: int
    first: int
    last: int


def laid_out(wanted: Mapping[T, Wanted]) -> tuple[dict[T, int], int]:
    """(where each value starts, the size of the block), in bytes, in multiples of 64; values that are alive at the same
    step do not overlap.

    The largest value comes first, each at the lowest address that is free while it lives: "greedy by size" of Pisarchyk
    and Lee, "Efficient memory management for deep neural net inference" (2020).
    """
    starts: dict[T, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # (start, end, first, last), in order
    for value, (n_bytes, first, last) in sorted(wanted.items(), key=lambda item: (-item[1].n_bytes, item[1].first)):
        n_bytes, at = -(-n_bytes // _LINE) * _LINE, 0
        for start, end, since, until in placed:
            if since <= last and first <= until:
                if start >= at + n_bytes:
                    break
                at = max(at, end)
        starts[value] = at
        bisect.insort(placed, (at, at + n_bytes, first, last))
    return starts, max((end for _, end, _, _ in placed), default=0)
