"""A damaged file is renamed, not deleted: its owner may want it, and a new one can be begun in its place."""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path

from convselect._store_choices import Choices
from convselect._store_file import _checked, kind_of

_BUSY_S = 0.2


def set_aside(path: Path) -> Path | None:
    """Rename a damaged file and what SQLite keeps beside it, so that nothing of it is lost and a new one can be begun;
    the new name. None where another process did so first.

    Raises:
        OSError: where it cannot be renamed.
    """
    judged = path.stat().st_ino if path.exists() else None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # not everywhere: two processes at once are rare enough
            import fcntl

            fcntl.flock(folder, fcntl.LOCK_EX)
        if judged is None or not path.exists() or path.stat().st_ino != judged or _is_whole(path):
            return None
        stem = f"{path.name}.damaged-{datetime.date.today().isoformat()}"
        names = (stem, *(f"{stem}-{i}" for i in range(2, 1000)))
        aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
        for end in ("-wal", "-shm", "-journal", ""):  # a new file must not find the log of the old one
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{end}", f"{aside}{end}")
        return aside
    finally:
        os.close(folder)


def _is_whole(path: Path) -> bool:
    """Whether another process has begun a new file there meanwhile."""
    try:
        found = path.stat()
        _checked.discard((str(path.absolute()), found.st_dev, found.st_ino))
        store = Choices(path, read_only=True, busy_s=_BUSY_S)
        try:
            damaged: list[str] = []
            list(store.decisions(damaged=damaged))
            return not damaged
        finally:
            store.close()
    except Exception as error:
        return kind_of(error) == "busy"
