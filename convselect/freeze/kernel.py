"""Kernels of the C library as frozen layers call them: on structures and pointers that are made once."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from convselect.base.problem import ConvProblem
from convselect.freeze.bound import Bound
from convselect.freeze.candidates import Form, Run, finish
from convselect.kernels import _library, _product, depthwise, direct, grouped


class Kernel(NamedTuple):
    """A kernel of the C library.

    Attributes:
        algorithm: name of the algorithm whose `why_not`, budgets and error grade apply.
        name: the C function.
        leading_ints: integers that it takes ahead of its operands.
        pack: packs the weight; None if the kernel reads it as it is.
        label: name of the candidate, if it is not the algorithm's.
        takes: whether the kernel computes a problem that its algorithm computes; None: it does.
        direct_sums: as `Algorithm.direct_sums`: False if its results are none, though those of its algorithm are.
        takes_pitch: whether x and y in NHWC may be some channels of larger images.
    """

    algorithm: str
    name: str
    leading_ints: tuple[int, ...] = ()
    pack: Callable[[Tensor, ConvProblem], Tensor] | None = None
    label: str | None = None
    takes: Callable[[ConvProblem], bool] | None = None
    direct_sums: bool = True
    takes_pitch: bool = False

    def pack_key(self, problem: ConvProblem) -> Hashable:
        return (self.name, problem.layout, problem.dtype, problem.threads, problem.weight_shape)


DIRECT = Kernel("direct", "cs_direct_frozen", (), direct.pack, takes_pitch=True)
# For the first layer of a network in NHWC: it reads an image in NCHW where it lies.
STEM = DIRECT._replace(label="direct_from_nchw", takes=direct.reads_other_layouts)
PRODUCT = Kernel("direct", "cs_product_frozen", (), _product.pack, "product", _product.takes, takes_pitch=True)
STRASSEN = Kernel(
    "direct", "cs_strassen_frozen", (), functools.partial(_product.pack, kernel="strassen"), "strassen",
    functools.partial(_product.takes, kernel="strassen"), takes_pitch=True, direct_sums=False,
)  # fmt: skip
DEPTHWISE = Kernel("depthwise", "cs_depthwise")
DEPTHWISE_PACKED = Kernel("depthwise", "cs_depthwise_frozen", (), depthwise.pack, takes_pitch=True)
GROUPED = Kernel("grouped", "cs_grouped")
GROUPED_PACKED = Kernel("grouped", "cs_grouped_frozen", (), grouped.pack)
KERNELS = (
    *(Kernel(f"winograd{m}", "cs_winograd", (m,), takes_pitch=True) for m in (2, 3, 4, 5, 6, 7)),
    DEPTHWISE,
    GROUPED,
    DIRECT,
    PRODUCT,
    STRASSEN,
)


def packed_form(kernel: Kernel, problem: ConvProblem) -> Kernel:
    """The kernel of the same algorithm that reads a packed weight, if there is one for this problem; else `kernel`."""
    if kernel is DEPTHWISE and depthwise.packed_floats(problem) is not None:
        return DEPTHWISE_PACKED
    if kernel is GROUPED and grouped.packed_floats(problem) is not None:
        return GROUPED_PACKED
    return kernel


class FixedCall(NamedTuple):
    """A call on memory that is always the same; what it is called with is ignored.

    Attributes:
        bound: the call, without what to do about its status.
        out: its result.
        otherwise: `otherwise(status)` computes `out` in another way, or raises, if the status is not OK.
    """

    bound: Bound
    out: Tensor
    otherwise: Callable[[int], object]

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        function, arguments, _owners = self.bound
        status = function(*arguments)
        if status:  # None if the function has none
            self.otherwise(status)
        return self.out


class FixedCalls(NamedTuple):
    """Several such calls, one after another; `out` is the last one's result."""

    calls: tuple[FixedCall, ...]
    out: Tensor

    def __call__(self, *_: Any, **__: Any) -> Tensor:
        for call in self.calls:
            call()
        return self.out


class HasEpilogue(Protocol):
    """What a kernel's epilogue is made of: a frozen layer, as a rule."""

    bias_float32: Tensor | None
    has_residual: bool
    activation: str | None
    slope: float

    def finish(self, y: Tensor, residual: Tensor | None) -> Tensor: ...


@dataclass
class Epilogue:
    """One that is not that of the layer itself."""

    bias_float32: Tensor | None
    has_residual: bool
    activation: str | None
    slope: float

    def finish(self, y: Tensor, residual: Tensor | None) -> Tensor:
        return finish(y, residual, self.activation, self.slope)


class KernelCall(NamedTuple):
    """`function(conv, *leading, x, *weight, y, epilogue)` of the C library, as a layer calls it.

    Attributes:
        conv: the problem; a copy of it says how far apart the pixels of x and y are, if they are not dense.
        leading: further arguments ahead of x's address.
        weight: the address of the packed weight; empty if `leading` has it.
        owners: the objects whose memory `leading` and `weight` point to.
        takes_pitch: see `Kernel`.
        layer: has bias, residual (in the form of y) and activation.
        native: computes the same for operands of any shape.
    """

    function: Any
    conv: _library.Conv | _library.Volume | _library.Repetition
    leading: tuple[Any, ...]
    weight: tuple[Any, ...]
    owners: Any
    layer: HasEpilogue
    native: Run
    x_form: Form
    y_form: Form
    takes_pitch: bool = False

    def bind(self, x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
        """See `Candidate.bind`."""
        bias, has_residual, activation = self.layer.bias_float32, self.layer.has_residual, self.layer.activation
        in_kernel = activation in _library.ACTIVATIONS
        code = _library.ACTIVATIONS[activation if in_kernel else None]
        # The structure belongs to this function alone: its residual changes from call to call.
        epilogue = _library.Epilogue(None if bias is None else bias.data_ptr(), None, code, self.layer.slope)
        if residual is not None and self.y_form.fits(residual):
            epilogue.residual = residual.data_ptr()
        reference = None if bias is None and not has_residual and not code else ctypes.byref(epilogue)
        activate = None if in_kernel else lambda y: self.layer.finish(y, None)
        y_pitch = None if out is None or not self.takes_pitch else self.y_form.pitch(out)
        if y_pitch is not None and has_residual:
            raise ValueError("a residual lies as the result does")
        x_pitch = None if x is None or not self.takes_pitch else self.x_form.pitch(x)
        if x is not None and x_pitch is None:
            x = self.x_form.seen(x)  # if it does not lie so, a copy is made at every call
        residual = residual if residual is None or self.y_form.fits(residual) else None
        call = self
        if x_pitch is not None or y_pitch is not None:
            apart = _library.Conv.from_buffer_copy(self.conv)
            apart.x_pitch, apart.y_pitch = x_pitch or 0, y_pitch or 0
            call = self._replace(conv=apart)
        if x is not None and out is not None and (residual is not None or not has_residual):
            return call._on_fixed_memory(x, residual, out, reference, activate)
        return call._on_any_memory(x, out, epilogue, reference, activate)

    def _on_fixed_memory(self, x: Tensor, residual: Tensor | None, out: Tensor, reference: Any, activate: Any) -> Run:
        at = ctypes.c_void_p
        leading = (ctypes.byref(self.conv), *self.leading)
        arguments = (*leading, at(x.data_ptr()), *self.weight, at(out.data_ptr()), reference)
        bound = Bound(self.function, arguments, (self.owners, x, residual, out))
        call = FixedCall(bound, out, lambda status: self._computed_natively(status, out, x, residual))
        if activate is None:
            return call  # type: ignore[return-value]  # mypy overlooks `__call__` of named tuples
        return lambda *_: activate(call())

    def _on_any_memory(
        self, fixed_x: Tensor | None, fixed_out: Tensor | None, epilogue: Any, reference: Any, activate: Any
    ) -> Run:
        function, weight = self.function, self.weight
        leading = (ctypes.byref(self.conv), *self.leading)
        x_form, y_form, new = self.x_form, self.y_form, self.y_form.new
        x_shape, x_strides, dtype, _ = x_form

        def run(x: Tensor, residual: Tensor | None = None, owners: Any = self.owners) -> Tensor:
            if fixed_x is not None:
                x = fixed_x
            elif x.stride() != x_strides or x.shape != x_shape or x.dtype != dtype:
                x = x_form.of(x)
            if residual is not None:
                residual = y_form.of(residual)
                epilogue.residual = residual.data_ptr()
            out = fixed_out if fixed_out is not None else new()
            status = function(*leading, x.data_ptr(), *weight, out.data_ptr(), reference)
            if status != _library.OK:
                return self._computed_natively(status, out, x, residual)
            return out if activate is None else activate(out)

        return run

    def _computed_natively(self, status: int, out: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        """Raises NotImplementedError if the kernel declined for another reason than memory or values not finite."""
        if status not in (_library.NO_MEMORY, _library.NONFINITE):
            raise NotImplementedError(f"{self.function.__name__} does not take {tuple(x.shape)}")
        return out.copy_(self.native(x, residual))
