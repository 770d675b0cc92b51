"""Steps between convolutions on memory that notices every stray byte: a part of `_guarded.run`, in its process."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _guarded import Guarded, Heap, at, placed
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS
from convselect.freeze import attention, pointwise, pooling, reduce
from convselect.freeze.bound import Bound
from convselect.freeze.pointwise import Input, Result
from convselect.kernels import _library

_FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}

_STATISTICS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[..., Bound | None]]] = {
    "sum": (lambda x: x.sum((2, 3), keepdim=True), reduce.total),
    "norm": (lambda x: torch.linalg.vector_norm(x, 2, (2, 3), keepdim=True), reduce.norm),
    "variance": (lambda x: x.var((2, 3), correction=0, keepdim=True), lambda *args: reduce.variance(*args, 0)),
    "largest": (lambda x: x.amax((2, 3), keepdim=True), reduce.largest),
}


class Case(NamedTuple):
    """A step on tensors that lie in `layout` if they are images, and what PyTorch makes of them."""

    name: str
    layout: str
    inputs: list[Tensor]
    want: Tensor
    bind: Callable[[Sequence[Tensor], Tensor], Bound | None]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Of sizes up to 67, the kinds in turn."""
    r = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for i in range(count):
        layout = r.choice((CONTIGUOUS, CHANNELS_LAST))
        N, C, H, W = shape = r.choice((1, 2)), r.randint(1, 67), r.randint(1, 23), r.randint(1, 67)
        x, y = normal(*shape), normal(*shape)
        kind = i % 11
        if kind < 2:
            other = normal(*(n if r.random() < 0.5 else 1 for n in shape))
            program = [("mul", (Input(0), Input(1))), ("add", (Result(0), Input(2))), ("silu", (Result(1),))]
            values = [x, other, y] if kind else [y, normal(1, C, 1, 1), other]
            yield Case("pointwise", layout, values, F.silu(values[0] * values[1] + values[2]),
                       lambda held, out, p=program: pointwise.bind(p, held, out))  # fmt: skip
        elif kind == 2:
            yield Case("mean", layout, [x], x.mean((2, 3), keepdim=True), lambda held, out: reduce.mean(held[0], out))
        elif kind == 8:
            operation = list(_STATISTICS)[i // 11 % len(_STATISTICS)]
            plain, ours = _STATISTICS[operation]
            yield Case(operation, layout, [x], plain(x), lambda held, out, ours=ours: ours(held[0], out, (2, 3)))
        elif kind == 9:
            groups = r.choice([g for g in (1, 2, 3, C) if C % g == 0])
            weight, bias = normal(C), normal(C)
            want, activation = F.group_norm(x, groups, weight, bias, 1e-3), r.choice((None, "leaky_relu"))
            yield Case("group_norm", layout, [x, weight, bias], want if activation is None else F.leaky_relu(want, 0.2),
                       lambda held, out, g=groups, a=activation: reduce.group_norm(
                           held[0], g, *held[1:], 1e-3, out, a, 0.2))  # fmt: skip
        elif kind == 10:
            keys, mask = r.randint(1, 67), normal(1, r.choice((1, C)), H, 1)
            mask = mask.expand(-1, -1, -1, keys).contiguous() if r.random() < 0.7 else mask
            qkv = [normal(N, C, rows, W) for rows in (H, keys, keys)]
            yield Case("attention", layout, [qkv[0], torch.stack(qkv[1:]).flatten(0, 1), mask],
                       F.scaled_dot_product_attention(*qkv, attn_mask=mask),
                       lambda held, out: attention.attention(held[0], *held[1].chunk(2), held[2], out))  # fmt: skip
        elif kind == 3:
            weight, bias = normal(C), normal(C)
            want = F.layer_norm(x.permute(0, 2, 3, 1), (C,), weight, bias, 1e-3).permute(0, 3, 1, 2)
            yield Case("layer_norm", layout, [x, weight, bias], want,
                       lambda held, out: reduce.layer_norm(*held, 1e-3, out, 1))  # fmt: skip
        elif kind == 4:
            yield Case("softmax", CONTIGUOUS, [x], x.softmax(-1), lambda held, out: reduce.softmax(held[0], out))
        elif kind == 7:
            parts = [x, normal(N, r.randint(1, 40), H, W), y]
            yield Case("concatenate", layout, parts, torch.cat(parts, 1),
                       lambda held, out: reduce.concatenate(held, out, 1))  # fmt: skip
        else:
            kernel, stride = (r.randint(1, 4), r.randint(1, 4)), (r.randint(1, 3), r.randint(1, 4))
            padding = (r.randint(0, kernel[0] // 2), r.randint(0, kernel[1] // 2))
            if H + 2 * padding[0] < kernel[0] or W + 2 * padding[1] < kernel[1]:
                continue
            ceil_mode = r.random() < 0.5
            arguments = (kernel, stride, padding, *((1,) if kind == 5 else ()), ceil_mode)
            plain, ours = (F.max_pool2d, pooling.max_pool) if kind == 5 else (F.avg_pool2d, pooling.avg_pool)
            yield Case(ours.__name__, layout, [x], plain(x, *arguments),
                       lambda held, out, a=arguments, ours=ours: ours(held[0], out, *a))  # fmt: skip


def run_steps(spec: dict[str, Any]) -> dict[str, Any]:
    """Every step at every instruction set, by one to three threads with the same bits."""
    loaded = _library.library()
    assert loaded is not None
    progress = os.open(spec["progress"], os.O_WRONLY | os.O_CREAT)
    memories = [[Heap() if side is None else Guarded(side) for _ in range(4)] for side in spec["sides"]]
    ran: Counter[str] = Counter()
    wrong: list[str] = []
    for case in cases(spec["seed"], spec["random"]):
        want = case.want.contiguous()
        for memory, level in itertools.product(memories, range(loaded.cs_best_isa() + 1)):
            _library.isa = lambda level=level: level  # type: ignore[assignment]
            held = []
            for to, tensor in zip(memory, case.inputs, strict=False):
                layout = case.layout if tensor.dim() == 4 else CONTIGUOUS
                held.append(at(placed(to, tensor, layout), tensor.shape, torch.float32, layout))
            first: Tensor | None = None
            for threads in (1, 2, 3):
                what = f"{case.name} isa={level} threads={threads} {case.layout} {[tuple(t.shape) for t in held]}"
                os.pwrite(progress, what.encode().ljust(500), 0)
                torch.set_num_threads(threads)
                out = at(memory[3].place(4 * want.numel()), want.shape, torch.float32, case.layout)
                out.fill_(float("nan"))
                bound = case.bind(held, out)
                if bound is None:
                    break
                assert bound.function(*bound.arguments) == _library.OK, what
                memory[3].check()
                if not torch.allclose(out, want, rtol=1e-5, atol=1e-5):
                    wrong.append(f"{what}: off by {(out - want).abs().max()}")
                first = out.clone() if first is None else first
                if not torch.equal(out, first):
                    wrong.append(f"{what}: other bits than by one thread")
                ran[f"{case.name} isa={level}"] += 1
    return {"ran": ran, "wrong": wrong}
