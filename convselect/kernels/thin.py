"""Few input or output channels: C kernels vectorised over the rows of the image (csrc/thin.inc).

    forward          y[n, k, p, q] = sum over c, r, s of w[k, c, r, s] * x[n, c, p', q'],
                     p' = p * stride_h + r * dil_h - pad_top, q' alike
    backward data    the same sum with input and output exchanged, one phase of the stride at a time
    backward weight  grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] * x[n, c, p', q']

Image processing has one channel or three, super-resolution ends in three, flow begins with two; blurs are a row of taps
and then a column. Vectors of channels would be nearly empty, and a matrix product of such a depth or width is a copy of
the image for every tap. Here a vector is a run of neighbouring pixels of one row, which each tap meets at its own
distance; a register tile of some channels times some vectors takes the whole sum. Image pipelines vectorise filters
like that (Ragan-Kelley et al., "Halide", PLDI 2013); here a loaded pixel meets several output channels besides. 16-bit
operands are widened as their rows are copied, summed in float32 and rounded once.
"""

from __future__ import annotations

import functools

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels._c_algorithm import CAlgorithm, why_not_in_c
from convselect.kernels._contract import Grade
from convselect.kernels._space import Parameter, Space, Values
from convselect.kernels._tuning import within

MOST_CHANNELS = 16
"""Input or output channels, whichever are fewer: with more, vectors of channels are as full."""

_OUTPUTS, _VECTORS = Parameter("outputs", (1, 2, 3, 4)), Parameter("vectors", (1, 2, 3, 4, 6, 8))
_PIXELS = Parameter("pixels", (128, 256, 512, 1024, 2048))


class Thin(CAlgorithm):
    """Parameters: `outputs`, the most channels of a register tile (in a weight gradient those of grad_y). Forward and
    data gradient: `vectors`, the most vectors of pixels in it. Weight gradient: `pixels`, how many of grad_y a tile
    sums up at a time.
    """

    name = "thin"
    kernel = "cs_thin"
    slots = ("outputs", "vectors", "pixels")

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.groups > 1:
            return f"The thin kernel needs a single group; this convolution has {p.groups}."
        fewest = min(p.C, p.K)
        if fewest > MOST_CHANNELS:
            return (
                f"The thin kernel needs at most {MOST_CHANNELS} input or output channels; "
                f"this convolution has {p.C} and {p.K}."
            )
        return why_not_in_c("The thin kernel", p)

    def error_grade(self, problem: ConvProblem) -> Grade:
        return Grade.DIRECT

    def space(self, problem: ConvProblem) -> Space:
        return _space(self, problem.direction == Direction.BACKWARD_WEIGHT)


@functools.cache
def _space(algorithm: Thin, gradient: bool) -> Space:
    parameters: tuple[Parameter, ...] = (_OUTPUTS, _PIXELS if gradient else _VECTORS)
    usual: Values = {"outputs": 4, "pixels": 512} if gradient else {"outputs": 4, "vectors": 8}

    def allowed(problem: ConvProblem, values: Values) -> bool:
        return within(algorithm, problem, usual, values)

    return Space(parameters, lambda _: usual, allowed)


ALGORITHMS = (Thin(),)
