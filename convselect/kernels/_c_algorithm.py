"""Base class of the algorithms of `csrc/`: one C kernel computes all three directions, and adds the bias."""

from __future__ import annotations

from torch import Tensor

from convselect.base.problem import CHANNELS_LAST, ConvProblem, Direction
from convselect.kernels import _library
from convselect.kernels._common import add_bias
from convselect.kernels._contract import Algorithm, Params
from convselect.kernels._tuning import in_order, in_slots


def why_not_in_c(what: str, problem: ConvProblem) -> str | None:
    """A sentence about `what` if the C kernels cannot compute this problem (wrong device or element type, or no
    library); None if they may."""
    if problem.device != "cpu":
        return f"{what} runs on CPUs; this problem is on {problem.device}."
    if problem.dtype == "float64":
        return f"{what} computes in float32; this problem is in float64."
    if not _library.available():
        return f"{what} needs the C kernels, which this installation was built without."
    return None


_MOST_STRIDE = 8


def why_not_in_steps(what: str, problem: ConvProblem) -> str | None:
    """A sentence about `what`, a user of csrc/direct_volume.inc, if that has too few classes of outputs for the stride
    of a data gradient; None if not, and for images."""
    p = problem
    if p.is_volume and p.direction == Direction.BACKWARD_DATA and max(p.stride_d, *p.stride) > _MOST_STRIDE:
        stride = f"{p.stride_d}x{p.stride_h}x{p.stride_w}"
        return f"{what} needs strides of at most {_MOST_STRIDE} for a volume's grad-input; this one has {stride}."
    return None


class CAlgorithm(Algorithm):
    """One kernel of the C library; problems that it cannot compute may run in PyTorch operations (`_without_c`)."""

    kernel: str
    """The kernel's name in csrc/kernels.h; the function `<kernel>_bytes` returns the size of its scratch memory."""
    slots: tuple[str, ...]
    """Parameters in the order of the kernel's slots of `cs_conv.tune`: csrc/convselect.h."""
    volume_kernel: str = ""
    """The same for volumes, if `dimensions` has 3; it takes the same integers."""
    volumes_in_ncdhw: bool = False
    """Whether that kernel reads and writes NCDHW order only: other operands are copied."""
    in_c = True
    leading_ints: tuple[int, ...] = ()
    """Integers that the kernel takes ahead of its operands."""

    def _in_c(self, problem: ConvProblem, params: Params = None) -> tuple[int, ...] | None:
        """`leading_ints` for this problem; None if the kernel does not compute it."""
        return self.leading_ints if problem.dtype != "float64" and _library.available() else None

    def _without_c(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params) -> Tensor:
        raise NotImplementedError(f"{self.name} does not compute {problem} without the C kernels")

    def _bytes_without_c(self, problem: ConvProblem, params: Params) -> int:
        raise NotImplementedError(f"{self.name} does not compute {problem} without the C kernels")

    def _tune(self, problem: ConvProblem, params: Params) -> tuple[int, ...]:
        return in_slots(self, problem, params, self.slots)

    def batch_invariant(self, problem: ConvProblem) -> bool:
        return self._in_c(problem) is not None  # a result's place in its image alone decides the order of its sum

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        leading_ints = self._in_c(problem, params)
        if leading_ints is None:
            return self._bytes_without_c(problem, params)
        tune = in_order(params, self.slots) if params else ()
        p = problem
        if not p.is_volume:
            return _library.workspace_bytes(f"{self.kernel}_bytes", p, leading_ints, tune)
        needed, copied = _library.workspace_bytes(f"{self.volume_kernel}_bytes", p, leading_ints, tune), 0
        if self.volumes_in_ncdhw and CHANNELS_LAST in (p.layout, p.weight_layout):
            copied = p.x_bytes + p.weight_bytes + p.y_bytes  # two of them
        return needed + copied

    def run(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        tune = () if params is None else self._tune(problem, params)
        leading_ints = self._in_c(problem, params)
        if leading_ints is None:
            return self._without_c(a, b, problem, params)
        if a.dim() == 5:
            return _library.call(self.volume_kernel, *self._ordered(a, b), problem, leading_ints, tune=tune)
        return _library.call(self.kernel, a, b, problem, leading_ints, tune=tune)

    def _ordered(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a.contiguous(), b.contiguous()) if self.volumes_in_ncdhw else (a, b)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor | None:
        leading_ints = self._in_c(problem, params)
        if leading_ints is None:
            return super().run_checked(a, b, problem, params, bias)
        if bias is not None and problem.direction != Direction.FORWARD:  # the kernels add it to y only
            result = self.run_checked(a, b, problem, params)
            return None if result is None else add_bias(result, bias)
        tune = () if params is None else self._tune(problem, params)
        kernel = self.kernel
        if a.dim() == 5:
            kernel, (a, b) = self.volume_kernel, self._ordered(a, b)
        out, finite = _library.call_checked(kernel, a, b, problem, leading_ints, bias, tune=tune)
        return out if finite else None

    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self.run(x, weight, problem.with_direction(Direction.FORWARD), params)

    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self.run(grad_y, weight, problem.with_direction(Direction.BACKWARD_DATA), params)

    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        return self.run(x, grad_y, problem.with_direction(Direction.BACKWARD_WEIGHT), params)
