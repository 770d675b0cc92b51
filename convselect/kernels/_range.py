"""Whether a transform can carry its operands: what csrc/winograd_range.inc and csrc/fft.inc do, in PyTorch's
operations, for algorithms that are written in these.

The rounding error of a transform is in proportion to the largest value of a tile or an image, also at outputs whose own
windows do not hold it: beside one pixel of 1e10 everything else is lost. What is judged are sums of magnitudes over the
channels, at each position of each image. Sources: the error bounds of Lavin & Gray 2015, arXiv 1509.09308, section 5.3,
and of Barabasz et al. 2020, "Error analysis and improving the accuracy of Winograd convolution", are in norms of whole
tiles; Demmel, Dumitriu, Holtz, Kleinberg 2007, "Fast matrix multiplication is stable", shows that no fast method has an
elementwise one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction

USUAL = 64.0
"""Images whose largest sum exceeds a usual one no more than so many times are even."""
EVENNESS = 8.0
"""In others, the largest sum may exceed the least sum over the window of an output so many times."""


def _magnitudes(t: Tensor, groups: int, order: float) -> Tensor:
    """(N, groups, H, W): sums over the channels of a group, or with order infinity the largest."""
    n, channels, height, width = t.shape
    grouped = t.reshape(n, groups, channels // groups, height, width)
    dtype = torch.float32 if t.element_size() == 2 else None  # float16 has no room for sums
    norms: Tensor = torch.linalg.vector_norm(grouped, order, dim=2, dtype=dtype)
    return norms


def _usual(sums: Tensor, share: float) -> Tensor:
    """(N, groups): the value that this share of those that are not zero does not exceed, by a sample."""
    flat = sums.flatten(2)
    ordered = flat[:, :, :: 1 + flat.shape[2] // 1024].sort(dim=2).values
    zeros = (ordered == 0).sum(2, keepdim=True)
    last = ordered.shape[2] - 1
    at = (zeros + ((last + 1 - zeros) * share).long()).clamp(max=last)
    return ordered.gather(2, at).squeeze(2)


def carries(a: Tensor, b: Tensor, problem: ConvProblem) -> bool:
    """Whether no result can have an error above what docs/budgets.md promises, for operands in the order of
    `Algorithm.run`. On a GPU, which would have to synchronise to answer, always True."""
    p = problem
    if not a.is_cpu or 0 in a.shape or 0 in b.shape:
        return True
    weight_gradient = p.direction == Direction.BACKWARD_WEIGHT
    sums = _magnitudes(a, p.groups, math.inf if weight_gradient else 1)
    largest = sums.amax((2, 3))
    if weight_gradient:  # each channel is a sum of its own
        others = _magnitudes(b, p.groups, math.inf)
        products = (others > 0).sum((0, 2, 3)).to(sums.dtype).sqrt()
        most = largest.amax(0) * others.amax((0, 2, 3))
        usual = _usual(sums, 0.3).amin(0) * _usual(others, 0.3).amin(0) * products
        return bool((most <= USUAL * usual).all())
    if bool((largest <= USUAL * _usual(sums, 0.1)).all()):
        return True
    # The sum over each output's window, without the largest: a tap may all but erase that one.
    height, width = p.kernel_extent
    top, left, out = p.pad_top, p.pad_left, (p.P, p.Q)
    if p.direction == Direction.BACKWARD_DATA:
        top, left, out = height - 1 - top, width - 1 - left, (p.H, p.W)
    bottom, right = (
        o + e - 1 - s - b for o, e, s, b in zip(out, (height, width), sums.shape[2:], (top, left), strict=True)
    )
    padded = F.pad(sums.double(), (left, right, top, bottom))
    window = F.avg_pool2d(padded, (height, width), stride=1) * (height * width)
    least = window.amin((2, 3)) - largest
    return bool((largest <= EVENNESS * least).all())
