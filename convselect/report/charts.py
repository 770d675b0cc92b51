"""Figures -> rectangles and texts in the coordinates of an SVG, which templates/charts.html draws. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 1080.0
COLOURS = 8
"""Number of colours for parts of a whole; further parts share the last colour."""

BIN_EDGES = (0.98, 1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Edges of the bins in which speed-ups are counted; up to 2 % from 1 is noise."""


@dataclass(frozen=True)
class Rect:
    """`kind` is a CSS class; `text` is written inside or beside it, `tip` is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    text: str
    kind: str = ""


@dataclass(frozen=True)
class Chart:
    """`ticks` are (x, text) of vertical lines from `top` to `bottom`; `title` is for screen readers."""

    title: str
    height: float
    rects: tuple[Rect, ...]
    texts: tuple[Text, ...]
    ticks: tuple[tuple[float, str], ...] = ()
    top: float = 0.0
    bottom: float = 0.0
    width: float = WIDTH


@dataclass(frozen=True)
class Pair:
    """One line of a chart of pairs: a value of each side, and what to write beside them."""

    label: str
    small: str
    first: float
    second: float
    first_text: str
    second_text: str


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """About `count` round numbers from 0 up to `most`, 1, 2 or 5 times a power of ten apart."""
    if not (most > 0 and math.isfinite(most)):
        return [0.0]
    step = 10.0 ** math.floor(math.log10(most / count))
    step *= next((f for f in (1, 2, 5, 10) if most / (f * step) <= count), 10)
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def shortened(text: str, most: int) -> str:
    """At most `most` characters; a longer text loses its middle, since layers' names differ at their ends."""
    if len(text) <= most:
        return text
    head = (most - 1) // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def pairs(title: str, rows: Sequence[Pair], tick_text: Mapping[float, str] | None = None) -> Chart:
    """Two horizontal bars per line, on one scale, with labels to the left of them."""
    left, right, line, bar, top = 330.0, WIDTH - 150.0, 40.0, 13.0, 22.0
    most = max((max(row.first, row.second) for row in rows), default=1.0) or 1.0
    scale = (right - left) / most
    rects, texts = [], []
    for i, row in enumerate(rows):
        y = top + i * line + 5
        texts += [Text(left - 10, y + 11, row.label, "label"), Text(left - 10, y + 26, row.small, "small")]
        for j, (value, text, kind) in enumerate(
            ((row.first, row.first_text, "native"), (row.second, row.second_text, "chosen"))
        ):
            tip = f"{row.label}: {text}"
            rects.append(Rect(left, y + j * (bar + 2), max(value * scale, 1.0), bar, kind, text, tip))
    bottom = top + len(rows) * line + 4
    ticks = tuple((left + value * scale, text) for value, text in (tick_text or {}).items() if value <= most)
    return Chart(title, bottom + 6, tuple(rects), tuple(texts), ticks, top, bottom)


def scale_of(rows: Sequence[Pair]) -> list[float]:
    """The positions of the ticks in `pairs`."""
    return nice_ticks(max((max(row.first, row.second) for row in rows), default=0.0))


@dataclass(frozen=True)
class Bar:
    """A whole and its parts: (CSS class, value, text, tip)."""

    label: str
    text: str
    parts: tuple[tuple[str, float, str, str], ...]


def stacks(title: str, bars: Sequence[Bar]) -> Chart:
    """Horizontal bars on one scale, divided into parts; a part's text is left out if it would not fit."""
    left, right, line, bar, top = 130.0, WIDTH - 110.0, 52.0, 38.0, 6.0
    most = max((sum(value for _, value, _, _ in one.parts) for one in bars), default=1.0) or 1.0
    scale = (right - left) / most
    rects, texts = [], []
    for i, one in enumerate(bars):
        x, y = left, top + i * line
        for kind, value, text, tip in one.parts:
            width = value * scale
            rects.append(Rect(x, y, width, bar, kind, text if 6.5 * len(text) + 8 <= width else "", tip))
            x += width
        texts += [Text(left - 10, y + 24, one.label, "label"), Text(x + 8, y + 24, one.text, "value")]
    return Chart(title, top + len(bars) * line, tuple(rects), tuple(texts))


def columns(title: str, names: Sequence[str], series: Mapping[str, Sequence[int]]) -> Chart:
    """Upright bars side by side, one of each series (CSS class -> counts) per name."""
    left, top, bottom = 10.0, 24.0, 224.0
    wide = (WIDTH - 2 * left) / max(1, len(names))
    most = max((max(counts, default=0) for counts in series.values()), default=0) or 1
    bar = min(46.0, (wide - 16) / max(1, len(series)))
    rects, texts = [], []
    for i, name in enumerate(names):
        middle = left + (i + 0.5) * wide
        texts.append(Text(middle, bottom + 18, name, "middle"))
        start = middle - bar * len(series) / 2
        for j, (kind, counts) in enumerate(series.items()):
            height = (bottom - top) * counts[i] / most
            tip = f"{name}: {counts[i]:,}"
            rects.append(Rect(start + j * bar, bottom - height, bar - 2, height, kind, "", tip))
            if counts[i]:
                texts.append(Text(start + (j + 0.5) * bar - 1, bottom - height - 5, f"{counts[i]:,}", "middle small"))
    return Chart(title, bottom + 28, tuple(rects), tuple(texts))


def binned(gains: Sequence[float]) -> list[int]:
    """Number of values in each bin between `BIN_EDGES`; an edge belongs to the bin above it."""
    counts = [0] * (len(BIN_EDGES) + 1)
    for gain in gains:
        counts[bisect.bisect_right(BIN_EDGES, gain)] += 1
    return counts


def bin_names() -> list[str]:
    inner = [f"{low:g}–{high:g}×" for low, high in itertools.pairwise(BIN_EDGES[1:])]
    return ["slower", "same (±2 %)", *inner, f"over {BIN_EDGES[-1]:g}×"]
