"""The device of a run: the current CUDA device, or, for a dry run, the CPU with meaningless times."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import convselect
from convselect.base import timing
from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction
from convselect.machine.environment import run_environment
from convselect.machine.host import family_of_cuda

MOST_COPIES = 128
"""Upper bound on sets of operands: a run makes about this many calls, and would not use more."""


class ContextLost(RuntimeError):
    """An illegal access or the like: every later call of this process fails."""


@dataclass(frozen=True)
class Device:
    """Attributes:
    kind: "cuda", or "cpu" for a dry run.
    arch: 10 * major + minor.
    cache_bytes: size of the last-level cache.
    events, clock: sources of times.
    """

    kind: str
    arch: int
    cache_bytes: int
    events: timing.Events
    clock: timing.Clock = timing.SYSTEM_CLOCK

    @property
    def dry(self) -> bool:
        return self.kind != "cuda"

    def synchronise(self) -> None:
        self.events.synchronise()

    def assert_alive(self) -> None:
        """After an exception: whether the device can still be used.

        Raises:
            ContextLost: if it cannot; only another process can continue.
        """
        try:
            self.synchronise()
        except RuntimeError as error:
            raise ContextLost(f"a kernel made the device unusable, the same command goes on: {error}") from error


def cuda() -> Device:
    """The current GPU.

    Raises:
        RuntimeError: if there is none.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device; --dry-run does without one")
    major, minor = torch.cuda.get_device_capability()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device("cuda", 10 * major + minor, getattr(properties, "L2_cache_size", 50 << 20), timing.cuda_events())


def dry() -> Device:
    """The CPU, and a clock that moves on by a millisecond whenever it is read."""
    ticks = itertools.count(0, 10**6)
    clock = timing.Clock(lambda: next(ticks), lambda: next(ticks))

    class Event:
        def record(self) -> None:
            self.at_ms = next(ticks) / 1e6

        def elapsed_time(self, later: Any) -> float:
            return float(later.at_ms - self.at_ms)

    return Device("cpu", 90, 1 << 12, timing.Events(Event, lambda us: None, lambda: None), clock)


def environment(device: Device) -> dict[str, Any]:
    """Environment of the times: the fields that `convselect train` needs, and others that explain them."""
    if device.dry:
        name, driver, cudnn = "none (dry run)", None, None
    else:
        name = torch.cuda.get_device_name()
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
        cudnn = torch.backends.cudnn.version()
    return {
        "family": family_of_cuda((device.arch // 10, device.arch % 10)) if not device.dry else "cuda-dry",
        "host_flags": {},
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver,
        "cudnn": cudnn,
        "triton": _triton_version(),
        "convselect": convselect.__version__,
        "host": {key: run_environment()[key] for key in ("device", "cpus", "python")},
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return None
    return str(triton.__version__)


@contextlib.contextmanager
def precision_of(problem: ConvProblem) -> Iterator[None]:
    """Context in which float32 products, of convolutions and of matrices, are TF32 if the problem says so."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32)
    cudnn.allow_tf32 = matmul.allow_tf32 = problem.tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def operands(problem: ConvProblem, device: Device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random operands of `Algorithm.run`, drawn on the device; products of order one."""
    p = problem
    generator = torch.Generator(device.kind).manual_seed(seed)

    def random(shape: tuple[int, ...], layout: str, scale: float = 1.0) -> Tensor:
        format = torch.channels_last if layout == CHANNELS_LAST else torch.contiguous_format
        drawn = torch.empty(shape, dtype=p.torch_dtype, device=device.kind, memory_format=format)
        return drawn.normal_(0.0, scale, generator=generator)

    scale = ((p.C // p.groups) * p.R * p.S) ** -0.5
    if p.direction == Direction.FORWARD:
        return random(p.x_shape, p.layout), random(p.weight_shape, p.weight_layout, scale)
    if p.direction == Direction.BACKWARD_DATA:
        return random(p.y_shape, p.layout), random(p.weight_shape, p.weight_layout, scale)
    return random(p.x_shape, p.layout), random(p.y_shape, p.layout)


def rotating(problem: ConvProblem, device: Device) -> list[tuple[Tensor, Tensor]]:
    """Sets of operands, together more than twice as large as the last-level cache, so that none is still in it when it
    is used again."""
    first = operands(problem, device)
    each = sum(t.numel() * t.element_size() for t in first)
    copies = min(MOST_COPIES, -(-2 * device.cache_bytes // each))
    return [first, *(operands(problem, device, seed) for seed in range(1, max(1, copies)))]


def reference(a: Tensor, b: Tensor, problem: ConvProblem, run: Callable[..., Tensor]) -> Tensor:
    """native's result in float64; in float32 without TF32 for 16-bit problems that would take seconds in float64."""
    wide = torch.float32 if problem.element_bytes == 2 and problem.flops > 1e11 else torch.float64
    name = str(wide).removeprefix("torch.")
    exact = problem._replace(dtype=name, tf32=False)
    with precision_of(exact):
        return run(a.to(wide), b.to(wide), exact)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 error; NaN if `got` contains any."""
    wide = want.dtype
    size = torch.linalg.vector_norm(want, dtype=torch.float64).item()
    error = torch.linalg.vector_norm(got.to(wide) - want, dtype=torch.float64).item()
    return error / size if size > 0 else error
