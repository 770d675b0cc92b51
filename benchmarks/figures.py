"""Figures and tables of the documentation, from the committed results.

    python -m benchmarks.figures

draws docs/figures/*.svg again and prints the tables of README.md, docs/algorithms.md, docs/data-set.md and
docs/results.md; `tests/test_docs.py` asserts that the pages have exactly these tables. Nothing is measured here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import _tables, _timm_tables
from benchmarks._tables import CLASSES, DIRECTIONS, GROUPS, KERNELS, NETWORKS, TIMES, TITLES, best_times, shares, tables
from convselect.measure.rows import read_rows

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
INK = ("#9aa5b1", "#c3cbd4", "#e3b23c", "#8f6c4e", "#2a7de1", "#7b4fc9", "#1f9e77", "#d1495b", "#59c2c9", "#f08a4b")
WIDTH = 7.2  # inches


def _axes(height: float) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "convselect", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "font.family": "DejaVu Sans", "svg.fonttype": "path",
    })  # fmt: skip
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(WIDTH, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")
    pyplot.close(figure)


def draw_shares(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Which algorithms are the fastest, by kernel class: stacked bars."""
    names = list(dict.fromkeys([*GROUPS.values(), "Winograd"]))
    figure, axes = _axes(3.3)
    titles = [CLASSES[name] for name in found]
    left = [0.0] * len(found)
    for name, colour in zip(names, INK, strict=True):
        widths = [100 * of.get(name, 0.0) for of in found.values()]
        axes.barh(titles, widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the problems in which it is the fastest, %")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    _save(figure, path)


def draw_classes(kernels: Mapping[str, Any], path: Path) -> None:
    """The choice's speed over native's by class and direction: bars on a logarithmic axis."""
    by_class: dict[str, dict[str, float]] = defaultdict(dict)
    for row in kernels["rows"]:
        by_class[row["class"]][row["direction"]] = row["layouts"]["contiguous"]["chosen"]
    figure, axes = _axes(4.6)
    for i, (direction, colour) in enumerate(zip(DIRECTIONS, (INK[4], INK[6], INK[9]), strict=True)):
        values = [of[direction] for of in by_class.values()]
        places = [j + (i - 1) * 0.26 for j in range(len(by_class))]
        bars = axes.barh(
            places, [v - 1 for v in values], left=1, height=0.25, color=colour, label=DIRECTIONS[direction]
        )
        axes.bar_label(bars, [f"{v:.2f}" for v in values], padding=2, fontsize=7)
    axes.set_xscale("log")
    ticks = (1, 2, 4, 8, 16, 32)
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_yticks(range(len(by_class)), list(by_class))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlim=(0.9, 45), xlabel="the model's choice: speed over native's, geometric mean")
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def draw_networks(networks: Mapping[str, Any], path: Path) -> None:
    """Whole networks against other ways to run them: grouped bars."""
    sides = {
        "eager, channels_last": lambda g: g["eager channels_last"],
        "torch.compile, freezing": lambda g: g["torch.compile"],
        "ONNX Runtime": lambda g: g["onnxruntime"],
        "OpenVINO": lambda g: g["openvino"],
        "converted": lambda g: g["converted"],
        "frozen": lambda g: max(g["frozen"], g["frozen channels_last"]),
    }
    found = [n for n in networks["networks"] if n["mode"] == "inference N=1"]
    figure, axes = _axes(3.4)
    for i, ((side, value), colour) in enumerate(
        zip(sides.items(), (INK[1], INK[0], INK[2], INK[3], INK[6], INK[4]), strict=True)
    ):
        axes.bar(
            [j + (i - 2.5) * 0.14 for j in range(len(found))],
            [value(n["gain"]) for n in found],
            width=0.13,
            color=colour,
            label=side,
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found)), [TITLES[n["network"]] for n in found])
    axes.grid(axis="y", alpha=0.3)
    axes.set(ylabel="times eager PyTorch, NCHW")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    _save(figure, path)


def draw_timm(run: Mapping[str, Any], path: Path) -> None:
    """Networks of timm, frozen and in other runtimes: dots, in the order of frozen over the better of the two."""
    found = _timm_tables.timm_ratios(run)
    figure, axes = _axes(0.8 + 0.17 * len(found))
    sides = {"onnxruntime": ("ONNX Runtime", INK[2]), "openvino": ("OpenVINO", INK[3]), "frozen": ("frozen", INK[4])}
    for i, of in enumerate(found.values()):
        axes.plot([min(of[s] for s in sides if s in of), of["frozen"]], [i, i], color=INK[1], linewidth=1, zorder=1)
    for side, (title, colour) in sides.items():
        places = [(of[side], i) for i, of in enumerate(found.values()) if side in of]
        axes.scatter(*zip(*places, strict=True), color=colour, s=18, label=title, zorder=2)
    axes.set_xscale("log")
    ticks = (1, 1.5, 2, 3, 4, 6, 8, 12)
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_yticks(range(len(found)), [f"{name}  {of['best']:.2f}" for name, of in found.items()], fontsize=7)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="times eager PyTorch, NCHW; beside each name: frozen over the faster of the two others")
    axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def main() -> None:
    times = best_times(read_rows(TIMES))
    kernels, networks = json.loads(KERNELS.read_text()), json.loads(NETWORKS.read_text())
    FIGURES.mkdir(exist_ok=True)
    draw_shares(shares(times), FIGURES / "winners.svg")
    draw_classes(kernels, FIGURES / "classes.svg")
    draw_networks(networks, FIGURES / "networks.svg")
    draw_timm(json.loads((_tables.RESULTS / _timm_tables.TIMM["AVX-512"]).read_text()), FIGURES / "timm.svg")
    for name, text in tables().items():
        print(f"{name}\n\n{text}\n")


if __name__ == "__main__":
    main()
