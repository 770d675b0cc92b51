"""A frozen transposed convolution, and the ways to run it.

With stride s, result s q + f of an axis reads the taps r for which r - f - padding is a multiple of s, each at its own
place of the input. So the results of one phase f are an ordinary convolution, and all phases together are one with
s * K channels (Shi et al. 2016, arXiv 1609.05158). In NHWC the pixels of phases stand where they belong if the image
has one row: nothing is moved. With more rows a copy puts the rows of phases between each other. The weight of that
convolution is made and packed once, so it runs as any frozen layer does, bias and activation included.

The other candidates are the kernels for the grad-input of a convolution, as in eager calls; bias, residual and
activation are a second pass there.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.aten.arguments import transposed_problem
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.base.settings import Settings
from convselect.freeze import pointwise
from convselect.freeze.bound import Bound
from convselect.freeze.candidates import FORMATS, PHASES, Candidate, Form, Run
from convselect.freeze.chains import Layer
from convselect.freeze.kernel import KERNELS, Epilogue, FixedCall, FixedCalls, Kernel, KernelCall
from convselect.freeze.layer import FrozenLayer, seen_as_image
from convselect.kernels import _library
from convselect.kernels._common import add_bias, format_of
from convselect.kernels._contract import Grade

# Kernels of grad-inputs read the weight as it is.
_GRADIENTS = (
    Kernel("direct", "cs_direct"),
    Kernel("patches", "cs_patches"),
    Kernel("thin", "cs_thin"),
    Kernel("depthwise", "cs_depthwise"),
    Kernel("grouped", "cs_grouped"),
    *(Kernel(f"winograd{m}", "cs_winograd", (m,)) for m in (2, 3, 4, 5, 6, 7)),
)
_MOST_PHASES = 64


class FrozenTransposed(FrozenLayer):
    """activation(conv_transpose(x) + residual); x is (N, K, P, Q), the weight (K, C / groups, R, S), of height 1 for a
    layer of one dimension. Its problem is the grad-input of the convolution the other way round."""

    def __init__(self, layer: Layer) -> None:
        self.stride, sides, self.dilation, self.groups, self.more = layer.geometry
        self.sides: tuple[int, ...] = tuple(sides) if len(sides) == 4 else (sides[0], sides[0], sides[1], sides[1])
        self._axes: dict[ConvProblem, tuple[_Axis, _Axis]] = {}  # what convolutions of phases were made of
        self._phase_bias: dict[int, Tensor] = {}
        super().__init__(layer)

    def _folded(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super()._folded()
        return seen_as_image(weight, self.layer.seen_as), bias

    def problem(self, x: Tensor) -> ConvProblem | None:
        whole = transposed_problem(x, self.form, (self.stride, (0, 0), self.more, self.groups, self.dilation))
        if whole is None:
            return None
        top, bottom, left, right = self.sides
        found = whole._replace(
            H=whole.H - top - bottom, W=whole.W - left - right,
            pad_top=top, pad_bottom=bottom, pad_left=left, pad_right=right,
        )  # fmt: skip
        return found if min(found.H, found.W) > 0 and found.y_shape == x.shape else None

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        top, bottom, left, right = self.sides
        padding = min(top, bottom), min(left, right)
        y = torch.conv_transpose2d(x, weight, bias, self.stride, padding, self.more, self.groups, self.dilation)  # type: ignore[call-overload]
        if (top, left) == padding == (bottom, right):
            return y
        rows, columns = (
            slice(before - p, size - (after - p))
            for before, after, p, size in zip((top, left), (bottom, right), padding, y.shape[2:], strict=True)
        )
        return y[:, :, rows, columns].clone(memory_format=FORMATS[_layout(y)])

    def refold(self) -> bool:
        done = super().refold()
        for count, tiled in self._phase_bias.items():
            assert self.bias_float32 is not None
            tiled.copy_(self.bias_float32.repeat(count))
        return done

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        found, problem = [self._native(layout)], self.problem(x)
        if problem is None or x.dtype != self.form.dtype or problem.dtype == "float64":
            return found
        problem = problem._replace(layout=layout, weight_layout=CONTIGUOUS)
        if residual is not None and (residual.shape != problem.x_shape or residual.dtype != x.dtype):
            return found
        shapes = problem.y_shape, problem.x_shape
        x_form, y_form = (Form.dense(shape, layout, problem.torch_dtype) for shape in shapes)
        found += self.kernel_candidates(_GRADIENTS, problem, settings, x_form, y_form)
        phases = _phases(problem)
        if phases is not None and (residual is None or not phases.moves_rows):
            self._axes[phases.problem] = phases.axes
            kernels = tuple(k._replace(label=f"{k.label or k.algorithm}{PHASES}") for k in map(_kept, KERNELS))
            y_form = Form.dense(phases.problem.y_shape, layout, problem.torch_dtype)
            more = self.kernel_candidates(kernels, phases.problem, settings, x_form, y_form)
            found += [replace(c, scratch_bytes=y_form.n_bytes) if phases.moves_rows else c for c in more]
        return found

    def _native(self, layout: str) -> Candidate:
        memory_format = format_of(layout, self.form.dim())

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            y = self.native(x.contiguous(memory_format=memory_format), residual)
            return y.contiguous(memory_format=memory_format)

        return Candidate("native", Grade.DIRECT, lambda *_: run)

    def weight_for(self, problem: ConvProblem) -> Tensor:
        return _phase_weight(self.weight, problem, *self._axes[problem])

    def _kernel_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        if problem.direction != Direction.FORWARD:
            return self._gradient_bind(kernel, problem, x_form, y_form)
        return self._phases_bind(kernel, problem, x_form, y_form)

    def _gradient_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        function = _library._function(kernel.name, len(kernel.leading_ints))
        structure = _library._struct(problem, problem.layout, CONTIGUOUS, problem.threads, _library.isa())
        plain = Epilogue(None, False, None, self.slope)

        def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
            weight = self.weight
            operands = kernel.leading_ints, (ctypes.c_void_p(weight.data_ptr()),), weight
            only = KernelCall(function, structure, *operands, plain, self._bare, x_form, y_form)
            run = only.bind(x, None, out)
            if self.bias is None and not self.has_residual and self.activation is None:
                return run
            if isinstance(run, FixedCall):
                rest = self._rest(run.out, residual)
                if rest is not None:
                    return FixedCalls((run, rest), run.out)  # type: ignore[return-value]
            return lambda x, residual=None: self.finish(self._with_bias(run(x)), residual)

        return bind

    def _bare(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._linear(x, self.weight, None)

    def _with_bias(self, y: Tensor) -> Tensor:
        return y if self.bias is None else add_bias(y, self.bias)

    def _rest(self, out: Tensor, residual: Tensor | None) -> FixedCall | None:
        """Bias, residual and activation in place, as one call; None if the C library does not do that here."""
        if (residual is None) == self.has_residual or out.dtype != torch.float32:
            return None
        steps: list[pointwise.Instruction] = []
        inputs: list[Tensor] = [out]
        value: pointwise.Operand = pointwise.Input(0)
        ones = (1,) * (out.dim() - 2)
        for more in (None if self.bias_float32 is None else self.bias_float32.view(-1, *ones), residual):
            if more is not None:
                inputs.append(more)
                steps.append(("add", (value, pointwise.Input(len(inputs) - 1))))
                value = pointwise.Result(len(steps) - 1)
        if self.activation is not None:
            slope = (self.slope,) if self.activation == "leaky_relu" else ()
            steps.append((self.activation, (value, *slope)))
        bound = pointwise.bind(steps, inputs, out)
        return None if bound is None else FixedCall(bound, out, _raise)

    def _phases_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        function = _library._function(kernel.name, len(kernel.leading_ints))
        structure = _library._conv(problem, problem.layout, CONTIGUOUS, problem.threads, _library.isa())
        view = _View(*self._axes[problem], self.form.shape[1])

        def native(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return view.taken_apart(self.native(x, None if residual is None else view.put_together(residual)))

        def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None, scratch: Tensor | None = None) -> Run:
            weight = self.packed_for(kernel, problem)
            operands = kernel.leading_ints, (ctypes.c_void_p(weight.data_ptr()),), weight
            epilogue = Epilogue(self._tiled_bias(view.phases), self.has_residual, self.activation, self.slope)
            call = KernelCall(function, structure, *operands, epilogue, native, x_form, y_form)
            if out is None or view.moves_rows:
                memory = None if scratch is None else y_form.on(scratch)
                inner = call.bind(x, None if residual is None else view.taken_apart(residual), memory)
                if isinstance(inner, FixedCall) and out is not None:
                    moved = _moved(view, inner.out, out)
                    if moved is not None:
                        return FixedCalls((inner, moved), out)  # type: ignore[return-value]

                def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
                    y = view.put_together(inner(x, None if residual is None else view.taken_apart(residual)))
                    return y if out is None else out.copy_(y)

                return run
            given = None if residual is None else view.taken_apart(residual)
            inner = call.bind(x, given, view.taken_apart(out))
            if isinstance(inner, FixedCall):
                return inner  # type: ignore[return-value]
            return lambda x, residual=None: view.put_together(
                inner(x, None if residual is None else view.taken_apart(residual))
            )

        return bind

    def _tiled_bias(self, count: int) -> Tensor | None:
        if self.bias_float32 is None:
            return None
        return self._phase_bias.setdefault(count, self.bias_float32.repeat(count))


def _layout(t: Tensor) -> str:
    return CONTIGUOUS if t.is_contiguous() else CHANNELS_LAST


def _raise(status: int) -> None:
    raise RuntimeError(f"a pointwise step ended with status {status}")


def _kept(kernel: Kernel) -> Kernel:
    """The kernel on a weight that is kept: that of the phases is in no parameter."""
    return kernel if kernel.pack is not None else kernel._replace(pack=lambda weight, _: weight)


class _Axis(NamedTuple):
    """One dimension of the convolution of phases.

    Attributes:
        stride: how many phases there are.
        taps: of each filter of a phase; zeros fill those that are shorter.
        places: (phase, tap of the phase, tap of the weight).
        before: zeros before the input.
        size: results of a phase.
    """

    stride: int
    taps: int
    places: tuple[tuple[int, int, int], ...]
    before: int
    size: int


class _Phases(NamedTuple):
    problem: ConvProblem
    axes: tuple[_Axis, _Axis]

    @property
    def moves_rows(self) -> bool:
        return _moves(*self.axes)


def _moves(rows: _Axis, columns: _Axis) -> bool:
    """Whether rows of phases have to be put between each other."""
    return rows.stride > 1 and columns.size > 1


def _phases(p: ConvProblem) -> _Phases | None:
    """The convolution of all phases; None if there is none, or in this layout more would have to be moved."""
    if p.groups > 1:
        return None
    rows = _axis(p.P, p.H, p.R, p.stride_h, p.dil_h, p.pad_top)
    columns = _axis(p.Q, p.W, p.S, p.stride_w, p.dil_w, p.pad_left)
    if rows is None or columns is None:
        return None
    phases = rows.stride * columns.stride
    if phases > _MOST_PHASES or (phases > 1 and p.layout != CHANNELS_LAST):
        return None
    posed = ConvProblem(
        Direction.FORWARD, p.N, p.K, p.P, p.Q, phases * p.C, rows.taps, columns.taps, 1, 1, rows.before,
        _after(rows, p.P), columns.before, _after(columns, p.Q), dtype=p.dtype, layout=p.layout, threads=p.threads,
    )  # fmt: skip
    return _Phases(posed, (rows, columns)) if min(posed.padding) >= 0 else None


def _axis(inputs: int, results: int, taps: int, stride: int, dilation: int, before: int) -> _Axis | None:
    if inputs == 1:  # one input meets each tap once: there are as many phases as results
        stride, dilation = results, 1
    if results % stride or (dilation > 1 and taps > 1):
        return None
    # Result s q + f reads input q + place by tap r.
    found = [(f, (f + before - r) // stride, r) for f in range(stride) for r in range(taps)]
    found = [(f, place, r) for f, place, r in found if (f + before - r) % stride == 0]
    if inputs == 1:
        found = [(f, place, r) for f, place, r in found if place == 0]
    if not found:
        return None
    first = min(place for _, place, _ in found)
    places = tuple((f, place - first, r) for f, place, r in found)
    return _Axis(stride, 1 + max(u for _, u, _ in places), places, -first, results // stride)


def _after(axis: _Axis, inputs: int) -> int:
    return axis.size - 1 + axis.taps - inputs - axis.before


def _phase_weight(weight: Tensor, problem: ConvProblem, rows: _Axis, columns: _Axis) -> Tensor:
    """The weight (phases * C, K, taps, taps) of the convolution of all phases, from (K, C, R, S)."""
    K, C = weight.shape[:2]
    made = weight.new_zeros(rows.stride, columns.stride, C, K, rows.taps, columns.taps)
    for (f, u, r), (g, v, s) in itertools.product(rows.places, columns.places):
        made[f, g, :, :, u, v] = weight[:, :, r, s].t()
    return made.view(problem.weight_shape)


class _View:
    """An image (N, C, H, W) in NHWC, as that of its phases (N, phases * C, P, Q) and back: views unless rows move.

    Args:
        channels: C.
    """

    def __init__(self, rows: _Axis, columns: _Axis, channels: int) -> None:
        self.rows, self.columns, self.channels = rows, columns, channels
        self.phases = rows.stride * columns.stride
        self.moves_rows = _moves(rows, columns)

    def put_together(self, y: Tensor) -> Tensor:
        if self.phases == 1:
            return y
        N, (f, g), (p, q) = len(y), (self.rows.stride, self.columns.stride), (self.rows.size, self.columns.size)
        apart = y.permute(0, 2, 3, 1).reshape(N, p, q, f, g * self.channels).permute(0, 1, 3, 2, 4)
        return apart.reshape(N, p * f, q * g, self.channels).permute(0, 3, 1, 2)

    def taken_apart(self, y: Tensor) -> Tensor:
        if self.phases == 1:
            return y
        N, (f, g), (p, q) = len(y), (self.rows.stride, self.columns.stride), (self.rows.size, self.columns.size)
        rows = y.permute(0, 2, 3, 1).reshape(N, p, f, q, g * self.channels).permute(0, 1, 3, 2, 4)
        return rows.reshape(N, p, q, f * g * self.channels).permute(0, 3, 1, 2)


def _moved(view: _View, y: Tensor, out: Tensor) -> FixedCall | None:
    """The copy that puts rows between each other, on fixed memory."""
    if y.dtype != torch.float32:
        return None
    N, (f, g), (p, q) = len(y), (view.rows.stride, view.columns.stride), (view.rows.size, view.columns.size)
    apart = y.permute(0, 2, 3, 1).view(N, p, q, f, g * view.channels).permute(0, 1, 3, 2, 4)
    whole = out.permute(0, 2, 3, 1).view(N, p, f, q, g * view.channels)
    bound: Bound | None = pointwise.bind([("copy", (pointwise.Input(0),))], [apart], whole)
    return None if bound is None else FixedCall(bound, out, _raise)
