"""Model files: a card (JSON text) and arrays as `.npz` without pickles, for artifacts and parameter networks."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


MOST_BYTES = 64 * 2**20
"""Largest file that is read, and most that it may unpack to. The largest shipped one has 170,000."""


class ArtifactError(ValueError):
    """A model file is missing, damaged, or made for another version; the message says which, in one sentence."""


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file, as large as it is when it is opened: a pipe or a device of that name is not waited for.

    Raises:
        OSError: if it cannot be read, is no regular file (a pipe, a device, a folder), or has more than `MOST_BYTES`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file")
        if found.st_size > MOST_BYTES:
            raise OSError(f"{os.fspath(path)} has {found.st_size} bytes, more than {MOST_BYTES}")
        parts: list[bytes] = []
        while (left := found.st_size - sum(len(part) for part in parts)) > 0 and (part := os.read(number, left)):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(number)


def read(source: str | os.PathLike[str] | bytes, what: str) -> tuple[str, dict[str, Array]]:
    """The card's text, and the arrays as float32.

    Args:
        source: a path, or the bytes of a file.
        what: what the file should be, for messages.

    Raises:
        ArtifactError: if it is missing or damaged, or holds anything but a card and floating-point arrays.
    """
    try:
        # Read first: numpy leaves a damaged file open.
        data = source if isinstance(source, bytes) else read_bytes(source)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            if sum(one.file_size for one in archive.zip.infolist()) > MOST_BYTES:
                raise ArtifactError(f"the {what} unpacks to more than {MOST_BYTES} bytes")
            if "card" not in archive.files:
                raise ArtifactError(f"this is not a convselect {what}: it has no card")
            text = str(archive["card"])
            stored = {name: archive[name] for name in archive.files if name != "card"}
    except FileNotFoundError:
        raise ArtifactError(f"there is no {what} {source!r:.300}") from None
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(f"the {what} is damaged or not a {what}: {error!s:.300}") from None
    except Exception as error:  # parsers of damaged bytes raise anything: zlib.error, TokenError, MemoryError, ...
        raise ArtifactError(f"the {what} is damaged or not a {what} ({type(error).__name__})") from None
    if any(array.dtype not in (np.float16, np.float32) for array in stored.values()):
        raise ArtifactError(f"the {what} holds arrays that are not floating point: it is damaged")
    return text, {name: np.ascontiguousarray(array, np.float32) for name, array in stored.items()}


def finite(arrays: Mapping[str, Array], what: str) -> dict[str, Array]:
    """The same arrays, read-only.

    Raises:
        ArtifactError: if one holds an infinity or a NaN.
    """
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ArtifactError(f"the {what} holds values that are not finite: it is damaged")
    views = {name: array.view() for name, array in arrays.items()}
    for array in views.values():
        array.setflags(write=False)
    return views


def write(path: str | os.PathLike[str], card: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file, and a copy of its card as readable `.json` beside it. Same input, same bytes; each file appears
    complete or not at all.

    Raises:
        OSError: if a file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, card=np.array(card), **arrays)  # type: ignore[arg-type]
    for target, content in ((path, buffer.getvalue()), (path.with_suffix(".json"), card.encode() + b"\n")):
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        os.replace(partial, target)
