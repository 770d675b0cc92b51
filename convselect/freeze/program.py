"""A frozen forward as a flat program: one call per step, with memory laid out beforehand."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from convselect.base.problem import ConvProblem
from convselect.freeze import pages
from convselect.freeze.arena import Wanted, laid_out
from convselect.freeze.candidates import Candidate, Form, Run
from convselect.freeze.capture import Captured
from convselect.freeze.chains import Layer, Step, meta_of, steps_of
from convselect.freeze.joining import Joining
from convselect.freeze.kernel import FixedCall, FixedCalls
from convselect.freeze.passes import Maker, fixed_call, on_any_memory
from convselect.freeze.reduce import concatenate
from convselect.freeze.registry import LAYERS, Entry, Registry
from convselect.freeze.residual import Fused, blocks
from convselect.freeze.runner import joined
from convselect.freeze.views import NO_VIEWS, shown, views_of

_aten = torch.ops.aten
# Captured for contiguous tensors; between frozen layers they may lie otherwise.
_SAME_ON_ANY_STRIDES = {_aten.view.default: _aten.reshape.default, _aten._unsafe_view.default: _aten.reshape.default}


@dataclass(eq=False)
class Walk:
    """What a walk through the steps found.

    Attributes:
        candidates: what runs each layer.
        problems: the convolution that each layer is.
        makers: steps that a function of the C library computes.
        forms: how each tensor lies in memory.
        base: a view -> the value whose memory it shows.
    """

    candidates: dict[Step, Candidate] = field(default_factory=dict)
    problems: dict[Step, ConvProblem | None] = field(default_factory=dict)
    makers: dict[Step, Maker] = field(default_factory=dict)
    forms: dict[fx.Node, Form] = field(default_factory=dict)
    base: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def note(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor):
            self.forms[node] = Form.like(value)


class Program:
    """The steps of a captured forward and the functions that they call.

    Attributes:
        layers, constants: what computes steps of these kinds.
        last_use: value -> index of the last step that reads it; the number of steps if it is part of the result.
    """

    def __init__(self, captured: Captured, registry: Registry) -> None:
        self.captured, self.registry = captured, registry
        self.steps = steps_of(captured)
        key_of = captured.constants.key
        self.layers = {step: registry.layer(step.target, key_of) for step in self.steps if step.kind in LAYERS}
        self.constants = {
            step.out: registry.constant(step.out, key_of) for step in self.steps if step.kind == "constant"
        }
        self.reads = registry.reads(captured.reads) if captured.reads else None
        self.last_use = self._last_use()

    def entries(self) -> list[Entry]:
        """What it has in the registry."""
        return [*self.layers.values(), *self.constants.values(), *([] if self.reads is None else [self.reads])]

    @property
    def result_nodes(self) -> list[fx.Node]:
        return nodes_in(self.captured.results)

    @property
    def digest(self) -> str:
        """The operations, without the values of constants: the same for another model of the same architecture."""
        parts = []
        for step in self.steps:
            target = step.target
            what = [target.activation, target.residual] if isinstance(target, Layer) else str(target)
            parts.append(f"{step.kind} {what} {step.args} {step.kwargs} {getattr(step.out.meta['val'], 'shape', None)}")
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def weights_digest(self) -> str:
        """Some values of all folded weights: other ones for another model of the same architecture."""
        found = hashlib.blake2b(digest_size=8)
        for layer in self.layers.values():
            found.update(layer.first_values)
        return found.hexdigest()

    def _last_use(self) -> dict[fx.Node, int]:
        last_use: dict[fx.Node, int] = {}
        for i, step in enumerate(self.steps):
            for node in nodes_in((step.args, step.kwargs)):
                last_use[node] = i
        for node in self.result_nodes:
            last_use[node] = len(self.steps)
        return last_use

    def function(self, step: Step) -> Callable[..., Any]:
        """What this step calls on operands of any form, layers left out."""
        if step.kind == "pointwise":
            return on_any_memory(step.target, step.args)
        if step.kind == "constant":
            constant = self.constants[step.out]
            return lambda: constant.value
        if step.kind == "read":
            owner, key = step.out.meta["source"]
            return lambda: owner[key]
        if step.target is _aten.as_strided.default:
            return _with_captured_strides(step)
        return _SAME_ON_ANY_STRIDES.get(step.target, step.target)  # type: ignore[no-any-return]

    # ---- blocks -------------------------------------------------------------------------------------------------

    def blocks(self) -> list[tuple[Step, ...]]:
        """What may run as one call: see `residual.blocks`."""
        users: dict[fx.Node, list[Step | None]] = {}
        for step in self.steps:
            for node in nodes_in((step.args, step.kwargs)):
                users.setdefault(node, []).append(step)
        for node in self.result_nodes:
            users.setdefault(node, []).append(None)
        whole = {step: layer for step, layer in self.layers.items() if step.permuted is None}
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

    # ---- one function -------------------------------------------------------------------------------------------

    def compiled(self, candidates: Mapping[Step, Candidate], walk: Walk) -> Callable[..., Any]:
        """The steps as one Python function that owns its intermediates: not for two calls at a time. Its attribute
        `laid_out_bytes` says how much memory it keeps for them."""
        binding = _Binding(self, candidates, walk)
        functions, fixed = binding.functions, binding.fixed
        together = joined([functions.get(step) for step in self.steps if step in functions])
        running = [step for step in self.steps if step in functions]
        scope: dict[str, Any] = {}
        names: dict[fx.Node, str] = {node: f"v{i}" for i, node in enumerate(self.captured.inputs)}
        lines = [f"def run({', '.join(names.values())}):"]
        for i, (node, t) in enumerate(fixed.items()):
            names[node] = f"s{i}"
            scope[names[node]] = t
        position = {step: i for i, step in enumerate(self.steps)}
        for i, step in enumerate(running):
            if i in together:
                run = together[i][1]
                if run is not None:
                    scope[f"f{i}"] = run
                    lines.append(f"    f{i}()")
                continue
            scope[f"f{i}"] = functions[step]
            arguments = [_source(a, names, scope) for a in step.args]
            arguments += [f"{key}={_source(value, names, scope)}" for key, value in step.kwargs.items()]
            call = f"f{i}({', '.join(arguments)})"
            used = {names[node] for node in nodes_in((step.args, step.kwargs)) if self.last_use[node] == position[step]}
            if step.out in fixed:
                lines.append(f"    {call}")
            else:
                names[step.out] = f"r{i}"
                lines.append(f"    r{i} = {call}")
                if step.out not in self.last_use:
                    used.add(f"r{i}")
            # As in the model itself, memory is free after its last use.
            dead = {name for name in used if name not in scope}
            if dead:
                lines.append(f"    del {', '.join(sorted(dead))}")
        leaves = [
            f"{names[leaf]}.clone()" if binding.is_overwritten(leaf) else _source(leaf, names, scope)
            for leaf in self.captured.results
        ]
        if self.captured.spec.is_leaf():
            lines.append(f"    return {leaves[0]}")
        else:
            scope["put_together"], scope["spec"] = pytree.tree_unflatten, self.captured.spec
            lines.append(f"    return put_together([{', '.join(leaves)}], spec)")
        exec("\n".join(lines), scope)
        scope["run"].laid_out_bytes = binding.n_bytes
        return scope["run"]  # type: ignore[no-any-return]


class _Binding:
    """What each step calls, and the memory that is laid out for values, shared by those that are never alive together
    (see `arena`). Parts of concatenations lie in them (see `joining`).

    Attributes:
        fixed: value -> memory that is the same at every call.
        functions: what steps call; those without one have nothing to do.
        n_bytes: of all memory laid out.
    """

    def __init__(self, program: Program, candidates: Mapping[Step, Candidate], walk: Walk) -> None:
        self._program, self._candidates, self._walk = program, candidates, walk
        self.fixed: dict[fx.Node, Tensor] = {}
        self.functions: dict[Step, Callable[..., Any]] = {}
        self._last: dict[fx.Node, int] = {}
        self._joining = Joining(program.steps, program.result_nodes, candidates, walk)
        for node, i in program.last_use.items():
            base = self._base(node)
            self._last[base] = max(i, self._last.get(base, -1))
        self._returned = {self._base(node) for node in program.result_nodes}
        self._starts, self.n_bytes = laid_out(self._wanted())
        self._block = pages.empty(self.n_bytes)
        for step in program.steps:
            self._bind(step)

    def is_overwritten(self, leaf: Any) -> bool:
        """Whether this part of the result lies in memory that the next call writes to."""
        return isinstance(leaf, fx.Node) and (leaf in self.fixed or self._base(leaf) in self.fixed)

    def _base(self, node: fx.Node) -> fx.Node:
        while node in self._walk.base:
            node = self._walk.base[node]
        place = self._joining.places.get(node)
        return node if place is None else place.root

    def _wanted(self) -> dict[fx.Node | Step, Wanted]:
        """What memory is laid out for: values, concatenations that they are parts of, and what steps need beside."""
        wanted: dict[fx.Node | Step, Wanted] = {}
        for i, step in enumerate(self._program.steps):
            base = self._base(step.out)
            if self._has_memory(step) and base not in wanted:
                joined = step.out in self._joining.places
                n_bytes = self._joining.n_bytes(base) if joined else self._walk.forms[base].n_bytes
                wanted[base] = Wanted(n_bytes, i, max(i, self._last.get(base, i)))
            candidate = self._candidates.get(step)
            if candidate is not None and candidate.scratch_bytes:
                wanted[step] = Wanted(candidate.scratch_bytes, i, i)
        return wanted

    def _has_memory(self, step: Step) -> bool:
        """Whether the step writes to memory that is laid out for its result."""
        if step in self._candidates:
            return self._candidates[step].writes_out and self._base(step.out) not in self._returned
        return step.out not in self._program.constants and step in self._walk.makers

    def _bind(self, step: Step) -> None:
        fixed, function = self.fixed, self._program.function
        if step in self._candidates:
            self._bind_layer(step, self._candidates[step])
        elif step.out in self._program.constants:
            fixed[step.out] = self._program.constants[step.out].value
        elif step in self._walk.makers:
            nodes = nodes_in((step.args, step.kwargs))
            out = fixed[step.out] = self._memory(step.out)
            maker, there = self._walk.makers[step], self._joining.there(step)
            if there is not None:
                maker = functools.partial(concatenate, dim=1, there=there)
            if there is None or len(there) < len(nodes):
                forms = [self._walk.forms[node] for node in nodes]
                self.functions[step] = fixed_call(
                    maker, [fixed.get(node) for node in nodes], forms, out, _flat(step, function(step))
                )
        elif step.out in self._walk.base and self._walk.base[step.out] in fixed:
            arguments = fx.map_arg((step.args, step.kwargs), lambda node: fixed.get(node, node))
            if nodes_in(arguments):
                self.functions[step] = function(step)
            else:
                fixed[step.out] = function(step)(*arguments[0], **arguments[1])
        else:
            self.functions[step] = function(step)

    def _bind_layer(self, step: Step, candidate: Candidate) -> None:
        x, residual = (*step.args, None)[:2]
        views = views_of(step)
        fixed_x, fixed_residual = self.fixed.get(x), self.fixed.get(residual)  # type: ignore[arg-type]
        out = None
        if self._has_memory(step):
            out = self._memory(step.out)
        given_x = None if fixed_x is None else shown(fixed_x, views.of_x(fixed_x))
        given_residual = shown(fixed_residual, views.of_residual(fixed_residual))
        operands = [given_x, given_residual, views.of_residual(out)]
        if candidate.scratch_bytes:
            operands.append(self._block[self._starts[step] :][: candidate.scratch_bytes])
        run: Run = candidate.bind(*operands)
        if views is not NO_VIEWS and not isinstance(run, FixedCall | FixedCalls):
            inner = run
            run = lambda x, residual=None: views.of_result(inner(views.of_x(x), views.of_residual(residual)))  # noqa: E731
        self.functions[step] = run
        if out is not None:
            self.fixed[step.out] = out

    def _memory(self, node: fx.Node) -> Tensor:
        """Memory for this value until its last use, that of views included."""
        form = self._walk.forms[node]
        memory = self._block[self._starts[self._base(node)] :]
        if node in self._joining.places:
            return self._joining.memory(node, memory)
        return memory[: form.n_bytes].view(form.dtype).as_strided(form.shape, form.strides)


def _flat(step: Step, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with the values of the nodes in the step's arguments one after another."""
    nodes = nodes_in((step.args, step.kwargs))

    def run(*values: Any) -> Any:
        by_node = dict(zip(nodes, values, strict=True))
        args, kwargs = fx.map_arg((step.args, step.kwargs), by_node.__getitem__)
        return function(*args, **kwargs)

    return run


def _with_captured_strides(step: Step) -> Callable[..., Any]:
    form = Form.like(meta_of(step.args[0]))

    def run(x: Tensor, *rest: Any, **options: Any) -> Any:
        if x.stride() != form.strides:
            x = torch.empty_strided(form.shape, form.strides, dtype=x.dtype, device=x.device).copy_(x)
        return step.target(x, *rest, **options)

    return run


def _source(value: Any, names: dict[fx.Node, str], scope: dict[str, Any]) -> str:
    """An expression for an argument; constants become globals of the function."""
    if isinstance(value, fx.Node):
        return names[value]
    if not nodes_in(value):
        name = f"c{len(scope)}"
        scope[name] = value
        return name
    if isinstance(value, list | tuple):
        inner = "".join(f"{_source(v, names, scope)}, " for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    assert isinstance(value, dict)
    inner = "".join(f"{k!r}: {_source(v, names, scope)}, " for k, v in value.items())
    return f"{{{inner}}}"


def nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found
