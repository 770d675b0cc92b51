"""Interleaved timing by a GPU's own clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from convselect.base import timing


def on_device(
    functions: Mapping[str, Callable[[int], object]],
    rounds: int,
    *,
    events: timing.Events,
    calls: Mapping[str, int] | None = None,
    host_us_per_call: float = 40.0,
    seed: int = 0,
    deadline_s: float | None = None,
    clock: timing.Clock = timing.SYSTEM_CLOCK,
) -> dict[str, timing.Timing]:
    """`timing.interleaved` for functions that only queue work on an accelerator: samples are its own time per call.

    There are no untimed calls: the caller has compiled and allocated everything beforehand.

    Args:
        functions: each is called with the number of the call, from 0 up over all rounds, so that it can use other
            operands each time, which are in no cache.
        calls: calls of each function per sample, in a row; default 1.
        host_us_per_call: while calls are queued, the accelerator is kept busy for this many microseconds per call.
        seed: random seed of the orders.
        deadline_s: as in `timing.interleaved`.

    Raises:
        ValueError: for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    order_source = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    numbers = dict.fromkeys(functions, 0)
    names = list(functions)
    deadline = timing.Deadline(deadline_s, clock=clock)
    longest_s, before_s = 0.0, 0.0
    for done in range(1, rounds + 1):
        order_source.shuffle(names)
        marks = {}
        for name in names:
            function, count = functions[name], 1 if calls is None else calls[name]
            first, last = events.event(), events.event()
            events.occupy(host_us_per_call * count)
            first.record()
            for _ in range(count):
                function(numbers[name])
                numbers[name] += 1
            last.record()
            marks[name] = (first, last, count)
        events.synchronise()
        for name, (first, last, count) in marks.items():
            samples[name].append(1e3 * first.elapsed_time(last) / count)
        now_s = deadline.elapsed_s
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
        if deadline_s is not None and done >= 2 and now_s + longest_s > deadline_s:
            break
    return {name: timing.Timing(tuple(us)) for name, us in samples.items()}
