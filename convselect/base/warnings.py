"""Warnings, each given once per process."""

from __future__ import annotations

import warnings


class ConvselectWarning(UserWarning):
    """Something that convselect works around: results stay correct, but may take longer than necessary."""


_given: set[str] = set()


def warn_once(topic: str, message: str) -> None:
    """Warn with `message`, unless there was a warning on this topic before in this process."""
    if topic not in _given:
        _given.add(topic)
        warnings.warn(message, ConvselectWarning, stacklevel=3)
