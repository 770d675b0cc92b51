"""What frozen layers share: a folded weight, what is packed from it, and the choice among candidates."""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.aten.arguments import wants_direct_sums
from convselect.base.problem import CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings, exactly
from convselect.freeze import pages
from convselect.freeze.candidates import (
    ONEDNN_ACTIVATIONS,
    Candidate,
    Form,
    Run,
    admitted,
    agreeing,
    fastest,
    finish,
    timed_once,
)
from convselect.freeze.capture import Source
from convselect.freeze.chains import Layer
from convselect.freeze.folded import evaluated, is_finite, sources_of
from convselect.freeze.kernel import Kernel, KernelCall, packed_form
from convselect.freeze.remembered import Key, Remembered
from convselect.kernels import _library
from convselect.kernels._contract import Grade
from convselect.kernels.pool import BY_NAME

_ROUNDS = 15
_DEADLINE_S = 0.25
# Measured alone, a call that allocates its result finds the memory of the last one in the caches; between other layers
# only memory laid out beforehand is there.
_NEW_MEMORY = 1.1
_BEHIND, _LEAST_US = 1.1, 20_000.0


class Search(NamedTuple):
    """How candidates are chosen.

    Attributes:
        settings: the budgets.
        remembered: what was chosen for layers, blocks and networks measured before; new choices are added.
        measure: False takes what was last chosen for another image size, or native.
        tick: called after each layer.
        trusted: these choices were checked before, layer by layer, for the same network: checking the whole is enough.
        took_us: what was chosen took this time, layer by layer; empty if `trusted`.
        other_us: the same of another layout, which is complete; None without one.
    """

    settings: Settings
    remembered: Remembered
    measure: bool
    tick: Callable[[], None]
    trusted: bool = False
    took_us: list[float] = []  # noqa: RUF012  each plan passes its own
    other_us: list[float] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the other layout stays ahead even if the layers to come take half of what they take there. Networks
        of short layers are planned soon enough, and one call says little of those."""
        if self.other_us is None or sum(self.other_us) < _LEAST_US:
            return False
        to_come = sum(self.other_us[len(self.took_us) :])
        return sum(self.took_us) + to_come / 2 > _BEHIND * sum(self.other_us)


class FrozenLayer(ABC):
    """A layer with what follows it: activation(layer(x) + residual). Parameters are read, never written.

    Attributes:
        form: the folded weight's shape and dtype, as a tensor without memory.
        first_values: some of its values.
        bias: (K,) in the layer's dtype, or None; `bias_float32` the same in float32.
        finite: whether neither holds NaN or infinity.
        direct_sums: whether the folded weight asks for direct sums.
        slope: of a "leaky_relu" below 0.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.activation = layer.activation
        self.slope = layer.slope
        self.has_residual = layer.residual
        dtype = layer.weight.meta["val"].dtype
        weight, bias = self._folded()
        self._weight: Tensor | None = pages.moved(weight.to(dtype))
        self._alive: Callable[[], Tensor | None] = weakref.ref(self._weight)
        self.form = torch.empty(weight.shape, dtype=dtype, device="meta")
        self.bias = None if bias is None else bias.to(dtype)
        # An attribute, since pointers to it are kept: the kernels read float32 whatever the layer's dtype.
        self.bias_float32 = None if bias is None else bias.to(torch.float32)
        self.finite = is_finite(self._weight, self.bias)
        self.direct_sums = wants_direct_sums(self._weight)
        self.first_values = _first_values(self._weight)
        self._packs: dict[Hashable, tuple[list[Any], Callable[[], Any], bool]] = {}
        self._pinned: frozenset[Hashable] = frozenset()

    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) from the parameters as they are now, in new contiguous memory."""
        dtype = self.layer.weight.meta["val"].dtype
        if self.layer.bias is None:
            return evaluated(self.layer.weight)[0].to(dtype), None
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weight, bias = evaluated(self.layer.weight, self.layer.bias)
        return weight.to(dtype), bias if bias.dtype == dtype else bias.to(wide)

    @property
    def weight(self) -> Tensor:
        """The folded weight, contiguous, in the layer's dtype: the same memory for as long as anybody holds it, folded
        again if nobody does."""
        found = self._weight if self._weight is not None else self._alive()
        if found is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():
            return self._keep(self._folded()[0])

    def _keep(self, weight: Tensor) -> Tensor:
        self._weight = weight = pages.moved(weight.to(self.form.dtype))
        self._alive = weakref.ref(weight)
        return weight

    @property
    def kept_bytes(self) -> int:
        """Of the weight and what is packed from it, as far as anybody holds it."""
        held = {id(t): t for t in (self._alive(), *(cell[0] for cell, _, _ in self._packs.values())) if t is not None}
        return sum(t.numel() * t.element_size() for t in held.values())

    def sources(self) -> list[Source]:
        """(dictionary, key) of every tensor that the folded weight and bias come from."""
        return sources_of(self.layer.weight, self.layer.bias)

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
        return self.finish(y, residual if residual is None else residual.to(wide))

    def _spread(self, x: Tensor) -> float:
        """The norm of the result if the signs of its products were random."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        variances = self._linear(x.to(wide).square(), self.weight.to(wide).square(), None)
        return math.sqrt(max(float(variances.sum(dtype=torch.float64)), 0.0))

    def native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result by PyTorch's own operations, for operands of any shape."""
        return self.finish(self._linear(x, self.weight, self.bias), residual)

    def finish(self, y: Tensor, residual: Tensor | None) -> Tensor:
        """activation(y + residual); may overwrite y."""
        return finish(y, residual, self.activation, self.slope)

    @property
    def onednn_activation(self) -> tuple[str, list[float], str]:
        """oneDNN's name for the activation, and its parameters."""
        return (
            ("leaky_relu", [self.slope], "") if self.activation == "leaky_relu" else ONEDNN_ACTIVATIONS[self.activation]
        )

    # ---- weights ------------------------------------------------------------------------------------------------

    def refold(self) -> bool:
        """Fold and pack again, in place. False if that cannot be: shape or dtype changed, a bias came or went, or the
        weight asks for other algorithms now."""
        weight, bias = self._folded()
        if weight.dtype != self.form.dtype or weight.shape != self.form.shape:
            return False
        if (bias is None) != (self.bias is None):
            return False
        held = self._weight if self._weight is not None else self._alive()
        weight = self._keep(weight) if held is None else held.copy_(weight)
        if bias is not None:
            assert self.bias is not None
            assert self.bias_float32 is not None
            self.bias.copy_(bias)
            self.bias_float32.copy_(bias)
        self.finite, self.first_values = is_finite(weight, self.bias), _first_values(weight)
        if wants_direct_sums(weight) and not self.direct_sums:
            return False
        for cell, make, in_place in self._packs.values():
            if in_place:
                cell[0].copy_(make())
            else:
                cell[0] = make()
        self._drop_unpinned()
        return True

    def packed(self, key: Hashable, make: Callable[[], Any], *, in_place: bool = False) -> list[Any]:
        """A list of one element, which `make` derives from the weight: anew whenever the weight changes.

        Args:
            in_place: keep the memory and overwrite it, for callers that keep a pointer to it.
        """
        found = self._packs.get(key)
        if found is None:
            found = self._packs[key] = ([pages.moved(make()) if in_place else make()], make, in_place)
        return found[0]

    def packed_for(self, kernel: Kernel, problem: ConvProblem) -> Tensor:
        """The weight as this kernel wants it: always the same memory."""
        pack = kernel.pack
        assert pack is not None
        key = kernel.pack_key(problem)
        return self.packed(key, lambda: pack(self.weight_for(problem), problem), in_place=True)[0]  # type: ignore[no-any-return]

    def weight_for(self, problem: ConvProblem) -> Tensor:
        """The weight of the convolution that is packed for this problem."""
        return self.weight.view(problem.weight_shape)

    def pin_packs(self, keys: Collection[Hashable]) -> None:
        """Keep the packed weights under these keys, which plans use, and drop the others."""
        self._pinned = frozenset(keys)
        self._drop_unpinned()

    def pin_chosen(self, key: Hashable) -> None:
        """Drop what is packed except for pinned weights and this one, which stays until weights are pinned again."""
        self._drop_unpinned(key)

    def _drop_unpinned(self, *chosen: Hashable) -> None:
        needed = {*self._pinned, *chosen}
        self._packs = {key: pack for key, pack in self._packs.items() if key in needed}
        if needed and None not in needed:
            self._weight = None

    # ---- the C library ------------------------------------------------------------------------------------------

    def kernel_candidates(
        self, kernels: tuple[Kernel, ...], problem: ConvProblem, settings: Settings, x: Form, y: Form
    ) -> list[Candidate]:
        """The kernels that take this problem within the budgets; `x` and `y` are its operands' forms."""
        found: list[Candidate] = []
        for kernel, grade, spreads in admitted_kernels(kernels, problem, settings):
            key = None if kernel.pack is None else kernel.pack_key(problem)
            bind = self._kernel_bind(kernel, problem, x, y)
            name = kernel.label or kernel.algorithm
            found.append(Candidate(name, grade, bind, key, True, kernel.takes_pitch, spreads))
        return found

    def _kernel_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        """`Candidate.bind` of this kernel."""
        function = _library._function(kernel.name, len(kernel.leading_ints))
        structure = _library._struct(problem, problem.layout, CONTIGUOUS, problem.threads, _library.isa())
        if x_form.memory_format != y_form.memory_format:
            assert isinstance(structure, _library.Conv)
            structure.x_layout = _library.LAYOUTS[CONTIGUOUS]

        def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
            # Packed here, so that a candidate that is never tried costs nothing.
            weight = self.weight if kernel.pack is None else self.packed_for(kernel, problem)
            operands = kernel.leading_ints, (ctypes.c_void_p(weight.data_ptr()),), weight
            call = KernelCall(function, structure, *operands, self, self.native, x_form, y_form, kernel.takes_pitch)
            return call.bind(x, residual, out)

        return bind

    # ---- choosing -----------------------------------------------------------------------------------------------

    def choose(
        self, x: Tensor, residual: Tensor | None, layout: str, search: Search, largest: int
    ) -> tuple[Candidate, Tensor]:
        """The fastest candidate that computes the right thing on these operands, and its result.

        Args:
            largest: Winograd's tiles may have this size.
        """
        problem, (settings, remembered, measure, _, trusted) = self.problem(x), search[:5]
        settings = exactly(settings) if self.direct_sums else settings
        every = self.candidates(x, residual, layout, settings)
        candidates = {candidate.name: candidate for candidate in every if candidate.tile <= largest}
        key: Key | None = None
        known: str | None = "native"
        if problem is not None:
            form = f"{layout} {self.activation} {'no ' if residual is None else ''}residual"
            key = Key(self.layer.kind, problem, form, settings)
            look_up = remembered.get if measure else remembered.for_any_size
            known = look_up(key)
            if len(candidates) < len(every) and known not in candidates:  # a larger tile would be faster
                key = key._replace(form=f"{form} tiles to {largest}")
                known = look_up(key)
        if trusted and known in candidates:
            y = _attempted(candidates[known], x, residual)
            if y is not None:
                self.pin_chosen(candidates[known].pack)
                return candidates[known], y
        reference, us = timed_once(lambda: self.reference(x, residual))
        took_us = {"native": us} if x.dtype in (torch.float32, torch.float64) else {}
        spread = functools.cache(lambda: self._spread(x))
        runs: dict[str, Run] = {"native": candidates["native"].bind(None, None, None)}
        if known in candidates and known != "native":
            runs |= agreeing([candidates[known]], x, residual, reference, spread)
        if known in runs:
            chosen = known
        elif measure:
            tried = [candidate for name, candidate in candidates.items() if name != "native"]
            runs |= agreeing(tried, x, residual, reference, spread, took_us)
            functions = {name: functools.partial(run, x, residual) for name, run in runs.items()}
            in_place = {name: function for name, function in functions.items() if candidates[name].writes_out}
            # With one row (layers behind a pooled image) a call takes as long as its weight takes to come from memory.
            # Measured alone it finds the weight in the caches, and these times say nothing: kernels read packed weights
            # in one stream, from huge pages.
            if problem is not None and problem.N * problem.P * problem.Q == 1 and in_place:
                functions = in_place
            handicaps = dict.fromkeys(functions.keys() - in_place.keys(), _NEW_MEMORY)
            chosen, *others = functions
            if others:
                chosen = fastest(functions, _ROUNDS, _DEADLINE_S, handicaps, took_us)
            if key is not None:
                remembered.put(key, chosen)
        else:
            chosen = "native"
        self.pin_chosen(candidates[chosen].pack)
        result, us = timed_once(functools.partial(runs[chosen], x, residual))
        search.took_us.append(us)
        return candidates[chosen], result


def admitted_kernels(
    kernels: tuple[Kernel, ...], problem: ConvProblem, settings: Settings
) -> Iterator[tuple[Kernel, Grade, bool]]:
    """The kernels that take this problem within the budgets, on packed weights where they can; the error of each, and
    whether it spreads values that are not finite."""
    for kernel in kernels if _library.available() else ():
        algorithm = BY_NAME[kernel.algorithm]
        if not admitted(algorithm, problem, settings) or (kernel.takes is not None and not kernel.takes(problem)):
            continue
        if not kernel.direct_sums and settings.precision == "exact":
            continue
        grade = algorithm.error_grade(problem) if kernel.direct_sums else Grade.CLOSE
        yield packed_form(kernel, problem), grade, algorithm.spreads_nonfinite


def seen_as_image(weight: Tensor, seen_as: str | None) -> Tensor:
    """The weight of the convolution of images, from the layer's own."""
    if seen_as == "row":
        return weight.unsqueeze(2)
    if seen_as == "slice":
        return weight.squeeze(2)
    return weight.flatten(3) if seen_as == "columns" else weight


def _first_values(weight: Tensor) -> bytes:
    return weight.flatten()[:16].view(torch.uint8).numpy().tobytes()


def _attempted(candidate: Candidate, x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Its result; None if it does not take these operands after all."""
    try:
        return candidate.bind(None, None, None)(x, residual)
    except (RuntimeError, MemoryError):
        return None
