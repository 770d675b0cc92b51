"""Tables and figures of the documentation, from the results that are committed.

    python -m benchmarks.figures            # draws docs/figures/*.svg again and prints the tables of docs/algorithms.md

`tests/test_docs.py` asserts that the page has these very tables. Nothing is measured here.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from convselect.model.dataset import NATIVE, Row, kernel_class, read_rows

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TIMES = RESULTS / "times-cpu-x86-avx512-c.csv.gz"
KERNELS = RESULTS / "kernels-avx512-1-thread.json"
NETWORKS = RESULTS / "networks-avx512-1-thread.json"
DIRECTIONS = {"forward": "forward", "backward_data": "grad-input", "backward_weight": "grad-weight"}
GROUPS = {
    "native": "native",
    "native_channels_last": "native, other layout",
    "native_contiguous": "native, other layout",
    "upcast": "upcast",
    "im2col_gemm": "im2col_gemm",
    "fft": "FFT",
    "fft_tiled": "FFT",
    "depthwise": "depthwise",
    "grouped": "grouped",
    "direct": "direct",
}
CLASSES = {
    "1x1": "1x1",
    "3x3": "3x3, stride 1",
    "strided": "strided",
    "depthwise": "depthwise, up to 5x5",
    "grouped": "grouped",
    "large": "7x7 and larger",
    "other": "everything else",
}
"""Of `kernel_class`, in the order of the page."""
INK = ("#9aa5b1", "#c3cbd4", "#e3b23c", "#8f6c4e", "#2a7de1", "#7b4fc9", "#1f9e77", "#d1495b", "#f08a4b")
WIDTH = 7.2  # inches


class Winner(NamedTuple):
    """How an algorithm did over the measured problems.

    Attributes:
        measured: on how many it was right, and timed to the end.
        fastest: on how many of all no other was faster.
        gain: geometric mean of native's time over its own, where it was the fastest.
    """

    measured: int
    fastest: int
    gain: float


# ---- from the results -----------------------------------------------------------------------------------------------


def best_times(rows: Iterable[Row]) -> dict[Any, dict[str, float]]:
    """problem -> algorithm -> median in us, of first measurements of what was right."""
    found: dict[Any, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.status == "ok" and row.repeat == 0:
            found[row.problem][row.algorithm] = row.median_us
    return {problem: times for problem, times in found.items() if NATIVE in times}


def winners(times: Mapping[Any, Mapping[str, float]]) -> dict[str, Winner]:
    """algorithm -> how it did; most often the fastest first."""
    measured: Counter[str] = Counter()
    gains: dict[str, list[float]] = defaultdict(list)
    for of_problem in times.values():
        measured.update(of_problem.keys())  # not the values: those are times
        best = min(of_problem, key=lambda name: of_problem[name])
        gains[best].append(of_problem[NATIVE] / of_problem[best])
    found = {name: Winner(measured[name], len(gains[name]), geometric_mean(gains[name])) for name in measured}
    return dict(sorted(found.items(), key=lambda item: -item[1].fastest))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def group(algorithm: str) -> str:
    """What an algorithm is drawn as: Winograd's tiles, the two transforms and the two layouts are one each."""
    return "Winograd" if algorithm.startswith("winograd") else GROUPS[algorithm]


def shares(times: Mapping[Any, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """kernel class -> group of algorithms -> share of the class's problems in which one of them is the fastest."""
    won: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    for problem, of_problem in times.items():
        won[kernel_class(problem)][group(min(of_problem, key=lambda name: of_problem[name]))] += 1
    return {name: {which: n / sum(of.values()) for which, n in of.items()} for name, of in won.items() if of}


# ---- tables ---------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def winners_table(found: Mapping[str, Winner], problems: int) -> str:
    return table(
        ("algorithm", "timed to the end on", "the fastest of all", "there, times native"),
        [
            (f"`{name}`", f"{w.measured:,}", f"{w.fastest:,} ({w.fastest / problems:.1%})", f"{w.gain:.2f}")
            for name, w in found.items()
            if w.fastest
        ],
    )


def shares_table(found: Mapping[str, Mapping[str, float]]) -> str:
    names = list(dict.fromkeys([*GROUPS.values(), "Winograd"]))
    return table(
        ("fastest in", *names),
        [(CLASSES[of], *(f"{share:.1%}" if (share := found[of].get(name)) else "" for name in names)) for of in found],
    )


def classes_table(kernels: Mapping[str, Any]) -> str:
    """`kernels` as `python -m benchmarks.run` writes it."""
    return table(
        ("kind of convolution", "direction", "the choice, times native: mean (p10)", "the best: mean", "the best ones"),
        [
            (
                row["class"],
                DIRECTIONS[row["direction"]],
                f"{at['chosen']:.2f} ({at['chosen_p10']:.2f})",
                f"{at['best']:.2f}",
                ", ".join(f"`{name}` {count}" for name, count in list(at["names"].items())[:3]),
            )
            for row in kernels["rows"]
            for at in [row["layouts"]["contiguous"]]
        ],
    )


# ---- figures --------------------------------------------------------------------------------------------------------


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
    for i, (direction, colour) in enumerate(zip(DIRECTIONS, (INK[4], INK[6], INK[8]), strict=True)):
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
    axes.set_xticks(range(len(found)), [n["network"] for n in found])
    axes.grid(axis="y", alpha=0.3)
    axes.set(ylabel="times eager PyTorch, NCHW")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    _save(figure, path)


def main() -> None:
    times = best_times(read_rows(TIMES))
    kernels, networks = json.loads(KERNELS.read_text()), json.loads(NETWORKS.read_text())
    FIGURES.mkdir(exist_ok=True)
    draw_shares(shares(times), FIGURES / "winners.svg")
    draw_classes(kernels, FIGURES / "classes.svg")
    draw_networks(networks, FIGURES / "networks.svg")
    print(f"{len(times):,} problems\n")
    print(winners_table(winners(times), len(times)))
    print()
    print(shares_table(shares(times)))
    print()
    print(classes_table(kernels))


if __name__ == "__main__":
    main()
