"""Which calls are no turns of a trial: those that need the same bits twice, and those that only look."""

from __future__ import annotations

import sys

import torch

_MODULES = ("torch.utils.checkpoint", "torch.autograd.gradcheck", "convselect.explain")
_globals: frozenset[int] = frozenset()
"""Identities of these modules' dictionaries: to compare one reads nothing of a frame's module, which is in no cache."""


def must_repeat(device: torch.device, own_frames: int) -> bool:
    """Whether the call at hand has to give the bits that another one gave, or must not be timed or counted.

    Args:
        own_frames: how many frames from the caller's on are of this package's dispatch, and need not be looked at.
    """
    global _globals
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    if len(_globals) < len(_MODULES):
        _globals = frozenset(id(vars(sys.modules[name])) for name in _MODULES if name in sys.modules)
    known = _globals
    frame = sys._getframe(1 + own_frames)
    while frame is not None:
        if id(frame.f_globals) in known:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
