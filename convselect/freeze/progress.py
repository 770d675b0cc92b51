"""A bar while a plan is made, or lines in a log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from convselect.base.timing import Deadline

FIRST_LINE_S, LINE_EVERY_S = 5.0, 10.0
"""When the first line is written where no bar can be drawn, and how often another."""


@contextlib.contextmanager
def bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` parts of the work. It draws on standard error if that is a terminal and
    rich is installed, and takes the bar away at the end. Elsewhere it writes a line now and then, and none if the work
    is done soon."""
    if sys.stderr is None or total < 2:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield _lines(total, what)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _lines(total, what)
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _lines(total: int, what: str) -> Callable[[], None]:
    done, wait = 0, Deadline(FIRST_LINE_S)

    def advance() -> None:
        nonlocal done, wait
        done += 1
        if wait.passed and done < total:
            wait = Deadline(LINE_EVERY_S)
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(f"convselect: {what}, {done} of {total}", file=sys.stderr, flush=True)

    return advance
