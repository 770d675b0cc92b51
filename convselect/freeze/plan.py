"""How inputs of one kind are computed: a program, the layout between its layers, and what runs each layer.

Planning walks through the steps on real values and lets every layer choose among its candidates, once with NCHW and
once with NHWC between the layers. The program that is faster from end to end stays, or neither if the model itself is
faster. In NHWC, blocks of two or three convolutions may run as one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from convselect.base.lru import Entry
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.freeze.candidates import Candidate, OtherForm, distance, timed
from convselect.freeze.capture import Step
from convselect.freeze.layer import Search
from convselect.freeze.program import Program, nodes_in, permutations
from convselect.freeze.residual import fuse

_ROUNDS = 9
_DEADLINE_S = 2.0
# Relative L2 distance between the frozen output and the model's own, a safety net behind the checks of each step.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Plan(Entry):
    """How inputs of one kind are computed.

    Attributes:
        layout: the layout between the layers; None if the model itself was faster, and runs.
        chosen: name of the layer -> name of its candidate.
        eager_us, frozen_us: medians of the whole forward in us when it was planned; None if it was not measured.
    """

    __slots__ = (
        "_make", "_pool", "_restore", "_watch_input", "candidates", "chosen", "eager_us", "frozen_us",
        "layout",
    )  # fmt: skip

    def __init__(self, layout: str | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.chosen: dict[str, str] = {}
        self.candidates: dict[Step, Candidate] = {}
        self.eager_us: float | None = None
        self.frozen_us: float | None = None
        self._make: Callable[[], Callable[..., Any]] | None = None
        self._pool: list[Callable[..., Any]] = []
        self._restore: list[tuple[torch.Size, tuple[int, ...]] | None] | None = None
        self._watch_input = False

    def run(self, args: tuple[Any, ...], eager: Callable[..., Any]) -> Any:
        """The model's result, with the strides the model itself gives it."""
        make, pool = self._make, self._pool
        if make is None or (self._watch_input and not _is_finite(args)):
            return eager(*args)
        # Each concurrent call has a function of its own, since these own their intermediates.
        try:
            function = pool.pop()
        except IndexError:
            function = make()
        try:
            result = function(*args)
            if self._restore is not None:
                result = _restored(result, self._restore)
        except OtherForm:
            return eager(*args)
        finally:
            pool.append(function)
        return result


def make_plan(
    program: Program,
    args: tuple[Any, ...],
    expected: Any,
    eager: Callable[..., Any],
    settings: Settings,
    remembered: dict[Any, str],
    layouts: tuple[str, ...],
    measure: bool,
    in_use: list[Plan],
) -> Plan:
    """The fastest way to compute what `eager` computes for arguments like these.

    Args:
        args: copies: planning may overwrite them.
        expected: the model's own result for them.
        layouts: which to try between the layers.
        remembered, measure: see `Search`; without measuring, the first layout that computes the right thing is taken.
        in_use: other plans, whose packed weights must stay.
    """
    plans: dict[str, Plan] = {}
    for layout in layouts:
        program.pin_packs([plan.candidates for plan in (*in_use, *plans.values())])
        plan = _plan_with_layout(program, args, expected, Search(settings, remembered, measure), layout)
        if plan is not None:
            plans[layout] = plan
            if not measure:
                return plan
    if not plans:
        return Plan()
    functions: dict[str, Callable[[], Any]] = {"eager": lambda: eager(*args)}
    for layout, plan in plans.items():
        functions[layout] = lambda plan=plan: plan.run(args, eager)  # type: ignore[misc]
    timings = timed(functions, _ROUNDS, _DEADLINE_S)
    best = min(timings, key=lambda name: timings[name].p20_us)
    chosen = plans.get(best, Plan())
    program.pin_packs([plan.candidates for plan in (*in_use, chosen)])
    chosen.eager_us, chosen.frozen_us = timings["eager"].median_us, timings[best].median_us
    return chosen


class _Walk(NamedTuple):
    """What a walk through the steps found: layers' candidates, the problems they pose, results on the meta device."""

    candidates: dict[Step, Candidate]
    problems: dict[Step, ConvProblem | None]
    shapes: dict[fx.Node, Tensor]


def _plan_with_layout(
    program: Program, args: tuple[Any, ...], expected: Any, search: Search, layout: str
) -> Plan | None:
    """The plan with this layout between the layers; None if its result is not the expected one."""
    walk = _choose_each(program, args, search, layout)
    if walk is None:
        return None
    running, runs = program, walk.candidates
    if layout == CHANNELS_LAST:
        running, runs = _with_blocks(program, walk, search)
    plan = Plan(layout)
    plan.candidates = walk.candidates
    plan.chosen = {step.target.name: candidate.name for step, candidate in walk.candidates.items()}
    plan._watch_input = any(candidate.wants_finite for candidate in walk.candidates.values())
    plan._make = lambda: running.compiled(runs, walk.shapes)
    got_leaves, got_spec = pytree.tree_flatten(plan._make()(*args))
    want_leaves, want_spec = pytree.tree_flatten(expected)
    if want_spec != got_spec or not all(map(_close, got_leaves, want_leaves)):
        return None
    forms = [(want.shape, want.stride()) if isinstance(want, Tensor) else None for want in want_leaves]
    if any(form is not None and got.stride() != form[1] for got, form in zip(got_leaves, forms, strict=True)):
        plan._restore = forms
    return plan


def _choose_each(program: Program, args: tuple[Any, ...], search: Search, layout: str) -> _Walk | None:
    """Run the steps one by one and let each layer choose; None if a layer's operands are of a kind it does not take."""
    values: dict[fx.Node, Any] = dict(zip(program.traced.inputs, args, strict=True))
    walk = _Walk({}, {}, {})
    for i, step in enumerate(program.steps):
        operands = fx.map_arg(step.args, values.__getitem__)
        layer = program.layers.get(step)
        if layer is None:
            values[step.out] = program.functions[step](*operands, **fx.map_arg(step.kwargs, values.__getitem__))
        else:
            x, residual = (*operands, None)[:2]
            if not _is_ours(x, step.kind) or not (residual is None or isinstance(residual, Tensor)):
                return None
            forth, back = permutations(step)
            problem = layer.problem(x)
            walk.problems[step] = None if problem is None else problem._replace(layout=layout)
            residual = None if residual is None else back(residual)
            walk.candidates[step], y = layer.choose(x, residual, layout, search)
            values[step.out] = forth(y)
            walk.shapes[step.out] = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        for node in nodes_in((step.args, step.kwargs)):
            if program.last_use[node] == i:
                values.pop(node, None)
    return walk


def _with_blocks(program: Program, walk: _Walk, search: Search) -> tuple[Program, dict[Step, Candidate]]:
    """The program with one step per block that is faster so, and its candidates; updates `walk.candidates`."""
    found = (fuse(steps, program.layers, walk.problems, walk.candidates, search) for steps in program.blocks())
    fused = [block for block in found if block is not None]
    if not fused:
        return program, walk.candidates
    for block in fused:
        for step, pack in zip(block.steps, block.packs, strict=True):
            walk.candidates[step] = replace(block.candidate, pack=pack)
    running, one = program.with_blocks(fused)
    return running, {**walk.candidates, **one}


def _is_ours(x: Any, kind: str) -> bool:
    return isinstance(x, Tensor) and (x.dim() == 4 if kind == "conv" else x.dim() > 1) and x.numel() > 0 and x.is_cpu


def _close(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor):
        return type(got) is type(want) and bool(got == want)
    if not isinstance(got, Tensor) or got.dtype != want.dtype:
        return False
    if not want.is_floating_point():
        return got.shape == want.shape
    return distance(got, want) <= _TOLERANCE.get(want.dtype, 0.0)


def _restored(result: Any, forms: list[tuple[torch.Size, tuple[int, ...]] | None]) -> Any:
    if isinstance(result, Tensor):
        return _with_form(result, forms[0])
    leaves, spec = pytree.tree_flatten(result)
    return pytree.tree_unflatten([_with_form(t, form) for t, form in zip(leaves, forms, strict=True)], spec)


def _with_form(t: Any, form: tuple[torch.Size, tuple[int, ...]] | None) -> Any:
    """With these strides. Raises OtherForm if it does not have this shape."""
    if form is None:
        return t
    if t.shape != form[0]:
        raise OtherForm
    if t.stride() == form[1]:
        return t
    return torch.empty_strided(*form, dtype=t.dtype, device=t.device).copy_(t)


def _is_finite(args: tuple[Any, ...]) -> bool:
    return all(
        math.isfinite(t.sum(dtype=torch.float32 if t.element_size() == 2 else None).item())
        for t in args
        if isinstance(t, Tensor) and t.is_floating_point()
    )


__all__ = ["CHANNELS_LAST", "CONTIGUOUS", "Plan", "Program", "make_plan"]
