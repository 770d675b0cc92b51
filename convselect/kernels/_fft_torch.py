"""The transforms of `fft.py` in PyTorch operations: whole images, and tiles that the C kernel does not compute.

The work is divided into chunks over groups, images, tiles and channels so that spectra stay near
`_fft_plan.SPECTRUM_BYTES`, and transforms run in pieces that stay in cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._common import compute_dtype
from convselect.kernels._fft_plan import Plan


@functools.lru_cache(maxsize=32)  # a few hundred kB each
def _dft(length: int, rows: int, columns: int, step: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi i j step / length, (rows, columns), exact to rounding however large i j is."""
    turns = torch.outer(torch.arange(rows), torch.arange(columns) * step) % length
    angle = turns.double() * (2 * math.pi / length)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def _ranges(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class Engine:
    """Computes one call: the loops over chunks, and the packing of spectra.

    A packed spectrum of `channels` (group-major) and `units` is (bins, groups, channels per group, units) for matrix
    products, bins column by column, and (groups, channels per group, units, bins) for elementwise ones, row by row.
    """

    def __init__(self, problem: ConvProblem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.real = compute_dtype(problem)
        self.complex = torch.complex128 if self.real == torch.float64 else torch.complex64

    # ---- between space and frequency ----------------------------------------------------------------------------

    def _transform(self, planes: Tensor, groups: int, conj: bool) -> Tensor:
        """Packed spectrum of planes (channels, *units, h, w), zero-padded to the transform's size."""
        plan = self.plan
        channels, units = planes.shape[0], planes[0, ..., 0, 0].numel()
        shape = (channels, units, plan.bins) if plan.elementwise else (plan.bins, channels * units)
        packed = torch.empty(shape, dtype=self.complex, device=planes.device)
        for c in _ranges(channels, max(1, plan.piece // units)):
            part = planes[c].reshape(-1, *planes.shape[-2:]).to(self.real)
            z = torch.fft.rfft2(part, s=plan.shape)
            if conj:
                z = torch.conj_physical(z, out=z)
            if plan.elementwise:
                packed[c] = z.reshape(-1, units, plan.bins)
            else:
                into = packed[:, c.start * units : c.stop * units]
                into.view(z.shape[2], z.shape[1], -1).copy_(z.permute(2, 1, 0))
        if plan.elementwise:
            return packed.view(groups, channels // groups, units, plan.bins)
        return packed.view(plan.bins, groups, channels // groups, units)

    def _inverse(self, packed: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(channels, planes (channels, units, Lh, Lw)), piece by piece."""
        plan = self.plan
        units = packed.shape[2] if plan.elementwise else packed.shape[3]
        channels = packed.numel() // (units * plan.bins)
        rows, columns = plan.rows.length, plan.cols.length // 2 + 1
        if plan.elementwise:
            flat = packed.reshape(channels * units, rows, columns)
        else:
            flat = packed.reshape(columns, rows, channels * units).permute(2, 1, 0)
        for c in _ranges(channels, max(1, plan.piece // units)):
            z = flat[c.start * units : c.stop * units]
            yield c, torch.fft.irfft2(z, s=plan.shape).reshape(-1, units, *plan.shape)

    def _weight_spectrum(self, weight: Tensor, g: slice, outer: slice, inner: slice, conj: bool) -> Tensor:
        """Packed spectrum of the weight between these outer and inner channels; it has (K', C') in place of units."""
        p = self.problem
        w = weight.view(p.groups, p.K // p.groups, p.C // p.groups, p.R, p.S)[g]
        w = w[:, inner, outer] if p.direction == Direction.BACKWARD_DATA else w[:, outer, inner]
        k, c = w.shape[1:3]
        if self.plan.pruned:
            return self._pruned_transform(w.flatten(0, 2), conj).view(self.plan.bins, -1, k, c)
        w = w.reshape(-1, 1, p.R, p.S)
        if p.dilation != (1, 1):
            spread = w.new_zeros(w.shape[0], 1, *p.kernel_extent)
            spread[..., :: p.dil_h, :: p.dil_w] = w
            w = spread
        packed = self._transform(w, g.stop - g.start, conj)
        if self.plan.elementwise:
            return packed.view(-1, k, c, self.plan.bins)
        return packed.view(self.plan.bins, -1, k, c)

    def _pruned_transform(self, w: Tensor, conj: bool) -> Tensor:
        """Spectrum (bins, channels) of taps (channels, R, S): first along S, whose input is real, then along R."""
        p, device, (length_h, length_w) = self.problem, str(w.device), self.plan.shape
        columns, sign = length_w // 2 + 1, 1 if conj else -1
        cos, sin = _dft(length_w, columns, p.S, p.dil_w, self.real, device)
        taps = w.permute(2, 1, 0).reshape(p.S, -1).to(self.real)
        half = torch.mm(torch.cat((cos, sin)), taps).view(2, columns, p.R, -1)
        half = torch.complex(half[0], half[1] if conj else half[1].neg_())
        cos, sin = _dft(length_h, length_h, p.R, p.dil_h, self.real, device)
        return torch.bmm(torch.complex(cos, sign * sin).expand(columns, -1, -1), half)

    def _pruned_inverse(self, packed: Tensor) -> Tensor:
        """Taps (channels, R, S) of a spectrum (bins, channels)."""
        p, device, (length_h, length_w) = self.problem, str(packed.device), self.plan.shape
        columns = length_w // 2 + 1
        cos, sin = (t.t() for t in _dft(length_h, length_h, p.R, p.dil_h, self.real, device))
        half = torch.bmm(torch.complex(cos, sin).expand(columns, -1, -1), packed.view(columns, length_h, -1))
        # The columns left out are the conjugates of those between the first and the last.
        twice = torch.full((columns,), 2.0 / (length_h * length_w), dtype=self.real, device=packed.device)
        twice[0] /= 2
        twice[-1] /= 2  # the lengths along columns are even
        cos, sin = (t.t() * twice for t in _dft(length_w, columns, p.S, p.dil_w, self.real, device))
        parts = torch.view_as_real(half).permute(3, 0, 1, 2).reshape(2 * columns, -1)
        del half
        return torch.mm(torch.cat((cos, -sin), 1), parts).view(p.S, p.R, -1).permute(2, 1, 0)

    def _tiles(self, image: Tensor, lead: tuple[int, int], fill: bool) -> Tensor:
        """Image (n, c, h, w) as overlapping tiles (c, n, tile rows, tile columns, h, w): a view of a padded copy.

        `fill`: tiles as long as the transform; otherwise disjoint tiles of one step."""
        axes = (self.plan.rows, self.plan.cols)
        pads: list[int] = []
        lengths = [axis.length if fill else axis.step for axis in axes]
        for i in (1, 0):
            span = axes[i].span if fill else axes[i].tiles * axes[i].step
            pads += [lead[i], span - lead[i] - image.shape[2 + i]]
        padded = F.pad(image, pads) if any(pads) else image
        for i in (0, 1):
            padded = padded.unfold(2 + i, lengths[i], axes[i].step)
        return padded.transpose(0, 1)

    # ---- products per frequency ---------------------------------------------------------------------------------

    def _product(self, total: Tensor | None, data: Tensor, w: Tensor) -> Tensor:
        """Spectrum of the result: streamed spectrum times weight spectrum, summed over inner channels, plus total."""
        backward_data = self.problem.direction == Direction.BACKWARD_DATA
        if self.plan.elementwise:
            if not backward_data:
                return data * w
            for k in range(w.shape[1]):
                a, b = data[:, k : k + 1], w[:, k : k + 1]
                total = a * b if total is None else total.addcmul_(a, b)
            assert total is not None
            return total
        matrix = (w.transpose(2, 3) if backward_data else w).flatten(0, 1)
        stream = data.flatten(0, 1)
        if stream.shape[2] == 1:  # a vector: BLAS takes it from the left several times faster
            product = torch.bmm(stream.transpose(1, 2), matrix.transpose(1, 2)).transpose(1, 2)
        else:
            product = torch.bmm(matrix, stream)
        return product.view(self.plan.bins, -1, *product.shape[1:])

    def _accumulate(self, total: Tensor | None, x: Tensor, grad: Tensor) -> Tensor:
        """Add this chunk's part of the weight's spectrum: the sum over its units of x times conj(grad_y)."""
        if self.plan.elementwise:
            product = x * grad
            product = product.sum(2, keepdim=True) if product.shape[2] > 1 else product
            return product if total is None else total.add_(product)
        a, b = grad.flatten(0, 1), x.flatten(0, 1).transpose(1, 2)
        if total is None:
            product = a * b if a.shape[2] == 1 else torch.bmm(a, b)
            return product.view(self.plan.bins, -1, *product.shape[1:])
        total.view(-1, *total.shape[2:]).baddbmm_(a, b)
        return total

    # ---- loops --------------------------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """(images, tile rows, tile columns) of every chunk."""
        plan = self.plan
        for n in _ranges(self.problem.N, plan.images):
            for i in _ranges(plan.rows.tiles, plan.tile_rows):
                for j in _ranges(plan.cols.tiles, plan.tile_cols):
                    yield n, i, j

    def _stream(self, data: Tensor, g: slice, inner: slice, block: tuple[slice, slice, slice]) -> Tensor:
        """Packed spectrum of one block of the streamed operand's tiles, groups g. `inner` is a part of one group's
        channels, or all channels of several groups: one range of channels either way."""
        plan = self.plan
        n, i, j = block
        channels = slice(g.start * plan.inner + inner.start, (g.stop - 1) * plan.inner + inner.stop)
        tiles = self._tiles(data[n, channels], (plan.rows.lead, plan.cols.lead), True)
        return self._transform(tiles[:, :, i, j], g.stop - g.start, False)

    def _store(self, result: Tensor, packed: Tensor, first: int, block: tuple[slice, slice, slice]) -> None:
        """Write the results of one block of tiles, for channels from `first` on, to their places in `result`."""
        rows, cols = self.plan.rows, self.plan.cols
        n, i, j = block
        count = (n.stop - n.start, i.stop - i.start, j.stop - j.start)
        target = result[n, :, i.start * rows.step : i.stop * rows.step, j.start * cols.step : j.stop * cols.step]
        for c, planes in self._inverse(packed):
            kept = planes[..., rows.skip : rows.skip + rows.step, cols.skip : cols.skip + cols.step]
            kept = kept.reshape(-1, *count, rows.step, cols.step).permute(1, 0, 2, 4, 3, 5)
            kept = kept.reshape(count[0], -1, count[1] * rows.step, count[2] * cols.step)
            target[:, first + c.start : first + c.stop] = kept[..., : target.shape[2], : target.shape[3]]

    def image_result(self, data: Tensor, weight: Tensor) -> Tensor:
        """y from x, or grad_x from grad_y."""
        p, plan = self.problem, self.plan
        result = data.new_empty(p.result_shape)
        conj = p.direction == Direction.FORWARD
        keep_weight = plan.outer_chunk == plan.outer and plan.inner_chunk == plan.inner
        for g in _ranges(p.groups, plan.groups):
            kept: Tensor | None = None
            for block in self._blocks():
                stream: Tensor | None = None
                for outer in _ranges(plan.outer, plan.outer_chunk):
                    product: Tensor | None = None
                    # Only one spectrum of each kind exists at a time: `workspace_bytes` relies on the `del`s.
                    for inner in _ranges(plan.inner, plan.inner_chunk):
                        if stream is None or plan.inner_chunk < plan.inner:
                            del stream
                            stream = self._stream(data, g, inner, block)
                        w = self._weight_spectrum(weight, g, outer, inner, conj) if kept is None else kept
                        kept = w if keep_weight else None
                        product = self._product(product, stream, w)
                        del w
                    assert product is not None
                    self._store(result, product, g.start * plan.outer + outer.start, block)
                    del product
                del stream
        return result

    def weight_result(self, x: Tensor, grad_y: Tensor) -> Tensor:
        """grad_weight."""
        p, plan = self.problem, self.plan
        result = x.new_empty(p.weight_shape)
        flat = result.view(-1, p.R, p.S)
        one_block = plan.units == p.N * plan.rows.tiles * plan.cols.tiles
        for g in _ranges(p.groups, plan.groups):
            held: Tensor | None = None
            for outer in _ranges(plan.outer, plan.outer_chunk):
                # A chunk is either part of one group or several whole groups: one range of channels.
                channels = slice(g.start * plan.outer + outer.start, (g.stop - 1) * plan.outer + outer.stop)
                total: Tensor | None = None
                for n, i, j in self._blocks():
                    stream = self._stream(x, g, slice(0, plan.inner), (n, i, j)) if held is None else held
                    tiles = self._tiles(grad_y[n, channels], (0, 0), False)
                    total = self._accumulate(total, stream, self._transform(tiles[:, :, i, j], g.stop - g.start, True))
                    held = stream if one_block else None
                    del stream, tiles
                assert total is not None
                first = channels.start * plan.inner
                if plan.pruned:
                    taps = self._pruned_inverse(total)
                    flat[first : first + taps.shape[0]] = taps
                    del total, taps
                    continue
                if not plan.elementwise:
                    total = total.reshape(plan.bins, 1, -1, 1)  # every (k, c) a channel of one unit
                for c, planes in self._inverse(total):
                    taps = planes[:, 0, : p.kernel_extent[0] : p.dil_h, : p.kernel_extent[1] : p.dil_w]
                    flat[first + c.start : first + c.stop] = taps
                del total
        return result
