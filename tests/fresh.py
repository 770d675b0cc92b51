"""Fresh interpreters for a tenth of the price: forks of a process that has imported torch, and nothing of ours.

For tests of what our own code does in a process of its own. What torch, OpenMP or malloc read when they are loaded (any
of their variables but OMP_NUM_THREADS) and what is imported at all need a process from scratch.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = """
import atexit, importlib, json, os, runpy, sys, threading, types, warnings
import numpy, torch

replies = os.fdopen(os.dup(1), "w")
found = sys.path[1:]  # without PYTHONPATH

def run(arguments):
    if arguments[0] == "-c":
        sys.argv[:], sys.path[0] = ["-c", *arguments[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:], sys.path[0] = ["-m", *arguments[2:]], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)

def child(arguments, env, cwd, out, err):
    replies.close()
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        os.dup2(os.open(path, flags), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.orig_argv[:] = [sys.executable, *arguments]
    while arguments[0] == "-W":
        warnings._processoptions([arguments[1]])
        arguments = arguments[2:]
    sys.path[:] = ["", *map(os.path.abspath, filter(None, env.get("PYTHONPATH", "").split(os.pathsep))), *found]
    importlib.invalidate_caches()
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    status = 0
    try:
        run(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(**json.loads(line))
    print(pid, file=replies, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)
"""
_server: subprocess.Popen | None = None


def _started() -> subprocess.Popen:
    global _server
    if _server is None or _server.poll() is not None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        _server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env
        )
    return _server


def run(
    arguments: list[str], *, env: dict[str, str] | None = None, cwd: str | os.PathLike | None = None,
    timeout: float = 200, check: bool = False,
) -> subprocess.CompletedProcess:  # fmt: skip
    """As `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)`.

    `arguments` are -c or -m and what follows, after any -W."""
    server = _started()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        out.touch()
        err.touch()
        env = dict(os.environ if env is None else env)
        request = {"arguments": arguments, "env": env, "cwd": str(cwd or os.getcwd()), "out": str(out), "err": str(err)}
        print(json.dumps(request), file=server.stdin, flush=True)
        pid = int(server.stdout.readline())
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            late = not selector.select(timeout)
        if late:
            os.kill(pid, signal.SIGKILL)
        status = int(server.stdout.readline())
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        done = subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())
    if check:
        done.check_returncode()
    return done
