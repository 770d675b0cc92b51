"""Calibration for a new machine: time a few problems, add a correction per algorithm to the nearest artifact.

A model from another machine is mostly right here as well: how an algorithm scales with sizes hardly depends on the
machine. Its overall speed relative to native does (another processor, another oneDNN). A shrunk additive correction of
ln(t_native / t) per algorithm, from 20 to 60 problems, corrects most of that:

    b_a = n / (n + SHRINK) * median over n problems of (measured gain - predicted gain)

over the problems on which the algorithm is near native or better, measured or predicted: a model is not trained to say
how slow slow algorithms are, and a mean over all problems made good models worse.

The correction is kept in the user's cache, under the fingerprint of the machine, and is valid for that machine alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from convselect.base import timing
from convselect.base.problem import ConvProblem
from convselect.kernels.pool import ALL
from convselect.machine import host
from convselect.machine.environment import cpu_fingerprint
from convselect.measure.measure import measure_problem
from convselect.measure.plan_cost import fixed_cost_us
from convselect.measure.rows import NATIVE, Row
from convselect.model.artifact import Calibration
from convselect.model.inference import Predictor
from convselect.model.loaded import calibration_path, digest, nearest_artifact

SHRINK = 4.0
"""Weight of a correction of 0, in problems: few measurements change little."""
RELEVANT = -0.3
"""Least ln(t_native / t), measured or predicted, of a time that counts for an algorithm's correction."""
PROBLEMS = Path(__file__).parent / "calibration.txt"
"""Layers of networks in random order, stratified by kernel class, all directions: the result of `sampling.draw` on
benchmarks/problems.csv at batches of 1, 2 and 8, in float32, without the largest."""


@dataclass(frozen=True)
class Report:
    """The result of a calibration.

    Attributes:
        artifact: the model file that was corrected.
        problems: number of problems timed.
        bias: algorithm -> correction of its predicted ln(t_native / t); without algorithms for which no time counted.
        times: algorithm -> number of problems that counted for its correction.
        path: the file with the correction; None if it was not written.
    """

    artifact: str
    problems: int
    bias: Mapping[str, float]
    times: Mapping[str, int]
    path: Path | None = field(default=None)


def problems(threads: int = 1) -> list[ConvProblem]:
    """The problems to time, in order: each prefix is a mixture of all kinds."""
    lines = PROBLEMS.read_text().splitlines()
    return [ConvProblem.parse(line)._replace(threads=threads) for line in lines if line and not line.startswith("#")]


def fit_bias(gains: Iterable[tuple[str, float, float]]) -> tuple[dict[str, float], dict[str, int]]:
    """(correction, number of times) per algorithm except native, from (algorithm, measured gain, predicted gain)."""
    residuals: dict[str, list[float]] = {}
    for name, measured, predicted in gains:
        if name != NATIVE and max(measured, predicted) > RELEVANT:
            residuals.setdefault(name, []).append(measured - predicted)
    times = {name: len(values) for name, values in sorted(residuals.items())}
    bias = {name: float(np.median(residuals[name])) * n / (n + SHRINK) for name, n in times.items()}
    return bias, times


def gains_of(rows: Sequence[Row], predictor: Predictor) -> list[tuple[str, float, float]]:
    """(algorithm, measured gain, predicted gain) of one problem's rows; with the cost of a plan, as in training."""
    times = {row.algorithm: row.min_us for row in rows if row.status in ("ok", "censored")}
    prediction = predictor.predict(rows[0].problem)
    if NATIVE not in times or prediction is None:
        return []
    problem = rows[0].problem
    known = set(prediction.names) - {NATIVE}
    return [
        (name, float(np.log(times[NATIVE] / (us + fixed_cost_us(problem, name)))), prediction.log_gain(name))
        for name, us in times.items()
        if name in known
    ]


def calibrate(
    seconds: float = 30.0,
    threads: int = 1,
    *,
    measure: Callable[[ConvProblem], list[Row]] | None = None,
    write: bool = True,
    on_problem: Callable[[int, int], object] | None = None,
) -> Report:
    """Time problems for about `seconds`, fit the correction, and keep it for this machine.

    Args:
        measure: problem -> its rows; default: `measure_problem` with every algorithm.
        write: False: only report.
        on_problem: called with (problems timed, all problems).

    Raises:
        ArtifactError: if there is no artifact to correct, or it is damaged.
        OSError: if the correction cannot be written.
        AssertionError: if this machine's clocks cannot be trusted.
    """
    if measure is None:
        timing.assert_trustworthy()
    artifact = nearest_artifact()
    predictor = Predictor.load(artifact, host_flags=host.host_flags())
    todo = problems(threads)
    deadline = timing.Deadline(seconds)
    found: list[tuple[str, float, float]] = []
    done = 0
    for problem in todo:
        if deadline.passed:
            break
        rows = measure(problem) if measure is not None else measure_problem("calibration", problem, ALL, deadline_s=1.0)
        found += gains_of(rows, predictor)
        done += 1
        if on_problem is not None:
            on_problem(done, len(todo))
    bias, times = fit_bias(found)
    path = None
    if write:
        path = calibration_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        calibration = Calibration(
            fingerprint=cpu_fingerprint(), artifact=artifact.stem, digest=digest(artifact), bias=bias, problems=done
        )
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(calibration), indent=1) + "\n")
        os.replace(partial, path)
    return Report(artifact.stem, done, bias, times, path)
