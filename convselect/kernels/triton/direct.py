"""Dense convolution on NVIDIA GPUs as one matrix product whose left operand is gathered, not stored.

    forward          y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] * x[n, c, p', q'],
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum with input and output exchanged; the pixels are taken by phases, that is by their
                     residues modulo the stride, since all pixels of a phase meet the same taps
    backward weight  grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, c, p', q']

Rows are output pixels, columns output channels, and the inner dimension is all (tap, channel) pairs in one loop. If
each block of it lies within one tap, the tap costs a few scalar instructions. Otherwise (a stem has 3 channels, padded
to 4) blocks span taps, and only a part of the last block is wasted.

If pixels and channels make too few programs for the GPU (small images, batch 1), the inner dimension is divided as
well: float32 sums go to a buffer, and a second kernel adds them up in a fixed order. A weight gradient, whose inner
dimension is all pixels, nearly always does so. There are no atomics: results are the same in every run.

On GPUs from compute capability 9.0 on, and for unit strides, there is another kernel, whose blocks of pixels are boxes
of images, rows and columns. The tensor memory accelerator fetches such a box for each tap, with zeros outside the
image. The first kernel computes addresses and bounds of every load; its blocks are runs of pixels for any image width.

Activations are read in NHWC, with channels that fill 8 bytes: others are copied to this form. (In NCHW pixels are
adjacent too, but every tap shifts them, so that 16-bit values could only be loaded one by one.) Weights are read as
(output, tap, input), which is the memory order of a channels_last weight. Results are written in either layout.

Source of the implicit product: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014; phases are the
sub-pixel form of Shi et al., "Real-Time Single Image and Video Super-Resolution", CVPR 2016, in reverse.

Expected of an H100, by arithmetic and not measured: 40 to 60 % of the tensor cores' peak in 16 bit if channels fill
the tiles, which is no more than cuDNN reaches there. The gain is expected in cases for which cuDNN has no fast kernels:
2**31 elements, dilation, 1xN, batch 1, strided gradients, float32 without TF32 (three products, still twice as fast as
the float32 units), float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, CONTIGUOUS, ConvProblem, Direction, canonical_strides
from convselect.kernels._contract import Grade, Params
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import Launch, TritonAlgorithm, Value

_MODULE = "convselect.kernels.triton.direct_kernels"

SPLIT_BYTES = 64 << 20
"""Most bytes of partial sums."""
MOST_SPLITS = 32
"""Most parts of the inner dimension, in forward and backward data."""
_WASTE = 4
"""A configuration that is expected to take this many times as long as the best is not offered."""
_PROGRAM_NS, _DESCRIPTOR_NS, _LAUNCH_NS = 500, 1000, 3000
"""Assumed times for filling and draining a program's pipeline, for its tensor descriptors, and for one more launch."""
_DESCRIPTOR_GAIN = 1.25
"""Assumed speed-up of loads for the tensor cores if no addresses are computed."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def shipped(p: ConvProblem) -> list[dict[str, Any]]:
    """All configurations for this direction and element type."""
    kind = "" if p.element_bytes == 2 else f"_{p.dtype}"
    if p.direction == Direction.BACKWARD_WEIGHT:
        return launcher.configurations("direct_triton", f"weight_gradient{kind}")
    found = launcher.configurations("direct_triton", f"gather{kind}")
    if launcher.architecture() >= 90 and p.dtype != "float64":
        found = found + launcher.configurations("direct_triton", f"gather_descriptor{kind}")
    return found


def _is_nhwc(layout: str, channels: int, pixels: int) -> bool:
    return layout == CHANNELS_LAST or (layout == CONTIGUOUS and 1 in (channels, pixels))


def _padded(channels: int, nhwc: bool, element_bytes: int) -> int:
    """Channels per pixel as the kernels read them: a multiple of 8 bytes; of 16 bytes if a copy is made anyway."""
    half = 8 // element_bytes
    if nhwc and channels % half == 0:
        return channels
    unit = half if channels <= half else 2 * half
    return _ceil(channels, unit) * unit


def _out_layout(p: ConvProblem) -> str:
    """The layout that aten gives to results of this problem."""
    return CHANNELS_LAST if CHANNELS_LAST in (p.layout, p.weight_layout) else CONTIGUOUS


def _multiprocessors() -> int:
    return 108 if launcher.architecture() < 90 else 132


def _turn_ns(p: ConvProblem, m: int, n: int, k: int, gain: float = 1) -> float:
    """Assumed time of one multiprocessor for one step of an (m x k) times (k x n) product: at half of its tensor cores'
    peak, or at its share of 5.5 TB/s from L2."""
    peak = 1500.0 if launcher.architecture() < 90 else 3000.0
    flops_per_ns = peak / (1 if p.element_bytes == 2 else 12 if p.dtype == "float64" else 2 if p.tf32 else 6)
    return max(2 * m * n * k / (gain * flops_per_ns), (m + n) * k * p.element_bytes / 42)


class DirectTriton(TritonAlgorithm):
    name = "direct_triton"

    def why_not_shape(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.groups != 1:
            return "The Triton direct kernel needs one group; this is a grouped convolution."
        pixels = p.N * max((p.H + p.stride_h) * (p.W + p.stride_w), p.P * p.Q)
        if max(2 * pixels, (p.K + 8) * (p.C + 8) * p.R * p.S) >= 2**31:
            return "The Triton direct kernel needs fewer than 2**30 pixels and 2**31 weights."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        """Copies of operands in other layouts or with channels that do not fill 8 bytes, and partial sums. A weight
        gradient's problem does not give the layout of grad_y; it is assumed to be that of x. No problem gives the
        alignment of operands; it is assumed to be 16 bytes."""
        p = problem
        if p.direction == Direction.BACKWARD_WEIGHT:
            gradients = [_Gradient(p, config) for config in shipped(p)]
            x, y = _copied(p, p.C, p.N * p.H * p.W), _copied(p, p.K, p.N * p.P * p.Q)
            return x + y + max(one.partial_bytes for one in gradients)
        gathers = [_Gather(p, config) for config in shipped(p)]
        source_pixels = p.N * (p.H * p.W if p.direction == Direction.FORWARD else p.P * p.Q)
        first = gathers[0]
        weight = max(one.weight_copied_bytes for one in gathers if one.applies)
        partial = max(one.partial_bytes + one.scratch_bytes for one in gathers if one.applies)
        return _copied(p, first.source_channels, source_pixels) + weight + partial

    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        """The configurations, sorted by the time that `_Gather` and `_Gradient` expect, without those that take
        `_WASTE` times as long as the best."""
        p = problem
        limit = launcher.shared_memory_bytes()
        plans: list[_Gather] | list[_Gradient]
        if p.direction == Direction.BACKWARD_WEIGHT:
            plans = [_Gradient(p, config) for config in shipped(p)]
        else:
            plans = [_Gather(p, config) for config in shipped(p)]
        fitting = sorted((one for one in plans if one.applies and one.shared_bytes <= limit), key=_expected)
        return [one.config for one in fitting if one.expected_ns <= _WASTE * fitting[0].expected_ns]

    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        config = dict(params) if params else self.configs(problem)[0]
        if problem.direction == Direction.BACKWARD_WEIGHT:
            return _Gradient(problem, config).launches()
        return _Gather(problem, config).launches()

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gather(x, weight, problem, params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gather(grad_y, weight, problem, params)

    def _gather(self, source: Tensor, weight: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        p = problem
        launches = self.launches(p, params)
        constants = dict(launches[0].constants)
        channels = constants["CHANNELS"]
        assert isinstance(channels, int)
        if constants.get("WEIGHT_SOURCE", 1) != 1:
            weight = _nhwc(weight, p.C)
        else:
            weight = _nhwc(weight.transpose(0, 1) if p.direction == Direction.BACKWARD_DATA else weight, channels)
        return _run(launches, p, _nhwc(source, channels), weight)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        launches = self.launches(problem, params)
        constants = dict(launches[0].constants)
        channels, out_channels = constants["CHANNELS"], constants["OUT_CHANNELS"]
        assert isinstance(channels, int)
        assert isinstance(out_channels, int)
        return _run(launches, problem, _nhwc(x, channels), _nhwc(grad_y, out_channels))


def _run(launches: tuple[Launch, ...], p: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    """Launch on prepared operands, through a buffer of partial sums if there is a second launch."""
    layout = torch.channels_last if _out_layout(p) == CHANNELS_LAST else torch.contiguous_format
    out = torch.empty(p.result_shape, dtype=a.dtype, device=a.device, memory_format=layout)
    if len(launches) == 1:
        launcher.run(launches[0], a, b, out)
        return out
    splits = dict(launches[1].constants)["SPLITS"]
    assert isinstance(splits, int)
    kind = torch.float64 if p.dtype == "float64" else torch.float32
    partial = torch.empty(splits * out.numel(), dtype=kind, device=a.device)
    launcher.run(launches[0], a, b, partial)
    launcher.run(launches[1], partial, out)
    return out


def _nhwc(t: Tensor, channels: int) -> Tensor:
    """The (N, C, H, W) tensor in channels_last, with `channels` channels, those beyond C zero."""
    N, C, H, W = t.shape
    if channels == C:
        return launcher.aligned(t.contiguous(memory_format=torch.channels_last))
    wide = t.new_empty((N, H, W, channels)).permute(0, 3, 1, 2)
    wide[:, :C] = t
    wide[:, C:] = 0
    return wide


def _copied(p: ConvProblem, channels: int, pixels: int) -> int:
    nhwc = _is_nhwc(p.layout, channels, pixels // p.N)
    padded = _padded(channels, nhwc, p.element_bytes)
    return 0 if nhwc and padded == channels else pixels * padded * p.element_bytes


def _expected(plan: _Gather | _Gradient) -> float:
    return plan.expected_ns


class _Gather:
    """Forward and backward data with one configuration."""

    def __init__(self, p: ConvProblem, config: dict[str, Any]) -> None:
        self.p, self.config = p, config
        self.forward = p.direction == Direction.FORWARD
        self.m, self.n, self.k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
        self.source_channels, self.out_channels = (p.C, p.K) if self.forward else (p.K, p.C)
        self.source_h, self.source_w = (p.H, p.W) if self.forward else (p.P, p.Q)
        self.out_h, self.out_w = (p.P, p.Q) if self.forward else (p.H, p.W)
        nhwc = _is_nhwc(p.layout, self.source_channels, self.source_h * self.source_w)
        self.channels = _padded(self.source_channels, nhwc, p.element_bytes)
        self.units_h = p.P if self.forward else _ceil(p.H, p.stride_h)
        self.units_w = p.Q if self.forward else _ceil(p.W, p.stride_w)
        self.units = p.N * self.units_h * self.units_w
        self.phases = 1 if self.forward else p.stride_h * p.stride_w
        self.size = p.N * self.out_channels * self.out_h * self.out_w
        self.tiles = _ceil(self.out_channels, self.n)
        self.descriptor = config["loads"] == "descriptor"
        if self.descriptor:
            self.box = _box(self.m, (p.N, self.out_h, self.out_w))
            blocks = _boxes(self.box, (p.N, self.out_h, self.out_w))
            self.turns = _ceil(self.channels, self.k) * p.R * p.S
        else:
            blocks = _ceil(self.units, self.m)
            # On average; phases differ.
            self.turns = _ceil(self.channels * p.R * p.S, self.k * self.phases)
        self.programs = self.tiles * self.phases * blocks
        self.splits = min(self._possible_splits(), key=self._expected_ns)

    @property
    def applies(self) -> bool:
        p = self.p
        return not self.descriptor or (p.stride == (1, 1) and self.channels * p.element_bytes % 16 == 0)

    @property
    def in_place(self) -> bool:
        """Backward: whether the weight is read as it is, (K, R, S, C), and not transposed to (C, R, S, K). Tensor cores
        take either order in 16 bit, but not in TF32."""
        p = self.p
        nhwc = _is_nhwc(p.weight_layout, p.C, p.R * p.S)
        return not self.forward and not self.descriptor and p.element_bytes == 2 and nhwc and p.C % 8 == 0

    @property
    def weight_copied_bytes(self) -> int:
        p = self.p
        if self.in_place or (self.forward and self.channels == p.C and _is_nhwc(p.weight_layout, p.C, p.R * p.S)):
            return 0
        return self.out_channels * self.channels * p.R * p.S * p.element_bytes

    @property
    def partial_bytes(self) -> int:
        return _partial_bytes(self.p, self.splits, self.size)

    @property
    def scratch_bytes(self) -> int:
        """Memory for two descriptors per program."""
        return 256 * self.programs * self.splits if self.descriptor else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the operands in the pipeline, or for converting the result from the layout of tensor cores
        to that of memory."""
        operands = int(self.config["num_stages"]) * (self.m + self.n) * self.k * self.p.element_bytes
        return max(operands, self.m * self.n * max(4, self.p.element_bytes))

    def _possible_splits(self) -> list[int]:
        """Numbers of parts such that each part has at least two turns of the loop."""
        most = min(MOST_SPLITS, self.turns // 2, SPLIT_BYTES // (self.size * max(4, self.p.element_bytes)))
        return [1, *(splits for splits in (2, 3, 4, 6, 8, 12, 16, 24, 32) if splits <= most)]

    def _expected_ns(self, splits: int) -> float:
        """Time of a program (its turns, beginning and end) times the programs per multiprocessor; partial sums are
        written and read at 5.5 TB/s."""
        turn_ns = _turn_ns(self.p, self.m, self.n, self.k, _DESCRIPTOR_GAIN if self.descriptor else 1)
        program_ns = _PROGRAM_NS + (_DESCRIPTOR_NS if self.descriptor else 0)
        rounds = _ceil(self.programs * splits, _multiprocessors())
        sums = 8 * splits * self.size / 5500 + _LAUNCH_NS if splits > 1 else 0
        return (_ceil(self.turns, splits) * turn_ns + program_ns) * rounds + sums

    @property
    def expected_ns(self) -> float:
        return self._expected_ns(self.splits)

    def launches(self) -> tuple[Launch, ...]:
        p = self.p
        strides = canonical_strides((p.N, self.out_channels, self.out_h, self.out_w), _out_layout(p))
        read = p.N * self.source_h * self.source_w * self.channels
        common: dict[str, Value] = dict(
            SOURCE_H=self.source_h, SOURCE_W=self.source_w, CHANNELS=self.channels,
            OUT_H=self.out_h, OUT_W=self.out_w, OUT_CHANNELS=self.out_channels,
            OUT_STRIDE_N=strides[0], OUT_STRIDE_C=strides[1], OUT_STRIDE_H=strides[2], OUT_STRIDE_W=strides[3],
            SPLITS=self.splits, OUT_SIZE=self.size, WIDE=max(read, self.splits * self.size) >= launcher.SPLIT_ELEMENTS,
            BLOCK_N=self.n, BLOCK_K=self.k, GROUP=8 if self.tiles > 8 else 1,
        )  # fmt: skip
        constants = self._descriptor_constants() if self.descriptor else self._pointer_constants()
        kernel = "gather_descriptor" if self.descriptor else "gather"
        grid = (self.programs, self.splits, 1)
        first = _launch(p, kernel, grid, common | constants, self.config, self.splits)
        return _with_sum(first, p, self.splits, self.size)

    def _descriptor_constants(self) -> dict[str, Value]:
        p, sign = self.p, 1 if self.forward else -1
        return dict(
            N=p.N, R=p.R, S=p.S, BEGIN_H=-sign * p.pad_top, BEGIN_W=-sign * p.pad_left,
            MOVE_H=sign * p.dil_h, MOVE_W=sign * p.dil_w,
            BLOCK_I=self.box[0], BLOCK_H=self.box[1], BLOCK_W=self.box[2],
        )  # fmt: skip

    def _pointer_constants(self) -> dict[str, Value]:
        p, taps = self.p, self.p.R * self.p.S
        if self.in_place:
            weight: dict[str, Value] = dict(WEIGHT_OUT=1, WEIGHT_TAP=p.C, WEIGHT_SOURCE=taps * p.C, WEIGHT_CHANNELS=p.K)
        else:
            weight = dict(
                WEIGHT_OUT=taps * self.channels, WEIGHT_TAP=self.channels, WEIGHT_SOURCE=1,
                WEIGHT_CHANNELS=self.channels,
            )  # fmt: skip
        return dict(
            FORWARD=self.forward, PIXELS=self.units, UNITS_H=self.units_h, UNITS_W=self.units_w,
            STEP_H=p.stride_h // math.gcd(p.stride_h, p.dil_h), STEP_W=p.stride_w // math.gcd(p.stride_w, p.dil_w),
            FLAT=self.channels % self.k != 0, BLOCK_M=self.m, **weight, **_geometry(p),
        )  # fmt: skip


class _Gradient:
    """Backward weight with one configuration."""

    applies = True

    def __init__(self, p: ConvProblem, config: dict[str, Any]) -> None:
        self.p, self.config = p, config
        self.m, self.n, self.j = (int(config[name]) for name in ("block_m", "block_n", "block_j"))
        self.channels = _padded(p.C, _is_nhwc(p.layout, p.C, p.H * p.W), p.element_bytes)
        self.out_channels = _padded(p.K, _is_nhwc(p.layout, p.K, p.P * p.Q), p.element_bytes)
        self.tiles = _ceil(p.K, self.n) * _ceil(self.channels * p.R * p.S, self.j)
        self.size = p.K * p.C * p.R * p.S
        self.chunks = _ceil(p.N * p.P * p.Q, self.m)
        self.turns = min(self._possible_turns(), key=self._expected_ns)
        self.splits = _ceil(self.chunks, self.turns)

    def _possible_turns(self) -> list[int]:
        """Turns per program such that the programs fill the GPU one to four times."""
        most = min(self.chunks // 2, SPLIT_BYTES // (self.size * max(4, self.p.element_bytes)))
        per_round = max(1, _multiprocessors() // self.tiles)
        return [_ceil(self.chunks, max(1, min(most, per_round * rounds))) for rounds in (0, 1, 2, 3, 4)]

    def _expected_ns(self, turns: int) -> float:
        """As for `_Gather`."""
        splits = _ceil(self.chunks, turns)
        turn_ns = _turn_ns(self.p, self.n, self.j, self.m)
        rounds = _ceil(self.tiles * splits, _multiprocessors())
        sums = 8 * splits * self.size / 5500 + _LAUNCH_NS if splits > 1 else 0
        return (turns * turn_ns + _PROGRAM_NS) * rounds + sums

    @property
    def expected_ns(self) -> float:
        return self._expected_ns(self.turns)

    @property
    def partial_bytes(self) -> int:
        return _partial_bytes(self.p, self.splits, self.size)

    @property
    def shared_bytes(self) -> int:
        operands = int(self.config["num_stages"]) * (self.n + self.j) * self.m * self.p.element_bytes
        return max(operands, self.n * self.j * max(4, self.p.element_bytes))

    def launches(self) -> tuple[Launch, ...]:
        p = self.p
        k, c, _, tap = canonical_strides((p.K, p.C, p.R, p.S), _out_layout(p))
        read = max(p.N * p.H * p.W * self.channels, p.N * p.P * p.Q * self.out_channels)
        constants: dict[str, Value] = dict(
            PIXELS=p.N * p.P * p.Q, P=p.P, Q=p.Q, H=p.H, W=p.W,
            C=p.C, CHANNELS=self.channels, K=p.K, OUT_CHANNELS=self.out_channels,
            OUT_STRIDE_K=k, OUT_STRIDE_C=c, OUT_STRIDE_TAP=tap, OUT_SIZE=self.size, TURNS=self.turns,
            WIDE=max(read, self.splits * self.size) >= launcher.SPLIT_ELEMENTS,
            BLOCK_M=self.m, BLOCK_N=self.n, BLOCK_J=self.j, **_geometry(p),
        )  # fmt: skip
        grid = (self.tiles * self.splits, 1, 1)
        first = _launch(p, "weight_gradient", grid, constants, self.config, self.splits)
        return _with_sum(first, p, self.splits, self.size)


def _boxes(box: tuple[int, int, int], sizes: tuple[int, int, int]) -> int:
    return math.prod(_ceil(size, side) for size, side in zip(sizes, box, strict=True))


def _box(m: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """(images, rows, columns), powers of two with the product m, that need the fewest boxes; of several the widest."""
    sides = [1 << power for power in range(m.bit_length())]
    boxes = [(m // (h * w), h, w) for h in sides for w in sides if h * w <= m]
    return min(boxes, key=lambda box: (_boxes(box, sizes), box[0], box[1]))


def _partial_kind(p: ConvProblem) -> str:
    return "float64" if p.dtype == "float64" else "float32"


def _partial_bytes(p: ConvProblem, splits: int, size: int) -> int:
    return 0 if splits == 1 else splits * size * max(4, p.element_bytes)


def _launch(
    p: ConvProblem, kernel: str, grid: tuple[int, int, int], constants: dict[str, Value], config: dict[str, Any],
    splits: int,
) -> Launch:  # fmt: skip
    constants = constants | dict(DOUBLE=p.dtype == "float64", PRECISION=launcher.dot_precision(p))
    pointers = (p.dtype, p.dtype, p.dtype if splits == 1 else _partial_kind(p))
    return Launch(
        _MODULE, kernel, grid, pointers, tuple(constants.items()), config["num_warps"], config["num_stages"],
        scratch=kernel == "gather_descriptor",
    )  # fmt: skip


def _with_sum(first: Launch, p: ConvProblem, splits: int, size: int) -> tuple[Launch, ...]:
    """The launch, and the launch that adds up its partial sums."""
    if splits == 1:
        return (first,)
    # Results with few elements have many splits, and the other way round.
    rows = min(32, 1 << (splits - 1).bit_length())
    block = 2048 // rows
    constants: dict[str, Value] = dict(
        SPLITS=splits, SIZE=size, WIDE=splits * size >= launcher.SPLIT_ELEMENTS, DOUBLE=p.dtype == "float64",
        BLOCK_SPLITS=rows, BLOCK=block,
    )  # fmt: skip
    pointers = (_partial_kind(p), p.dtype)
    return first, Launch(_MODULE, "sum_splits", (_ceil(size, block), 1, 1), pointers, tuple(constants.items()), 4, 1)


def _geometry(p: ConvProblem) -> dict[str, Value]:
    return dict(
        R=p.R, S=p.S, STRIDE_H=p.stride_h, STRIDE_W=p.stride_w, DIL_H=p.dil_h, DIL_W=p.dil_w,
        PAD_TOP=p.pad_top, PAD_LEFT=p.pad_left,
    )  # fmt: skip


ALGORITHMS = (DirectTriton(),)
