"""Three frozen convolutions in one call of the C library: pointwise, depthwise, pointwise, with or without the first.

This is MobileNetV2's inverted residual (Sandler et al. 2018, arXiv 1801.04381). What lies between its convolutions is
several times as large as what goes in and comes out; computed some rows at a time, it never leaves the L2 cache.
Whether that is faster than one call per layer is measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from convselect.choice.budgets import is_disabled
from convselect.freeze.capture import Step
from convselect.freeze.conv import FrozenConv
from convselect.freeze.layer import (
    DEPTHWISE_PACKED,
    DIRECT,
    FORMATS,
    Candidate,
    Form,
    FrozenLayer,
    Run,
    distance,
    fastest,
    pack_key,
)
from convselect.kernels import _library, depthwise
from convselect.kernels._contract import Grade
from convselect.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, canonical_strides
from convselect.settings import Settings

NAME = "block"
_ROUNDS = 15
_DEADLINE_S = 0.25
_TOLERANCE = 1.2e-5  # three layers of a direct sum's


class Fused(NamedTuple):
    """A block that runs as one: its candidate stands for the last step, and the others hold what it needs packed."""

    steps: tuple[Step, ...]
    candidate: Candidate
    packs: tuple[Any, ...]


def blocks(
    steps: Sequence[Step], layers: Mapping[Step, FrozenLayer], users: Mapping[fx.Node, Sequence[Step | None]]
) -> Iterator[tuple[Step, ...]]:
    """(expand, depthwise, project) or (depthwise, project) where nothing else sees what is between them.

    Args:
        users: value -> the steps that take it, and None where it is part of the result.
    """
    makers = {step.out: step for step in layers}

    def only(step: Step) -> Step | None:
        """The step that alone takes what this one makes, as its first argument only."""
        found = users.get(step.out, ())
        return found[0] if len(found) == 1 and found[0] is not None and found[0].args[0] is step.out else None

    for step in steps:
        if not _is(layers.get(step), depthwise=True) or len(step.args) > 1:
            continue
        project = only(step)
        if project is None or not _is(layers.get(project), depthwise=False):
            continue
        expand = makers.get(step.args[0])
        if (
            expand is not None
            and _is(layers[expand], depthwise=False)
            and len(expand.args) == 1
            and only(expand) is step
        ):
            yield expand, step, project
        else:
            yield step, project


def _is(layer: FrozenLayer | None, *, depthwise: bool) -> bool:
    if not isinstance(layer, FrozenConv) or layer.activation not in _library.ACTIVATIONS:
        return False
    conv = layer.conv
    if depthwise:
        return conv.groups == conv.in_channels == conv.out_channels and conv.groups > 1
    return conv.groups == 1 and conv.kernel_size == (1, 1)


def fuse(
    steps: tuple[Step, ...],
    layers: Mapping[Step, FrozenLayer],
    problems: Mapping[Step, ConvProblem | None],
    candidates: Mapping[Step, Candidate],
    settings: Settings,
    remembered: dict[Any, str],
    measure: bool,
) -> Fused | None:
    """The block in one call, if that computes the same and is faster than these candidates one by one."""
    if any(is_disabled(name, settings.disabled) for name in ("direct", "depthwise")):
        return None  # it is made of these two
    posed = tuple(problems[step] for step in steps)
    if any(p is None or p.dtype != "float32" or p.layout != CHANNELS_LAST for p in posed):
        return None
    *ahead, middle, last = (p._replace(weight_layout=CONTIGUOUS) for p in posed if p is not None)
    if depthwise.packed_floats(middle) is None or not all(p.is_pointwise for p in (*ahead, last)):
        return None
    parts = [layers[step] for step in steps]
    key = (NAME, posed, tuple((layer.activation, layer.has_residual) for layer in parts), settings)
    known = remembered.get(key, None if measure else "apart")
    if known == "apart":
        return None
    problems_ = (*ahead, middle, last)
    fused = _fused(steps, parts, problems_, settings)
    if fused is None:
        return None
    if known is None:
        runs = [candidates[step] for step in steps]
        known = remembered[key] = _measured(fused.candidate, parts, runs, problems_)
    if known == "apart":
        for step, layer in zip(steps, parts, strict=True):
            layer.settle(candidates[step].pack)
        return None
    return fused


def _fused(
    steps: tuple[Step, ...], parts: list[FrozenLayer], problems: tuple[ConvProblem, ...], settings: Settings
) -> Fused | None:
    *ahead, middle, last = problems
    *expand, deep, project = parts
    kernels = (*(DIRECT for _ in ahead), DEPTHWISE_PACKED, DIRECT)
    packs = tuple(pack_key(kernel, p) for kernel, p in zip(kernels, problems, strict=True))
    loaded = _library.library()
    assert loaded is not None
    conv = ctypes.byref(_library._conv(middle, CHANNELS_LAST, CONTIGUOUS, middle.threads, _library.isa()))
    codes = _library.ACTIVATIONS
    block = _library.Block()
    block.C, block.K = problems[0].C, last.K
    block.expand_activation = codes[expand[0].activation] if expand else 0
    block.taps_activation = codes[deep.activation]
    block.expand = 1 if expand else None  # for the query, which asks no more than whether there is one
    query = loaded.cs_block_bytes
    query.argtypes, query.restype = (ctypes.c_void_p,) * 2, ctypes.c_int64
    if not 0 <= query(conv, ctypes.byref(block)) <= settings.workspace_bytes:
        return None
    function = loaded["cs_block_frozen"]
    function.argtypes, function.restype = (ctypes.c_void_p,) * 5, ctypes.c_int32
    x_form, y_form = (
        Form(torch.Size(shape), canonical_strides(shape, CHANNELS_LAST), torch.float32, FORMATS[CHANNELS_LAST])
        for shape in (problems[0].x_shape, last.y_shape)
    )

    def native(x: Tensor, residual: Tensor | None) -> Tensor:
        for layer in parts[:-1]:
            x = layer.native(x)
        return project.native(x, residual)

    def bind(fixed_x: Tensor | None, fixed_residual: Tensor | None, fixed_out: Tensor | None) -> Run:
        held = [layer.packed_for(k, p) for layer, k, p in zip(parts, kernels, problems, strict=True)]
        bias = [None if layer.bias_float32 is None else layer.bias_float32.data_ptr() for layer in parts]
        pointers = [t.data_ptr() for t in held]
        if expand:
            block.expand, block.expand_bias = pointers[0], bias[0]
        block.taps, block.taps_bias, block.project = pointers[-2], bias[-2], pointers[-1]
        # It belongs to this function alone: its residual changes from call to call.
        epilogue = _library.Epilogue(bias[-1], None, codes[project.activation], 0)
        if fixed_residual is not None:
            epilogue.residual = fixed_residual.data_ptr()
        own, end = ctypes.byref(block), ctypes.byref(epilogue)
        if fixed_x is not None and fixed_out is not None and (fixed_residual is not None or not project.has_residual):
            arguments = (conv, own, fixed_x.data_ptr(), fixed_out.data_ptr(), end)

            def run_fixed(x: Tensor, residual: Tensor | None = None, held: Any = held) -> Tensor:
                if function(*arguments) != _library.OK:
                    fixed_out.copy_(native(x, residual))
                return fixed_out

            return run_fixed
        new = y_form.new

        def run(x: Tensor, residual: Tensor | None = None, held: Any = held) -> Tensor:
            x = x_form.of(x)
            if residual is not None:
                residual = y_form.of(residual)
                epilogue.residual = residual.data_ptr()
            out = fixed_out if fixed_out is not None else new()
            if function(conv, own, x.data_ptr(), out.data_ptr(), end) != _library.OK:
                out.copy_(native(x, residual))
            return out

        return run

    candidate = Candidate(NAME, Grade.DIRECT, bind, packs[-1], True)
    return Fused(steps, candidate, packs)


def _measured(
    block: Candidate, parts: list[FrozenLayer], candidates: list[Candidate], problems: tuple[ConvProblem, ...]
) -> str:
    """ "block" or "apart", on random operands in memory of their own."""
    generator = torch.Generator().manual_seed(0)

    def made(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=generator).to(memory_format=torch.channels_last)

    x = made(problems[0].x_shape)
    residual = made(problems[-1].y_shape) if parts[-1].has_residual else None
    want = x
    for layer in parts[:-1]:
        want = layer.reference(want, None)
    want = parts[-1].reference(want, residual)
    chain: list[Callable[[], Tensor]] = []
    given = x
    for candidate, problem in zip(candidates, problems, strict=True):
        is_last = problem is problems[-1]
        out = made(problem.y_shape)
        run = candidate.bind(given, residual if is_last else None, out if candidate.writes_out else None)
        chain.append(functools.partial(run, given, residual if is_last else None))
        given = out

    def apart() -> Tensor:
        for call in chain:
            y = call()
        return y

    out = made(problems[-1].y_shape)
    together = functools.partial(block.bind(x, residual, out), x, residual)
    if not distance(together(), want) <= _TOLERANCE:
        return "apart"
    return fastest({"apart": apart, NAME: together}, _ROUNDS, _DEADLINE_S)


__all__ = ["NAME", "Fused", "blocks", "fuse"]
