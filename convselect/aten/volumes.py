"""What `arguments` and `strides` do for images, for volumes: from a call to its problem, and aten's strides of the
results. On CPUs only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.aten.arguments import Geometry, TransposedGeometry, surroundings
from convselect.aten.strides import ResultStrides, Strides, in_format_of, in_functorch
from convselect.base.problem import (
    CHANNELS_LAST,
    CONTIGUOUS,
    DTYPE_NAMES,
    ConvProblem,
    Direction,
    padding_sides,
    triple,
)
from convselect.base.volumes import image_of, volume_again
from convselect.kernels._native_volumes import even_padding, output_padding, steps


def volume_of(x: Tensor, weight: Tensor, geometry: Geometry) -> ConvProblem | None:
    """The forward problem of a call; None if its arguments do not have the form of a convolution's. It is an image's if
    there is one slice, and one depth tap without steps.

    Args:
        x: (N, C, D, H, W).
        weight: (K, C / groups, T, R, S).
    """
    stride, padding, dilation, groups = geometry
    if not _are_operands(x, weight):
        return None
    N, C, D, H, W = x.shape
    K, _, T, R, S = weight.shape
    try:
        (stride_d, stride_h, stride_w), (dil_d, dil_h, dil_w) = triple(stride), triple(dilation)
        if not isinstance(padding, str | int) and len(padding) > 3:
            return None
        if padding == "same" and not stride_d == stride_h == stride_w == 1:
            return None
        front, back, top, bottom, left, right = padding_sides(padding, (T, R, S), (dil_d, dil_h, dil_w))
    except (TypeError, ValueError, IndexError):
        return None
    return ConvProblem(
        Direction.FORWARD, N, C, H, W, K, R, S, stride_h, stride_w, top, bottom, left, right, dil_h, dil_w, groups,
        *surroundings(x, weight),
    )._replace(D=D, T=T, stride_d=stride_d, pad_front=front, pad_back=back, dil_d=dil_d)  # fmt: skip


def transposed_volume(x: Tensor, weight: Tensor, geometry: TransposedGeometry) -> ConvProblem | None:
    """As `arguments.transposed_problem`, for volumes.

    Args:
        x: (N, K, O, P, Q), the problem's grad_y.
        weight: (K, C / groups, T, R, S).
    """
    stride, padding, output_padding, groups, dilation = geometry
    if not _are_operands(x, weight):
        return None
    N, K, *outputs = x.shape
    _, part, *taps = weight.shape
    try:
        strides, pads, more, dilations = map(triple, (stride, padding, output_padding, dilation))
        if not all(isinstance(n, int) for n in (*strides, *pads, *more, *dilations, groups)):
            return None
        if not all(0 <= extra < step for extra, step in zip(more, strides, strict=True)):
            return None
        sizes = [
            (out - 1) * step - 2 * pad + dil * (tap - 1) + extra + 1
            for out, step, pad, dil, tap, extra in zip(outputs, strides, pads, dilations, taps, more, strict=True)
        ]
    except (TypeError, ValueError, IndexError):
        return None
    if weight.shape[0] != K or min(*outputs, *sizes) < 1:
        return None
    (D, H, W), (T, R, S) = sizes, taps
    (stride_d, stride_h, stride_w), (front, top, left), (dil_d, dil_h, dil_w) = strides, pads, dilations
    return ConvProblem(
        Direction.BACKWARD_DATA, N, part * groups, H, W, K, R, S, stride_h, stride_w, top, top, left, left,
        dil_h, dil_w, groups, *surroundings(x, weight),
    )._replace(D=D, T=T, stride_d=stride_d, pad_front=front, pad_back=front, dil_d=dil_d)  # fmt: skip


def _are_operands(x: Tensor, weight: Tensor) -> bool:
    return x.dim() == 5 == weight.dim() and x.dtype in DTYPE_NAMES and x.device.type == "cpu"


def volume_problem_of(x: Tensor, weight: Tensor, geometry: Geometry) -> ConvProblem | None:
    """The problem that computes a call: an image's if there is one (`image_of`)."""
    found = volume_of(x, weight, geometry)
    return found and (image_of(found) or found)


def transposed_volume_problem(x: Tensor, weight: Tensor, geometry: TransposedGeometry) -> ConvProblem | None:
    """The same for a transposed convolution."""
    found = transposed_volume(x, weight, geometry)
    return found and (image_of(found) or found)


def volume_gradients(x: Tensor, weight: Tensor, problem: ConvProblem) -> list[ConvProblem]:
    """As `arguments.gradients_of`, of operands with five sizes and the problem that computes their call."""
    found = []
    if x.requires_grad:
        layout = _layout_of(volume_strides(x, weight, problem).y)
        found.append(problem._replace(direction=Direction.BACKWARD_DATA, layout=layout))
    if weight.requires_grad:
        found.append(problem.with_direction(Direction.BACKWARD_WEIGHT))
    return found


def transposed_volume_gradients(x: Tensor, weight: Tensor, problem: ConvProblem) -> list[ConvProblem]:
    """As `arguments.transposed_gradients_of`, likewise."""
    layout = _layout_of(transposed_volume_strides(x, weight, problem).y)
    of_x, of_weight = (
        problem._replace(direction=direction, layout=layout)
        for direction in (Direction.FORWARD, Direction.BACKWARD_WEIGHT)
    )
    return [p for p, operand in ((of_x, x), (of_weight, weight)) if operand.requires_grad]


def _layout_of(strides: Strides) -> str:
    """The layout of a fresh tensor with these strides; contiguous if both fit."""
    return CONTIGUOUS if strides[-1] == 1 and strides[1] == max(strides[1:]) else CHANNELS_LAST


# ---- strides ----------------------------------------------------------------------------------------------------


def volume_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> ResultStrides:
    """As `strides.result_strides`: those of y, grad_x and grad_weight, which have five sizes.

    Args:
        problem: of the call, or of the image that computes it.
    """
    x, weight = _unwrapped(x), _unwrapped(weight)
    p = problem if problem.is_volume else volume_again(problem, rows_of(x, weight))
    (stride, dilation), (padding, rest) = steps(p), even_padding(p)
    y_shape = (p.N, p.K, p.O, p.P, p.Q)
    padded = x if rest is None else F.pad(x.detach(), rest)
    backend = torch._C._select_conv_backend(padded, weight, None, stride, padding, dilation, False, (0, 0, 0), p.groups)
    strides = in_format_of(padded, weight, backend, p.groups, (y_shape, tuple(padded.shape), tuple(weight.shape)))
    if rest is None:
        return strides
    # grad_x is cut out of the gradient of the padded x, and cloned: that keeps the strides of a single image.
    left, _, top, _, front, _ = rest
    cut = torch.empty_strided(padded.shape, strides.grad_x, device="meta")
    cut = cut.narrow(2, front, p.D).narrow(3, top, p.H).narrow(4, left, p.W).clone()
    return strides._replace(grad_x=cut.stride())


def transposed_volume_strides(x: Tensor, weight: Tensor, problem: ConvProblem) -> ResultStrides:
    """As `strides.transposed_strides`."""
    x, weight = _unwrapped(x), _unwrapped(weight)
    p = problem if problem.is_volume else volume_again(problem, rows_of(x, weight))
    stride, dilation = steps(p)
    padding, more = (p.pad_front, p.pad_top, p.pad_left), output_padding(p)
    backend = torch._C._select_conv_backend(x, weight, None, stride, padding, dilation, True, more, p.groups)
    y_shape = (p.N, p.C, p.D, p.H, p.W)
    return in_format_of(x, weight, backend, p.groups, (y_shape, tuple(x.shape), tuple(weight.shape)))


def _unwrapped(t: Tensor) -> Tensor:
    """Under vmap tensors do not give their layout."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if in_functorch() else t


# ---- volumes that are images --------------------------------------------------------------------------------------


def rows_of(x: Tensor, weight: Tensor) -> tuple[int, int] | None:
    """(H, W) of operands with five sizes, which are one dimension of the image; None if there is one slice, whose image
    it is."""
    return None if x.shape[2] == weight.shape[2] == 1 else (x.shape[3], x.shape[4])


def folded(t: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """(N, C, D, H, W), or a weight, as an image: a view of what is dense, as aten takes it."""
    if not (t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last_3d)):
        t = t.contiguous()
    return t.squeeze(2) if rows is None else t.flatten(3)


def unfolded(result: Tensor, rows: tuple[int, int] | None) -> Tensor:
    """The reverse, and no view: autograd forbids changing one in place that a function returns."""
    result = result.unsqueeze(2) if rows is None else result.unflatten(3, rows)
    return result.detach() if result._is_view() else result


def folded_strides(strides: Strides, rows: tuple[int, int] | None) -> Strides:
    """Those of five sizes without the one that disappears: the slices', or the rows', whose memory columns continue."""
    gone = 2 if rows is None else 3
    return (*strides[:gone], *strides[gone + 1 :])
