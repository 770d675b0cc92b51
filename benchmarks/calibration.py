"""The gain from calibration: one family's model on another family's times, corrected by some of those.

    python -m benchmarks.calibration --artifact convselect/model/artifacts/cpu-x86-avx512-c.npz \
        --times benchmarks/results/times-cpu-x86-avx2-c.csv.gz

The problems used for the correction are drawn at random, and the rest is judged; means over several draws. "at home" is
the artifact trained on these same times, an upper bound for other artifacts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Shown

from convselect.model import evaluate as ev
from convselect.model.calibrate import fit_bias
from convselect.model.dataset import Table
from convselect.model.inference import Predictor
from convselect.model.judging import artifact_gains
from convselect.model.train import read_measured

COUNTS = (0, 10, 20, 40, 60, 200)
DRAWS = 10


def corrected(gains: ev.Floats, table: Table, members: ev.Ints) -> ev.Floats:
    """Gains (n, c) with the bias that the problems `members` show."""
    native = table.native
    assert native is not None
    measured = np.log(table.times_us[:, [native]] / table.times_us)
    found = [
        (table.names[c], float(measured[i, c]), float(gains[i, c]))
        for i in members
        for c in np.flatnonzero(np.isfinite(measured[i]) & np.isfinite(gains[i]))
    ]
    bias, _ = fit_bias(found)
    return gains + np.array([bias.get(name, 0.0) for name in table.names])


def measure(artifact: Path, times: Path, seed: int = 0) -> dict[str, dict[str, float]]:
    """Title -> mean figures over the draws."""
    table, _ = read_measured([times])
    float32 = np.array([p.dtype == "float32" for p in table.problems])
    table = table.part(float32)  # 16-bit types are declined if the processors differ in their support
    predictor = Predictor.load(artifact)
    gains, admitted = artifact_gains(predictor, table), ev.admitted(table)
    margins = np.broadcast_to(ev.margins_of(table, predictor.card.margin, predictor.card.margins), gains.shape)
    rng = np.random.default_rng(seed)
    result: dict[str, dict[str, float]] = {}
    for count in COUNTS:
        draws = []
        for _ in range(DRAWS if count else 1):
            order = rng.permutation(len(table.problems))
            members, rest = order[:count], order[max(COUNTS) :]  # always the same number judged
            now = corrected(gains, table, members) if count else gains
            choice = ev.chosen(now[rest], admitted[rest], margins[rest])
            draws.append(ev.judge(choice, admitted[rest]))
        result[f"{count} problems"] = {name: float(np.mean([d[name] for d in draws])) for name in draws[0]}
    home = Predictor.load(artifact.with_name(f"{times.name.removeprefix('times-').split('.')[0]}.npz"))
    gains = artifact_gains(home, table)
    choice = ev.chosen(gains, admitted, ev.margins_of(table, home.card.margin, home.card.margins))
    result["at home (trained on these)"] = ev.judge(choice, admitted)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.calibration", description="What a calibration is worth.")
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    result = measure(options.artifact, options.times)
    shown = Shown(title=f"{options.artifact.stem} on {options.times.name}", box=SIMPLE_HEAD, title_justify="left")
    for i, name in enumerate(ev.SUMMARY_HEADER):
        shown.add_column(name, justify="right" if i else "left")
    for title, found in result.items():
        shown.add_row(*ev.summary(title, found))
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(shown)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
