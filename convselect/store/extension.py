"""The compiled part of the eager path, `eager/cached_calls.cpp`: where it is, and how it is built.

It uses PyTorch's C++ interface, which differs from version to version, so a build serves one version of PyTorch and of
Python. It lies in the user's cache, under a name that has both and a digest of the source. `CONVSELECT_NO_EXTENSION=1`
leaves it out.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from convselect.machine.environment import user_cache
from convselect.machine.ownership import examined

SOURCE = Path(__file__).parent.parent / "eager" / "cached_calls.cpp"
FLAGS = ("-O2", "-g0", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,--as-needed")


class BuildError(RuntimeError):
    """It could not be built; the message says why, and what to do."""


@functools.cache
def name() -> str:
    """The file's name for this source, PyTorch and Python."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    here = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}"
    return f"cached-calls-{digest}-{here}.so"


def is_off() -> bool:
    return os.environ.get("CONVSELECT_NO_EXTENSION", "").strip() not in ("", "0")


def found() -> Path | None:
    """The built file, if there is one that nobody else can have written."""
    if is_off():
        return None
    try:
        path = user_cache() / name()
        return Path(examined(path)) if path.exists() else None
    except OSError:
        return None


def compiler() -> str | None:
    """The C++ compiler: what `CXX` names, else c++, g++ or clang++."""
    named = os.environ.get("CXX")
    return next(
        (path for each in ([named] if named else ["c++", "g++", "clang++"]) if (path := shutil.which(each))), None
    )


def build() -> Path:
    """Compile it, which takes half a minute, into the user's cache, and return the file.

    Raises:
        BuildError: if there is no compiler, or it fails. OSError: if the cache cannot be written.
    """
    compile_by = compiler()
    if compile_by is None:
        raise BuildError("no C++ compiler was found: install g++ or clang++, or name one in CXX")
    package = Path(torch.__file__).parent
    headers = (package / "include", package / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    if not (headers[2] / "Python.h").exists():
        raise BuildError(f"Python's headers are missing ({headers[2]}): install python3-dev, or its like")
    target = user_cache() / name()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made.so"
        abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
        command = [
            compile_by, *FLAGS, f"-std={'c++20' if _version() >= (2, 12) else 'c++17'}",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{path}" for path in headers), str(SOURCE), "-o", str(made),
            f"-L{package / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{compile_by} failed:\n{done.stderr[-2000:]}")
        made.replace(target)
    return target


def _version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    print(build())
