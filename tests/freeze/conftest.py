"""Layouts and candidates that are given instead of measured."""

from __future__ import annotations

import pytest

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.timing import Timing
from convselect.freeze import layer as freeze_layer
from convselect.freeze import plan, residual
from convselect.store import process

VOLUMES = ("winograd4_slices", "depthwise_slices", "product_slices", "product_phases")
KERNELS = (
    *VOLUMES,
    "winograd4",
    "winograd6",
    "winograd2",
    "depthwise",
    "grouped",
    "strassen",
    "product",
    "direct",
    "direct_slices",
)
PREFERENCES = {
    "nchw kernels": (CONTIGUOUS, (*KERNELS, "onednn_packed")),
    "nhwc kernels": (CHANNELS_LAST, (*KERNELS, "onednn_packed")),
    "nhwc onednn": (CHANNELS_LAST, ("gemm", "onednn_packed")),
    "nchw native": (CONTIGUOUS, ()),
}


@pytest.fixture(autouse=True)
def _no_store():
    """What one test chooses must not decide what the next one sees."""
    process.configure("off")
    yield
    process.configure()


@pytest.fixture(params=PREFERENCES)
def forced(request, monkeypatch):
    """Nothing is measured: the layout and the candidates are these, so that each is really what runs."""
    layout, names = PREFERENCES[request.param]

    def timed(functions, rounds, deadline_s):
        return {name: Timing((1.0 if name == layout else 2.0,)) for name in functions}

    def fastest(functions, rounds, deadline_s, handicaps=None, took_us=None):
        return next((name for name in names if name in functions), "native")

    monkeypatch.setattr(plan, "timed", timed)
    monkeypatch.setattr(freeze_layer, "fastest", fastest)
    monkeypatch.setattr(residual, "fastest", lambda *_: "block" if "direct" in names else "apart")
    return layout
