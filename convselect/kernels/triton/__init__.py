"""Algorithms that run on GPUs, written in Triton. Importing them does not import triton."""

from convselect.kernels.triton import depthwise as depthwise
from convselect.kernels.triton import direct as direct
from convselect.kernels.triton import grouped as grouped
from convselect.kernels.triton import large_depthwise as large_depthwise
