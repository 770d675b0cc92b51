"""Runs the C kernels' entry points on bare pointers to memory that notices every stray byte, and checks every result.

A program, so that a crash ends a process of its own: `run(...)` starts it, and says at which case it died.

    guarded     each buffer lies flush against a page that may not be touched, first with its end, then with its start;
                operands are read-only; bytes beside the result are compared afterwards
    heap        each buffer is a block of `malloc` of exactly its size, for a library with the address sanitizer
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh
import torch
from activations import ACTIVATIONS, SLOPE
from problems import PROBLEMS, operands_of, random_operands
from tolerances import FORWARD, WEIGHT_GRADIENT_FACTOR
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels._contract import Grade
from convselect.kernels.pool import BY_NAME
from convselect.kernels.reference import Reference

CSRC = Path(_library.__file__).parent / "csrc"
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = (CONTIGUOUS, CHANNELS_LAST)
THREADS = (1, 2, 3, 16, 40)  # how work is divided depends on them, however many there are
# What the kernels' parameters are, by the macro that kernels.h names them with: the integers ahead of the operands.
TILES = {
    "CS_OPERANDS": [()],
    "CS_TILED": [(m,) for m in (2, 3, 4, 5, 6, 7)],
    "CS_TRANSFORM": [(16,), (24,), (32,), (48,), (64,), (96,), (384,)],  # the last two for kernels of one row only
}


def _table(macro: str) -> str:
    """The body of a macro of kernels.h."""
    return re.search(rf"#define {macro}\(X\)((?:.*\\\n)*.*)", (CSRC / "kernels.h").read_text()).group(1)


def kernels() -> dict[str, list[tuple[int, ...]]]:
    """The kernels of kernels.h: name -> the integers to call it with ahead of its operands."""
    table = _table("CS_KERNELS")
    entries = re.findall(r"X\((\w+), (\w+), \w+\)", table)
    assert len(entries) == table.count("X(") > 0
    return {name: TILES[parameters] for name, parameters in entries}


def volume_kernels() -> dict[str, list[tuple[int, ...]]]:
    """The same for volumes: `cs_NAME_volume`."""
    table = _table("CS_VOLUME_KERNELS")
    entries = re.findall(r"X\((\w+_volume),[\s\\]*\(([^)]*)\)", table)
    assert len(entries) == table.count("X(") > 0
    return {name: TILES["CS_TILED" if "int32_t m" in parameters else "CS_OPERANDS"] for name, parameters in entries}


def packed_kernels() -> dict[str, list[tuple[int, ...]]]:
    """Those that compute a forward with a packed weight: `cs_NAME_frozen`, with `cs_NAME_pack` and
    `cs_NAME_packed_bytes` beside it, each called with the same integers."""
    table = _table("CS_PACKED_KERNELS")
    entries = re.findall(r"X\((\w+_frozen),[\s\\]*\(([^)]*)\)", table)
    assert len(entries) == len(re.findall(r"\w+_frozen", table)) > 0
    return {name: TILES["CS_TILED" if "int32_t m" in parameters else "CS_OPERANDS"] for name, parameters in entries}


def grade(kernel: str, before: tuple[int, ...], problem: ConvProblem) -> Grade:
    """The grade that the kernel's algorithm promises: `cs_winograd` with m = 4 is what `winograd4` runs."""
    if kernel == "cs_strassen_frozen":
        return Grade.LOOSE  # one value of 10,000 in a row
    algorithm = BY_NAME.get(kernel.removeprefix("cs_").removesuffix("_frozen") + "".join(map(str, before)))
    return Grade.CLOSE if algorithm is None else algorithm.error_grade(problem)


# ---- memory -----------------------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.malloc.argtypes, _libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = (ctypes.c_void_p,), None
NO_ACCESS, READ, READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
CANARY = 0xA5
BESIDE = 4096


class Guarded:
    """One buffer at a time in a region between two pages that may not be touched."""

    BYTES = 1 << 23

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._map = mmap.mmap(-1, self.BYTES + 2 * mmap.PAGESIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE
        self._protect(self._start - mmap.PAGESIZE, mmap.PAGESIZE, NO_ACCESS)
        self._protect(self._start + self.BYTES, mmap.PAGESIZE, NO_ACCESS)

    @staticmethod
    def _protect(address: int, size: int, how: int) -> None:
        assert _libc.mprotect(address, size, how) == 0, os.strerror(ctypes.get_errno())

    def place(self, size: int) -> int:
        """The address of `size` bytes that may be written until `lock`."""
        assert size + BESIDE <= self.BYTES
        self._protect(self._start, self.BYTES, READ_WRITE)
        self._size = size
        self._beside = self._start + (self.BYTES - size - BESIDE if self.at_end else size)
        ctypes.memset(self._beside, CANARY, BESIDE)
        return self._start + (self.BYTES - size if self.at_end else 0)

    def lock(self) -> None:
        self._protect(self._start, self.BYTES, READ)

    def check(self) -> None:
        assert ctypes.string_at(self._beside, BESIDE) == bytes([CANARY]) * BESIDE, "wrote beside its result"


class Heap:
    """One buffer at a time from `malloc`."""

    def __init__(self) -> None:
        self._address: int | None = None

    def place(self, size: int) -> int:
        _libc.free(self._address)
        self._address = _libc.malloc(size)
        assert self._address
        return self._address

    def lock(self) -> None: ...

    def check(self) -> None: ...


def at(address: int, shape: Sequence[int], dtype: torch.dtype, layout: str = CONTIGUOUS) -> Tensor:
    """A tensor over bare memory."""
    count = 1
    for size in shape:
        count *= size
    flat = torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
    if layout == CHANNELS_LAST:
        N, C, *size = shape
        return flat.view(N, *size, C).movedim(-1, 1)
    return flat.view(shape)


def placed(memory: Any, values: Tensor, layout: str = CONTIGUOUS) -> int:
    """Copy `values` into `memory`, read-only from then on; the address."""
    address = memory.place(values.numel() * values.element_size())
    at(address, values.shape, values.dtype, layout).copy_(values)
    memory.lock()
    return address


# ---- problems ---------------------------------------------------------------------------------------------------


def random_problems(seed: int, count: int) -> Iterator[ConvProblem]:
    """Problems of every class the kernels know, of sizes around their block sizes; small enough for a sanitizer."""
    r = random.Random(seed)
    while count:
        G = C = K = 1
        kind = r.choice(("3x3", "3x3", "depthwise", "depthwise", "grouped", "grouped", "dense", "dense"))
        shape = r.choice(("plain", "plain", "plain", "plain", "deep", "wide"))  # deep: many channels; wide: long rows
        H, W = r.randint(1, 40), r.randint(1, 40)
        if shape == "wide":
            H, W = r.randint(1, 3), r.choice((r.randint(50, 600), r.randint(50, 600), r.randint(1000, 1300)))
        elif shape == "deep":
            H, W = r.randint(1, 7), r.randint(1, 7)
        if kind == "depthwise":
            G = C = r.choice((2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40)) * (6 if shape == "deep" else 1)
            K = C * r.choice((1, 1, 1, 2, 3))
        elif kind == "grouped":
            G = r.randint(2, 5)
            C = G * r.choice((2, 3, 4, 8, 12, 16))
            K = r.choice((C, C, G * r.choice((1, 2, 4, 7, 8, 16))))
        else:
            C, K = (r.choice((1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 64)) for _ in "CK")
            if shape == "deep":
                C, K = (r.choice((C, 65, 100, 128, 200, 256, 300)) for C in (C, K))
        if kind == "3x3":
            R = S = 3
        else:
            R, S = (r.choice((1, 2, 3, 3, 3, 4, 5, 7, 9)) for _ in "RS")
            S = r.choice((R, S))
            if shape == "wide" and r.random() < 0.5:
                R, S = 1, r.choice((S, S, 2, 11, 17, 33, 70))
        p = conv_problem(
            r.choice((1, 1, 2, 3, 5)), C, H, W, K, R, S,
            direction=r.choice(list(Direction)),
            stride=1 if kind == "3x3" else r.choice((1, 1, 2, (2, 1), (1, 3))),
            padding=r.choice((0, 1, 2, (R - 1) // 2, tuple(r.randint(0, 5) for _ in range(4)))),
            dilation=r.choice((1, 1, 1, 2, (3, 1), (1, 4)) if kind == "3x3" else (1, 1, 1, 2, (3, 1))),
            groups=G, dtype=r.choice((*DTYPES, "float32")),
        )  # fmt: skip
        if p.P > 0 and p.Q > 0 and p.flops < (3e7 if shape == "deep" else 6e6):
            count -= 1
            yield p._replace(stride_h=2, stride_w=2) if kind == "3x3" and H % 3 == 0 else p


def pointwise_problems(seed: int, count: int) -> Iterator[ConvProblem]:
    """1x1 without padding: sizes around tiles and panels, rows that share a set of a cache, strides."""
    r = random.Random(seed)
    for _ in range(count):
        C, K = (r.choice((1, 3, 8, 16, 20, 24, 33, 40, 56, 64, 100, 134, 200)) for _ in "CK")
        H, W = (1, r.randint(1, 60)) if r.random() < 0.3 else (r.randint(1, 9), r.randint(1, 9))
        stride = r.choice((1, 1, 2, (1, 3)))
        if r.random() < 0.1:
            C, H, W = r.choice((512, 1024)), min(H, 5), min(W, 5)
        yield conv_problem(r.choice((1, 1, 3)), C, H, W, K, 1, 1, stride=stride)


def patch_problems(seed: int, count: int) -> Iterator[ConvProblem]:
    """Patches (kernel = stride) with and without a rest, and layers with few input channels."""
    r = random.Random(seed)
    while count:
        K = r.choice((1, 5, 8, 16, 24, 31, 33, 64))
        R, S = (r.choice((1, 2, 3, 4, 5, 8)) for _ in "RS")
        if r.random() < 0.5:
            C, stride, padding = r.choice((1, 3, 6, 17, 40)), (R, S), 0
        else:
            C, stride, padding = r.randint(1, 4), r.choice((1, 2, (3, 1))), r.choice((0, 1, (2, 0, 1, 3)))
        H, W = r.randint(R, 40), r.randint(S, 60)
        p = conv_problem(
            r.choice((1, 2, 5)), C, H, W, K, R, S, stride=stride, padding=padding, direction=r.choice(list(Direction))
        )
        if R * S > 1 and p.flops < 6e6:
            count -= 1
            yield p


def listed_problems() -> Iterator[ConvProblem]:
    for p, direction, dtype in itertools.product(PROBLEMS.values(), Direction, DTYPES):
        yield p._replace(direction=direction, dtype=dtype)


def with_reference(problem: ConvProblem) -> tuple[Tensor, Tensor, Tensor, float]:
    """Both operands, the float64 result, and the norm that a sum of that number of random terms is expected to have
    (the norm of a single result may be near zero by cancellation, and then measures nothing). In images of an odd width
    one value is so large that transforms compute its tiles again."""
    operands = operands_of(problem, *random_operands(problem))
    if problem.W % 2:
        first = operands[0]
        first[(0, -1, *(size // part for part, size in enumerate(first.shape[2:], 2)))] = 1e4
    exact = problem._replace(dtype="float64")
    want = Reference().run(*(t.double() for t in operands), exact)
    variance = Reference().run(*(t.double().square() for t in operands), exact)
    return (*operands, want, variance.sum().sqrt().item())


# ---- running ----------------------------------------------------------------------------------------------------


class Runner:
    """Calls kernels at every instruction set there is, compares, and counts what ran.

    Args:
        names: kernels to run.
        sides: for guarded memory, whether buffers are at the end of their region; None for the heap.
        progress: file that holds the case being run.
        programs: draws a program of the kernel's algorithm for each problem; None: the kernels decide.
        tiles: with how many of its sizes of tiles, drawn anew for each problem, a kernel that has several runs.
    """

    def __init__(
        self,
        names: Sequence[str],
        sides: Sequence[bool | None],
        progress: str,
        programs: random.Random | None = None,
        tiles: int = 2,
    ) -> None:
        self._programs = programs
        self._tiles, self._draw = tiles, random.Random(0)
        self._kernels = {name: tiles for name, tiles in {**kernels(), **packed_kernels()}.items() if name in names}
        assert len(self._kernels) == len(names)
        loaded = _library.library()
        assert loaded is not None
        self._levels = range(loaded.cs_best_isa() + 1)
        self._functions = {(k, b): _library._function(k, len(b)) for k, tiles in self._kernels.items() for b in tiles}
        self._memories = [[Heap() if side is None else Guarded(side) for _ in range(6)] for side in sides]
        self._progress = os.open(progress, os.O_WRONLY | os.O_CREAT)
        self.ran: Counter[str] = Counter()
        self.tuned = 0
        self.wrong: list[str] = []

    def _tune(self, name: str, before: tuple[int, ...], problem: ConvProblem) -> list[int]:
        """A random program, in the kernel's slots; only zeros if there is none."""
        slots = [0] * _library.TUNE_SLOTS
        stem = name.removeprefix("cs_")
        algorithm = BY_NAME.get("fft_tiled" if stem == "fft" else stem + "".join(map(str, before)))
        if self._programs is None or algorithm is None or algorithm.why_not(problem) is not None:
            return slots
        space = algorithm.space(problem)
        if space is not None:
            program = space.sample(problem, self._programs)
            order = algorithm.slots
            slots[: len(order)] = [program.get(parameter, 0) for parameter in order]
        return slots

    def _packed(self, name: str, before: tuple[int, ...], conv: Any, weight: int, memory: Any) -> int | None:
        """The address of the packed weight; None if the kernel does not apply."""
        loaded, pointer = _library.library(), ctypes.c_void_p
        assert loaded is not None
        size, pack = (loaded[name.replace("_frozen", suffix)] for suffix in ("_packed_bytes", "_pack"))
        size.argtypes, size.restype = (pointer, *(ctypes.c_int32,) * len(before)), ctypes.c_int64
        pack.argtypes = (*size.argtypes, pointer, pointer)
        count = size(ctypes.addressof(conv), *before)
        if count < 0:
            return None
        address = memory.place(count)
        ctypes.memset(address, 0xFF, count)
        assert pack(ctypes.addressof(conv), *before, weight, address) == _library.OK
        memory.check()
        memory.lock()
        return address

    def run(self, problem: ConvProblem, layouts: Sequence[tuple[str, str]], threads: int) -> None:
        p = problem
        a, b, want, scale = with_reference(p)
        generator = torch.Generator().manual_seed(1)
        bias = torch.randn(p.K, generator=generator)
        residual = torch.randn(p.y_shape, generator=generator).to(p.torch_dtype)
        activation = list(ACTIVATIONS)[(p.C + p.H + p.K) % len(ACTIVATIONS)]
        wants = [want]
        if p.direction == Direction.FORWARD:
            wants.append(ACTIVATIONS[activation](want + bias.double()[:, None, None] + residual.double()))
        drawn = {name: self._draw.sample(all_, min(self._tiles, len(all_))) for name, all_ in self._kernels.items()}
        functions = [(k, before, self._functions[k, before]) for k, befores in drawn.items() for before in befores]
        for memory, (a_layout, b_layout) in itertools.product(self._memories, layouts):
            result_layout = CONTIGUOUS if p.direction == Direction.BACKWARD_WEIGHT else a_layout
            conv = _library._conv(p, a_layout, b_layout, threads, 0)
            epilogue = _library.Epilogue(
                placed(memory[3], bias), placed(memory[4], residual, a_layout), _library.ACTIVATIONS[activation], SLOPE
            )
            a_at, b_at = placed(memory[0], a, a_layout), placed(memory[1], b, b_layout)
            for name, before, function in functions:
                for level, fused in itertools.product(self._levels, range(len(wants))):
                    conv.isa = level
                    posed = p._replace(layout=a_layout, threads=threads)
                    conv.tune[:] = self._tune(name, before, posed)
                    what = (
                        f"{name}{before or ''} isa={level} {a_layout}/{b_layout} threads={threads}"
                        f" {'with epilogue' if fused else ''} {list(conv.tune) if any(conv.tune) else ''} {p}"
                    )
                    os.pwrite(self._progress, what.encode().ljust(500), 0)
                    second: int | None = b_at
                    if name.endswith("_frozen"):
                        forward = p.direction == Direction.FORWARD
                        second = self._packed(name, before, conv, b_at, memory[5]) if forward else None
                        if second is None:
                            continue
                    out = memory[2].place(want.numel() * p.element_bytes)
                    ctypes.memset(out, 0xFF, want.numel() * p.element_bytes)  # NaN in every element type
                    status = function(
                        ctypes.addressof(conv),
                        *before,
                        a_at,
                        second,
                        out,
                        ctypes.addressof(epilogue) if fused else None,
                    )
                    # In images of a few pixels any window may be much smaller than the largest value.
                    spoilt = p.W % 2 or p.H * p.W < 16
                    left = spoilt and name in ("cs_winograd", "cs_fft") and status == _library.NONFINITE
                    assert left or status in (_library.OK, _library.UNSUPPORTED), f"{what}: status {status}"
                    if status == _library.UNSUPPORTED:
                        continue
                    self.ran[f"{name}{before or ''} {p.direction} {p.dtype} isa={level}"] += 1
                    self.tuned += any(conv.tune)
                    memory[2].check()
                    if left:
                        continue
                    got = at(out, want.shape, p.torch_dtype, result_layout).double()
                    # An epilogue's result is rounded once more, so its own size counts as well.
                    size = max(scale, wants[1].norm().item()) if fused else scale
                    error = (got - wants[fused]).norm().item() / max(size, 1e-30)
                    # The table speaks of root mean squares over many elements; a few may all round the worst way.
                    bound = FORWARD[p.dtype, grade(name, before, p)] * (1 if got.numel() > 64 else 2)
                    if not error <= bound * (WEIGHT_GRADIENT_FACTOR if p.direction == Direction.BACKWARD_WEIGHT else 1):
                        self.wrong.append(f"{what}: relative error {error:.2e} over {bound:.1e}")


def random_blocks(seed: int, count: int) -> Iterator[tuple[int, int, ConvProblem, tuple[str | None, ...]]]:
    """(channels of x, 0 if the first layer is missing, channels of y, the depthwise problem, activations)."""
    r = random.Random(seed)
    while count:
        D = r.choice((3, 8, 16, 17, 24, 33, 40, 96)) if r.random() < 0.9 else 1024
        C, K = r.choice((0, 1, 5, 16, 24)), r.choice((1, 7, 16, 24, 33, 40))
        H, W = (r.randint(1, 60), r.randint(1, 30)) if D < 100 else (r.randint(1, 9), r.randint(1, 9))
        R, S = r.choice((1, 3, 5, 7, 8)), r.choice((3, 5, 7))
        p = conv_problem(
            r.choice((1, 1, 2, 3)), D, H, W, D, R, S,
            stride=(r.choice((1, 2, 3)), r.choice((1, 2))),
            padding=r.choice((0, 1, 2, tuple(r.randint(0, 6) for _ in range(4)))), groups=D,
        )  # fmt: skip
        if p.P > 0 and p.Q > 0:
            count -= 1
            yield C, K, p._replace(layout=CHANNELS_LAST), tuple(r.choice(list(ACTIVATIONS)) for _ in range(3))


def run_blocks(spec: dict[str, Any]) -> dict[str, Any]:
    """`cs_block_frozen` on random blocks, at every instruction set and by one to three threads with the same bits."""
    loaded, pointer = _library.library(), ctypes.c_void_p
    assert loaded is not None
    function = loaded["cs_block_frozen"]
    function.argtypes, function.restype = (pointer,) * 5, ctypes.c_int32
    progress = os.open(spec["progress"], os.O_WRONLY | os.O_CREAT)
    packs = {}
    for name in ("product", "depthwise"):
        size, pack = loaded[f"cs_{name}_packed_bytes"], loaded[f"cs_{name}_pack"]
        size.argtypes, size.restype, pack.argtypes = (pointer,), ctypes.c_int64, (pointer,) * 3
        packs[name] = size, pack
    memories = [[Heap() if side is None else Guarded(side) for _ in range(9)] for side in spec["sides"]]
    ran: Counter[str] = Counter()
    wrong: list[str] = []
    for case, (C, K, p, activations) in enumerate(random_blocks(spec["seed"], spec["random"])):
        generator = torch.Generator().manual_seed(case)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator)

        D, channels = p.C, C or p.C
        expands = (normal(D, C, 1, 1) / C**0.5, normal(D)) if C else None
        taps, taps_bias = normal(D, 1, p.R, p.S) / (p.R * p.S) ** 0.5, normal(D)
        project, bias = normal(K, D, 1, 1) / D**0.5, normal(K)
        x, residual = normal(p.N, channels, p.H, p.W), normal(p.N, K, p.P, p.Q)
        value = x.double()
        if expands is not None:
            value = ACTIVATIONS[activations[0]](torch.conv2d(value, expands[0].double(), expands[1].double()))
        value = torch.nn.functional.pad(value, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom))
        value = torch.conv2d(value, taps.double(), taps_bias.double(), p.stride, groups=D)
        value = torch.conv2d(ACTIVATIONS[activations[1]](value), project.double(), bias.double())
        want = ACTIVATIONS[activations[2]](value + residual.double())
        pointwise = [
            conv_problem(p.N, channels, p.H, p.W, D, 1, 1)._replace(layout=CHANNELS_LAST),
            conv_problem(p.N, D, p.P, p.Q, K, 1, 1)._replace(layout=CHANNELS_LAST),
        ]
        for memory, level in itertools.product(memories, range(loaded.cs_best_isa() + 1)):

            def packed(name: str, q: ConvProblem, weight: Tensor, to: Any, level: int = level) -> int:
                conv = _library._conv(q, CHANNELS_LAST, CONTIGUOUS, 1, level)
                size, pack = packs[name]
                address = to.place(size(ctypes.addressof(conv)))
                assert pack(ctypes.addressof(conv), weight.data_ptr(), address) == _library.OK
                to.lock()
                return int(address)

            codes = [_library.ACTIVATIONS[a] for a in activations]
            block = _library.Block(C=channels, K=K, expand_activation=codes[0], taps_activation=codes[1])
            block.expand_parameter = block.taps_parameter = SLOPE
            if expands is not None:
                block.expand = packed("product", pointwise[0], expands[0], memory[0])
                block.expand_bias = placed(memory[1], expands[1])
            block.taps, block.taps_bias = packed("depthwise", p, taps, memory[2]), placed(memory[3], taps_bias)
            block.project = packed("product", pointwise[1], project, memory[4])
            addresses = placed(memory[5], bias), placed(memory[6], residual, CHANNELS_LAST)
            epilogue = _library.Epilogue(*addresses, codes[2], SLOPE)
            x_at = placed(memory[7], x, CHANNELS_LAST)
            first: Tensor | None = None
            for threads in (1, 2, 3):
                what = f"cs_block_frozen isa={level} threads={threads} C={C} K={K} {activations} {p}"
                os.pwrite(progress, what.encode().ljust(500), 0)
                conv = _library._conv(p, CHANNELS_LAST, CONTIGUOUS, threads, level)
                out = memory[8].place(4 * want.numel())
                ctypes.memset(out, 0xFF, 4 * want.numel())
                status = function(*map(ctypes.addressof, (conv, block)), x_at, out, ctypes.addressof(epilogue))
                assert status == _library.OK, f"{what}: status {status}"
                memory[8].check()
                got = at(out, want.shape, torch.float32, CHANNELS_LAST).clone()
                error = ((got.double() - want).norm() / max(want.norm().item(), want.numel() ** 0.5 / 10)).item()
                if not error <= 4e-6:
                    wrong.append(f"{what}: relative error {error:.2e}")
                first = got if first is None else first
                if not torch.equal(got, first):
                    wrong.append(f"{what}: other bits than by one thread")
                ran[f"block {'of three' if C else 'of two'} isa={level}"] += 1
    return {"ran": ran, "wrong": wrong}


def outcome(spec: dict[str, Any]) -> dict[str, Any]:
    """What ran, and what was wrong."""
    if spec.get("spots"):
        from _guarded_spots import run_spots

        return run_spots(spec)
    if spec.get("volumes"):
        from _guarded_volumes import run_volumes

        return run_volumes(spec)
    if spec.get("steps"):
        from _guarded_steps import run_steps

        return run_steps(spec)
    if spec.get("blocks"):
        return run_blocks(spec)
    programs = random.Random(spec["seed"]) if spec.get("programs") else None
    runner = Runner(spec["kernels"], spec["sides"], spec["progress"], programs)
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    for i, problem in enumerate(random_problems(spec["seed"], spec["random"])):
        runner.run(problem, [pairs[i % 4]], THREADS[i % 5])
    for i, problem in enumerate(pointwise_problems(spec["seed"], spec.get("pointwise", 0))):
        runner.run(problem, [(CHANNELS_LAST, CONTIGUOUS)], THREADS[i % 5])
    for i, problem in enumerate(patch_problems(spec["seed"], spec.get("patches", 0))):
        runner.run(problem, [pairs[i % 4]], THREADS[i % 5])
    if spec["listed"]:
        for i, problem in enumerate(listed_problems()):
            runner.run(problem, pairs if spec["listed"] == "all layouts" else [pairs[i % 4]], 1 + i % 2)
    ran = {**runner.ran, "tuned": runner.tuned} if programs else runner.ran
    return {"ran": ran, "wrong": runner.wrong}


def main(specs: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    print(json.dumps([outcome(spec) for spec in specs]))


def run(environment: dict[str, str] | None = None, **spec: Any) -> dict[str, int]:
    """Run cases in a process of their own; how often each kernel ran, by direction, element type and instruction set.

    Args:
        environment: added to this process's.
        kernels, sides: as `Runner` has them.
        random, seed: how many random problems, and from which seed.
        pointwise: how many random 1x1 problems without padding, in channels_last.
        patches: how many random patches and layers with few input channels.
        programs: whether each case has a program drawn at random; "tuned" then counts those that were not the default.
        listed: "" (none), "one layout" or "all layouts": the problems of tests/problems.py.

    Raises:
        AssertionError: the process died, by a signal or by a sanitizer's report, or a result is wrong.
    """
    return run_all({"": spec}, environment)[""]


def run_all(specs: dict[str, dict[str, Any]], environment: dict[str, str] | None = None) -> dict[str, dict[str, int]]:
    """Several such runs, by name, in one process, which takes seconds to start."""
    # Threads sleep while they wait (conftest.py): the machine may have fewer cores than a case has threads.
    environment = {**os.environ, **(environment or {})}
    with tempfile.NamedTemporaryFile() as progress:
        given = json.dumps([{**spec, "progress": progress.name} for spec in specs.values()])
        if "LD_PRELOAD" in environment:
            command = [sys.executable, __file__, given]
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        else:
            environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
            code = "import json, sys, _guarded; _guarded.main(json.loads(sys.argv[1]))"
            child = fresh.run(["-c", code, given], env=environment, timeout=800)
        case = Path(progress.name).read_text().strip()
    if child.returncode != 0:
        how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit status {child.returncode}"
        raise AssertionError(f"{how} at: {case}\n{child.stderr[-6000:]}")
    results = json.loads(child.stdout.splitlines()[-1])
    wrong = [one for result in results for one in result["wrong"]]
    assert not wrong, "\n".join([f"{len(wrong)} wrong results", *wrong[:20]])
    return {name: result["ran"] for name, result in zip(specs, results, strict=True)}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
