"""The interface of every algorithm in the pool. To add an algorithm, write one file that implements it and add one line
to `kernels/pool.py`; dispatch, tests, collector and benchmarks find it there."""

from __future__ import annotations

import enum
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._common import add_bias
from convselect.kernels._range import carries
from convselect.kernels._space import Space

Params = Mapping[str, Any] | None


class Grade(enum.IntEnum):
    """How an algorithm's rounding error compares with a direct sum (relative L2 against float64, in float32).

    A precision budget admits every grade up to its own: "exact" DIRECT, and of these only `Algorithm.direct_sums`;
    "native" NEAR, "fast" LOOSE. A weight gradient, which is a sum over the batch and all pixels, may have twice the
    error.
    """

    DIRECT = 0  # a direct sum in any order, or an algorithm that rounds as little: mostly below 1e-6
    NEAR = 1  # in a network about as far from native as native's layouts are from each other
    CLOSE = 2
    LOOSE = 3


MOST_ERROR = {Grade.DIRECT: 2.5e-6, Grade.NEAR: 3e-6, Grade.CLOSE: 1e-5, Grade.LOOSE: 2e-5}
GRADE_OF_PRECISION = {"exact": Grade.DIRECT, "native": Grade.NEAR, "fast": Grade.LOOSE}


class NotApplicable(RuntimeError):
    """An explicitly requested algorithm cannot do this problem; the message is its `why_not` sentence."""


class Algorithm(ABC):
    """One way to compute one problem.

    x is (N, C, H, W), weight (K, C/groups, R, S), y (N, K, P, Q), of volumes (N, C, D, H, W), (K, C/groups, T, R, S)
    and (N, K, O, P, Q), if `dimensions` has 3; `problem` describes exactly these tensors, but strides are the caller's:
    any. Results may have any strides; dispatch restores aten's. All operands have `problem.dtype`, and so has the
    result. No argument is modified. Nothing derived from a weight is kept.
    """

    name: str
    """Stored on disk: never changes."""
    revision: int = 1
    """Raise it when the implementation changes so much that old measurements are no longer valid."""
    automatic: bool = True
    """False: runs only when forced by name (the reference)."""
    dimensions: frozenset[int] = frozenset({2})
    """Dimensions of the images that it takes: 3 are volumes. `why_not` of algorithms that do not list 3 is never asked
    about one (`__init_subclass__`)."""
    devices: frozenset[str] = frozenset({"cpu"})
    """Kinds of device that it has an implementation for; `why_not` gives the reason for others."""
    spreads_nonfinite: bool = False
    """True if one NaN or infinity in an activation reaches results that a direct sum would leave finite
    (transform methods). Dispatch then checks the result and hands such a call to native. (Infinite weights do not
    count: whether a weight that meets only padding gives 0 * inf differs between instruction sets even in native.)"""

    direct_sums: bool = True
    """Whether every result is the sum of its own products, in some order. Then a window of zeros gives 0, whole numbers
    are added exactly (up to 2**24 in float32), and a sum of products that are not negative is not negative. False for
    transform methods: they add values that a result does not depend on and subtract them again, which leaves rounding
    errors. precision="exact" admits direct sums only; a test feeds every algorithm such data."""

    may_be_unready: bool = False
    """Whether `ready` has to be asked before each automatic call: something may have to be compiled first, or a
    process-wide switch may rule the algorithm out. False saves a cached call the question."""

    in_c: bool = False
    """Whether it is a kernel of the C library, which can be called without Python (`eager/cached.py`)."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Whoever was written for images need not know that there are volumes."""
        super().__init_subclass__(**arguments)
        if "why_not" in vars(cls):
            cls.why_not = _of_known_dimensions(cls.why_not)  # type: ignore[method-assign]

    @abstractmethod
    def why_not(self, problem: ConvProblem) -> str | None:
        """None if the algorithm applies; otherwise one sentence for the user (capital letter, full stop) that names the
        requirement first: 'Winograd needs stride 1; this convolution has stride 2x2.'"""

    def same_as_native(self, problem: ConvProblem) -> str | None:
        """One sentence, of the same form, if this algorithm applies but would do just what native does; otherwise None.
        Automatic choice and the collector then skip it, while a forced request still runs."""
        return None

    @abstractmethod
    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        """Upper bound on the peak memory of `run` with `params`, in bytes, without operands and result. `params` are
        not checked; one bound may hold for all of them."""

    @abstractmethod
    def error_grade(self, problem: ConvProblem) -> Grade: ...

    def deterministic(self, problem: ConvProblem) -> bool:
        """Whether two runs on the same operands, with the same number of threads, give the same bits; a test runs every
        algorithm several times. Others are refused if PyTorch's deterministic algorithms are switched on."""
        return True

    def batch_invariant(self, problem: ConvProblem) -> bool:
        """Whether each image of a batch gets bit for bit the result that it gets alone, in the forward direction and
        in that of grad-input. True only if a test has shown it; otherwise a batch that has to be invariant is computed
        image by image."""
        return False

    @abstractmethod
    def forward(self, x: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        """y = x * weight, without bias."""

    @abstractmethod
    def backward_data(self, grad_y: Tensor, weight: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        """grad_x, shaped (N, C, H, W)."""

    @abstractmethod
    def backward_weight(self, x: Tensor, grad_y: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        """grad_weight, shaped (K, C/groups, R, S)."""

    def space(self, problem: ConvProblem) -> Space | None:
        """The values that `params` may take on this problem; None if there are no parameters. `params=None` means the
        default of the space."""
        return None

    def ready(self, problem: ConvProblem, params: Params = None) -> bool:
        """Whether a call would run at once; asked only if `may_be_unready`. If something has to be compiled first, this
        starts compiling in the background and returns False; an automatic choice then runs native. Never waits."""
        return True

    def run(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        """The direction `problem` names, on its two operands in the order of the signatures above."""
        if problem.direction == Direction.FORWARD:
            return self.forward(a, b, problem, params)
        if problem.direction == Direction.BACKWARD_DATA:
            return self.backward_data(a, b, problem, params)
        return self.backward_weight(a, b, problem, params)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor | None:
        """What dispatch calls: `run`, plus `bias`: (K,) in the forward direction, (C,) for grad-input, which is what a
        transposed convolution computes. None if `spreads_nonfinite` and the result holds an infinity or a NaN, or the
        operands a value that may spoil results that do not see it; the call then has to run native instead.

        Algorithms whose kernels add the bias or do the check override this; here each is one more pass over the result.
        """
        result = self.run(a, b, problem, params)
        if self.spreads_nonfinite and not (is_finite(result) and carries(a, b, problem)):
            return None
        return result if bias is None else add_bias(result, bias)

    def __repr__(self) -> str:
        return f"<convselect algorithm {self.name}>"


def _of_known_dimensions(why_not: Callable[[Any, ConvProblem], str | None]) -> Callable[..., str | None]:
    @functools.wraps(why_not)
    def asked(self: Algorithm, problem: ConvProblem) -> str | None:
        if problem.is_volume and 3 not in self.dimensions:
            return f"{self.name} needs images; this convolution has {problem.D} slices and {problem.T} depth taps."
        return why_not(self, problem)

    return asked


def is_finite(t: Tensor) -> bool:
    """Whether all values are finite, by one sum; a sum that overflows merely costs a native run. Always True on a GPU,
    which would have to synchronise to answer: there infinities and NaNs may spread further than in native."""
    if not t.is_cpu:
        return True
    return math.isfinite(t.sum(dtype=torch.float32 if t.element_size() == 2 else None).item())
