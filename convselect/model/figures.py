"""Figures of an evaluation, drawn with matplotlib (`pip install 'convselect[plots]'`) into PNG files.

The first two are those of ICLR 2025 submission 13039: chosen against native per problem, sorted, and averaged over
directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convselect.model.dataset import Table
from convselect.model.evaluate import Floats, Ints, geomean


def draw(
    folder: str | Path,
    table: Table,
    times_us: Floats,
    choice: Ints,
    reliability: Mapping[str, Sequence[float]],
    learning: Mapping[int, float] | None = None,
) -> list[Path]:
    """Write the figures into a folder, made if need be; returns their paths.

    Args:
        table, times_us, choice: the judged problems (n), what could be chosen (n, c), and what was (n,).
        reliability: as `evaluate.reliability` gives it.
        learning: number of training problems -> fraction of oracle.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []

    def save(name: str, figure: Any, title: str) -> None:
        figure.axes[0].set_title(title)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        written.append(path)

    rows = np.arange(len(choice))
    taken, oracle = times_us[rows, choice], np.nanmin(times_us, 1)
    if table.native is not None:
        gain, best = times_us[:, table.native] / taken, times_us[:, table.native] / oracle
        order = np.argsort(gain)
        figure, axes = pyplot.subplots(figsize=(7, 4))
        axes.plot(np.sort(best), color="0.7", label="oracle, sorted by itself")
        axes.plot(gain[order], label="chosen")
        axes.axhline(1, color="k", linewidth=0.5)
        axes.set(xlabel="problem, sorted", ylabel="speed-up over native", yscale="log")
        axes.legend()
        save("chosen_against_native", figure, "chosen against native, per held-out problem")

        directions = sorted({str(p.direction) for p in table.problems})
        members = [np.array([str(p.direction) == d for p in table.problems]) for d in directions]
        figure, axes = pyplot.subplots(figsize=(5, 4))
        at = np.arange(len(directions))
        for offset, label, values in ((-0.2, "chosen", gain), (0.2, "oracle", best)):
            axes.bar(at + offset, [geomean(values[m]) for m in members], 0.4, label=label)
        axes.axhline(1, color="k", linewidth=0.5)
        axes.set(xticks=at, xticklabels=directions, ylabel="geometric mean speed-up over native")
        axes.legend()
        save("by_direction", figure, "speed-up by direction")

    figure, axes = pyplot.subplots(figsize=(5, 4))
    slower = np.sort(taken / oracle - 1)[::-1]
    axes.plot(np.linspace(0, 1, len(slower)), np.maximum(slower, 1e-4))
    axes.set(xlabel="share of problems", ylabel="time over the oracle's, minus 1", yscale="log")
    save("regret", figure, "regret, sorted")

    figure, axes = pyplot.subplots(figsize=(4, 4))
    axes.plot([0, 1], [0, 1], color="0.7")
    axes.plot(reliability["confidence"], reliability["right"], marker="o")
    axes.set(xlabel="confidence", ylabel="share right")
    save("reliability", figure, f"reliability (calibration error {reliability['ece'][0]:.3f})")

    if learning:
        figure, axes = pyplot.subplots(figsize=(5, 4))
        axes.plot(list(learning), list(learning.values()), marker="o")
        axes.set(xlabel="training problems", ylabel="mean fraction of oracle", xscale="log")
        save("learning_curve", figure, "how many problems")
    return written
