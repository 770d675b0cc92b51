"""The spot check on memory that notices every stray byte: a part of `_guarded.run`, in its process."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import torch
from _guarded import DTYPES, LAYOUTS, Guarded, Heap, at, placed, random_problems, with_reference
from problems import PROBLEMS

from convselect.base.problem import CONTIGUOUS, Direction
from convselect.kernels._spot_check import spot_check


def run_spots(spec: dict[str, Any]) -> dict[str, Any]:
    """`cs_spot_check` of right and wrong results in every direction and dtype: at many places, wide looks included."""
    progress = os.open(spec["progress"], os.O_WRONLY | os.O_CREAT)
    memories = [[Heap() if side is None else Guarded(side) for _ in range(4)] for side in spec["sides"]]
    ran: Counter[str] = Counter()
    wrong: list[str] = []
    problems = itertools.chain(PROBLEMS.values(), random_problems(spec["seed"], spec["random"]))
    for i, (drawn, direction) in enumerate(itertools.product(problems, Direction)):
        p = drawn._replace(direction=direction, dtype=(*DTYPES, "float64")[i % 4])
        a, b, want, _ = with_reference(p)
        if not want.any():  # windows of padding: no result is the usual one that a wide look compares with
            continue
        bias = torch.ones(p.K, dtype=p.torch_dtype) if direction == Direction.FORWARD else None
        right = (want if bias is None else want + 1).to(p.torch_dtype)
        operands = (a, b, right) if bias is None else (a, b, right, bias)
        for memory, layout, factor in itertools.product(memories, LAYOUTS, (1, 3)):
            what = f"cs_spot_check {layout} {direction} {p.dtype} {'wrong' if factor > 1 else 'right'}"
            os.pwrite(progress, f"{what} {p}".encode().ljust(500), 0)
            held = []
            for to, tensor in zip(memory, operands, strict=False):
                values = tensor * factor if tensor is right else tensor
                of = layout if tensor.dim() == 4 else CONTIGUOUS
                held.append(at(placed(to, values, of), values.shape, values.dtype, of))
            finding = spot_check(
                held[2], *held[:2], p, *held[3:], limit=64.0, spreads=i % 2 == 0, places=40, seed=i
            )  # fmt: skip
            ran[what] += 1
            if finding is None or finding.right != (factor == 1 or finding.expected == 0):
                wrong.append(f"{what} {p}: {finding}")
    return {"ran": ran, "wrong": wrong}
