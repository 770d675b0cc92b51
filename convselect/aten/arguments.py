"""From the arguments of a call to its problem: what it is, whether aten would accept it, what autocast casts, and
whether the weight is one whose results people compare with ==."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from convselect.aten.strides import in_functorch, result_strides, transposed_strides
from convselect.base.lru import on_clear
from convselect.base.problem import (
    CHANNELS_LAST,
    CONTIGUOUS,
    DTYPE_NAMES,
    ConvProblem,
    Direction,
    canonical_strides,
    layout_of,
    padding_sides,
    pair,
)

threads = torch.get_num_threads
deterministic: Any = torch._C._get_deterministic_algorithms
fp32_precision: Any = torch._C._get_fp32_precision_getter

Geometry = tuple[Any, Any, Any, Any]
"""(stride, padding, dilation, groups), as a call gives them: ints, pairs, and for the padding a text."""
TransposedGeometry = tuple[Any, Any, Any, Any, Any]
"""(stride, padding, output padding, groups, dilation): the order of `torch.conv_transpose2d`."""

_DEVICES = frozenset({"cpu", "cuda"})
_INT = frozenset({int})
_STRIDED: Any = torch.strided
# What autocast casts: floating point except float64.
_CAST_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def problem_of(x: Tensor, weight: Tensor, geometry: Geometry) -> ConvProblem | None:
    """The forward problem of a call; None if its arguments do not have the form of a convolution's.

    Args:
        x: (N, C, H, W).
        weight: (K, C / groups, R, S).
    """
    stride, padding, dilation, groups = geometry
    if x.dim() != 4 or weight.dim() != 4 or x.dtype not in DTYPE_NAMES or x.device.type not in _DEVICES:
        return None
    K, _, R, S = weight.shape
    try:
        if _are_pairs(stride, padding, dilation):  # a layer's are; this costs a third of what follows
            (stride_h, stride_w), (pad_h, pad_w), (dil_h, dil_w) = stride, padding, dilation
            pads = (pad_h, pad_h, pad_w, pad_w)
        else:
            stride_h, stride_w = pair(stride)
            dil_h, dil_w = pair(dilation)
            if any(not isinstance(v, str | int) and len(v) > 2 for v in (stride, padding, dilation)):
                return None
            top, bottom, left, right = padding_sides(padding, (R, S), (dil_h, dil_w))
            pads = (top, bottom, left, right)
    except (TypeError, ValueError, IndexError):
        return None
    N, C, H, W = x.shape
    return ConvProblem(
        Direction.FORWARD,
        N,
        C,
        H,
        W,
        K,
        R,
        S,
        stride_h,
        stride_w,
        *pads,
        dil_h,
        dil_w,
        groups,
        *surroundings(x, weight),
    )


def surroundings(x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """The fields of a problem from `dtype` to `tf32`."""
    settled = deterministic()
    if x.is_cpu:
        device, tf32 = "cpu", fp32_precision("mkldnn", "conv") not in ("none", "ieee")
    else:
        device, tf32 = x.device.type, x.dtype == torch.float32 and fp32_precision("cuda", "conv") == "tf32"
        # If cuDNN computes, its own flag counts as well.
        settled = settled or (x.is_cuda and torch.backends.cudnn.deterministic)
    layouts = (_layout(x), _layout(weight)) if in_functorch() else (layout_of(x), layout_of(weight))
    return DTYPE_NAMES[x.dtype], *layouts, device, threads(), settled, tf32


def transposed_problem(x: Tensor, weight: Tensor, geometry: TransposedGeometry) -> ConvProblem | None:
    """The problem of a transposed convolution: grad-input of the convolution that maps its result's shape to that of x.
    None if its arguments do not have that form, or if no convolution does: with an output padding of a stride or more,
    one would map that shape to a larger x.

    Args:
        x: (N, K, P, Q), the problem's grad_y.
        weight: (K, C / groups, R, S).
    """
    stride, padding, output_padding, groups, dilation = geometry
    if x.dim() != 4 or weight.dim() != 4 or x.dtype not in DTYPE_NAMES or x.device.type not in _DEVICES:
        return None
    N, K, P, Q = x.shape
    _, part, R, S = weight.shape
    try:
        if any(not isinstance(v, int) and len(v) > 2 for v in (stride, padding, output_padding, dilation)):
            return None
        (stride_h, stride_w), (pad_h, pad_w), (more_h, more_w), (dil_h, dil_w) = map(
            pair, (stride, padding, output_padding, dilation)
        )
        numbers = (stride_h, stride_w, pad_h, pad_w, more_h, more_w, dil_h, dil_w, groups)
        if not all(isinstance(n, int) for n in numbers) or not (0 <= more_h < stride_h and 0 <= more_w < stride_w):
            return None
        H = (P - 1) * stride_h - 2 * pad_h + dil_h * (R - 1) + more_h + 1
        W = (Q - 1) * stride_w - 2 * pad_w + dil_w * (S - 1) + more_w + 1
    except (TypeError, ValueError, IndexError):
        return None
    if weight.shape[0] != K or min(P, Q, H, W) < 1:
        return None
    return ConvProblem(
        Direction.BACKWARD_DATA, N, part * groups, H, W, K, R, S, stride_h, stride_w, pad_h, pad_h, pad_w, pad_w,
        dil_h, dil_w, groups, *surroundings(x, weight),
    )  # fmt: skip


def _are_pairs(stride: Any, padding: Any, dilation: Any) -> bool:
    return (
        type(stride) is type(padding) is type(dilation) is tuple and len(stride) == len(padding) == len(dilation) == 2
    )


def gradients_of(x: Tensor, weight: Tensor, problem: ConvProblem) -> list[ConvProblem]:
    """The problems of the gradients that the operands of a convolution require; that of x in the layout that y has."""
    found = []
    if x.requires_grad:
        found.append(problem._replace(direction=Direction.BACKWARD_DATA, layout=y_layout(x, weight, problem)))
    if weight.requires_grad:
        found.append(problem.with_direction(Direction.BACKWARD_WEIGHT))
    return found


def transposed_gradients_of(x: Tensor, weight: Tensor, problem: ConvProblem) -> list[ConvProblem]:
    """The same for a transposed convolution, whose gradients both stream that of its result."""
    strides = transposed_strides(x, weight, problem).y
    layout = CONTIGUOUS if strides == canonical_strides(problem.x_shape, CONTIGUOUS) else CHANNELS_LAST
    of_x, of_weight = (
        problem._replace(direction=direction, layout=layout)
        for direction in (Direction.FORWARD, Direction.BACKWARD_WEIGHT)
    )
    return [p for p, operand in ((of_x, x), (of_weight, weight)) if operand.requires_grad]


def one_row(x: Tensor, weight: Tensor, geometry: Any) -> tuple[Tensor, Tensor, Any] | None:
    """The operands (N, C, L) or (C, L) and (K, C / groups, S) of a 1-D convolution, transposed or not, as images of one
    row, in memory as aten takes them, and its geometry for two dimensions; None if these are not its operands."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    if x.dim() != 3 or weight.dim() != 3:
        return None
    if len(geometry) == 4:
        stride, padding, dilation, groups = geometry
        pads = padding if isinstance(padding, str) else _two(padding, 0)
        geometry = (_two(stride, 1), pads, _two(dilation, 1), groups)
    else:
        stride, padding, more, groups, dilation = geometry
        geometry = (_two(stride, 1), _two(padding, 0), _two(more, 0), groups, _two(dilation, 1))
    return x.contiguous().unsqueeze(2), weight.unsqueeze(2), geometry


def _two(value: Any, of_height: int) -> Any:
    """An argument for two dimensions; None, which no convolution takes, if it is none for one."""
    if isinstance(value, int):
        return (of_height, value)
    return (of_height, value[0]) if isinstance(value, tuple) and len(value) == 1 else None


def _layout(t: Tensor) -> str:
    """As `layout_of`, under vmap, where a tensor knows its strides but does not answer about channels_last."""
    return layout_of(torch.empty_strided(t.shape, t.stride(), device="meta"))


def valid(p: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, *, cast: bool) -> bool:
    """Whether this is a convolution that aten accepts and that has something to compute. Calls that aten does not
    accept are passed to it, so that it raises its own error."""
    stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups = p[8:17]
    steps = (stride_h, stride_w, dil_h, dil_w, groups, p.stride_d, p.dil_d)
    pads = (top, bottom, left, right, p.pad_front, p.pad_back)
    if not (
        (_INT.issuperset(map(type, steps + pads)) or all(isinstance(n, int) for n in steps + pads))
        and min(steps) > 0
        and min(pads) >= 0
        and max(steps + pads) < 2**63
        and not (geometry[1] == "same" and (stride_h, stride_w) != (1, 1))
        and x.numel() > 0
        and weight.numel() > 0
        and weight.shape[1] * groups == p.C
        and p.K % groups == 0
    ):
        return False
    p.derive()
    return (
        # The kernel fits into the padded image.
        p.P >= 1
        and p.Q >= 1
        and p.O >= 1
        and p.is_possible
        and weight.dtype == (dtype := x.dtype)
        and weight.device == (device := x.device)
        and x.layout is _STRIDED
        and weight.layout is _STRIDED
        and (bias is None or _bias_fits(bias, dtype, device, p.result_shape[1], cast=cast))
    )


def y_layout(x: Tensor, weight: Tensor, problem: ConvProblem) -> str:
    """The layout that y, and as a rule its gradient, will have."""
    N, K, P, Q = problem.y_shape
    strides = result_strides(x, weight, problem).y
    return CONTIGUOUS if strides == canonical_strides((N, K, P, Q), CONTIGUOUS) else CHANNELS_LAST


def _bias_fits(bias: Tensor, dtype: torch.dtype, device: torch.device, K: int, *, cast: bool) -> bool:
    return (
        bias.shape == (K,)
        and bias.device == device
        and bias.layout is _STRIDED
        and (bias.dtype == dtype or (cast and {bias.dtype, dtype} <= _CAST_DTYPES))
    )


def are_ints(geometry: Geometry) -> bool:
    """Whether the numbers are ints, and neither floats nor bools, which compare equal."""
    for value in geometry:
        if type(value) is int or type(value) is str:
            continue
        if not isinstance(value, tuple) or not _INT.issuperset(map(type, value)):
            return False
    return True


def autocast_dtype(x: Tensor) -> torch.dtype | bool:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else False


def cast_like_autocast(t: Tensor, dtype: torch.dtype | bool) -> Tensor:
    """Autocast's rule: floating point except float64 is cast."""
    if isinstance(dtype, torch.dtype) and t.is_floating_point() and t.dtype != torch.float64:
        return t.to(dtype)
    return t


# ---- weights that ask for direct sums -------------------------------------------------------------------------------

_FIRST = 16
_GRAIN = 256.0
"""Multiples of 1/256 count as whole: binomial filters of 5x5 and Sobel's over 8 are exact sums as well."""
_BYTES = ctypes.c_char * (2 * _FIRST)


def _read_bfloat16(address: int) -> Any:
    """float32 with zeros below."""
    words = struct.unpack(f"={_FIRST}H", _BYTES.from_address(address))
    return struct.unpack(f"={_FIRST}f", struct.pack(f"={_FIRST}I", *[word << 16 for word in words]))


_READ: dict[torch.dtype, Any] = {
    torch.float32: (ctypes.c_float * _FIRST).from_address,
    torch.float64: (ctypes.c_double * _FIRST).from_address,
    torch.float16: lambda address: struct.unpack(f"={_FIRST}e", _BYTES.from_address(address)),
    torch.bfloat16: _read_bfloat16,
}
_MOST_WEIGHTS = 4096
_CHANNELS_LAST: Any = torch.channels_last
_unwrapped: Any = torch._C._functorch.get_unwrapped
_is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor

# (address, elements) of a weight whose first elements do not tell -> places in memory that do, or its version if there
# are none. Either may be of a weight that is no more: places are read again, and a version that is out of date costs
# speed, not exactness. No lock: threads that meet here look twice at most.
_weights: dict[tuple[int, int], tuple[int, ...] | int] = {}
on_clear(_weights.clear)


def wants_direct_sums(weight: Tensor) -> bool:
    """Whether a weight (K, C/groups, R, S) counts or averages: it has no negative value, or whole numbers only
    (multiples of 1/256), or a single value per filter. Results of such weights are compared with zero, rounded, or
    taken the root of, which rounding errors of transforms break.

    False is certain: it takes a negative value, a fraction and two values that differ, which this call has seen in the
    weight. The first 16 elements of a trained weight show all three, in 1 to 2 us; otherwise all of it is read once.
    True may be out of date if the weight has changed without its version counter (`.data.copy_`). Always False on a
    GPU, which would have to synchronise.
    """
    if not weight.is_cpu:
        return False
    while _is_wrapped(weight):  # by transforms of torch.func: by the values of the whole batch
        weight = _unwrapped(weight)
    count, read = weight.numel(), _READ.get(weight.dtype)
    filter_size = count // weight.shape[0]
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=_CHANNELS_LAST)
    if read is not None and dense and count >= _FIRST:
        first = read(weight.data_ptr())[:]
    else:
        first = weight.detach().reshape(-1)[:_FIRST].tolist()
    if min(first) < 0 and (first[0] * _GRAIN % 1 or any(value * _GRAIN % 1 for value in first)):
        start = first[0]
        if filter_size > 1 and first[1] != start:
            return False
        one = first if filter_size >= _FIRST else first[:filter_size]
        if start != max(one) or start != min(one):
            return False
    return _looked_through(weight, dense, count, filter_size)


def _looked_through(weight: Tensor, dense: bool, count: int, filter_size: int) -> bool:
    key, version = (weight.data_ptr(), count), 0 if weight.is_inference() else weight._version
    t = weight.detach()
    flat = t.as_strided((count,), (1,)) if dense else t.reshape(-1)
    known = _weights.get(key)
    if known == version:
        return True
    if isinstance(known, tuple):
        negative, fraction, other, same = (float(flat[place]) for place in known)
        if negative < 0 and fraction * _GRAIN % 1 and other != same:
            return False
    places = _places(flat, filter_size)
    if len(_weights) >= _MOST_WEIGHTS:
        _weights.clear()
    _weights[key] = version if places is None else places
    return places is None


def _places(flat: Tensor, filter_size: int) -> tuple[int, int, int, int] | None:
    """Where there is a negative value, a fraction, and a value that differs from the first of its filter, and that;
    None unless there are all of them."""
    found: list[int | None] = [None, None, None]
    filters, start, count = flat.view(-1, filter_size), 0, 64
    while start < len(filters):
        part = filters[start : start + count]
        wide = part.float() if part.element_size() == 2 else part
        looks = (lambda w: w < 0, lambda w: torch.frac(w * _GRAIN) != 0, lambda w: w != w[:, :1])
        for i, look in enumerate(looks):
            if found[i] is None:
                seen = look(wide).flatten()
                place = int(seen.to(torch.uint8).argmax())
                if seen[place]:
                    found[i] = start * filter_size + place
        negative, fraction, other = found
        if negative is not None and fraction is not None and other is not None:
            return negative, fraction, other, other - other % filter_size
        start, count = start + count, 8 * count
    return None
