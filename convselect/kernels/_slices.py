"""Volumes whose kernel steps along the depth by its own size: convolutions of images with C T channels.

Windows then share no slices, so that x (N, C, O T, H, W) is O images (C T, H, W) for each n, and the weight
(K, C, T, R, S) is one of images as it lies. Slices of one image lie apart in NCDHW; some at a time are copied together,
few enough to stay in the L2 cache until the kernel of images reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from convselect.base.problem import CONTIGUOUS, ConvProblem, Direction

CHUNK_BYTES = 2 * 2**20
"""Of x that is copied together, if one image is not larger."""

Run = Callable[[Tensor, Tensor, ConvProblem], Tensor]


def images_of(problem: ConvProblem) -> ConvProblem | None:
    """The problem of the O images of one volume; None if windows overlap along the depth, or padding is in them."""
    p = problem
    if p.stride_d != p.T or p.pad_front or p.O * p.T > p.D or (p.dil_d > 1 and p.T > 1) or p.groups > 1:
        return None
    return p._replace(
        N=p.O, C=p.C * p.T, D=1, T=1, stride_d=1, pad_back=0, dil_d=1, layout=CONTIGUOUS, weight_layout=CONTIGUOUS
    )


def _step(p: ConvProblem) -> int:
    """Images at a time."""
    return min(p.O, max(1, CHUNK_BYTES // (p.C * p.T * p.H * p.W * p.element_bytes)))


def _parts(p: ConvProblem) -> Iterator[tuple[int, slice, slice]]:
    """(volume, slices of y, slices of x)."""
    step = _step(p)
    for n in range(p.N):
        for first in range(0, p.O, step):
            last = min(first + step, p.O)
            yield n, slice(first, last), slice(first * p.T, last * p.T)


def _together(x: Tensor, n: int, slices: slice, p: ConvProblem) -> Tensor:
    """(images, C T, H, W): a view if there is one channel."""
    part: Tensor = x[n, :, slices].unflatten(1, (-1, p.T)).transpose(0, 1)  # type: ignore[no-untyped-call]
    return part.reshape(-1, p.C * p.T, p.H, p.W)


def run(a: Tensor, b: Tensor, problem: ConvProblem, images: ConvProblem, of_images: Run) -> Tensor:
    """The result of a direction, contiguous, by an algorithm of images.

    Args:
        images: `images_of` the problem.
        of_images: (operands of images, their problem) -> the result.
    """
    p = problem
    if p.direction == Direction.BACKWARD_WEIGHT:
        total = torch.zeros(images.weight_shape, dtype=a.dtype)
        for n, of_y, of_x in _parts(p):
            grad = b[n, :, of_y].transpose(0, 1).contiguous()
            total += of_images(_together(a, n, of_x, p), grad, images._replace(N=len(grad)))
        return total.view(p.weight_shape)
    weight = b.reshape(images.weight_shape)
    if p.direction == Direction.FORWARD:
        y = torch.empty(p.y_shape, dtype=a.dtype)
        for n, of_y, of_x in _parts(p):
            x = _together(a, n, of_x, p)
            y[n, :, of_y] = of_images(x, weight, images._replace(N=len(x))).transpose(0, 1)
        return y
    grad_x = torch.empty(p.x_shape, dtype=a.dtype)
    grad_x[:, :, p.O * p.T :] = 0  # slices that no window meets
    for n, of_y, of_x in _parts(p):
        grad = a[n, :, of_y].transpose(0, 1).contiguous()
        part = of_images(grad, weight, images._replace(N=len(grad)))
        grad_x[n, :, of_x].unflatten(1, (-1, p.T)).copy_(part.unflatten(1, (p.C, p.T)).transpose(0, 1))
    return grad_x


def workspace_bytes(problem: ConvProblem, images: ConvProblem, of_images: Callable[[ConvProblem], int]) -> int:
    """Upper bound: operands and result of some images, and copies of what does not lie in NCDHW."""
    p, some = problem, images._replace(N=_step(problem))
    copied = 0 if p.layout == p.weight_layout == CONTIGUOUS else p.x_bytes + p.weight_bytes + p.y_bytes
    return of_images(some) + some.x_bytes + some.y_bytes + 3 * some.weight_bytes + copied


__all__ = ["images_of", "run", "workspace_bytes"]
