"""What all trials of a process together may cost.

Each trial has its own bound (`trial.py`). Many problems with bad predictions would still add up, so a trial begins only
while the sum of (time - native's time) over all trials is at most `CALLS` calls of native, of the mean length of those
seen so far, and `SHARE` of the time that this process has computed since the first trial. Until then native runs, which
costs nothing. With at least 2,000 calls, of which 2.5 % are `CALLS`, and convolutions at least half of what is
computed, that is 3 % of native's time at most, plus what one trial may cost.

One trial may cost a lot: a candidate's first call takes as long as it takes. So a trial begins only if there is room
for another loss beyond a trial's own bound as large as the largest so far, in calls of native. Of a good model that is
little or nothing; one that lies has one such call in a process, and not as many as there is room for.
"""

from __future__ import annotations

CALLS = 40.0
SHARE = 0.005


class Account:
    """The cost of all trials so far. Threads that meet here lose an entry at most."""

    __slots__ = ("_since_us", "beyond_calls", "excess_us", "native_us", "trials")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.excess_us = 0.0
        """Time spent beyond what native alone would have taken; negative if the trials have saved time."""
        self.native_us = 0.0
        """Sum of native's time for one call of each problem on trial."""
        self.trials = 0
        self.beyond_calls = 0.0
        """The most that one trial has cost beyond its bound, in calls of its native; at most `CALLS`: what trials save
        makes room for others whatever one of them has cost."""
        self._since_us = 0.0

    def begun(self, native_us: float, computed_us: float = 0.0) -> None:
        """A trial of a problem has begun, of which one call takes native this long, after all threads of the process
        have computed for `computed_us`."""
        if self.trials == 0:
            self._since_us = computed_us
        self.native_us += native_us
        self.trials += 1

    def lost(self, beyond_us: float, native_us: float) -> None:
        """A trial has cost this much more than a trial may, and one call of its native takes `native_us`."""
        self.beyond_calls = min(CALLS, max(self.beyond_calls, beyond_us / max(native_us, 1.0)))

    def forked(self) -> None:
        """The CPU time of a forked process begins at 0."""
        self._since_us = 0.0

    def allows(self, computed_us: float, threads: int = 1) -> bool:
        """Whether another trial, on this many threads, may begin, after all threads have computed for `computed_us`."""
        if self.trials == 0:
            return True
        calls = CALLS - self.beyond_calls
        return self.excess_us <= calls * self.native_us / self.trials + SHARE * (computed_us - self._since_us) / threads
