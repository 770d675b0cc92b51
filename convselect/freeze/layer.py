"""What frozen layers share: a folded weight, what is packed from it, and the choice among ways to run it.

Which candidate runs is decided by measuring: each is first compared with PyTorch's own operations in float32 on the
operands in hand, and is timed only if it agrees.
"""

from __future__ import annotations

import ctypes
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.choice.budgets import over_budget
from convselect.kernels import _library, depthwise, direct
from convselect.kernels._contract import Algorithm, Grade
from convselect.kernels.pool import BY_NAME
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.settings import Settings
from convselect.timing import Timing, interleaved

Run = Callable[..., Tensor]
Source = tuple[dict[str, Any], str]

FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}
# Relative L2 distance to float32 operations: the grade's own bound and what those themselves may be off.
_TOLERANCE = {Grade.DIRECT: 4e-6, Grade.CLOSE: 1.2e-5, Grade.LOOSE: 2.4e-5}
_TOLERANCE_16_BIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
# oneDNN's names for an activation, and its parameters.
ONEDNN_ACTIVATIONS: dict[str | None, tuple[str, list[float], str]] = {
    None: ("none", [], ""), "relu": ("relu", [], ""), "relu6": ("hardtanh", [0.0, 6.0], ""), "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
}  # fmt: skip
_ROUNDS = 15
_FAR_OFF = 1.4  # slower by more than this in two calls: not timed again
_DEADLINE_S = 0.25
# By itself a call finds the memory of its last result in the caches; among other layers only what was laid out
# beforehand does.
_NEW_MEMORY = 1.1


class OtherForm(Exception):
    """An operand does not have the shape that was planned for: its size depends on data."""


class Kernel(NamedTuple):
    """A kernel of the C library: the algorithm that speaks for it, integers ahead of its operands, how its weight is
    packed."""

    algorithm: str
    name: str
    before: tuple[int, ...] = ()
    pack: Callable[[Tensor, ConvProblem], Tensor] | None = None


DIRECT = Kernel("direct", "cs_direct_frozen", (), direct.pack)
DEPTHWISE = Kernel("depthwise", "cs_depthwise")
DEPTHWISE_PACKED = Kernel("depthwise", "cs_depthwise_frozen", (), depthwise.pack)
KERNELS = (
    *(Kernel(f"winograd{m}", "cs_winograd", (m,)) for m in (2, 3, 4, 5, 6, 7)),
    DEPTHWISE,
    Kernel("grouped", "cs_grouped"),
    DIRECT,
)


@dataclass(eq=False)
class Candidate:
    """One way to run a frozen layer on inputs of one shape.

    Attributes:
        bind: `bind(x, residual, out)` makes the function to call, `run(x, residual)`. Each operand may be given when
            it will be the very same memory at every call; then the function ignores what it is called with.
        pack: key of what it needs packed, None for nothing.
        writes_out: whether `bind` can be given the memory to write to.
        wants_finite: a NaN or an infinity may spread (transform methods) or come out as a number (oneDNN's max(NaN, 0)
            is 0).
    """

    name: str
    grade: Grade
    bind: Callable[[Tensor | None, Tensor | None, Tensor | None], Run]
    pack: Hashable = None
    writes_out: bool = False
    wants_finite: bool = False


class Form(NamedTuple):
    """How a tensor has to lie in memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    memory_format: torch.memory_format

    def of(self, t: Tensor) -> Tensor:
        """The tensor itself or a copy in this form.

        Raises:
            OtherForm: where shape or dtype differ.
        """
        if t.shape != self.shape or t.dtype != self.dtype:
            raise OtherForm
        return t if t.stride() == self.strides else t.contiguous(memory_format=self.memory_format)

    def new(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


class FrozenLayer(ABC):
    """A layer with what follows it: activation(layer(x) + residual). The modules it came from are read, never written.

    Attributes:
        weight: folded, contiguous, the layer's dtype; always the same memory.
        bias: (K,) in the layer's dtype, or None; `bias_float32` the same in float32.
        finite: whether neither holds NaN or infinity.
    """

    def __init__(self, dtype: torch.dtype, activation: str | None, residual: bool) -> None:
        self.activation = activation
        self.has_residual = residual
        weight, bias = self._folded()
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        # Kept for as long as pointers to it are: the kernels read float32 whatever the layer's dtype.
        self.bias_float32 = None if bias is None else bias.to(torch.float32)
        self.finite = self._is_finite()
        self._packs: dict[Hashable, tuple[list[Any], Callable[[], Any], bool]] = {}
        self._held: frozenset[Hashable] = frozenset()

    @abstractmethod
    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) from the modules as they are now, in new contiguous memory."""

    @abstractmethod
    def sources(self) -> list[Source]:
        """(dictionary, key) of every tensor that the folded weight and bias come from."""

    @abstractmethod
    def reference(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result by PyTorch's own operations, in float32 (float64 for a float64 layer)."""

    @abstractmethod
    def native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result by PyTorch's own operations, for operands of any shape."""

    @abstractmethod
    def problem(self, x: Tensor) -> ConvProblem | None:
        """The convolution this poses; None where it is none of ours."""

    @abstractmethod
    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        """What may run on inputs like these within the budgets, "native" first."""

    # ---- weights ------------------------------------------------------------------------------------------------

    def refold(self) -> bool:
        """Fold and pack again, in place. False where shape, dtype or presence changed, and pointers would not hold."""
        weight, bias = self._folded()
        if weight.dtype != self.weight.dtype or weight.shape != self.weight.shape:
            return False
        if (bias is None) != (self.bias is None):
            return False
        self.weight.copy_(weight)
        if bias is not None:
            assert self.bias is not None
            assert self.bias_float32 is not None
            self.bias.copy_(bias)
            self.bias_float32.copy_(bias)
        self.finite = self._is_finite()
        for cell, make, in_place in self._packs.values():
            if in_place:
                cell[0].copy_(make())
            else:
                cell[0] = make()
        return True

    def _is_finite(self) -> bool:
        """By sums; one that overflows merely costs speed."""
        sums = [t.sum(dtype=torch.float64).item() for t in (self.weight, self.bias) if t is not None]
        return all(map(math.isfinite, sums))

    def packed(self, key: Hashable, make: Callable[[], Any], *, in_place: bool = False) -> list[Any]:
        """A cell with what `make` derives from the weight, made again whenever the weight changes; `in_place` in the
        same memory, for those who keep a pointer to it."""
        found = self._packs.get(key)
        if found is None:
            found = self._packs[key] = ([make()], make, in_place)
        return found[0]

    def packed_for(self, kernel: Kernel, problem: ConvProblem) -> Tensor:
        """The weight as this kernel wants it: always the same memory."""
        pack = kernel.pack
        assert pack is not None
        key, shape = pack_key(kernel, problem), problem.weight_shape
        return self.packed(key, lambda: pack(self.weight.view(shape), problem), in_place=True)[0]  # type: ignore[no-any-return]

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget what is packed under other keys."""
        self._packs = {key: entry for key, entry in self._packs.items() if key in keys}

    # ---- the C library ------------------------------------------------------------------------------------------

    def kernel_candidates(
        self, kernels: tuple[Kernel, ...], problem: ConvProblem, settings: Settings, x: Form, y: Form
    ) -> list[Candidate]:
        """The kernels that take this problem within the budgets; `x` and `y` are its operands' forms."""
        found: list[Candidate] = []
        if not _library.available():
            return found
        for kernel in kernels:
            algorithm = BY_NAME[kernel.algorithm]
            if not _admitted(algorithm, problem, settings):
                continue
            grade = algorithm.error_grade(problem)
            if kernel is DEPTHWISE and depthwise.packed_floats(problem) is not None:
                kernel = DEPTHWISE_PACKED
            key = None if kernel.pack is None else pack_key(kernel, problem)
            bind = self._bound_kernel(kernel, problem, x, y)
            found.append(Candidate(kernel.algorithm, grade, bind, key, True, algorithm.spreads_nonfinite))
        return found

    def _bound_kernel(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        """A kernel on structures and pointers that are made once."""
        function = _library._function(kernel.name, len(kernel.before))
        conv = ctypes.byref(_library._conv(problem, problem.layout, CONTIGUOUS, problem.threads, _library.isa()))
        pointer, before, pack = ctypes.c_void_p, kernel.before, kernel.pack
        in_kernel = self.activation in _library.ACTIVATIONS
        activation = self.activation if in_kernel else None
        code, has_residual = _library.ACTIVATIONS[activation], self.has_residual
        bias = self.bias_float32
        plain = bias is None and not has_residual and not code
        native = self.native
        x_shape, x_strides, dtype, _ = x_form

        def after(y: Tensor) -> Tensor:
            return y if in_kernel else finish(y, None, self.activation)

        def recover(status: int, out: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
            if status not in (_library.NO_MEMORY, _library.NONFINITE):
                raise NotImplementedError(f"{kernel.name} does not compute {problem}")
            return out.copy_(native(x, residual))

        def bind(fixed_x: Tensor | None, fixed_residual: Tensor | None, fixed_out: Tensor | None) -> Run:
            # Packed here, so that a candidate that is never tried costs nothing.
            prepared = self.weight if pack is None else self.packed_for(kernel, problem)
            weight = pointer(prepared.data_ptr())
            # The structure belongs to this function alone: its residual changes from call to call.
            epilogue = _library.Epilogue(None if bias is None else bias.data_ptr(), None, code, 0)
            if fixed_residual is not None:
                epilogue.residual = fixed_residual.data_ptr()
            reference = None if plain else ctypes.byref(epilogue)
            if fixed_x is not None and fixed_out is not None and (fixed_residual is not None or not has_residual):
                arguments = (conv, *before, pointer(fixed_x.data_ptr()), weight, pointer(fixed_out.data_ptr()))

                def run_fixed(x: Tensor, residual: Tensor | None = None, held: Any = prepared) -> Tensor:
                    status = function(*arguments, reference)
                    if status != _library.OK:
                        return recover(status, fixed_out, x, residual)
                    return fixed_out if in_kernel else after(fixed_out)

                return run_fixed
            new = y_form.new

            def run(x: Tensor, residual: Tensor | None = None, held: Any = prepared) -> Tensor:
                if x.stride() != x_strides or x.shape != x_shape or x.dtype != dtype:
                    x = x_form.of(x)
                if residual is not None:
                    residual = y_form.of(residual)
                    epilogue.residual = residual.data_ptr()
                out = fixed_out if fixed_out is not None else new()
                status = function(conv, *before, x.data_ptr(), weight, out.data_ptr(), reference)
                if status != _library.OK:
                    return recover(status, out, x, residual)
                return out if in_kernel else after(out)

            return run

        return bind

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose(
        self,
        x: Tensor,
        residual: Tensor | None,
        layout: str,
        settings: Settings,
        remembered: dict[Any, str],
        measure: bool,
    ) -> tuple[Candidate, Tensor]:
        """The fastest candidate that computes the right thing on these operands, and its result.

        Args:
            remembered: problem and epilogue -> name, of layers measured before; this is added.
            measure: False takes what was last chosen for another image size, or native.
        """
        problem = self.problem(x)
        rest = (type(self), layout, self.activation, residual is not None, settings)
        sizeless = (None if problem is None else problem._replace(N=0, H=0, W=0), *rest)
        key = (problem, *rest)
        known = remembered.get(key) if measure else remembered.get(sizeless, "native")
        candidates = {candidate.name: candidate for candidate in self.candidates(x, residual, layout, settings)}
        reference = self.reference(x, residual)
        runs: dict[str, Run] = {"native": candidates["native"].bind(None, None, None)}
        chosen = known
        if chosen in candidates and chosen not in runs:
            runs |= _agreeing([candidates[chosen]], x, residual, reference)
        if chosen not in runs:
            chosen = "native"
            if measure:
                others = [candidate for name, candidate in candidates.items() if name != "native"]
                runs |= _agreeing(others, x, residual, reference)
                functions = {name: functools.partial(run, x, residual) for name, run in runs.items()}
                handicaps = {name: _NEW_MEMORY for name in runs if not candidates[name].writes_out}
                chosen = fastest(functions, _ROUNDS, _DEADLINE_S, handicaps) if len(runs) > 1 else "native"
        if measure and known is None:
            remembered[key] = remembered[sizeless] = chosen
        self.settle(candidates[chosen].pack)
        return candidates[chosen], runs[chosen](x, residual)

    def settle(self, pack: Hashable) -> None:
        """Keep of the packed weights only this one and those that plans use."""
        self.keep({*self._held, pack})

    def hold(self, keys: Collection[Hashable]) -> None:
        """Say which packed weights plans use: those are kept, the rest goes."""
        self._held = frozenset(keys)
        self.keep(self._held)


def pack_key(kernel: Kernel, problem: ConvProblem) -> Hashable:
    return (kernel.name, problem.layout, problem.dtype, problem.threads)


def fastest(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int,
    deadline_s: float,
    handicaps: Mapping[str, float] | None = None,
) -> str:
    """The name of the function that takes least, its time multiplied by its handicap."""
    first = timed(functions, 2, deadline_s)
    least = min(timing.min_us for timing in first.values())
    close = {name: function for name, function in functions.items() if first[name].min_us < _FAR_OFF * least}
    timings = timed(close, rounds, deadline_s)
    handicaps = handicaps or {}
    return min(timings, key=lambda name: timings[name].min_us * handicaps.get(name, 1.0))


def timed(functions: Mapping[str, Callable[[], Any]], rounds: int, deadline_s: float) -> dict[str, Timing]:
    """Interleaved timings; of one thread the CPU time it takes, so that what neighbours take does not count."""
    timings = interleaved(functions, rounds, deadline_s=deadline_s)
    if torch.get_num_threads() > 1:
        return timings
    return {name: timing.on_thread_clock for name, timing in timings.items()}


def finish(y: Tensor, residual: Tensor | None, activation: str | None) -> Tensor:
    """activation(y + residual); may overwrite y."""
    if residual is not None:
        y = y.add_(residual) if residual.shape == y.shape and residual.dtype == y.dtype else y + residual
    if activation == "relu":
        return torch.relu_(y)
    if activation == "relu6":
        return F.hardtanh_(y, 0.0, 6.0)
    if activation == "gelu":
        return torch.ops.aten.gelu_(y)  # type: ignore[no-any-return]
    return F.silu(y, inplace=True) if activation == "silu" else y


def distance(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance; infinite where either is not finite or the shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    norm = torch.linalg.vector_norm(want.double())
    off = torch.linalg.vector_norm(got.double() - want.double())
    result = float(off) if float(norm) == 0.0 else float(off / norm)
    return result if result == result else float("inf")


def copied(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)


def onednn_takes(dtype: str) -> bool:
    """Whether oneDNN is there, switched on, and has fast kernels for this dtype on this processor."""
    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    ops = torch.ops.mkldnn
    supported = {"bfloat16": ops._is_mkldnn_bf16_supported, "float16": ops._is_mkldnn_fp16_supported}
    return dtype == "float32" or (dtype in supported and bool(supported[dtype]()))


def _admitted(algorithm: Algorithm, problem: ConvProblem, settings: Settings) -> bool:
    """Whether it applies, is not disabled and keeps within the budgets."""
    if algorithm.why_not(problem) is not None:
        return False
    try:
        return over_budget(algorithm, problem, settings) is None
    except NotImplementedError:
        return False


def _agreeing(candidates: list[Candidate], x: Tensor, residual: Tensor | None, reference: Tensor) -> dict[str, Run]:
    """Functions of the candidates that compute the right thing; one that raises or declines does not."""
    found: dict[str, Run] = {}
    for candidate in candidates:
        try:
            run = candidate.bind(None, None, None)
            got = run(x, residual)
        except (RuntimeError, MemoryError):  # NotImplementedError is a RuntimeError
            continue
        tolerance = _TOLERANCE_16_BIT.get(x.dtype, _TOLERANCE[candidate.grade])
        if got.dtype == x.dtype and distance(got, reference) <= tolerance:
            found[candidate.name] = run
    return found
