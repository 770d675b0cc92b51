"""Every Triton algorithm, direction and shipped configuration against float64, on awkward problems and some large ones.

Neither the interpreter nor the compiler's output shows a miscompiled kernel; only its results on a GPU do.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import _gpu_problems
from benchmarks._gpu_device import Device, operands, precision_of, reference, relative_error
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.kernels.pool import BY_NAME
from convselect.kernels.triton.launch import Launch, TritonAlgorithm

SMALL: tuple[ConvProblem, ...] = (
    conv_problem(2, 24, 17, 19, 24, 3, 3, padding=1, groups=24),
    conv_problem(2, 64, 28, 28, 64, 7, 7, padding=3, groups=64),
    conv_problem(3, 24, 15, 13, 40, 3, 3, padding=1),
    conv_problem(2, 64, 14, 14, 64, 3, 3, padding=1, groups=8),
    conv_problem(2, 16, 33, 35, 16, 31, 31, padding=15, groups=16),
    conv_problem(2, 3, 33, 31, 32, 7, 7, stride=2, padding=3),
    conv_problem(2, 30, 14, 15, 30, 5, 5, stride=2, padding=2, groups=30),
    conv_problem(2, 32, 16, 16, 64, 3, 3, stride=2, padding=1),
    conv_problem(2, 232, 9, 9, 232, 3, 3, padding=1, groups=4),
    conv_problem(1, 48, 27, 25, 48, 13, 13, padding=6, groups=48),
    conv_problem(2, 64, 12, 12, 96, 1, 1),
    conv_problem(1, 40, 12, 11, 40, 3, 3, padding=2, dilation=2, groups=40),
    conv_problem(2, 16, 12, 11, 24, 3, 3, padding=2, dilation=2),
    conv_problem(1, 20, 9, 8, 20, 4, 4, padding="same", groups=20),
    conv_problem(1, 8, 9, 8, 12, 4, 2, padding="same"),
    conv_problem(2, 16, 1, 40, 24, 1, 7, padding=(0, 3)),
    conv_problem(2, 16, 56, 7, 16, 51, 5, padding=(25, 2), groups=16),
    conv_problem(2, 12, 9, 9, 24, 3, 3, padding=1, groups=12),
    conv_problem(3, 7, 1, 1, 5, 3, 3, padding=1),
    conv_problem(2, 32, 11, 11, 32, 3, 3, stride=3, padding=1, groups=4),
    conv_problem(1, 96, 56, 56, 96, 3, 3, padding=1, groups=96),
    conv_problem(4, 128, 14, 14, 128, 3, 3, padding=1, groups=32),
    conv_problem(2, 3, 16, 12, 8, 4, 4, stride=4),
    conv_problem(1, 1, 20, 18, 8, 3, 3, padding=1),
)
TYPES = (("float16", False), ("float32", True), ("bfloat16", False), ("float32", False), ("float64", False))
LARGE_CASES = (1, 8, 13, 16, 20, 21, 23, 30, 34, 45, 47, 48, 49)
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "tf32": 3e-3, "float16": 6e-4, "bfloat16": 5e-3}
"""Relative L2 error, for forward and data gradients; twice as much for weight gradients, which are longer sums."""
CONFIGURATIONS_EACH = 2
"""Configurations per problem: the least tried ones, so that each is tried on some problem."""
COLUMNS = ("algorithm", "status", "error", "bound", "problem", "params", "message")


class Check(NamedTuple):
    algorithm: TritonAlgorithm
    problem: ConvProblem
    params: dict[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.algorithm.name, str(self.problem), json.dumps(self.params, sort_keys=True))

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.algorithm.launches(self.problem, self.params)


def bound_of(problem: ConvProblem) -> float:
    kind = "tf32" if problem.tf32 and problem.dtype == "float32" else problem.dtype
    return BOUNDS[kind] * (2 if problem.direction == Direction.BACKWARD_WEIGHT else 1)


def _problems(device: Device) -> Iterator[ConvProblem]:
    """Small ones in all types and layouts, then large ones as they are; a dry run's are a few tiny ones."""
    layouts = (CHANNELS_LAST, CONTIGUOUS)
    if device.dry:
        shapes = [conv_problem(1, 8, 5, 6, 8, 3, 3, padding=1, groups=8), conv_problem(1, 8, 4, 5, 6, 1, 1)]
        for p in shapes:
            for direction in Direction:
                yield p._replace(direction=direction, device="cpu")
        return
    for kind, (dtype, tf32) in enumerate(TYPES):
        for i, p in enumerate(SMALL):
            # Both layouts of the two most used types; of the others, one or the other by turns.
            for layout in layouts if kind < 2 else (layouts[(i + kind) % 2],):
                for direction in Direction:
                    yield p._replace(
                        direction=direction, dtype=dtype, tf32=tf32, layout=layout, weight_layout=layout, device="cuda"
                    )
        if kind == 1:
            for case in _gpu_problems.cases():
                if case.number in LARGE_CASES:
                    yield from _gpu_problems.directions(case)


def plan(pool: Sequence[TritonAlgorithm], device: Device) -> list[Check]:
    """The checks, problem by problem, so that if time runs out complete problems have been checked."""
    used: Counter[tuple[str, str, str, str]] = Counter()
    offers: dict[tuple[str, str, str, str], Check] = {}
    checks = []
    for problem in _problems(device):
        for algorithm in pool:
            if algorithm.why_not_shape(problem) is not None:
                continue
            kind = (algorithm.name, str(problem.direction), problem.dtype)
            offered = {(*kind, json.dumps(p, sort_keys=True)): p for p in algorithm.configs(problem)}

            large = problem.flops > 1e9
            for mark in sorted(offered, key=used.__getitem__)[: 1 if large else CONFIGURATIONS_EACH]:
                used[mark] += 1
                checks.append(Check(algorithm, problem, offered[mark]))
            for mark, params in offered.items():
                offers.setdefault(mark, Check(algorithm, problem, params))
    return checks + [check for mark, check in offers.items() if not used[mark]]


def run(
    checks: Iterable[Check], device: Device, path: Path, deadline: timing.Deadline, on_check: Any = None
) -> dict[str, Any]:
    """Check in order until the deadline, and append one row per check to the file. Checks in the file are skipped.

    Returns: numbers of right, wrong, failed and pending checks in the whole file.

    Raises:
        ContextLost: if a kernel made the device unusable; its row is in the file.
    """
    done = {(row["algorithm"], row["problem"], row["params"]) for row in read(path)}
    before: tuple[ConvProblem, Any, Tensor] | None = None
    left = 0
    if path.exists():  # a line that an interrupted write left unfinished
        text = path.read_bytes()
        path.write_bytes(text[: text.rfind(b"\n") + 1])
    with path.open("a", newline="") as file, torch.no_grad():
        writer = csv.writer(file, lineterminator="\n")
        if not done and file.tell() == 0:
            writer.writerow(COLUMNS)
        for check in checks:
            if check.key in done:
                continue
            if deadline.passed:
                left += 1
                continue
            if before is None or before[0] != check.problem:
                before = None  # its memory, before more is asked for
                pair = operands(check.problem, device)
                before = (check.problem, pair, reference(*pair, check.problem, BY_NAME["native"].run))
            status, error, message = _checked(check, before[1], before[2])
            name, problem, params = check.key
            writer.writerow([name, status, f"{error:.3e}", f"{bound_of(check.problem):.0e}", problem, params, message])
            file.flush()
            if status == "failed":
                device.assert_alive()
            if on_check is not None:
                on_check(status)
    found = Counter(row["status"] for row in read(path))
    return {status: found[status] for status in ("ok", "wrong", "failed")} | {"not_reached": left}


def _checked(check: Check, pair: tuple[Tensor, Tensor], want: Tensor) -> tuple[str, float, str]:
    try:
        with precision_of(check.problem):
            got = _with_nan_memory(lambda: check.algorithm.run(*pair, check.problem, check.params))
        if got.shape != want.shape or got.dtype != check.problem.torch_dtype:
            return "wrong", math.nan, f"a result of {got.dtype} {tuple(got.shape)}"
        error = relative_error(got, want)
    except Exception as raised:  # of any kind: the others are still to be checked
        return "failed", math.nan, f"{type(raised).__name__}: {raised}"[:300].replace("\n", " ")
    return ("ok" if error <= bound_of(check.problem) else "wrong"), error, ""


def _with_nan_memory(function: Any) -> Tensor:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # under which torch.empty fills with NaN
    try:
        result: Tensor = function()
        return result
    finally:
        torch.use_deterministic_algorithms(before)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the file; an unfinished last line is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [row for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()) if row.get("message") is not None]


def summary(path: Path) -> list[dict[str, Any]]:
    """Per algorithm and direction: checks, configurations, worst error in units of its bound, and what went wrong."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read(path):
        groups.setdefault((row["algorithm"], row["problem"].partition(" ")[0]), []).append(row)
    found = []
    for (name, direction), rows in groups.items():
        shares = [float(row["error"]) / float(row["bound"]) for row in rows if row["status"] != "failed"]
        bad = [row for row in rows if row["status"] != "ok"]
        found.append({
            "algorithm": name, "direction": direction, "checks": len(rows),
            "configurations": len({row["params"] for row in rows}), "bad": len(bad),
            "worst_share_of_bound": max(shares, default=math.nan),
            "first_bad": " ".join(bad[0][key] for key in ("status", "problem", "params", "message")) if bad else "",
        })  # fmt: skip
    return found
