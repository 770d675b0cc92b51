"""Who else can write a file that decides what runs here. Asked of the owner and the mode, as OpenSSH asks of its files.

OpenSSH (`safe_path` in misc.c, for authorized_keys and, by owner and mode alone, ~/.ssh/config) wants a regular file
that belongs to root or to the user, and that neither the group nor others can write, and the same of every folder above
its real path, up to the user's home or the root of the file system. Here it is the same, with two differences:

- *The group may write if it is the user's own*: named like the user, the user's primary group, no other members. With
  such groups the usual umask is 002, and they can write most folders. It is pam_umask's rule ("usergroups"); Debian's
  OpenSSH makes the same exception. Root has no such group, since other accounts may be in root's.
- *A folder with the sticky bit, like /tmp, may stand above*, if what is below it on the path belongs to root or to the
  user: others cannot rename or replace that. It may not hold the file itself: SQLite takes over a log that it finds
  beside the file, and anybody could put one there.

OpenSSH opens a file first and then looks at what it has opened. SQLite has to be given a name. So the name that is
opened is the one that was examined, without symbolic links: only who may write its folders can put another file there.
A file is not opened to be examined, because closing it again would take SQLite's locks of this process on it away.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def examined(path: str | Path, *, named: bool = False, any_owner: bool = False) -> Path:
    """The path without symbolic links, after a look at the file, if there is one, and at the folders above it.

    Args:
        named: the user has named the file, and so decided whose folder it is in and which group may write there. Still
            nobody else may write it: everybody can write neither it nor a folder above, and it belongs to root, to the
            user, or to whom its folder belongs.
        any_owner: if `named`, it may belong to anybody: it is only read.

    Raises:
        PermissionError: if others can write it; the message says what, and how to mend it.
        OSError: if it is no regular file, but a folder, a device, a pipe, or a link to nothing.
    """
    real = os.path.realpath(path)
    found = _stat(real)
    if found is None and os.path.islink(path):
        raise OSError(f"{path} is a symbolic link to nothing ({real})")
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    if not hasattr(os, "geteuid"):  # access is by lists there, and a user's folders are the user's own
        return Path(real)
    trusted = {0, os.geteuid()}
    holder = os.stat(os.path.dirname(real))
    if found is not None and not any_owner:
        _check_owner(real, found, trusted | ({holder.st_uid} if named else set()))
    if found is not None:
        _check_mode(real, found, named)
    _check_folders(real, found, trusted, named)
    return Path(real)


def _check_folders(real: str, found: os.stat_result | None, trusted: set[int], named: bool) -> None:
    home = _stat(os.path.expanduser("~"))
    below, owner, here = real, None if found is None else found.st_uid, os.path.dirname(real)
    first = True
    while True:
        folder = os.stat(here)
        if folder.st_mode & stat.S_ISVTX and not first:
            if owner not in trusted and folder.st_mode & stat.S_IWOTH:
                raise PermissionError(
                    f"{below} belongs to another user, {_name(owner)}, in {here}, where everybody may make folders"
                )
        else:
            _check_mode(here, folder, named)
        if not named:
            _check_owner(here, folder, trusted)
        above = os.path.dirname(here)
        if above == here or (not named and home is not None and os.path.samestat(home, folder)):
            return
        below, owner, here, first = here, folder.st_uid, above, False


def _check_owner(path: str, found: os.stat_result, trusted: set[int]) -> None:
    if found.st_uid not in trusted:
        raise PermissionError(
            f"{path} belongs to another user, {_name(found.st_uid)}: `chown` gives it to you, or name another file"
        )


def _check_mode(path: str, found: os.stat_result, named: bool) -> None:
    who, less = None, ""
    if found.st_mode & stat.S_IWOTH:
        who, less = "everybody", "go-w"
    elif found.st_mode & stat.S_IWGRP and not named and not _is_private(found.st_gid):
        who, less = "its group", "g-w"
    if who is not None:
        mode = stat.S_IMODE(found.st_mode)
        todo = f"`chmod {less} '{path}'` ends that"
        if mode & stat.S_ISVTX:
            todo = "name a file in a folder of your own"
        raise PermissionError(f"{who} can write {path} (mode {mode:04o}): {todo}")


def _is_private(group: int) -> bool:
    """Whether this is the user's own group, with nobody else in it."""
    try:
        import grp
        import pwd

        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except (ImportError, KeyError):
        return False
    own = user.pw_uid != 0 and user.pw_gid == group and found.gr_name == user.pw_name
    return own and set(found.gr_mem) <= {user.pw_name}


def _name(uid: int | None) -> str:
    try:
        import pwd

        return pwd.getpwuid(-1 if uid is None else uid).pw_name
    except (ImportError, KeyError, OverflowError):
        return f"number {uid}"


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
