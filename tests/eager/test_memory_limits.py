"""Where stock PyTorch has enough memory, a converted layer has: native gives back what is kept, and runs in bands."""

from __future__ import annotations

import os

import fresh
import pytest
import torch

from convselect.base.problem import conv_problem
from convselect.kernels._native_ops import native_forward, native_forward_in_bands

CODE = """
import resource
import torch
import convselect

torch.set_num_threads(1)
x, layer = torch.randn(1, 64, 384, 384), torch.nn.Conv2d(64, 64, 3, padding=1)
if {converted}:
    layer = convselect.convert(torch.nn.Sequential(layer))
torch.nn.Conv2d(4, 4, 3)(torch.randn(1, 4, 8, 8))
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + {mib} * 2**20,) * 2)
passed = 0
with torch.no_grad():
    for _ in range(3):
        try:
            layer(x)
            passed += 1
        except RuntimeError:
            pass
print(passed)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="other libraries need other amounts of memory")
def test_a_converted_layer_passes_where_stock_passes():
    begun = 0
    for mib in range(66, 100, 4):
        env = {**os.environ, "CONVSELECT_STORE": "off"}
        stock, ours = (
            int(fresh.run(["-c", CODE.format(converted=converted, mib=mib)], env=env, check=True).stdout)
            for converted in (False, True)
        )
        begun += stock > 0
        assert ours >= stock, f"{mib} MiB"
    assert begun


@pytest.mark.parametrize(
    "problem",
    [
        conv_problem(2, 6, 17, 13, 8, 3, 3, stride=2, padding=(1, 2, 0, 1), groups=2, dtype="float64"),
        conv_problem(1, 3, 50, 50, 4, 7, 5, stride=3, padding=3, dilation=2, dtype="float64"),
        conv_problem(3, 4, 133, 9, 4, 3, 3, padding=1, groups=4, dtype="float64"),
        conv_problem(1, 4, 5, 5, 4, 1, 1, dtype="float64"),
    ],
    ids=str,
)
def test_bands_are_the_whole(problem):
    x, weight = torch.randn(problem.x_shape).double(), torch.randn(problem.weight_shape).double()
    bias = torch.randn(problem.K).double()
    got = native_forward_in_bands(x, weight, problem, bias)
    torch.testing.assert_close(got, native_forward(x, weight, problem, bias))
