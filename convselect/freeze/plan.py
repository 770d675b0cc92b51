"""A frozen forward for inputs of one kind: a flat program, one call per step, with memory laid out beforehand.

Planning walks through the steps on real values, lets every convolution choose among its candidates, and does so once
for NCHW and once for NHWC between the layers; whichever program is faster from end to end stays, and neither if the
model itself is. In NHWC, blocks of three convolutions may run as one call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from convselect.freeze.capture import Step, Traced, keeps_no_view
from convselect.freeze.chains import is_boundary
from convselect.freeze.conv import FrozenConv
from convselect.freeze.layer import Candidate, FrozenLayer, OtherForm, Run, distance, timed
from convselect.freeze.linear import FrozenLinear
from convselect.freeze.pool import mean_of
from convselect.freeze.residual import Fused, blocks, fuse
from convselect.lru import Entry
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.settings import Settings

_ROUNDS = 9
_DEADLINE_S = 2.0
# Relative L2 distance between the frozen output and the model's own, a safety net behind the checks of each step.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Program:
    """Traced steps with everything they call bound: what all plans of one forward share."""

    def __init__(self, root: nn.Module, traced: Traced) -> None:
        self.root = root
        self.traced = traced
        self.steps = _needed(traced)
        self.layers: dict[Step, FrozenLayer] = {}
        self.functions: dict[Step, Callable[..., Any]] = {}
        for step in self.steps:
            if step.kind == "conv":
                self.layers[step] = FrozenConv(step.target)
            elif step.kind == "linear":
                self.layers[step] = FrozenLinear(step.target)
            else:
                self.functions[step] = _bound(step, root)
        self.last_use = self._last_use()
        self.reusable = self._reusable()

    def _last_use(self) -> dict[fx.Node, int]:
        last_use: dict[fx.Node, int] = {}
        for i, step in enumerate(self.steps):
            for node in _nodes((step.args, step.kwargs)):
                last_use[node] = i
        for node in _nodes(self.traced.result):
            last_use[node] = len(self.steps)
        return last_use

    def blocks(self) -> list[tuple[Step, ...]]:
        """What may run as one call: see `_freeze_residual.blocks`."""
        users: dict[fx.Node, list[Step | None]] = {}
        for step in self.steps:
            for node in _nodes((step.args, step.kwargs)):
                users.setdefault(node, []).append(step)
        for node in _nodes(self.traced.result):
            users.setdefault(node, []).append(None)
        whole = {step: layer for step, layer in self.layers.items() if getattr(step.target, "permuted", None) is None}
        return list(blocks(self.steps, whole, users))

    def with_blocks(self, fused: list[Fused]) -> tuple[Program, dict[Step, Candidate]]:
        """A program in which each of these blocks is one step, and the candidates of those steps."""
        program, one = copy.copy(self), {}
        inner = {step for block in fused for step in block.steps[:-1]}
        for block in fused:
            first, last = block.steps[0], block.steps[-1]
            one[last] = Step(last.out, last.kind, last.target, (first.args[0], *last.args[1:]))
        program.steps = [one.get(step, step) for step in self.steps if step not in inner]
        program.layers = {one.get(step, step): layer for step, layer in self.layers.items() if step not in inner}
        program.last_use = program._last_use()
        return program, {one[block.steps[-1]]: block.candidate for block in fused}

    @property
    def finite(self) -> bool:
        return all(layer.finite for layer in self.layers.values())

    def hold(self, plans: list[Plan]) -> None:
        """Keep the packed weights that these plans use, and no others."""
        for step, layer in self.layers.items():
            layer.hold({plan.candidates[step].pack for plan in plans if step in plan.candidates})

    def _reusable(self) -> set[fx.Node]:
        """Values that are gone when the program ends: nobody returns one, keeps it or makes a view of it."""
        private = {step.out: keeps_no_view(step, self.root) for step in self.steps}
        returned = set(_nodes(self.traced.result))
        users: dict[fx.Node, list[fx.Node]] = {step.out: [] for step in self.steps}
        for step in self.steps:
            for node in _nodes((step.args, step.kwargs)):
                users.setdefault(node, []).append(step.out)
        return {
            step.out
            for step in self.layers
            if step.out not in returned and all(private[user] for user in users[step.out])
        }


class Plan(Entry):
    """How inputs of one kind are computed.

    Attributes:
        layout: the layout between the layers; None where the model itself was faster, and runs.
        chosen: name of the convolution -> name of its candidate.
        eager_us, frozen_us: medians of the whole forward when it was planned; None where it was not measured.
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
        # Each concurrent call has a program of its own, since programs own their intermediates.
        try:
            program = pool.pop()
        except IndexError:
            program = make()
        try:
            result = program(*args)
            if self._restore is not None:
                result = _restored(result, self._restore)
        except OtherForm:
            return eager(*args)
        finally:
            pool.append(program)
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
        measure: False takes the first layout that computes the right thing, and remembered candidates.
        in_use: other plans, whose packed weights must stay.
    """
    plans: dict[str, Plan] = {}
    for layout in layouts:
        program.hold([*in_use, *plans.values()])
        plan = _plan(program, args, expected, settings, remembered, layout, measure)
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
    program.hold([*in_use, chosen])
    chosen.eager_us, chosen.frozen_us = timings["eager"].median_us, timings[best].median_us
    return chosen


def _plan(
    program: Program,
    args: tuple[Any, ...],
    expected: Any,
    settings: Settings,
    remembered: dict[Any, str],
    layout: str,
    measure: bool,
) -> Plan | None:
    """The plan with this layout between the layers; None if its result is not the expected one."""
    traced = program.traced
    values: dict[fx.Node, Any] = dict(zip(traced.inputs, args, strict=True))
    candidates: dict[Step, Candidate] = {}
    shapes: dict[fx.Node, Tensor] = {}
    problems: dict[Step, ConvProblem | None] = {}
    for i, step in enumerate(program.steps):
        operands = fx.map_arg(step.args, values.__getitem__)
        if step in program.layers:
            x, residual = operands[0], operands[1] if len(operands) > 1 else None
            if not _is_ours(x, step.kind) or not (residual is None or isinstance(residual, Tensor)):
                return None
            forth, back = _permutations(step)
            if residual is not None:
                residual = back(residual)
            layer = program.layers[step]
            problem = layer.problem(x)
            problems[step] = None if problem is None else problem._replace(layout=layout)
            candidate, y = layer.choose(x, residual, layout, settings, remembered, measure)
            candidates[step], values[step.out] = candidate, forth(y)
            shapes[step.out] = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="meta")
        else:
            values[step.out] = program.functions[step](*operands, **fx.map_arg(step.kwargs, values.__getitem__))
        for node in _nodes((step.args, step.kwargs)):
            if program.last_use[node] == i:
                values.pop(node, None)
    plan = Plan(layout)
    running, runs = program, candidates
    if layout == CHANNELS_LAST:
        found = [
            fuse(steps, program.layers, problems, candidates, settings, remembered, measure)
            for steps in program.blocks()
        ]
        fused = [block for block in found if block is not None]
        if fused:
            for block in fused:
                for step, pack in zip(block.steps, block.packs, strict=True):
                    candidates[step] = replace(block.candidate, pack=pack)
            running, one = program.with_blocks(fused)
            runs = {**candidates, **one}
    plan.candidates = candidates
    plan.chosen = {step.target.name: candidate.name for step, candidate in candidates.items()}
    plan._watch_input = any(candidate.wants_finite for candidate in candidates.values())
    plan._make = lambda: _compiled(running, runs, shapes)
    got = plan._make()(*args)
    want_leaves, want_spec = pytree.tree_flatten(expected)
    got_leaves, got_spec = pytree.tree_flatten(got)
    if want_spec != got_spec or not all(map(_close, got_leaves, want_leaves)):
        return None
    forms = [(want.shape, want.stride()) if isinstance(want, Tensor) else None for want in want_leaves]
    if any(form is not None and got.stride() != form[1] for got, form in zip(got_leaves, forms, strict=True)):
        plan._restore = forms
    return plan


def _is_ours(x: Any, kind: str) -> bool:
    return isinstance(x, Tensor) and (x.dim() == 4 if kind == "conv" else x.dim() > 1) and x.numel() > 0 and x.is_cpu


def _permutations(step: Step) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """From a layer's result to the value of its step, and from the step's residual to the layer's."""
    dims = getattr(step.target, "permuted", None)
    if dims is None:
        return _same, _same
    inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
    return lambda t: t.permute(dims), lambda t: t.permute(inverse)


def _same(t: Tensor) -> Tensor:
    return t


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
    """With these strides. Raises OtherForm where it does not have this shape."""
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


# ---- compiling ------------------------------------------------------------------------------------------------------


def _nodes(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found


def _needed(traced: Traced) -> list[Step]:
    """Without parameters that were read for what is now folded."""
    used = set(_nodes((traced.result, [(step.args, step.kwargs) for step in traced.steps])))
    return [step for step in traced.steps if step.kind != "attribute" or step.out in used]


def _bound(step: Step, root: nn.Module) -> Callable[..., Any]:
    if step.kind == "module":
        module = root.get_submodule(step.target)
        # Without hooks a call is its forward; that none were added is checked at every call of the whole.
        if is_boundary(module):
            return module
        return mean_of(module) or module.forward
    if step.kind == "method":
        name = step.target
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    if step.kind == "attribute":
        owner_name, _, attribute = step.target.rpartition(".")
        owner = root.get_submodule(owner_name)
        return lambda: getattr(owner, attribute)
    return step.target  # type: ignore[no-any-return]


def _compiled(program: Program, candidates: dict[Step, Candidate], shapes: dict[fx.Node, Tensor]) -> Callable[..., Any]:
    """The steps as one Python function with intermediates of its own: not for two calls at a time."""
    fixed = _fixed_results(program, candidates, shapes)
    scope: dict[str, Any] = {}
    names: dict[fx.Node, str] = {node: f"v{i}" for i, node in enumerate(program.traced.inputs)}
    parameters = ", ".join(names.values())
    lines = [f"def run({parameters}):"]
    for i, step in enumerate(program.steps):
        function: Callable[..., Any]
        if step in candidates:
            x, residual = (*step.args, None)[:2]
            forth, back = _permutations(step)
            if forth is _same:
                function = candidates[step].bind(fixed.get(x), fixed.get(residual), fixed.get(step.out))  # type: ignore[arg-type]
            else:
                function = _permuting(candidates[step].bind(fixed.get(x), None, None), forth, back)  # type: ignore[arg-type]
        else:
            function = program.functions[step]
        scope[f"f{i}"] = function
        names[step.out] = f"r{i}"
        arguments = [_source(a, names, scope) for a in step.args]
        arguments += [f"{key}={_source(value, names, scope)}" for key, value in step.kwargs.items()]
        lines.append(f"    r{i} = f{i}({', '.join(arguments)})")
        # As in the model itself, memory is free after its last use.
        dead = {names[node] for node in _nodes((step.args, step.kwargs)) if program.last_use[node] == i}
        if step.out not in program.last_use:
            dead.add(f"r{i}")
        if dead:
            lines.append(f"    del {', '.join(sorted(dead))}")
    lines.append(f"    return {_source(program.traced.result, names, scope)}")
    exec(compile("\n".join(lines), "<convselect.freeze>", "exec"), scope)
    return scope["run"]  # type: ignore[no-any-return]


def _permuting(run: Run, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Run:
    return lambda x, residual: forth(run(x, back(residual)))


def _source(value: Any, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
    """An expression for an argument; what is no value of the program becomes a global of the function."""
    if isinstance(value, fx.Node):
        return names[value]
    if not _nodes(value):
        name = f"c{len(scope)}"
        scope[name] = value
        return name
    if isinstance(value, list | tuple):
        inner = "".join(f"{_source(v, names, scope)}, " for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        inner = "".join(f"{k!r}: {_source(v, names, scope)}, " for k, v in value.items())
        return f"{{{inner}}}"
    assert isinstance(value, slice)
    return f"slice({', '.join(_source(v, names, scope) for v in (value.start, value.stop, value.step))})"


def _fixed_results(
    program: Program, candidates: dict[Step, Candidate], shapes: dict[fx.Node, Tensor]
) -> dict[fx.Node, Tensor]:
    """Memory for the results that can be written to memory given beforehand, shared by those that are never alive
    together. First fit in the order of the steps."""
    fixed: dict[fx.Node, Tensor] = {}
    free: list[Tensor] = []
    held: dict[fx.Node, Tensor] = {}
    for i, step in enumerate(program.steps):
        permuted = getattr(step.target, "permuted", None) is not None
        if step in candidates and candidates[step].writes_out and step.out in program.reusable and not permuted:
            shape = shapes[step.out]
            n_bytes = shape.numel() * shape.element_size()
            fitting = [block for block in free if block.numel() >= n_bytes]
            block = min(fitting, key=Tensor.numel) if fitting else _block(n_bytes)
            free = [other for other in free if other is not block]
            held[step.out] = block
            fixed[step.out] = block[:n_bytes].view(shape.dtype).as_strided(shape.shape, shape.stride())
        for node in {*_nodes((step.args, step.kwargs)), step.out}:
            if node in held and program.last_use.get(node, i) <= i:
                free.append(held.pop(node))
    return fixed


def _block(n_bytes: int) -> Tensor:
    return torch.empty(-(-n_bytes // 64) * 64, dtype=torch.uint8, device="cpu")


__all__ = ["CHANNELS_LAST", "CONTIGUOUS", "Plan", "Program", "make_plan"]
