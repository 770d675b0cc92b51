"""A frozen forward as a flat program: one call per step, with memory laid out beforehand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from convselect.freeze.candidates import Candidate, Run
from convselect.freeze.capture import Step, Traced, keeps_no_view
from convselect.freeze.chains import is_boundary
from convselect.freeze.conv import FrozenConv
from convselect.freeze.layer import FrozenLayer
from convselect.freeze.linear import FrozenLinear
from convselect.freeze.pool import mean_of
from convselect.freeze.residual import Fused, blocks


class Program:
    """Traced steps and the functions that they call: what all plans of one forward share.

    Attributes:
        layers, functions: what runs each step, a frozen layer or a function.
        last_use: value -> index of the last step that reads it; the number of steps if it is part of the result.
        reusable: values whose memory may be overwritten by the next call.
    """

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
            for node in nodes_in((step.args, step.kwargs)):
                last_use[node] = i
        for node in nodes_in(self.traced.result):
            last_use[node] = len(self.steps)
        return last_use

    def blocks(self) -> list[tuple[Step, ...]]:
        """What may run as one call: see `residual.blocks`."""
        users: dict[fx.Node, list[Step | None]] = {}
        for step in self.steps:
            for node in nodes_in((step.args, step.kwargs)):
                users.setdefault(node, []).append(step)
        for node in nodes_in(self.traced.result):
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

    @property
    def finite(self) -> bool:
        return all(layer.finite for layer in self.layers.values())

    def pin_packs(self, used: Collection[Mapping[Step, Candidate]]) -> None:
        """Keep the packed weights that these plans' candidates use, and drop the others."""
        for step, layer in self.layers.items():
            layer.pin_packs({candidates[step].pack for candidates in used if step in candidates})

    def _reusable(self) -> set[fx.Node]:
        """Results of layers that nobody returns, keeps or makes a view of."""
        private = {step.out: keeps_no_view(step, self.root) for step in self.steps}
        returned = set(nodes_in(self.traced.result))
        users: dict[fx.Node, list[fx.Node]] = {step.out: [] for step in self.steps}
        for step in self.steps:
            for node in nodes_in((step.args, step.kwargs)):
                users.setdefault(node, []).append(step.out)
        return {
            step.out
            for step in self.layers
            if step.out not in returned and all(private[user] for user in users[step.out])
        }

    def compiled(self, candidates: Mapping[Step, Candidate], shapes: Mapping[fx.Node, Tensor]) -> Callable[..., Any]:
        """The steps as one Python function that owns its intermediates: not for two calls at a time.

        Args:
            shapes: results of layers, on the meta device.
        """
        functions = _bound_functions(self, candidates, shapes)
        scope: dict[str, Any] = {f"f{i}": function for i, function in enumerate(functions)}
        names: dict[fx.Node, str] = {node: f"v{i}" for i, node in enumerate(self.traced.inputs)}
        lines = [f"def run({', '.join(names.values())}):"]
        for i, step in enumerate(self.steps):
            names[step.out] = f"r{i}"
            arguments = [_source(a, names, scope) for a in step.args]
            arguments += [f"{key}={_source(value, names, scope)}" for key, value in step.kwargs.items()]
            lines.append(f"    r{i} = f{i}({', '.join(arguments)})")
            # As in the model itself, memory is free after its last use.
            dead = {names[node] for node in nodes_in((step.args, step.kwargs)) if self.last_use[node] == i}
            if step.out not in self.last_use:
                dead.add(f"r{i}")
            if dead:
                lines.append(f"    del {', '.join(sorted(dead))}")
        lines.append(f"    return {_source(self.traced.result, names, scope)}")
        exec(compile("\n".join(lines), "<convselect.freeze>", "exec"), scope)
        return scope["run"]  # type: ignore[no-any-return]


def _bound_functions(
    program: Program, candidates: Mapping[Step, Candidate], shapes: Mapping[fx.Node, Tensor]
) -> list[Callable[..., Any]]:
    """What each step calls; layers with the memory that is laid out for their operands."""
    fixed = _fixed_results(program, candidates, shapes)
    functions: list[Callable[..., Any]] = []
    for step in program.steps:
        if step not in candidates:
            functions.append(program.functions[step])
            continue
        bind, (x, residual) = candidates[step].bind, (*step.args, None)[:2]
        if step.permuted is None:
            functions.append(bind(fixed.get(x), fixed.get(residual), fixed.get(step.out)))  # type: ignore[arg-type]
        else:
            functions.append(_permuting(bind(fixed.get(x), None, None), *permutations(step)))  # type: ignore[arg-type]
    return functions


def _permuting(run: Run, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Run:
    return lambda x, residual: forth(run(x, back(residual)))


def _fixed_results(
    program: Program, candidates: Mapping[Step, Candidate], shapes: Mapping[fx.Node, Tensor]
) -> dict[fx.Node, Tensor]:
    """Memory for results that can be written to memory given beforehand, shared by results that are never alive
    together: best fit in the order of the steps."""
    fixed: dict[fx.Node, Tensor] = {}
    free: list[Tensor] = []
    taken: dict[fx.Node, Tensor] = {}
    for i, step in enumerate(program.steps):
        writes_out = step in candidates and candidates[step].writes_out and step.permuted is None
        if writes_out and step.out in program.reusable:
            shape = shapes[step.out]
            n_bytes = shape.numel() * shape.element_size()
            fitting = [block for block in free if block.numel() >= n_bytes]
            block = min(fitting, key=Tensor.numel) if fitting else _block(n_bytes)
            free = [other for other in free if other is not block]
            taken[step.out] = block
            fixed[step.out] = block[:n_bytes].view(shape.dtype).as_strided(shape.shape, shape.stride())
        for node in {*nodes_in((step.args, step.kwargs)), step.out}:
            if node in taken and program.last_use.get(node, i) <= i:
                free.append(taken.pop(node))
    return fixed


def _block(n_bytes: int) -> Tensor:
    return torch.empty(-(-n_bytes // 64) * 64, dtype=torch.uint8, device="cpu")


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
    if isinstance(value, dict):
        inner = "".join(f"{k!r}: {_source(v, names, scope)}, " for k, v in value.items())
        return f"{{{inner}}}"
    assert isinstance(value, slice)
    return f"slice({', '.join(_source(v, names, scope) for v in (value.start, value.stop, value.step))})"


def nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(arguments, lambda node: found.append(node))
    return found


def _needed(traced: Traced) -> list[Step]:
    """The steps without reads of parameters that are folded now."""
    used = set(nodes_in((traced.result, [(step.args, step.kwargs) for step in traced.steps])))
    return [step for step in traced.steps if step.kind != "attribute" or step.out in used]


def _bound(step: Step, root: nn.Module) -> Callable[..., Any]:
    if step.kind == "module":
        module = root.get_submodule(step.target)
        # Without hooks a call is its forward; every call of the frozen model checks that none were added.
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


def permutations(step: Step) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Functions from a layer's result to its step's value, and from the step's residual to the layer's."""
    dims = step.permuted
    if dims is None:
        return _same, _same
    inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
    return lambda t: t.permute(dims), lambda t: t.permute(inverse)


def _same(t: Tensor) -> Tensor:
    return t
