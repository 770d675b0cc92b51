"""The problems that a GPU is measured on: layers of published networks, the most informative first.

`gpu_problems.csv` holds cases chosen one by one: depthwise, grouped, stems, patches, 1x1, dense, dilated, one-row,
strided gradients, float64, and a tensor of more than 2**31 elements. After them come the same layers in other element
types and layouts, then layers of `problems.csv` at several batch sizes.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.measure.rows import kernel_class
from convselect.model.sampling import read_layers

CASES = Path(__file__).parent / "gpu_problems.csv"
LAYERS = Path(__file__).parent / "problems.csv"
COUNT = 250
BATCHES = (1, 32, 128)
MOST_BYTES, MOST_FLOPS = 1 << 30, 4e11
"""Bounds on layers at other batch sizes: more expensive ones add no information and take the time of many."""
HUGE_FLOPS = 1e12
# How float32, float16 and bfloat16 take turns in layers that have no element type of their own.
_STYLES = (
    ("bfloat16", False, CHANNELS_LAST),
    ("float16", False, CHANNELS_LAST),
    ("float32", True, CONTIGUOUS),
    ("bfloat16", False, CONTIGUOUS),
    ("float32", False, CHANNELS_LAST),
    ("float16", False, CONTIGUOUS),
    ("float32", True, CHANNELS_LAST),
    ("float32", False, CONTIGUOUS),
)
# Kinds in which libraries leave most behind come first, and more often.
_TURNS = ("depthwise", "large", "depthwise", "grouped", "strided", "depthwise", "1x1", "large", "3x3", "other")


class Case(NamedTuple):
    """A layer with its number in the list (0: of another list) and the network it comes from."""

    number: int
    model: str
    problem: ConvProblem


def _styled(p: ConvProblem, dtype: str, tf32: bool, layout: str, device: str) -> ConvProblem:
    return p._replace(dtype=dtype, tf32=tf32, layout=layout, weight_layout=layout, device=device)


def cases(device: str = "cuda") -> list[Case]:
    """The list of `gpu_problems.csv`, forward."""
    found = []
    with CASES.open(newline="") as file:
        for line in csv.DictReader(file):
            sizes = [int(line[name]) for name in ("N", "C", "H", "W", "K", "R", "S")]
            stride, padding, dilation = ((int(line[f"{a}_h"]), int(line[f"{a}_w"])) for a in ("stride", "pad", "dil"))
            p = conv_problem(*sizes, stride=stride, padding=padding, dilation=dilation, groups=int(line["groups"]))
            p = _styled(p, line["dtype"], line["tf32"] == "1", line["layout"], device)
            found.append(Case(int(line["case"]), line["model"], p))
    return found


def variants(case: Case) -> Iterator[Case]:
    """The same layer in the other layout, the other 16-bit type, and the other kind of float32 product."""
    p = case.problem
    if p.dtype == "float64" or p.flops > HUGE_FLOPS:
        return
    other = CONTIGUOUS if p.layout == CHANNELS_LAST else CHANNELS_LAST
    yield case._replace(problem=p._replace(layout=other, weight_layout=other))
    if p.element_bytes == 2:
        swapped = "float16" if p.dtype == "bfloat16" else "bfloat16"
        yield case._replace(problem=p._replace(dtype=swapped))
        if p.groups > 1 or p.flops < 2e10:
            yield case._replace(problem=p._replace(dtype="float32", tf32=True))
    else:
        yield case._replace(problem=p._replace(tf32=not p.tf32))


def layers(device: str = "cuda") -> Iterator[Case]:
    """Layers of real networks at several batch sizes, kinds by turns, element types and layouts going round."""
    by_kind: dict[str, list[tuple[str, ConvProblem]]] = {}
    for model, p in dict.fromkeys((model, p._replace(N=1)) for model, p in read_layers(LAYERS)):
        if p.H * p.W >= 49 and p.flops > 1e6:  # squeeze-and-excitation layers only measure launch overhead
            by_kind.setdefault(kernel_class(p), []).append((model, p))
    batches, styles = itertools.cycle(BATCHES), itertools.cycle(_STYLES)
    # Take layers at regular distances in the list, so that a few of them cover many networks.
    queues = {kind: iter(found[0::3] + found[1::3] + found[2::3]) for kind, found in by_kind.items()}
    while queues:
        for kind in _TURNS:
            model, p = next(queues.get(kind, iter(())), (None, None))
            if model is None or p is None:
                queues.pop(kind, None)
                continue
            p = _styled(p._replace(N=next(batches)), *next(styles), device)
            while (p.bytes > MOST_BYTES or p.flops > MOST_FLOPS) and p.N > 1:
                p = p._replace(N=p.N // 4)
            yield Case(0, model, p)


def plan(count: int = COUNT, device: str = "cuda") -> list[Case]:
    """`count` layers, the most valuable first, none twice; what takes longest to compute is the last of its group."""
    listed = sorted(cases(device), key=lambda c: c.problem.flops > HUGE_FLOPS)
    others = [list(variants(case)) for case in listed]
    turned = [found[i] for i in range(max(map(len, others))) for found in others if i < len(found)]
    mixed = [case for pair in zip(turned, layers(device), strict=False) for case in pair]
    rest = itertools.islice(layers(device), len(turned), None)
    seen: dict[ConvProblem, Case] = {}
    for case in itertools.chain(listed, mixed, turned, rest):
        seen.setdefault(case.problem, case)
        if len(seen) >= count:
            break
    return list(seen.values())


def directions(case: Case) -> list[ConvProblem]:
    """The problems of a layer in all three directions."""
    return [case.problem.with_direction(direction) for direction in Direction]
