"""`ConvProblem`: everything that decides how fast a convolution runs and which algorithms apply, as a frozen key.

All three directions are written in the *forward* convention: x (N, C, H, W), weight (K, C/groups, R, S),
y (N, K, P, Q). The direction is part of the problem, so one layer has three problems with three choices.
A volume has a depth besides: x (N, C, D, H, W), weight (K, C/groups, T, R, S), y (N, K, O, P, Q).
Derived quantities (output size, FLOPs, bytes, GEMM shape) are computed here. `model/features.py` has some of them as
logarithms, for speed; a test compares the two.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch


class Direction(str, enum.Enum):
    """What is computed: y, grad_x, or grad_weight."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_WEIGHT = "backward_weight"

    # Enum hashes its name in Python; a problem is hashed on every look-up, so use str's C implementation.
    __hash__ = str.__hash__
    # Likewise: the value.
    __str__ = str.__str__


DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

CONTIGUOUS = "contiguous"
CHANNELS_LAST = "channels_last"
STRIDED = "strided"  # neither: expanded, sliced, transposed


MOST_BYTES = 2**47
"""A process cannot address more: no tensor is larger."""
MOST_STEPS = 2**31 - 1


class Gemm(NamedTuple):
    """The matrix product equivalent to a convolution, per group: (m x k) times (k x n), `batch` times."""

    batch: int
    m: int
    n: int
    k: int


T_co = TypeVar("T_co", covariant=True)


class derived(Generic[T_co]):
    """A quantity that follows from a problem's fields: computed when it is first asked for, and kept with the problem.

    Making a plan asks for some of them dozens of times, right after a convolution that has left none of this code in
    the processor's caches. `functools.cached_property` takes a lock before Python 3.12.
    """

    def __init__(self, compute: Callable[[Any], T_co]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, problem: None, owner: type) -> derived[T_co]: ...
    @overload
    def __get__(self, problem: ConvProblem, owner: type) -> T_co: ...
    def __get__(self, problem: ConvProblem | None, owner: type) -> derived[T_co] | T_co:
        if problem is None:
            return self
        value = problem.__dict__[self._name] = self._compute(problem)
        return value


class _Fields(NamedTuple):
    direction: Direction
    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride_h: int = 1
    stride_w: int = 1
    pad_top: int = 0
    pad_bottom: int = 0
    pad_left: int = 0
    pad_right: int = 0
    dil_h: int = 1
    dil_w: int = 1
    groups: int = 1
    dtype: str = "float32"
    layout: str = CONTIGUOUS
    weight_layout: str = CONTIGUOUS
    device: str = "cpu"
    threads: int = 1
    deterministic: bool = False
    tf32: bool = False
    frozen: bool = False
    D: int = 1
    T: int = 1
    stride_d: int = 1
    pad_front: int = 0
    pad_back: int = 0
    dil_d: int = 1


class ConvProblem(_Fields):
    """One convolution in one direction. Hashable, immutable, cheap to build.

    Sizes are in elements; `pad_*` is zero padding per side; `C` is the full number of input channels.
    `layout` is the memory layout of the activation that streams through (x for forward and backward_weight,
    grad_y for backward_data), `weight_layout` that of the weight: "contiguous", "channels_last" or "strided".
    The fields of depth, which come last, keep their defaults for an image: its key and its text do not name them.
    """

    # ---- derived quantities -------------------------------------------------------------------------------------

    @derived
    def is_volume(self) -> bool:
        """Whether there is a depth: any of its fields differs from its default. Shapes then have five sizes."""
        return self[IMAGE_FIELDS:] != _NO_DEPTH

    @derived
    def O(self) -> int:  # noqa: E743  the letter of the output depth, as P and Q are those of height and width
        """Output depth; 1 for an image."""
        return (self.D + self.pad_front + self.pad_back - self.dil_d * (self.T - 1) - 1) // self.stride_d + 1

    @derived
    def P(self) -> int:
        """Output height."""
        return (self.H + self.pad_top + self.pad_bottom - self.dil_h * (self.R - 1) - 1) // self.stride_h + 1

    @derived
    def Q(self) -> int:
        """Output width."""
        return (self.W + self.pad_left + self.pad_right - self.dil_w * (self.S - 1) - 1) // self.stride_w + 1

    def derive(self) -> None:
        """Compute most of the quantities below at once, for a problem that a choice is going to be made for: one
        function in no cache in place of a dozen. What is computed is what they say; a test compares."""
        if "flops" in self.__dict__:
            return
        (direction, N, C, H, W, K, R, S, stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups, dtype,
         *_, D, T, stride_d, front, back, dil_d) = self  # fmt: skip
        depth = self[IMAGE_FIELDS:]
        is_volume = depth != _NO_DEPTH
        P = (H + top + bottom - dil_h * (R - 1) - 1) // stride_h + 1
        Q = (W + left + right - dil_w * (S - 1) - 1) // stride_w + 1
        O = (D + front + back - dil_d * (T - 1) - 1) // stride_d + 1  # noqa: E741
        each, part = ELEMENT_BYTES[dtype], C // groups
        taps, results = part * T * R * S, N * K * O * P * Q
        x_bytes, weight_bytes, y_bytes = N * C * D * H * W * each, K * taps * each, results * each
        shapes: tuple[tuple[int, ...], ...] = ((N, K, P, Q), (N, C, H, W), (K, part, R, S))
        if is_volume:
            shapes = ((N, K, O, P, Q), (N, C, D, H, W), (K, part, T, R, S))
        y, x, weight = shapes
        self.__dict__.update(
            is_volume=is_volume, P=P, Q=Q, O=O, element_bytes=each, flops=2 * results * taps,
            x_bytes=x_bytes, weight_bytes=weight_bytes, y_bytes=y_bytes, bytes=x_bytes + weight_bytes + y_bytes,
            is_possible=max(x_bytes, weight_bytes, y_bytes) <= MOST_BYTES, x_shape=x, weight_shape=weight, y_shape=y,
            result_shape=y if direction == "forward" else x if direction == "backward_data" else weight,
            stride=(stride_h, stride_w), dilation=(dil_h, dil_w), is_depthwise=groups == C and groups > 1,
            symmetric_padding=top == bottom and left == right and front == back,
        )  # fmt: skip

    @derived
    def x_shape(self) -> tuple[int, ...]:
        """(N, C, H, W), and (N, C, D, H, W) of a volume; likewise the next."""
        return (self.N, self.C, self.D, self.H, self.W) if self.is_volume else (self.N, self.C, self.H, self.W)

    @derived
    def weight_shape(self) -> tuple[int, ...]:
        filters = (self.K, self.C // self.groups)
        return (*filters, self.T, self.R, self.S) if self.is_volume else (*filters, self.R, self.S)

    @derived
    def y_shape(self) -> tuple[int, ...]:
        return (self.N, self.K, self.O, self.P, self.Q) if self.is_volume else (self.N, self.K, self.P, self.Q)

    @derived
    def result_shape(self) -> tuple[int, ...]:
        """Shape of what this direction computes: y, grad_x or grad_weight."""
        if self.direction == Direction.FORWARD:
            return self.y_shape
        return self.x_shape if self.direction == Direction.BACKWARD_DATA else self.weight_shape

    @derived
    def stride(self) -> tuple[int, int]:
        return (self.stride_h, self.stride_w)

    @derived
    def dilation(self) -> tuple[int, int]:
        return (self.dil_h, self.dil_w)

    @derived
    def padding(self) -> tuple[int, int, int, int]:
        """(top, bottom, left, right), without that along the depth."""
        return (self.pad_top, self.pad_bottom, self.pad_left, self.pad_right)

    @derived
    def symmetric_padding(self) -> bool:
        p = self
        return p.pad_top == p.pad_bottom and p.pad_left == p.pad_right and p.pad_front == p.pad_back

    @derived
    def kernel_extent(self) -> tuple[int, int]:
        """Height and width that the dilated kernel spans."""
        return (self.dil_h * (self.R - 1) + 1, self.dil_w * (self.S - 1) + 1)

    @derived
    def depth_extent(self) -> int:
        """Depth that the dilated kernel spans."""
        return self.dil_d * (self.T - 1) + 1

    @derived
    def is_depthwise(self) -> bool:
        """One input channel per group, any channel multiplier K / groups."""
        return self.groups == self.C and self.groups > 1

    @derived
    def is_pointwise(self) -> bool:
        """1x1 kernel (1x1x1), unit stride, no padding: a plain matrix product."""
        if not self.R == self.S == self.stride_h == self.stride_w == 1 or any(self.padding):
            return False
        return self.T == self.stride_d == 1 and not self.pad_front and not self.pad_back

    @derived
    def is_patch(self) -> bool:
        """Kernel = stride, no overlap, no padding, undilated (patch embedding): a matrix product of views."""
        return (
            self.stride_h == self.R
            and self.stride_w == self.S
            and self.stride_d == self.T
            and self.dil_h == self.dil_w == self.dil_d == 1
            and not any((*self.padding, self.pad_front, self.pad_back))
        )

    @derived
    def is_possible(self) -> bool:
        """Whether image, weight and result are no larger than tensors can be."""
        return max(self.x_bytes, self.weight_bytes, self.y_bytes) <= MOST_BYTES

    @derived
    def is_oversized(self) -> bool:
        """Whether a size, a step or the padded image is larger than anything but PyTorch's own convolution is made for.
        A stride beyond the image is a valid one."""
        p = self
        rows, columns = p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right
        slices = p.D + p.pad_front + p.pad_back
        if max(rows, columns, slices, p.T, p.stride_d, p.dil_d, *self[1:17]) > MOST_STEPS or not self.is_possible:
            return True
        return p.N * p.C * slices * rows * columns * self.element_bytes > MOST_BYTES

    @derived
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @derived
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @derived
    def flops(self) -> int:
        """Multiplications and additions of the direct sum, the same for all three directions (2 per MAC)."""
        return 2 * self.N * self.K * self.O * self.P * self.Q * (self.C // self.groups) * self.T * self.R * self.S

    @derived
    def x_bytes(self) -> int:
        return self.N * self.C * self.D * self.H * self.W * self.element_bytes

    @derived
    def weight_bytes(self) -> int:
        return self.K * (self.C // self.groups) * self.T * self.R * self.S * self.element_bytes

    @derived
    def y_bytes(self) -> int:
        return self.N * self.K * self.O * self.P * self.Q * self.element_bytes

    @derived
    def bytes(self) -> int:
        """Compulsory traffic: every operand and the result once."""
        return self.x_bytes + self.weight_bytes + self.y_bytes

    @derived
    def gemm(self) -> Gemm:
        """The equivalent matrix product per group: rows are output channels, columns the result's other dimensions."""
        G, spatial = self.groups, self.N * self.O * self.P * self.Q
        k_out, taps = self.K // G, (self.C // G) * self.T * self.R * self.S
        if self.direction == Direction.FORWARD:
            return Gemm(G, k_out, spatial, taps)
        if self.direction == Direction.BACKWARD_DATA:
            return Gemm(G, taps, spatial, k_out)
        return Gemm(G, k_out, taps, spatial)

    # ---- building and printing ----------------------------------------------------------------------------------

    def with_direction(self, direction: Direction) -> ConvProblem:
        return self._replace(direction=direction)

    @property
    def brief(self) -> str:
        """The problem in a few characters, without direction and threads: "1x64x56x56 -> 64, 3x3 s2 p1 bfloat16";
        of a volume "1x32x16x64x64 -> 64, 3x3x3 p1"."""
        p = self
        image, kernel = f"{p.H}x{p.W}", f"{p.R}x{p.S}"
        stride: tuple[int, ...] = p.stride
        padding: tuple[int, ...] = p.padding
        dilation: tuple[int, ...] = p.dilation
        if p.is_volume:
            image, kernel = f"{p.D}x{image}", f"{p.T}x{kernel}"
            stride, dilation = (p.stride_d, *stride), (p.dil_d, *dilation)
            padding = (p.pad_front, p.pad_back, *padding)
        parts = [f"{p.N}x{p.C}x{image} -> {p.K}, {kernel}"]
        for letter, values, usual in (("s", stride, 1), ("p", padding, 0), ("d", dilation, 1)):
            if set(values) == {usual}:
                continue
            same = len(set(values)) == 1
            parts.append(letter + (str(values[0]) if same else str(values).replace(" ", "")))
        if self.groups > 1:
            parts.append(f"g{self.groups}")
        if self.dtype != "float32":
            parts.append(self.dtype)
        if self.layout != CONTIGUOUS:
            parts.append(self.layout)
        return " ".join(parts)

    def __str__(self) -> str:
        """A line that `ConvProblem.parse` reads back; defaults are left out."""
        parts = [str(self.direction)]
        for name, value in zip(self._fields[1:], self[1:], strict=True):
            if name not in self._field_defaults or value != self._field_defaults[name]:
                parts.append(f"{name}={value}")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> ConvProblem:
        """Inverse of `str(problem)`.

        Raises:
            ValueError: if the text is not a problem: a field is unknown, missing, repeated or has no such value, or no
                convolution has these sizes.
        """
        head, *rest = text.split() or [""]
        values: dict[str, object] = {}
        for item in rest:
            name, _, raw = item.partition("=")
            if name not in cls._fields or name == "direction" or name in values:
                kind = "repeated" if name in values else "unknown"
                raise ValueError(f"{kind} field {name!r:.60} in problem {text!r:.300}")
            default = cls._field_defaults.get(name, 0)
            if isinstance(default, bool):
                values[name] = _BOOLS.get(raw, raw)
            else:
                values[name] = raw if isinstance(default, str) or not _INTEGER.fullmatch(raw) else int(raw)
        if missing := [name for name in cls._fields[1:8] if name not in values]:
            raise ValueError(f"{', '.join(missing)} missing in problem {text!r:.300}")
        problem = cls(Direction(head), **values)  # type: ignore[arg-type]
        if (why := problem.why_impossible()) is not None:
            raise ValueError(f"{why}: problem {text!r:.300}")
        return problem

    def why_impossible(self) -> str | None:
        """What no convolution has, in words, if these values come from elsewhere; None if they make sense."""
        for name, value in zip(self._fields, self, strict=True):
            default = self._field_defaults.get(name, 0)
            if name == "direction":
                right = isinstance(value, Direction)
            elif isinstance(default, str):
                right = value in _TEXTS[name] if name in _TEXTS else isinstance(value, str) and value.isidentifier()
            elif isinstance(default, bool):
                right = isinstance(value, bool)
            else:
                least = 0 if name.startswith("pad_") else 1
                right = type(value) is int and least <= value < _MOST
                if type(value) is int and value < least:
                    return f"{name} must be at least {least}, not {value}"
            if not right:
                return f"{name} cannot be {value!r:.60}"
        if self.C % self.groups or self.K % self.groups:
            return f"C={self.C} and K={self.K} must be multiples of groups={self.groups}"
        if self.P < 1 or self.Q < 1:
            return f"the kernel spans {self.kernel_extent}, more than the padded image"
        if self.O < 1:
            return f"the kernel spans {self.depth_extent} slices, more than the padded depth"
        return None


IMAGE_FIELDS = ConvProblem._fields.index("D")
"""Number of fields ahead of those of depth."""
_NO_DEPTH = tuple(ConvProblem._field_defaults[name] for name in ConvProblem._fields[IMAGE_FIELDS:])
_BOOLS = {"True": True, "False": False}
_INTEGER = re.compile("[0-9]{1,12}")
_MOST = 2**40
_TEXTS: dict[str, tuple[str, ...]] = {
    "dtype": tuple(ELEMENT_BYTES),
    "layout": (CONTIGUOUS, CHANNELS_LAST, STRIDED),
    "weight_layout": (CONTIGUOUS, CHANNELS_LAST, STRIDED),
}


def conv_problem(
    N: int,
    C: int,
    H: int,
    W: int,
    K: int,
    R: int,
    S: int,
    *,
    direction: Direction | str = Direction.FORWARD,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    **rest: object,
) -> ConvProblem:
    """Build a problem from arguments like `nn.Conv2d`: ints or pairs, `padding="same"`, or (top, bottom, left, right).

    Raises:
        ValueError: for a padding string other than "same" and "valid".
    """
    stride_h, stride_w = pair(stride)
    dil_h, dil_w = pair(dilation)
    top, bottom, left, right = padding_sides(padding, (R, S), (dil_h, dil_w))
    return ConvProblem(
        Direction(direction), N, C, H, W, K, R, S, stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups,
        **rest,  # type: ignore[arg-type]
    )  # fmt: skip


KERNEL_CLASSES = ("1x1", "3x3", "strided", "depthwise", "grouped", "large", "other")


def kernel_class(problem: ConvProblem) -> str:
    """The one of `KERNEL_CLASSES` under which a problem is sampled, reported and has margins."""
    p = problem
    if max(p.R, p.S) >= 7:
        return "large"
    if p.groups > 1:
        return "depthwise" if p.is_depthwise else "grouped"
    if p.stride != (1, 1):
        return "strided"
    if p.R == p.S and p.R in (1, 3) and p.dilation == (1, 1):
        return f"{p.R}x{p.S}"
    return "other"


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """An int, a sequence of one or a sequence of two, as two ints."""
    if isinstance(value, int):
        return (value, value)
    first, last = value[0], value[-1]
    return (first, last)


def triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    """An int, a sequence of one or a sequence of three, as three ints.

    Raises:
        ValueError: for a sequence of any other length.
    """
    if isinstance(value, int):
        return (value, value, value)
    first, middle, last = value if len(value) != 1 else (*value, *value, *value)
    return (first, middle, last)


def padding_sides(
    padding: int | str | Sequence[int], kernel_size: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[int, ...]:
    """Zero padding per side of two axes or three, in pairs: (top, bottom, left, right), or (front, back, top, ..).

    Args:
        padding: one number, one per axis, or one per side; "same" puts what is odd at the end of each axis.

    Raises:
        ValueError: for another string than "same" and "valid", or another number of numbers.
    """
    axes = len(kernel_size)
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * (2 * axes)
        if padding != "same":
            raise ValueError(f"padding must be 'same', 'valid' or numbers, not {padding!r}")
        totals = [step * (taps - 1) for step, taps in zip(dilation, kernel_size, strict=True)]
        return tuple(side for total in totals for side in (total // 2, total - total // 2))
    if not isinstance(padding, int) and len(padding) == 2 * axes:
        return tuple(padding)
    return tuple(pad for pad in (pair if axes == 2 else triple)(padding) for _ in range(2))


def layout_of(tensor: torch.Tensor) -> str:
    """The memory layout of a 4-D or 5-D tensor; "contiguous" if both layouts fit (one channel or one pixel)."""
    if tensor.is_contiguous():
        return CONTIGUOUS
    if tensor.is_contiguous(memory_format=torch.channels_last_3d if tensor.dim() == 5 else torch.channels_last):
        return CHANNELS_LAST
    return STRIDED


def canonical_strides(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The strides of a fresh 4-D or 5-D tensor in this layout: as `torch.empty(shape, memory_format=...)`."""
    if len(shape) == 4 and layout != CHANNELS_LAST and 0 not in shape:
        _, C, H, W = shape
        return (C * H * W, H * W, W, 1)
    _, C, *sizes = shape
    if layout == CHANNELS_LAST:
        *outer, whole = _steps((*sizes, C))
        return (whole, 1, *reversed(outer[1:]))
    # In this layout torch counts an empty dimension as one when it computes strides from sizes.
    return tuple(reversed(_steps([max(size, 1) for size in (C, *sizes)])))


def _steps(sizes: Sequence[int]) -> list[int]:
    """Elements between neighbours along each axis, the innermost first; last, elements of all."""
    steps = [1]
    for size in reversed(sizes):
        steps.append(steps[-1] * size)
    return steps
