"""What every test starts from."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
import types

import pytest
import torch

from convselect.base import settings, warnings
from convselect.kernels.triton import launch
from convselect.store import extension


def _folder() -> str:
    """A folder that is there until this process ends, in memory if it is roomy and libraries can be loaded from it.
    SQLite waits for a disk at every commit; what tests kill are processes, and the kernel keeps what these wrote."""
    try:
        found = os.statvfs("/dev/shm")
        usable = found.f_bavail * found.f_frsize >= 4 << 30 and not found.f_flag & os.ST_NOEXEC
    except OSError:
        usable = False
    made, owner = tempfile.mkdtemp(prefix="convselect-tests-", dir="/dev/shm" if usable else None), os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(made, ignore_errors=True))
    return made


# What the user has calibrated or stored must not decide what tests see; processes that tests start inherit this.
# And what is chosen must not depend on a clock: trials on real calls, the default, have tests of their own. (All others
# may be run under them as well: CONVSELECT_TEST_POLICY=verify.)
os.environ["CONVSELECT_POLICY"] = os.environ.get("CONVSELECT_TEST_POLICY", "auto")
settings.set_defaults(os.environ["CONVSELECT_POLICY"])  # pytest's own configuration has imported the package already
# Given once per process, so by whichever test exports first; test_interplay.py has one of its own for it.
warnings._given.add("export")
_built = extension.found()
os.environ["CONVSELECT_CACHE"] = _folder()
if _built is not None:  # for the processes that tests start
    os.symlink(_built, os.path.join(os.environ["CONVSELECT_CACHE"], _built.name))
# Threads wait for others asleep: beside another worker's tests, spinning costs several times what they compute. (OpenMP
# reads this when it is loaded, so it holds in the workers of xdist and in processes that tests start.)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def nan_memory():
    """Fresh tensors hold NaN, those that ATen makes inside its own operators included, so memory that an algorithm
    forgets to write shows up in every comparison. (PyTorch fills only while deterministic algorithms are on. Its own
    function for that imports the compiler, which takes longer than many a file of tests.)"""
    fill, mode = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch._C._set_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch._C._set_deterministic_algorithms(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def with_triton(monkeypatch):
    """What is refused is what a machine with Triton refuses. (Its environment is another one; see the Makefile.)"""
    monkeypatch.setattr(launch, "installed", lambda: True)


@pytest.fixture(autouse=True)
def _same_start():
    """One seed, and one thread: OpenMP teams that wait for a busy core take the suite from minutes to hours. Tests of
    threading set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


LONG = {
    "test_csrc_memory.py", "test_compile.py", "test_collect.py", "test_malformed.py", "test_examples.py", "test_ops.py",
    "test_opinfo.py", "test_cases.py",
}  # fmt: skip


STARTS_PYTHON = {"subprocess", "multiprocessing", "fresh", "in_a_process", "outcomes"}


def _names(function, namespace: dict, seen: set) -> set[str]:
    """The names that a function's code mentions, and those that functions of its own module do which it mentions."""
    codes, found = [function.__code__], set()
    while codes:
        code = codes.pop()
        found |= {*code.co_names}
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for name in found - seen:
        helper = namespace.get(name)
        seen.add(name)
        if isinstance(helper, types.FunctionType) and helper.__globals__ is namespace:
            found |= _names(helper, namespace, seen)
    return found


def pytest_configure(config):
    if config.option.basetemp is None:  # neither given nor, in a worker, that of all
        config.option.basetemp = os.path.join(_folder(), "tests")


def pytest_collection_finish():
    """What there is by now, twelve thousand tests and all they import, stays: no garbage collection looks through it
    again. One that does takes about a second, and tests ask for a hundred."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    """What starts Python, by itself, a helper of its module or a fixture, is marked `process`. Files that take minutes
    come first, for the processes to end together."""
    items.sort(key=lambda item: item.path.name not in LONG)
    known: dict = {}
    for item in items:
        fixtures = (one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found)
        for function in (item.function, *fixtures):
            if function.__module__ == item.module.__name__ and function not in known:
                names = _names(function, vars(item.module), set())
                known[function] = not names.isdisjoint(STARTS_PYTHON)
            if known.get(function):
                item.add_marker("process")
