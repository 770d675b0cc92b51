"""Warnings that are given once per process."""

from __future__ import annotations

import warnings


class ConvselectWarning(UserWarning):
    """Something convselect works around: results stay right, speed may not be what it could be."""


_given: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn with `message` unless something was said on this topic before in this process."""
    if topic not in _given:
        _given.add(topic)
        warnings.warn(message, ConvselectWarning, stacklevel=3)
