"""Command lines of `convselect`, several in one process: starting it takes far longer than refusing does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import fresh

CODE = """
import contextlib, io, json, sys, traceback
from convselect.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    said, status = io.StringIO(), 0
    with contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            status = end.code
        except BaseException:
            traceback.print_exc()
            status = 1
    print(json.dumps([status, said.getvalue()]), flush=True)
"""


def outcomes(
    lines: Iterable[list[str]], cwd: str | os.PathLike, env: dict[str, str] | None = None
) -> list[tuple[int, str]]:
    """The exit status of each line and what it says on stderr.

    Raises:
        AssertionError: the process died, and at which line.
    """
    lines = list(lines)
    done = fresh.run(["-c", CODE, json.dumps(lines)], cwd=cwd, env=env)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode == 0, f"{done.returncode} at {lines[len(found)]}: {done.stderr}"
    return [(status, said) for status, said in found]
