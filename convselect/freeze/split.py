"""Long filters of one row as the sum of two shorter ones, each by Winograd's algorithm.

    sum over s < S of w[s] x[q + s]  =  sum over s < a of w[s] x[q + s]  +  sum over s < S - a of w[a + s] x[q + a + s]

The C kernels have Winograd's algorithm for 2, 3, 5 and 7 taps of a row; vocoders have filters of 11 (HiFi-GAN: Kong et
al. 2020, arXiv 2010.05646). Two kernels multiply 4.2 times per result where a direct sum multiplies 11 times. The
second one adds the first one's result as its residual.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.freeze.candidates import Bind, Candidate, Form, Run, admitted
from convselect.freeze.kernel import Epilogue, FixedCall, FixedCalls, KernelCall
from convselect.freeze.layer import FrozenLayer
from convselect.kernels import _library
from convselect.kernels.pool import BY_NAME

# Taps of a row -> those of the two filters, the last of which may be filled with zeros.
_PARTS = {8: (5, 3), 9: (5, 5), 10: (5, 5), 11: (7, 5), 12: (7, 5), 13: (7, 7), 14: (7, 7)}
_TILES = ({7: 4, 5: 4, 3: 4}, {7: 4, 5: 6, 3: 6})


class _Part(NamedTuple):
    """One of the two filters.

    Attributes:
        first: its first tap.
        problem: of the shorter filter. Its padding is negative where it reads no place near an edge.
        tile: of its kernel.
    """

    first: int
    problem: ConvProblem
    tile: int


def candidates(layer: FrozenLayer, problem: ConvProblem, settings: Settings, x: Form, y: Form) -> list[Candidate]:
    """The two sums, with the tiles that the budgets admit; none if this is no such filter.

    Args:
        x, y: the forms of its operands.
    """
    p = problem
    if (
        p.S not in _PARTS
        or p.dtype != "float32"
        or (p.R, p.P, p.stride_w, p.groups) != (1, 1, 1, 1)
        or not _library.available()
    ):
        return []
    found: list[Candidate] = []
    for tiles in _TILES:
        first, second = _parts(p, tiles)
        names = [f"winograd{part.tile}" for part in (first, second)]
        if not all(
            admitted(BY_NAME[n], part.problem, settings) for n, part in zip(names, (first, second), strict=True)
        ):
            continue
        # Errors are those of the larger tile.
        widest = max((second, first), key=lambda part: part.tile)
        algorithm, name = BY_NAME[f"winograd{widest.tile}"], f"winograd{widest.tile}_split"
        if any(c.name == name for c in found):
            continue
        key = ("split", p.S)
        bind = _bind(layer, p, (first, second), key, x, y)
        grade = algorithm.error_grade(widest.problem)
        found.append(Candidate(name, grade, bind, key, True, False, True, y.n_bytes))
    return found


def _parts(p: ConvProblem, tiles: dict[int, int]) -> tuple[_Part, _Part]:
    first, made = 0, []
    for taps in _PARTS[p.S]:
        left = p.pad_left - first * p.dil_w
        right = p.Q - 1 + p.dil_w * (taps - 1) + 1 - p.W - left
        made.append(_Part(first, p._replace(S=taps, pad_left=left, pad_right=right), tiles[taps]))
        first += taps
    return made[0], made[1]


def _bind(
    layer: FrozenLayer, p: ConvProblem, parts: tuple[_Part, _Part], key: tuple[str, int], x_form: Form, y_form: Form
) -> Bind:
    first, second = parts
    function = _library._function("cs_winograd", 1)
    structures = [_library._conv(part.problem, p.layout, CONTIGUOUS, p.threads, _library.isa()) for part in parts]

    def pack() -> Tensor:
        end = second.first + second.problem.S
        filled = F.pad(layer.weight, (0, end - p.S))
        return torch.cat([filled[..., : second.first].flatten(), filled[..., second.first :].flatten()])

    def first_natively(x: Tensor, residual: Tensor | None = None) -> Tensor:
        padded = F.pad(x, (first.problem.pad_left, first.problem.pad_right))
        y = torch.conv2d(padded, layer.weight[..., : second.first], None, 1, 0, p.dilation)
        return y if residual is None else y.add_(residual)

    def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None, scratch: Tensor | None = None) -> Run:
        weights = layer.packed(key, pack, in_place=True)[0]
        start = weights.data_ptr()
        addresses = [ctypes.c_void_p(start), ctypes.c_void_p(start + 4 * p.K * p.C * second.first)]
        own = [residual]  # of the whole layer

        def natively(x: Tensor, _: Tensor | None = None) -> Tensor:
            return layer.native(x, own[0])

        epilogues = (
            Epilogue(None, layer.has_residual, None, layer.slope),
            Epilogue(layer.bias_float32, True, layer.activation, layer.slope),
        )
        one, two = (
            KernelCall(function, structure, (part.tile,), (address,), weights, epilogue, native, x_form, y_form)
            for structure, part, address, epilogue, native in zip(
                structures, parts, addresses, epilogues, (first_natively, natively), strict=True
            )
        )
        half = None if scratch is None else y_form.on(scratch)
        before, after = one.bind(x, residual, half), two.bind(x, half, out)
        if isinstance(before, FixedCall) and isinstance(after, FixedCall):
            return FixedCalls((before, after), after.out)  # type: ignore[return-value]

        def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
            own[0] = residual
            return after(x, before(x, residual))

        return run

    return bind
