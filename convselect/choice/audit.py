"""Whether a choice that was made by timing still holds: pairs of native's time and its own (`Settings.audit`)."""

from __future__ import annotations

import math

LOSS = 0.01
"""ln(t / t_native) from which an audit gives a choice up."""
MIN_AUDITS, MAX_AUDITS = 5, 24
Z = (3.75, 3.36, 3.14, 3.0, 2.9, 2.82, 2.76, 2.72, 2.68, 2.65, 2.62, 2.6, 2.58, 2.57, 2.55, 2.54, 2.53, 2.52, 2.51, 2.5)
"""Student's t at 99 % for MIN_AUDITS to MAX_AUDITS samples."""
NOISE_FLOOR = 0.01
"""Lower bound of the deviation of an audit's ln(t_native / t)."""


class Audits:
    """The last `MAX_AUDITS` pairs."""

    __slots__ = ("_gains", "_native_us")

    def __init__(self) -> None:
        self._native_us: float | None = None
        self._gains: list[float] = []

    def native(self, us: float) -> None:
        """The first half of a pair."""
        self._native_us = us

    @property
    def native_us(self) -> float | None:
        """Native's time, if the choice's own is to come."""
        return self._native_us

    def chosen(self, us: float) -> str | None:
        """The second half; a sentence without its subject if the choice is clearly slower than native by now."""
        if self._native_us is None:
            return None
        self._gains = [*self._gains[1 - MAX_AUDITS :], math.log(self._native_us / us)]
        self._native_us = None
        n = len(self._gains)
        if n < MIN_AUDITS:
            return None
        middle = sorted(self._gains)[n // 2]
        deviation = max(1.4826 * sorted(abs(g - middle) for g in self._gains)[n // 2], NOISE_FLOOR)
        if middle + Z[n - MIN_AUDITS] * 1.2533 * deviation / math.sqrt(n) < -LOSS:
            return f"was {math.exp(-middle):.2f} times slower than native in {n} audits"
        return None
