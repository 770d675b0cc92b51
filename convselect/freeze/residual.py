"""Three frozen convolutions in one call of the C library: pointwise, depthwise, pointwise, with or without the first.

This is MobileNetV2's inverted residual (Sandler et al. 2018, arXiv 1801.04381). The tensors between its convolutions
are several times as large as input and output; computed some rows at a time, they never leave the L2 cache. Whether
that is faster than one call per layer is measured.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem
from convselect.base.settings import Settings
from convselect.choice.budgets import is_disabled
from convselect.freeze.candidates import Candidate, Form, Run, distance, fastest
from convselect.freeze.chains import Step
from convselect.freeze.conv import FrozenConv
from convselect.freeze.kernel import DEPTHWISE_PACKED, PRODUCT, KernelCall
from convselect.freeze.layer import FrozenLayer, Search
from convselect.freeze.remembered import Key
from convselect.kernels import _library, depthwise
from convselect.kernels._contract import Grade

NAME = "block"
_ROUNDS = 15
_DEADLINE_S = 0.25
_TOLERANCE = 1.2e-5  # three times that of a direct sum


class Fused(NamedTuple):
    """A block that runs as one call: `candidate` is that of the last step; `packs` are the keys of the weight that each
    step's layer packs for it."""

    steps: tuple[Step, ...]
    candidate: Candidate
    packs: tuple[Any, ...]


def blocks(
    steps: Sequence[Step], layers: Mapping[Step, FrozenLayer], users: Mapping[fx.Node, Sequence[Step | None]]
) -> Iterator[tuple[Step, ...]]:
    """(expand, depthwise, project) or (depthwise, project), if nothing else reads what is between them.

    Args:
        users: value -> the steps that read it, and None if it is part of the result.
    """
    makers = {step.out: step for step in layers}

    def only(step: Step) -> Step | None:
        """The step that alone reads this one's result, as its first argument only."""
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
    K, C, R, S = layer.form.shape
    if depthwise:
        return layer.groups == K > 1 and C == 1
    return layer.groups == 1 and (R, S) == (1, 1)


def fuse(
    steps: tuple[Step, ...],
    layers: Mapping[Step, FrozenLayer],
    problems: Mapping[Step, ConvProblem | None],
    candidates: Mapping[Step, Candidate],
    search: Search,
) -> Fused | None:
    """The block as one call, if that computes the same and is faster than these candidates one by one."""
    settings, remembered, measure, *_ = search
    parts = [layers[step] for step in steps]
    posed = _problems(problems[step] for step in steps)
    if posed is None or any(is_disabled(name, settings.disabled) for name in ("direct", "depthwise")):
        return None  # blocks are made of these two
    form = ", ".join(
        f"{problem} {layer.activation} {layer.has_residual}" for problem, layer in zip(posed, parts, strict=True)
    )
    key = Key(NAME, posed[0], form, settings)
    known = remembered.get(key)
    if known == "apart" or (known is None and not measure):
        return None
    fused = _fused(steps, parts, posed, settings)
    if fused is not None and known is None:
        runs = [candidates[step] for step in steps]
        known = _measured(fused.candidate, parts, runs, posed)
        remembered.put(key, known)
        if known == "apart":
            for layer, run in zip(parts, runs, strict=True):
                layer.pin_chosen(run.pack)
            return None
    return fused


def _problems(posed: Iterable[ConvProblem | None]) -> tuple[ConvProblem, ...] | None:
    """A block's problems, with contiguous weights; None if the C library does not take them as a block."""
    problems: list[ConvProblem] = []
    for problem in posed:
        if problem is None or problem.dtype != "float32" or problem.layout != CHANNELS_LAST:
            return None
        problems.append(problem._replace(weight_layout=CONTIGUOUS))
    *ahead, middle, last = problems
    if depthwise.packed_floats(middle) is None or not all(p.is_pointwise for p in (*ahead, last)):
        return None
    return tuple(problems)


def _fused(
    steps: tuple[Step, ...], parts: list[FrozenLayer], problems: tuple[ConvProblem, ...], settings: Settings
) -> Fused | None:
    """The block as one call; None if that takes more scratch memory than the budget admits."""
    middle = problems[-2]
    conv = _library._conv(middle, CHANNELS_LAST, CONTIGUOUS, middle.threads, _library.isa())
    if (
        not 0
        <= _scratch_bytes(ctypes.byref(conv), _structure(parts, problems, [1] * len(parts)))
        <= settings.workspace_bytes
    ):
        return None
    kernels = (*(PRODUCT for _ in problems[:-2]), DEPTHWISE_PACKED, PRODUCT)
    x_form = Form.dense(problems[0].x_shape, CHANNELS_LAST, torch.float32)
    y_form = Form.dense(problems[-1].y_shape, CHANNELS_LAST, torch.float32)
    last = parts[-1]

    def native(x: Tensor, residual: Tensor | None) -> Tensor:
        for layer in parts[:-1]:
            x = layer.native(x)
        return last.native(x, residual)

    def bind(x: Tensor | None, residual: Tensor | None, out: Tensor | None) -> Run:
        weights = [layer.packed_for(k, p) for layer, k, p in zip(parts, kernels, problems, strict=True)]
        block = _structure(parts, problems, [t.data_ptr() for t in weights])
        function, leading = _library._function("cs_block_frozen", 0), (ctypes.byref(block),)
        call = KernelCall(function, conv, leading, (), weights, last, native, x_form, y_form, True)
        return call.bind(x, residual, out)

    packs = tuple(kernel.pack_key(p) for kernel, p in zip(kernels, problems, strict=True))
    return Fused(steps, Candidate(NAME, Grade.DIRECT, bind, packs[-1], True, True), packs)


def _structure(parts: list[FrozenLayer], problems: tuple[ConvProblem, ...], weights: list[int]) -> _library.Block:
    """The structure for the C library, with these addresses of packed weights."""
    biases = [None if layer.bias_float32 is None else layer.bias_float32.data_ptr() for layer in parts]
    activations = [_library.ACTIVATIONS[layer.activation] for layer in parts]
    block = _library.Block(C=problems[0].C, K=problems[-1].K, taps_activation=activations[-2])
    block.taps_parameter = parts[-2].slope
    block.taps, block.taps_bias, block.project = weights[-2], biases[-2], weights[-1]
    if len(parts) == 3:
        block.expand, block.expand_bias, block.expand_activation = weights[0], biases[0], activations[0]
        block.expand_parameter = parts[0].slope
    return block


def _scratch_bytes(conv: Any, block: _library.Block) -> int:
    """Negative if the C library does not take this block. Which addresses are set matters here, their values do not."""
    loaded = _library.library()
    assert loaded is not None
    query = loaded.cs_block_bytes
    query.argtypes, query.restype = (ctypes.c_void_p,) * 2, ctypes.c_int64
    return query(conv, ctypes.byref(block))  # type: ignore[no-any-return]


def _measured(
    block: Candidate, parts: list[FrozenLayer], candidates: list[Candidate], problems: tuple[ConvProblem, ...]
) -> str:
    """Measure on random operands: NAME or "apart"."""
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
