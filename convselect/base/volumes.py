"""Problems of three dimensions from arguments like those of `nn.Conv3d`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convselect.base.problem import ConvProblem, Direction, padding_sides


def volume_problem(
    N: int,
    C: int,
    D: int,
    H: int,
    W: int,
    K: int,
    T: int,
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
    """Build a problem from arguments like `nn.Conv3d`: ints or triples, `padding="same"`, or (front, back, top, bottom,
    left, right). Steps along a depth of one slice are left out, as they are of no consequence.

    Raises:
        ValueError: for a padding string other than "same" and "valid".
    """
    stride_d, stride_h, stride_w = triple(stride)
    dil_d, dil_h, dil_w = triple(dilation)
    front, back, top, bottom, left, right = volume_padding(padding, (T, R, S), (dil_d, dil_h, dil_w))
    fields: dict[str, Any] = {**depth_fields(D, T, stride_d, front, back, dil_d), **rest}
    return ConvProblem(
        Direction(direction), N, C, H, W, K, R, S, stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups,
        **fields,
    )  # fmt: skip


def depth_fields(D: int, T: int, stride_d: int, pad_front: int, pad_back: int, dil_d: int) -> dict[str, int]:
    """The fields of depth by name, without steps that change nothing: so a depth of one slice is an image."""
    if T == 1:
        dil_d = 1
    if D + pad_front + pad_back == dil_d * (T - 1) + 1:  # one slice of results
        stride_d = 1
    return {
        "D": D, "T": T, "stride_d": stride_d, "pad_front": pad_front, "pad_back": pad_back, "dil_d": dil_d
    }  # fmt: skip


def triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    """An int, a sequence of one or a sequence of three, as three ints.

    Raises:
        ValueError: for a sequence of any other length.
    """
    if isinstance(value, int):
        return (value, value, value)
    first, middle, last = value if len(value) != 1 else (*value, *value, *value)
    return (first, middle, last)


def volume_padding(
    padding: int | str | Sequence[int], kernel_size: tuple[int, int, int], dilation: tuple[int, int, int]
) -> tuple[int, ...]:
    """Zero padding per side (front, back, top, bottom, left, right); "same" puts odd ones at the back, the bottom and
    the right."""
    if isinstance(padding, str):
        depth = padding_sides(padding, (1, kernel_size[0]), (1, dilation[0]))[2:]
        return (*depth, *padding_sides(padding, kernel_size[1:], dilation[1:]))
    if not isinstance(padding, int) and len(padding) == 6:
        return tuple(padding)
    return tuple(pad for pad in triple(padding) for _ in range(2))
