"""F(m x m, 3 x 3) of `winograd.py` in PyTorch operations: for float64, and for all types if the C kernels are missing.

Per tile of m x m outputs, with d the (m + 2)^2 inputs it sees, g the kernel, o the element-wise product:

    y       = A^T [sum over c of (G g_c G^T) o (B^T d_c B)] A
    grad_g  = G^T [sum over tiles of (A grad_y A^T) o (B^T d B)] G
    grad_x  = y of grad_y and the kernel rotated by 180 degrees, channels exchanged

For each of the (m + 2)^2 positions the sum over channels (or tiles) is a matrix product. So: gather tiles, transform
them, one batched GEMM, transform back, scatter; a block of tiles at a time, so that intermediates stay in cache.

Sources: Winograd 1980, "Arithmetic complexity of computations"; Lavin & Gray 2015, arXiv 1509.09308 (the tiling, the
GEMM form); matrices in `_winograd_transforms.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction
from convselect.kernels._common import compute_dtype, compute_element_bytes, memory_format
from convselect.kernels._winograd_transforms import R, arrays

CACHED_BYTES = 5 * 2**18
"""Target size of one block's transformed inputs, so that they stay in the L2 cache until the GEMM reads them; but a
block never has fewer tiles than channels (up to MOST_FOR_GEMM), since it reads all of the transformed weight."""
MOST_FOR_GEMM = 256
MOST_TILES = 1024
FEW_TILES = 32
BLOCK_BYTES = 48 * 2**20
"""Upper limit for a block's intermediates, down to a block of one tile."""
CHUNK_BYTES = 4 * 2**20
"""If all tiles fit one block the transformed weight is used only once, so it is made and used in chunks of this
size: measured 2 to 5 times faster at 512 channels than first writing all of it to fresh memory."""
# The matrices (first call of a process), torch's 60 x 60 transposition buffer, alignment.
_SMALL_BYTES = 2**18
_ALIGN = 16  # elements: a cache line in float32


class _Block(NamedTuple):
    """Images n .. n + N and tiles (i .. i + P, j .. j + Q) of each."""

    n: int
    i: int
    j: int
    N: int
    P: int
    Q: int

    @property
    def tiles(self) -> int:
        return self.N * self.P * self.Q


class _Plan(NamedTuple):
    """How the output of N images of `rows` x `columns` tiles is divided into blocks of up to `block` tiles."""

    m: int
    N: int
    rows: int
    columns: int
    block: tuple[int, int, int]  # images, tile rows, tile columns
    chunk: int  # output channels per group whose transformed weight exists at one time
    areas: tuple[int, ...]  # elements of each scratch area

    @property
    def block_tiles(self) -> int:
        return math.prod(self.block)

    def scratch(self, dtype: torch.dtype) -> list[Tensor]:
        """The areas, flat, cut from one allocation; reused by every block, since fresh pages are slow."""
        return list(torch.empty(sum(self.areas), dtype=dtype).split(list(self.areas)))

    def blocks(self) -> Iterator[_Block]:
        size_n, size_i, size_j = self.block
        for n in range(0, self.N, size_n):
            for i in range(0, self.rows, size_i):
                for j in range(0, self.columns, size_j):
                    rest = (self.N - n, self.rows - i, self.columns - j)
                    yield _Block(n, i, j, *map(min, self.block, rest))


def _plan(problem: ConvProblem, m: int) -> _Plan:
    p, a, item = problem, m + R - 1, compute_element_bytes(problem)
    data = p.direction == Direction.BACKWARD_DATA
    c_in, c_out = (p.K, p.C) if data else (p.C, p.K)
    height, width = (p.H, p.W) if data else (p.P, p.Q)
    rows, columns = -(-height // m), -(-width // m)

    channels = max(c_in, c_out, 1)
    tiles = max(min(channels, MOST_FOR_GEMM), min(MOST_TILES, CACHED_BYTES // (a * a * channels * item)))
    per_tile = sum(_areas(p, m, c_in, c_out))
    tiles = max(1, min(tiles, BLOCK_BYTES // (max(per_tile, 1) * item)))
    size_j = min(columns, tiles)
    size_i = min(rows, max(1, tiles // max(1, size_j)))
    size_n = min(p.N, tiles // max(1, size_i * size_j)) if (size_i, size_j) == (rows, columns) else 1
    # Blocks of equal size rather than a small last one.
    block = (_even(p.N, size_n), _even(rows, size_i), _even(columns, size_j))

    chunk = c_out // p.groups
    if p.groups == 1 and block == (p.N, rows, columns):
        chunk = min(chunk, max(32, CHUNK_BYTES // (a * a * max(c_in, 1) * item) // 32 * 32))
    tiles = math.prod(block)
    areas = [tiles * elements for elements in _areas(p, m, c_in, chunk * p.groups)]
    if p.direction == Direction.BACKWARD_WEIGHT:
        areas = [tiles * elements for elements in _areas(p, m, c_in, c_out)]
    areas.append(a * a * c_in * chunk)  # the transformed weight, or weight gradient
    return _Plan(m, p.N, rows, columns, block, chunk, tuple(-(-n // _ALIGN) * _ALIGN for n in areas))


def _areas(problem: ConvProblem, m: int, c_in: int, c_out: int) -> tuple[int, ...]:
    """Elements per tile of the scratch areas; `_correlate` and `_weight_gradient` say what they hold."""
    a = m + R - 1
    tile, half, domain = m * m, m * a, a * a
    if problem.direction == Direction.BACKWARD_WEIGHT:
        return (max(domain * c_in, tile * c_out), domain * c_in, domain * c_out, max(domain * c_in, half * c_out))
    return (max(domain * c_in, half * c_out), domain * c_in, domain * max(c_in, c_out))


def _even(total: int, most: int) -> int:
    """The smallest size that cuts `total` into as few parts as `most` does."""
    return -(-total // -(-total // most)) if total > 0 else 1


# ---- tiles ----------------------------------------------------------------------------------------------------------


def _window(
    image: Tensor, block: _Block, origin: tuple[int, int], size: tuple[int, int], area: Tensor, spare: Tensor
) -> Tensor:
    """The part of `image` (N, C, H, W) that `block` needs, zero outside the image, as (N, height, width, C) in `area`.

    `origin` is the window's first row and column in the image, negative in the padding. `spare` is overwritten.
    """
    (top, left), (height, width), (C, H, W) = origin, size, image.shape[1:]
    elements = block.N * C * height * width
    slab = area[:elements].view(block.N, height, width, C)
    channels_inside = image.stride(1) <= image.stride(3)
    target = slab.permute(0, 3, 1, 2) if channels_inside else spare[:elements].view(block.N, C, height, width)
    rows, columns = slice(max(top, 0), min(top + height, H)), slice(max(left, 0), min(left + width, W))
    if (rows.stop - rows.start, columns.stop - columns.start) != (height, width):
        target.zero_()
    if rows.start < rows.stop and columns.start < columns.stop:
        inside = target[:, :, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
        inside.copy_(image[block.n : block.n + block.N, :, rows, columns])
    if not channels_inside:
        # Per image, both sides dense: the one form of transposition that torch does in cache-sized blocks.
        for row_major, channels_last in zip(target, slab, strict=True):
            channels_last.view(-1, C).copy_(row_major.view(C, -1).t())
    return slab


def _gathered(slab: Tensor, area: Tensor, groups: int, size: int, step: int) -> Tensor:
    """Tiles of `size` x `size` every `step` of a slab (N, height, width, C) as a matrix (size^2, G * tiles * C / G)."""
    N, _, _, C = slab.shape
    tiles = slab.unfold(1, size, step).unfold(2, size, step)  # (N, P, Q, C, size, size), a view
    P, Q = tiles.shape[1:3]
    shape = (size, size, groups, N, P, Q, C // groups)
    matrix = area[: size * size * N * P * Q * C].view(shape)
    matrix.copy_(tiles.unflatten(3, (groups, C // groups)).permute(5, 6, 3, 0, 1, 2, 4))
    return matrix.view(size * size, -1)


def _scatter(tiles: Tensor, y: Tensor, block: _Block, m: int) -> None:
    """Write tiles (m, m, N, P, Q, G, K / G), any strides, to their place in y (N, K, height, width), cropped there."""
    G = tiles.shape[5]
    part = y[block.n : block.n + block.N].unflatten(1, (G, -1))
    part = part[..., block.i * m : (block.i + block.P) * m, block.j * m : (block.j + block.Q) * m]
    for row, row_tiles, height in _full_and_cropped(part.shape[3], m):
        for column, column_tiles, width in _full_and_cropped(part.shape[4], m):
            target = part[..., row : row + row_tiles * height, column : column + column_tiles * width]
            target = target.unflatten(4, (column_tiles, width)).unflatten(3, (row_tiles, height))
            i, j = row // m, column // m
            source = tiles[:height, :width, :, i : i + row_tiles, j : j + column_tiles]
            target.copy_(source.permute(2, 5, 6, 3, 0, 4, 1))


def _full_and_cropped(length: int, m: int) -> list[tuple[int, int, int]]:
    """(first element, tiles, elements per tile) of the whole tiles in `length`, then of a cropped one."""
    full, rest = divmod(length, m)
    return [part for part in ((0, full, m), (full * m, 1, rest)) if part[1] * part[2] > 0]


def _two_sided(matrix: Tensor, tiles: Tensor, between: Tensor, area: Tensor) -> Tensor:
    """matrix @ tile @ matrix^T for each tile, a column of `tiles` (s^2, n): (r^2, n) in `area`, which may hold `tiles`.

    Two thin products over slabs of n: at 8 x 8 twice as fast as one product with the Kronecker square of `matrix`.
    """
    r, s = matrix.shape
    n = tiles.shape[1]
    rows = torch.mm(matrix, tiles.view(s, s * n), out=between[: r * s * n].view(r, s * n))
    torch.bmm(matrix.expand(r, r, s), rows.view(r, s, n), out=area[: r * r * n].view(r, r, n))
    return area[: r * r * n].view(r * r, n)


# ---- the two computations -------------------------------------------------------------------------------------------


def _matrices(m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """B^T, A^T, G x G, G x G flipped as tensors that share memory with `arrays`, whose docstring says why they are made
    anew per call."""
    BT, AT, GG, GG_flipped = map(torch.from_numpy, arrays(m, "float64" if dtype == torch.float64 else "float32"))
    return BT, AT, GG, GG_flipped


def _transformed_weight(weight: Tensor, GG: Tensor, area: Tensor) -> Tensor:
    """((m + 2)^2, K, C / groups) from (K, C / groups, 3, 3)."""
    K, c_per_group = weight.shape[:2]
    taps = weight.to(GG.dtype).permute(2, 3, 0, 1).reshape(R * R, K * c_per_group)
    out = area[: GG.shape[0] * taps.shape[1]].view(GG.shape[0], -1)
    return torch.mm(GG, taps, out=out).view(-1, K, c_per_group)


def _correlate(image: Tensor, weight: Tensor, problem: ConvProblem, m: int) -> Tensor:
    """y for FORWARD (image = x), grad_x for BACKWARD_DATA (image = grad_y)."""
    p, G, a, dtype = problem, problem.groups, m + R - 1, compute_dtype(problem)
    BT, AT, GG, GG_flipped = _matrices(m, dtype)
    plan = _plan(p, m)
    *areas, weight_area = plan.scratch(dtype)
    if p.direction == Direction.FORWARD:
        top, left, c_in, c_out = p.pad_top, p.pad_left, p.C // G, p.K // G
    else:
        # Padding above R - 1 turns negative: the outermost rows of grad_y met nothing but zeros.
        top, left, c_in, c_out = R - 1 - p.pad_top, R - 1 - p.pad_left, p.K // G, p.C // G
    # With one input channel per group there is nothing to sum: an element-wise product, all groups side by side.
    multiply = c_in == 1 and G > 1
    batches = 1 if multiply else G

    def filters(start: int) -> Tensor:
        """(a^2 G, chunk, c_in): the transformed kernels of `chunk` output channels; of all, if there are groups."""
        if p.direction == Direction.FORWARD:
            part = weight[start : start + plan.chunk] if plan.chunk < c_out else weight
            return _transformed_weight(part, GG, weight_area).view(a * a * G, -1, c_in)
        part = weight[:, start : start + plan.chunk]
        return _transformed_weight(part, GG_flipped, weight_area).view(a * a * G, c_in, -1).transpose(1, 2)

    y = torch.empty(p.result_shape, dtype=p.torch_dtype, memory_format=memory_format(p))
    # The product's layout is free: take the one that scatters in runs, with channels or tiles innermost. Few tiles make
    # no runs, and then the GEMM with channels innermost is faster.
    channels_inside = multiply or p.layout == CHANNELS_LAST or plan.block_tiles <= FEW_TILES
    kernels = filters(0)
    for block in plan.blocks():
        tiles = block.tiles
        origin = (block.i * m - top, block.j * m - left)
        # Area 0 holds the window, then half-transformed outputs; area 1 the tiles, then their transforms; area 2
        # half-transformed tiles, then products, then outputs.
        window = _window(image, block, origin, (block.P * m + R - 1, block.Q * m + R - 1), areas[0], areas[1])
        domain = _two_sided(BT, _gathered(window, areas[1], batches, a, m), areas[2], areas[1])
        for start in range(0, c_out, plan.chunk):
            if start > 0:  # only ever in a plan of one block
                kernels = filters(start)
            count = kernels.shape[1]
            products = areas[2][: a * a * G * tiles * count]
            if multiply:
                factors = domain.view(a * a, tiles, G, 1), kernels.reshape(a * a, 1, G, count)
                torch.mul(*factors, out=products.view(a * a, tiles, G, count))
            elif channels_inside:
                rows = domain.view(a * a * G, tiles, c_in)
                torch.bmm(rows, kernels.transpose(1, 2), out=products.view(a * a * G, tiles, count))
            else:
                rows = domain.view(a * a * G, tiles, c_in)
                torch.bmm(kernels, rows.transpose(1, 2), out=products.view(a * a * G, count, tiles))
            outputs = _two_sided(AT, products.view(a * a, -1), areas[0], areas[2])
            if channels_inside:
                outputs = outputs.view(m, m, batches, block.N, block.P, block.Q, -1).permute(0, 1, 3, 4, 5, 2, 6)
            else:
                outputs = outputs.view(m, m, batches, -1, block.N, block.P, block.Q).permute(0, 1, 4, 5, 6, 2, 3)
            _scatter(outputs, y[:, start : start + G * count], block, m)
    return y


def _weight_gradient(x: Tensor, grad_y: Tensor, problem: ConvProblem, m: int) -> Tensor:
    """grad_weight: sums over all tiles in the transform domain, back to 3 x 3 once per kernel."""
    p, G, a, dtype = problem, problem.groups, m + R - 1, compute_dtype(problem)
    BT, AT, GG, _ = _matrices(m, dtype)
    c_in, c_out = p.C // G, p.K // G
    multiply = c_in == 1 and G > 1  # as in _correlate
    batches = 1 if multiply else G
    plan = _plan(p, m)
    *areas, sums_area = plan.scratch(dtype)
    sums_area.zero_()
    grad = torch.empty(p.weight_shape, dtype=p.torch_dtype)

    def finish(start: int, count: int) -> None:
        """Transform the sums of `count` output channels (per group) back and write them to their place."""
        sums = sums_area[: a * a * G * count * c_in].view(a * a, -1)
        # (9, channels) and a transposing copy: sums^T @ GG, which needs no copy, measured 4 times slower.
        taps = (GG.t() @ sums).view(R, R, G * count, c_in)
        grad[start : start + G * count] = taps.permute(2, 3, 0, 1)

    for block in plan.blocks():
        tiles = block.tiles
        origin = (block.i * m - p.pad_top, block.j * m - p.pad_left)
        # Area 0 holds windows, area 1 the transforms of x, area 2 those of grad_y, area 3 half-transformed tiles.
        window = _window(x, block, origin, (block.P * m + R - 1, block.Q * m + R - 1), areas[0], areas[1])
        domain_x = _two_sided(BT, _gathered(window, areas[1], batches, a, m), areas[3], areas[1])
        # Tiles that overhang the edge of grad_y are filled with zeros, so what x holds there adds nothing.
        window = _window(grad_y, block, (block.i * m, block.j * m), (block.P * m, block.Q * m), areas[0], areas[2])
        domain_y = _two_sided(AT.t(), _gathered(window, areas[2], batches, m, m), areas[3], areas[2])
        if multiply:
            products = domain_y.view(a * a, tiles, G, c_out)
            products *= domain_x.view(a * a, tiles, G, 1)
            sums_area[: a * a * G * c_out].view(a * a, G, c_out).add_(products.sum(1))
            continue
        rows_x, rows_y = domain_x.view(a * a * G, tiles, c_in), domain_y.view(a * a * G, tiles, c_out)
        if plan.chunk == c_out:
            sums = sums_area[: a * a * G * c_out * c_in].view(a * a * G, c_out, c_in)
            sums.baddbmm_(rows_y.transpose(1, 2), rows_x)
            continue
        for start in range(0, c_out, plan.chunk):  # one block: nothing to add up
            part = rows_y[:, :, start : start + plan.chunk].transpose(1, 2)
            torch.bmm(part, rows_x, out=sums_area[: a * a * part.shape[1] * c_in].view(a * a, part.shape[1], c_in))
            finish(start, part.shape[1])
    if plan.chunk == c_out:
        finish(0, c_out)
    return grad


# ---- what winograd.py calls -----------------------------------------------------------------------------------------


@torch.no_grad()
def run(a: Tensor, b: Tensor, problem: ConvProblem, m: int) -> Tensor:
    """F(m x m, 3 x 3) on the direction's two operands."""
    if problem.direction == Direction.BACKWARD_WEIGHT:
        return _weight_gradient(a, b, problem, m)
    return _correlate(a, b, problem, m)


def workspace_bytes(problem: ConvProblem, m: int) -> int:
    """Upper bound on the peak of extra memory of `run`."""
    p, plan, item = problem, _plan(problem, m), compute_element_bytes(problem)
    # Temporaries of one chunk: the reordered and cast weight; or the weight gradient before it is copied to its place.
    copies = 2 if p.element_bytes == 2 and p.direction != Direction.BACKWARD_WEIGHT else 1
    weight = R * R * plan.chunk * (p.K if p.direction == Direction.BACKWARD_DATA else p.C)
    elements = sum(plan.areas) + copies * weight
    if p.direction == Direction.BACKWARD_WEIGHT and p.groups == p.C:
        elements += (m + R - 1) ** 2 * p.K  # what one block adds to the sums
    return item * elements + _SMALL_BYTES
