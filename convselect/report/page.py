"""A report -> one HTML page: formats numbers, makes the charts, and fills the templates beside this file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convselect.measure.rows import KERNEL_CLASSES, NATIVE
from convselect.report.charts import (
    COLOURS,
    Bar,
    Chart,
    Pair,
    bin_names,
    binned,
    columns,
    pairs,
    scale_of,
    shortened,
    stacks,
)
from convselect.report.end_to_end import EndToEnd
from convselect.report.measurements import DataReport
from convselect.report.networks import DIRECTIONS, Layer, NetworkReport

TEMPLATES = Path(__file__).parent / "templates"
MOST_BARS = 24
"""Most lines of a chart of layers; the tables have all layers."""
THIN = "\u202f"  # a narrow space that does not break, between number and unit
GROUPS = {
    "by_kernel_class": "class of layer", "by_kind": "direction and kind", "by_direction": "direction",
    "by_source": "source", "by_dtype": "element type", "by_threads": "threads",
}  # fmt: skip

ORDERS = {"by_kernel_class": KERNEL_CLASSES, "by_direction": tuple(DIRECTIONS)}


def render(report: NetworkReport | DataReport) -> str:
    """The self-contained page. All text from outside is escaped.

    Raises:
        ModuleNotFoundError: without jinja2, which PyTorch installs.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "duration": duration, "times": times, "percent": percent, "count": count, "error": error,
        "params": params, "shortened": shortened,
    }  # fmt: skip
    environment.globals |= {"directions": DIRECTIONS}
    if isinstance(report, NetworkReport):
        return environment.get_template("network.html").render(of_network(report))
    return environment.get_template("data.html").render(of_measurements(report))


# ---- numbers ----------------------------------------------------------------------------------------------------


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:,.{digits}f}"


def duration(us: float | None) -> str:
    """Microseconds in a suitable unit: "12.3 µs", "4.56 ms", "7.89 s"; "–" for None."""
    if us is None or us != us:
        return "–"
    for unit, size in (("µs", 1.0), ("ms", 1e3), ("s", 1e6)):
        if unit == "s" or float(f"{us / size:.3g}") < 1000:
            return f"{_three(us / size)}{THIN}{unit}"
    raise AssertionError("seconds take everything")


def times(ratio: float | None) -> str:
    """ "1.59×"; "–" for None."""
    if ratio is None:
        return "–"
    return f"{ratio:.2f}×" if ratio < 9.995 else f"{_three(ratio)}×"


def percent(share: float | None, digits: int = 1) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f}{THIN}%"


def count(number: float) -> str:
    return f"{number:,.0f}"


def error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def params(values: Mapping[str, Any] | None) -> str:
    """ "" for the defaults, else "tile=6, block=64"."""
    return ", ".join(f"{name}={value}" for name, value in (values or {}).items())


# ---- a network --------------------------------------------------------------------------------------------------


def of_network(report: NetworkReport) -> dict[str, Any]:
    """The variables of network.html besides the report itself."""
    directions = list(dict.fromkeys(layer.direction for layer in report.layers))
    sections = []
    for direction in directions:
        layers = [layer for layer in report.layers if layer.direction == direction]
        sections.append(
            {
                "direction": direction,
                "layers": layers,
                "chart": _layer_chart(layers, DIRECTIONS[direction]),
                "native_us": _sum([one.all_native_us for one in layers]),
                "chosen_us": _sum([one.all_chosen_us for one in layers]),
            }
        )
    names = _by_time(report.layers)
    kinds = {name: "native" if name == NATIVE else f"c{min(i, COLOURS - 1)}" for i, name in enumerate(names)}
    return {
        "report": report,
        "sections": sections,
        "spent": [
            (end, spent) for end in report.end_to_end if (spent := _spent(end, report.layers, kinds)) is not None
        ],
        "algorithms": _algorithms(report.layers),
        "calls": sum(layer.calls for layer in report.layers if layer.in_inference),
        "modules": len({name for layer in report.layers for name in layer.names}),
    }


def label(layer: Layer, most: int = 34) -> str:
    """A layer's name, and the number of other layers with the same problem."""
    more = len(layer.names) - 1
    extra = f" +{more}" if more else ""
    return shortened(layer.names[0] or "(the model)", most - len(extra)) + extra


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known and len(known) == len(values) else None


def _layer_chart(layers: Sequence[Layer], direction: str) -> tuple[Chart, bool, int] | None:
    """(chart, whether it has times, else predicted ratios, how many layers are left out)."""
    timed = [one for one in layers if one.all_native_us is not None and one.all_chosen_us is not None]
    rows: list[Pair]
    if timed:
        by_time = sorted(timed, key=lambda one: -(one.all_native_us or 0.0))
        kept = {id(one) for one in by_time[:MOST_BARS]}
        timed = [one for one in timed if id(one) in kept]
        rows = [
            Pair(
                label(one), _small(one), one.all_native_us or 0.0, one.all_chosen_us or 0.0,
                duration(one.all_native_us), f"{duration(one.all_chosen_us)} · {times(one.gain)} · {one.algorithm}",
            )
            for one in timed
        ]  # fmt: skip
        ticks = {value: duration(value) if value else "0" for value in scale_of(rows)}
        title = f"{direction}: time of nn.Conv2d and of the choice, per layer"
        return pairs(title, rows, ticks), True, len(layers) - len(timed)
    said = [one for one in layers if one.gain is not None and one.algorithm != NATIVE][:MOST_BARS]
    if not said:
        return None
    rows = [
        Pair(label(one), _small(one), 1.0, 1 / (one.gain or 1.0), "1", f"{times(one.gain)} · {one.algorithm}")
        for one in said
    ]
    title = f"{direction}: time of the choice relative to nn.Conv2d, per layer"
    return pairs(title, rows, {value: f"{value:g}" for value in scale_of(rows)}), False, len(layers) - len(said)


def _small(layer: Layer) -> str:
    return (f"{layer.calls} × " if layer.calls > 1 else "") + shortened(layer.problem.brief, 46)


def _by_time(layers: Sequence[Layer]) -> list[str]:
    """Chosen algorithms but native, those with most time first."""
    spent: dict[str, float] = {}
    for layer in layers:
        if layer.algorithm != NATIVE:
            spent[layer.algorithm] = spent.get(layer.algorithm, 0.0) + (layer.all_chosen_us or 0.0)
    return sorted(spent, key=lambda name: -spent[name])


def _algorithms(layers: Sequence[Layer]) -> dict[str, dict[str, int]]:
    """Direction -> algorithm -> calls, most first."""
    found: dict[str, dict[str, int]] = {}
    for layer in layers:
        of = found.setdefault(layer.direction, {})
        of[layer.algorithm] = of.get(layer.algorithm, 0) + layer.calls
    return {d: dict(sorted(of.items(), key=lambda item: -item[1])) for d, of in found.items()}


@dataclass(frozen=True)
class Spent:
    """How the time of a pass is spent: a chart, and its key: (CSS class, name, us before, us after)."""

    chart: Chart
    key: tuple[tuple[str, str, float, float], ...]


def _spent(end: EndToEnd, layers: Sequence[Layer], kinds: Mapping[str, str]) -> Spent | None:
    """Convolutions by what computes them once converted, and everything else; None if a time is missing."""
    if end.layers_native_us is None or end.layers_chosen_us is None:
        return None
    members = [one for one in layers if end.mode != "inference" or one.in_inference]
    both = end.like_layers
    key: list[tuple[str, str, float, float]] = []
    for name in [*kinds, NATIVE]:
        of = [one for one in members if one.algorithm == name]
        if of:
            before, after = (math.fsum(us or 0.0 for us in side) for side in zip(*map(_all_us, of), strict=True))
            key.append((kinds.get(name, "native"), name, before, after))
    before = max(0.0, both.native.median - end.layers_native_us)
    after = max(0.0, both.converted.median - end.layers_chosen_us)
    key.append(("rest", "everything else", before, after))
    bars = []
    *convolutions, rest = key
    # Before, PyTorch computes all of them: the colours are those of what computes them after.
    stock = ("native", "convolutions, by PyTorch", math.fsum(one[2] for one in convolutions))
    sides = (
        ("nn.Conv2d", both.native, [stock, (*rest[:2], rest[2])]),
        ("converted", both.converted, [(kind, name, us) for kind, name, _, us in key]),
    )
    for side, whole, values in sides:
        parts = tuple((kind, us, name, f"{name}: {duration(us)}") for kind, name, us in values)
        bars.append(Bar(side, duration(max(whole.median, math.fsum(us for _, _, us in values))), parts))
    return Spent(stacks(f"{end.mode}: where the time goes", bars), tuple(key))


def _all_us(layer: Layer) -> tuple[float | None, float | None]:
    return layer.all_native_us, layer.all_chosen_us


# ---- measured times ---------------------------------------------------------------------------------------------


def of_measurements(report: DataReport) -> dict[str, Any]:
    """The variables of data.html besides the report itself."""
    series = {"native": binned(report.gains_best)}
    if report.gains_chosen:
        series["chosen"] = binned(report.gains_chosen)
    reference = "nn.Conv2d" if report.reference == NATIVE else report.reference
    tables = []
    for title, groups in report.by.items():
        names = list(groups)
        if title in ORDERS:
            names.sort(key=ORDERS[title].index)
        if len(groups) > 1:
            tables.append((GROUPS[title], [(DIRECTIONS.get(name, name), groups[name]) for name in names]))
    widest = max((one.share for one in report.shares), default=0) or 1
    return {
        "report": report,
        "reference": reference,
        "against_native": report.reference == NATIVE,
        "speedups": columns(f"speed-up over {reference}, number of problems", bin_names(), series)
        if report.problems
        else None,
        "tables": tables,
        "widest": widest,
        "best_geomean": math.exp(math.fsum(map(math.log, report.gains_best)) / len(report.gains_best))
        if report.gains_best
        else None,
        "chosen_geomean": math.exp(math.fsum(map(math.log, report.gains_chosen)) / len(report.gains_chosen))
        if report.gains_chosen
        else None,
    }
