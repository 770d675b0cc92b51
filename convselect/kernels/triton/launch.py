"""Run Triton kernels: describe launches, compile them in the background, and call them at low cost.

A `Launch` is a frozen value that determines a compiled kernel and its grid. It is made from a problem alone, without
tensors. So the same description can run on a GPU, be interpreted on a CPU by the tests, and be compiled for an absent
GPU by the test that checks registers and instructions.

Every shape is a constant of the kernel: only pointers are passed, and the compiler knows all divisibilities. (Of
integers passed at run time it knows only whether 16 divides them: 24 channels would then mean two-byte loads.) The
price is one compilation per problem, of 0.3 to 3 s, on a background thread while native runs.

This module imports Triton only when it is used. Kernels are in separate modules, named by `Launch.module`.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import threading
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.kernels._contract import Algorithm, Params

Value = int | float | bool | str

POINTER_TYPES = {
    "float64": "*fp64",
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
}
HANDLE_VERSIONS = ((3, 6),)
"""Triton versions whose compiled kernels `_Handle` can call directly; with others it goes through `fn[grid]`."""
KEPT = 2048
"""Most compiled launches kept per process; then the oldest are dropped, but stay in Triton's own cache on disk."""
MAX_GRID = (2**31 - 1, 65535, 65535)
SPLIT_ELEMENTS = 2**31
"""From this many elements on, offsets need 64 bits."""


@dataclass(frozen=True)
class Launch:
    """One kernel, specialised and laid out on a grid.

    Attributes:
        module, kernel: module and name of the `triton.jit` function; its parameters are pointers, then constants by
            name.
        grid: programs along x, y, z.
        pointers: element types of the tensors, names as in `ConvProblem.dtype`, in the order of the parameters.
        constants: every other parameter, by name.
        scratch: whether the kernel makes tensor descriptors, which lie in memory that comes with each launch.
    """

    module: str
    kernel: str
    grid: tuple[int, int, int]
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Value], ...]
    num_warps: int = 4
    num_stages: int = 2
    scratch: bool = False

    def __post_init__(self) -> None:
        if any(not 0 < n <= most for n, most in zip(self.grid, MAX_GRID, strict=True)):
            raise ValueError(f"{self.kernel} cannot have a grid of {self.grid}")
        if unknown := set(self.pointers) - POINTER_TYPES.keys():
            raise ValueError(f"{self.kernel} cannot have pointers to {', '.join(sorted(unknown))}")
        if len(dict(self.constants)) < len(self.constants):
            raise ValueError(f"{self.kernel} has a constant twice: {[name for name, _ in self.constants]}")
        if self.num_warps not in (1, 2, 4, 8, 16, 32) or self.num_stages < 1:
            raise ValueError(f"{self.kernel} cannot have {self.num_warps} warps and {self.num_stages} stages")
        # Needed at every call, and computed from some thirty values.
        object.__setattr__(self, "_hash", hash(self._values()))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of strings differ between processes.
        return Launch, self._values()

    def function(self) -> Any:
        """The `triton.jit` function; imports Triton."""
        return getattr(importlib.import_module(self.module), self.kernel)


# ---- what this machine has --------------------------------------------------------------------------------------


@functools.cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache  # the variable is read once, when kernels are decorated
def interpreting() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(problem: ConvProblem) -> str | None:
    """A sentence why no Triton kernel can run on this problem's device; None if one can. On a machine without a GPU,
    the answer for a problem on a GPU depends on its shapes alone, so that choices can be inspected anywhere."""
    if problem.device == "cpu":
        return (
            None if interpreting() and installed() else "Triton algorithms run on NVIDIA GPUs; this problem is on cpu."
        )
    if not installed():
        return "Triton algorithms need Triton, which is not installed."
    if torch.version.hip is not None:
        return "Triton algorithms need an NVIDIA GPU; this PyTorch is built for AMD GPUs."
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "Triton algorithms need a GPU of compute capability 8.0 or newer; this one is older."
    return None


_assumed_arch: list[int] = []


@contextlib.contextmanager
def assumed_arch(arch: int) -> Iterator[None]:
    """Within this context configurations are those for this architecture (80, 90), on any machine."""
    _assumed_arch.append(arch)
    try:
        yield
    finally:
        _assumed_arch.pop()


def architecture() -> int:
    """10 * major + minor of the current GPU; 90 if there is none."""
    if _assumed_arch:
        return _assumed_arch[-1]
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        return 90
    return _architecture_of(torch.cuda.current_device())


@functools.cache
def _architecture_of(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def shared_memory_bytes() -> int:
    """Most bytes of shared memory that one program may use."""
    return {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.get(architecture(), 99) * 1024


@functools.cache
def _configurations(algorithm: str) -> Mapping[str, Any]:
    path = Path(__file__).parent / "configs" / f"{algorithm}.json"
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def configurations(algorithm: str, kernel: str) -> list[dict[str, Any]]:
    """The shipped configurations of a kernel for the current architecture, or those of the nearest older one if it has
    none; the first is the default.

    In the file, "provenance" says where they come from, and "kernels" -> kernel -> "sm_80" holds a list of them.
    """
    by_arch: dict[str, list[dict[str, Any]]] = _configurations(algorithm)["kernels"][kernel]
    known = sorted(int(name.removeprefix("sm_")) for name in by_arch)
    older = [arch for arch in known if arch <= architecture()]
    return [dict(one) for one in by_arch[f"sm_{older[-1] if older else known[0]}"]]


def dot_precision(problem: ConvProblem) -> str:
    """`input_precision` of `tl.dot` that respects the user's setting for float32: TF32 if native may use it, else three
    TF32 products, which are as exact as float32."""
    if problem.dtype != "float32":
        return "ieee" if problem.dtype == "float64" else "tf32"
    return "tf32" if problem.tf32 else "tf32x3"


# ---- compiling --------------------------------------------------------------------------------------------------


def compiled(launch: Launch, arch: int | None = None) -> Any:
    """Triton's `CompiledKernel` for the current GPU, or for an architecture that need not be present. Takes seconds
    unless Triton's cache on disk has it.

    The kernel assumes that pointers are divisible by 16; `run` ensures it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launch.function()
    names = [parameter.name for parameter in function.params]
    constants = dict(launch.constants)
    if set(names[len(launch.pointers) :]) != set(constants):
        raise TypeError(f"{launch.kernel} has parameters {names}, given are {sorted(constants)}")
    signature = {name: POINTER_TYPES[kind] for name, kind in zip(names, launch.pointers, strict=False)}
    signature |= dict.fromkeys(names[len(launch.pointers) :], "constexpr")
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(index,): [["tt.divisibility", 16]] for index in range(len(launch.pointers))}
    source = ASTSource(function, signature, constexprs, attributes)
    target = None if arch is None else GPUTarget("cuda", arch, 32)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=target, options=options)


class _Handle:
    """A compiled launch of one device."""

    __slots__ = ("_arguments", "_compiled", "_launch", "_stream")

    def __init__(self, launch: Launch) -> None:
        import triton

        self._launch = launch
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        self._compiled = compiled(launch) if version in HANDLE_VERSIONS else None
        if self._compiled is None:
            # Compile without launching, through an interface that every version has.
            tensors = [torch.empty(0, dtype=getattr(torch, kind), device="cuda") for kind in launch.pointers]
            launch.function().warmup(*tensors, grid=launch.grid, **self._options())
            return
        from triton.runtime import driver

        constants = dict(launch.constants)
        names = [parameter.name for parameter in launch.function().params]
        self._arguments = tuple(constants[name] for name in names[len(launch.pointers) :])
        self._stream = driver.active.get_current_stream
        _ = self._compiled.run  # loads the module now, since loading synchronises

    def _options(self) -> dict[str, Any]:
        launch = self._launch
        return {**dict(launch.constants), "num_warps": launch.num_warps, "num_stages": launch.num_stages}

    def __call__(self, device: int, tensors: Sequence[Tensor]) -> None:
        if self._launch.scratch:
            # In a separate context, so that an allocator that the user has set stays.
            contextvars.copy_context().run(self._with_scratch, device, tensors)
        else:
            self._call(device, tensors)

    def _with_scratch(self, device: int, tensors: Sequence[Tensor]) -> None:
        import triton

        triton.set_allocator(_allocate)
        self._call(device, tensors)

    def _call(self, device: int, tensors: Sequence[Tensor]) -> None:
        kernel = self._compiled
        if kernel is None:
            self._launch.function()[self._launch.grid](*tensors, **self._options())
            return
        kernel.run(
            *self._launch.grid, self._stream(device), kernel.function, kernel.packed_metadata, None, None, None,
            *tensors, *self._arguments,
        )  # fmt: skip


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory of the current stream, which may reuse it after the launch. PyTorch aligns it to 512 bytes; descriptors
    need 128."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


_lock = threading.Lock()
_handles: dict[tuple[Launch, int], Future[_Handle]] = {}
_pool: list[ThreadPoolExecutor] = []
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@contextlib.contextmanager
def _beside_captures() -> Iterator[None]:
    """Within this context the calling thread may allocate and load modules while another thread captures a CUDA graph;
    otherwise that would break the capture."""
    mode = ctypes.c_int(_RELAXED)
    try:
        exchange = _driver().cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        yield
        return
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _compile_on(launch: Launch, device: int) -> _Handle:
    with torch.cuda.device(device), _beside_captures():
        return _Handle(launch)


def _begin(launch: Launch, device: int) -> Future[_Handle] | None:
    """Start compiling a new launch and return its future; do nothing and return None during the capture of a graph."""
    if _capturing():
        return None
    with _lock:
        future = _handles.get((launch, device))
        if future is None:
            if not _pool:
                _pool.append(ThreadPoolExecutor(max_workers=2, thread_name_prefix="convselect-compile"))
            while len(_handles) >= KEPT:
                del _handles[next(iter(_handles))]
            future = _handles[launch, device] = _pool[0].submit(_compile_on, launch, device)
    return future


def _end(*, fork: bool = False) -> None:
    """Drop pending compilations: a process that ends must not wait for them, and a fork has no threads for them."""
    global _lock
    if fork:
        _lock = threading.Lock()
        _handles.clear()
    elif _pool:
        _pool[0].shutdown(wait=False, cancel_futures=True)
    _pool.clear()


# `atexit` would be too late: by then the interpreter has waited for the pool's threads.
getattr(threading, "_register_atexit", lambda _: None)(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=functools.partial(_end, fork=True))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def ready(launches: Sequence[Launch]) -> bool:
    """Whether all are compiled for the current device. Starts compiling the others on another thread, unless a CUDA
    graph is being captured.

    Raises:
        Exception: the one with which a compilation failed.
    """
    if interpreting():
        return True
    device = torch.cuda.current_device()
    all_done = True
    for launch in launches:
        future = _handles.get((launch, device)) or _begin(launch, device)
        if future is None or not future.done():
            all_done = False
        elif (error := future.exception()) is not None:
            # The same exception is raised at every call: without this, each call would extend its traceback.
            raise error.with_traceback(None)
    return all_done


def run(launch: Launch, *tensors: Tensor) -> None:
    """Launch on the current stream of the tensors' device; compiles first if necessary.

    Raises:
        RuntimeError: if it would have to compile while a CUDA graph is being captured.
        TypeError: if the tensors' element types are not those of the launch.
    """
    if interpreting():
        given = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
        if given != launch.pointers:
            raise TypeError(f"{launch.kernel} is for {launch.pointers}, given are {given}")
        launch.function()[launch.grid](*tensors, **dict(launch.constants))
        return
    device = tensors[0].device.index
    future = _handles.get((launch, device)) or _begin(launch, device)
    if future is None:
        raise RuntimeError(f"{launch.kernel} is not compiled yet, and cannot be during the capture of a CUDA graph")
    handle = future.result()
    if device == torch.cuda.current_device():
        handle(device, tensors)
    else:
        with torch.cuda.device(device):
            handle(device, tensors)


def aligned(t: Tensor) -> Tensor:
    """The tensor, or a copy of it, that begins at a multiple of 16 bytes, as compiled kernels assume."""
    return t if t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.preserve_format)


# ---- the base of the algorithms ---------------------------------------------------------------------------------


def _cached(launches: Any) -> Any:
    @functools.lru_cache(maxsize=KEPT)
    def made(algorithm: TritonAlgorithm, problem: ConvProblem, _: int, items: Any) -> tuple[Launch, ...]:
        return tuple(launches(algorithm, problem, None if items is None else dict(items)))

    @functools.wraps(launches)
    def cached(self: TritonAlgorithm, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        items = None if params is None else tuple(params.items())
        try:
            hash(items)
        except TypeError:
            return tuple(launches(self, problem, params))
        return made(self, problem, architecture(), items)

    cached.forget = made.cache_clear  # type: ignore[attr-defined]
    return cached


class TritonAlgorithm(Algorithm):
    """An algorithm made of Triton launches. `params` is one of `configs(problem)`, by default the first."""

    devices = frozenset({"cuda"})
    may_be_unready = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "launches" in cls.__dict__:
            cls.launches = _cached(cls.__dict__["launches"])  # type: ignore[method-assign]

    def why_not(self, problem: ConvProblem) -> str | None:
        return missing(problem) or self.why_not_shape(problem)

    @abstractmethod
    def why_not_shape(self, problem: ConvProblem) -> str | None:
        """As `why_not`, for the problem alone, independent of this machine."""

    @abstractmethod
    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        """The shipped configurations that can run this problem, the one expected to be fastest first; at least one if
        `why_not_shape` is None."""

    @abstractmethod
    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        """The launches, in order. Made once per problem, parameters and architecture, and cached, since every call
        needs them."""

    def ready(self, problem: ConvProblem, params: Params = None) -> bool:
        return ready(self.launches(problem, params))
