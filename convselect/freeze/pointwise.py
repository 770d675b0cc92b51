"""Pointwise programs of the C library (`csrc/pointwise.inc`): many operations on tensors in one pass over them."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from convselect.freeze.bound import Bound, Call, bound
from convselect.kernels import _library

DIMS = 4
REGISTERS = 16
INPUTS = 16
_MAX_EXPONENT = 64
_BINARY = {"add": 16, "sub": 17, "mul": 18, "div": 19, "min": 20, "max": 21}
_UNARY = {
    "copy": 32, "neg": 33, "abs": 34, "square": 35, "sqrt": 36, "rsqrt": 37, "reciprocal": 38, "exp": 39, "log": 40,
    "softplus": 41, "mish": 42,
}  # fmt: skip
# Operations of one tensor and numbers, and how many.
_WITH_NUMBERS = {"elu": 43, "clamp": 44, "pow": 45, "leaky_relu": _library.ACTIVATIONS["leaky_relu"]}
_NUMBERS = {"elu": 1, "clamp": 2, "pow": 1, "leaky_relu": 1}
_ADD_RELU, _MUL_ADD = 22, 24
CODES: dict[str, int] = {
    **{name: code for name, code in _library.ACTIVATIONS.items() if name}, **_BINARY, **_UNARY, **_WITH_NUMBERS,
}  # fmt: skip


@dataclass(frozen=True)
class Input:
    """The tensor at `index` of a program's inputs."""

    index: int


@dataclass(frozen=True)
class Result:
    """The result of the instruction at `index`."""

    index: int


Operand = Input | Result | float
Instruction = tuple[str, tuple[Operand, ...]]


class _Instruction(ctypes.Structure):
    """`cs_instruction` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("op", "to", "a", "b", "c", "reserved")),
        ("p", ctypes.c_float), ("q", ctypes.c_float),
    )  # fmt: skip


class _Program(Call):
    """`cs_pointwise_program` of csrc/convselect.h."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * DIMS), ("strides", ctypes.c_int64 * DIMS),
        ("input_strides", ctypes.c_void_p), ("instructions", ctypes.c_void_p),
        ("inputs", ctypes.c_int64), ("instructions_count", ctypes.c_int64),
    )  # fmt: skip


def bind(instructions: Sequence[Instruction], inputs: Sequence[Tensor], out: Tensor) -> Bound | None:
    """The program as one C call on the memory of these tensors.

    Args:
        instructions: (name, operands), in order; the last one's result is `out`. Operands are inputs, results of
            instructions before, and numbers. Names and operands: activations of `_library.ACTIVATIONS` (x), with
            "leaky_relu" (x, slope); "add", "sub", "mul", "div", "min", "max" (x, y); "copy", "neg", "abs", "square",
            "sqrt", "rsqrt", "reciprocal", "exp", "log", "softplus", "mish" (x); "elu" (x, alpha);
            "clamp" (x, low, high); "pow" (x, exponent), a whole number of magnitude 64 at most. They compute what
            PyTorch's functions of these names do, with their defaults: NaN passes "min", "max" and "clamp", "gelu" is
            the erf form.
        inputs: float32 on the CPU; broadcast against `out`.
        out: float32 on the CPU. It may be one of the inputs, but may not share memory with them otherwise.

    Returns:
        A call of `cs_pointwise`: addresses of the program, of an array with the inputs' addresses (numbers follow),
        and of `out`. None if a tensor is of another kind, strides are not covered (in the fastest dimension of `out`,
        whose stride is 1, inputs move by 1 or stand still; four dimensions remain after merging), or the program needs
        more than 16 inputs or registers.

    Raises:
        ValueError: for an unknown name, or operands that do not fit it.
    """
    constants: list[float] = []
    coded = _coded(instructions, len(inputs), constants)
    form = _form(inputs, out)
    if coded is None or form is None or not _library.available() or len(inputs) + len(constants) > INPUTS:
        return None
    sizes, strides, input_strides = form
    numbers = (ctypes.c_float * max(len(constants), 1))(*constants)
    addresses = [t.data_ptr() for t in inputs]
    addresses += [ctypes.addressof(numbers) + 4 * i for i in range(len(constants))]
    pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
    flat = list(itertools.chain.from_iterable(input_strides)) + [0] * (DIMS * len(constants))
    steps = (ctypes.c_int64 * max(len(flat), 1))(*flat)
    code = (_Instruction * len(coded))(*coded)
    program = _Program(
        _library.isa(), torch.get_num_threads(), (ctypes.c_int64 * DIMS)(*sizes), (ctypes.c_int64 * DIMS)(*strides),
        ctypes.addressof(steps), ctypes.addressof(code), len(addresses), len(coded),
    )  # fmt: skip
    return bound("cs_pointwise", program, pointers, out, steps, code, numbers, tuple(inputs))


# ---- instructions ---------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One instruction of the C library: its values, and the numbers that belong to the operation."""

    code: int
    values: tuple[Operand, ...]
    numbers: tuple[float, ...]
    result: int


def _coded(instructions: Sequence[Instruction], inputs: int, constants: list[float]) -> list[_Instruction] | None:
    """The instructions with registers for results; None if they need too many. Numbers are added to `constants`."""
    if not instructions:
        raise ValueError("a program without instructions")
    steps = _joined([_checked(name, operands, inputs, i) for i, (name, operands) in enumerate(instructions)])
    last_use = {v.index: step.result for step in steps for v in step.values if isinstance(v, Result)}
    free, registers = list(range(REGISTERS))[::-1], dict[int, int]()
    coded = []
    for code, values, numbers, result in steps:
        sources = [_source(value, inputs, registers, constants) for value in values]
        if not free:
            return None
        registers[result] = free.pop()  # before operands' are given back: an instruction does not write what it reads
        for index in {value.index for value in values if isinstance(value, Result)}:
            if last_use[index] == result:
                free.append(registers[index])
        if result not in last_use:
            free.append(registers[result])
        a, b, c = (*sources, *sources[-1:], *sources[-1:])[:3]
        p, q = (*numbers, 0.0, 0.0)[:2]
        coded.append(_Instruction(code, registers[result], a, b, c, 0, p, q))
    return coded


def _source(value: Operand, inputs: int, registers: dict[int, int], constants: list[float]) -> int:
    if isinstance(value, Input):
        return -1 - value.index
    if isinstance(value, Result):
        return registers[value.index]
    known = [number.hex() for number in constants]  # 0.0 equals -0.0
    if value.hex() not in known:
        constants.append(value)
        known.append(value.hex())
    return -1 - inputs - known.index(value.hex())


def _joined(steps: list[_Step]) -> list[_Step]:
    """relu(a + b) and a * b + c as one step each, if nothing else reads the value in between."""
    uses = Counter(v.index for step in steps for v in step.values if isinstance(v, Result))
    kept: dict[int, _Step] = {}
    for step in steps:
        before = [
            kept[v.index] for v in step.values if isinstance(v, Result) and uses[v.index] == 1 and v.index in kept
        ]
        for earlier in before:
            if (step.code, earlier.code) == (CODES["relu"], CODES["add"]):
                step = step._replace(code=_ADD_RELU, values=earlier.values)
            elif (step.code, earlier.code) == (CODES["add"], CODES["mul"]):
                other = next(v for v in step.values if v != Result(earlier.result))
                # The evaluator is quickest if a tensor comes first.
                factors = sorted(earlier.values, key=lambda v: not isinstance(v, Input | Result))
                step = step._replace(code=_MUL_ADD, values=(*factors, other))
            else:
                continue
            del kept[earlier.result]
            break
        kept[step.result] = step
    return list(kept.values())


def _checked(name: str, operands: tuple[Operand, ...], inputs: int, index: int) -> _Step:
    if name not in CODES:
        raise ValueError(f"no pointwise operation {name!r}")
    count, numbers = 2 if name in _BINARY else 1, _NUMBERS.get(name, 0)
    if len(operands) != count + numbers:
        raise ValueError(f"{name} takes {count + numbers} operands, not {len(operands)}")
    for operand in operands[:count]:
        if isinstance(operand, Input | Result):
            if not 0 <= operand.index < (inputs if isinstance(operand, Input) else index):
                raise ValueError(f"{name}: {operand} does not exist yet")
        elif not isinstance(operand, int | float):
            raise ValueError(f"{name} of {operand!r}")
    rest = tuple(number for number in operands[count:] if isinstance(number, int | float))
    if len(rest) != numbers:
        raise ValueError(f"{name} takes a number last, not {operands[-1]!r}")
    if name == "pow" and not (float(rest[0]).is_integer() and abs(rest[0]) <= _MAX_EXPONENT):
        raise ValueError(f"an exponent of {rest[0]}")
    if any(math.isnan(number) for number in rest):
        raise ValueError(f"{name} with NaN")
    values = tuple(float(v) if isinstance(v, int | float) else v for v in operands[:count])
    return _Step(CODES[name], values, tuple(map(float, rest)), index)


# ---- shapes and strides ---------------------------------------------------------------------------------------------


def _form(
    inputs: Sequence[Tensor], out: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]] | None:
    """(sizes, strides of out, strides of each input) in four dimensions; None if that cannot be."""
    if out.numel() == 0 or not all(is_plain(t) for t in (*inputs, out)):
        return None
    try:
        all_strides = [out.stride(), *(t.expand(out.shape).stride() for t in inputs)]
    except RuntimeError:
        return None
    if any(shares_memory(t, out) and _place(t) != _place(out) for t in inputs):
        return None
    steps = out.stride()
    order = sorted((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: (-steps[d], d))
    merged: list[tuple[int, tuple[int, ...]]] = []  # (size, strides of all), the slowest first
    for d in order:
        size, moves = out.shape[d], tuple(strides[d] for strides in all_strides)
        if merged and all(before == move * size for before, move in zip(merged[-1][1], moves, strict=True)):
            merged[-1] = (merged[-1][0] * size, moves)
        else:
            merged.append((size, moves))
    last = merged[-1][1] if merged else (1, *(0 for _ in inputs))
    if len(merged) > DIMS or last[0] != 1 or not all(step in (0, 1) for step in last[1:]):
        return None
    for (_, (slower, *_)), (size, (faster, *_)) in itertools.pairwise(merged):
        if slower < faster * size:
            return None  # `out` overlaps itself
    padded = [(1, (0,) * len(all_strides))] * (DIMS - max(len(merged), 1)) + (merged or [(1, last)])
    sizes = tuple(size for size, _ in padded)
    by_tensor = list(zip(*(moves for _, moves in padded), strict=True))
    return sizes, by_tensor[0], by_tensor[1:]


def is_plain(t: Tensor) -> bool:
    """Whether this is float32 memory that the C library can read: no lazy negation, no other device or layout."""
    return (
        t.dtype == torch.float32 and t.is_cpu and t.layout == torch.strided and not t.is_neg()
        and not t._is_zerotensor()
    )  # fmt: skip


def _place(t: Tensor) -> tuple[int, torch.Size, list[int]]:
    """Where a tensor's elements lie; the strides of dimensions of one element say nothing."""
    return t.data_ptr(), t.shape, [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of memory that two tensors span meet, and not as channels of the same pixels."""
    begins = [t.data_ptr() for t in (a, b)]
    ends = [t.data_ptr() + 4 * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))) for t in (a, b)]
    return a.numel() > 0 and max(begins) < min(ends) and not interleaved(a, b)


def interleaved(a: Tensor, b: Tensor) -> bool:
    """Whether these are images in NHWC that are different channels of the same pixels, so that no element is common."""
    if a.dim() != 4 or a.stride() != b.stride() or a.stride(1) != 1:
        return False
    pitch = a.stride(3)
    between, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    if pitch <= 0 or rest or any(step % pitch for step in (a.stride(0), a.stride(2))):
        return False
    return a.shape[1] <= between % pitch <= pitch - b.shape[1]
