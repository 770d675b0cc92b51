"""benchmarks.balance: how kernels divide their work, on threads that are not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import _virtual
from benchmarks._virtual import Stretch, division, least
from benchmarks.balance import KINDS, Row, fastest, problems, summary, table

gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC, whose OpenMP it stands in for")

LOOP = """
#include <stdatomic.h>
#include <time.h>
static void spin(int ms) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    double end = t.tv_sec + t.tv_nsec * 1e-9 + ms * 1e-3;
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    while (t.tv_sec + t.tv_nsec * 1e-9 < end);
}
/* Five tasks, and one that a single thread does. Returns how often each of the five ran, as digits. */
int five(int threads, int dynamic) {
    _Atomic int ran = 0;
    int digit[5] = {1, 10, 100, 1000, 10000};
#pragma omp parallel num_threads(threads)
    {
        if (dynamic) {
#pragma omp for schedule(dynamic, 1)
            for (int i = 0; i < 5; i++) spin(4), ran += digit[i];
        } else {
#pragma omp for schedule(static)
            for (int i = 0; i < 5; i++) spin(4), ran += digit[i];
        }
    }
    spin(4);
    return ran;
}
"""

PROGRAM = """
import ctypes, json, sys
import torch
from benchmarks import _virtual, balance
from convselect.base.problem import Direction, conv_problem
from convselect.kernels.pool import BY_NAME

library = ctypes.CDLL(sys.argv[1])
recorder = _virtual.Recorder()
found = {}
for threads in (1, 2, 4, 5, 64):
    for dynamic in (0, 1):
        ran, stretches = recorder.record(lambda: library.five(threads, dynamic), threads)
        found[f"{threads} {dynamic}"] = [ran, *_virtual.division(stretches)[:3]]
torch.set_num_threads(1)
rows = []
for direction in Direction:
    problem = conv_problem(2, 32, 28, 28, 32, 3, 3, padding=1)._replace(direction=direction)
    made = balance.rows(recorder, "3x3", problem, (3, 16), everything=True)
    rows += [[r.algorithm, r.direction, *r.efficiency.values()] for r in made]
print(json.dumps({"five": found, "rows": rows}))
"""


def _static(phase: int, *ns: int) -> list[Stretch]:
    return [Stretch(phase, len(ns), rank, 0, -1, each) for rank, each in enumerate(ns)]


def test_serial_and_static_phases_add_up():
    found = division([*_static(0, 10), *_static(1, 30, 10), *_static(2, 5)])
    assert (found.work_ns, found.span_ns, found.serial_ns) == (55, 45, 15)
    assert (found.shares, found.largest) == (2, 1.5)


def test_a_dynamic_loop_goes_to_whoever_is_free():
    """Threads that come at 0 and at 20: the first two parts go to the first one."""
    parts = [Stretch(0, 2, 0, 1, i, ns) for i, ns in enumerate([15, 10, 30])]
    found = division([*_static(0, 0, 20), *parts])
    assert found.span_ns == 50  # 15, 10 and nothing; 20 and 30
    assert found.work_ns == 75
    assert found.shares == 3


def test_the_least_of_runs_counts_whoever_takes_a_part():
    first = [Stretch(0, 2, 0, 1, 7, 30), Stretch(0, 2, 1, 1, -1, 4)]
    second = [Stretch(0, 2, 1, 1, 7, 20), Stretch(0, 2, 1, 1, -1, 6)]
    assert sorted(s.ns for s in least([first, second])) == [4, 20]


def test_every_kind_has_problems():
    found = problems(KINDS, None, 1)
    assert {kind for kind, _ in found} == set(KINDS)
    assert {p.N for _, p in found} >= {1, 8}


def test_the_fastest_of_each_problem_is_summed_up():
    rows = [
        Row("3x3", problem, "forward", 1, name, us, {4: share}, {4: 2.0})
        for problem, name, us, share in [("a", "quick", 5.0, 0.5), ("a", "slow", 6.0, 0.9), ("b", "slow", 7.0, 0.8)]
    ]
    assert [row.algorithm for row in fastest(rows)] == ["quick", "slow"]
    assert list(summary(rows, [4]).columns[3].cells) == ["0.63, 0.50"]
    assert list(table(rows, [4]).columns[5].cells) == ["0.50, 0.50", "0.85, 0.80"]


def test_own_openmp_is_no_virtual_one():
    with pytest.raises(RuntimeError, match="start the process"):
        _virtual.Recorder()


@gcc
@pytest.mark.process
def test_threads_that_are_not_there(tmp_path: Path):
    """Each part of a loop runs once, times are those of the schedule, and it changes no result of a C kernel."""
    source, library = tmp_path / "five.c", tmp_path / "five.so"
    source.write_text(LOOP)
    subprocess.run(["gcc", "-O1", "-fopenmp", "-shared", "-fPIC", "-o", library, source], check=True)
    environment = _virtual.environment(_virtual.build(tmp_path))
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    turns = {1: 5, 2: 3, 4: 2, 5: 1, 64: 1}
    for name, (ran, work_ns, span_ns, serial_ns) in found["five"].items():
        threads = int(name.split()[0])
        assert ran == 11111
        assert work_ns == pytest.approx(24e6, rel=0.2)
        assert span_ns == pytest.approx(4e6 * (turns[threads] + 1), rel=0.2)
        assert serial_ns == pytest.approx(4e6 if threads > 1 else 24e6, rel=0.2)
    assert {direction for _, direction, *_ in found["rows"]} == {"forward", "backward_data", "backward_weight"}
    assert {name for name, *_ in found["rows"]} >= {"direct", "winograd4"}
    assert all(0 < share <= 1 for _, _, *shares in found["rows"] for share in shares)
