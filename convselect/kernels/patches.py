"""Gradients of patches and stems in C, where the image lies: `csrc/patches.inc`.

*Patches*: kernel = stride, no padding, as vision transformers, ConvNeXt and Swin cut an image into, so that windows
neither overlap nor leave gaps. Their grad-input is one matrix product

    grad_x[n, c, p stride_h + r, q stride_w + s] = sum over k of grad_y[n, k, p, q] w[k, c, r, s]

whose result is stored where the pixels lie, without col2im. *Stems*: few input channels, any stride and padding. The
weight gradient of both,

    grad_w[k, c, r, s] = sum over n, p, q of grad_y[n, k, p, q] x[n, c, p stride_h + r - pad_top, ...],

reads x through a table of pointers that step by the stride, without im2col. Forward, and the grad-input of stems, are
those of `direct`: packing an image's patches for a product with the weights as they lie was slower. Volumes that step
along the depth by the kernel's size are images of C T channels (`_slices.py`).
"""

from __future__ import annotations

from torch import Tensor

from convselect.base.problem import ConvProblem, Direction
from convselect.kernels import _slices
from convselect.kernels._c_algorithm import CAlgorithm, why_not_in_c
from convselect.kernels._common import add_bias
from convselect.kernels._contract import Grade, Params

FEW_CHANNELS = 4
"""Most input channels of a stem, as in the C source."""


def _are_patches(p: ConvProblem) -> bool:
    return p.stride == (p.R, p.S) and not (p.pad_top or p.pad_left) and p.P * p.R <= p.H and p.Q * p.S <= p.W


class Patches(CAlgorithm):
    """No parameters: chunks follow from the sizes of caches."""

    name = "patches"
    dimensions = frozenset({2, 3})
    kernel = "cs_patches"
    slots = ()

    def why_not(self, problem: ConvProblem) -> str | None:
        p = problem
        if p.is_volume:
            return self._why_not_volume(p)
        if p.groups != 1:
            return f"The kernel for patches needs one group; this convolution has {p.groups}."
        if p.dilation != (1, 1):
            return f"The kernel for patches needs dilation 1; this convolution has dilation {p.dil_h}x{p.dil_w}."
        if p.R * p.S == 1:
            return "The kernel for patches needs more than one tap; this convolution is 1x1."
        if p.C > FEW_CHANNELS and not _are_patches(p):
            return (
                f"The kernel for patches needs kernel = stride without padding, or at most {FEW_CHANNELS} input "
                f"channels; this convolution is {p.R}x{p.S} with stride {p.stride_h}x{p.stride_w} and {p.C} channels."
            )
        if p.element_bytes != 4:
            return f"The kernel for patches computes in float32; this problem is in {p.dtype}."
        return why_not_in_c("The kernel for patches", p)

    def _why_not_volume(self, p: ConvProblem) -> str | None:
        if p.groups != 1:
            return f"The kernel for patches needs one group; this convolution has {p.groups}."
        images = _slices.images_of(p)
        if images is None:
            return (
                "The kernel for patches takes volumes if the stride along the depth is the kernel's size, without "
                f"padding; this one has {p.T} taps with stride {p.stride_d}."
            )
        return self.why_not(images)

    def workspace_bytes(self, problem: ConvProblem, params: Params = None) -> int:
        images = _slices.images_of(problem) if problem.is_volume else None
        if images is None:
            return super().workspace_bytes(problem, params)
        return _slices.workspace_bytes(problem, images, super().workspace_bytes)

    def run(self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None) -> Tensor:
        images = _slices.images_of(problem) if a.dim() == 5 else None
        if images is None:
            return super().run(a, b, problem, params)
        return _slices.run(a.contiguous(), b.contiguous(), problem, images, super().run)

    def run_checked(
        self, a: Tensor, b: Tensor, problem: ConvProblem, params: Params = None, bias: Tensor | None = None
    ) -> Tensor | None:
        if a.dim() < 5:
            return super().run_checked(a, b, problem, params, bias)
        result = self.run(a, b, problem, params)
        return result if bias is None else add_bias(result, bias)

    def same_as_native(self, problem: ConvProblem) -> str | None:
        """Also where it would do just what `direct` does: a second measurement of that would tell nothing."""
        p = problem
        if p.is_volume:
            return None
        if p.direction == Direction.FORWARD:
            return "Forward, the kernel for patches is the direct kernel."
        if p.direction == Direction.BACKWARD_DATA and not _are_patches(p):
            return "The grad-input of overlapping windows is the direct kernel's."
        return None

    def error_grade(self, problem: ConvProblem) -> Grade:
        """Measured in float32 on normal data: at most 8e-7, in weight gradients 7e-7."""
        return Grade.DIRECT


ALGORITHMS = (Patches(),)
