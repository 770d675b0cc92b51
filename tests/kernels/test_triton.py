"""`kernels/triton/launch.py`: launches as values, compiling for GPUs that are not there, and without Triton."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fake_model import use_fake
from places import TESTS
from tiny_triton import Tiny

import convselect
from convselect.base import lru
from convselect.base import warnings as _warnings
from convselect.base.problem import conv_problem
from convselect.kernels.pool import BY_NAME
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import Launch

POINTWISE = conv_problem(2, 16, 7, 9, 24, 1, 1, dtype="float16", device="cuda")
needs_triton = pytest.mark.skipif(not launcher.installed(), reason="Triton is not installed")
ADD = Launch("_tiny_kernels", "product", (4, 1, 1), ("float16",) * 3, (("N", 32), ("K", 16), ("BLOCK", 32)), 1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(launcher, "_handles", {})
    monkeypatch.setattr(launcher, "_pool", [])
    monkeypatch.setattr(_warnings, "_given", set())
    lru.clear()
    yield
    for pool in launcher._pool:
        pool.shutdown(wait=False, cancel_futures=True)
    lru.clear()


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"grid": (0, 1, 1)}, "grid"),
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"grid": (1, 1, 65536)}, "grid"),
        ({"grid": (2**31, 1, 1)}, "grid"),
        ({"pointers": ("float16", "complex64")}, "pointers to complex64"),
        ({"constants": (("N", 1), ("N", 2))}, "constant twice"),
        ({"num_warps": 3}, "3 warps"),
        ({"num_stages": 0}, "0 stages"),
    ],
)
def test_impossible_launches_are_refused(changes, reason):
    given = dict(module="m", kernel="k", grid=(1, 1, 1), pointers=("float16",), constants=())
    Launch(**given)
    Launch(**{**given, "grid": (2**31 - 1, 65535, 65535)})
    with pytest.raises(ValueError, match=reason):
        Launch(**{**given, **changes})


def test_equal_launches_are_one_key_here_and_in_other_processes():
    same = Launch("_tiny_kernels", "product", (4, 1, 1), ("float16",) * 3, (("N", 32), ("K", 16), ("BLOCK", 32)), 1)
    assert same == ADD
    assert {same: 1}[ADD] == 1
    assert Launch("_tiny_kernels", "product", (5, 1, 1), ADD.pointers, ADD.constants, 1) != ADD
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(__import__('test_triton').ADD))"
    folder = os.pathsep.join([str(TESTS / "kernels"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONPATH": folder}, check=True
    )
    assert {pickle.loads(done.stdout): 1}[ADD] == 1


def test_launches_are_made_once_per_problem_parameters_and_architecture():
    tiny = Tiny()
    launches = tiny.launches(POINTWISE)
    assert tiny.launches(POINTWISE) is launches
    assert tiny.launches(POINTWISE, {"BLOCK": 32, "num_warps": 1}) is not launches
    assert tiny.launches(POINTWISE, {"BLOCK": 64, "num_warps": 1}) == launches
    with launcher.assumed_arch(80):
        assert tiny.launches(POINTWISE) is not launches
        assert tiny.launches(POINTWISE) == launches
    odd = {"BLOCK": 32, "num_warps": 1, "note": ["not", "hashable"]}
    assert tiny.launches(POINTWISE, odd) == tiny.launches(POINTWISE, {"BLOCK": 32, "num_warps": 1})


def test_aligned():
    base = torch.zeros(64, dtype=torch.float16)
    assert launcher.aligned(base[8:]) is not base
    assert launcher.aligned(base[8:]).data_ptr() == base[8:].data_ptr()
    moved = launcher.aligned(base[1:33].view(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)[:, :, 1:])
    assert moved.data_ptr() % 16 == 0
    odd = launcher.aligned(torch.arange(5, dtype=torch.float16)[1:])
    assert odd.tolist() == [1, 2, 3, 4]
    assert odd.data_ptr() % 16 == 0


# ---- architectures and configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "found"), [(75, "a"), (80, "a"), (86, "a"), (89, "a"), (90, "b"), (100, "b")])
def test_the_nearest_older_configurations(arch, found, monkeypatch):
    file = {"kernels": {"k": {"sm_90": [{"x": "b"}], "sm_80": [{"x": "a"}]}}}
    monkeypatch.setattr(launcher, "_configurations", lambda name: file)
    with launcher.assumed_arch(arch):
        assert launcher.configurations("any", "k") == [{"x": found}]
        launcher.configurations("any", "k")[0]["x"] = "changed by a caller"
        assert launcher.configurations("any", "k") == [{"x": found}]


def test_the_architecture_of_the_machine_unless_one_is_assumed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launcher.architecture() == 90
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (8, 6))
    launcher._architecture_of.cache_clear()
    assert launcher.architecture() == 86
    assert launcher.shared_memory_bytes() == 99 * 1024
    with launcher.assumed_arch(80), launcher.assumed_arch(90):
        assert launcher.architecture() == 90
    launcher._architecture_of.cache_clear()


def test_why_no_kernel_can_run(with_triton, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launcher.missing(POINTWISE) is None
    assert "NVIDIA" in launcher.missing(POINTWISE._replace(device="cpu"))
    assert "1x1" in Tiny().why_not(POINTWISE._replace(R=3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "8.0" in launcher.missing(POINTWISE)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "NVIDIA" in launcher.missing(POINTWISE)
    monkeypatch.setattr(launcher, "installed", lambda: False)
    assert "not installed" in launcher.missing(POINTWISE)
    monkeypatch.setattr(launcher, "interpreting", lambda: True)
    assert launcher.missing(POINTWISE._replace(device="cpu")) is not None


def test_dot_precision_is_what_the_user_allowed():
    dtypes = {d: launcher.dot_precision(POINTWISE._replace(dtype=d)) for d in ("float16", "bfloat16", "float64")}
    assert dtypes == {"float16": "tf32", "bfloat16": "tf32", "float64": "ieee"}
    assert launcher.dot_precision(POINTWISE._replace(dtype="float32")) == "tf32x3"
    assert launcher.dot_precision(POINTWISE._replace(dtype="float32", tf32=True)) == "tf32"


# ---- processes without Triton, or with another one --------------------------------------------------------------


def fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_triton_everything_else_works():
    out = fresh("""
        import sys

        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Refuse())
        import importlib.util
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
        import torch, convselect
        from convselect.kernels.pool import ALL
        from convselect.kernels.triton import launch as launcher
        from convselect.base.problem import conv_problem

        assert not launcher.installed()
        for device in ("cpu", "cuda"):
            problem = conv_problem(1, 8, 9, 9, 8, 3, 3, padding=1, groups=8, device=device)
            for algorithm in ALL:
                reason = algorithm.why_not(problem)
                if isinstance(algorithm, launcher.TritonAlgorithm):
                    assert "Triton" in reason or "GPU" in reason, reason
            print(convselect.explain_problem(problem).rows[0].algorithm)
        convselect.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
        assert "triton" not in sys.modules
    """)
    assert out.splitlines()[1] == "native"


def test_another_version_is_called_by_the_door_that_every_version_has(monkeypatch):
    calls = []

    class Function:
        def warmup(self, *tensors, grid, **options):
            calls.append(("warmup", len(tensors), grid, options))

        def __getitem__(self, grid):
            return lambda *tensors, **options: calls.append(("run", len(tensors), grid, options))

    fake = ModuleType("triton")
    fake.__version__ = "4.1.0+git"
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setattr(Launch, "function", lambda self: Function())
    monkeypatch.setattr(launcher.torch, "empty", lambda *size, **options: SimpleNamespace(**options))
    handle = launcher._Handle(ADD)
    handle(0, ("a", "b", "c"))
    options = {"N": 32, "K": 16, "BLOCK": 32, "num_warps": 1, "num_stages": 2}
    assert calls == [("warmup", 3, (4, 1, 1), options), ("run", 3, (4, 1, 1), options)]


@needs_triton
def test_a_known_version_is_called_with_pointers_and_constants_in_their_order(monkeypatch):
    import triton
    from triton.runtime import driver

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    calls = []
    kernel = SimpleNamespace(run=lambda *given: calls.append(given), function="f", packed_metadata="m")
    monkeypatch.setattr(launcher, "compiled", lambda launch: kernel)
    monkeypatch.setattr(launcher, "HANDLE_VERSIONS", (version,))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda device: f"stream {device}"))
    given = dict(ADD.constants)
    shuffled = Launch(ADD.module, ADD.kernel, ADD.grid, ADD.pointers, tuple(reversed(ADD.constants)), 1)
    launcher._Handle(shuffled)(3, ("a", "b", "c"))
    assert calls == [
        (4, 1, 1, "stream 3", "f", "m", None, None, None, "a", "b", "c", given["N"], given["K"], given["BLOCK"])
    ]


# ---- compiled for GPUs that are not there -----------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("arch", [80, 90])
def test_a_kernel_compiles_without_a_gpu(arch):
    kernel = launcher.compiled(ADD, arch)
    assert {"ptx", "cubin"} <= set(kernel.asm)
    assert f".target sm_{arch}" in kernel.asm["ptx"]
    assert kernel.metadata.num_warps == 1
    with pytest.raises(TypeError, match="parameters"):
        launcher.compiled(Launch(ADD.module, ADD.kernel, ADD.grid, ADD.pointers, (("N", 32),)), arch)


@needs_triton
def test_a_kernel_that_does_not_compile_says_so():
    with pytest.raises(Exception, match="no_such_thing"):
        launcher.compiled(Launch("_tiny_kernels", "broken", (1, 1, 1), ("float16",), (("N", 32),)), 90)


# ---- ready and run ----------------------------------------------------------------------------------------------


class Handle:
    """A compiled launch in a test: computes what `Tiny` would have asked for, and counts."""

    calls = 0

    def __call__(self, device, tensors):
        Handle.calls += 1
        a, b, c = tensors
        torch.mm(a.float(), b.float(), out=None if c.dtype != torch.float32 else c)
        c.copy_(torch.mm(a.float(), b.float()))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU by the number None, which tensors of the CPU are on."""
    made = SimpleNamespace(capturing=False, compile=lambda launch, device: Handle())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launcher, "_capturing", lambda: made.capturing)
    monkeypatch.setattr(launcher, "_compile_on", lambda launch, device: made.compile(launch, device))
    monkeypatch.setattr(Handle, "calls", 0)
    return made


def settled() -> None:
    for future in list(launcher._handles.values()):
        future.exception(10)


def test_what_is_not_compiled_is_begun_elsewhere_and_not_waited_for(gpu):
    go = threading.Event()
    gpu.compile = lambda launch, device: go.wait(10) and Handle()
    launches = Tiny().launches(POINTWISE)
    assert not launcher.ready(launches)
    assert not launcher.ready(launches)
    assert len(launcher._handles) == 1
    go.set()
    settled()
    assert launcher.ready(launches)


def test_nothing_is_begun_while_a_graph_is_captured(gpu):
    gpu.capturing = True
    assert not launcher.ready((ADD,))
    assert not launcher._handles
    tensors = [torch.zeros(2, 2, dtype=torch.float16)] * 3
    with pytest.raises(RuntimeError, match="capture"):
        launcher.run(ADD, *tensors)
    gpu.capturing = False
    launcher.run(ADD, *tensors)
    gpu.capturing = True
    assert launcher.ready((ADD,))
    launcher.run(ADD, *tensors)
    assert Handle.calls == 2


def test_a_failed_compilation_is_raised_each_time_without_growing(gpu):
    def fail(launch, device):
        raise ValueError("does not compile")

    gpu.compile = fail
    with contextlib.suppress(ValueError):
        launcher.ready((ADD,))
    settled()
    depths = []
    for _ in range(3):
        with pytest.raises(ValueError, match="does not compile") as caught:
            launcher.ready((ADD,))
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_so_many_are_kept_and_no_more(gpu, monkeypatch):
    monkeypatch.setattr(launcher, "KEPT", 3)
    for rows in range(1, 6):
        launcher.ready((Launch(ADD.module, ADD.kernel, (rows, 1, 1), ADD.pointers, ADD.constants, 1),))
    assert [launch.grid[0] for launch, _ in launcher._handles] == [3, 4, 5]


def test_another_device_than_the_current_one_is_made_current(gpu, monkeypatch):
    seen = []

    class OnDevice:
        def __init__(self, device):
            seen.append(device)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    future: Future = Future()
    future.set_result(lambda device, tensors: seen.append(("ran", device)))
    launcher._handles[ADD, 1] = future
    launcher.run(ADD, SimpleNamespace(device=SimpleNamespace(index=1)))
    assert seen == [1, ("ran", 1)]


def test_modules_are_loaded_in_a_way_that_spoils_no_capture(monkeypatch):
    modes = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: modes.append(mode._obj.value))
    monkeypatch.setattr(launcher, "_driver", lambda: driver)
    with launcher._beside_captures():
        assert modes == [2]
    assert len(modes) == 2

    def none():
        raise OSError("no such library")

    monkeypatch.setattr(launcher, "_driver", none)
    with launcher._beside_captures():
        pass


def test_an_ending_process_does_not_wait_for_what_is_queued():
    out = fresh("""
        import threading, time, torch
        from convselect.kernels.triton import launch as launcher
        torch.cuda.current_device = lambda: None
        started = threading.Event()
        def slow(launch, device):
            started.set()
            time.sleep(0.2)
        launcher._compile_on = slow
        for rows in range(1, 500):
            launcher.ready((launcher.Launch("m", "k", (rows, 1, 1), (), ()),))
        started.wait(10)
        print("done")
    """)
    assert out == "done"


# ---- through dispatch -------------------------------------------------------------------------------------------


class OnCpu(Tiny):
    """As if tensors of the CPU were on the GPU of these tests."""

    def why_not(self, problem):
        return self.why_not_shape(problem)


@pytest.fixture
def tiny(gpu, monkeypatch):
    algorithm = OnCpu()
    monkeypatch.setitem(BY_NAME, algorithm.name, algorithm)
    use_fake(monkeypatch, algorithm.name)
    return algorithm


X, W = torch.randn(2, 16, 7, 9), torch.randn(24, 16, 1, 1)


def test_native_runs_until_the_kernel_is_compiled(tiny, gpu):
    go = threading.Event()
    gpu.compile = lambda launch, device: go.wait(10) and Handle()
    want = F.conv2d(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(convselect.conv2d(X, W), want)
        assert Handle.calls == 0
        go.set()
        settled()
        torch.testing.assert_close(convselect.conv2d(X, W), want)
    assert Handle.calls == 1
    assert convselect.conv2d(X, W).stride() == want.stride()


def test_native_runs_while_a_graph_is_captured_before_it_was_compiled(tiny, gpu):
    gpu.capturing = True
    assert torch.equal(convselect.conv2d(X, W), F.conv2d(X, W))
    assert not launcher._handles


@pytest.mark.parametrize("when", ["compiled", "run"])
def test_a_failure_is_native_after_one_warning_or_raised_where_it_was_asked_for(tiny, gpu, when):
    def fail(*_):
        raise RuntimeError("out of registers")

    gpu.compile = fail if when == "compiled" else lambda launch, device: fail
    with pytest.warns(convselect.ConvselectWarning, match="tiny_triton failed.*out of registers") as caught:
        for _ in range(3):
            assert torch.equal(convselect.conv2d(X, W), F.conv2d(X, W))
            settled()
    assert len(caught) == 1
    with pytest.raises(RuntimeError, match="out of registers"):
        convselect.conv2d(X, W, policy="tiny_triton")


def test_a_forced_one_waits_for_its_compilation(tiny, gpu):
    gpu.compile = lambda launch, device: threading.Event().wait(0.05) or Handle()
    torch.testing.assert_close(convselect.conv2d(X, W, policy="tiny_triton"), F.conv2d(X, W))
    assert Handle.calls == 1


def test_gradients_come_from_kernels_too(tiny, gpu):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    run = functools.partial(convselect.conv2d, x, w, policy="tiny_triton")
    got = torch.autograd.grad(run().square().sum(), (x, w))
    want = torch.autograd.grad(F.conv2d(x, w).square().sum(), (x, w))
    assert Handle.calls == 3
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
