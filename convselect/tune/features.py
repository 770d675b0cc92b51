"""Input features of the cost model: the problem, the parameters, and estimates computed from both.

A parameter that an algorithm lacks is NaN, since trees accept missing values. Estimates are rough on purpose: the
method's arithmetic and memory traffic to first order, block sizes relative to the caches that they have to fit into,
how often a block is reused, and how full the last block is. Logarithms are to base 2.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convselect.base.problem import ConvProblem
from convselect.model.features import FEATURE_NAMES, features
from convselect.tune.programs import Program

_CACHES = (("SC_LEVEL1_DCACHE_SIZE", 32 << 10), ("SC_LEVEL2_CACHE_SIZE", 1 << 20), ("SC_LEVEL3_CACHE_SIZE", 16 << 20))


class Caches(NamedTuple):
    """Sizes of a core's data caches, in bytes."""

    l1: int
    l2: int
    l3: int


@functools.cache
def caches() -> Caches:
    """The cache sizes of this machine's processor; typical sizes if the system does not report them."""
    found = []
    for name, usual in _CACHES:
        try:
            size = os.sysconf(name)
        except (ValueError, OSError, AttributeError):
            size = 0
        found.append(size if size > 0 else usual)
    return Caches(*found)


class Estimate(NamedTuple):
    """Cost of an algorithm on a problem, independent of its parameters.

    Attributes:
        flops: operations of the method, without transforms.
        traffic_bytes: operands and result once, plus the intermediate values that the method writes and reads.
        tiles: number of image tiles; pixels of the result if the method has no tiles.
        taps: values per input channel in one tile.
    """

    flops: float
    traffic_bytes: float
    tiles: float
    taps: float


@functools.lru_cache(maxsize=4096)
def estimate(problem: ConvProblem, algorithm: str) -> Estimate:
    p = problem
    found = re.fullmatch(r"winograd(\d)", algorithm)
    if found is None:
        return Estimate(float(p.flops), float(p.bytes), float(p.N * p.P * p.Q), float(p.R * p.S))
    m = int(found[1])
    rows, columns = (m if p.R > 1 else 1), (m if p.S > 1 else 1)
    height, width, across = (p.H, p.W, p.stride_h) if p.direction == "backward_data" else (p.P, p.Q, 1)
    tiles = p.N * -(-height // (across * rows)) * -(-width // (across * columns))
    taps = (p.stride_h * (rows - 1) + p.R) * (p.stride_w * (columns - 1) + p.S)
    flops = 2.0 * tiles * taps * (p.C // p.groups) * p.K
    between = p.element_bytes * taps * (tiles * (p.C + p.K) + (p.C // p.groups) * p.K)
    return Estimate(flops, float(p.bytes + 2 * between), float(tiles), float(taps))


_ESTIMATES = (
    "log_flops", "log_traffic", "log_intensity", "log_tiles", "log_taps", "log_x/l2", "log_weight/l2", "log_y/l2",
    "log_weight/l1", "log_transformed_weight/l2", "log_x/l3", "log_block/l1", "log_block/l2",
)  # fmt: skip
_OF_SIZES = (
    "log_value", "log_value/l2", "log_blocks_of_K", "rest_of_K", "log_blocks_of_C", "rest_of_C", "log_blocks_of_tiles",
    "rest_of_tiles",
)  # fmt: skip
_OF_BYTES = ("log_value/l1", "log_tile/l2", "log_x/value", "log_weight/value", "log_tile_columns", "log_reuse")


class ProgramFeatures:
    """Feature vectors with one set of columns: the algorithms and parameters that occur in `programs`.

    Args:
        programs: their algorithms and parameters get columns. A program with another algorithm has 0 in the columns of
            algorithms and NaN in those of parameters that it lacks.
    """

    def __init__(self, programs: Iterable[Program]) -> None:
        programs = list(programs)
        self.algorithms = sorted({program.algorithm for program in programs})
        self.parameters = sorted({name for program in programs for name, _ in program.params})
        self.names = (
            *FEATURE_NAMES,
            *_ESTIMATES,
            "family",
            *self.algorithms,
            *(f"{name}:{what}" for name in self.parameters for what in (*_OF_SIZES, *_OF_BYTES)),
        )
        self._families = sorted({family(name) for name in self.algorithms})

    def __call__(self, problem: ConvProblem, programs: Sequence[Program]) -> npt.NDArray[np.float32]:
        """(n, len(names)), float32."""
        of_problem = features(problem)
        rows = np.full((len(programs), len(self.names)), np.nan, dtype=np.float32)
        rows[:, : len(FEATURE_NAMES)] = of_problem
        first = len(FEATURE_NAMES)
        for row, program in zip(rows, programs, strict=True):
            row[first:] = self._of_program(problem, program)
        return rows

    def _of_program(self, problem: ConvProblem, program: Program) -> list[float]:
        e, sizes = estimate(problem, program.algorithm), caches()
        element = problem.element_bytes
        transformed = element * e.taps * problem.K * (problem.C // problem.groups)
        # The product of the block sizes: the values that are worked on at one time, with all their taps.
        block = element * e.taps * math.prod(max(v, 1) for n, v in program.params if not _in_kib(n))
        values = [
            _log(e.flops), _log(e.traffic_bytes), _log(e.flops / e.traffic_bytes), _log(e.tiles), _log(e.taps),
            _log(problem.x_bytes / sizes.l2), _log(problem.weight_bytes / sizes.l2), _log(problem.y_bytes / sizes.l2),
            _log(problem.weight_bytes / sizes.l1), _log(transformed / sizes.l2), _log(problem.x_bytes / sizes.l3),
            _log(block / sizes.l1), _log(block / sizes.l2),
        ]  # fmt: skip
        own = family(program.algorithm)
        values.append(float(self._families.index(own)) if own in self._families else float("nan"))
        values += [float(program.algorithm == name) for name in self.algorithms]
        params = program.values
        for name in self.parameters:
            value = params.get(name)
            if value is None:
                values += [float("nan")] * (len(_OF_SIZES) + len(_OF_BYTES))
            else:
                values += _of_value(problem, program.algorithm, name, value)
        return values


@functools.lru_cache(maxsize=1 << 16)
def _of_value(problem: ConvProblem, algorithm: str, name: str, value: int) -> tuple[float, ...]:
    """One parameter read as a size in channels or tiles and as a size in bytes: the trees pick what is useful."""
    e, sizes, count = estimate(problem, algorithm), caches(), max(value, 1) * (1024 if _in_kib(name) else 1)
    column = problem.element_bytes * e.taps * (problem.C // problem.groups)  # bytes per tile of the image
    columns = count / column
    return (
        float(value) if value < 2 else 1 + _log(value),
        _log(count / sizes.l2),
        _log(problem.K / count),
        -problem.K % count / count,
        _log(problem.C / count),
        -problem.C % count / count,
        _log(e.tiles / count),
        -e.tiles % count / count,
        _log(count / sizes.l1),
        _log(count * problem.element_bytes * e.taps / sizes.l2),
        _log(problem.x_bytes / count),
        _log(problem.weight_bytes / count),
        _log(columns),
        _log(e.tiles / max(columns, 1.0)),
    )


def _in_kib(name: str) -> bool:
    return name.endswith("_kib")


def family(algorithm: str) -> str:
    """The algorithm's name without its number: algorithms that differ only in the number are one family."""
    return algorithm.rstrip("0123456789")


def _log(value: float) -> float:
    return math.log2(max(value, 1e-9))
