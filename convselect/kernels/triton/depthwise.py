"""Depthwise convolution on GPUs: Triton kernels without tensor cores (kernels/triton/depthwise_kernels.py).

    forward          y[n, k, p, q] = sum over r, s of w[k, r, s] * x[n, k // M, p', q'],  M = K / C,
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    grad_x[n, c, h, w] = sum over m, r, s of w[k, r, s] * grad_y[n, k, p, q],  k = c * M + m,
                     over those r, s for which p = (h + pad_top - r * dil_h) / stride_h and q are whole
    backward weight  grad_w[k, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, k // M, p', q']

A thread computes a tile of neighbouring outputs, so that each value is read once for all outputs and taps that use it.
In channels-last order a tile is a part of a row, of 16 bytes of channels; in contiguous order it is a block of rows and
columns of one channel, since there a read at a shift of one column can only be one element wide. Backward data is the
same sum: a tile covers whole periods of the stride, so that the compiler knows which taps meet an output, and no
products are wasted. A weight gradient is summed in two steps, without atomics: each warp over a part of the images,
then over the parts.

For any sizes, lanes are numbered without gaps, except in the last tile of a row. Sums are float32 (float64 for
float64), rounded once.

Expected of an H100, by arithmetic and by counting instructions, not measured: 3x3 and 5x5 near the memory bound; 7x7 in
16 bit bound by issuing instructions, 0.55 to 0.65 of which are multiplications.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, STRIDED, ConvProblem, Direction
from convselect.kernels._common import strides, why_not_depthwise
from convselect.kernels._contract import Grade, Params
from convselect.kernels.triton import launch as launcher
from convselect.kernels.triton.launch import SPLIT_ELEMENTS, Launch, TritonAlgorithm, Value

MOST_TAPS = 11
"""Most rows or columns of a filter. With more, sums of a row do not fit into registers, and tensor cores are faster."""
MOST_STRIDE = 16
"""Largest stride in backward data, in which a tile covers a period of the stride."""
_WHAT = "The Triton depthwise kernel"
MODULE = "convselect.kernels.triton.depthwise_kernels"

_WARP = 32
_SMS = 132
_ENOUGH_LANES = _SMS * 512
"""Fewer lanes do not hide the latency of memory; if a problem has fewer, smaller tiles are better."""
_ENOUGH_PARTS = 32
"""Warps per multiprocessor into which a weight gradient is split: two or three times those that fit at once."""
_FEWEST_STEPS = 4
_MOST_PARTIAL_BYTES = 16 << 20
_MOST_UNROLLED = 512
"""Most multiplications per thread; with more, code does not fit the instruction cache and takes long to compile."""
_REGISTERS = 200
"""Most registers that a configuration may need, as `_cost` estimates them; of 255 the compiler needs some for
addresses."""


def _over(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _reach(back: bool, tile: int, taps: int, stride: int, dil: int, pad: int) -> tuple[int, int, int]:
    """Which rows (columns) of the source a tile of outputs uses, relative to the tile's first: the first one, the
    number from there to the last, and a bit for each that is used."""
    if back:
        numerators = {j + pad - s * dil for j in range(tile) for s in range(taps)}
        met = {n // stride for n in numerators if n % stride == 0}
    else:
        met = {j * stride + s * dil - pad for j in range(tile) for s in range(taps)}
    first = min(met)
    return first, max(met) - first + 1, sum(1 << (e - first) for e in met)


def _constants(values: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return tuple(values.items())


class DepthwiseTriton(TritonAlgorithm):
    name = "depthwise_triton"

    def why_not_shape(self, problem: ConvProblem) -> str | None:
        p = problem
        if (reason := why_not_depthwise(_WHAT, p)) is not None:
            return reason
        if max(p.R, p.S) > MOST_TAPS:
            return f"{_WHAT} needs a filter of at most {MOST_TAPS}x{MOST_TAPS}; this one is {p.R}x{p.S}."
        if p.direction == Direction.BACKWARD_DATA and max(p.stride) > MOST_STRIDE:
            return f"{_WHAT} needs strides of at most {MOST_STRIDE} for a data gradient; this one has {strides(p)}."
        if max(p.N * p.C * p.H * p.W, p.N * p.K * p.P * p.Q) >= 2**33:
            return f"{_WHAT} needs tensors of fewer than 2**33 elements; one has more."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        """Copies of operands in other layouts, the weight ordered by taps, and the partial sums. The layout of grad_y
        in a weight gradient is not known; it is assumed to need a copy. Operands that do not begin at a multiple of 16
        bytes (some views) are copied as well."""
        p = problem
        streamed = p.y_bytes if p.direction == Direction.BACKWARD_DATA else p.x_bytes
        copied = streamed if p.layout == STRIDED else 0
        if p.direction == Direction.BACKWARD_WEIGHT:
            return copied + p.y_bytes + self._partial_bytes(p)
        return copied + 2 * p.weight_bytes

    # ---- configurations ---------------------------------------------------------------------------------------------

    def configs(self, problem: ConvProblem) -> list[dict[str, Any]]:
        """The configurations that fit into registers, sorted by estimated instructions for the whole problem; if it is
        too small to fill the GPU, by instructions of one thread."""
        costs = {"gather_nhwc": self._cost_nhwc, "gather_nchw": self._cost_nchw, "weight_nhwc": self._cost_weight_nhwc,
                 "weight_nchw": self._cost_weight_nchw}  # fmt: skip
        kernel = self._kernel(problem)
        shipped = launcher.configurations(self.name, kernel)
        judged = [(*costs[kernel](problem, config), index) for index, config in enumerate(shipped)]
        fitting = [j for j in judged if j[0] <= _REGISTERS] or [min(judged)]
        return [shipped[index] for _, _, index in sorted(fitting, key=lambda j: j[1:])]

    def _kernel(self, p: ConvProblem) -> str:
        layout = "nhwc" if p.layout == CHANNELS_LAST else "nchw"
        return f"{'weight' if p.direction == Direction.BACKWARD_WEIGHT else 'gather'}_{layout}"

    def _cost_nhwc(self, p: ConvProblem, config: dict[str, Any]) -> tuple[int, float]:
        c = self._gather_nhwc(p, config)
        lanes = self._lanes_nhwc(c)
        V, wide = int(c["V"]), max(p.element_bytes // 4, 1)
        loads, products = int(c["USED"]).bit_count(), self._products(p, int(c["TQ"]), p.S, p.stride_w)
        row = loads * (V + 8) + p.S * (V + 2) + products * V
        registers = wide * V * (int(c["TQ"]) + p.S) + loads * V * p.element_bytes // 4 + 30
        return registers, (row * p.R + int(c["TQ"]) * (V + 4) + 40) * max(lanes, _ENOUGH_LANES)

    def _cost_nchw(self, p: ConvProblem, config: dict[str, Any]) -> tuple[int, float]:
        c = self._gather_nchw(p, config)
        TP, TQ, wide = int(c["TP"]), int(c["TQ"]), max(p.element_bytes // 4, 1)
        loads = int(c["USED"]).bit_count() * int(c["USED_H"]).bit_count()
        products = self._products(p, TP, p.R, p.stride_h) * self._products(p, TQ, p.S, p.stride_w)
        lanes = self._lanes_nchw(c)
        registers = wide * (TP * TQ + p.R * p.S + int(c["SPAN"])) + 30
        # A load by a warp takes four times as long as a multiplication.
        each = 4 * (loads + p.R * p.S) + products + 4 * TP * TQ + 40
        return registers, each * max(lanes, _ENOUGH_LANES)

    def _cost_weight_nhwc(self, p: ConvProblem, config: dict[str, Any]) -> tuple[int, float]:
        c = self._weight_nhwc(p, config)
        V, TQ, RT, wide = int(c["BP"]) * int(c["BX"]) // _WARP, int(c["TQ"]), int(c["RT"]), max(p.element_bytes // 4, 1)
        loads = int(c["USED"]).bit_count()
        registers = wide * V * (RT * p.S + TQ) + loads * V * p.element_bytes // 4 + 30
        each = TQ * (V + 6) + RT * (loads * (V + 6) + TQ * p.S * V)
        programs = self._weight_programs(c, p)
        done = max(programs * int(c["STEPS"]), _SMS * 8 * int(c["STEPS"]))
        return registers, each * done

    def _cost_weight_nchw(self, p: ConvProblem, config: dict[str, Any]) -> tuple[int, float]:
        c = self._weight_nchw(p, config)
        TP, TQ, RT, wide = int(c["TP"]), int(c["TQ"]), int(c["RT"]), max(p.element_bytes // 4, 1)
        loads = int(c["USED"]).bit_count() * int(c["USED_H"]).bit_count()
        registers = wide * (RT * p.S + TP * TQ + int(c["SPAN"])) + 30
        each = 4 * (loads + TP * TQ) + RT * p.S * TP * TQ
        return registers, each * max(self._weight_programs(c, p), _SMS * 8) * int(c["STEPS"])

    @staticmethod
    def _products(p: ConvProblem, tile: int, taps: int, stride: int) -> int:
        """Products of a tile in one dimension: its outputs, times the taps of each."""
        return tile * _over(taps, stride) if p.direction == Direction.BACKWARD_DATA else tile * taps

    # ---- launches ---------------------------------------------------------------------------------------------------

    def launches(self, problem: ConvProblem, params: Params = None) -> tuple[Launch, ...]:
        p, config = problem, dict(params) if params else self.configs(problem)[0]
        kernel = self._kernel(p)
        if kernel == "gather_nhwc":
            c = self._gather_nhwc(p, config)
            phases = p.stride_h if c["BACK"] else 1
            return (self._launch(kernel, p, (self._lanes_nhwc(c), int(c["LANES"])), phases, c, config),)
        if kernel == "gather_nchw":
            c = self._gather_nchw(p, config)
            return (self._launch(kernel, p, (self._lanes_nchw(c), int(c["LANES"])), 1, c, config),)
        c = self._weight_nhwc(p, config) if kernel == "weight_nhwc" else self._weight_nchw(p, config)
        return (
            Launch(
                MODULE, kernel, (self._weight_programs(c, p), 1, 1), (p.dtype, p.dtype, self._sum_type(p)),
                _constants(c), num_warps=1, num_stages=1,
            ),
            self._sum_parts(p, self._parts(c, p)),
        )  # fmt: skip

    @staticmethod
    def _launch(kernel: str, p: ConvProblem, lanes: tuple[int, int], phases: int, constants: dict[str, Value],
                config: dict[str, Any]) -> Launch:  # fmt: skip
        grid = (_over(*lanes), phases, 1)
        return Launch(MODULE, kernel, grid, (p.dtype,) * 3, _constants(constants), config["num_warps"], num_stages=1)

    @staticmethod
    def _sum_type(p: ConvProblem) -> str:
        return "float64" if p.dtype == "float64" else "float32"

    @staticmethod
    def _common(p: ConvProblem) -> dict[str, Value]:
        return dict(
            N=p.N, M=p.K // p.C, R=p.R, S=p.S, SH=p.stride_h, SW=p.stride_w, DH=p.dil_h, DW=p.dil_w, PT=p.pad_top,
            PL=p.pad_left, WIDE=max(p.N * p.C * p.H * p.W, p.N * p.K * p.P * p.Q) >= SPLIT_ELEMENTS,
            ACC64=p.dtype == "float64",
        )  # fmt: skip

    @classmethod
    def _gather(cls, p: ConvProblem) -> dict[str, Value]:
        back = p.direction == Direction.BACKWARD_DATA
        src, out = (p.y_shape, p.x_shape) if back else (p.x_shape, p.y_shape)
        shapes = dict(zip(("SRC_C", "SRC_H", "SRC_W", "OUT_C", "OUT_H", "OUT_W"), (*src[1:], *out[1:]), strict=True))
        return {**cls._common(p), **shapes, "BACK": back}

    @classmethod
    def _gather_nhwc(cls, p: ConvProblem, config: dict[str, Any]) -> dict[str, Value]:
        c, back = cls._gather(p), p.direction == Direction.BACKWARD_DATA
        tq = _over(config["tq"], p.stride_w) * p.stride_w if back else config["tq"]
        vector = 1 if p.K != p.C else math.gcd(p.C, config["vector_bytes"] // p.element_bytes)
        first, span, used = _reach(back, tq, p.S, p.stride_w, p.dil_w, p.pad_left)
        rows = p.N * (_over(p.H, p.stride_h) if back else p.P)
        unrollable = p.R * p.S * tq * vector <= _MOST_UNROLLED and not (back and (p.stride_h > 1 or p.K != p.C))
        return c | dict(
            K=p.K, R_STEP=p.stride_h // math.gcd(p.stride_h, p.dil_h) if back else 1, LO=first, SPAN=span, USED=used,
            TQ=tq, V=vector, CI=_side_by_side(int(c["OUT_C"]) // vector, vector * p.element_bytes),
            BH=min(config["rows"], rows), LANES=_WARP * config["num_warps"],
            UNROLL=bool(config["unroll"]) and unrollable,
        )  # fmt: skip

    @staticmethod
    def _lanes_nhwc(c: dict[str, Value]) -> int:
        phases = int(c["SH"]) if c["BACK"] else 1
        rows = int(c["N"]) * _over(int(c["OUT_H"]), phases)
        strips = _over(rows, int(c["BH"]))
        return strips * int(c["BH"]) * _over(int(c["OUT_W"]), int(c["TQ"])) * int(c["OUT_C"]) // int(c["V"])

    @classmethod
    def _gather_nchw(cls, p: ConvProblem, config: dict[str, Any]) -> dict[str, Value]:
        c, back = cls._gather(p), p.direction == Direction.BACKWARD_DATA
        tp, tq = config["tp"], config["tq"]
        if back:
            tp, tq = _over(tp, p.stride_h) * p.stride_h, _over(tq, p.stride_w) * p.stride_w
        first_h, span_h, used_h = _reach(back, tp, p.R, p.stride_h, p.dil_h, p.pad_top)
        first, span, used = _reach(back, tq, p.S, p.stride_w, p.dil_w, p.pad_left)
        return c | dict(
            LO_H=first_h, SPAN_H=span_h, USED_H=used_h, LO=first, SPAN=span, USED=used, TP=tp, TQ=tq,
            LANES=_WARP * config["num_warps"],
        )  # fmt: skip

    @staticmethod
    def _lanes_nchw(c: dict[str, Value]) -> int:
        tiles = _over(int(c["OUT_H"]), int(c["TP"])) * _over(int(c["OUT_W"]), int(c["TQ"]))
        return int(c["N"]) * int(c["OUT_C"]) * tiles

    @classmethod
    def _weight(cls, p: ConvProblem) -> dict[str, Value]:
        return cls._common(p) | dict(C=p.C, H=p.H, W=p.W, K=p.K, P=p.P, Q=p.Q)

    @staticmethod
    def _rows_at_once(p: ConvProblem, sums: int, V: int) -> int:
        """Rows of the filter whose sums one program holds, chosen so that all programs have about the same number."""
        groups = _over(p.R, max(1, sums // (p.S * V)))
        return _over(p.R, groups)

    @classmethod
    def _weight_nhwc(cls, p: ConvProblem, config: dict[str, Any]) -> dict[str, Value]:
        _, span, used = _reach(False, config["tq"], p.S, p.stride_w, p.dil_w, 0)
        rt = cls._rows_at_once(p, config["sums"], config["bp"] * config["bx"] // _WARP)
        c = cls._weight(p) | dict(
            SPAN=span, USED=used, TQ=config["tq"], BP=config["bp"], BX=config["bx"], RT=rt, STEPS=1
        )
        return c | dict(STEPS=cls._steps(c, p))

    @classmethod
    def _weight_nchw(cls, p: ConvProblem, config: dict[str, Any]) -> dict[str, Value]:
        rt = cls._rows_at_once(p, config["sums"], 1)
        _, span_h, used_h = _reach(False, config["tp"], rt, p.stride_h, p.dil_h, 0)
        _, span, used = _reach(False, config["tq"], p.S, p.stride_w, p.dil_w, 0)
        c = cls._weight(p) | dict(
            SPAN_H=span_h, USED_H=used_h, SPAN=span, USED=used, TP=config["tp"], TQ=config["tq"], LANES=_WARP, RT=rt,
            STEPS=1,
        )  # fmt: skip
        return c | dict(STEPS=cls._steps(c, p))

    @staticmethod
    def _blocks(c: dict[str, Value], p: ConvProblem) -> tuple[int, int]:
        """For a weight gradient: programs per part, and blocks of outputs that the parts share."""
        groups = _over(p.R, int(c["RT"]))
        tiles = _over(p.Q, int(c["TQ"]))
        if "BX" in c:
            return groups * _over(p.K, int(c["BX"])), _over(p.N * p.P * tiles, int(c["BP"]))
        return groups * p.K, _over(p.N * _over(p.P, int(c["TP"])) * tiles, _WARP)

    @classmethod
    def _steps(cls, c: dict[str, Value], p: ConvProblem) -> int:
        """Blocks per part: enough parts to fill the GPU, but no more partial sums than are allowed."""
        programs, blocks = cls._blocks(c, p)
        size = p.K * p.R * p.S * (8 if p.dtype == "float64" else 4)
        most = max(1, min(_MOST_PARTIAL_BYTES // size, _over(blocks, _FEWEST_STEPS)))
        return _over(blocks, min(most, _over(_SMS * _ENOUGH_PARTS, programs)))

    @classmethod
    def _parts(cls, c: dict[str, Value], p: ConvProblem) -> int:
        return _over(cls._blocks(c, p)[1], int(c["STEPS"]))

    @classmethod
    def _weight_programs(cls, c: dict[str, Value], p: ConvProblem) -> int:
        return cls._blocks(c, p)[0] * cls._parts(c, p)

    @staticmethod
    def _partial_bytes(p: ConvProblem) -> int:
        size = p.K * p.R * p.S * (8 if p.dtype == "float64" else 4)
        return max(size, _MOST_PARTIAL_BYTES // size * size)

    @classmethod
    def _sum_parts(cls, p: ConvProblem, parts: int) -> Launch:
        block, at_once = 32, min(32, 1 << (parts - 1).bit_length())
        constants: dict[str, Value] = dict(
            PARTS=parts, TAPS=p.R * p.S, K=p.K, BLOCK=block, AT_ONCE=at_once, ACC64=p.dtype == "float64"
        )
        grid = (_over(p.K * p.R * p.S, block), 1, 1)
        return Launch(MODULE, "sum_parts", grid, (cls._sum_type(p), p.dtype), _constants(constants), 4, num_stages=1)

    # ---- the three directions ---------------------------------------------------------------------------------------

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gathered(x, weight, problem, params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._gathered(grad_y, weight, problem, params)

    def _gathered(self, src: Tensor, weight: Tensor, p: ConvProblem, params: Params) -> Tensor:
        (launch,) = self.launches(p, params)
        out = torch.empty(p.result_shape, dtype=src.dtype, device=src.device, memory_format=_format(p))
        weight = weight.reshape(p.K, p.R * p.S)
        if p.layout == CHANNELS_LAST:
            weight = weight.t()
        launcher.run(launch, _dense(src, p), launcher.aligned(weight.contiguous()), out)
        return out

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p, (products, total) = problem, self.launches(problem, params)
        sum_type = getattr(torch, self._sum_type(p))
        parts = dict(total.constants)["PARTS"]
        partial = torch.empty((int(parts), p.R * p.S, p.K), dtype=sum_type, device=x.device)
        out = torch.empty(p.weight_shape, dtype=x.dtype, device=x.device)
        launcher.run(products, _dense(x, p), _dense(grad_y, p), partial)
        launcher.run(total, partial, out)
        return out


def _side_by_side(vectors: int, vector_bytes: int) -> int:
    """How many of a pixel's vectors of channels neighbouring threads take: a divisor of their number, at most a cache
    line (128 bytes), unless only a larger one fills half a line."""
    divisors = [d for d in range(1, vectors + 1) if vectors % d == 0]
    best = max(d for d in divisors if d == 1 or d * vector_bytes <= 128)
    if best * vector_bytes >= 64:
        return best
    return min((d for d in divisors if d * vector_bytes >= 64), default=vectors)


def _format(p: ConvProblem) -> torch.memory_format:
    return torch.channels_last if p.layout == CHANNELS_LAST else torch.contiguous_format


def _dense(t: Tensor, p: ConvProblem) -> Tensor:
    return launcher.aligned(t.contiguous(memory_format=_format(p)))


ALGORITHMS = (DepthwiseTriton(),)
