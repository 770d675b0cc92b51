"""Load balance of the C kernels on machines with more processors than this one: what their division of the work allows.

    python -m benchmarks.balance                             # about ten minutes
    python -m benchmarks.balance --classes 3x3 1x1 --threads 2 16 --all
    python -m benchmarks.balance --layers layers.csv --out run.json

The kernels run as they are, with as many threads as asked for, but one after another on one processor
(`benchmarks/virtual_openmp.c`): each thread's share, and each part of a dynamic loop, is timed alone, and the schedule
that the kernel uses gives the time that would pass. Printed is, per class of layers, direction and algorithm, and in a
second table of each problem's fastest algorithm,

    efficiency = time of all threads together / (threads * time that passes),

the geometric mean of the problems and the least of them. What is done by one thread alone, and waiting at barriers,
counts against it, in proportion. So it is a bound: what threads share (memory bandwidth, caches, power) and the cost of
a barrier itself come on top. What is done more than once because the work is divided is not in it, but in the last
column: time of all threads together over that on one thread.

Each result is compared with the same division computed by one thread, bit by bit, and at random places with float64.
GCC only, whose OpenMP this is. Use one processor: `taskset -c 0 python -m benchmarks.balance`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from benchmarks import _virtual, volumes
from benchmarks._classes import CLASSES, PROBLEMS, read_problems
from benchmarks._tables import geometric_mean
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.base.volumes import image_of
from convselect.demo.tables import print_environment
from convselect.kernels import _library, _spot_check
from convselect.kernels._c_algorithm import CAlgorithm
from convselect.kernels.pool import ALL
from convselect.machine.environment import run_environment
from convselect.measure.measure import operands

THREADS = (2, 4, 8, 16, 32, 64)
ROW = PROBLEMS.with_name("problems_1d.csv")
ONE_ROW, VOLUMES = "1-D", "3-D"
KINDS = (*(c.name for c in CLASSES if not c.dtypes), ONE_ROW, VOLUMES)
WITHIN = 1.3
"""Without `--all`: algorithms that take at most this many times as long as the fastest C kernel of the problem."""
_RUNS, _RUNS_US = (3, 12), 30_000.0  # at least and at most, and otherwise as many as this time allows
_FLOPS = (2e7, 1e9)  # of a problem: below, nobody needs many threads; above, they are like these, and take long
_LEAST_US = 50.0  # nobody divides less


@dataclass
class Row:
    """One problem by one algorithm.

    Attributes:
        one_us: time on one thread.
        efficiency: threads -> as above.
        speed_up: threads -> one_us over the time that would pass.
        serial: threads -> share of that time in which one thread works outside parallel regions.
        shares: threads -> tasks of the longest phase; their largest over their mean is in `largest`.
    """

    kind: str
    problem: str
    direction: str
    batch: int
    algorithm: str
    one_us: float
    efficiency: dict[int, float] = field(default_factory=dict)
    speed_up: dict[int, float] = field(default_factory=dict)
    serial: dict[int, float] = field(default_factory=dict)
    shares: dict[int, int] = field(default_factory=dict)
    largest: dict[int, float] = field(default_factory=dict)


def algorithms(problem: ConvProblem) -> list[CAlgorithm]:
    """Those whose C kernel computes this problem."""
    return [
        a for a in ALL
        if isinstance(a, CAlgorithm) and a.why_not(problem) is None and a._in_c(problem) is not None
    ]  # fmt: skip


def kernel_call(algorithm: CAlgorithm, a: Tensor, b: Tensor, problem: ConvProblem) -> tuple[_virtual.Call, Tensor]:
    """A call of the C kernel on these operands, and the tensor that it writes."""
    ints = algorithm._in_c(problem)
    assert ints is not None
    name = algorithm.volume_kernel if problem.is_volume else algorithm.kernel
    if problem.is_volume:
        a, b = algorithm._ordered(a, b)
    weights = problem.direction == Direction.BACKWARD_WEIGHT
    preferred = problem.layout if problem.layout in _library.LAYOUTS else CONTIGUOUS
    a, a_layout = _library.dense(a, preferred)
    b, b_layout = _library.dense(b, preferred if weights else CONTIGUOUS)
    plan = _library._prepared(name, len(ints), problem, a_layout, b_layout, problem.threads, _library.isa(), ())
    out = torch.empty(plan.result_shape, dtype=plan.dtype, memory_format=plan.out_format)
    struct = ctypes.addressof(plan.conv._obj)
    arguments = (struct, *ints, a.data_ptr(), b.data_ptr(), out.data_ptr(), 0)
    return _virtual.Call(plan.function, arguments, (a, b, plan)), out


def divided(recorder: _virtual.Recorder, call: _virtual.Call, out: Tensor, threads: int) -> _virtual.Division:
    """The division of a call, after one that takes the memory: each stretch as long as in its quickest run.

    Raises:
        AssertionError: if the result is not, bit by bit, that of one thread with the same division.
    """
    assert call() == _library.OK
    want = out.clone()
    out.fill_(float("nan"))
    status, first = recorder.record(call, threads)
    assert status == _library.OK
    assert torch.equal(out, want), "the result depends on the threads"
    work_us = sum(s.ns for s in first) / 1e3
    count = min(max(int(_RUNS_US / max(work_us, 1.0)), _RUNS[0]), _RUNS[1])
    runs = [recorder.record(call, threads)[1] for _ in range(count)]
    return _virtual.division(_virtual.least(runs))


def one_thread(
    recorder: _virtual.Recorder, problem: ConvProblem, everything: bool
) -> list[tuple[CAlgorithm, tuple[Tensor, Tensor], float]]:
    """Algorithms, their operands and their times on one thread in us."""
    p = problem._replace(threads=1)
    a, b = operands(p)
    found = []
    for algorithm in algorithms(p):
        call, out = kernel_call(algorithm, a, b, p)
        one_us = divided(recorder, call, out, 1).work_ns / 1e3
        finding = _spot_check.check(algorithm, out, a, b, p, places=8, seed=0)
        assert finding is None or finding.right, f"{algorithm.name} is wrong on {p}: {finding}"
        found.append((algorithm, (a, b), one_us))
    most = min((us for *_, us in found), default=0.0) * (float("inf") if everything else WITHIN)
    return [one for one in found if _LEAST_US <= one[2] <= most]


def rows(
    recorder: _virtual.Recorder, kind: str, problem: ConvProblem, threads: Sequence[int], everything: bool = False
) -> list[Row]:
    made = []
    for algorithm, (a, b), one_us in one_thread(recorder, problem, everything):
        row = Row(kind, str(problem), str(problem.direction), problem.N, algorithm.name, one_us)
        for count in threads:
            found = divided(recorder, *kernel_call(algorithm, a, b, problem._replace(threads=count)), count)
            row.efficiency[count] = found.work_ns / count / found.span_ns
            row.speed_up[count] = one_us * 1e3 / found.span_ns
            row.serial[count] = found.serial_ns / found.span_ns
            row.shares[count] = found.shares
            row.largest[count] = found.largest
        made.append(row)
    return made


def problems(kinds: Iterable[str], layers: Path | None, count: int) -> list[tuple[str, ConvProblem]]:
    """(kind, forward problem): `count` of each kind and batch, spread over sizes. With a list of layers, of those."""
    low, high = _FLOPS

    def spread(some: Iterable[ConvProblem]) -> list[ConvProblem]:
        ordered = sorted({p for p in some if low <= p.flops <= high}, key=lambda p: (p.flops, str(p)))
        return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(min(count, len(ordered)))]

    images = read_problems(layers or PROBLEMS)
    found: list[tuple[str, ConvProblem]] = []
    for kind in kinds:
        if kind == VOLUMES:
            some = [p for p in volumes.LAYERS.values() if image_of(p) is None]
        elif kind == ONE_ROW:
            some = read_problems(ROW)
        else:
            of_kind = next(c for c in CLASSES if c.name == kind)
            some = [p for p in images if of_kind.holds(p)]
        for batch in (1, 8):
            found += [(kind, p) for p in spread(p for p in some if batch == p.N)]
    return found


def table(found: Sequence[Row], threads: Sequence[int]) -> Table:
    grid = Table(box=SIMPLE_HEAD)
    for name in ("kind", "direction", "batch", "algorithm", "problems"):
        grid.add_column(name)
    for count in threads:
        grid.add_column(f"{count} threads", justify="right")
    grid.add_column(f"work at {threads[-1]}", justify="right")
    groups: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in found:
        groups[row.kind, row.direction, row.batch, row.algorithm].append(row)
    for (kind, direction, batch, algorithm), some in groups.items():
        cells = []
        for count in threads:
            values = [row.efficiency[count] for row in some]
            cells.append(f"{geometric_mean(values):.2f}, {min(values):.2f}")
        more = geometric_mean([row.efficiency[threads[-1]] * threads[-1] / row.speed_up[threads[-1]] for row in some])
        grid.add_row(kind, direction, str(batch), algorithm, str(len(some)), *cells, f"{more:.2f}")
    return grid


def fastest(found: Iterable[Row]) -> list[Row]:
    """Of each problem and direction the algorithm that takes least time on one thread."""
    best: dict[tuple[str, str, str], Row] = {}
    for row in found:
        key = (row.kind, row.problem, row.direction)
        if key not in best or row.one_us < best[key].one_us:
            best[key] = row
    return list(best.values())


def summary(found: Sequence[Row], threads: Sequence[int]) -> Table:
    """Of the fastest algorithms, both batches together."""
    grid = Table("kind", "direction", "problems", *(f"{count} threads" for count in threads), box=SIMPLE_HEAD)
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in fastest(found):
        groups[row.kind, row.direction].append(row)
    for (kind, direction), some in groups.items():
        values = [[row.efficiency[count] for row in some] for count in threads]
        cells = [f"{geometric_mean(each):.2f}, {min(each):.2f}" for each in values]
        grid.add_row(kind, direction, str(len(some)), *cells)
    return grid


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="*", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--threads", nargs="*", type=int, default=THREADS)
    parser.add_argument("--count", type=int, default=4, help="problems of each kind and batch")
    parser.add_argument("--layers", type=Path, help="a CSV file of layers instead of problems.csv")
    parser.add_argument("--layout", choices=[CONTIGUOUS, CHANNELS_LAST], default=CONTIGUOUS)
    parser.add_argument("--all", action="store_true", help=f"also algorithms over {WITHIN} times the fastest's time")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    asked = parser.parse_args(argv)
    if not _virtual.preloaded():
        with tempfile.TemporaryDirectory() as folder:
            sys.exit(_virtual.run_again(folder))
    if not _library.available():
        sys.exit("benchmarks.balance: there are no C kernels here")
    torch.set_num_threads(1)
    console, recorder = Console(), _virtual.Recorder()
    print_environment(console, run_environment())
    found: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for kind, forward in progress.track(problems(asked.classes, asked.layers, asked.count)):
            for direction in Direction:
                problem = forward._replace(
                    direction=direction, layout=asked.layout, weight_layout=asked.layout, dtype="float32"
                )
                found += rows(recorder, kind, problem, asked.threads, asked.all)
    found.sort(key=lambda row: (KINDS.index(row.kind), row.direction, row.batch, row.algorithm))
    console.print(table(found, asked.threads))
    console.print(summary(found, asked.threads))
    if asked.out is not None:
        document = {"environment": run_environment(), "rows": [asdict(row) for row in found]}
        asked.out.write_text(json.dumps(document, indent=1))
    ctypes.CDLL(None).fflush(None)


if __name__ == "__main__":
    main()
