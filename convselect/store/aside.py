"""A damaged file is renamed, not deleted: its owner may want it, and a new one can be begun in its place."""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path


def set_aside(path: Path, judged: int | None) -> Path | None:
    """Rename a damaged file and what SQLite keeps beside it, so that nothing of it is lost and a new one can be begun;
    the new name. None where another process did so first.

    Args:
        judged: inode of the file that was found damaged; another one by this name is not touched.

    Raises:
        OSError: where it cannot be renamed.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError, OSError):  # not everywhere: two processes at once are rare enough
            import fcntl

            fcntl.flock(folder, fcntl.LOCK_EX)
        if judged is None or not path.exists() or path.stat().st_ino != judged:
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
