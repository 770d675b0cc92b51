"""What frozen layers share: a folded weight, what is packed from it, and the choice among candidates."""

from __future__ import annotations

import ctypes
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.aten.arguments import wants_direct_sums
from convselect.base.problem import CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings, exactly
from convselect.freeze.candidates import Candidate, Form, Run, admitted, agreeing, fastest, finish
from convselect.freeze.kernel import DEPTHWISE, DEPTHWISE_PACKED, Kernel, KernelCall
from convselect.kernels import _library, depthwise
from convselect.kernels.pool import BY_NAME

Source = tuple[dict[str, Any], str]

_ROUNDS = 15
_DEADLINE_S = 0.25
# Measured alone, a call that allocates its result finds the memory of the last one in the caches; between other layers
# only memory laid out beforehand is there.
_NEW_MEMORY = 1.1


class Search(NamedTuple):
    """How candidates are chosen.

    Attributes:
        settings: the budgets.
        remembered: what was chosen for layers (and blocks) measured before; new choices are added.
        measure: False takes what was last chosen for another image size, or native.
    """

    settings: Settings
    remembered: dict[Any, str]
    measure: bool


class FrozenLayer(ABC):
    """A layer with what follows it: activation(layer(x) + residual). The modules it came from are read, never written.

    Attributes:
        weight: folded, contiguous, the layer's dtype; always the same memory.
        bias: (K,) in the layer's dtype, or None; `bias_float32` the same in float32.
        finite: whether neither holds NaN or infinity.
        direct_sums: whether the folded weight asks for direct sums.
    """

    def __init__(self, dtype: torch.dtype, activation: str | None, residual: bool) -> None:
        self.activation = activation
        self.has_residual = residual
        weight, bias = self._folded()
        self.weight = weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        # An attribute, since pointers to it are kept: the kernels read float32 whatever the layer's dtype.
        self.bias_float32 = None if bias is None else bias.to(torch.float32)
        self.finite = self._is_finite()
        self.direct_sums = wants_direct_sums(self.weight)
        self._packs: dict[Hashable, tuple[list[Any], Callable[[], Any], bool]] = {}
        self._pinned: frozenset[Hashable] = frozenset()

    @abstractmethod
    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) from the modules as they are now, in new contiguous memory."""

    @abstractmethod
    def sources(self) -> list[Source]:
        """(dictionary, key) of every tensor that the folded weight and bias come from."""

    @abstractmethod
    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The result by PyTorch's own operations, without residual and activation."""

    @abstractmethod
    def problem(self, x: Tensor) -> ConvProblem | None:
        """The convolution that this layer is for x; None if the C kernels and oneDNN do not take it."""

    @abstractmethod
    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        """What may run on inputs like these within the budgets, "native" first.

        Args:
            layout: of a convolution's results; linear layers ignore it.
        """

    def reference(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The result by PyTorch's own operations, in float32 (float64 for a float64 layer)."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = self.bias_float32 if wide == torch.float32 else self.bias
        y = self._linear(x.to(wide), self.weight.to(wide), bias)
        return finish(y, residual if residual is None else residual.to(wide), self.activation)

    def native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result by PyTorch's own operations, for operands of any shape."""
        return finish(self._linear(x, self.weight, self.bias), residual, self.activation)

    # ---- weights ------------------------------------------------------------------------------------------------

    def refold(self) -> bool:
        """Fold and pack again, in place. False if that cannot be: shape or dtype changed, a bias came or went, or the
        weight asks for other algorithms now."""
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
        if wants_direct_sums(self.weight) and not self.direct_sums:
            return False
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
        """A list of one element, which `make` derives from the weight: anew whenever the weight changes.

        Args:
            in_place: keep the memory and overwrite it, for callers that keep a pointer to it.
        """
        found = self._packs.get(key)
        if found is None:
            found = self._packs[key] = ([make()], make, in_place)
        return found[0]

    def packed_for(self, kernel: Kernel, problem: ConvProblem) -> Tensor:
        """The weight as this kernel wants it: always the same memory."""
        pack = kernel.pack
        assert pack is not None
        key, shape = kernel.pack_key(problem), problem.weight_shape
        return self.packed(key, lambda: pack(self.weight.view(shape), problem), in_place=True)[0]  # type: ignore[no-any-return]

    def pin_packs(self, keys: Collection[Hashable]) -> None:
        """Keep the packed weights under these keys, which plans use, and drop the others."""
        self._pinned = frozenset(keys)
        self._drop_unpinned()

    def pin_chosen(self, key: Hashable) -> None:
        """Drop what is packed except for pinned weights and this one, which stays until weights are pinned again."""
        self._drop_unpinned(key)

    def _drop_unpinned(self, *chosen: Hashable) -> None:
        self._packs = {key: pack for key, pack in self._packs.items() if key in self._pinned or key in chosen}

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
            if not admitted(algorithm, problem, settings):
                continue
            grade = algorithm.error_grade(problem)
            if kernel is DEPTHWISE and depthwise.packed_floats(problem) is not None:
                kernel = DEPTHWISE_PACKED
            key = None if kernel.pack is None else kernel.pack_key(problem)
            bind = self._kernel_bind(kernel, problem, x, y)
            found.append(Candidate(kernel.algorithm, grade, bind, key, True, algorithm.spreads_nonfinite))
        return found

    def _kernel_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        """`Candidate.bind` of this kernel."""
        function = _library._function(kernel.name, len(kernel.leading_ints))
        conv = ctypes.byref(_library._conv(problem, problem.layout, CONTIGUOUS, problem.threads, _library.isa()))

        def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
            # Packed here, so that a candidate that is never tried costs nothing.
            weight = self.weight if kernel.pack is None else self.packed_for(kernel, problem)
            weight_at, leading = ctypes.c_void_p(weight.data_ptr()), (conv, *kernel.leading_ints)
            call = KernelCall(function, leading, (weight_at,), weight, self, self.native, x_form, y_form)
            return call.bind(x, residual, out)

        return bind

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose(self, x: Tensor, residual: Tensor | None, layout: str, search: Search) -> tuple[Candidate, Tensor]:
        """The fastest candidate that computes the right thing on these operands, and its result."""
        problem, (settings, remembered, measure) = self.problem(x), search
        settings = exactly(settings) if self.direct_sums else settings
        rest = (type(self), layout, self.activation, residual is not None, settings)
        key, sizeless = (problem, *rest), (None if problem is None else problem._replace(N=0, H=0, W=0), *rest)
        known = remembered.get(key) if measure else remembered.get(sizeless, "native")
        candidates = {candidate.name: candidate for candidate in self.candidates(x, residual, layout, settings)}
        reference = self.reference(x, residual)
        runs: dict[str, Run] = {"native": candidates["native"].bind(None, None, None)}
        if known in candidates and known != "native":
            runs |= agreeing([candidates[known]], x, residual, reference)
        if known in runs:
            chosen = known
        elif measure:
            others = [candidate for name, candidate in candidates.items() if name != "native"]
            runs |= agreeing(others, x, residual, reference)
            functions = {name: functools.partial(run, x, residual) for name, run in runs.items()}
            handicaps = {name: _NEW_MEMORY for name in runs if not candidates[name].writes_out}
            chosen = fastest(functions, _ROUNDS, _DEADLINE_S, handicaps) if len(runs) > 1 else "native"
        else:
            chosen = "native"
        if measure and known is None:
            remembered[key] = remembered[sizeless] = chosen
        self.pin_chosen(candidates[chosen].pack)
        return candidates[chosen], runs[chosen](x, residual)


def copied(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)
