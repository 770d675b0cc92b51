"""What the operators of `ops` do when they run, and what their results look like before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.arguments import problem_of, transposed_problem, valid, wants_direct_sums
from convselect.aten.strides import result_strides, transposed_strides
from convselect.aten.volumes import (
    folded,
    folded_strides,
    rows_of,
    transposed_volume,
    transposed_volume_strides,
    unfolded,
    volume_of,
    volume_strides,
)
from convselect.base import settings as _settings
from convselect.base.lru import LRU, Entry, on_clear
from convselect.base.problem import ConvProblem, Direction, layout_of
from convselect.base.settings import CACHE_ENTRIES, Settings, exactly
from convselect.base.volumes import image_of
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE, Choice, forced
from convselect.eager.execute import execute
from convselect.eager.resolve import choice_for, params_of
from convselect.kernels import _cuda_flags
from convselect.kernels.pool import BY_NAME

Sizes = Sequence[int]
FORWARD, BACKWARD_DATA, BACKWARD_WEIGHT = Direction.FORWARD, Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHT


class OpGeometry(NamedTuple):
    """As the operators take it: `padding` is per side (top, bottom, left, right), of volumes after (front, back)."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int

    @property
    def transposed(self) -> bool:
        return False


class TransposedOpGeometry(NamedTuple):
    """The same of transposed convolutions: `padding` is per dimension, as aten's."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int
    output_padding: Sizes

    @property
    def transposed(self) -> bool:
        return True


AnyGeometry = OpGeometry | TransposedOpGeometry


class Target(NamedTuple):
    """Size and strides of the tensor that a gradient is of."""

    size: Sizes
    stride: Sizes


class _Posed(NamedTuple):
    """What an operator call is to the pool."""

    problem: ConvProblem
    strides: tuple[int, ...]
    """Of the result, as the algorithms compute it."""
    folds: bool
    """Whether the operands are volumes, and the problem is that of images which they are on views."""
    rows: tuple[int, int] | None
    """(H, W) of such operands, which are one dimension of the image; see `aten.volumes.rows_of`."""


class _Prepared(Entry):
    """One kind of operator call: its problem, the strides of the result, and what runs."""

    __slots__ = ("by_direct_sums", "choice", "posed", "watches")

    def __init__(self, posed: _Posed, choice: Choice, settings: Settings) -> None:
        super().__init__()
        self.posed = posed
        self.choice = choice
        transforms = choice.per_image is not None or not BY_NAME[choice.algorithm].direct_sums
        self.watches = transforms and settings.chooses and posed.problem.direction != BACKWARD_WEIGHT
        """Whether to look at every weight: some may run by direct sums only."""
        self.by_direct_sums: Choice | None = None


plans = LRU(CACHE_ENTRIES)
on_clear(plans.clear)
_threads = torch.get_num_threads
_deterministic: Any = torch._C._get_deterministic_algorithms
_mkldnn_enabled: Any = torch._C._get_mkldnn_enabled
_fp32_precision: Any = torch._C._get_fp32_precision_getter


def run(
    direction: Direction,
    a: Tensor,
    b: Tensor,
    target: Target | None,
    geometry: AnyGeometry,
    algorithm: str,
    settings: str,
    bias: Tensor | None = None,
) -> Tensor:
    """One direction on its two operands, in the order of the algorithms' contract; of a transposed convolution, too, in
    its own words: forward (input, weight), gradient of the input (grad_output, weight), of the weight (input,
    grad_output)."""
    in_force = _settings.parse(settings) if settings else _settings.current()
    stride, padding, dilation, groups, *more = geometry
    key = (
        direction, a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.device,
        target and (*target.size, *target.stride), *stride, *padding, *dilation, groups,
        bool(more), *(more[0] if more else ()), algorithm, in_force,
        # What may change between two runs of a graph.
        _threads(), _deterministic(), _mkldnn_enabled(),
        _fp32_precision("mkldnn", "conv") if a.is_cpu else _cuda_flags.state(),
    )  # fmt: skip
    prepared = plans.entries.get(key)
    if prepared is None:
        posed = _posed(direction, a, b, target, geometry)
        if posed is None:
            return aten(direction, a, b, target, geometry, bias)
        prepared = _Prepared(posed, _choice(posed.problem, algorithm, in_force), in_force)
        plans.put(key, prepared)
    else:
        prepared.age = plans.clock
    choice, (problem, strides, folds, rows) = prepared.choice, prepared.posed
    if prepared.watches and wants_direct_sums(b):
        choice = prepared.by_direct_sums or choice_for(problem, exactly(in_force))
        prepared.by_direct_sums = choice
    if geometry.transposed and direction == BACKWARD_WEIGHT:
        a, b = b, a  # the convolution the other way round streams the gradient
    if not folds:
        return execute(choice, a, b, problem, strides, bias)
    result = execute(choice, folded(a, rows), folded(b, rows), problem, strides, bias)
    return unfolded(result, rows and ((1, 1) if direction == BACKWARD_WEIGHT else rows))


def outline(
    direction: Direction, a: Tensor, b: Tensor, target: Target | None, geometry: AnyGeometry, bias: Tensor | None = None
) -> Tensor:
    """The result's size, strides and dtype: what `run` returns, without the values. With symbolic sizes aten's own
    answer, which differs at most if a dimension has size one."""
    numbers = (
        *a.shape,
        *a.stride(),
        *b.shape,
        *b.stride(),
        *(() if target is None else (*target.size, *target.stride)),
    )
    if all(type(n) is int for n in numbers):
        found = _with_strides(direction, a, b, target, geometry)
        if found is not None:
            problem, strides = found
            shape = _y_shape(problem, geometry, a.dim()) if target is None else tuple(target.size)
            return a.new_empty_strided(shape, strides)
    return aten(direction, a, b, target, geometry, bias)


def _y_shape(p: ConvProblem, geometry: AnyGeometry, dimensions: int) -> tuple[int, ...]:
    """The result's; a problem of one slice does not know whether that is a volume."""
    channels, size = (p.C, (p.D, p.H, p.W)) if geometry.transposed else (p.K, (p.O, p.P, p.Q))
    return (p.N, channels, *size[5 - dimensions :])


def _posed(direction: Direction, a: Tensor, b: Tensor, target: Target | None, geometry: AnyGeometry) -> _Posed | None:
    """What the pool is asked; None if aten would refuse, or there is nothing to compute."""
    found = _with_strides(direction, a, b, target, geometry)
    if found is None:
        return None
    problem, strides = found
    image = image_of(problem) if a.dim() == 5 else None
    if image is None:
        return _Posed(problem, strides, folds=False, rows=None)
    rows = rows_of(*_operands(direction, a, b, target))
    return _Posed(image, folded_strides(strides, rows), folds=True, rows=rows)


def _operands(direction: Direction, a: Tensor, b: Tensor, target: Target | None) -> tuple[Tensor, Tensor]:
    """(x, weight); one of them, in a backward direction, a stand-in that is asked for its shape and strides only."""
    if target is None:
        return a, b
    other = torch.empty_strided(tuple(target.size), tuple(target.stride), dtype=a.dtype, device=a.device)
    return (other, b) if direction == BACKWARD_DATA else (a, other)


def _with_strides(
    direction: Direction, a: Tensor, b: Tensor, target: Target | None, geometry: AnyGeometry
) -> tuple[ConvProblem, tuple[int, ...]] | None:
    """The problem, of volumes if the operands are, and the strides of its result."""
    x, weight = _operands(direction, a, b, target)
    volumes = x.dim() == 5
    if isinstance(geometry, TransposedOpGeometry):
        stride, padding, dilation, groups, output_padding = geometry
        call: Any = (tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation))
        problem = (transposed_volume if volumes else transposed_problem)(x, weight, call)
    else:
        stride, padding, dilation, groups = geometry
        call = (tuple(stride), (0,) * len(stride), tuple(dilation), groups)
        problem = (volume_of if volumes else problem_of)(x, weight, call)
        if problem is not None:
            sides: Any = dict(zip(_SIDES[-len(padding) :], padding, strict=True))
            problem = problem._replace(**sides)
    if problem is None or not valid(problem, x, weight, None, call, cast=False):
        return None
    strides = _STRIDES[volumes, geometry.transposed](x, weight, problem)
    if direction == FORWARD:
        return problem, strides.y
    if direction == BACKWARD_WEIGHT:
        streamed = layout_of(b) if geometry.transposed else problem.layout
        return problem._replace(direction=direction, layout=streamed), strides.grad_weight
    other = FORWARD if geometry.transposed else direction
    return problem._replace(direction=other, layout=layout_of(a)), strides.grad_x


_SIDES = ("pad_front", "pad_back", "pad_top", "pad_bottom", "pad_left", "pad_right")
_STRIDES: dict[tuple[bool, bool], Any] = {
    (False, False): result_strides,
    (False, True): transposed_strides,
    (True, False): volume_strides,
    (True, True): transposed_volume_strides,
}


def _choice(problem: ConvProblem, algorithm: str, settings: Settings) -> Choice:
    """The algorithm named, if it applies: the machine may be another than the one that traced."""
    if not algorithm:
        return choice_for(problem, settings)
    if settings.policy == algorithm:
        return forced(problem, algorithm, BY_NAME)
    known = BY_NAME.get(algorithm)
    reason = "There is no such algorithm here." if known is None else known.why_not(problem)
    if reason is None:
        return Choice(algorithm, "memory", params_of(algorithm, problem, settings))
    warn_once(f"graph:{algorithm}", f"convselect: a graph asks for {algorithm}; native runs instead. {reason}")
    return Choice(NATIVE, "fallback")


# ---- aten -----------------------------------------------------------------------------------------------------------


def aten(
    direction: Direction,
    a: Tensor,
    b: Tensor,
    target: Target | None,
    geometry: AnyGeometry,
    bias: Tensor | None = None,
) -> Tensor:
    """One direction by aten's operators: differentiable, traceable, and with aten's errors."""
    if direction == FORWARD:
        even, rest, more = _paddings(geometry)
        x = a if rest is None else F.pad(a, rest)
        stride, dilation, groups = geometry.stride, geometry.dilation, geometry.groups
        return torch.ops.aten.convolution.default(  # type: ignore[no-any-return]
            x, b, bias, stride, even, dilation, geometry.transposed, more, groups
        )
    assert target is not None
    other = a.new_empty_strided(tuple(target.size), tuple(target.stride))
    if direction == BACKWARD_DATA:
        return aten_backward(a, other, b, geometry, (True, False))[0]  # type: ignore[no-any-return]
    return aten_backward(b, a, other, geometry, (False, True))[1]  # type: ignore[no-any-return]


def aten_backward(grad_y: Tensor, x: Tensor, weight: Tensor, geometry: AnyGeometry, needed: tuple[bool, bool]) -> Any:
    """(grad_x, grad_weight) by one call of aten's operator, None if not needed."""
    even, rest, more = _paddings(geometry)
    if rest is not None:
        x = F.pad(x, rest)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
        grad_y, x, weight, None, geometry.stride, even, geometry.dilation, geometry.transposed, more, geometry.groups,
        [*needed, False],
    )  # fmt: skip
    if rest is not None and grad_x is not None:
        grad_x = F.pad(grad_x, [-n for n in rest])
    return grad_x, grad_weight


def _paddings(geometry: AnyGeometry) -> tuple[list[int], list[int] | None, list[int]]:
    """The padding as aten takes it, what `F.pad` has to add (None: nothing), and the output padding."""
    if isinstance(geometry, TransposedOpGeometry):
        return [*geometry.padding], None, [*geometry.output_padding]
    sides = list(zip(geometry.padding[::2], geometry.padding[1::2], strict=True))
    even = [min(side) for side in sides]
    rest = [n - min(side) for side in reversed(sides) for n in side]
    return even, rest if any(rest) else None, [0] * len(even)
