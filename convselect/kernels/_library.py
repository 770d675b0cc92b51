"""The C kernels of `csrc/`, loaded through ctypes and called on data pointers.

Without the library (no compiler at installation, or `CONVSELECT_NO_NATIVE=1`) `available()` is False, and algorithms
compute with PyTorch's operations or say through `why_not` that they do not apply. The library is loaded on first use:
torch is imported by then, so that the library shares torch's OpenMP threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.base.warnings import warn_once
from convselect.kernels import _huge_pages

ABI = 11
TUNE_SLOTS = 8
OK, NO_MEMORY, UNSUPPORTED, NONFINITE = range(4)
ISAS = {"base": 0, "avx2": 1, "avx512": 2}
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
LAYOUTS = {CONTIGUOUS: 0, CHANNELS_LAST: 1}
DIRECTIONS = {Direction.FORWARD: 0, Direction.BACKWARD_DATA: 1, Direction.BACKWARD_WEIGHT: 2}
ACTIVATIONS = {
    None: 0, "relu": 1, "relu6": 2, "silu": 3, "hardswish": 4, "hardsigmoid": 5, "sigmoid": 6, "gelu": 7,
    "gelu_tanh": 8, "tanh": 9, "leaky_relu": 10,
}  # fmt: skip
_FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last}
_VOLUME_FORMATS = {CONTIGUOUS: torch.contiguous_format, CHANNELS_LAST: torch.channels_last_3d}


class Conv(ctypes.Structure):
    """`cs_conv` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in (
            "N", "C", "H", "W", "K", "R", "S", "P", "Q",
            "stride_h", "stride_w", "pad_top", "pad_left", "dil_h", "dil_w", "groups",
        )),
        *((name, ctypes.c_int32) for name in (
            "dtype", "direction", "x_layout", "y_layout", "weight_layout", "threads", "isa", "reserved",
        )),
        ("tune", ctypes.c_int32 * TUNE_SLOTS),
        ("x_pitch", ctypes.c_int64), ("y_pitch", ctypes.c_int64),
    )  # fmt: skip


class Volume(ctypes.Structure):
    """`cs_volume` of csrc/convselect.h."""

    _fields_ = (
        ("conv", Conv),
        *((name, ctypes.c_int64) for name in ("D", "T", "O", "stride_d", "pad_front", "dil_d")),
    )


class Repetition(ctypes.Structure):
    """`cs_repetition` of csrc/convselect.h."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("conv", ctypes.c_void_p),
        *((name, ctypes.c_int64 * 3) for name in ("counts", "x_steps", "y_steps")),
        ("threads", ctypes.c_int32), ("reserved", ctypes.c_int32),
    )  # fmt: skip


class Epilogue(ctypes.Structure):
    """`cs_epilogue` of csrc/convselect.h."""

    _fields_ = (
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("parameter", ctypes.c_float),
    )


class Block(ctypes.Structure):
    """`cs_block` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expand", "expand_bias", "taps", "taps_bias", "project")),
        ("C", ctypes.c_int64),
        ("K", ctypes.c_int64),
        ("expand_activation", ctypes.c_int32),
        ("taps_activation", ctypes.c_int32),
        ("expand_parameter", ctypes.c_float),
        ("taps_parameter", ctypes.c_float),
    )


_Tune = ctypes.c_int32 * TUNE_SLOTS
_NO_TUNE = _Tune()  # copied into every struct


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None if there is none, it is switched off, or, with a warning, it cannot be loaded or belongs
    to another version of the package.

    `CONVSELECT_LIBRARY` names another build of it, for example one with sanitizers.
    """
    if os.environ.get("CONVSELECT_NO_NATIVE", "").strip() not in ("", "0"):
        return None
    named = os.environ.get("CONVSELECT_LIBRARY")
    path = named or os.path.join(os.path.dirname(__file__), "_csrc.so")
    if not named and not os.path.exists(path):  # not built
        return None
    try:
        loaded = ctypes.CDLL(path)
        if loaded.cs_abi() == ABI:
            loaded.cs_scratch_bytes.restype = ctypes.c_int64
            return loaded
        reason = f"{path} is of another version"
    except (OSError, AttributeError) as error:
        reason = str(error)
    text = f"the C kernels are not used: {reason}. Results are right, but slower; `convselect doctor` says what to do."
    warn_once("library", f"convselect: {text}")
    return None


def available() -> bool:
    return library() is not None


def give_back() -> None:
    """Give back the scratch memory that the calling thread keeps, and what malloc holds unused."""
    loaded = library()
    if loaded is not None:
        loaded.cs_free_scratch()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def isa() -> int:
    """The instruction set for which the kernels are called: the best available one that torch may use (the user can
    restrict torch)."""
    loaded = library()
    assert loaded is not None
    best: int = loaded.cs_best_isa()
    capability = torch.backends.cpu.get_cpu_capability().lower()
    allowed = "avx512" if capability.startswith("avx512") else "avx2" if capability.startswith("avx2") else "base"
    return min(best, ISAS[allowed])


class _Call(NamedTuple):
    """The part of a call that is the same for every call of a kernel on one problem."""

    function: Any
    conv: Any
    operand_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    result_shape: tuple[int, ...]
    dtype: torch.dtype
    out_format: torch.memory_format
    large: bool  # whether the result is written to huge pages


@functools.cache
def _function(name: str, leading_ints: int, pointers: int = 4, result: Any = ctypes.c_int32) -> Any:
    """A function of the library as a separate object, whose argument types no other code sets, so that ints can be
    passed as pointers. It takes a `cs_conv`, `leading_ints` integers and `pointers` pointers: a kernel's operands,
    result and epilogue."""
    loaded = library()
    assert loaded is not None
    function = loaded[name]
    pointer = ctypes.c_void_p
    function.argtypes = (pointer, *(ctypes.c_int32,) * leading_ints, *(pointer,) * pointers)
    function.restype = result
    return function


def _conv(p: ConvProblem, a_layout: str, b_layout: str, threads: int, isa: int, tune: tuple[int, ...] = ()) -> Conv:
    """The problem as a C struct, with operands in these layouts; a weight gradient is contiguous. `tune`: the kernel's
    parameters in the order of its slots, 0 if the kernel decides."""
    a, b = LAYOUTS[a_layout], LAYOUTS[b_layout]
    x, y, weight = (a, b, 0) if p.direction == Direction.BACKWARD_WEIGHT else (a, a, b)
    return Conv(
        *p[1:8], p.P, p.Q, p.stride_h, p.stride_w, p.pad_top, p.pad_left, p.dil_h, p.dil_w, p.groups,
        DTYPES[p.dtype], DIRECTIONS[p.direction], x, y, weight, threads, isa, 0,
        _Tune(*tune) if tune else _NO_TUNE,
    )  # fmt: skip


def _struct(
    p: ConvProblem, a_layout: str, b_layout: str, threads: int, isa: int, tune: tuple[int, ...] = ()
) -> Conv | Volume:
    """As `_conv`, with the depth if there is one."""
    conv = _conv(p, a_layout, b_layout, threads, isa, tune)
    return Volume(conv, p.D, p.T, p.O, p.stride_d, p.pad_front, p.dil_d) if p.is_volume else conv


def packed_floats(kernel: str, conv: Any) -> int | None:
    """Floats of a weight that `<kernel>_pack` has packed for this struct (by reference); None: it does not apply."""
    size = _function(f"{kernel}_packed_bytes", 0, 0, ctypes.c_int64)(conv)
    return None if size < 0 else int(size) // 4


def packed(
    kernel: str, floats: int | None, weight: Tensor, problem: ConvProblem, layout: str, level: int | None = None
) -> Tensor:
    """A float32 weight in the order in which `<kernel>_frozen` reads it, with x in this layout, on this instruction set
    (None: the one in use): one-dimensional, of `floats` elements.

    Raises:
        ValueError: if `floats` is None, or the weight's shape, dtype or device is not the problem's.
    """
    if floats is None or weight.shape != problem.weight_shape or weight.dtype != torch.float32 or not weight.is_cpu:
        raise ValueError(f"a weight {weight.dtype} {tuple(weight.shape)} for {problem}")
    result = torch.empty(floats, dtype=torch.float32, device="cpu")
    weight = weight.resolve_neg().contiguous()
    forward = problem.with_direction(Direction.FORWARD)
    conv = ctypes.byref(_conv(forward, layout, CONTIGUOUS, problem.threads, isa() if level is None else level))
    status = _function(f"{kernel}_pack", 0, 2)(conv, weight.data_ptr(), result.data_ptr())
    assert status == OK
    return result


@functools.lru_cache(maxsize=4096)
def _prepared(
    name: str,
    leading_ints: int,
    problem: ConvProblem,
    a_layout: str,
    b_layout: str,
    threads: int,
    isa: int,
    tune: tuple[int, ...],
) -> _Call:
    p = problem
    first = p.y_shape if p.direction == Direction.BACKWARD_DATA else p.x_shape
    second = p.y_shape if p.direction == Direction.BACKWARD_WEIGHT else p.weight_shape
    formats = _VOLUME_FORMATS if p.is_volume else _FORMATS
    return _Call(
        _function(name, leading_ints),
        ctypes.byref(_struct(p, a_layout, b_layout, threads, isa, tune)),
        (first, second),
        p.result_shape,
        p.torch_dtype,
        formats[CONTIGUOUS if p.direction == Direction.BACKWARD_WEIGHT else a_layout],
        math.prod(p.result_shape) * p.element_bytes >= _huge_pages.LARGE_BYTES,
    )


def dense(tensor: Tensor, otherwise: str) -> tuple[Tensor, str]:
    """(tensor, layout): the tensor itself if it is dense in NCHW or NHWC order (NCDHW or NDHWC), else a copy in the
    layout `otherwise`.

    The result's memory holds its values: lazily negated tensors, and tensors that a flag marks as zero, are copied too.
    """
    if tensor.is_neg() or tensor._is_zerotensor():
        tensor = tensor.resolve_neg().clone()
    if tensor.is_contiguous():
        return tensor, CONTIGUOUS
    formats = _FORMATS if tensor.dim() == 4 else _VOLUME_FORMATS
    if tensor.is_contiguous(memory_format=formats[CHANNELS_LAST]):
        return tensor, CHANNELS_LAST
    return tensor.contiguous(memory_format=formats[otherwise]), otherwise


def _epilogue(
    bias: Tensor | None, residual: Tensor | None, activation: str | None, slope: float, p: ConvProblem, call: _Call
) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
    """The struct for the kernel, and the tensors that must live until it returns."""
    if p.direction != Direction.FORWARD:
        raise ValueError(f"bias, residual and activation belong to the forward direction, not to {p}")
    bias_at = residual_at = None
    if bias is not None:
        if bias.dtype != torch.float32 or not bias.is_contiguous() or bias.is_neg():
            bias = bias.resolve_neg().float().contiguous()
        if bias.shape != (p.K,) or not bias.is_cpu:
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {p}")
        bias_at = bias.data_ptr()
    if residual is not None:
        residual = residual.resolve_neg().contiguous(memory_format=call.out_format)
        if residual.shape != call.result_shape or residual.dtype != call.dtype or not residual.is_cpu:
            raise ValueError(f"a residual {residual.dtype} {tuple(residual.shape)} for {p}")
        residual_at = residual.data_ptr()
    return ctypes.byref(Epilogue(bias_at, residual_at, ACTIVATIONS[activation], slope)), (bias, residual)


def call(*arguments: Any, **options: Any) -> Tensor:
    """As `call_checked`, but returns only the result, not whether it may be used."""
    return call_checked(*arguments, **options)[0]


def call_checked(
    name: str,
    a: Tensor,
    b: Tensor,
    problem: ConvProblem,
    leading_ints: tuple[int, ...] = (),
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    isa_level: int | None = None,
    tune: tuple[int, ...] = (),
    slope: float = 0.01,
) -> tuple[Tensor, bool]:
    """Run kernel `name` on the direction's two operands.

    Args:
        leading_ints: integers that the kernel takes ahead of its operands.
        bias, residual, activation: y becomes activation(y + bias + residual); forward only. `bias` is (K,),
            `residual` is shaped like y.
        tune: the kernel's parameters, in the order of its slots; 0 if the kernel decides.
        slope: of "leaky_relu" below 0.

    Returns:
        The result, in the layout of the streamed operand (for a weight gradient contiguous), and whether it may be
        used: False if a transform method found an infinity or a NaN that it may have spread over neighbours.

    Raises:
        MemoryError: if there is not enough scratch memory.
        NotImplementedError: if the kernel declines; its `why_not` should have said so.
        ValueError: if a tensor does not fit the problem; the kernel, which sees only pointers, is not called then.
    """
    p = problem
    preferred = p.layout if p.layout in LAYOUTS else CONTIGUOUS
    a, a_layout = dense(a, preferred)
    b, b_layout = dense(b, preferred if p.direction == Direction.BACKWARD_WEIGHT else CONTIGUOUS)
    level = isa() if isa_level is None else isa_level
    plan = _prepared(name, len(leading_ints), p, a_layout, b_layout, torch.get_num_threads(), level, tune)
    dtype = plan.dtype
    if (a.shape, b.shape) != plan.operand_shapes or a.dtype != dtype or b.dtype != dtype or not (a.is_cpu and b.is_cpu):
        raise ValueError(f"{name}: operands {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} for {p}")
    out = torch.empty(plan.result_shape, dtype=dtype, device="cpu", memory_format=plan.out_format)
    if plan.large:
        _huge_pages.use_huge_pages(out)
    epilogue = held = None
    if bias is not None or residual is not None or activation is not None:
        epilogue, held = _epilogue(bias, residual, activation, slope, p, plan)
    status = plan.function(plan.conv, *leading_ints, a.data_ptr(), b.data_ptr(), out.data_ptr(), epilogue)
    del held
    if status == OK:
        return out, True
    if status == NONFINITE:
        return out, False
    if status == NO_MEMORY:
        raise MemoryError(f"{name}: no scratch memory for {p}")
    raise NotImplementedError(f"{name} does not compute {p}")


def copied_bytes(problem: ConvProblem) -> int:
    """Bytes of the dense copies that `call` makes of operands in other layouts. A weight gradient's problem does not
    give the layout of grad_y; it is assumed to be dense."""
    p = problem
    streamed = p.y_bytes if p.direction == Direction.BACKWARD_DATA else p.x_bytes
    weight = 0 if p.direction == Direction.BACKWARD_WEIGHT or p.weight_layout in LAYOUTS else p.weight_bytes
    return (0 if p.layout in LAYOUTS else streamed) + weight


@functools.lru_cache(maxsize=8)
def _asked_about(problem: ConvProblem, isa: int, tune: tuple[int, ...]) -> Any:
    """The struct of queries, by reference: several algorithms are asked about one problem."""
    return ctypes.byref(_struct(problem, CONTIGUOUS, CONTIGUOUS, problem.threads, isa, tune))


def workspace_bytes(
    query: str, problem: ConvProblem, leading_ints: tuple[int, ...] = (), tune: tuple[int, ...] = ()
) -> int:
    """Memory that a call takes, in bytes, without operands and result: the kernel's scratch memory, as its query
    function returns it, and dense copies of operands.

    Raises:
        NotImplementedError: if the kernel does not apply.
    """
    conv = _asked_about(problem, isa(), tune)
    scratch: int = _function(query, len(leading_ints), 0, ctypes.c_int64)(conv, *leading_ints)
    if scratch < 0:
        raise NotImplementedError(f"{query} does not apply to {problem}")
    return scratch + copied_bytes(problem)


# ---- small networks ---------------------------------------------------------------------------------------------

LAYER_ROWS = 16


class Layer(ctypes.Structure):
    """`cs_layer` of csrc/convselect.h."""

    _fields_ = (
        ("matrix", ctypes.c_void_p), ("source", ctypes.c_void_p), ("target", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("padded", ctypes.c_int64),
        ("rectified", ctypes.c_int32), ("half", ctypes.c_int32),
    )  # fmt: skip


class Input(ctypes.Structure):
    """`cs_input` of csrc/convselect.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "high", "mean", "scale", "target")),
        ("n", ctypes.c_int64),
    )


_MODEL_FIELDS = struct.Struct("=24q")
_MODEL_DTYPES = {**DTYPES, "float64": 3}
_STRIDED = 2  # any other layout


class Network:
    """A chain of matrix-vector products on vectors that stay where they are, as one call of C.

    Args:
        x: the input (n,); numpy float32, like all other arrays here.
        normalise: low, high, mean, scale, target: vectors (n,).
        layers: (matrix (rows, columns), source (columns,), target (rows,), rectified) each; vectors contiguous. Vectors
            are used in place and kept alive, matrices are copied: in float16 if that keeps their values.
    """

    def __init__(self, x: Any, normalise: Sequence[Any], layers: Sequence[tuple[Any, Any, Any, bool]]) -> None:
        import numpy as np

        loaded = library()
        assert loaded is not None
        pointer = ctypes.c_void_p
        self._network, self._predict = loaded["cs_network"], loaded["cs_predict"]
        self._network.argtypes = (ctypes.c_int32, pointer, pointer, pointer, ctypes.c_int64)
        self._predict.argtypes = (ctypes.c_int32, *(pointer,) * 4, ctypes.c_int64)
        self._network.restype = self._predict.restype = ctypes.c_int32
        chain = (Layer * len(layers))()
        self._held: list[Any] = [x, normalise, layers, chain]
        for entry, (matrix, source, target, rectified) in zip(chain, layers, strict=True):
            rows, columns = matrix.shape
            padded = -(-rows // LAYER_ROWS) * LAYER_ROWS
            with np.errstate(over="ignore"):
                narrow = matrix.astype(np.float16)
            # Without instructions for it, to widen them would take longer than to read them.
            half = isa() > ISAS["base"] and bool((narrow == matrix).all())
            by_column = np.zeros((columns, padded), np.float16 if half else np.float32)
            by_column[:, :rows] = (narrow if half else matrix).T
            self._held.append(by_column)
            entry.matrix, entry.source, entry.target = by_column.ctypes.data, source.ctypes.data, target.ctypes.data
            entry.rows, entry.columns, entry.padded = rows, columns, padded
            entry.rectified, entry.half = rectified, half
        given = Input(*(vector.ctypes.data for vector in normalise), len(normalise[0]))
        self._fields = ctypes.create_string_buffer(_MODEL_FIELDS.size)
        self._held.append(given)
        self._chain = (x.ctypes.data, ctypes.addressof(given), ctypes.addressof(chain), len(layers))
        self._isa, self._fields_at = isa(), ctypes.addressof(self._fields)

    def run(self) -> None:
        """Run it on the values that `x` holds."""
        x, given, chain, count = self._chain
        self._network(self._isa, given, x, chain, count)

    def predict(self, problem: ConvProblem) -> bool:
        """Write the features of a problem to `x`, and run it on them. False: a size is not positive.

        For images that are not oversized; `csrc/features.c` computes in 64 bits what Python computes exactly.
        """
        p = problem
        _MODEL_FIELDS.pack_into(
            self._fields, 0, *p[1:17], DIRECTIONS[p.direction], _MODEL_DTYPES[p.dtype],
            LAYOUTS.get(p.layout, _STRIDED), LAYOUTS.get(p.weight_layout, _STRIDED),
            p.threads, p.deterministic, p.tf32, p.frozen,
        )  # fmt: skip
        return bool(self._predict(self._isa, self._fields_at, *self._chain) == OK)
