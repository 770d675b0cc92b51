"""`Algorithm.direct_sums`, shown by data whose sums leave no room for rounding."""

from __future__ import annotations

import pytest
import torch
from problems import PROBLEMS

from convselect.base.problem import Direction, conv_problem
from convselect.kernels import _library
from convselect.kernels.pool import ALL
from convselect.kernels.reference import Reference

POOL = [a for a in ALL if "cpu" in a.devices and a.automatic]
SHAPES = {
    **{name: PROBLEMS[name] for name in (
        "3x3 uneven padding", "1x1", "1x1 groups", "stride 2", "patch 4x4", "dilation 2", "groups, few channels",
        "depthwise 3x3", "depthwise multiplier 3, 5x5", "depthwise 13x13", "5x5", "9x9", "1xN", "Nx1",
    )},
    "3x3 many": conv_problem(1, 32, 16, 17, 32, 3, 3, padding=1),
    "7x7": conv_problem(1, 16, 20, 20, 16, 7, 7, padding=3),
    "1x3": conv_problem(1, 8, 9, 30, 8, 1, 3, padding=(0, 1)),
}  # fmt: skip


def _operands(problem, kind, dtype):
    """(a, b) of the problem's direction."""
    p, generator = problem, torch.Generator().manual_seed(7)
    shapes = {
        Direction.FORWARD: (p.x_shape, p.weight_shape),
        Direction.BACKWARD_DATA: (p.y_shape, p.weight_shape),
        Direction.BACKWARD_WEIGHT: (p.x_shape, p.y_shape),
    }[p.direction]

    def drawn(shape, low, high):
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    if kind == "mask":  # a hole in every image
        a, b = torch.ones(shapes[0], dtype=dtype), torch.ones(shapes[1], dtype=dtype)
        a[:, :, a.shape[2] // 4 :, a.shape[3] // 4 :] = 0
        return a, b
    if kind == "whole":  # sums stay below 2**24; in 16 bit below 2**8
        most = (128, 256) if dtype == torch.float32 else (2, 2)
        return drawn(shapes[0], 0, most[1]), drawn(shapes[1], -most[0], most[0])
    a, b = (torch.rand(shape, generator=generator).to(dtype) for shape in shapes)
    return a.pow(8), b


def _broken(algorithm, problem, kind, dtype):
    """What a direct sum cannot do, in words; None if it did not happen."""
    a, b = _operands(problem, kind, dtype)
    got = algorithm.run(a.clone(), b.clone(), problem)
    want = Reference().run(a.double(), b.double(), problem._replace(dtype="float64"))
    if kind == "mask" and not torch.equal(got == 0, want == 0):
        return "a sum of zeros is not zero"
    if kind == "whole" and want.abs().max() < (2**24 if dtype == torch.float32 else 2**8):
        return None if torch.equal(got.double(), want) else "whole numbers are not added exactly"
    return "a sum of what is not negative is negative" if kind == "square" and bool((got < 0).any()) else None


def _found(algorithm, dtype):
    broken, ran = set(), 0
    for name, shape in SHAPES.items():
        for direction in Direction if dtype == torch.float32 else (Direction.FORWARD,):
            problem = shape._replace(direction=direction, dtype=str(dtype).removeprefix("torch."))
            if algorithm.why_not(problem) is not None:
                continue
            for kind in ("mask", "whole", "square"):
                ran += 1
                why = _broken(algorithm, problem, kind, dtype)
                if why is not None:
                    broken.add(f"{name} {direction}: {why}")
    return broken, ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", [a for a in POOL if a.direct_sums], ids=lambda a: a.name)
def test_direct_sums_keep_zeros_whole_numbers_and_signs(algorithm, dtype):
    broken, ran = _found(algorithm, dtype)
    assert not broken
    of_one_dtype = ("upcast", "patches")
    assert ran or algorithm.name in of_one_dtype or not _library.available()


@pytest.mark.parametrize("algorithm", [a for a in POOL if not a.direct_sums], ids=lambda a: a.name)
def test_transforms_do_not(algorithm):
    """Otherwise the declaration would keep something from being chosen for no reason."""
    broken, ran = _found(algorithm, torch.float32)
    assert broken or algorithm.name == "winograd2" or not ran
    assert ran or not _library.available()


def test_the_transforms_are_the_ones_that_are_known():
    assert {a.name for a in ALL if not a.direct_sums} == {f"winograd{m}" for m in range(2, 8)} | {"fft", "fft_tiled"}
