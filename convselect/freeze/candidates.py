"""Ways to run a frozen layer, and the choice among them by measuring.

Each candidate is first compared with PyTorch's own operations in float32 on the operands at hand, and is timed only if
it agrees.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, canonical_strides
from convselect.base.settings import Settings
from convselect.base.timing import Timing, interleaved, once
from convselect.choice.budgets import over_budget
from convselect.kernels._common import format_of
from convselect.kernels._contract import Algorithm, Grade

Run = Callable[..., Tensor]
_Result = TypeVar("_Result")
Bind = Callable[..., Run]
PHASES = "_phases"
"""What the names of candidates end with that compute the phases of a transposed convolution."""

FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}
# Relative L2 distance to float32 operations: the grade's own bound plus the error of those operations.
_TOLERANCE = {Grade.DIRECT: 4e-6, Grade.NEAR: 5e-6, Grade.CLOSE: 1.2e-5, Grade.LOOSE: 2.4e-5}
_TOLERANCE_16_BIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
# oneDNN's names for an activation, and its parameters; a leaky_relu's slope is the layer's.
ONEDNN_ACTIVATIONS: dict[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""), "relu": ("relu", [], ""), "relu6": ("hardtanh", [0.0, 6.0], ""), "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"), "gelu_tanh": ("gelu", [], "tanh"), "hardswish": ("hardswish", [], ""),
    "hardsigmoid": ("hardsigmoid", [], ""), "sigmoid": ("sigmoid", [], ""), "tanh": ("tanh", [], ""),
}  # fmt: skip
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "relu6": lambda y: F.hardtanh_(y, 0.0, 6.0),
    "silu": lambda y: F.silu(y, inplace=True),
    "hardswish": lambda y: F.hardswish(y, inplace=True),
    "hardsigmoid": lambda y: F.hardsigmoid(y, inplace=True),
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda y: torch.ops.aten.gelu_(y, approximate="tanh"),  # type: ignore[no-any-return]
}
_FAR_OFF = 1.4  # a candidate slower by more than this factor in two calls is not timed again
LONG_US, _LONG_ROUNDS = 2_000.0, 2
"""Times of calls that take longer than this differ little from call to call: rounds are few, and what was slower by
more than `_FAR_OFF_AT_FIRST` when its result was checked is not timed at all."""
_FAR_OFF_AT_FIRST, _FAR_OFF_IF_LONG = 2.0, 1.2


class OtherForm(Exception):
    """An operand does not have the planned shape: its size depends on data."""


@dataclass(eq=False)
class Candidate:
    """One way to run a frozen layer on inputs of one shape.

    Attributes:
        bind: `bind(x, residual, out)` makes the function to call, `run(x, residual)`. An operand that will be the same
            memory at every call may be given here; the function then ignores what it is called with.
        pack: key of the packed weight that it needs; None if it needs none.
        writes_out: whether `bind` can be given the memory to write to.
        takes_pitch: whether x and out may be some channels of larger images: see `Form.pitch`.
        wants_finite: a NaN or an infinity may spread (transform methods) or come out as a number (oneDNN's max(NaN, 0)
            is 0).
        scratch_bytes: of memory for a call, which is a fourth argument of `bind` then: uint8, or None for memory of its
            own.
    """

    name: str
    grade: Grade
    bind: Bind
    pack: Hashable = None
    writes_out: bool = False
    takes_pitch: bool = False
    wants_finite: bool = False
    scratch_bytes: int = 0

    @property
    def tile(self) -> int:
        """The size of Winograd's tiles; 0 for all others."""
        name = self.name.partition("_")[0]
        digits = name.removeprefix("winograd")
        return int(digits) if digits != name and digits.isdigit() else 0


class Form(NamedTuple):
    """How a tensor has to lie in memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format

    @classmethod
    def dense(cls, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Form:
        """An image (N, C, H, W) or a volume (N, C, D, H, W) in this layout."""
        return cls(torch.Size(shape), canonical_strides(shape, layout), dtype, format_of(layout, len(shape)))

    @classmethod
    def like(cls, t: Tensor) -> Form:
        last = format_of(CHANNELS_LAST, t.dim()) if t.dim() in (4, 5) else torch.contiguous_format
        is_last = not t.is_contiguous() and t.is_contiguous(memory_format=last)
        return cls(t.shape, t.stride(), t.dtype, last if is_last else torch.contiguous_format)

    @property
    def n_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether a tensor like this fills its memory, without gaps and overlaps."""
        sizes = sorted((stride, size) for size, stride in zip(self.shape, self.strides, strict=True) if size != 1)
        expected = 1
        for stride, size in sizes:
            if stride != expected:
                return False
            expected *= size
        return expected == self.shape.numel()

    def pitch(self, t: Tensor) -> int | None:
        """Elements from pixel to pixel, if this tensor holds such an image in NHWC as some channels of a larger one."""
        if self.memory_format != torch.channels_last or t.shape != self.shape or t.dtype != self.dtype:
            return None
        _, channels, height, width = self.shape
        pitch = t.stride(3)
        fits = pitch > channels and t.stride() == (height * width * pitch, 1, width * pitch, pitch)
        return pitch if fits else None

    def seen(self, t: Tensor) -> Tensor | None:
        """The tensor with these strides, if they differ where dimensions have one element only; else None."""
        if t.shape != self.shape or t.dtype != self.dtype:
            return None
        lies_so = all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), self.strides, strict=True))
        return t.as_strided(self.shape, self.strides) if lies_so else None

    def fits(self, t: Tensor) -> bool:
        """Whether this tensor lies so."""
        return t.stride() == self.strides and t.shape == self.shape and t.dtype == self.dtype

    def of(self, t: Tensor) -> Tensor:
        """The tensor itself or a copy in this form.

        Raises:
            OtherForm: if shape or dtype differ.
        """
        if t.shape != self.shape or t.dtype != self.dtype:
            raise OtherForm
        return t if t.stride() == self.strides else t.contiguous(memory_format=self.memory_format)

    def on(self, memory: Tensor) -> Tensor:
        """A tensor like this at the start of some bytes."""
        return memory[: self.n_bytes].view(self.dtype).as_strided(self.shape, self.strides)

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


def fastest(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    deadline_s: float,
    handicaps: Mapping[str, float] | None = None,
    took_us: Mapping[str, float] | None = None,
) -> str:
    """The name of the function with the least time, each multiplied by its handicap.

    Args:
        took_us: times of a call of each before; what has none counts as fast.
    """
    took_us, handicaps = took_us or {}, handicaps or {}
    known = [took_us[name] for name in functions if name in took_us]
    if known and min(known) > LONG_US:
        most = _FAR_OFF_AT_FIRST * min(known)
        functions = {name: function for name, function in functions.items() if took_us.get(name, 0.0) <= most}
        best: Mapping[str, float] = took_us
        for count in (1, _LONG_ROUNDS):
            if len(functions) == 1:
                break
            again = timed(functions, count, deadline_s, first=False)
            best = {name: min(timing.min_us, best.get(name, math.inf)) for name, timing in again.items()}
            least = min(best.values())
            functions = {
                name: function for name, function in functions.items() if best[name] <= _FAR_OFF_IF_LONG * least
            }
        return min(functions, key=lambda name: best.get(name, 0.0) * handicaps.get(name, 1.0))
    first = timed(functions, 2, deadline_s)
    least = min(timing.min_us for timing in first.values())
    close = {name: function for name, function in functions.items() if first[name].min_us < _FAR_OFF * least}
    timings = timed(close, rounds, deadline_s)
    return min(timings, key=lambda name: timings[name].min_us * handicaps.get(name, 1.0))


def timed(
    functions: Mapping[str, Callable[[], Any]], rounds: int, deadline_s: float, *, first: bool = True
) -> dict[str, Timing]:
    """Interleaved timings; with one thread its CPU time, so that other processes do not count. `first`: as there."""
    timings = interleaved(functions, rounds, deadline_s=deadline_s, first=first)
    return {name: _on_its_clock(timing) for name, timing in timings.items()}


def timed_once(function: Callable[[], _Result]) -> tuple[_Result, float]:
    """(its result, the time of the call in us), in the clock of `timed`."""
    result, timing = once(function)
    return result, _on_its_clock(timing).min_us


def _on_its_clock(timing: Timing) -> Timing:
    return timing if torch.get_num_threads() > 1 else timing.on_thread_clock


def finish(y: Tensor, residual: Tensor | None, activation: str | None, slope: float = 0.01) -> Tensor:
    """activation(y + residual); may overwrite y. slope: of "leaky_relu" below 0.

    Raises:
        KeyError: for an unknown activation.
    """
    if residual is not None:
        y = y.add_(residual) if residual.shape == y.shape and residual.dtype == y.dtype else y + residual
    if activation == "leaky_relu":
        return F.leaky_relu_(y, slope)
    return y if activation is None else _IN_PLACE[activation](y)


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance; infinite if either is not finite or the shapes differ."""
    return _distance(got, want, None)


def _distance(got: Tensor, want: Tensor, norm: float | None) -> float:
    """The same; `norm`: of `want`, if it is known."""
    if got.shape != want.shape:
        return float("inf")
    norm = _norm(want) if norm is None else norm
    wide = torch.promote_types(torch.promote_types(got.dtype, want.dtype), torch.float32)
    # Values of float32 differ by less than a rounding of it from their exact difference.
    off = _norm(got.to(wide) - want.to(wide))
    result = off if norm == 0.0 else off / norm
    return result if result == result else float("inf")


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64))


def onednn_takes(dtype: str) -> bool:
    """Whether oneDNN is available, switched on, and has fast kernels for this dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    ops = torch.ops.mkldnn
    supported = {"bfloat16": ops._is_mkldnn_bf16_supported, "float16": ops._is_mkldnn_fp16_supported}
    return dtype == "float32" or (dtype in supported and bool(supported[dtype]()))


def admitted(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> bool:
    """Whether it applies, is not disabled and is within the budgets. Large tiles are, although calls that nobody
    compares with anything do without them: a plan's result is compared with the model's own (`accuracy`)."""
    if algorithm.why_not(problem) is not None:
        return False
    try:
        return over_budget(algorithm, problem, settings, least=Grade.CLOSE) is None
    except NotImplementedError:
        return False


def agreeing(
    candidates: list[Candidate],
    x: Tensor,
    residual: Tensor | None,
    reference: Tensor,
    spread: Callable[[], float] = lambda: 0.0,
    took_us: dict[str, float] | None = None,
) -> dict[str, Run]:
    """Functions of the candidates that compute `reference` within tolerance; those that raise are left out.

    Args:
        spread: the norm that such a result has if its products are of random signs. Where they cancel, the result's own
            norm says nothing of rounding.
        took_us: gets the time of each call.
    """
    found: dict[str, Run] = {}
    norm = functools.cache(lambda: _norm(reference))
    for candidate in candidates:
        try:
            run = candidate.bind(None, None, None)
            got, us = timed_once(functools.partial(run, x, residual))
        except (RuntimeError, MemoryError):  # NotImplementedError is a RuntimeError
            continue
        if got.dtype != x.dtype:
            continue
        tolerance = _TOLERANCE_16_BIT.get(x.dtype, _TOLERANCE[candidate.grade])
        off = _distance(got, reference, norm())
        if off <= tolerance or (math.isfinite(off) and off * norm() <= tolerance * spread()):
            found[candidate.name] = run
            if took_us is not None:
                took_us[candidate.name] = us
    return found
