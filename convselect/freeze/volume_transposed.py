"""A frozen transposed convolution of volumes, and the ways to run it.

The kernels for the grad-input of a convolution compute it as in eager calls, with bias, residual and activation in a
pass behind. Where the stride is the kernel's size, as U-Nets go up, each result meets one tap: a matrix product, from
(K) to (T R S C) channels per pixel. In NDHWC what row r of slice t gets is a run of memory, so T R products write to y
itself, a row of the input at a time; nothing is moved behind them, and they finish y themselves.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from convselect.aten.volumes import transposed_volume
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.base.settings import Settings
from convselect.freeze.bound import Bound
from convselect.freeze.candidates import PHASES, Candidate, Form, Run
from convselect.freeze.chains import Layer
from convselect.freeze.kernel import PRODUCT, FixedCall, FixedCalls, Kernel
from convselect.freeze.layer import admitted_kernels
from convselect.freeze.transposed import FrozenTransposed
from convselect.freeze.volume import KERNELS
from convselect.kernels import _library


class FrozenTransposedVolume(FrozenTransposed):
    """activation(conv_transpose(x) + residual); x is (N, K, O, P, Q), the weight (K, C / groups, T, R, S). Its problem
    is the grad-input of the convolution the other way round."""

    def __init__(self, layer: Layer) -> None:
        padding = layer.geometry[1]
        sides = padding if len(padding) == 6 else tuple(p for p in padding for _ in range(2))
        super().__init__(layer)
        self.sides = sides

    def problem(self, x: Tensor) -> ConvProblem | None:
        whole = transposed_volume(x, self.form, (self.stride, (0, 0, 0), self.more, self.groups, self.dilation))
        if whole is None:
            return None
        front, back, top, bottom, left, right = self.sides
        found = whole._replace(
            D=whole.D - front - back, H=whole.H - top - bottom, W=whole.W - left - right, pad_front=front,
            pad_back=back, pad_top=top, pad_bottom=bottom, pad_left=left, pad_right=right,
        )  # fmt: skip
        return found if min(found.D, found.H, found.W) > 0 and found.y_shape == x.shape else None

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pairs = [(self.sides[i], self.sides[i + 1]) for i in (0, 2, 4)]
        padding = tuple(map(min, pairs))
        x = x.contiguous()  # as in `FrozenVolume`
        y = torch.conv_transpose3d(x, weight, bias, self.stride, padding, self.more, self.groups, self.dilation)  # type: ignore[call-overload]
        for axis, ((before, after), p) in enumerate(zip(pairs, padding, strict=True), start=2):
            y = y.narrow(axis, before - p, y.shape[axis] - (before - p) - (after - p))
        return y if y.is_contiguous() else y.contiguous()

    def candidates(self, x: Tensor, residual: Tensor | None, layout: str, settings: Settings) -> list[Candidate]:
        found, problem = [self._native(layout)], self.problem(x)
        if problem is None or x.dtype != self.form.dtype or problem.dtype == "float64":
            return found
        problem = problem._replace(layout=layout, weight_layout=CONTIGUOUS)
        if residual is not None and (residual.shape != problem.x_shape or residual.dtype != x.dtype):
            return found
        shapes = problem.y_shape, problem.x_shape
        x_form, y_form = (Form.dense(shape, layout, problem.torch_dtype) for shape in shapes)
        found += self.kernel_candidates(KERNELS, problem, settings, x_form, y_form)
        return found + _rows(self, problem, settings, x_form, y_form)

    def _kernel_bind(self, kernel: Kernel, problem: ConvProblem, x_form: Form, y_form: Form) -> Any:
        return self._gradient_bind(kernel, problem, x_form, y_form)


def _rows(layer: FrozenTransposed, p: ConvProblem, settings: Settings, x: Form, y: Form) -> list[Candidate]:
    """A product per row of the input, slice and row of taps; none unless each result meets one tap."""
    steps, kernel = (p.stride_d, *p.stride), (p.T, p.R, p.S)
    plain = (p.pad_front, p.pad_back, *p.padding) == (0,) * 6 and (p.dil_d, *p.dilation) == (1, 1, 1)
    exact = (p.D, p.H, p.W) == (p.O * p.T, p.P * p.R, p.Q * p.S)
    if steps != kernel or not plain or not exact or p.groups > 1 or p.layout != CHANNELS_LAST or p.dtype != "float32":
        return []
    row = ConvProblem(
        Direction.FORWARD, 1, p.K, 1, p.Q, p.S * p.C, 1, 1, dtype=p.dtype, layout=p.layout, threads=1
    )  # fmt: skip
    found = []
    for product, grade, spreads in admitted_kernels((PRODUCT,), row, settings):
        key = ("rows", product.pack_key(row), kernel)
        bind = _Rows(layer, product, p, row, key, x, y).bind
        found.append(Candidate(f"product{PHASES}", grade, bind, key, True, False, spreads))
    return found


class _Rows:
    """The products, `cs_repeat` over the rows of the input for each row of taps."""

    def __init__(
        self, layer: FrozenTransposed, kernel: Kernel, p: ConvProblem, row: ConvProblem, key: Any, x: Form, y: Form
    ) -> None:
        self.layer, self.kernel, self.p, self.row, self.key, self.x, self.y = layer, kernel, p, row, key, x, y
        self.function = _library._function("cs_repeat", 0)
        of = _library._function(kernel.name, 0)
        self.conv = _library._conv(row, CHANNELS_LAST, CONTIGUOUS, 1, _library.isa())
        x_row, y_row = 4 * p.Q * p.K, 4 * p.W * p.C
        steps = [((p.P * x_row, x_row, 0)), (p.T * p.H * y_row, p.R * y_row, 0)]
        self.calls = _library.Repetition(
            ctypes.cast(of, ctypes.c_void_p).value, ctypes.addressof(self.conv),
            *((ctypes.c_int64 * 3)(*values) for values in ((p.N * p.O, p.P, 1), *steps)), p.threads, 0,
        )  # fmt: skip
        # Where the first row of each (t, r) is in y.
        self.places = [(t * p.H + r) * y_row for t in range(p.T) for r in range(p.R)]

    def _pack(self) -> Tensor:
        """(K, C, T, R, S) as the weight (S C, K) of a product for each (t, r)."""
        p, pack = self.p, self.kernel.pack
        assert pack is not None
        rows = self.layer.weight.permute(2, 3, 4, 1, 0).reshape(p.T * p.R, *self.row.weight_shape)
        return torch.cat([pack(one.contiguous(), self.row) for one in rows])

    def bind(self, x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
        """See `Candidate.bind`."""
        layer = self.layer
        weights = layer.packed(self.key, self._pack, in_place=True)[0]
        bias = layer._tiled_bias(self.p.S)
        code = _library.ACTIVATIONS[layer.activation]
        x = None if x is None else self.x.seen(x)
        residual = residual if residual is None or self.y.fits(residual) else None
        fixed_x, fixed_out = x, out
        per_product = 4 * weights.numel() // len(self.places)

        def calls(x: Tensor, residual: Tensor | None, out: Tensor) -> list[FixedCall]:
            made = []
            for i, place in enumerate(self.places):
                epilogue = _library.Epilogue(
                    None if bias is None else bias.data_ptr(),
                    None if residual is None else residual.data_ptr() + place, code, layer.slope,
                )  # fmt: skip
                weight, to = weights.data_ptr() + i * per_product, out.data_ptr() + place
                addresses = (ctypes.addressof(self.calls), x.data_ptr(), weight, to, ctypes.addressof(epilogue))
                bound = Bound(self.function, addresses, (self, weights, bias, x, residual, out, epilogue))
                made.append(FixedCall(bound, out, lambda _: natively(x, residual, out)))
            return made

        def natively(x: Tensor, residual: Tensor | None, out: Tensor) -> None:
            out.copy_(layer.native(x, residual))

        if x is not None and out is not None and (residual is not None or not layer.has_residual):
            return FixedCalls(tuple(calls(x, residual, out)), out)  # type: ignore[return-value]

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            x = self.x.of(x) if fixed_x is None else fixed_x
            residual = None if residual is None else self.y.of(residual)
            out = self.y.new() if fixed_out is None else fixed_out
            for call in calls(x, residual, out):
                call()
            return out

        return run
