"""PyTorch's own convolutions on NVIDIA GPUs, called in other ways than `torch.conv2d` does.

    cudnn_benchmark    cuDNN, whose engine is found by timing the candidates once per shape instead of by its heuristics
    cudnn_depthwise    cuDNN, if PyTorch would use its own depthwise kernel
    native_depthwise   PyTorch's own depthwise kernel, if it would use cuDNN
    padded_channels    channels filled up with zeros to multiples of 8, without which 16-bit tensor cores stay idle
    split_batch        the batch in parts whose tensors have fewer than 2**31 elements, the limit of fast engines

No kernel is written here; which of these is fastest differs by shape, element type and cuDNN's version. The operators
take cuDNN's switches as arguments. Only weight gradients go through `aten::convolution_backward`, which reads the
process-wide switches, so those are set for the length of the call.
"""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction
from convselect.kernels import _cuda_flags
from convselect.kernels._common import why_not_depthwise
from convselect.kernels._contract import Algorithm, Grade, Params
from convselect.kernels._native_ops import (
    even_padding,
    native_backward_data,
    native_backward_weight,
    native_forward,
    native_workspace_bytes,
)

SPLIT_ELEMENTS = 2**31
"""cuDNN's fast engines index with 32 bits."""
CHANNEL_STEP = 8
"""16 bytes of 16-bit channels: what tensor cores load at a time."""
SEARCH_BYTES = 256 * 2**20
"""Assumed workspace of cuDNN while it searches; PyTorch gives an engine what it asks for if there is enough memory."""

REMEMBERED = 10_000
"""Searches that are cached; PyTorch keeps the same number."""

_aten = torch.ops.aten


def largest_operand(problem: ConvProblem) -> int:
    """Elements of the larger activation."""
    p = problem
    return max(p.N * p.C * p.H * p.W, p.N * p.K * p.P * p.Q)


def _not_cudnn(problem: ConvProblem, limit: int = SPLIT_ELEMENTS) -> str | None:
    """A sentence why cuDNN's operators cannot be called on this problem; None if they can. On a machine without a GPU,
    the answer for a problem on a GPU depends on its shapes alone."""
    if problem.device != "cuda":
        return f"The cuDNN library needs an NVIDIA GPU; this problem is on {problem.device}."
    if torch.version.hip is not None:
        return "The cuDNN library needs an NVIDIA GPU; this PyTorch is built for AMD GPUs."
    if torch.cuda.is_available() and not (torch.backends.cudnn.is_available() and torch._C._get_cudnn_enabled()):
        return "The cuDNN library needs to be there and enabled; it is missing or switched off."
    if largest_operand(problem) >= limit:
        return f"The cuDNN library needs tensors of fewer than {limit} elements; PyTorch splits larger ones."
    return None


def _memory_format(problem: ConvProblem) -> torch.memory_format:
    """The one that PyTorch gives cuDNN: channels_last if either operand is."""
    last = CHANNELS_LAST in (problem.layout, problem.weight_layout)
    return torch.channels_last if last else torch.contiguous_format


# ---- cuDNN called by name ---------------------------------------------------------------------------------------


def cudnn_forward(x: Tensor, weight: Tensor, problem: ConvProblem, benchmark: bool) -> Tensor:
    """y by `aten::cudnn_convolution`."""
    padding, rest = even_padding(problem)
    if rest is not None:
        x = F.pad(x, rest)
    format = _memory_format(problem)
    return _aten.cudnn_convolution(  # type: ignore[no-any-return]
        x.contiguous(memory_format=format), weight.contiguous(memory_format=format), padding, problem.stride,
        problem.dilation, problem.groups, benchmark, _deterministic(problem), problem.tf32,
    )  # fmt: skip


def cudnn_backward_data(grad_y: Tensor, weight: Tensor, problem: ConvProblem, benchmark: bool) -> Tensor:
    """grad_x by `aten::cudnn_convolution_transpose`, which is the same call of cuDNN."""
    p = problem
    padding, rest = even_padding(p)
    left, right, top, bottom = rest or (0, 0, 0, 0)
    extents, sizes = p.kernel_extent, (p.H + top + bottom, p.W + left + right)
    # Rows and columns at the end of each axis that the strides do not reach.
    over = [
        size - ((out - 1) * stride - 2 * pad + extent)
        for size, out, stride, pad, extent in zip(sizes, (p.P, p.Q), p.stride, padding, extents, strict=True)
    ]
    format = _memory_format(p)
    grad: Tensor = _aten.cudnn_convolution_transpose(
        grad_y.contiguous(memory_format=format), weight.contiguous(memory_format=format), padding, over, p.stride,
        p.dilation, p.groups, benchmark, _deterministic(p), p.tf32,
    )  # fmt: skip
    return grad if rest is None else grad[:, :, top : top + p.H, left : left + p.W]


def _deterministic(problem: ConvProblem) -> bool:
    return problem.deterministic or _cuda_flags.deterministic()


class CudnnBenchmark(Algorithm):
    """The search happens at the first call of a shape in each thread, as PyTorch keeps its results per thread."""

    name = "cudnn_benchmark"
    devices = frozenset({"cuda"})

    def __init__(self) -> None:
        self._local = threading.local()

    def why_not(self, problem: ConvProblem) -> str | None:
        reason = _not_cudnn(problem)
        if reason is not None:
            return reason
        if problem.deterministic:
            return "A search by time may end differently in every process; deterministic results are required."
        if problem.is_depthwise and problem.direction == Direction.BACKWARD_WEIGHT and not _in_cudnn(problem):
            return "A search needs cuDNN; PyTorch computes this weight gradient with a kernel of its own."
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        return native_workspace_bytes(problem) + SEARCH_BYTES

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def _may_search(self, problem: ConvProblem, *operands: Tensor) -> bool:
        """Whether benchmarking can be on. A search during the capture of a CUDA graph would break it; a search that is
        already cached does not. PyTorch caches results by shapes and by the operands' alignment."""
        searched: set[object] = self._local.__dict__.setdefault("searched", set())
        key = (problem, operands[0].device.index, *(t.data_ptr() % 16 for t in operands))
        if _cuda_flags.capturing():
            return key in searched
        if len(searched) >= REMEMBERED:
            searched.clear()
        searched.add(key)
        return True

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return cudnn_forward(x, weight, problem, self._may_search(problem, x, weight))

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return cudnn_backward_data(grad_y, weight, problem, self._may_search(problem, grad_y, weight))

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        with _cuda_flags.benchmark(self._may_search(problem, x, grad_y)):
            return native_backward_weight(x, grad_y, problem)


# ---- depthwise: cuDNN's or PyTorch's own ------------------------------------------------------------------------


def _in_cudnn(problem: ConvProblem) -> bool:
    """Whether PyTorch certainly hands this depthwise problem to cuDNN: it does in channels_last. (In the other layout
    a table of float16 shapes in its source decides.)"""
    return _memory_format(problem) == torch.channels_last


class CudnnDepthwise(Algorithm):
    """cuDNN with its heuristics, in the layout the operands have."""

    name = "cudnn_depthwise"
    devices = frozenset({"cuda"})

    def why_not(self, problem: ConvProblem) -> str | None:
        if (reason := why_not_depthwise("This cuDNN kernel", problem)) is not None:
            return reason
        if problem.direction == Direction.BACKWARD_WEIGHT and not _in_cudnn(problem):
            return "A depthwise weight gradient needs channels_last to reach cuDNN; this one is in NCHW."
        return _not_cudnn(problem)

    def same_as_native(self, problem: ConvProblem) -> str | None:
        return "PyTorch gives channels_last depthwise convolutions to cuDNN already." if _in_cudnn(problem) else None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        return native_workspace_bytes(problem) + SEARCH_BYTES

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return cudnn_forward(x, weight, problem, False)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return cudnn_backward_data(grad_y, weight, problem, False)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return native_backward_weight(x, grad_y, problem)


class NativeDepthwise(Algorithm):
    """PyTorch's depthwise kernel, for NCHW only; gradients by `aten::convolution_backward` with cuDNN switched off."""

    name = "native_depthwise"
    devices = frozenset({"cuda"})

    def why_not(self, problem: ConvProblem) -> str | None:
        if (reason := why_not_depthwise("PyTorch's depthwise kernel", problem)) is not None:
            return reason
        if problem.device != "cuda":
            return f"PyTorch's depthwise kernel needs a GPU; this problem is on {problem.device}."
        if largest_operand(problem) >= SPLIT_ELEMENTS:
            return "PyTorch's depthwise kernel needs tensors of fewer than 2**31 elements; it indexes with 32 bits."
        return None

    def same_as_native(self, problem: ConvProblem) -> str | None:
        p = problem
        if not _in_cudnn(p) and (p.dtype != "float16" or max(p.R, p.S) > 5 or p.dilation != (1, 1)):
            return "PyTorch takes its own depthwise kernel already."
        return None

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        return native_workspace_bytes(problem)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = problem
        padding, rest = even_padding(p)
        if rest is not None:
            x = F.pad(x, rest)
        return _aten._conv_depthwise2d(  # type: ignore[no-any-return]
            x.contiguous(), weight.contiguous(), (p.R, p.S), None, p.stride, padding, p.dilation
        )

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        with _cuda_flags.cudnn_enabled(False):
            return native_backward_data(grad_y.contiguous(), weight.contiguous(), _contiguous(problem))

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        with _cuda_flags.cudnn_enabled(False):
            return native_backward_weight(x.contiguous(), grad_y.contiguous(), _contiguous(problem))


def _contiguous(problem: ConvProblem) -> ConvProblem:
    return problem._replace(layout="contiguous", weight_layout="contiguous")


# ---- rewritten for cuDNN ----------------------------------------------------------------------------------------


class PaddedChannels(Algorithm):
    """Pads channels with zeros: extra input channels add nothing to any sum, extra output channels are cut off."""

    name = "padded_channels"
    devices = frozenset({"cuda"})

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.device != "cuda":
            return f"Padding channels needs a GPU with tensor cores; this problem is on {problem.device}."
        if p.element_bytes != 2:
            return f"Padding channels needs 16-bit tensors; {problem.dtype} gains nothing from aligned channels."
        if p.groups != 1:
            return f"Padding channels needs one group; this convolution has {problem.groups}."
        if p.C % CHANNEL_STEP == 0 and p.K % CHANNEL_STEP == 0:
            return f"Padding channels needs channels to pad; they are multiples of {CHANNEL_STEP} already."
        return None

    def _padded(self, problem: ConvProblem) -> ConvProblem:
        return problem._replace(C=_up(problem.C), K=_up(problem.K))

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        p = self._padded(problem)
        return native_workspace_bytes(p) + p.x_bytes + p.y_bytes + 2 * p.weight_bytes

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = self._padded(problem)
        y = native_forward(_filled(x, p.N, p.C), _filled(weight, p.K, p.C), p)
        return y[:, : problem.K]

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = self._padded(problem)
        grad = native_backward_data(_filled(grad_y, p.N, p.K), _filled(weight, p.K, p.C), p)
        return grad[:, : problem.C]

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        p = self._padded(problem)
        grad = native_backward_weight(_filled(x, p.N, p.C), _filled(grad_y, p.N, p.K), p)
        return grad[: problem.K, : problem.C]


def _up(channels: int) -> int:
    return -(-channels // CHANNEL_STEP) * CHANNEL_STEP


def _filled(t: Tensor, first: int, second: int) -> Tensor:
    """The tensor with its first two dimensions filled up with zeros to these sizes, in its own layout."""
    if t.shape[:2] == (first, second):
        return t
    last = not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
    format = torch.channels_last if last else torch.contiguous_format
    filled = torch.empty(
        (first, second, *t.shape[2:]), dtype=t.dtype, device=t.device, memory_format=format
    )  # zeros only in the parts that are not copied
    filled[: t.shape[0], : t.shape[1]] = t
    filled[: t.shape[0], t.shape[1] :] = 0
    filled[t.shape[0] :] = 0
    return filled


class SplitBatch(Algorithm):
    """Native on parts of the batch, each with fewer than `limit` elements per activation."""

    name = "split_batch"
    devices = frozenset({"cuda"})

    def __init__(self, limit: int = SPLIT_ELEMENTS, devices: frozenset[str] = devices) -> None:
        self._limit, self.devices = limit, devices

    def why_not(self, problem: ConvProblem) -> str | None:
        if problem.device not in self.devices:
            return f"Splitting a batch needs a GPU's engines, which index with 32 bits; this is on {problem.device}."
        if largest_operand(problem) < self._limit:
            return f"Splitting a batch needs a tensor of {self._limit} elements or more; none is so large here."
        if problem.N < 2 or largest_operand(problem._replace(N=1)) >= self._limit:
            return f"Splitting a batch needs images of fewer than {self._limit} elements; a single image has more."
        return None

    def _parts(self, problem: ConvProblem) -> list[slice]:
        images = (self._limit - 1) // largest_operand(problem._replace(N=1))
        parts = -(-problem.N // images)
        images = -(-problem.N // parts)  # of about the same size
        return [slice(first, min(first + images, problem.N)) for first in range(0, problem.N, images)]

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        part = self._parts(problem)[0]
        one = problem._replace(N=part.stop - part.start)
        result = one.y_bytes if problem.direction == Direction.FORWARD else one.x_bytes
        return native_workspace_bytes(one) + result + (2 * problem.weight_bytes + 8 * problem.weight_bytes)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def _by_parts(self, a: Tensor, b: Tensor, problem: ConvProblem) -> Tensor:
        last = problem.layout == CHANNELS_LAST
        result = torch.empty(
            problem.result_shape, dtype=a.dtype, device=a.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )  # fmt: skip
        function = native_forward if problem.direction == Direction.FORWARD else native_backward_data
        for part in self._parts(problem):
            result[part] = function(a[part], b, problem._replace(N=part.stop - part.start))
        return result

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._by_parts(x, weight, problem)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self._by_parts(grad_y, weight, problem)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        total: Tensor | None = None
        for part in self._parts(problem):
            grad = native_backward_weight(x[part], grad_y[part], problem._replace(N=part.stop - part.start))
            # Each part comes rounded to 16 bits; at least their sum is not rounded once per part.
            grad = grad.float() if problem.element_bytes == 2 else grad
            total = grad if total is None else total.add_(grad)
        assert total is not None
        return total.to(x.dtype)


ALGORITHMS = (CudnnBenchmark(), CudnnDepthwise(), NativeDepthwise(), PaddedChannels(), SplitBatch())
