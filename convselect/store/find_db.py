"""Read MIOpen's find-db as measurements: times of AMD's library on a GPU, in its own text format.

One line per problem, `key=solver:milliseconds,workspace bytes,kind of algorithm;solver:...`. The key is

    C-H-W-RxS-K-P-Q-N-padding-stride-dilation-bias-layout[-weight layout-output layout]-type-direction[_gGROUPS][_c..]

with pairs as HxW. For the two gradients (B and W) the first three numbers are those of y's gradient and the second
three those of x. Older files write `kind of algorithm:solver,milliseconds,workspace,..`. Sources, in ROCm/MIOpen:
docs/conceptual/finddb.rst, src/conv/problem_description.cpp and src/include/miopen/perf_field.hpp.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.measure.rows import Row

PREFIX = "miopen:"
"""Prefix of solvers' names here: they are not algorithms of convselect."""
_DIRECTIONS = {"F": Direction.FORWARD, "B": Direction.BACKWARD_DATA, "W": Direction.BACKWARD_WEIGHT}
_DTYPES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16", "FP64": "float64"}
_LAYOUTS = {"NCHW": CONTIGUOUS, "NHWC": CHANNELS_LAST}
_KEY = re.compile(
    r"(?P<a>\d+-\d+-\d+)-(?P<kernel>\d+x\d+)-(?P<b>\d+-\d+-\d+)-(?P<N>\d+)-(?P<padding>\d+x\d+)-(?P<stride>\d+x\d+)"
    r"-(?P<dilation>\d+x\d+)-(?P<bias>\d+)-(?P<layout>[A-Za-z]+(?:-[A-Za-z]+){0,2})-(?P<dtype>[A-Z]+\d+[A-Z0-9]*)"
    r"-(?P<direction>[FBW])(?:_g(?P<groups>\d+))?(?P<cast>(?:_c[iwo][A-Z0-9]+)*)"
)
_KEY_3D = re.compile(r"\d+-\d+-\d+-\d+-\d+x\d+x\d+-")
# gfx90a68.HIP.fdb.txt: 0x68 compute units; gfx1030_36.HIP.2_19_0_d.ufdb.txt: 36 compute units, and a version.
_NAME = re.compile(
    r"(?P<arch>gfx(?:9[0-9a-f]{2}|8[0-9a-f]{2}|1[0-9]{2}[0-9a-f]))(?:[-+][-+a-z]*)?(?:_(?P<units>\d+)|(?P<hex>[0-9a-f]+))?"
    r"(?:\.(?P<backend>HIP|OpenCL))?(?:\.(?P<version>[0-9][\w.]*?))?\.u?fdb\.txt"
)


class Skipped(ValueError):
    """A line is left out; the message is the reason."""


@dataclass
class FindDb:
    """A file's contents.

    Attributes:
        environment: architecture, compute units and version, as far as the file's name gives them.
        rows: one per problem and solver.
        skipped: reason -> number of lines, or of solvers in a line, that were left out for this reason.
    """

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def problems(self) -> int:
        return len({row.problem for row in self.rows})


def environment_of(name: str) -> dict[str, Any]:
    """The description of the environment that a file's name stands for.

    Raises:
        ValueError: if it is not named like MIOpen's files: only the name says which GPU the times are from.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"{name!r} does not say which GPU it is of: MIOpen's files are called gfx90a68.HIP.fdb.txt or "
            "gfx1030_36.HIP.2_19_0.ufdb.txt"
        )
    units = int(found["units"]) if found["units"] else int(found["hex"], 16) if found["hex"] else None
    return {
        "family": f"rocm-{found['arch']}",
        "host_flags": {},
        "device": found["arch"] if units is None else f"{found['arch']}, {units} compute units",
        "torch": None,
        "backend": found["backend"],
        "miopen": found["version"],
        "source": "MIOpen find-db",
    }


def read(path: str | Path) -> FindDb:
    """Read a find-db or user find-db file.

    Raises:
        ValueError: if its name does not say which GPU it is from.
        OSError: if it cannot be read.
    """
    with Path(path).open(errors="replace") as file:
        return parse(file, environment_of(Path(path).name))


def parse(lines: Iterable[str], environment: dict[str, Any]) -> FindDb:
    """Read the lines that a `ConvProblem` can express; the others are counted."""
    found = FindDb(environment)
    for line in lines:
        if not (line := line.strip()):
            continue
        key, equals, values = line.partition("=")
        try:
            if not equals:
                raise Skipped("not a line of a find-db")
            problem = problem_of(key)
        except Skipped as reason:
            found.skipped[str(reason)] += 1
            continue
        times: dict[str, float] = {}
        for value in filter(None, values.split(";")):
            try:
                solver, milliseconds = _solver(value)
            except Skipped as reason:
                found.skipped[str(reason)] += 1
                continue
            times[solver] = min(milliseconds, times.get(solver, math.inf))
        for solver, milliseconds in times.items():
            us = milliseconds * 1000
            found.rows.append(
                Row("miopen", problem, PREFIX + solver, 1, "ok", "event", min_us=us, median_us=us, wall_us=us)
            )
    return found


def _solver(text: str) -> tuple[str, float]:
    """A solver's entry as (solver, milliseconds). Raises Skipped if it has no valid time."""
    name, _, rest = text.partition(":")
    cells = rest.split(",")
    if len(cells) >= 4:  # the older form: the name stands for a kind of algorithm
        name, *cells = cells
    try:
        milliseconds = float(cells[0][:30])
    except ValueError:
        raise Skipped("a solver without a time") from None
    # Some versions summed up long runs wrongly, with results of zero or below.
    if not name or len(name) > 200 or not 0 < milliseconds < 1e9:
        raise Skipped("a time that is none")
    return name, milliseconds


def problem_of(key: str) -> ConvProblem:
    """The problem of a key.

    Raises:
        Skipped: if no `ConvProblem` can express it, with the reason.
    """
    if len(key) > 500 or re.search("[0-9]{13}", key):  # more than any size
        raise Skipped("a key that cannot be read")
    if _KEY_3D.match(key):
        raise Skipped("three spatial dimensions")
    found = _KEY.fullmatch(key)
    if found is None:
        raise Skipped("a key that cannot be read")
    layouts = set(found["layout"].split("-"))
    if found["cast"]:
        raise Skipped("computed in another type than it is stored in")
    if found["dtype"] not in _DTYPES:
        raise Skipped("an element type that is not ours")
    if len(layouts) > 1 or not layouts <= set(_LAYOUTS):
        raise Skipped("a layout that is not ours")
    layout = _LAYOUTS[layouts.pop()]
    direction = _DIRECTIONS[found["direction"]]
    x, y = (tuple(map(int, found[name].split("-"))) for name in "ab")
    if direction != Direction.FORWARD:
        x, y = y, x
    R, S = _pair(found["kernel"])
    problem = conv_problem(
        int(found["N"]), x[0], x[1], x[2], y[0], R, S, direction=direction, stride=_pair(found["stride"]),
        padding=_pair(found["padding"]), dilation=_pair(found["dilation"]), groups=int(found["groups"] or 1),
        dtype=_DTYPES[found["dtype"]], layout=layout, weight_layout=layout, device="cuda",
    )  # fmt: skip
    if problem.why_impossible() is not None:
        raise Skipped("sizes that no convolution has")
    if y[1:] != (problem.P, problem.Q):
        # A transposed convolution is stored as the gradient that it equals; keys that fit neither cannot be expressed.
        raise Skipped("sizes that do not fit each other (transposed, or rounded otherwise)")
    return problem


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    return int(first), int(second)
