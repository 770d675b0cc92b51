"""How a convolution by FFT is divided: transform lengths, tiles, and the chunks that keep its memory bounded.

`workspace_bytes` and the loops of `_fft_torch.py` share the plan, so that the bound matches what is really allocated.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from convselect.base.problem import ConvProblem, Direction

TILES = (32, 64, 128, 256, 512)
"""Tile sides to pick from."""
MAX_TILED_EXTENT = TILES[-1] // 2
"""Kernels wider than half the largest tile would recompute more than they keep."""

# Above 32 MiB glibc gives every allocation fresh pages from the kernel, which costs more than the transforms do.
SPECTRUM_BYTES = 24 * 2**20
# If the weight's spectrum is too large to keep, the image's is kept instead: fewer passes over the weight.
HELD_SPECTRUM_BYTES = 80 * 2**20
# Kernels of few taps are transformed by two matrix products, which skip the zeros they would be padded with and leave
# the spectrum in the order that the products per frequency want: half the time of a transform and a transposition.
MAX_PRUNED_TAPS = 32
CPU_PIECE_BYTES, GPU_PIECE_BYTES = 2**20, 32 * 2**20  # the size of an L2 cache; enough to fill a GPU
GPU_SPECTRUM_BYTES = 128 * 2**20  # fewer, larger launches: on a GPU neither pages nor caches set a limit

KERNEL_TILES = (16, 24, 32, 48, 64)
"""Tile sides that `csrc/fft.inc` knows."""
ROW_TILES = (32, 48, 64, 96, 128, 256, 384, 512, 768, 1024)
"""Lengths of its tiles of one row, which kernels of one row have: `csrc/fft_rows.inc`."""


@functools.lru_cache(maxsize=4096)
def fast_length(n: int, even: bool) -> int:
    """The smallest length >= n with no prime factor above 7 (and even, if asked). Such lengths are far apart if n is
    large, so this goes through the products of 3, 5 and 7, a few hundred for any size of a tensor."""
    best = 1 << max(n - 1, int(even)).bit_length()
    sevens = 1
    while sevens < best:
        fives = sevens
        while fives < best:
            odd = fives
            while odd < best:
                best = min(best, odd << max(-(-n // odd) - 1, int(even)).bit_length())
                odd *= 3
            fives *= 5
        sevens *= 7
    return best


class Axis(NamedTuple):
    """How one axis is divided: `tiles` transforms of `length`, each yielding `step` results from its `skip`-th on;
    the streamed operand starts `lead` elements into the first tile (negative: that many are cut off)."""

    length: int
    step: int
    tiles: int
    lead: int
    skip: int

    @property
    def span(self) -> int:
        """Elements that all tiles cover together."""
        return (self.tiles - 1) * self.step + self.length


def _axis(
    direction: Direction, size: int, out: int, extent: int, pads: tuple[int, int], tile: int | None, even: bool
) -> Axis:
    before, after = pads
    whole = fast_length(max(size + max(before, after), out, extent), even)
    backward_data = direction == Direction.BACKWARD_DATA
    if tile is None or tile >= whole:
        return Axis(whole, size, 1, 0, before) if backward_data else Axis(whole, out, 1, before, 0)
    step = tile - extent + 1
    if backward_data:
        # grad_x[h] sums grad_y[h + before - r]: a tile of results needs extent - 1 elements in front of it.
        return Axis(tile, step, -(-size // step), extent - 1 - before, extent - 1)
    return Axis(tile, step, -(-out // step), before, 0)


class Plan(NamedTuple):
    """Everything about the execution that follows from the problem; `workspace_bytes` and the loops share it.

    `inner` and `outer` are channels per group of the streamed operand and of the other activation (forward and
    backward weight: C/G and K/G; backward data: K/G and C/G).
    """

    rows: Axis
    cols: Axis
    bins: int
    inner: int
    outer: int
    elementwise: bool  # one input channel per group: products of spectra, no matrix products
    pruned: bool  # the kernel's transforms are matrix products
    groups: int  # per chunk
    outer_chunk: int
    inner_chunk: int  # less than inner only for elementwise backward data, whose sum over inner channels is a loop
    images: int  # per chunk, and so tile rows and columns
    tile_rows: int
    tile_cols: int
    piece_bytes: int
    complex_bytes: int

    @property
    def units(self) -> int:
        """Transforms per channel in a chunk."""
        return self.images * self.tile_rows * self.tile_cols

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.length, self.cols.length)

    @property
    def piece(self) -> int:
        """Transforms per piece."""
        return max(1, self.piece_bytes // (self.bins * self.complex_bytes))


def _axes(p: ConvProblem, tile: int | None) -> tuple[Axis, Axis]:
    extent_h, extent_w = p.kernel_extent
    rows = _axis(p.direction, p.H, p.P, extent_h, (p.pad_top, p.pad_bottom), tile, False)
    return rows, _axis(p.direction, p.W, p.Q, extent_w, (p.pad_left, p.pad_right), tile, True)


@functools.lru_cache(maxsize=1024)
def plan_of(p: ConvProblem, tile: int | None) -> Plan:
    rows, cols = _axes(p, tile)
    bins = rows.length * (cols.length // 2 + 1)
    complex_bytes = 16 if p.dtype == "float64" else 8
    plane = bins * complex_bytes
    inner, outer = p.C // p.groups, p.K // p.groups
    elementwise = inner == 1
    pruned = not elementwise and max(p.R, p.S) <= MAX_PRUNED_TAPS
    if p.direction == Direction.BACKWARD_DATA:
        inner, outer = outer, inner
    cpu = p.device == "cpu"
    piece_bytes = CPU_PIECE_BYTES if cpu else GPU_PIECE_BYTES
    # Elementwise products of spectra only move memory: small chunks keep the whole pipeline in cache.
    target = GPU_SPECTRUM_BYTES if not cpu else 2 * piece_bytes if elementwise else SPECTRUM_BYTES
    per_group = max(inner * outer, inner + outer) * plane
    groups = max(1, min(p.groups, target // per_group))
    outer_chunk = outer
    if inner * outer * plane > target:
        # The streamed operand's spectrum is kept during the loop over outer channels; in backward weight the other way.
        if not elementwise:
            target = HELD_SPECTRUM_BYTES if cpu else GPU_SPECTRUM_BYTES
        held = target if p.direction == Direction.BACKWARD_WEIGHT else max(target // 4, 2**21)
        outer_chunk = max(1, min(outer, held // (inner * plane)))
    inner_chunk = inner
    if elementwise and p.direction == Direction.BACKWARD_DATA:
        inner_chunk = max(1, min(inner, target // plane))
    per_unit = groups * (inner_chunk + outer_chunk) * plane
    units = max(1, target // per_unit)
    if units >= rows.tiles * cols.tiles:
        images, tile_rows, tile_cols = max(1, min(p.N, units // (rows.tiles * cols.tiles))), rows.tiles, cols.tiles
    else:
        images, tile_rows, tile_cols = 1, max(1, units // cols.tiles), min(units, cols.tiles)
    return Plan(
        rows, cols, bins, inner, outer, elementwise, pruned, groups, outer_chunk, inner_chunk, images, tile_rows,
        tile_cols, piece_bytes, complex_bytes,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def tile_side(problem: ConvProblem) -> int:
    """The tile side with the least estimated time. Nanoseconds per element of one spectrum, measured on one core:
    4 for a transform and its transposition, 0.2 for a multiplication in a matrix product, 1 for any other."""
    p = problem
    best, best_ns = TILES[-1], float("inf")
    for tile in TILES:
        if tile < max(p.kernel_extent):
            continue
        rows, cols = _axes(p, tile)
        units = p.N * rows.tiles * cols.tiles
        weights = p.K * (p.C // p.groups)
        product_ns = 1.0 if p.groups == p.C else 0.2
        total_ns = rows.length * cols.length * (weights * (4 + units * product_ns) + (p.C + p.K) * units * 4)
        if total_ns < best_ns:
            best, best_ns = tile, total_ns
    return best


def _kernel_axis(length: int, size: int, out: int, taps: int, before: int, dil: int) -> tuple[int, int, int]:
    """(step, tiles, results of a phase) of one axis, computed as in `fft_make_axis` of csrc/fft.inc."""
    line = -(-out // dil)
    padding = max(0, -((min(dil, out) - 1 - before) // dil))
    span, end = line + taps - 1, max(0, -(-(size + before) // dil))
    wraps = max(line, taps, end) <= length and span - length <= padding
    step = line if span <= length or wraps else length - taps + 1
    return step, out // (step * dil) * dil + min(dil, out % (step * dil)), line


def kernel_tiles(p: ConvProblem) -> tuple[int, ...]:
    """The sides, or lengths, of tiles in the C kernel that hold this problem's kernel."""
    return tuple(tile for tile in (ROW_TILES if p.R == 1 else KERNEL_TILES) if tile >= max(p.R, p.S))


def _kernel_axes(p: ConvProblem, side: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(step, tiles) of rows and columns in the C kernel; None if tiles would recompute more than they keep."""
    dil_h, dil_w = p.dil_h if p.R > 1 else 1, p.dil_w if p.S > 1 else 1
    if p.direction == Direction.BACKWARD_DATA:
        rows = (p.P, p.H, p.R, dil_h * (p.R - 1) - p.pad_top, dil_h)
        cols = (p.Q, p.W, p.S, dil_w * (p.S - 1) - p.pad_left, dil_w)
    else:
        rows, cols = (p.H, p.P, p.R, p.pad_top, dil_h), (p.W, p.Q, p.S, p.pad_left, dil_w)
    if p.R == 1:
        step, tiles, line = _kernel_axis(side, *cols)
        return None if step < min(line, side // 2) else ((1, rows[1]), (step, tiles))
    axes = _kernel_axis(side, *rows), _kernel_axis(side, *cols)
    if any(step < min(line, side // 2) for step, _, line in axes):
        return None
    return axes[0][:2], axes[1][:2]


@functools.lru_cache(maxsize=4096)
def sides(problem: ConvProblem, in_c: bool) -> tuple[int, ...]:
    """The tile sides to pick from, in the C kernel or by PyTorch's operations."""
    if in_c:
        return tuple(side for side in kernel_tiles(problem) if _kernel_axes(problem, side) is not None)
    return tuple(side for side in TILES if side >= max(problem.kernel_extent))


@functools.lru_cache(maxsize=1024)
def kernel_tile_side(problem: ConvProblem) -> int | None:
    """The side, of `kernel_tiles`, with the least estimated time in the C kernel; None if tiles would recompute more
    than they keep. Nanoseconds per bin and vector of 16 channels, measured on one core: 24 for a tile to or from its
    spectrum, 30 for one of one row, 14 for a kernel, which is mostly zeros, 1.3 for a multiplication in a matrix
    product."""
    p = problem
    best, best_ns = None, float("inf")
    inner, outer = p.C // p.groups, p.K // p.groups
    if p.direction == Direction.BACKWARD_DATA:
        inner, outer = outer, inner
    inner_blocks, outer_blocks = -(-inner // 16), -(-outer // 16)
    tile_ns = 30 if p.R == 1 else 24
    for side in kernel_tiles(p):
        axes = _kernel_axes(p, side)
        if axes is None:
            continue
        units = p.N * axes[0][1] * axes[1][1]
        transforms_ns = tile_ns * units * (inner_blocks + outer_blocks) + 14 * inner * outer_blocks
        total_ns = (1 if p.R == 1 else side) * (side // 2 + 1) * (transforms_ns + 1.3 * units * inner * outer_blocks)
        if total_ns < best_ns:
            best, best_ns = side, total_ns
    return best
