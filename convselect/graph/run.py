"""What the operators of `ops` do when they run, and what their results look like before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.arguments import problem_of, valid, wants_direct_sums
from convselect.aten.strides import result_strides
from convselect.base import settings as _settings
from convselect.base.lru import LRU, Entry, on_clear
from convselect.base.problem import ConvProblem, Direction, layout_of
from convselect.base.settings import CACHE_ENTRIES, Settings, exactly
from convselect.base.warnings import warn_once
from convselect.choice.choose import NATIVE, Choice, forced
from convselect.eager.execute import execute
from convselect.eager.resolve import choice_for, params_of
from convselect.kernels import _cuda_flags
from convselect.kernels.pool import BY_NAME

Sizes = Sequence[int]


class OpGeometry(NamedTuple):
    """As the operators take it: `padding` is per side (top, bottom, left, right)."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int


class Target(NamedTuple):
    """Size and strides of the tensor that a gradient is of."""

    size: Sizes
    stride: Sizes


class _Prepared(Entry):
    """One kind of operator call: its problem, the strides of the result, and what runs."""

    __slots__ = ("by_direct_sums", "choice", "problem", "strides", "watches")

    def __init__(self, problem: ConvProblem, strides: tuple[int, ...], choice: Choice, settings: Settings) -> None:
        super().__init__()
        self.problem = problem
        self.strides = strides
        self.choice = choice
        transforms = choice.per_image is not None or not BY_NAME[choice.algorithm].direct_sums
        self.watches = transforms and settings.chooses and problem.direction != Direction.BACKWARD_WEIGHT
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
    geometry: OpGeometry,
    algorithm: str,
    settings: str,
    bias: Tensor | None = None,
) -> Tensor:
    """One direction on its two operands, in the order of the algorithms' contract."""
    in_force = _settings.parse(settings) if settings else _settings.current()
    stride, padding, dilation, groups = geometry
    key = (
        direction, a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.device,
        target and (*target.size, *target.stride), *stride, *padding, *dilation, groups, algorithm, in_force,
        # What may change between two runs of a graph.
        _threads(), _deterministic(), _mkldnn_enabled(),
        _fp32_precision("mkldnn", "conv") if a.is_cpu else _cuda_flags.state(),
    )  # fmt: skip
    prepared = plans.entries.get(key)
    if prepared is None:
        x, weight = _operands(direction, a, b, target)
        found = _posed(direction, a, x, weight, geometry)
        if found is None:
            return aten(direction, a, b, target, geometry, bias)
        problem, strides = found
        prepared = _Prepared(problem, strides, _choice(problem, algorithm, in_force), in_force)
        plans.put(key, prepared)
    else:
        prepared.age = plans.clock
    choice = prepared.choice
    if prepared.watches and wants_direct_sums(b):
        choice = prepared.by_direct_sums or choice_for(prepared.problem, exactly(in_force))
        prepared.by_direct_sums = choice
    return execute(choice, a, b, prepared.problem, prepared.strides, bias)


def outline(
    direction: Direction, a: Tensor, b: Tensor, target: Target | None, geometry: OpGeometry, bias: Tensor | None = None
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
        x, weight = _operands(direction, a, b, target)
        found = _posed(direction, a, x, weight, geometry)
        if found is not None:
            problem, strides = found
            return a.new_empty_strided(problem.result_shape, strides)
    return aten(direction, a, b, target, geometry, bias)


def _operands(direction: Direction, a: Tensor, b: Tensor, target: Target | None) -> tuple[Tensor, Tensor]:
    """(x, weight); one of them, in a backward direction, a stand-in that is asked for its shape and strides only."""
    if target is None:
        return a, b
    other = torch.empty_strided(tuple(target.size), tuple(target.stride), dtype=a.dtype, device=a.device)
    return (other, b) if direction == Direction.BACKWARD_DATA else (a, other)


def _posed(
    direction: Direction, streamed: Tensor, x: Tensor, weight: Tensor, geometry: OpGeometry
) -> tuple[ConvProblem, tuple[int, ...]] | None:
    """The problem and the strides of its result; None if aten would refuse, or there is nothing to compute."""
    stride, (top, bottom, left, right), dilation, groups = geometry
    call = (tuple(stride), (0, 0), tuple(dilation), groups)
    problem = problem_of(x, weight, call)
    if problem is None:
        return None
    problem = problem._replace(pad_top=top, pad_bottom=bottom, pad_left=left, pad_right=right)
    if not valid(problem, x, weight, None, call, cast=False):
        return None
    strides = result_strides(x, weight, problem)
    if direction == Direction.FORWARD:
        return problem, strides.y
    if direction == Direction.BACKWARD_DATA:
        return problem._replace(direction=direction, layout=layout_of(streamed)), strides.grad_x
    return problem.with_direction(direction), strides.grad_weight


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
    direction: Direction, a: Tensor, b: Tensor, target: Target | None, geometry: OpGeometry, bias: Tensor | None = None
) -> Tensor:
    """One direction by aten's operators: differentiable, traceable, and with aten's errors."""
    if direction == Direction.FORWARD:
        even, rest = _split(geometry.padding)
        x = a if rest is None else F.pad(a, rest)
        stride, _, dilation, groups = geometry
        return torch.ops.aten.convolution.default(x, b, bias, stride, even, dilation, False, [0, 0], groups)  # type: ignore[no-any-return]
    assert target is not None
    other = a.new_empty_strided(tuple(target.size), tuple(target.stride))
    if direction == Direction.BACKWARD_DATA:
        return aten_backward(a, other, b, geometry, (True, False))[0]  # type: ignore[no-any-return]
    return aten_backward(b, a, other, geometry, (False, True))[1]  # type: ignore[no-any-return]


def aten_backward(grad_y: Tensor, x: Tensor, weight: Tensor, geometry: OpGeometry, needed: tuple[bool, bool]) -> Any:
    """(grad_x, grad_weight) by one call of aten's operator, None if not needed."""
    even, rest = _split(geometry.padding)
    if rest is not None:
        x = F.pad(x, rest)
    grad_x, grad_weight, _ = torch.ops.aten.convolution_backward.default(
        grad_y, x, weight, None, geometry.stride, even, geometry.dilation, False, [0, 0], geometry.groups,
        [*needed, False],
    )  # fmt: skip
    if rest is not None and grad_x is not None:
        grad_x = F.pad(grad_x, [-n for n in rest])
    return grad_x, grad_weight


def _split(padding: Sizes) -> tuple[list[int], list[int] | None]:
    """Per-side padding as aten takes it, and what `F.pad` has to add (None: nothing)."""
    top, bottom, left, right = padding
    even = [min(top, bottom), min(left, right)]
    rest = [left - even[1], right - even[1], top - even[0], bottom - even[0]]
    return even, rest if any(rest) else None
