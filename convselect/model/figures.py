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
    learning: Mapping[int, Mapping[str, float]] | None = None,
) -> list[Path]:
    """Write the figures into a folder, which is made if necessary; returns their paths.

    Args:
        table, times_us, choice: the judged problems (n), the times of what could be chosen (n, c), and the choices
            (n,).
        reliability: as `evaluate.reliability` gives it.
        learning: number of training problems -> figures, as `evaluate.judge` gives them.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    taken, oracle = times_us[np.arange(len(choice)), choice], np.nanmin(times_us, 1)
    written = []
    if table.native is not None:
        gain, best = times_us[:, table.native] / taken, times_us[:, table.native] / oracle
        written.append(_chosen_against_native(folder, gain, best))
        written.append(_by_direction(folder, [str(p.direction) for p in table.problems], gain, best))
    written.append(_regret(folder, taken / oracle - 1))
    written.append(_reliability(folder, reliability))
    if learning:
        written.append(_learning_curve(folder, learning))
    return written


def _axes(width: float) -> Any:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, 4))[1]


def _save(axes: Any, path: Path, title: str) -> Path:
    from matplotlib import pyplot

    axes.set_title(title)
    axes.figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(axes.figure)
    return path


def _chosen_against_native(folder: Path, gain: Floats, best: Floats) -> Path:
    axes = _axes(7)
    axes.plot(np.sort(best), color="0.7", label="oracle, sorted by itself")
    axes.plot(np.sort(gain), label="chosen")
    axes.axhline(1, color="k", linewidth=0.5)
    axes.set(xlabel="problem, sorted", ylabel="speed-up over native", yscale="log")
    axes.legend()
    return _save(axes, folder / "chosen_against_native.png", "chosen against native, per held-out problem")


def _by_direction(folder: Path, of: Sequence[str], gain: Floats, best: Floats) -> Path:
    directions = sorted(set(of))
    members = [np.array([one == direction for one in of]) for direction in directions]
    at = np.arange(len(directions))
    axes = _axes(5)
    for offset, label, values in ((-0.2, "chosen", gain), (0.2, "oracle", best)):
        axes.bar(at + offset, [geomean(values[m]) for m in members], 0.4, label=label)
    axes.axhline(1, color="k", linewidth=0.5)
    axes.set(xticks=at, xticklabels=directions, ylabel="geometric mean speed-up over native")
    axes.legend()
    return _save(axes, folder / "by_direction.png", "speed-up by direction")


def _regret(folder: Path, slower: Floats) -> Path:
    axes = _axes(5)
    axes.plot(np.linspace(0, 1, len(slower)), np.maximum(np.sort(slower)[::-1], 1e-4))
    axes.set(xlabel="share of problems", ylabel="time over the oracle's, minus 1", yscale="log")
    return _save(axes, folder / "regret.png", "regret, sorted")


def _reliability(folder: Path, found: Mapping[str, Sequence[float]]) -> Path:
    axes = _axes(4)
    axes.plot([0, 1], [0, 1], color="0.7")
    axes.plot(found["confidence"], found["right"], marker="o")
    axes.set(xlabel="confidence", ylabel="share right")
    return _save(axes, folder / "reliability.png", f"reliability (calibration error {found['ece'][0]:.3f})")


def _learning_curve(folder: Path, learning: Mapping[int, Mapping[str, float]]) -> Path:
    axes = _axes(5)
    axes.plot(list(learning), [of["fraction_of_oracle_mean"] for of in learning.values()], marker="o")
    axes.set(xlabel="training problems", ylabel="mean fraction of oracle", xscale="log")
    return _save(axes, folder / "learning_curve.png", "how many problems")
