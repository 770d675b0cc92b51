"""How inputs of one kind are computed: a program, the layout between its layers, and what runs each layer.

Planning walks through the steps on real values and lets every layer choose among its candidates, once with NCHW and
once with NHWC between the layers. The program that is faster from end to end stays, or neither if the model itself is
faster. In NHWC, blocks of two or three convolutions may run as one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from convselect.base.lru import Entry
from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.base.settings import Settings
from convselect.base.timing import Timing
from convselect.freeze.accuracy import Limits
from convselect.freeze.candidates import LONG_US, Candidate, OtherForm, distance, timed, timed_once
from convselect.freeze.chains import Step
from convselect.freeze.layer import FrozenLayer, Search
from convselect.freeze.passes import maker_of
from convselect.freeze.program import Program, Walk, nodes_in
from convselect.freeze.progress import bar
from convselect.freeze.remembered import Key, Remembered
from convselect.freeze.residual import Fused, fuse
from convselect.freeze.views import views_of

_AS_IT_WAS = "eager"
_ROUNDS = 9
_CLEARLY = 1.5  # the model itself is timed once if it is slower by this factor
_DEADLINE_S = 2.0
# Relative L2 distance between the frozen output and the model's own, a safety net behind the checks of each step.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Plan(Entry):
    """How inputs of one kind are computed.

    Attributes:
        layout: the layout between the layers; None if the model itself was faster, and runs.
        program: its steps; None if the model itself runs.
        chosen: name of the layer -> name of its candidate.
        packs: keys of the packed weights that it uses.
        distances: of its results from the model's own when it was planned, leaf by leaf.
        tiles: the tile size of each layer, 0 without Winograd.
        laid_out_bytes: of the memory for intermediates, once per concurrent call.
        eager_us, frozen_us: medians of the whole forward in us when it was planned; None if it was not measured.
    """

    __slots__ = (
        "_make", "_pool", "_restore", "_watch_input", "chosen", "distances", "eager_us", "frozen_us", "laid_out_bytes",
        "layout", "packs", "program", "tiles",
    )  # fmt: skip

    def __init__(self, layout: str | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.chosen: dict[str, str] = {}
        self.program: Program | None = None
        self.packs: dict[FrozenLayer, set[Hashable]] = {}
        self.eager_us: float | None = None
        self.frozen_us: float | None = None
        self.distances: list[float] = []
        self.tiles: list[int] = []
        self.laid_out_bytes = 0
        self._make: Callable[[], Callable[..., Any]] | None = None
        self._pool: list[Callable[..., Any]] = []
        self._restore: list[tuple[torch.Size, tuple[int, ...]] | None] | None = None
        self._watch_input = False

    @property
    def weights_bytes(self) -> int:
        """Bytes of folded and packed weights that its layers keep now, for other plans too."""
        return sum(layer.kept_bytes for layer in self.packs)

    def run(self, tensors: tuple[Tensor, ...], eager: Callable[[], Any]) -> Any:
        """The model's result, with the strides the model itself gives it.

        Args:
            tensors: those among the arguments.
            eager: the model itself, with these arguments.
        """
        make, pool = self._make, self._pool
        if make is None or (self._watch_input and not _is_finite(tensors)):
            return eager()
        # Each concurrent call has a function of its own, since these own their intermediates.
        try:
            function = pool.pop()
        except IndexError:
            function = make()
        try:
            result = function(*tensors)
            if self._restore is not None:
                result = _restored(result, self._restore)
        except OtherForm:
            return eager()
        finally:
            pool.append(function)
        return result


def make_plan(
    program: Program,
    tensors: tuple[Tensor, ...],
    expected: Any,
    eager: Callable[[], Any],
    settings: Settings,
    remembered: Remembered,
    layouts: tuple[str, ...],
    measure: bool,
    in_use: list[Plan],
) -> Plan:
    """The fastest way to compute what `eager` computes for arguments like these.

    Args:
        tensors: copies of the tensors among the arguments: planning may overwrite them.
        expected: the model's own result for them.
        layouts: which to try between the layers.
        remembered, measure: see `Search`; without measuring, the first layout that computes the right thing is taken.
        in_use: other plans, whose packed weights must stay.
    """
    key = _network_key(program, tensors, settings)
    known = None if key is None else remembered.get(key)
    if known == _AS_IT_WAS:
        return Plan()
    limits_key = None if key is None else key._replace(kind="tiles", form=f"{key.form} {program.weights_digest}")
    limits = Limits(program, tensors, expected, settings, remembered, limits_key)
    plans: dict[str, Plan] = {}
    other_us: list[float] | None = None
    tried = (known,) if known in layouts else layouts
    with bar(len(tried) * len(program.layers), "freezing") as tick:
        for layout in tried:
            pinned = [plan.packs for plan in (*in_use, *plans.values())]
            search = Search(settings, remembered, measure, tick, took_us=[], other_us=other_us)
            plan = None
            if layout == known and limits.known:
                trusting = search._replace(trusted=True)
                plan = _accurate_plan(program, tensors, expected, trusting, layout, limits, pinned)
            if plan is None:
                plan = _accurate_plan(program, tensors, expected, search, layout, limits, pinned)
            if plan is not None:
                plans[layout] = plan
                if not measure or layout == known:
                    return plan
                # In two dimensions blocks of layers, which run as one call in NHWC, may still catch up.
                if any(layer.layer.kind.endswith("volume") for layer in program.layers.values()):
                    other_us = search.took_us
    if not plans:
        return Plan()
    functions: dict[str, Callable[[], Any]] = {_AS_IT_WAS: eager}
    for layout, plan in plans.items():
        functions[layout] = lambda plan=plan: plan.run(tensors, eager)  # type: ignore[misc]
    timings = _compared(functions)
    best = min(timings, key=lambda name: timings[name].p20_us)
    if key is not None:
        remembered.put(key, best)
    chosen = plans.get(best, Plan())
    program.registry.pin_packs([plan.packs for plan in (*in_use, chosen)])
    chosen.eager_us, chosen.frozen_us = timings[_AS_IT_WAS].median_us, timings[best].median_us
    return chosen


def _compared(functions: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
    """Times of the model itself and of the plans."""
    eager = functions[_AS_IT_WAS]
    _, eager_us = timed_once(eager)  # not its first call, which the capture was
    if eager_us > LONG_US:
        plans = {name: function for name, function in functions.items() if name != _AS_IT_WAS}
        timings = timed(plans, _ROUNDS, _DEADLINE_S / 2)
        if eager_us > _CLEARLY * min(timing.median_us for timing in timings.values()):
            return {_AS_IT_WAS: Timing((eager_us,)), **timings}
    return timed(functions, _ROUNDS, _DEADLINE_S)


def _network_key(program: Program, tensors: tuple[Tensor, ...], settings: Settings) -> Key | None:
    """What the choice of a layout is for: these operations on tensors of these kinds."""
    for step, layer in program.layers.items():
        node = step.args[0].meta["val"]
        problem = layer.problem(views_of(step).of_x(torch.empty(node.shape, dtype=node.dtype, device="cpu")))
        if problem is not None:
            kinds = " ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in tensors)
            return Key("network", problem, f"{program.digest} {kinds}", settings)
    return None


def _accurate_plan(
    program: Program,
    tensors: tuple[Tensor, ...],
    expected: Any,
    search: Search,
    layout: str,
    limits: Limits,
    pinned: list[dict[FrozenLayer, set[Hashable]]],
) -> Plan | None:
    """As `_plan_with_layout`, with tiles as small as the network needs them; None if that is not enough."""
    while True:
        program.registry.pin_packs(pinned)
        plan = _plan_with_layout(program, tensors, expected, search, layout, limits)
        if plan is None:
            return None
        if search.trusted:
            return plan if limits.are_met(plan.distances) else None
        program.registry.pin_packs([*pinned, plan.packs])
        if limits.admit(plan.distances, plan.tiles, layout):
            wanted = zip(plan.distances, pytree.tree_leaves(expected), strict=True)
            return plan if all(d <= _tolerance(want) for d, want in wanted) else None


def _plan_with_layout(
    program: Program, tensors: tuple[Tensor, ...], expected: Any, search: Search, layout: str, limits: Limits
) -> Plan | None:
    """The plan with this layout between the layers; None if its result is not of the expected kind."""
    walk = _choose_each(program, tensors, search, layout, limits)
    if walk is None:
        return None
    running, runs = program, walk.candidates
    if layout == CHANNELS_LAST:
        running, runs = _with_blocks(program, walk, search)
    plan = Plan(layout)
    plan.program = program
    for step, candidate in walk.candidates.items():
        plan.chosen[_unused(step.target.name, plan.chosen)] = candidate.name
        plan.packs.setdefault(program.layers[step], set()).add(candidate.pack)
    plan._watch_input = any(candidate.wants_finite for candidate in walk.candidates.values())
    plan._make = lambda: running.compiled(runs, walk)
    function: Any = plan._make()
    plan.laid_out_bytes = function.laid_out_bytes
    got_leaves, got_spec = pytree.tree_flatten(function(*tensors))
    want_leaves, want_spec = pytree.tree_flatten(expected)
    if want_spec != got_spec or not all(map(_same_kind, got_leaves, want_leaves)):
        return None
    plan.distances = [_distance(got, want) for got, want in zip(got_leaves, want_leaves, strict=True)]
    plan.tiles = [candidate.tile for candidate in walk.candidates.values()]
    forms = [(want.shape, want.stride()) if isinstance(want, Tensor) else None for want in want_leaves]
    if any(form is not None and got.stride() != form[1] for got, form in zip(got_leaves, forms, strict=True)):
        plan._restore = forms
    return plan


def _unused(name: str, names: Collection[str]) -> str:
    """This name, numbered if a layer before was called so: a module may be called twice."""
    numbered = (name, *(f"{name} ({i})" for i in range(2, len(names) + 2)))
    return next(one for one in numbered if one not in names)


def _choose_each(
    program: Program, tensors: tuple[Tensor, ...], search: Search, layout: str, limits: Limits
) -> Walk | None:
    """Run the steps one by one and let each layer choose; None if a layer's operands are of a kind it does not take, or
    the other layout is ahead."""
    values: dict[fx.Node, Any] = dict(zip(program.captured.inputs, tensors, strict=True))
    walk = Walk()
    search.took_us.clear()
    for node, value in values.items():
        walk.note(node, value)
    for i, step in enumerate(program.steps):
        operands, options = fx.map_arg((step.args, step.kwargs), values.__getitem__)
        layer = program.layers.get(step)
        if layer is None:
            value = program.function(step)(*operands, **options)
            read = [values[node] for node in nodes_in((step.args, step.kwargs))]
            maker = None if step.kind in ("constant", "read") else maker_of(step, read, value)
            if maker is not None:
                walk.makers[step] = maker
        else:
            views = views_of(step)
            x, residual = (*operands, None)[:2]
            if not isinstance(x, Tensor) or not isinstance(residual, Tensor | None):
                return None
            x, residual = views.of_x(x), views.of_residual(residual)
            if not _is_ours(x, step.kind):
                return None
            problem = layer.problem(x)
            walk.problems[step] = None if problem is None else problem._replace(layout=layout)
            walk.candidates[step], y = layer.choose(x, residual, layout, search, limits.of(step))
            if search.is_behind:
                return None
            value = views.of_result(y)
            search.tick()
        values[step.out] = value
        walk.note(step.out, value)
        if step not in program.layers and step not in walk.makers:
            memory = _memory(value)
            shown = [node for node in nodes_in((step.args, step.kwargs)) if memory & _memory(values[node])]
            if shown:
                walk.base[step.out] = shown[0]
        for node in nodes_in((step.args, step.kwargs)):
            if program.last_use[node] == i:
                values.pop(node, None)
    return walk


def _memory(value: Any) -> set[int]:
    """Addresses of the memory that a value, or a part of it, lies in."""
    return {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(value) if isinstance(t, Tensor)}


def _with_blocks(program: Program, walk: Walk, search: Search) -> tuple[Program, dict[Step, Candidate]]:
    """The program with one step per block that is faster so, and its candidates; updates `walk.candidates`."""
    fused: list[Fused] = []
    taken: set[Step] = set()
    for steps in program.blocks():
        if steps[0] in taken:
            steps = steps[1:]  # the last layer of one block may be the first of the next: a block without it is left
        if len(steps) > 1 and taken.isdisjoint(steps):
            block = fuse(steps, program.layers, walk.problems, walk.candidates, search)
            if block is not None:
                fused.append(block)
                taken.update(steps)
    if not fused:
        return program, walk.candidates
    for block in fused:
        for step, pack in zip(block.steps, block.packs, strict=True):
            walk.candidates[step] = replace(block.candidate, pack=pack)
    running, one = program.with_blocks(fused)
    return running, {**walk.candidates, **one}


def _is_ours(x: Tensor, kind: str) -> bool:
    dims = 5 if kind.endswith("volume") else 4
    return (x.dim() > 1 if kind == "linear" else x.dim() == dims) and x.numel() > 0 and x.is_cpu


def _same_kind(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor):
        return type(got) is type(want) and bool(got == want)
    return isinstance(got, Tensor) and got.dtype == want.dtype and got.shape == want.shape


def _distance(got: Any, want: Any) -> float:
    return distance(got, want) if isinstance(want, Tensor) and want.is_floating_point() else 0.0


def _tolerance(want: Any) -> float:
    return _TOLERANCE.get(want.dtype, 0.0) if isinstance(want, Tensor) else 0.0


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


def _is_finite(tensors: tuple[Tensor, ...]) -> bool:
    return all(
        math.isfinite(t.sum(dtype=torch.float32 if t.element_size() == 2 else None).item())
        for t in tensors
        if t.is_floating_point()
    )


__all__ = ["CHANNELS_LAST", "CONTIGUOUS", "Plan", "Program", "make_plan"]
