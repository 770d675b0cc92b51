"""Calls during a trial that are not timed, for `benchmarks.trials`, in a process of its own:

    python -m benchmarks._trials_untimed LIST COUNT CALLS THREADS

A call is untimed if no clock was read in it, so the clocks are replaced by ones that count before the package is
imported. Its cost is its time less the median of a settled native plan's, through convselect, on the same operands in
the same rounds.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

MOST_FLOPS = 4e6
"""Small problems: a microsecond is lost in the noise of large ones."""


class _Counted:
    """A clock that counts how often it is read."""

    reads = 0

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read

    def __call__(self) -> int:
        _Counted.reads += 1
        return self._read()


def measure(path: Path, count: int, calls: int, threads: int) -> dict[str, Any]:
    """{"excess_us": of every untimed call, "open": how many calls were made while a trial was open}."""
    now = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    for name in ("thread_time_ns", "perf_counter_ns", "monotonic_ns", "perf_counter", "thread_time", "monotonic"):
        setattr(time, name, _Counted(getattr(time, name)))

    import gc

    import torch

    import convselect
    from benchmarks._classes import read_problems
    from benchmarks._trials_layers import Layer, draw, forget, undisturbed

    torch.set_num_threads(threads)
    convselect.set_store("off")
    gc.freeze()
    source, excess_us, opened = random.Random(0), list[float](), 0
    for problem in draw(read_problems(path), count, MOST_FLOPS, 1):
        layer, untimed_us, native_us = Layer(problem), list[float](), list[float]()
        sides = [("default", layer.call("default")), ("native", layer.call("native"))]
        with undisturbed(False):
            for _, call in 3 * sides:
                call()
            for _ in range(calls):
                if not layer.on_trial():
                    break
                opened += 1
                source.shuffle(sides)
                for name, call in sides:
                    reads = _Counted.reads
                    start = now()
                    result = call()
                    end = now()
                    del result
                    if name == "native":
                        native_us.append((end - start) / 1e3)
                    elif _Counted.reads == reads:
                        untimed_us.append((end - start) / 1e3)
        if untimed_us:
            usual = median(native_us)
            excess_us += [us - usual for us in untimed_us]
        forget()
    return {"excess_us": excess_us, "open": opened}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), *map(int, sys.argv[2:5]))))
