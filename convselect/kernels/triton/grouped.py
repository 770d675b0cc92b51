"""Grouped convolution on NVIDIA GPUs: implicit matrix products that take several small groups at once.

    forward          y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] * x[n, group(k) * C/G + c, p', q'],
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum with input and output exchanged; the pixels are taken by phases, that is by their
                     residues modulo the stride, since all pixels of a phase meet the same taps
    backward weight  grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, group(k) * C/G + c, p', q']

A group with 4, 8 or 16 channels is too small for a tensor core's tile, and its 8 to 32 bytes are too few for a load. So
a program takes a *pack* of neighbouring groups: a tile of pixels times all channels of the pack, and per tap a weight
tile that is block-diagonal: the kernel loads a zero if input and output channel belong to different groups. 32 channels
of groups of 4 waste seven eighths of the products, but tensor cores can afford that: such layers are bound by memory
(18 FLOP per byte; an H100 can do 266). Larger groups are packs of one, tiled like any matrix product.

Each pixel is read once per tap. With one stage the loads go through the L1 cache, which holds the pixels that the taps
share; pipelined loads of 16 bytes bypass it and read from L2. One stage suits small packs, pipelining large groups.

The weight gradient has the pixels as its inner dimension, and (tap, input channel) pairs as columns, so that a tile of
grad_y is read once for several taps. Pixels are divided among programs; their float32 sums go to a buffer that a second
kernel adds up in a fixed order. There are no atomics: results are the same in every run.

Activations are read in NHWC; those in other layouts are copied first. Results are written in either layout.

Source of the implicit product: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", 2014; phases are the
sub-pixel form of Shi et al., "Real-Time Single Image and Video Super-Resolution", CVPR 2016, in reverse.

Expected of an H100, by arithmetic and not measured: with 4 to 32 channels per group, 1.5 to 3 times the least time that
memory allows; with more, half of the tensor cores' peak.
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

_MODULE = "convselect.kernels.triton.grouped_kernels"
_DTYPES = ("float16", "bfloat16", "float32")

SPLIT_BYTES = 64 << 20
"""Most bytes of the partial sums of a weight gradient."""
_PROGRAMS_PER_SM = 4
"""Programs per multiprocessor among which a weight gradient's pixels are divided."""
_WASTE = 4
"""A configuration that is expected to take this many times as long as the best is not offered."""


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def shipped(p: ConvProblem) -> list[dict[str, Any]]:
    """All configurations for this direction and element type. Those of float32 are smaller: three products in place of
    one need many registers, and in the weight gradient WGMMA loads float32 4 bytes at a time if pipelined."""
    kernel = "weight_gradient" if p.direction == Direction.BACKWARD_WEIGHT else "gather"
    return launcher.configurations("grouped_triton", kernel + ("_float32" if p.dtype == "float32" else ""))


def _pack(groups: int, inputs: int, outputs: int, most_inputs: int, most_outputs: int, element_bytes: int) -> int:
    """How many groups of `inputs` and `outputs` channels a tile takes: one if a single group fills it, else as many
    as fit, or somewhat fewer if packs then begin at multiples of 16 bytes."""
    most = min(groups, most_inputs // inputs, most_outputs // outputs)
    if most <= 1 or most == groups:
        return max(1, most)
    for pack in range(most, most // 2, -1):
        if pack * inputs * element_bytes % 16 == 0 and pack * outputs * element_bytes % 16 == 0:
            return pack
    return most


def _out_layout(p: ConvProblem) -> str:
    """The layout that aten gives to results of this problem."""
    return CHANNELS_LAST if CHANNELS_LAST in (p.layout, p.weight_layout) else CONTIGUOUS


def _wide(p: ConvProblem) -> bool:
    return max(p.N * p.C * p.H * p.W, p.N * p.K * p.P * p.Q) >= launcher.SPLIT_ELEMENTS


def _multiprocessors() -> int:
    return 108 if launcher.architecture() < 90 else 132


def _turn_ns(p: ConvProblem, m: int, n: int, k: int, stages: int) -> float:
    """Assumed time of one multiprocessor for one step of an (m x k) times (k x n) product: at half of the peak of an
    H100's tensor cores. Loads take its share of 5.5 TB/s from L2 at the same time if pipelined, else 100 bytes per ns
    from L1 before it."""
    flops_per_ns = 3000.0 / (1 if p.element_bytes == 2 else 2 if p.tf32 else 6)
    computing = 2 * m * n * k / flops_per_ns
    read_bytes = (m + n) * k * p.element_bytes
    return max(computing, read_bytes / 42) if stages > 1 else computing + read_bytes / 100


def _axis_constants(stride: int, dilation: int) -> tuple[int, int, int]:
    """(step, common, inverse) of `_axis` in the kernels: taps of a phase are `step` apart."""
    common = math.gcd(stride, dilation)
    step = stride // common
    return step, common, pow(dilation // common, -1, step)


class GroupedTriton(TritonAlgorithm):
    name = "grouped_triton"

    def why_not_shape(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.groups == 1:
            return "The Triton grouped kernel needs several groups; this is not a grouped convolution."
        if p.is_depthwise:
            return "The Triton grouped kernel needs several input channels per group; this convolution is depthwise."
        if p.dtype not in _DTYPES:
            return f"The Triton grouped kernel computes on tensor cores in float32; this problem is in {p.dtype}."
        pixels = p.N * max((p.H + p.stride_h) * (p.W + p.stride_w), p.P * p.Q)
        if max(2 * pixels, p.K * (p.C // p.groups) * p.R * p.S) >= 2**31:
            return "The Triton grouped kernel needs fewer than 2**30 pixels and 2**31 weights."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        """Copies in NHWC of operands in other layouts, and partial sums. A weight gradient's problem does not give the
        layout of grad_y; it is assumed to be that of x. No problem gives the alignment of operands; it is assumed to be
        16 bytes."""
        p = problem
        copied = 0 if p.layout == CHANNELS_LAST else p.y_bytes if p.direction == Direction.BACKWARD_DATA else p.x_bytes
        if p.direction != Direction.BACKWARD_WEIGHT:
            return copied + (0 if p.weight_layout == CHANNELS_LAST and not _turned(p) else p.weight_bytes)
        copied += 0 if p.layout == CHANNELS_LAST else p.y_bytes
        weights = p.K * (p.C // p.groups) * p.R * p.S
        splits = max(_Gradient(p, config).splits for config in shipped(p))
        return copied + (4 * splits * weights if splits > 1 else 0)

    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        """The configurations, sorted by the time that `_Gather` and `_Gradient` expect, without those that take
        `_WASTE` times as long as the best."""
        p = problem
        plan = _Gradient if p.direction == Direction.BACKWARD_WEIGHT else _Gather
        limit = launcher.shared_memory_bytes()
        plans = [plan(p, config) for config in shipped(p)]
        fitting = [one for one in plans if one.shared_bytes <= limit]
        fitting.sort(key=lambda one: one.expected_ns)
        return [one.config for one in fitting if one.expected_ns <= _WASTE * fitting[0].expected_ns]

    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        config = dict(params) if params else self.configs(problem)[0]
        if problem.direction == Direction.BACKWARD_WEIGHT:
            return _Gradient(problem, config).launches()
        return (_Gather(problem, config).launch(),)

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gather(x, weight, problem, params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gather(grad_y, weight, problem, params)

    def _gather(self, source: Tensor, weight: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        (launch,) = self.launches(problem, params)
        out = _empty(problem, source)
        weight = _turn(weight, problem) if _turned(problem) else _nhwc(weight)
        launcher.run(launch, _nhwc(source), weight, out)
        return out

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        first, *rest = self.launches(problem, params)
        out = _empty(problem, x)
        if not rest:
            launcher.run(first, _nhwc(x), _nhwc(grad_y), out)
            return out
        splits = dict(rest[0].constants)["SPLITS"]
        assert isinstance(splits, int)
        partial = torch.empty(splits * out.numel(), dtype=torch.float32, device=x.device)
        launcher.run(first, _nhwc(x), _nhwc(grad_y), partial)
        launcher.run(rest[0], partial, out)
        return out


def _nhwc(t: Tensor) -> Tensor:
    return launcher.aligned(t.contiguous(memory_format=torch.channels_last))


def _turned(p: ConvProblem) -> bool:
    """Whether the weight is copied with the inner dimension last: in TF32 tensor cores need this order, and without the
    copy the compiler would load 4 bytes at a time."""
    return p.direction == Direction.BACKWARD_DATA and p.dtype == "float32"


def _turn(weight: Tensor, p: ConvProblem) -> Tensor:
    """(K, C/groups, R, S) -> (C, R, S, K/groups)."""
    groups = weight.reshape(p.groups, p.K // p.groups, p.C // p.groups, p.R, p.S)
    return launcher.aligned(groups.permute(0, 2, 3, 4, 1).contiguous())


def _empty(p: ConvProblem, like: Tensor) -> Tensor:
    layout = torch.channels_last if _out_layout(p) == CHANNELS_LAST else torch.contiguous_format
    return torch.empty(p.result_shape, dtype=like.dtype, device=like.device, memory_format=layout)


class _Gather:
    """Forward and backward data with one configuration."""

    def __init__(self, p: ConvProblem, config: dict[str, Any]) -> None:
        self.p, self.config = p, config
        self.forward = p.direction == Direction.FORWARD
        c_group, k_group = p.C // p.groups, p.K // p.groups
        self.source_group, self.out_group = (c_group, k_group) if self.forward else (k_group, c_group)
        self.m, self.n, self.k = (int(config[name]) for name in ("block_m", "block_n", "block_k"))
        self.pack = _pack(p.groups, self.source_group, self.out_group, self.k, self.n, p.element_bytes)
        self.units_h = p.P if self.forward else _ceil(p.H, p.stride_h)
        self.units_w = p.Q if self.forward else _ceil(p.W, p.stride_w)
        self.units = p.N * self.units_h * self.units_w
        self.phases = 1 if self.forward else p.stride_h * p.stride_w

    @property
    def programs(self) -> int:
        tiles = _ceil(self.p.groups, self.pack) * _ceil(self.pack * self.out_group, self.n)
        return tiles * self.phases * _ceil(self.units, self.m)

    @property
    def shared_bytes(self) -> int:
        """Shared memory for the operands in the pipeline, or for converting the result from the layout of tensor cores
        to that of memory."""
        operands = int(self.config["num_stages"]) * (self.m + self.n) * self.k * self.p.element_bytes
        return max(operands, self.m * self.n * 4)

    @property
    def expected_ns(self) -> float:
        """Time of a program (its turns, plus 200 ns to begin and end) times the programs per multiprocessor."""
        p = self.p
        turns = _ceil(self.pack * self.source_group, self.k) * p.R * p.S / self.phases
        turn_ns = _turn_ns(p, self.m, self.n, self.k, self.config["num_stages"])
        return (turns * turn_ns + 200) * _ceil(self.programs, _multiprocessors())

    def launch(self) -> Launch:
        p = self.p
        out_c, out_h, out_w = (p.K, p.P, p.Q) if self.forward else (p.C, p.H, p.W)
        source_h, source_w = (p.H, p.W) if self.forward else (p.P, p.Q)
        strides = canonical_strides((p.N, out_c, out_h, out_w), _out_layout(p))
        step_h, common_h, inverse_h = _axis_constants(p.stride_h, p.dil_h)
        step_w, common_w, inverse_w = _axis_constants(p.stride_w, p.dil_w)
        constants: dict[str, Value] = dict(
            FORWARD=self.forward, SOURCE_LAST=self.forward or _turned(p),
            PIXELS=self.units, UNITS_H=self.units_h, UNITS_W=self.units_w,
            SOURCE_H=source_h, SOURCE_W=source_w, OUT_H=out_h, OUT_W=out_w,
            OUT_STRIDE_N=strides[0], OUT_STRIDE_C=strides[1], OUT_STRIDE_H=strides[2], OUT_STRIDE_W=strides[3],
            GROUPS=p.groups, PACK=self.pack, SOURCE_GROUP=self.source_group, OUT_GROUP=self.out_group,
            STEP_H=step_h, COMMON_H=common_h, INVERSE_H=inverse_h,
            STEP_W=step_w, COMMON_W=common_w, INVERSE_W=inverse_w,
            WIDE=_wide(p), PRECISION=launcher.dot_precision(p),
            BLOCK_M=self.m, BLOCK_N=self.n, BLOCK_K=self.k,
            **_geometry(p),
        )  # fmt: skip
        return Launch(
            _MODULE, "gather", (self.programs, 1, 1), (p.dtype,) * 3, tuple(constants.items()),
            self.config["num_warps"], self.config["num_stages"],
        )  # fmt: skip


class _Gradient:
    """Backward weight with one configuration."""

    def __init__(self, p: ConvProblem, config: dict[str, Any]) -> None:
        self.p, self.config = p, config
        self.c_group, self.k_group = p.C // p.groups, p.K // p.groups
        self.m, self.n, self.j = (int(config[name]) for name in ("block_m", "block_n", "block_j"))
        # All taps of a pack share columns, so only waste limits its input channels: as many as outputs.
        self.pack = _pack(p.groups, self.c_group, self.k_group, max(self.n, self.c_group), self.n, p.element_bytes)
        self.tiles = (
            _ceil(p.groups, self.pack)
            * _ceil(self.pack * self.k_group, self.n)
            * _ceil(self.pack * self.c_group * p.R * p.S, self.j)
        )
        self.weights = p.K * self.c_group * p.R * p.S
        chunks = _ceil(p.N * p.P * p.Q, self.m)
        wanted = _ceil(_PROGRAMS_PER_SM * _multiprocessors(), self.tiles)
        most = max(1, min(wanted, chunks, SPLIT_BYTES // (4 * self.weights)))
        self.turns = _ceil(chunks, most)
        self.splits = _ceil(chunks, self.turns)

    @property
    def shared_bytes(self) -> int:
        operands = int(self.config["num_stages"]) * (self.n + self.j) * self.m * self.p.element_bytes
        return max(operands, self.n * self.j * 4)

    @property
    def expected_ns(self) -> float:
        """As for `_Gather`, plus the partial sums, written and read at 5.5 TB/s."""
        turn_ns = _turn_ns(self.p, self.n, self.j, self.m, self.config["num_stages"])
        rounds = _ceil(self.tiles * self.splits, _multiprocessors())
        sums = 8 * self.splits * self.weights / 5500 if self.splits > 1 else 0
        return (self.turns * turn_ns + 200) * rounds + sums

    def launches(self) -> tuple[Launch, ...]:
        p, taps = self.p, self.p.R * self.p.S
        k, c, _, tap = canonical_strides((p.K, self.c_group, p.R, p.S), _out_layout(p))
        result: dict[str, Value] = dict(OUT_STRIDE_K=k, OUT_STRIDE_C=c, OUT_STRIDE_TAP=tap)
        partial: dict[str, Value] = dict(
            OUT_STRIDE_K=taps * self.c_group, OUT_STRIDE_C=1, OUT_STRIDE_TAP=self.c_group
        )  # fmt: skip
        constants: dict[str, Value] = dict(
            PIXELS=p.N * p.P * p.Q, P=p.P, Q=p.Q, H=p.H, W=p.W,
            GROUPS=p.groups, PACK=self.pack, C_GROUP=self.c_group, K_GROUP=self.k_group,
            OUT_STRIDE_SPLIT=self.weights, TURNS=self.turns, WIDE=_wide(p), PRECISION=launcher.dot_precision(p),
            BLOCK_M=self.m, BLOCK_N=self.n, BLOCK_J=self.j,
            **_geometry(p), **(partial if self.splits > 1 else result),
        )  # fmt: skip
        sums = Launch(
            _MODULE, "weight_gradient", (self.tiles * self.splits, 1, 1),
            (p.dtype, p.dtype, "float32" if self.splits > 1 else p.dtype), tuple(constants.items()),
            self.config["num_warps"], self.config["num_stages"],
        )  # fmt: skip
        if self.splits == 1:
            return (sums,)
        # Small weights have many splits, and the other way round.
        rows = min(32, 1 << (self.splits - 1).bit_length())
        block = 1024 // rows
        last: dict[str, Value] = dict(
            SPLITS=self.splits, SIZE=self.weights, C_GROUP=self.c_group, TAPS=taps,
            BLOCK_SPLITS=rows, BLOCK=block, **result,
        )  # fmt: skip
        grid = (_ceil(self.weights, block), 1, 1)
        return sums, Launch(_MODULE, "sum_splits", grid, ("float32", p.dtype), tuple(last.items()), 4, 1)


def _geometry(p: ConvProblem) -> dict[str, Value]:
    return dict(
        R=p.R, S=p.S, STRIDE_H=p.stride_h, STRIDE_W=p.stride_w, DIL_H=p.dil_h, DIL_W=p.dil_w,
        PAD_TOP=p.pad_top, PAD_LEFT=p.pad_left,
    )  # fmt: skip


ALGORITHMS = (GroupedTriton(),)
