"""Convolutions of volumes in NDHWC slice by slice, by the kernels of images, whose weights are packed once.

A slice (H, W, C) of such a volume is an image, and

    y_o = sum over t < T of conv(x_i, w_t),  i = o * stride + t * dilation - padding

With one tap along the depth, all slices are one batch of images. Else each slice of results stays in the caches while
its taps are added up: each call but the first adds the last one's result as its residual, and the last one has bias
and activation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.freeze.bound import Bound
from convselect.freeze.candidates import Candidate, Form, Run, finish
from convselect.freeze.kernel import DEPTHWISE, DIRECT, GROUPED, KERNELS, PRODUCT, FixedCall, FixedCalls, Kernel
from convselect.freeze.layer import FrozenLayer, admitted_kernels
from convselect.kernels import _library

_ENDING = "_slices"


class _Call(NamedTuple):
    """One call: which slice of x (batch and depth together) and which tap; the slice of y, and whether it is written
    to the scratch memory in its place; whether it is the slice's first and last."""

    slice: int
    tap: int
    result: int
    aside: bool
    is_first: bool
    is_last: bool


def candidates(layer: FrozenLayer, problem: ConvProblem, settings: Settings, x: Form, y: Form) -> list[Candidate]:
    """The kernels of images that compute this layer so; none if it is in another layout.

    Args:
        x, y: the forms of its operands.
    """
    p = problem
    if p.layout != CHANNELS_LAST or p.dtype != "float32":
        return []
    together = p.T == p.stride_d == 1 and p.pad_front == p.pad_back == 0
    image = p._replace(D=1, T=1, stride_d=1, pad_front=0, pad_back=0, dil_d=1, N=p.N * p.D if together else 1)
    calls = [_Call(0, 0, 0, False, True, True)] if together else list(_calls(p))
    if len({call.result for call in calls}) < (1 if together else p.N * p.O):
        return []  # slices that meet padding only
    # Sums over taps would add up what transforms round; and their transforms of x would be made again for each tap.
    kernels = KERNELS if p.T == 1 else (DEPTHWISE, GROUPED, DIRECT, PRODUCT)
    found: list[Candidate] = []
    for kernel, grade, spreads in admitted_kernels(kernels, image, settings):
        key = ("slices", kernel.pack_key(image), p.T)
        bind = _Slices(layer, kernel, p, image, calls, key, x, y).bind
        name = f"{kernel.label or kernel.algorithm}{_ENDING}"
        scratch = y.n_bytes // (p.N * p.O) if p.T > 1 else 0
        found.append(Candidate(name, grade, bind, key, True, False, spreads, scratch))
    return found


def _calls(p: ConvProblem) -> Iterator[_Call]:
    for n in range(p.N):
        for o in range(p.O):
            first = o * p.stride_d - p.pad_front
            taps = [t for t in range(p.T) if 0 <= first + t * p.dil_d < p.D]
            for j, t in enumerate(taps):
                last = len(taps) - 1
                aside = (last - j) % 2 == 1  # the last one writes to y
                yield _Call(n * p.D + first + t * p.dil_d, t, n * p.O + o, aside, j == 0, j == last)


class _Slices:
    """The calls of one kernel."""

    def __init__(
        self, layer: FrozenLayer, kernel: Kernel, p: ConvProblem, image: ConvProblem, calls: list[_Call], key: Any,
        x: Form, y: Form,
    ) -> None:  # fmt: skip
        self.layer, self.kernel, self.p, self.image, self.calls, self.key = layer, kernel, p, image, calls, key
        self.x, self.y = x, y
        self.function = _library._function(kernel.name, len(kernel.leading_ints))
        self.conv = _library._conv(image, CHANNELS_LAST, CONTIGUOUS, p.threads, _library.isa())
        self.steps = 4 * image.H * image.W * p.C, 4 * image.P * image.Q * p.K  # bytes from slice to slice

    def _pack(self) -> Tensor:
        of = self.layer.weight.view(self.p.weight_shape).unbind(2)
        pack = self.kernel.pack
        return torch.cat([(w.contiguous() if pack is None else pack(w.contiguous(), self.image)).flatten() for w in of])

    def bind(self, x: Tensor | None, residual: Tensor | None, out: Tensor | None, scratch: Tensor | None = None) -> Run:
        """See `Candidate.bind`."""
        weights = self.layer.packed(self.key, self._pack, in_place=True)[0]
        if x is not None:
            x = self.x.seen(x)
        if residual is not None and not self.y.fits(residual):
            residual = None
        if x is not None and out is not None and (residual is not None or not self.layer.has_residual):
            if scratch is None and self.p.T > 1:
                scratch = torch.empty(self.steps[1], dtype=torch.uint8)
            fixed = [self._fixed(one, x, residual, out, scratch, weights) for one in self._made(weights)]
            if len(fixed) == 1:
                return fixed[0]._replace(out=out)  # type: ignore[return-value]
            return FixedCalls(tuple(fixed), out)  # type: ignore[return-value]
        fixed_x, fixed_out, made = x, out, self._made(weights)

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            x = self.x.of(x) if fixed_x is None else fixed_x
            residual = None if residual is None else self.y.of(residual)
            out = self.y.new() if fixed_out is None else fixed_out
            aside = scratch
            if aside is None and self.p.T > 1:
                aside = torch.empty(self.steps[1], dtype=torch.uint8)
            for one in made:
                call, arguments = self._bound(one, x, residual, out, aside)
                status = self.function(*arguments)
                if status:
                    self._natively(call, status, x, residual, out, aside)
            return out

        return run

    def _made(self, weights: Tensor) -> list[tuple[_Call, int, _library.Epilogue]]:
        """Each call with the address of its weight and an epilogue without its residual."""
        layer, per_tap, made = self.layer, 4 * weights.numel() // self.p.T, []
        bias = None if layer.bias_float32 is None else layer.bias_float32.data_ptr()
        for call in self.calls:
            e = _library.Epilogue(
                bias if call.is_last else None, None, _library.ACTIVATIONS[layer.activation if call.is_last else None],
                layer.slope,
            )  # fmt: skip
            made.append((call, weights.data_ptr() + call.tap * per_tap, e))
        return made

    def _bound(
        self, one: tuple[_Call, int, Any], x: Tensor, residual: Tensor | None, out: Tensor, scratch: Tensor | None
    ) -> tuple[_Call, tuple[Any, ...]]:
        """The call's arguments on this memory."""
        call, weight, epilogue = one
        from_x, at = x.data_ptr() + call.slice * self.steps[0], call.result * self.steps[1]
        places = [out.data_ptr() + at, 0 if scratch is None else scratch.data_ptr()]
        if not call.is_first:
            epilogue.residual = places[not call.aside]
        elif residual is not None:
            epilogue.residual = residual.data_ptr() + at
        leading = (ctypes.byref(self.conv), *self.kernel.leading_ints)
        return call, (*leading, from_x, weight, places[call.aside], ctypes.byref(epilogue))

    def _fixed(
        self, one: Any, x: Tensor, residual: Tensor | None, out: Tensor, scratch: Tensor | None, weights: Tensor
    ) -> FixedCall:
        call, arguments = self._bound(one, x, residual, out, scratch)
        bound = Bound(self.function, arguments, (weights, x, residual, out, scratch, self.conv, one))
        return FixedCall(bound, out, lambda status: self._natively(call, status, x, residual, out, scratch))

    def _natively(
        self, call: _Call, status: int, x: Tensor, residual: Tensor | None, out: Tensor, scratch: Tensor | None
    ) -> None:
        """Raises NotImplementedError if the kernel declined for another reason than memory or values not finite."""
        if status not in (_library.NO_MEMORY, _library.NONFINITE):
            raise NotImplementedError(f"{self.function.__name__} does not take {tuple(self.image.x_shape)}")
        layer, p = self.layer, self.image
        images, results = x.transpose(1, 2).flatten(0, 1), out.transpose(1, 2).flatten(0, 1)
        before = None if residual is None else residual.transpose(1, 2).flatten(0, 1)
        given = images[call.slice :][: p.N]
        to = results[call.result :][: p.N]
        aside = None if scratch is None else self._image_on(scratch)
        if not call.is_first:
            added: Tensor | None = to if call.aside else aside
        else:
            added = None if before is None else before[call.result :][: p.N]
        padded = F.pad(given, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom))
        weight = layer.weight.view(self.p.weight_shape)[:, :, call.tap]
        bias = layer.bias if call.is_last else None
        y = torch.conv2d(padded.contiguous(), weight.contiguous(), bias, p.stride, 0, p.dilation, p.groups)  # type: ignore[call-overload]
        y = finish(y, added, layer.activation if call.is_last else None, layer.slope)
        where = aside if call.aside else to
        assert where is not None
        where.copy_(y)

    def _image_on(self, memory: Tensor) -> Tensor:
        return Form.dense(self.image.y_shape, CHANNELS_LAST, self.x.dtype).on(memory)
