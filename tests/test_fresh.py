"""`fresh.run` is what `subprocess.run` of a new interpreter would be."""

from __future__ import annotations

import os
import subprocess
import sys

import fresh
import pytest

pytestmark = pytest.mark.process
PROGRAMS = {
    "prints": ["-c", "import sys; print(sys.argv, __name__); print('aside', file=sys.stderr)", "a", "b"],
    "status": ["-c", "raise SystemExit(3)"],
    "message": ["-c", "raise SystemExit('no')"],
    "raises": ["-c", "def f(): raise ValueError('no')\nf()"],
    "at exit": ["-c", "import atexit; atexit.register(print, 'end'); print('begin')"],
    "module": ["-m", "json.tool", "--help"],
    "warnings": ["-W", "error::ResourceWarning", "-c", "import warnings; warnings.warn('open', ResourceWarning)"],
    "environment": [
        "-c",
        "import os, sys; print(os.environ['A'], 'B' in os.environ, os.path.abspath('x y') in sys.path, os.getcwd())",
    ],
    "threads": ["-c", "import torch; print(torch.get_num_threads())"],
    "original": ["-c", "import sys; print(sys.orig_argv[1:], 'convselect' in sys.modules)"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_new_interpreter(name, tmp_path, monkeypatch):
    monkeypatch.setenv("B", "not handed on")
    env = {name: value for name, value in os.environ.items() if name != "B"}
    env |= {"A": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": "x y"}
    want = subprocess.run(
        [sys.executable, *PROGRAMS[name]], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    got = fresh.run(PROGRAMS[name], cwd=tmp_path, env=env)
    assert (got.returncode, got.stdout) == (want.returncode, want.stdout)
    assert got.stderr.splitlines()[-1:] == want.stderr.splitlines()[-1:]


def test_time_and_death():
    with pytest.raises(subprocess.TimeoutExpired):
        fresh.run(["-c", "import time; time.sleep(60)"], timeout=0.2)
    assert fresh.run(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]).returncode == -9
    with pytest.raises(subprocess.CalledProcessError):
        fresh.run(["-c", "1 / 0"], check=True)
