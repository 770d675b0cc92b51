"""A bar while a plan is made, where somebody can see it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` parts of the work. It draws on standard error if that is a terminal and
    rich is installed, and takes the bar away at the end."""
    if sys.stderr is None or not sys.stderr.isatty() or total < 2:
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
