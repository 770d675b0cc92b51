"""A search space with a time for every program, made by hand: what is best depends on the problem's size."""

from __future__ import annotations

import math

from benchmarks._recorded import Recorded
from convselect.base.problem import ConvProblem, conv_problem
from convselect.choice.choose import NATIVE
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space
from convselect.tune.programs import Program, Programs
from convselect.tune.records import Measured

BLOCKS = (1, 2, 4, 8, 16, 32, 64)
CACHE = 4096


def space() -> Space:
    return Space(
        (
            Parameter("packed", (0, 1), STRUCTURE),
            Parameter("rows", BLOCKS),
            Parameter("columns", BLOCKS),
            Parameter("depth", BLOCKS),
            Parameter("ahead", (0, 1, 2, 4), "annotation"),
        ),
        default=lambda p: {"packed": 0, "rows": 4, "columns": 4, "depth": 4, "ahead": 0},
        allowed=lambda p, v: v.get("rows", 1) * v.get("columns", 1) <= 256,
        rules=(
            Rule("pack", lambda p, v: p.C >= 16, lambda p, v: [{"packed": 0}, {"packed": 1}]),
            Rule("leave", lambda p, v: p.C < 16, lambda p, v: [{"packed": 0}]),
        ),
    )


def time_us(problem: ConvProblem, program: Program) -> float:
    """Work, times a penalty for each size that is off its best: rows * columns fills 64 registers, the block fits the
    cache, packing pays for many channels."""
    work = problem.flops / 1e5
    if program.algorithm == NATIVE:
        return 1.5 * work
    if program.algorithm == "plain":
        return 1.2 * work
    v = program.values
    tile = abs(math.log2(v["rows"] * v["columns"] / 64))
    shape = abs(math.log2(v["rows"] / v["columns"]) - (1 if problem.W > 20 else -1))
    block = v["rows"] * v["columns"] * v["depth"] * 4
    spill = max(0.0, math.log2(block / CACHE)) + max(0.0, math.log2(CACHE / block) / 3)
    packed = 0.9 if v["packed"] == (problem.C >= 64) else 1.1
    ahead = 1 + 0.03 * abs(v["ahead"] - 2)
    base = 0.4 if program.algorithm == "blocked" else 0.55
    return work * base * packed * ahead * (1 + 0.12 * tile + 0.1 * shape + 0.15 * spill)


def problems() -> list[ConvProblem]:
    sizes = ((64, 56, 64), (128, 28, 128), (256, 14, 256), (512, 7, 512), (8, 112, 16), (64, 28, 256))
    return [conv_problem(1, c, s, s, k, 3, 3, padding=1) for c, s, k in sizes]


def programs(problem: ConvProblem) -> Programs:
    return Programs(problem, {NATIVE: None, "plain": None, "blocked": space(), "other": space()})


class Toy:
    """A runner on the made-up times; `wrong` programs fail their check."""

    def __init__(self, wrong: frozenset[Program] = frozenset()) -> None:
        self.wrong = wrong
        self.ran: list[tuple[ConvProblem, Program]] = []

    def run(self, problem, programs, default):
        self.ran += [(problem, program) for program in programs]
        return [Measured(p, "wrong") if p in self.wrong else Measured(p, "ok", time_us(problem, p)) for p in programs]

    def confirm(self, problem, programs, default):
        from convselect.tune.runner import Verdict

        best = min((default, *programs), key=lambda p: time_us(problem, p))
        native, now = time_us(problem, Program(NATIVE)), time_us(problem, best)
        return Verdict(best, native / now, time_us(problem, default) / now, 1)


def recorded(problem: ConvProblem, count: int | None = None, seed: int = 0) -> Recorded:
    """Times of every program, or of `count` drawn at random; the defaults come first."""
    import random

    of = programs(problem)
    everything = [of.made(n, v) for n in of.tunable for v in of.spaces[n].programs(problem)]
    if count is not None:
        everything = random.Random(seed).sample(everything, count)
    chosen = list(dict.fromkeys([*of.defaults(), *everything]))
    kinds = {(name, p.name): p.kind for name in of.tunable for p in of.spaces[name].parameters}
    measured = {p: Measured(p, "ok", time_us(problem, p)) for p in chosen}
    return Recorded(problem, {"toy": 2}, measured, of.default("blocked"), kinds)
