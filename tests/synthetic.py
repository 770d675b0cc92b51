"""Synthetic times to train on, and a quick recipe."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from convselect.base.problem import Direction, conv_problem
from convselect.measure.rows import Row, environment_path, write_rows
from convselect.model import train

QUICK = train.Recipe(steps=120, alpha=4.0)
FAMILIES = ("alexnet", "bagnet", "convnext", "densenet", "efficientnet", "fbnet", "ghostnet")
MACHINE = {"family": "cpu-x86-avx2", "host_flags": {"avx512_bf16": False}, "device": "test", "torch": "2.13"}


def synthetic(n: int, seed: int = 0) -> list[Row]:
    """Rows whose best algorithm follows a rule: "gemm" for 1x1, "tiles" for large 3x3 with many channels, else native.
    The winner is 1.6 times as fast, the others 0.7 times; 3 % noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        C, K, R = int(2 ** rng.uniform(2, 9)), int(2 ** rng.uniform(2, 9)), int(rng.choice([1, 3, 5]))
        H = int(2 ** rng.uniform(2.5, 6))
        direction = list(Direction)[rng.integers(3)]
        problem = conv_problem(int(rng.choice([1, 2, 8])), C, H, H, K, R, R, padding=R // 2, direction=direction)
        applicable = {"native": 1.0, "gemm": 0.7}
        if R == 3:
            applicable["tiles"] = 0.7
        best = "gemm" if R == 1 else "tiles" if R == 3 and C >= 32 and H >= 14 else "native"
        applicable[best] = 1.6 if best != "native" else 1.0
        base = problem.flops / 5e4 + 5
        model = f"{FAMILIES[i % len(FAMILIES)]}_{i % 3}"
        for name, speed in applicable.items():
            time = base / speed * math.exp(rng.normal(0, 0.03))
            rows.append(Row(model, problem, name, 1, "ok", "thread", time, time, time, time, time, 9))
    return rows


def write(path: Path, rows: list[Row], machine: dict[str, object] = MACHINE) -> Path:
    write_rows(path, rows)
    environment_path(path).write_text(json.dumps({"machine": machine}))
    return path
