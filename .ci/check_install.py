"""Whether an installed convselect is whole: `check_install.py kernels` with the C library, `.. no-kernels` without.

Run by the Python it is installed for. Looks at versions and at what `convselect doctor` says, and compares one
convolution of each kind, in all three directions, with float64. Ends with an AssertionError where something is wrong.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import convselect
from convselect.kernels import _library

os.environ["CONVSELECT_STORE"] = "off"  # what other runs settled on is not what is looked at
EXPECTED = {"kernels": True, "no-kernels": False}[sys.argv[1]]
BOUND = 1e-5  # what the default precision promises in float32, forward
# name, convolution, image (C, H, W), an algorithm that has a C kernel and a formulation in PyTorch's operations
CASES = (
    ("3x3", dict(weight=(16, 8, 3, 3), padding=1), (8, 20, 20), "winograd4"),
    ("depthwise 5x5", dict(weight=(12, 1, 5, 5), padding=2, groups=12), (12, 17, 17), "depthwise"),
    ("strided 7x7", dict(weight=(8, 3, 7, 7), padding=3, stride=2), (3, 32, 32), "im2col_gemm"),
)


def gradients_and_result(function, x, weight, **options):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight, **options)
    y.backward(torch.ones_like(y))
    return y.detach(), x.grad, weight.grad


def distance(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


place = Path(convselect.__file__).resolve().parent
assert place.is_relative_to(Path(sys.prefix).resolve()), f"this is not the installed package: {place}"
assert importlib.metadata.version("convselect") == convselect.__version__
assert _library.available() == EXPECTED, f"the C kernels are {'not ' if EXPECTED else ''}loaded"

doctor = subprocess.run(
    [Path(sys.executable).with_name("convselect"), "doctor", "--json"], capture_output=True, text=True
)
assert doctor.returncode in (0, 1), doctor.stdout + doctor.stderr  # 1: it could be faster, 2: something is broken
report = json.loads(doctor.stdout)
assert report["library"]["loaded"] == EXPECTED
assert not report["self_test"]["wrong"]

worst = 0.0
torch.manual_seed(0)
for name, options, image, algorithm in CASES:
    options = dict(options)
    weight, x = torch.randn(options.pop("weight")), torch.randn(2, *image)
    exact = gradients_and_result(torch.conv2d, x.double(), weight.double(), **options)
    for policy in (algorithm, "auto"):
        with convselect.use(policy):
            got = gradients_and_result(convselect.conv2d, x, weight, **options)
        for what, a, b in zip(("y", "grad-input", "grad-weight"), got, exact, strict=True):
            worst = max(worst, distance(a, b))
            assert distance(a, b) <= BOUND, f"{name}, {policy}: {what} is {distance(a, b):.1e} off"
live = sum(found["live"] for found in report["algorithms"].values())
print(
    f"convselect {convselect.__version__} in {place.parent}: C kernels {'live' if EXPECTED else 'not there'}, "
    f"{live} algorithms live, {report['self_test']['checked']} checked by doctor, {worst:.0e} off at worst here"
)
