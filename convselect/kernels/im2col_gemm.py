"""Convolution as a matrix product over an unfolded image (im2col).

    forward          y  (K, L)   =  weight (K, C*R*S) @ columns (C*R*S, L)          L = P*Q per image
    backward_data    columns'    =  weight^T @ grad_y, then scattered back (col2im)
    backward_weight  grad_weight =  grad_y @ columns^T, summed over images

Source: Chellapilla et al. 2006, "High performance convolutional neural networks for document processing".

If the columns *are* the image nothing is unfolded: 1x1 kernels at stride 1, and kernels as large as the image, are
plain GEMMs on views. Patch convolutions (kernel = stride) copy x once. Everything else is unfolded in chunks of images
or of output rows that keep the columns within the workspace budget and, by default, near the size of the caches.
Volumes: `_im2col_volumes.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base import settings
from convselect.base.problem import CHANNELS_LAST, ConvProblem
from convselect.kernels import _im2col_volumes
from convselect.kernels._common import cast_bytes, compute_dtype, compute_element_bytes
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._cuda_flags import product_rounds_too_much
from convselect.kernels._space import Parameter, Space, Values
from convselect.kernels._tuning import in_slots, within

# The best of 1 to 64 MiB on layers of ResNet-18 and VGG-16: all are equal on small images; on 224 x 224, 2 MiB is a
# quarter faster than 8 and more, and 1 MiB is sometimes slower.
COLUMN_BYTES = 2 * 2**20
_COLUMN_BYTES = Parameter("column_bytes", (0, *(2**n for n in range(15, 25))))
# GEMMs on a GPU are fastest on all pixels at once, and its caches hold no column block anyway: one launch for many
# images.
GPU_COLUMN_BYTES = 256 * 2**20
FOLDED_PIXELS = 16
"""Images of fewer pixels are multiplied by a 1x1 kernel all at once. From here on products of their own are as fast."""


def _dtype(p: ConvProblem) -> torch.dtype:
    """Element type of the matrices. GPUs multiply 16-bit matrices with sums in float32, so nothing is cast there."""
    return p.torch_dtype if p.device == "cuda" else compute_dtype(p)


def _element_bytes(p: ConvProblem) -> int:
    return p.element_bytes if p.device == "cuda" else compute_element_bytes(p)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm(a, b)` unrounded: in float32 if a and b are 16-bit matrices."""
    if a.element_size() > 2:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, total in `compute_dtype`."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(_wide_product(a, b))


def _is_whole_image(p: ConvProblem) -> bool:
    """One output pixel that sees the whole unpadded image: a fully connected layer."""
    return p.R == p.H and p.S == p.W and p.dil_h == p.dil_w == 1 and not any(p.padding)


def _chunks(p: ConvProblem, params: Params) -> Iterator[tuple[int, int, int, int]]:
    """(first image, last image, first output row, last output row) such that the columns of each fit the budget."""
    per_row = (p.C * p.R * p.S) * p.Q * _element_bytes(p)
    budget = _column_budget(p, params)
    if per_row * p.P <= budget:
        images = max(1, min(p.N, budget // (per_row * p.P)))
        for first in range(0, p.N, images):
            yield first, min(first + images, p.N), 0, p.P
    else:
        rows = max(1, budget // per_row)
        for image in range(p.N):
            for first in range(0, p.P, rows):
                yield image, image + 1, first, min(first + rows, p.P)


def _column_budget(p: ConvProblem, params: Params) -> int:
    if params and params.get("column_bytes"):
        return int(params["column_bytes"])
    allowed = max(settings.current().workspace_bytes, 1)
    return min(GPU_COLUMN_BYTES, allowed // 2) if p.device == "cuda" else min(COLUMN_BYTES, allowed)


def _column_bytes(p: ConvProblem, params: Params = None) -> int:
    """The largest unfolded piece that `_chunks` makes."""
    per_row = (p.C * p.R * p.S) * p.Q * _element_bytes(p)
    budget = _column_budget(p, params)
    if per_row * p.P <= budget:
        return per_row * p.P * max(1, min(p.N, budget // (per_row * p.P)))
    return per_row * max(1, budget // per_row)


def _is_folded(p: ConvProblem) -> bool:
    """Whether all images of a batch are one product: they have so few pixels each that products of their own, which all
    read the weight, take up to 20 times as long. Folding copies both operands once."""
    return p.is_pointwise and p.groups == 1 and p.N > 1 and 1 < p.P * p.Q < FOLDED_PIXELS and p.device == "cpu"


def _folded(w: Tensor, x: Tensor, p: ConvProblem) -> Tensor:
    """w (rows, columns) times each image of x (N, columns, H, W): (N, rows, pixels)."""
    pixels = p.P * p.Q
    product = w @ x.reshape(p.N, -1, pixels).transpose(0, 1).reshape(w.shape[1], p.N * pixels)
    return product.view(-1, p.N, pixels).transpose(0, 1).contiguous()


class Im2colGemm(Algorithm):
    """Parameter on CPUs: `column_bytes`, how much is unfolded at a time; 0: the smaller of `COLUMN_BYTES` and the
    workspace budget."""

    name = "im2col_gemm"
    dimensions = frozenset({2, 3})
    devices = frozenset({"cpu", "cuda"})
    may_be_unready = True

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.is_volume and problem.device != "cpu":
            return f"im2col_gemm needs a CPU for volumes; this problem is on {problem.device}."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p, size = problem, _element_bytes(problem)
        x, y, weight = (b // p.element_bytes for b in (p.x_bytes, p.y_bytes, p.weight_bytes))
        # On a GPU a weight gradient is summed in float32, and so are the columns of backward data.
        casts = 8 * weight if p.device == "cuda" else cast_bytes(p, x, y, weight)
        # Packed copies of strided operands, the result before its last copy, a transposed weight.
        copies = size * (x + y + 2 * weight)
        if p.is_volume:
            return casts + copies + size * _im2col_volumes.workspace(p, _column_budget(p, params) // size)
        if p.is_pointwise or _is_whole_image(p):
            return casts + copies
        if p.direction == "backward_data":
            images, channels = _scatter_chunk(p, params)
            columns = images * channels * p.R * p.S * p.P * p.Q * compute_element_bytes(p)
            padded = images * channels * (p.H + p.pad_top + p.pad_bottom) * (p.W + p.pad_left + p.pad_right)
            padded *= compute_element_bytes(p)
            return casts + copies + 2 * columns + padded
        padded = p.N * p.C * (p.H + p.pad_top + p.pad_bottom) * (p.W + p.pad_left + p.pad_right) * size
        images = min(p.N, max(1, _column_bytes(p, params) // max(1, p.C * p.R * p.S * p.P * p.Q * size)))
        return casts + copies + padded + _column_bytes(p, params) + images * p.K * p.P * p.Q * size

    def ready(self, problem: ConvProblem, params: Params = None) -> bool:
        return not product_rounds_too_much(problem)

    def space(self, problem: ConvProblem) -> Space | None:
        p = problem
        return None if p.device != "cpu" or p.is_volume or p.is_pointwise or _is_whole_image(p) else _space(self)

    def run(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        in_slots(self, problem, params, ())  # raises if `params` is not a program
        return super().run(a, b, problem, params)

    def _of_volumes(self, a: Tensor, b: Tensor, p: ConvProblem, params: Params, compute: Any) -> Tensor:
        budget = _column_budget(p, params) // _element_bytes(p)
        result: Tensor = compute(a.to(_dtype(p)), b.to(_dtype(p)), p, budget)
        return result.to(a.dtype)

    # ---- forward ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, dtype = problem, _dtype(problem)
        if p.is_volume:
            return self._of_volumes(x, weight, p, params, _im2col_volumes.forward)
        x, weight, out_dtype = x.to(dtype), weight.to(dtype), x.dtype
        if _is_whole_image(p):
            y = torch.bmm(
                x.reshape(p.N, p.groups, -1).transpose(0, 1), weight.reshape(p.groups, p.K // p.groups, -1).mT
            )
            y = y.transpose(0, 1).reshape(p.y_shape)
        elif p.layout == CHANNELS_LAST:
            y = self._forward_channels_last(x, weight, p, params)
        else:
            y = self._forward_contiguous(x, weight, p, params)
        return y.to(out_dtype)

    def _forward_contiguous(self, x: Tensor, weight: Tensor, p: ConvProblem, params: Params) -> Tensor:
        G = p.groups
        w = weight.reshape(G, p.K // G, -1)
        if p.is_pointwise:
            if _is_folded(p):
                return _folded(w[0], x, p).view(p.y_shape)
            columns = x.reshape(p.N * G, p.C // G, p.P * p.Q)
            return torch.bmm(w.repeat(p.N, 1, 1) if G > 1 else w.expand(p.N, -1, -1), columns).view(p.y_shape)
        y = torch.empty(p.y_shape, dtype=x.dtype, device=x.device)
        flat = y.view(p.N, G, p.K // G, p.P * p.Q)
        for n0, n1, r0, r1, columns in self._columns_contiguous(x, p, params):
            if p.device == "cuda":  # one launch for all images
                product = torch.bmm(
                    w.repeat(n1 - n0, 1, 1) if G > 1 else w.expand(n1 - n0, -1, -1), columns.flatten(0, 1)
                )
                flat[n0:n1, :, :, r0 * p.Q : r1 * p.Q] = product.view(n1 - n0, G, p.K // G, -1)
                del columns, product
                continue
            for image in range(n1 - n0):
                target = flat[n0 + image, :, :, r0 * p.Q : r1 * p.Q]
                if G == 1:
                    torch.mm(w[0], columns[image, 0], out=target[0])
                else:
                    target.copy_(torch.bmm(w, columns[image]))
            del columns  # before the next chunk is made, so that there is only one
        return y

    def _columns_contiguous(
        self, x: Tensor, p: ConvProblem, params: Params
    ) -> Iterator[tuple[int, int, int, int, Tensor]]:
        """Chunks of the unfolded image as (images, G, C/G*R*S, pixels); a view if the kernel is 1x1."""
        G = p.groups
        if p.is_pointwise:
            yield 0, p.N, 0, p.P, x.reshape(p.N, G, p.C // G, -1)
            return
        windows = _windows(_pad(x, p).contiguous(), p)
        for n0, n1, r0, r1 in _chunks(p, params):
            yield n0, n1, r0, r1, windows[n0:n1, ..., r0:r1, :].reshape(n1 - n0, G, -1, (r1 - r0) * p.Q)

    def _forward_channels_last(self, x: Tensor, weight: Tensor, p: ConvProblem, params: Params) -> Tensor:
        G = p.groups
        y = torch.empty((p.N, p.P, p.Q, p.K), dtype=x.dtype, device=x.device)
        flat = y.view(-1, G, p.K // G)
        # (G, R*S*C/G, K/G): rows in the order in which a channels_last window is read.
        w = weight.reshape(G, p.K // G, p.C // G, p.R, p.S).permute(0, 3, 4, 2, 1).reshape(G, -1, p.K // G)
        for n0, n1, r0, r1, columns in self._columns_channels_last(x, p, params):
            target = flat[(n0 * p.P + r0) * p.Q : ((n1 - 1) * p.P + r1) * p.Q]
            if G == 1:
                torch.mm(columns[0], w[0], out=target[:, 0])
            else:
                target.copy_(torch.bmm(columns, w).transpose(0, 1))
            del columns
        return y.permute(0, 3, 1, 2)

    def _columns_channels_last(
        self, x: Tensor, p: ConvProblem, params: Params
    ) -> Iterator[tuple[int, int, int, int, Tensor]]:
        """Chunks of the unfolded image as (G, pixels, R*S*C/G); a view if the kernel is 1x1."""
        G = p.groups
        if p.is_pointwise:
            pixels = x.permute(0, 2, 3, 1).reshape(-1, G, p.C // G)
            yield 0, p.N, 0, p.P, pixels.transpose(0, 1)
            return
        windows = _windows(_pad(x, p).contiguous(memory_format=torch.channels_last), p)
        windows = windows.unflatten(1, (G, p.C // G)).permute(1, 0, 5, 6, 3, 4, 2)  # G N P Q R S C/G
        for n0, n1, r0, r1 in _chunks(p, params):
            yield n0, n1, r0, r1, windows[:, n0:n1, r0:r1].reshape(G, (n1 - n0) * (r1 - r0) * p.Q, -1)

    # ---- backward -----------------------------------------------------------------------------------------------

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G, dtype = problem, problem.groups, _dtype(problem)
        if p.is_volume:
            return self._of_volumes(grad_y, weight, p, params, _im2col_volumes.backward_data)
        g, weight, out_dtype = grad_y.to(dtype), weight.to(dtype), grad_y.dtype
        w = weight.reshape(G, p.K // G, -1)  # (G, K/G, C/G*R*S)
        if _is_whole_image(p):
            grad = torch.bmm(g.reshape(p.N, G, -1).transpose(0, 1), w).transpose(0, 1).reshape(p.x_shape)
        elif p.is_pointwise and p.layout == CHANNELS_LAST and G == 1:
            grad = (g.permute(0, 2, 3, 1).reshape(-1, p.K) @ w[0]).view(p.N, p.H, p.W, p.C).permute(0, 3, 1, 2)
        elif _is_folded(p):
            grad = _folded(w[0].mT, g, p).view(p.x_shape)
        elif p.is_pointwise:
            columns = g.reshape(p.N * G, p.K // G, -1)
            grad = torch.bmm(w.mT.repeat(p.N, 1, 1) if G > 1 else w.mT.expand(p.N, -1, -1), columns).view(p.x_shape)
        else:
            grad = self._scatter(g, weight, p, params)
        return grad.to(out_dtype)

    def _scatter(self, g: Tensor, weight: Tensor, p: ConvProblem, params: Params) -> Tensor:
        """weight^T @ grad_y, folded back onto the image; in chunks of images and of input channels of a group."""
        G, per_group = p.groups, p.C // p.groups
        size = (p.H + p.pad_top + p.pad_bottom, p.W + p.pad_left + p.pad_right)
        w = weight.reshape(G, p.K // G, per_group, p.R * p.S)
        g = g.reshape(p.N, G, p.K // G, p.P * p.Q)
        grad = torch.empty(p.N, G, per_group, p.H, p.W, dtype=g.dtype, device=g.device)
        images, channels = _scatter_chunk(p, params)
        groups = max(1, channels // per_group)
        channels = min(channels, per_group)
        for n in range(0, p.N, images):
            for group in range(0, G, groups):
                for c in range(0, per_group, channels):
                    part = w[group : group + groups, :, c : c + channels].flatten(2).mT
                    columns = self._back_columns(part, g[n : n + images, group : group + groups])
                    target = grad[n : n + images, group : group + groups, c : c + channels]
                    folded = F.fold(
                        columns.reshape(columns.shape[0], -1, p.P * p.Q), size, (p.R, p.S), p.dilation, 0, p.stride
                    )
                    folded = folded[..., p.pad_top : p.pad_top + p.H, p.pad_left : p.pad_left + p.W]
                    target.copy_(folded.reshape(target.shape))
                    del columns, folded
        return grad.view(p.x_shape)

    def _back_columns(self, part: Tensor, g: Tensor) -> Tensor:
        """part (groups, c, k) @ g (images, groups, k, pixels); unrounded if both are 16-bit."""
        if part.element_size() > 2:
            return torch.matmul(part, g)
        product = _wide_product(part.expand(g.shape[0], -1, -1, -1).flatten(0, 1), g.flatten(0, 1))
        return product.view(*g.shape[:2], *product.shape[1:])

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, G, dtype = problem, problem.groups, _dtype(problem)
        if p.is_volume:
            return self._of_volumes(x, grad_y, p, params, _im2col_volumes.backward_weight)
        x, g, out_dtype = x.to(dtype), grad_y.to(dtype), x.dtype
        if _is_whole_image(p):
            columns = x.reshape(p.N, G, -1).transpose(0, 1)
            grad = torch.bmm(g.reshape(p.N, G, -1).transpose(0, 1).mT, columns).reshape(p.weight_shape)
        elif p.layout == CHANNELS_LAST or p.device == "cuda":  # a GPU sums over all pixels in one product
            flat = g.permute(0, 2, 3, 1).reshape(-1, G, p.K // G)
            total = torch.zeros(G, p.R * p.S * p.C // G, p.K // G, dtype=compute_dtype(p), device=x.device)
            for n0, n1, r0, r1, columns in self._columns_channels_last(x, p, params):
                part = flat[(n0 * p.P + r0) * p.Q : ((n1 - 1) * p.P + r1) * p.Q].transpose(0, 1)
                _add_product(total, columns.mT, part)
                del columns
            grad = total.view(G, p.R, p.S, p.C // G, p.K // G).permute(0, 4, 3, 1, 2).reshape(p.weight_shape)
        else:
            flat = g.reshape(p.N, G, p.K // G, p.P * p.Q)
            total = torch.zeros(G, p.K // G, p.C // G * p.R * p.S, dtype=dtype, device=x.device)
            for n0, n1, r0, r1, columns in self._columns_contiguous(x, p, params):
                for image in range(n1 - n0):
                    total.baddbmm_(flat[n0 + image, :, :, r0 * p.Q : r1 * p.Q], columns[image].mT)
                del columns
            grad = total.view(p.weight_shape)
        return grad.to(out_dtype)


def _pad(x: Tensor, p: ConvProblem) -> Tensor:
    return F.pad(x, (p.pad_left, p.pad_right, p.pad_top, p.pad_bottom)) if any(p.padding) else x


def _windows(padded: Tensor, p: ConvProblem) -> Tensor:
    """Every window of the padded image, as a view (N, C, R, S, P, Q) that overlaps itself."""
    sN, sC, sH, sW = padded.stride()
    return padded.as_strided(
        (p.N, p.C, p.R, p.S, p.P, p.Q), (sN, sC, p.dil_h * sH, p.dil_w * sW, p.stride_h * sH, p.stride_w * sW)
    )


def _scatter_chunk(p: ConvProblem, params: Params) -> tuple[int, int]:
    """(images, channels) whose columns fit the budget: whole groups, or part of one group."""
    per_channel = p.R * p.S * p.P * p.Q * compute_element_bytes(p)
    channels = max(1, _column_budget(p, params) // per_channel)
    if channels >= p.C:
        return min(p.N, channels // p.C), p.C
    per_group = p.C // p.groups
    return 1, channels if channels < per_group else channels // per_group * per_group


@functools.cache
def _space(algorithm: Im2colGemm) -> Space:
    usual = {"column_bytes": 0}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        p, value = problem, values.get("column_bytes", 0)
        if value == 0:
            return True
        # A budget of more than twice all columns is the same program as the next smaller one.
        in_all = p.N * p.C * p.R * p.S * p.P * p.Q * compute_element_bytes(p)
        return value < 2 * in_all and within(algorithm, p, usual, values)

    return Space((_COLUMN_BYTES,), lambda _: usual, allowed)


ALGORITHMS = (Im2colGemm(),)
