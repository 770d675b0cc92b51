"""The kernels of volumes on memory that notices every stray byte: a part of `_guarded.run`, in its process."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from _guarded import DTYPES, LAYOUTS, Guarded, Heap, at, grade, placed, volume_kernels, with_reference
from activations import ACTIVATIONS, SLOPE
from problems import VOLUMES
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR

from convselect.base.problem import CONTIGUOUS, ConvProblem, Direction
from convselect.base.volumes import volume_problem
from convselect.kernels import _library


def random_volumes(seed: int, count: int) -> Iterator[ConvProblem]:
    """Volumes of sizes around the kernels' block sizes, with and without a stride and groups."""
    r = random.Random(seed)
    while count:
        groups = r.choice((1, 1, 1, 2, 3))
        C, K = (groups * r.choice((1, 2, 3, 8, 16, 17)) for _ in "CK")
        if r.random() < 0.3:
            groups = C = r.choice((2, 3, 9))
            K = C * r.choice((1, 1, 2))
        filtered = r.random() < 0.5  # of a kind that Winograd takes
        R, S = (3, 3) if filtered else (r.choice((1, 2, 3, 5, 7)) for _ in "RS")
        step = r.choice((1, 1, 2)) if filtered else r.choice((1, 1, 2, 3))
        p = volume_problem(
            r.choice((1, 1, 2)), C, r.randint(1, 8), r.randint(1, 20), r.randint(1, 40),
            K, r.choice((1, 2, 3, 3, 5)), R, S,
            direction=r.choice(list(Direction)),
            stride=(r.choice((1, 1, 2)), step, step if filtered else r.choice((1, step))),
            padding=tuple(r.randint(0, 2) for _ in range(6)),
            dilation=(r.choice((1, 1, 2)), *((1, 1) if step > 1 else r.choice(((1, 1), (1, 1), (2, 1))))),
            groups=groups, dtype=r.choice((*DTYPES, "float32")),
        )  # fmt: skip
        if p.is_volume and min(p.O, p.P, p.Q) > 0 and p.flops < 6e6:
            count -= 1
            yield p


def run_volumes(spec: dict[str, Any]) -> dict[str, Any]:
    """Every kernel of volumes at every instruction set, in one layout and with one size of tiles for each problem."""
    loaded, draw = _library.library(), random.Random(spec["seed"])
    assert loaded is not None
    progress = os.open(spec["progress"], os.O_WRONLY | os.O_CREAT)
    memories = [[Heap() if side is None else Guarded(side) for _ in range(5)] for side in spec["sides"]]
    ran: Counter[str] = Counter()
    wrong: list[str] = []
    listed = (p._replace(direction=d, dtype=DTYPES[i % 3]) for d in Direction for i, p in enumerate(VOLUMES.values()))
    for i, p in enumerate(itertools.chain(listed, random_volumes(spec["seed"], spec["random"]))):
        layout, second_layout, threads = LAYOUTS[i % 2], LAYOUTS[i // 2 % 2], 1 + i % 3
        a, b, want, scale = with_reference(p)
        generator = torch.Generator().manual_seed(1)
        bias, residual = torch.randn(p.K, generator=generator), torch.randn(p.y_shape, generator=generator).to(a.dtype)
        activation = list(ACTIVATIONS)[i % len(ACTIVATIONS)]
        wants = [want]
        if p.direction == Direction.FORWARD:
            wants.append(ACTIVATIONS[activation](want + bias.double()[:, None, None, None] + residual.double()))
        for memory, (name, tiles) in itertools.product(memories, volume_kernels().items()):
            before = draw.choice(tiles)
            layouts = (layout, second_layout) if name == "cs_winograd_volume" else (CONTIGUOUS, CONTIGUOUS)
            result_layout = CONTIGUOUS if p.direction == Direction.BACKWARD_WEIGHT else layouts[0]
            a_at, b_at = (placed(m, t, of) for m, t, of in zip(memory, (a, b), layouts, strict=False))
            addresses = placed(memory[3], bias), placed(memory[4], residual, layouts[0])
            epilogue = _library.Epilogue(*addresses, _library.ACTIVATIONS[activation], SLOPE)
            for level, fused in itertools.product(range(loaded.cs_best_isa() + 1), range(len(wants))):
                volume = _library._struct(p, *layouts, threads, level)
                what = f"{name}{before or ''} isa={level} {layouts} threads={threads} fused={fused} {p}"
                os.pwrite(progress, what.encode().ljust(500), 0)
                out = memory[2].place(want.numel() * p.element_bytes)
                ctypes.memset(out, 0xFF, want.numel() * p.element_bytes)  # NaN in every element type
                status = _library._function(name, len(before))(
                    ctypes.addressof(volume), *before, a_at, b_at, out, ctypes.addressof(epilogue) if fused else None
                )
                # In volumes of a few pixels, and beside a large one, windows may be smaller than the largest value.
                spoilt = p.W % 2 or p.D * p.H * p.W < 32
                left = spoilt and name == "cs_winograd_volume" and status == _library.NONFINITE
                assert left or status in (_library.OK, _library.UNSUPPORTED), f"{what}: status {status}"
                if status == _library.UNSUPPORTED:
                    continue
                ran[f"{name} {p.direction} {p.dtype} isa={level}"] += 1
                memory[2].check()
                if left:
                    continue
                got = at(out, want.shape, p.torch_dtype, result_layout).double()
                size = max(scale, wants[1].norm().item()) if fused else scale
                error = (got - wants[fused]).norm().item() / max(size, 1e-30)
                of = name.removesuffix("_volume")
                bound = FORWARD[p.dtype, grade(of, before, p)] * (1 if got.numel() > 64 else 2)
                if not error <= bound * (WEIGHT_GRADIENT_FACTOR if p.direction == Direction.BACKWARD_WEIGHT else 1):
                    wrong.append(f"{what}: relative error {error:.2e} over {bound:.1e}")
    return {"ran": ran, "wrong": wrong}
