"""Evaluate the times: speed-ups by class and direction against their targets, shares of the device's bandwidth, and
answers to the questions that decide what to build."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import _gpu_problems
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.measure.rows import NATIVE, Row

LARGE_BYTES = 50_000_000


class Group(NamedTuple):
    """A class of problems and the geometric mean of native's time over the best algorithm's that is aimed at."""

    name: str
    target: float | None
    holds: Callable[[ConvProblem], bool]


def _depthwise(low: int, high: int) -> Callable[[ConvProblem], bool]:
    return lambda p: p.is_depthwise and low <= max(p.R, p.S) <= high


def _grouped(layout: str) -> Callable[[ConvProblem], bool]:
    return lambda p: 1 < p.groups < p.C and p.layout == layout and max(p.R, p.S) > 1


GROUPS = (
    Group("depthwise 2x2 to 7x7", 2.0, _depthwise(2, 7)),
    Group("depthwise 9x9 and up", 5.0, _depthwise(9, 1000)),
    Group("grouped, NHWC", 1.2, _grouped(CHANNELS_LAST)),
    Group("grouped, NCHW", None, _grouped(CONTIGUOUS)),
    Group("patches (kernel = stride)", None, lambda p: p.is_patch and p.groups == 1 and p.R > 1),
    Group("1x1", None, lambda p: p.groups == 1 and p.R == p.S == 1),
    Group("stems, C <= 4", None, lambda p: p.groups == 1 and p.C <= 4 and not p.is_patch),
    Group("dense, 16 bit", None, lambda p: p.groups == 1 and p.C > 4 and p.R * p.S > 1 and p.element_bytes == 2),
    Group("dense, float32", None, lambda p: p.groups == 1 and p.C > 4 and p.R * p.S > 1 and p.dtype == "float32"),
)

Times = dict[ConvProblem, dict[str, float]]


def times_of(rows: Iterable[Row]) -> Times:
    """Problem -> algorithm -> median in us, of algorithms with correct results."""
    found: Times = {}
    for row in rows:
        if row.status in ("ok", "censored") and row.median_us == row.median_us:
            found.setdefault(row.problem, {})[row.algorithm] = row.median_us
    return {problem: by_name for problem, by_name in found.items() if NATIVE in by_name}


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def speedups(times: Times) -> list[dict[str, Any]]:
    """Per class and direction: problems, geometric mean of native over the best, the same for Triton's alone and for
    libraries' alone, the minimum of native over the best (1 if native is the best), and the winners."""
    found = []
    for group in GROUPS:
        for direction in Direction:
            members = [(p, t) for p, t in times.items() if p.direction == direction and group.holds(p)]
            if not members:
                continue
            triton, library = [], []
            winners: Counter[str] = Counter()
            best = []
            for _, t in members:
                name = min(t, key=t.__getitem__)
                winners[name] += 1
                best.append(t[NATIVE] / t[name])
                ours = [us for other, us in t.items() if "triton" in other]
                if ours:
                    triton.append(t[NATIVE] / min(ours))
                library.append(t[NATIVE] / min(us for other, us in t.items() if "triton" not in other))
            mean = _mean(best)
            assert mean is not None
            found.append({
                "class": group.name, "direction": str(direction), "problems": len(members), "target": group.target,
                "best": mean, "reached": None if group.target is None else mean >= group.target,
                "triton": _mean(triton), "triton_problems": len(triton), "libraries": _mean(library),
                "worst": min(best), "winners": dict(winners.most_common(4)),
            })  # fmt: skip
    return found


def bandwidth_shares(times: Times, bytes_per_s: float) -> list[dict[str, Any]]:
    """Depthwise 3x3 and 7x7 of 50 MB and more: the share of the copy's bandwidth that compulsory traffic reaches."""
    found = []
    for side in (3, 7):
        for direction in Direction:
            members = [
                (p, t)
                for p, t in times.items()
                if p.is_depthwise and p.R == p.S == side and p.bytes >= LARGE_BYTES and p.direction == direction
            ]
            for who in ("native", "triton", "best"):
                shares = []
                for p, t in members:
                    us = {
                        "native": [t[NATIVE]],
                        "triton": [v for name, v in t.items() if "triton" in name],
                        "best": list(t.values()),
                    }[who]
                    if us:
                        shares.append(p.bytes / (min(us) * 1e-6) / bytes_per_s)
                if shares:
                    found.append({
                        "kernel": f"{side}x{side}", "direction": str(direction), "who": who, "problems": len(shares),
                        "mean": sum(shares) / len(shares), "best": max(shares), "worst": min(shares),
                    })  # fmt: skip
    return found


def questions(times: Times, device: str = "cuda") -> list[dict[str, Any]]:
    """The questions that can be asked of the listed cases, each with its lines: native's time, TFLOP/s, GB/s, and the
    best other."""
    listed = {case.number: case for case in _gpu_problems.cases(device)}
    asked: list[tuple[str, tuple[int, ...], Callable[[ConvProblem], Iterable[ConvProblem]]]] = [
        ("Is NHWC depthwise slow?", (1, 3, 5, 8, 9), lambda p: (p,)),
        ("bfloat16 against float16 in dense layers?", (34, 36, 39, 40, 43), _both_types),
        ("Grouped: NHWC against NCHW?", (19, 20, 21, 22), _both_layouts),
        ("Patches: how far from a matrix product?", (28, 29, 30), lambda p: (p,)),
        ("Tensors of more than 2**31 elements?", (42,), lambda p: (p,)),
        ("float64, and float32 without TF32?", (50, 41), lambda p: (p, p._replace(tf32=False))),
        ("Large dense layers: who else comes near?", (36, 37, 38), lambda p: (p,)),
        ("Large depthwise kernels?", (13, 14, 15, 16, 17), lambda p: (p,)),
    ]
    found = []
    for question, numbers, forms in asked:
        lines = []
        for number in numbers:
            for form in dict.fromkeys(forms(listed[number].problem)):
                for direction in Direction:
                    p = form.with_direction(direction)
                    if p in times:
                        lines.append(_line(listed[number].model, p, times[p]))
        found.append({"question": question, "lines": lines})
    return found


def _both_types(p: ConvProblem) -> tuple[ConvProblem, ...]:
    return (p._replace(dtype="bfloat16"), p._replace(dtype="float16"))


def _both_layouts(p: ConvProblem) -> tuple[ConvProblem, ...]:
    return tuple(p._replace(layout=layout, weight_layout=layout) for layout in (CHANNELS_LAST, CONTIGUOUS))


def _line(model: str, p: ConvProblem, t: dict[str, float]) -> dict[str, Any]:
    others = {name: us for name, us in t.items() if name != NATIVE}
    best = min(others, key=others.__getitem__) if others else None
    kind = "tf32" if p.tf32 and p.dtype == "float32" else p.dtype
    return {
        "layer": model, "direction": str(p.direction), "dtype": kind, "layout": p.layout, "native_us": t[NATIVE],
        "native_tflop_per_s": p.flops / t[NATIVE] / 1e6, "native_gb_per_s": p.bytes / t[NATIVE] / 1e3,
        "best_other": best, "ratio": t[NATIVE] / others[best] if best is not None else None,
    }  # fmt: skip
