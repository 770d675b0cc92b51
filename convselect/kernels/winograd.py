"""Winograd's minimal filtering F(m x m, r x r), m = 2 to 7: (m + r - 1)^2 multiplications instead of the m^2 r^2 of a
direct sum; and F(m, r) along one axis for 1 x r and r x 1 kernels.

With d the (m + r - 1)^2 inputs that a tile of m x m outputs sees, g the kernel, o the element-wise product:

    y       = A^T [sum over c of (G g_c G^T) o (B^T d_c B)] A
    grad_g  = G^T [sum over tiles of (A grad_y A^T) o (B^T d B)] G
    grad_x  = y of grad_y and the kernel rotated by 180 degrees, channels exchanged

For each of the (m + r - 1)^2 positions the sum over channels (or tiles) is a matrix product. At stride 2 an axis is two
convolutions of stride 1, by the even and by the odd taps, whose results are added: F(m, (r + 1) / 2) and F(m, r / 2),
2 m + r - 2 positions (`csrc/winograd_strides.inc`). A dilated convolution is one without dilation on each phase of the
image (every dil-th pixel of every dil-th row): the C kernel cuts its tiles out of phases, which it reads and writes
where they lie.

`csrc/winograd.inc` computes it for the kernel sizes of `TILES` and `STRIDED_TILES`; `_winograd_torch.py` for 3x3
kernels, stride 1, no dilation and m = 2, 4, 6 in float64, and in every element type if the C library is missing.
Networks for ImageNet have images of 7 * 2^k pixels, which tiles of 7 x 7 cover without waste.

Volumes are filtered along their rows and columns, and the sum over the T taps along the depth is taken in the transform
domain, where each slice is transformed once for all the slices of results that meet it (`csrc/winograd_depth.inc`):
T (m + r - 1)^2 multiplications instead of T m^2 r^2. Tiles of more than 8 points round too much there; 7x7 has m = 2.

Sources: Winograd 1980, "Arithmetic complexity of computations"; Lavin & Gray 2015, arXiv 1509.09308.
"""

from __future__ import annotations

import functools
import math

from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels import _winograd_torch, _winograd_transforms
from convselect.kernels._c_algorithm import CAlgorithm
from convselect.kernels._common import strides
from convselect.kernels._contract import Grade, Params
from convselect.kernels._space import STRUCTURE, Parameter, Rule, Space, Values
from convselect.kernels._tuning import within

TILES: dict[tuple[int, int], tuple[int, ...]] = {
    (3, 3): (2, 3, 4, 5, 6, 7),
    (5, 5): (2, 4, 5),
    (7, 7): (3,),
    (1, 3): (4, 6),
    (3, 1): (4, 6),
    (1, 7): (4,),
    (7, 1): (4,),
    (1, 5): (4, 6),
    (5, 1): (4, 6),
    (1, 2): (6,),
    (2, 1): (6,),
}
"""Kernel size -> sizes m of an output tile. Larger tiles round too much, and smaller ones were never the fastest."""

VOLUME_TILES: dict[tuple[int, int], tuple[int, ...]] = {(7, 7): (2,)}
"""The same of volumes, in place of those that round too much there."""

STRIDED_TILES: dict[tuple[int, int], tuple[int, ...]] = {
    (3, 3): (3, 4, 5, 7),
    (4, 4): (2, 4),
    (5, 5): (4, 5),
    (7, 7): (4, 5),
}
"""The same for stride 2: `csrc/winograd_strides.inc`."""

_FRAIL_POINTS = 9
"""From this many points m + r - 1 on, rounding errors are near the bound. Such tiles need images of at least
`_FRAIL_IMAGE` pixels along each axis (outputs that see more padding than image are little more than differences of
large numbers), and count as `Grade.CLOSE` only for at least `_FRAIL_RESULTS` results (the error of fewer varies)."""
_FRAIL_IMAGE = 7
_FRAIL_RESULTS = 4096


_FORWARD = (
    Parameter("team", (0,), STRUCTURE),
    Parameter("span_kib", (128, 256, 512, 1024, 2048, 4096)),
    Parameter("inputs", (16, 32, 48, 64)),
    Parameter("outputs", (32, 64, 96, 128, 256)),
)
_FORWARD_SHARED = (Parameter("team", (0, 1, 2), STRUCTURE), *_FORWARD[1:])
_GRADIENT = (
    Parameter("team", (0,), STRUCTURE),
    Parameter("span_kib", (0, 512, 1024, 2048, 4096, 8192, 16384)),
    Parameter("inputs", (16, 32, 48, 64)),
    Parameter("outputs", (32, 48, 64, 96, 128)),
)


def _dilation(problem: ConvProblem) -> tuple[int, int]:
    """Dilation along the axes that have several taps."""
    p = problem
    return p.dil_h if p.R > 1 else 1, p.dil_w if p.S > 1 else 1


_MOST_SLICES = 7
"""Most taps along the depth, and the largest stride along it: as in `csrc/winograd_depth.inc`."""
_MOST_DEPTH_STRIDE = 2


class Winograd(CAlgorithm):
    """F(m x m, r x r), or F(m, r) along one axis; at stride 2 the two of each axis.

    Parameters of the C kernel: `span_kib`, KiB of transformed inputs that are held at a time; `inputs`, channels summed
    at a time (more would round more); `outputs`, output channels whose transformed weights are held; `team`, with
    several threads, whether each has its own tiles (1) or all share them (2). 0: the kernel decides.
    """

    revision = 2
    spreads_nonfinite = True  # a tile mixes all its inputs
    direct_sums = False
    dimensions = frozenset({2, 3})
    kernel = "cs_winograd"
    volume_kernel = "cs_winograd_volume"
    slots = ("span_kib", "inputs", "outputs", "team")

    def __init__(self, m: int) -> None:
        self.m = m
        self.name = f"winograd{m}"
        self.leading_ints = (m,)

    def _frail(self, problem: ConvProblem) -> bool:
        strided = problem.stride_h == 2  # no phase has more than 7 points
        return self.m + max(problem.R, problem.S) - 1 >= _FRAIL_POINTS and min(problem.R, problem.S) > 1 and not strided

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if (p.stride_h, p.stride_w) not in ((1, 1), (2, 2)):
            return f"Winograd needs stride 1 or 2x2; this convolution has {strides(p)}."
        tiles_of, at = (TILES, "") if p.stride_h == 1 else (STRIDED_TILES, " at stride 2")
        if p.is_volume and p.stride_h == 1:
            tiles_of = TILES | VOLUME_TILES  # of 7x7
        if (p.R, p.S) not in tiles_of:
            sizes = ", ".join(f"{R}x{S}" for R, S in tiles_of)
            return f"Winograd needs kernels of {sizes}{at}; this one is {p.R}x{p.S}."
        dil_h, dil_w = _dilation(p)
        if p.stride_h == 2 and dil_h * dil_w > 1:
            return f"Winograd at stride 2 needs dilation 1; this convolution has dilation {dil_h}x{dil_w}."
        if p.device != "cpu":
            return f"Winograd runs on CPUs; this problem is on {p.device}."
        if self.m not in tiles_of[p.R, p.S]:
            tiles = " and ".join(f"winograd{m}" for m in tiles_of[p.R, p.S])
            return f"Tiles of {self.m} need other kernels; for {p.R}x{p.S}{at} there is {tiles}."
        if p.T > _MOST_SLICES or p.stride_d > _MOST_DEPTH_STRIDE:
            most = f"{_MOST_SLICES} taps along the depth at stride 1 or 2"
            return f"Winograd takes up to {most}; this convolution has {p.T} at stride {p.stride_d}."
        in_torch = (p.R, p.S) == (3, 3) and self.m in _winograd_transforms.POINTS and p.stride_h == 1
        in_torch = in_torch and not p.is_volume
        if p.is_volume and self._frail(p):
            return f"Tiles of {self.m} for {p.R}x{p.S} round too much for volumes, whose sums are longer."
        if not in_torch and not self._in_c(p):
            tiles = f"Tiles of {self.m} for {p.R}x{p.S} kernels{at}"
            return f"{tiles} need the C kernels, which compute in float32; this is float64, or they are missing."
        if dil_h * dil_w > 1 and not self._in_c(p):
            dilated = f"Winograd with dilation {dil_h}x{dil_w}"
            return f"{dilated} needs the C kernels, which compute in float32; this is float64, or they are missing."
        if self._frail(p) and min(min(p.H, p.P) // dil_h, min(p.W, p.Q) // dil_w) < _FRAIL_IMAGE:
            least, out = f"{_FRAIL_IMAGE}x{_FRAIL_IMAGE}", f"{p.P}x{p.Q}"
            phases = f", and phases of dilation {dil_h}x{dil_w} are smaller still" if dil_h * dil_w > 1 else ""
            return f"Tiles of {self.m} need images of {least} or more; these are {p.H}x{p.W} in and {out} out{phases}."
        if p.stride_h == 2 and p.direction == Direction.BACKWARD_DATA and (p.pad_top - p.pad_left) % 2 != 0:
            pads = f"{p.pad_top} at the top and {p.pad_left} on the left"
            return f"Winograd's grad-input at stride 2 needs paddings both even or both odd; these are {pads}."
        return None

    def _without_c(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        return _winograd_torch.run(a, b, problem, self.m)

    def _bytes_without_c(self, problem: ConvProblem, params: Params) -> int:
        return _winograd_torch.workspace_bytes(problem, self.m)

    def space(self, problem: ConvProblem) -> Space | None:
        if not self._in_c(problem) or problem.is_volume:
            return None
        return _space(self, problem.direction == Direction.BACKWARD_WEIGHT, problem.threads > 1)

    def error_grade(self, problem: ConvProblem) -> Grade:
        """Measured in float32 on normal, rectified and smooth data, 1 to 2,048 channels, all directions: the C kernels
        at most 4.6e-7 (F(2x2, 3x3)), 5.6e-7 (F(3x3, 3x3)), 1.0e-6 (F(4x4, 3x3)), 2.3e-6 (F(5x5, 3x3)), 4.1e-6 (F(6x6,
        3x3)), 9.0e-6 (F(7x7, 3x3)), 4.0e-6 (F(4x4, 5x5)), 8.6e-6 (F(5x5, 5x5)), 9.6e-6 (F(3x3, 7x7)); along one axis
        2.1e-6 (F(4, 7), F(6, 5)), their weight gradients 5.1e-6, others 2.4e-6; at stride 2 at most 4e-7 (m = 3, 4 for
        3x3, 2 for 4x4), 6e-7 (4 for 4x4), 1.4e-6 (5 for 3x3 and 5x5, 4 for 5x5 and 7x7) and 4e-6 (the others); native
        5e-8 to 5e-7: sums over channels are cut into runs of 64, over channels and depth taps of volumes into runs of
        up to 192: at most 6e-7 (m = 2), 1.3e-6 (4), 3.1e-6 (5) and 5e-6 (6). PyTorch operations sum them in one run:
        5e-6 to 8e-6 with m = 6, above 1e-5 in a weight gradient of few products that cancel."""
        if problem.element_bytes == 2:
            return Grade.DIRECT  # rounded once, from float32: 16 bits hide the difference
        if self.m == 6 and not self._in_c(problem):
            return Grade.LOOSE
        if self._frail(problem) and math.prod(problem.result_shape) < _FRAIL_RESULTS:
            return Grade.LOOSE
        taps = max(problem.R, problem.S)
        if problem.stride_h == 2:
            points = self.m + (taps - 1) // 2  # of the even taps' transform
            return Grade.DIRECT if points <= 5 else Grade.NEAR if points <= 7 else Grade.CLOSE
        points = self.m + taps - 1
        if min(problem.R, problem.S) == 1:
            longest = 8 if problem.direction == Direction.BACKWARD_WEIGHT else 10
            return Grade.NEAR if points <= longest else Grade.CLOSE
        if taps == 3 and self.m <= 3:
            return Grade.DIRECT
        # Of volumes depth taps are summed as well, and PyTorch's operations sum all channels in one run.
        most = 7 if self._in_c(problem) and not problem.is_volume else 6
        return Grade.NEAR if points <= most else Grade.CLOSE


@functools.cache
def _space(algorithm: Winograd, gradient: bool, shared: bool) -> Space:
    """One space for all problems of a kind. It allows blocks up to the next size above the number of channels."""

    def default(problem: ConvProblem) -> Values:
        if gradient:
            return {"team": 0, "span_kib": 0, "inputs": 48, "outputs": 64}
        return {"team": 0, "span_kib": 1024, "inputs": 64, "outputs": 32}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        p, usual = problem, default(problem)
        ins, outs = p.C // p.groups, p.K // p.groups
        if p.direction == Direction.BACKWARD_DATA:
            ins, outs = outs, ins
        for name, channels in (("inputs", ins), ("outputs", outs)):
            value = values.get(name)
            # A block beyond all channels is the same program as the next smaller one.
            if value is not None and value != usual[name] and value >= 2 * channels:
                return False
        return within(algorithm, p, usual, values)

    rules = (
        Rule("one thread has nothing to share", lambda p, _: p.threads == 1, lambda *_: [{"team": 0}]),
        Rule(
            "threads share spans or have their own",
            lambda p, _: p.threads > 1,
            lambda *_: [{"team": team} for team in (0, 1, 2)] if not gradient else [{"team": 0}],
        ),
    )
    parameters = _GRADIENT if gradient else _FORWARD_SHARED if shared else _FORWARD
    return Space(parameters, default, allowed, rules)


ALGORITHMS = tuple(Winograd(m) for m in sorted({m for tiles in TILES.values() for m in tiles}))
