"""The launches of `large_depthwise.py`, made from a problem and a configuration, and the order of configurations.

Letters are explained in that file's docstring.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import SPLIT_ELEMENTS, Launch

_MODULE = "convselect.kernels.triton.large_depthwise_kernels"
NAME = "large_depthwise_triton"

# An H100's rates, for comparing configurations: per SM and cycle, 16-bit multiply-adds and bytes from the L2 cache.
_SMS, _MACS, _L2_BYTES, _STEP_CYCLES = 132, 4096, 40, 60

Strides = tuple[int, int, int, int]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _strides(N: int, C: int, H: int, W: int, layout: str) -> Strides:
    """Strides of (n, c, h, w) in a fresh tensor."""
    return (C * H * W, 1, W * C, C) if layout == CHANNELS_LAST else (C * H * W, H * W, W, 1)


def _swapped(strides: Strides) -> Strides:
    return (strides[0], strides[1], strides[3], strides[2])


@dataclass(frozen=True)
class _Band:
    """A stride-1 correlation as the kernel computes it: (N, C, H, W) with R x S taps to (N, C, P, Q)."""

    N: int
    C: int
    H: int
    W: int
    P: int
    Q: int
    R: int
    S: int
    pad_top: int
    pad_left: int
    flip: bool
    transposed: bool
    """Whether heights and widths are exchanged, in this object's other fields too."""

    @staticmethod
    def of(problem: ConvProblem) -> _Band:
        p = problem
        if p.direction == Direction.FORWARD:
            band = _Band(p.N, p.C, p.H, p.W, p.P, p.Q, p.R, p.S, p.pad_top, p.pad_left, False, False)
        else:
            top, left = p.R - 1 - p.pad_top, p.S - 1 - p.pad_left
            band = _Band(p.N, p.C, p.P, p.Q, p.H, p.W, p.R, p.S, top, left, True, False)
        return band._turned() if p.R >= 2 * p.S else band

    def _turned(self) -> _Band:
        return _Band(
            self.N, self.C, self.W, self.H, self.Q, self.P, self.S, self.R, self.pad_left, self.pad_top, self.flip, True
        )

    def width(self, element_bytes: int) -> int:
        """Elements between the beginnings of two rows of the image that the kernel reads."""
        return _up(self.W, 16 // element_bytes)

    def packed(self, problem: ConvProblem) -> bool:
        """Whether the kernel reads a copy of the image."""
        return self.transposed or problem.layout == CHANNELS_LAST or self.width(problem.element_bytes) != self.W

    def outer(self, height: int, width: int, layout: str) -> Strides:
        """Strides along the band's axes of the caller's tensor with this height and width."""
        if self.transposed:
            return _swapped(_strides(self.N, self.C, width, height, layout))
        return _strides(self.N, self.C, height, width, layout)

    def unpacked(self, problem: ConvProblem) -> bool:
        """Whether the kernel's output still has to be copied into the result's layout."""
        return self.transposed or problem.layout == CHANNELS_LAST


@dataclass(frozen=True)
class _Table:
    """The shifted copies of a channel's filter for one tile shape, and the window of columns that they serve."""

    columns: int
    copies: int
    rows: int
    length: int
    zeros: int

    @staticmethod
    def of(band: _Band, BP: int, BQ: int, BK: int, element_bytes: int) -> _Table:
        copies = 16 // element_bytes
        columns, offsets = 0, []
        for q0 in range(0, band.Q, BQ):
            c0 = max(0, q0 - band.pad_left) // copies * copies
            columns = max(columns, min(band.W, q0 - band.pad_left + BQ + band.S - 1) - c0)
            offsets.append(c0 - q0 + band.pad_left)
        columns = _up(max(columns, 1), 32 // element_bytes)
        zeros = _up(max(0, BQ - 1 - min(offsets)), copies)
        length = (zeros + max(offsets)) // copies * copies + columns
        # The last step of the loop may run past the window.
        last_row = (_up((BP + band.R - 1) * columns, BK) - 1) // columns
        return _Table(columns, copies, last_row + BP, length, zeros)

    @property
    def elements(self) -> int:
        return self.copies * self.rows * self.length


@dataclass(frozen=True)
class _Correlation:
    """How the weight gradient's sum is divided: `parts_q` ranges of columns q times `parts_k` ranges of (h, n)."""

    x_length: int
    y_length: int
    parts_q: int
    parts_k: int
    per_q: int
    per_k: int
    RB: int
    SB: int

    @staticmethod
    def of(problem: ConvProblem, BK: int, programs: int) -> _Correlation:
        p, vector = problem, 16 // problem.element_bytes
        steps = -(-p.H * p.N // BK)
        wanted = max(1, -(-programs // p.C))
        per_q = -(-p.Q // min(p.Q, wanted))
        parts_q = -(-p.Q // per_q)
        per_k = -(-steps // min(steps, max(1, wanted // parts_q)))
        parts_k = -(-steps // per_k)
        x_length, y_length = _up(p.H * p.N, vector), _up(p.P * p.N, vector)
        RB, SB = max(16, _power(p.R)), max(16, _power(p.S))
        return _Correlation(x_length, y_length, parts_q, parts_k, per_q, per_k, RB, SB)


@dataclass(frozen=True)
class Step:
    """A launch, the names of the tensors it reads, and the name, shape and type of the tensor it writes."""

    launch: Launch
    reads: tuple[str, ...]
    writes: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


RESULT = "result"


def _wide(*elements: int) -> bool:
    return max(elements) >= SPLIT_ELEMENTS


def _relayout(
    problem: ConvProblem, sizes: tuple[int, int, int, int], source: Strides, target: Strides, width: int | None = None
) -> Launch:
    """Copies (n, c, h, w) between any strides; zeros fill the target's innermost axis up to `width`."""
    v = max(axis for axis in range(4) if target[axis] == 1)
    others = sorted((axis for axis in range(4) if axis != v), key=lambda axis: source[axis])
    u, a, b = others
    V = sizes[v] if width is None else width
    BV = min(64, _power(V))
    BU = min(_power(sizes[u]), 2048 // BV)
    tiles = -(-sizes[u] // BU) * -(-V // BV)
    constants = dict(
        U=sizes[u], V=sizes[v], V_TARGET=V, A=sizes[a], BU=BU, BV=BV,
        FROM_U=source[u], FROM_V=source[v], FROM_A=source[a], FROM_B=source[b],
        TO_U=target[u], TO_V=target[v], TO_A=target[a], TO_B=target[b],
        WIDE=_wide(sum((n - 1) * s for n, s in zip(sizes, source, strict=True)) + 1,
                   sum((n - 1) * s for n, s in zip(sizes, target, strict=True)) + V),
    )  # fmt: skip
    grid = (tiles * sizes[a] * sizes[b], 1, 1)
    return Launch(_MODULE, "relayout", grid, (problem.dtype, problem.dtype), tuple(constants.items()), 4, 1)


def _banded_steps(problem: ConvProblem, config: dict[str, Any]) -> tuple[Step, ...]:
    band, e, dtype = _Band.of(problem), problem.element_bytes, problem.torch_dtype
    N, C, H, W, P, Q = band.N, band.C, band.H, band.W, band.P, band.Q
    BM, BP, BQ, BK = config["BM"], config["BP"], config["BQ"], config["K_BYTES"] // e
    width, table = band.width(e), _Table.of(band, BP, BQ, BK, e)
    steps = []

    if band.packed(problem):
        target = _strides(N, C, H, width, CONTIGUOUS)
        launch = _relayout(problem, (N, C, H, W), band.outer(H, W, problem.layout), target, width)
        steps.append(Step(launch, ("x",), "x", (N, C, H, width), dtype))

    block = 1024
    taps = (1, band.R) if band.transposed else (band.S, 1)
    constants: dict[str, Any] = dict(
        R=band.R, S=band.S, COPIES=table.copies, ROWS=table.rows, LENGTH=table.length, FIRST_ROW=BP - 1,
        ZEROS=table.zeros, FLIP=band.flip, STEP_R=taps[0], STEP_S=taps[1], BLOCK=block,
        WIDE=_wide(C * table.elements),
    )  # fmt: skip
    grid = (C * -(-table.elements // block), 1, 1)
    launch = Launch(_MODULE, "shifted_filters", grid, (problem.dtype,) * 2, tuple(constants.items()), 4, 1)
    steps.append(Step(launch, ("weight",), "table", (C, table.elements), dtype))

    constants = dict(
        N=N, C=C, H=H, WIDTH=width, P=P, Q=Q, R=band.R, PAD_TOP=band.pad_top, PAD_LEFT=band.pad_left,
        COLUMNS=table.columns, COPIES=table.copies, ROWS=table.rows, LENGTH=table.length, ZEROS=table.zeros,
        BM=BM, BP=BP, BQ=BQ, BK=BK, PRECISION=launcher.dot_precision(problem),
        WIDE=_wide(N * C * H * width, N * C * P * Q, C * table.elements),
    )  # fmt: skip
    grid = (C * -(-N * -(-P // BP) // BM) * -(-Q // BQ), 1, 1)
    kinds = (problem.dtype,) * 3
    launch = Launch(_MODULE, "banded", grid, kinds, tuple(constants.items()), config["num_warps"], config["num_stages"])
    if not band.unpacked(problem):
        steps.append(Step(launch, ("x", "table"), RESULT))
    else:
        steps.append(Step(launch, ("x", "table"), "y", (N, C, P, Q), dtype))
        launch = _relayout(problem, (N, C, P, Q), _strides(N, C, P, Q, CONTIGUOUS), band.outer(P, Q, problem.layout))
        steps.append(Step(launch, ("y",), RESULT))
    return tuple(steps)


def _correlation_steps(problem: ConvProblem, config: dict[str, Any]) -> tuple[Step, ...]:
    p, dtype = problem, problem.torch_dtype
    BK = config["K_BYTES"] // p.element_bytes
    cut = _Correlation.of(p, BK, config["PROGRAMS"])
    parts = cut.parts_q * cut.parts_k
    steps = []
    for name, H, W, length in (("x", p.H, p.W, cut.x_length), ("y", p.P, p.Q, cut.y_length)):
        target = (1, W * length, p.N, length)
        launch = _relayout(p, (p.N, p.C, H, W), _strides(p.N, p.C, H, W, p.layout), target)
        steps.append(Step(launch, (name,), name, (p.C, W, length), dtype))

    constants: dict[str, Any] = dict(
        N=p.N, H=p.H, W=p.W, P=p.P, Q=p.Q, R=p.R, S=p.S, PAD_TOP=p.pad_top, PAD_LEFT=p.pad_left,
        X_LENGTH=cut.x_length, Y_LENGTH=cut.y_length, PARTS_Q=cut.parts_q, PARTS_K=cut.parts_k,
        PER_Q=cut.per_q, PER_K=cut.per_k, RB=cut.RB, SB=cut.SB, BK=BK, PRECISION=launcher.dot_precision(p),
        WIDE=_wide(p.C * p.W * cut.x_length, p.C * p.Q * cut.y_length, p.C * parts * cut.RB * cut.SB),
    )  # fmt: skip
    launch = Launch(
        _MODULE, "correlate", (p.C * parts, 1, 1), (p.dtype, p.dtype, "float32"), tuple(constants.items()),
        config["num_warps"], config["num_stages"],
    )  # fmt: skip
    steps.append(Step(launch, ("x", "y"), "partial", (p.C, parts, cut.RB, cut.SB)))

    block = min(512, _power(p.R * p.S))
    constants = dict(
        R=p.R, S=p.S, PARTS=parts, RB=cut.RB, SB=cut.SB, BLOCK=block, WIDE=_wide(p.C * parts * cut.RB * cut.SB)
    )
    grid = (p.C * -(-p.R * p.S // block), 1, 1)
    launch = Launch(_MODULE, "add_parts", grid, ("float32", p.dtype), tuple(constants.items()), 4, 1)
    steps.append(Step(launch, ("partial",), RESULT))
    return tuple(steps)


@dataclass(frozen=True)
class _Gradient:
    """How the banded weight gradient is divided: tiles of HB rows of the window by CB columns, for SB taps."""

    columns: int
    CB: int
    HB: int
    SB: int
    tiles_h: int
    tiles_q: int
    parts: int

    @staticmethod
    def of(problem: ConvProblem, config: dict[str, Any]) -> _Gradient | None:
        """None if the window is wider than a tile."""
        band, e = _Band.of(problem._replace(direction=Direction.FORWARD)), problem.element_bytes
        BM, BP, BQ, BK = config["BM"], config["BP"], config["BQ"], config["K_BYTES"] // e
        columns = _Table.of(band, BP, BQ, BK, e).columns
        CB = _power(columns)
        if BM < CB:
            return None
        tiles_h, tiles_q = -(-(BP + band.R - 1) // (BM // CB)), -(-band.Q // BQ)
        steps = -(-band.N * -(-band.P // BP) // BK)
        parts = min(steps, max(1, 2 * _SMS // (band.C * tiles_h * tiles_q)))
        return _Gradient(columns, CB, BM // CB, max(16, _power(band.S)), tiles_h, tiles_q, parts)


def _gradient_steps(problem: ConvProblem, config: dict[str, Any]) -> tuple[Step, ...]:
    band, e = _Band.of(problem._replace(direction=Direction.FORWARD)), problem.element_bytes
    cut = _Gradient.of(problem, config)
    assert cut is not None
    N, C, H, W, P, Q = band.N, band.C, band.H, band.W, band.P, band.Q
    BP, BQ, BK, vector = config["BP"], config["BQ"], config["K_BYTES"] // e, 16 // e
    widths, steps = [], []
    for name, height, width in (("x", H, W), ("y", P, Q)):
        padded = _up(width, vector)
        widths.append(padded)
        if band.transposed or problem.layout == CHANNELS_LAST or padded != width:
            target = _strides(N, C, height, padded, CONTIGUOUS)
            launch = _relayout(
                problem, (N, C, height, width), band.outer(height, width, problem.layout), target, padded
            )
            steps.append(Step(launch, (name,), name, (N, C, height, padded), problem.torch_dtype))

    tiles, rows = cut.tiles_q * cut.parts, cut.tiles_h * cut.HB
    elements = C * tiles * rows * BP * cut.SB
    constants: dict[str, Any] = dict(
        N=N, C=C, H=H, WIDTH=widths[0], P=P, Y_WIDTH=widths[1], Q=Q, R=band.R, PAD_TOP=band.pad_top,
        PAD_LEFT=band.pad_left, COPIES=vector, PARTS=cut.parts, HB=cut.HB, CB=cut.CB, SB=cut.SB, BP=BP, BQ=BQ, BK=BK,
        PRECISION=launcher.dot_precision(problem), WIDE=_wide(N * C * H * widths[0], N * C * P * widths[1], elements),
    )  # fmt: skip
    launch = Launch(
        _MODULE, "banded_gradient", (C * tiles * cut.tiles_h, 1, 1), (problem.dtype, problem.dtype, "float32"),
        tuple(constants.items()), config["num_warps"], config["num_stages"],
    )  # fmt: skip
    steps.append(Step(launch, ("x", "y"), "partial", (C, tiles, rows, BP, cut.SB)))

    block = min(512, _power(band.R * band.S))
    taps = (1, band.R) if band.transposed else (band.S, 1)
    constants = dict(
        R=band.R, S=band.S, TILES=tiles, ROWS=rows, BP=BP, SB=cut.SB, STEP_R=taps[0], STEP_S=taps[1], BLOCK=block,
        WIDE=_wide(elements),
    )  # fmt: skip
    grid = (C * -(-band.R * band.S // block), 1, 1)
    launch = Launch(_MODULE, "add_bands", grid, ("float32", problem.dtype), tuple(constants.items()), 4, 1)
    steps.append(Step(launch, ("partial",), RESULT))
    return tuple(steps)


@functools.lru_cache(maxsize=4096)
def planned(problem: ConvProblem, config: tuple[tuple[str, Any], ...]) -> tuple[Step, ...]:
    """The steps of a problem, in order; the configuration is given as pairs so that it can be a cache key."""
    values = dict(config)
    if problem.direction != Direction.BACKWARD_WEIGHT:
        return _banded_steps(problem, values)
    return _gradient_steps(problem, values) if "BM" in values else _correlation_steps(problem, values)


@functools.lru_cache(maxsize=4096)
def ranked(problem: ConvProblem, arch: int) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """The configurations of an architecture that fit, the one with the least estimated time first."""
    if problem.direction == Direction.BACKWARD_WEIGHT:
        offered = [c for c in launcher.configurations(NAME, "banded_gradient") if _Gradient.of(problem, c)]
        offered += launcher.configurations(NAME, "correlate")
    else:
        offered = launcher.configurations(NAME, "banded")
    limit = launcher.shared_memory_bytes()
    fitting = [c for c in offered if _shared_bytes(problem, c) <= limit and _registers_do(problem, c, arch)]
    fitting.sort(key=lambda config: _cycles(problem, config))
    return tuple(tuple(config.items()) for config in fitting)


def _cycles(problem: ConvProblem, config: dict[str, Any]) -> float:
    """An estimate of the time: waves of programs, each of this many steps; for comparing configurations only."""
    if problem.direction != Direction.BACKWARD_WEIGHT:
        return _banded_cycles(problem, config)
    return _gradient_cycles(problem, config) if "BM" in config else _correlation_cycles(problem, config)


def _shared_bytes(problem: ConvProblem, config: dict[str, Any]) -> int:
    """Shared memory of the pipeline's buffers, plus a kilobyte for its barriers."""
    buffers = int(config["num_stages"])
    if problem.dtype == "float32" and not problem.tf32:
        buffers += 1  # the low parts of operands that were split in two
    if "BM" not in config:
        rows = max(16, _power(problem.R)) + max(16, _power(problem.S))
    else:
        rows = config["BM"] + config["BP"] * config["BQ"]
    return rows * int(config["K_BYTES"]) * buffers + 1024


def _registers_do(problem: ConvProblem, config: dict[str, Any], arch: int) -> bool:
    """Whether registers have room for operands split into two parts, as three TF32 products need them: one operand's
    parts with wgmma, both operands' with mma."""
    if problem.dtype != "float32" or problem.tf32 or "BM" not in config:
        return True
    most = 64 if arch == 90 and config["BM"] >= 64 else 32
    return bool(config["BM"] * config["BP"] * config["BQ"] <= most * 32 * config["num_warps"])


def _step_cycles(problem: ConvProblem, rows: int, columns: int, k_bytes: int) -> float:
    """Time of one step of a product on one SM: whichever is slower, tensor cores or the L2 cache."""
    rate: float = _MACS if rows >= 64 else _MACS / 2
    if problem.dtype == "float32":
        rate = rate / 2 if problem.tf32 else rate / 6
    macs = rows * columns * k_bytes / problem.element_bytes
    cycles: float = max(macs / rate, (rows + columns) * k_bytes / _L2_BYTES)
    return cycles + _STEP_CYCLES


def _banded_cycles(problem: ConvProblem, config: dict[str, Any]) -> float:
    band, e = _Band.of(problem), problem.element_bytes
    BM, BP, BQ, BK = config["BM"], config["BP"], config["BQ"], config["K_BYTES"] // e
    table = _Table.of(band, BP, BQ, BK, e)
    groups, window = -(-band.P // BP), BP + band.R - 1
    tiles_m, tiles_q = -(-band.N * groups // BM), -(-band.Q // BQ)
    # With thousands of tiles a sample is enough.
    sample = range(0, tiles_m, max(1, tiles_m // 64))
    steps = 0
    for tile in sample:
        lowest = min((tile * BM + BM - 1) // band.N, groups - 1) * BP - band.pad_top
        highest = tile * BM // band.N * BP - band.pad_top
        rows = min(window, band.H - highest) - min(window, max(0, -lowest))
        steps += -(-max(0, rows) * table.columns // BK)
    programs: int = band.C * tiles_m * tiles_q
    per_program: float = steps / len(sample) * _step_cycles(problem, BM, BP * BQ, config["K_BYTES"])
    # The copies of the filter are written once and first read from there.
    copies: float = 2 * band.C * table.elements * e / (_SMS * _L2_BYTES)
    return -(-programs // _SMS) * per_program + copies


def _gradient_cycles(problem: ConvProblem, config: dict[str, Any]) -> float:
    band, cut = _Band.of(problem._replace(direction=Direction.FORWARD)), _Gradient.of(problem, config)
    assert cut is not None
    BM, BP, BK = config["BM"], config["BP"], config["K_BYTES"] // problem.element_bytes
    tiles, steps = [range(t * cut.HB, (t + 1) * cut.HB) for t in range(cut.tiles_h)], 0
    for rows in tiles:
        low, high = max(0, band.pad_top - rows[-1] + BP - 1) // BP, (band.H - 1 + band.pad_top - rows[0]) // BP + 1
        steps += -(-max(0, min(high, -(-band.P // BP)) - low) * band.N // BK)
    per_program = steps / len(tiles) / cut.parts * _step_cycles(problem, BM, BP * config["BQ"], config["K_BYTES"])
    # Summing along the diagonals takes a shuffle and a few instructions per element.
    per_program += BM * BP * config["BQ"] * cut.SB / cut.CB / 8
    programs = band.C * cut.tiles_h * cut.tiles_q * cut.parts
    partial: float = 8 * programs * cut.HB * BP * cut.SB / (_SMS * _L2_BYTES)
    return float(-(-programs // _SMS) * per_program + partial)


def _correlation_cycles(problem: ConvProblem, config: dict[str, Any]) -> float:
    p = problem
    cut = _Correlation.of(p, config["K_BYTES"] // p.element_bytes, config["PROGRAMS"])
    per_program = cut.per_q * cut.per_k * _step_cycles(p, cut.RB, cut.SB, config["K_BYTES"])
    programs = p.C * cut.parts_q * cut.parts_k
    partial: float = 8 * programs * cut.RB * cut.SB / (_SMS * _L2_BYTES)
    return -(-programs // _SMS) * per_program + partial
